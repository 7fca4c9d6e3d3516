//! Figures of an arena on a GPU that need no GPU: driver calls, bytes and their order over the
//! simulation, instructions, and ratios of times in one run.
//!
//! `--part NAME` measures one part; without it, all. A figure with a goal prints whether it holds.
//!
//! Exit codes: 0 every goal held; 1 one was missed, or a part failed.
#![expect(clippy::print_stdout, clippy::print_stderr, reason = "a program that shows something")]

#[path = "../common/mod.rs"]
#[allow(dead_code, reason = "other benches use more of it")]
mod common;
mod compact;
mod device_schedules;
mod devices;
mod pairs;
#[path = "../replay/trace.rs"]
#[allow(dead_code, reason = "others use more of it")]
mod recorded;
mod stores;
mod torture;
mod trace;
mod wake;

use std::process::ExitCode;

use clap::Parser;
use lowtide::BoxError;

use crate::common::figures::Figures;

type Measure = fn(&mut Figures) -> Result<(), BoxError>;

/// The parts, in the order in which they run.
const PARTS: &[(&str, Measure)] = &[
    ("binary", torture::binary),
    ("compact", compact::measure),
    ("devices", devices::measure),
    ("killed", torture::killed),
    ("leases", stores::leases),
    ("pairs", pairs::pairs),
    ("stores", stores::measure),
    ("torture", torture::measure),
    ("trace", trace::measure),
    ("views", pairs::views),
    ("wake", wake::measure),
];

#[derive(Clone, Debug, Parser)]
#[command(about = "Figures of an arena on a GPU, over the simulation")]
struct Cli {
    /// Measures only this part; may be repeated.
    #[arg(long, value_name = "NAME", value_parser = part_names())]
    part: Vec<String>,
}

fn part_names() -> Vec<&'static str> {
    PARTS.iter().map(|(name, _)| *name).collect()
}

fn main() -> ExitCode {
    if let Some(code) = torture::child() {
        return code;
    }
    common::main(|cli: Cli| {
        let is_wanted =
            |name: &str| cli.part.is_empty() || cli.part.iter().any(|part| part == name);
        let mut all_held = true;
        for (name, measure) in PARTS.iter().filter(|(name, _)| is_wanted(name)) {
            let mut figures = Figures::default();
            if let Err(error) = measure(&mut figures) {
                eprintln!("{name}: {error}");
                all_held = false;
            }
            all_held &= figures.print();
        }
        Ok(all_held)
    })
}
