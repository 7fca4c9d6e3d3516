//! The orders that a process under measurement receives, and its reports to the driver.
//!
//! One line when the traffic begins, one with figures when it ends; then it waits until its
//! standard input ends, so that none outlives the driver. Invariant: between its two lines it says
//! nothing.

use std::io::{Read as _, Write as _};

use clap::Parser;

use crate::burst::{self, Kind, Size};
use crate::{Allocator, BoxError};

/// The command line of such a process.
#[derive(Clone, Debug, Parser)]
pub struct Cli {
    /// The kind of requests.
    kind: Kind,
    /// Threads.
    threads: usize,
    /// Operations of a thread in each phase.
    operations: usize,
    /// Requests that a thread holds in quiet times.
    held: usize,
    /// The variant of the allocator, if it has several.
    #[arg(default_value = "")]
    pub way: String,
}

/// Does what it was told: a burst of requests, then rest.
///
/// # Errors
/// Whatever goes wrong.
pub fn run(cli: &Cli, allocator: &dyn Allocator) -> Result<(), BoxError> {
    say("traffic")?;
    let Cli { kind, threads, operations, held, .. } = *cli;
    burst::play(Size { threads, operations, held, kind }, allocator, |outcome| {
        let us = |part| outcome.latency.percentile(part) / 1e3;
        let (p50, p95, p99, p999) = (us(0.5), us(0.95), us(0.99), us(0.999));
        let (operations, live) = (outcome.operations, outcome.live);
        say(&format!(
            "idle operations={operations} live={live} p50={p50} p95={p95} p99={p99} p999={p999}"
        ))?;
        wait_for_end()
    })
}

/// A line for the driver, at once.
///
/// # Errors
/// Where the driver is gone.
pub fn say(line: &str) -> Result<(), BoxError> {
    let mut out = std::io::stdout().lock();
    writeln!(out, "{line}")?;
    Ok(out.flush()?)
}

/// Waits until the standard input ends.
///
/// # Errors
/// Where it cannot be read.
pub fn wait_for_end() -> Result<(), BoxError> {
    let mut byte = [0; 1];
    while std::io::stdin().read(&mut byte)? > 0 {}
    Ok(())
}
