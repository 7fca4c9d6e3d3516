//! Names of results: of those that the library answers, that lowtide knows, and that tests plan.
//!
//! Invariant: a result that is not in the table has no name, and asking for it is an error (1).
#![expect(unsafe_code, reason = "exports functions under C names: the attribute alone")]

use std::ffi::{CStr, c_char};

use crate::call::{Answer, INVALID_VALUE};
use crate::ffi::{Out, export};

/// Results of cuda.h: number and name.
const NAMES: &[(u32, &CStr)] = &[
    (0, c"CUDA_SUCCESS"),
    (1, c"CUDA_ERROR_INVALID_VALUE"),
    (2, c"CUDA_ERROR_OUT_OF_MEMORY"),
    (3, c"CUDA_ERROR_NOT_INITIALIZED"),
    (4, c"CUDA_ERROR_DEINITIALIZED"),
    (34, c"CUDA_ERROR_STUB_LIBRARY"),
    (36, c"CUDA_ERROR_CALL_REQUIRES_NEWER_DRIVER"),
    (46, c"CUDA_ERROR_DEVICE_UNAVAILABLE"),
    (100, c"CUDA_ERROR_NO_DEVICE"),
    (101, c"CUDA_ERROR_INVALID_DEVICE"),
    (201, c"CUDA_ERROR_INVALID_CONTEXT"),
    (205, c"CUDA_ERROR_MAP_FAILED"),
    (214, c"CUDA_ERROR_ECC_UNCORRECTABLE"),
    (218, c"CUDA_ERROR_INVALID_PTX"),
    (304, c"CUDA_ERROR_OPERATING_SYSTEM"),
    (400, c"CUDA_ERROR_INVALID_HANDLE"),
    (401, c"CUDA_ERROR_ILLEGAL_STATE"),
    (500, c"CUDA_ERROR_NOT_FOUND"),
    (600, c"CUDA_ERROR_NOT_READY"),
    (700, c"CUDA_ERROR_ILLEGAL_ADDRESS"),
    (709, c"CUDA_ERROR_CONTEXT_IS_DESTROYED"),
    (711, c"CUDA_ERROR_TOO_MANY_PEERS"),
    (712, c"CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED"),
    (713, c"CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED"),
    (719, c"CUDA_ERROR_LAUNCH_FAILED"),
    (800, c"CUDA_ERROR_NOT_PERMITTED"),
    (801, c"CUDA_ERROR_NOT_SUPPORTED"),
    (802, c"CUDA_ERROR_SYSTEM_NOT_READY"),
    (803, c"CUDA_ERROR_SYSTEM_DRIVER_MISMATCH"),
    (806, c"CUDA_ERROR_MPS_RPC_FAILURE"),
    (900, c"CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED"),
    (901, c"CUDA_ERROR_STREAM_CAPTURE_INVALIDATED"),
    (905, c"CUDA_ERROR_STREAM_CAPTURE_ISOLATION"),
    (906, c"CUDA_ERROR_STREAM_CAPTURE_IMPLICIT"),
    (907, c"CUDA_ERROR_CAPTURED_EVENT"),
    (912, c"CUDA_ERROR_INVALID_CLUSTER_SIZE"),
    (999, c"CUDA_ERROR_UNKNOWN"),
];

fn put(code: u32, to: Out<*const c_char>) -> Answer {
    let name = NAMES.iter().find(|(number, _)| *number == code);
    to.put(name.map_or(std::ptr::null(), |(_, name)| name.as_ptr()))?;
    name.map(|_| ()).ok_or(INVALID_VALUE)
}

export! {
    fn cuGetErrorName(code: u32, to: Out<*const c_char>) {
        put(code, to)
    }

    fn cuGetErrorString(code: u32, to: Out<*const c_char>) {
        put(code, to)
    }
}
