//! The memory of CUDA devices for ONNX Runtime: blocks of device arenas, in the order of streams.
//!
//! `AllocOnStream` names the stream of a block's next work. `Free` names none: as in ONNX Runtime's
//! own arena, the block is free after the work that the stream has by then. A block without a
//! stream (weights, tensors that the program creates) is free after all work of the device. An
//! unload waits for that, so that the memory of its session decays.
//!
//! ONNX Runtime 1.32 checks no address that it gets: without memory a kernel writes to null. There
//! is no other memory to take, as on the CPU.
//!
//! ONNX Runtime 1.32 replaces an allocator of the device without an error, so it is asked first.
//! A provider library that is registered later leaves this one in its place.
//!
//! Invariant: at most one arena for each device.
#![expect(unsafe_code, reason = "calls of ONNX Runtime, with streams that it names")]

use std::ptr::{self, NonNull};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

use lowtide::ByteSize;
use lowtide::device::driver::StreamHandle;
use lowtide::device::{DeviceArena, DeviceError, Region};
use lowtide_core::sync::lock;
use ort::environment::Environment;
use ort::{AsPointer as _, sys};

use super::allocator::{MemorySource, OrtAllocator, Purpose, check};
use super::blocks::{self, FoundBlock};
use super::error::{OrtError, failed};

/// The alignment of `cudaMalloc`.
const ALIGN: ByteSize = ByteSize::new(256);

/// The arenas that are registered; held while one is.
static ARENAS: Mutex<Vec<DeviceArena>> = Mutex::new(Vec::new());

/// The arena of a device.
#[derive(Debug)]
pub(crate) struct CudaArena {
    arena: DeviceArena,
    pub(crate) device: i32,
    /// The last allocation failed.
    is_failing: AtomicBool,
}

/// Registers an arena as the allocator of its device.
///
/// # Errors
/// [`OrtError::HostMemory`], [`OrtError::Registered`], [`OrtError::Runtime`].
pub(crate) fn register(
    env: &Environment,
    arena: DeviceArena,
) -> Result<&'static OrtAllocator, OrtError> {
    let source = MemorySource::Cuda(CudaArena::new(arena.clone())?);
    let mut arenas = lock(&ARENAS);
    check_free(env, &source)?;
    let allocator = OrtAllocator::register(env, source);
    let allocator = allocator.map_err(failed("register the allocator of a CUDA device"))?;
    arenas.push(arena);
    Ok(allocator)
}

/// Fails if the device of this arena has an allocator.
fn check_free(env: &Environment, source: &MemorySource) -> Result<(), OrtError> {
    let cannot = failed("look up the allocator of a CUDA device");
    let info = source.memory_info().map_err(&cannot)?;
    let mut found = ptr::null_mut();
    let look_up = ort::api().GetSharedAllocator;
    // SAFETY: the environment and the description exist, and `found` is written.
    let status = unsafe { look_up(env.ptr().cast_mut(), info.ptr(), &raw mut found) };
    check(status).map_err(&cannot)?;
    let device = info.device_id();
    if found.is_null() { Ok(()) } else { Err(OrtError::Registered { device }) }
}

/// Waits until the device has done all work on freed memory, so that it decays. An arena whose
/// stream captures a graph is left as it is.
pub(crate) fn wait_for_freed() {
    let arenas = lock(&ARENAS).clone();
    for arena in arenas {
        let _ = arena.wait_for_pending();
    }
}

/// Returns the stream that ONNX Runtime names; `None` for any.
pub(crate) fn handle(stream: *mut sys::OrtSyncStream) -> Option<StreamHandle> {
    let stream = NonNull::new(stream)?;
    let handle = ort::api().SyncStream_GetHandle;
    // SAFETY: ONNX Runtime passes a stream of its own.
    let handle = unsafe { handle(stream.as_ptr()) };
    StreamHandle::of_cuda(handle.addr() as u64)
}

impl CudaArena {
    /// # Errors
    /// [`OrtError::HostMemory`].
    pub(crate) fn new(arena: DeviceArena) -> Result<Self, OrtError> {
        let device = arena.cuda_ordinal().and_then(|number| i32::try_from(number).ok());
        match device {
            Some(device) => Ok(Self { arena, device, is_failing: AtomicBool::new(false) }),
            None => Err(OrtError::HostMemory { arena: arena.name().to_owned() }),
        }
    }

    /// Allocates a block. Logs the first failure after a success.
    pub(crate) fn alloc(&self, size: usize, purpose: Purpose) -> Option<FoundBlock> {
        let found = self.try_alloc(size, purpose);
        let was_failing = self.is_failing.swap(found.is_err(), Ordering::Relaxed);
        if let (Err(error), false) = (&found, was_failing) {
            let arena = self.arena.name();
            log!(warn, target: "lowtide", arena, %error, "ONNX Runtime gets no device memory");
        }
        found.ok().flatten()
    }

    fn try_alloc(&self, size: usize, purpose: Purpose) -> Result<Option<FoundBlock>, DeviceError> {
        let arena = &self.arena;
        let bytes = ByteSize::of(size);
        let block = match purpose {
            // SAFETY: the stream is of the device's primary context, as the arena. It exists as
            // long as its session, which `ort` keeps while values of its runs exist; that of a
            // program is given to `ort` by an unsafe function.
            Purpose::Run(Some(stream)) => unsafe {
                arena.alloc_raw_on(stream, bytes, ALIGN, Region::Dynamic)
            },
            Purpose::Run(None) => arena.alloc_raw(bytes, ALIGN, Region::Dynamic),
            Purpose::Weight => arena.alloc_raw(bytes, ALIGN, Region::Stable),
        };
        blocks::leased(arena.clone(), &block?, size)
    }

    /// Releases idle memory now, after a wait for the device.
    pub(crate) fn shrink(&self) {
        let _ = self.arena.wait_for_pending();
        let _ = self.arena.purge();
    }
}

/// Over the fake of the CUDA driver: nothing here has run on a GPU. Some also need a real ONNX
/// Runtime, of which a build for the CPU is enough (`real`).
#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::AtomicUsize;
    use std::time::Duration;

    use super::*;
    use crate::Runtime;
    use crate::real::{library, run, small_model, wait_until};
    use lowtide::Memory;
    use lowtide::config::DeviceChoice;
    use lowtide::cudarc::driver::{CudaContext, CudaStream, result};
    use lowtide::decay::DecayTime;
    use lowtide::device::clock::SystemClock;
    use lowtide::device::{ArenaConfig, HostDriver};
    use lowtide_fake_cuda::{Fake, Guard, Options};
    use ort::memory::{AllocationDevice, Allocator, AllocatorType, MemoryInfo, MemoryType};
    use ort::value::Tensor;
    use test_fork::test;

    /// A block of the tests.
    const BYTES: usize = 8 << 20;

    fn started() -> (Guard, Memory, DeviceArena) {
        let fake = Fake::start(Options::default());
        let memory = Memory::builder().device(DeviceChoice::Cuda).start().unwrap();
        let arena = memory.devices().open_arena("cuda").unwrap();
        arena.set_decay(DecayTime::Within(Duration::from_millis(50)));
        (fake, memory, arena)
    }

    fn allocator(arena: &DeviceArena) -> &'static OrtAllocator {
        OrtAllocator::unregistered(MemorySource::Cuda(CudaArena::new(arena.clone()).unwrap()))
    }

    fn of_stream(stream: &CudaStream) -> Purpose {
        Purpose::Run(StreamHandle::of_cuda(stream.cu_stream().addr() as u64))
    }

    fn free(allocator: &OrtAllocator, block: *mut std::ffi::c_void) {
        allocator.release(NonNull::new(block.cast()).unwrap());
    }

    /// Queues work that writes a block.
    fn write(block: *mut std::ffi::c_void, stream: &CudaStream) {
        // SAFETY: a live block of this size, and a stream that exists.
        unsafe { result::memset_d8_async(block.addr() as u64, 7, BYTES, stream.cu_stream()) }
            .unwrap();
    }

    fn cuda_info(device: i32) -> MemoryInfo<'static> {
        let kind = AllocatorType::Device;
        MemoryInfo::new(AllocationDevice::CUDA, device, kind, MemoryType::Default).unwrap()
    }

    fn unregister(env: &Environment, device: i32) {
        let unregister = ort::api().UnregisterAllocator;
        // SAFETY: the environment and the description exist.
        check(unsafe { unregister(env.ptr().cast_mut(), cuda_info(device).ptr()) }).unwrap();
    }

    #[test]
    fn blocks_are_in_cuda_memory_and_counted() {
        let (fake, _memory, arena) = started();
        let allocator = allocator(&arena);
        let sizes = [1, 255, 256, 257, BYTES];
        let purposes = [Purpose::Run(None), Purpose::Weight];
        let blocks: Vec<_> = sizes
            .iter()
            .flat_map(|&size| purposes.map(|purpose| allocator.obtain(size, purpose)))
            .collect();
        assert!(blocks.iter().all(|block| !block.is_null() && block.addr() % 256 == 0));
        assert!(fake.numbers(0).mappings > 0);
        let stats = allocator.stats();
        assert_eq!((stats.allocs, stats.reserves, stats.failures, stats.overflows), (5, 5, 0, 0));
        assert_eq!(stats.in_use.get(), 2 * sizes.iter().sum::<usize>() as u64);
        assert_eq!(arena.glance().live, arena.snapshot().live);
        assert!(arena.close().is_err(), "blocks are live");
        blocks.into_iter().for_each(|block| free(allocator, block));
        assert!(allocator.stats().in_use.is_zero() && arena.glance().live.is_zero());
        assert!(allocator.obtain(0, Purpose::Run(None)).is_null());
        arena.close().unwrap();
        assert!(allocator.obtain(1, Purpose::Run(None)).is_null(), "closed");
        assert_eq!(allocator.stats().failures, 1);
        assert_eq!(fake.faults(), "");
    }

    /// ONNX Runtime never asks an allocator that is registered to shrink.
    #[test]
    fn memory_of_a_stream_is_reused_in_its_order_and_decays_when_idle() {
        let (fake, _memory, arena) = started();
        let allocator = allocator(&arena);
        let context = CudaContext::new(0).unwrap();
        let streams = [context.new_stream().unwrap(), context.new_stream().unwrap()];
        let waits = fake.calls(c"cuCtxSynchronize");
        let mut blocks = Vec::new();
        for stream in [&streams[0], &streams[0], &streams[1]] {
            let block = allocator.obtain(BYTES, of_stream(stream));
            write(block, stream);
            free(allocator, block);
            blocks.push(block);
        }
        assert_eq!(blocks[0], blocks[1], "the same stream takes it at once");
        if blocks[2] == blocks[0] {
            assert!(fake.calls(c"cuStreamWaitEvent") > 0, "another stream waits for it");
        }
        assert!(!arena.glance().committed.is_zero(), "the device still writes");
        fake.run(0, u64::MAX);
        wait_until("the arena decays", || arena.glance().committed.is_zero());
        assert_eq!((allocator.stats().shrinks, fake.calls(c"cuCtxSynchronize")), (0, waits));
        assert_eq!(fake.faults(), "");
    }

    #[test]
    fn memory_without_a_stream_decays_after_the_wait_of_an_unload() {
        let (fake, _memory, arena) = started();
        let allocator = allocator(&arena);
        free(allocator, allocator.obtain(BYTES, Purpose::Weight));
        assert!(!arena.snapshot().pending.is_zero(), "any stream may use it");
        ARENAS.lock().unwrap().push(arena.clone());
        wait_for_freed();
        wait_until("the arena decays", || arena.glance().committed.is_zero());
        free(allocator, allocator.obtain(BYTES, Purpose::Run(None)));
        allocator.shrink();
        assert!(arena.glance().committed.is_zero(), "a shrink waits itself");
        assert_eq!(fake.faults(), "");
    }

    /// Counts events that warn.
    struct Warnings(Arc<AtomicUsize>);

    impl tracing::Subscriber for Warnings {
        fn enabled(&self, of: &tracing::Metadata<'_>) -> bool {
            *of.level() == tracing::Level::WARN
        }

        fn new_span(&self, _: &tracing::span::Attributes<'_>) -> tracing::span::Id {
            tracing::span::Id::from_u64(1)
        }

        fn record(&self, _: &tracing::span::Id, _: &tracing::span::Record<'_>) {}

        fn record_follows_from(&self, _: &tracing::span::Id, _: &tracing::span::Id) {}

        fn event(&self, _: &tracing::Event<'_>) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }

        fn enter(&self, _: &tracing::span::Id) {}

        fn exit(&self, _: &tracing::span::Id) {}
    }

    #[test]
    fn memory_that_the_device_does_not_have_is_null_and_logged_once() {
        let (_fake, _memory, arena) = started();
        let allocator = allocator(&arena);
        arena.set_limit(ByteSize::of(BYTES));
        let warnings = Arc::new(AtomicUsize::new(0));
        tracing::subscriber::with_default(Warnings(Arc::clone(&warnings)), || {
            for count in 1..=2 {
                let failed = [2 * BYTES, 2 * BYTES, usize::MAX];
                let failed = failed.map(|size| allocator.obtain(size, Purpose::Run(None)));
                assert!(failed.iter().all(|block| block.is_null()));
                assert_eq!(warnings.load(Ordering::Relaxed), count);
                free(allocator, allocator.obtain(BYTES, Purpose::Run(None)));
            }
        });
        let stats = allocator.stats();
        assert_eq!((stats.failures, stats.overflows), (6, 0));
    }

    #[test]
    fn an_arena_is_registered_once_for_its_device() {
        let Some(library) = library() else { return };
        let (_fake, memory, arena) = started();
        let runtime = Runtime::open(&memory, library).unwrap();
        let clock = Arc::new(SystemClock::new());
        let host = DeviceArena::open(Arc::new(HostDriver::new()), clock, ArenaConfig::new("host"));
        let refused = runtime.register_cuda(host.unwrap()).unwrap_err();
        assert!(matches!(&refused, OrtError::HostMemory { arena } if arena == "host"), "{refused}");
        runtime.register_cuda(arena.clone()).unwrap();
        let again = memory.devices().open_arena("again").unwrap();
        let refused = runtime.register_cuda(again).unwrap_err();
        assert!(matches!(refused, OrtError::Registered { device: 0 }), "{refused}");
        let allocator = runtime.allocator().stats();
        assert!(allocator.in_use.is_zero(), "that of the CPU is another one");
    }

    /// The provider looks its allocator up by this description.
    #[test]
    fn the_description_of_the_memory_is_that_of_the_cuda_provider() {
        let Some(library) = library() else { return };
        let (_fake, memory, arena) = started();
        let runtime = Runtime::open(&memory, library).unwrap();
        let allocator = runtime.register_cuda(arena).unwrap();
        let mut wanted = ptr::null_mut();
        let create = ort::api().CreateMemoryInfo_V2;
        // SAFETY: a text that ends with NUL, and a place for a pointer.
        let status = unsafe {
            create(
                c"Cuda".as_ptr(),
                sys::OrtMemoryInfoDeviceType::OrtMemoryInfoDeviceType_GPU,
                0x10de, // NVIDIA
                0,
                sys::OrtDeviceMemoryType::OrtDeviceMemoryType_DEFAULT,
                0,
                sys::OrtAllocatorType::OrtDeviceAllocator,
                &raw mut wanted,
            )
        };
        check(status).unwrap();
        let mut difference = 1;
        let compare = ort::api().CompareMemoryInfo;
        // SAFETY: both exist.
        let status = unsafe { compare(cuda_info(0).ptr(), wanted, &raw mut difference) };
        check(status).unwrap();
        assert_eq!(difference, 0);
        let mut found = ptr::null_mut();
        let look_up = ort::api().GetSharedAllocator;
        // SAFETY: both exist, and `found` is written.
        let status =
            unsafe { look_up(runtime.environment().ptr().cast_mut(), wanted, &raw mut found) };
        check(status).unwrap();
        assert_eq!(found.addr(), ptr::from_ref(allocator).addr());
        // SAFETY: created above, and released once.
        unsafe { (ort::api().ReleaseMemoryInfo)(wanted) };
    }

    #[test]
    fn tensors_of_a_session_are_in_the_arena_and_decay_with_it() {
        let Some(library) = library() else { return };
        let (_fake, memory, arena) = started();
        let runtime = Runtime::open(&memory, library).unwrap();
        let allocator = runtime.register_cuda(arena.clone()).unwrap();
        let (_folder, model) = small_model();
        let session = runtime.session("small", &model).register().unwrap();
        let loaded = session.acquire_blocking().unwrap();
        run(&mut loaded.lock(), 10).unwrap(); // on the CPU, with the allocator of the CPU
        assert_eq!(allocator.stats().allocs, 0);
        // ONNX Runtime finds the registered allocator for the device in this session.
        let of_session = Allocator::new(&loaded.lock(), cuda_info(0)).unwrap();
        let tensor = Tensor::<f32>::new(&of_session, [BYTES / 4]).unwrap();
        let stats = allocator.stats();
        assert_eq!((stats.allocs, stats.in_use), (1, ByteSize::of(BYTES)));
        assert_eq!(arena.glance().live, ByteSize::of(BYTES));
        arena.set_limit(ByteSize::of(BYTES));
        drop(Tensor::<f32>::new(&of_session, [BYTES / 4])); // 1.32: a tensor at null
        assert_eq!(allocator.stats().failures, 1);
        drop((tensor, of_session));
        assert!(allocator.stats().in_use.is_zero());
        run(&mut loaded.lock(), 10).unwrap();
        drop(loaded);
        session.unload_now(Duration::from_secs(5)).unwrap();
        wait_until("the arena decays", || arena.glance().committed.is_zero());
        assert_eq!(allocator.stats().shrinks, 0);
    }

    #[test]
    fn blocks_that_outlive_a_registration_are_freed_in_their_arena() {
        let Some(library) = library() else { return };
        let (fake, memory, arena) = started();
        let runtime = Runtime::open(&memory, library).unwrap();
        let first = runtime.register_cuda(arena.clone()).unwrap();
        let (_folder, model) = small_model();
        let session = runtime.session("small", &model).register().unwrap();
        let loaded = session.acquire_blocking().unwrap();
        let of_session = Allocator::new(&loaded.lock(), cuda_info(0)).unwrap();
        let tensor = Tensor::<f32>::new(&of_session, [BYTES / 4]).unwrap();
        unregister(runtime.environment(), 0);
        let other = memory.devices().open_arena("other").unwrap();
        let second = runtime.register_cuda(other.clone()).unwrap();
        drop(loaded);
        session.unload_now(Duration::from_secs(5)).unwrap();
        assert_eq!(arena.glance().live, ByteSize::of(BYTES), "the tensor is there");
        drop((tensor, of_session));
        assert!(arena.glance().live.is_zero() && first.stats().in_use.is_zero());
        assert_eq!(second.stats().allocs, 0);
        let loaded = session.acquire_blocking().unwrap();
        let of_session = Allocator::new(&loaded.lock(), cuda_info(0)).unwrap();
        drop(Tensor::<f32>::new(&of_session, [BYTES / 4]).unwrap());
        assert_eq!((first.stats().allocs, second.stats().allocs), (1, 1));
        assert_eq!(fake.faults(), "");
    }
}
