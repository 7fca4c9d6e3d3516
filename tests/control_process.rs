//! What needs a process of its own: allocations counted on the hot paths, and a forked child.
#![expect(unsafe_code, reason = "an allocator that counts, and fork")]

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::sync::Arc;
use std::time::Duration;

use lowtide::ByteSize;
use lowtide::clock::{Clock, ManualClock, Moment};
use lowtide::control::{
    AcquireError, Admission, Budget, Cost, Ladder, Limit, Maintenance, Managed, Resource,
    Resources, Sample, Sensor, Settings, Signals, UnloadError,
};

thread_local! {
    static ALLOCATIONS: Cell<u64> = const { Cell::new(0) };
}

struct Counting;

// SAFETY: every call is handed on to the system's allocator unchanged; counting touches only a
// thread-local integer without a destructor, which does not allocate.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.set(ALLOCATIONS.get() + 1);
        // SAFETY: the caller's promise about `layout` is handed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, block: *mut u8, layout: Layout) {
        // SAFETY: `block` came from `alloc` above, so from the system, with this layout.
        unsafe { System.dealloc(block, layout) }
    }
}

#[global_allocator]
static COUNTING: Counting = Counting;

fn allocations(act: impl FnOnce()) -> u64 {
    let before = ALLOCATIONS.get();
    act();
    ALLOCATIONS.get() - before
}

/// The signals of this machine with pressure added, so that each decision is taken.
struct Machine {
    signals: Signals,
    turn: u64,
}

impl Sensor for Machine {
    fn sample(&mut self, now: Moment) -> Sample {
        self.turn += 1;
        let signal = self.signals.sample();
        Sample {
            physical: signal.physical.saturating_add(ByteSize::mib(self.turn % 100)),
            purgeable: ByteSize::mib(50),
            limit: Limit::given(ByteSize::mib(110)),
            device_decay_due: now,
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
    assert_eq!(resources.add(Arc::new(managed.clone())), Ok(()));
    let ladder = Ladder::new(vec![resources.reclaimer(Budget::Host)]).expect("one rung");
    let sensor = Box::new(Machine { signals: Signals::open(), turn: 0 });
    let mut maintenance =
        Maintenance::new(Settings::default(), sensor, admission.clone(), resources, ladder)
            .expect("settings");
    let queue = maintenance.queue();
    let (mut posted, mut admitted) = (0, 0);
    let count = allocations(|| {
        for _ in 0..1000 {
            clock.advance(Duration::from_millis(10));
            let tick = maintenance.tick(clock.now());
            queue.push(tick.jobs);
            posted += tick.jobs.count();
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
            matches!(managed.acquire_blocking(), Err(AcquireError::Forked { .. })),
            managed.try_acquire().is_none(),
            matches!(managed.warm(), Err(AcquireError::Forked { .. })),
            matches!(managed.unload_now(Duration::ZERO), Err(UnloadError::Forked { .. })),
            !managed.unload_if_due(Moment::NEVER),
            managed.next_due() == Moment::NEVER,
        ];
        drop((guard, managed, idle));
        let failed = refused.iter().position(|refused| !refused);
        let code = failed.map_or(0, |at| i32::try_from(at).unwrap_or(99) + 1);
        // SAFETY: ends the child at once, without running the parent's exit handlers.
        unsafe { libc::_exit(code) };
    }
    assert!(child > 0, "fork failed");
    let mut status = 0;
    // SAFETY: `status` is a valid place for an int, and `child` is our own child.
    let waited = unsafe { libc::waitpid(child, &raw mut status, 0) };
    assert_eq!(waited, child);
    assert!(libc::WIFEXITED(status), "status {status:#x}");
    assert_eq!(libc::WEXITSTATUS(status), 0, "the check of this number failed");
    assert_eq!(managed.stats().guards, 1, "the parent's are untouched");
    drop(guard);
}
