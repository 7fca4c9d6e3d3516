//! The simulation as a device of the suite, in each order of work.

#![expect(unsafe_code, reason = "a lane is of a stream that the caller vouches for")]

use std::sync::{Arc, Mutex, PoisonError};

use lowtide_cuda_sim::{DriverCosts, Order, Outcome as Found, Pattern, SimDriver, SimOptions};
use lowtide_gpu::ByteSize;
use lowtide_gpu::driver::{DeviceAddress, Driver, StreamHandle};
use lowtide_gpu::{Buffer, DeviceArena, Lane, Lease, RawBlock};

use super::cases::{Device, Fault, Outcome};

struct Simulation {
    sim: Arc<SimDriver>,
    streams: Mutex<Vec<StreamHandle>>,
}

impl Simulation {
    fn new(order: Order, change: impl FnOnce(&mut SimOptions)) -> Self {
        let mut options = SimOptions { order, costs: DriverCosts::zero(), ..SimOptions::default() };
        change(&mut options);
        Self { sim: Arc::new(SimDriver::new(options)), streams: Mutex::default() }
    }

    /// Asserts that the contract of the driver was kept as well, and that nothing is left.
    fn end(self) {
        let streams = self.streams.into_inner().unwrap_or_else(PoisonError::into_inner);
        for stream in streams {
            self.sim.stream_destroy(stream).expect("a stream");
        }
        self.sim.run_all();
        self.sim.assert_no_faults();
        assert!(self.sim.leaks().is_empty(), "{:?}", self.sim.leaks());
    }
}

impl Device for Simulation {
    fn driver(&self) -> Arc<dyn Driver> {
        self.sim.clone()
    }

    fn lane(&self, arena: &DeviceArena) -> Result<Lane, Fault> {
        let stream = self.sim.stream_create()?;
        self.streams.lock().unwrap_or_else(PoisonError::into_inner).push(stream);
        // SAFETY: the simulation looks whether a stream is there.
        Ok(unsafe { arena.lane(stream) }?)
    }

    fn write(&self, lane: &Lane, to: &mut Buffer<u8>, lease: &Lease, value: u8) -> Outcome {
        self.fill(lane, to.address(lease)?.ok_or("no address")?, to.bytes(), value)
    }

    fn holds(&self, lane: &Lane, of: &Buffer<u8>, lease: &Lease, value: u8) -> Result<bool, Fault> {
        self.check(lane, of.address(lease)?.ok_or("no address")?, of.bytes(), value)
    }

    fn write_raw(&self, lane: &Lane, to: RawBlock, value: u8) -> Outcome {
        self.fill(lane, to.at, to.size, value)
    }

    fn raw_holds(&self, lane: &Lane, of: RawBlock, value: u8) -> Result<bool, Fault> {
        self.check(lane, of.at, of.size, value)
    }
}

impl Simulation {
    fn fill(&self, lane: &Lane, at: DeviceAddress, size: ByteSize, value: u8) -> Outcome {
        for (at, size) in parts(at, size)? {
            self.sim.fill(lane.stream(), at, size, Pattern::new(value.into()))?;
        }
        Ok(())
    }

    fn check(
        &self,
        lane: &Lane,
        at: DeviceAddress,
        size: ByteSize,
        value: u8,
    ) -> Result<bool, Fault> {
        let check =
            |(at, size)| self.sim.check(lane.stream(), at, size, Pattern::new(value.into()));
        let checks: Vec<_> = parts(at, size)?.into_iter().map(check).collect::<Result<_, _>>()?;
        self.sim.stream_synchronize(lane.stream())?;
        Ok(checks.into_iter().all(|check| self.sim.outcome(check) == Found::Held))
    }
}

/// Returns the parts that are written and checked: all of a small block, both ends of a large one,
/// which is as good and less work.
fn parts(at: DeviceAddress, size: ByteSize) -> Result<Vec<(DeviceAddress, ByteSize)>, Fault> {
    const PART: ByteSize = ByteSize::kib(16);
    let left = size.saturating_sub(PART);
    if left <= PART {
        return Ok(vec![(at, size)]);
    }
    let last = at.checked_add(left).ok_or("beyond all addresses")?;
    Ok(vec![(at, PART), (last, PART)])
}

fn run(order: Order, change: impl FnOnce(&mut SimOptions)) {
    let device = Simulation::new(order, change);
    super::run(&device);
    device.end();
}

#[test]
fn the_simulation_keeps_it_when_work_is_done_as_late_as_may_be() {
    run(Order::Lazy, |_| {});
}

#[test]
fn the_simulation_keeps_it_when_work_is_done_in_random_order() {
    for seed in 0..4 {
        println!("seed {seed}");
        run(Order::Random { seed }, |_| {});
    }
}

#[test]
fn the_simulation_keeps_it_with_other_handles_and_without_remap() {
    run(Order::Synchronous, |options| options.remap = false);
    run(Order::Lazy, |options| options.handle_min = ByteSize::mib(16));
}

#[test]
fn the_simulation_keeps_it_without_virtual_memory() {
    for pool in [false, true] {
        for order in [Order::Lazy, Order::Synchronous, Order::Random { seed: 7 }] {
            println!("pool: {pool}, {order:?}");
            run(order, |options| (options.virtual_memory, options.pool) = (false, pool));
        }
    }
}
