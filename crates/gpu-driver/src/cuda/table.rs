//! The table of CUDA driver functions, all resolved before any is called.
//!
//! The table holds pointers and makes no call; the requirements of each function are stated at its
//! call. Functions come in groups. Without the first group there is no CUDA driver; without another
//! group its backend is unavailable, and the first missing function is named. Opaque pointers of
//! cuda.h (contexts, streams, events, pools) are integers here: they are passed on unchanged and
//! never dereferenced.
//!
//! Invariant: a group, once obtained, has all of its functions.
#![expect(unsafe_code, reason = "symbols become functions of the types that cuda.h gives them")]

use std::ffi::{CStr, c_char, c_void};
use std::ptr::NonNull;

use super::abi::{Access, AllocationProperties, PoolProperties};

/// Finds a symbol by its name.
pub(super) type Find<'a> = &'a dyn Fn(&CStr) -> Option<NonNull<c_void>>;

/// A function that the driver lacks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Missing(pub(super) &'static str);

/// Defines a struct with a pointer for each function: field, name, arguments. Each function returns
/// a `CUresult`.
macro_rules! group {
    ($(#[$meta:meta])* $group:ident { $($field:ident = $name:literal ($($argument:ty),*);)* }) => {
        $(#[$meta])*
        #[derive(Clone, Copy)]
        pub(super) struct $group {
            $(pub(super) $field: unsafe extern "C" fn($($argument),*) -> u32,)*
        }

        impl $group {
            /// Returns all functions of the group, or the name of the first that is missing.
            pub(super) fn find(find: Find<'_>) -> Result<Self, Missing> {
                Ok(Self {
                    $($field: {
                        let symbol = find($crate::cuda::table::name_of(concat!($name, "\0")));
                        // SAFETY: both are as large as a pointer, and `None` is null in both. The
                        // symbol of this name is a function with these arguments in cuda.h of
                        // CUDA 10.2 to 13 (of NVML: in nvml.h of driver 510 to 580), and its
                        // result an enum of 32 bits.
                        let found = unsafe {
                            std::mem::transmute::<
                                Option<std::ptr::NonNull<std::ffi::c_void>>,
                                Option<unsafe extern "C" fn($($argument),*) -> u32>,
                            >(symbol)
                        };
                        found.ok_or(Missing($name))?
                    },)*
                })
            }
        }
    };
}

pub(super) use group;

/// Returns a name that the macro above ended with a zero.
pub(super) fn name_of(name: &'static str) -> &'static CStr {
    CStr::from_bytes_with_nul(name.as_bytes()).unwrap_or_default()
}

group! {
    /// The functions of every driver since CUDA 10.2.
    Base {
        init = "cuInit"(u32);
        error_name = "cuGetErrorName"(u32, *mut *const c_char);
        driver_version = "cuDriverGetVersion"(*mut i32);
        device_count = "cuDeviceGetCount"(*mut i32);
        device = "cuDeviceGet"(*mut i32, i32);
        device_name = "cuDeviceGetName"(*mut c_char, i32, i32);
        device_uuid = "cuDeviceGetUuid"(*mut [u8; 16], i32);
        device_attribute = "cuDeviceGetAttribute"(*mut i32, i32, i32);
        device_memory = "cuDeviceTotalMem_v2"(*mut usize, i32);
        context_retain = "cuDevicePrimaryCtxRetain"(*mut usize, i32);
        context_release = "cuDevicePrimaryCtxRelease_v2"(i32);
        context_current = "cuCtxGetCurrent"(*mut usize);
        context_set = "cuCtxSetCurrent"(usize);
        context_synchronize = "cuCtxSynchronize"();
        memory_info = "cuMemGetInfo_v2"(*mut usize, *mut usize);
        host_alloc = "cuMemHostAlloc"(*mut *mut c_void, usize, u32);
        host_free = "cuMemFreeHost"(*mut c_void);
        host_register = "cuMemHostRegister_v2"(*mut c_void, usize, u32);
        host_unregister = "cuMemHostUnregister"(*mut c_void);
        copy_on_device = "cuMemcpyDtoDAsync_v2"(u64, u64, usize, usize);
        copy_to_host = "cuMemcpyDtoHAsync_v2"(*mut c_void, u64, usize, usize);
        copy_to_device = "cuMemcpyHtoDAsync_v2"(u64, *const c_void, usize, usize);
        stream_create = "cuStreamCreate"(*mut usize, u32);
        stream_destroy = "cuStreamDestroy_v2"(usize);
        stream_synchronize = "cuStreamSynchronize"(usize);
        stream_wait_event = "cuStreamWaitEvent"(usize, usize, u32);
        stream_is_capturing = "cuStreamIsCapturing"(usize, *mut u32);
        capture_mode = "cuThreadExchangeStreamCaptureMode"(*mut u32);
        event_create = "cuEventCreate"(*mut usize, u32);
        event_destroy = "cuEventDestroy_v2"(usize);
        event_record = "cuEventRecord"(usize, usize);
        event_query = "cuEventQuery"(usize);
        event_synchronize = "cuEventSynchronize"(usize);
    }
}

group! {
    /// Virtual memory: address space separate from memory.
    Virtual {
        granularity = "cuMemGetAllocationGranularity"(*mut usize, *const AllocationProperties, u32);
        reserve = "cuMemAddressReserve"(*mut u64, usize, usize, u64, u64);
        unreserve = "cuMemAddressFree"(u64, usize);
        create = "cuMemCreate"(*mut u64, usize, *const AllocationProperties, u64);
        release = "cuMemRelease"(u64);
        map = "cuMemMap"(u64, usize, usize, u64, u64);
        unmap = "cuMemUnmap"(u64, usize);
        set_access = "cuMemSetAccess"(u64, usize, *const Access, usize);
    }
}

group! {
    /// The handle of an address: since CUDA 11.
    Retain {
        handle_of = "cuMemRetainAllocationHandle"(*mut u64, u64);
    }
}

group! {
    /// Access to memory of other devices: since CUDA 4.
    Peers {
        can_access = "cuDeviceCanAccessPeer"(*mut i32, i32, i32);
    }
}

group! {
    /// The owner of an address: since CUDA 4.
    Pointer {
        attribute = "cuPointerGetAttribute"(*mut c_void, i32, u64);
    }
}

group! {
    /// The UUID of a MIG instance, if there is one, instead of the device's: since CUDA 11.4.
    Share {
        device_uuid = "cuDeviceGetUuid_v2"(*mut [u8; 16], i32);
    }
}

group! {
    /// Pools of stream-ordered memory: since CUDA 11.2.
    Pools {
        create = "cuMemPoolCreate"(*mut usize, *const PoolProperties);
        destroy = "cuMemPoolDestroy"(usize);
        trim_to = "cuMemPoolTrimTo"(usize, usize);
        attribute = "cuMemPoolGetAttribute"(usize, i32, *mut c_void);
        set_attribute = "cuMemPoolSetAttribute"(usize, i32, *mut c_void);
        of_device = "cuDeviceGetDefaultMemPool"(*mut usize, i32);
        alloc = "cuMemAllocFromPoolAsync"(*mut u64, usize, usize, usize);
        free = "cuMemFreeAsync"(u64, usize);
    }
}

group! {
    /// The device's current pool, used by allocations that name no pool: since CUDA 11.2.
    CurrentPool {
        get = "cuDeviceGetMemPool"(*mut usize, i32);
        set = "cuDeviceSetMemPool"(i32, usize);
    }
}

group! {
    /// Memory that the device caches for graphs: since CUDA 11.4.
    Graphs {
        trim = "cuDeviceGraphMemTrim"(i32);
        attribute = "cuDeviceGetGraphMemAttribute"(i32, i32, *mut c_void);
        set_attribute = "cuDeviceSetGraphMemAttribute"(i32, i32, *mut c_void);
    }
}

group! {
    /// Plain memory.
    Plain {
        alloc = "cuMemAlloc_v2"(*mut u64, usize);
        free = "cuMemFree_v2"(u64);
    }
}

group! {
    /// Managed memory, which the plain calls free.
    Managed {
        alloc = "cuMemAllocManaged"(*mut u64, usize, u32);
    }
}

/// All functions that were found.
#[derive(Clone, Copy)]
pub(super) struct Table {
    pub(super) base: Base,
    pub(super) share: Result<Share, Missing>,
    pub(super) virtual_memory: Result<Virtual, Missing>,
    pub(super) retain: Result<Retain, Missing>,
    pub(super) peers: Result<Peers, Missing>,
    pub(super) pointer: Result<Pointer, Missing>,
    pub(super) pools: Result<Pools, Missing>,
    pub(super) current_pool: Result<CurrentPool, Missing>,
    pub(super) graphs: Result<Graphs, Missing>,
    pub(super) plain: Result<Plain, Missing>,
    pub(super) managed: Result<Managed, Missing>,
}

impl Table {
    /// Returns the table, or the name of the first function without which there is no CUDA.
    pub(super) fn find(find: Find<'_>) -> Result<Self, Missing> {
        Ok(Self {
            base: Base::find(find)?,
            share: Share::find(find),
            virtual_memory: Virtual::find(find),
            retain: Retain::find(find),
            peers: Peers::find(find),
            pointer: Pointer::find(find),
            pools: Pools::find(find),
            current_pool: CurrentPool::find(find),
            graphs: Graphs::find(find),
            plain: Plain::find(find),
            managed: Managed::find(find),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn without(missing: &'static CStr) -> impl Fn(&CStr) -> Option<NonNull<c_void>> {
        move |name| (name != missing).then_some(NonNull::dangling()) // never called
    }

    #[test]
    fn a_function_that_every_driver_has_is_named_where_it_is_missing() {
        assert_eq!(Table::find(&|_| None).err(), Some(Missing("cuInit")));
        let last = Table::find(&without(c"cuEventSynchronize"));
        assert_eq!(last.err(), Some(Missing("cuEventSynchronize")));
    }

    #[test]
    fn without_a_function_of_a_rung_the_others_are_there() {
        let table = Table::find(&without(c"cuMemMap")).expect("a driver");
        assert_eq!(table.virtual_memory.err(), Some(Missing("cuMemMap")));
        assert!(table.retain.is_ok() && table.share.is_ok());
        assert!(table.pools.is_ok() && table.plain.is_ok() && table.managed.is_ok());
        let table = Table::find(&without(c"cuMemFreeAsync")).expect("a driver");
        assert_eq!(table.pools.err(), Some(Missing("cuMemFreeAsync")));
        assert!(table.virtual_memory.is_ok() && table.plain.is_ok());
    }
}
