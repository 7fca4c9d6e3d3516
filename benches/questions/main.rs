//! An operator's questions: whether incidents are answered, what a killed service leaves, and what
//! the heap profiler costs.
//!
//! `cargo bench -p lowtide-benches --features profiling --bench questions -- answers`, or `killed`,
//! or `profiler`.
//!
//! Exit codes: 0 every goal held; 1 one was missed, or something could not be measured.
#![expect(clippy::print_stdout, reason = "a program that prints figures")]
#![expect(clippy::disallowed_methods, reason = "it runs in real time")]

mod answers;
mod killed;
mod profiler;

use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Parser, Subcommand};
use common::callgrind::Counted;

// The interval of the image's build: 2^23 bytes are 8 MiB.
lowtide::global_allocator!(balanced, prof: true, lg_prof_sample: 23);

/// An operator's questions.
#[derive(Debug, Parser)]
struct Cli {
    #[command(subcommand)]
    part: Option<Part>,
    #[command(flatten)]
    counted: Counted,
}

#[derive(Debug, Subcommand)]
enum Part {
    /// Whether incidents are answered by what an operator sees.
    Answers {
        /// Stages this incident in this process.
        #[arg(long)]
        only: Option<String>,
    },
    /// What a killed service leaves: the cause, and the function that grew.
    Killed,
    /// What the heap profiler costs.
    Profiler,
    /// Is the service that grows.
    #[command(hide = true)]
    Grow { site: usize, mib_per_second: u64, folder: PathBuf },
    /// Is the next start: prints the cause in the first line and the summary in the second.
    #[command(hide = true)]
    Tell { folder: PathBuf },
}

fn main() -> ExitCode {
    common::main(|cli: Cli| {
        match cli.part {
            Some(Part::Answers { only }) => return answers::run(only.as_deref()),
            Some(Part::Killed) => return killed::measure(),
            Some(Part::Profiler) => return profiler::measure(),
            Some(Part::Grow { site, mib_per_second, folder }) => {
                killed::grow(site, mib_per_second, &folder)?;
            }
            Some(Part::Tell { folder }) => killed::tell(&folder)?,
            None => profiler::be(cli.counted.be.as_deref().unwrap_or_default(), cli.counted.steps)?,
        }
        Ok(true)
    })
}
