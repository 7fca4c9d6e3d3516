//! Figures of an arena on a GPU that need no GPU: driver calls, bytes and their order over the
//! simulation, instructions, and ratios of times in one run.
//!
//! `--part NAME` measures one part; without it, all. A figure with a goal prints whether it holds.
//!
//! Exit codes: 0 every goal held; 1 one was missed, or a part failed.
#![expect(clippy::print_stderr, reason = "a program that shows something")]

#[path = "../../tests/memory/device_schedules.rs"]
mod device_schedules;
mod handles;
mod lanes;

use std::collections::BTreeMap;
use std::process::ExitCode;
use std::thread;
use std::time::Duration;

use clap::Parser;
use common::figures::{Figures, count};
use common::sim::Bed;
use lowtide::BoxError;
use lowtide_core::clock::Clock as _;
use lowtide_core::sync::background;
use lowtide_cuda_sim::{Call, Order, Pattern, SimOptions};
use lowtide_gpu::driver::Driver as _;
use lowtide_gpu::{ArenaConfig, Buffer, CompactOptions, Lane, Moved, Region, SleepConfig};

type Measure = fn(&mut Figures) -> Result<(), BoxError>;

/// The parts, in the order in which they run.
const PARTS: &[(&str, Measure)] = &[
    ("compact", compact),
    ("devices", devices),
    ("leases", handles::leases),
    ("pairs", lanes::pairs),
    ("trace", handles::traces),
    ("views", lanes::views),
    ("wake", handles::wake),
];

/// Figures of an arena on a GPU, over the simulation.
#[derive(Clone, Debug, Parser)]
struct Cli {
    /// Measures only this part; may be repeated.
    #[arg(long, value_name = "NAME", value_parser = PARTS.iter().map(|part| part.0).collect::<Vec<_>>())]
    part: Vec<String>,
}

fn main() -> ExitCode {
    common::main(|cli: Cli| {
        let is_wanted =
            |name: &str| cli.part.is_empty() || cli.part.iter().any(|part| part == name);
        let mut all_held = true;
        for (name, measure) in PARTS.iter().filter(|(name, _)| is_wanted(name)) {
            let mut figures = Figures::default();
            if let Err(error) = measure(&mut figures) {
                eprintln!("{name}: {error}");
                all_held = false;
            }
            all_held &= figures.print();
        }
        Ok(all_held)
    })
}

/// Counts faults in random schedules over two and eight devices of one `Memory`, of which one is
/// lost. Each schedule has devices of its own.
fn devices(figures: &mut Figures) -> Result<(), BoxError> {
    const SCHEDULES: u64 = 10_000;
    let run = |devices| {
        let all = (0..SCHEDULES).flat_map(|seed| device_schedules::faults(seed, devices).0);
        all.inspect(|fault| eprintln!("{fault}")).count()
    };
    let all = thread::scope(|scope| {
        let eight = scope.spawn(|| run(8));
        let two = run(2);
        eight.join().map(|eight| two + eight)
    });
    let all = all.map_err(|_| "a thread panicked")?;
    figures.at_most("gpu.devices.faults", count(all as u64), "faults", 0.0);
    Ok(())
}

// Compaction, decay and idle sleep with several streams: context waits and driver calls.
//
// Lanes allocate blocks in turn and write to them; one block in eight stays. The worker's calls
// and a compaction follow. Whether blocks keep their bytes, the random schedules check.

const LANES: usize = 4;
/// The blocks that stay live, and their size.
const KEPT: usize = 1_000;
const SIZE: usize = 64 << 10;
/// One block in eight stays.
const ONE_IN: usize = 8;

/// Live blocks and their lanes.
struct Blocks {
    bed: Bed,
    lanes: Vec<Lane>,
    live: Vec<(usize, Buffer<u8>)>,
}

impl Blocks {
    fn new() -> Result<Self, BoxError> {
        let options = SimOptions { order: Order::Lazy, ..Default::default() };
        let sleep = SleepConfig { idle_after: Some(Duration::from_secs(60)), ..Default::default() };
        let bed = Bed::open(options, ArenaConfig { sleep, ..ArenaConfig::new("compact") })?;
        let lanes = (0..LANES).map(|_| bed.lane(bed.sim.stream_create()?));
        let lanes = lanes.collect::<Result<Vec<_>, _>>()?;
        let mut live = Vec::new();
        for nth in 0..KEPT * ONE_IN {
            let block = lanes[nth % LANES].alloc::<u8>(SIZE, Region::Dynamic)?;
            live.push((nth, block));
        }
        let mut blocks = Self { bed, lanes, live };
        blocks.write()?;
        // A stride that is no multiple of the number of lanes keeps blocks of every lane.
        blocks.live.retain(|(nth, _)| nth % ONE_IN == nth / ONE_IN % ONE_IN);
        Ok(blocks)
    }

    /// Does the work that the worker does with an arena, four times: cached blocks leave at the
    /// second, and the next records the events of their last uses.
    fn work(&self, later: Duration) -> Result<bool, BoxError> {
        let _background = background();
        let clock = self.bed.sim.clock();
        let mut has_slept = false;
        for _ in 0..4 {
            self.bed.sim.advance(1 << 20);
            clock.advance(later);
            self.bed.arena.decay(clock.now())?;
            has_slept |= self.bed.arena.sleep_if_idle(clock.now())?.is_some();
        }
        Ok(has_slept)
    }

    /// Lets the lanes write to every live block.
    fn write(&self) -> Result<(), BoxError> {
        for (nth, block) in &self.live {
            let lane = &self.lanes[nth % LANES];
            let lease = lane.enter()?;
            let at = block.address(&lease)?.ok_or("a block without an address")?;
            let pattern = Pattern::new(*nth as u64);
            self.bed.sim.fill(lane.stream(), at, block.bytes(), pattern)?;
        }
        Ok(())
    }
}

fn compact(figures: &mut Figures) -> Result<(), BoxError> {
    let blocks = Blocks::new()?;
    let sim = &blocks.bed.sim;
    blocks.work(Duration::from_secs(1))?;
    // Later work of the streams, which the compaction waits for.
    blocks.write()?;
    sim.run_all();
    let calls = || {
        let copies = sim.calls(Call::Copy) + sim.calls(Call::CopyAsync);
        (count(copies), count(sim.calls_total()))
    };
    let before = calls();
    // The number of moves of each block, by the block's first address.
    let mut moves: BTreeMap<_, u64> = BTreeMap::new();
    let mut first = BTreeMap::new();
    let options = CompactOptions::new(Region::Dynamic);
    let done = blocks.bed.arena.compact(options, |Moved { from, to, .. }| {
        let origin = first.remove(&from).unwrap_or(from);
        first.insert(to, origin);
        *moves.entry(origin).or_default() += 1;
    })?;
    let after = calls();
    blocks.write()?;
    sim.run_all();
    blocks.work(Duration::from_secs(1))?;
    let has_slept = blocks.work(Duration::from_secs(100))?;
    let faults = sim.faults_total();
    if faults > 0 || done.moves == 0 || !has_slept {
        return Err(format!("{faults} faults, {} moves, slept: {has_slept}", done.moves).into());
    }
    let (made, waits) = (count(done.moves), count(sim.calls(Call::Synchronize)));
    figures.at_most("gpu.context_waits", waits, "calls", 0.0);
    let per_block = made / count(moves.len() as u64);
    figures.add("gpu.compact.moves_per_block", per_block, "moves");
    figures.add("gpu.compact.copies_per_move", (after.0 - before.0) / made, "copies");
    figures.add("gpu.compact.calls_per_move", (after.1 - before.1) / made, "calls");
    Ok(())
}
