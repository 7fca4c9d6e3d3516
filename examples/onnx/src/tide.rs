//! The tide of a real model: the memory of two processes at each stage, side by side. Both run the
//! proxy with the same model and the same burst of requests, one with lowtide and one without.
//!
//! Each process measures itself and prints the results as JSON; the program that the user starts
//! reads them and prints a table. It checks no limits.
#![expect(clippy::disallowed_methods, reason = "it measures real time")]
#![expect(clippy::print_stdout, clippy::print_stderr, reason = "a program that shows something")]

use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use clap::Parser;
use lowtide::admission::Signals;
use lowtide::{BoxError, ByteSize, Memory};
use serde::{Deserialize, Serialize};

use crate::app::{self, Options};
use crate::load::{self, Burst, Corpus};
use crate::model::Settings;

const START: Duration = Duration::from_secs(1);
const BURST: Duration = Duration::from_secs(8);
/// The time after the burst at which the model is still loaded.
const IDLE: Duration = Duration::from_secs(6);
/// The time without a request before lowtide unloads the model.
const IDLE_UNLOAD: Duration = Duration::from_secs(8);
/// From the end of the idle stage: the unload is due after 2 s.
const UNLOADED: Duration = Duration::from_secs(6);
/// The sampling interval.
const LOOK_EVERY: Duration = Duration::from_millis(50);
/// The program without lowtide, in the same folder.
const WITHOUT: &str = "tide-onnx-glibc";

#[derive(Clone, Debug, Parser)]
#[command(about = "Watch the memory of a service with a model, with lowtide and without")]
struct Cli {
    #[command(flatten)]
    model: Settings,
    /// Connections at once. Each sends its next request after the answer to the last one.
    #[arg(long, default_value_t = 8)]
    connections: usize,
    /// Seed of the texts.
    #[arg(long, default_value_t = 7)]
    seed: u64,
    /// Run the service and print its results as JSON.
    #[arg(long, hide = true)]
    record: bool,
}

/// The results of a run. Memory is anonymous and shared memory of the process, in bytes.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
struct Run {
    start: u64,
    peak: u64,
    idle: u64,
    unloaded: u64,
    /// Answers with a 2xx status.
    ok: u64,
    /// Rejections (503), other statuses, and failed connections.
    other: u64,
    /// Median latency in milliseconds.
    median: f64,
}

/// Runs both services, one after the other, and compares their memory.
pub fn show() -> ExitCode {
    let cli = Cli::parse();
    exit_code(if cli.record { record(&cli, true) } else { compare(&cli) })
}

/// Runs the service without lowtide and prints its results.
pub fn record_without_lowtide() -> ExitCode {
    exit_code(record(&Cli::parse(), false))
}

fn exit_code(done: Result<(), BoxError>) -> ExitCode {
    let Err(error) = done else { return ExitCode::SUCCESS };
    eprintln!("tide-onnx: {error}");
    ExitCode::FAILURE
}

fn compare(cli: &Cli) -> Result<(), BoxError> {
    let with = std::env::current_exe()?;
    let without = with.with_file_name(WITHOUT);
    let seconds = (START + BURST + IDLE + UNLOADED).as_secs();
    let (model, connections) = (cli.model.model.display(), cli.connections);
    println!("{model}, {connections} connections; each run takes {seconds} s");
    println!("running with lowtide");
    let with = recorded(&with)?;
    println!("running without lowtide: glibc, and ONNX Runtime's defaults\n");
    print_table(with, recorded(&without)?);
    Ok(())
}

/// Runs a program with the same arguments, and reads the results that it prints.
fn recorded(program: &Path) -> Result<Run, BoxError> {
    let name = program.display();
    let mut command = Command::new(program);
    command.args(std::env::args_os().skip(1)).arg("--record").stderr(Stdio::inherit());
    let output = command.output().map_err(|error| {
        format!("cannot start {name}: {error}: expected {WITHOUT} in the folder of tide-onnx")
    })?;
    if !output.status.success() {
        return Err(format!("{name}: {}", output.status).into());
    }
    Ok(serde_json::from_slice(&output.stdout)?)
}

/// Runs the service in this process and prints its results.
fn record(cli: &Cli, with_lowtide: bool) -> Result<(), BoxError> {
    let home = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../..");
    let corpus = Corpus::read(&["README.md", "docs"].map(|part| home.join(part)))?;
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    runtime.block_on(async {
        let memory = if with_lowtide { Some(Memory::start()?) } else { None };
        let options = Options {
            model: cli.model.clone(),
            idle_unload: Some(IDLE_UNLOAD),
            ..Options::default()
        };
        let running = app::start(options, memory.clone(), String::new).await?;
        let burst = Burst {
            lasts: BURST,
            connections: cli.connections,
            text_bytes: 0,
            embed_every: Some(1),
            seed: cli.seed,
        };
        let (signals, never) = (Signals::open(), AtomicBool::new(false));
        let (start, _) = watch(&signals, START, &never).await?;
        let ended = Arc::new(AtomicBool::new(false));
        let load = tokio::spawn({
            let (to, ended) = (running.address, Arc::clone(&ended));
            async move {
                let tally = load::run(to, &corpus, burst).await;
                ended.store(true, Ordering::Release);
                tally
            }
        });
        let (_, peak) = watch(&signals, BURST * 4, &ended).await?;
        // Waits for the requests in flight, but not forever.
        let tally = tokio::time::timeout(BURST, load).await??;
        let (idle, _) = watch(&signals, IDLE, &never).await?;
        let (unloaded, _) = watch(&signals, UNLOADED, &never).await?;
        let other = tally.shed + tally.other.values().sum::<u64>();
        let (ok, median) = (tally.ok, tally.quantile(0.5));
        let run = Run { start, peak, idle, unloaded, ok, other, median };
        println!("{}", serde_json::to_string(&run)?);
        for (what, count) in &tally.other {
            eprintln!("{count} failed requests: {what}");
        }
        running.stop(Duration::from_secs(2)).await;
        if let Some(memory) = memory {
            memory.shutdown(Duration::from_secs(2)).await;
        }
        Ok(())
    })
}

/// Watches the memory until `ended` or the time is up. Returns the last amount and the highest.
async fn watch(
    signals: &Signals,
    time: Duration,
    ended: &AtomicBool,
) -> Result<(u64, u64), BoxError> {
    let end = Instant::now() + time;
    let (mut last, mut peak) = (0, 0);
    while !ended.load(Ordering::Acquire) && Instant::now() < end {
        tokio::time::sleep(LOOK_EVERY).await;
        let pages = signals.resident().ok_or("cannot read /proc/self/status")?;
        last = pages.anon.saturating_add(pages.shmem).get();
        peak = last.max(peak);
    }
    Ok((last, peak))
}

/// Prints the memory at the end of each stage, and the answers.
fn print_table(with: Run, without: Run) {
    let row = |name: &str, of: &dyn Fn(Run) -> String| {
        println!("{name:<38}{:>14}{:>18}", of(with), of(without));
    };
    println!("{:<38}{:>14}{:>18}", "", "with lowtide", "without lowtide");
    let mib = |bytes: u64| ByteSize::new(bytes).to_string();
    row("before the first request", &|run| mib(run.start));
    row("peak of the burst", &|run| mib(run.peak));
    row(&format!("{} s after the burst", IDLE.as_secs()), &|run| mib(run.idle));
    let [unload, end] = [IDLE_UNLOAD, IDLE + UNLOADED].map(|time| time.as_secs());
    row(&format!("{end} s after it (unload after {unload} s)"), &|run| mib(run.unloaded));
    row("successful requests", &|run| run.ok.to_string());
    row("rejected or failed requests", &|run| run.other.to_string());
    row("median time of a request", &|run| format!("{:.0} ms", run.median));
}
