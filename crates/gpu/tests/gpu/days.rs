//! Days of a device arena in virtual time: committed memory, driver calls and tables.
//!
//! Requests follow the hours of a day. Each allocates blocks of random sizes on a lane, and one in
//! four keeps a block for minutes or hours, as a cache of a conversation does. The model is replaced
//! each morning, and the arena sleeps when it is idle. The requests repeat after some days, so that
//! two such periods differ only by the arena's state.
//!
//! Invariant: the clock never passes the time of a due decay or sleep.

use std::f64::consts::TAU;
use std::sync::Arc;
use std::time::Duration;

use lowtide_cuda_sim::{DriverCosts, Pattern, SimDriver, SimOptions};
use lowtide_gpu::clock::{Clock as _, ManualClock, Moment};
use lowtide_gpu::driver::{Driver as _, StreamHandle};
use lowtide_gpu::{
    ArenaConfig, Buffer, ByteSize, DeviceArena, Lane, Region, SleepConfig, SleepState,
};

use crate::chance::Chance;

/// Requests a second at the peak of a day.
const PEAK: f64 = if cfg!(lowtide_soak) { 0.5 } else { 0.02 };
/// Days until the same requests come again. The pools fill in the first ones.
const PERIOD: usize = if cfg!(lowtide_soak) { 10 } else { 3 };
const PERIODS: usize = if cfg!(lowtide_soak) { 9 } else { 3 };
const MINUTES: u32 = 24 * 60;
/// The minute at which the model is replaced.
const MORNING: u32 = 5 * 60;
/// MiB of the blocks of the model, in an order that changes from day to day.
const MODEL: [u64; 5] = [3, 7, 16, 33, 64];
/// Sizes of other blocks, in MiB.
const SIZES: (f64, f64) = (0.001, 64.0);
/// The time for which a block is left behind, in seconds.
const LEFT_FOR: (f64, f64) = (60.0, 7200.0);
const SLEEPS_AFTER: Duration = Duration::from_secs(1800);
/// The relative difference that is accepted between two periods.
const DRIFT: f64 = 0.005;

/// What a day took.
#[derive(Clone, Copy, Debug, Default)]
struct Day {
    /// Committed and live memory, summed over its seconds without sleep.
    committed: f64,
    live: f64,
    /// Calls of the driver.
    calls: f64,
    /// The peaks of the arena's metadata in bytes, and of live driver objects.
    tables: f64,
    objects: f64,
}

struct World {
    sim: Arc<SimDriver>,
    arena: DeviceArena,
    clock: ManualClock,
    lane: Lane,
    stream: StreamHandle,
    chance: Chance,
    model: Vec<Buffer<u8>>,
    left: Vec<(Moment, Buffer<u8>)>,
    day: Day,
}

#[test]
fn weeks_of_requests_models_and_sleep_leave_an_arena_as_it_was() {
    let seed = 1;
    println!("seed {seed}");
    let sim = Arc::new(SimDriver::new(SimOptions {
        costs: DriverCosts::zero(),
        ..SimOptions::default()
    }));
    let sleep = SleepConfig { idle_after: Some(SLEEPS_AFTER), ..SleepConfig::default() };
    let config = ArenaConfig { sleep, ..ArenaConfig::new("days") };
    let arena = DeviceArena::open(sim.clone(), Arc::new(sim.clock()), config).expect("valid");
    let stream = sim.stream_create().expect("a stream");
    #[expect(unsafe_code, reason = "a lane is of a stream that the caller vouches for")]
    // SAFETY: the simulation checks that a stream exists, so any number is safe with it.
    let lane = unsafe { arena.lane(stream) }.expect("a lane");
    let (clock, chance) = (sim.clock(), Chance::new(seed));
    let (model, left, day) = (Vec::new(), Vec::new(), Day::default());
    let mut world = World { sim, arena, clock, lane, stream, chance, model, left, day };
    let days: Vec<_> = (0..PERIODS * PERIOD).map(|nth| world.day(nth, seed)).collect();
    let World { sim, arena, lane, model, left, .. } = world;
    drop((model, left, lane));
    arena.close().expect("nothing is in use");
    drop(arena);
    sim.stream_destroy(stream).expect("it exists");
    sim.run_all();
    sim.assert_no_faults();
    assert!(sim.leaks().is_empty(), "{:?}", sim.leaks());

    let mut periods = days.chunks_exact(PERIOD).skip(1);
    let first = periods.next().expect("three periods");
    let last = periods.next_back().expect("three periods");
    let drifts = |what: &str, of: fn(&Day) -> f64| {
        let [first, last] = [first, last].map(|days| days.iter().map(of).sum::<f64>());
        let drift = last / first - 1.0;
        println!("{what}: {first}, {last}");
        assert!(drift.abs() <= DRIFT, "{what} drifts by {drift}");
    };
    drifts("committed by live memory", |day| day.committed / day.live);
    drifts("driver calls", |day| day.calls);
    drifts("bytes of tables", |day| day.tables);
    drifts("driver objects", |day| day.objects);
}

impl World {
    fn day(&mut self, nth: usize, seed: u64) -> Day {
        let calls = self.sim.calls_total();
        self.day = Day::default();
        self.chance = Chance::new(seed ^ (nth % PERIOD) as u64);
        for minute in 0..MINUTES {
            if minute == MORNING {
                let mut sizes = MODEL;
                sizes.rotate_left(nth % MODEL.len());
                self.model.clear();
                for size in sizes {
                    let block = self.block(ByteSize::mib(size), Region::Stable);
                    self.model.push(block);
                }
            }
            let hours = TAU * f64::from(minute) / f64::from(MINUTES);
            let mut expected = 60.0 * PEAK * (1.0 - hours.cos()) / 2.0;
            let mut requests = 0;
            while self.chance.happens(expected) {
                (expected, requests) = (expected - 1.0, requests + 1);
            }
            let apart = Duration::from_secs(60) / (requests + 1);
            for _ in 0..requests {
                self.pass(apart);
                self.request();
            }
            self.pass(Duration::from_secs(60) - apart * requests);
            if minute % 60 == 0 {
                let leaks = self.sim.leaks();
                let objects = leaks.reservations + leaks.handles + leaks.events + leaks.host_stores;
                #[expect(clippy::cast_precision_loss, reason = "some hundreds")]
                let objects = objects as f64;
                self.day.objects = self.day.objects.max(objects);
                self.day.tables = self.day.tables.max(self.arena.snapshot().metadata.as_f64());
            }
        }
        #[expect(clippy::cast_precision_loss, reason = "far below 2^52")]
        let calls = (self.sim.calls_total() - calls) as f64;
        self.day.calls = calls;
        self.day
    }

    fn block(&self, size: ByteSize, region: Region) -> Buffer<u8> {
        let size = usize::try_from(size.get()).expect("some MiB");
        self.lane.alloc(size, region).expect("there is room")
    }

    fn request(&mut self) {
        let lease = self.lane.enter().expect("it wakes");
        let mut blocks = Vec::new();
        for _ in 0..self.chance.pick(&[2, 4, 8]) {
            let size = ByteSize::mib(1).scaled(self.chance.around(SIZES.0, SIZES.1));
            let block = self.block(size, Region::Dynamic);
            if let Some(at) = block.address(&lease).expect("it is awake") {
                let (bytes, pattern) = (ByteSize::new(64), Pattern::new(1));
                self.sim.fill(self.stream, at, bytes, pattern).expect("it is mapped");
            }
            blocks.push(block);
        }
        drop(lease);
        if self.chance.happens(0.25) {
            let time = Duration::from_secs_f64(self.chance.around(LEFT_FOR.0, LEFT_FOR.1));
            self.left.extend(blocks.pop().map(|block| (self.clock.now() + time, block)));
        }
        drop(blocks);
        self.sim.run_all();
    }

    /// Advances the clock, with each decay and sleep that is due.
    fn pass(&mut self, time: Duration) {
        let end = self.clock.now() + time;
        loop {
            let now = self.clock.now();
            let due = self.arena.next_decay().min(self.arena.next_sleep()).clamp(now, end);
            let glance = self.arena.glance();
            if self.arena.state() == SleepState::Awake {
                let seconds = (due - now).as_secs_f64();
                self.day.committed += glance.committed.as_f64() * seconds;
                self.day.live += glance.live.as_f64() * seconds;
            }
            self.clock.advance(due - now);
            if due == end {
                self.left.retain(|(until, _)| *until > end);
                return;
            }
            self.sim.run_all();
            self.arena.decay(due).expect("no fault");
            self.arena.sleep_if_idle(due).expect("no fault");
        }
    }
}
