//! Render: what an answer of `/metrics` and of `/memory` costs, with few blocks and with many; and
//! what the two threads behind it take (`loops`).
//!
//! A real `Memory` on the host driver, with a recorder for Prometheus; an arena with a thousand
//! blocks of a few hundred bytes, then with a million. `/memory` is asked for as the page does,
//! with map, events and trail. Real time, the median of many answers: on a busy machine it says
//! little.
//!
//! Exit codes: 0 every goal held; 1 one was missed, or a run failed.
#![expect(clippy::disallowed_methods, reason = "it measures real time")]

#[path = "../common/mod.rs"]
#[allow(dead_code, reason = "other benches use more of it")]
mod common;
mod loops;

use std::process::ExitCode;
use std::time::{Duration, Instant};

use http::Request;
use lowtide::config::DeviceChoice;
use lowtide::device::{Buffer, DeviceArena, Region};
use lowtide::service::Endpoints;
use lowtide::{BoxError, Memory};
use metrics_exporter_prometheus::{Matcher, PrometheusBuilder};

use crate::common::figures::{Figures, count, median};

#[global_allocator]
static HEAP: lowtide_heap::Heap = lowtide_heap::Heap;

const SEED: u64 = 42;
const MEMORY: &str = "/memory?format=json&with=map,history,events,admin_tasks";

/// The number of blocks, the suffix of its figures, answers that are timed, and the goals in ms.
const CASES: [(usize, &str, usize, [f64; 2]); 2] =
    [(1_000, "1k", 201, [1.0, 5.0]), (1_000_000, "1m", 31, [50.0, 50.0])];
/// Bytes of a document at most.
const BYTES_MAX: f64 = 1_048_576.0;

#[derive(clap::Parser)]
#[command(about = "What answers of /metrics and /memory cost, and the threads behind them")]
struct Cli {
    /// Judges no time.
    #[arg(long)]
    counted: bool,
}

fn main() -> ExitCode {
    common::main(|cli: Cli| run(cli.counted))
}

fn run(counted: bool) -> Result<bool, BoxError> {
    let mut recorder = PrometheusBuilder::new();
    for (name, buckets) in lowtide::metrics::histograms() {
        recorder = recorder.set_buckets_for_metric(Matcher::Full(name.to_owned()), buckets)?;
    }
    let recorder = recorder.install_recorder()?;
    let mut figures = Figures::new(counted);
    loops::measure(&mut figures)?;
    let memory = Memory::builder().device(DeviceChoice::Host).start()?;
    let arena = memory.devices().open_arena("weights")?;
    // Metrics show once the worker has published them.
    let deadline = Instant::now() + Duration::from_secs(30);
    while memory.report().history().is_empty() {
        if Instant::now() > deadline {
            return Err("the worker has published nothing in 30 s".into());
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    let endpoints = Endpoints::new(Some(memory.clone())).with_metrics(move || recorder.render());
    let (mut blocks, mut chance) = (Vec::new(), SEED);
    for (count, of, answers, goals) in CASES {
        fill(&arena, count, &mut blocks, &mut chance)?;
        for ((name, address), goal) in
            [("metrics", "/metrics"), ("memory", MEMORY)].into_iter().zip(goals)
        {
            let (ms, bytes) = timed(&endpoints, address, answers)?;
            figures.timed(&format!("render.{name}.ms_{of}"), ms, "ms", goal);
            figures.at_most(format!("render.{name}.bytes_{of}"), bytes, "bytes", BYTES_MAX);
        }
    }
    drop(blocks);
    memory.shutdown_blocking(Duration::from_secs(5)).into_result()?;
    Ok(figures.print())
}

/// Allocates blocks of 1 to 512 bytes, a tenth too many, and frees others by chance until so many
/// are left, so that there are holes everywhere.
fn fill(
    arena: &DeviceArena,
    count: usize,
    blocks: &mut Vec<Buffer<u8>>,
    chance: &mut u64,
) -> Result<(), BoxError> {
    let mut is_full = false;
    while !is_full || blocks.len() > count {
        *chance = chance.wrapping_mul(0x5851_F42D_4C95_7F2D).wrapping_add(1);
        if !is_full {
            blocks.push(arena.alloc(1 + usize::try_from(*chance >> 55)?, Region::Dynamic)?);
        }
        // A tenth of the places are taken a second time, so that neighbours in memory are none
        // in the books.
        if is_full || (*chance >> 40).is_multiple_of(10) {
            let nth = usize::try_from(*chance >> 33)? % blocks.len();
            drop(blocks.swap_remove(nth));
        }
        is_full |= blocks.len() >= count + count / 10;
    }
    Ok(())
}

/// The median time of an answer, in ms, and its bytes.
fn timed(endpoints: &Endpoints, address: &str, answers: usize) -> Result<(f64, f64), BoxError> {
    let request = Request::get(address).body(())?;
    let (mut times, mut bytes) = (Vec::with_capacity(answers), 0);
    for _ in 0..answers {
        let begun = Instant::now();
        let answer = endpoints.answer_request(&request).ok_or("it is not answered")?;
        times.push(begun.elapsed().as_secs_f64() * 1e3);
        if !answer.status().is_success() {
            return Err(format!("{address}: {}", answer.status()).into());
        }
        bytes = answer.body().len();
    }
    Ok((median(&times), count(bytes as u64)))
}
