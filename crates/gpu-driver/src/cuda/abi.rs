//! The types and constants of cuda.h that cross the FFI boundary.
//!
//! Bindings change the shape of these structures from version to version; their size and the fields
//! used here are the same in all versions. Constants stay integers, so that a value newer than this
//! file is a number and not undefined behaviour.
//!
//! Invariant: each structure has the size that cuda.h specifies on 64-bit machines.

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
