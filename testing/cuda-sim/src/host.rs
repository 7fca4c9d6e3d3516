//! Host memory: blocks for pinned pools, and stores for offloading.
//!
//! Blocks for pools are real memory from the host driver and are never locked; the limits here are
//! the model's. Stores hold only the bytes written, so an arena of many GiB can be offloaded. A
//! store beyond the lock limit is pageable, and is copied through the rings of
//! [`Staging`](lowtide_gpu_driver::staging::Staging), as by the CUDA driver.
//!
//! Copies from and to host memory follow the manual: page-locked memory is read and written when
//! the copy is done, and a copy with other memory is synchronous.
//!
//! Invariant: locked blocks and stores together are within the lock limit that applied when the
//! last of them was created.
#![expect(unsafe_code, reason = "copies read and write host memory by its address")]

use std::fmt::Debug;
use std::ptr::{self, NonNull};
use std::sync::{Arc, Weak};

use super::SimDriver;
use super::call::Call;
use super::fault::{Fault, HandleKind, WorkKind};
use super::memory::Range;
use super::model::{Answer, Model, NOT_SUPPORTED, OUT_OF_MEMORY};
use super::raw::Place;
use super::sparse::index;
use lowtide_core::bytes::ByteSize;
use lowtide_gpu_driver::host::HostDriver;
use lowtide_gpu_driver::{
    DeviceAddress, Driver as _, DriverError, HOST_GRANULARITY, HostMemory, HostStore, StreamHandle,
};

impl Model {
    /// Begins a call that takes host memory: fails if the limit is reached.
    pub(super) fn enter_host(&mut self, call: Call, size: ByteSize, memory: HostMemory) -> Answer {
        self.enter(call, size)?;
        self.charge(0, size);
        if memory == HostMemory::PageLocked {
            if !self.options.page_locked {
                return Err(self.fail(NOT_SUPPORTED));
            }
            let locked = self.host_bytes(Some(memory)).saturating_add(size);
            if locked > self.lock_limit {
                return Err(DriverError::LockLimit { requested: size, limit: self.lock_limit });
            }
        }
        if self.host_bytes(None).saturating_add(size) > self.host_limit {
            return Err(self.fail(OUT_OF_MEMORY));
        }
        Ok(())
    }

    pub(super) fn host_alloc(&mut self, size: ByteSize, memory: HostMemory) -> Answer<NonNull<u8>> {
        self.enter_host(Call::HostAlloc, size, memory)?;
        let at = HostDriver::new().host_alloc(size, HostMemory::Pageable)?;
        self.host_blocks.insert(at.addr().get(), (size, memory));
        Ok(at)
    }

    /// # Safety
    /// Every use of the memory is complete, except copies that the model knows.
    pub(super) unsafe fn host_free(
        &mut self,
        at: NonNull<u8>,
        size: ByteSize,
        memory: HostMemory,
    ) -> Answer {
        let call = Call::HostFree;
        self.enter(call, ByteSize::ZERO)?;
        self.charge(0, size);
        let address = at.addr().get();
        if self.host_blocks.get(&address) != Some(&(size, memory)) {
            return Err(self.stale(HandleKind::HostMemory, address as u64));
        }
        let range = Range { at: address as u64, size: size.get() };
        if let Some(copy) = self.host_copies.iter().find(|copy| copy.is_queued_in(range)) {
            let (at, stream) = (DeviceAddress::new(range.at), copy.stream);
            let work = WorkKind::HostCopy;
            self.faults.push(Fault::HostGoneBeforeDone { at, stream, work });
            self.run_all();
        }
        // SAFETY: an allocation of the host driver: looked up above. Its copies are run, and it has
        // no other uses (contract of this function).
        unsafe { HostDriver::new().host_free(at, size, HostMemory::Pageable) }?;
        self.host_blocks.remove(&address);
        Ok(())
    }

    /// Returns `true` if the memory is part of a page-locked block.
    fn is_locked(&self, part: Range) -> bool {
        let blocks = self.host_blocks.iter();
        blocks
            .filter(|(_, (_, memory))| *memory == HostMemory::PageLocked)
            .any(|(&at, (size, _))| Range { at: at as u64, size: size.get() }.holds(part))
    }

    pub(super) fn store_create(&mut self, size: ByteSize) -> Answer<HostStore> {
        if size.is_zero() || !size.get().is_multiple_of(HOST_GRANULARITY.get()) {
            let at = DeviceAddress::new(0);
            return Err(DriverError::Misaligned { at, size, granularity: HOST_GRANULARITY });
        }
        let memory = self.store_memory(size);
        self.enter_host(Call::HostAlloc, size, memory)?;
        let at = size.as_usize().and_then(|_| self.memory.place_store(size.get()));
        let at = at.ok_or_else(|| self.fail(OUT_OF_MEMORY))?;
        self.stores.insert(at, (size.get(), memory));
        Ok(HostStore { at, size })
    }

    /// Returns the kind of memory of the next store: page-locked within the limit.
    fn store_memory(&self, size: ByteSize) -> HostMemory {
        let locked = self.host_bytes(Some(HostMemory::PageLocked)).saturating_add(size);
        let limit = self.lock_limit.min(self.store_lock_limit);
        if self.options.page_locked && locked <= limit {
            HostMemory::PageLocked
        } else {
            HostMemory::Pageable
        }
    }

    /// Returns `true` if the store of a part is not page-locked.
    pub(super) fn is_pageable(&self, part: HostStore) -> bool {
        let store = self.stores.range(..=part.at).next_back();
        store.is_some_and(|(_, store)| store.1 == HostMemory::Pageable)
    }
}

impl SimDriver {
    /// Creates a store, with a ring if it is the first that is not page-locked.
    pub(super) fn store_create(&self, size: ByteSize) -> Answer<HostStore> {
        let store = self.model().store_create(size)?;
        if self.model().is_pageable(store) {
            self.staging.add_store(self);
        }
        Ok(store)
    }

    /// Destroys a store, after the rings if it is the last that is not page-locked.
    pub(super) fn store_destroy(&self, store: HostStore) -> Answer {
        let is_pageable = self.model().is_pageable(store);
        if is_pageable {
            // SAFETY: the model records a fault if a copy of a ring is not complete.
            unsafe { self.staging.remove_store(self) }?;
        }
        let outcome = self.model().store_destroy(store.at);
        if is_pageable && outcome.is_err() {
            self.staging.add_store(self);
        }
        outcome
    }

    /// Copies between device memory and a store: through a ring if that is not page-locked.
    pub(super) fn transfer(
        &self,
        call: Call,
        (device, part): (DeviceAddress, HostStore),
        stream: StreamHandle,
    ) -> Answer {
        let mut model = self.model();
        if !model.is_pageable(part) {
            return model.transfer(call, stream.get(), device.get(), part);
        }
        model.call = call;
        model.check_part(part)?;
        drop(model);
        let place = (device, part.size);
        if call == Call::Offload {
            let put = &mut |offset, bytes: &[u8]| {
                let _ = self.model().bytes().write(part.at + offset, bytes);
            };
            // SAFETY: the ring is host memory of this driver, and the model looks up the rest.
            return unsafe { self.staging.offload(self, place, stream, put) };
        }
        let get = &mut |offset, bytes: &mut [u8]| {
            let _ = self.model().bytes().read(part.at + offset, bytes);
        };
        // SAFETY: as above.
        unsafe { self.staging.restore(self, place, stream, get) }
    }
}

impl SimDriver {
    /// Queues a copy with host memory at one end, and waits for it if that is not page-locked.
    ///
    /// # Safety
    /// Until the copy is complete, `size` bytes of host memory are there, and nothing else writes
    /// to them, nor reads them if the copy writes them.
    pub(super) unsafe fn copy_with_host(
        &self,
        call: Call,
        (device, host): (DeviceAddress, NonNull<u8>),
        size: ByteSize,
        stream: StreamHandle,
    ) -> Answer {
        let of_code = |code| DriverError::of_cuda(call.name(), code, size);
        // SAFETY: contract of this function.
        let part = unsafe { HostBytes::new(host.as_ptr(), index(size.get()), ()) };
        let part = Arc::new(part);
        let range = Range { at: host.addr().get() as u64, size: size.get() };
        let copy = HostCopy { part: Arc::downgrade(&part), range, stream };
        let (device, host) = (Place::Device(device.get()), Place::Host(part, 0));
        let (to, from) = if call == Call::Restore { (device, host) } else { (host, device) };
        self.raw().copy_async(to, from, size.get(), stream.get()).map_err(of_code)?;
        let mut model = self.model();
        model.host_copies.retain(|copy| copy.part.strong_count() > 0);
        model.host_copies.push(copy);
        if model.is_locked(range) {
            return Ok(());
        }
        // A wait that is refused would leave the copy queued, and the memory is the caller's again.
        let waited = model.stream_synchronize(stream.get());
        waited.inspect_err(|_| model.run_all())
    }
}

/// A copy with host memory at one end.
#[derive(Debug)]
pub(super) struct HostCopy {
    /// Alive until the copy is done.
    part: Weak<HostBytes>,
    range: Range,
    stream: StreamHandle,
}

impl HostCopy {
    /// Returns `true` if the copy is not done and reads or writes some of the range.
    fn is_queued_in(&self, range: Range) -> bool {
        self.part.strong_count() > 0 && self.range.overlaps(range)
    }
}

/// Host memory that the device reads and writes when its work runs.
#[derive(Debug)]
pub struct HostBytes {
    /// Its address, with provenance exposed: it crosses threads as a number.
    at: usize,
    size: usize,
    _owner: Box<dyn Debug + Send + Sync>,
}

impl HostBytes {
    /// Names `size` bytes, which live as long as `owner`; it is dropped after the last copy.
    ///
    /// # Safety
    /// Until all copies with the value are done the bytes are there, writable if a copy writes
    /// them, and no Rust reference conflicts with a copy.
    pub unsafe fn new(at: *mut u8, size: usize, owner: impl Debug + Send + Sync + 'static) -> Self {
        Self { at: at.expose_provenance(), size, _owner: Box::new(owner) }
    }

    /// Takes bytes of its own.
    #[must_use]
    pub fn owned(mut bytes: Vec<u8>) -> Self {
        let (at, size) = (bytes.as_mut_ptr(), bytes.len());
        // SAFETY: the bytes are those of the owner, which nothing else uses.
        unsafe { Self::new(at, size, bytes) }
    }

    /// Returns the number of bytes.
    #[must_use]
    pub const fn size(&self) -> u64 {
        self.size as u64
    }

    /// A pointer to `length` bytes from `offset` on.
    ///
    /// # Panics
    /// If they are not inside.
    fn part(&self, offset: u64, length: usize) -> *mut u8 {
        let offset = index(offset);
        let end = offset.checked_add(length);
        assert!(end.is_some_and(|end| end <= self.size), "{offset}+{length} of {}", self.size);
        ptr::with_exposed_provenance_mut::<u8>(self.at).wrapping_add(offset)
    }

    /// Reads from `offset` on.
    ///
    /// # Panics
    /// If the range exceeds the size.
    pub fn read(&self, offset: u64, into: &mut [u8]) {
        let from = self.part(offset, into.len()).cast_const();
        // SAFETY: the bytes lie inside (checked above) memory that is there (contract of `new`).
        // `into` is a buffer of the model's or of its caller. If a thread writes meanwhile, that is
        // the race that a device would have, too.
        unsafe { ptr::copy_nonoverlapping(from, into.as_mut_ptr(), into.len()) };
    }

    /// Writes from `offset` on.
    pub(super) fn write(&self, offset: u64, from: &[u8]) {
        let into = self.part(offset, from.len());
        // SAFETY: as in `read`.
        unsafe { ptr::copy_nonoverlapping(from.as_ptr(), into, from.len()) };
    }
}
