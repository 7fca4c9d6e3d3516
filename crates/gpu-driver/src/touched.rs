//! Host memory with all of its pages present, for page-locking or as a store that is not locked.
//!
//! The kernel fills a page with zeros when it is first touched, and that takes most of the time of
//! page-locking fresh memory. Several threads touch the parts at once, on a NUMA node of choice.
//! Nothing fills the memory a second time.
//!
//! The memory is not inherited by a forked child (`MADV_DONTFORK`): a device that reads or writes
//! its pages must not meet a copy on write, and no slice of it exists that code in the child could
//! use.
//!
//! Invariant: the range is mapped until [`TouchedMemory::unmap`]; a drop unmaps nothing, because a
//! child does not have the range.
#![expect(unsafe_code, reason = "memory comes from mmap, and is touched by its address")]

use std::ptr;
use std::thread;

use super::{DriverError, HOST_GRANULARITY};
use lowtide_core::bytes::ByteSize;

/// The maximum number of threads that touch memory at once. A guess: a few of them use all of the
/// bandwidth of a memory controller.
const THREADS_MAX: usize = 8;

/// The smallest part for a thread of its own: touching it takes longer than starting a thread.
const PART_MIN: usize = 16 << 20;

/// The unit in which memory is divided among threads: a huge page.
const HUGE: usize = 2 << 20;

/// The smallest page size in use.
const PAGE: usize = 4 << 10;

/// The maximum number of a NUMA node, as in Linux.
#[cfg(target_os = "linux")]
const NODES_MAX: usize = 1024;

/// Mapped memory of this process.
#[derive(Debug)]
pub struct TouchedMemory {
    /// The address, with exposed provenance for all of the memory.
    at: usize,
    bytes: usize,
}

impl TouchedMemory {
    /// Maps memory of whole [`HOST_GRANULARITY`] units, all bytes zero, and touches its pages with
    /// up to `threads` threads, this one included. The pages come from the NUMA node if it has
    /// room and the system permits the choice.
    ///
    /// # Errors
    /// [`DriverError::OutOfMemory`], or [`DriverError::Refused`] with the system's code.
    pub fn map(size: ByteSize, node: Option<u32>, threads: usize) -> Result<Self, DriverError> {
        let none = || DriverError::OutOfMemory { call: "mmap", requested: size };
        let whole = size.get().is_multiple_of(HOST_GRANULARITY.get()) && !size.is_zero();
        let bytes = size.as_usize().filter(|_| whole).ok_or_else(none)?;
        let access = libc::PROT_READ | libc::PROT_WRITE;
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        // SAFETY: without MAP_FIXED the kernel picks a range that nothing occupies. No file is
        // involved: descriptor -1 and offset 0 as mmap(2) asks of MAP_ANONYMOUS.
        let start = unsafe { libc::mmap(ptr::null_mut(), bytes, access, flags, -1, 0) };
        if start == libc::MAP_FAILED {
            return Err(super::host::last_error("mmap", bytes));
        }
        let memory = Self { at: start.expose_provenance(), bytes };
        memory.advise(node);
        memory.touch(threads);
        Ok(memory)
    }

    /// Returns the number of threads with which memory of this size is touched.
    #[must_use]
    pub fn threads(size: ByteSize) -> usize {
        let processors = thread::available_parallelism().map_or(1, usize::from);
        let parts = size.as_usize().unwrap_or(usize::MAX) / PART_MIN;
        processors.min(THREADS_MAX).min(parts).max(1)
    }

    /// Returns the start of the memory.
    #[must_use]
    pub fn start(&self) -> *mut u8 {
        ptr::with_exposed_provenance_mut(self.at)
    }

    /// Returns the size of the memory in bytes.
    #[must_use]
    pub const fn bytes(&self) -> usize {
        self.bytes
    }

    /// Unmaps the memory.
    ///
    /// # Safety
    /// Nothing uses the memory any more, and this process has not been forked from the one that
    /// mapped it.
    ///
    /// # Errors
    /// [`DriverError::Refused`] with the system's code; the memory stays mapped.
    pub unsafe fn unmap(&self) -> Result<(), DriverError> {
        // SAFETY: the whole of a mapping of ours that nothing uses (contract of this function).
        let result = unsafe { libc::munmap(self.start().cast(), self.bytes) };
        if result == 0 { Ok(()) } else { Err(super::host::last_error("munmap", self.bytes)) }
    }

    /// Asks for huge pages, for memory of one node, and for none of it in a child. The memory is
    /// as usable without.
    #[cfg(target_os = "linux")]
    fn advise(&self, node: Option<u32>) {
        for advice in [libc::MADV_HUGEPAGE, libc::MADV_DONTFORK] {
            // SAFETY: a fresh mapping of ours; neither advice changes its contents.
            let _ = unsafe { libc::madvise(self.start().cast(), self.bytes, advice) };
        }
        let node = node.and_then(|node| usize::try_from(node).ok());
        let Some(node) = node.filter(|node| *node < NODES_MAX - 1) else { return };
        let bits = libc::c_ulong::BITS as usize;
        let mut mask = [0 as libc::c_ulong; NODES_MAX / libc::c_ulong::BITS as usize];
        mask[node / bits] = 1 << (node % bits);
        let (policy, flags) = (libc::MPOL_PREFERRED, 0_u32);
        // SAFETY: mbind(2): the range is a mapping of ours, the mask has `NODES_MAX` bits. It fails
        // without effect if there is no such node or the process may not choose.
        let _ = unsafe {
            let (at, mask) = (self.start(), mask.as_ptr());
            libc::syscall(libc::SYS_mbind, at, self.bytes, policy, mask, NODES_MAX, flags)
        };
    }

    #[cfg(not(target_os = "linux"))]
    fn advise(&self, _: Option<u32>) {}

    /// Touches all pages.
    fn touch(&self, threads: usize) {
        let part = self.bytes.div_ceil(threads.max(1)).next_multiple_of(HUGE);
        let parts = || (0..self.bytes).step_by(part).map(|at| (at, part.min(self.bytes - at)));
        thread::scope(|scope| {
            for (at, bytes) in parts().skip(1) {
                let touch = move || self.touch_part(at, bytes);
                let name = "lowtide-touch".to_owned();
                let thread = thread::Builder::new().name(name);
                if thread.spawn_scoped(scope, touch).is_err() {
                    self.touch_part(at, bytes);
                }
            }
            if let Some((at, bytes)) = parts().next() {
                self.touch_part(at, bytes);
            }
        });
    }

    fn touch_part(&self, at: usize, bytes: usize) {
        let start = self.start().wrapping_add(at);
        // One call instead of a fault for each page (madvise(2), since Linux 5.14).
        #[cfg(target_os = "linux")]
        // SAFETY: a part of a mapping of ours; its contents stay.
        if unsafe { libc::madvise(start.cast(), bytes, libc::MADV_POPULATE_WRITE) } == 0 {
            return;
        }
        for page in (0..bytes).step_by(PAGE) {
            // SAFETY: inside the mapping, where only this thread writes: zero, which is there. It
            // is volatile so that the write is made.
            unsafe { start.wrapping_add(page).write_volatile(0) };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the number of bytes whose pages are present.
    fn present(memory: &TouchedMemory) -> usize {
        let mut pages = vec![0_u8; memory.bytes / PAGE];
        let (start, bytes) = (memory.start().cast(), memory.bytes);
        // SAFETY: mincore(2): one byte for each page of a mapping of ours.
        let result = unsafe { libc::mincore(start, bytes, pages.as_mut_ptr()) };
        assert_eq!(result, 0);
        pages.iter().filter(|page| **page & 1 == 1).count() * PAGE
    }

    #[test]
    fn every_page_is_present_and_zero_for_any_number_of_threads() {
        for threads in [0, 1, 2, 5, 64] {
            // A node that is there, and one that is not.
            for (node, units) in [(Some(0), 1), (Some(700), 33), (None, 100)] {
                let size = HOST_GRANULARITY.checked_mul(units).expect("little");
                let memory = TouchedMemory::map(size, node, threads).expect("memory");
                assert_eq!(present(&memory) as u64, size.get(), "{threads} threads");
                // SAFETY: the memory is ours, and initialised by the kernel.
                let bytes = unsafe { std::slice::from_raw_parts(memory.start(), memory.bytes()) };
                assert!(bytes.iter().all(|byte| *byte == 0));
                // SAFETY: the slice is not used again.
                unsafe { memory.unmap() }.expect("unmapped");
            }
        }
    }

    #[test]
    fn few_threads_touch_little_memory_and_sizes_of_no_unit_are_refused() {
        assert_eq!(TouchedMemory::threads(ByteSize::mib(31)), 1);
        assert!((1..=THREADS_MAX).contains(&TouchedMemory::threads(ByteSize::gib(1))));
        for size in [ByteSize::ZERO, ByteSize::kib(4), ByteSize::new(1 << 62)] {
            let refused = TouchedMemory::map(size, None, 2);
            assert!(matches!(refused, Err(DriverError::OutOfMemory { .. })), "{size}: {refused:?}");
        }
    }
}
