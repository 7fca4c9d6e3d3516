//! The functions that PyTorch's `CUDAPluggableAllocator` takes by name or address.
//!
//! They use the default allocator. PyTorch passes the size, the device and the current stream to
//! both functions, and does not check the address: an allocation that failed is NULL, and the first
//! kernel that uses it fails.
//!
//! Invariant: signatures are those of PyTorch's documentation; nothing is said of other functions
//! of its interface.
#![expect(unsafe_code, reason = "the functions of the header, with pointers of the caller")]

use std::ffi::{c_int, c_void};

use lowtide_gpu::ByteSize;

use crate::api::{LOWTIDE_ALL_DEVICES, StreamPointer, address, guard_block, pointer, stream};
use crate::blocks;
use crate::failure::{guard, guard_address};
use crate::options::invalid;
use crate::registry::{self, default_handle};

/// PyTorch's `alloc_fn`. Returns NULL for a size of 0 and after a failure (`lowtide_last_error`).
///
/// # Safety
/// As for `lowtide_alloc`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn lowtide_torch_alloc(
    size: isize,
    device: c_int,
    stream: StreamPointer,
) -> *mut c_void {
    guard_address(|| {
        let size = usize::try_from(size).map_err(|_| invalid("size", size as i64, "0 or more"))?;
        let at = blocks::alloc(default_handle()?, device, size, 0, self::stream(stream))?;
        Ok(pointer(at))
    })
}

/// PyTorch's `free_fn`. The size is not used.
///
/// # Safety
/// As for `lowtide_free`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn lowtide_torch_free(
    block: *mut c_void,
    size: isize,
    device: c_int,
    stream: StreamPointer,
) {
    let _ = size;
    let stream = self::stream(stream);
    guard_block(block, |at| blocks::free(default_handle()?, device, at, stream));
}

/// For `set_record_stream_fn`, which is required if tensors are used on several streams. The
/// address may be inside the block.
///
/// # Safety
/// As for `lowtide_record_use`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn lowtide_torch_record_stream(block: *mut c_void, stream: StreamPointer) {
    guard_block(block, |at| {
        let handle = default_handle()?;
        let (device, found) = blocks::find(handle, at)?;
        blocks::record_use(handle, device, found.at, self::stream(stream))
    });
}

/// For `set_reset_fn`: `torch.cuda.empty_cache()` releases all idle memory.
#[unsafe(no_mangle)]
pub extern "C" fn lowtide_torch_empty_cache() {
    guard(|| blocks::shrink(default_handle()?, LOWTIDE_ALL_DEVICES, ByteSize::ZERO).map(drop));
}

/// For `set_base_alloc_fn`: returns the start of the block that contains an address, and stores its
/// size in `*size`, which is optional. NULL if there is none.
///
/// # Safety
/// `size` is NULL or may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn lowtide_torch_base_alloc(
    block: *mut c_void,
    size: *mut usize,
) -> *mut c_void {
    guard_address(|| {
        let (_, found) = blocks::find(default_handle()?, address(block))?;
        if !size.is_null() {
            let bytes = found.size.as_usize().unwrap_or(usize::MAX);
            // SAFETY: may be written, by the contract of this function.
            unsafe { size.write_unaligned(bytes) };
        }
        Ok(pointer(Some(found.at)))
    })
}

/// For `set_memory_fraction_fn`: limits a device to a share of its memory, 0 to 1.
#[unsafe(no_mangle)]
pub extern "C" fn lowtide_torch_memory_fraction(fraction: f64, device: c_int) {
    guard(|| {
        let handle = default_handle()?;
        if !(0.0..=1.0).contains(&fraction) {
            // Shown in thousandths; a value that is no number as 0.
            #[expect(clippy::cast_possible_truncation, reason = "saturates")]
            let thousandths = (fraction * 1000.0) as i64;
            return Err(invalid("fraction in thousandths", thousandths, "0 to 1000"));
        }
        let device = registry::device(handle, device)?;
        let memory = device.driver.device_memory()?;
        let limit = memory.map_or(ByteSize::MAX, |memory| memory.total.scaled(fraction));
        device.arena.set_limit(limit);
        Ok(())
    });
}
