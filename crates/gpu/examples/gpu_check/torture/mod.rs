//! Random work on eight lanes, whose every word is checked, while the arena does all that it may do
//! under it: reuse between lanes, decay, purges, sleeps, wakes and compactions.
//!
//! Kernels of 1 to 50 ms write a pattern of their own into each block and compare it later; they
//! begin with their delay, so a missing wait between two lanes changes words. An unrelated stream
//! measures the latency of launches meanwhile. The lanes are divided among the host threads. Every
//! second sleep or compaction runs while no other thread makes a step; the others run concurrently.
//! Only the arena orders work between lanes; for all other orders the program waits on the host.
//!
//! Bounds: [`QUEUED`] kernels a lane, half of `--torture-size` live, `--torture-seconds`.
//!
//! Invariant: every block has a seed that no other block of the run has, and is written once.

mod kernels;

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, PoisonError, RwLock};
use std::thread::{self, ScopedJoinHandle};
use std::time::Duration;

use cudarc::driver::{CudaEvent, CudaStream};
use lowtide_gpu::ByteSize;
use lowtide_gpu::clock::{Bell, Clock, Moment};
use lowtide_gpu::decay::DecayTime;
use lowtide_gpu::{Buffer, CompactOptions, DeviceArena, DeviceError, Lane, Region, SleepOptions};

use super::cases::{Fault, Outcome};
use super::report::Report;
use super::rig::{Random, Rig, float, quantile, stream};
use kernels::{Kernels, Words};

/// Lanes, shared out among the threads.
pub(crate) const LANES: usize = 8;

/// Kernels queued on a lane before the host waits for the oldest.
const QUEUED: usize = 16;

/// Steps of a thread between two looks at the counts.
const LOOK: u64 = 16;

/// Of a thousand steps, those from this one on are compactions and sleeps.
const ALONE: u64 = 992;

/// Idle memory is released after this.
const DECAY: Duration = Duration::from_millis(100);

/// The time between two launches on the unrelated stream.
const PACE: Duration = Duration::from_millis(1);

/// Launches that are timed before the torture.
const QUIET: usize = 500;

/// Launches that are timed during the torture, at most: enough for 17 minutes.
const LAUNCHES: usize = 1_000_000;

/// The delays of kernels, from the shortest to the longest; a fifth of them have none.
const DELAYS: (Duration, Duration) = (Duration::from_millis(1), Duration::from_millis(50));

/// The smallest block.
const SMALLEST: ByteSize = ByteSize::kib(4);

/// The number of operations of each kind, over all threads.
#[derive(Debug, Default)]
struct Counts {
    steps: AtomicU64,
    blocks: AtomicU64,
    kernels: AtomicU64,
    released: AtomicU64,
    sleeps: AtomicU64,
    moves: AtomicU64,
}

fn add(to: &AtomicU64, count: u64) {
    to.fetch_add(count, Ordering::Relaxed);
}

/// The state that the threads share.
struct Shared<'a> {
    rig: &'a Rig<'a>,
    arena: DeviceArena,
    kernels: Kernels,
    counts: Counts,
    /// The seed of the next block.
    seed: AtomicU32,
    /// The live bytes of each thread, at most.
    room: ByteSize,
    end: Moment,
    /// Read during a step, written during one that has the arena alone.
    turn: RwLock<()>,
    /// Set if a thread failed or found a wrong word.
    stop: AtomicBool,
}

/// Runs until the time is over, or a wrong word was found.
pub(crate) fn torture(rig: &Rig<'_>, report: &mut Report<'_>) -> Outcome {
    let args = rig.args;
    let size = rig.fitting(args.torture_size, args.torture_block)?;
    let threads = args.torture_threads;
    report.line(&format!("torture: seed {}, {threads} threads, {LANES} lanes, {size}", args.seed));
    let kernels = Kernels::load(&rig.context)?;
    let unrelated = rig.context.new_stream()?;
    let quiet = latencies(rig, &kernels, &unrelated, QUIET, &AtomicBool::new(false))?;
    let start = rig.clock.now();
    let shared = Shared {
        rig,
        arena: rig.arena("torture", size, DecayTime::from_duration(DECAY))?.0,
        kernels,
        counts: Counts::default(),
        seed: AtomicU32::new(1),
        room: size.scaled(0.5 / float(threads)),
        end: start + args.torture_seconds,
        turn: RwLock::new(()),
        stop: AtomicBool::new(false),
    };
    let ended = AtomicBool::new(false);
    let (busy, done) = thread::scope(|scope| {
        let shared = &shared;
        let workers: Vec<_> = (0..threads)
            .map(|number| scope.spawn(move || shared.stopping(|| Worker::run(shared, number))))
            .collect();
        let (ended, unrelated) = (&ended, &unrelated);
        let launcher = scope.spawn(move || {
            shared.stopping(|| latencies(rig, &shared.kernels, unrelated, LAUNCHES, ended))
        });
        let done: Vec<_> = workers.into_iter().map(ScopedJoinHandle::join).collect();
        ended.store(true, Ordering::Relaxed);
        (launcher.join(), done)
    });
    let took = rig.clock.now() - start;
    let outcome = done.into_iter().flatten().collect::<Outcome>();
    let wrong = shared.kernels.wrong();
    write_counts(&shared.counts, took, report);
    if let Ok(Ok(busy)) = busy {
        write_latencies(&quiet, &busy, report);
    }
    let wrong = wrong?;
    report.figure("gpu.torture.wrong_words", float(wrong.words), "words");
    if wrong.words > 0 {
        let (seed, run) = (wrong.seed, args.seed);
        return Err(format!(
            "{} wrong words; one is {:#010x} in block {seed} of the run with seed {run}",
            wrong.words, wrong.found
        )
        .into());
    }
    outcome?;
    rig.settle(&shared.arena)?;
    Ok(shared.arena.close()?)
}

/// Launches kernels on an unrelated stream until `ended` is set, at most `most`. Returns the
/// microseconds from each launch to the end of its work.
fn latencies(
    rig: &Rig<'_>,
    kernels: &Kernels,
    stream: &CudaStream,
    most: usize,
    ended: &AtomicBool,
) -> Result<Vec<f64>, Fault> {
    let (bell, mut took_us) = (Bell::new(), Vec::new());
    while took_us.len() < most && !ended.load(Ordering::Relaxed) {
        let (took, ()) = rig.timed(|| kernels.launch_and_wait(stream))?;
        took_us.push(took.as_secs_f64() * 1e6);
        // No other thread notifies this bell, so this waits until the time.
        rig.clock.wait_until(&bell, rig.clock.now() + PACE);
    }
    Ok(took_us)
}

fn write_latencies(quiet: &[f64], busy: &[f64], report: &mut Report<'_>) {
    for (when, took_us) in [("quiet_launch", quiet), ("launch", busy)] {
        for share in [50, 99] {
            let name = format!("gpu.torture.{when}_p{share}_us");
            report.figure(&name, quantile(took_us, 10 * share), "us");
        }
    }
    let added = (quantile(busy, 990) - quantile(quiet, 990)).max(0.0);
    report.figure("gpu.torture.added_launch_p99_us", added, "us");
}

fn write_counts(counts: &Counts, took: Duration, report: &mut Report<'_>) {
    report.figure("gpu.torture.s", took.as_secs_f64(), "s");
    for (name, count, unit) in [
        ("steps", &counts.steps, "steps"),
        ("blocks", &counts.blocks, "blocks"),
        ("kernels", &counts.kernels, "kernels"),
        ("released_bytes", &counts.released, "bytes"),
        ("sleeps", &counts.sleeps, "sleeps"),
        ("moves", &counts.moves, "moves"),
    ] {
        let count = float(count.load(Ordering::Relaxed));
        report.figure(&format!("gpu.torture.{name}"), count, unit);
    }
}

/// Loses the device's context, to test this program.
pub(crate) fn lose_context(rig: &Rig<'_>) -> Outcome {
    let kernels = Kernels::load(&rig.context)?;
    Ok(kernels.lose_context(&*rig.context.new_stream()?)?)
}

impl Shared<'_> {
    /// Stops the other threads if this one fails or panics.
    fn stopping<T>(&self, act: impl FnOnce() -> Result<T, Fault>) -> Result<T, Fault> {
        let done = catch_unwind(AssertUnwindSafe(act));
        let done = done.unwrap_or_else(|_| Err("a thread panicked".into()));
        if done.is_err() {
            self.stop.store(true, Ordering::Relaxed);
        }
        done
    }

    fn is_over(&self, steps: u64) -> bool {
        let most = self.rig.args.torture_steps;
        self.stop.load(Ordering::Relaxed)
            || (most > 0 && steps >= most)
            || self.rig.clock.now() >= self.end
    }
}

/// A block with its pattern.
struct Live {
    buffer: Buffer<u32>,
    seed: u32,
    /// Its lane, of those of the thread.
    lane: usize,
}

/// A lane, and the ends of its kernels, the oldest first.
struct Queue {
    lane: Lane,
    stream: Arc<CudaStream>,
    ends: VecDeque<CudaEvent>,
}

impl Queue {
    /// Notes that a kernel was queued, and waits for the oldest if there are too many.
    fn queued(&mut self) -> Outcome {
        self.ends.push_back(self.stream.record_event(None)?);
        if self.ends.len() > QUEUED
            && let Some(oldest) = self.ends.pop_front()
        {
            oldest.synchronize()?;
        }
        Ok(())
    }
}

/// A host thread with some of the lanes.
struct Worker<'a> {
    shared: &'a Shared<'a>,
    queues: Vec<Queue>,
    live: VecDeque<Live>,
    live_bytes: ByteSize,
    random: Random,
}

impl<'a> Worker<'a> {
    fn run(shared: &'a Shared<'a>, number: usize) -> Outcome {
        let lanes = (number..LANES).step_by(shared.rig.args.torture_threads).map(|_| {
            let lane = shared.rig.lane(&shared.arena)?;
            let stream = Arc::clone(stream(&lane)?);
            Ok(Queue { lane, stream, ends: VecDeque::new() })
        });
        let mut worker = Self {
            shared,
            queues: lanes.collect::<Result<_, Fault>>()?,
            live: VecDeque::new(),
            live_bytes: ByteSize::ZERO,
            random: Random(shared.rig.args.seed ^ (number as u64) << 32),
        };
        let mut steps = 0;
        while !shared.is_over(steps) {
            worker.step()?;
            steps += 1;
            if steps % LOOK == 0 && shared.kernels.wrong()?.words > 0 {
                shared.stop.store(true, Ordering::Relaxed);
            }
        }
        add(&shared.counts.steps, steps);
        worker.finish()
    }

    /// Checks all blocks for the last time, and waits.
    fn finish(mut self) -> Outcome {
        while let Some(mut block) = self.live.pop_front() {
            self.check(&mut block)?;
        }
        self.queues.iter().try_for_each(|queue| Ok(queue.stream.synchronize()?))
    }

    fn step(&mut self) -> Outcome {
        let what = self.random.below(1_000);
        let turn = &self.shared.turn;
        if what >= ALONE && self.random.below(2) == 0 {
            let _turn = turn.write().unwrap_or_else(PoisonError::into_inner);
            return self.act(what);
        }
        let _turn = turn.read().unwrap_or_else(PoisonError::into_inner);
        self.act(what)
    }

    fn act(&mut self, what: u64) -> Outcome {
        match what {
            0..480 => self.alloc(),
            480..820 => self.free(),
            820..920 => self.check_on(false),
            920..940 => self.check_on(true),
            940..960 => {
                let lane = self.random.index(self.queues.len());
                Ok(self.queues[lane].lane.end_run()?)
            }
            960..988 => self.decay(),
            988..ALONE => self.purge(),
            ALONE..996 => self.compact(),
            _ => self.sleep(),
        }
    }

    /// Allocates a block and writes its pattern.
    fn alloc(&mut self) -> Outcome {
        let size = self.size();
        while self.live_bytes.saturating_add(size) > self.shared.room && !self.live.is_empty() {
            self.free()?;
        }
        let at = self.random.index(self.queues.len());
        let count = usize::try_from(size.get() / 4)?;
        let buffer = match self.queues[at].lane.alloc::<u32>(count, Region::Dynamic) {
            Ok(buffer) => buffer,
            // Other threads and work that is not done may have the rest of the limit.
            Err(DeviceError::OutOfMemory { .. }) => return self.free(),
            Err(error) => return Err(error.into()),
        };
        let seed = self.shared.seed.fetch_add(1, Ordering::Relaxed);
        let mut block = Live { buffer, seed, lane: at };
        self.launch(&mut block, at, false)?;
        self.live_bytes = self.live_bytes.saturating_add(block.buffer.bytes());
        add(&self.shared.counts.blocks, 1);
        self.live.push_back(block);
        Ok(())
    }

    /// From the smallest to `--torture-block`; each doubling is as likely as any other.
    fn size(&mut self) -> ByteSize {
        let largest = self.shared.rig.args.torture_block.max(SMALLEST).get();
        let doublings = (largest / SMALLEST.get()).ilog2();
        let least = SMALLEST.get() << self.random.below(u64::from(doublings) + 1);
        let size = least + self.random.below(least);
        ByteSize::new(size.min(largest) / 4 * 4)
    }

    fn delay(&mut self) -> Duration {
        if self.random.below(5) == 0 {
            return Duration::ZERO;
        }
        // The square of a share: short ones are more frequent.
        let share = float(self.random.below(1 << 20)) / f64::from(1 << 20);
        DELAYS.0 + (DELAYS.1 - DELAYS.0).mul_f64(share * share)
    }

    /// Queues the kernel that writes a block, or the one that checks it, on one of the lanes.
    fn launch(&mut self, block: &mut Live, on: usize, is_check: bool) -> Outcome {
        let (own, other) = (&self.queues[block.lane], &self.queues[on]);
        let mut lease = own.lane.enter()?;
        if on != block.lane {
            // Not by a wait of the device: those are the arena's alone.
            own.stream.record_event(None)?.synchronize()?;
            block.buffer.record_use(&other.lane)?;
            lease.record_use(&other.lane)?;
        }
        let at = block.buffer.address(&lease)?.ok_or("a block without address")?.get();
        let words = Words { at, count: block.buffer.len() as u64, seed: block.seed };
        let delay = self.delay();
        self.shared.kernels.queue(&self.queues[on].stream, words, delay, is_check)?;
        drop(lease);
        add(&self.shared.counts.kernels, 1);
        self.queues[on].queued()
    }

    /// Compares a block with its pattern.
    fn check(&mut self, block: &mut Live) -> Outcome {
        self.launch(block, block.lane, true)
    }

    fn take(&mut self) -> Option<Live> {
        if self.live.is_empty() {
            return None;
        }
        let at = self.random.index(self.live.len());
        self.live.swap_remove_back(at)
    }

    /// Checks a block and frees it, with both kernels perhaps still queued.
    fn free(&mut self) -> Outcome {
        let Some(mut block) = self.take() else { return Ok(()) };
        self.check(&mut block)?;
        self.live_bytes = self.live_bytes.saturating_sub(block.buffer.bytes());
        Ok(())
    }

    /// Checks a block, on its own lane or on any.
    fn check_on(&mut self, any: bool) -> Outcome {
        let Some(mut block) = self.take() else { return Ok(()) };
        let lane = if any { self.random.index(self.queues.len()) } else { block.lane };
        self.launch(&mut block, lane, true)?;
        self.live.push_back(block);
        Ok(())
    }

    fn decay(&self) -> Outcome {
        let decayed = self.shared.arena.decay(self.shared.rig.clock.now())?;
        add(&self.shared.counts.released, decayed.get());
        Ok(())
    }

    fn purge(&self) -> Outcome {
        add(&self.shared.counts.released, self.shared.arena.purge()?.get());
        Ok(())
    }

    fn compact(&self) -> Outcome {
        let budget = self.shared.rig.args.torture_block.max(ByteSize::mib(4));
        let options = CompactOptions { budget, ..CompactOptions::new(Region::Dynamic) };
        let done = self.shared.arena.compact(options, |_| {})?;
        add(&self.shared.counts.moves, done.moves);
        Ok(())
    }

    /// Lets the arena sleep; the next use wakes it.
    fn sleep(&mut self) -> Outcome {
        let arena = &self.shared.arena;
        let stores_max = if self.random.below(2) == 0 { ByteSize::ZERO } else { ByteSize::MAX };
        arena.set_stores_max(stores_max);
        let options = SleepOptions { drain: Duration::from_millis(10), ..SleepOptions::default() };
        match arena.sleep(options) {
            Ok(_) => add(&self.shared.counts.sleeps, 1),
            // Another thread holds or wants a lease, or sleeps as well.
            Err(
                DeviceError::Leased { .. }
                | DeviceError::SleepCancelled { .. }
                | DeviceError::State { .. },
            ) => {}
            Err(error) => return Err(error.into()),
        }
        if self.random.below(2) == 0 {
            return Ok(());
        }
        match arena.wake() {
            // It is awake already.
            Ok(_) | Err(DeviceError::State { .. }) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }
}
