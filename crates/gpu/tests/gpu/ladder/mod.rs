//! The behaviour of an arena when memory is short: the rungs of its ladder, one after the other,
//! and its error if none of them helped.
//!
//! Over the host driver, and over the simulation, where calls are counted and neighbours come.

#![expect(clippy::print_stdout, reason = "seeds and measured values are shown")]

mod callbacks;
mod granule;
mod outlook;
mod placement;
mod random;
pub(crate) mod remap;

use std::sync::Arc;

use lowtide_cuda_sim::{DriverCosts, Order, SimDriver, SimOptions};
use lowtide_gpu::ByteSize;
use lowtide_gpu::clock::ManualClock;
use lowtide_gpu::{ArenaConfig, Buffer, DeviceArena, DeviceError, HostDriver, Region};

const DYNAMIC: Region = Region::Dynamic;
const GRANULE: ByteSize = ByteSize::mib(2);

fn config(limit: ByteSize) -> ArenaConfig {
    ArenaConfig { limit, reserve: ByteSize::gib(8), ..ArenaConfig::new("ladder") }
}

fn on_host(limit: ByteSize) -> DeviceArena {
    let clock = Arc::new(ManualClock::new());
    DeviceArena::open(Arc::new(HostDriver::new()), clock, config(limit)).expect("open")
}

/// A device whose calls cost nothing.
fn device(change: impl FnOnce(&mut SimOptions)) -> Arc<SimDriver> {
    let mut options = SimOptions {
        order: Order::Lazy,
        costs: DriverCosts::zero(),
        context_overhead: ByteSize::ZERO,
        ..SimOptions::default()
    };
    change(&mut options);
    Arc::new(SimDriver::new(options))
}

fn on_device(sim: &Arc<SimDriver>, config: ArenaConfig) -> DeviceArena {
    let driver: Arc<SimDriver> = Arc::clone(sim);
    DeviceArena::open(driver, Arc::new(sim.clock()), config).expect("open")
}

fn mib(arena: &DeviceArena, count: usize) -> Result<Buffer<u8>, DeviceError> {
    arena.alloc(count << 20, DYNAMIC)
}

/// Numbers that look random, from a seed that is printed.
struct Chance(u64);

impl Chance {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 = self.0.wrapping_mul(0x5851_F42D_4C95_7F2D).wrapping_add(0x1405_7B7E_F767_814F);
        (self.0 >> 33) % bound
    }

    fn index(&mut self, bound: usize) -> usize {
        usize::try_from(self.below(bound as u64)).expect("small")
    }
}
