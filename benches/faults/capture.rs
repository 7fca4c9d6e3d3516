//! Captures of graphs on streams that are no lanes, while an arena decays on another thread.
//!
//! A decay that waited for the whole context, or asked an event in the default mode of its thread,
//! failed with code 900 and invalidated every capture of the process.

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

/// The number of captures that are begun.
const CAPTURES: u64 = 1_000;

/// The time between two decays.
const PERIOD: Duration = Duration::from_millis(10);

/// Bytes of each block that is freed before a capture.
const BLOCK: usize = 1 << 20;

pub(crate) fn run() -> Result<(), BoxError> {
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
    let mut spoiled = 0_u64;
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
    println!("figure faults.capture.captures {CAPTURES} count");
    println!("figure faults.capture.spoiled {spoiled} count");
    drop((lane, own, foreign));
    arena.close()?;
    drop((arena, context));
    fake.assert_clean();
    if spoiled > 0 || failed > 0 {
        return Err(format!("{spoiled} captures were spoiled, {failed} decays failed").into());
    }
    Ok(())
}
