//! A device, an arena over it, and a foreign stream of which the arena knows nothing.
#![expect(unsafe_code, reason = "a lane is of a stream that the caller vouches for")]

use std::sync::{Arc, Mutex};

use lowtide_cuda_sim::{SimDriver, SimOptions};
use lowtide_gpu::ByteSize;
use lowtide_gpu::clock::ManualClock;
use lowtide_gpu::driver::{DeviceAddress, Driver as _, StreamHandle};
use lowtide_gpu::{ArenaConfig, DeviceArena, Lane};

pub(crate) const MIB: usize = 1 << 20;

pub(crate) struct Bed {
    pub(crate) arena: DeviceArena,
    pub(crate) sim: Arc<SimDriver>,
    pub(crate) clock: ManualClock,
    pub(crate) foreign: StreamHandle,
}

impl Bed {
    pub(crate) fn new() -> Self {
        let sim = Arc::new(SimDriver::new(SimOptions::default()));
        let clock = sim.clock();
        let config = ArenaConfig { limit: ByteSize::mib(16), ..ArenaConfig::new("border") };
        let arena = DeviceArena::open(sim.clone(), Arc::new(clock.clone()), config);
        let arena = arena.expect("opens");
        let foreign = sim.stream_create().expect("a stream");
        Self { arena, sim, clock, foreign }
    }

    pub(crate) fn lane(&self) -> Lane {
        let stream = self.sim.stream_create().expect("a stream");
        // SAFETY: the simulation looks whether a stream is there.
        unsafe { self.arena.lane(stream) }.expect("a lane")
    }

    /// Breaches of the contract, and checks that found something else, when all work is done.
    pub(crate) fn faults(&self) -> u64 {
        self.sim.run_all();
        self.sim.faults_total() + self.sim.differences()
    }
}

/// The arguments with which release functions were called.
#[derive(Clone, Debug, Default)]
pub(crate) struct Released(Arc<Mutex<Vec<(DeviceAddress, ByteSize)>>>);

impl Released {
    pub(crate) fn note(&self) -> impl FnOnce(DeviceAddress, ByteSize) + Send + 'static {
        let log = Arc::clone(&self.0);
        move |at, size| log.lock().expect("no panic").push((at, size))
    }

    pub(crate) fn all(&self) -> Vec<(DeviceAddress, ByteSize)> {
        self.0.lock().expect("no panic").clone()
    }
}
