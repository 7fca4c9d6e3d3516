//! Sleep and wake in recordings: who brought them about, what was in the way, and arenas whose
//! granule is larger than the driver's.

use std::any::Any;
use std::future::Future as _;
use std::sync::Arc;
use std::task::{Context, Waker};
use std::time::Duration;

use lowtide_cuda_sim::{Call, Order, SimError};
use lowtide_gpu::ByteSize;
use lowtide_gpu::clock::Clock as _;
use lowtide_gpu::driver::Driver;
use lowtide_gpu::record::{Fallen, Log, Operation, Sleepless};
use lowtide_gpu::{
    ArenaConfig, Buffer, CompactOptions, Contents, DeviceArena, DeviceError, HostBudget, Region,
    SleepOptions, SleepState,
};

use super::program::Program;
use super::{MIB, config, host, open, simulation};

fn options() -> SleepOptions {
    SleepOptions { drain: Duration::ZERO, dynamic: Contents::Discard, ..SleepOptions::default() }
}

/// The words of a recording's operations, and what came of sleeps and wakes.
fn words(log: &Log) -> Vec<String> {
    let word = |operation: &Operation| match operation {
        Operation::Sleep { .. } | Operation::Wake { .. } => operation.to_string(),
        _ => operation.word().to_owned(),
    };
    log.entries().iter().map(|entry| word(&entry.operation)).collect()
}

/// Replayed on such a driver, the same comes of every line.
fn assert_replays(log: &Log, driver: Arc<dyn Driver>) {
    let replayed = log.replay(driver, log.header().config()).expect("open");
    assert_eq!((replayed.first_difference, replayed.matches()), (None, Some(true)), "{log}");
    assert_eq!(replayed.skipped, 0);
}

fn two(arena: &DeviceArena) -> [Buffer<u8>; 2] {
    Region::ALL.map(|region| arena.alloc::<u8>(3 << 20, region).expect("room"))
}

#[test]
fn who_enters_allocates_resizes_or_closes_wakes_an_arena_once_in_the_recording_and_in_its_replay() {
    let sim = simulation(Order::Lazy);
    let (arena, clock, kept) = open(sim.clone(), config());
    let [stable, mut dynamic] = two(&arena);
    arena.sleep(options()).expect("asleep");
    drop(arena.enter().expect("awake"));
    arena.sleep(options()).expect("asleep");
    drop(arena.alloc::<u8>(100, Region::Stable).expect("awake"));
    arena.sleep(options()).expect("asleep");
    dynamic.resize(1 << 20).expect("awake");
    arena.sleep(options()).expect("asleep");
    arena.compact(CompactOptions::new(Region::Dynamic), |_| {}).expect("busy");
    assert_eq!(arena.state(), SleepState::Asleep, "it is not woken to be compacted");
    dynamic.resize(0).expect("freed");
    drop(stable);
    assert_eq!(arena.state(), SleepState::Asleep, "nobody is woken by a free");
    arena.decay(clock.now()).expect("nothing to wake for");
    drop((dynamic, arena));
    let log = kept.log();
    let slept = |released: u64, offloaded: u64| {
        let (released, offloaded) = (released * MIB, offloaded * MIB);
        format!(
            "sleep stable=keep dynamic=discard -> slept released={released} \
             offloaded={offloaded} stayed=0"
        )
    };
    let woke = |committed: u64, restored: u64| {
        format!("wake -> done committed={} restored={}", committed * MIB, restored * MIB)
    };
    let expected = [
        "alloc".into(),
        "alloc".into(),
        slept(8, 4),
        woke(8, 4),
        slept(8, 4),
        woke(8, 4),
        "alloc".into(),
        "free".into(),
        slept(10, 4), // what the small block left is idle
        woke(8, 4),
        "resize".into(),
        slept(8, 4),
        "compact".into(),
        "free".into(),
        "free".into(),
        woke(0, 0),
        "decay".into(),
    ];
    assert_eq!(words(&log), expected);
    assert_replays(&log, simulation(Order::Lazy));
    sim.assert_no_faults();
}

struct Full;

impl HostBudget for Full {
    fn reserve(&self, _: ByteSize) -> Result<Box<dyn Any + Send>, String> {
        Err("full".to_owned())
    }
}

/// Returns the cause of each failed sleep, and the state of the arena at that time.
fn failures(log: &Log) -> Vec<(Sleepless, SleepState)> {
    let failed = |operation: &Operation| match operation {
        Operation::Sleep { outcome: Fallen::Failed { why, state }, .. } => Some((*why, *state)),
        _ => None,
    };
    log.entries().iter().filter_map(|entry| failed(&entry.operation)).collect()
}

#[test]
fn a_sleep_that_a_lease_the_budget_or_the_state_refused_is_refused_in_the_replay_as_well() {
    let (arena, _, kept) = open(simulation(Order::Synchronous), config());
    let buffers = two(&arena);
    let lease = arena.enter().expect("awake");
    assert!(matches!(arena.sleep(options()), Err(DeviceError::Leased { .. })));
    drop(lease);
    arena.set_host_budget(Arc::new(Full));
    assert!(matches!(arena.sleep(options()), Err(DeviceError::HostBudget { .. })));
    arena.sleep(SleepOptions { stable: Contents::Discard, ..options() }).expect("nothing to book");
    assert!(matches!(arena.sleep(options()), Err(DeviceError::State { .. })));
    arena.wake().expect("awake");
    drop((buffers, arena));
    let log = kept.log();
    let (awake, asleep) = (SleepState::Awake, SleepState::Asleep);
    assert_eq!(
        failures(&log),
        [(Sleepless::Leased, awake), (Sleepless::Budget, awake), (Sleepless::State, asleep)]
    );
    assert_replays(&log, simulation(Order::Synchronous));
}

/// Nobody enters meanwhile in a replay: it is kept awake by a lease, and goes on from there.
#[test]
fn a_sleep_that_was_cancelled_leaves_the_arena_awake_in_the_replay_and_is_told_apart() {
    let sim = simulation(Order::Synchronous);
    let (arena, _, kept) = open(sim.clone(), config());
    let buffers = two(&arena);
    let other = arena.clone();
    let (send, waiting) = std::sync::mpsc::channel();
    sim.before(Call::Offload, 0, move || {
        let mut entering = Box::pin(other.enter_async());
        let polled = entering.as_mut().poll(&mut Context::from_waker(Waker::noop()));
        assert!(polled.is_pending());
        send.send(entering).expect("heard");
    });
    assert!(matches!(arena.sleep(options()), Err(DeviceError::SleepCancelled { .. })));
    drop((waiting, buffers, arena));
    let log = kept.log();
    assert_eq!(failures(&log), [(Sleepless::Cancelled, SleepState::Awake)]);
    let mut replay =
        log.start(simulation(Order::Synchronous), log.header().config()).expect("open");
    while replay.step() {
        assert_eq!(replay.arena().state(), SleepState::Awake);
    }
    let line = log.entries().iter().find(|entry| entry.operation.word() == "sleep");
    assert_eq!(replay.finish().first_difference, line.map(|entry| entry.line));
}

#[test]
fn a_wake_that_failed_fails_in_the_replay_and_is_not_tried_again_by_who_wanted_it() {
    let (arena, _, kept) = open(simulation(Order::Synchronous), config());
    let buffers = two(&arena);
    arena.sleep(options()).expect("asleep");
    arena.set_limit(ByteSize::mib(2));
    assert!(arena.alloc::<u8>(100, Region::Stable).is_err());
    arena.set_limit(ByteSize::MAX);
    drop(arena.alloc::<u8>(100, Region::Stable).expect("awake"));
    drop((buffers, arena));
    let log = kept.log();
    let wakes = log.entries().iter().filter(|entry| entry.operation.word() == "wake");
    let failed = wakes.map(|entry| matches!(entry.operation, Operation::Wake { woken: None }));
    assert_eq!(failed.collect::<Vec<_>>(), [true, false]);
    assert_replays(&log, simulation(Order::Synchronous));
}

#[test]
fn where_the_driver_failed_the_recording_says_in_which_state_that_left_the_arena() {
    let sim = simulation(Order::Synchronous);
    let (arena, _, kept) = open(sim.clone(), config());
    let buffers = two(&arena);
    sim.fail_nth(Some(Call::Unmap), 0, SimError::InvalidValue);
    arena.sleep(options()).expect_err("not unmapped");
    let state = arena.state();
    drop((buffers, arena));
    let log = kept.log();
    assert_eq!(failures(&log), [(Sleepless::Driver, state)]);
    let replayed = log.replay(simulation(Order::Synchronous), log.header().config());
    let line = log.entries().iter().find(|entry| entry.operation.word() == "sleep");
    let line = line.map(|entry| entry.line);
    assert_eq!(replayed.expect("open").first_difference, line, "there it does not fail");
}

#[test]
fn an_arena_of_larger_granules_than_the_driver_is_replayed_with_the_same_outcome() {
    for seed in 0..6 {
        println!("seed {seed}");
        let config = ArenaConfig { granule: Some(ByteSize::mib(8)), ..config() };
        let (arena, clock, kept) = open(host(), config);
        let streams = (1..4).map(lowtide_gpu::driver::StreamHandle::new).collect();
        Program::new(arena, clock, seed, streams).run(300);
        let log = kept.log();
        assert!(kept.text().contains(" -> granularity=8388608 "));
        assert!(kept.text().contains("kind=reserve"), "one on granules of its own");
        assert_eq!(log.header().config().granule, Some(ByteSize::mib(8)));
        assert_replays(&log, host());
        let other = ArenaConfig { granule: None, ..log.header().config() };
        let replayed = log.replay(host(), other).expect("open");
        assert_eq!(replayed.first_difference, Some(2), "other granules are told apart at once");
    }
}
