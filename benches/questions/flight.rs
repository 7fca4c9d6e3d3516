//! What the flight recorder costs: its thread in a service under steady load, and its memory.
//!
//! Exit codes: 0 every goal held; 1 one was missed, or something could not be measured.
#![expect(clippy::print_stdout, reason = "a program that prints figures")]
#![expect(clippy::disallowed_methods, reason = "it measures real time")]
#![expect(unsafe_code, reason = "an allocator that counts, and the name of a thread")]

use std::convert::Infallible;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use axum::Router;
use axum::body::{Body, Bytes};
use axum::http::Request;
use axum::routing::post;
use clap::Parser;
use common::counting::Counting;
use common::figures::{Figures, count, median};
use common::own;
use common::process::{Process, kernel_value, nanos_of};
use lowtide::{BoxError, ByteSize, Memory};
use tower::ServiceExt as _;

#[global_allocator]
static ALLOCATOR: Counting = Counting(note_allocation);

/// What the flight recorder costs.
#[derive(Clone, Debug, Parser)]
struct Cli {
    /// Be a service under steady load, or an idle one.
    #[arg(long, hide = true)]
    be: Option<String>,
    /// The recording.
    #[arg(long, hide = true)]
    recording: Option<PathBuf>,
    /// Judges no time.
    #[arg(long)]
    counted: bool,
}

fn main() -> ExitCode {
    common::main(|cli: Cli| {
        let recording = cli.recording.as_deref();
        match cli.be.as_deref() {
            Some("serve") => serve(recording.ok_or("no recording")?)?,
            Some(_) => idle(recording)?,
            None => return measure(cli.counted),
        }
        Ok(true)
    })
}

/// The goals.
const CPU_PERCENT_MAX: f64 = 0.2;
const MEMORY_MAX: f64 = 1126.0 * 1024.0; // 1.1 MiB

/// After the start, before anything is counted.
const SETTLE: Duration = Duration::from_secs(3);
/// The time over which CPU and allocations are counted.
const COUNTED: Duration = Duration::from_secs(20);
/// Pairs of services whose memory is compared.
const PAIRS: usize = 11;
/// Requests in progress, each with a body that does not end.
const REQUESTS: usize = 64;
/// The length that each declares.
const LENGTH: u64 = 1 << 20;

/// The name of the recorder's thread.
const NAME: &str = "lowtide-flight";

static ALLOCATIONS: AtomicU64 = AtomicU64::new(0);

/// Counts an allocation if the calling thread is the recorder's.
fn note_allocation() {
    let mut name = [0_u8; 16];
    // SAFETY: the kernel writes at most 16 bytes, with a zero at their end.
    let done = unsafe { libc::prctl(libc::PR_GET_NAME, name.as_mut_ptr()) };
    if done == 0 && name.starts_with(NAME.as_bytes()) {
        ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
    }
}

/// Is a service under steady load with a recorder. Prints its figures after [`SETTLE`] and
/// [`COUNTED`].
fn serve(recording: &Path) -> Result<(), BoxError> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let builder = Memory::builder().memory_limit(ByteSize::gib(1));
    let memory = builder.flight_recorder(recording).start()?;
    let app =
        Router::new().route("/hold", post(|body: Bytes| async move { body.len().to_string() }));
    let app = app.layer(memory.layer().without_slow_start());
    runtime.block_on(async {
        for _ in 0..REQUESTS {
            let first =
                futures_util::stream::iter([Ok::<_, Infallible>(Bytes::from(vec![1; 70_000]))]);
            let body = futures_util::StreamExt::chain(first, futures_util::stream::pending());
            let request = Request::post("/hold").header("content-length", LENGTH);
            tokio::spawn(app.clone().oneshot(request.body(Body::from_stream(body))?));
        }
        tokio::time::sleep(SETTLE).await;
        let held = memory.report().oldest_requests().len();
        let seen = || Ok::<_, BoxError>((ALLOCATIONS.load(Ordering::Relaxed), nanos_of(NAME)?));
        let (start, before) = (Instant::now(), seen()?);
        while start.elapsed() < COUNTED {
            // Events, of which each changes the recording.
            memory.heap().request_purge();
            drop(std::hint::black_box(vec![1_u8; 8 << 20]));
            tokio::time::sleep(Duration::from_millis(500)).await;
        }
        let (took, after) = (start.elapsed().as_secs_f64(), seen()?);
        let percent = count(after.1 - before.1) / 1e9 / took * 100.0;
        println!("{held} {} {percent}", after.0 - before.0);
        Ok::<_, BoxError>(())
    })?;
    Ok(())
}

/// Is an idle service, with a recorder if a path is given. Prints its resident memory without
/// that of shared libraries: anonymous pages and mapped files.
fn idle(recording: Option<&Path>) -> Result<(), BoxError> {
    let mut builder = Memory::builder().memory_limit(ByteSize::gib(1));
    if let Some(path) = recording {
        builder = builder.flight_recorder(path);
    }
    let memory = builder.start()?;
    std::thread::sleep(SETTLE);
    let _ = memory.heap().purge()?;
    let kib = |name: &str| kernel_value("/proc/self/status", name);
    println!("{} {}", kib("RssAnon:")?, kib("RssFile:")?);
    Ok(())
}

/// Prints the figures. Returns whether every goal held.
fn measure(is_counted: bool) -> Result<bool, BoxError> {
    let folder = tempfile::tempdir()?;
    let path = folder.path().join("recording");
    let [held, allocations, percent] = printed("serve", Some(&path))?;
    println!("{held} requests were listed, each of which the recorder described");
    let added = (0..PAIRS).map(|_| {
        let [with, without]: [[f64; 2]; 2] =
            [printed("idle", Some(&path))?, printed("idle", None)?];
        Ok([0, 1].map(|at| with[at] - without[at]))
    });
    let added = added.collect::<Result<Vec<[f64; 2]>, BoxError>>()?;
    let [anonymous, mapped] =
        [0, 1].map(|at| median(&added.iter().map(|pair| pair[at]).collect::<Vec<_>>()).max(0.0));
    let mut figures = Figures::new(is_counted);
    figures.timed("questions.recorder.cpu_percent", percent, "percent", CPU_PERCENT_MAX);
    figures.at_most("questions.recorder.allocations", allocations, "allocations", 0.0);
    let memory = 1024.0 * (anonymous + mapped);
    figures.at_most("questions.recorder.memory_bytes", memory, "bytes", MEMORY_MAX);
    Ok(figures.print())
}

/// Returns the numbers that this program prints as such a service.
fn printed<const N: usize>(role: &str, recording: Option<&Path>) -> Result<[f64; N], BoxError> {
    let mut command = own()?;
    command.args(["--be", role]);
    if let Some(path) = recording {
        command.arg("--recording").arg(path);
    }
    let text = Process::start(command)?.output()?;
    let numbers = text.split_whitespace().map(str::parse).collect::<Result<Vec<f64>, _>>()?;
    numbers.try_into().map_err(|_| format!("it printed {text:?}").into())
}
