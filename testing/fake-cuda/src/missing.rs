//! Functions that are not supported and return 801: cudarc panics if a function does not exist.
//!
//! Invariant: no call has an effect.
#![expect(unsafe_code, reason = "exports functions under C names: the attribute alone")]

use crate::call::NOT_SUPPORTED;
use crate::ffi::export;

/// Exports functions that answer 801, whatever they are given: in C a caller passes arguments, and
/// a function that takes none leaves them alone.
macro_rules! missing {
    ($($name:ident)*) => { $( export! { fn $name() { Err(NOT_SUPPORTED) } } )* };
}

missing! {
    cuCtxCreate_v2 cuCtxCreate_v3 cuCtxCreate_v4 cuCtxDestroy_v2
    cuCtxEnablePeerAccess cuCtxDisablePeerAccess
    cuMemcpyPeer cuMemcpyPeerAsync cuMemcpyBatchAsync cuMemcpyBatchAsync_v2
    cuMemPrefetchAsync cuMemAdvise
    cuMemExportToShareableHandle cuMemImportFromShareableHandle
    cuMemPoolExportToShareableHandle cuMemPoolImportFromShareableHandle
    cuIpcGetMemHandle cuIpcOpenMemHandle_v2 cuIpcCloseMemHandle
    cuImportExternalMemory cuExternalMemoryGetMappedBuffer cuDestroyExternalMemory
    cuModuleLoad cuModuleLoadFatBinary cuLibraryLoadData
    cuLaunchCooperativeKernel cuLaunchKernelEx
    cuOccupancyMaxPotentialBlockSize cuOccupancyMaxPotentialBlockSizeWithFlags
    cuOccupancyMaxActiveBlocksPerMultiprocessor
    cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags
    cuOccupancyAvailableDynamicSMemPerBlock
    cuOccupancyMaxActiveClusters cuOccupancyMaxPotentialClusterSize
}
