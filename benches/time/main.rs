//! Time: what an arena gives back as time passes, and what that costs in driver calls.
//!
//! Recorded allocations with pauses between the requests, over the host driver and a clock that the
//! bench moves; what is left of a burst when nobody calls; and what scattered live blocks keep
//! committed, before and after their neighbours are moved together; what streams cost, and what
//! sleep and wake; and whether a refusal is ever false. What is counted is bytes, calls and virtual
//! time, which do not depend on the machine.
//!
//! Exit codes: 0 every goal held; 1 one was missed, or a run failed.
#![expect(clippy::disallowed_methods, reason = "it measures real time")]

mod blocks;
#[path = "../index/chance.rs"]
#[allow(dead_code, reason = "others use more of it")]
mod chance;
#[path = "../common/mod.rs"]
#[allow(dead_code, reason = "other benches use more of it")]
mod common;
mod device;
mod pauses;
#[path = "../replay/player.rs"]
#[allow(dead_code, reason = "another bench uses more of it")]
mod player;
#[path = "../replay/trace.rs"]
#[allow(dead_code, reason = "another bench uses more of it")]
mod trace;

use std::process::ExitCode;

use clap::Parser;
use lowtide_gpu::BoxError;

use crate::common::figures::Figures;
use crate::trace::Trace;

/// Of chance.
const SEEDS: [u64; 3] = [42, 7, 1234];

#[derive(Clone, Copy, Debug, Parser)]
#[command(about = "What an arena gives back as time passes, and what that costs")]
struct Cli {}

/// The most that figures may be.
const GOALS: &[(&str, f64)] = &[
    ("decay.retained_byte_seconds.ratio", 0.5),
    ("decay.short_gap.extra_driver_calls", 0.0),
    ("decay.long_gap.driver_calls_per_handle", 6.0),
    ("decay.idle_to_zero.decays", 2.0),
    ("purge.random90.committed_per_live", 1.25),
    ("compact.random90_64k.committed_per_live", 1.3),
    ("streams.fresh.committed_growth_bytes", 0.0),
    ("sleep.driver_calls_per_handle", 1.2),
    ("sleep.driver_calls.large_blocks", 1200.0),
    ("sleep.driver_calls.100x_blocks_ratio", 1.02),
    ("streams.steady.driver_calls_per_allocation", 0.0),
    ("streams.unsafe_unmaps", 0.0),
    ("oom.false_refusals", 0.0),
];

fn main() -> ExitCode {
    common::main(|Cli {}| {
        let mut figures = Figures::default();
        measure(&mut figures)?;
        figures.set_goals(GOALS);
        Ok(figures.print())
    })
}

fn measure(figures: &mut Figures) -> Result<(), BoxError> {
    let traces = trace::own().map(|file| Trace::open(&file));
    pauses::measure(&traces.into_iter().collect::<Result<Vec<_>, _>>()?, &SEEDS, figures)?;
    device::silence(figures)?;
    device::streams(figures)?;
    device::sleep(figures)?;
    blocks::refusals(&SEEDS, figures)?;
    blocks::scattered(&SEEDS, figures)
}
