//! Faults of a device, over the fake libcuda with unmodified cudarc: captured graphs that a decay
//! spoiled, and safe code that raced with copies from and to page-locked memory.

use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::Duration;

use cudarc::driver::CudaContext;
use cudarc::driver::sys::{CUgraphInstantiate_flags, CUstreamCaptureMode};
use lowtide::clock::{Clock, SystemClock};
use lowtide::decay::DecayTime;
use lowtide::device::driver::cuda::{CudaDriver, CudaOptions};
use lowtide::device::{ArenaConfig, DeviceArena, Region};
use lowtide::{BoxError, ByteSize};
use lowtide_fake_cuda::{Fake, Options};

use crate::common::figures::{Figures, count};

#[cfg(target_os = "linux")]
#[path = "../../testing/fake-cuda/tests/cuda/driver/pinned_schedule.rs"]
#[allow(dead_code, reason = "the tests use more of it")]
mod pinned_schedule;

/// The number of captures that are begun.
const CAPTURES: u64 = 1_000;

/// The time between two decays.
const PERIOD: Duration = Duration::from_millis(10);

/// Bytes of each block that is freed before a capture.
const BLOCK: usize = 1 << 20;

/// Captures graphs on streams that are no lanes, while an arena decays on another thread.
///
/// A decay that waited for the whole context, or asked an event in the default mode of its thread,
/// failed with code 900 and invalidated every capture of the process.
pub(crate) fn capture(figures: &mut Figures) -> Result<(), BoxError> {
    let fake = Fake::start(Options { devices: 1, ..Options::default() });
    let driver = Arc::new(CudaDriver::open(CudaOptions::default())?);
    let context = CudaContext::new(0)?;
    let (own, foreign) = (context.new_stream()?, context.new_stream()?);
    let clock: Arc<dyn Clock> = Arc::new(SystemClock::new());
    let config = ArenaConfig {
        decay: DecayTime::AtOnce,
        limit: ByteSize::mib(256),
        reserve: ByteSize::gib(1),
        ..ArenaConfig::new("capture")
    };
    let arena = DeviceArena::open(driver, Arc::clone(&clock), config)?;
    let lane = arena.cuda_lane(&own)?;
    let mut spoiled = 0;
    let failed = std::thread::scope(|scope| -> Result<u64, BoxError> {
        let ((decayed, decays), (stop, stopped)) = (channel(), channel::<()>());
        let (arena, clock) = (&arena, &clock);
        let decay = scope.spawn(move || {
            let mut failed = 0;
            while stopped.recv_timeout(PERIOD) == Err(RecvTimeoutError::Timeout) {
                failed += u64::from(arena.decay(clock.now()).is_err());
                let _ = decayed.send(()); // the other end may be gone
            }
            failed
        });
        for _ in 0..CAPTURES {
            // Work of a stream, proved by an event; and of no stream, which only a wait proves.
            drop(lane.alloc::<u8>(BLOCK, Region::Dynamic)?);
            drop(arena.alloc::<u8>(BLOCK, Region::Stable)?);
            foreign.begin_capture(CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_GLOBAL)?;
            // A whole decay falls into the capture: the first may have been under way at its begin.
            decays.try_iter().for_each(drop);
            for _ in 0..2 {
                decays.recv()?;
            }
            let flags = CUgraphInstantiate_flags::CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH;
            spoiled += u64::from(foreign.end_capture(flags).is_err());
        }
        drop(stop);
        decay.join().map_err(|_| "the thread that decays panicked".into())
    })?;
    figures.add("faults.capture.captures", count(CAPTURES), "count");
    figures.at_most("faults.capture.spoiled", count(spoiled), "count", 0.0);
    drop((lane, own, foreign));
    arena.close()?;
    drop((arena, context));
    fake.assert_clean();
    if failed > 0 { Err(format!("{failed} decays failed").into()) } else { Ok(()) }
}

/// Runs random schedules of safe code and copies.
#[cfg(target_os = "linux")]
pub(crate) fn pinned(figures: &mut Figures) -> Result<(), BoxError> {
    /// Schedules; each seed is one.
    const SCHEDULES: u64 = 100_000;
    /// Schedules on one device, which is then replaced.
    const ON_ONE_DEVICE: u64 = 20;
    /// Races that are shown in full.
    const SHOWN: usize = 3;
    let fake = Fake::start(Options::default());
    let (mut all, mut shown) = (pinned_schedule::Done::default(), 0);
    for first in (0..SCHEDULES).step_by(20) {
        // Half of them with work as late as possible, the others in random order.
        let order = u32::from(first / ON_ONE_DEVICE % 2 == 1);
        let bed = pinned_schedule::Bed::new(&fake, order, first);
        for seed in first..first + ON_ONE_DEVICE {
            match bed.run(seed) {
                Ok(done) => all.add(done),
                Err(race) => {
                    if shown < SHOWN {
                        eprintln!("seed {}: {race}", race.seed);
                    }
                    shown += 1;
                    all.add(race.done);
                }
            }
        }
    }
    figures.add("faults.pinned.schedules", count(SCHEDULES), "schedules");
    figures.at_most("faults.pinned.races", count(all.races), "races", 0.0);
    Ok(())
}

#[cfg(not(target_os = "linux"))]
pub(crate) fn pinned(_: &mut Figures) -> Result<(), BoxError> {
    Ok(())
}
