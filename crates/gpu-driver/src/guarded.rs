//! A driver that makes no further call once its context is lost.
//!
//! A lost context is lost for good, so a further call only repeats the error, and may block in a
//! driver that is being reset. All arenas of a device share one [`Guarded`] driver, so an error
//! that one arena gets stops the calls of all. It retries nothing and releases nothing.
//!
//! Invariant: after a call has failed with [`DriverError::is_context_lost`], no later call reaches
//! the driver. Calls that other threads have already begun return their own results.
#![expect(unsafe_code, reason = "the calls of the trait that take memory away are passed on")]

use std::ptr::NonNull;
use std::sync::{Arc, OnceLock};

use crate::error::DriverResult;
use crate::{
    Backend, Capabilities, DeviceAddress, DeviceMemory, DeviceUuid, Driver, DriverError,
    EventHandle, HostMemory, HostStore, StreamHandle,
};
use lowtide_core::bytes::ByteSize;

/// A driver that passes calls on to another until the other reports that its context is lost, and
/// answers every later call with that error. Costs one atomic read per call.
///
/// Pageable host memory needs no context: it can still be allocated and freed.
#[derive(Debug)]
pub struct Guarded {
    driver: Arc<dyn Driver>,
    lost: OnceLock<DriverError>,
}

impl Guarded {
    /// Creates a guard of `driver`, whose context is not known to be lost.
    #[must_use]
    pub fn new(driver: Arc<dyn Driver>) -> Self {
        Self { driver, lost: OnceLock::new() }
    }

    /// Returns the error that reported the loss of the context, if it is lost. Makes no driver
    /// call.
    #[must_use]
    pub fn lost(&self) -> Option<&DriverError> {
        self.lost.get()
    }

    /// Returns the driver behind this one.
    #[must_use]
    pub const fn driver(&self) -> &Arc<dyn Driver> {
        &self.driver
    }

    fn call<T>(&self, act: impl FnOnce(&dyn Driver) -> DriverResult<T>) -> DriverResult<T> {
        if let Some(error) = self.lost.get() {
            return Err(error.clone());
        }
        let answer = act(&*self.driver);
        if let Err(error) = &answer
            && error.is_context_lost()
        {
            // Another thread may have set it first.
            let _ = self.lost.set(error.clone());
        }
        answer
    }
}

/// Passes calls on, each with its own arguments.
macro_rules! forward {
    (plain: $($name:ident($($arg:ident: $kind:ty),*) -> $out:ty;)*) => {
        $(fn $name(&self $(, $arg: $kind)*) -> $out {
            self.driver.$name($($arg),*)
        })*
    };
    (safe: $($name:ident($($arg:ident: $kind:ty),*) -> $out:ty;)*) => {
        $(fn $name(&self $(, $arg: $kind)*) -> DriverResult<$out> {
            self.call(|driver| driver.$name($($arg),*))
        })*
    };
    (taking: $($name:ident($($arg:ident: $kind:ty),*) -> $out:ty;)*) => {
        $(unsafe fn $name(&self $(, $arg: $kind)*) -> DriverResult<$out> {
            // SAFETY: the contract of this call is that of the other, with the same arguments.
            self.call(|driver| unsafe { driver.$name($($arg),*) })
        })*
    };
}

// SAFETY: the promises are those of the other driver. A call that is not passed on is an error, and
// has changed nothing, as after an error of the lost context.
unsafe impl Driver for Guarded {
    forward! { plain:
        backend() -> Backend;
        capabilities() -> Capabilities;
        context() -> Option<u64>;
        ordinal() -> Option<u32>;
        uuid() -> Option<DeviceUuid>;
        context_overhead() -> Option<ByteSize>;
        rollback_failures_total() -> u64;
        host_pointer(at: DeviceAddress) -> Option<NonNull<u8>>;
    }

    forward! { safe:
        reserve(size: ByteSize) -> DeviceAddress;
        segment_create(size: ByteSize) -> DeviceAddress;
        trim() -> ();
        device_memory() -> Option<DeviceMemory>;
        headroom() -> Option<ByteSize>;
        foreign_memory(at: DeviceAddress, size: ByteSize) -> Option<&'static str>;
        stream_create() -> StreamHandle;
        event_create() -> EventHandle;
        synchronize() -> ();
        host_store_create(size: ByteSize) -> HostStore;
    }

    forward! { taking:
        unreserve(at: DeviceAddress, size: ByteSize) -> ();
        commit(at: DeviceAddress, size: ByteSize, handle: ByteSize) -> ();
        decommit(at: DeviceAddress, size: ByteSize, handle: ByteSize) -> ();
        remap(from: DeviceAddress, to: DeviceAddress, size: ByteSize, handle: ByteSize) -> ();
        segment_destroy(at: DeviceAddress, size: ByteSize) -> ();
        copy(from: DeviceAddress, to: DeviceAddress, size: ByteSize) -> ();
        stream_destroy(stream: StreamHandle) -> ();
        stream_wait_event(stream: StreamHandle, event: EventHandle) -> ();
        stream_synchronize(stream: StreamHandle) -> ();
        is_capturing(stream: StreamHandle) -> bool;
        event_destroy(event: EventHandle) -> ();
        event_record(event: EventHandle, stream: StreamHandle) -> ();
        event_query(event: EventHandle) -> bool;
        event_synchronize(event: EventHandle) -> ();
        copy_async(
            from: DeviceAddress, to: DeviceAddress, size: ByteSize, stream: StreamHandle
        ) -> ();
        host_store_destroy(store: HostStore) -> ();
        offload(from: DeviceAddress, into: HostStore, stream: StreamHandle) -> ();
        restore(from: HostStore, to: DeviceAddress, stream: StreamHandle) -> ();
        copy_from_host(
            from: NonNull<u8>, to: DeviceAddress, size: ByteSize, stream: StreamHandle
        ) -> ();
        copy_to_host(
            from: DeviceAddress, to: NonNull<u8>, size: ByteSize, stream: StreamHandle
        ) -> ();
    }

    fn host_alloc(&self, size: ByteSize, memory: HostMemory) -> DriverResult<NonNull<u8>> {
        match memory {
            HostMemory::Pageable => self.driver.host_alloc(size, memory),
            HostMemory::PageLocked => self.call(|driver| driver.host_alloc(size, memory)),
        }
    }

    unsafe fn host_free(
        &self,
        at: NonNull<u8>,
        size: ByteSize,
        memory: HostMemory,
    ) -> DriverResult {
        // SAFETY: the contract of this call is that of the other, with the same arguments.
        let free = |driver: &dyn Driver| unsafe { driver.host_free(at, size, memory) };
        match memory {
            HostMemory::Pageable => free(&*self.driver),
            HostMemory::PageLocked => self.call(free),
        }
    }
}

#[cfg(all(test, not(lowtide_loom)))]
mod tests {
    use std::collections::BTreeSet;
    use std::sync::atomic::{AtomicU32, Ordering};

    use super::*;
    use crate::host::HostDriver;

    /// A driver that was lost before its first call.
    #[derive(Debug, Default)]
    struct Lost {
        host: HostDriver,
        calls: AtomicU32,
    }

    // SAFETY: it provides no memory but the host driver's.
    unsafe impl Driver for Lost {
        fn backend(&self) -> Backend {
            self.host.backend()
        }

        fn capabilities(&self) -> Capabilities {
            self.host.capabilities()
        }

        fn reserve(&self, _: ByteSize) -> DriverResult<DeviceAddress> {
            self.calls.fetch_add(1, Ordering::Relaxed);
            Err(DriverError::IllegalAddress { call: "cuMemAddressReserve" })
        }

        fn device_memory(&self) -> DriverResult<Option<DeviceMemory>> {
            self.calls.fetch_add(1, Ordering::Relaxed);
            Ok(None)
        }

        fn host_alloc(&self, size: ByteSize, memory: HostMemory) -> DriverResult<NonNull<u8>> {
            self.host.host_alloc(size, memory)
        }

        unsafe fn host_free(
            &self,
            at: NonNull<u8>,
            size: ByteSize,
            memory: HostMemory,
        ) -> DriverResult {
            // SAFETY: `host_alloc` allocated it with the host driver.
            unsafe { self.host.host_free(at, size, memory) }
        }
    }

    #[test]
    fn after_the_first_loss_no_call_reaches_the_driver_and_pageable_memory_is_freed() {
        let lost = Arc::new(Lost::default());
        let guarded = Guarded::new(lost.clone());
        let size = ByteSize::mib(2);
        assert_eq!((guarded.device_memory(), guarded.lost()), (Ok(None), None));
        let held = guarded.host_alloc(size, HostMemory::Pageable).expect("memory");
        let error = DriverError::IllegalAddress { call: "cuMemAddressReserve" };
        assert_eq!(guarded.reserve(size), Err(error.clone()));
        assert_eq!(guarded.lost(), Some(&error));
        assert_eq!((guarded.device_memory(), guarded.trim()), (Err(error.clone()), Err(error)));
        assert_eq!(lost.calls.load(Ordering::Relaxed), 2);
        // SAFETY: allocated above with this size and kind, and not used.
        assert_eq!(unsafe { guarded.host_free(held, size, HostMemory::Pageable) }, Ok(()));
    }

    /// A call with a default in the trait that was not passed on would answer for the driver.
    #[test]
    fn every_call_of_the_trait_is_passed_on() {
        let whole = include_str!("lib.rs");
        let (_, contract) = whole.split_once("pub unsafe trait Driver").expect("the trait");
        let (contract, _) = contract.split_once("\n}\n").expect("its end");
        let declared = contract.lines().filter_map(|line| {
            let line = line.trim_start();
            let line = line.strip_prefix("unsafe ").unwrap_or(line);
            Some(line.strip_prefix("fn ")?.split_once('(')?.0)
        });
        let declared: BTreeSet<_> = declared.collect();
        let own = include_str!("guarded.rs");
        let (_, own) = own.split_once("unsafe impl Driver for Guarded").expect("the guard");
        let (own, _) = own.split_once("\n}\n").expect("its end");
        let is_passed = |name: &&str| {
            let starts = [format!("        {name}("), format!("fn {name}(")];
            starts.iter().any(|start| own.contains(start))
        };
        assert!(declared.len() > 30, "{declared:?}");
        let missing: Vec<_> = declared.iter().filter(|name| !is_passed(name)).collect();
        assert!(missing.is_empty(), "not passed on: {missing:?}");
    }
}
