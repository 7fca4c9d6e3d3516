//! Opening a device: what is missing, what is refused, what is asked for in vain.
//!
//! Invariant: after an open that failed nothing is held: no context, no stream, no memory.

use std::ffi::CStr;

use lowtide::ByteSize;
use lowtide::device::driver::cuda::{
    CudaDriver, CudaError, CudaOptions, DeviceChoice, DeviceUuid, Probe, RungFailure,
};
use lowtide::device::driver::{Driver as _, DriverError, Rung};
use lowtide_fake_driver::{Fake, Guard, Options};

use crate::support::{Bed, LAZY, life};

/// Functions without which there is no CUDA.
pub(crate) const BASE: &[&CStr] = &[
    c"cuInit",
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
    c"cuMemcpyDtoDAsync_v2",
    c"cuMemcpyDtoHAsync_v2",
    c"cuMemcpyHtoDAsync_v2",
    c"cuStreamCreate",
    c"cuStreamDestroy_v2",
    c"cuStreamSynchronize",
    c"cuStreamWaitEvent",
    c"cuStreamIsCapturing",
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

/// Functions that older drivers lack.
pub(crate) const NEWER: &[&CStr] = &[c"cuMemRetainAllocationHandle", c"cuDeviceGetUuid_v2"];

fn open_without(missing: &CStr) -> Result<CudaDriver, CudaError> {
    let missing = missing.to_str().expect("plain");
    CudaDriver::open_with(CudaOptions::default(), &|name| name != missing)
}

/// The error of an open that left nothing behind.
#[track_caller]
fn refused(fake: &Guard, options: CudaOptions) -> CudaError {
    let error = CudaDriver::open(options).expect_err("no device was to be had");
    fake.assert_clean();
    assert_eq!((fake.retains(0), fake.retains(1)), (0, 0));
    error
}

fn cause(error: CudaError) -> RungFailure {
    match error {
        CudaError::NoSuchRung { rung: Rung::CudaVirtualMemory, device: 0, cause } => cause,
        other => panic!("{other}"),
    }
}

#[test]
fn a_function_that_is_missing_is_named_and_nothing_is_held() {
    for name in BASE {
        let fake = Fake::start(LAZY);
        let symbol = name.to_str().expect("plain");
        let error = open_without(name).expect_err(symbol);
        assert_eq!(error, CudaError::Unavailable(Probe::NoSymbol { symbol }));
        assert_eq!(fake.calls_total(), 0, "{symbol}: a call before all were found");
    }
    for name in VIRTUAL {
        let fake = Fake::start(LAZY);
        let symbol = name.to_str().expect("plain");
        let cause = cause(open_without(name).expect_err(symbol));
        assert_eq!(cause, RungFailure::NoFunction(symbol));
        assert_eq!(fake.calls(c"cuDevicePrimaryCtxRetain"), 0);
        fake.assert_clean();
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
    assert_eq!(cause(refused(&fake, CudaOptions::default())), RungFailure::NotOffered);
    let claimed = none | Options::CLAIMS_VIRTUAL_MEMORY;
    fake.reset(Options { flags: claimed, ..LAZY });
    let cause_of_claimed = cause(refused(&fake, CudaOptions::default()));
    let RungFailure::Driver(DriverError::Unsupported { what }) = cause_of_claimed else {
        panic!("{cause_of_claimed}");
    };
    assert_eq!(what, "cuMemGetAllocationGranularity");
    fake.reset(LAZY);
    fake.fail(c"cuMemGetAllocationGranularity", 1, 1);
    let error = cause(refused(&fake, CudaOptions::default()));
    assert!(matches!(error, RungFailure::Driver(DriverError::Refused { code: 1, .. })), "{error}");
    // A share of a device whose only failing call is one of the trial.
    fake.fail(c"cuMemCreate", 1, 801);
    let error = cause(refused(&fake, CudaOptions::default()));
    assert!(matches!(error, RungFailure::Driver(DriverError::Unsupported { .. })), "{error}");
    drop(CudaDriver::open(CudaOptions::default()).expect("the next one is had"));
    fake.assert_clean();
}

#[test]
fn a_device_is_chosen_by_number_or_uuid_and_a_wrong_one_is_named() {
    let fake = Fake::start(LAZY);
    for ordinal in [2, 7, u32::MAX] {
        let device = DeviceChoice::Ordinal(ordinal);
        let error = refused(&fake, CudaOptions { device, ..CudaOptions::default() });
        assert_eq!(error, CudaError::NoSuchDevice { ordinal, count: 2 });
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
    assert_eq!(error, CudaError::NoSuchUuid { uuid, known: known.clone() });
    let device = DeviceChoice::Uuid(known[1]);
    let driver = CudaDriver::open(CudaOptions { device, ..CudaOptions::default() }).expect("it");
    assert_eq!((driver.device().ordinal, driver.device().uuid), (1, known[1]));
    assert_eq!((fake.retains(0), fake.retains(1)), (0, 1));
    let bed = Bed::over(driver);
    assert_eq!(life(&bed, &mut || {}).0, Vec::<String>::new());
    drop(bed);
    fake.assert_clean();
}

#[test]
fn another_way_to_memory_than_there_is_is_refused() {
    let fake = Fake::start(LAZY);
    for rung in [Rung::Host, Rung::CudaPool, Rung::CudaPlain] {
        let error = refused(&fake, CudaOptions { rung: Some(rung), ..CudaOptions::default() });
        let cause = RungFailure::NoArena;
        assert_eq!(error, CudaError::NoSuchRung { rung, device: 0, cause });
    }
    let rung = Some(Rung::CudaVirtualMemory);
    drop(CudaDriver::open(CudaOptions { rung, ..CudaOptions::default() }).expect("this one"));
    fake.assert_clean();
}

#[test]
fn handles_are_powers_of_two_of_at_least_the_granularity() {
    let fake = Fake::start(Options { granularity: 0, capacity: 8 << 30, ..LAZY });
    let granularity = ByteSize::mib(2);
    for requested in [ByteSize::ZERO, ByteSize::mib(3), ByteSize::mib(1), ByteSize::MAX] {
        let handle = Some(requested);
        let error = refused(&fake, CudaOptions { handle, ..CudaOptions::default() });
        assert_eq!(error, CudaError::HandleSize { requested, granularity });
    }
    let handle = Some(ByteSize::gib(1));
    let driver = CudaDriver::open(CudaOptions { handle, ..CudaOptions::default() }).expect("large");
    assert_eq!(driver.capabilities().granularity, ByteSize::gib(1));
    drop(driver);
    // More than there is, and more than there are addresses for.
    for handle in [ByteSize::gib(16), ByteSize::new(1 << 63)] {
        let handle = Some(handle);
        let error = cause(refused(&fake, CudaOptions { handle, ..CudaOptions::default() }));
        let RungFailure::Driver(DriverError::OutOfMemory { .. }) = error else { panic!("{error}") };
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
    let error = cause(refused(&fake, CudaOptions { handle, ..CudaOptions::default() }));
    let requested = ByteSize::mib(2);
    let call = "cuMemCreate";
    assert_eq!(error, RungFailure::Driver(DriverError::OutOfMemory { call, requested }));
    drop(CudaDriver::open(CudaOptions::default()).expect("a small handle fits"));
    fake.assert_clean();
}
