//! Patterns that public reports gave for memory which grows beyond what is in use, on other
//! allocators: the peak of committed over that of live memory. Each held when it was tried.
//!
//! Nothing decays, and the device has done what was queued only where a pattern waits for it.

use std::collections::VecDeque;

use super::*;
use crate::chance::Chance;

const GIB: usize = 1 << 30;
const SEED: u64 = 1;

struct Run {
    arena: DeviceArena,
    sim: Arc<SimDriver>,
    lane: Lane,
    chance: Chance,
    /// The peaks of live and of committed memory.
    peaks: [ByteSize; 2],
}

impl Run {
    fn new() -> Self {
        let costs = DriverCosts::zero();
        let capacity = ByteSize::gib(22);
        let options = SimOptions { costs, capacity, order: Order::Lazy, ..SimOptions::default() };
        let sim = Arc::new(SimDriver::new(options));
        let config = ArenaConfig { decay: DecayTime::Never, ..ArenaConfig::new("patterns") };
        let arena = DeviceArena::open(sim.clone(), Arc::new(sim.clock()), config).expect("open");
        let lane = lane(&arena, &sim);
        let chance = Chance::new(SEED);
        Self { arena, sim, lane, chance, peaks: [ByteSize::ZERO; 2] }
    }

    fn side(&self) -> Lane {
        lane(&self.arena, &self.sim)
    }

    fn alloc(&mut self, size: usize) -> Buffer<u8> {
        let lane = self.lane.clone();
        self.alloc_on(&lane, size)
    }

    fn alloc_on(&mut self, lane: &Lane, size: usize) -> Buffer<u8> {
        let buffer = lane.alloc(size, DYNAMIC).expect("room");
        let now = self.arena.glance();
        self.peaks = [self.peaks[0].max(now.live), self.peaks[1].max(now.committed)];
        buffer
    }

    fn below(&mut self, end: usize) -> usize {
        self.chance.below(end)
    }

    /// The device does what was queued, and the arena looks.
    fn tick(&self) {
        self.sim.run_all();
        self.arena.decay(self.sim.clock().now()).expect("looked");
    }

    /// Returns the ratio of the peaks, which is at most this.
    #[track_caller]
    fn end(self, most: f64) -> f64 {
        let ratio = self.peaks[1].as_f64() / self.peaks[0].as_f64();
        assert!(ratio <= most, "{ratio:.3}: {:?}", self.peaks);
        self.arena.validate();
        self.sim.assert_no_faults();
        ratio
    }
}

/// Reported in pytorch#31252 and SpecForge#739: batches of text whose longest grows.
#[test]
fn batches_that_grow_commit_little_more_than_they_use() {
    let mut run = Run::new();
    for turn in 0..120 {
        let tokens = 32 + run.below(64 + turn * 2);
        let mut activations = Vec::new();
        for _ in 0..24 {
            for factor in [1, 3, 1, 4, 1] {
                activations.push(run.alloc(factor * tokens * 16 * 1024 * 2));
            }
            activations.push(run.alloc(16 * 16 * tokens * tokens * 2));
        }
        while let Some(last) = activations.pop() {
            let gradient = run.alloc(last.len());
            drop((last, gradient));
        }
        run.tick();
    }
    println!("figure field.pattern.growing_batches {:.3} ratio", run.end(1.06));
}

/// Reported in onnxruntime#29351: an embedding and a reranking model by turns.
#[test]
fn two_models_by_turns_commit_little_more_than_they_use() {
    let mut run = Run::new();
    let lane = run.lane.clone();
    let weight = |nth: usize| lane.alloc::<u8>((1 + nth % 6) * MIB, Region::Stable).expect("room");
    let weights: Vec<_> = (0..200).map(weight).collect();
    for turn in 0..150 {
        let (batch, tokens) = (1 + run.below(32), 16 + run.below(496));
        let heads = if turn % 2 == 0 { 12 } else { 16 };
        let rows = batch * tokens;
        let mut held = VecDeque::new();
        for _ in 0..24 {
            for size in [rows * 4096, rows * 12_288, heads * rows * tokens * 4, rows * 16_384] {
                if size <= GIB {
                    held.push_back(run.alloc(size));
                }
                while held.len() > 3 {
                    held.pop_front();
                }
            }
        }
        drop(held);
        run.tick();
    }
    drop(weights);
    println!("figure field.pattern.two_models {:.3} ratio", run.end(1.10));
}

/// Reported in Megatron-LM#6885: large blocks on a stream that is used once, then on another.
#[test]
fn streams_that_are_used_once_leave_their_memory_to_others() {
    let mut run = Run::new();
    for _ in 0..20 {
        let side = run.side();
        let first: Vec<_> = (0..40).map(|nth| run.alloc_on(&side, (50 + nth * 3) * MIB)).collect();
        drop((first, side));
        let then: Vec<_> = (0..30).map(|nth| run.alloc((40 + nth * 5) * MIB + 77)).collect();
        run.tick();
        drop(then);
    }
    println!("figure field.pattern.one_shot_streams {:.3} ratio", run.end(1.06));
}

/// Reported in pytorch#147168: two streams use each block, and the host runs ahead of both.
#[test]
fn blocks_of_two_streams_are_reused_while_no_work_completes() {
    let mut run = Run::new();
    let (lane, side) = (run.lane.clone(), run.side());
    for _ in 0..400 {
        for (size, [owner, other]) in [(64, [&lane, &side]), (48, [&side, &lane])] {
            let mut buffer = run.alloc_on(owner, size * MIB);
            buffer.record_use(other).expect("recorded");
        }
    }
    drop((lane, side));
    println!("figure field.pattern.host_ahead {:.3} ratio", run.end(1.01));
}

/// Reported in cubecl#1191: an explicit clean-up several times in each step.
#[test]
fn purges_in_each_step_commit_little_more_than_is_used() {
    let mut run = Run::new();
    for turn in 0..100 {
        let mut held: Vec<Buffer<u8>> = Vec::new();
        for nth in 0..60 {
            held.push(run.alloc((1 + (nth * 37 + turn * 11) % 90) * MIB / 3 + nth));
            if held.len() > 10 {
                let at = run.below(10);
                held.swap_remove(at);
            }
            if nth % 9 == 0 {
                run.sim.run_all();
                run.arena.purge().expect("no error");
            }
        }
        drop(held);
        run.tick();
    }
    println!("figure field.pattern.clean_ups {:.3} ratio", run.end(1.30));
}
