//! Index: what the block index costs and how well it places, beside the allocators of its field.
//!
//! The same operations from the same seeds go to the index, to the crates `offset-allocator` and
//! `rlsf`, and to models of cuArena and of ONNX Runtime's arena, of which only failures compare:
//! how fast a model runs says nothing. Failures and instructions do not depend on the machine;
//! times do.
//!
//! Exit codes: 0 every goal held; 1 one was missed.
#![expect(clippy::print_stdout, reason = "a program that shows something")]
#![expect(clippy::disallowed_methods, reason = "it measures real time")]
#![expect(clippy::cast_precision_loss, reason = "figures of a bench are far below 2^52")]

mod arena;
mod chance;
#[path = "../common/mod.rs"]
#[allow(dead_code, reason = "other benches use more of it")]
mod common;
mod count;
mod granules;
mod ours;
#[path = "../peers/mod.rs"]
#[allow(dead_code, reason = "another bench uses more of them")]
mod peers;
mod tlsf;
mod work;

use std::process::ExitCode;

use clap::Parser;

use crate::common::figures::Figures;
use crate::count::Counted;
use crate::granules::Layout;
use crate::ours::Ours;
use crate::peers::{Bfc, CuArena, Extend, Offset, Peer};
use crate::tlsf::Tlsf;
use crate::work::{MIX_LIVE, Mix, POOL, SEEDS};

/// Steps of the timed mix.
const STEPS: usize = 1_000_000;
/// Times that the timed mix is played; the median of each figure counts.
const ROUNDS: usize = 5;
/// Blocks, free ones counted, that `offset-allocator` is told to be ready for: its default.
const BLOCKS_MAX: u32 = 1 << 17;

#[derive(Clone, Copy, Debug, Parser)]
#[command(about = "What the block index costs and how well it places")]
struct Cli {
    /// Play the mix and end: the process whose instructions are counted.
    #[arg(long, hide = true)]
    be: Option<Counted>,
    #[arg(long, hide = true, default_value_t = 0)]
    steps: usize,
    /// Judges no time, and leaves out what measures nothing else.
    #[arg(long)]
    counted: bool,
}

/// The most that figures may be.
const GOALS: &[(&str, f64)] = &[
    ("index.random_mix.instructions", 300.0),
    ("index.load90.failures.seed42", 100.0),
    ("index.load90.failures.seed7", 100.0),
    ("index.load90.failures.seed1234", 100.0),
    ("index.virtual.two_ranges.load90.failures", 0.0),
    ("index.virtual.two_ranges.active_per_live.worst", 1.03),
    ("index.metadata.bytes_per_block", 64.0),
    ("index.metadata.bytes_per_block_worst", 64.0),
    ("arena.pair.driver_calls", 0.0),
    ("arena.two_threads.contended_locks", 0.0),
    ("arena.virtual.load90.failures", 0.0),
    ("arena.virtual.load90.active_per_live.worst", 1.03),
];

/// The same for what is timed.
const TIMED: &[(&str, f64)] = &[
    ("index.random_mix.median_ns", 50.0),
    ("index.random_mix.p999_ns", 500.0),
    ("index.holes_8192.median_ns", 300.0),
    ("arena.pair.median_ns", 60.0),
    ("arena.two_threads.wall_ratio_over_loop", 1.15),
];

fn main() -> ExitCode {
    common::main(|cli: Cli| {
        if let Some(who) = cli.be {
            count::be(who, cli.steps);
            return Ok(true);
        }
        let mut figures = Figures::default();
        if !cli.counted {
            times(&mut figures);
        }
        instructions(&mut figures);
        failures(&mut figures);
        virtual_memory(&mut figures);
        metadata(&mut figures);
        arena::measure(&mut figures);
        figures.set_goals(GOALS);
        if cli.counted {
            // Documents state one that is a ratio of times.
            figures.forget(TIMED);
        } else {
            figures.set_goals(TIMED);
        }
        Ok(figures.print())
    })
}

fn times(figures: &mut Figures) {
    // Ours is named by no peer.
    timed(figures, "", || Ours::new(POOL));
    timed(figures, "peer.offset-allocator.", || Offset::new(POOL, BLOCKS_MAX));
    timed(figures, "peer.rlsf.", || Tlsf::new(POOL));
}

fn timed<P: Peer + Send>(figures: &mut Figures, prefix: &str, make: impl Fn() -> P) {
    let mut add =
        |name: &str, value: f64| figures.add(format!("{prefix}index.{name}"), value, "ns");
    let loops = ["pair_8mib", "batch_1kib", "ping_pong_1mib", "chain"];
    for (name, nanos) in loops.iter().zip(work::loops(&mut make())) {
        add(&format!("{name}.median_ns"), nanos);
    }
    for round in 0..ROUNDS {
        let mut peer = make();
        let mut mix = Mix::filled(&mut peer, SEEDS[round % SEEDS.len()], MIX_LIVE);
        let nanos = mix.timed(STEPS, |todo| work::act(&mut peer, todo));
        for (share, name) in [(500, "median_ns"), (990, "p99_ns"), (999, "p999_ns")] {
            add(&format!("random_mix.{name}"), work::permille(&nanos, share) as f64);
        }
    }
    add("holes_8192.median_ns", work::beside_holes(&mut make(), 520) as f64);
    add("holes_8192_own_bin.median_ns", work::beside_holes(&mut make(), 996) as f64);
}

fn instructions(figures: &mut Figures) {
    for (prefix, who) in [
        ("", Counted::Ours),
        ("peer.offset-allocator.", Counted::OffsetAllocator),
        ("peer.rlsf.", Counted::Rlsf),
    ] {
        match count::count(who) {
            Ok(count) => {
                figures.add(
                    format!("{prefix}index.random_mix.instructions"),
                    count,
                    "instructions",
                );
            }
            Err(why) => println!("skipped: {prefix}index.random_mix.instructions: {why}"),
        }
    }
}

fn failures(figures: &mut Figures) {
    let bfc = |extend| move |seed| work::load90(Bfc::new(extend, POOL), seed);
    let of: [(&str, &dyn Fn(u64) -> u64); 5] = [
        ("", &|seed| work::load90(Ours::new(POOL), seed)),
        ("peer.offset-allocator.", &|seed| work::load90(Offset::new(POOL, BLOCKS_MAX), seed)),
        ("peer.cuarena-model.", &|seed| work::load90(CuArena::new(POOL), seed)),
        ("peer.bfc-model-next-power-of-two.", &bfc(Extend::NextPowerOfTwo)),
        ("peer.bfc-model-same-as-requested.", &bfc(Extend::SameAsRequested)),
    ];
    for (prefix, failures) in of {
        for seed in SEEDS {
            let name = format!("{prefix}index.load90.failures.seed{seed}");
            figures.add(name, failures(seed) as f64, "failures");
        }
    }
}

fn virtual_memory(figures: &mut Figures) {
    for layout in Layout::ALL {
        let all = SEEDS.map(|seed| granules::load90(layout, seed));
        let most = |of: fn(&granules::Outcome) -> f64| all.iter().map(of).fold(0.0, f64::max);
        let name = format!("index.virtual.{}", layout.name());
        figures.add(format!("{name}.load90.failures"), most(|one| one.failures as f64), "failures");
        figures.add(format!("{name}.active_per_live.worst"), most(|one| one.worst), "ratio");
        figures.add(format!("{name}.active_per_live.end"), most(|one| one.end), "ratio");
        figures.add(
            format!("{name}.small_alone.live_mib"),
            most(|one| one.small_mib as f64),
            "MiB",
        );
        let pinned = most(|one| one.pinned_mib as f64);
        figures.add(format!("{name}.small_alone.active_mib"), pinned, "MiB");
    }
}

fn metadata(figures: &mut Figures) {
    // The worst from a thousand blocks on, whenever the table of records has just grown.
    let mut pool = Ours::new(POOL);
    let mut worst: f64 = 0.0;
    for blocks in 1..20_000 {
        let _ = pool.alloc(256);
        if blocks >= 1_000 {
            worst = worst.max(pool.index.metadata() as f64 / f64::from(blocks));
        }
    }
    figures.add("index.metadata.bytes_per_block_worst".to_owned(), worst, "bytes");
    let mut pool = Ours::new(POOL);
    Mix::filled(&mut pool, SEEDS[0], MIX_LIVE).play(&mut pool, STEPS);
    let each = pool.metadata_per_block();
    figures.add("index.metadata.bytes_per_block".to_owned(), each, "bytes");
}
