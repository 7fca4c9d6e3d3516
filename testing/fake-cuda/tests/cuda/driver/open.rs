//! Opening a device: what is missing, what is refused, what is asked for in vain.
//!
//! Invariant: after an open that failed nothing is held: no context, no stream, no memory.

use std::ffi::CStr;
use std::time::Duration;

use lowtide::ByteSize;
use lowtide_fake_cuda::{Fake, Guard, Options};
use lowtide_gpu::driver::cuda::{CudaDriver, CudaOptions, DeviceChoice, DeviceUuid};
use lowtide_gpu::driver::{Backend, Driver as _, DriverError};
use lowtide_gpu::{Region, SleepOptions};

use super::support::{Bed, LAZY, life};

/// Functions without which there is no CUDA.
pub(crate) const BASE: &[&CStr] = &[
    c"cuInit",
    c"cuGetErrorName",
    c"cuDriverGetVersion",
    c"cuDeviceGetCount",
    c"cuDeviceGet",
    c"cuDeviceGetName",
    c"cuDeviceGetUuid",
    c"cuDeviceGetAttribute",
    c"cuDeviceTotalMem_v2",
    c"cuDevicePrimaryCtxRetain",
    c"cuDevicePrimaryCtxRelease_v2",
    c"cuCtxGetCurrent",
    c"cuCtxSetCurrent",
    c"cuCtxSynchronize",
    c"cuMemGetInfo_v2",
    c"cuMemHostAlloc",
    c"cuMemFreeHost",
    c"cuMemHostRegister_v2",
    c"cuMemHostUnregister",
    c"cuMemcpyDtoDAsync_v2",
    c"cuMemcpyDtoHAsync_v2",
    c"cuMemcpyHtoDAsync_v2",
    c"cuStreamCreate",
    c"cuStreamDestroy_v2",
    c"cuStreamSynchronize",
    c"cuStreamWaitEvent",
    c"cuStreamIsCapturing",
    c"cuThreadExchangeStreamCaptureMode",
    c"cuEventCreate",
    c"cuEventDestroy_v2",
    c"cuEventRecord",
    c"cuEventQuery",
    c"cuEventSynchronize",
];

/// Functions without which there is no virtual memory.
pub(crate) const VIRTUAL: &[&CStr] = &[
    c"cuMemGetAllocationGranularity",
    c"cuMemAddressReserve",
    c"cuMemAddressFree",
    c"cuMemCreate",
    c"cuMemRelease",
    c"cuMemMap",
    c"cuMemUnmap",
    c"cuMemSetAccess",
];

/// Functions without which there are no pools.
pub(crate) const POOLS: &[&CStr] = &[
    c"cuMemPoolCreate",
    c"cuMemPoolDestroy",
    c"cuMemPoolTrimTo",
    c"cuMemPoolGetAttribute",
    c"cuMemPoolSetAttribute",
    c"cuDeviceGetDefaultMemPool",
    c"cuMemAllocFromPoolAsync",
    c"cuMemFreeAsync",
];

/// Functions without which there is no plain memory, and none that is managed.
pub(crate) const PLAIN: &[&CStr] = &[c"cuMemAlloc_v2", c"cuMemFree_v2", c"cuMemAllocManaged"];

/// Each way to memory, asked for, with the functions that it needs beside the base.
pub(crate) const WAYS: [(CudaOptions, &[&CStr]); 4] = [
    (way(Some(Backend::CudaVirtualMemory), false), VIRTUAL),
    (way(Some(Backend::CudaPool), false), POOLS),
    (way(Some(Backend::CudaPlain), false), &[c"cuMemAlloc_v2", c"cuMemFree_v2"]),
    (way(None, true), PLAIN),
];

const fn way(backend: Option<Backend>, managed: bool) -> CudaOptions {
    let device = DeviceChoice::Ordinal(0);
    let handle = Some(ByteSize::kib(64));
    let (pool_limit, peers, rdma) = (None, &[], false);
    CudaOptions { device, backend, managed, handle, pool_limit, peers, rdma }
}

/// Functions that older drivers lack.
pub(crate) const NEWER: &[&CStr] = &[c"cuMemRetainAllocationHandle", c"cuDeviceGetUuid_v2"];

fn open_without(missing: &CStr) -> Result<CudaDriver, DriverError> {
    without(missing, CudaOptions::default())
}

fn without(missing: &CStr, options: CudaOptions) -> Result<CudaDriver, DriverError> {
    let missing = missing.to_str().expect("plain");
    CudaDriver::open_with(options, &|name| name != missing)
}

/// The first rung and no other.
const FIRST: CudaOptions =
    CudaOptions { handle: None, ..way(Some(Backend::CudaVirtualMemory), false) };

/// The error of an open that left nothing behind.
#[track_caller]
fn refused(fake: &Guard, options: CudaOptions) -> DriverError {
    let error = CudaDriver::open(options).expect_err("no device was to be had");
    fake.assert_clean();
    assert_eq!((fake.retains(0), fake.retains(1)), (0, 0));
    error
}

fn cause(error: DriverError) -> DriverError {
    match error {
        DriverError::NoBackend { device: 0, mut skipped } if skipped.len() == 1 => {
            skipped.remove(0).1
        }
        other => panic!("{other}"),
    }
}

#[test]
fn a_function_that_is_missing_is_named_and_nothing_is_held() {
    for name in BASE {
        let fake = Fake::start(LAZY);
        let symbol = name.to_str().expect("plain");
        let error = open_without(name).expect_err(symbol);
        assert_eq!(error, DriverError::NoFunction { function: symbol });
        assert_eq!(fake.calls_total(), 0, "{symbol}: a call before all were found");
    }
    for (options, names) in WAYS {
        for name in names {
            let fake = Fake::start(LAZY);
            let symbol = name.to_str().expect("plain");
            let error = without(name, options).expect_err(symbol);
            assert_eq!(cause(error), DriverError::NoFunction { function: symbol });
            assert_eq!(fake.calls(c"cuDevicePrimaryCtxRetain"), 0);
            fake.assert_clean();
        }
    }
}

/// A function that is missing takes its own rung away and no other.
#[test]
fn without_a_function_of_a_rung_the_next_is_taken_and_says_why() {
    let ladder = [Backend::CudaVirtualMemory, Backend::CudaPool, Backend::CudaPlain];
    for at in 0..2 {
        for name in WAYS[at].1 {
            let fake = Fake::start(LAZY);
            let lacks = |symbol: &str| {
                WAYS[..at].iter().any(|(_, names)| names[0].to_str() == Ok(symbol))
                    || name.to_str() == Ok(symbol)
            };
            let driver = CudaDriver::open_with(CudaOptions::default(), &|it| !lacks(it));
            let driver = driver.expect("the next");
            assert_eq!(driver.backend(), ladder[at + 1], "{name:?}");
            let skipped: Vec<_> = driver.skipped().iter().map(|(backend, _)| *backend).collect();
            assert_eq!(skipped, ladder[..=at]);
            let last = driver.skipped().last().map(|(_, cause)| cause.clone());
            assert_eq!(
                last,
                Some(DriverError::NoFunction { function: name.to_str().expect("plain") })
            );
            drop(driver);
            fake.assert_clean();
        }
    }
}

#[test]
fn without_the_newer_functions_a_device_opens_and_works() {
    for name in NEWER {
        let fake = Fake::start(LAZY);
        let driver = open_without(name).expect("a device");
        let can_remap = *name != c"cuMemRetainAllocationHandle";
        assert_eq!(driver.capabilities().remap, can_remap);
        let bed = Bed::over(driver);
        assert_eq!(life(&bed, &mut || {}).0, Vec::<String>::new());
        assert_eq!(fake.calls(c"cuMemRetainAllocationHandle") > 0, can_remap);
        drop(bed);
        fake.validate(0);
        fake.assert_clean();
    }
}

#[test]
fn a_device_that_offers_no_virtual_memory_or_refuses_it_says_which() {
    let none = Options::NO_VIRTUAL_MEMORY;
    let fake = Fake::start(Options { flags: none, ..LAZY });
    assert_eq!(cause(refused(&fake, FIRST)), DriverError::Unsupported { what: "virtual memory" });
    let claimed = none | Options::CLAIMS_VIRTUAL_MEMORY;
    fake.reset(Options { flags: claimed, ..LAZY });
    let cause_of_claimed = cause(refused(&fake, FIRST));
    let DriverError::Unsupported { what } = cause_of_claimed else {
        panic!("{cause_of_claimed}");
    };
    assert_eq!(what, "cuMemGetAllocationGranularity");
    fake.reset(LAZY);
    fake.fail(c"cuMemGetAllocationGranularity", 1, 1);
    let error = cause(refused(&fake, FIRST));
    assert!(matches!(error, DriverError::Refused { code: 1, .. }), "{error}");
    // A share of a device whose only failing call is one of the trial.
    fake.fail(c"cuMemCreate", 1, 801);
    let error = cause(refused(&fake, FIRST));
    assert!(matches!(error, DriverError::Unsupported { .. }), "{error}");
    drop(CudaDriver::open(FIRST).expect("the next one is had"));
    fake.assert_clean();
}

#[test]
fn what_a_device_lacks_decides_the_rung_and_is_said() {
    let (no_virtual, no_pools) = (Options::NO_VIRTUAL_MEMORY, Options::NO_POOLS);
    let claims = Options::CLAIMS_VIRTUAL_MEMORY;
    for (flags, backend, skipped) in [
        (0, Backend::CudaVirtualMemory, 0),
        (no_pools, Backend::CudaVirtualMemory, 0),
        (no_virtual, Backend::CudaPool, 1),
        (no_virtual | claims, Backend::CudaPool, 1),
        (no_virtual | Options::NO_POOL_CREATE, Backend::CudaPool, 1),
        (no_virtual | no_pools, Backend::CudaPlain, 2),
        (no_virtual | claims | no_pools, Backend::CudaPlain, 2),
    ] {
        let fake = Fake::start(Options { flags, ..LAZY });
        let driver = CudaDriver::open(CudaOptions::default()).expect("a device");
        assert_eq!((driver.backend(), driver.skipped().len()), (backend, skipped), "{flags}");
        assert_eq!(driver.shares_pool(), flags & Options::NO_POOL_CREATE != 0);
        let text = format!("{driver:?}");
        for (backend, _) in driver.skipped() {
            assert!(text.contains(&format!("{backend:?}")), "{text}");
        }
        drop(driver);
        fake.assert_clean();
    }
}

/// Each of them fails its trial in turn; nothing of it stays.
#[test]
fn a_rung_that_fails_its_trial_gives_way_to_the_next() {
    let fake = Fake::start(LAZY);
    fake.fail(c"cuMemSetAccess", 1, 999);
    let driver = CudaDriver::open(CudaOptions::default()).expect("a pool");
    assert_eq!(driver.backend(), Backend::CudaPool);
    assert_eq!((fake.numbers(0).handles, fake.numbers(0).reservations), (0, 0));
    drop(driver);
    // Both pools, ours and the device's.
    fake.fail(c"cuMemSetAccess", 1, 999);
    fake.fail(c"cuMemAllocFromPoolAsync", 1, 801);
    fake.fail(c"cuMemAllocFromPoolAsync", 2, 801);
    let driver = CudaDriver::open(CudaOptions::default()).expect("plain memory");
    assert_eq!((driver.backend(), fake.numbers(0).pools), (Backend::CudaPlain, 0));
    drop(driver);
    // Ours alone, as it is refused where computing is confidential.
    fake.fail(c"cuMemAllocFromPoolAsync", 1, 801);
    let driver = CudaDriver::open(WAYS[1].0).expect("the device's pool");
    assert!(driver.shares_pool() && fake.numbers(0).pools == 0);
    drop(driver);
    // All.
    fake.fail(c"cuMemSetAccess", 1, 999);
    fake.fail(c"cuMemAllocFromPoolAsync", 1, 2);
    fake.fail(c"cuMemAlloc_v2", 1, 2);
    let error = refused(&fake, CudaOptions::default());
    let DriverError::NoBackend { device: 0, skipped } = &error else { panic!("{error}") };
    assert_eq!(skipped.len(), 3);
    for (backend, cause) in skipped {
        assert!(error.to_string().contains(&format!("{backend}: {cause}")), "{error}");
    }
    fake.assert_clean();
}

/// If the context is lost, no other rung helps, and none is tried.
#[test]
fn a_context_that_is_lost_in_a_trial_ends_the_climb() {
    let fake = Fake::start(LAZY);
    fake.fail(c"cuMemcpyHtoDAsync_v2", 1, 700);
    let error = CudaDriver::open(CudaOptions::default()).expect_err("lost");
    let DriverError::NoBackend { skipped, .. } = &error else { panic!("{error}") };
    assert_eq!(skipped.len(), 1, "{error}");
    assert_eq!((fake.calls(c"cuMemPoolCreate"), fake.calls(c"cuMemAlloc_v2")), (0, 0));
}

#[test]
fn a_device_is_chosen_by_number_or_uuid_and_a_wrong_one_is_named() {
    let fake = Fake::start(LAZY);
    for ordinal in [2, 7, u32::MAX] {
        let device = DeviceChoice::Ordinal(ordinal);
        let error = refused(&fake, CudaOptions { device, ..CudaOptions::default() });
        assert_eq!(error, DriverError::NoSuchDevice { ordinal, count: 2 });
    }
    let known: Vec<_> =
        CudaDriver::devices().expect("devices").into_iter().map(|device| device.uuid).collect();
    assert_eq!(known.len(), 2);
    let uuid = DeviceUuid::new([7; 16]);
    let device = DeviceChoice::Uuid(uuid);
    let error = refused(&fake, CudaOptions { device, ..CudaOptions::default() });
    for named in [uuid, known[0], known[1]] {
        assert!(error.to_string().contains(&named.to_string()), "{error}");
    }
    assert_eq!(error, DriverError::NoSuchUuid { uuid, known: known.clone() });
    let device = DeviceChoice::Uuid(known[1]);
    let driver = CudaDriver::open(CudaOptions { device, ..CudaOptions::default() }).expect("it");
    assert_eq!((driver.device().ordinal, driver.device().uuid), (1, known[1]));
    assert_eq!((fake.retains(0), fake.retains(1)), (0, 1));
    let bed = Bed::over(driver);
    assert_eq!(life(&bed, &mut || {}).0, Vec::<String>::new());
    drop(bed);
    fake.assert_clean();
}

/// The error if options do not fit the backend.
fn needs(backend: Backend, expected: &'static str) -> DriverError {
    let skipped = vec![(backend, DriverError::WrongBackend { expected })];
    DriverError::NoBackend { device: 0, skipped }
}

#[test]
fn another_way_to_memory_than_there_is_is_refused() {
    let fake = Fake::start(LAZY);
    let host = Some(Backend::Host);
    let error = refused(&fake, CudaOptions { backend: host, ..CudaOptions::default() });
    let expected = "a CUDA backend: cuda_virtual_memory, cuda_pool or cuda_plain";
    assert_eq!(error, needs(Backend::Host, expected));
    for backend in [Backend::CudaVirtualMemory, Backend::CudaPool] {
        let error = refused(&fake, way(Some(backend), true));
        assert_eq!(error, needs(backend, "the backend cuda_plain for managed memory"));
    }
    for (options, _) in WAYS {
        let driver = CudaDriver::open(options).expect("this one");
        assert_eq!(driver.backend(), options.backend.unwrap_or(Backend::CudaPlain));
        assert_eq!(driver.is_managed(), options.managed);
        assert_eq!(driver.skipped(), []);
    }
    drop(CudaDriver::open(way(Some(Backend::CudaPlain), true)).expect("the same"));
    fake.assert_clean();
}

#[test]
fn a_device_that_cannot_share_its_memory_as_asked_is_named() {
    let (device, peer) = (0, 1);
    let peers = CudaOptions { peers: &[1], ..CudaOptions::default() };
    let rdma = CudaOptions { rdma: true, ..CudaOptions::default() };
    let fake = Fake::start(Options { flags: Options::NO_PEERS | Options::NO_RDMA, ..LAZY });
    let error = refused(&fake, peers);
    assert_eq!(error, DriverError::NoPeerAccess { device, peer });
    assert!(error.to_string().contains("device 1 cannot access memory of CUDA device 0"));
    assert_eq!(refused(&fake, rdma), DriverError::NoRdma { device });
    drop(fake);
    let fake = Fake::start(LAZY);
    let far = CudaOptions { peers: &[0, 127], ..peers };
    assert_eq!(refused(&fake, far), DriverError::NoSuchDevice { ordinal: 127, count: 2 });
    for asked in [peers, rdma] {
        for backend in [Backend::CudaPool, Backend::CudaPlain] {
            let error = refused(&fake, CudaOptions { backend: Some(backend), ..asked });
            let expected = "the backend cuda_virtual_memory for peer access and RDMA";
            assert_eq!(error, needs(backend, expected));
        }
        fake.fail(c"cuMemSetAccess", 1, 999); // WSL 2 refuses memory for network cards here
        let error = refused(&fake, asked);
        assert!(matches!(&error, DriverError::NoBackend { skipped, .. } if skipped.len() == 1));
    }
    let alone = CudaOptions { peers: &[0], ..CudaOptions::default() };
    drop(CudaDriver::open(alone).expect("the device itself"));
    fake.assert_clean();
}

#[test]
fn a_limit_below_what_a_pool_takes_at_once_is_named() {
    let fake = Fake::start(LAZY);
    let requested = ByteSize::kib(63);
    let options = CudaOptions { pool_limit: Some(requested), ..WAYS[1].0 };
    let error = refused(&fake, options);
    assert_eq!(error, DriverError::PoolLimit { requested, unit: ByteSize::kib(64) });
    fake.assert_clean();
}

#[test]
fn handles_are_powers_of_two_of_at_least_the_granularity() {
    let fake = Fake::start(Options { granularity: 0, capacity: 8 << 30, ..LAZY });
    let granularity = ByteSize::mib(2);
    for requested in [ByteSize::ZERO, ByteSize::mib(3), ByteSize::mib(1), ByteSize::MAX] {
        let handle = Some(requested);
        let error = refused(&fake, CudaOptions { handle, ..FIRST });
        assert_eq!(error, DriverError::HandleSize { requested, granularity });
        for (options, _) in &WAYS[1..] {
            let error = CudaDriver::open(CudaOptions { handle, ..*options });
            let odd = requested != ByteSize::mib(1);
            assert_eq!(error.is_err(), odd, "{options:?}");
        }
    }
    let handle = Some(ByteSize::gib(1));
    let driver = CudaDriver::open(CudaOptions { handle, ..CudaOptions::default() }).expect("large");
    assert_eq!(driver.capabilities().granularity, ByteSize::gib(1));
    drop(driver);
    // More than there is, and more than there are addresses for.
    for handle in [ByteSize::gib(16), ByteSize::new(1 << 63)] {
        let handle = Some(handle);
        let error = cause(refused(&fake, CudaOptions { handle, ..FIRST }));
        let DriverError::OutOfMemory { .. } = error else { panic!("{error}") };
    }
    fake.assert_clean();
}

/// The trial copied 64 KiB into a handle of 4 KiB.
#[test]
fn a_granularity_below_what_the_trial_copies_opens() {
    let fake = Fake::start(Options { granularity: 4 << 10, ..LAZY });
    let driver = CudaDriver::open(CudaOptions::default()).expect("a device");
    assert_eq!(driver.capabilities().granularity, ByteSize::kib(4));
    drop(driver);
    fake.assert_clean();
}

#[test]
fn a_device_that_is_full_is_not_opened_and_nothing_is_held() {
    let fake = Fake::start(Options { capacity: 1 << 20, ..LAZY });
    let handle = Some(ByteSize::mib(2));
    let error = cause(refused(&fake, CudaOptions { handle, ..FIRST }));
    let requested = ByteSize::mib(2);
    let call = "cuMemCreate";
    assert_eq!(error, DriverError::OutOfMemory { call, requested });
    drop(CudaDriver::open(CudaOptions::default()).expect("a small handle fits"));
    fake.assert_clean();
}

/// A toolkit's stub stands before the driver's library on the path: it answered 34, and that was
/// the end of the search.
#[test]
fn a_stub_library_does_not_end_the_search() {
    let fake = Fake::start(LAZY);
    fake.fail(c"cuInit", 1, 34); // under the first name; the last is the driver
    let driver = CudaDriver::open(CudaOptions::default()).expect("the next library is taken");
    assert_eq!(fake.calls(c"cuInit"), 2);
    drop(driver);
    fake.fail(c"cuInit", 1, 34);
    assert_eq!(CudaDriver::devices().expect("the next library is taken").len(), 2);
    // Nothing but stubs.
    for nth in 1..=2 {
        fake.fail(c"cuInit", nth, 34);
    }
    let error = refused(&fake, CudaOptions::default());
    assert_eq!(error.code(), Some(34));
    assert!(error.to_string().starts_with("cuInit failed: CUDA_ERROR_STUB_LIBRARY"), "{error}");
    fake.assert_clean();
}

#[test]
fn a_start_that_fails_says_what_an_operator_can_do() {
    let fake = Fake::start(LAZY);
    for (code, name, part) in [
        (46, "CUDA_ERROR_DEVICE_UNAVAILABLE", "nvidia-smi"),
        (802, "CUDA_ERROR_SYSTEM_NOT_READY", "nvidia-fabricmanager"),
        (803, "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH", "different versions"),
    ] {
        fake.fail(c"cuInit", 1, code);
        let text = refused(&fake, CudaOptions::default()).to_string();
        let begin = format!("cuInit failed: {name}: ");
        assert!(text.starts_with(&begin) && text.contains(part), "{text}");
        assert!(text.ends_with(&format!("(code {code})")), "{text}");
        // On HGX systems it is the first context that answers so.
        fake.fail(c"cuDevicePrimaryCtxRetain", 1, code);
        let text = refused(&fake, FIRST).to_string();
        assert!(text.contains(name) && text.contains(part), "{text}");
    }
    fake.assert_clean();
}

/// The crate's table knew a few: others were "unnamed".
#[test]
fn each_result_has_the_name_that_the_driver_gives_it() {
    let fake = Fake::start(LAZY);
    let driver = CudaDriver::open(CudaOptions::default()).expect("a device");
    for (code, name) in [
        (1, "CUDA_ERROR_INVALID_VALUE"),
        (36, "CUDA_ERROR_CALL_REQUIRES_NEWER_DRIVER"),
        (304, "CUDA_ERROR_OPERATING_SYSTEM"),
        (711, "CUDA_ERROR_TOO_MANY_PEERS"),
        (912, "CUDA_ERROR_INVALID_CLUSTER_SIZE"),
        (4242, "unnamed"),
    ] {
        fake.fail(c"cuMemGetInfo_v2", 1, code);
        let text = driver.headroom().expect_err("refused").to_string();
        assert_eq!(text, format!("cuMemGetInfo failed: {name} (code {code})"));
    }
    drop(driver);
    fake.assert_clean();
}

/// `cuStreamSynchronize` and events without the blocking flag keep a core busy.
#[test]
fn the_host_sleeps_while_it_waits_for_streams_and_events() {
    for (options, _) in WAYS {
        let fake = Fake::start(LAZY);
        let driver = CudaDriver::open(options).expect("a device");
        assert_eq!(fake.spins(), 0, "{options:?}: the trial of the memory");
        let bed = Bed::over(driver);
        let arena = bed.arena();
        let lane = arena.cuda_lane(&bed.one).expect("a lane");
        let before = fake.spins(); // cudarc waits for the context at its first stream
        let blocks = [(); 2].map(|()| lane.alloc::<u8>(64 << 10, Region::Stable).expect("room"));
        if arena.capabilities().virtual_memory {
            let options = SleepOptions { drain: Duration::ZERO, ..SleepOptions::default() };
            let lease = lane.enter().expect("awake");
            drop(lease);
            arena.sleep(options).expect("asleep");
            arena.wake().expect("awake");
        }
        drop(blocks);
        arena.purge().expect("marked");
        fake.run(0, u64::MAX);
        arena.purge().expect("gone");
        assert_eq!(fake.spins(), before, "{options:?}");
        drop(lane);
        arena.close().expect("closed");
        drop((arena, bed));
        fake.assert_clean();
    }
}
