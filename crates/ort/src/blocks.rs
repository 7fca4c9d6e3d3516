//! Blocks for ONNX Runtime: weights from the process heap, memory of runs from an arena.
//!
//! Weights are allocated on the thread that loads, so with `lowtide::Memory::managed` they are in
//! the heap arena of their session, where they are measured and released together. Memory of runs
//! is in one arena for all sessions, which keeps it for the next run and releases it when idle.
//!
//! Invariant: a device arena is awake, and does not move a block, while a block of it is live: each
//! block holds a lease.
#![expect(unsafe_code, reason = "an allocator hands out memory")]

use std::alloc::Layout;
use std::cell::Cell;
use std::collections::BTreeSet;
use std::ptr::{self, NonNull};
use std::sync::Mutex;

use lowtide::ByteSize;
use lowtide::device::driver::DeviceAddress;
use lowtide::device::{DeviceArena, DeviceError, Lease, RawBlock, Region};
use lowtide::heap::HostArena;
use lowtide::memory::ArenaUse;
use lowtide_core::sync::lock;

/// The alignment of all blocks: ONNX Runtime's kernels read whole vectors of 64 bytes.
pub(crate) const ALIGN: usize = 64;
const DEVICE_ALIGN: ByteSize = ByteSize::new(ALIGN as u64);

/// The arena for the memory of runs: a device arena in host memory, the serving arena of a slot, or
/// a heap arena.
///
/// Weights are allocated from the heap, not from this arena.
#[derive(Debug)]
pub enum RunArena {
    /// An arena in host memory.
    Device(DeviceArena),
    /// A slot: each allocation goes to the arena that serves it at that moment.
    Slot(ArenaUse),
    /// A heap arena.
    Heap(HostArena),
}

/// A block and its address.
pub(crate) type FoundBlock = (NonNull<u8>, OrtBlock);

impl RunArena {
    /// Allocates a block. Returns `None` if the arena has no memory left.
    pub(crate) fn alloc(&self, size: usize) -> Option<FoundBlock> {
        let (arena, block) = match self {
            Self::Device(arena) => {
                let block = arena.alloc_raw(ByteSize::of(size), DEVICE_ALIGN, Region::Dynamic);
                (arena.clone(), block.ok()?)
            }
            Self::Slot(used) => {
                used.alloc_raw(ByteSize::of(size), DEVICE_ALIGN, Region::Dynamic).ok()?
            }
            Self::Heap(arena) => {
                // Without lowtide's global allocator there is no such scope.
                return arena.scope_uncached(|| in_heap(size)).unwrap_or_else(|_| in_heap(size));
            }
        };
        let (start, block) = leased(arena, &block, size).ok()??;
        request_huge_pages(&HUGE_PAGES, start.addr().get(), size);
        Some((start, block))
    }

    /// Releases idle memory now.
    pub(crate) fn shrink(&self) {
        match self {
            Self::Device(arena) => drop(arena.purge()),
            Self::Slot(used) => drop(used.purge()),
            Self::Heap(arena) => drop(arena.purge()),
        }
    }

    /// Returns `true` if the CPU can read blocks of the arena.
    pub(crate) fn is_readable(&self) -> bool {
        let Some((start, block)) = self.alloc(1) else { return true }; // full, so known later
        let is_readable = match &block {
            OrtBlock::Heap(_) => true,
            OrtBlock::Device(arena, ..) => arena.capabilities().host_backed,
        };
        // SAFETY: the block was just allocated, and is not used.
        unsafe { block.free(start) };
        is_readable
    }
}

/// How a live block is freed.
pub(crate) enum OrtBlock {
    Heap(Layout),
    /// The lease is dropped after the block is freed.
    Device(DeviceArena, Lease, usize),
}

/// Adds the lease that a block holds. Frees the block if there is none. No block is at null.
pub(crate) fn leased(
    arena: DeviceArena,
    block: &RawBlock,
    size: usize,
) -> Result<Option<FoundBlock>, DeviceError> {
    let lease = arena.enter().inspect_err(|_| drop(arena.free(block.at)))?;
    let address = usize::try_from(block.at.get()).unwrap_or_default();
    let start = NonNull::new(ptr::with_exposed_provenance_mut(address));
    Ok(start.map(|start| (start, OrtBlock::Device(arena, lease, size))))
}

impl OrtBlock {
    pub(crate) const fn size(&self) -> usize {
        match self {
            Self::Heap(layout) => layout.size(),
            Self::Device(.., size) => *size,
        }
    }

    /// Frees the block.
    ///
    /// # Safety
    /// This `OrtBlock` was returned with `start`, and no work that is queued later uses the memory.
    pub(crate) unsafe fn free(self, start: NonNull<u8>) {
        match self {
            // SAFETY: allocated with this layout by the global allocator; the caller's promise.
            Self::Heap(layout) => unsafe { std::alloc::dealloc(start.as_ptr(), layout) },
            Self::Device(arena, lease, _) => {
                let freed = arena.free(DeviceAddress::new(start.as_ptr().addr() as u64));
                debug_assert!(freed.is_ok(), "{freed:?}");
                drop(lease);
            }
        }
    }
}

/// Allocates from the process heap: in the arena to which this thread is bound.
pub(crate) fn in_heap(size: usize) -> Option<(NonNull<u8>, OrtBlock)> {
    let layout = Layout::from_size_align(size, ALIGN).ok().filter(|layout| layout.size() > 0)?;
    // SAFETY: the size is not zero.
    let start = NonNull::new(unsafe { std::alloc::alloc(layout) })?;
    Some((start, OrtBlock::Heap(layout)))
}

thread_local! {
    static LOADING: Cell<bool> = const { Cell::new(false) };
}

/// Runs a load. What ONNX Runtime allocates on this thread meanwhile comes from the heap: it
/// belongs to the session, or is freed before the load ends.
pub(crate) fn load<T>(act: impl FnOnce() -> T) -> T {
    struct Restore(bool);
    impl Drop for Restore {
        fn drop(&mut self) {
            LOADING.set(self.0);
        }
    }
    let _restore = Restore(LOADING.replace(true));
    act()
}

/// Returns `true` within a [`load`] on this thread.
pub(crate) fn is_loading() -> bool {
    LOADING.get()
}

// Huge pages for the memory of runs.
//
// A run touches blocks of many MiB, and each fresh page of 4 KiB is a fault of a microsecond or
// more. A device arena commits granules of 2 MiB, each the size of a huge page, so that huge pages
// use no more memory than is committed. The request outlives the release of a granule, so each is
// requested once.
//
// Invariant: only whole granules inside of blocks are named.

/// The size of a huge page, and of a granule of the host driver.
const PAGE: usize = 2 << 20;

/// The granules for which huge pages were requested, by address.
static HUGE_PAGES: Mutex<BTreeSet<usize>> = Mutex::new(BTreeSet::new());

/// Requests huge pages for the granules within a block. If the system has none, nothing changes.
fn request_huge_pages(known: &Mutex<BTreeSet<usize>>, start: usize, size: usize) {
    let Some(first) = start.checked_next_multiple_of(PAGE) else { return };
    let end = start.saturating_add(size) / PAGE * PAGE;
    if first >= end {
        return;
    }
    let mut known = lock(known);
    let fresh: Vec<_> =
        (first..end).step_by(PAGE).filter(|granule| known.insert(*granule)).collect();
    drop(known);
    fresh.into_iter().for_each(advise);
}

#[cfg(target_os = "linux")]
fn advise(granule: usize) {
    let start = ptr::with_exposed_provenance_mut(granule);
    // SAFETY: the advice changes no contents, and the range is a part of a live block.
    let _ = unsafe { libc::madvise(start, PAGE, libc::MADV_HUGEPAGE) };
}

#[cfg(not(target_os = "linux"))]
fn advise(_: usize) {}

#[cfg(test)]
mod tests {
    use super::*;
    use lowtide::Memory;
    use lowtide::config::DeviceChoice;
    use lowtide::decay::DecayTime;
    use test_fork::test;

    fn memory() -> Memory {
        Memory::builder().device(DeviceChoice::Host).start().unwrap()
    }

    /// Allocates, writes and frees blocks of many sizes at once.
    fn exercise(arena: &RunArena) {
        let sizes = [1, 63, 64, 65, 4_096, 100_000, 3 << 20];
        let blocks: Vec<_> = sizes.iter().filter_map(|&size| arena.alloc(size)).collect();
        assert_eq!(blocks.len(), sizes.len());
        for ((start, block), size) in blocks.into_iter().zip(sizes) {
            assert_eq!((block.size(), start.addr().get() % ALIGN), (size, 0));
            // SAFETY: the block has `size` bytes.
            unsafe { start.as_ptr().write_bytes(0xa5, size) };
            // SAFETY: it is freed once.
            unsafe { block.free(start) };
        }
    }

    #[test]
    fn blocks_of_each_kind_of_arena_can_be_written_and_freed() {
        let memory = memory();
        let device = memory.devices().open_arena("runs").unwrap();
        exercise(&RunArena::Device(device.clone()));
        assert!(device.glance().live.is_zero());
        exercise(&RunArena::Heap(HostArena::new("runs").unwrap()));
    }

    #[test]
    fn a_device_arena_stays_awake_while_a_block_is_live() {
        use lowtide::device::SleepOptions;
        let memory = memory();
        let device = memory.devices().open_arena("runs").unwrap();
        let arena = RunArena::Device(device.clone());
        let (start, block) = arena.alloc(1 << 20).unwrap();
        assert!(device.sleep(SleepOptions::default()).is_err(), "a lease is held");
        // SAFETY: freed once.
        unsafe { block.free(start) };
        device.sleep(SleepOptions::default()).unwrap();
        exercise(&arena); // wakes it
    }

    #[test]
    fn idle_memory_is_released_by_a_shrink() {
        let memory = memory();
        let device = memory.devices().open_arena("runs").unwrap();
        device.set_decay(DecayTime::Never);
        let arena = RunArena::Device(device.clone());
        exercise(&arena);
        assert!(device.glance().committed >= ByteSize::mib(3));
        arena.shrink();
        assert!(device.glance().committed.is_zero());
    }

    #[test]
    fn an_arena_at_its_limit_returns_no_block() {
        let memory = memory();
        let device = memory.devices().open_arena("runs").unwrap();
        device.set_limit(ByteSize::mib(4));
        let arena = RunArena::Device(device);
        assert!(arena.alloc(8 << 20).is_none());
        assert!(in_heap(usize::MAX).is_none());
        assert!(in_heap(0).is_none());
    }

    #[test]
    fn a_load_is_marked_on_its_thread_until_it_ends() {
        assert!(!is_loading());
        load(|| {
            assert!(is_loading());
            load(|| ());
            assert!(is_loading());
            std::thread::spawn(|| assert!(!is_loading())).join().unwrap();
        });
        let _ = std::panic::catch_unwind(|| load(|| panic!("a failed load")));
        assert!(!is_loading());
    }
}

#[cfg(test)]
mod huge_tests {
    use super::*;

    fn requested(start: usize, size: usize) -> Vec<usize> {
        let known = Mutex::default();
        request_huge_pages(&known, start, size);
        known.into_inner().unwrap().into_iter().collect()
    }

    #[test]
    fn only_whole_granules_within_a_block_are_requested() {
        let base = 1 << 40; // not mapped: the system refuses, which changes nothing
        let none: [usize; 0] = [];
        assert_eq!(requested(base, PAGE - 1), none);
        assert_eq!(requested(base, 2 * PAGE + 5), [base, base + PAGE]);
        assert_eq!(requested(base + 64, 2 * PAGE), [base + PAGE]);
        assert_eq!(requested(base + 64, PAGE), none);
        assert_eq!(requested(usize::MAX - 1, PAGE), none);
    }
}
