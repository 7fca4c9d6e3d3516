//! What the flight recorder costs: its thread in a service under steady load, and its memory.
//!
//! Exit codes: 0 every goal held; 1 one was missed, or something could not be measured.
#![expect(clippy::print_stdout, clippy::print_stderr, reason = "a program that prints figures")]
#![expect(clippy::disallowed_methods, reason = "it measures real time")]
#![expect(unsafe_code, reason = "an allocator that counts, and the name of a thread")]

#[path = "../common/mod.rs"]
#[allow(dead_code, reason = "other benches use more of it")]
mod common;
#[path = "../common/counting.rs"]
mod counting;
mod recorder;

use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Parser, ValueEnum};
use lowtide::BoxError;

use crate::counting::Counting;

#[global_allocator]
static ALLOCATOR: Counting = Counting(recorder::note_allocation);

/// A process that this program starts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Role {
    /// A service under steady load.
    Serve,
    /// A service without load.
    Idle,
}

#[derive(Clone, Debug, Parser)]
#[command(about = "What the flight recorder costs")]
struct Cli {
    /// Be this process.
    #[arg(long, hide = true)]
    be: Option<Role>,
    /// The recording.
    #[arg(long, hide = true)]
    recording: Option<PathBuf>,
    /// Judges no time.
    #[arg(long)]
    counted: bool,
}

fn main() -> ExitCode {
    common::main(|cli: Cli| run(&cli))
}

/// Returns whether every goal held.
fn run(cli: &Cli) -> Result<bool, BoxError> {
    let recording = cli.recording.as_deref();
    match cli.be {
        Some(Role::Serve) => recorder::serve(recording.ok_or("no recording")?)?,
        Some(Role::Idle) => recorder::idle(recording)?,
        None => return recorder::measure(cli.counted),
    }
    Ok(true)
}
