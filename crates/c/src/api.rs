//! The functions of the header for any program.
//!
//! Each returns a status and unwinds never. Pointers that the header calls optional may be NULL;
//! any other NULL is a failure. A pointer that is not NULL must be valid for what the function does
//! with it.
//!
//! Invariant: after a failure `*out` is 0 or NULL, if it was given.
#![expect(unsafe_code, reason = "the functions of the header, with pointers of the caller")]

use std::ffi::{c_char, c_int, c_void};

use lowtide_gpu::ByteSize;
use lowtide_gpu_driver::{DeviceAddress, StreamHandle};

use crate::blocks;
use crate::failure::{self, Outcome, Status, guard, not_null};
use crate::options::{Block, Config, Options, Statistics, check_room, invalid, write};
use crate::registry::{self, StreamRef};

/// The version of the functions and structs that this header describes. It changes if a program
/// that was built with an older header could fail.
pub const LOWTIDE_ABI_MAJOR: u32 = 1;
/// Additions within that version.
pub const LOWTIDE_ABI_MINOR: u32 = 0;

/// All devices of an allocator.
pub const LOWTIDE_ALL_DEVICES: c_int = -1;

/// An allocator: an arena on each device that is used. A handle is a number and owns nothing.
type Allocator = u64;

/// A CUDA stream (`cudaStream_t`, `CUstream`) of the device. NULL is the legacy default stream.
/// `cudaStreamPerThread` counts as `lowtide_any_stream()`.
pub(crate) type StreamPointer = *mut c_void;

pub(crate) fn stream(pointer: StreamPointer) -> StreamRef {
    StreamRef::of(pointer.addr() as u64)
}

pub(crate) fn address(pointer: *mut c_void) -> DeviceAddress {
    DeviceAddress::new(pointer.addr() as u64)
}

/// As [`guard`], for a function that takes the address of a block: NULL succeeds.
#[inline(always)]
pub(crate) fn guard_block(
    block: *mut c_void,
    act: impl FnOnce(DeviceAddress) -> Outcome<()>,
) -> Status {
    guard(|| if block.is_null() { Ok(()) } else { act(address(block)) })
}

pub(crate) fn pointer(at: Option<DeviceAddress>) -> *mut c_void {
    let at = at.map_or(0, DeviceAddress::get);
    // Targets have 64 bits, as CUDA. The memory of a host driver was exposed by that.
    std::ptr::with_exposed_provenance_mut(usize::try_from(at).unwrap_or(0))
}

/// Returns the version of the library: `LOWTIDE_ABI_MAJOR << 16 | LOWTIDE_ABI_MINOR`. A program
/// works with a library of the same major version and the same or a later minor one.
#[unsafe(no_mangle)]
pub extern "C" fn lowtide_abi_version() -> u32 {
    (LOWTIDE_ABI_MAJOR << 16) | LOWTIDE_ABI_MINOR
}

/// Returns the stream for memory that any stream may use. A block of it is reused only after all
/// work of the device, which is waited for when an allocation needs the memory.
#[unsafe(no_mangle)]
pub extern "C" fn lowtide_any_stream() -> StreamPointer {
    std::ptr::without_provenance_mut(usize::MAX)
}

/// Returns the name of a status, such as `LOWTIDE_STATUS_OUT_OF_MEMORY`. Static text.
#[unsafe(no_mangle)]
pub extern "C" fn lowtide_status_name(status: i32) -> *const c_char {
    failure::name(status).as_ptr()
}

/// Returns the text of the last failed call of this thread; empty before the first. At most 512
/// bytes, UTF-8. Valid until the next failed call of the thread, and until the thread ends.
#[unsafe(no_mangle)]
pub extern "C" fn lowtide_last_error() -> *const c_char {
    failure::last()
}

/// Opens an allocator and stores its handle in `*out`. A device is opened by the first allocation
/// on it, which for CUDA takes from 0.1 s to several seconds.
///
/// `options` is optional. At most 64 allocators are open at once. The first call starts a thread
/// that releases idle memory.
///
/// # Safety
/// `options` is NULL or points to as many bytes as its `struct_size` says. `out` is NULL or may be
/// written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn lowtide_open(options: *const Options, out: *mut Allocator) -> Status {
    guard(|| {
        not_null(out, "out")?;
        // SAFETY: the contract of this function.
        let open = || registry::open(unsafe { Config::read(options) }?);
        // SAFETY: may be written, by the contract of this function.
        unsafe { store(out, 0, open) }
    })
}

/// Closes an allocator: waits for the work of its freed blocks, and returns its memory to the
/// devices.
///
/// Fails if blocks are live; the allocator stays open. If another thread allocates meanwhile, some
/// devices may be closed then: free the blocks and call it again.
#[unsafe(no_mangle)]
pub extern "C" fn lowtide_close(allocator: Allocator) -> Status {
    guard(|| registry::close(allocator))
}

/// Makes an allocator the one that the functions for PyTorch and ONNX Runtime use. Fails if another
/// one is; without a call they open one with the default options.
#[unsafe(no_mangle)]
pub extern "C" fn lowtide_set_default(allocator: Allocator) -> Status {
    guard(|| registry::set_default(allocator))
}

/// Stores the handle of the default allocator in `*out`; opens one if there is none.
///
/// # Safety
/// `out` is NULL or may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn lowtide_get_default(out: *mut Allocator) -> Status {
    guard(|| {
        not_null(out, "out")?;
        // SAFETY: may be written, by the contract of this function.
        unsafe { store(out, 0, registry::default_handle) }
    })
}

/// Allocates `size` bytes on a device for the next work of a stream, and stores the address in
/// `*out`. The contents are unspecified.
///
/// The size is rounded up to 256 bytes. `align` is a power of two up to the granule of the device
/// (2 MiB on most); 0 for 256. A size of 0 succeeds with NULL, as `cudaMalloc`. Memory that the
/// stream freed is reused at once; that of another stream after an event, which the stream waits
/// for on the device; new memory is committed last. Does not synchronize, unless memory is short.
///
/// # Safety
/// `out` is NULL or may be written. The stream is of that device, and exists until the blocks that
/// use it are freed, or `lowtide_end_stream` is called.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn lowtide_alloc(
    allocator: Allocator,
    device: c_int,
    size: usize,
    align: usize,
    stream: StreamPointer,
    out: *mut *mut c_void,
) -> Status {
    guard(|| {
        not_null(out, "out")?;
        let stream = self::stream(stream);
        let alloc = || blocks::alloc(allocator, device, size, align, stream).map(pointer);
        // SAFETY: may be written, by the contract of this function.
        unsafe { store(out, std::ptr::null_mut(), alloc) }
    })
}

/// Frees a block after its last use was queued on a stream. NULL succeeds.
///
/// The stream may differ from that of the allocation: then both count as users of the block, as
/// those of `lowtide_record_use`. The memory is reused after the work that they have until now. If
/// no live block uses a stream any more, records an event behind its work: the stream may be
/// destroyed then, and a later stream with the same handle counts as another one.
///
/// # Safety
/// The stream is as for `lowtide_alloc`. The program queues no further work on the block.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn lowtide_free(
    allocator: Allocator,
    device: c_int,
    block: *mut c_void,
    stream: StreamPointer,
) -> Status {
    let stream = self::stream(stream);
    guard_block(block, |at| blocks::free(allocator, device, at, stream))
}

/// Records that work on a stream uses a block of another stream. The memory is reused after the
/// work that the stream has when the block is freed. A block that more than 64 streams use counts
/// as used by any stream.
///
/// # Safety
/// The stream is as for `lowtide_alloc`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn lowtide_record_use(
    allocator: Allocator,
    device: c_int,
    block: *mut c_void,
    stream: StreamPointer,
) -> Status {
    guard(|| {
        not_null(block, "block")?;
        let stream = self::stream(stream);
        blocks::record_use(allocator, device, address(block), stream)
    })
}

/// Tells that a stream is about to be destroyed while live blocks use it; call it before that.
/// Records an event behind the stream's work and does not wait. The blocks count as used by any
/// stream from now on. Without this call an error of the destroyed stream has the same effect, and
/// fails no call for another stream; but CUDA leaves the use of a destroyed stream undefined.
///
/// No other call with the stream may be in progress.
///
/// # Safety
/// The stream is as for `lowtide_alloc`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn lowtide_end_stream(
    allocator: Allocator,
    device: c_int,
    stream: StreamPointer,
) -> Status {
    guard(|| {
        let (device, stream) =
            (registry::opened(allocator, device)?, self::stream(stream).handle());
        if let (Some(device), Some(stream)) = (device, stream) {
            // SAFETY: the contract of this function.
            unsafe { device.arena.end_stream(stream) }?;
        }
        Ok(())
    })
}

/// Tells that a stream begins (`is_capturing` 1) or ends (0) the capture of a CUDA graph; call it
/// before `cudaStreamBeginCapture` and after `cudaStreamEndCapture`. Opens the device.
///
/// A graph keeps addresses. The memory of blocks that are allocated or freed on the stream
/// meanwhile is held when they are freed, so that a launch uses no memory of others, until
/// `lowtide_release_captured`. It counts in `live_bytes`. Keep other blocks of the graph until it
/// is destroyed. Without this call memory freed during a capture is reused. Until the end is told,
/// no call waits for the whole device, and memory that needs such a wait is not available.
#[unsafe(no_mangle)]
pub extern "C" fn lowtide_set_capturing(
    allocator: Allocator,
    device: c_int,
    stream: StreamPointer,
    is_capturing: c_int,
) -> Status {
    guard(|| {
        let device = registry::device(allocator, device)?;
        let stream = self::stream(stream).handle().filter(|&stream| stream != StreamHandle::LEGACY);
        let stream = stream.ok_or_else(|| invalid("stream", 0, "one that can capture"))?;
        Ok(device.arena.set_capturing(stream, is_capturing != 0)?)
    })
}

/// Frees the memory that graphs of a device have captured, or of all for `LOWTIDE_ALL_DEVICES`. It
/// is reused after all work of the device. Stores its bytes in `*released`, which is optional.
///
/// # Safety
/// No graph that was captured on a stream of the device is launched any more; launches in progress
/// may go on. `released` is NULL or may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn lowtide_release_captured(
    allocator: Allocator,
    device: c_int,
    released: *mut u64,
) -> Status {
    guard(|| {
        let release = || {
            let mut released = ByteSize::ZERO;
            for arena in blocks::named(allocator, device)? {
                // SAFETY: the contract of this function.
                released = released.saturating_add(unsafe { arena.release_captured() }?);
            }
            Ok(released.get())
        };
        // SAFETY: the contract of this function.
        unsafe { store(released, 0, release) }
    })
}

/// Stores the result of `act` in `*out`, and `none` if it fails. Stores nothing in NULL.
///
/// # Safety
/// `out` is NULL or may be written.
#[inline(always)]
unsafe fn store<T>(out: *mut T, none: T, act: impl FnOnce() -> Outcome<T>) -> Outcome<()> {
    if out.is_null() {
        return act().map(drop);
    }
    // SAFETY: the contract of this function.
    unsafe { out.write_unaligned(none) };
    let value = act()?;
    // SAFETY: as above.
    unsafe { out.write_unaligned(value) };
    Ok(())
}

/// Finds the live block that contains an address, on any device, and fills in `*out`.
///
/// # Safety
/// `out` is NULL, or points to as many bytes as its `struct_size` says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn lowtide_find_block(
    allocator: Allocator,
    address: *mut c_void,
    out: *mut Block,
) -> Status {
    guard(|| {
        // SAFETY: the contract of this function.
        unsafe { check_room(out, "out") }?;
        not_null(address, "address")?;
        let (device, found) = blocks::find(allocator, self::address(address))?;
        let size = |bytes: ByteSize| bytes.as_usize().unwrap_or(usize::MAX);
        let block = Block {
            struct_size: size_of::<Block>(),
            base: pointer(Some(found.at)),
            size: size(found.size),
            requested: size(found.requested),
            device,
            reserved: 0,
        };
        // SAFETY: the contract of this function.
        unsafe { write(out, "out", &block) }
    })
}

/// Releases idle memory of a device, or of all for `LOWTIDE_ALL_DEVICES`, until at most
/// `keep_bytes` are committed on each. Stores the bytes released in `*released`, which is optional.
///
/// Waits for the work of freed blocks first: of their streams, or of the whole device if a block
/// was of any stream. While one of the streams captures a graph it does not wait, and releases only
/// memory whose work is known to be complete.
///
/// # Safety
/// `released` is NULL or may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn lowtide_shrink(
    allocator: Allocator,
    device: c_int,
    keep_bytes: u64,
    released: *mut u64,
) -> Status {
    guard(|| {
        let keep = ByteSize::new(keep_bytes);
        let shrink = || blocks::shrink(allocator, device, keep).map(ByteSize::get);
        // SAFETY: the contract of this function.
        unsafe { store(released, 0, shrink) }
    })
}

/// Sets the most bytes that a device may have committed; `UINT64_MAX` for no limit. Opens the
/// device. Memory above a lowered limit stays until it is freed or released. The addresses of a
/// device follow from its limit when it is opened, so a limit that is raised to more than three
/// times that, and more than 4 GiB, may be out of reach.
#[unsafe(no_mangle)]
pub extern "C" fn lowtide_set_limit(
    allocator: Allocator,
    device: c_int,
    limit_bytes: u64,
) -> Status {
    guard(|| {
        registry::device(allocator, device)?.arena.set_limit(ByteSize::new(limit_bytes));
        Ok(())
    })
}

/// Fills in the figures of a device, or the sum over all for `LOWTIDE_ALL_DEVICES`. A device that
/// was not used has zeros. Makes no call of the driver.
///
/// # Safety
/// `out` is NULL, or points to as many bytes as its `struct_size` says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn lowtide_get_statistics(
    allocator: Allocator,
    device: c_int,
    out: *mut Statistics,
) -> Status {
    guard(|| {
        // SAFETY: the contract of this function.
        unsafe { check_room(out, "out") }?;
        let figures = blocks::statistics(allocator, device)?;
        // SAFETY: the contract of this function.
        unsafe { write(out, "out", &figures) }
    })
}
