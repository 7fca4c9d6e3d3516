//! Memory of the host: what pools take, and what device memory is offloaded into.
//!
//! What pools take is real memory, had from the host driver and never locked; the limits here are
//! the model's. Stores hold only what was written, so that an arena of many GiB may be offloaded.
//!
//! Invariant: locked blocks and stores together are within the lock limit that held when the last
//! of them was made.

use std::ptr::NonNull;

use super::call::Call;
use super::fault::{HandleKind, SimError};
use super::model::Model;
use super::sparse::Sparse;
use crate::bytes::ByteSize;
use crate::device::driver::host::HostDriver;
use crate::device::driver::sealed::Key;
use crate::device::driver::{
    DeviceAddress, Driver as _, DriverError, HOST_GRANULARITY, HostMemory, HostStore,
};

impl Model {
    /// Begins the allocation of host memory: fails where there is no more of it.
    fn enter_host(&mut self, size: ByteSize, memory: HostMemory) -> Result<(), DriverError> {
        self.enter_host_as(Call::HostAlloc, size, memory)
    }

    /// As [`Model::enter_host`], for any call that takes host memory.
    pub(super) fn enter_host_as(
        &mut self,
        call: Call,
        size: ByteSize,
        memory: HostMemory,
    ) -> Result<(), DriverError> {
        self.enter(call, size)?;
        self.charge(call, 0, size);
        if memory == HostMemory::PageLocked {
            if !self.options.page_locked {
                return Err(self.fail(call, SimError::NotSupported, size));
            }
            let locked = self.host_bytes(Some(memory)).saturating_add(size);
            if locked > self.lock_limit {
                return Err(DriverError::LockLimit { requested: size, limit: self.lock_limit });
            }
        }
        if self.host_bytes(None).saturating_add(size) > self.host_limit {
            return Err(self.fail(call, SimError::OutOfMemory, size));
        }
        Ok(())
    }

    pub(super) fn host_alloc(
        &mut self,
        size: ByteSize,
        memory: HostMemory,
    ) -> Result<NonNull<u8>, DriverError> {
        self.enter_host(size, memory)?;
        let at = HostDriver::new().host_alloc(size, HostMemory::Pageable)?;
        self.host_blocks.insert(at.addr().get(), (size, memory));
        Ok(at)
    }

    pub(super) fn host_free(
        &mut self,
        at: NonNull<u8>,
        size: ByteSize,
        memory: HostMemory,
        key: Key,
    ) -> Result<(), DriverError> {
        let call = Call::HostFree;
        self.enter(call, ByteSize::ZERO)?;
        self.charge(call, 0, size);
        let address = at.addr().get();
        if self.host_blocks.get(&address) != Some(&(size, memory)) {
            return Err(self.stale(call, HandleKind::HostMemory, address as u64));
        }
        HostDriver::new().host_free(at, size, HostMemory::Pageable, key)?;
        self.host_blocks.remove(&address);
        Ok(())
    }

    pub(super) fn store_create(&mut self, size: ByteSize) -> Result<HostStore, DriverError> {
        if size.is_zero() || !size.get().is_multiple_of(HOST_GRANULARITY.get()) {
            let at = DeviceAddress::new(0);
            return Err(DriverError::Misaligned { at, size, granularity: HOST_GRANULARITY });
        }
        self.enter_host(size, self.store_memory())?;
        if size.as_usize().is_none() {
            return Err(self.fail(Call::HostAlloc, SimError::OutOfMemory, size));
        }
        Ok(HostStore::new(self.stores.insert(Sparse::new(size))))
    }
}
