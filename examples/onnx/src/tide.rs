//! The tide of a real model: the memory of two processes over time, side by side. Both run the
//! proxy with the same model and the same burst of requests, one with lowtide and one without.
//!
//! Each process records itself and prints its samples as lines of JSON; the program that the user
//! starts reads them and draws. It checks no limits.
#![expect(clippy::disallowed_methods, reason = "it measures real time")]
#![expect(clippy::print_stdout, clippy::print_stderr, reason = "a program that shows something")]

use std::fmt::Write as _;
use std::io::{BufRead as _, BufReader};
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
use crate::load::{self, Answered, Burst, Corpus};
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
/// Characters in a full bar.
const BAR: usize = 24;
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
    /// Run the service and print its samples as lines of JSON.
    #[arg(long, hide = true)]
    record: bool,
}

/// The stages of a run, in order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
enum Stage {
    Start,
    Burst,
    Idle,
    Unloaded,
}

/// Memory at one instant.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
struct Sample {
    stage: Stage,
    /// Since the start of the run.
    seconds: f64,
    /// Anonymous and shared memory of the process, in bytes.
    memory: u64,
}

/// How requests were answered.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
struct Answers {
    /// Answers with a 2xx status.
    ok: u64,
    /// Rejections (503), other statuses, and failed connections.
    other: u64,
    /// Median latency in milliseconds.
    median: f64,
}

/// A line of a recording.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
enum Line {
    Sample(Sample),
    Answers(Answers),
}

/// A whole recording.
#[derive(Clone, Debug)]
struct Recording {
    samples: Vec<Sample>,
    answers: Answers,
}

impl Recording {
    /// Returns the highest memory in this second, and its stage.
    fn second(&self, second: u32) -> Option<(Stage, u64)> {
        let span = f64::from(second)..f64::from(second + 1);
        let samples = self.samples.iter().filter(|sample| span.contains(&sample.seconds));
        samples.map(|sample| (sample.stage, sample.memory)).max_by_key(|(_, memory)| *memory)
    }

    fn peak(&self) -> u64 {
        self.samples.iter().map(|sample| sample.memory).max().unwrap_or(0)
    }

    /// Returns the memory at the end of a stage.
    fn at_end(&self, stage: Stage) -> u64 {
        let last = self.samples.iter().rfind(|sample| sample.stage == stage);
        last.map_or(0, |sample| sample.memory)
    }
}

/// Runs both services, one after the other, and draws their memory.
pub fn show() -> ExitCode {
    let cli = Cli::parse();
    let done = if cli.record { record(&cli, true) } else { compare(&cli) };
    exit_code(done)
}

/// Runs the service without lowtide and prints its samples.
pub fn record_without_lowtide() -> ExitCode {
    exit_code(record(&Cli::parse(), false))
}

fn exit_code(done: Result<(), BoxError>) -> ExitCode {
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{}: {error}", program());
            ExitCode::FAILURE
        }
    }
}

/// Returns the name of this program.
fn program() -> String {
    let path = std::env::current_exe().unwrap_or_default();
    path.file_name().unwrap_or_default().to_string_lossy().into_owned()
}

fn compare(cli: &Cli) -> Result<(), BoxError> {
    let with = std::env::current_exe()?;
    let without = with.with_file_name(WITHOUT);
    let seconds = (START + BURST + IDLE + UNLOADED).as_secs();
    println!(
        "{}, {} connections; each run takes {seconds} s",
        cli.model.model.display(),
        cli.connections
    );
    println!("running with lowtide");
    let with = recorded(&with, cli)?;
    println!("running without lowtide: glibc, and ONNX Runtime's defaults");
    let without = recorded(&without, cli)?;
    println!("\n{}\n{}", drawn(&with, &without), table(&with, &without));
    Ok(())
}

/// Runs a program that records itself, and reads what it prints.
fn recorded(program: &Path, cli: &Cli) -> Result<Recording, BoxError> {
    let mut command = Command::new(program);
    command.arg("--record").arg("--model").arg(&cli.model.model);
    command.arg("--library").arg(&cli.model.library);
    command.args(["--connections", &cli.connections.to_string()]);
    command.args(["--seed", &cli.seed.to_string()]);
    let mut child = command.stdout(Stdio::piped()).spawn().map_err(|error| {
        let program = program.display();
        format!("cannot start {program}: {error}: expected {WITHOUT} in the folder of tide-onnx")
    })?;
    let output = child.stdout.take().ok_or("the program has no output")?;
    let (mut samples, mut answers) = (Vec::new(), None);
    for line in BufReader::new(output).lines() {
        match serde_json::from_str(&line?)? {
            Line::Sample(sample) => samples.push(sample),
            Line::Answers(found) => answers = Some(found),
        }
    }
    let status = child.wait()?;
    let answers = answers.filter(|_| status.success());
    let answers = answers.ok_or_else(|| format!("{}: {status}", program.display()))?;
    Ok(Recording { samples, answers })
}

/// Runs the service in this process and prints its samples.
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
        let recorder = Recorder { signals: Signals::open(), start: Instant::now() };
        recorder.until(Stage::Start, START, &AtomicBool::new(false)).await?;
        let ended = Arc::new(AtomicBool::new(false));
        let load = tokio::spawn({
            let (to, ended) = (running.address, Arc::clone(&ended));
            async move {
                let tally = load::run(to, &corpus, burst, Arc::new(Answered::default())).await;
                ended.store(true, Ordering::Release);
                tally
            }
        });
        recorder.until(Stage::Burst, BURST * 4, &ended).await?;
        // Waits for the requests in flight, but not forever.
        let tally = tokio::time::timeout(BURST, load).await??;
        recorder.until(Stage::Idle, IDLE, &AtomicBool::new(false)).await?;
        recorder.until(Stage::Unloaded, UNLOADED, &AtomicBool::new(false)).await?;
        let other = tally.shed + tally.other.values().sum::<u64>();
        print(Line::Answers(Answers { ok: tally.ok, other, median: tally.quantile(0.5) }))?;
        for (what, count) in &tally.other {
            eprintln!("{}: {count} failed requests: {what}", program());
        }
        running.stop(Duration::from_secs(2)).await;
        if let Some(memory) = memory {
            memory.shutdown_async(Duration::from_secs(2)).await;
        }
        Ok(())
    })
}

fn print(line: Line) -> Result<(), BoxError> {
    println!("{}", serde_json::to_string(&line)?);
    Ok(())
}

struct Recorder {
    signals: Signals,
    start: Instant,
}

impl Recorder {
    /// Prints samples of a stage until `ended` or its time is up.
    async fn until(
        &self,
        stage: Stage,
        time: Duration,
        ended: &AtomicBool,
    ) -> Result<(), BoxError> {
        let end = Instant::now() + time;
        while !ended.load(Ordering::Acquire) && Instant::now() < end {
            tokio::time::sleep(LOOK_EVERY).await;
            let pages = self.signals.resident().ok_or("cannot read /proc/self/status")?;
            let memory = pages.anon.saturating_add(pages.shmem).get();
            let seconds = self.start.elapsed().as_secs_f64();
            print(Line::Sample(Sample { stage, seconds, memory }))?;
        }
        Ok(())
    }
}

/// Draws both recordings side by side, a line for each second.
fn drawn(with: &Recording, without: &Recording) -> String {
    let full = with.peak().max(without.peak()).max(1);
    let mut text = "peak memory of the process in each second, MiB\n\n".to_owned();
    let _ = writeln!(text, "{:>6}  {:<32}without lowtide", "", "with lowtide");
    let rows = (0..).map(|second| (second, with.second(second), without.second(second)));
    for (second, with, without) in rows.take_while(|(_, one, other)| one.or(*other).is_some()) {
        let _ = write!(text, "{second:>4} s  ");
        let [left, right] = [with, without].map(|at| at.map_or(String::new(), |at| bar(at, full)));
        let _ = writeln!(text, "{}", format!("{left:<32}{right}").trim_end());
    }
    text.push_str("\n█ burst of requests  ▒ no requests\n");
    text
}

fn bar((stage, memory): (Stage, u64), full: u64) -> String {
    let cells = usize::try_from((memory * BAR as u64).div_ceil(full)).unwrap_or(BAR);
    let cell = if stage == Stage::Burst { "█" } else { "▒" };
    format!("{:>4} {}", memory >> 20, cell.repeat(cells))
}

/// Lists the memory at the end of each stage, and the answers.
fn table(with: &Recording, without: &Recording) -> String {
    let mut text = format!("{:<38}{:>14}{:>18}\n", "", "with lowtide", "without lowtide");
    let mut row = |name: &str, of: &dyn Fn(&Recording) -> String| {
        let _ = writeln!(text, "{name:<38}{:>14}{:>18}", of(with), of(without));
    };
    let mib = |bytes: u64| ByteSize::new(bytes).to_string();
    row("before the first request", &|run| mib(run.at_end(Stage::Start)));
    row("peak of the burst", &|run| mib(run.peak()));
    let idle = format!("{} s after the burst", IDLE.as_secs());
    row(&idle, &|run| mib(run.at_end(Stage::Idle)));
    let [unload, end] = [IDLE_UNLOAD, IDLE + UNLOADED].map(|time| time.as_secs());
    let unloaded = format!("{end} s after it (unload after {unload} s)");
    row(&unloaded, &|run| mib(run.at_end(Stage::Unloaded)));
    row("successful requests", &|run| run.answers.ok.to_string());
    row("rejected or failed requests", &|run| run.answers.other.to_string());
    row("median time of a request", &|run| format!("{:.0} ms", run.answers.median));
    text
}
