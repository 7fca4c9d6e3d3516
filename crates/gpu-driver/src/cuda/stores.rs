//! Host memory for offloading, addressed by number so that no slice of it can exist.
//!
//! A store is mapped, touched by several threads on the device's NUMA node, and then registered:
//! that takes a third of the time of `cuMemHostAlloc`, and nothing fills it with zeros again. A
//! store that the driver refuses to page-lock stays pageable, and copies go through a small ring
//! ([`Staging`]).
//!
//! Invariant: a number names one store from its creation until it is freed, and is never reused; a
//! store is unmapped after it was unregistered.
#![expect(unsafe_code, reason = "bytes of pageable stores are copied by their address")]

use std::collections::BTreeMap;
use std::ptr::NonNull;
use std::sync::OnceLock;

use super::abi::ATTRIBUTE_HOST_NODE;
use super::calls::{Answer, Calls};
use super::driver::CudaDriver;
use crate::staging::Staging;
use crate::{DriverError, HostStore, StoreSpan, TouchedMemory};
use lowtide_core::bytes::ByteSize;
use lowtide_core::log;
use lowtide_core::sync::atomic::{AtomicBool, Ordering};
use lowtide_core::sync::{Mutex, lock};

/// The stores of a driver.
#[derive(Debug, Default)]
pub(super) struct Stores {
    /// The node of the host that is closest to the device, if known; queried for the first store.
    node: OnceLock<Option<u32>>,
    table: Mutex<StoreTable>,
    pub(super) staging: Staging,
    has_logged_pageable: AtomicBool,
}

#[derive(Debug, Default)]
struct StoreTable {
    last: u64,
    stores: BTreeMap<u64, Store>,
}

#[derive(Debug)]
struct Store {
    memory: TouchedMemory,
    is_locked: bool,
}

/// The part of a store that a span names.
pub(super) enum Found {
    Locked(NonNull<u8>),
    Pageable(Part),
}

/// A part of a pageable store, which stays until the copy with it is complete.
pub(super) struct Part {
    start: *mut u8,
    size: u64,
}

impl Stores {
    pub(super) fn create(&self, driver: &CudaDriver, size: ByteSize) -> Answer<HostStore> {
        let node = *self.node.get_or_init(|| driver.call(|calls| node_of(calls, driver)).ok());
        let memory = TouchedMemory::map(size, node, TouchedMemory::threads(size))?;
        let is_locked = match self.lock_pages(driver, &memory) {
            Ok(is_locked) => is_locked,
            Err(error) => {
                // SAFETY: it was not registered, and is not handed out.
                let _ = unsafe { memory.unmap() };
                return Err(error);
            }
        };
        let mut table = lock(&self.table);
        table.last += 1;
        let number = table.last;
        table.stores.insert(number, Store { memory, is_locked });
        Ok(HostStore::new(number))
    }

    /// Page-locks memory, or counts it as a store that needs a ring. Returns `true` if it is
    /// page-locked.
    fn lock_pages(&self, driver: &CudaDriver, memory: &TouchedMemory) -> Answer<bool> {
        let error = match driver.call(|calls| calls.register(memory)) {
            Ok(()) => return Ok(true),
            Err(error) if error.is_context_lost() => return Err(error),
            Err(error) => error,
        };
        self.staging.add_store(driver);
        if !self.has_logged_pageable.swap(true, Ordering::Relaxed) {
            log!(warn, %error, "cannot page-lock host memory, copies are slower");
        }
        Ok(false)
    }

    /// Frees a store; the store stays if the driver refuses.
    ///
    /// # Safety
    /// Every copy from and to the store is complete, and no other call with it is in progress.
    pub(super) unsafe fn destroy(&self, driver: &CudaDriver, store: HostStore) -> Answer {
        // Removed from the table first: the call may block as long as other work of the device
        // takes.
        let number = store.get();
        let mut store = lock(&self.table).stores.remove(&number).ok_or_else(unknown)?;
        // SAFETY: the contract of this function.
        let outcome = unsafe { self.free(driver, &mut store) };
        if outcome.is_err() {
            lock(&self.table).stores.insert(number, store);
        }
        outcome
    }

    /// # Safety
    /// As for [`Stores::destroy`].
    unsafe fn free(&self, driver: &CudaDriver, store: &mut Store) -> Answer {
        if store.is_locked {
            // SAFETY: registered by `lock_pages`; no copy uses it (contract of this function).
            driver.call(|calls| unsafe { calls.host_unregister(store.memory.start()) })?;
        } else {
            // SAFETY: the contract of this function.
            unsafe { self.staging.remove_store(driver) }?;
        }
        // The system refuses that only if it has too many mappings; then the memory leaks.
        // SAFETY: no copy uses it, and it is not registered.
        let _ = unsafe { store.memory.unmap() };
        Ok(())
    }

    /// Returns the part of a store that a span names.
    pub(super) fn find(&self, span: StoreSpan) -> Answer<Found> {
        let table = lock(&self.table);
        let store = table.stores.get(&span.store.get()).ok_or_else(unknown)?;
        let end = span.offset.checked_add(span.size).and_then(ByteSize::as_usize);
        let fits = end.is_some_and(|end| end <= store.memory.bytes());
        let offset = span.offset.as_usize().filter(|_| fits).ok_or_else(unknown)?;
        let start = store.memory.start().wrapping_add(offset);
        if store.is_locked {
            return NonNull::new(start).map(Found::Locked).ok_or_else(unknown);
        }
        Ok(Found::Pageable(Part { start, size: span.size.get() }))
    }
}

impl Part {
    /// Returns the address of `length` bytes from `offset` on.
    ///
    /// # Panics
    /// If they are not inside the part.
    fn at(&self, offset: u64, length: usize) -> *mut u8 {
        let end = offset.checked_add(length as u64);
        assert!(end.is_some_and(|end| end <= self.size), "{offset}+{length} of {}", self.size);
        self.start.wrapping_add(usize::try_from(offset).unwrap_or(usize::MAX))
    }

    pub(super) fn write(&self, offset: u64, bytes: &[u8]) {
        let to = self.at(offset, bytes.len());
        // SAFETY: the bytes lie inside the part (checked above) of a store that stays mapped, and
        // nothing else accesses it (contracts of `Driver::offload` and `Driver::restore`).
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), to, bytes.len()) };
    }

    pub(super) fn read(&self, offset: u64, into: &mut [u8]) {
        let from = self.at(offset, into.len()).cast_const();
        // SAFETY: as in `write`; every byte is initialised, by the kernel at least.
        unsafe { std::ptr::copy_nonoverlapping(from, into.as_mut_ptr(), into.len()) };
    }
}

/// Returns the number of the node that is closest to the device.
fn node_of(calls: &Calls, driver: &CudaDriver) -> Answer<u32> {
    let device = calls.device(driver.device.ordinal)?;
    let node = calls.device_attribute(ATTRIBUTE_HOST_NODE, device)?;
    u32::try_from(node).map_err(|_| DriverError::Unsupported { what: "NUMA nodes" })
}

fn unknown() -> DriverError {
    DriverError::Unsupported { what: "host stores of another driver, or spans outside a store" }
}
