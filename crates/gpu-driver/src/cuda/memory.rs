//! The memory of a device, with the selected backend, and what the backends have in common.
//!
//! A call that the backend does not support is a typed error.
//!
//! Invariant: a failed call changes nothing, except for failed rollbacks, which are counted.

use std::collections::BTreeMap;

use super::calls::{Answer, Calls};
use super::context::DeviceContext;
use super::segments::Pool;
use super::vmm::Mapping;
use crate::{Backend, DeviceAddress, DriverError};
use lowtide_core::bytes::ByteSize;
use lowtide_core::sync::Mutex;
use lowtide_core::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// Memory of one device, in whole units.
pub(super) struct Memory {
    pub(super) source: Source,
    /// The unit of addresses and sizes, and the size of the smallest handle; a power of two.
    pub(super) unit: ByteSize,
    /// The number of failed rollback calls: memory or addresses are lost until the process ends.
    stuck: AtomicU64,
    /// `true` if the driver has returned a segment at an unaligned address.
    pub(super) is_odd: AtomicBool,
    /// For each segment that begins inside its allocation: the start of the allocation.
    pub(super) began: Mutex<BTreeMap<u64, u64>>,
}

/// The source of memory.
pub(super) enum Source {
    /// Address space with mapped memory.
    Virtual(Mapping),
    /// Segments of a pool.
    Pool(Pool),
    /// Segments that are plain or managed allocations.
    Plain { is_managed: bool },
}

impl Memory {
    pub(super) fn new(source: Source, unit: ByteSize) -> Self {
        let (is_odd, began) = (AtomicBool::new(false), Mutex::default());
        Self { source, unit, stuck: AtomicU64::new(0), is_odd, began }
    }

    pub(super) const fn backend(&self) -> Backend {
        match self.source {
            Source::Virtual(_) => Backend::CudaVirtualMemory,
            Source::Pool(_) => Backend::CudaPool,
            Source::Plain { .. } => Backend::CudaPlain,
        }
    }

    pub(super) const fn is_virtual(&self) -> bool {
        matches!(self.source, Source::Virtual(_))
    }

    pub(super) fn stuck(&self) -> u64 {
        self.stuck.load(Ordering::Relaxed)
    }

    /// Closes the backend, of which no memory is left.
    pub(super) fn close(&self, context: &DeviceContext) -> Answer {
        let Source::Pool(pool) = &self.source else { return Ok(()) };
        context.call(|calls| pool.close(calls, context.stream))
    }

    /// Counts a failed rollback call.
    pub(super) fn back(&self, calls: &Calls, outcome: Answer) {
        if let Err(error) = outcome {
            self.stuck.fetch_add(1, Ordering::Relaxed);
            calls.note_not_undone(error);
        }
    }

    /// Returns the bytes of a range of whole units that does not exceed the last address.
    pub(super) fn whole(&self, at: DeviceAddress, size: ByteSize) -> Answer<usize> {
        let is_whole = !size.is_zero()
            && at.is_multiple_of(self.unit)
            && size.get().is_multiple_of(self.unit.get())
            && at.checked_add(size).is_some();
        let bytes = size.as_usize().filter(|_| is_whole);
        bytes.ok_or(DriverError::Misaligned { at, size, granularity: self.unit })
    }
}
