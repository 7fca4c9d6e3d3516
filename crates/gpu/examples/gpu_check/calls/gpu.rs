//! The device's context, and owners of its virtual memory: a physical handle, and a range of
//! addresses.
//!
//! Each owner ends its raw value once, so that the tables need little unsafe code and a failed part
//! leaves nothing behind. Errors on drop are ignored. Streams, events and copies are cudarc's.
//!
//! Invariant: a raw handle or address passed to the driver is alive; an owner's `end` runs once.
#![expect(unsafe_code, reason = "calling the driver")]

use std::ptr;
use std::sync::Arc;

use cudarc::driver::{CudaContext, result, sys};

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
        gpu.granularity = gpu.granule(false).unwrap_or(1).max(1);
        Ok(gpu)
    }

    /// Asks the granularity, the smallest or the recommended one.
    pub(crate) fn granule(&self, recommended: bool) -> Result<usize, Fault> {
        use sys::CUmemAllocationGranularity_flags as Kind;
        let kind = if recommended {
            Kind::CU_MEM_ALLOC_GRANULARITY_RECOMMENDED
        } else {
            Kind::CU_MEM_ALLOC_GRANULARITY_MINIMUM
        };
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

    /// Releases the handle; the memory stays while it is mapped.
    pub(crate) fn release(mut self) -> Outcome {
        self.end()
    }

    fn end(&mut self) -> Outcome {
        let Some(handle) = self.0.take() else { return Ok(()) };
        // SAFETY: `take` makes this the only release of a reference the driver gave.
        checked("cuMemRelease", unsafe { sys::cuMemRelease(handle) })
    }
}

impl Drop for Physical {
    fn drop(&mut self) {
        let _ = self.end();
    }
}

/// A reserved range of device addresses, cut in pieces of one handle each.
pub(crate) struct Range {
    pub(crate) base: u64,
    piece: usize,
    mapped: Vec<bool>,
    access: Access,
    is_reserved: bool,
}

impl Range {
    /// Reserves `count` pieces of `piece` bytes; multiples of the granularity.
    pub(crate) fn reserve(gpu: &Gpu, piece: usize, count: usize) -> Result<Self, Fault> {
        let mapped = vec![false; count];
        let access = Access { location: gpu.prop.location, flags: 3 };
        let mut base = 0;
        // SAFETY: the reference outlives the call.
        let code =
            unsafe { sys::cuMemAddressReserve(&mut base, piece.saturating_mul(count), 0, 0, 0) };
        checked("cuMemAddressReserve", code)?;
        Ok(Self { base, piece, mapped, access, is_reserved: true })
    }

    fn at(&self, index: usize) -> u64 {
        self.base + (index * self.piece) as u64
    }

    fn bytes(&self) -> usize {
        self.piece * self.mapped.len()
    }

    pub(crate) fn map(&mut self, index: usize, physical: &Physical) -> Outcome {
        let (at, handle) = (self.at(index), physical.0.unwrap_or(0));
        // SAFETY: the handle is alive while `physical` is; a refused address is an error code.
        checked("cuMemMap", unsafe { sys::cuMemMap(at, self.piece, 0, handle, 0) })?;
        self.mapped[index] = true;
        Ok(())
    }

    pub(crate) fn set_access(&self, index: usize) -> Outcome {
        self.access_to(self.at(index), self.piece)
    }

    /// Access to the whole range in one call.
    pub(crate) fn set_access_all(&self) -> Outcome {
        self.access_to(self.base, self.bytes())
    }

    fn access_to(&self, at: u64, bytes: usize) -> Outcome {
        let access = ptr::from_ref(&self.access).cast();
        // SAFETY: the reference outlives the call and one description is passed.
        checked("cuMemSetAccess", unsafe { sys::cuMemSetAccess(at, bytes, access, 1) })
    }

    /// The handle behind a piece, with a reference of its own.
    pub(crate) fn retain(&self, index: usize) -> Result<Physical, Fault> {
        let (mut handle, at) = (0, ptr::without_provenance_mut(usize::try_from(self.at(index))?));
        // SAFETY: the address is only looked up, never read.
        let code = unsafe { sys::cuMemRetainAllocationHandle(&mut handle, at) };
        checked("cuMemRetainAllocationHandle", code).map(|()| Physical(Some(handle)))
    }

    pub(crate) fn unmap(&mut self, index: usize) -> Outcome {
        // SAFETY: the range is this owner's and host code holds no reference into it; a kernel
        // that still used it would be a fault on the device and an error code here.
        checked("cuMemUnmap", unsafe { sys::cuMemUnmap(self.at(index), self.piece) })?;
        self.mapped[index] = false;
        Ok(())
    }

    /// Unmaps the whole range in one call.
    pub(crate) fn unmap_all(&mut self) -> Outcome {
        // SAFETY: as in `unmap`.
        checked("cuMemUnmap", unsafe { sys::cuMemUnmap(self.base, self.bytes()) })?;
        self.mapped.fill(false);
        Ok(())
    }

    /// Writes 64 bytes at the start and reads them back.
    pub(crate) fn write_and_read(&self) -> Outcome {
        let mut read = [0_u8; 64];
        // SAFETY: an address without memory is an error code and no host access.
        unsafe { result::memset_d8_sync(self.base, 0x5A, read.len()) }?;
        // SAFETY: the array has the length that is passed.
        unsafe { result::memcpy_dtoh_sync(&mut read, self.base) }?;
        if read == [0x5A; 64] { Ok(()) } else { Err(format!("read {read:?}, wrote 0x5A").into()) }
    }

    /// Frees the addresses; every piece must be unmapped.
    pub(crate) fn free(mut self) -> Outcome {
        self.end()
    }

    fn end(&mut self) -> Outcome {
        if !std::mem::take(&mut self.is_reserved) {
            return Ok(());
        }
        // SAFETY: the base and length of one reservation, freed once.
        let code = unsafe { sys::cuMemAddressFree(self.base, self.bytes()) };
        checked("cuMemAddressFree", code)
    }
}

impl Drop for Range {
    fn drop(&mut self) {
        for index in 0..self.mapped.len() {
            if self.mapped[index] {
                let _ = self.unmap(index);
            }
        }
        let _ = self.end();
    }
}
