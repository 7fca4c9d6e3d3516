//! Memory in segments over the fake driver library, through the driver's own calls.
//!
//! The arena's tests cover its behaviour; these tests cover addresses, limits, shared pools, and
//! the state after a failure.
//!
//! Invariant: a test ends with no recorded fault and no leak.
#![expect(unsafe_code, reason = "segments are released and copied here")]

use std::ptr::NonNull;

use lowtide_fake_cuda::{Fake, Guard, Options};

use super::calls::Calls;
use super::memory::MemoryPool;
use super::{CudaDriver, CudaOptions};
use crate::{Backend, DeviceAddress, Driver as _, DriverError, HostMemory, StreamHandle};
use lowtide_core::bytes::ByteSize;

const UNIT: ByteSize = ByteSize::kib(64);

/// Work completes as late as possible, and addresses are not multiples of a unit.
const LAZY: Options = Options {
    order: 0,
    flags: 0,
    seed: 0,
    capacity: 1 << 30,
    granularity: 4 << 10,
    address_space: 0,
    context_overhead: 0,
    devices: 1,
    driver_version: 12_080,
};

const POOL: CudaOptions = CudaOptions {
    device: super::DeviceChoice::Ordinal(0),
    backend: Some(Backend::CudaPool),
    managed: false,
    handle: Some(UNIT),
    pool_limit: None,
    peers: &[],
    rdma: false,
};
const PLAIN: CudaOptions = CudaOptions { backend: Some(Backend::CudaPlain), ..POOL };
const MANAGED: CudaOptions = CudaOptions { backend: None, managed: true, ..POOL };

fn taken(fake: &Guard) -> u64 {
    fake.numbers(0).taken_bytes + fake.numbers(0).managed_bytes
}

fn units(count: u64) -> ByteSize {
    UNIT.checked_mul(count).expect("little")
}

fn end(driver: &CudaDriver, (at, size): (DeviceAddress, ByteSize)) {
    // SAFETY: a whole segment of the driver, and no work of it is queued.
    unsafe { driver.segment_destroy(at, size) }.expect("released");
}

#[test]
fn segments_begin_at_multiples_of_the_unit_whatever_the_driver_gives() {
    for options in [POOL, PLAIN, MANAGED] {
        let fake = Fake::start(LAZY);
        let driver = CudaDriver::open(options).expect("a device");
        let before = taken(&fake);
        let mut all: Vec<_> = [1, 3, 2, 1, 7]
            .into_iter()
            .map(units)
            .map(|size| (driver.segment_create(size).expect("memory"), size))
            .collect();
        for (at, size) in &all {
            assert!(at.is_multiple_of(UNIT), "{options:?}: {size} at {at}");
            let last = last_byte(*at, *size);
            // SAFETY: the first and the last byte of a segment, which nothing else uses.
            unsafe { driver.copy(*at, last, ByteSize::new(1)) }.expect("there");
        }
        all.sort();
        for pair in all.windows(2) {
            assert!(pair[0].0.get() + pair[0].1.get() <= pair[1].0.get(), "{pair:?}");
        }
        all.into_iter().for_each(|it| end(&driver, it));
        driver.trim().expect("trimmed");
        assert_eq!(taken(&fake), before, "{options:?}");
        assert_eq!(driver.rollback_failures_total(), 0);
        drop(driver);
        fake.validate(0);
        fake.assert_clean();
    }
}

fn last_byte(at: DeviceAddress, size: ByteSize) -> DeviceAddress {
    DeviceAddress::new(at.get() + size.get() - 1)
}

#[test]
fn a_pool_keeps_what_is_freed_until_a_trim_and_plain_memory_goes_at_once() {
    for (options, kept) in [(POOL, 4), (PLAIN, 0), (MANAGED, 0)] {
        let fake = Fake::start(Options { granularity: UNIT.get(), ..LAZY });
        let driver = CudaDriver::open(options).expect("a device");
        let before = taken(&fake);
        let at = driver.segment_create(units(4)).expect("memory");
        // The fake's managed memory is host memory, which may begin at any page. One unit more is
        // allocated for it, unless it happens to begin at a multiple of a unit.
        let most = units(if options == MANAGED { 5 } else { 4 });
        let more = taken(&fake) - before;
        assert!((units(4).get()..=most.get()).contains(&more), "{options:?}: {more}");
        end(&driver, (at, units(4)));
        assert_eq!(taken(&fake), before + units(kept).get());
        // A wait by other code does not release it.
        driver.synchronize().expect("done");
        assert_eq!(taken(&fake), before + units(kept).get());
        driver.trim().expect("trimmed");
        assert_eq!(taken(&fake), before);
        drop(driver);
        fake.assert_clean();
    }
}

#[test]
fn each_rung_says_what_it_cannot_do() {
    let fake = Fake::start(LAZY);
    for options in [POOL, PLAIN, MANAGED] {
        let driver = CudaDriver::open(options).expect("a device");
        let can = driver.capabilities();
        assert!(!(can.virtual_memory || can.remap || can.host_backed));
        assert!(can.asynchronous && can.page_locked);
        assert_eq!((can.granularity, driver.is_managed()), (UNIT, options == MANAGED));
        let (at, size) = (DeviceAddress::new(UNIT.get()), UNIT);
        macro_rules! answer {
            ($call:expr) => {{
                // SAFETY: a driver of segments has no address space: it makes no call of CUDA.
                unsafe { $call }
            }};
        }
        for answer in [
            driver.reserve(size).map(drop),
            answer!(driver.unreserve(at, size)),
            answer!(driver.commit(at, size, size)),
            answer!(driver.decommit(at, size, size)),
            answer!(driver.remap(at, at, size, size)),
        ] {
            assert!(matches!(answer, Err(DriverError::Unsupported { .. })), "{answer:?}");
        }
        for size in [0, 1, UNIT.get() + 1, u64::MAX].map(ByteSize::new) {
            let refused = driver.segment_create(size).expect_err("no such size");
            assert!(matches!(refused, DriverError::Misaligned { .. }), "{size}: {refused}");
        }
        let most = ByteSize::new(u64::MAX - (UNIT.get() - 1));
        let refused = driver.segment_create(most).expect_err("not so much memory");
        let requested = most;
        assert!(
            matches!(refused, DriverError::OutOfMemory { requested: of, .. } if of == requested)
                || matches!(refused, DriverError::Refused { code: 1, .. }),
            "{refused}"
        );
    }
    let driver = CudaDriver::open(CudaOptions { backend: None, ..POOL }).expect("virtual memory");
    let refused = driver.segment_create(UNIT).expect_err("no segments");
    assert!(matches!(refused, DriverError::Unsupported { .. }), "{refused}");
    driver.trim().expect("nothing to do");
    drop(driver);
    fake.assert_clean();
}

#[test]
fn a_pools_limit_holds_where_the_driver_knows_it() {
    for (driver_version, most) in [(12_080, 4), (12_010, 8)] {
        let fake = Fake::start(Options { granularity: UNIT.get(), driver_version, ..LAZY });
        let options = CudaOptions { pool_limit: Some(units(4)), ..POOL };
        let driver = CudaDriver::open(options).expect("a device");
        let mut all = Vec::new();
        let refused =
            (0..8).find_map(|_| driver.segment_create(UNIT).map(|at| all.push((at, UNIT))).err());
        let call = "cuMemAllocFromPoolAsync";
        let beyond = DriverError::OutOfMemory { call, requested: UNIT };
        assert_eq!(refused, (most < 8).then_some(beyond));
        assert_eq!(all.len(), most);
        all.into_iter().for_each(|it| end(&driver, it));
        drop(driver);
        fake.assert_clean();
    }
}

/// Returns the release threshold of the device's default pool.
fn threshold(driver: &CudaDriver) -> u64 {
    let of = |calls: &Calls| calls.pool_bytes(calls.default_pool(0)?, super::table::POOL_THRESHOLD);
    driver.context.call(of).expect("answered")
}

fn set_threshold(driver: &CudaDriver, value: u64) {
    let of = |calls: &Calls| {
        calls.set_pool_bytes(calls.default_pool(0)?, super::table::POOL_THRESHOLD, value)
    };
    driver.context.call(of).expect("set");
}

#[test]
fn the_devices_own_pool_is_used_where_ours_is_refused_and_left_as_it_was() {
    let fake = Fake::start(Options { flags: Options::NO_POOL_CREATE, ..LAZY });
    let other = CudaDriver::open(PLAIN).expect("who looks on");
    for (before, after) in [(0, 0), (12 << 20, 12 << 20), (u64::MAX, u64::MAX)] {
        set_threshold(&other, before);
        let driver = CudaDriver::open(POOL).expect("a device");
        assert!(driver.shares_pool() && format!("{driver:?}").contains("shares_pool: true"));
        assert_eq!(threshold(&other), u64::MAX);
        let at = driver.segment_create(units(2)).expect("memory");
        end(&driver, (at, units(2)));
        assert!(taken(&fake) >= units(2).get());
        driver.trim().expect("trimmed");
        assert_eq!(taken(&fake), 0);
        drop(driver);
        assert_eq!(threshold(&other), after);
    }
    // A value that other code sets meanwhile is kept.
    set_threshold(&other, 0);
    let driver = CudaDriver::open(POOL).expect("a device");
    set_threshold(&other, 5);
    drop(driver);
    assert_eq!(threshold(&other), 5);
    // Two drivers, closed in either order.
    for first in [0, 1] {
        set_threshold(&other, 7);
        let mut both = vec![
            CudaDriver::open(POOL).expect("a device"),
            CudaDriver::open(POOL).expect("another"),
        ];
        drop(both.remove(first));
        drop(both);
        assert_eq!(threshold(&other), 7, "{first} first");
    }
    drop(other);
    fake.assert_clean();
}

#[test]
fn a_segment_that_could_not_be_given_back_is_given_back_later() {
    let names = [(POOL, c"cuMemFreeAsync"), (PLAIN, c"cuMemFree_v2"), (MANAGED, c"cuMemFree_v2")];
    for (options, name) in names {
        let fake = Fake::start(LAZY);
        let driver = CudaDriver::open(options).expect("a device");
        let at = driver.segment_create(units(3)).expect("memory");
        fake.fail(name, 1, 999);
        // SAFETY: a whole segment of the driver, and no work of it is queued.
        unsafe { driver.segment_destroy(at, units(3)) }.expect_err("refused");
        end(&driver, (at, units(3)));
        drop(driver);
        fake.assert_clean();
    }
}

#[test]
fn memory_of_a_pool_that_could_not_be_waited_for_goes_back() {
    let fake = Fake::start(LAZY);
    let driver = CudaDriver::open(POOL).expect("a device");
    for nth in 1..=2 {
        fake.fail(c"cuEventSynchronize", nth, 999);
        // The first address is unaligned, and the second allocation is waited for as well.
        let outcome = driver.segment_create(UNIT);
        fake.forget_failures();
        if let Ok(at) = outcome {
            end(&driver, (at, UNIT));
        }
    }
    assert_eq!((driver.rollback_failures_total(), fake.numbers(0).pooled_live), (0, 0));
    drop(driver);
    fake.assert_clean();
}

#[test]
fn a_pool_whose_threshold_cannot_be_set_is_given_up() {
    let fake = Fake::start(LAZY);
    let driver = CudaDriver::open(PLAIN).expect("a device");
    fake.fail(c"cuMemPoolSetAttribute", 1, 999);
    let made = driver.context.call(|calls| MemoryPool::create(calls, 0, None).map(drop));
    made.expect_err("refused");
    drop(driver);
    fake.assert_clean();
}

/// The bug: copies and waits on this stream were refused, so that each copy of a pinned buffer on its
/// lane left the buffer quarantined.
#[test]
fn the_legacy_default_stream_copies_and_is_waited_for() {
    let fake = Fake::start(LAZY);
    let driver = CudaDriver::open(PLAIN).expect("a device");
    let stream = StreamHandle::LEGACY;
    let (one, two) = (driver.segment_create(UNIT), driver.segment_create(UNIT));
    let (one, two) = (one.expect("memory"), two.expect("memory"));
    let host = driver.host_alloc(UNIT, HostMemory::PageLocked).expect("memory");
    // SAFETY: a byte of memory of this test.
    unsafe { host.write(7) };
    // SAFETY: memory of this test, which stays until the wait below; the stream always exists.
    unsafe { driver.copy_from_host(host, one, UNIT, stream) }.expect("queued");
    // SAFETY: as above.
    unsafe { driver.copy_async(one, two, UNIT, stream) }.expect("queued");
    let last = host.as_ptr().wrapping_add(1);
    let last = NonNull::new(last).expect("not null");
    // SAFETY: as above; one byte at the second one.
    unsafe { driver.copy_to_host(two, last, ByteSize::new(1), stream) }.expect("queued");
    // SAFETY: the stream always exists.
    unsafe { driver.stream_synchronize(stream) }.expect("done");
    // SAFETY: no copy is in progress.
    assert_eq!(unsafe { last.read() }, 7);
    // SAFETY: the whole allocation, with which every copy is complete.
    unsafe { driver.host_free(host, UNIT, HostMemory::PageLocked) }.expect("freed");
    end(&driver, (one, UNIT));
    end(&driver, (two, UNIT));
    drop(driver);
    fake.assert_clean();
}

/// The bug: a driver, and a governor of a pool, made calls of CUDA in a forked child.
#[test]
fn a_forked_child_makes_no_calls() {
    let fake = Fake::start(LAZY);
    let driver = CudaDriver::open(PLAIN).expect("a device");
    let calls = fake.calls_total();
    // SAFETY: the child makes a call that is refused, and ends.
    let child = unsafe { libc::fork() };
    if child == 0 {
        let refused = driver.device_memory() == Err(DriverError::Forked);
        let is_right = refused && fake.calls_total() == calls;
        // SAFETY: ends the child at once.
        unsafe { libc::_exit(i32::from(!is_right)) };
    }
    let mut status = 0;
    // SAFETY: our own child, and a place for its status.
    assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
    assert!(libc::WIFEXITED(status) && libc::WEXITSTATUS(status) == 0, "{status:#x}");
}
