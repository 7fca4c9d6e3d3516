//! Recorded and replayed: the same comes of it, on every driver that answers alike.

use std::sync::Arc;
use std::time::Duration;

use lowtide_cuda_sim::{Call, Order, SimDriver, SimError};
use lowtide_gpu::ByteSize;
use lowtide_gpu::clock::{Clock as _, SystemClock};
use lowtide_gpu::decay::DecayTime;
use lowtide_gpu::driver::{Driver, StreamHandle};
use lowtide_gpu::record::{After, Entry, Log, Operation, Recorder, Resized, Why};
use lowtide_gpu::{ArenaConfig, DeviceArena, DeviceError, Region};

use super::program::{Program, growths};
use super::{MIB, config, host, lane_of, open, recorder, segments, simulation};

const SEEDS: u64 = lowtide_cuda_sim::sample(30);
const STEPS: usize = 400;

fn streams(sim: Option<&SimDriver>) -> Vec<StreamHandle> {
    let stream = |number: u64| match sim {
        Some(sim) => sim.stream_create().expect("a stream"),
        None => StreamHandle::new(0xABC0 + number),
    };
    (0..3).map(stream).collect()
}

/// Records a program of this seed; the recording as text.
fn recorded(driver: Arc<dyn Driver>, seed: u64, streams: Vec<StreamHandle>) -> String {
    let decays = [DecayTime::from_millis(300), DecayTime::AtOnce, DecayTime::Never];
    let pick = |of: u64| usize::try_from(seed % of).expect("an index");
    let (decay, growth) = (decays[pick(3)], growths()[pick(2)]);
    let limit = ByteSize::mib(if seed.is_multiple_of(4) { 24 } else { 512 });
    let config = ArenaConfig { decay, growth, limit, ..config() };
    let (arena, clock, kept) = open(driver, config);
    clock.advance(Duration::from_nanos(seed * 1_234_567_891));
    Program::new(arena, clock, seed, streams).run(STEPS);
    kept.text()
}

/// Replays on a driver like the recorded one: the hash is the same, and a recording of the replay
/// is the same but for times and the word at its end.
fn replays_alike(text: &str, driver: impl Fn() -> Arc<dyn Driver>) {
    let log = Log::parse(text).expect("what was recorded is read");
    assert_eq!(log.to_string(), text, "a recording is read without loss");
    let closing = log.closing().expect("it was brought to its end");
    assert_eq!(closing.hash, log.hash());
    assert_eq!(closing.operations, log.entries().len() as u64);
    assert!(closing.one_thread);
    let (recorder, again) = recorder();
    let config = ArenaConfig { recorder: Some(recorder), ..log.header().config() };
    let replayed = log.replay(driver(), config).expect("open");
    if let Some(line) = replayed.first_difference {
        let line = usize::try_from(line).expect("an index");
        let again = again.text();
        let show = |text: &str| {
            text.lines().skip(line.saturating_sub(8)).take(10).collect::<Vec<_>>().join("\n")
        };
        panic!("line {line}:\n{}\n\n{}", show(text), show(&again));
    }
    assert_eq!((replayed.matches(), replayed.hash), (Some(true), closing.hash));
    assert_eq!(replayed.skipped, 0);
    assert_eq!(replayed.snapshot.allocs_total, allocs(&log));
    assert_eq!(again.text().replace("ended=finished", "ended=gone"), text);
    let second = log.replay(driver(), log.header().config()).expect("open");
    assert_eq!(second, replayed);
}

fn allocs(log: &Log) -> u64 {
    let handed_out = |operation: &Operation| match operation {
        Operation::Alloc { .. } => true,
        Operation::Resize { outcome, .. } => matches!(outcome, Resized::Moved(_)),
        _ => false,
    };
    log.entries().iter().filter(|entry| handed_out(&entry.operation)).count() as u64
}

#[test]
fn a_random_program_on_the_host_is_replayed_with_the_same_outcome_of_every_operation() {
    for seed in 0..SEEDS {
        println!("seed {seed}");
        let text = recorded(host(), seed, streams(None));
        replays_alike(&text, host);
    }
}

#[test]
fn a_random_program_on_the_simulation_is_replayed_with_the_same_outcome_of_every_operation() {
    for seed in 0..SEEDS {
        for order in [Order::Lazy, Order::Synchronous] {
            println!("seed {seed}, {order:?}");
            let sim = simulation(order);
            let text = recorded(sim.clone(), seed, streams(Some(&sim)));
            sim.assert_no_faults();
            replays_alike(&text, || simulation(order));
        }
    }
}

#[test]
fn a_random_program_on_segments_is_replayed_with_the_same_outcome_of_every_operation() {
    for seed in 0..SEEDS {
        for pool in [false, true] {
            println!("seed {seed}, pool: {pool}");
            let sim = segments(pool);
            let text = recorded(sim.clone(), seed, streams(Some(&sim)));
            sim.assert_no_faults();
            replays_alike(&text, || segments(pool));
        }
    }
}

#[test]
fn where_waits_end_by_chance_two_replays_with_the_same_chances_are_alike() {
    for seed in 0..SEEDS {
        println!("seed {seed}");
        let order = Order::Random { seed };
        let sim = simulation(order);
        let text = recorded(sim.clone(), seed, streams(Some(&sim)));
        let log = Log::parse(&text).expect("what was recorded is read");
        let replay = || log.replay(simulation(order), log.header().config()).expect("open");
        assert_eq!(replay(), replay());
    }
}

#[test]
fn every_word_is_in_some_recording() {
    let mut text = String::new();
    for seed in 0..24 {
        let sim = simulation(Order::Synchronous);
        text += &recorded(sim.clone(), seed, streams(Some(&sim)));
    }
    let words = "alloc refuse free resize move use pin unpin lane lane_end end_run limit \
                 decay_time decay trim shrink compact reset close contents sleep wake end";
    for word in words.split(' ') {
        let said = text.lines().any(|line| line.split(' ').nth(1) == Some(word));
        assert!(said, "{word}: no program did that");
    }
    for part in ["why=limit", "why=too_large", "moved=yes", "moved=no", "after=lanes", "raw=yes"] {
        assert!(text.contains(part), "{part}: no program came to that");
    }
    assert!(text.contains(" busy moves=0"), "no compaction found a lease");
    for part in [
        "-> slept released=",
        "why=leased state=awake",
        "why=state state=asleep",
        "wake -> done",
        "wake -> failed",
        "what=usual",
    ] {
        assert!(text.contains(part), "{part}: no program came to that");
    }
}

#[test]
fn a_recording_of_the_host_is_replayed_on_streams() {
    for seed in 0..SEEDS {
        println!("seed {seed}");
        let text = recorded(host(), seed, streams(None));
        let log = Log::parse(&text).expect("it is read");
        let sim = simulation(Order::Lazy);
        let replayed = log.replay(sim.clone(), log.header().config()).expect("open");
        let again = log.replay(simulation(Order::Lazy), log.header().config()).expect("open");
        assert_eq!(replayed, again, "what is pending goes elsewhere, and always to the same place");
        assert_eq!(replayed.operations + replayed.skipped, log.entries().len() as u64);
        sim.assert_no_faults();
        let leaks = sim.leaks();
        assert!(leaks.is_empty(), "{leaks:?}");
    }
}

#[test]
fn a_smaller_arena_is_told_apart_at_the_first_line_of_which_something_else_came() {
    let (arena, _, kept) = open(host(), config());
    let first = arena.alloc::<u8>(4 << 20, Region::Dynamic).expect("room");
    let second = arena.alloc::<u8>(8 << 20, Region::Dynamic).expect("room");
    drop((first, second, arena));
    let log = kept.log();
    let config = ArenaConfig { limit: ByteSize::mib(8), ..log.header().config() };
    let replayed = log.replay(host(), config).expect("open");
    assert_eq!((replayed.first_difference, replayed.matches()), (Some(4), Some(false)));
    assert_eq!((replayed.operations, replayed.skipped), (3, 1), "what was refused is not freed");
    let config = ArenaConfig { reserve: ByteSize::gib(1), ..log.header().config() };
    let replayed = log.replay(host(), config).expect("open");
    assert_eq!(replayed.first_difference, Some(2), "other address space");
}

#[test]
fn a_recording_that_was_cut_short_is_replayed_and_compared_as_far_as_it_goes() {
    let text = recorded(host(), 3, streams(None));
    let lines: Vec<_> = text.split_inclusive('\n').collect();
    let log = Log::parse(&lines[..lines.len() / 2].concat()).expect("whole lines");
    assert_eq!(log.closing(), None);
    let replayed = log.replay(host(), log.header().config()).expect("open");
    assert_eq!((replayed.matches(), replayed.first_difference), (None, None));
    assert_eq!(replayed.hash, log.hash());
    replayed.snapshot.validate();
}

#[test]
fn what_decays_is_the_same_in_a_replay_although_the_clock_ran_on() {
    // Times are the machine's, whose readings all differ: what goes idle is stamped with the time
    // that the recording shows.
    let clock = Arc::new(SystemClock::new());
    let (recorder, kept) = recorder();
    let decay = DecayTime::from_duration(Duration::from_micros(400));
    let config = ArenaConfig { recorder: Some(recorder), decay, ..config() };
    let arena = DeviceArena::open(host(), clock.clone(), config).expect("open");
    for turn in 0..2_000 {
        let buffers = [3, 1, 2].map(|mib| {
            let size = (mib + turn % 5) << 20;
            arena.alloc::<u8>(size, Region::Dynamic).expect("room")
        });
        drop(buffers);
        arena.decay(clock.now()).expect("given back");
    }
    drop(arena);
    let log = kept.log();
    let replayed = log.replay(host(), log.header().config()).expect("open");
    assert_eq!(replayed.first_difference, None);
}

#[test]
fn places_and_lanes_are_as_the_arena_had_them() {
    let sim = simulation(Order::Synchronous);
    let (arena, _, kept) = open(sim.clone(), config());
    let (one, two) = (sim.stream_create().expect("one"), sim.stream_create().expect("two"));
    let [one, two] = [one, two].map(|stream| lane_of(&arena, stream));
    let mut buffer = one.alloc::<f64>(1 << 10, Region::Stable).expect("room");
    buffer.record_use(&two).expect("ours");
    buffer.record_use(&two).expect("known already");
    buffer.resize(1 << 9).expect("smaller");
    drop(buffer);
    drop(arena.alloc::<u8>(100, Region::Dynamic).expect("room"));
    assert!(arena.alloc::<u8>(usize::MAX, Region::Dynamic).is_err());
    drop((one, two, arena));
    let log = kept.log();
    let asked = |line: &str| line.split(" ->").next().map(str::to_owned);
    let lines: Vec<_> = log.entries().iter().map(|entry| entry.operation.to_string()).collect();
    assert_eq!(
        lines.iter().filter_map(|line| asked(line)).collect::<Vec<_>>(),
        [
            "lane lane=1 stream=1",
            "lane lane=2 stream=2",
            "alloc id=1 kind=buffer region=stable bytes=8192 align=8 lane=1",
            "use id=1 lane=2",
            "resize id=1 bytes=4096",
            "free id=1 after=lanes",
            "alloc id=2 kind=buffer region=dynamic bytes=100 align=1 lane=none",
            "free id=2 after=all",
            "refuse kind=buffer region=dynamic bytes=18446744073709551615 align=1 lane=none",
            "lane_end lane=1",
            "lane_end lane=2",
        ]
    );
    let (first, second) = (&log.entries()[2].operation, &log.entries()[4].operation);
    let Operation::Alloc { place: Some(first), .. } = first else { panic!("{first}") };
    let Operation::Resize { outcome: Resized::InPlace(second), .. } = second else {
        panic!("{second}")
    };
    assert_eq!((first.region, first.size), (Region::Stable, ByteSize::kib(8)));
    assert_eq!((second.offset, second.size), (first.offset, ByteSize::kib(4)));
    assert!(lines[8].ends_with(" -> why=too_large"));
    assert!(matches!(log.entries()[5].operation, Operation::Free { after: After::Lanes, .. }));
    assert_eq!(Log::parse(&log.to_string()), Ok(log));
}

#[test]
fn a_refusal_says_why() {
    let (arena, _, kept) = open(host(), ArenaConfig { limit: ByteSize::mib(4), ..config() });
    let block = arena.alloc::<u8>(3 << 20, Region::Dynamic).expect("room");
    let mut other = arena.alloc::<u8>(300, Region::Stable).expect_err("no granule is left");
    assert!(other.is_out_of_memory());
    drop(block);
    let mut buffer = arena.alloc::<u8>(2 << 20, Region::Stable).expect("room");
    other = buffer.resize(100 << 20).expect_err("beyond the limit");
    assert!(other.is_out_of_memory());
    drop(buffer);
    assert!(arena.alloc_raw(ByteSize::gib(5), ByteSize::new(1), Region::Dynamic).is_err());
    drop(arena);
    let why: Vec<_> = kept
        .log()
        .entries()
        .iter()
        .filter_map(|entry| match entry.operation {
            Operation::Refuse { why, .. } => why,
            Operation::Resize { outcome: Resized::Refused(why), .. } => Some(why),
            _ => None,
        })
        .collect();
    assert_eq!(why, [Why::Limit, Why::Limit, Why::TooLarge]);
    replays_alike(&kept.text(), host);
}

/// If the driver fails, the recording contains the failure, and the block keeps its number.
#[test]
fn what_the_driver_failed_at_is_recorded_and_compared_with_a_replay_that_succeeds() {
    let sim = simulation(Order::Synchronous);
    let (arena, clock, kept) = open(sim.clone(), config());
    let mut buffer = arena.alloc::<u8>(2 << 20, Region::Dynamic).expect("room");
    let beside = arena.alloc::<u8>(2 << 20, Region::Dynamic).expect("room");
    sim.fail_nth(Some(Call::Copy), 0, SimError::InvalidValue);
    buffer.resize(3 << 20).expect_err("not copied");
    buffer.resize(4 << 20).expect("copied");
    sim.fail_nth(Some(Call::Create), 0, SimError::InvalidValue);
    arena.alloc::<u8>(64 << 20, Region::Stable).expect_err("not created");
    drop((buffer, beside));
    sim.fail_nth(Some(Call::Unmap), 0, SimError::InvalidValue);
    arena.purge().expect_err("not unmapped");
    sim.fail_nth(Some(Call::Unmap), 0, SimError::InvalidValue);
    arena.decay(clock.now() + Duration::from_secs(60)).expect_err("not unmapped");
    sim.fail_nth(Some(Call::Unmap), 0, SimError::InvalidValue);
    arena.close().expect_err("not unmapped");
    drop(arena);
    let log = kept.log();
    let came = |entry: &Entry| {
        entry.operation.to_string().split_once(" -> ").map(|(_, came)| came.to_owned())
    };
    let came: Vec<_> = log.entries().iter().filter_map(came).skip(2).collect();
    assert!(came[1].ends_with("moved=yes"), "{came:?}");
    let failed = "failed released=0";
    assert_eq!((&*came[0], &*came[2]), ("why=driver", "why=driver"));
    assert_eq!(came[3..], [failed, failed, "failed"]);
    assert!(
        log.entries()
            .iter()
            .all(|entry| !matches!(entry.operation, Operation::Alloc { id: 3.., .. }))
    );
    let replayed = log.replay(simulation(Order::Synchronous), log.header().config());
    let replayed = replayed.expect("open");
    assert_eq!((replayed.matches(), replayed.first_difference), (Some(false), Some(5)));
}

#[test]
fn a_recorder_is_of_one_arena() {
    let recorder = Recorder::hash_only();
    let config = || ArenaConfig { recorder: Some(recorder.clone()), ..config() };
    let clock = Arc::new(SystemClock::new());
    let sim = simulation(Order::Lazy);
    let first = DeviceArena::open(sim.clone(), clock.clone(), config()).expect("open");
    let again = DeviceArena::open(sim.clone(), clock.clone(), config());
    let by = "recorded".to_owned();
    assert_eq!(again.map(drop), Err(DeviceError::RecorderTaken { by }));
    drop(first);
    assert!(DeviceArena::open(sim.clone(), clock, config()).is_err(), "its recording is over");
    assert!(sim.leaks().is_empty(), "the address space was given back");
}

#[test]
fn every_block_is_seen_where_a_recorder_is_on() {
    let (arena, _, kept) =
        open(host(), ArenaConfig { thread_cache: ByteSize::mib(64), ..config() });
    arena.set_thread_cache(ByteSize::new(64 * MIB));
    for _ in 0..100 {
        drop(arena.alloc::<u8>(4096, Region::Dynamic).expect("room"));
    }
    assert_eq!(arena.snapshot().thread_cache_allocs_total, 0);
    drop(arena);
    assert_eq!(allocs(&kept.log()), 100);
}
