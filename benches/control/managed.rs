//! Resources that load on demand: what a use costs, how often a thousand at once load, whether
//! anybody waits for another's unloading, and what is left after it.
//!
//! Invariant: one `Memory` for all of it, with the settings of the profile balanced but for the
//! idle time.

use std::hint::black_box;
use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::{Duration, Instant};

use lowtide::{BoxError, ByteSize, Memory};
use lowtide_admission::{Cost, Managed};

use crate::admission::alone;
use crate::common::figures::Figures;

const TURNS: u32 = 1_000_000;
/// The number of callers that want a cold resource at the same moment.
const CROWD: usize = 1000;
/// The time of a load, and of an unload, in the cases in which it matters.
const LONG: Duration = Duration::from_millis(500);
const IDLE: Duration = Duration::from_secs(1);
/// The longest tick of the control loop.
const TICK: Duration = Duration::from_millis(250);
const MODEL: usize = 60 << 20;
const DEADLINE: Duration = Duration::from_secs(20);

pub(crate) fn measure(rounds: usize, figures: &mut Figures) -> Result<(), BoxError> {
    let memory = Memory::builder().start()?;
    let hot = memory.managed("hot", || Ok(7_u64)).register()?;
    drop(hot.acquire_blocking()?);
    for _ in 0..rounds {
        let nanos = alone(TURNS, || drop(black_box(hot.acquire_blocking())));
        figures.add("managed.acquire_ns", nanos, "ns");
    }
    let loads = crowd(&memory)?;
    figures.add("managed.loads", f64::from(loads), "loads");
    figures.add("managed.other_wait_ms", waits(&memory, &hot)?, "ms");
    unload(&memory, figures)?;
    let ended = memory.shutdown_blocking(DEADLINE);
    if ended.is_clean() { Ok(()) } else { Err(ended.to_string().into()) }
}

/// Loads for a thousand who want it at once.
fn crowd(memory: &Memory) -> Result<u32, BoxError> {
    static LOADS: AtomicU32 = AtomicU32::new(0);
    let cold = memory
        .managed("cold", || {
            LOADS.fetch_add(1, Ordering::Relaxed);
            std::thread::sleep(LONG);
            Ok(())
        })
        .register()?;
    let ready = Barrier::new(CROWD);
    let got: usize = std::thread::scope(|scope| {
        let want = || {
            ready.wait();
            usize::from(cold.acquire_blocking().is_ok())
        };
        let threads: Vec<_> = (0..CROWD).map(|_| scope.spawn(want)).collect();
        threads.into_iter().map(|thread| thread.join().unwrap_or(0)).sum()
    });
    if got != CROWD {
        return Err(format!("{got} of {CROWD} had the resource").into());
    }
    Ok(LOADS.load(Ordering::Relaxed))
}

/// The longest wait in milliseconds of those who use one resource while another one is unloaded.
fn waits(memory: &Memory, hot: &Managed<u64>) -> Result<f64, BoxError> {
    let slow = memory.managed("slow", || Ok(())).unload(|()| std::thread::sleep(LONG));
    let slow = slow.register()?;
    drop(slow.acquire_blocking()?);
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let unloading = scope.spawn(|| {
            let unloaded = slow.unload_now(DEADLINE);
            over.store(true, Ordering::Release);
            unloaded
        });
        // The longest of thousands is the scheduler's time slice on a busy machine: told is the
        // 99.9th percentile.
        let mut waits = Vec::new();
        while !over.load(Ordering::Acquire) {
            let start = Instant::now();
            drop(black_box(hot.acquire_blocking()));
            waits.push(start.elapsed().as_secs_f64() * 1e3);
            std::thread::sleep(Duration::from_micros(100));
        }
        match unloading.join() {
            Ok(Ok(true)) => {
                waits.sort_by(f64::total_cmp);
                let at = waits.len() * 999 / 1000;
                waits.get(at).copied().ok_or_else(|| "nobody had time to wait".into())
            }
            other => Err(format!("the slow resource was not unloaded: {other:?}").into()),
        }
    })
}

/// When a resource goes that nobody uses, and what is resident then.
fn unload(memory: &Memory, figures: &mut Figures) -> Result<(), BoxError> {
    let cost = Cost::host(ByteSize::of(MODEL));
    let model = memory.managed("model", || Ok(vec![1_u8; MODEL])).cost(cost).idle(IDLE);
    let model = model.register()?;
    let physical = || memory.snapshot().physical;
    let before = physical();
    let held = model.acquire_blocking()?;
    let loaded = physical();
    drop(held);
    let released = Instant::now();
    while model.peek().is_some() {
        if released.elapsed() > DEADLINE {
            return Err("the model was never unloaded".into());
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    let late = released.elapsed().saturating_sub(IDLE);
    // The purge is a job of its own; what it leaves is looked at until it has been at work.
    let allowed = before.scaled(0.05).max(ByteSize::mib(8));
    let mut after = physical();
    while after > before.saturating_add(allowed) && released.elapsed() < DEADLINE {
        std::thread::sleep(Duration::from_millis(1));
        after = physical();
    }
    let over = after.saturating_sub(before);
    println!(
        "unload: {before} before, {loaded} loaded, {after} after {:.0} ms",
        released.elapsed().as_secs_f64() * 1e3
    );
    figures.add("managed.unload_late_ms", late.as_secs_f64() * 1e3, "ms");
    figures.add("managed.unload_late_ticks", late.div_duration_f64(TICK), "ticks");
    figures.add("managed.after_unload_mib", over.as_f64() / 1_048_576.0, "MiB");
    figures.add("managed.after_unload_over_goal", over.as_f64() / allowed.as_f64(), "ratio");
    Ok(())
}
