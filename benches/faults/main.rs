//! Figures of known faults. Each part stages one fault and counts what goes
//! wrong.
//!
//! `cargo bench --bench faults` runs every part, each in a process of its own, since a process has
//! one heap and one `Memory`. `cargo bench --bench faults -- NAME` runs one part. With `--ci`, the
//! part that takes minutes runs less often.
//!
//! Exit codes: 0 if every goal holds, 1 if one does not.
#![expect(clippy::print_stdout, clippy::print_stderr, reason = "a program that prints figures")]

mod capture;
#[path = "../common/mod.rs"]
#[allow(dead_code, reason = "other benches use more of it")]
mod common;
mod dropped;
mod health;
mod log;
#[cfg(target_os = "linux")]
mod pinned;
#[path = "../proxy/mod.rs"]
mod proxy;
mod readme;
mod runaway;
#[path = "../../tests/support/mod.rs"]
mod support;
mod swap;

use std::net::SocketAddr;
use std::process::ExitCode;

use clap::Parser;
use lowtide::{BoxError, ByteSize};
use tokio::runtime::Runtime;

use crate::common::process::{self, Process};

lowtide::global_allocator!(balanced);

/// Stages a fault, prints its `figure NAME VALUE UNIT` lines, and fails if a goal does not hold.
type Part = fn(&Cli) -> Result<(), BoxError>;

/// The parts, in the order in which they run.
const PARTS: &[(&str, Part)] = &[
    ("capture", |_| capture::run()),
    ("dropped", |_| dropped::run()),
    ("health", |_| health::run()),
    ("log", |_| log::run()),
    #[cfg(target_os = "linux")]
    ("pinned", |_| pinned::run()),
    ("readme", readme::run),
    ("runaway", runaway::run),
    ("swap", |_| swap::run()),
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
            let (_, run) = part.ok_or_else(unknown)?;
            run(&cli).map(|()| true)
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

/// Starts this program as the service of a part, in a memory cgroup, and waits until it prints its
/// address.
fn start(part: &str) -> Result<(Process, SocketAddr), BoxError> {
    let mut command = common::own()?;
    command.args([part, "--serve"]);
    let mut service = Process::start_in_group(&command, ByteSize::mib(256))?;
    let address = service.first_line()?;
    Ok((service, address))
}

/// Runs a part: as its service if this process is to be that, else as its clients, if a memory
/// cgroup can be made here.
fn stage(
    cli: &Cli,
    serve: fn() -> Result<(), BoxError>,
    measure: fn(&Runtime, bool) -> Result<(), BoxError>,
) -> Result<(), BoxError> {
    if cli.serve {
        return serve();
    }
    if let Err(reason) = process::group(ByteSize::mib(256)) {
        println!("skipped: {reason}");
        return Ok(());
    }
    measure(&tokio::runtime::Builder::new_multi_thread().enable_all().build()?, cli.ci)
}
