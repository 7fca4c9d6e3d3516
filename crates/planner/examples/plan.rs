//! Plans the buffers of a CSV file, and compares the plan with those of other planners.
//!
//! `cargo run --release --example plan -- FILE.csv [--capacity N] [--segment-bytes N]
//! [--budget 10s] [--svg OUT]`. The file has the format of MiniMalloc or idealloc, as in
//! `crates/planner/tests/data/planning`; it has no views and no roles, for which there is `Graph`.
//! With `--inclusive`, upper ends are the last steps for any column name. The drawing has time
//! across and addresses up, with segments stacked.
//!
//! Exit code 0: there is a plan, within the capacity if one was given; 1: it needs more; 2: the
//! file could not be read or planned.
//!
//! Invariant: the printed plan is verified.
#![expect(clippy::print_stdout, reason = "the figures are the product")]

#[path = "plan/drawing.rs"]
mod drawing;

use std::cell::Cell;
use std::error::Error;
use std::fs;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use clap::Parser;
use lowtide_planner::ByteSize;
use lowtide_planner::clock::{Clock, SystemClock};
use lowtide_planner::{Budget, Ends, Heuristic, Plan, Planner, Problem};

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
    /// The file for a drawing of the plan, as SVG.
    #[arg(long)]
    svg: Option<PathBuf>,
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
    let ends = if args.inclusive { Ends::Inclusive } else { Ends::AsNamed };
    let file = File::open(&args.path);
    let file = file.map_err(|error| format!("{}: {error}", args.path.display()))?;
    let problem = Problem::read_csv(file, ends)
        .map_err(|error| format!("{}: {error}", args.path.display()))?;
    let bound = problem.lower_bound()?;
    println!("{}: {} buffers", args.path.display(), problem.demands().len());
    println!("at most {bound} ({} bytes) live at once", bound.get());

    let clock = SystemClock::new();
    let (started, found) = (clock.now(), Cell::new(Duration::ZERO));
    let budget = Budget { time: args.budget, nodes: u64::MAX };
    let progress = |peak: ByteSize| {
        found.set(clock.now() - started);
        println!("{:>9.3} s  {}", found.get().as_secs_f64(), beside(peak, bound));
    };
    let mut planner = Planner::new(&clock).budget(budget).on_better(progress);
    planner = planner.enough(ByteSize::new(args.capacity.unwrap_or(0)));
    if let Some(limit) = args.segment_bytes {
        planner = planner.segments_of(ByteSize::new(limit));
    }
    let plan = planner.plan(&problem)?;
    let seconds = (clock.now() - started).as_secs_f64();
    drop(planner);

    println!();
    println!("{:20}{}", "lowtide", beside(plan.peak(), bound));
    for heuristic in Heuristic::ALL {
        println!("{:20}{}", heuristic.name(), beside(problem.plan_by(heuristic)?.peak(), bound));
    }
    if plan.segments().len() > 1 {
        println!("{} segments; the other planners use one", plan.segments().len());
    }
    println!("{}", verdict(&plan));
    if let Some(path) = &args.svg {
        let title = args.path.file_name().unwrap_or_default().to_string_lossy();
        fs::write(path, drawing::drawn(&title, &problem, &plan)?)
            .map_err(|error| format!("{}: {error}", path.display()))?;
        println!("drawing written to {}", path.display());
    }
    figures(&args.path, &problem, &plan, seconds)?;
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

/// The lines that the bench ends in.
fn figures(
    path: &Path,
    problem: &Problem,
    plan: &Plan,
    seconds: f64,
) -> Result<(), Box<dyn Error>> {
    let name = path.file_stem().unwrap_or_default().to_string_lossy().replace(' ', "_");
    let bound = problem.lower_bound()?;
    println!("figure plan.{name}.seconds {seconds:.4} s");
    println!("figure plan.{name}.peak {} bytes", plan.peak().get());
    println!("figure plan.{name}.bound {} bytes", plan.bound().get());
    println!("figure plan.{name}.peak_per_bound {:.4} ratio", ratio(plan.peak(), bound));
    println!("figure plan.{name}.proven {} of 1", u8::from(plan.is_optimal()));
    for heuristic in Heuristic::ALL {
        let theirs = ratio(problem.plan_by(heuristic)?.peak(), bound);
        println!("figure plan.{name}.peer.{}.peak_per_bound {theirs:.4} ratio", heuristic.name());
    }
    Ok(())
}
