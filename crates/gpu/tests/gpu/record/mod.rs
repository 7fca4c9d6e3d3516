//! Record and replay of a device arena: what is written, what is read, and whether the same comes
//! of it again.
//!
//! Programs are random ones with their seeds printed. It looks at no time and at no contents.

#![expect(unsafe_code, reason = "a lane is of a stream that the caller vouches for")]

mod documents;
mod malformed;
mod program;
mod replays;
mod rmm;
mod sinks;
mod sleep;
mod threads;

use std::io::{self, Write};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use lowtide_cuda_sim::{DriverCosts, Order, SimDriver, SimOptions};
use lowtide_gpu::ByteSize;
use lowtide_gpu::clock::ManualClock;
use lowtide_gpu::driver::{Driver, StreamHandle};
use lowtide_gpu::record::{Log, Recorder};
use lowtide_gpu::{ArenaConfig, DeviceArena, HostDriver, Lane, SleepConfig};

const MIB: u64 = 1 << 20;
const GRANULE: ByteSize = ByteSize::mib(2);

/// A sink that keeps what it gets.
#[derive(Clone, Default)]
struct Kept(Arc<Mutex<Vec<u8>>>);

impl Kept {
    fn text(&self) -> String {
        let bytes = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        String::from_utf8(bytes.clone()).expect("a recording is text")
    }

    fn log(&self) -> Log {
        Log::parse(&self.text()).expect("what was recorded is read")
    }
}

impl Write for Kept {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// A recorder and what it wrote.
fn recorder() -> (Recorder, Kept) {
    let kept = Kept::default();
    (Recorder::new(kept.clone()), kept)
}

fn host() -> Arc<dyn Driver> {
    Arc::new(HostDriver::new())
}

/// A device that does its work before a call returns, or as late as it may; calls cost nothing.
fn simulation(order: Order) -> Arc<SimDriver> {
    let (granularity, handle_min) = (GRANULE, GRANULE);
    let costs = DriverCosts::zero();
    let options = SimOptions { order, costs, granularity, handle_min, ..SimOptions::default() };
    Arc::new(SimDriver::new(options))
}

/// A device that has its memory in segments.
fn segments(pool: bool) -> Arc<SimDriver> {
    let (granularity, handle_min) = (GRANULE, GRANULE);
    let (costs, virtual_memory) = (DriverCosts::zero(), false);
    let device = SimOptions { costs, granularity, handle_min, ..SimOptions::default() };
    Arc::new(SimDriver::new(SimOptions { virtual_memory, pool, ..device }))
}

/// An arena that is recorded.
fn open(driver: Arc<dyn Driver>, config: ArenaConfig) -> (DeviceArena, Arc<ManualClock>, Kept) {
    let (recorder, kept) = recorder();
    let clock = Arc::new(ManualClock::new());
    let config = ArenaConfig { recorder: Some(recorder), ..config };
    let arena = DeviceArena::open(driver, clock.clone(), config).expect("open");
    (arena, clock, kept)
}

fn lane_of(arena: &DeviceArena, stream: StreamHandle) -> Lane {
    // SAFETY: the simulation looks whether a stream is there, and the host has none.
    unsafe { arena.lane(stream) }.expect("open")
}

fn config() -> ArenaConfig {
    // A clock that nobody moves on does not wait.
    let sleep = SleepConfig { wake_timeout: Duration::ZERO, ..SleepConfig::default() };
    ArenaConfig { reserve: ByteSize::gib(4), sleep, ..ArenaConfig::new("recorded") }
}
