//! Replay: what recorded allocations of model code need of the device, in our arena and in peers.
//!
//! Each trace goes through the public API of an arena over the host driver, with idle memory given
//! back at once, with the default decay, and with ever smaller limits; then through the peers. It
//! prints the most that each took from the device for the most that was live. Peaks do not depend
//! on the machine; times do.
//!
//! Exit codes: 0 every goal held; 1 one was missed, or a trace could not be replayed; 2 a file is
//! no trace.
#![expect(clippy::print_stdout, clippy::print_stderr, reason = "a program that shows something")]
#![expect(clippy::disallowed_methods, reason = "it measures real time")]

mod ours;
#[path = "../peers/mod.rs"]
#[allow(dead_code, reason = "another bench uses more of them")]
mod peers;
mod rivals;
mod table;
mod trace;

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::Parser;

use crate::table::Row;
use crate::trace::Trace;

/// The project's own traces.
const OWN: [&str; 5] =
    ["bert-embed", "gpt2-generate", "llama-generate", "vit-images", "gpt2-train"];

#[derive(Clone, Debug, Parser)]
#[command(about = "What recorded allocations of model code need of the device")]
struct Cli {
    /// Recordings to replay in place of the project's own traces: JSON lines, plain or compressed
    /// with gzip.
    files: Vec<PathBuf>,
    /// Cargo says this when benches are asked for.
    #[arg(long, hide = true)]
    bench: bool,
}

fn main() -> ExitCode {
    // Cargo's tests start benches too, without that word and with arguments of their own.
    if !std::env::args().any(|argument| argument == "--bench") {
        println!("replay: a bench of seconds, not a test: run `cargo bench --bench replay`");
        return ExitCode::SUCCESS;
    }
    let Cli { mut files, .. } = Cli::parse();
    let own = files.is_empty();
    if own {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("traces");
        files = OWN.iter().map(|name| folder.join(format!("{name}.jsonl.gz"))).collect();
    }
    let traces = match open(&files) {
        Ok(traces) => traces,
        Err(error) => {
            eprintln!("replay: {error}");
            return ExitCode::from(2);
        }
    };
    let mut rows = Vec::new();
    for trace in traces {
        match ours::measure(&trace) {
            Ok(ours) => rows.push(Row { peers: rivals::needs(&trace), ours, trace }),
            Err(error) => {
                eprintln!("replay: {}: {error}", trace.name);
                return ExitCode::FAILURE;
            }
        }
    }
    if table::print(&rows, own) { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// Reads all files, or says what is wrong with one; no two may be called the same.
fn open(files: &[PathBuf]) -> Result<Vec<Trace>, String> {
    let mut traces: Vec<Trace> = Vec::new();
    for file in files {
        let trace = Trace::open(file).map_err(|error| error.to_string())?;
        if traces.iter().any(|other| other.name == trace.name) {
            return Err(format!(
                "{}: expected a new name: {} is there",
                file.display(),
                trace.name
            ));
        }
        traces.push(trace);
    }
    Ok(traces)
}
