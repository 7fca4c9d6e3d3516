//! Time: what an arena gives back as time passes, and what that costs in driver calls.
//!
//! Recorded allocations with pauses between the requests, over the host driver and a clock that the
//! bench moves; what is left of a burst when nobody calls; and what scattered live blocks keep
//! committed, before and after their neighbours are moved together; what streams cost, and what
//! sleep and wake; and whether a refusal is ever false. What is counted is bytes, calls and virtual
//! time, which do not depend on the machine. Of the figures in real time only the simulation's
//! speed has a goal.
//!
//! Exit codes: 0 every goal held; 1 one was missed, or a run failed.
#![expect(clippy::print_stdout, clippy::print_stderr, reason = "a program that shows something")]
#![expect(clippy::disallowed_methods, reason = "it measures real time")]

#[path = "../index/chance.rs"]
mod chance;
mod pauses;
#[path = "../peers/mod.rs"]
#[allow(dead_code, unused_imports, reason = "other benches use more of them")]
mod peers;
mod player;
mod refusals;
mod rivals;
mod scattered;
mod schedule;
mod silence;
mod sleep;
mod streams;
mod table;
#[path = "../replay/trace.rs"]
#[allow(dead_code, reason = "another bench uses more of it")]
mod trace;

use std::path::Path;
use std::process::ExitCode;

use clap::Parser;
use lowtide_gpu::BoxError;

use crate::table::Figures;
use crate::trace::Trace;

/// The project's own traces.
const TRACES: [&str; 5] =
    ["bert-embed", "gpt2-generate", "llama-generate", "vit-images", "gpt2-train"];
/// Of chance.
const SEEDS: [u64; 3] = [42, 7, 1234];

#[derive(Clone, Copy, Debug, Parser)]
#[command(about = "What an arena gives back as time passes, and what that costs")]
#[expect(clippy::struct_excessive_bools, reason = "arguments of a command")]
struct Cli {
    /// Only the first trace, with the first seed; goals are judged all the same.
    #[arg(long)]
    quick: bool,
    /// Scattered blocks of random sizes for twelve more seeds as well.
    #[arg(long)]
    more_seeds: bool,
    /// Judges no time: the speed of the simulation is printed and has no goal.
    #[arg(long)]
    counted: bool,
    /// Cargo says this when benches are asked for.
    #[arg(long, hide = true)]
    bench: bool,
}

fn main() -> ExitCode {
    // Cargo's tests start benches too, without that word and with arguments of their own.
    if !std::env::args().any(|argument| argument == "--bench") {
        println!("time: a bench of seconds, not a test: run `cargo bench --bench time`");
        return ExitCode::SUCCESS;
    }
    let cli = Cli::parse();
    let mut figures = Figures::default();
    match measure(cli, &mut figures) {
        Ok(()) if figures.print(cli.counted) => ExitCode::SUCCESS,
        Ok(()) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("time: {error}");
            ExitCode::FAILURE
        }
    }
}

fn measure(cli: Cli, figures: &mut Figures) -> Result<(), BoxError> {
    let few = if cli.quick { 1 } else { usize::MAX };
    let seeds = &SEEDS[..SEEDS.len().min(few)];
    let mut traces = Vec::new();
    for name in TRACES.iter().take(few) {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("traces");
        traces.push(Trace::open(&folder.join(format!("{name}.jsonl.gz")))?);
    }
    pauses::measure(&traces, seeds, figures)?;
    silence::measure(figures)?;
    streams::measure(figures)?;
    sleep::measure(figures)?;
    refusals::measure(seeds, figures)?;
    let more: Vec<_> = if cli.more_seeds { (100..112).collect() } else { Vec::new() };
    scattered::measure(seeds, &more, figures)
}
