//! Retention: what allocators keep after a burst, and what giving it back costs.
//!
//! Each allocator is a process of its own, started here and watched from outside. The runs take
//! turns; a ratio is taken within a round, and the median of the rounds is told.
//!
//! Exit codes: 0 every goal held; 1 one was missed, or something could not be measured.
#![expect(clippy::print_stdout, clippy::print_stderr, reason = "a program that shows something")]

mod burst;
#[path = "../../common/callgrind.rs"]
#[allow(dead_code, reason = "other benches count steps of themselves")]
mod callgrind;
mod contestants;
mod costs;
#[path = "../../common/figures.rs"]
#[allow(dead_code, reason = "other benches use more of it")]
mod figures;
mod process;

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
    /// The burst of all allocators.
    Burst,
    /// The same of documents of which none is left.
    Documents,
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
    match measure(Cli::parse()) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("retention: {error}");
            ExitCode::FAILURE
        }
    }
}

/// Measures everything and prints it. Returns `true` if every goal held.
fn measure(mut cli: Cli) -> Result<bool, BoxError> {
    let mut figures = Figures::default();
    if cli.smoke {
        let names =
            ["glibc_trim", "jemalloc_default", "low_memory", "balanced", contestants::APART];
        (cli.rounds, cli.only) = (1, names.map(str::to_owned).into());
    }
    let wanted = |part: Part| cli.parts.is_empty() || cli.parts.contains(&part);
    if wanted(Part::Costs) {
        costs::measure(&mut figures, cli.smoke)?;
    }
    let plan = burst::Plan::of(cli.smoke);
    let mut contestants = contestants::chosen(&cli.only)?;
    if wanted(Part::Burst) {
        burst::rounds(&mut figures, &plan, &contestants, cli.rounds)?;
    }
    if wanted(Part::Documents) {
        // Of documents none is left, so there is nothing to keep apart.
        contestants.retain(|one| one.name != contestants::APART);
        let plan = burst::Plan::of_documents(cli.smoke);
        burst::rounds(&mut figures, &plan, &contestants, cli.rounds)?;
    }
    if cli.pairs > 0 {
        burst::pairs(&mut figures, &plan, cli.pairs)?;
    }
    if cli.smoke {
        figures.print();
        return Ok(true);
    }
    ratios(&mut figures);
    figures.set_goals(GOALS);
    Ok(figures.print())
}

/// The most that figures may be.
const GOALS: &[(&str, f64)] = &[
    (burst::APART_AT_REST, 1.35),
    ("retention.balanced.cpu_per_op_ratio", 1.10),
    ("pairs.balanced.cpu_ratio", 1.10),
    ("pairs.balanced.p50_ratio", 1.04),
    ("pairs.balanced.p95_ratio", 1.02),
    ("heap.pair.more_instructions", 4.0),
    ("heap.scrape.us", 200.0),
    ("heap.scrape.allocations", 0.0),
    ("heap.purge.ms_per_mib", 0.15),
];

/// Figures of two allocators that have a goal, divided: the part, who, the figure, over whom, and
/// the most that the median of the rounds may be.
const RATIOS: &[(&str, &str, &str, &str, f64)] = &[
    ("retention", "low_memory", "resident_2s_mib", "jemalloc_default", 0.18),
    ("retention", "balanced", "resident_2s_mib", "jemalloc_default", 0.22),
    ("retention", "low_memory", "resident_10s_mib", "glibc_trim", 1.00),
    ("retention", "balanced", "resident_10s_mib", "glibc_trim", 1.15),
    ("retention", "low_memory", "resident_10s_mib", "balanced", 1.00),
    ("documents", "low_memory", "resident_10s_mib", "balanced", 1.00),
    ("retention", "balanced", "peak_mib", "jemalloc_default", 1.05),
    ("retention", "balanced", "cpu_us", "trim_100ms", 0.5),
];

/// Adds the ratios of what was measured.
fn ratios(figures: &mut Figures) {
    for (part, who, end, whom, most) in RATIOS {
        let [one, other] =
            [who, whom].map(|name| figures.each(&format!("{part}.{name}.{end}")).to_vec());
        let name = format!("{part}.{who}.{end}_over_{whom}");
        for (one, other) in one.iter().zip(&other) {
            figures.at_most(name.as_str(), one / other, "ratio", *most);
        }
    }
}
