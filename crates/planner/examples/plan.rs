//! Plans the buffers of a CSV file, and compares the plan with those of other planners.
//!
//! `cargo run --release --example plan -- FILE.csv [--capacity N] [--segment-bytes N]
//! [--budget 10s]`. The file has the format of MiniMalloc or idealloc, as in
//! `crates/planner/tests/data/planning`; it has no views and no roles, for which there is `Graph`.
//! With `--inclusive`, upper ends are the last steps for any column name.
//!
//! Exit code 0: there is a plan, within the capacity if one was given; 1: it needs more; 2: the
//! file could not be read or planned.
//!
//! Invariant: the printed plan is verified.
#![expect(clippy::print_stdout, reason = "the figures are the product")]

use std::error::Error;
use std::fs::File;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use clap::Parser;
use lowtide_planner::ByteSize;
use lowtide_planner::clock::{Clock, SystemClock};
use lowtide_planner::{Heuristic, Plan, Planner, Problem};

/// Plans the buffers of a CSV file.
#[derive(Parser)]
struct Args {
    /// The CSV file.
    path: PathBuf,
    /// The available memory, in bytes: a plan within it is good enough.
    #[arg(long)]
    capacity: Option<u64>,
    /// The maximum size of a segment, in bytes.
    #[arg(long)]
    segment_bytes: Option<u64>,
    /// The maximum time to search for a better plan.
    #[arg(long, default_value = "10s", value_parser = humantime::parse_duration)]
    budget: Duration,
    /// Treat the upper end of each lifetime as its last step (inclusive).
    #[arg(long)]
    inclusive: bool,
}

fn main() -> ExitCode {
    match plan(&Args::parse()) {
        Ok(code) => code,
        Err(error) => {
            println!("failed: {error}");
            ExitCode::from(2)
        }
    }
}

fn plan(args: &Args) -> Result<ExitCode, Box<dyn Error>> {
    let file = File::open(&args.path);
    let file = file.map_err(|error| format!("{}: {error}", args.path.display()))?;
    let problem = Problem::read_csv(file, args.inclusive)
        .map_err(|error| format!("{}: {error}", args.path.display()))?;
    let bound = problem.lower_bound()?;
    println!("{}: {} buffers", args.path.display(), problem.demands().len());
    println!("at most {bound} ({} bytes) live at once", bound.get());

    let clock = SystemClock::new();
    let started = clock.now();
    let seconds = || (clock.now() - started).as_secs_f64();
    let progress = |peak| println!("{:>9.3} s  {}", seconds(), beside(peak, bound));
    let mut planner = Planner::new(&clock).budget(args.budget, u64::MAX).on_better(progress);
    planner = planner.enough(ByteSize::new(args.capacity.unwrap_or(0)));
    if let Some(limit) = args.segment_bytes {
        planner = planner.segments_of(ByteSize::new(limit));
    }
    let plan = planner.plan(&problem)?;
    println!("{:>9.3} s  done\n", seconds());
    println!("{:20}{}", "lowtide", beside(plan.peak(), bound));
    for heuristic in Heuristic::ALL {
        println!("{:20}{}", heuristic.name(), beside(problem.plan_by(heuristic)?.peak(), bound));
    }
    if plan.segments().len() > 1 {
        println!("{} segments; the other planners use one", plan.segments().len());
    }
    println!("{}", verdict(&plan));
    let fits = args.capacity.is_none_or(|capacity| plan.peak().get() <= capacity);
    Ok(if fits { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// A peak, and how much more than the bound it is.
fn beside(peak: ByteSize, bound: ByteSize) -> String {
    format!("{:>15} bytes  {:.4} of the bound", peak.get(), ratio(peak, bound))
}

fn ratio(peak: ByteSize, bound: ByteSize) -> f64 {
    if bound.is_zero() { 1.0 } else { peak.as_f64() / bound.as_f64() }
}

fn verdict(plan: &Plan) -> String {
    if plan.is_optimal() {
        String::from("proved: no plan needs less")
    } else {
        format!("no plan needs less than {}; at most {} could be saved", plan.bound(), plan.gap())
    }
}
