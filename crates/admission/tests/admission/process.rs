//! Tests that need a process of their own: allocations counted on the hot paths, and a forked
//! child.
#![expect(unsafe_code, reason = "fork and waitpid are C calls")]

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Barrier};
use std::time::Duration;

use lowtide_admission::ByteSize;
use lowtide_admission::clock::{Bell, Clock, ManualClock, Moment};
use lowtide_admission::{
    Admission, Budget, Cost, Limit, Maintenance, Managed, Reclaimable, ResourceError, Resources,
    Sample, Sensor, Settings, SignalTracker, Signals, UnloadReason,
};
use test_fork::test;

use crate::counting::allocations;

/// The signals of this machine with pressure added, so that each decision is taken.
struct Machine {
    signals: SignalTracker,
    turn: u64,
}

impl Sensor for Machine {
    fn sample(&mut self, now: Moment) -> Sample {
        self.turn += 1;
        let signal = self.signals.sample(now);
        Sample {
            physical: signal.physical.saturating_add(ByteSize::mib(self.turn % 100)),
            purgeable: ByteSize::mib(50),
            limit: Limit::given(ByteSize::mib(110)),
            device_decay_due: Some(now),
            ..Sample::default()
        }
    }
}

#[test]
fn a_sample_a_tick_and_an_admission_allocate_nothing() {
    let admission = Admission::new();
    let resources = Resources::new();
    let clock = Arc::new(ManualClock::new());
    let managed = Managed::builder("model", || Ok(()))
        .idle(Duration::from_millis(1))
        .build(clock.clone(), None);
    drop(managed.acquire_blocking().expect("loads"));
    assert_eq!(resources.add(&managed), Ok(()));
    let ladder = vec![resources.reclaimer(Budget::Host)];
    let sensor =
        Box::new(Machine { signals: SignalTracker::new(Arc::new(Signals::open())), turn: 0 });
    let mut maintenance =
        Maintenance::new(Settings::default(), sensor, admission.clone(), resources, ladder)
            .expect("settings");
    let (mut posted, mut admitted) = (0, 0);
    let count = allocations(|| {
        for _ in 0..1000 {
            clock.advance(Duration::from_millis(10));
            posted += maintenance.tick(clock.now()).count();
            admitted += u32::from(admission.try_admit(Cost::host(ByteSize::kib(1))).is_ok());
        }
        drop(managed.try_acquire());
    });
    assert!(posted > 1000 && admitted > 100, "{posted} posted, {admitted} admitted");
    assert_eq!(count, 0, "allocations in 1000 ticks and admissions");
    assert!(allocations(|| drop(Box::new(1))) > 0, "the counter counts");
}

#[test]
fn a_forked_child_gets_typed_errors_and_its_drops_do_nothing() {
    let clock = Arc::new(ManualClock::new());
    let managed = Managed::builder("model", || Ok(1))
        .idle(Duration::ZERO)
        .unload(|_| panic!("cleaned up in the child"))
        .build(clock.clone(), Some(Admission::new()));
    let idle = managed.clone();
    let guard = managed.acquire_blocking().expect("loads");
    // SAFETY: the child takes no lock that another thread could hold, allocates nothing, and ends
    // with `_exit`.
    let child = unsafe { libc::fork() };
    if child == 0 {
        let refused = [
            matches!(managed.acquire_blocking(), Err(ResourceError::Forked { .. })),
            managed.try_acquire().is_none(),
            matches!(managed.warm(), Err(ResourceError::Forked { .. })),
            matches!(managed.unload_now(Duration::ZERO), Err(ResourceError::Forked { .. })),
            !managed.unload_if_due(Moment::NEVER),
            managed.next_due() == Moment::NEVER,
        ];
        drop((guard, managed, idle));
        end_child(&refused);
    }
    assert_child_is_content(child);
    assert_eq!(managed.stats().guards, 1, "the parent's are untouched");
    drop(guard);
}

/// Ends the child with the number of the first check that failed, from 1.
fn end_child(checks: &[bool]) -> ! {
    let failed = checks.iter().position(|held| !held);
    let code = failed.map_or(0, |at| i32::try_from(at).unwrap_or(99) + 1);
    // SAFETY: ends the child at once, without running the parent's exit handlers.
    unsafe { libc::_exit(code) }
}

fn assert_child_is_content(child: libc::pid_t) {
    assert!(child > 0, "fork failed");
    let mut status = 0;
    // SAFETY: `status` is a valid place for an int, and `child` is our own child.
    let waited = unsafe { libc::waitpid(child, &raw mut status, 0) };
    assert_eq!(waited, child);
    assert!(libc::WIFEXITED(status), "status {status:#x}: it hung, where that is 0xe");
    assert_eq!(libc::WEXITSTATUS(status), 0, "the check of this number failed");
}

/// A clock that stands still where it is asked to hold whoever asks for the time.
#[derive(Debug)]
struct Holding {
    clock: ManualClock,
    /// The number of the next call that it holds; 0 for none.
    holds: AtomicU64,
    met: Barrier,
}

impl Clock for Holding {
    fn now(&self) -> Moment {
        let order = Ordering::SeqCst;
        if self.holds.fetch_update(order, order, |holds| holds.checked_sub(1)) == Ok(1) {
            self.met.wait(); // It holds,
            self.met.wait(); // and goes on.
        }
        self.clock.now()
    }

    fn since_epoch(&self) -> Duration {
        self.clock.since_epoch()
    }

    fn wait_until(&self, bell: &Arc<Bell>, deadline: Moment) -> bool {
        self.clock.wait_until(bell, deadline)
    }
}

/// The bug: `stats` took the lock, which another thread may hold at the fork.
#[test]
fn stats_in_a_forked_child_waited_for_a_thread_of_the_parent() {
    let clock = Arc::new(Holding {
        clock: ManualClock::new(),
        holds: AtomicU64::new(0),
        met: Barrier::new(2),
    });
    let cost = Cost::host(ByteSize::mib(3));
    let managed =
        Managed::<u8>::builder("model", || Err(lowtide_admission::BoxError::from("no such file")))
            .cost(cost)
            .build(clock.clone(), Some(Admission::new()));
    let resources = Resources::new();
    assert_eq!(resources.add(&managed), Ok(()));
    assert!(managed.acquire_blocking().is_err());
    std::thread::scope(|scope| {
        clock.holds.store(1, Ordering::SeqCst);
        // Within the pause after a failure the time is read under the lock.
        scope.spawn(|| assert!(managed.acquire_blocking().is_err()));
        clock.met.wait();
        // SAFETY: the child takes no lock that the other thread holds, and ends with `_exit`.
        let child = unsafe { libc::fork() };
        if child == 0 {
            // SAFETY: a system call without preconditions; it ends a child that hangs.
            unsafe { libc::alarm(20) };
            let stats = managed.stats();
            end_child(&[
                (&*stats.name, stats.cost, stats.loads_failed_total) == ("model", cost, 0),
                managed.peek().is_none(),
                !managed.unload(UnloadReason::Pressure),
                matches!(managed.close(Duration::ZERO), Err(ResourceError::Forked { .. })),
                resources.stats().is_empty(),
                resources.next_due() == Moment::NEVER,
                resources.add(&managed).is_err(),
            ]);
        }
        // The child's copy of the lock stays held.
        clock.met.wait();
        assert_child_is_content(child);
    });
    assert_eq!(managed.stats().loads_failed_total, 1);
    assert_eq!(resources.stats().len(), 1);
}

/// A request that does not fit would otherwise wait for a lock that another thread holds.
#[test]
fn in_a_forked_child_no_reclaimer_is_asked_added_or_removed() {
    let clock = Arc::new(Holding {
        clock: ManualClock::new(),
        holds: AtomicU64::new(0),
        met: Barrier::new(2),
    });
    let (admission, resources) = (Admission::with_limit(ByteSize::mib(1)), Resources::new());
    resources.evict_for(&admission, clock.clone(), || {});
    let reclaimable = || Reclaimable::new("cache", || ByteSize::mib(9), |wanted| wanted);
    let add = || resources.add_reclaimer(reclaimable(), &admission, clock.clone());
    let reclaimer = add().expect("the first");
    let refused = || admission.try_admit(Cost::host(ByteSize::kib(1025))).is_err();
    let held = admission.try_admit(Cost::host(ByteSize::kib(512))).expect("fits");
    let short = || admission.try_admit(Cost::host(ByteSize::kib(513))).is_err();
    std::thread::scope(|scope| {
        // The second time is read under the lock of the rounds.
        clock.holds.store(2, Ordering::SeqCst);
        scope.spawn(|| assert!(short()));
        clock.met.wait();
        // SAFETY: the child takes no lock that the other thread holds, and ends with `_exit`.
        let child = unsafe { libc::fork() };
        if child == 0 {
            // SAFETY: a system call without preconditions; it ends a child that hangs.
            unsafe { libc::alarm(20) };
            let stats = reclaimer.stats();
            let is_forked = matches!(add(), Err(ResourceError::Forked { .. }));
            drop(reclaimer);
            end_child(&[
                (&*stats.name, stats.calls_total) == ("cache", 0),
                refused() && short(),
                is_forked,
                resources.reclaimer_stats().is_empty(),
            ]);
        }
        // The child's copy of the lock stays held.
        clock.met.wait();
        assert_child_is_content(child);
    });
    drop(held);
}

#[test]
fn a_loader_or_a_clean_up_that_forks_ends_in_the_child_with_a_typed_error() {
    let parent = std::process::id();
    let fork = || {
        // SAFETY: the child runs on in the code under test, which takes no lock there.
        let child = unsafe { libc::fork() };
        if child > 0 {
            assert_child_is_content(child);
        }
    };
    let managed = Managed::builder("model", move || {
        fork();
        Ok(())
    })
    .unload(move |()| fork())
    .build(Arc::new(ManualClock::new()), Some(Admission::new()));
    let loaded = managed.acquire_blocking();
    if std::process::id() != parent {
        end_child(&[matches!(loaded, Err(ResourceError::Forked { .. }))]);
    }
    drop(loaded.expect("the parent has it"));
    let unloaded = managed.unload_now(Duration::ZERO);
    if std::process::id() != parent {
        end_child(&[matches!(unloaded, Err(ResourceError::Forked { .. }))]);
    }
    assert_eq!(unloaded, Ok(true));
}
