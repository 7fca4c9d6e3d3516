//! A `Memory` whose device arenas lie in CUDA memory, over the fake of the driver's library.

#[path = "../../../../tests/support/mod.rs"]
pub(crate) mod support;

use std::sync::Arc;
use std::time::Duration;

use cudarc::driver::CudaContext;
use lowtide::admission::{Budget, Cost, Rejected};
use lowtide::config::{DeviceBackend, DeviceChoice};
use lowtide::decay::DecayTime;
use lowtide::memory::{DeviceSelector, StartError};
use lowtide::{ByteSize, Memory};
use lowtide_fake_cuda::{Fake, Options};
use lowtide_gpu::driver::Backend;
use lowtide_gpu::driver::cuda::{self, CudaDriver, CudaOptions, PoolGovernor};
use lowtide_gpu::{Region, SleepOptions};

use support::Tree;

const SOON: Duration = Duration::from_secs(20);

#[test]
fn arenas_lie_on_the_device_where_cuda_is_asked_for() {
    let fake = Fake::start(Options { devices: 1, ..Options::default() });
    let memory = Memory::builder().device(DeviceChoice::Cuda).start().expect("a device");
    let arena = memory.devices().open_arena("embedder").expect("an arena");
    assert_eq!(arena.backend(), Backend::CudaVirtualMemory);
    let context = CudaContext::new(0).expect("the same context");
    let stream = context.new_stream().expect("a stream");
    let lane = arena.cuda_lane(&stream).expect("a lane");
    let mut weights = lane.alloc::<f32>(1 << 18, Region::Stable).expect("room");
    let values: Vec<f32> = (0_u16..1 << 8).map(f32::from).cycle().take(weights.len()).collect();
    let lease = lane.enter().expect("a lease");
    stream.memcpy_htod(&values, &mut weights.cuda_mut(&lease).expect("a view")).expect("there");
    drop(lease);
    arena.sleep(SleepOptions::default()).expect("asleep");
    assert_eq!(fake.numbers(0).mappings, 0, "its memory is gone");
    let lease = lane.enter().expect("awake");
    let back = stream.clone_dtoh(weights.cuda(&lease).expect("a view")).expect("back");
    assert_eq!(back, values);
    drop((lease, weights, lane, stream));
    // A drop waits for no work, and leaves the memory that is worked on.
    arena.close().expect("nothing is live");
    drop(arena);
    assert!(memory.shutdown_blocking(SOON).is_clean());
    drop((memory, context));
    fake.assert_clean();
}

#[test]
fn every_visible_device_is_opened_and_an_arena_lies_on_the_one_that_is_named() {
    let fake = Fake::start(Options { devices: 2, ..Options::default() });
    let memory = Memory::builder().device(DeviceChoice::CudaAll).start().expect("two devices");
    let devices = CudaDriver::devices().expect("two devices");
    let names: Vec<_> = devices.iter().map(|device| device.uuid.to_string()).collect();
    let found: Vec<_> = memory.devices().all().into_iter().map(|device| device.name).collect();
    assert_eq!(found, names, "in the order of the driver");
    let second = DeviceSelector::Uuid(devices[1].uuid);
    let arena = memory.devices().on(second).open_arena("embedder").expect("an arena");
    assert_eq!(arena.cuda_ordinal(), Some(1));
    let buffer = arena.alloc::<u8>(1 << 20, Region::Stable).expect("room");
    assert_eq!([0, 1].map(|device| fake.numbers(device).mappings), [0, 1]);
    drop(buffer);
    arena.close().expect("nothing is live");
    assert!(memory.shutdown_blocking(SOON).is_clean());
    drop((memory, arena));
    let one = [DeviceChoice::CudaOrdinal(1), DeviceChoice::CudaUuid(devices[1].uuid)];
    let failed = Memory::builder().devices(one).start();
    assert!(matches!(failed, Err(StartError::SameDevice { .. })), "{failed:?}");
    fake.assert_clean();
}

#[test]
fn a_device_that_cannot_be_had_is_an_error_that_names_the_cause() {
    let flags = Options::NO_VIRTUAL_MEMORY;
    let fake = Fake::start(Options { devices: 1, flags, ..Options::default() });
    // No rung works: the first is not offered, and the calls of the others are refused.
    fake.fail(c"cuMemAllocFromPoolAsync", 1, 2);
    fake.fail(c"cuMemAlloc_v2", 1, 2);
    let failed = Memory::builder().device(DeviceChoice::Cuda).start();
    let Err(StartError::NoCuda { cause, .. }) = failed else { panic!("{failed:?}") };
    let expected = "cannot allocate on CUDA device 0: cuda_virtual_memory: the driver does not \
                    support virtual memory; cuda_pool: ";
    assert!(cause.starts_with(expected) && cause.contains("; cuda_plain: "), "{cause}");
    fake.assert_clean();
}

#[test]
fn auto_takes_a_device_that_works_and_else_the_host() {
    let fake = Fake::start(Options { devices: 1, ..Options::default() });
    let backend = || {
        let memory = Memory::builder().device(DeviceChoice::Auto).start().expect("starts");
        let arena = memory.devices().open_arena("embedder").expect("an arena");
        let backend = arena.backend();
        drop(arena);
        assert!(memory.shutdown_blocking(SOON).is_clean());
        backend
    };
    assert_eq!(backend(), Backend::CudaVirtualMemory);
    fake.assert_clean();
    // It claims virtual memory and refuses it, as shares of devices do, and the rest as well.
    let flags = Options::NO_VIRTUAL_MEMORY | Options::CLAIMS_VIRTUAL_MEMORY | Options::NO_POOLS;
    fake.reset(Options { devices: 1, flags, ..Options::default() });
    fake.fail(c"cuMemAlloc_v2", 1, 801);
    assert_eq!(backend(), Backend::Host);
    fake.assert_clean();
}

#[test]
fn a_device_is_chosen_by_number_or_uuid_and_a_rung_by_its_name() {
    let fake = Fake::start(Options { devices: 2, ..Options::default() });
    let second = CudaDriver::devices().expect("two")[1].uuid;
    let ways = [
        (DeviceChoice::CudaOrdinal(1), DeviceBackend::Pool, Backend::CudaPool),
        (DeviceChoice::CudaUuid(second), DeviceBackend::Plain, Backend::CudaPlain),
        (DeviceChoice::CudaUuid(second), DeviceBackend::Managed, Backend::CudaPlain),
        (DeviceChoice::CudaOrdinal(1), DeviceBackend::VirtualMemory, Backend::CudaVirtualMemory),
    ];
    for (device, backend, found) in ways {
        let memory =
            Memory::builder().device(device).device_backend(backend).start().expect("starts");
        let opened =
            memory.devices().open_arena("one").map(|arena| (arena.backend(), arena.cuda_ordinal()));
        assert_eq!(opened, Ok((found, Some(1))), "{device} {backend}");
        assert_eq!((fake.retains(0), fake.retains(1)), (0, 1));
        assert!(memory.shutdown_blocking(SOON).is_clean());
        drop(memory);
        fake.assert_clean();
    }
    let failed = Memory::builder().device(DeviceChoice::CudaOrdinal(2)).start();
    let Err(error @ StartError::NoCuda { .. }) = failed else { panic!("{failed:?}") };
    let expected = "cannot open the device cuda:2: no CUDA device 2: expected a number below 2, \
                    the number of visible devices";
    assert_eq!(error.to_string(), expected);
    // What is asked for and not offered is an error, or the host's turn.
    fake.reset(Options { flags: Options::NO_POOLS, ..Options::default() });
    let pool = || Memory::builder().device_backend(DeviceBackend::Pool);
    let failed = pool().device(DeviceChoice::Cuda).start();
    let Err(StartError::NoCuda { cause, .. }) = failed else { panic!("{failed:?}") };
    let expected = "cannot allocate on CUDA device 0: cuda_pool: the driver does not support \
                    memory pools";
    assert_eq!(cause, expected);
    for (device, expected) in [
        (
            DeviceChoice::Auto,
            "device arenas use host memory: cannot allocate on CUDA device 0: cuda_pool",
        ),
        (DeviceChoice::Host, "LOWTIDE_DEVICE_BACKEND=pool (code) has no effect"),
    ] {
        let memory = pool().device(device).start().expect("starts");
        let diagnostics = memory.snapshot().diagnostics;
        assert!(diagnostics.iter().any(|note| note.text.starts_with(expected)), "{diagnostics:?}");
        let arena = memory.devices().open_arena("one").expect("an arena");
        assert_eq!((arena.backend(), arena.cuda_ordinal()), (Backend::Host, None));
        drop(arena);
        assert!(memory.shutdown_blocking(SOON).is_clean());
    }
    fake.assert_clean();
}

/// With options that no setting names; what the settings say of the device is not looked at.
#[test]
fn a_driver_that_was_opened_by_hand_is_taken() {
    let fake = Fake::start(Options { devices: 1, ..Options::default() });
    let handle = Some(ByteSize::mib(16));
    let driver = CudaDriver::open(CudaOptions { handle, ..CudaOptions::default() }).expect("opens");
    let builder = Memory::builder().device(DeviceChoice::None).device_backend(DeviceBackend::Pool);
    let memory = builder.driver(Arc::new(driver)).start().expect("starts");
    let arena = memory.devices().open_arena("large handles").expect("an arena");
    let granularity = arena.capabilities().granularity;
    assert_eq!((arena.backend(), Some(granularity)), (Backend::CudaVirtualMemory, handle));
    assert!(
        memory.report().diagnostics().iter().all(|note| note.about != "device"),
        "{:?}",
        memory.report().diagnostics()
    );
    drop(arena);
    assert!(memory.shutdown_blocking(SOON).is_clean());
    drop(memory);
    fake.assert_clean();
}

/// On the host nothing of the device is held.
#[test]
fn the_host_is_taken_where_it_is_asked_for() {
    let fake = Fake::start(Options { devices: 1, ..Options::default() });
    let memory = Memory::builder().device(DeviceChoice::Host).start().expect("starts");
    let arena = memory.devices().open_arena("embedder").expect("an arena");
    assert_eq!((arena.backend(), fake.retains(0)), (Backend::Host, 0));
    let block = arena.alloc::<u8>(1 << 20, Region::Stable).expect("room");
    assert_eq!(block.bytes(), ByteSize::mib(1));
    drop((block, arena));
    assert!(memory.shutdown_blocking(SOON).is_clean());
    fake.assert_clean();
}

/// Memory that an unmodified cudarc allocates and frees is returned, and a governor that ends is
/// forgotten.
#[test]
fn a_memory_gives_back_what_a_governed_pool_keeps() {
    let fake = Fake::start(Options { devices: 1, ..Options::default() });
    let first = cuda::DeviceChoice::Ordinal(0);
    let governor = PoolGovernor::open(first, None, DecayTime::AtOnce);
    let governor = Arc::new(governor.expect("a governor"));
    let memory = Memory::builder()
        .device(DeviceChoice::None)
        .metrics_interval(Duration::from_millis(10))
        .start()
        .expect("starts");
    for _ in 0..2 {
        memory.devices().govern(&governor).expect("known");
    }
    let context = CudaContext::new(0).expect("the same context");
    let stream = context.new_stream().expect("a stream");
    drop(stream.clone_htod(&[1_u8; 1 << 16]).expect("memory"));
    stream.synchronize().expect("done"); // the worker waits for nothing itself
    let reserved = || governor.report(ByteSize::ZERO).expect("answered").reserved;
    support::until("what was freed is back", || reserved().is_zero());
    fake.fail(c"cuMemPoolGetAttribute", 1, 999);
    let said =
        || memory.snapshot().diagnostics.iter().any(|note| note.text.contains("governor of CUDA"));
    support::until("a failure is a note", said);
    drop((stream, context));
    drop(governor); // the worker may be at it: the last handle ends it
    support::until("the governor has ended", || fake.numbers(0).pools == 0);
    assert!(memory.shutdown_blocking(SOON).is_clean());
    support::until("its context is gone", || fake.retains(0) == 0);
    fake.assert_clean();
}

/// The bug: the memory of a GB10 or a Jetson was in the host's ledger and in the device's.
#[test]
fn an_integrated_gpu_has_no_budget_of_its_own() {
    let fake = Fake::start(Options { devices: 1, ..Options::default() });
    let tree = Tree::new(ByteSize::gib(1));
    let size = ByteSize::mib(64);
    for (flags, unified) in [(0, false), (Options::INTEGRATED, true)] {
        fake.reset(Options { devices: 1, flags, ..Options::default() });
        let builder = Memory::builder().device(DeviceChoice::Cuda).signals(tree.open());
        let memory = builder.device_limit(ByteSize::mib(512)).start().expect("a device");
        let arena = memory.devices().open_arena("weights").expect("an arena");
        assert_eq!(arena.capabilities().unified, unified);
        let weights = arena.alloc::<u8>(64 << 20, Region::Stable).expect("room");
        let snapshot = memory.snapshot();
        let beside = if unified { size } else { ByteSize::ZERO };
        assert_eq!(snapshot.physical, ByteSize::mib(10).saturating_add(beside));
        let said =
            snapshot.diagnostics.iter().any(|note| note.text.contains("no memory of its own"));
        let has_budget = snapshot.device.ceiling != ByteSize::MAX;
        assert_eq!((snapshot.unified, said, has_budget), (unified, unified, !unified));
        let permit = memory.admission().try_admit(Cost::device(size)).expect("fits");
        let booked =
            [Budget::Host, Budget::Device].map(|it| memory.admission().ledger(it).reserved());
        let expected = if unified { [size, ByteSize::ZERO] } else { [ByteSize::ZERO, size] };
        assert_eq!(booked, expected);
        drop((permit, weights));
        arena.close().expect("nothing is live");
        drop(arena);
        assert!(memory.shutdown_blocking(SOON).is_clean());
        drop(memory);
        fake.assert_clean();
    }
}

/// Reported in timemachine #1203 and ollama #1895: the device was never known to be lost.
#[test]
fn nothing_is_admitted_for_a_device_that_answers_no_call() {
    for code in [999, 806, 46] {
        let fake = Fake::start(Options { devices: 1, ..Options::default() });
        let memory = Memory::builder().device(DeviceChoice::Cuda).start().expect("a device");
        let arena = memory.devices().open_arena("embedder").expect("an arena");
        fake.poison(0, code);
        let error = arena.alloc::<u8>(1 << 20, Region::Stable).expect_err("dead");
        assert!(error.to_string().contains("lost"), "{error}");
        support::until("its loss is known", || {
            let admitted = memory.admission().try_admit(Cost::device(ByteSize::mib(1)));
            matches!(admitted, Err(Rejected::DeviceLost { .. }))
        });
        drop(arena);
        let _ = memory.shutdown_blocking(SOON);
    }
}
