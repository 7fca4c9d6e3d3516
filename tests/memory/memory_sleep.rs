//! Arenas of a `Memory` that fall asleep by themselves, in virtual time: over a simulated device,
//! whose contents go to the host and are booked there, and over host memory. Nobody calls anything
//! but what a user would.
//!
//! Memory is used on lanes: the worker falls asleep only where events prove that all work is done.
#![cfg(all(feature = "device", target_os = "linux"))]
#![expect(unsafe_code, reason = "a lane is of a stream that the caller vouches for")]

use std::sync::Arc;
use std::time::Duration;

use lowtide::clock::{Clock, ManualClock, Moment};
use lowtide::config::DeviceChoice;
use lowtide::config::arena::ArenaOptions;
use lowtide::decay::DecayTime;
use lowtide::device::driver::{Driver as _, StreamHandle};
use lowtide::device::{
    ArenaSnapshot, Buffer, Contents, DeviceArena, DeviceError, Lane, Region, SleepOptions,
    SleepState,
};
use lowtide::memory::{AdminCommand, AdminTaskState, Builder, Slot};
use lowtide::{ByteSize, Memory};
use lowtide_admission::{Budget, Cost, Level, Priority};
use lowtide_cuda_sim::{Call, DriverCosts, Outcome, Pattern, SimDriver, SimError, SimOptions};
use test_fork::test;

use crate::support::{Tree, advance_until, until};

const SOON: Duration = Duration::from_secs(5);
const SECOND: Duration = Duration::from_secs(1);
const TICK: Duration = Duration::from_millis(250);
const IDLE: Duration = Duration::from_secs(30);
const MIB: usize = 1 << 20;
const MODEL: ByteSize = ByteSize::mib(8);

/// A simulated device, a host in a cgroup of 512 MiB, and what the clock of both is.
struct Bed {
    sim: Arc<SimDriver>,
    clock: Arc<ManualClock>,
    tree: Tree,
    stream: StreamHandle,
}

impl Bed {
    fn new() -> Self {
        let options = SimOptions { costs: DriverCosts::zero(), ..SimOptions::default() };
        let sim = Arc::new(SimDriver::new(options));
        let (clock, stream) = (Arc::new(sim.clock()), sim.stream_create().expect("a stream"));
        Self { sim, clock, tree: Tree::new(ByteSize::mib(512)), stream }
    }

    /// Nothing decays, and what is idle for 30 s sleeps.
    fn builder(&self) -> Builder {
        Memory::builder()
            .clock(Arc::clone(&self.clock) as Arc<dyn Clock>)
            .signals(self.tree.open())
            .driver(self.sim.clone())
            .device_decay(DecayTime::Never)
            .device_sleep_after(Some(IDLE))
    }

    fn lane(&self, arena: &DeviceArena) -> Lane {
        // SAFETY: the simulation looks whether a stream is there.
        unsafe { arena.lane(self.stream) }.expect("a lane")
    }

    /// A buffer of 8 MiB with a mark in it.
    fn model(&self, arena: &DeviceArena, region: Region, mark: u64) -> Buffer<u8> {
        let lane = self.lane(arena);
        let buffer = lane.alloc::<u8>(8 * MIB, region).expect("room");
        let lease = lane.enter().expect("a lease");
        let at = buffer.address(&lease).expect("ours").expect("not empty");
        self.sim.fill(self.stream, at, buffer.bytes(), Pattern::new(mark)).expect("queued");
        buffer
    }

    fn assert_marked(&self, arena: &DeviceArena, buffer: &Buffer<u8>, mark: u64) {
        let lease = self.lane(arena).enter().expect("a lease");
        let at = buffer.address(&lease).expect("ours").expect("not empty");
        let check = self.sim.check(self.stream, at, buffer.bytes(), Pattern::new(mark));
        self.sim.stream_synchronize(self.stream).expect("done");
        assert_eq!(self.sim.outcome(check.expect("queued")), Outcome::Held, "mark {mark}");
    }

    /// The arenas are closed, nothing is left on the device or on the host, and the driver's
    /// contract was kept.
    fn end(self, arenas: impl IntoIterator<Item = DeviceArena>) {
        for arena in arenas {
            arena.close().expect("nothing is live");
        }
        self.sim.stream_destroy(self.stream).expect("a stream");
        self.sim.run_all();
        self.sim.assert_no_faults();
        assert_eq!(self.sim.unsafe_unmaps(), 0);
        assert!(self.sim.leaks().is_empty(), "{:?}", self.sim.leaks());
    }

    /// Lets time pass, a second or more, and waits for a sample at its end.
    fn pass(&self, memory: &Memory, time: Duration) {
        let ceiling = || memory.admission().ledger(Budget::Host).ceiling();
        let before = ceiling();
        let other = if before > ByteSize::mib(400) { 480 } else { 512 };
        self.tree.limit(ByteSize::mib(other));
        self.clock.advance(time);
        until("a sample", || ceiling() != before);
    }
}

fn standing(memory: &Memory) -> ByteSize {
    memory.admission().ledger(Budget::Host).resource_reservations()
}

fn falls_asleep(arena: &DeviceArena) {
    until("it falls asleep", || arena.state() == SleepState::Asleep);
}

fn figures(memory: &Memory, name: &str) -> ArenaSnapshot {
    let snapshot = memory.snapshot();
    let mut all = snapshot.devices.arenas.into_iter().chain(snapshot.devices.draining);
    all.find(|arena| arena.name == name).expect("an arena of this name")
}

#[test]
fn an_idle_arena_sleeps_in_its_time_and_wakes_with_its_use_and_nobody_calls_for_it() {
    let bed = Bed::new();
    let memory = bed.builder().start().expect("starts");
    let arena = memory.devices().open_arena("weights").expect("opens");
    let model = bed.model(&arena, Region::Stable, 7);
    for round in 0..3 {
        let left = bed.clock.now();
        bed.pass(&memory, IDLE - Duration::from_nanos(1));
        assert_eq!(arena.state(), SleepState::Awake, "not before, in round {round}");
        // The next sample is the first that finds it due, and no more time goes by.
        bed.clock.advance(TICK);
        falls_asleep(&arena);
        assert_eq!(bed.clock.now(), left + (IDLE + TICK - Duration::from_nanos(1)));
        until("it is booked", || figures(&memory, "weights").offloaded == MODEL);
        let found = figures(&memory, "weights");
        assert_eq!((found.asleep, found.committed), (MODEL, ByteSize::ZERO));
        assert_eq!(standing(&memory), MODEL);
        bed.assert_marked(&arena, &model, 7);
        let found = figures(&memory, "weights");
        assert_eq!((found.state, found.wakes_total), (SleepState::Awake, round + 1));
        // The copies' memory stays for the next time.
        assert_eq!((found.offloaded, standing(&memory)), (MODEL, MODEL));
        assert_eq!(bed.sim.calls(Call::HostAlloc), 1, "in round {round}");
    }
    assert!(
        memory.report().diagnostics().iter().all(|note| note.about != "device"),
        "{:?}",
        memory.report().diagnostics()
    );
    drop(model);
    assert!(memory.shutdown_blocking(SOON).is_clean());
    drop(memory);
    bed.end([arena]);
}

/// What stays for the next sleep is the host's again when it is short, and at the end.
#[test]
fn host_memory_for_the_next_sleep_goes_under_pressure_and_with_the_manager() {
    let bed = Bed::new();
    let memory = bed.builder().start().expect("starts");
    let arena = memory.devices().open_arena("weights").expect("opens");
    let model = bed.model(&arena, Region::Stable, 7);
    let turn = || {
        bed.clock.advance(IDLE + TICK);
        falls_asleep(&arena);
        bed.assert_marked(&arena, &model, 7);
        assert_eq!((arena.snapshot().offloaded, standing(&memory)), (MODEL, MODEL));
    };
    turn();
    bed.tree.hold(450);
    advance_until(&bed.clock, TICK, "the worker releases it", || standing(&memory).is_zero());
    assert_eq!(arena.state(), SleepState::Awake);
    bed.tree.hold(10);
    advance_until(&bed.clock, TICK, "the level falls", || memory.level() == Level::None);
    turn();
    assert!(!memory.shutdown_blocking(SOON).is_clean(), "the model is live");
    assert_eq!(arena.snapshot().offloaded, ByteSize::ZERO);
    drop((model, memory));
    bed.end([arena]);
}

#[test]
fn over_host_memory_what_is_discarded_goes_and_what_is_kept_is_not_booked() {
    let (clock, tree) = (Arc::new(ManualClock::new()), Tree::new(ByteSize::mib(512)));
    let memory = Memory::builder()
        .clock(Arc::clone(&clock) as Arc<dyn Clock>)
        .signals(tree.open())
        .device(DeviceChoice::Host)
        .device_decay(DecayTime::Never)
        .device_sleep_after(Some(IDLE))
        .device_sleep_dynamic(Contents::Discard)
        .start()
        .expect("starts");
    let arena = memory.devices().open_arena("mixed").expect("opens");
    let kept = arena.alloc_from(&vec![5_u8; 8 * MIB], Region::Stable).expect("room");
    let lost = arena.alloc_from(&vec![6_u8; 8 * MIB], Region::Dynamic).expect("room");
    // While the host is short of memory too: here it gives some back, and takes none.
    tree.hold(400);
    advance_until(&clock, TICK, "the level rises", || memory.level() > Level::None);
    advance_until(&clock, TICK, "it sleeps", || arena.state() == SleepState::Asleep);
    let found = figures(&memory, "mixed");
    assert_eq!((found.asleep, found.committed), (MODEL, MODEL));
    assert_eq!((found.offloaded, standing(&memory)), (ByteSize::ZERO, ByteSize::ZERO));
    let lease = arena.enter().expect("it wakes");
    assert!(kept.slice(&lease).expect("host").iter().all(|&byte| byte == 5));
    assert!(lost.take_discarded() && !kept.take_discarded());
    drop((lease, kept, lost));
    assert!(memory.shutdown_blocking(SOON).is_clean());
}

#[test]
fn a_lease_keeps_it_awake_and_the_residency_too() {
    let bed = Bed::new();
    let memory = bed.builder().device_min_awake(100 * SECOND).start().expect("starts");
    let arena = memory.devices().open_arena("weights").expect("opens");
    let opened = bed.clock.now();
    let model = bed.model(&arena, Region::Stable, 1);
    let lease = bed.lane(&arena).enter().expect("a lease");
    bed.pass(&memory, 90 * SECOND);
    drop(lease);
    advance_until(&bed.clock, TICK, "it sleeps", || arena.state() == SleepState::Asleep);
    assert!(bed.clock.now() >= opened + 90 * SECOND + IDLE, "the idle time, from the lease on");
    let woken = bed.clock.now();
    bed.assert_marked(&arena, &model, 1);
    advance_until(&bed.clock, TICK, "it sleeps", || arena.state() == SleepState::Asleep);
    assert!(bed.clock.now() >= woken + 100 * SECOND, "the residency, from the wake on");
    let lease = arena.enter().expect("it wakes");
    bed.pass(&memory, 1_000 * SECOND);
    assert_eq!(arena.state(), SleepState::Awake);
    drop((lease, model));
    assert!(memory.shutdown_blocking(SOON).is_clean());
    drop(memory);
    bed.end([arena]);
}

#[test]
fn no_arena_sleeps_by_itself_unless_that_is_configured() {
    let bed = Bed::new();
    let memory = bed.builder().device_sleep_after(None).start().expect("starts");
    let arena = memory.devices().open_arena("weights").expect("opens");
    let model = bed.model(&arena, Region::Stable, 1);
    bed.pass(&memory, 1_000_000 * SECOND);
    assert_eq!((arena.next_sleep(), arena.state()), (Moment::NEVER, SleepState::Awake));
    // Who asks for it has it, and it is booked alike.
    arena.sleep(SleepOptions::default()).expect("asleep");
    assert_eq!(standing(&memory), MODEL);
    drop(model);
    assert!(memory.shutdown_blocking(SOON).is_clean());
    assert_eq!(standing(&memory), ByteSize::ZERO);
    drop(memory);
    bed.end([arena]);
}

#[test]
fn without_room_in_the_hosts_ledger_it_stays_awake_and_tries_again_later() {
    let bed = Bed::new();
    let memory = bed.builder().start().expect("starts");
    let arena = memory.devices().open_arena("weights").expect("opens");
    let model = bed.model(&arena, Region::Stable, 3);
    let much = Cost::host(ByteSize::gib(1));
    let requests = memory.admission().try_admit_with(much, Priority::Exempt).expect("always");
    let said = || memory.report().diagnostics().into_iter().filter(|note| note.about == "device");
    advance_until(&bed.clock, TICK, "it is refused", || said().count() == 1);
    let stores = bed.sim.calls(Call::HostAlloc);
    assert_eq!((arena.state(), stores), (SleepState::Awake, 0));
    let note = said().next().expect("one").text;
    let start = "idle sleep of weights failed: arena \"weights\" cannot sleep: cannot \
                 reserve 8.0 MiB of host memory: ";
    assert!(note.starts_with(start) && note.contains(" reserved, allowance "), "{note}");
    let refused = arena.sleep(SleepOptions::default()).expect_err("nor when it is asked for");
    assert!(matches!(refused, DeviceError::HostBudget { .. }), "{refused}");
    // More attempts, each with other figures, are no more notes.
    // While an attempt is under way nothing is due.
    let due = || Some(arena.next_sleep()).filter(|&due| due != Moment::NEVER);
    for _ in 0..3 {
        let before = bed.clock.now() + 10 * SECOND;
        advance_until(&bed.clock, SECOND, "another attempt", || due().is_some_and(|d| d > before));
    }
    assert_eq!((said().count(), arena.state()), (1, SleepState::Awake));
    assert_eq!(standing(&memory), ByteSize::ZERO, "a refused booking holds nothing");
    drop(requests);
    advance_until(&bed.clock, SECOND, "it sleeps", || arena.state() == SleepState::Asleep);
    assert_eq!(standing(&memory), MODEL);
    bed.assert_marked(&arena, &model, 3);
    drop(model);
    assert!(memory.shutdown_blocking(SOON).is_clean());
    drop(memory);
    bed.end([arena]);
}

/// The bytes are there once they are copied: counted beside what is measured, the ledger would lose
/// them twice.
#[test]
fn offloaded_bytes_count_once_when_they_are_part_of_what_is_measured() {
    let bed = Bed::new();
    let memory = bed.builder().start().expect("starts");
    let arena = memory.devices().open_arena("weights").expect("opens");
    let models = [1, 2, 3, 4].map(|mark| bed.model(&arena, Region::Stable, mark));
    let ledger = memory.admission().ledger(Budget::Host);
    bed.clock.advance(IDLE + TICK);
    falls_asleep(&arena);
    until("it is booked", || standing(&memory) == ByteSize::mib(32));
    bed.tree.hold(10 + 32); // the copies
    let counted = |bytes: u64| ledger.ceiling().saturating_sub(ByteSize::mib(bytes));
    let left = || ledger.allowance_bytes().saturating_sub(ledger.reserved_bytes());
    // What is purgeable of the heap of this program is its own, and a few MiB.
    let is_near = |found: ByteSize, bytes| {
        let expected = counted(bytes).scaled(1.0 / ledger.correction_factor());
        (found.as_f64() - expected.as_f64()).abs() < ByteSize::mib(6).as_f64()
    };
    bed.pass(&memory, SECOND);
    bed.pass(&memory, SECOND);
    assert!(is_near(left(), 10 + 32), "{} left", left());
    assert!(!is_near(left(), 10 + 32 + 32), "{} left", left());
    drop(models);
    assert!(memory.shutdown_blocking(SOON).is_clean());
    drop(memory);
    bed.end([arena]);
}

#[test]
fn while_the_host_is_short_no_contents_are_copied_to_it() {
    let bed = Bed::new();
    let memory = bed.builder().start().expect("starts");
    let arena = memory.devices().open_arena("weights").expect("opens");
    let model = bed.model(&arena, Region::Stable, 1);
    bed.tree.hold(400);
    advance_until(&bed.clock, TICK, "the level rises", || memory.level() > Level::None);
    bed.pass(&memory, 2 * IDLE);
    assert_eq!(arena.state(), SleepState::Awake);
    assert_eq!(bed.sim.calls(Call::HostAlloc), 0);
    bed.tree.hold(10);
    advance_until(&bed.clock, TICK, "the level falls", || memory.level() == Level::None);
    advance_until(&bed.clock, TICK, "it sleeps", || arena.state() == SleepState::Asleep);
    bed.assert_marked(&arena, &model, 1);
    drop(model);
    assert!(memory.shutdown_blocking(SOON).is_clean());
    drop(memory);
    bed.end([arena]);
}

#[test]
fn several_arenas_sleep_each_in_its_time_and_one_that_fails_does_not_stop_the_others() {
    let bed = Bed::new();
    let memory = bed.builder().start().expect("starts");
    let open = |name: &str| memory.devices().open_arena(name).expect("opens");
    let arenas = ["first", "second", "third"].map(open);
    let models: Vec<_> = (1..)
        .zip(&arenas)
        .map(|(mark, arena)| {
            bed.clock.advance(SECOND);
            bed.model(arena, Region::Dynamic, mark)
        })
        .collect();
    bed.sim.fail_nth(Some(Call::HostAlloc), 0, SimError::OutOfMemory);
    bed.clock.advance(IDLE + TICK);
    falls_asleep(&arenas[1]);
    falls_asleep(&arenas[2]);
    assert_eq!(arenas[0].state(), SleepState::Awake, "the first was due first, and failed");
    until("its booking has ended", || standing(&memory) == ByteSize::mib(16));
    let diagnostics = memory.report().diagnostics();
    let mut diagnostics = diagnostics.iter().filter(|note| note.about == "device");
    let note = diagnostics.next().expect("one");
    assert!(note.text.starts_with("idle sleep of first failed: "), "{note}");
    assert_eq!(diagnostics.next(), None);
    advance_until(&bed.clock, TICK, "tried again", || arenas[0].state() == SleepState::Asleep);
    for (mark, (arena, model)) in (1..).zip(arenas.iter().zip(&models)) {
        bed.assert_marked(arena, model, mark);
    }
    drop(models);
    assert!(memory.shutdown_blocking(SOON).is_clean());
    drop(memory);
    bed.end(arenas);
}

#[test]
fn a_replaced_arena_sleeps_too_and_goes_with_its_last_block() {
    let bed = Bed::new();
    let memory = bed.builder().start().expect("starts");
    let (slot, none) = (Slot::device("shared", 0), ArenaOptions::new());
    let session = memory.devices().use_arena(&slot, &none).expect("opened");
    let old = session.alloc::<u8>(8 * MIB, Region::Stable).expect("room");
    memory.devices().replace_arena(&slot, &none).expect("replaced");
    let draining = || memory.snapshot().devices.draining;
    bed.clock.advance(IDLE + TICK);
    until("it falls asleep", || {
        draining().first().is_some_and(|arena| arena.state == SleepState::Asleep)
    });
    assert_eq!((draining()[0].asleep, standing(&memory)), (MODEL, MODEL));
    drop(old); // asleep, and nobody will wake it
    advance_until(&bed.clock, TICK, "it goes", || draining().is_empty());
    until("and its booking", || standing(&memory).is_zero());
    drop(session);
    assert!(memory.shutdown_blocking(SOON).is_clean());
    drop(memory);
    bed.end([]);
}

/// The bug: the host memory of a sleeping arena whose blocks were all freed stayed, and booked,
/// until somebody entered or purged: nothing was due.
#[test]
fn host_memory_of_an_arena_that_slept_for_nothing_stayed() {
    let bed = Bed::new();
    let memory = bed.builder().start().expect("starts");
    let arena = memory.devices().open_arena("weights").expect("opens");
    let model = bed.model(&arena, Region::Stable, 1);
    bed.clock.advance(IDLE + TICK);
    falls_asleep(&arena);
    until("it is booked", || standing(&memory) == MODEL);
    drop(model);
    advance_until(&bed.clock, TICK, "the copies go", || standing(&memory).is_zero());
    assert_eq!(arena.snapshot().offloaded, ByteSize::ZERO);
    assert!(memory.shutdown_blocking(SOON).is_clean());
    drop(memory);
    bed.end([arena]);
}

/// The bug: when freed memory that the device may still work on should be looked at was counted
/// from the moment of the question, so that it never came.
#[test]
fn freed_memory_that_was_pending_stayed_for_ever() {
    let bed = Bed::new();
    let builder = bed.builder().device_sleep_after(None);
    let memory = builder.device_decay(DecayTime::from_millis(1_000)).start().expect("starts");
    let arena = memory.devices().open_arena("scratch").expect("opens");
    drop(bed.model(&arena, Region::Dynamic, 1));
    assert_eq!(arena.snapshot().pending, MODEL);
    bed.sim.run_all();
    advance_until(&bed.clock, TICK, "it decays", || arena.glance().committed.is_zero());
    assert!(memory.shutdown_blocking(SOON).is_clean());
    drop(memory);
    bed.end([arena]);
}

#[test]
fn a_shutdown_while_it_sleeps_leaves_the_contents_to_their_owner() {
    let bed = Bed::new();
    let memory = bed.builder().start().expect("starts");
    let arena = memory.devices().open_arena("weights").expect("opens");
    let model = bed.model(&arena, Region::Stable, 9);
    bed.clock.advance(IDLE + TICK);
    falls_asleep(&arena);
    let report = memory.shutdown_blocking(SOON);
    assert_eq!(report.device_live, MODEL, "{report}");
    assert_eq!((arena.state(), standing(&memory)), (SleepState::Asleep, MODEL));
    // The ledger outlives its `Memory`, for as long as bytes are booked in it.
    let admission = memory.admission().clone();
    let standing = || admission.ledger(Budget::Host).resource_reservations();
    drop(memory);
    bed.assert_marked(&arena, &model, 9);
    assert_eq!(standing(), MODEL, "nobody looks after it any more");
    assert_eq!(arena.release_stores(), MODEL);
    assert_eq!(standing(), ByteSize::ZERO);
    let refused = arena.sleep(SleepOptions::default()).expect_err("admission is closed");
    assert!(refused.to_string().contains("shutting down"), "{refused}");
    bed.assert_marked(&arena, &model, 9);
    drop(model);
    bed.end([arena]);
}

/// The bug: the worker waited two seconds for memory that it was itself to give back.
#[test]
fn a_wake_that_was_asked_for_keeps_the_worker_from_nothing() {
    let bed = Bed::new();
    let memory = bed.builder().device_sleep_after(None).start().expect("starts");
    let arena = memory.devices().open_arena("model").expect("opens");
    let kept = bed.model(&arena, Region::Dynamic, 1);
    arena.sleep(SleepOptions::default()).expect("asleep");
    bed.sim.set_neighbours(ByteSize::gib(1024));
    memory.admin().run(AdminCommand::Wake { arena: "model".to_owned() }).expect("heard");
    until("it ends", || matches!(memory.admin().tasks()[0].state, AdminTaskState::Failed(_)));
    bed.sim.set_neighbours(ByteSize::ZERO);
    bed.assert_marked(&arena, &kept, 1);
    drop(kept);
    assert!(memory.shutdown_blocking(SOON).is_clean());
    drop(memory);
    bed.end([arena]);
}

#[test]
fn the_end_of_a_sleeping_arena_gives_back_what_it_booked() {
    let bed = Bed::new();
    for how in ["closed", "dropped"] {
        let memory = bed.builder().start().expect("starts");
        let arena = memory.devices().open_arena("weights").expect("opens");
        let model = bed.model(&arena, Region::Stable, 9);
        bed.clock.advance(IDLE + TICK);
        falls_asleep(&arena);
        until("it is booked", || standing(&memory) == MODEL);
        let admission = memory.admission().clone();
        if how == "closed" {
            drop(model);
            arena.close().expect("nothing is live");
            assert_eq!(standing(&memory), ByteSize::ZERO);
            until("its name is free", || memory.devices().open_arena("weights").is_ok());
            assert!(memory.shutdown_blocking(SOON).is_clean());
            drop((memory, arena));
        } else {
            assert!(!memory.shutdown_blocking(SOON).is_clean());
            drop((memory, arena, model));
        }
        assert_eq!(admission.ledger(Budget::Host).resource_reservations(), ByteSize::ZERO, "{how}");
    }
    bed.end([]);
}

#[test]
fn what_is_due_when_the_memory_ends_is_not_put_to_sleep_first() {
    let bed = Bed::new();
    let memory = bed.builder().start().expect("starts");
    let arena = memory.devices().open_arena("weights").expect("opens");
    let model = bed.model(&arena, Region::Stable, 1);
    memory.admission().close();
    bed.pass(&memory, 2 * IDLE);
    let report = memory.shutdown_blocking(SOON);
    assert_eq!(report.device_live, MODEL, "{report}");
    assert_eq!((arena.state(), arena.snapshot().sleeps_total), (SleepState::Awake, 0));
    assert!(
        memory.report().diagnostics().iter().all(|note| note.about != "device"),
        "{:?}",
        memory.report().diagnostics()
    );
    drop((memory, model));
    bed.end([arena]);
}

/// It waited for the whole device, which spoils every capture of a graph: a stream that no arena
/// knows may capture at any time. Asked for by the program it sleeps.
#[test]
fn an_arena_that_is_used_without_lanes_stays_awake_and_a_note_says_why() {
    let bed = Bed::new();
    let memory = bed.builder().start().expect("starts");
    let arena = memory.devices().open_arena("weights").expect("opens");
    let model = bed.model(&arena, Region::Stable, 1);
    drop(arena.enter().expect("a lease of no lane"));
    let foreign = bed.sim.stream_create().expect("a stream");
    bed.sim.begin_capture(foreign).expect("captures");
    let said = || memory.report().diagnostics().into_iter().find(|note| note.about == "device");
    advance_until(&bed.clock, TICK, "it is refused", || said().is_some());
    let note = said().expect("one").text;
    let start = "idle sleep of weights failed: cuCtxSynchronize was not called: ";
    assert!(note.starts_with(start) && note.contains("on lanes"), "{note}");
    assert_eq!((arena.state(), bed.sim.calls(Call::Synchronize)), (SleepState::Awake, 0));
    let graph = bed.sim.end_capture(foreign).expect("not spoiled");
    bed.sim.graph_destroy(graph).expect("done");
    bed.sim.stream_destroy(foreign).expect("a stream");
    arena.sleep(SleepOptions::default()).expect("the program waits for the device");
    drop(model);
    assert!(memory.shutdown_blocking(SOON).is_clean());
    drop(memory);
    bed.end([arena]);
}
