//! Index: what the block index costs and how well it places, beside the allocators of its field.
//!
//! The same operations from the same seeds go to the index and to the crate `offset-allocator`.
//! Failures and instructions do not depend on the machine; times do.
//!
//! Exit codes: 0 every goal held; 1 one was missed, or something could not be measured.
#![expect(clippy::disallowed_methods, reason = "it measures real time")]
#![expect(clippy::cast_precision_loss, reason = "figures of a bench are far below 2^52")]

mod work;

use std::process::ExitCode;

use clap::Parser;
use common::callgrind::{Counted, per_step};
use common::figures::{Figures, median};
use lowtide_gpu::index::BlockIndex;

use crate::work::{MIX_LIVE, Mix, Nobody, POOL, Peer, SEEDS};

/// Steps of the timed mix.
const STEPS: usize = 1_000_000;
/// Times that the timed mix is played; the median of each figure counts.
const ROUNDS: usize = 5;
/// Steps of the shorter of two runs whose instructions are counted.
const COUNTED: u32 = 50_000;

/// What the block index costs and how well it places.
#[derive(Clone, Debug, Parser)]
struct Cli {
    /// Plays the mix on an allocator.
    #[command(flatten)]
    role: Counted,
    /// Judges no time, and leaves out what measures nothing else.
    #[arg(long)]
    counted: bool,
    /// Measures failed allocations alone.
    #[arg(long)]
    failed: bool,
}

const NO_GOAL: f64 = f64::INFINITY;

fn main() -> ExitCode {
    common::main(|cli: Cli| {
        if let Some(who) = &cli.role.be {
            be(who, cli.role.steps);
            return Ok(true);
        }
        let mut figures = Figures::new(cli.counted);
        failures_of_arena(&mut figures)?;
        if cli.failed {
            return Ok(figures.print());
        }
        if !cli.counted {
            // Ours is named by no peer.
            timed(&mut figures, "", 50.0, || BlockIndex::new(POOL));
            timed(&mut figures, "peer.offset-allocator.", NO_GOAL, work::offset);
        }
        instructions(&mut figures)?;
        failures(&mut figures);
        work::arena(&mut figures);
        Ok(figures.print())
    })
}

fn timed<P: Peer>(figures: &mut Figures, prefix: &str, goal: f64, make: impl Fn() -> P) {
    for round in 0..ROUNDS {
        let mut peer = make();
        let mut mix = Mix::filled(&mut peer, SEEDS[round % SEEDS.len()], MIX_LIVE);
        let nanos = mix.timed(&mut peer, STEPS);
        let name = format!("{prefix}index.random_mix.median_ns");
        figures.at_most(name, median(&nanos), "ns", goal);
    }
}

/// The process that is counted: plays so many steps of the mix.
fn be(who: &str, steps: usize) {
    fn run<P: Peer>(mut peer: P, steps: usize) {
        Mix::filled(&mut peer, SEEDS[0], MIX_LIVE).play(&mut peer, steps);
    }
    match who {
        "ours" => run(BlockIndex::new(POOL), steps),
        "offset-allocator" => run(work::offset(), steps),
        "beside few" => work::fail(1 << 13, steps),
        "beside many" => work::fail(1 << 17, steps),
        _ => run(Nobody, steps),
    }
}

/// Instructions of an operation of the mix, less those of a loop without an allocator: what chance
/// and bookkeeping of the bench cost is not counted.
fn instructions(figures: &mut Figures) -> Result<(), String> {
    let of = |who: &str| per_step("", who, COUNTED);
    for (prefix, who, goal) in
        [("", "ours", 300.0), ("peer.offset-allocator.", "offset-allocator", NO_GOAL)]
    {
        let name = format!("{prefix}index.random_mix.instructions");
        figures.at_most(name, of(who)? - of("nobody")?, "instructions", goal);
    }
    Ok(())
}

/// Allocations that fail beside many free blocks: times, and instructions over those beside few.
fn failures_of_arena(figures: &mut Figures) -> Result<(), String> {
    work::failed(figures);
    let ratio = per_step("", "beside many", 50)? / per_step("", "beside few", 50)?;
    figures.at_most("light.fail.instructions_ratio", ratio, "ratio", 1.05);
    Ok(())
}

fn failures(figures: &mut Figures) {
    for seed in SEEDS {
        let name = |prefix: &str| format!("{prefix}index.load90.failures.seed{seed}");
        let ours = work::load90(BlockIndex::new(POOL), seed);
        figures.at_most(name(""), ours, "failures", 100.0);
        let offset = work::load90(work::offset(), seed);
        figures.add(name("peer.offset-allocator."), offset, "failures");
    }
}
