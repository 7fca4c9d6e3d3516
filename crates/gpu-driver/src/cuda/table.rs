//! The table of CUDA driver functions, all resolved before any is called.
//!
//! Functions come in groups. Without the first group there is no CUDA driver; without another group
//! its backend is unavailable, and the first missing function is named. Opaque pointers of cuda.h
//! (contexts, streams, events, pools) are integers here: they are passed on unchanged and never
//! dereferenced. The declaration of a function makes the method that calls it and checks its
//! result; a missing function is an error there.
//!
//! Invariant: a function is `Some` only if the library has a symbol of that name.
#![expect(unsafe_code, reason = "symbols become functions of the types that cuda.h gives them")]

use std::ffi::{CStr, c_char, c_void};
use std::ptr::NonNull;

use super::calls::{Calls, NAME_LENGTH};

/// Finds a symbol by its name.
pub(super) type Find<'a> = &'a dyn Fn(&CStr) -> Option<NonNull<c_void>>;

/// Defines a table with a pointer for each function, and a method of the caller's type for each:
/// kind, field, name, arguments. Each function returns 0 or a code, which the method passes to
/// `done`. With a result, the function writes it through its first argument.
///
/// The method is `unsafe` where it depends on the arguments whether the call is sound: pointers
/// are as the library's header says. There is none for `raw` functions, whose code is needed.
macro_rules! functions {
    ($(#[$table_meta:meta])* $table:ident of $calls:ty; $(
        $(#[$meta:meta])*
        $group:ident {
            $($kind:ident $field:ident = $name:literal ($($arg:ident: $type:ty),*) $(-> $out:ty)?;)*
        }
    )*) => {
        $(#[$table_meta])*
        #[derive(Clone, Copy)]
        pub(super) struct $table {
            $($(pub(super) $field: Option<unsafe extern "C" fn($(*mut $out,)? $($type),*) -> u32>,)*)*
        }

        impl $table {
            /// Finds the functions of a library.
            pub(super) fn find(find: $crate::cuda::table::Find<'_>) -> Self {
                Self { $($($field: {
                    let symbol = find($crate::cuda::table::name_of(concat!($name, "\0")));
                    // SAFETY: both are as large as a pointer, and `None` is null in both. The
                    // symbol of this name is a function with these arguments in cuda.h of
                    // CUDA 10.2 to 13 (of NVML: in nvml.h of driver 510 to 580), and its
                    // result an enum of 32 bits.
                    unsafe {
                        std::mem::transmute::<
                            Option<std::ptr::NonNull<std::ffi::c_void>>,
                            Option<unsafe extern "C" fn($(*mut $out,)? $($type),*) -> u32>,
                        >(symbol)
                    }
                },)*)* }
            }

            $(
            $(#[$meta])*
            ///
            /// # Errors
            /// The name of the first function that is missing.
            pub(super) fn $group(&self) -> Result<(), $crate::DriverError> {
                $(self.$field.ok_or($crate::DriverError::NoFunction { function: $name })?;)*
                Ok(())
            })*
        }

        impl $calls {
            $($($crate::cuda::table::method! {
                $kind $field $name ($($arg: $type),*) $($out)?
            })*)*
        }
    };
}

/// Defines the method that calls a function of a table.
macro_rules! method {
    (raw $($rest:tt)*) => {};
    (safe $field:ident $name:literal ($($arg:ident: $type:ty),*) $($out:ty)?) => {
        pub(super) fn $field(&self $(, $arg: $type)*) -> $crate::error::DriverResult<$($out)?> {
            // SAFETY: the arguments are numbers, which the library looks up, or references to what
            // the function reads and writes.
            unsafe { $crate::cuda::table::call!(self $field $name ($($arg),*) $($out)?) }
        }
    };
    (unsafe $field:ident $name:literal ($($arg:ident: $type:ty),*) $($out:ty)?) => {
        pub(super) unsafe fn $field(
            &self $(, $arg: $type)*
        ) -> $crate::error::DriverResult<$($out)?> {
            // SAFETY: the contract of this function is that of the library's.
            unsafe { $crate::cuda::table::call!(self $field $name ($($arg),*) $($out)?) }
        }
    };
}

/// Calls a function of a table and checks its result. The names of messages have no version.
macro_rules! call {
    ($self:ident $field:ident $name:literal ($($arg:ident),*) $($out:ty)?) => {{
        let call = $name.strip_suffix("_v2").unwrap_or($name);
        let function = $self.table.$field;
        let function = function.ok_or($crate::DriverError::Unsupported { what: call })?;
        #[allow(unused_mut, unused_parens, clippy::let_unit_value, reason = "some have no result")]
        let mut out: ($($out)?) = Default::default();
        $self.done(call, function($((&raw mut out).cast::<$out>(),)? $($arg),*))?;
        Ok(out)
    }};
}

pub(super) use {call, functions, method};

/// Returns a name that the macro above ended with a zero.
pub(super) fn name_of(name: &'static str) -> &'static CStr {
    CStr::from_bytes_with_nul(name.as_bytes()).unwrap_or_default()
}

functions! {
    /// The functions of the driver.
    Table of Calls;

    /// Checks the functions of every driver since CUDA 10.2.
    base {
        safe init = "cuInit"(flags: u32);
        raw error_name = "cuGetErrorName"(code: u32, text: *mut *const c_char);
        safe driver_version = "cuDriverGetVersion"() -> u32;
        safe device_count = "cuDeviceGetCount"() -> i32;
        safe device = "cuDeviceGet"(ordinal: u32) -> i32;
        safe read_name = "cuDeviceGetName"(name: &mut [u8; NAME_LENGTH], length: i32, device: i32);
        safe device_uuid = "cuDeviceGetUuid"(device: i32) -> [u8; 16];
        safe device_attribute = "cuDeviceGetAttribute"(attribute: i32, device: i32) -> i32;
        safe device_memory = "cuDeviceTotalMem_v2"(device: i32) -> usize;
        safe context_retain = "cuDevicePrimaryCtxRetain"(device: i32) -> usize;
        safe context_release = "cuDevicePrimaryCtxRelease_v2"(device: i32);
        safe context_current = "cuCtxGetCurrent"() -> usize;
        safe context_set = "cuCtxSetCurrent"(context: usize);
        safe context_synchronize = "cuCtxSynchronize"();
        safe read_memory = "cuMemGetInfo_v2"(free: &mut usize, total: &mut usize);
        safe host_alloc = "cuMemHostAlloc"(at: &mut usize, bytes: usize, flags: u32);
        unsafe host_free = "cuMemFreeHost"(at: *mut u8);
        unsafe host_register = "cuMemHostRegister_v2"(at: *mut u8, bytes: usize, flags: u32);
        unsafe host_unregister = "cuMemHostUnregister"(at: *mut u8);
        safe copy_on_device =
            "cuMemcpyDtoDAsync_v2"(to: u64, from: u64, bytes: usize, stream: usize);
        unsafe copy_to_host =
            "cuMemcpyDtoHAsync_v2"(to: *mut u8, from: u64, bytes: usize, stream: usize);
        unsafe copy_to_device =
            "cuMemcpyHtoDAsync_v2"(to: u64, from: *const u8, bytes: usize, stream: usize);
        safe create_stream = "cuStreamCreate"(flags: u32) -> usize;
        safe stream_destroy = "cuStreamDestroy_v2"(stream: usize);
        safe stream_spin = "cuStreamSynchronize"(stream: usize);
        safe wait_event = "cuStreamWaitEvent"(stream: usize, event: usize, flags: u32);
        safe capture_status = "cuStreamIsCapturing"(stream: usize, status: &mut u32);
        safe capture_mode = "cuThreadExchangeStreamCaptureMode"(mode: &mut u32);
        safe create_event = "cuEventCreate"(flags: u32) -> usize;
        safe event_destroy = "cuEventDestroy_v2"(event: usize);
        safe event_record = "cuEventRecord"(event: usize, stream: usize);
        raw query_event = "cuEventQuery"(event: usize);
        safe event_synchronize = "cuEventSynchronize"(event: usize);
    }

    /// Checks virtual memory: address space separate from memory.
    virtual_memory {
        safe granularity =
            "cuMemGetAllocationGranularity"(of: &AllocationProperties, kind: u32) -> usize;
        safe reserve =
            "cuMemAddressReserve"(bytes: usize, align: usize, wish: u64, flags: u64) -> u64;
        safe unreserve = "cuMemAddressFree"(at: u64, bytes: usize);
        safe create = "cuMemCreate"(bytes: usize, of: &AllocationProperties, flags: u64) -> u64;
        safe release = "cuMemRelease"(handle: u64);
        safe map = "cuMemMap"(at: u64, bytes: usize, offset: usize, handle: u64, flags: u64);
        safe unmap = "cuMemUnmap"(at: u64, bytes: usize);
        unsafe set_access =
            "cuMemSetAccess"(at: u64, bytes: usize, access: *const Access, count: usize);
    }

    /// Checks the function for the handle of an address: since CUDA 11.
    retain {
        safe handle_of = "cuMemRetainAllocationHandle"(at: u64) -> u64;
    }

    /// Checks pools of stream-ordered memory: since CUDA 11.2.
    pools {
        safe pool_create = "cuMemPoolCreate"(of: &PoolProperties) -> usize;
        safe pool_destroy = "cuMemPoolDestroy"(pool: usize);
        safe pool_trim_to = "cuMemPoolTrimTo"(pool: usize, keep: usize);
        safe read_pool = "cuMemPoolGetAttribute"(pool: usize, attribute: i32, value: &mut u64);
        safe write_pool = "cuMemPoolSetAttribute"(pool: usize, attribute: i32, value: &mut u64);
        safe default_pool = "cuDeviceGetDefaultMemPool"(device: i32) -> usize;
        safe pool_alloc =
            "cuMemAllocFromPoolAsync"(bytes: usize, pool: usize, stream: usize) -> u64;
        safe pool_free = "cuMemFreeAsync"(at: u64, stream: usize);
    }

    /// Checks the device's current pool, used by allocations that name no pool: since CUDA 11.2.
    current_pools {
        safe current_pool = "cuDeviceGetMemPool"(device: i32) -> usize;
        safe set_current_pool = "cuDeviceSetMemPool"(device: i32, pool: usize);
    }

    /// Checks the memory that the device caches for graphs: since CUDA 11.4.
    graphs {
        safe graph_trim = "cuDeviceGraphMemTrim"(device: i32);
        safe read_graphs =
            "cuDeviceGetGraphMemAttribute"(device: i32, attribute: i32, value: &mut u64);
        safe write_graphs =
            "cuDeviceSetGraphMemAttribute"(device: i32, attribute: i32, value: &mut u64);
    }

    /// Checks plain memory.
    plain {
        safe plain_alloc = "cuMemAlloc_v2"(bytes: usize) -> u64;
        safe plain_free = "cuMemFree_v2"(at: u64);
    }

    /// Checks managed memory, which the plain calls free.
    managed {
        safe managed_alloc = "cuMemAllocManaged"(bytes: usize, flags: u32) -> u64;
    }

    /// Checks functions that are used if they are there: peers and owners since CUDA 4, and the
    /// UUID of a MIG instance, if there is one, since CUDA 11.4.
    #[expect(dead_code, reason = "each is used if it is there")]
    optional {
        safe can_access = "cuDeviceCanAccessPeer"(device: i32, of: i32) -> i32;
        raw pointer_attribute =
            "cuPointerGetAttribute"(value: *mut c_void, attribute: i32, at: u64);
        safe part_uuid = "cuDeviceGetUuid_v2"(device: i32) -> [u8; 16];
    }
}

// The types and constants of cuda.h that cross the FFI boundary.
//
// Bindings change the shape of these structures from version to version; their size and the fields
// used here are the same in all versions. Constants stay integers, so that a value newer than this
// file is a number and not undefined behaviour.
//
// Invariant: each structure has the size that cuda.h specifies on 64-bit machines.

/// `CUresult`: success.
pub(super) const SUCCESS: u32 = 0;
/// `CUDA_ERROR_NOT_READY`: work is not complete yet. Not an error.
pub(super) const NOT_READY: u32 = 600;

/// `CU_DEVICE_ATTRIBUTE_INTEGRATED`
pub(super) const ATTRIBUTE_INTEGRATED: i32 = 18;
/// `CU_DEVICE_ATTRIBUTE_HOST_NUMA_ID`: the node of the host that is closest to the device; -1 if
/// there are no nodes. Since CUDA 12.2.
pub(super) const ATTRIBUTE_HOST_NODE: i32 = 134;
/// `CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED`
pub(super) const ATTRIBUTE_VIRTUAL_MEMORY: i32 = 102;

/// `CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED`. Since CUDA 11.0.
pub(super) const ATTRIBUTE_RDMA: i32 = 110;
/// `CU_DEVICE_ATTRIBUTE_MANAGED_MEMORY`
pub(super) const ATTRIBUTE_MANAGED: i32 = 83;
/// `CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED`
pub(super) const ATTRIBUTE_POOLS: i32 = 115;

/// `CU_MEM_ATTACH_GLOBAL`: any stream of any device can access the managed memory.
pub(super) const ATTACH_GLOBAL: u32 = 1;
/// `CU_GRAPH_MEM_ATTR_USED_MEM_HIGH`
pub(super) const GRAPH_USED_HIGH: i32 = 1;
/// `CU_GRAPH_MEM_ATTR_RESERVED_MEM_CURRENT`
pub(super) const GRAPH_RESERVED: i32 = 2;
/// `CU_MEMPOOL_ATTR_RELEASE_THRESHOLD`
pub(super) const POOL_THRESHOLD: i32 = 4;
/// `CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT`
pub(super) const POOL_RESERVED: i32 = 5;
/// `CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH`
pub(super) const POOL_RESERVED_HIGH: i32 = 6;
/// `CU_MEMPOOL_ATTR_USED_MEM_CURRENT`
pub(super) const POOL_USED: i32 = 7;
/// `CU_MEMPOOL_ATTR_USED_MEM_HIGH`
pub(super) const POOL_USED_HIGH: i32 = 8;

/// `CU_STREAM_LEGACY`: the legacy default stream, regardless of how the program was compiled.
pub(super) const STREAM_LEGACY: usize = 1;
/// `CUDA_ERROR_STREAM_CAPTURE_IMPLICIT`: the legacy default stream depends on a stream that
/// captures a graph.
pub(super) const CAPTURE_IMPLICIT: i64 = 906;
/// `CU_STREAM_NON_BLOCKING`: no order with the legacy default stream.
pub(super) const STREAM_NON_BLOCKING: u32 = 1;
/// `CU_EVENT_BLOCKING_SYNC`: the host sleeps while it waits for the event.
pub(super) const EVENT_BLOCKING: u32 = 1;
/// `CU_EVENT_DISABLE_TIMING`
pub(super) const EVENT_DISABLE_TIMING: u32 = 2;
/// `CU_MEMHOSTALLOC_PORTABLE`: page-locked for every context.
pub(super) const HOST_PORTABLE: u32 = 1;
/// `CU_MEM_ALLOC_GRANULARITY_MINIMUM`
pub(super) const GRANULARITY_MINIMUM: u32 = 0;
/// `CU_POINTER_ATTRIBUTE_CONTEXT`
pub(super) const ATTRIBUTE_CONTEXT: i32 = 1;
/// `CU_POINTER_ATTRIBUTE_MEMORY_TYPE`
pub(super) const ATTRIBUTE_MEMORY_TYPE: i32 = 2;
/// `CU_POINTER_ATTRIBUTE_IS_MANAGED`
pub(super) const ATTRIBUTE_IS_MANAGED: i32 = 8;
/// `CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL`
pub(super) const ATTRIBUTE_ORDINAL: i32 = 9;
/// `CU_MEMORYTYPE_HOST`
pub(super) const MEMORY_HOST: u32 = 1;
/// `CUDA_ERROR_INVALID_VALUE`
pub(super) const INVALID_VALUE: i64 = 1;
/// `CU_STREAM_CAPTURE_STATUS_NONE`
pub(super) const CAPTURE_NONE: u32 = 0;
/// `CU_STREAM_CAPTURE_MODE_RELAXED`
pub(super) const CAPTURE_RELAXED: u32 = 2;

/// `CU_MEM_LOCATION_TYPE_DEVICE`
const LOCATION_DEVICE: i32 = 1;
/// `CU_MEM_ALLOCATION_TYPE_PINNED`
const ALLOCATION_PINNED: i32 = 1;
/// `CU_MEM_ACCESS_FLAGS_PROT_READWRITE`
const ACCESS_READ_WRITE: i32 = 3;

/// `CUmemLocation`
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(super) struct Location {
    kind: i32,
    id: i32,
}

/// `CUmemAllocationProp`: memory of a device that cannot be shared with another process.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(super) struct AllocationProperties {
    kind: i32,
    handle_kinds: i32,
    location: Location,
    windows: usize,
    /// Compression (0), direct access by network cards, usage and reserved fields (0).
    flags: [u8; 8],
}

impl AllocationProperties {
    /// Returns the properties for a device; with `rdma`, of memory for network cards too.
    pub(super) const fn on(device: i32, rdma: bool) -> Self {
        let location = Location { kind: LOCATION_DEVICE, id: device };
        let flags = [0, rdma as u8, 0, 0, 0, 0, 0, 0];
        Self { kind: ALLOCATION_PINNED, handle_kinds: 0, location, windows: 0, flags }
    }
}

/// `CUmemAccessDesc`: the device reads and writes.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(super) struct Access {
    location: Location,
    flags: i32,
}

impl Access {
    pub(super) const fn by(device: i32) -> Self {
        let location = Location { kind: LOCATION_DEVICE, id: device };
        Self { location, flags: ACCESS_READ_WRITE }
    }
}

/// `CUmemPoolProps`: memory of a device that cannot be shared with another process. The limit has
/// an effect since CUDA 12.2; before that its field must be zero.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(super) struct PoolProperties {
    kind: i32,
    handle_kinds: i32,
    location: Location,
    windows: usize,
    limit: usize,
    /// Usage and reserved fields: all zero.
    rest: [u8; 56],
}

impl PoolProperties {
    /// Returns the properties for a device. A limit of 0 means none.
    pub(super) const fn on(device: i32, limit: usize) -> Self {
        let location = Location { kind: LOCATION_DEVICE, id: device };
        let (kind, rest) = (ALLOCATION_PINNED, [0; 56]);
        Self { kind, handle_kinds: 0, location, windows: 0, limit, rest }
    }
}

#[cfg(target_pointer_width = "64")]
const _: () = assert!(
    size_of::<Location>() == 8
        && size_of::<AllocationProperties>() == 32
        && size_of::<Access>() == 12
        && size_of::<PoolProperties>() == 88
);

#[cfg(test)]
mod tests {
    use super::*;

    fn missing(function: &'static str) -> Result<(), crate::DriverError> {
        Err(crate::DriverError::NoFunction { function })
    }

    fn without(missing: &'static CStr) -> impl Fn(&CStr) -> Option<NonNull<c_void>> {
        move |name| (name != missing).then_some(NonNull::dangling()) // never called
    }

    #[test]
    fn a_function_that_every_driver_has_is_named_where_it_is_missing() {
        assert_eq!(Table::find(&|_| None).base(), missing("cuInit"));
        let last = Table::find(&without(c"cuEventSynchronize"));
        assert_eq!(last.base(), missing("cuEventSynchronize"));
    }

    #[test]
    fn without_a_function_of_a_rung_the_others_are_there() {
        let table = Table::find(&without(c"cuMemMap"));
        assert_eq!(table.virtual_memory(), missing("cuMemMap"));
        assert!(table.base().is_ok() && table.retain().is_ok());
        assert!(table.pools().is_ok() && table.plain().is_ok() && table.managed().is_ok());
        let table = Table::find(&without(c"cuMemFreeAsync"));
        assert_eq!(table.pools(), missing("cuMemFreeAsync"));
        assert!(table.virtual_memory().is_ok() && table.plain().is_ok());
    }
}
