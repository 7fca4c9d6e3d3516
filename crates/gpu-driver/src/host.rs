//! The host driver: private anonymous memory of this process, used like device memory.
//!
//! It is a supported backend, not a test double: it provides the same arenas, limits and decay on
//! machines without a GPU. Work completes at once. The driver keeps no metadata, because the kernel
//! does. Transparent huge pages follow the system's setting.
//!
//! It does not support remapping: `mremap` onto a fixed address removes the target's mapping before
//! it can fail, and another mapping could then take a hole in a reservation. Releasing pages and
//! allocating them again costs about as little.
//!
//! Host memory is mapped separately and page-locked with mlock. It is not marked `MADV_DONTFORK`:
//! no device of this driver reads its physical pages, so a copy on write after a fork does no harm,
//! while a hole in the child would crash any code there that still holds a slice. This memory is
//! private: the child has a copy, which is not locked, because locks are not inherited (mlock(2)).
//! CUDA's host memory is shared with the child instead.
//!
//! Invariant: `accessible = committed`; a bare granule is `PROT_NONE` and has no page.
#![expect(unsafe_code, reason = "address space comes from mmap, mprotect and madvise")]

use std::ptr::NonNull;
use std::{io, ptr, thread};

use lowtide_core::bytes::ByteSize;
pub use lowtide_core::kernel::physical_memory;

use super::error::DriverResult;
use super::{
    Backend, Capabilities, DeviceAddress, Driver, DriverError, HOST_GRANULARITY, HostMemory,
    StreamHandle,
};

/// The granule. 2 MiB: a huge page of `x86_64` and of aarch64 with 4 KiB pages, what data-centre
/// GPUs map, and a multiple of every page size in use (4, 16, 64 KiB).
const GRANULARITY: ByteSize = ByteSize::mib(2);

/// A driver for memory in the address space of this process: granules of 2 MiB, no streams, and
/// the same addresses after a wake.
#[derive(Debug, Default)]
#[non_exhaustive]
pub struct HostDriver {}

impl HostDriver {
    /// Creates a driver. All host drivers share the process's address space.
    #[must_use]
    pub const fn new() -> Self {
        Self {}
    }
}

// SAFETY: `mmap` returns fresh ranges, a granule is accessible from `commit` to `decommit`, the
// kernel keeps its contents and fills it with zeros first, and all work is done in its call.
unsafe impl Driver for HostDriver {
    fn backend(&self) -> Backend {
        Backend::Host
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities {
            virtual_memory: true,
            host_access: true,
            host_backed: true,
            page_locked: true,
            granularity: GRANULARITY,
            ..Capabilities::default()
        }
    }

    fn reserve(&self, size: ByteSize) -> DriverResult<DeviceAddress> {
        let size_wanted = GranuleRange::of(DeviceAddress::new(0), size)?.length;
        let refused = || DriverError::OutOfMemory { call: "mmap", requested: size };
        // mmap aligns to pages only: map one granule more and unmap the excess.
        let slack = length_of(GRANULARITY)?;
        let length = size_wanted.checked_add(slack).ok_or_else(refused)?;
        // SAFETY: without MAP_FIXED no mapping is replaced.
        let start = unsafe { map(ptr::null_mut(), length, libc::PROT_NONE, libc::MAP_NORESERVE) }?;
        let address = start.expose_provenance();
        let head = address.next_multiple_of(slack) - address;
        let base = start.wrapping_byte_add(head);
        // If a trim fails, only address space is lost.
        // SAFETY: inside the mapping just made and outside the returned range: nothing uses it.
        let _ = unsafe { unmap(start, head) };
        // SAFETY: as for the head.
        let _ = unsafe { unmap(base.wrapping_byte_add(size_wanted), slack - head) };
        Ok(DeviceAddress::new(base.addr() as u64))
    }

    unsafe fn unreserve(&self, at: DeviceAddress, size: ByteSize) -> DriverResult {
        let range = GranuleRange::of(at, size)?;
        // SAFETY: a whole reservation that nothing uses any more (contract of `unreserve`).
        unsafe { unmap(range.start, range.length) }
    }

    unsafe fn commit(&self, at: DeviceAddress, size: ByteSize, _handle: ByteSize) -> DriverResult {
        let range = GranuleRange::of(at, size)?;
        // SAFETY: a part of a reservation (contract of `commit`); access is only added.
        unsafe { range.protect(READ_WRITE) }
    }

    unsafe fn decommit(
        &self,
        at: DeviceAddress,
        size: ByteSize,
        _handle: ByteSize,
    ) -> DriverResult {
        let range = GranuleRange::of(at, size)?;
        // SAFETY: a part of a reservation of which every use is complete (contract of `decommit`).
        unsafe { range.discard() }?;
        // SAFETY: as above.
        unsafe { range.protect(libc::PROT_NONE) }
    }

    unsafe fn copy(&self, from: DeviceAddress, to: DeviceAddress, size: ByteSize) -> DriverResult {
        let refused = || DriverError::Overlap { from, to, size };
        let length = length_of(size)?;
        if from.get().abs_diff(to.get()) < size.get() {
            return Err(refused());
        }
        let from = self.host_pointer(from).ok_or_else(refused)?.as_ptr();
        let to = self.host_pointer(to).ok_or_else(refused)?.as_ptr();
        // SAFETY: both parts are committed, or one is host memory of the caller's
        // (`copy_from_host`, `copy_to_host`), and nothing writes to `from` or uses `to` meanwhile
        // (contract of `copy`). They do not overlap: checked above. Bytes have no alignment, and
        // every one of them is initialised (contract of `host_pointer`).
        unsafe { ptr::copy_nonoverlapping(from, to, length) };
        Ok(())
    }

    unsafe fn copy_from_host(
        &self,
        from: NonNull<u8>,
        to: DeviceAddress,
        size: ByteSize,
        _: StreamHandle,
    ) -> DriverResult {
        // SAFETY: `from` is valid for reads and not written to, `to` is committed and not used
        // otherwise (contract of `copy_from_host`). This driver's `copy` takes any host memory.
        unsafe { self.copy(address_of(from), to, size) }
    }

    unsafe fn copy_to_host(
        &self,
        from: DeviceAddress,
        to: NonNull<u8>,
        size: ByteSize,
        _: StreamHandle,
    ) -> DriverResult {
        // SAFETY: `to` is valid for writes and not used otherwise, `from` is committed and not
        // written to (contract of `copy_to_host`). This driver's `copy` takes any host memory.
        unsafe { self.copy(from, address_of(to), size) }
    }

    fn host_alloc(&self, size: ByteSize, memory: HostMemory) -> DriverResult<NonNull<u8>> {
        let length = host_length(DeviceAddress::new(0), size)?;
        // SAFETY: without MAP_FIXED no mapping is replaced.
        let start = unsafe { map(ptr::null_mut(), length, READ_WRITE, 0) }?;
        if memory == HostMemory::PageLocked {
            // Not MAP_LOCKED: mmap does not fail if it cannot lock ("Notes" of mmap(2)). SAFETY:
            // the whole of the mapping just made; locking changes no contents.
            let result = unsafe { libc::mlock(start, length) };
            if result != 0 {
                let error = lock_error(size);
                // SAFETY: the whole of the mapping just made, which is not handed out.
                let _ = unsafe { unmap(start, length) };
                return Err(error);
            }
        }
        // No mapping of the kernel's choice begins at address 0.
        NonNull::new(start.cast()).ok_or(DriverError::OutOfMemory { call: "mmap", requested: size })
    }

    unsafe fn host_free(&self, at: NonNull<u8>, size: ByteSize, _: HostMemory) -> DriverResult {
        let address = DeviceAddress::new(at.addr().get() as u64);
        // The pages are unlocked with it: "Memory locks are ... automatically removed if the
        // address range is unmapped" (mlock(2)).
        let length = host_length(address, size)?;
        // SAFETY: a whole allocation of `host_alloc` that nothing uses any more (contract of
        // `host_free`).
        unsafe { unmap(at.as_ptr().cast(), length) }
    }

    fn host_pointer(&self, at: DeviceAddress) -> Option<NonNull<u8>> {
        // `reserve` exposed the provenance of the mapping in which `at` lies.
        let address = usize::try_from(at.get()).ok()?;
        NonNull::new(ptr::with_exposed_provenance_mut(address))
    }
}

/// A range of whole granules in this process's address space.
#[derive(Clone, Copy)]
struct GranuleRange {
    start: *mut libc::c_void,
    length: usize,
}

impl GranuleRange {
    fn of(at: DeviceAddress, size: ByteSize) -> DriverResult<Self> {
        let whole = at.is_multiple_of(GRANULARITY)
            && size.get().is_multiple_of(GRANULARITY.get())
            && !size.is_zero();
        if !whole {
            return Err(DriverError::Misaligned { at, size, granularity: GRANULARITY });
        }
        let address = length_of(ByteSize::new(at.get()))?;
        let start = ptr::with_exposed_provenance_mut(address);
        Ok(Self { start, length: length_of(size)? })
    }

    /// # Safety
    /// The range lies in one reservation. If access is taken away, every use of it is complete.
    unsafe fn protect(self, access: libc::c_int) -> DriverResult {
        // SAFETY: whole pages of a mapping that `reserve` made and that is ours until `unreserve`;
        // no reference loses its access (contract of this function).
        let result = unsafe { libc::mprotect(self.start, self.length, access) };
        self.outcome("mprotect", result)
    }

    /// Releases the pages, so that they read as zero when they are next accessible.
    ///
    /// # Safety
    /// The range lies in one reservation, and every use of it is complete.
    #[cfg(target_os = "linux")]
    unsafe fn discard(self) -> DriverResult {
        // SAFETY: whole pages of a private anonymous mapping of ours that nothing uses any more
        // (contract of this function). "Subsequent accesses of pages in the range will succeed, but
        // will result in ... zero-fill-on-demand pages" (madvise(2), MADV_DONTNEED).
        let result = unsafe { libc::madvise(self.start, self.length, libc::MADV_DONTNEED) };
        self.outcome("madvise", result)
    }

    /// Releases the pages by a new mapping over the old one: `MADV_DONTNEED` of other systems keeps
    /// the contents.
    ///
    /// # Safety
    /// The range lies in one reservation, and every use of it is complete.
    #[cfg(not(target_os = "linux"))]
    unsafe fn discard(self) -> DriverResult {
        let flags = libc::MAP_FIXED | libc::MAP_NORESERVE;
        // SAFETY: whole granules of a reservation that nothing uses (contract of this function).
        unsafe { map(self.start, self.length, libc::PROT_NONE, flags) }.map(drop)
    }

    fn outcome(self, call: &'static str, result: libc::c_int) -> DriverResult {
        if result == 0 { Ok(()) } else { Err(last_error(call, self.length)) }
    }
}

/// Access to committed memory.
const READ_WRITE: libc::c_int = libc::PROT_READ | libc::PROT_WRITE;

/// Maps private anonymous memory with this access: with none, only address space.
///
/// # Safety
/// With `MAP_FIXED` in `flags`, the range at `at` is part of a reservation, and nothing uses it.
unsafe fn map(
    at: *mut libc::c_void,
    length: usize,
    access: libc::c_int,
    flags: libc::c_int,
) -> DriverResult<*mut libc::c_void> {
    let flags = flags | libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
    // SAFETY: without MAP_FIXED the kernel picks a range that nothing occupies; with it, the range
    // is whole granules of a reservation of ours (contract of this function), so that no other
    // mapping is replaced. No file is involved: descriptor -1 and offset 0 as mmap(2) asks of
    // MAP_ANONYMOUS.
    let start = unsafe { libc::mmap(at, length, access, flags, -1, 0) };
    if start == libc::MAP_FAILED { Err(last_error("mmap", length)) } else { Ok(start) }
}

/// Returns the address of host memory, with which [`HostDriver::host_pointer`] gives its pointer.
fn address_of(at: NonNull<u8>) -> DeviceAddress {
    DeviceAddress::new(at.as_ptr().expose_provenance() as u64)
}

/// Returns the length of host memory, which consists of whole units.
pub(super) fn host_length(at: DeviceAddress, size: ByteSize) -> DriverResult<usize> {
    if size.is_zero() || !size.get().is_multiple_of(HOST_GRANULARITY.get()) {
        return Err(DriverError::Misaligned { at, size, granularity: HOST_GRANULARITY });
    }
    length_of(size)
}

/// Converts a failure of mlock. If a limit is set, it is reported as the cause: on a fresh mapping
/// ENOMEM means the limit, or (rarely) too many mappings; EAGAIN means that memory has run out
/// (mlock(2)).
fn lock_error(size: ByteSize) -> DriverError {
    let error = io::Error::last_os_error();
    let code = error.raw_os_error().unwrap_or_default();
    let mut limit = libc::rlimit { rlim_cur: libc::RLIM_INFINITY, rlim_max: 0 };
    // SAFETY: `limit` is a valid place for the result.
    let known = unsafe { libc::getrlimit(libc::RLIMIT_MEMLOCK, &raw mut limit) } == 0;
    if (code == libc::ENOMEM || code == libc::EPERM)
        && known
        && limit.rlim_cur != libc::RLIM_INFINITY
    {
        return DriverError::LockLimit { requested: size, limit: ByteSize::new(limit.rlim_cur) };
    }
    if code == libc::ENOMEM || code == libc::EAGAIN {
        return DriverError::OutOfMemory { call: "mlock", requested: size };
    }
    DriverError::Refused { call: "mlock", code: i64::from(code), message: error.to_string() }
}

/// Unmaps a range of our own mapping; does nothing if the length is zero.
///
/// # Safety
/// The range lies in a mapping that [`map`] made, and nothing uses it any more.
unsafe fn unmap(start: *mut libc::c_void, length: usize) -> DriverResult {
    if length == 0 {
        return Ok(());
    }
    // SAFETY: a range of a mapping of ours that nothing refers into (contract of this function).
    let result = unsafe { libc::munmap(start, length) };
    if result == 0 { Ok(()) } else { Err(last_error("munmap", length)) }
}

fn length_of(size: ByteSize) -> DriverResult<usize> {
    size.as_usize().ok_or(DriverError::OutOfMemory { call: "mmap", requested: size })
}

fn last_error(call: &'static str, length: usize) -> DriverError {
    let error = io::Error::last_os_error();
    let code = error.raw_os_error().unwrap_or_default();
    if code == libc::ENOMEM {
        return DriverError::OutOfMemory { call, requested: ByteSize::of(length) };
    }
    DriverError::Refused { call, code: i64::from(code), message: error.to_string() }
}

// Host memory with all of its pages present, for page-locking or as a store that is not locked.
//
// The kernel fills a page with zeros when it is first touched, and that takes most of the time of
// page-locking fresh memory. Several threads touch the parts at once, on a NUMA node of choice.
// Nothing fills the memory a second time.
//
// The memory is not inherited by a forked child (`MADV_DONTFORK`): a device that reads or writes
// its pages must not meet a copy on write, and no slice of it exists that code in the child could
// use.
//
// Invariant: the range is mapped until [`TouchedMemory::unmap`]; a drop unmaps nothing, because a
// child does not have the range.

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
    /// [`DriverError::Misaligned`], [`DriverError::OutOfMemory`], or [`DriverError::Refused`] with
    /// the system's code.
    pub fn map(size: ByteSize, node: Option<u32>, threads: usize) -> Result<Self, DriverError> {
        let bytes = host_length(DeviceAddress::new(0), size)?;
        // SAFETY: without MAP_FIXED no mapping is replaced.
        let start = unsafe { map(ptr::null_mut(), bytes, READ_WRITE, 0) }?;
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
        unsafe { unmap(self.start().cast(), self.bytes) }
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

    const GRANULE: usize = 2 << 20;

    #[test]
    fn a_committed_granule_holds_what_is_written_and_comes_back_as_zero() {
        let driver = HostDriver::new();
        let size = ByteSize::mib(8);
        let base = driver.reserve(size).expect("address space");
        assert!(base.is_multiple_of(GRANULARITY));
        let at = base.checked_add(GRANULARITY).expect("inside");
        for round in 0..2_u8 {
            // SAFETY: a bare granule of the reservation.
            unsafe { driver.commit(at, GRANULARITY, GRANULARITY) }.expect("memory");
            let bytes = driver.host_pointer(at).expect("host access").as_ptr();
            // SAFETY: the granule at `at` is committed, ours, and initialised by the kernel.
            let granule = unsafe { std::slice::from_raw_parts_mut(bytes, GRANULE) };
            assert!(granule.iter().all(|&byte| byte == 0), "round {round}");
            granule.fill(0xA5);
            // SAFETY: committed above; the slice is not used again.
            unsafe { driver.decommit(at, GRANULARITY, GRANULARITY) }.expect("decommit");
        }
        // SAFETY: the whole reservation, of which the only committed granule is bare again.
        unsafe { driver.unreserve(base, size) }.expect("unreserve");
    }

    #[test]
    fn host_memory_is_zero_writable_and_given_back_whole() {
        let driver = HostDriver::new();
        let size = HOST_GRANULARITY;
        for memory in [HostMemory::Pageable, HostMemory::PageLocked] {
            let at = match driver.host_alloc(size, memory) {
                Ok(at) => at,
                Err(error @ DriverError::LockLimit { .. }) => {
                    println!("skipped: {error}");
                    continue;
                }
                Err(error) => panic!("{error}"),
            };
            // SAFETY: `size` bytes at `at` are ours and initialised (contract of `host_alloc`).
            let bytes = unsafe { std::slice::from_raw_parts_mut(at.as_ptr(), 64 << 10) };
            assert!(bytes.iter().all(|&byte| byte == 0));
            bytes.fill(0xA5);
            // SAFETY: the whole allocation; the slice is not used again.
            unsafe { driver.host_free(at, size, memory) }.expect("freed");
        }
        for size in [ByteSize::ZERO, ByteSize::new(1), ByteSize::kib(4), ByteSize::MAX] {
            let refused = driver.host_alloc(size, HostMemory::Pageable);
            assert!(matches!(refused, Err(DriverError::Misaligned { .. })), "{size}: {refused:?}");
        }
        let refused = driver.host_alloc(ByteSize::new(1 << 62), HostMemory::Pageable);
        assert!(matches!(refused, Err(DriverError::OutOfMemory { .. })), "{refused:?}");
    }

    #[test]
    fn ranges_of_other_than_whole_granules_are_refused() {
        let driver = HostDriver::new();
        for size in [ByteSize::ZERO, ByteSize::new(1), ByteSize::kib(4)] {
            let refused = driver.reserve(size);
            assert!(matches!(refused, Err(DriverError::Misaligned { .. })), "{size}: {refused:?}");
        }
        let odd = DeviceAddress::new(4096);
        // SAFETY: an address between granules is refused before any call of the system.
        let refused = unsafe { driver.commit(odd, GRANULARITY, GRANULARITY) };
        assert!(matches!(refused, Err(DriverError::Misaligned { .. })), "{refused:?}");
    }

    #[test]
    fn more_address_space_than_there_is_is_a_typed_error() {
        let size = ByteSize::new(1 << 62);
        let refused = HostDriver::new().reserve(size);
        assert!(matches!(refused, Err(DriverError::OutOfMemory { .. })), "{refused:?}");
    }
}

#[cfg(test)]
mod touched_tests {
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
        for size in [ByteSize::ZERO, ByteSize::kib(4)] {
            let refused = TouchedMemory::map(size, None, 2);
            assert!(matches!(refused, Err(DriverError::Misaligned { .. })), "{size}: {refused:?}");
        }
        let refused = TouchedMemory::map(ByteSize::new(1 << 62), None, 2);
        assert!(matches!(refused, Err(DriverError::OutOfMemory { .. })), "{refused:?}");
    }
}
