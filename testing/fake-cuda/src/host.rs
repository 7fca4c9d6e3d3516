//! Host memory by address: mapped by the library, registered by the program, or used during one
//! call.
//!
//! The model reads and writes it; this file proves that the memory exists. Memory that the library
//! mapped is kept while anything can access it. Registered memory stays until it is unregistered,
//! which waits for all work. Memory of one call stays until that call returns, and the call waits
//! for the copy or copies at once.
//!
//! Invariant: a mapping is unmapped once, with the last value that names it.
#![expect(unsafe_code, reason = "names memory of C callers by its address")]

use std::ffi::c_void;
use std::sync::Arc;

use lowtide_cuda_sim::raw::HostBytes;

use crate::ffi::Untyped;

/// The unit in which memory of our own is mapped, in bytes.
const PAGE: usize = 4 << 10;

/// Memory that the library mapped: its address, with provenance exposed, and its length.
#[derive(Debug)]
struct MappedPages(usize, usize);

impl Drop for MappedPages {
    fn drop(&mut self) {
        let at: *mut c_void = std::ptr::with_exposed_provenance_mut(self.0);
        // SAFETY: mapped by `map` with this length, unmapped once, and nobody asks any more: the
        // model drops its last share when the memory is freed.
        let gone = unsafe { libc::munmap(at, self.1) };
        debug_assert_eq!(gone, 0);
    }
}

/// Maps fresh memory of our own, all zero. `None` if there is no more. It is shared with forked
/// children, as page-locked memory of the real driver is.
pub(crate) fn map(size: usize) -> Option<(Untyped, Arc<HostBytes>)> {
    let length = size.checked_next_multiple_of(PAGE).filter(|length| *length > 0)?;
    let (protection, flags) =
        (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_SHARED | libc::MAP_ANONYMOUS);
    // SAFETY: mmap(2): an anonymous mapping at an address of the kernel's choice touches no memory
    // that is there.
    let at = unsafe { libc::mmap(std::ptr::null_mut(), length, protection, flags, -1, 0) };
    if at == libc::MAP_FAILED {
        return None;
    }
    let owner = MappedPages(at.expose_provenance(), length);
    // SAFETY: mapped above, to be read and written, until `owner` is dropped.
    let bytes = unsafe { HostBytes::new(at.cast(), size, owner) };
    Some((Untyped::of(at), Arc::new(bytes)))
}

/// Names memory of a C caller, who keeps it as the head of this file says.
pub(crate) fn of_caller(at: Untyped, size: usize) -> Arc<HostBytes> {
    // SAFETY: the C caller's promise: cuda.h, memory of a copy is there, and writable where it is
    // the destination. That another thread uses it meanwhile is the caller's race, as it is with a
    // device.
    Arc::new(unsafe { HostBytes::new(at.pointer().cast(), size, ()) })
}

/// Copies `size` bytes of a C caller's memory now: pageable memory on its way to the device.
pub(crate) fn staged(from: Untyped, size: usize) -> Arc<HostBytes> {
    let mut bytes = vec![0; size];
    of_caller(from, size).read(0, &mut bytes);
    Arc::new(HostBytes::owned(bytes))
}
