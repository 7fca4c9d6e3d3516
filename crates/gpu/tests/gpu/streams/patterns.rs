//! Patterns that public reports gave for memory which grows beyond what is in use, on other
//! allocators: the peak of committed over that of live memory.
//!
//! Nothing decays, and the device has done what was queued only where a pattern waits for it. The
//! figures `light.patterns.` are of a driver with virtual memory, `light.segments.` of one without.

use std::collections::VecDeque;

use super::*;
use crate::chance::Chance;
use lowtide_gpu::HostDriver;
use lowtide_gpu::clock::ManualClock;

const GIB: usize = 1 << 30;
const SEED: u64 = 1;

/// The most of any pattern, and of the mean. The goals are 1.15 and 1.06.
const WORST: f64 = 1.32;
const MEAN: f64 = 1.13;

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
        Self::over(true)
    }

    fn over(virtual_memory: bool) -> Self {
        let options = SimOptions {
            costs: DriverCosts::zero(),
            capacity: ByteSize::gib(22),
            order: Order::Lazy,
            virtual_memory,
            ..SimOptions::default()
        };
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

    fn ratio(&self) -> f64 {
        self.peaks[1].as_f64() / self.peaks[0].as_f64()
    }

    /// Allocates on any lane, and frees a block at random before if this many are live.
    fn churn(&mut self, live: &mut Vec<Buffer<u8>>, most: usize, size: usize) {
        if live.len() >= most {
            let at = self.below(live.len());
            live.swap_remove(at);
        }
        live.push(self.alloc(size));
        if self.below(50) == 0 {
            self.tick();
        }
    }

    /// Six blocks on a lane, of a size by chance and its multiples.
    fn burst(&mut self, lane: &Lane) -> Vec<Buffer<u8>> {
        let scale = 1 + self.below(16);
        (1..=6).map(|nth| self.alloc_on(lane, nth * scale * MIB / 2)).collect()
    }

    /// Returns the ratio of the peaks, which is at most this.
    #[track_caller]
    fn end(self, most: f64) -> f64 {
        let ratio = self.ratio();
        assert!(ratio <= most, "{ratio:.3}: {:?}", self.peaks);
        self.arena.validate();
        self.sim.assert_no_faults();
        ratio
    }
}

/// Reported in pytorch#31252 and SpecForge#739: batches of text whose longest grows.
fn growing_batches(run: &mut Run) {
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
}

#[test]
fn batches_that_grow_commit_little_more_than_they_use() {
    let mut run = Run::new();
    growing_batches(&mut run);
    println!("figure field.pattern.growing_batches {:.3} ratio", run.end(1.06));
}

/// Reported in onnxruntime#29351: an embedding and a reranking model by turns.
fn two_models(run: &mut Run) {
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
}

#[test]
fn two_models_by_turns_commit_little_more_than_they_use() {
    let mut run = Run::new();
    two_models(&mut run);
    println!("figure field.pattern.two_models {:.3} ratio", run.end(1.10));
}

/// Reported in Megatron-LM#6885: large blocks on a stream that is used once, then on another.
fn one_shot_streams(run: &mut Run) {
    for _ in 0..20 {
        let side = run.side();
        let first: Vec<_> = (0..40).map(|nth| run.alloc_on(&side, (50 + nth * 3) * MIB)).collect();
        drop((first, side));
        let then: Vec<_> = (0..30).map(|nth| run.alloc((40 + nth * 5) * MIB + 77)).collect();
        run.tick();
        drop(then);
    }
}

#[test]
fn streams_that_are_used_once_leave_their_memory_to_others() {
    let mut run = Run::new();
    one_shot_streams(&mut run);
    println!("figure field.pattern.one_shot_streams {:.3} ratio", run.end(1.06));
}

/// Reported in pytorch#147168: two streams use each block, and the host runs ahead of both.
fn host_ahead(run: &mut Run) {
    let (lane, side) = (run.lane.clone(), run.side());
    for _ in 0..400 {
        for (size, [owner, other]) in [(64, [&lane, &side]), (48, [&side, &lane])] {
            let mut buffer = run.alloc_on(owner, size * MIB);
            buffer.record_use(other).expect("recorded");
        }
    }
    drop((lane, side));
}

#[test]
fn blocks_of_two_streams_are_reused_while_no_work_completes() {
    let mut run = Run::new();
    host_ahead(&mut run);
    println!("figure field.pattern.host_ahead {:.3} ratio", run.end(1.01));
}

/// Reported in cubecl#1191: an explicit clean-up several times in each step.
fn clean_ups(run: &mut Run) {
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
}

#[test]
fn purges_in_each_step_commit_little_more_than_is_used() {
    let mut run = Run::new();
    clean_ups(&mut run);
    println!("figure field.pattern.clean_ups {:.3} ratio", run.end(1.30));
}

/// Models of Hugging Face and candle: caches of 16 layers grow by a copy for each token.
fn concatenation(run: &mut Run) {
    for _ in 0..3 {
        let start = 64 + run.below(400);
        let mut caches: Vec<_> = (0..64).map(|_| run.alloc(8192 * start)).collect();
        for token in 1..100 {
            for cache in &mut caches {
                *cache = run.alloc(8192 * (start + token));
            }
            if token % 20 == 0 {
                run.tick();
            }
        }
    }
}

/// The same on eight lanes, from little memory on.
fn concatenation_on_lanes(run: &mut Run) {
    let lanes: Vec<_> = (0..8).map(|_| run.side()).collect();
    let mut caches: Vec<Vec<Buffer<u8>>> = lanes.iter().map(|_| Vec::new()).collect();
    for token in 64..164 {
        for (lane, caches) in lanes.iter().zip(&mut caches) {
            for layer in 0..32 {
                let longer = run.alloc_on(lane, 8192 * token);
                match caches.get_mut(layer) {
                    Some(cache) => *cache = longer,
                    None => caches.push(longer),
                }
            }
        }
        run.tick();
    }
}

/// Results that stay among others that go.
fn temporaries(run: &mut Run) {
    let mut results: Vec<Buffer<u8>> = Vec::new();
    for turn in 0..2_000 {
        let mut sizes = [(); 8].map(|()| 1_usize << (12 + run.below(14)));
        sizes.iter_mut().for_each(|size| *size += run.below(*size));
        let temporaries = sizes.map(|size| run.alloc(size));
        if turn % 3 == 0 {
            let size = (32 << 10) << run.below(7);
            let size = size + run.below(size);
            run.churn(&mut results, 600, size);
        }
        drop(temporaries);
        run.tick();
    }
}

/// A byte more than a power of two.
fn odd_sizes(run: &mut Run) {
    let (mut live, mut sum): (Vec<Buffer<u8>>, usize) = (Vec::new(), 0);
    for _ in 0..3_000 {
        let size = (1 << (10 + run.below(17))) + 1;
        while sum + size > 2 * GIB {
            let at = run.below(live.len());
            sum -= live.swap_remove(at).len();
        }
        sum += size;
        run.churn(&mut live, usize::MAX, size);
    }
}

fn grown_in_place(run: &mut Run) {
    let mut all: Vec<_> = (0..64).map(|_| run.alloc(256 << 10)).collect();
    for _ in 0..3_000 {
        let at = run.below(all.len());
        let size = all[at].len();
        let size = if size > 96 * MIB { 256 << 10 } else { size + size / 8 + 1 };
        all[at].resize(size).expect("room");
        let now = run.arena.glance();
        run.peaks = [run.peaks[0].max(now.live), run.peaks[1].max(now.committed)];
        if run.below(20) == 0 {
            run.tick();
        }
    }
}

fn many_streams(run: &mut Run) {
    let lanes: Vec<_> = (0..64).map(|_| run.side()).collect();
    let mut live = VecDeque::new();
    for _ in 0..1_500 {
        let lane = run.below(64);
        live.push_back(run.burst(&lanes[lane]));
        if live.len() > 4 {
            live.pop_front();
        }
        run.tick();
    }
}

/// Reported in onnxruntime#32342: a stream for each run.
fn fresh_streams(run: &mut Run) {
    let mut live = VecDeque::new();
    for _ in 0..1_500 {
        let lane = run.side();
        live.push_back((run.burst(&lane), lane));
        if live.len() > 3 {
            live.pop_front();
        }
        run.tick();
    }
}

/// Reported in rmm#536 and #2039: tables of two streams.
fn tables_of_two_streams(run: &mut Run) {
    let lanes = [run.lane.clone(), run.side()];
    let mut held: Vec<Buffer<u8>> = Vec::new();
    for turn in 0..1_200 {
        let size = (1 + run.below(512)) * MIB / 2 + run.below(MIB);
        held.push(run.alloc_on(&lanes[turn % 2], size));
        while held.iter().map(Buffer::len).sum::<usize>() > 5 * GIB {
            let at = run.below(held.len());
            held.remove(at);
        }
        if turn % 7 == 0 {
            run.tick();
        }
    }
}

fn one_size<const SIZE: usize>(run: &mut Run) {
    let mut live = Vec::new();
    for _ in 0..3_000 {
        run.churn(&mut live, 500, SIZE);
    }
}

type Pattern = (&'static str, fn(&mut Run));

/// The patterns, without those that need no more than 1.02 of what is live on any arena.
const PATTERNS: [Pattern; 14] = [
    ("growing_batches", growing_batches),
    ("two_models", two_models),
    ("one_shot_streams", one_shot_streams),
    ("host_ahead", host_ahead),
    ("clean_ups", clean_ups),
    ("concatenation", concatenation),
    ("concatenation_on_lanes", concatenation_on_lanes),
    ("temporaries", temporaries),
    ("odd_sizes", odd_sizes),
    ("resize", grown_in_place),
    ("many_streams", many_streams),
    ("fresh_streams", fresh_streams),
    ("two_streams", tables_of_two_streams),
    ("2mib_1", one_size::<{ 2 * MIB + 1 }>),
];

/// Plays a pattern, and prints and returns its ratio.
#[expect(clippy::print_stdout, reason = "measured values are shown")]
fn measure((name, pattern): Pattern, virtual_memory: bool) -> f64 {
    let mut run = Run::over(virtual_memory);
    pattern(&mut run);
    let kind = if virtual_memory { "patterns" } else { "segments" };
    println!("figure light.{kind}.{name} {:.3} ratio", run.ratio());
    run.end(f64::INFINITY)
}

#[test]
fn reported_patterns_commit_no_more_than_was_measured() {
    let ratios = PATTERNS.map(|pattern| measure(pattern, true));
    let worst = ratios.into_iter().fold(0.0, f64::max);
    let mean = ratios.iter().sum::<f64>() / 14.0;
    println!("figure light.patterns.worst {worst:.3} ratio");
    println!("figure light.patterns.mean {mean:.3} ratio");
    assert!(worst <= WORST && mean <= MEAN, "worst {worst:.3}, mean {mean:.3}");
}

/// Reported in onnxruntime#13500 and #14474: idle memory was passed over.
#[test]
fn idle_memory_is_used_before_more_is_committed() {
    let clock = Arc::new(ManualClock::new());
    let config = ArenaConfig::new("idle");
    let arena = DeviceArena::open(Arc::new(HostDriver::new()), clock, config).expect("open");
    let [first, idle, last] = [3, 40, 1].map(|mib| arena.alloc::<u8>(mib * MIB, DYNAMIC));
    drop(idle);
    let second = arena.alloc::<u8>(24 * MIB, DYNAMIC).expect("room");
    let committed = arena.glance().committed;
    println!("figure light.patterns.hold_mib {} MiB", committed.get() >> 20);
    assert_eq!(committed, ByteSize::mib(44));
    drop((first, last, second));
}

/// The goals are 1.15, 1.10 and 1.5: they hold.
#[test]
fn without_virtual_memory_no_more_is_allocated_than_was_measured() {
    let measured = [
        (("2mib_1", one_size::<{ 2 * MIB + 1 }> as fn(&mut Run)), 1.15),
        (("1.5mib", one_size::<{ 3 * MIB / 2 }>), 1.05),
        (("growing_batches", growing_batches), 1.45),
    ];
    for (pattern, most) in measured {
        let ratio = measure(pattern, false);
        assert!(ratio <= most, "{}: {ratio:.3}", pattern.0);
    }
}
