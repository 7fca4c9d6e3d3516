//! The orders that a process under measurement receives, and its reports to the driver.
//!
//! One line when the traffic begins, one with figures when it ends; then it waits until its
//! standard input ends, so that none outlives the driver. Invariant: between its two lines it says
//! nothing.

use std::io::{Read as _, Write as _};

use clap::{Parser, Subcommand};

use crate::workload::burst::{self, Kind, Size};
use crate::workload::{http, model};
use crate::{Allocator, BoxError, count};

/// The command line of such a process.
#[derive(Clone, Debug, Parser)]
pub struct Cli {
    /// The act that it runs.
    #[command(subcommand)]
    pub act: Act,
}

/// The acts of such a process.
#[derive(Clone, Debug, Subcommand)]
pub enum Act {
    /// A burst of requests, then rest.
    Burst {
        /// Threads.
        threads: usize,
        /// Operations of a thread in each phase.
        operations: usize,
        /// Requests that a thread holds in quiet times.
        held: usize,
        /// The variant of the allocator, if it has several.
        #[arg(default_value = "")]
        way: String,
    },
    /// A burst of documents of which none is left, then rest.
    Documents {
        /// Threads.
        threads: usize,
        /// Operations of a thread in each phase.
        operations: usize,
        /// Documents that a thread holds in quiet times.
        held: usize,
        /// The variant of the allocator, if it has several.
        #[arg(default_value = "")]
        way: String,
    },
    /// Answers HTTP requests until its standard input ends.
    Http {
        /// The variant of the run.
        #[arg(default_value = "")]
        way: String,
    },
    /// Loads a model beside busy neighbours, uses and unloads it.
    Unload {
        /// The size of the model in MiB.
        mib: u64,
        /// The variant of the run.
        way: String,
    },
    /// The same many times.
    Cycles {
        /// The size of the model in MiB.
        mib: u64,
        /// The number of repetitions.
        times: usize,
        /// The variant of the run.
        way: String,
    },
}

impl Act {
    /// Returns the variant of the run; empty if there is one alone.
    #[must_use]
    pub fn way(&self) -> &str {
        match self {
            Self::Burst { way, .. }
            | Self::Documents { way, .. }
            | Self::Http { way }
            | Self::Unload { way, .. }
            | Self::Cycles { way, .. } => way,
        }
    }
}

/// Does what it was told.
///
/// # Errors
/// Whatever goes wrong.
pub fn run(
    act: Act,
    allocator: &dyn Allocator,
    place: &mut dyn model::Place,
) -> Result<(), BoxError> {
    let kind = match act {
        Act::Documents { .. } => Kind::Document,
        _ => Kind::Mixed,
    };
    match act {
        Act::Burst { threads, operations, held, .. }
        | Act::Documents { threads, operations, held, .. } => {
            say("traffic")?;
            let size = Size { threads, operations, held, kind };
            burst::play(size, allocator, |outcome| {
                let us = |part| outcome.latency.percentile(part) / 1e3;
                let (p50, p95, p99, p999) = (us(0.5), us(0.95), us(0.99), us(0.999));
                let (operations, live) = (outcome.operations, outcome.live);
                say(&format!(
                    "idle operations={operations} live={live} p50={p50} p95={p95} p99={p99} \
                     p999={p999}"
                ))?;
                wait_for_end()
            })
        }
        Act::Http { .. } => http::serve(allocator),
        Act::Unload { mib, .. } => {
            let outcome = model::unload(mib, allocator, place)?;
            let model::Unloaded { base, loaded, after, again } = outcome;
            say(&format!("unload base={base} loaded={loaded} after={after} again={again}"))
        }
        Act::Cycles { mib, times, .. } => {
            let outcome = model::cycles(mib, times, allocator, place)?;
            say(&format!(
                "cycles slope={} descriptors={} threads={} arenas={}",
                outcome.slope, outcome.descriptors, outcome.threads, outcome.arenas
            ))
        }
    }
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

/// The slope of a line through these values, by least squares, for each step.
#[must_use]
pub fn slope(values: &[f64]) -> f64 {
    let n = count(values.len() as u64);
    let middle = (n - 1.0) / 2.0;
    let mean = values.iter().sum::<f64>() / n;
    let (mut above, mut below) = (0.0, 0.0);
    for (at, value) in values.iter().enumerate() {
        let x = count(at as u64) - middle;
        above += x * (value - mean);
        below += x * x;
    }
    if below > 0.0 { above / below } else { 0.0 }
}
