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

use crate::incidents::{INCIDENTS, Incident, LOGGED};

lowtide::global_allocator!(balanced, prof: true, lg_prof_sample: 19);

/// The incidents that the log must name: those of [`LOGGED`], an eviction and rejections.
const NAMED_IN_LOG: usize = LOGGED.len() + 2;
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
        if name == "deployed" {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
            return runtime.block_on(incidents::deployed()).map(|()| true);
        }
        let all = || INCIDENTS.iter().chain(LOGGED);
        let known = || all().map(|one| one.name).collect::<Vec<_>>().join(", ");
        let found = all().find(|one| one.name == name);
        let incident = found.ok_or_else(|| format!("{name:?}: expected one of {}", known()))?;
        return stage(incident).map(|()| true);
    }
    let (mut answered, mut logged) = (0, 0);
    for (nth, incident) in INCIDENTS.iter().chain(LOGGED).enumerate() {
        let begin = Instant::now();
        let child = common::own()?.args(["--only", incident.name]).output()?;
        let text = String::from_utf8_lossy(&child.stdout);
        print!("{text}");
        let in_time = begin.elapsed() <= MINUTE;
        let is_answered = child.status.success() && in_time;
        answered += usize::from(is_answered && nth < INCIDENTS.len());
        logged += usize::from(text.contains("\nlog: "));
        if !is_answered {
            let error = String::from_utf8_lossy(&child.stderr);
            println!("{}: not answered (in time: {in_time}): {error}", incident.name);
        }
    }
    let all = INCIDENTS.len();
    println!("figure questions.staged_answered {answered} questions");
    println!("figure questions.logs.named {logged} incidents");
    println!("of {all} questions and {NAMED_IN_LOG} incidents of the log");
    Ok(answered == all && logged == NAMED_IN_LOG)
}

fn stage(incident: &Incident) -> Result<(), BoxError> {
    println!("question: {}", incident.question);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let answer = runtime.block_on((incident.stage)())?;
    println!("answer: {}", answer.text);
    if let Some(line) = answer.log {
        println!("log: {line}");
    }
    Ok(())
}
