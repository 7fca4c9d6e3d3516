//! Compaction, decay and idle sleep with several streams: context waits and driver calls.
//!
//! Lanes allocate blocks in turn and write to them; one block in eight stays. The worker's calls
//! and a compaction follow. Each live block is checked at its new address.
#![expect(unsafe_code, reason = "a lane is of a stream that the caller vouches for")]

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use lowtide::{BoxError, ByteSize};
use lowtide_core::clock::Clock as _;
use lowtide_core::sync::background;
use lowtide_cuda_sim::{Call, Order, Outcome, Pattern, SimDriver, SimOptions};
use lowtide_gpu::driver::Driver as _;
use lowtide_gpu::{
    ArenaConfig, Buffer, CompactOptions, DeviceArena, Lane, Moved, Region, SleepConfig,
};

use crate::common::figures::Figures;

const LANES: usize = 4;
/// The blocks that stay live, and their size.
const KEPT: usize = 1_000;
const SIZE: usize = 64 << 10;
/// One block in eight stays.
const ONE_IN: usize = 8;

/// Device calls at one instant.
struct Calls {
    all: u64,
    context_waits: u64,
    copies: u64,
}

impl Calls {
    fn now(sim: &SimDriver) -> Self {
        Self {
            all: sim.calls_total(),
            context_waits: sim.calls(Call::Synchronize),
            copies: sim.calls(Call::Copy) + sim.calls(Call::CopyAsync),
        }
    }
}

/// An arena on a simulated device, with live blocks that each have a pattern.
struct Rig {
    sim: Arc<SimDriver>,
    arena: DeviceArena,
    lanes: Vec<Lane>,
    blocks: Vec<(usize, Buffer<u8>)>,
}

impl Rig {
    fn new() -> Result<Self, BoxError> {
        let sim = Arc::new(SimDriver::new(SimOptions { order: Order::Lazy, ..Default::default() }));
        let sleep = SleepConfig { idle_after: Some(Duration::from_secs(60)), ..Default::default() };
        let config = ArenaConfig { sleep, ..ArenaConfig::new("compact") };
        let arena = DeviceArena::open(sim.clone(), Arc::new(sim.clock()), config)?;
        let mut lanes = Vec::new();
        for _ in 0..LANES {
            let stream = sim.stream_create()?;
            // SAFETY: the simulation checks that a stream exists; this one outlives the lane.
            lanes.push(unsafe { arena.lane(stream) }?);
        }
        let mut blocks = Vec::new();
        for nth in 0..KEPT * ONE_IN {
            let lane = &lanes[nth % LANES];
            let block = lane.alloc::<u8>(SIZE, Region::Dynamic)?;
            let lease = lane.enter()?;
            let at = block.address(&lease)?.ok_or("a block without an address")?;
            sim.fill(lane.stream(), at, block.bytes(), pattern(nth)?)?;
            drop(lease);
            blocks.push((nth, block));
        }
        // A stride that is no multiple of the number of lanes keeps blocks of every lane.
        blocks.retain(|(nth, _)| nth % ONE_IN == nth / ONE_IN % ONE_IN);
        Ok(Self { sim, arena, lanes, blocks })
    }

    /// Does the work that the worker does with an arena, four times: cached blocks leave at the
    /// second, and the next records the events of their last uses.
    fn work(&self, later: Duration) -> Result<bool, BoxError> {
        let _background = background();
        let clock = self.sim.clock();
        let mut has_slept = false;
        for _ in 0..4 {
            self.sim.advance(1 << 20);
            clock.advance(later);
            self.arena.decay(clock.now())?;
            has_slept |= self.arena.sleep_if_idle(clock.now())?.is_some();
        }
        Ok(has_slept)
    }

    /// Checks every live block. Returns the number of blocks with wrong bytes.
    fn wrong(&self) -> Result<usize, BoxError> {
        let mut checks = Vec::new();
        for (nth, block) in &self.blocks {
            let lane = &self.lanes[nth % LANES];
            let lease = lane.enter()?;
            let at = block.address(&lease)?.ok_or("a block without an address")?;
            checks.push(self.sim.check(lane.stream(), at, block.bytes(), pattern(*nth)?)?);
        }
        self.sim.run_all();
        let is_wrong = |ticket: &_| self.sim.outcome(*ticket) != Outcome::Held;
        Ok(checks.iter().filter(|ticket| is_wrong(ticket)).count())
    }
}

fn pattern(nth: usize) -> Result<Pattern, BoxError> {
    Ok(Pattern::new(u64::try_from(nth)?))
}

pub(crate) fn measure(figures: &mut Figures) -> Result<(), BoxError> {
    let rig = Rig::new()?;
    rig.work(Duration::from_secs(1))?;
    // Later work of the streams, which the compaction waits for.
    let unproved = rig.wrong()?;
    let committed = rig.arena.snapshot().committed;
    let before = Calls::now(&rig.sim);
    // The number of moves of each block, by the block's first address.
    let mut moves: BTreeMap<_, u64> = BTreeMap::new();
    let mut first = BTreeMap::new();
    let options = CompactOptions::new(Region::Dynamic);
    let done = rig.arena.compact(options, |Moved { from, to, .. }| {
        let origin = first.remove(&from).unwrap_or(from);
        first.insert(to, origin);
        *moves.entry(origin).or_default() += 1;
    })?;
    let after = Calls::now(&rig.sim);
    let wrong = unproved + rig.wrong()?;
    rig.work(Duration::from_secs(1))?;
    let has_slept = rig.work(Duration::from_secs(100))?;
    let waits = Calls::now(&rig.sim).context_waits;
    let faults = rig.sim.faults_total();
    println!(
        "{} moves of {} blocks, {}, {} skipped; committed {committed}, then {} idle",
        done.moves,
        moves.len(),
        done.moved,
        done.skipped,
        done.recovered,
    );
    if wrong > 0 || faults > 0 || done.moves == 0 || !has_slept {
        return Err(format!("{wrong} blocks wrong, {faults} faults, slept: {has_slept}").into());
    }
    let per = |count: u64, of: u64| ByteSize::new(count).as_f64() / ByteSize::new(of).as_f64();
    let once = u64::try_from(moves.len())?;
    figures.at_most("gpu.context_waits", ByteSize::new(waits).as_f64(), "calls", 0.0);
    figures.add("gpu.compact.moves_per_block", per(done.moves, once), "moves");
    let copies = after.copies - before.copies;
    figures.add("gpu.compact.copies_per_move", per(copies, done.moves), "copies");
    let calls = after.all - before.all;
    figures.add("gpu.compact.calls_per_move", per(calls, done.moves), "calls");
    Ok(())
}
