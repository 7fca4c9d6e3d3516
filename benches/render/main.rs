//! Render: what an answer of `/metrics` and of `/memory` costs, with few blocks and with many; and
//! what a tick of the control thread takes.
//!
//! A real `Memory` on the host driver, with a recorder for Prometheus, as many arenas as may be open
//! and 10,000 routes; one arena with a thousand blocks of a few hundred bytes, then with a million.
//! `/memory` is asked for as the page does, with map, events and trail, and with routes. Real time,
//! the median of many answers: on a busy machine it says little.
//!
//! Exit codes: 0 every goal held; 1 one was missed, or a run failed.
#![expect(clippy::disallowed_methods, reason = "it measures real time")]

use std::cell::Cell;
use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use common::chance::Chance;
use common::figures::{Figures, count, median};
use http::Request;
use lowtide::clock::{Bell, Clock, Moment, SystemClock};
use lowtide::config::DeviceChoice;
use lowtide::device::{Buffer, DeviceArena, Region};
use lowtide::metrics::record;
use lowtide::service::Endpoints;
use lowtide::{BoxError, ByteSize, Memory};
use lowtide_admission::Cost;
use lowtide_core::sync::lock;
use lowtide_heap::{Account, purge_now, thread_totals};
use metrics_exporter_prometheus::{Matcher, PrometheusBuilder};

#[global_allocator]
static HEAP: lowtide_heap::Heap = lowtide_heap::Heap;

const MEMORY: &str = "/memory?format=json&with=map,history,events,admin_tasks,routes";

/// The number of blocks, the suffix of its figures, answers that are timed, and the goals in ms.
const CASES: [(usize, &str, usize, [f64; 2]); 2] =
    [(1_000, "1k", 201, [1.0, 5.0]), (1_000_000, "1m", 31, [50.0, 50.0])];
/// Bytes of a document at most; while it is made, eight times as many may be live at once.
const BYTES_MAX: f64 = 1_048_576.0;

/// What answers of /metrics and /memory cost, and the threads behind them.
#[derive(clap::Parser)]
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
    threads(&mut figures)?;
    let memory = Memory::builder().device(DeviceChoice::Host).start()?;
    let open = |nth| memory.devices().open_arena(&format!("arena {nth}"));
    let arenas = (0..64).map(open).collect::<Result<Vec<_>, _>>()?;
    for nth in 0..10_000 {
        let routes = &memory.admission().state().routes;
        let of = routes.of_route("GET", &format!("/routes/{nth}/{{id}}"), true, true);
        of.add(ByteSize::mib(1), ByteSize::mib(1), None);
    }
    // Metrics show once the worker has published them.
    let deadline = Instant::now() + Duration::from_secs(30);
    while memory.report().history().len() < 3 {
        if Instant::now() > deadline {
            return Err("the worker has published nothing in 30 s".into());
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    let endpoints = Endpoints::new(Some(memory.clone())).with_metrics(move || recorder.render());
    let (mut blocks, mut chance) = (Vec::new(), Chance::new(42));
    for (blocks_of, of, each, goals) in CASES {
        fill(&arenas[0], blocks_of, &mut blocks, &mut chance)?;
        for ((name, address), goal) in
            [("metrics", "/metrics"), ("memory", MEMORY)].into_iter().zip(goals)
        {
            let [ms, bytes, peak] = answers(&endpoints, address, each)?;
            figures.timed(&format!("render.{name}.ms_{of}"), ms, "ms", goal);
            figures.at_most(format!("render.{name}.bytes_{of}"), bytes, "bytes", BYTES_MAX);
            figures.at_most(format!("render.{name}.peak_{of}"), peak, "bytes", 8.0 * BYTES_MAX);
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
    chance: &mut Chance,
) -> Result<(), BoxError> {
    let mut is_full = false;
    while !is_full || blocks.len() > count {
        if !is_full {
            blocks.push(arena.alloc(1 + chance.below(512), Region::Dynamic)?);
        }
        // A tenth of the places are taken a second time, so that neighbours in memory are none
        // in the books.
        if is_full || chance.below(10) == 0 {
            drop(blocks.swap_remove(chance.below(blocks.len())));
        }
        is_full |= blocks.len() >= count + count / 10;
    }
    Ok(())
}

/// The median time of an answer in ms, its bytes, and the most that were live while it was made.
fn answers(endpoints: &Endpoints, address: &str, answers: usize) -> Result<[f64; 3], BoxError> {
    let request = Request::get(address).body(())?;
    let (mut times, mut bytes, mut peak) = (Vec::with_capacity(answers), 0, 0);
    for _ in 0..answers {
        let (account, begun) = (Arc::new(Account::new((), |_, _| ())), Instant::now());
        let answer = account.run(|| endpoints.answer_request(&request));
        times.push(begun.elapsed().as_secs_f64() * 1e3);
        let answer = answer.ok_or("it is not answered")?;
        if !answer.status().is_success() {
            return Err(format!("{address}: {}", answer.status()).into());
        }
        (bytes, peak) = (answer.body().len(), account.memory().peak.get());
    }
    Ok([median(&times), count(bytes as u64), count(peak)])
}

// The costs of the two threads of a `Memory`: the control thread for a tick, and writing the series.
//
// The control thread waits on the clock that the `Memory` was given, and does one turn of its work
// between two waits. So a clock that writes down what lies between them measures the real loop, over
// the real kernel and heap, and what it allocates. Between two ticks it takes memory and touches it, so
// that each finds that something moved: the dear case.
//
// Invariant: what the clock does itself lies outside of what it measures.

/// Turns that are measured.
const TICKS: usize = 2001;
const TIMED: usize = 1001;
/// The memory that is taken between two ticks: more than the kernel's counters may be behind. All
/// of it is released at [`HELD_MAX`] pieces, so that the next is new to the kernel as well.
const TOUCHED: usize = 1 << 20;
const HELD_MAX: usize = 64;
const PATIENCE: Duration = Duration::from_secs(60);

thread_local! {
    /// When this thread's turn began, and what it had allocated by then.
    static BEGUN: Cell<Option<(Instant, u64)>> = const { Cell::new(None) };
}

/// The records of one thread: what each turn took in us, and whether it allocated anything.
type Turns = Vec<(f64, bool)>;

/// The clock.
#[derive(Debug, Default)]
struct Watch {
    clock: SystemClock,
    control: Mutex<Turns>,
    /// Memory that moves between two ticks.
    held: Mutex<Vec<Vec<u8>>>,
    /// `true` if the control thread goes on without a wait.
    hurries: AtomicBool,
}

impl Watch {
    fn ends(&self) {
        let (now, allocated) = (Instant::now(), thread_totals().map_or(0, |it| it.0));
        if let Some((begun, before)) = BEGUN.take() {
            let took = (now - begun).as_secs_f64() * 1e6;
            lock(&self.control).push((took, allocated != before));
        }
    }

    fn moves_memory(&self) {
        let mut held = lock(&self.held);
        if held.len() >= HELD_MAX {
            held.clear();
            drop(purge_now());
        }
        held.push(vec![1; TOUCHED]);
    }

    /// The median of the next turns in us, and in how many of them something was allocated.
    fn median(&self, count: usize) -> Result<(f64, usize), BoxError> {
        *lock(&self.control) = Vec::with_capacity(1 << 16);
        let deadline = Instant::now() + PATIENCE;
        while lock(&self.control).len() < count {
            if Instant::now() > deadline {
                return Err(format!("{count} turns were not made in {PATIENCE:?}").into());
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        let turns = std::mem::take(&mut *lock(&self.control));
        let took: Vec<_> = turns.iter().take(count).map(|turn| turn.0).collect();
        Ok((median(&took), turns.iter().filter(|turn| turn.1).count()))
    }
}

impl Clock for Watch {
    fn now(&self) -> Moment {
        self.clock.now()
    }

    fn since_epoch(&self) -> Duration {
        self.clock.since_epoch()
    }

    fn wait_until(&self, bell: &Arc<Bell>, deadline: Moment) -> bool {
        if deadline == Moment::NEVER {
            return self.clock.wait_until(bell, deadline); // the worker
        }
        self.ends();
        self.moves_memory();
        let hurries = self.hurries.load(Ordering::Relaxed);
        let until = if hurries { self.clock.now() } else { deadline };
        let is_rung = self.clock.wait_until(bell, until);
        let allocated = thread_totals().map_or(0, |it| it.0);
        BEGUN.set(Some((Instant::now(), allocated)));
        is_rung
    }
}

/// Adds the figures.
fn threads(figures: &mut Figures) -> Result<(), BoxError> {
    let watch = Arc::new(Watch::default());
    let clock: Arc<dyn Clock> = watch.clone();
    let builder = Memory::builder().clock(clock).device(DeviceChoice::Host).purge_interval(None);
    let memory = builder.metrics_interval(Duration::from_millis(10)).start()?;
    let arena = memory.devices().open_arena("weights")?;
    let block = arena.alloc::<u8>(1 << 20, Region::Dynamic)?;
    figures.timed("publish.median_us", written(&memory)?, "us", 25.0);
    let permit = memory.admission().try_admit(Cost::host(ByteSize::mib(1)))?;
    watch.hurries.store(true, Ordering::Relaxed);
    let (tick, allocated) = watch.median(TICKS)?;
    watch.hurries.store(false, Ordering::Relaxed);
    figures.timed("tick.median_us", tick, "us", 8.0);
    figures.at_most("tick.allocations", count(allocated as u64), "ticks", 0.0);
    drop((permit, block));
    memory.shutdown_blocking(Duration::from_secs(5)).into_result()?;
    Ok(())
}

/// Returns the time to write a hundred series to the recorder, in us: those of a heap, an arena,
/// both budgets and admission, as the worker writes them, one time after the other.
fn written(memory: &Memory) -> Result<f64, BoxError> {
    let snapshot = memory.snapshot();
    let (heap, arenas) = (snapshot.heap.as_ref(), &snapshot.devices.arenas);
    let write = || record::publish(heap, arenas, memory.admission());
    // How many they are, another recorder shows.
    let other = PrometheusBuilder::new().build_recorder();
    metrics::with_local_recorder(&other, write);
    let shown = other.handle().render();
    let series = shown.lines().filter(|line| !line.is_empty() && !line.starts_with('#')).count();
    let took = (0..TIMED).map(|_| {
        let begun = Instant::now();
        write();
        begun.elapsed().as_secs_f64() * 1e6
    });
    let all = median(&took.collect::<Vec<_>>());
    Ok(all * 100.0 / count(series as u64))
}
