//! The controller in virtual time, with many seeds; `crates/admission/tests/admission/simulated.rs`
//! runs a few.
//!
//! Scenarios, each from a seed; days of the controller and of a device arena; and the advice on
//! smaller limits compared with their effect. A run that fails is shown with its seed, and `--from
//! SEED --seeds 1` runs it again.
//!
//! Exit codes: 0 all held; 1 one failed.
#![expect(clippy::print_stdout, clippy::print_stderr, reason = "a program that shows something")]

#[path = "../../crates/admission/tests/admission/sim/mod.rs"]
#[allow(dead_code, reason = "the tests use more of it")]
mod sim;

use std::process::ExitCode;
use std::time::Duration;

use clap::Parser;
use common::figures::{Figures, count};
use common::sim::Bed;
use lowtide::{BoxError, ByteSize};
use lowtide_cuda_sim::{Pattern, SimOptions};
use lowtide_gpu::clock::{Clock as _, ManualClock, Moment};
use lowtide_gpu::driver::{Driver as _, StreamHandle};
use lowtide_gpu::{ArenaConfig, Buffer, Lane, Region, SleepConfig, SleepState};

use crate::sim::days::{Advised, LOADS};
use crate::sim::scenario::{DAY, Load, MIXES, Scenario, Shape};
use crate::sim::{claims, days};
use common::chance::Chance;

/// Seconds of traffic that are recorded for an advice.
const ADVISED_S: f64 = 300.0;
/// The relative difference that is accepted between two periods of the arena.
const ARENA_DRIFT: f64 = 0.005;

/// The whole controller in virtual time.
#[derive(Clone, Debug, Parser)]
struct Cli {
    /// The number of scenarios.
    #[arg(long, default_value_t = 3000)]
    seeds: u64,
    /// The first seed.
    #[arg(long, default_value_t = 0)]
    from: u64,
    /// The number of days of traffic.
    #[arg(long, default_value_t = 90)]
    days: u32,
    /// Seeds of each comparison of the advice on limits with what they do; 0 for none.
    #[arg(long, default_value_t = 3)]
    advice: u64,
}

fn main() -> ExitCode {
    common::main(|cli: Cli| {
        let mut figures = Figures::default();
        let mut failed = scenarios(&cli, &mut figures);
        if cli.advice > 0 {
            failed += advised(cli.advice, &mut figures);
        }
        if cli.days > 0 {
            failed += virtual_days(cli.from, cli.days, &mut figures);
        }
        figures.at_most("controller.failed", count(failed), "runs", 0.0);
        Ok(figures.print())
    })
}

/// All seeds; how many failed.
fn scenarios(cli: &Cli, figures: &mut Figures) -> u64 {
    let mut failed = 0;
    for seed in cli.from..cli.from + cli.seeds {
        if let Err(failure) = claims::judge(&Scenario::of(seed)) {
            failed += 1;
            eprintln!("{failure}");
        }
    }
    figures.add("controller.runs", count(cli.seeds), "runs");
    failed
}

/// Compares the advice on smaller limits with their effect. Returns the number of killed runs.
fn advised(seeds: u64, figures: &mut Figures) -> u64 {
    let (mut killed, mut all) = (0, Vec::new());
    for mix in MIXES {
        for (load, of) in LOADS {
            for seed in 0..seeds {
                let Some(advised) = days::compare(seed, mix, of, ADVISED_S) else { continue };
                println!("{} {load}, seed {seed}: {advised:?}", mix.name);
                let Advised { smallest, half, .. } = advised;
                all.push([smallest.predicted, smallest.real, half.predicted, half.real]);
                killed += u64::from(advised.killed);
            }
        }
    }
    let names = ["smallest.predicted", "smallest.real", "half.predicted", "half.real"];
    for (at, name) in names.into_iter().enumerate() {
        let mean = all.iter().map(|one| one[at]).sum::<f64>() / count(all.len().max(1) as u64);
        figures.add(format!("questions.advice.{name}_percent"), 100.0 * mean, "%");
    }
    killed
}

/// Runs days of the controller and of an arena. Returns 1 if they failed.
fn virtual_days(seed: u64, days: u32, figures: &mut Figures) -> u64 {
    let month = days::run(seed, days, DAY);
    let mut add = |name: &str, value, unit| {
        figures.add(format!("controller.days.{name}"), value, unit);
    };
    add("allowance_drift", month.allowance_drift, "MiB");
    add("physical_drift", month.physical_drift, "MiB");
    let mut faults = month.faults;
    match drifts(seed, days as usize) {
        Ok(drifts) => {
            let drifting = drifts.into_iter().filter(|(_, drift)| drift.abs() > ARENA_DRIFT);
            faults.extend(drifting.map(|(name, drift)| format!("{name} drifts by {drift}")));
        }
        Err(error) => faults.push(format!("the arena: {error}")),
    }
    for fault in &faults {
        eprintln!("{days} days, seed {seed}: {fault}");
    }
    add("held", f64::from(if faults.is_empty() { days } else { 0 }), "days");
    u64::from(!faults.is_empty())
}

// Days of a device arena in virtual time: committed memory, driver calls and tables.
//
// Requests follow the simulation's load of a day. Each allocates blocks of random sizes on a lane,
// and one in four keeps a block for minutes or hours, as a cache of a conversation does. The model
// is replaced each morning, and the arena sleeps when it is idle. The requests repeat after ten
// days, so that two such periods differ only by the arena's state.
//
// Invariant: the clock never passes the time of a due decay or sleep.

/// The load: requests a second at its peak.
const LOAD: Load = Load { low: 0.0, high: 0.5, shape: Shape::Days { day: DAY } };
/// Days until the same requests come again.
const PERIOD: usize = 10;
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

/// A day.
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

/// A value of a day.
type Of = fn(&Day) -> f64;

struct World {
    bed: Bed,
    clock: ManualClock,
    lane: Lane,
    stream: StreamHandle,
    seed: u64,
    chance: Chance,
    model: Vec<Buffer<u8>>,
    left: Vec<(Moment, Buffer<u8>)>,
    day: Day,
}

/// Runs so many days, and closes the arena. Compares the mean of each value in the last period with
/// that in the second: pools fill in the first. Returns the relative differences; fewer than three
/// periods are not compared.
fn drifts(seed: u64, days: usize) -> Result<Vec<(&'static str, f64)>, BoxError> {
    let mut world = World::new(seed)?;
    let days = (0..days).map(|day| world.day(day)).collect::<Result<Vec<_>, _>>()?;
    world.close()?;
    let of: [(_, Of); 4] = [
        ("committed_per_live", |day| day.committed / day.live),
        ("driver_calls", |day| day.calls),
        ("table_bytes", |day| day.tables),
        ("driver_objects", |day| day.objects),
    ];
    let mut periods = days.chunks_exact(PERIOD).skip(1);
    let (Some(first), Some(last)) = (periods.next(), periods.next_back()) else {
        return Ok(Vec::new());
    };
    let drift = |(name, of): (_, Of)| {
        let [first, last] = [first, last].map(|days| days.iter().map(of).sum::<f64>());
        (name, last / first - 1.0)
    };
    Ok(of.into_iter().map(drift).collect())
}

impl World {
    fn new(seed: u64) -> Result<Self, BoxError> {
        let sleep = SleepConfig { idle_after: Some(SLEEPS_AFTER), ..SleepConfig::default() };
        let config = ArenaConfig { sleep, ..ArenaConfig::new("days") };
        let bed = Bed::open(SimOptions::default(), config)?;
        let stream = bed.sim.stream_create()?;
        let (clock, lane) = (bed.sim.clock(), bed.lane(stream)?);
        let (chance, day) = (Chance::new(seed), Day::default());
        let (model, left) = (Vec::new(), Vec::new());
        Ok(Self { bed, clock, lane, stream, seed, chance, model, left, day })
    }

    fn close(self) -> Result<(), BoxError> {
        let Self { bed, lane, stream, model, left, .. } = self;
        drop((model, left, lane));
        bed.arena.close()?;
        drop(bed.arena);
        bed.sim.stream_destroy(stream)?;
        bed.sim.run_all();
        if bed.sim.faults_total() > 0 || !bed.sim.leaks().is_empty() {
            return Err(format!("{:?}, {:?}", bed.sim.faults(), bed.sim.leaks()).into());
        }
        Ok(())
    }

    fn day(&mut self, nth: usize) -> Result<Day, BoxError> {
        let calls = self.bed.sim.calls_total();
        self.day = Day::default();
        self.chance = Chance::new(self.seed ^ (nth % PERIOD) as u64);
        for minute in 0..MINUTES {
            if minute == MORNING {
                let mut sizes = MODEL;
                sizes.rotate_left(nth % MODEL.len());
                self.model.clear();
                for size in sizes {
                    self.model.push(self.block(ByteSize::mib(size), Region::Stable)?);
                }
            }
            let mut expected = 60.0 * LOAD.at(60.0 * f64::from(minute));
            let mut requests = 0;
            while self.chance.happens(expected) {
                (expected, requests) = (expected - 1.0, requests + 1);
            }
            let apart = Duration::from_secs(60) / (requests + 1);
            for _ in 0..requests {
                self.pass(apart)?;
                self.request()?;
            }
            self.pass(Duration::from_secs(60) - apart * requests)?;
            self.look();
        }
        self.day.calls = count(self.bed.sim.calls_total() - calls);
        Ok(self.day)
    }

    fn block(&self, size: ByteSize, region: Region) -> Result<Buffer<u8>, BoxError> {
        Ok(self.lane.alloc(usize::try_from(size.get())?, region)?)
    }

    fn request(&mut self) -> Result<(), BoxError> {
        let lease = self.lane.enter()?;
        let mut blocks = Vec::new();
        for _ in 0..self.chance.pick(&[2, 4, 8]) {
            let size = ByteSize::mib(1).scaled(self.chance.around(SIZES.0, SIZES.1));
            let block = self.block(size, Region::Dynamic)?;
            if let Some(at) = block.address(&lease)? {
                self.bed.sim.fill(self.stream, at, ByteSize::new(64), Pattern::new(1))?;
            }
            blocks.push(block);
        }
        drop(lease);
        if self.chance.happens(0.25) {
            let time = Duration::from_secs_f64(self.chance.around(LEFT_FOR.0, LEFT_FOR.1));
            self.left.extend(blocks.pop().map(|block| (self.clock.now() + time, block)));
        }
        drop(blocks);
        self.bed.sim.run_all();
        Ok(())
    }

    /// Advances the clock, with each decay and sleep that is due.
    fn pass(&mut self, time: Duration) -> Result<(), BoxError> {
        let end = self.clock.now() + time;
        loop {
            let now = self.clock.now();
            let due = self.bed.arena.next_decay().min(self.bed.arena.next_sleep()).clamp(now, end);
            let glance = self.bed.arena.glance();
            if self.bed.arena.state() == SleepState::Awake {
                let seconds = (due - now).as_secs_f64();
                self.day.committed += glance.committed.as_f64() * seconds;
                self.day.live += glance.live.as_f64() * seconds;
            }
            self.clock.advance(due - now);
            if due == end {
                self.left.retain(|(until, _)| *until > end);
                return Ok(());
            }
            self.bed.arena.decay(due)?;
            self.bed.arena.sleep_if_idle(due)?;
        }
    }

    fn look(&mut self) {
        let leaks = self.bed.sim.leaks();
        let objects = leaks.reservations + leaks.handles + leaks.events + leaks.host_stores;
        self.day.objects = self.day.objects.max(count(objects as u64));
        self.day.tables = self.day.tables.max(self.bed.arena.snapshot().metadata.as_f64());
    }
}
