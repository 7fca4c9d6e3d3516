//! All operations of an arena on many threads at once, over a driver that fails now and then.
//!
//! Invariant: no block loses its contents or is handed out twice, the limit holds, and at the end
//! no memory is left.

use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use super::driver::DeviceAddress;
use super::*;
use crate::record::Recorder;

const THREADS: u64 = 4;
const STEPS: u64 = 400;

/// The number of elements between marks.
const STRIDE: usize = 32;

#[derive(Debug, Default)]
struct Seen {
    moves: AtomicU64,
    errors: AtomicU64,
    lost: AtomicU64,
    done: AtomicBool,
    raw: Mutex<Vec<DeviceAddress>>,
}

struct Worker<'a> {
    number: u64,
    chance: Chance,
    arena: DeviceArena,
    clock: ManualClock,
    seen: &'a Seen,
    kept: Vec<(u64, usize, Buffer<u64>)>,
    pins: Vec<BlockPin>,
    /// log2 of the largest length.
    max: u64,
}

impl Worker<'_> {
    fn size(&mut self) -> usize {
        if self.chance.below(4) > 0 {
            let hot = [4096, 100_000, 200_000, 40_000];
            return hot[usize::try_from(self.chance.below(4)).expect("small")];
        }
        let bits = self.max - self.chance.below(self.max / 2);
        usize::try_from(self.chance.below(1 << bits)).expect("small")
    }

    fn region(&mut self) -> Region {
        Region::ALL[usize::from(self.chance.below(4) > 0)]
    }

    fn fill(&self, mark: u64, buffer: &mut Buffer<u64>) -> bool {
        let Ok(lease) = self.arena.enter() else { return false };
        match buffer.slice_mut(&lease) {
            Ok(elements) => {
                for (nth, place) in elements.iter_mut().enumerate().step_by(STRIDE) {
                    *place = mark ^ ((nth as u64) << 40);
                }
                true
            }
            Err(DeviceError::ContentsLost { .. }) => {
                self.seen.lost.fetch_add(1, Ordering::Relaxed);
                false
            }
            Err(error) => panic!("{error}"),
        }
    }

    fn check(&self, mark: u64, len: usize, buffer: &Buffer<u64>) {
        let lease = loop {
            match buffer.enter() {
                Ok(lease) => break lease,
                Err(DeviceError::Closed { .. }) => thread::yield_now(),
                Err(error) => panic!("{error}"),
            }
        };
        match buffer.slice(&lease) {
            Ok(elements) => {
                assert!(elements.len() >= len);
                for (nth, place) in elements[..len].iter().enumerate().step_by(STRIDE) {
                    assert!(*place == mark ^ ((nth as u64) << 40), "changed at {nth}");
                }
            }
            Err(DeviceError::ContentsLost { .. }) => {
                self.seen.lost.fetch_add(1, Ordering::Relaxed);
            }
            Err(error) => panic!("{error}"),
        }
    }

    fn judge<T>(&self, outcome: Result<T, DeviceError>) -> Option<T> {
        match outcome {
            Ok(value) => Some(value),
            Err(error) => {
                self.seen.errors.fetch_add(1, Ordering::Relaxed);
                let expected = error.is_out_of_memory()
                    || matches!(
                        error,
                        DeviceError::Driver(_)
                            | DeviceError::Closed { .. }
                            | DeviceError::ZeroSize
                            | DeviceError::TooLarge { .. }
                            | DeviceError::LiveBlocks { .. }
                            | DeviceError::ContentsLost { .. }
                    );
                assert!(expected, "{error}");
                None
            }
        }
    }

    fn nth(&mut self) -> usize {
        usize::try_from(self.chance.below(self.kept.len() as u64)).expect("small")
    }

    fn step(&mut self, step: u64) {
        let mark = (self.number << 32) | step;
        match self.chance.below(40) {
            0..12 => self.alloc(mark),
            12..20 if !self.kept.is_empty() => {
                let nth = self.nth();
                let (mark, len, buffer) = self.kept.swap_remove(nth);
                self.check(mark, len, &buffer);
            }
            20..24 if !self.kept.is_empty() => self.resize(mark),
            24 if !self.kept.is_empty() => {
                let nth = self.nth();
                let pin = self.judge(self.kept[nth].2.pin());
                self.pins.extend(pin);
                if self.pins.len() > 4 {
                    self.pins.clear();
                }
            }
            25..27 => self.alloc_raw(),
            27 => self.free_raw(),
            28..32 => self.release_granules(),
            32..37 => self.set(),
            37 => {
                let huge = 1 << self.chance.below(40);
                drop(self.judge(self.arena.alloc::<u64>(huge, Region::Stable)));
            }
            38 => self.arena.validate(),
            _ => {}
        }
        while self.kept.len() > 24 {
            let (mark, len, buffer) = self.kept.swap_remove(0);
            self.check(mark, len, &buffer);
        }
    }

    fn alloc(&mut self, mark: u64) {
        let (len, region) = (self.size(), self.region());
        let outcome = match self.chance.below(8) {
            0 => self.arena.reserve(len, region),
            _ => self.arena.alloc(len, region),
        };
        if let Some(mut buffer) = self.judge(outcome) {
            let len = if self.fill(mark, &mut buffer) { buffer.len() } else { 0 };
            self.kept.push((mark, len, buffer));
        }
    }

    fn resize(&mut self, mark: u64) {
        let nth = self.nth();
        let (old, len, mut buffer) = self.kept.swap_remove(nth);
        let wanted = self.size();
        let outcome = buffer.resize(wanted);
        let stays = if self.judge(outcome).is_some() { len.min(wanted) } else { len };
        self.check(old, stays, &buffer);
        let len = if self.fill(mark, &mut buffer) { buffer.len() } else { 0 };
        self.kept.push((mark, len, buffer));
    }

    fn alloc_raw(&mut self) {
        let size = ByteSize::of(self.size());
        let align = ByteSize::new(1 << self.chance.below(22));
        let region = self.region();
        if let Some(block) = self.judge(self.arena.alloc_raw(size, align, region)) {
            assert!(block.at.is_multiple_of(align));
            lock(&self.seen.raw).push(block.at);
        }
    }

    /// Frees a raw block of any thread. A reset or a move may have been faster.
    fn free_raw(&self) {
        let Some(at) = lock(&self.seen.raw).pop() else { return };
        match self.arena.free(at) {
            Ok(_) | Err(DeviceError::NotLive { .. } | DeviceError::InteriorAddress { .. }) => {}
            Err(error) => panic!("{error}"),
        }
    }

    fn release_granules(&mut self) {
        let given = match self.chance.below(4) {
            0 => {
                self.clock.advance(Duration::from_millis(self.chance.below(3000)));
                self.arena.decay(self.clock.now())
            }
            1 => self.arena.purge(),
            2 => self.arena.trim(ByteSize::mib(self.chance.below(64))),
            _ => self.arena.shrink(),
        };
        self.judge(given);
    }

    fn set(&mut self) {
        match self.chance.below(5) {
            0 => self.arena.set_thread_cache(ByteSize::new(1 << (20 + self.chance.below(6)))),
            1 => self.arena.set_decay(match self.chance.below(20) {
                0 => DecayTime::AtOnce,
                1 => DecayTime::Never,
                _ => DecayTime::Within(Duration::from_millis(1 + self.chance.below(20_000))),
            }),
            2 => {
                for region in self.arena.occupancy(64) {
                    assert!(region.cells.is_sorted_by(|one, next| one.0 < next.0));
                    for (nth, [.., active, idle]) in region.cells {
                        assert!(active.saturating_add(idle) <= region.cell, "{nth}");
                    }
                }
            }
            3 if self.chance.below(4) == 0 => {
                let closed = self.arena.close();
                assert!(self.judge(closed).is_none(), "closed with a live block");
            }
            4 if self.chance.below(20) == 0 => drop(self.judge(self.arena.reset())),
            _ => {}
        }
    }
}

/// Compacts until the other threads are done, with callbacks that use the arena.
fn compact(arena: &DeviceArena, seen: &Seen, mut chance: Chance, moves_raw: bool) {
    while !seen.done.load(Ordering::Relaxed) {
        let contiguous = match chance.below(3) {
            0 => None,
            1 => Some(ByteSize::MAX),
            _ => Some(ByteSize::mib(chance.below(32))),
        };
        let region = Region::ALL[usize::from(chance.below(4) > 0)];
        let budget = ByteSize::mib(1 + chance.below(16));
        let options = CompactOptions { region, contiguous, budget, moves_raw };
        let mut told = ByteSize::ZERO;
        let outcome = arena.compact(options, |moved| {
            told = told.saturating_add(moved.size);
            match chance.below(12) {
                0 => drop(arena.alloc::<u8>(3 << 20, region)),
                1 => {
                    let inner = arena.compact(options, |_| {}).expect("one at a time");
                    assert!(inner.is_busy);
                }
                2 => drop(arena.enter()),
                3 if moves_raw => drop(arena.reset()),
                4 => panic!("a trial"),
                5 => drop(arena.purge()),
                6 => drop(arena.close()),
                _ => {}
            }
        });
        let done = outcome.unwrap_or_else(|failed| *failed.value);
        assert!(done.moved <= budget && told <= done.moved, "{done:?} of {budget}, {told} told");
        seen.moves.fetch_add(done.moves, Ordering::Relaxed);
    }
}

fn storm(seed: u64, config: ArenaConfig, odds: Option<u64>, max: u64) {
    storm_over(FaultInjectingDriver::new(), seed, config, odds, max);
}

fn storm_over(
    driver: FaultInjectingDriver,
    seed: u64,
    config: ArenaConfig,
    odds: Option<u64>,
    max: u64,
) -> Arc<FaultInjectingDriver> {
    let (limit, moves_raw) = (config.limit, seed.is_multiple_of(2));
    let (driver, clock) = (Arc::new(driver), ManualClock::new());
    let arena = DeviceArena::open(driver.clone(), Arc::new(clock.clone()), config).expect("open");
    let never_closed = arena.alloc::<u8>(1, Region::Stable).expect("room");
    driver.fail_one_in(odds, seed);
    let seen = Seen::default();
    thread::scope(|scope| {
        let threads: Vec<_> = (1..=THREADS)
            .map(|number| {
                let (arena, clock) = (arena.clone(), clock.clone());
                let chance = Chance(seed ^ (number << 40));
                let (kept, pins, seen) = (Vec::new(), Vec::new(), &seen);
                let mut worker = Worker { number, chance, arena, clock, seen, kept, pins, max };
                scope.spawn(move || {
                    (0..STEPS).for_each(|step| worker.step(step));
                    for (mark, len, buffer) in &worker.kept {
                        worker.check(*mark, *len, buffer);
                    }
                })
            })
            .collect();
        let compacting = scope.spawn(|| compact(&arena, &seen, Chance(seed ^ 77), moves_raw));
        let ends: Vec<_> = threads.into_iter().map(thread::ScopedJoinHandle::join).collect();
        seen.done.store(true, Ordering::Relaxed);
        compacting.join().expect("no panic");
        assert!(ends.iter().all(Result::is_ok), "a thread panicked");
    });
    driver.fail_one_in(None, 0);
    arena.reset().expect("here");
    drop(never_closed);
    arena.validate();
    let snapshot = arena.snapshot();
    assert!(seen.errors.load(Ordering::Relaxed) > 0, "too tame: {seen:?}");
    assert_eq!((snapshot.live, snapshot.leases), (ByteSize::ZERO, 0));
    assert_eq!(snapshot.allocs_total, snapshot.frees_total);
    assert!(driver.committed().1 <= limit, "the limit was passed");
    arena.purge().expect("purge");
    assert_eq!((arena.snapshot().committed, driver.committed().0), Default::default());
    arena.close().expect("empty");
    drop(arena);
    assert_eq!(driver.reservations(), 0);
    driver.assert_no_faults();
    driver
}

#[test]
fn a_storm_over_a_driver_that_fails_now_and_then_loses_nothing() {
    for (seed, odds) in [(0x9E37_79B9_7F4A_7C15, 50), (0xD1B5_4A32_D192_ED02, 3)] {
        println!("seed {seed:#x}, a failure in {odds:?} calls");
        storm(seed, config(ByteSize::mib(48)), Some(odds), 19);
    }
}

/// The maximum number of storms until one is short of memory that is idle elsewhere: nearly always
/// the first is.
const ROUNDS_MAX: u64 = 20;

#[test]
fn a_storm_where_idle_memory_is_remapped_loses_nothing() {
    let seeds = [(0x6A09_E667_F3BC_C909, None), (0xBB67_AE85_84CA_A73B, Some(7))];
    for (nth, (seed, odds)) in seeds.into_iter().enumerate() {
        println!("seed {seed:#x}, a failure in {odds:?} calls");
        let granule = (nth > 0).then_some(ByteSize::mib(4));
        let config = ArenaConfig { granule, ..config(ByteSize::mib(40)) };
        // With one active thread at a time, a storm may never be short of memory.
        let is_any_remapped = (0..ROUNDS_MAX).any(|round| {
            let mut driver = FaultInjectingDriver::new();
            driver.capabilities.remap = true;
            storm_over(driver, seed ^ round, config.clone(), odds, 19).remapped() > 0
        });
        assert!(is_any_remapped, "nothing was, {ROUNDS_MAX} times");
    }
}

#[test]
fn a_storm_where_addresses_are_short_loses_nothing() {
    let (limit, reserve) = (ByteSize::mib(40), ByteSize::mib(24));
    for (seed, odds) in [(0xA24B_AED4_963E_E407, None), (0x8CB9_2BA7_2F3D_8DD8, Some(7))] {
        println!("seed {seed:#x}, a failure in {odds:?} calls");
        storm(seed, ArenaConfig { reserve, ..config(limit) }, odds, 18);
    }
}

#[test]
fn a_storm_where_growth_doubles_and_events_are_recorded_loses_nothing() {
    let growth = Growth::NextPowerOfTwo {
        initial: ByteSize::mib(1),
        after_shrink: ByteSize::mib(2),
        cap: ByteSize::mib(16),
    };
    for (seed, odds) in [(0x9FB2_1C65_1E98_DF25, None), (0xCB24_D0A5_C88C_35B2, Some(7))] {
        println!("seed {seed:#x}, a failure in {odds:?} calls");
        let recorder = Some(Recorder::new(std::io::sink()));
        let config = ArenaConfig { growth, recorder, ..config(ByteSize::new(60_000_001)) };
        storm(seed, config, odds, 19);
    }
}
