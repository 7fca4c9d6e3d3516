//! An arena over the simulation of CUDA's driver.

use std::sync::Arc;

use lowtide::BoxError;
use lowtide_cuda_sim::{DriverCosts, SimDriver, SimOptions};
use lowtide_gpu::driver::StreamHandle;
use lowtide_gpu::{ArenaConfig, DeviceArena, Lane};

/// A simulated device and an arena on it, whose time is the device's.
pub struct Bed {
    pub sim: Arc<SimDriver>,
    pub arena: DeviceArena,
}

impl Bed {
    /// Opens them; no call takes time.
    pub fn open(options: SimOptions, config: ArenaConfig) -> Result<Self, BoxError> {
        let costs = DriverCosts::zero();
        let sim = Arc::new(SimDriver::new(SimOptions { costs, ..options }));
        let arena = DeviceArena::open(sim.clone(), Arc::new(sim.clock()), config)?;
        Ok(Self { sim, arena })
    }

    /// A lane of a stream.
    #[expect(unsafe_code, reason = "a lane is of a stream that the caller vouches for")]
    pub fn lane(&self, stream: StreamHandle) -> Result<Lane, BoxError> {
        // SAFETY: the simulation checks that a stream exists, so any number is safe with it.
        Ok(unsafe { self.arena.lane(stream) }?)
    }

    /// Closes the arena.
    ///
    /// # Panics
    /// If a call broke the driver's contract.
    pub fn close(self) -> Result<(), BoxError> {
        self.arena.close()?;
        self.sim.assert_no_faults();
        Ok(())
    }
}
