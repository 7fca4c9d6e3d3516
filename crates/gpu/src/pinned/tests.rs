//! Tests of the pool over a watched driver: watermarks, failures at every call, held calls, limits.
//!
//! The driver locks no page, so that these tests pass under any `ulimit -l`. Page-locking by the
//! kernel is tested in a separate process.

use std::sync::Arc;

use super::*;
use crate::Bound;
use crate::driver::{Driver as _, DriverError};
use lowtide_core::clock::SystemClock;
use lowtide_cuda_sim::trial::{Failure, FaultInjectingDriver};

mod cu_arena;
mod random;
mod refused;
mod threads;

const GRANULE: ByteSize = ByteSize::kib(64);

/// Returns a configuration with segments of 1 MiB; more than 3 MiB idle shrinks to 1 MiB.
fn config(limit: ByteSize) -> PinnedConfig {
    PinnedConfig {
        limit,
        segment: ByteSize::mib(1),
        high_watermark: ByteSize::mib(3),
        low_watermark: ByteSize::mib(1),
        ..PinnedConfig::new("trial")
    }
}

fn open_with(config: PinnedConfig) -> (PinnedPool, Arc<FaultInjectingDriver>) {
    let driver = Arc::new(FaultInjectingDriver::new());
    (open_over(driver.clone(), config).expect("open"), driver)
}

fn open_over(
    driver: Arc<FaultInjectingDriver>,
    config: PinnedConfig,
) -> Result<PinnedPool, DeviceError> {
    PinnedPool::open(driver, Arc::new(SystemClock::new()), config)
}

fn open(limit: ByteSize) -> (PinnedPool, Arc<FaultInjectingDriver>) {
    open_with(config(limit))
}

fn bytes(pool: &PinnedPool, size: ByteSize) -> Result<PinnedBuffer<u8>, DeviceError> {
    pool.alloc(size.as_usize().expect("fits"))
}

fn mib(pool: &PinnedPool, mib: u64) -> PinnedBuffer<u8> {
    bytes(pool, ByteSize::mib(mib)).expect("room")
}

/// Checks that the state, the driver and the snapshot agree.
fn check(pool: &PinnedPool, driver: &FaultInjectingDriver) {
    pool.validate();
    driver.assert_no_faults();
    assert_eq!(driver.host_memory().0, pool.snapshot().arena.committed);
}

#[test]
fn idle_memory_stays_below_the_high_watermark_and_goes_down_to_the_low_one_above_it() {
    let (pool, driver) = open(ByteSize::MAX);
    let idle = || pool.glance().idle;
    let mut kept: Vec<_> = (0..4).map(|_| mib(&pool, 1)).collect();
    assert_eq!(driver.host_memory().1, 4);
    kept.truncate(1);
    assert_eq!((idle(), pool.maintain()), (ByteSize::mib(3), Ok(ByteSize::ZERO)), "at the mark");
    kept.clear();
    assert_eq!(idle(), ByteSize::mib(4), "a drop gives nothing back");
    assert_eq!(driver.host_memory().1, 4);
    assert_eq!(pool.maintain(), Ok(ByteSize::mib(3)));
    check(&pool, &driver);
    let calls = driver.calls();
    // Between the watermarks it neither releases nor allocates.
    for _ in 0..100 {
        let one = mib(&pool, 1);
        drop(one);
        assert_eq!(pool.maintain(), Ok(ByteSize::ZERO));
    }
    assert_eq!((driver.calls(), idle()), (calls, ByteSize::mib(1)));
    // A free above the high watermark releases immediately.
    let four: Vec<_> = (0..4).map(|_| mib(&pool, 1)).collect();
    let given: Vec<_> = four.into_iter().map(|buffer| buffer.free().expect("freed")).collect();
    let mibs = [0, 0, 0, 3].map(ByteSize::mib);
    assert_eq!((given.as_slice(), idle()), (mibs.as_slice(), ByteSize::mib(1)));
    check(&pool, &driver);
}

#[test]
fn what_stays_idle_is_what_fits_under_the_low_watermark() {
    let low = PinnedConfig { low_watermark: ByteSize::mib(3), ..config(ByteSize::MAX) };
    let (pool, driver) = open_with(low);
    drop([mib(&pool, 8), mib(&pool, 2), mib(&pool, 5), mib(&pool, 1)]);
    assert_eq!(pool.maintain(), Ok(ByteSize::mib(13)), "2 + 1 MiB fit, 8 and 5 do not");
    assert_eq!(pool.trim(ByteSize::mib(2)), Ok(ByteSize::mib(1)));
    let held = mib(&pool, 1);
    assert_eq!(pool.trim(ByteSize::ZERO), Ok(ByteSize::ZERO), "a live block keeps its segment");
    drop(held);
    assert_eq!(pool.purge(), Ok(ByteSize::mib(2)));
    check(&pool, &driver);
}

#[test]
fn watermarks_that_cross_are_refused_with_their_numbers() {
    let (low_watermark, high_watermark) = (ByteSize::mib(2), ByteSize::mib(1));
    let crossed = PinnedConfig { low_watermark, high_watermark, ..config(ByteSize::MAX) };
    let refused = open_over(Arc::new(FaultInjectingDriver::new()), crossed).expect_err("crossed");
    assert_eq!(refused, DeviceError::Watermarks { low: low_watermark, high: high_watermark });
}

#[test]
fn small_buffers_share_a_segment_and_large_ones_have_their_own_made_to_measure() {
    let (pool, driver) = open(ByteSize::MAX);
    let small: Vec<_> = (0..100).map(|_| bytes(&pool, ByteSize::kib(10)).expect("room")).collect();
    assert_eq!(pool.glance().committed, ByteSize::mib(1));
    let large = bytes(&pool, ByteSize::new((5 << 20) + 1)).expect("room");
    assert_eq!(pool.glance().committed, ByteSize::mib(6).saturating_add(GRANULE));
    drop((small, large));
    check(&pool, &driver);
}

#[test]
fn a_small_pool_is_not_held_by_one_small_buffer() {
    let big = PinnedConfig { segment: ByteSize::mib(64), ..config(ByteSize::mib(4)) };
    let (pool, driver) = open_with(big);
    let small = bytes(&pool, ByteSize::new(1)).expect("room");
    assert_eq!(pool.glance().committed, ByteSize::kib(512), "an eighth of the limit");
    let rest = bytes(&pool, ByteSize::kib(3584)).expect("the rest of the limit");
    drop((small, rest));
    check(&pool, &driver);
}

#[test]
fn idle_segments_make_room_under_the_limit_before_an_allocation_fails() {
    let (pool, driver) = open(ByteSize::mib(8));
    let held = mib(&pool, 2);
    drop([mib(&pool, 3), mib(&pool, 2)]);
    let six = mib(&pool, 6);
    check(&pool, &driver);
    assert_eq!(pool.glance().committed, ByteSize::mib(8));
    let refused = bytes(&pool, ByteSize::mib(1)).expect_err("full");
    let (requested, live) = (ByteSize::mib(1), ByteSize::mib(8));
    let none = ByteSize::ZERO;
    let expected = DeviceError::OutOfMemory {
        arena: pool.name().into(),
        requested,
        live,
        active: live,
        committed: live,
        limit: live,
        bound: Bound::Limit,
        holes: none,
        largest_free: none,
        recoverable: none,
    };
    assert_eq!(refused, expected);
    assert_eq!(pool.snapshot().arena.alloc_failures_limit_total, 1);
    drop((held, six));
    check(&pool, &driver);
}

#[test]
fn a_limit_may_change_while_buffers_live() {
    let (pool, driver) = open(ByteSize::mib(2));
    let held = mib(&pool, 2);
    assert!(bytes(&pool, GRANULE).is_err());
    pool.set_limit(ByteSize::mib(3));
    drop(mib(&pool, 1));
    pool.set_limit(ByteSize::mib(1));
    assert_eq!((held.len(), pool.limit()), (2 << 20, ByteSize::mib(1)));
    assert!(bytes(&pool, ByteSize::mib(2)).is_err(), "above the limit");
    // The memory may be handed out again, and no more is allocated.
    drop(mib(&pool, 1));
    check(&pool, &driver);
    drop(held);
    assert_eq!(pool.purge(), Ok(ByteSize::mib(3)));
    pool.set_limit(ByteSize::kib(63));
    let refused = bytes(&pool, ByteSize::new(1)).expect_err("less than a granule");
    assert!(matches!(refused, DeviceError::OutOfMemory { .. }), "{refused}");
    check(&pool, &driver);
}

#[test]
fn a_buffer_has_a_segment_of_its_size_where_the_host_has_no_larger_piece() {
    let (pool, driver) = open(ByteSize::MAX);
    driver.set_host_limit(ByteSize::kib(320));
    let buffer = bytes(&pool, ByteSize::kib(70)).expect("less than a segment");
    assert_eq!(pool.glance().committed, ByteSize::kib(128));
    let refused = bytes(&pool, ByteSize::kib(200)).expect_err("no more");
    assert!(matches!(refused, DeviceError::OutOfMemory { bound: Bound::Driver, .. }), "{refused}");
    assert_eq!(pool.snapshot().arena.alloc_failures_device_total, 1);
    drop(buffer);
    // The idle segment is released to make room for a larger one.
    let larger = bytes(&pool, ByteSize::kib(257)).expect("after the idle one is given back");
    drop(larger);
    check(&pool, &driver);
}

#[test]
fn a_lock_limit_is_a_typed_error_and_never_a_silent_pageable_buffer() {
    let (pool, driver) = open(ByteSize::MAX);
    driver.set_lock_limit(ByteSize::mib(2));
    let held = mib(&pool, 2);
    assert_eq!(held.memory(), Some(HostMemory::PageLocked));
    let refused = bytes(&pool, GRANULE).expect_err("no more may be locked");
    let (requested, limit) = (GRANULE, ByteSize::mib(2));
    assert_eq!(refused, DeviceError::Driver(DriverError::LockLimit { requested, limit }));
    assert!(refused.is_out_of_memory());
    assert_eq!(pool.snapshot().arena.alloc_failures_device_total, 1);
    assert_eq!(pool.snapshot().pageable, ByteSize::ZERO);
    drop(held);
    drop(mib(&pool, 1)); // in the idle segment
    let larger = bytes(&pool, ByteSize::kib(1500)).expect("half of what may be locked is idle");
    drop(larger);
    // A shortage that is not caused by locking is no lock limit.
    driver.set_host_limit(ByteSize::mib(1));
    pool.purge().expect("nothing is live");
    let refused = bytes(&pool, ByteSize::kib(1500)).expect_err("the host has no more");
    assert!(matches!(refused, DeviceError::OutOfMemory { bound: Bound::Driver, .. }), "{refused}");
    check(&pool, &driver);
}

#[test]
fn a_fall_back_to_pageable_memory_is_asked_for_by_name_and_shown() {
    let kind = PinnedKind::PageLockedOrPageable;
    let (pool, driver) = open_with(PinnedConfig { kind, ..config(ByteSize::MAX) });
    driver.set_lock_limit(ByteSize::mib(2));
    let locked = mib(&pool, 2);
    let pageable = mib(&pool, 2);
    assert_eq!(locked.memory(), Some(HostMemory::PageLocked));
    assert_eq!(pageable.memory(), Some(HostMemory::Pageable));
    let snapshot = pool.snapshot();
    assert_eq!((snapshot.page_locked, snapshot.pageable), (ByteSize::mib(2), ByteSize::mib(2)));
    assert_eq!((snapshot.fallbacks_total, snapshot.kind), (1, kind));
    drop((locked, pageable));
    assert_eq!(mib(&pool, 2).memory(), Some(HostMemory::PageLocked), "the better one first");
    check(&pool, &driver);
}

#[test]
fn a_driver_without_page_locking_is_refused_at_open_unless_pageable_will_do() {
    let mut driver = FaultInjectingDriver::new();
    driver.capabilities.page_locked = false;
    let driver = Arc::new(driver);
    let backend = driver.backend();
    let refused = open_over(driver.clone(), config(ByteSize::MAX)).expect_err("refused");
    assert_eq!(refused, DeviceError::Unsupported { what: "page-locked memory", backend });
    for kind in [PinnedKind::PageLockedOrPageable, PinnedKind::Pageable] {
        let with = PinnedConfig { kind, ..config(ByteSize::MAX) };
        let pool = open_over(driver.clone(), with).expect("opens");
        assert_eq!(mib(&pool, 1).memory(), Some(HostMemory::Pageable));
    }
}

#[test]
fn a_pool_closes_only_without_live_blocks_and_then_allocates_no_more() {
    let (pool, driver) = open(ByteSize::MAX);
    let (held, other) = (mib(&pool, 1), pool.clone());
    let error = pool.close().expect_err("a block is live");
    let arena = || "trial".to_owned();
    let (count, bytes_live) = (1, ByteSize::mib(1));
    assert_eq!(error, DeviceError::LiveBlocks { arena: arena(), count, bytes: bytes_live });
    drop(mib(&pool, 1)); // usable as before
    drop(held);
    driver.fail(Failure { nth: driver.calls(), out_of_memory: false });
    let error = pool.close().expect_err("a trial");
    assert!(matches!(error, DeviceError::Driver(DriverError::Refused { .. })), "{error}");
    assert_eq!(bytes(&other, GRANULE).expect_err("closed"), DeviceError::Closed { arena: arena() });
    check(&other, &driver);
    // The end of the pool frees the segments that the driver refused to free.
    drop((pool, other));
    assert_eq!(driver.host_memory(), (ByteSize::ZERO, 0));
}

#[test]
fn a_block_that_a_device_may_use_for_ever_is_neither_reused_nor_freed() {
    let (pool, driver) = open(ByteSize::MAX);
    let (mut unproven, other) = (mib(&pool, 1), mib(&pool, 2));
    let at = unproven.start;
    unproven.device_use = DeviceUse::Unproven;
    drop((unproven, other));
    let snapshot = pool.snapshot();
    assert_eq!((snapshot.live(), snapshot.quarantined), (ByteSize::ZERO, ByteSize::mib(1)));
    assert_eq!(pool.purge(), Ok(ByteSize::mib(2)), "all but its segment");
    let (arena, count, bytes) = ("trial".to_owned(), 1, ByteSize::mib(1));
    assert_eq!(pool.close(), Err(DeviceError::LiveBlocks { arena, count, bytes }));
    let others = [mib(&pool, 1), mib(&pool, 1)];
    assert!(others.iter().all(|buffer| buffer.start != at), "not reused");
    drop(others);
    check(&pool, &driver);
    drop(pool);
    assert_eq!(driver.host_memory(), (ByteSize::mib(1), 1), "the others are freed");
}

#[test]
fn buffers_keep_the_pool_alive_and_the_last_one_gives_everything_back() {
    let (pool, driver) = open(ByteSize::MAX);
    let mut buffer = pool.alloc_from(&[7_u32; 100]).expect("room");
    drop(pool);
    buffer.resize(1 << 20).expect("the pool is there");
    assert_eq!(buffer.elements()[99], 7);
    drop(buffer);
    driver.assert_no_faults();
    assert_eq!(driver.host_memory(), (ByteSize::ZERO, 0));
}

#[test]
fn a_resize_that_fails_keeps_the_buffer_as_it_was() {
    let (pool, driver) = open(ByteSize::mib(2));
    let mut buffer = pool.alloc_from(&[9_u8; 1000]).expect("room");
    let start = buffer.start.as_ptr();
    assert!(buffer.resize(2 << 20).expect_err("above the limit").is_out_of_memory());
    let overflow = buffer.resize(usize::MAX).expect_err("no such length");
    assert!(matches!(overflow, DeviceError::TooLarge { .. }), "{overflow}");
    assert_eq!((buffer.start.as_ptr(), buffer.elements()), (start, &[9_u8; 1000][..]));
    check(&pool, &driver);
    buffer.resize(1024).expect("the block has room");
    assert_eq!(buffer.start.as_ptr(), start);
    assert_eq!((buffer.len(), buffer.elements()[999]), (1024, 9));
    let behind = bytes(&pool, ByteSize::new(256)).expect("room");
    buffer.resize(100).expect("smaller");
    assert_eq!((buffer.start.as_ptr(), pool.snapshot().live()), (start, ByteSize::new(512)));
    buffer.resize(1024).expect("what it left is free");
    assert_eq!((buffer.start.as_ptr(), buffer.elements()[99]), (start, 9));
    buffer.resize(2048).expect("elsewhere: a block stands behind it");
    assert_ne!(buffer.start.as_ptr(), start);
    assert_eq!(buffer.elements()[..100], [9_u8; 100]);
    drop(behind);
    check(&pool, &driver);
    buffer.resize(0).expect("given up");
    assert_eq!((buffer.len(), pool.snapshot().live()), (0, ByteSize::ZERO));
    buffer.resize(10).expect("from nothing");
    assert_eq!(pool.snapshot().arena.requested, ByteSize::new(10));
    check(&pool, &driver);
}

#[test]
fn sizes_that_no_memory_has_are_typed_errors_with_their_numbers() {
    let (pool, driver) = open(ByteSize::MAX);
    let (len, element) = (usize::MAX, ByteSize::new(8));
    let largest = ByteSize::new(1 << 62);
    let refused = pool.alloc::<u64>(len).expect_err("overflows");
    assert_eq!(refused, DeviceError::TooLarge { len, element, largest });
    let refused = pool.alloc::<u8>((1 << 62) + 1).expect_err("no slice is as long");
    assert!(matches!(refused, DeviceError::TooLarge { .. }), "{refused}");
    assert_eq!(pool.snapshot().arena.alloc_failures_addresses_total, 2);
    let refused = pool.alloc::<u8>(1 << 62).expect_err("no machine has so much");
    assert!(refused.is_out_of_memory(), "{refused}");
    drop(mib(&pool, 1));
    check(&pool, &driver);
}

#[test]
fn elements_without_bytes_take_no_block() {
    let (pool, driver) = open(ByteSize::ZERO);
    let mut none = pool.alloc::<u64>(0).expect("nothing to obtain");
    assert!(none.is_empty() && none.memory().is_none() && none.resize(0).is_ok());
    let units = pool.alloc::<()>(usize::MAX).expect("nothing to obtain");
    assert_eq!((units.len(), units.bytes()), (usize::MAX, ByteSize::ZERO));
    assert_eq!(driver.calls(), 0);
    check(&pool, &driver);
}

/// Performs every kind of act once, and continues after each failure. Validates after each act.
fn scenario(driver: &Arc<FaultInjectingDriver>) {
    let pool = open_over(driver.clone(), config(ByteSize::mib(8))).expect("open");
    let mut kept: Vec<PinnedBuffer<u8>> = Vec::new();
    for kib in [100, 3000, 2000, 200] {
        kept.extend(bytes(&pool, ByteSize::kib(kib)));
        check(&pool, driver);
    }
    kept.truncate(1);
    check(&pool, driver);
    // Needs the idle memory: the limit is reached on the way.
    kept.extend(bytes(&pool, ByteSize::mib(6)));
    check(&pool, driver);
    if let Some(first) = kept.first_mut() {
        first.fill(0x5A).expect("no copy");
        let len = first.len();
        let _ = first.resize(1 << 20);
        assert!(first.elements()[..len.min(first.len())].iter().all(|&byte| byte == 0x5A));
    }
    check(&pool, driver);
    kept.clear();
    let _ = pool.maintain();
    check(&pool, driver);
    kept.extend(bytes(&pool, ByteSize::mib(2)));
    let _ = pool.trim(ByteSize::mib(3));
    check(&pool, driver);
    kept.extend((0..4).filter_map(|_| bytes(&pool, ByteSize::mib(1)).ok()));
    for buffer in kept.drain(..) {
        let _ = buffer.free();
        check(&pool, driver);
    }
    kept.extend(bytes(&pool, ByteSize::mib(3)));
    kept.clear();
    let _ = pool.close();
    check(&pool, driver);
}

#[test]
fn a_failure_at_any_driver_call_leaves_the_books_right() {
    let whole = Arc::new(FaultInjectingDriver::new());
    scenario(&whole);
    let calls = whole.calls();
    assert!(calls > 10, "only {calls} calls: the scenario is too tame");
    for out_of_memory in [false, true] {
        for nth in 0..calls {
            println!("call {nth} fails, out of memory: {out_of_memory}");
            let driver = Arc::new(FaultInjectingDriver::new());
            driver.fail(Failure { nth, out_of_memory });
            scenario(&driver);
            driver.assert_no_faults();
            assert_eq!(driver.host_memory(), (ByteSize::ZERO, 0));
        }
    }
}

#[test]
fn a_block_is_placed_in_the_smallest_idle_segment_so_that_larger_ones_can_go() {
    let (pool, driver) = open(ByteSize::MAX);
    drop([mib(&pool, 8), mib(&pool, 2), mib(&pool, 5)]);
    let small = bytes(&pool, ByteSize::mib(1)).expect("room");
    assert_eq!(pool.purge(), Ok(ByteSize::mib(13)));
    // A second buffer goes into the segment of the first.
    drop(bytes(&pool, ByteSize::mib(1)).expect("room"));
    assert_eq!(driver.host_memory().1, 1);
    drop(small);
    check(&pool, &driver);
}
