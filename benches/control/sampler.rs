//! The cost of the control loop: its thread's time on a processor while a request is held, so that
//! it ticks each 10 ms, in a process of 2 GiB with thousands of mappings; and one reading.
//!
//! Invariant: nothing but the loop runs in the process while its thread is watched.

use std::hint::black_box;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use lowtide::clock::{Bell, Clock as _, SystemClock};
use lowtide::device::Region;
use lowtide::{BoxError, ByteSize, Memory};
use lowtide_admission::{Cost, Signals};
use lowtide_heap::{HeapProbe, thread_totals};

use crate::common::figures::Figures;
use crate::look::Look;

const RESIDENT: ByteSize = ByteSize::gib(2);
/// Blocks of a granule each: every other one is given back, so that each stands in a mapping of its
/// own.
const GRANULES: usize = 4000;
const GRANULE: usize = 2 << 20;
const TICK: Duration = Duration::from_millis(10);
const WATCHED: Duration = Duration::from_secs(1);
const WARM: Duration = Duration::from_millis(300);
const TURNS: usize = 9;
const READINGS: u32 = 2000;
const DEADLINE: Duration = Duration::from_secs(20);

pub(crate) fn measure(quick: bool, figures: &mut Figures) -> Result<(), BoxError> {
    let memory = Memory::builder().start()?;
    let (resident, granules) = if quick { (ByteSize::mib(64), 40) } else { (RESIDENT, GRANULES) };
    let held = vec![1_u8; resident.as_usize().ok_or("no such size here")?];
    let arena = memory.devices().open_arena("maps")?;
    let mut blocks = Vec::with_capacity(granules);
    for _ in 0..granules {
        blocks.push(Some(arena.alloc::<u8>(GRANULE, Region::Stable)?));
    }
    for block in blocks.iter_mut().step_by(2) {
        *block = None;
    }
    memory.heap().purge()?;
    let maps = std::fs::read_to_string("/proc/self/maps")?.lines().count();
    println!("sampler: {} resident, {maps} mappings", memory.snapshot().physical);
    figures.add("sampler.mappings", f64::from(u32::try_from(maps)?), "mappings");

    // In turns, because the cost of a wake-up changes with what else the machine does.
    for _ in 0..if quick { 1 } else { TURNS } {
        let floor = floor()?;
        let permit = memory.admission().try_admit(Cost::host(ByteSize::mib(1)))?;
        std::thread::sleep(WARM); // an idle loop notices the request within a tick of 250 ms
        let loops = share_of("lowtide-control")?;
        drop(permit);
        figures.add("sampler.floor_cpu_ratio", floor, "of a core");
        figures.add("sampler.cpu_ratio", loops, "of a core");
        figures.add("sampler.over_floor", loops / floor, "times");
    }

    let (signals, heap) = (Signals::open(), HeapProbe::new()?);
    let read = || {
        black_box(signals.sample());
        drop(black_box(heap.active()));
    };
    let mut micros = Vec::with_capacity(READINGS as usize);
    let bytes_before = thread_totals()?.0;
    for _ in 0..READINGS {
        let start = Instant::now();
        read();
        micros.push(start.elapsed().as_secs_f64() * 1e6);
    }
    let bytes = thread_totals()?.0 - bytes_before;
    micros.sort_by(f64::total_cmp);
    let middle = micros.get(micros.len() / 2).copied().unwrap_or(f64::NAN);
    figures.add("sampler.read_us", middle, "us");
    figures.add("sampler.allocated_bytes", f64::from(u32::try_from(bytes)?), "bytes");
    let refresh = |micros: &mut Vec<f64>| {
        let start = Instant::now();
        drop(black_box(heap.snapshot()));
        micros.push(start.elapsed().as_secs_f64() * 1e6);
    };
    micros.clear();
    for _ in 0..READINGS / 10 {
        refresh(&mut micros);
    }
    micros.sort_by(f64::total_cmp);
    let middle = micros.get(micros.len() / 2).copied().unwrap_or(f64::NAN);
    figures.add("sampler.refresh_us", middle, "us");
    drop((held, blocks));
    arena.close()?;
    let ended = memory.shutdown_blocking(DEADLINE);
    if ended.is_clean() { Ok(()) } else { Err(ended.to_string().into()) }
}

/// The part of a core that the thread with this name takes while it is watched.
fn share_of(name: &str) -> Result<f64, BoxError> {
    let (before, start) = (nanos_of(name)?, Instant::now());
    std::thread::sleep(WATCHED);
    let (after, wall) = (nanos_of(name)?, start.elapsed());
    Ok(Duration::from_nanos(after - before).div_duration_f64(wall))
}

/// Nanoseconds on a processor of the thread with this name.
fn nanos_of(name: &str) -> Result<u64, BoxError> {
    let threads = Look::at(std::process::id())?.threads;
    let thread = threads.into_values().find(|thread| thread.name == name);
    Ok(thread.ok_or_else(|| format!("no thread {name}"))?.nanos)
}

/// Measures a thread that is woken each 10 ms and does nothing: no sampler can take less.
fn floor() -> Result<f64, BoxError> {
    let (clock, bell, stop) = (SystemClock::new(), Bell::new(), AtomicBool::new(false));
    std::thread::scope(|scope| {
        let idler = || {
            while !stop.load(Ordering::Acquire) {
                clock.wait_until(&bell, clock.now() + TICK);
            }
        };
        std::thread::Builder::new().name("idler".to_owned()).spawn_scoped(scope, idler)?;
        std::thread::sleep(WARM); // it names itself when it runs
        let share = share_of("idler");
        stop.store(true, Ordering::Release);
        share
    })
}
