//! The allocators that ONNX Runtime calls: a table of C functions over a [`RunArena`] for the CPU,
//! and over an arena in CUDA memory (`cuda`).
//!
//! ONNX Runtime calls it from any thread, frees by address without a size, and may free a tensor
//! long after its session, so a registered allocator is never dropped. It does not check what it
//! gets: 1.32 crashes in a kernel if a run gets null. So on the CPU a block beyond the limit of the
//! arena is from the heap, and null means that the system has no memory.
//!
//! `Reserve` is for weights, which on the CPU are from the heap, as every allocation on a thread
//! that loads. The CPU has no streams: `AllocOnStream` is `Alloc`, and a freed block is free at
//! once.
//!
//! The table has the version of the oldest library that is accepted. ONNX Runtime reads no field
//! that is newer than the version, and expects none. `Shrink`, which is newer, is never called by
//! 1.32 for a registered allocator: [`OrtAllocator::shrink`] is the call.
//!
//! Invariants: `stats.in_use = sum of the live blocks`; no panic unwinds into C.
#![expect(unsafe_code, reason = "C calls it, and it hands out memory")]

use std::collections::BTreeMap;
use std::ffi::{CString, c_void};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr::{self, NonNull};
use std::sync::Mutex;

use lowtide::ByteSize;
use lowtide::device::driver::StreamHandle;
use lowtide_core::sync::lock;
use ort::environment::Environment;
use ort::memory::{AllocationDevice, AllocatorType, MemoryInfo, MemoryType};
use ort::{AsPointer as _, sys};

use super::blocks::{self, FoundBlock, OrtBlock, RunArena};
#[cfg(feature = "cuda")]
use super::cuda::{self, CudaArena};

/// An allocator that ONNX Runtime uses in the place of its own arena: that of the CPU, or of a CUDA
/// device.
#[repr(C)]
pub struct OrtAllocator {
    /// First, so that a pointer to it is a pointer to the allocator.
    table: sys::OrtAllocator,
    /// `None` for one that no library knows.
    info: Option<MemoryInfo<'static>>,
    source: MemorySource,
    books: Mutex<Blocks>,
}

/// Where an allocator has its memory.
#[derive(Debug)]
pub(crate) enum MemorySource {
    Cpu(RunArena),
    #[cfg(feature = "cuda")]
    Cuda(CudaArena),
}

/// What ONNX Runtime wants a block for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Purpose {
    /// A run, with its next work on this stream; `None` for any stream.
    Run(Option<StreamHandle>),
    Weight,
}

/// The live blocks by address, and the figures.
#[derive(Default)]
struct Blocks {
    live: BTreeMap<usize, OrtBlock>,
    stats: OrtAllocatorStats,
}

/// The figures of an [`OrtAllocator`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct OrtAllocatorStats {
    /// Bytes that ONNX Runtime holds: weights, and tensors of runs.
    pub in_use: ByteSize,
    /// The maximum of `in_use`.
    pub max_in_use: ByteSize,
    /// The largest block so far.
    pub max_alloc_size: ByteSize,
    /// Calls for memory of runs.
    pub allocs: u64,
    /// Calls for memory of weights.
    pub reserves: u64,
    /// Calls for memory of runs that the arena had no room for, and that the heap served.
    pub overflows: u64,
    /// Calls that got no memory.
    pub failures: u64,
    /// Calls of [`OrtAllocator::shrink`].
    pub shrinks: u64,
}

impl OrtAllocator {
    /// Registers an allocator with the environment. It lives until the process ends.
    pub(crate) fn register(env: &Environment, source: MemorySource) -> ort::Result<&'static Self> {
        let info = source.memory_info()?;
        let allocator: &'static Self = Box::leak(Box::new(Self::new(Some(info), source)));
        let register = ort::api().RegisterAllocator;
        let table = ptr::from_ref(allocator).cast_mut().cast::<sys::OrtAllocator>();
        // SAFETY: the environment and the table live until the process ends. ONNX Runtime never
        // writes to the table.
        check(unsafe { register(env.ptr().cast_mut(), table) })?;
        Ok(allocator)
    }

    fn new(info: Option<MemoryInfo<'static>>, source: MemorySource) -> Self {
        // SAFETY: a value of plain fields; the functions that must be there follow.
        let mut table = unsafe { sys::OrtAllocator::default() };
        table.Alloc = Some(alloc);
        table.Free = Some(free);
        table.Info = Some(memory_info);
        table.Reserve = Some(reserve);
        table.GetStats = Some(stats);
        table.AllocOnStream = Some(alloc_on_stream);
        Self { table, info, source, books: Mutex::default() }
    }

    /// Creates one that no library knows.
    #[cfg(test)]
    pub(crate) fn unregistered(source: MemorySource) -> &'static Self {
        Box::leak(Box::new(Self::new(None, source)))
    }

    /// Returns its figures.
    #[must_use]
    pub fn stats(&self) -> OrtAllocatorStats {
        lock(&self.books).stats
    }

    /// Releases the idle memory of runs now, on a CUDA device after a wait for its work. It is
    /// released anyway when it has been idle for the decay time of the arena.
    pub fn shrink(&self) {
        lock(&self.books).stats.shrinks += 1;
        match &self.source {
            MemorySource::Cpu(arena) => arena.shrink(),
            #[cfg(feature = "cuda")]
            MemorySource::Cuda(arena) => arena.shrink(),
        }
    }

    pub(crate) fn obtain(&self, size: usize, purpose: Purpose) -> *mut c_void {
        if size == 0 {
            return ptr::null_mut(); // as ONNX Runtime's own arena
        }
        let (found, overflows) = self.source.alloc(size, purpose);
        let is_weight = purpose == Purpose::Weight;
        let mut books = lock(&self.books);
        let stats = &mut books.stats;
        stats.overflows += u64::from(overflows);
        *(if is_weight { &mut stats.reserves } else { &mut stats.allocs }) += 1;
        let Some((start, block)) = found else {
            stats.failures += 1;
            return ptr::null_mut();
        };
        let bytes = ByteSize::of(size);
        stats.in_use = stats.in_use.saturating_add(bytes);
        stats.max_in_use = stats.max_in_use.max(stats.in_use);
        stats.max_alloc_size = stats.max_alloc_size.max(bytes);
        books.live.insert(start.addr().get(), block);
        start.as_ptr().cast()
    }

    pub(crate) fn release(&self, start: NonNull<u8>) {
        let mut books = lock(&self.books);
        let Some(block) = books.live.remove(&start.addr().get()) else {
            debug_assert!(false, "ONNX Runtime frees {start:?}, which is not live");
            return;
        };
        let size = ByteSize::of(block.size());
        books.stats.in_use = books.stats.in_use.saturating_sub(size);
        drop(books);
        // SAFETY: the block was removed from the live ones, so it is freed once; ONNX Runtime does
        // not use what it frees.
        unsafe { block.free(start) };
    }
}

impl MemorySource {
    /// Returns the description under which ONNX Runtime looks an allocator up.
    pub(crate) fn memory_info(&self) -> ort::Result<MemoryInfo<'static>> {
        let (device, number) = match self {
            Self::Cpu(_) => (AllocationDevice::CPU, 0),
            #[cfg(feature = "cuda")]
            Self::Cuda(arena) => (AllocationDevice::CUDA, arena.device),
        };
        // An allocator of the type `Arena` cannot be registered.
        MemoryInfo::new(device, number, AllocatorType::Device, MemoryType::Default)
    }

    /// Allocates a block. Also returns `true` if it is not from the arena of runs, in which it
    /// belongs.
    fn alloc(&self, size: usize, purpose: Purpose) -> (Option<FoundBlock>, bool) {
        match self {
            Self::Cpu(arena) => {
                let of_run = purpose != Purpose::Weight && !blocks::is_loading();
                let in_arena = if of_run { arena.alloc(size) } else { None };
                let overflows = of_run && in_arena.is_none();
                (in_arena.or_else(|| blocks::in_heap(size)), overflows)
            }
            #[cfg(feature = "cuda")]
            Self::Cuda(arena) => (arena.alloc(size, purpose), false),
        }
    }

    /// Returns the stream on which a block is used first, where that makes a difference.
    #[cfg_attr(not(feature = "cuda"), expect(unused_variables, reason = "the CPU has none"))]
    fn stream(&self, stream: *mut sys::OrtSyncStream) -> Option<StreamHandle> {
        match self {
            Self::Cpu(_) => None,
            #[cfg(feature = "cuda")]
            Self::Cuda(_) => cuda::handle(stream),
        }
    }
}

lowtide_core::debug_as!(OrtAllocator, |it| source: it.source, stats: it.stats());

pub(crate) fn check(status: sys::OrtStatusPtr) -> ort::Result<()> {
    // SAFETY: a status that ONNX Runtime returned, and which is taken once.
    unsafe { ort::Error::result_from_status(status) }
}

/// # Safety
/// `this` is the table of an allocator that is never dropped.
unsafe fn of<'a>(this: *const sys::OrtAllocator) -> &'a OrtAllocator {
    // SAFETY: the table is the first field of a `repr(C)` struct, and was created with a pointer to
    // the whole of it.
    unsafe { &*this.cast::<OrtAllocator>() }
}

/// Calls `act`, or returns null if it panics.
fn guarded<T>(act: impl FnOnce() -> *mut T) -> *mut T {
    catch_unwind(AssertUnwindSafe(act)).unwrap_or(ptr::null_mut())
}

unsafe extern "system" fn alloc(this: *mut sys::OrtAllocator, size: usize) -> *mut c_void {
    // SAFETY: ONNX Runtime passes the table that was registered.
    let allocator = unsafe { of(this) };
    guarded(|| allocator.obtain(size, Purpose::Run(None)))
}

unsafe extern "system" fn alloc_on_stream(
    this: *mut sys::OrtAllocator,
    size: usize,
    stream: *mut sys::OrtSyncStream,
) -> *mut c_void {
    // SAFETY: as above.
    let allocator = unsafe { of(this) };
    guarded(|| allocator.obtain(size, Purpose::Run(allocator.source.stream(stream))))
}

unsafe extern "system" fn reserve(this: *const sys::OrtAllocator, size: usize) -> *mut c_void {
    // SAFETY: as above.
    let allocator = unsafe { of(this) };
    guarded(|| allocator.obtain(size, Purpose::Weight))
}

unsafe extern "system" fn free(this: *mut sys::OrtAllocator, start: *mut c_void) {
    // SAFETY: as above.
    let allocator = unsafe { of(this) };
    let release = || NonNull::new(start.cast()).into_iter().for_each(|it| allocator.release(it));
    let _ = catch_unwind(AssertUnwindSafe(release));
}

unsafe extern "system" fn memory_info(this: *const sys::OrtAllocator) -> *const sys::OrtMemoryInfo {
    // SAFETY: as above.
    unsafe { of(this) }.info.as_ref().map_or(ptr::null(), MemoryInfo::ptr)
}

unsafe extern "system" fn stats(
    this: *const sys::OrtAllocator,
    out: *mut *mut sys::OrtKeyValuePairs,
) -> sys::OrtStatusPtr {
    // SAFETY: as above.
    let allocator = unsafe { of(this) };
    let pairs = guarded(|| key_values(&allocator.stats()));
    // SAFETY: ONNX Runtime passes a place for a pointer, and releases what is there.
    unsafe { out.write(pairs) };
    sys::OrtStatusPtr(ptr::null_mut())
}

/// The figures under the names of ONNX Runtime's own arena.
fn key_values(stats: &OrtAllocatorStats) -> *mut sys::OrtKeyValuePairs {
    let mut pairs = ptr::null_mut();
    let create = ort::api().CreateKeyValuePairs;
    // SAFETY: `pairs` is written.
    unsafe { create(&raw mut pairs) };
    let add = ort::api().AddKeyValuePair;
    for (key, value) in named(stats) {
        let value = CString::new(value.to_string()).unwrap_or_default();
        // SAFETY: both texts end with NUL and are copied.
        unsafe { add(pairs, key.as_ptr(), value.as_ptr()) };
    }
    pairs
}

fn named(stats: &OrtAllocatorStats) -> [(&'static std::ffi::CStr, u64); 6] {
    [
        (c"InUse", stats.in_use.get()),
        (c"MaxInUse", stats.max_in_use.get()),
        (c"MaxAllocSize", stats.max_alloc_size.get()),
        (c"NumAllocs", stats.allocs),
        (c"NumReserves", stats.reserves),
        (c"NumArenaShrinkages", stats.shrinks),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;
    use lowtide::heap::HostArena;
    use lowtide::{Memory, config::DeviceChoice};
    use test_fork::test;

    const RUN: Purpose = Purpose::Run(None);

    fn allocator(arena: RunArena) -> &'static OrtAllocator {
        OrtAllocator::unregistered(MemorySource::Cpu(arena))
    }

    fn heap_arena() -> RunArena {
        RunArena::Heap(HostArena::new("runs").unwrap())
    }

    fn table(allocator: &'static OrtAllocator) -> *mut sys::OrtAllocator {
        ptr::from_ref(allocator).cast_mut().cast()
    }

    #[test]
    fn the_functions_of_the_table_allocate_count_and_free() {
        let memory = Memory::builder().device(DeviceChoice::Host).start().unwrap();
        let device = memory.devices().open_arena("runs").unwrap();
        let allocator = allocator(RunArena::Device(device.clone()));
        let this = table(allocator);
        // SAFETY: the table of an allocator that is never dropped; each block is freed once.
        let of_run = unsafe { alloc(this, 1_000) };
        // SAFETY: as above.
        let of_weight = unsafe { reserve(this, 2_000) };
        // SAFETY: as above; the stream is not used.
        let of_stream = unsafe { alloc_on_stream(this, 4_000, this.cast()) };
        let blocks = [of_run, of_weight, of_stream];
        assert!(blocks.iter().all(|block| !block.is_null() && block.addr() % blocks::ALIGN == 0));
        let found = allocator.stats();
        assert_eq!((found.allocs, found.reserves, found.failures), (2, 1, 0));
        assert_eq!((found.in_use.get(), found.max_alloc_size.get()), (7_000, 4_000));
        assert!(device.glance().live >= ByteSize::new(5_000), "without the weight");
        // SAFETY: as above.
        blocks.iter().for_each(|&block| unsafe { free(this, block) });
        let found = allocator.stats();
        assert_eq!((found.in_use.get(), found.max_in_use.get()), (0, 7_000));
        // A block of a stream needs no end of a run either.
        assert!(device.glance().live.is_zero());
        // SAFETY: as above; null is not a block.
        unsafe { free(this, ptr::null_mut()) };
    }

    #[test]
    fn weights_and_memory_of_loads_are_not_in_the_arena_of_runs() {
        let memory = Memory::builder().device(DeviceChoice::Host).start().unwrap();
        let device = memory.devices().open_arena("runs").unwrap();
        let allocator = allocator(RunArena::Device(device.clone()));
        let held = [
            allocator.obtain(1 << 20, Purpose::Weight),
            blocks::load(|| allocator.obtain(1 << 20, RUN)),
        ];
        assert!(device.glance().committed.is_zero());
        assert_eq!(allocator.stats().in_use, ByteSize::mib(2));
        held.iter().for_each(|block| allocator.release(NonNull::new(block.cast()).unwrap()));
    }

    /// Bug of ONNX Runtime 1.32: a run that gets null from a registered allocator crashes.
    #[test]
    fn a_block_beyond_the_limit_of_the_arena_comes_from_the_heap() {
        let memory = Memory::builder().device(DeviceChoice::Host).start().unwrap();
        let device = memory.devices().open_arena("runs").unwrap();
        device.set_limit(ByteSize::mib(2));
        let allocator = allocator(RunArena::Device(device.clone()));
        let blocks = [allocator.obtain(1 << 20, RUN), allocator.obtain(4 << 20, RUN)];
        let stats = allocator.stats();
        assert_eq!((stats.overflows, stats.failures), (1, 0));
        assert!(device.glance().committed <= ByteSize::mib(2));
        blocks.iter().for_each(|block| allocator.release(NonNull::new(block.cast()).unwrap()));
        assert!(allocator.stats().in_use.is_zero());
    }

    #[test]
    fn memory_that_the_system_does_not_have_is_null_and_counted() {
        let allocator = allocator(heap_arena());
        let this = table(allocator);
        // SAFETY: the table of an allocator that is never dropped.
        let none = unsafe { alloc(this, 0) };
        // SAFETY: as above.
        let huge = unsafe { alloc(this, usize::MAX / 2) };
        assert!(none.is_null() && huge.is_null());
        assert_eq!(allocator.stats().failures, 1);
    }

    #[test]
    fn an_address_that_is_not_of_a_live_block_is_not_freed() {
        let memory = Memory::builder().device(DeviceChoice::Host).start().unwrap();
        let arena = memory.devices().open_arena("runs").unwrap();
        let allocator = allocator(RunArena::Device(arena.clone()));
        let this = table(allocator);
        let block = allocator.obtain(1_000, RUN);
        let live = arena.glance().live;
        for strange in [this.cast(), block.wrapping_byte_add(256)] {
            // SAFETY: the table of an allocator that is never dropped. Nothing uses the address.
            unsafe { free(this, strange) }; // with debug assertions it panics within
        }
        assert_eq!((allocator.stats().in_use.get(), arena.glance().live), (1_000, live));
        allocator.release(NonNull::new(block.cast()).unwrap());
        assert!(arena.glance().live.is_zero());
    }

    #[test]
    fn a_panic_does_not_unwind_into_c() {
        assert!(guarded::<c_void>(|| panic!("within an allocation")).is_null());
    }

    #[test]
    fn the_statistics_have_the_names_of_onnx_runtime() {
        let stats = OrtAllocatorStats { in_use: ByteSize::new(7), ..OrtAllocatorStats::default() };
        let named = named(&stats);
        assert_eq!(named[0], (c"InUse", 7));
        assert!(named.iter().any(|(name, _)| *name == c"NumArenaShrinkages"));
    }
}
