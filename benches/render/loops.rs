//! The costs of the two threads of a `Memory`: the control thread for a tick, the worker for a
//! publication; and of that, writing the series.
//!
//! Both wait on the clock that the `Memory` was given, and do one turn of their work between two
//! waits. So a clock that writes down what lies between them measures the real loops, over the real
//! kernel and heap, and what they allocate. Between two ticks it takes memory and touches it, so
//! that each finds that something moved: the dear case.
//!
//! Invariant: what the clock does itself lies outside of what it measures.

use std::cell::Cell;
use std::sync::Arc;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use lowtide::clock::{Bell, Clock, Moment, SystemClock};
use lowtide::config::DeviceChoice;
use lowtide::device::Region;
use lowtide::metrics::MetricsTier;
use lowtide::metrics::record::MetricsWriter;
use lowtide::{BoxError, ByteSize, Memory};
use lowtide_admission::{Budget, Cost};
use lowtide_core::sync::lock;
use lowtide_heap::{purge_now, thread_totals};
use metrics_exporter_prometheus::PrometheusBuilder;

use crate::common::figures::{Figures, count, median};

/// Turns of each kind that are measured.
const TICKS: usize = 2001;
const PUBLICATIONS: usize = 501;
const TIMED: usize = 1001;
/// The memory that is taken between two ticks: more than the kernel's counters may be behind. All
/// of it is released at [`HELD_MAX`] pieces, so that the next is new to the kernel as well.
const TOUCHED: usize = 1 << 20;
const HELD_MAX: usize = 64;
const PUBLISHED_EACH: Duration = Duration::from_millis(10);
const PATIENCE: Duration = Duration::from_secs(60);
/// Microseconds of writing the series.
const GOAL_US: f64 = 25.0;
/// Microseconds of a tick.
const GOAL_TICK_US: f64 = 8.0;
/// The goal is for so many series.
const SERIES: u32 = 100;
/// The same goal over the floor: it was set where one gauge without a label took 53 ns.
const GOAL_OVER_FLOOR: f64 = 25_000.0 / (53.0 * 100.0);

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
    worker: Mutex<Turns>,
    /// Memory that moves between two ticks, unless it is still.
    held: Mutex<Vec<Vec<u8>>>,
    is_still: AtomicBool,
    /// `true` if the control thread goes on without a wait.
    hurries: AtomicBool,
}

impl Watch {
    fn ends(&self, of: &Mutex<Turns>) {
        let (now, allocated) = (Instant::now(), thread_totals().map_or(0, |it| it.0));
        if let Some((begun, before)) = BEGUN.take() {
            let took = (now - begun).as_secs_f64() * 1e6;
            lock(of).push((took, allocated != before));
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
    fn median(&self, of: &Mutex<Turns>, count: usize) -> Result<(f64, usize), BoxError> {
        *lock(of) = Vec::with_capacity(1 << 16);
        let deadline = Instant::now() + PATIENCE;
        while lock(of).len() < count {
            if Instant::now() > deadline {
                return Err(format!("{count} turns were not made in {PATIENCE:?}").into());
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        let turns = std::mem::take(&mut *lock(of));
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
        let is_control = deadline != Moment::NEVER;
        self.ends(if is_control { &self.control } else { &self.worker });
        let until = if is_control {
            if !self.is_still.load(Ordering::Relaxed) {
                self.moves_memory();
            }
            if self.hurries.load(Ordering::Relaxed) { self.clock.now() } else { deadline }
        } else {
            deadline
        };
        let is_rung = self.clock.wait_until(bell, until);
        let allocated = thread_totals().map_or(0, |it| it.0);
        BEGUN.set(Some((Instant::now(), allocated)));
        is_rung
    }
}

/// Adds the figures.
pub(crate) fn measure(figures: &mut Figures) -> Result<(), BoxError> {
    let watch = Arc::new(Watch::default());
    let clock: Arc<dyn Clock> = watch.clone();
    let builder = Memory::builder().clock(clock).device(DeviceChoice::Host);
    let memory = builder.metrics_interval(PUBLISHED_EACH).purge_interval(None).start()?;
    let arena = memory.devices().open_arena("weights")?;
    let block = arena.alloc::<u8>(1 << 20, Region::Dynamic)?;
    let (all, _) = watch.median(&watch.worker, PUBLICATIONS)?;
    let (hundred, floor) = written(&memory)?;
    figures.timed("publish.median_us", hundred, "us", GOAL_US);
    figures.add("publish.floor_us", floor, "us");
    figures.timed("publish.over_floor", hundred / floor, "times", GOAL_OVER_FLOOR);
    figures.add("publish.woken_us", all, "us");

    let permit = memory.admission().try_admit(Cost::host(ByteSize::mib(1)))?;
    watch.hurries.store(true, Ordering::Relaxed);
    let (tick, allocated) = watch.median(&watch.control, TICKS)?;
    watch.is_still.store(true, Ordering::Relaxed);
    let (still, still_allocated) = watch.median(&watch.control, TICKS)?;
    watch.hurries.store(false, Ordering::Relaxed);
    figures.timed("tick.median_us", tick, "us", GOAL_TICK_US);
    figures.add("tick.still_us", still, "us");
    let allocated = count((allocated + still_allocated) as u64);
    figures.at_most("tick.allocations", allocated, "ticks", 0.0);
    drop((permit, block));
    memory.shutdown_blocking(Duration::from_secs(5)).into_result()?;
    Ok(())
}

/// Returns the time to write a hundred series to the recorder, in us: those of a heap, an arena,
/// both budgets and admission, as the worker writes them, one time after the other. And the least
/// that the recorder takes for as many: one name, without a label, found at once.
fn written(memory: &Memory) -> Result<(f64, f64), BoxError> {
    let snapshot = memory.snapshot();
    let write = || {
        let to = MetricsWriter::new(MetricsTier::Detail, true);
        snapshot.heap.iter().for_each(|heap| to.heap(heap));
        snapshot.devices.arenas.iter().for_each(|arena| to.arena("0", arena));
        for budget in [Budget::Host, Budget::Device] {
            to.ledger(memory.admission().ledger(budget), budget);
        }
        to.admission(&snapshot.admission);
    };
    // How many they are, another recorder shows.
    let other = PrometheusBuilder::new().build_recorder();
    metrics::with_local_recorder(&other, write);
    let shown = other.handle().render();
    let series = shown.lines().filter(|line| !line.is_empty() && !line.starts_with('#')).count();
    let floor = timed(|| (0..SERIES).for_each(|_| metrics::gauge!("lowtide_floor").set(1.0)));
    let hundred = timed(write) * f64::from(SERIES) / f64::from(u32::try_from(series)?);
    Ok((hundred, floor))
}

/// The median time of some calls, in us.
fn timed(mut act: impl FnMut()) -> f64 {
    let took = (0..TIMED).map(|_| {
        let begun = Instant::now();
        act();
        begun.elapsed().as_secs_f64() * 1e6
    });
    median(&took.collect::<Vec<_>>())
}
