//! The device's context, and owners of its virtual memory: a physical handle, and a range of
//! addresses.
//!
//! Each owner ends its raw value once, so that the tables need little unsafe code and a failed part
//! leaves nothing behind. Errors on drop are ignored. Streams, events and copies are cudarc's.
//!
//! Invariant: a raw handle or address passed to the driver is alive, and is released once.
#![expect(unsafe_code, reason = "calling the driver")]

use std::ptr;
use std::sync::Arc;

use cudarc::driver::{CudaContext, sys};

use super::super::cases::{Fault, Outcome};

/// `CUmemLocation` in every version of cuda.h from 11.0 to 13.5; cudarc's type varies.
#[repr(C)]
#[derive(Clone, Copy)]
struct Location {
    /// 1 = device.
    kind: u32,
    ordinal: i32,
}

/// `CUmemAllocationProp`.
#[repr(C)]
struct Prop {
    /// 1 = pinned, the only kind.
    kind: u32,
    /// 0 = not to be shared with other processes.
    shareable: u32,
    location: Location,
    windows: usize,
    /// Compression, RDMA, usage and four reserved bytes, all off.
    flags: [u8; 8],
}

/// `CUmemAccessDesc`.
#[repr(C)]
struct Access {
    location: Location,
    /// 3 = read and write.
    flags: u32,
}

const _: () = assert!(size_of::<Prop>() == size_of::<sys::CUmemAllocationProp>());
const _: () = assert!(size_of::<Access>() == size_of::<sys::CUmemAccessDesc>());

fn checked(call: &str, code: sys::CUresult) -> Outcome {
    code.result().map_err(|error| format!("{call}: {error}").into())
}

/// One device with its primary context, current on the thread that opened it.
pub(crate) struct Gpu {
    pub(crate) context: Arc<CudaContext>,
    prop: Prop,
    /// The smallest unit of a handle, in bytes.
    pub(crate) granularity: usize,
}

impl Gpu {
    /// Takes the device's primary context and makes it current on this thread.
    pub(crate) fn open(ordinal: u32) -> Result<Self, Fault> {
        let context = CudaContext::new(usize::try_from(ordinal)?)?;
        let location = Location { kind: 1, ordinal: context.cu_device() };
        let prop = Prop { kind: 1, shareable: 0, location, windows: 0, flags: [0; 8] };
        let mut gpu = Self { context, prop, granularity: 1 };
        gpu.granularity = gpu.granule().unwrap_or(1).max(1);
        Ok(gpu)
    }

    /// Asks the smallest granularity.
    pub(crate) fn granule(&self) -> Result<usize, Fault> {
        let kind = sys::CUmemAllocationGranularity_flags::CU_MEM_ALLOC_GRANULARITY_MINIMUM;
        let (mut bytes, prop) = (0, ptr::from_ref(&self.prop).cast());
        // SAFETY: both references outlive the call.
        let code = unsafe { sys::cuMemGetAllocationGranularity(&mut bytes, prop, kind) };
        checked("cuMemGetAllocationGranularity", code).map(|()| bytes)
    }
}

/// Physical device memory.
pub(crate) struct Physical(Option<u64>);

impl Physical {
    pub(crate) fn create(gpu: &Gpu, bytes: usize) -> Result<Self, Fault> {
        let (mut handle, prop) = (0, ptr::from_ref(&gpu.prop).cast());
        // SAFETY: both references outlive the call.
        checked("cuMemCreate", unsafe { sys::cuMemCreate(&mut handle, bytes, prop, 0) })?;
        Ok(Self(Some(handle)))
    }

    /// Releases the handle, once; the memory stays while it is mapped.
    pub(crate) fn release(&mut self) -> Outcome {
        let Some(handle) = self.0.take() else { return Ok(()) };
        // SAFETY: `take` makes this the only release of a reference the driver gave.
        checked("cuMemRelease", unsafe { sys::cuMemRelease(handle) })
    }
}

impl Drop for Physical {
    fn drop(&mut self) {
        let _ = self.release();
    }
}

/// A reserved range of device addresses, cut in pieces of one handle each, which are mapped and
/// unmapped in their order.
pub(crate) struct Range {
    pub(crate) base: u64,
    piece: usize,
    count: usize,
    mapped: std::ops::Range<usize>,
    access: Access,
}

impl Range {
    /// Reserves `count` pieces of `piece` bytes; multiples of the granularity.
    pub(crate) fn reserve(gpu: &Gpu, piece: usize, count: usize) -> Result<Self, Fault> {
        let access = Access { location: gpu.prop.location, flags: 3 };
        let mut base = 0;
        // SAFETY: the reference outlives the call.
        let code =
            unsafe { sys::cuMemAddressReserve(&mut base, piece.saturating_mul(count), 0, 0, 0) };
        checked("cuMemAddressReserve", code)?;
        Ok(Self { base, piece, count, mapped: 0..0, access })
    }

    /// The address and the bytes of a piece, or of all.
    fn span(&self, index: Option<usize>) -> (u64, usize) {
        match index {
            Some(index) => (self.base + (index * self.piece) as u64, self.piece),
            None => (self.base, self.piece * self.count),
        }
    }

    pub(crate) fn map(&mut self, index: usize, physical: &Physical) -> Outcome {
        let ((at, bytes), handle) = (self.span(Some(index)), physical.0.unwrap_or(0));
        // SAFETY: the handle is alive while `physical` is; a refused address is an error code.
        checked("cuMemMap", unsafe { sys::cuMemMap(at, bytes, 0, handle, 0) })?;
        self.mapped.end = index + 1;
        Ok(())
    }

    /// Gives access to a piece, or to all in one call.
    pub(crate) fn set_access(&self, index: Option<usize>) -> Outcome {
        let ((at, bytes), access) = (self.span(index), ptr::from_ref(&self.access).cast());
        // SAFETY: the reference outlives the call and one description is passed.
        checked("cuMemSetAccess", unsafe { sys::cuMemSetAccess(at, bytes, access, 1) })
    }

    /// The handle behind a piece, with a reference of its own.
    pub(crate) fn retain(&self, index: usize) -> Result<Physical, Fault> {
        let (mut handle, (at, _)) = (0, self.span(Some(index)));
        let at = ptr::without_provenance_mut(usize::try_from(at)?);
        // SAFETY: the address is only looked up, never read.
        let code = unsafe { sys::cuMemRetainAllocationHandle(&mut handle, at) };
        checked("cuMemRetainAllocationHandle", code).map(|()| Physical(Some(handle)))
    }

    /// Unmaps a piece, or all in one call.
    pub(crate) fn unmap(&mut self, index: Option<usize>) -> Outcome {
        let (at, bytes) = self.span(index);
        // SAFETY: the range is this owner's and host code holds no reference into it; a kernel
        // that still used it would be a fault on the device and an error code here.
        checked("cuMemUnmap", unsafe { sys::cuMemUnmap(at, bytes) })?;
        self.mapped.start = index.map_or(self.mapped.end, |index| index + 1);
        Ok(())
    }

    /// Frees the addresses, once; every piece must be unmapped.
    pub(crate) fn free(&mut self) -> Outcome {
        let (at, bytes) = self.span(None);
        if std::mem::take(&mut self.count) == 0 {
            return Ok(());
        }
        // SAFETY: the base and length of one reservation, freed once.
        checked("cuMemAddressFree", unsafe { sys::cuMemAddressFree(at, bytes) })
    }
}

impl Drop for Range {
    fn drop(&mut self) {
        for index in self.mapped.clone() {
            let _ = self.unmap(Some(index));
        }
        let _ = self.free();
    }
}
