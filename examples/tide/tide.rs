//! The tide: shows in one command how a real service's memory rises under load and falls again.
//!
//! It starts the proxy, drives HTTP load with real text through it, and prints the memory of heap
//! and device meanwhile; then it does the same with jemalloc's defaults, and runs a short burst at
//! an eighth of the limit. Each run is a process of its own, which nothing of another has warmed. It
//! ends with a table and the bounds that must hold, and fails if one does not. It takes at most 90
//! seconds.
#![expect(clippy::print_stdout, reason = "a program that shows something")]
#![expect(clippy::disallowed_methods, reason = "it measures real time")]

#[path = "../proxy/app.rs"]
#[allow(dead_code, reason = "the proxy itself uses more of it")]
mod app;
#[path = "../proxy/chance.rs"]
mod chance;
#[path = "../proxy/embed.rs"]
mod embed;
#[path = "../proxy/forward.rs"]
mod forward;
mod load;
#[path = "../proxy/model.rs"]
mod model;
mod report;
mod run;
#[path = "../proxy/upstream.rs"]
mod upstream;

use std::io::{BufRead as _, BufReader};
use std::process::{Command, Stdio};

use clap::Parser;
use lowtide::BoxError;

use crate::run::{CONNECTIONS, Kind, LIMIT, Outcome, TEXT_SIZE, WEIGHTS};

#[global_allocator]
static HEAP: lowtide::heap::Heap = lowtide::heap::Heap;

#[derive(Clone, Debug, Parser)]
#[command(about = "Watch a service's memory rise under load and go back down")]
struct Cli {
    /// Run only this, and print its outcome as a line of JSON.
    #[arg(long, hide = true)]
    only: Option<Kind>,
}

fn main() -> Result<(), BoxError> {
    match Cli::parse().only {
        Some(kind) => child(kind),
        None => parent(),
    }
}

/// Runs everything. Fails if a bound does not hold.
fn parent() -> Result<(), BoxError> {
    println!(
        "a proxy under load: {CONNECTIONS} connections, {TEXT_SIZE} of text each, a model of \
         {WEIGHTS},\nlimit {LIMIT}\n"
    );
    let managed = spawn(Kind::Managed)?;
    let twin = spawn(Kind::Defaults)?;
    let tight = spawn(Kind::Tight)?;
    print!("\n{}", report::table(&managed, &twin));
    load::must_hold(&report::bounds(&managed, &twin, &tight)?)
}

/// One run in this process, for a parent that reads its outcome.
fn child(kind: Kind) -> Result<(), BoxError> {
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    let outcome = runtime.block_on(run::run(kind))?;
    println!("{}", serde_json::to_string(&outcome)?);
    Ok(())
}

/// One run in a process of its own. Prints its lines, but for the outcome.
fn spawn(kind: Kind) -> Result<Outcome, BoxError> {
    let mut command = Command::new(std::env::current_exe()?);
    command.args(["--only", &format!("{kind:?}").to_lowercase()]);
    let mut child = command.stdout(Stdio::piped()).spawn()?;
    let mut outcome = None;
    for line in BufReader::new(child.stdout.take().ok_or("no pipe to the child")?).lines() {
        let line = line?;
        match serde_json::from_str(&line) {
            Ok(found) => outcome = Some(found),
            Err(_) => println!("{line}"),
        }
    }
    let status = child.wait()?;
    Ok(outcome.ok_or_else(|| format!("the run with {} ended with {status}", kind.title()))?)
}
