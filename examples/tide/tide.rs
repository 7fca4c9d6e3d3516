//! The tide: shows in one command how a real service's memory rises under load and falls again.
//!
//! It starts the proxy in this process, drives HTTP load with real text through it, and displays
//! the memory of heap and device meanwhile; then it does the same in a child process with
//! jemalloc's defaults, and runs a short burst at half of the limit. It ends with a table and the
//! bounds that must hold, and fails if one does not. It takes at most 90 seconds.
#![expect(clippy::print_stdout, clippy::print_stderr, reason = "a program that shows something")]
#![expect(clippy::disallowed_methods, reason = "it measures real time")]

#[path = "../proxy/app.rs"]
#[allow(dead_code, reason = "the proxy itself uses more of it")]
mod app;
mod cgroup;
#[path = "../proxy/chance.rs"]
mod chance;
mod chart;
mod door;
#[path = "../proxy/embed.rs"]
mod embed;
#[path = "../proxy/forward.rs"]
mod forward;
mod load;
#[path = "../proxy/model.rs"]
mod model;
mod picture;
mod report;
mod run;
#[path = "../proxy/upstream.rs"]
mod upstream;

use std::io::{BufRead as _, BufReader};
use std::path::PathBuf;
use std::process::{Child, Command, ExitCode, Stdio};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use clap::Parser;
use lowtide::{BoxError, ByteSize};

use crate::load::Corpus;
use crate::picture::{Picture, Scene};
use crate::run::{Glimpse, Kind, Outcome, Plan};

#[global_allocator]
static HEAP: lowtide::heap::Heap = lowtide::heap::Heap;

#[derive(Clone, Debug, Parser)]
#[command(about = "Watch a service's memory rise under load and go back down")]
struct Cli {
    /// Text to send: files, or folders of .md, .txt and .rs files. Default: this project's own.
    #[arg(long)]
    input: Vec<PathBuf>,
    /// The memory limit of the service.
    #[arg(long, default_value = "1536m")]
    limit: ByteSize,
    /// Connections at once.
    #[arg(long, default_value_t = 56)]
    connections: usize,
    /// Size of the text in one request.
    #[arg(long, default_value = "1m")]
    text: ByteSize,
    /// Size of the model's weights.
    #[arg(long, default_value = "64m")]
    weights: ByteSize,
    /// Seed of load and weights.
    #[arg(long, default_value_t = 7)]
    seed: u64,
    /// Also draw the memory of both runs over time into this SVG file.
    #[arg(long, value_name = "FILE")]
    chart: Option<PathBuf>,
    /// Run only this, and print it as lines of JSON.
    #[arg(long, hide = true)]
    only: Option<Kind>,
}

impl Cli {
    fn plan(&self, kind: Kind) -> Plan {
        Plan {
            kind,
            limit: self.limit,
            connections: self.connections.max(1),
            text_bytes: self.text.as_usize().unwrap_or(usize::MAX).max(1),
            weights: self.weights,
            seed: self.seed,
        }
    }

    fn inputs(&self) -> Vec<PathBuf> {
        if !self.input.is_empty() {
            return self.input.clone();
        }
        let home = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../..");
        ["README.md", "docs", "src", "examples"].map(|part| home.join(part)).into()
    }
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    let done = match cli.only {
        Some(kind) => child(&cli, kind).map(|()| true),
        None => parent(&cli),
    };
    match done {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("tide: {error}");
            ExitCode::FAILURE
        }
    }
}

/// Runs everything; whether all bounds hold.
fn parent(cli: &Cli) -> Result<bool, BoxError> {
    println!(
        "a proxy under load: {} connections, {} of text each, a model of {},\nlimit {}\n",
        cli.connections, cli.text, cli.weights, cli.limit
    );
    let (managed, its_course) = {
        let course = Course::default();
        let mut show = shower(Kind::Managed, course.clone());
        (execute(cli, Kind::Managed, move |glimpse| show(glimpse))?, course.taken())
    };
    let (twin, twin_course) = spawn(cli, Kind::Defaults)?;
    let (half, _) = spawn(cli, Kind::Half)?;
    if let Some(file) = &cli.chart {
        chart::draw(file, &its_course, &twin_course)?;
    }
    println!("\n{}", report::table(&managed, &twin));
    let bounds = report::bounds(&managed, &twin, &half);
    println!("must hold");
    for bound in &bounds {
        let word = if bound.holds { "ok    " } else { "FAILED" };
        println!("  {word}  {}:\n          {}", bound.what, bound.measured);
        for line in bound.why.iter().filter(|_| !bound.holds) {
            println!("          {line}");
        }
    }
    Ok(bounds.iter().all(|bound| bound.holds))
}

/// One run in this process.
fn execute(
    cli: &Cli,
    kind: Kind,
    show: impl FnMut(&Glimpse) + Send + 'static,
) -> Result<Outcome, BoxError> {
    let corpus = Corpus::read(&cli.inputs())?;
    let plan = cli.plan(kind);
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    runtime.block_on(async {
        tokio::select! {
            outcome = run::run(&plan, &corpus, show) => outcome,
            // An end in order: the run's cgroup is left and removed.
            _ = tokio::signal::ctrl_c() => Err("interrupted".into()),
        }
    })
}

/// One run in this process, for a parent that reads lines of JSON.
fn child(cli: &Cli, kind: Kind) -> Result<(), BoxError> {
    let print = |name: &str, value: serde_json::Result<String>| {
        if let Ok(value) = value {
            println!("{name} {value}");
        }
    };
    let outcome =
        execute(cli, kind, move |glimpse| print("glimpse", serde_json::to_string(glimpse)))?;
    print("outcome", serde_json::to_string(&outcome));
    Ok(())
}

/// One run in a process of its own, which nothing of this one has warmed.
fn spawn(cli: &Cli, kind: Kind) -> Result<(Outcome, Vec<Glimpse>), BoxError> {
    let plan = cli.plan(kind);
    let name = match kind {
        Kind::Managed => "managed",
        Kind::Defaults => "defaults",
        Kind::Half => "half",
    };
    let mut command = Command::new(std::env::current_exe()?);
    command
        .args(["--only", name, "--limit", &plan.limit.exact(), "--text", &cli.text.exact()])
        .args(["--connections", &plan.connections.to_string()])
        .args(["--weights", &plan.weights.exact(), "--seed", &plan.seed.to_string()])
        .stdout(Stdio::piped());
    for input in &cli.input {
        command.arg("--input").arg(input);
    }
    let mut child = command.spawn()?;
    let course = Course::default();
    let outcome = follow(&mut child, shower(kind, course.clone()));
    if outcome.is_err() {
        // It would run on for a while, and its output is no longer read.
        let _ = child.kill();
    }
    let status = child.wait()?;
    let outcome =
        outcome?.ok_or_else(|| format!("the run with {} ended with {status}", kind.title()))?;
    Ok((outcome, course.taken()))
}

/// Shows what a run in a child says, and gives what came of it.
fn follow(child: &mut Child, mut show: impl FnMut(&Glimpse)) -> Result<Option<Outcome>, BoxError> {
    let mut outcome = None;
    for line in BufReader::new(child.stdout.take().ok_or("no pipe to the child")?).lines() {
        let line = line?;
        if let Some(glimpse) = line.strip_prefix("glimpse ") {
            show(&serde_json::from_str(glimpse)?);
        } else if let Some(found) = line.strip_prefix("outcome ") {
            outcome = Some(serde_json::from_str(found)?);
        }
    }
    Ok(outcome)
}

/// The glimpses of a run in their order: ten a second.
#[derive(Clone, Default)]
struct Course(Arc<Mutex<Vec<Glimpse>>>);

impl Course {
    fn add(&self, glimpse: &Glimpse) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).push(glimpse.clone());
    }

    fn taken(&self) -> Vec<Glimpse> {
        std::mem::take(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

/// Shows the glimpses of a run, and keeps them.
fn shower(kind: Kind, course: Course) -> impl FnMut(&Glimpse) + Send + 'static {
    let mut picture = Picture::new();
    move |glimpse| {
        course.add(glimpse);
        let water = &glimpse.water;
        let title = format!("{}: {}", kind.title(), glimpse.doing);
        let [ok, shed, other] = glimpse.answered;
        let other = if other > 0 { format!("  others {other}") } else { String::new() };
        picture.show(&Scene {
            title: &title,
            progress: glimpse.seconds / kind.lasts().as_secs_f64(),
            elapsed: Duration::from_secs_f64(glimpse.seconds),
            heap: (ByteSize::new(water.heap_live), ByteSize::new(water.heap_retained())),
            device: (ByteSize::new(water.device_live), ByteSize::new(water.device_retained())),
            rss: ByteSize::new(water.rss),
            note: format!("2xx {ok}  503 {shed}{other}  pressure {}", glimpse.level),
        });
    }
}
