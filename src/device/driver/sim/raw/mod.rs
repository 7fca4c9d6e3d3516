//! The calls of CUDA as cuda.h has them, one by one, below what `Driver` needs.
//!
//! For a library that offers the simulation under CUDA's own names. Handles, streams and events
//! are plain numbers here, results are CUDA's, and every rule of the manual is kept where the call
//! stands: a wrong call is refused with the driver's code and is on record as a fault, a wrong
//! access by work loses the context with 700. Contexts, threads and names of devices are the
//! caller's business; one simulation is one device with its context alive.
//!
//! Invariant: `Err(code) => code != 0`; a refused call changed nothing.

mod copies;
mod kernels;
mod memory;
mod pools;
mod streams;

pub use kernels::{KERNELS, Kernel};
pub use memory::Found;
pub use pools::PoolState;

pub use super::task::{DeviceBytes, HostBytes, HostKind, Job, Unreachable};

pub use copies::Place;

use super::SimDriver;
use super::model::Model;
use crate::device::driver::DriverError;
use crate::sync::MutexGuard;

/// What a call answers: a result of cuda.h other than success is the error.
pub type Answer<T = ()> = Result<T, u32>;

/// The single calls of a simulated device.
#[derive(Clone, Copy, Debug)]
pub struct Raw<'a>(&'a SimDriver);

impl SimDriver {
    /// Its single calls.
    #[must_use]
    pub const fn raw(&self) -> Raw<'_> {
        Raw(self)
    }
}

/// What a device holds, in numbers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Numbers {
    /// Bytes of the device that are taken, without the context's own and without neighbours'.
    pub taken_bytes: u64,
    /// Reservations of address space.
    pub reservations: u64,
    /// Physical handles, mapped or not.
    pub handles: u64,
    /// Mappings of them.
    pub mappings: u64,
    /// Plain allocations.
    pub plain_live: u64,
    /// Allocations from pools.
    pub pooled_live: u64,
    /// Pools that were created.
    pub pools: u64,
    /// Streams that were created.
    pub streams: u64,
    /// Events.
    pub events: u64,
    /// Captured graphs, executable or not.
    pub graphs: u64,
    /// Bytes of host memory that are page-locked.
    pub locked_bytes: u64,
    /// Bytes of managed memory.
    pub managed_bytes: u64,
    /// Pieces of work that are not done.
    pub unfinished: u64,
}

impl Raw<'_> {
    fn model(&self) -> MutexGuard<'_, Model> {
        self.0.model()
    }

    /// What the device holds. Cost: O(all that there is).
    #[must_use]
    pub fn numbers(&self) -> Numbers {
        let leaks = self.0.leaks();
        let model = self.model();
        let [plain_live, pooled_live] = model.pools.live();
        Numbers {
            taken_bytes: (model.memory.committed().get()) + model.memory.taken().get(),
            reservations: leaks.reservations as u64,
            handles: leaks.handles as u64,
            mappings: model.memory.mappings(),
            plain_live,
            pooled_live,
            pools: model.pools_made(),
            streams: leaks.streams as u64,
            events: leaks.events as u64,
            graphs: leaks.graphs as u64,
            locked_bytes: model.host_ranges.locked(),
            managed_bytes: model.host_ranges.managed(),
            unfinished: model.queues.unfinished() as u64,
        }
    }
}

/// The result of cuda.h that an error stands for.
#[expect(clippy::needless_pass_by_value, reason = "as `map_err` wants it")]
fn code(error: DriverError) -> u32 {
    match &error {
        DriverError::OutOfMemory { .. } | DriverError::LockLimit { .. } => 2,
        DriverError::Unsupported { .. } => 801,
        DriverError::Overlap { .. } | DriverError::Misaligned { .. } => 1,
        _ => error.code().and_then(|code| u32::try_from(code).ok()).unwrap_or(999),
    }
}
