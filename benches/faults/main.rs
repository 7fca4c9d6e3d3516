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
#[path = "../../examples/tide/cgroup.rs"]
#[allow(dead_code, reason = "the tide enters its cgroup itself")]
mod cgroup;
mod child;
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

use std::process::{Command, ExitCode};

use lowtide::BoxError;

lowtide::global_allocator!(balanced);

/// Stages a fault, prints its `figure NAME VALUE UNIT` lines, and fails if a goal does not hold.
type Part = fn() -> Result<(), BoxError>;

/// The parts, in the order in which they run.
const PARTS: &[(&str, Part)] = &[
    ("capture", capture::run),
    ("dropped", dropped::run),
    ("health", health::run),
    ("log", log::run),
    #[cfg(target_os = "linux")]
    ("pinned", pinned::run),
    ("readme", readme::run),
    ("runaway", runaway::run),
    ("swap", swap::run),
];

/// The argument that asks for a sample.
const SAMPLE: &str = "--ci";

fn main() -> ExitCode {
    // Cargo passes `--bench`.
    let name = std::env::args().skip(1).find(|argument| !argument.starts_with('-'));
    let result = match name {
        None => run_all(),
        Some(name) => run_one(&name),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run_one(name: &str) -> Result<(), BoxError> {
    let names: Vec<_> = PARTS.iter().map(|(name, _)| *name).collect();
    let part = PARTS.iter().find(|(known, _)| *known == name);
    let (_, run) =
        part.ok_or_else(|| format!("unknown part {name:?}, expected one of {names:?}"))?;
    run()
}

/// Returns `true` if [`SAMPLE`] is among the arguments.
fn is_sample() -> bool {
    std::env::args().any(|argument| argument == SAMPLE)
}

/// Runs every part, also after one that failed.
fn run_all() -> Result<(), BoxError> {
    let program = std::env::current_exe()?;
    let mut failed = Vec::new();
    for (name, _) in PARTS {
        println!("{name}:");
        let mut part = Command::new(&program);
        part.arg(name).args(is_sample().then_some(SAMPLE));
        if !part.status()?.success() {
            failed.push(*name);
        }
    }
    if failed.is_empty() { Ok(()) } else { Err(format!("missed goals: {failed:?}").into()) }
}
