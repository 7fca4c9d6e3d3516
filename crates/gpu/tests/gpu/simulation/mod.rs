//! The simulation of the CUDA driver: that it keeps CUDA's contract, and nothing beyond it.
//!
//! Each rule of the contract is a test. Where a rule says that nothing is waited for, the test sees
//! that nothing was; where it says that something is an error, the test sees the error and that
//! nothing else happened. `programs` asks the question the simulation is for: are wrong programs
//! caught, and right ones never accused?

mod capture;
mod failures;
mod memory;
mod model;
mod orders;
mod programs;
mod raw;
mod streams;

use lowtide_cuda_sim::{DriverCosts, Order, SimDriver, SimOptions};
use lowtide_gpu::ByteSize;
use lowtide_gpu::driver::{DeviceAddress, Driver as _, DriverError};

pub(crate) const GRANULE: ByteSize = ByteSize::mib(2);

/// A device in this order of work, whose calls cost nothing.
pub(crate) fn device(order: Order) -> SimDriver {
    SimDriver::new(SimOptions { order, costs: DriverCosts::zero(), ..SimOptions::default() })
}

/// Committed memory of so many granules.
pub(crate) fn committed(sim: &SimDriver, granules: u64) -> DeviceAddress {
    let size = ByteSize::new(granules * GRANULE.get());
    let at = sim.reserve(size).expect("addresses");
    sim.commit(at, size, GRANULE).expect("memory");
    at
}

/// The address so many bytes further on.
pub(crate) fn on(at: DeviceAddress, bytes: u64) -> DeviceAddress {
    at.checked_add(ByteSize::new(bytes)).expect("inside")
}

/// The number of the CUDA result.
pub(crate) fn code<T: std::fmt::Debug>(result: Result<T, DriverError>) -> Option<i64> {
    result.expect_err("it was to fail").code()
}

/// A sequence of numbers that is the same for the same seed.
pub(crate) struct Numbers(u64);

impl Numbers {
    pub(crate) fn new(seed: u64) -> Self {
        Self(seed)
    }

    pub(crate) fn below(&mut self, end: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (self.0 >> 33) % end
    }
}
