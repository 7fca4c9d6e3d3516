//! The flight recorder: whether it tells why a service was killed, and what it costs.
//!
//! `--only killed` grows services until the kernel kills them, from several call sites, slowly and
//! fast, and asks the next start for the cause. `--only recorder` measures the recorder's thread in
//! a service under steady load. Without a memory cgroup this process kills them when their memory
//! passes the limit.
//!
//! Exit codes: 0 every goal held; 1 one was missed, or something could not be measured.
#![expect(clippy::print_stdout, clippy::print_stderr, reason = "a program that prints figures")]
#![expect(clippy::disallowed_methods, reason = "it measures real time")]
#![expect(unsafe_code, reason = "an allocator that counts")]

#[path = "../../examples/tide/cgroup.rs"]
#[allow(dead_code, reason = "the tide enters its cgroup itself")]
mod cgroup;
mod counting;
mod killed;
mod recorder;

use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Parser, ValueEnum};
use lowtide::BoxError;

use crate::counting::Counting;
use crate::killed::Growth;

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// A part of the bench.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Part {
    /// Services that the kernel kills.
    Killed,
    /// What the recorder costs.
    Recorder,
}

/// A process that this program starts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Role {
    /// A service that grows until it is killed.
    Grow,
    /// The next start, which prints what the recording tells.
    Tell,
    /// A service under steady load.
    Serve,
    /// A service without load.
    Idle,
}

#[derive(Clone, Debug, Parser)]
#[command(about = "Whether the flight recorder tells why a service was killed, and what it costs")]
struct Cli {
    /// Measure this part alone.
    #[arg(long)]
    only: Option<Part>,
    /// Be this process.
    #[arg(long, hide = true)]
    be: Option<Role>,
    /// The call site that grows.
    #[arg(long, hide = true, default_value = "blocks")]
    growth: Growth,
    /// The bytes by which that grows in a second; 0 for as fast as it can.
    #[arg(long, hide = true, default_value_t = 0)]
    rate: u32,
    /// The recording.
    #[arg(long, hide = true)]
    recording: Option<PathBuf>,
    /// Cargo says this when benches are asked for.
    #[arg(long, hide = true)]
    bench: bool,
}

fn main() -> ExitCode {
    // Cargo's tests start benches too, without that word and with arguments of their own.
    if !std::env::args().any(|argument| argument == "--bench" || argument == "--be") {
        println!("flight: a bench of three minutes, not a test: run `cargo bench --bench flight`");
        return ExitCode::SUCCESS;
    }
    match run(&Cli::parse()) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("flight: {error}");
            ExitCode::FAILURE
        }
    }
}

/// Returns whether every goal held.
fn run(cli: &Cli) -> Result<bool, BoxError> {
    if let Some(role) = cli.be {
        let recording = cli.recording.as_deref();
        let needed = recording.ok_or("no recording");
        match role {
            Role::Grow => killed::grow(needed?, cli.growth, cli.rate)?,
            Role::Tell => killed::tell(needed?)?,
            Role::Serve => recorder::serve(needed?)?,
            Role::Idle => recorder::idle(recording)?,
        }
        return Ok(true);
    }
    let mut holds = true;
    if cli.only != Some(Part::Recorder) {
        holds &= killed::measure()?;
    }
    if cli.only != Some(Part::Killed) {
        holds &= recorder::measure()?;
    }
    Ok(holds)
}
