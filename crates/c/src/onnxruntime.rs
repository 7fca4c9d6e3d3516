//! The functions that ONNX Runtime's CUDA provider takes by address: `gpu_external_alloc`,
//! `gpu_external_free` and `gpu_external_empty_cache`.
//!
//! They have neither a device nor a stream, and use the default allocator with the device and the
//! stream of `lowtide_ort_bind`. Unbound, blocks are for any stream of device 0: freed memory stays
//! pending until an allocation needs it, or idle memory is released, and the device is waited for.
//!
//! Invariant: a block is freed on the device that it is on, whatever is bound.
#![expect(unsafe_code, reason = "the functions of the header, with pointers of the caller")]

use std::ffi::{c_int, c_void};
use std::sync::{PoisonError, RwLock};

use lowtide_gpu::ByteSize;

use crate::api::{LOWTIDE_ALL_DEVICES, StreamPointer, guard_block, pointer, stream};
use crate::blocks;
use crate::failure::{Status, guard, guard_address};
use crate::registry::{self, StreamRef, default_handle};

static BOUND: RwLock<(c_int, StreamRef)> = RwLock::new((0, StreamRef::ANY));

fn bound() -> (c_int, StreamRef) {
    *BOUND.read().unwrap_or_else(PoisonError::into_inner)
}

/// Sets the device and the stream of later calls of the functions for ONNX Runtime, in the whole
/// process: the provider's `device_id`, and the stream on which it works. Opens the device.
///
/// One process can have one such stream. `lowtide_any_stream()` unbinds it.
///
/// # Safety
/// As for `lowtide_alloc`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn lowtide_ort_bind(device: c_int, stream: StreamPointer) -> Status {
    guard(|| {
        let stream = self::stream(stream);
        registry::device(default_handle()?, device)?;
        *BOUND.write().unwrap_or_else(PoisonError::into_inner) = (device, stream);
        Ok(())
    })
}

/// `gpu_external_alloc`. Returns NULL after a failure, for which ONNX Runtime throws.
#[unsafe(no_mangle)]
pub extern "C" fn lowtide_ort_alloc(size: usize) -> *mut c_void {
    guard_address(|| {
        let (device, stream) = bound();
        Ok(pointer(blocks::alloc(default_handle()?, device, size, 0, stream)?))
    })
}

/// `gpu_external_free`.
///
/// # Safety
/// As for `lowtide_free`; the last use of the block was queued on the bound stream.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn lowtide_ort_free(block: *mut c_void) {
    guard_block(block, |at| {
        let (handle, (device, stream)) = (default_handle()?, bound());
        match blocks::free(handle, device, at, stream) {
            // It is of a device that was bound before; the stream is of another device.
            Err(failure) if failure.status() == Status::ForeignAddress => {
                let (device, _) = blocks::find(handle, at)?;
                blocks::free(handle, device, at, StreamRef::ANY)
            }
            outcome => outcome,
        }
    });
}

/// `gpu_external_empty_cache`: releases idle memory of all devices.
#[unsafe(no_mangle)]
pub extern "C" fn lowtide_ort_empty_cache() {
    guard(|| blocks::shrink(default_handle()?, LOWTIDE_ALL_DEVICES, ByteSize::ZERO).map(drop));
}
