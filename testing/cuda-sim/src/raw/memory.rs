//! Virtual memory call by call, plain memory, and real host memory that the device can access.
//!
//! Sizes are bytes. A handle is mapped whole or not at all, possibly at several places; a new
//! mapping has no access; a release before the unmap is valid, and the last of the two frees the
//! memory; an unmap does not wait, and is recorded as a fault if work is unfinished.
//!
//! Invariant: as in [`super`].

use std::sync::Arc;

use super::super::call::Call;
use super::super::fault::{Fault, HandleKind};
use super::super::memory::{Obstacle, Range};
use super::super::model::{INVALID_VALUE, Model, OUT_OF_MEMORY};
use super::super::task::HostKind;
use super::{Answer, HostBytes, Raw, code};
use lowtide_core::bytes::ByteSize;
use lowtide_gpu_driver::{DeviceAddress, HostMemory};

/// The memory found at an address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Found {
    /// Plain or stream-ordered device memory: the start of the allocation, its bytes.
    Allocation(u64, u64),
    /// A mapping of the caller's own.
    Mapped,
    /// Real host memory: its kind, its start, its bytes.
    Host(HostKind, u64, u64),
}

#[expect(clippy::missing_errors_doc, reason = "each answers with the codes of cuda.h")]
impl Raw<'_> {
    /// `cuMemGetInfo`: free bytes and total bytes.
    pub fn memory_info(&self) -> Answer<(u64, u64)> {
        self.call(Call::GetInfo, 0, |model| {
            Ok((model.headroom().get(), model.options.capacity.get()))
        })
    }

    /// Returns the memory of the device, in bytes. Works without a context, and after it is lost.
    #[must_use]
    pub fn capacity(&self) -> u64 {
        self.model().options.capacity.get()
    }

    /// Returns the free bytes, and the bytes of other processes. Works without a context, and after
    /// it is lost.
    #[must_use]
    pub fn free_and_neighbours(&self) -> (u64, u64) {
        let model = self.model();
        (model.headroom().get(), model.neighbours.get())
    }

    /// `cuMemGetAllocationGranularity`, in bytes.
    pub fn granularity(&self) -> Answer<u64> {
        let model = self.model();
        if model.options.virtual_memory { Ok(model.options.handle_min.get()) } else { Err(801) }
    }

    /// `cuMemGetAccess`: `true` if work may access the address.
    #[must_use]
    pub fn is_open(&self, at: u64) -> bool {
        self.model().memory.first_bare(Range { at, size: 1 }).is_none()
    }

    /// `cuMemAddressReserve`; the size is a multiple of the granularity, and an alignment of 0
    /// selects the device's own. There is no address hint.
    pub fn address_reserve(&self, size: u64, alignment: u64) -> Answer<u64> {
        let mut model = self.model();
        model.enter_virtual(Call::AddressReserve, ByteSize::new(size)).map_err(code)?;
        let unit = model.options.handle_min.get();
        let alignment = alignment.max(unit);
        if size == 0 || !size.is_multiple_of(unit) || !alignment.is_power_of_two() {
            return Err(INVALID_VALUE);
        }
        model.memory.reserve(size, alignment).ok_or(2)
    }

    /// `cuMemAddressFree`: a whole reservation with nothing mapped in it.
    pub fn address_free(&self, at: u64, size: u64) -> Answer {
        self.model().unreserve(Range { at, size }).map_err(code)
    }

    /// `cuMemCreate`: a handle with one reference.
    pub fn create(&self, size: u64) -> Answer<u64> {
        let mut model = self.model();
        model.enter_virtual(Call::Create, ByteSize::new(size)).map_err(code)?;
        if size == 0 || !size.is_multiple_of(model.options.handle_min.get()) {
            return Err(INVALID_VALUE);
        }
        model.charge(1, ByteSize::new(size));
        if model.headroom().get() < size {
            return Err(code(model.fail(OUT_OF_MEMORY)));
        }
        Ok(model.memory.create(size))
    }

    /// `cuMemRelease`: releases one reference.
    pub fn release(&self, handle: u64) -> Answer {
        let mut model = self.model();
        model.enter_virtual(Call::Release, ByteSize::ZERO).map_err(code)?;
        let held = model.memory.size_of(handle).is_some() && model.memory.release(handle);
        if held { Ok(()) } else { Err(no_handle(&mut model, handle)) }
    }

    /// `cuMemRetainAllocationHandle`: the handle behind an address, with one more reference.
    pub fn retain_handle(&self, at: u64) -> Answer<u64> {
        let mut model = self.model();
        model.enter_virtual(Call::RetainHandle, ByteSize::ZERO).map_err(code)?;
        model.memory.retain_at(at).ok_or(INVALID_VALUE)
    }

    /// `cuMemMap`: a whole handle, at bare addresses of one reservation.
    pub fn map(&self, at: u64, size: u64, offset: u64, handle: u64) -> Answer {
        let mut model = self.model();
        let range = Range { at, size };
        model.enter_virtual(Call::Map, ByteSize::new(size)).map_err(code)?;
        let Some(whole) = model.memory.size_of(handle) else {
            return Err(no_handle(&mut model, handle));
        };
        if offset != 0 || size != whole {
            let handle_size = ByteSize::new(whole);
            let fault = Fault::MapPart { range, handle_size };
            return Err(code(model.refuse(fault, INVALID_VALUE)));
        }
        model.whole(DeviceAddress::new(at), ByteSize::new(size)).map_err(code)?;
        model.bare_in_one_reservation(range, range).map_err(code)?;
        model.memory.map_handle(range, handle);
        model.charge(1, ByteSize::new(size));
        Ok(())
    }

    /// `cuMemSetAccess`, for work of this device, on whole mappings without a hole.
    pub fn set_access(&self, at: u64, size: u64, access: bool) -> Answer {
        let mut model = self.model();
        let range = Range { at, size };
        model.enter_virtual(Call::SetAccess, ByteSize::new(size)).map_err(code)?;
        model.in_one_reservation(range).map_err(code)?;
        let Ok(handles) = model.memory.whole_mappings(range) else { return Err(INVALID_VALUE) };
        model.charge(handles, ByteSize::new(size));
        model.memory.change_access(range, access);
        Ok(())
    }

    /// `cuMemUnmap`: whole mappings without a hole. Does not wait.
    pub fn unmap(&self, at: u64, size: u64) -> Answer {
        self.model().unmap(Range { at, size }).map_err(code)
    }

    /// `cuMemAlloc`: plain memory.
    pub fn alloc(&self, size: u64) -> Answer<u64> {
        self.call(Call::Alloc, size, |model| model.alloc_plain(size))
    }

    /// `cuMemFree`: waits for all work, then frees. Also accepts stream-ordered memory.
    pub fn free(&self, at: u64) -> Answer {
        self.call(Call::Free, 0, |model| model.free_plain(at))
    }

    /// Checks for room before real memory is allocated for [`Raw::host_insert`]. `cuMemHostAlloc`,
    /// `cuMemHostRegister` or `cuMemAllocManaged`.
    pub fn host_enter(&self, size: u64, kind: HostKind) -> Answer {
        let (call, memory) = match kind {
            HostKind::Locked => (Call::HostAlloc, HostMemory::PageLocked),
            HostKind::Registered => (Call::HostRegister, HostMemory::PageLocked),
            HostKind::Managed => (Call::AllocManaged, HostMemory::Pageable),
        };
        self.model().enter_host(call, ByteSize::new(size), memory).map_err(code)
    }

    /// Makes host memory known to the device, under its real address; 712 if some of it is known
    /// already.
    pub fn host_insert(&self, at: u64, kind: HostKind, bytes: Arc<HostBytes>) -> Answer {
        let mut model = self.model();
        if model.host_ranges.touches(Range { at, size: bytes.size() }) {
            return Err(712); // CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED
        }
        model.host_ranges.0.insert(at, (kind, bytes));
        Ok(())
    }

    /// Removes host memory from the device. Unfinished work with it is recorded as a fault and runs
    /// first, because nothing may touch the owner's memory afterwards.
    pub fn host_remove(&self, at: u64, kind: HostKind) -> Answer {
        let mut model = self.model();
        let call = match kind {
            HostKind::Locked => Call::HostFree,
            HostKind::Registered => Call::HostUnregister,
            HostKind::Managed => Call::Free,
        };
        let entered = model.enter(call, ByteSize::ZERO);
        let found = model.host_ranges.0.get(&at).filter(|found| found.0 == kind);
        let Some(size) = found.map(|(_, bytes)| bytes.size()) else {
            entered.map_err(code)?;
            if kind == HostKind::Registered {
                return Err(713); // CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED
            }
            let fault = Fault::NotAllocated { call, at: DeviceAddress::new(at) };
            return Err(code(model.refuse(fault, INVALID_VALUE)));
        };
        entered.map_err(code)?;
        if let Some((stream, work)) = model.unfinished_in(Range { at, size }) {
            // Managed memory is freed as plain memory is: that waits, and is right.
            if kind != HostKind::Managed {
                let at = DeviceAddress::new(at);
                model.faults.push(Fault::HostGoneBeforeDone { at, stream, work });
            }
        }
        model.run_all();
        model.host_ranges.0.remove(&at);
        model.lost_in().map_err(code)
    }

    /// Returns the host memory that contains the range, if the device can access it by itself.
    #[must_use]
    pub fn host_find(&self, at: u64, size: u64) -> Option<(HostKind, u64, Arc<HostBytes>)> {
        let model = self.model();
        let found = model.host_ranges.find(Range { at, size });
        found.map(|(base, kind, bytes)| (kind, base, Arc::clone(bytes)))
    }

    /// Returns the memory at an address, if there is any.
    #[must_use]
    pub fn find(&self, at: u64) -> Option<Found> {
        let model = self.model();
        let byte = Range { at, size: 1 };
        if let Some((base, kind, bytes)) = model.host_ranges.find(byte) {
            return Some(Found::Host(kind, base, bytes.size()));
        }
        if let Some((start, size)) = model.pools.live_at(at) {
            return Some(Found::Allocation(start, size));
        }
        let bare = matches!(model.memory.whole_mappings(byte), Err(Obstacle::Bare(_)));
        (model.memory.is_reserved(byte) && !bare).then_some(Found::Mapped)
    }

    /// Returns `true` if the address is in this device's address space.
    #[must_use]
    pub fn is_inside(&self, at: u64) -> bool {
        self.model().memory.is_inside(at)
    }
}

fn no_handle(model: &mut Model, number: u64) -> u32 {
    let (call, kind) = (model.call, HandleKind::Physical);
    code(model.refuse(Fault::StaleHandle { call, kind, number }, INVALID_VALUE))
}
