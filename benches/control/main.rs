//! Control: what admission, sampling and managed resources cost those who use them.
//!
//! Real threads and real time; the median of some rounds is told, because other work shares the
//! machine. Whether the service survives under load is the bench `overload`'s; how the whole
//! controller behaves over days, the bench `controller`'s.
//!
//! Exit codes: 0 every goal held; 1 one was missed, or something could not be measured.
#![expect(clippy::print_stdout, clippy::print_stderr, reason = "a program that shows something")]
#![expect(clippy::disallowed_methods, reason = "it measures real time")]

mod admission;
#[path = "../idle/look.rs"]
#[allow(dead_code, reason = "another bench uses more of it")]
mod look;
mod managed;
mod sampler;
mod table;

use std::process::ExitCode;

use clap::Parser;
use lowtide::BoxError;

use crate::table::Figures;

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
    /// Cargo says this when benches are asked for.
    #[arg(long, hide = true)]
    bench: bool,
}

fn main() -> ExitCode {
    // Cargo's tests start benches too, without that word and with arguments of their own.
    if !std::env::args().any(|argument| argument == "--bench") {
        println!("control: a bench of a minute, not a test: run `cargo bench --bench control`");
        return ExitCode::SUCCESS;
    }
    let mut figures = Figures::default();
    let cli = Cli::parse();
    match measure(&cli, &mut figures) {
        Ok(()) if figures.print(cli.counted) => ExitCode::SUCCESS,
        Ok(()) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("control: {error}");
            ExitCode::FAILURE
        }
    }
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
