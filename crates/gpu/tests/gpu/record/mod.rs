//! Recordings of a device arena: the lines, what they lead to, and the sinks.
//!
//! Programs are random ones with their seeds printed. It looks at no time and at no contents.

#![expect(unsafe_code, reason = "a lane is of a stream that the caller vouches for")]

mod program;
mod sinks;
mod viewer;

use std::collections::{BTreeMap, BTreeSet};
use std::io::{self, Write};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use lowtide_cuda_sim::{DriverCosts, Order, SimDriver, SimOptions, sample};
use lowtide_gpu::ByteSize;
use lowtide_gpu::clock::{Bell, Clock, ManualClock, Moment};
use lowtide_gpu::decay::DecayTime;
use lowtide_gpu::driver::{DeviceAddress, Driver, StreamHandle};
use lowtide_gpu::record::Recorder;
use lowtide_gpu::{
    ArenaConfig, Buffer, CompactOptions, DeviceArena, DeviceError, HostDriver, Lane, Region,
    SleepConfig,
};
use serde_json::Value;

use program::{Program, Random, growths};

const MIB: u64 = 1 << 20;
const GRANULE: ByteSize = ByteSize::mib(2);
const PAGE: &str = include_str!("../../../../../docs/RECORDING.md");

/// A sink that keeps what it gets.
#[derive(Clone, Default)]
pub(crate) struct Kept(Arc<Mutex<Vec<u8>>>);

impl Kept {
    pub(crate) fn text(&self) -> String {
        let bytes = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        String::from_utf8(bytes.clone()).expect("a recording is text")
    }

    fn events(&self) -> Vec<Value> {
        events(&self.text())
    }
}

impl Write for Kept {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// The events of a recording, each a line that is complete.
pub(crate) fn events(text: &str) -> Vec<Value> {
    assert!(text.is_empty() || text.ends_with('\n'), "the last line is complete");
    text.lines().map(|line| serde_json::from_str(line).expect(line)).collect()
}

pub(crate) fn name(event: &Value) -> &str {
    event["event"].as_str().expect("a name")
}

fn number(event: &Value, key: &str) -> u64 {
    event[key].as_u64().unwrap_or_else(|| panic!("{key} of {event}"))
}

fn recorder() -> (Recorder, Kept) {
    let kept = Kept::default();
    (Recorder::new(kept.clone()), kept)
}

fn host() -> Arc<dyn Driver> {
    Arc::new(HostDriver::new())
}

/// A device that does its work before a call returns, or as late as it may; calls cost nothing.
fn simulation(order: Order) -> Arc<SimDriver> {
    let (granularity, handle_min) = (GRANULE, GRANULE);
    let costs = DriverCosts::zero();
    let options = SimOptions { order, costs, granularity, handle_min, ..SimOptions::default() };
    Arc::new(SimDriver::new(options))
}

/// A device that has its memory in segments.
fn segments(pool: bool) -> Arc<SimDriver> {
    let (granularity, handle_min) = (GRANULE, GRANULE);
    let (costs, virtual_memory) = (DriverCosts::zero(), false);
    let device = SimOptions { costs, granularity, handle_min, ..SimOptions::default() };
    Arc::new(SimDriver::new(SimOptions { virtual_memory, pool, ..device }))
}

/// An arena that is recorded.
fn open(
    driver: Arc<dyn Driver>,
    config: ArenaConfig,
) -> (DeviceArena, Arc<ManualClock>, Recorder, Kept) {
    let (recorder, kept) = recorder();
    let clock = Arc::new(ManualClock::new());
    let config = ArenaConfig { recorder: Some(recorder.clone()), ..config };
    let arena = DeviceArena::open(driver, clock.clone(), config).expect("open");
    (arena, clock, recorder, kept)
}

fn lane_of(arena: &DeviceArena, stream: StreamHandle) -> Lane {
    // SAFETY: the simulation looks whether a stream is there, and the host has none.
    unsafe { arena.lane(stream) }.expect("open")
}

fn config() -> ArenaConfig {
    // A clock that nobody moves on does not wait.
    let sleep = SleepConfig { wake_timeout: Duration::ZERO, ..SleepConfig::default() };
    ArenaConfig { reserve: ByteSize::gib(4), sleep, ..ArenaConfig::new("recorded") }
}

/// What the events lead to.
#[derive(Default)]
struct Books {
    /// The size of each live block, by its address.
    live: BTreeMap<u64, u64>,
    /// The granules with memory.
    backed: BTreeSet<u64>,
}

impl Books {
    fn of(events: &[Value]) -> Self {
        let (mut books, mut last) = (Self::default(), 0);
        for event in events {
            let time = number(event, "time_ns");
            assert!(last <= time, "{event} after {last}");
            last = time;
            books.add(event);
        }
        books
    }

    fn add(&mut self, event: &Value) {
        let address = |key| number(event, key);
        let granules = |at: u64| {
            let size = number(event, "size");
            assert!(size.is_multiple_of(GRANULE.get()), "{event}");
            (at..at + size).step_by(usize::try_from(GRANULE.get()).expect("64 bits"))
        };
        match name(event) {
            "alloc" => self.insert(event, address("address")),
            "free" => self.remove(event),
            "resize" => {
                self.live.remove(&address("address")).expect("live");
                self.insert(event, address("address"));
            }
            "move" => {
                self.remove(event);
                self.insert(event, address("to"));
            }
            "use" | "pin" | "contents" => {
                assert!(self.live.contains_key(&address("address")), "{event} of no live block");
            }
            "commit" => granules(address("address"))
                .for_each(|at| assert!(self.backed.insert(at), "{event} of memory that is there")),
            "decommit" => granules(address("address"))
                .for_each(|at| assert!(self.backed.remove(&at), "{event} of no memory")),
            "remap" => {
                granules(address("address"))
                    .for_each(|at| assert!(self.backed.remove(&at), "{event} of no memory"));
                granules(address("to"))
                    .for_each(|at| assert!(self.backed.insert(at), "{event} to other memory"));
            }
            _ => {}
        }
    }

    fn insert(&mut self, event: &Value, at: u64) {
        let other = self.live.insert(at, number(event, "size"));
        assert_eq!(other, None, "{event} at the address of another block");
    }

    fn remove(&mut self, event: &Value) {
        let size = self.live.remove(&number(event, "address"));
        assert_eq!(size, Some(number(event, "size")), "{event} of a live block");
    }

    /// Compares them with the arena's own, while no other thread uses it.
    fn assert_are_of(&self, arena: &DeviceArena) {
        let snapshot = arena.snapshot();
        assert_eq!(self.live.values().sum::<u64>(), snapshot.live.get());
        assert_eq!(self.backed.len() as u64 * GRANULE.get(), snapshot.committed.get());
        let blocks: u64 = arena.occupancy(2).iter().map(|region| region.blocks).sum();
        assert_eq!(self.live.len() as u64, blocks);
        for (&at, &size) in &self.live {
            let inside = DeviceAddress::new(at + 1);
            let block = DeviceAddress::new(at);
            let size = ByteSize::new(size);
            let wanted = DeviceError::InteriorAddress { at: inside, block, size };
            assert_eq!(arena.raw_block(inside), Err(wanted));
        }
    }
}

/// Runs a random program on each kind of driver. Calls `check` with the recording and the arena now
/// and then, and at the end, with no arena.
#[expect(clippy::print_stdout, reason = "a failure is repeated by its seed")]
fn each_program(seeds: u64, mut check: impl FnMut(&[Value], Option<&DeviceArena>)) {
    let kinds: [fn() -> Option<Arc<SimDriver>>; 5] = [
        || None,
        || Some(simulation(Order::Lazy)),
        || Some(simulation(Order::Synchronous)),
        || Some(segments(false)),
        || Some(segments(true)),
    ];
    for (seed, kind) in (0..seeds).flat_map(|seed| (0..).zip(kinds).map(move |kind| (seed, kind))) {
        println!("seed {seed}, driver {}", kind.0);
        let sim = kind.1();
        let streams = (0..3).map(|number| match &sim {
            Some(sim) => sim.stream_create().expect("a stream"),
            None => StreamHandle::new(0xABC0 + number),
        });
        let streams = streams.collect();
        let driver = sim.clone().map_or_else(host, |sim| sim as Arc<dyn Driver>);
        let decays = [DecayTime::from_millis(300), DecayTime::AtOnce, DecayTime::Never];
        let pick = |of: u64| usize::try_from(seed % of).expect("an index");
        let (decay, growth) = (decays[pick(3)], growths()[pick(2)]);
        let limit = ByteSize::mib(if seed.is_multiple_of(4) { 24 } else { 512 });
        let (arena, clock, recorder, kept) =
            open(driver, ArenaConfig { decay, growth, limit, ..config() });
        clock.advance(Duration::from_nanos(seed * 1_234_567_891));
        let mut program = Program::new(arena.clone(), clock, seed, streams);
        for _ in 0..5 {
            program.run(80);
            recorder.flush().expect("written");
            check(&kept.events(), Some(&arena));
        }
        drop(arena);
        program.end();
        check(&kept.events(), None);
        if let Some(sim) = sim {
            sim.assert_no_faults();
        }
    }
}

#[test]
fn the_events_of_a_random_program_lead_to_the_state_of_the_arena() {
    each_program(sample(20), |events, arena| {
        let books = Books::of(events);
        match arena {
            Some(arena) => books.assert_are_of(arena),
            None => {
                assert!(books.live.is_empty(), "all blocks were freed");
                assert_eq!(events.last().map(name), Some("end"));
            }
        }
    });
}

/// The names of events with their keys, those in brackets optional, in the page's table.
fn table() -> BTreeMap<String, Vec<String>> {
    let rows = PAGE.lines().filter(|row| row.starts_with("| `"));
    rows.map(|row| {
        let mut columns = row.split('|').skip(1).map(|column| column.trim().replace('`', ""));
        let (event, keys) = (columns.next().expect("an event"), columns.next().expect("keys"));
        let keys = keys.split(", ").filter(|key| !key.is_empty()).map(str::to_owned);
        (event, keys.collect())
    })
    .collect()
}

#[test]
fn every_event_has_the_keys_that_the_page_lists() {
    let table = table();
    let mut seen = BTreeSet::new();
    let mut check = |events: &[Value]| {
        for event in events {
            let keys = event.as_object().expect("an object");
            let row = table.get(name(event)).unwrap_or_else(|| panic!("{event} is not listed"));
            let is_listed =
                |key: &str| row.iter().any(|listed| listed.trim_matches(['[', ']']) == key);
            for key in keys.keys().filter(|key| !["time_ns", "event"].contains(&key.as_str())) {
                assert!(is_listed(key), "`{key}` of {event} is not listed");
            }
            for key in row.iter().filter(|key| !key.starts_with('[')) {
                assert!(keys.contains_key(key), "{event} lacks `{key}`");
            }
            seen.insert(name(event).to_owned());
        }
    };
    each_program(8, |events, _| check(events));
    // Memory is remapped for a limit, a close is refused, and a sleep too.
    let (arena, _, recorder, kept) =
        open(simulation(Order::Synchronous), ArenaConfig { limit: ByteSize::mib(8), ..config() });
    let large = arena.alloc::<u8>(4 << 20, Region::Dynamic).expect("room");
    drop(arena.alloc::<u8>(4 << 20, Region::Dynamic).expect("room"));
    let small = arena.alloc::<u8>(100, Region::Stable).expect("an idle granule goes there");
    arena.close().expect_err("blocks are live");
    let lease = arena.enter().expect("awake");
    arena
        .sleep(lowtide_gpu::SleepOptions { drain: Duration::ZERO, ..Default::default() })
        .expect_err("a lease is held");
    drop((lease, large, small));
    recorder.finish().expect("written");
    check(&kept.events());
    let missing: Vec<_> = table.keys().filter(|event| !seen.contains(*event)).collect();
    assert!(missing.is_empty(), "{missing:?} did not occur");
}

#[test]
fn names_are_escaped_and_the_first_line_has_the_settings() {
    let decay = DecayTime::Never;
    let config = ArenaConfig { decay, ..ArenaConfig::new("a \"quoted\"\\\n\u{1}näme") };
    let (arena, _, recorder, kept) = open(host(), config);
    recorder.flush().expect("written");
    let first = &kept.events()[0];
    assert_eq!((name(first), &first["arena"]), ("open", &arena.name().into()));
    assert_eq!(number(first, "granule"), arena.capabilities().granularity.get());
    assert_eq!((first.get("limit"), first.get("decay_ns")), (None, None), "none and never");
}

#[test]
fn a_resize_that_moves_is_an_allocation_and_a_free_and_one_in_place_is_an_event() {
    let (arena, _, recorder, kept) = open(host(), config());
    let mut buffer = arena.alloc::<u8>(1000, Region::Dynamic).expect("room");
    buffer.resize(100_000).expect("moved");
    buffer.resize(5_000).expect("where it stands");
    recorder.flush().expect("written");
    let events = kept.events();
    let blocks =
        events.iter().filter(|event| event.get("bytes").is_some() || name(event) == "free");
    let blocks: Vec<_> = blocks.map(|event| (name(event), event["bytes"].as_u64())).collect();
    let bytes = [Some(1000), Some(100_000), None, Some(5_000)];
    assert_eq!(
        blocks,
        ["alloc", "alloc", "free", "resize"].into_iter().zip(bytes).collect::<Vec<_>>()
    );
}

/// Runs the work of one thread.
fn work(arena: &DeviceArena, seed: u64) {
    let mut random = Random::new(seed);
    let mut buffers: Vec<Buffer<u8>> = Vec::new();
    for _ in 0..400 {
        let size = usize::try_from(1 + random.below(MIB)).expect("64 bits");
        match random.below(8) {
            0..=3 => buffers.extend(arena.alloc(size, Region::ALL[random.index(2)])),
            4..=5 if !buffers.is_empty() => {
                drop(buffers.swap_remove(random.index(buffers.len())));
            }
            6 if !buffers.is_empty() => {
                let buffer = random.index(buffers.len());
                let _ = buffers[buffer].resize(size);
            }
            _ => match random.below(16) {
                0 => drop(arena.compact(CompactOptions::new(Region::Dynamic), |_| {})),
                1 => drop(arena.trim(ByteSize::mib(random.below(64)))),
                2 => drop(arena.reset()),
                _ => {
                    let size = ByteSize::new(size as u64);
                    drop(arena.alloc_raw(size, ByteSize::new(1), Region::Dynamic));
                }
            },
        }
    }
}

#[test]
fn the_events_of_several_threads_are_in_the_order_of_the_arenas_books() {
    for seed in 0..sample(20) {
        println!("seed {seed}");
        let (arena, _, recorder, kept) =
            open(host(), ArenaConfig { limit: ByteSize::mib(96), ..config() });
        thread::scope(|scope| {
            for number in 0..4 {
                let arena = &arena;
                scope.spawn(move || work(arena, seed * 10 + number));
            }
        });
        arena.validate();
        recorder.flush().expect("written");
        Books::of(&kept.events()).assert_are_of(&arena);
    }
}

#[test]
fn a_recorder_serves_one_arena() {
    let (arena, _, recorder, _) = open(host(), config());
    let config = ArenaConfig { recorder: Some(recorder), ..ArenaConfig::new("other") };
    let again = DeviceArena::open(host(), Arc::new(ManualClock::new()), config);
    let by = arena.name().to_owned();
    assert_eq!(again.map(drop), Err(DeviceError::RecorderTaken { by }));
}

/// A clock that counts how often it is read.
#[derive(Debug, Default)]
struct CountingClock {
    reads: Mutex<u64>,
    clock: ManualClock,
}

impl Clock for CountingClock {
    fn now(&self) -> Moment {
        *self.reads.lock().expect("no panic") += 1;
        self.clock.now()
    }

    fn since_epoch(&self) -> Duration {
        self.clock.since_epoch()
    }

    fn wait_until(&self, bell: &Arc<Bell>, deadline: Moment) -> bool {
        self.clock.wait_until(bell, deadline)
    }
}

#[test]
fn an_arena_without_a_recorder_reads_no_clock_for_events() {
    let clock = Arc::new(CountingClock::default());
    let config = ArenaConfig { decay: DecayTime::Never, ..ArenaConfig::new("alone") };
    let config = ArenaConfig { thread_cache: ByteSize::ZERO, ..config };
    let arena = DeviceArena::open(host(), Arc::clone(&clock) as _, config).expect("an arena");
    let before = *clock.reads.lock().expect("no panic");
    let mut buffer = arena.alloc::<u8>(1000, Region::Dynamic).expect("memory");
    buffer.resize(10).expect("smaller");
    drop(buffer);
    arena.purge().expect("nothing fails");
    arena.set_limit(ByteSize::gib(1));
    assert_eq!(*clock.reads.lock().expect("no panic"), before);
}
