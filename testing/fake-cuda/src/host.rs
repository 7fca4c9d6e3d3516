//! Host memory by address: mapped by the library, registered by the program, or used during one
//! call.
//!
//! The model asks it to read and write; this file proves that the memory exists. Memory that the
//! library mapped is kept while anything can access it. Registered memory stays until it is
//! unregistered, which waits for all work. Memory of one call stays until that call returns, and
//! the call waits for the copy or copies at once.
//!
//! Invariant: `offset + length <= size` for each read and write.
#![expect(unsafe_code, reason = "reads and writes memory of C callers by its address")]

use std::ffi::c_void;
use std::sync::Arc;

use lowtide_cuda_sim::raw::HostBytes;

use crate::ffi::Untyped;

/// A range of memory of this process.
#[derive(Debug)]
pub(crate) struct Memory {
    /// Its address, with provenance exposed: it goes from thread to thread as a number.
    at: usize,
    size: usize,
    /// `true` if it is mapped by us, and ours to unmap.
    own: bool,
}

/// The unit in which memory of our own is mapped, in bytes.
const PAGE: usize = 4 << 10;

impl Memory {
    /// Maps fresh memory of our own, all zero. `None` if there is no more. It is shared with forked
    /// children, as page-locked memory of the real driver is.
    pub(crate) fn map(size: usize) -> Option<Arc<Self>> {
        let length = size.checked_next_multiple_of(PAGE).filter(|length| *length > 0)?;
        let (protection, flags) =
            (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_SHARED | libc::MAP_ANONYMOUS);
        // SAFETY: mmap(2): an anonymous mapping at an address of the kernel's choice
        // touches no memory that is there.
        let at = unsafe { libc::mmap(std::ptr::null_mut(), length, protection, flags, -1, 0) };
        if at == libc::MAP_FAILED {
            return None;
        }
        Some(Arc::new(Self { at: at.expose_provenance(), size, own: true }))
    }

    /// Names memory of a C caller, who keeps it as the head of this file says.
    pub(crate) fn of_caller(at: Untyped, size: usize) -> Arc<Self> {
        Arc::new(Self { at: at.pointer().expose_provenance(), size, own: false })
    }

    pub(crate) fn address(&self) -> Untyped {
        Untyped::of(std::ptr::with_exposed_provenance_mut(self.at))
    }

    /// A pointer to `length` bytes from `offset` on.
    ///
    /// # Panics
    /// If they are not inside.
    fn part(&self, offset: u64, length: usize) -> *mut u8 {
        let offset = usize::try_from(offset).unwrap_or(usize::MAX);
        let end = offset.checked_add(length);
        assert!(end.is_some_and(|end| end <= self.size), "{offset}+{length} of {}", self.size);
        std::ptr::with_exposed_provenance_mut::<u8>(self.at).wrapping_add(offset)
    }
}

impl HostBytes for Memory {
    fn size(&self) -> u64 {
        self.size as u64
    }

    fn read(&self, offset: u64, into: &mut [u8]) {
        let from = self.part(offset, into.len()).cast_const();
        // SAFETY: the bytes lie inside (checked above) memory that is there (head of this file);
        // `into` is a buffer of ours, so that they do not overlap. That another thread writes them
        // meanwhile is the C caller's race, as it is with a device.
        unsafe { std::ptr::copy_nonoverlapping(from, into.as_mut_ptr(), into.len()) };
    }

    fn write(&self, offset: u64, from: &[u8]) {
        let into = self.part(offset, from.len());
        // SAFETY: as in `read`; cuda.h: the destination of a copy is writable memory.
        unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), into, from.len()) };
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        if self.own {
            let at: *mut c_void = std::ptr::with_exposed_provenance_mut(self.at);
            let length = self.size.next_multiple_of(PAGE);
            // SAFETY: mapped by `map` with this length, unmapped once, and nobody asks any more:
            // the model drops its last share when the memory is freed.
            let gone = unsafe { libc::munmap(at, length) };
            debug_assert_eq!(gone, 0);
        }
    }
}

/// Bytes that were copied at the call: pageable memory on its way to the device.
#[derive(Debug)]
pub(crate) struct Staged(Box<[u8]>);

impl Staged {
    /// Copies `size` bytes of a C caller's memory now.
    pub(crate) fn copy(from: Untyped, size: usize) -> Arc<Self> {
        let mut bytes = vec![0; size].into_boxed_slice();
        Memory::of_caller(from, size).read(0, &mut bytes);
        Arc::new(Self(bytes))
    }
}

impl HostBytes for Staged {
    fn size(&self) -> u64 {
        self.0.len() as u64
    }

    fn read(&self, offset: u64, into: &mut [u8]) {
        let offset = usize::try_from(offset).unwrap_or(usize::MAX);
        into.copy_from_slice(&self.0[offset..][..into.len()]);
    }

    /// Nothing is ever copied back to where it came from.
    fn write(&self, _: u64, _: &[u8]) {}
}
