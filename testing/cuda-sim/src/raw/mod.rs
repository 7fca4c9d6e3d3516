//! The calls of CUDA as in cuda.h, one by one, below the `Driver` trait.
//!
//! They serve a library that offers the simulation under CUDA's own names. Handles, streams and
//! events are plain numbers here, and results are CUDA's. Every rule of the manual is enforced: a
//! wrong call is refused with the driver's code and recorded as a fault, and a wrong access by work
//! loses the context with 700. The caller handles contexts, threads and device names; one
//! simulation is one device with a live context.
//!
//! Invariant: `Err(code) => code != 0`; a refused call changed nothing.

mod copies;
mod kernels;
mod memory;
mod pools;
mod streams;

pub use super::pools::Pool;
pub use copies::Place;
pub use kernels::{KERNELS, Kernel, UNKNOWN};
pub use memory::Found;

pub use super::host::HostBytes;
pub use super::task::{DeviceBytes, HostKind, Job, Unreachable};

use super::SimDriver;
use super::call::Call;
use super::model::{self, Model};
use lowtide_core::bytes::ByteSize;
use lowtide_core::sync::MutexGuard;
use lowtide_gpu_driver::DriverError;

/// The result of a call: a result of cuda.h other than success is the error.
pub type Answer<T = ()> = Result<T, u32>;

/// The single calls of a simulated device.
///
/// # Errors
/// A call that the manual forbids, or for which a failure was planned, returns the result of cuda.h
/// as an [`Answer`] and changes nothing.
#[derive(Clone, Copy, Debug)]
pub struct Raw<'a>(&'a SimDriver);

impl SimDriver {
    /// Returns the single calls of this device.
    #[must_use]
    pub const fn raw(&self) -> Raw<'_> {
        Raw(self)
    }
}

/// The objects and bytes that a device holds.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Numbers {
    /// Bytes of the device in use, without the context's own and other processes' memory.
    pub taken_bytes: u64,
    /// Reservations of address space.
    pub reservations: u64,
    /// Physical handles, mapped or not.
    pub handles: u64,
    /// Mappings of handles.
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
    /// Pieces of unfinished work.
    pub unfinished: u64,
}

impl Raw<'_> {
    fn model(&self) -> MutexGuard<'_, Model> {
        self.0.model()
    }

    /// Makes a call that requests `size` bytes.
    fn call<T>(
        &self,
        call: Call,
        size: u64,
        act: impl FnOnce(&mut Model) -> model::Answer<T>,
    ) -> Answer<T> {
        let mut model = self.model();
        model.enter(call, ByteSize::new(size)).and_then(|()| act(&mut model)).map_err(code)
    }

    /// Returns the objects and bytes that the device holds. Cost: O(all objects).
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
            locked_bytes: model.host_ranges.bytes(false),
            managed_bytes: model.host_ranges.bytes(true),
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
