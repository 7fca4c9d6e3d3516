//! An arena over a simulated device, buffers with marks in them, and what must hold at the end.
//!
//! Invariant: marks are written and checked by work of the device, under a lease.
#![expect(unsafe_code, reason = "a lane is of a stream that the caller vouches for")]

use std::sync::Arc;
use std::time::Duration;

use crate::wait_until;
use lowtide_cuda_sim::{DriverCosts, Order, Outcome, Pattern, SimDriver, SimOptions};
use lowtide_gpu::ByteSize;
use lowtide_gpu::driver::{DeviceAddress, Driver as _, StreamHandle};
use lowtide_gpu::{ArenaConfig, Buffer, DeviceArena, Lane, Lease, Region, SleepConfig};

pub(crate) const MIB: usize = 1 << 20;

/// A device whose calls cost nothing, and an arena over it.
pub(crate) struct Bed {
    pub(crate) sim: Arc<SimDriver>,
    pub(crate) arena: DeviceArena,
    pub(crate) stream: StreamHandle,
}

impl Bed {
    pub(crate) fn new(order: Order) -> Self {
        Self::with(order, |_| {})
    }

    pub(crate) fn with(order: Order, change: impl FnOnce(&mut ArenaConfig)) -> Self {
        let granularity = ByteSize::kib(64);
        let (handle_min, costs) = (granularity, DriverCosts::zero());
        let options = SimOptions { order, costs, granularity, handle_min, ..SimOptions::default() };
        Self::over(Arc::new(SimDriver::new(options)), change)
    }

    pub(crate) fn over(sim: Arc<SimDriver>, change: impl FnOnce(&mut ArenaConfig)) -> Self {
        // No host memory stays after a wake: what is looked after goes.
        let (wake_timeout, stores_max) = (Duration::ZERO, ByteSize::ZERO);
        let sleep = SleepConfig { wake_timeout, stores_max, ..SleepConfig::default() };
        let reserve = ByteSize::gib(8);
        let mut config = ArenaConfig { reserve, sleep, ..ArenaConfig::new("sleeper") };
        change(&mut config);
        let arena = DeviceArena::open(sim.clone(), Arc::new(sim.clock()), config).expect("open");
        let stream = sim.stream_create().expect("a stream");
        Self { sim, arena, stream }
    }

    pub(crate) fn lane(&self) -> Lane {
        // SAFETY: the simulation looks whether a stream is there.
        unsafe { self.arena.lane(self.stream) }.expect("a lane")
    }

    /// A buffer with a mark in it.
    pub(crate) fn marked(&self, size: usize, region: Region, mark: u64) -> Buffer<u8> {
        let buffer = self.arena.alloc::<u8>(size, region).expect("room");
        let lease = self.arena.enter().expect("a lease");
        self.mark(&buffer, &lease, mark);
        buffer
    }

    pub(crate) fn mark(&self, buffer: &Buffer<u8>, lease: &Lease, mark: u64) {
        for (at, size) in parts(buffer, lease) {
            self.sim.fill(self.stream, at, size, Pattern::new(mark)).expect("queued");
        }
    }

    /// Asserts that the mark is there.
    pub(crate) fn assert_marked(&self, buffer: &Buffer<u8>, mark: u64) {
        let lease = self.arena.enter().expect("a lease");
        let check = |(at, size)| self.sim.check(self.stream, at, size, Pattern::new(mark));
        let checks: Result<Vec<_>, _> = parts(buffer, &lease).into_iter().map(check).collect();
        self.sim.stream_synchronize(self.stream).expect("done");
        for check in checks.expect("queued") {
            assert_eq!(self.sim.outcome(check), Outcome::Held, "mark {mark}");
        }
    }

    /// Asserts that each has its mark: the first this one, each the next.
    pub(crate) fn assert_all_marked(&self, first: u64, buffers: &[Buffer<u8>]) {
        (first..).zip(buffers).for_each(|(mark, buffer)| self.assert_marked(buffer, mark));
    }

    /// Asserts that the contract was kept, and nothing is left when the arena is gone.
    pub(crate) fn end(self) {
        let Self { sim, arena, stream } = self;
        arena.validate();
        arena.close().expect("nothing is live");
        drop(arena);
        sim.stream_destroy(stream).expect("a stream");
        sim.run_all();
        sim.assert_no_faults();
        assert_eq!(sim.unsafe_unmaps(), 0);
        // A thread that woke the arena may be the last to let go of it.
        wait_until(|| sim.leaks().is_empty());
    }
}

/// Returns the parts of a buffer that hold a mark: the whole buffer, or both ends of a large one,
/// which is as good and less work.
fn parts(buffer: &Buffer<u8>, lease: &Lease) -> Vec<(DeviceAddress, ByteSize)> {
    const PART: ByteSize = ByteSize::kib(32);
    let (at, size) = (at(buffer, lease), buffer.bytes());
    if size <= ByteSize::kib(96) {
        return vec![(at, size)];
    }
    let last = at.checked_add(size.saturating_sub(PART)).expect("in the buffer");
    vec![(at, PART), (last, PART)]
}

pub(crate) fn at(buffer: &Buffer<u8>, lease: &Lease) -> DeviceAddress {
    buffer.address(lease).expect("ours").expect("not empty")
}
