//! Figures of known faults. Each part stages one fault and counts what goes
//! wrong.
//!
//! `cargo bench --bench faults` runs every part, each in a process of its own, since a process has
//! one heap and one `Memory`. `cargo bench --bench faults -- NAME` runs one part. With `--ci`, the
//! part that takes minutes runs less often.
//!
//! Exit codes: 0 if every goal holds, 1 if one does not.
#![expect(clippy::print_stdout, clippy::print_stderr, reason = "a program that prints figures")]

mod admission;
#[path = "../common/mod.rs"]
#[allow(dead_code, reason = "other benches use more of it")]
mod common;
mod device;
mod log;
#[path = "../proxy/mod.rs"]
mod proxy;
mod service;

use std::process::ExitCode;

use clap::Parser;
use lowtide::BoxError;

use crate::common::figures::Figures;

lowtide::global_allocator!(balanced);

/// Stages a fault and adds its figures.
type Part = fn(&Cli, &mut Figures) -> Result<(), BoxError>;

/// The parts, in the order in which they run.
const PARTS: &[(&str, Part)] = &[
    ("capture", |_, figures| device::capture(figures)),
    ("health", |_, figures| admission::health(figures)),
    ("log", |_, figures| log::run(figures)),
    ("pinned", |_, figures| device::pinned(figures)),
    ("readme", service::readme),
    ("runaway", service::runaway),
    ("swap", |_, figures| admission::swap(figures)),
];

#[derive(Clone, Debug, Parser)]
#[command(about = "Known faults, reproduced")]
struct Cli {
    /// Runs this part alone.
    part: Option<String>,
    /// Runs the parts that take minutes less often.
    #[arg(long)]
    ci: bool,
    /// Is the service of the part.
    #[arg(long, hide = true)]
    serve: bool,
}

fn main() -> ExitCode {
    common::main(|cli: Cli| match &cli.part {
        None => run_all(cli.ci),
        Some(name) => {
            let names: Vec<_> = PARTS.iter().map(|(name, _)| *name).collect();
            let part = PARTS.iter().find(|(known, _)| known == name);
            let unknown = || format!("unknown part {name:?}, expected one of {names:?}");
            let mut figures = Figures::default();
            part.ok_or_else(unknown)?.1(&cli, &mut figures)?;
            Ok(figures.print())
        }
    })
}

/// Runs every part in a process of its own, also after one that failed.
fn run_all(is_sample: bool) -> Result<bool, BoxError> {
    let mut failed = Vec::new();
    for (name, _) in PARTS {
        println!("{name}:");
        let mut part = common::own()?;
        part.arg(name).args(is_sample.then_some("--ci"));
        if !part.status()?.success() {
            failed.push(*name);
        }
    }
    if failed.is_empty() { Ok(true) } else { Err(format!("missed goals: {failed:?}").into()) }
}
