//! Stages incidents, and reads the answer where an operator reads it: in `/memory`, `/metrics` and
//! the log.
//!
//! Each incident runs in a process of its own (`--only NAME` runs one), with the real heap, and is
//! answered if the texts that an operator sees name the cause. The eighth question, who holds a
//! GPU, needs a driver: `cargo xtask figures questions` stages it with the tests of the fake
//! driver.
//!
//! Exit codes: 0 every question was answered; 1 one was not.
#![expect(clippy::print_stdout, reason = "a program that prints figures")]
#![expect(clippy::disallowed_methods, reason = "it runs in real time")]

#[path = "../common/mod.rs"]
#[allow(dead_code, reason = "other benches use more of it")]
mod common;
mod incidents;

use std::process::ExitCode;
use std::time::{Duration, Instant};

use clap::Parser;
use lowtide::BoxError;

use crate::common::figures::{Figures, count};
use crate::incidents::{INCIDENTS, LOGGED};

lowtide::global_allocator!(balanced, prof: true, lg_prof_sample: 19);

/// The incidents that the log must name: those of [`LOGGED`], an eviction and rejections.
const NAMED_IN_LOG: f64 = 6.0;
/// The time within which an answer must be found.
const MINUTE: Duration = Duration::from_secs(60);

#[derive(Debug, Parser)]
#[command(about = "Whether incidents are answered by what an operator sees")]
struct Cli {
    /// Stages this incident in this process.
    #[arg(long)]
    only: Option<String>,
}

fn main() -> ExitCode {
    common::main(|cli: Cli| run(cli.only.as_deref()))
}

fn run(only: Option<&str>) -> Result<bool, BoxError> {
    if let Some(name) = only {
        let (text, line) = incidents::stage(name)?;
        println!("answer: {text}");
        line.inspect(|line| println!("log: {line}"));
        return Ok(true);
    }
    let (mut answered, mut logged) = (0.0, 0.0);
    for (nth, (name, question)) in INCIDENTS.into_iter().chain(LOGGED).enumerate() {
        let begin = Instant::now();
        let child = common::own()?.args(["--only", name]).output()?;
        let text = String::from_utf8_lossy(&child.stdout);
        println!("question: {question}\n{text}");
        let in_time = begin.elapsed() <= MINUTE;
        if !child.status.success() || !in_time {
            let error = String::from_utf8_lossy(&child.stderr);
            println!("{name}: not answered (in time: {in_time}): {error}");
        } else if nth < INCIDENTS.len() {
            answered += 1.0;
        }
        logged += f64::from(u8::from(text.contains("\nlog: ")));
    }
    let (all, mut figures) = (count(INCIDENTS.len() as u64), Figures::default());
    figures.at_least("questions.staged_answered", answered, "questions", all);
    figures.at_least("questions.logs.named", logged, "incidents", NAMED_IN_LOG);
    Ok(figures.print())
}
