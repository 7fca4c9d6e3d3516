//! Control: what admission, sampling and managed resources cost those who use them.
//!
//! Real threads and real time; the median of some rounds is told, because other work shares the
//! machine. Whether the service survives under load is the bench `overload`'s; how the whole
//! controller behaves over days, the bench `controller`'s.
//!
//! Exit codes: 0 every goal held; 1 one was missed, or something could not be measured.
#![expect(clippy::print_stdout, reason = "a program that shows something")]
#![expect(clippy::disallowed_methods, reason = "it measures real time")]

mod admission;
#[path = "../common/mod.rs"]
#[allow(dead_code, reason = "other benches use more of it")]
mod common;
#[path = "../idle/look.rs"]
#[allow(dead_code, reason = "another bench uses more of it")]
mod look;
mod managed;
mod sampler;

use std::process::ExitCode;

use clap::Parser;
use lowtide::BoxError;

use crate::common::figures::Figures;

lowtide::global_allocator!(balanced);

/// The parts of the bench, in the order in which they run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum Part {
    /// The cost of admitting a request and ending it.
    Admission,
    /// Resources that load on demand.
    Managed,
    /// The cost of the control loop.
    Sampler,
}

#[derive(Clone, Debug, Parser)]
#[command(about = "What admission, sampling and managed resources cost")]
struct Cli {
    /// The number of measurements of each.
    #[arg(long, default_value_t = 9)]
    rounds: usize,
    /// These parts alone.
    #[arg(long, value_delimiter = ',')]
    parts: Vec<Part>,
    /// One round, and a small process to sample.
    #[arg(long)]
    quick: bool,
    /// Judges no time, and leaves out what measures nothing else.
    #[arg(long)]
    counted: bool,
}

/// The most that a figure may be.
const GOALS: &[(&str, f64)] = &[
    ("admission.allocated_bytes", 0.0),
    ("managed.loads", 1.0),
    ("managed.unload_late_ticks", 1.0),
    ("managed.after_unload_over_goal", 1.0),
    ("sampler.allocated_bytes", 0.0),
];

/// The same for what is timed.
const TIMED: &[(&str, f64)] = &[
    ("admission.one_threads_ns", 15.0),
    ("admission.two_threads_ns", 80.0),
    ("admission.one_over_atomics", 1.3),
    // The same goal over what two atomic operations took where it was set: 48 ns.
    ("admission.two_over_atomics", 1.67),
    ("admission.rejected_ns", 15.0),
    ("managed.acquire_ns", 100.0),
    ("managed.other_wait_ms", 1.0),
    ("sampler.cpu_ratio", 0.003),
    ("sampler.over_floor", 1.5),
    ("sampler.read_us", 25.0),
];

fn main() -> ExitCode {
    common::main(|cli: Cli| {
        let mut figures = Figures::default();
        measure(&cli, &mut figures)?;
        figures.set_goals(GOALS);
        if !cli.counted {
            figures.set_goals(TIMED);
        }
        Ok(figures.print())
    })
}

fn measure(cli: &Cli, figures: &mut Figures) -> Result<(), BoxError> {
    let rounds = if cli.quick { 1 } else { cli.rounds.max(1) };
    let wanted = |part| cli.parts.is_empty() || cli.parts.contains(&part);
    if wanted(Part::Admission) {
        admission::measure(rounds, figures)?;
    }
    if wanted(Part::Managed) {
        managed::measure(rounds, figures)?;
    }
    if wanted(Part::Sampler) {
        sampler::measure(cli.quick, figures)?;
    }
    Ok(())
}
