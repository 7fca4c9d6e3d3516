//! Retention: what allocators keep after a burst, and what giving it back costs.
//!
//! Each allocator is a process of its own, started here and watched from outside. The runs take
//! turns; a ratio is taken within a round, and the median of the rounds is told.
//!
//! Exit codes: 0 every goal held; 1 one was missed, or something could not be measured.
#![expect(clippy::print_stdout, clippy::print_stderr, reason = "a program that shows something")]

mod burst;
#[path = "../../callgrind.rs"]
mod callgrind;
mod contestants;
mod costs;
mod figures;
mod goals;
mod http;
mod models;
mod plot;
mod process;

use std::path::PathBuf;
use std::process::ExitCode;

use clap::Parser;
use retention::BoxError;

use crate::contestants::Contestant;
use crate::figures::Figures;

/// The parts of the bench, in the order in which they run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum Part {
    /// The costs of single acts.
    Costs,
    /// Loading and unloading a model.
    Unload,
    /// Doing so many times.
    Cycles,
    /// A service on tokio.
    Http,
    /// The burst of all allocators.
    Burst,
    /// The same of documents of which none is left.
    Documents,
    /// Purging each second during it.
    Purging,
}

#[derive(Clone, Debug, Parser)]
#[command(about = "What allocators keep after a burst, and what giving it back costs")]
struct Cli {
    /// The number of runs of each.
    #[arg(long, default_value_t = 3)]
    rounds: usize,
    /// Besides, so many pairs of balanced and jemalloc's default, for the processor time alone.
    #[arg(long, default_value_t = 0)]
    pairs: usize,
    /// These allocators alone.
    #[arg(long, value_delimiter = ',')]
    only: Vec<String>,
    /// These parts alone.
    #[arg(long, value_delimiter = ',')]
    parts: Vec<Part>,
    /// One more allocator: lowtide under the profile balanced, with this string for jemalloc.
    #[arg(long, value_name = "NAME=CONF")]
    also: Vec<String>,
    /// Draws resident memory over time here.
    #[arg(long)]
    svg: Option<PathBuf>,
    /// Small, short, and judged by no goal: that it runs at all.
    #[arg(long)]
    smoke: bool,
    /// Cargo says this when benches are asked for.
    #[arg(long, hide = true)]
    bench: bool,
}

fn main() -> ExitCode {
    if !std::env::args().any(|argument| argument == "--bench") {
        println!("retention: a bench, not a test: run `cargo bench` with its manifest");
        return ExitCode::SUCCESS;
    }
    match measure(&Cli::parse()) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("retention: {error}");
            ExitCode::FAILURE
        }
    }
}

/// Measures everything and prints it; whether every goal held.
fn measure(cli: &Cli) -> Result<bool, BoxError> {
    let mut figures = Figures::default();
    let wanted = |part: Part| {
        let parts = if cli.smoke {
            &[Part::Costs, Part::Burst, Part::Documents] as &[Part]
        } else {
            &cli.parts
        };
        parts.is_empty() || parts.contains(&part)
    };
    let rounds = if cli.smoke { 1 } else { cli.rounds };
    if wanted(Part::Costs) {
        costs::measure(&mut figures, cli.smoke)?;
    }
    if wanted(Part::Unload) {
        models::unload(&mut figures, rounds)?;
    }
    if wanted(Part::Cycles) {
        models::cycles(&mut figures)?;
    }
    if wanted(Part::Http) {
        http::measure(&mut figures, rounds)?;
    }
    let plan = burst::Plan::of(cli.smoke);
    let contestants = if cli.smoke {
        contestants::named(&[
            "glibc_trim",
            "jemalloc_default",
            "low_memory",
            "balanced",
            contestants::APART,
        ])
    } else {
        contestants::chosen(&cli.only, &cli.also)?
    };
    if wanted(Part::Burst) {
        for name in contestants::missing() {
            println!("{name}: left out, the bench was built without it");
        }
        let last = burst::rounds(&mut figures, &plan, &contestants, rounds)?;
        if let Some(path) = &cli.svg {
            plot::draw(path, &last)?;
        }
    }
    if wanted(Part::Documents) {
        // Of documents none is left, so there is nothing to keep apart.
        let mut contestants = contestants.clone();
        contestants.retain(|one| one.name != contestants::APART);
        burst::rounds(&mut figures, &burst::Plan::of_documents(cli.smoke), &contestants, rounds)?;
    }
    if cli.pairs > 0 {
        burst::pairs(&mut figures, &plan, cli.pairs)?;
    }
    if wanted(Part::Purging) {
        burst::purging(&mut figures, &plan, rounds.max(5))?;
    }
    let names: Vec<_> = contestants.iter().map(|one| one.name.as_str()).collect();
    figures.table("retention", &names);
    figures.table("documents", &names);
    let held = cli.smoke || goals::judge(&figures);
    figures.print();
    Ok(held)
}
