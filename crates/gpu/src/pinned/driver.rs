//! The driver of a pool's arena: host memory of another driver, as whole segments.
//!
//! The arena calls this driver, and the pool asks it for the pointer and the kind of a block. A
//! segment is one [`Driver::host_alloc`] of the other driver. Host memory is aligned to
//! [`HOST_ALIGNMENT`] only, which is therefore the granularity, and the largest alignment of a
//! block. The arena's granule is [`HOST_GRANULARITY`](crate::driver::HOST_GRANULARITY), the unit of
//! sizes.
//!
//! The driver reports a lock limit to the arena as a lack of memory, so that the arena releases
//! idle segments and requests a smaller one. [`PinnedDriver::lock_limit`] has the error itself.
//!
//! This driver copies nothing: copies between host and device go through the other driver.
//!
//! Invariant: `segments = allocations of the other driver that are not freed`.
#![expect(unsafe_code, reason = "host memory is freed, and the contract of a driver is kept")]

use std::collections::BTreeMap;
use std::ptr::NonNull;
use std::sync::Arc;

use super::config::PinnedKind;
use crate::driver::{
    Backend, Capabilities, DeviceAddress, Driver, DriverError, HOST_ALIGNMENT, HostMemory,
};
use lowtide_core::bytes::ByteSize;
use lowtide_core::sync::{Mutex, lock};

/// A driver for the host memory of another driver.
#[derive(Debug)]
pub(super) struct PinnedDriver {
    host: Arc<dyn Driver>,
    kind: PinnedKind,
    segments: Mutex<HostSegments>,
}

#[derive(Debug, Default)]
struct HostSegments {
    by_start: BTreeMap<DeviceAddress, HostSegment>,
    /// The error of the last allocation, if it was a lock limit.
    lock_limit: Option<DriverError>,
    /// The number of segments that are pageable because locking failed.
    fallbacks_total: u64,
}

/// One allocation of host memory.
#[derive(Clone, Copy, Debug)]
struct HostSegment {
    start: NonNull<u8>,
    size: ByteSize,
    memory: HostMemory,
}

impl HostSegment {
    /// # Panics
    /// If the memory is not aligned.
    fn address(&self) -> DeviceAddress {
        let at = DeviceAddress::new(self.start.addr().get() as u64);
        assert!(at.is_multiple_of(HOST_ALIGNMENT), "{at} is not aligned to {HOST_ALIGNMENT}");
        at
    }
}

// SAFETY: a segment is an address and two plain values; reading and writing there is the business
// of buffers, each of which owns its part alone.
unsafe impl Send for HostSegment {}

impl PinnedDriver {
    pub(super) fn new(host: Arc<dyn Driver>, kind: PinnedKind) -> Self {
        Self { host, kind, segments: Mutex::default() }
    }

    /// Returns the pointer to an address in a segment, with the provenance of that segment, and the
    /// segment's kind of memory.
    pub(super) fn find(&self, at: DeviceAddress) -> Option<(NonNull<u8>, HostMemory)> {
        let segments = lock(&self.segments);
        let (&first, segment) = segments.by_start.range(..=at).next_back()?;
        let into = at.offset_from(first).filter(|into| *into < segment.size)?;
        let pointer = segment.start.as_ptr().wrapping_add(into.as_usize()?);
        Some((NonNull::new(pointer)?, segment.memory))
    }

    /// Returns the error of the last allocation, if the process may not lock that much memory.
    pub(super) fn lock_limit(&self) -> Option<DriverError> {
        lock(&self.segments).lock_limit.clone()
    }

    /// Returns the bytes of the segments of a kind of memory.
    pub(super) fn bytes(&self, memory: HostMemory) -> ByteSize {
        let segments = lock(&self.segments);
        let of_kind = segments.by_start.values().filter(|segment| segment.memory == memory);
        of_kind.map(|segment| segment.size).sum()
    }

    /// Returns the number of segments that are pageable because locking failed.
    pub(super) fn fallbacks_total(&self) -> u64 {
        lock(&self.segments).fallbacks_total
    }

    /// Allocates memory of the pool's kind.
    fn allocate(&self, size: ByteSize) -> Result<HostSegment, DriverError> {
        let with = |memory| {
            let start = self.host.host_alloc(size, memory)?;
            Ok(HostSegment { start, size, memory })
        };
        match with(self.kind.first()) {
            Err(DriverError::LockLimit { .. } | DriverError::Unsupported { .. })
                if self.kind == PinnedKind::PageLockedOrPageable =>
            {
                with(HostMemory::Pageable)
            }
            allocated => allocated,
        }
    }
}

// SAFETY: a segment is an allocation of `host_alloc`, which another driver keeps to its contract:
// it overlaps nothing, is initialised, and stays until `host_free`. `find` returns pointers into
// segments with the provenance of the allocation. All work is done in its call.
unsafe impl Driver for PinnedDriver {
    fn backend(&self) -> Backend {
        Backend::PinnedHost
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities {
            host_access: true,
            host_backed: true,
            page_locked: self.host.capabilities().page_locked,
            granularity: HOST_ALIGNMENT,
            ..Capabilities::default()
        }
    }

    fn segment_create(&self, size: ByteSize) -> Result<DeviceAddress, DriverError> {
        let allocated = self.allocate(size);
        let mut segments = lock(&self.segments);
        segments.lock_limit = None;
        let segment = match allocated {
            Ok(segment) => segment,
            Err(error @ DriverError::LockLimit { .. }) => {
                segments.lock_limit = Some(error);
                return Err(DriverError::OutOfMemory { call: "mlock", requested: size });
            }
            Err(error) => return Err(error),
        };
        let at = segment.address();
        segments.fallbacks_total += u64::from(segment.memory != self.kind.first());
        segments.by_start.insert(at, segment);
        Ok(at)
    }

    unsafe fn segment_destroy(&self, at: DeviceAddress, size: ByteSize) -> Result<(), DriverError> {
        // Removed before it is freed: another thread may then get the same address.
        let Some(segment) = lock(&self.segments).by_start.remove(&at) else {
            return Err(DriverError::Misaligned { at, size, granularity: HOST_ALIGNMENT });
        };
        let HostSegment { start, size, memory } = segment;
        // SAFETY: a whole allocation of this driver, which is not freed yet, since it was in the
        // table. Every use of it is complete (contract of this function).
        let freed = unsafe { self.host.host_free(start, size, memory) };
        if freed.is_err() {
            lock(&self.segments).by_start.insert(at, segment);
        }
        freed
    }

    fn host_pointer(&self, at: DeviceAddress) -> Option<NonNull<u8>> {
        self.find(at).map(|(pointer, _)| pointer)
    }
}

#[cfg(all(test, not(lowtide_loom)))]
mod tests {
    use super::*;
    use crate::driver::HOST_GRANULARITY;
    use crate::driver::host::HostDriver;

    fn driver(kind: PinnedKind) -> PinnedDriver {
        PinnedDriver::new(Arc::new(HostDriver::new()), kind)
    }

    #[test]
    fn a_pointer_is_of_the_segment_that_contains_the_address() {
        let driver = driver(PinnedKind::Pageable);
        let two = [(); 2].map(|()| driver.segment_create(HOST_GRANULARITY).expect("memory"));
        for at in two {
            let last = HOST_GRANULARITY.saturating_sub(ByteSize::new(1));
            let end = at.checked_add(last).expect("an address");
            for inside in [at, end] {
                let (pointer, memory) = driver.find(inside).expect("in the segment");
                assert_eq!(pointer.addr().get() as u64, inside.get());
                assert_eq!(memory, HostMemory::Pageable);
                // SAFETY: a byte of a segment that nothing else uses.
                unsafe { pointer.write(7) };
            }
        }
        for at in two {
            // SAFETY: a whole segment that nothing uses any more.
            unsafe { driver.segment_destroy(at, HOST_GRANULARITY) }.expect("freed");
            assert!(driver.host_pointer(at).is_none(), "it is freed");
        }
        assert!(driver.bytes(HostMemory::Pageable).is_zero());
    }
}
