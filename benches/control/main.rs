//! Control: what admission, sampling, managed resources and the heap cost those who use them.
//!
//! Real threads and real time; the median of some rounds is told, because other work shares the
//! machine. Whether the service survives under load is the bench `overload`'s; how the whole
//! controller behaves over days, the bench `controller`'s.
//!
//! Exit codes: 0 every goal held; 1 one was missed, or something could not be measured.
#![expect(clippy::disallowed_methods, reason = "it measures real time")]
#![expect(clippy::print_stdout, reason = "the program that started this one reads it")]
#![expect(unsafe_code, reason = "allocators are called as such")]

use std::alloc::{GlobalAlloc, Layout};
use std::hint::black_box;
use std::process::ExitCode;
use std::ptr::null_mut;
use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use clap::{Parser, ValueEnum as _};
use common::callgrind::{Counted, per_step};
use common::figures::{Figures, count};
use common::number_of;
use common::process::{nanos_of, resident_at_rest};
use lowtide::clock::{Bell, Clock as _, SystemClock};
use lowtide::device::Region;
use lowtide::{BoxError, ByteSize, Memory};
use lowtide_admission::{Admission, Cost};
use lowtide_heap::{Heap, flush_thread_cache};
use tikv_jemallocator::Jemalloc;
use tokio::sync::Semaphore;

lowtide::global_allocator!(balanced);

/// The parts of the bench, in the order in which they run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum Part {
    /// The cost of admitting a request and ending it.
    Admission,
    /// Resources that load on demand.
    Managed,
    /// The cost of the control loop.
    Sampler,
    /// The cost of blocks of the heap.
    Heap,
}

/// What admission, sampling and managed resources cost.
#[derive(Clone, Debug, Parser)]
struct Cli {
    /// These parts alone.
    #[arg(long, value_delimiter = ',')]
    parts: Vec<Part>,
    #[command(flatten)]
    child: Counted,
}

const TURNS: u32 = 1_000_000;
const ROUNDS: usize = 9;
const COST: ByteSize = ByteSize::kib(64);
const DEADLINE: Duration = Duration::from_secs(20);
/// The process whose sampler is watched, with blocks of a granule each: every other one is given
/// back, so that each stands in a mapping of its own.
const RESIDENT: ByteSize = ByteSize::gib(2);
const GRANULES: usize = 4000;
const GRANULE: usize = 2 << 20;
const TICK: Duration = Duration::from_millis(10);
const WATCHED: Duration = Duration::from_secs(1);
const WARM: Duration = Duration::from_millis(300);

fn main() -> ExitCode {
    common::main(|cli: Cli| {
        if let Some(work) = &cli.child.be {
            return be(work, cli.child.steps).map(|()| true);
        }
        let mut figures = Figures::default();
        for part in Part::value_variants() {
            match part {
                part if !cli.parts.is_empty() && !cli.parts.contains(part) => {}
                Part::Admission => admission(&mut figures)?,
                Part::Managed => managed(&mut figures)?,
                Part::Sampler => sampler(&mut figures)?,
                Part::Heap => heap(&mut figures)?,
            }
        }
        Ok(figures.print())
    })
}

/// The cost of admitting a request and ending it, alone and with another thread; for comparison a
/// semaphore's permits by the byte, and two atomic additions. Every turn books and gives back.
fn admission(figures: &mut Figures) -> Result<(), BoxError> {
    let open = Admission::with_limit(ByteSize::gib(64));
    let full = Admission::with_limit(ByteSize::gib(1));
    let _most = full.try_admit(Cost::host(ByteSize::gib(1)))?;
    let admit = || drop(black_box(open.try_admit(black_box(Cost::host(COST)))));
    let reject = || drop(black_box(full.try_admit(black_box(Cost::host(COST)))));
    let account = AtomicU64::new(0);
    // What any account costs at least.
    let atomics = || {
        account.fetch_add(black_box(1), Ordering::Relaxed);
        account.fetch_sub(black_box(1), Ordering::Relaxed);
    };
    let semaphore = Semaphore::new(1 << 30);
    let permits = || drop(black_box(semaphore.try_acquire_many(black_box(65_536))));
    for _ in 0..ROUNDS {
        let (one, two) = (alone(admit), beside(&admit));
        let floors = (alone(atomics), beside(&atomics));
        figures.at_most("admission.one_threads_ns", one, "ns", 15.0);
        figures.at_most("admission.two_threads_ns", two, "ns", 80.0);
        figures.at_most("admission.rejected_ns", alone(reject), "ns", 15.0);
        figures.add("admission.atomics_one_ns", floors.0, "ns");
        figures.add("admission.atomics_two_ns", floors.1, "ns");
        figures.at_most("admission.one_over_atomics", one / floors.0, "ratio", 1.3);
        // The same goal over what two atomic operations took where it was set: 48 ns.
        figures.at_most("admission.two_over_atomics", two / floors.1, "ratio", 1.67);
        figures.add("admission.semaphore_one_ns", alone(permits), "ns");
        figures.add("admission.semaphore_two_ns", beside(&permits), "ns");
    }
    Ok(())
}

/// Nanoseconds of a turn.
fn alone(turn: impl Fn()) -> f64 {
    let start = Instant::now();
    for _ in 0..TURNS {
        turn();
    }
    start.elapsed().as_secs_f64() * 1e9 / f64::from(TURNS)
}

/// Nanoseconds of a turn of each of two threads.
fn beside(turn: &(impl Fn() + Sync)) -> f64 {
    let ready = Barrier::new(2);
    let run = || {
        ready.wait();
        alone(turn)
    };
    std::thread::scope(|scope| {
        let other = scope.spawn(run);
        let mine = run();
        other.join().map_or(f64::NAN, |theirs| f64::midpoint(mine, theirs))
    })
}

/// Resources that load on demand: what a use costs.
fn managed(figures: &mut Figures) -> Result<(), BoxError> {
    let memory = Memory::builder().start()?;
    let hot = memory.managed("hot", || Ok(7_u64)).register()?;
    drop(hot.acquire_blocking()?);
    for _ in 0..ROUNDS {
        let nanos = alone(|| drop(black_box(hot.acquire_blocking())));
        figures.at_most("managed.acquire_ns", nanos, "ns", 100.0);
    }
    Ok(memory.shutdown_blocking(DEADLINE).into_result()?)
}

/// The cost of the control loop: its thread's time on a processor while a request is held, so that
/// it ticks each 10 ms, in a process of 2 GiB with thousands of mappings. Nothing but the loop runs
/// in the process while its thread is watched. The bench `render` counts what a tick allocates.
fn sampler(figures: &mut Figures) -> Result<(), BoxError> {
    let memory = Memory::builder().start()?;
    let held = vec![1_u8; RESIDENT.as_usize().ok_or("no such size here")?];
    let arena = memory.devices().open_arena("maps")?;
    let mut blocks = Vec::with_capacity(GRANULES);
    for _ in 0..GRANULES {
        blocks.push(Some(arena.alloc::<u8>(GRANULE, Region::Stable)?));
    }
    blocks.iter_mut().step_by(2).for_each(|block| *block = None);
    memory.heap().purge()?;

    // In turns, because the cost of a wake-up changes with what else the machine does.
    for _ in 0..ROUNDS {
        let floor = floor()?;
        let permit = memory.admission().try_admit(Cost::host(ByteSize::mib(1)))?;
        std::thread::sleep(WARM); // an idle loop notices the request within a tick of 250 ms
        let loops = share_of("lowtide-control")?;
        drop(permit);
        figures.add("sampler.floor_cpu_ratio", floor, "of a core");
        figures.at_most("sampler.cpu_ratio", loops, "of a core", 0.003);
        figures.at_most("sampler.over_floor", loops / floor, "times", 1.5);
    }
    drop((held, blocks));
    arena.close()?;
    Ok(memory.shutdown_blocking(DEADLINE).into_result()?)
}

/// The part of a core that the thread with this name takes while it is watched.
fn share_of(name: &str) -> Result<f64, BoxError> {
    let (before, start) = (nanos_of(name)?, Instant::now());
    std::thread::sleep(WATCHED);
    let (after, wall) = (nanos_of(name)?, start.elapsed());
    Ok(Duration::from_nanos(after - before).div_duration_f64(wall))
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

/// Settings for threads that hold many blocks at once (docs/TUNING.md).
const SLOTS: &str = "tcache_nslots_small_min:128,tcache_nslots_large:64";
/// The most blocks at once.
const HELD: usize = 64;

/// Instructions of a block's allocation and release: by [`Heap`] over `tikv-jemallocator`, and with
/// [`SLOTS`]; and what [`SLOTS`] add to resident memory.
fn heap(figures: &mut Figures) -> Result<(), BoxError> {
    let plain = per_step("", "plain 64 1", 200_000)?;
    let pair = per_step("", "heap 64 1", 200_000)? / plain;
    figures.at_most("light.heap.pair64", pair, "ratio", 1.01);
    for (name, work, most) in [("1k", "heap 1024 64", 130.0), ("16k", "heap 16384 64", 400.0)] {
        let each = per_step(SLOTS, work, 2000)? / count(HELD as u64);
        figures.at_most(format!("light.heap.live_{name}"), each, "instructions", most);
    }
    let more = number_of(SLOTS, "rest")? - number_of("", "rest")?;
    figures.at_most("light.heap.rest", more / 1024.0, "MiB", 2.0);
    Ok(())
}

/// Allocates and frees blocks: `heap` or `plain`, their bytes, and how many at once. Or is a process
/// whose threads rest after that, with empty caches, and prints its resident KiB.
fn be(work: &str, steps: usize) -> Result<(), BoxError> {
    if let [allocator, bytes, held] = work.split(' ').collect::<Vec<_>>()[..] {
        let heap: &dyn GlobalAlloc = if allocator == "heap" { &Heap } else { &Jemalloc };
        blocks(heap, bytes.parse()?, held.parse()?, steps);
        return Ok(());
    }
    let resident = resident_at_rest(|| {
        (4..15).for_each(|bits| blocks(&Heap, 1 << bits, HELD, 10));
        flush_thread_cache().expect("flushed");
    });
    println!("{}", resident?);
    Ok(())
}

/// Allocates blocks and frees them, again and again.
fn blocks(heap: &dyn GlobalAlloc, bytes: usize, held: usize, steps: usize) {
    let layout = Layout::array::<u64>(black_box(bytes) / 8).expect("a size");
    let mut blocks = [null_mut(); HELD];
    for _ in 0..steps {
        for block in &mut blocks[..held] {
            // SAFETY: the layout has a size.
            *block = unsafe { heap.alloc(layout) };
            // SAFETY: it has so many bytes; there is memory.
            unsafe { block.write(1) };
        }
        for block in &blocks[..held] {
            // SAFETY: it came from this allocator with this layout.
            unsafe { heap.dealloc(*block, layout) };
        }
    }
}
