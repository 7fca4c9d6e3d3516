//! Idle: what the crate costs a service that does nothing; and what the flight recorder costs.
//!
//! Child processes of this program stand idle side by side: without a `Memory`, and with one that has
//! its default settings; or with one, and with one that has a recorder too. From outside they are
//! read for CPU time by thread, threads by name and resident memory, so that reading costs them
//! nothing. The time that starting takes is measured in processes of their own, as is the recorder's
//! thread in a service under steady load.
//!
//! Invariant: what a managed process has and a bare one has not is a started `Memory` with an arena
//! and a resource, and nothing else.
//!
//! Exit codes: 0 every goal held; 1 one was missed, or something could not be measured.
#![expect(clippy::print_stdout, reason = "a program that shows something")]
#![expect(clippy::disallowed_methods, reason = "it measures real time")]

use std::convert::Infallible;
use std::io::Read as _;
use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use axum::Router;
use axum::body::{Body, Bytes};
use axum::http::Request;
use axum::routing::post;
use clap::Parser;
use common::figures::{Figures, count, median};
use common::own;
use common::process::{Process, kernel_value, nanos_of, threads};
use futures_util::{StreamExt as _, stream};
use lowtide::clock::{Bell, Clock, Moment, SystemClock};
use lowtide::memory::Builder;
use lowtide::{BoxError, ByteSize, Memory};
use lowtide_heap::thread_totals;
use tower::ServiceExt as _;

lowtide::global_allocator!(balanced);

/// Processes of each kind that stand idle.
const OF_EACH: usize = 3;
/// After the start, before CPU time is counted: what starting left to do is done then.
const SETTLE: Duration = Duration::from_secs(2);
/// Processes that are started for the time it takes.
const STARTS: usize = 30;

/// What the crate costs a service that does nothing.
#[derive(Clone, Debug, Parser)]
struct Cli {
    /// Be a process of this kind: with a recorder of metrics and no `Memory` (`bare`), with one that
    /// has its default settings (`managed`), with one that ends once it has started (`brief`), or
    /// with one under load (`loaded`).
    #[arg(long, hide = true)]
    be: Option<String>,
    /// Measures the flight recorder alone.
    #[arg(long)]
    recorder: bool,
    /// Judges the number of threads alone, or allocations and memory, and watches for 6 seconds in
    /// place of 32.
    #[arg(long)]
    counted: bool,
}

fn main() -> ExitCode {
    common::main(|cli: Cli| match cli.be.as_deref() {
        Some("loaded") => loaded().map(|()| true),
        Some(kind) => be(kind).map(|()| true),
        None if cli.recorder => recorder(cli.counted),
        None => measure(cli.counted),
    })
}

/// Is such a process until standard input ends. Prints the time that `Memory::start` took, in ms.
fn be(kind: &str) -> Result<(), BoxError> {
    let managed = Memory::builder().prometheus()?; // each kind has a recorder
    let builder = (kind != "bare").then_some(managed);
    let before = Instant::now();
    let memory = builder.map(Builder::start);
    let took = before.elapsed();
    let memory = memory.transpose()?;
    let hold = |memory: &Memory| {
        let arena = memory.devices().open_arena("idle")?;
        let resource = memory.managed("idle", || Ok(vec![0_u8; 1024])).register()?;
        Ok::<_, BoxError>((arena, resource))
    };
    let _held = memory.as_ref().map(hold).transpose()?;
    println!("{}", took.as_secs_f64() * 1e3);
    if kind != "brief" {
        std::io::stdin().read_to_end(&mut Vec::new())?;
    }
    Ok(())
}

/// Starts a process, with a flight recorder if it gets a file for one.
fn start(kind: &str, recording: Option<&Path>) -> Result<Process, BoxError> {
    let mut command = own(&["--be", kind])?;
    command.envs(recording.map(|path| ("LOWTIDE_FLIGHT_RECORDER", path)));
    Process::start(command)
}

/// Looks at a process: its CPU time and that of its control thread in seconds, the number of our
/// threads, and its resident memory, and of that what is its own, in MiB.
fn look(process: &Process) -> Result<[f64; 5], BoxError> {
    let id = process.child.id();
    let threads = threads(id)?;
    let of = |name: &'static str| threads.iter().filter(move |it| it.0.starts_with(name));
    let seconds = |name| of(name).map(|thread| count(thread.1) / 1e9).sum();
    // Read last: it walks the process's pages.
    let mib =
        |key| kernel_value(format!("/proc/{id}/smaps_rollup"), key).map(|kib| count(kib) / 1024.0);
    let private = mib("Private_Dirty:")? + mib("Private_Clean:")?;
    Ok([seconds(""), seconds(CONTROL), count(of("lowtide-").count() as u64), mib("Rss:")?, private])
}

/// Lets processes of two kinds stand idle side by side for this time. Returns the medians of each
/// kind: what it and its control thread take of a processor in percent, and the rest of [`look`].
fn stand(
    kinds: [&dyn Fn(usize) -> Result<Process, BoxError>; 2],
    watched: Duration,
) -> Result<[[f64; 5]; 2], BoxError> {
    let mut idlers = Vec::new();
    for nth in 0..OF_EACH {
        for start in kinds {
            let mut process = start(nth)?;
            process.line()?;
            idlers.push(process);
        }
    }
    std::thread::sleep(SETTLE);
    let looks = || idlers.iter().map(look).collect::<Result<Vec<_>, _>>();
    let (before, begun) = (looks()?, Instant::now());
    std::thread::sleep(watched);
    let (mut after, seconds) = (looks()?, begun.elapsed().as_secs_f64());
    for (after, before) in after.iter_mut().zip(before) {
        [0, 1].into_iter().for_each(|at| after[at] = (after[at] - before[at]) / seconds * 100.0);
    }
    let of_kind = |kind: usize, at: usize| {
        median(&after[kind..].iter().step_by(2).map(|look| look[at]).collect::<Vec<_>>())
    };
    Ok([0, 1].map(|kind| std::array::from_fn(|at| of_kind(kind, at))))
}

/// Measures everything and prints it; whether every goal held. Each figure is the median over the
/// processes of a kind, or the difference of two medians.
fn measure(counted: bool) -> Result<bool, BoxError> {
    let watched = Duration::from_secs(if counted { 6 } else { 32 });
    let mut figures = Figures::new(counted);
    let [bare, managed] = stand([&|_| start("bare", None), &|_| start("managed", None)], watched)?;
    let starts = (0..STARTS).map(|_| start("brief", None)?.first_line());
    let starts = starts.collect::<Result<Vec<_>, BoxError>>()?;
    figures.at_most("idle_managed_threads", managed[2], "threads", 2.0);
    figures.add("idle_managed_private", managed[4] - bare[4], "MiB");
    figures.add("idle_managed_start_p50", median(&starts), "ms");
    figures.timed("idle_managed_cpu", managed[0] - bare[0], "%", 0.05);
    figures.timed("idle_managed_resident", managed[3] - bare[3], "MiB", 2.0);
    figures.timed("idle_managed_start_max", starts.into_iter().fold(0.0, f64::max), "ms", 10.0);
    Ok(figures.print())
}

// What the flight recorder costs: its thread in a service under steady load, and its memory, which
// is what an idle process holds beyond one without it.

const RECORDER_MAX: f64 = 1126.0 * 1024.0; // 1.1 MiB
/// The time over which CPU and allocations are counted.
const COUNTED: Duration = Duration::from_secs(20);
/// Requests in progress, each with a body that does not end.
const REQUESTS: usize = 64;
/// The names of the recorder's thread and of the control loop's.
const NAME: &str = "lowtide-flight";
const CONTROL: &str = "lowtide-control";

/// A clock that notes what the recorder's thread has allocated whenever that waits.
#[derive(Debug, Default)]
struct Watch {
    clock: SystemClock,
    allocated: AtomicU64,
}

impl Clock for Watch {
    fn now(&self) -> Moment {
        self.clock.now()
    }

    fn since_epoch(&self) -> Duration {
        self.clock.since_epoch()
    }

    fn wait_until(&self, bell: &Arc<Bell>, deadline: Moment) -> bool {
        if std::thread::current().name() == Some(NAME) {
            let allocated = thread_totals().map_or(u64::MAX, |(allocated, _)| allocated);
            self.allocated.store(allocated, Ordering::Relaxed);
        }
        self.clock.wait_until(bell, deadline)
    }
}

/// Is a service under steady load with a recorder. Prints the bytes that the recorder's thread
/// allocated, and what it and the control loop's take of a processor in percent.
#[tokio::main(flavor = "current_thread")]
async fn loaded() -> Result<(), BoxError> {
    let watch = Arc::new(Watch::default());
    let memory = Memory::builder().clock(watch.clone()).memory_limit(ByteSize::gib(1)).start()?;
    let hold = post(|body: Bytes| async move { body.len().to_string() });
    let app = Router::new().route("/hold", hold).layer(memory.layer().without_slow_start());
    for _ in 0..REQUESTS {
        let first = stream::iter([Ok::<_, Infallible>(Bytes::from(vec![1; 70_000]))]);
        let body = Body::from_stream(first.chain(stream::pending()));
        let request = Request::post("/hold").header("content-length", 1 << 20);
        tokio::spawn(app.clone().oneshot(request.body(body)?));
    }
    tokio::time::sleep(SETTLE).await;
    if memory.report().oldest_requests().is_empty() {
        return Err("no requests are listed".into());
    }
    let allocated = || watch.allocated.load(Ordering::Relaxed);
    let seen = || Ok::<_, BoxError>([allocated(), nanos_of(NAME)?, nanos_of(CONTROL)?]);
    let (start, before) = (Instant::now(), seen()?);
    while start.elapsed() < COUNTED {
        // Events, of which each changes the recording.
        memory.heap().request_purge();
        drop(std::hint::black_box(vec![1_u8; 8 << 20]));
        tokio::time::sleep(Duration::from_millis(500)).await;
    }
    let (took, after) = (start.elapsed(), seen()?);
    let [allocated, recorder, control] = [0, 1, 2].map(|at| after[at] - before[at]);
    let percent = |nanos| count(nanos) / took.as_secs_f64() / 1e7;
    println!("{allocated}\n{}\n{}", percent(recorder), percent(control));
    Ok(())
}

/// Measures the flight recorder, and prints the figures. Returns whether every goal held.
fn recorder(counted: bool) -> Result<bool, BoxError> {
    let folder = tempfile::tempdir()?;
    let recorded = |kind, nth: usize| start(kind, Some(&folder.path().join(nth.to_string())));
    let mut loaded = recorded("loaded", OF_EACH)?;
    let [allocations, percent, control] = [(); 3].map(|()| loaded.first_line());
    let watched = if counted { SETTLE } else { COUNTED };
    let [without, with] =
        stand([&|_| start("managed", None), &|nth| recorded("managed", nth)], watched)?;
    let memory = (with[3] - without[3]).max(0.0) * f64::from(1 << 20);
    let mut figures = Figures::new(counted);
    figures.timed("questions.recorder.cpu_percent", percent?, "percent", 0.2);
    figures.timed("poll.control.busy", control?, "percent", 0.08);
    figures.timed("poll.control.idle", without[1], "percent", 0.03);
    figures.at_most("questions.recorder.allocations", allocations?, "bytes", 0.0);
    figures.at_most("questions.recorder.memory_bytes", memory, "bytes", RECORDER_MAX);
    Ok(figures.print())
}
