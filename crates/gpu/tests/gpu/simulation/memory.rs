//! Address space and physical memory: reserve, commit, decommit, limits, copies, host memory.

use std::sync::Arc;

use lowtide_cuda_sim::{
    Call, Fault, Order, Outcome, Pattern, Range, SimDriver, SimError, SimOptions, WorkKind,
};
use lowtide_gpu::ByteSize;
use lowtide_gpu::clock::SystemClock;
use lowtide_gpu::driver::{DeviceAddress, Driver as _, DriverError, HostMemory, HostStore};
use lowtide_gpu::{DeviceError, PinnedConfig, PinnedPool};

use super::{GRANULE, code, committed, device, on};

const PATTERN: Pattern = Pattern::new(42);

fn range(at: DeviceAddress, size: ByteSize) -> Range {
    Range { at: at.get(), size: size.get() }
}

#[test]
fn only_whole_granules_are_reserved_and_committed() {
    let sim = device(Order::Lazy);
    for size in [ByteSize::ZERO, ByteSize::new(1), ByteSize::kib(64), ByteSize::mib(3)] {
        let refused = sim.reserve(size);
        assert!(matches!(refused, Err(DriverError::Misaligned { .. })), "{size}: {refused:?}");
    }
    let at = sim.reserve(GRANULE).expect("addresses");
    assert!(at.is_multiple_of(GRANULE));
    let odd = sim.commit(on(at, 4096), GRANULE, GRANULE);
    assert!(matches!(odd, Err(DriverError::Misaligned { .. })), "{odd:?}");
    assert_eq!(sim.calls(Call::Create), 0);
    sim.assert_no_faults();
}

#[test]
fn address_space_runs_out_and_is_given_again() {
    let options = SimOptions { address_space: ByteSize::gib(32), ..SimOptions::default() };
    let sim = SimDriver::new(options);
    let half = ByteSize::gib(16);
    let first = sim.reserve(half).expect("half");
    let requested = ByteSize::gib(32);
    let call = "cuMemAddressReserve";
    assert_eq!(sim.reserve(requested), Err(DriverError::OutOfMemory { call, requested }));
    let second = sim.reserve(half).expect("the other half");
    assert!(sim.reserve(GRANULE).is_err());
    sim.unreserve(first, half).expect("whole and bare");
    assert_eq!(sim.reserve(GRANULE), Ok(first), "the lowest address is given again at once");
    sim.unreserve(second, half).expect("whole and bare");
    assert_eq!(sim.leaks().reserved, GRANULE);
    sim.assert_no_faults();
}

#[test]
fn a_commit_makes_a_handle_for_each_granule_and_sets_access_once() {
    let sim = device(Order::Lazy);
    committed(&sim, 8);
    let calls = [Call::Create, Call::Map, Call::Release, Call::SetAccess, Call::Unmap];
    assert_eq!(calls.map(|call| sim.calls(call)), [8, 8, 8, 1, 0]);
    assert_eq!((sim.leaks().handles, sim.leaks().committed), (8, ByteSize::mib(16)));
}

#[test]
fn any_run_of_whole_handles_is_taken_away_by_a_call_for_each() {
    let sim = device(Order::Lazy);
    let at = committed(&sim, 8);
    sim.decommit(on(at, 3 * GRANULE.get()), ByteSize::mib(4), GRANULE).expect("whole handles");
    sim.commit(on(at, 4 * GRANULE.get()), GRANULE, GRANULE).expect("bare now");
    sim.decommit(at, ByteSize::mib(6), GRANULE).expect("whole handles");
    assert_eq!((sim.calls(Call::Unmap), sim.leaks().handles), (5, 4));
    sim.assert_no_faults();
    sim.validate();
}

#[test]
fn mapping_twice_unmapping_the_bare_and_a_part_of_a_handle_are_refused_and_on_record() {
    let sim = SimDriver::new(SimOptions::default());
    let size = ByteSize::mib(8);
    let at = sim.reserve(size).expect("addresses");
    sim.commit(at, size, size).expect("memory");
    assert_eq!(sim.leaks().handles, 1);
    assert_eq!(code(sim.commit(on(at, GRANULE.get()), GRANULE, GRANULE)), Some(1));
    assert_eq!(code(sim.decommit(at, GRANULE, GRANULE)), Some(1));
    assert_eq!(code(sim.unreserve(at, size)), Some(1));
    assert_eq!(code(sim.unreserve(at, GRANULE)), Some(1));
    let outside = on(at, size.get());
    assert_eq!(code(sim.commit(outside, GRANULE, GRANULE)), Some(1));
    sim.decommit(at, size, size).expect("whole");
    assert_eq!(code(sim.decommit(at, size, size)), Some(1));
    let (twice, part, whole) = (on(at, GRANULE.get()), range(at, GRANULE), range(at, size));
    assert_eq!(
        sim.faults(),
        [
            Fault::DoubleMap(range(twice, GRANULE)),
            Fault::UnmapPart { range: part, handle: whole },
            Fault::UnreserveMapped(whole),
            Fault::NotReserved { call: Call::AddressFree, range: part },
            Fault::NotReserved { call: Call::Map, range: range(outside, GRANULE) },
            Fault::UnmapBare { range: whole, bare: at },
        ]
    );
    sim.unreserve(at, size).expect("bare and whole");
    assert!(sim.leaks().is_empty(), "{:?}", sim.leaks());
}

#[test]
fn a_commit_beyond_the_device_fails_whole_and_neighbours_count() {
    let options = SimOptions {
        capacity: ByteSize::mib(64),
        context_overhead: ByteSize::mib(16),
        ..SimOptions::default()
    };
    let sim = SimDriver::new(options);
    assert_eq!(sim.headroom(), Ok(Some(ByteSize::mib(48))));
    sim.set_neighbours(ByteSize::mib(40));
    let at = sim.reserve(ByteSize::mib(64)).expect("addresses");
    let requested = ByteSize::mib(10);
    let refused = DriverError::OutOfMemory { call: "cuMemCreate", requested };
    assert_eq!(sim.commit(at, requested, GRANULE), Err(refused));
    assert_eq!(sim.leaks().handles, 0);
    assert_eq!(sim.headroom(), Ok(Some(ByteSize::mib(8))));
    sim.commit(at, ByteSize::mib(8), GRANULE).expect("just fits");
    assert_eq!(sim.headroom(), Ok(Some(ByteSize::ZERO)));
    sim.set_neighbours(ByteSize::gib(1)); // they take more than there is
    assert_eq!(sim.headroom(), Ok(Some(ByteSize::ZERO)));
    sim.set_neighbours(ByteSize::ZERO);
    sim.set_capacity(ByteSize::mib(128));
    assert_eq!(sim.headroom(), Ok(Some(ByteSize::mib(104))));
    sim.assert_no_faults();
}

#[test]
fn contents_are_kept_while_committed_and_unspecified_after() {
    let sim = device(Order::Lazy);
    let stream = sim.stream_create().expect("stream");
    let at = committed(&sim, 2);
    let (odd, size) = (on(at, 4097), ByteSize::new(GRANULE.get() + 13));
    sim.fill(stream, odd, size, PATTERN).expect("queued");
    let held = sim.check(stream, odd, size, PATTERN).expect("queued");
    sim.stream_synchronize(stream).expect("done");
    assert_eq!(sim.outcome(held), Outcome::Held);
    sim.decommit(at, ByteSize::mib(4), GRANULE).expect("nothing refers to it");
    sim.commit(at, ByteSize::mib(4), GRANULE).expect("memory");
    let gone = sim.check(stream, odd, size, PATTERN).expect("queued");
    sim.stream_synchronize(stream).expect("done");
    assert!(matches!(sim.outcome(gone), Outcome::Differs { .. }));
    assert_eq!(sim.differences(), 1);
}

#[test]
fn a_decommit_waits_for_nothing_and_the_work_that_comes_later_loses_the_context() {
    let sim = device(Order::Lazy);
    let stream = sim.stream_create().expect("stream");
    let at = committed(&sim, 1);
    let part = ByteSize::kib(1);
    sim.fill(stream, at, part, PATTERN).expect("queued");
    sim.decommit(at, GRANULE, GRANULE).expect("an unmap succeeds all the same");
    assert_eq!((sim.unfinished(), sim.unsafe_unmaps()), (1, 1));
    let lost = DriverError::IllegalAddress { call: "cuStreamSynchronize" };
    assert_eq!(sim.stream_synchronize(stream), Err(lost));
    let work = WorkKind::Fill;
    assert_eq!(
        sim.faults(),
        [
            Fault::UnmapBeforeDone { range: range(at, GRANULE), stream, work },
            Fault::IllegalAddress { stream: Some(stream), work, range: range(at, part), bare: at },
        ]
    );
    assert_eq!(sim.lost(), Some(700));
}

#[test]
fn a_decommit_beside_work_that_refers_to_other_memory_is_no_fault() {
    let sim = device(Order::Lazy);
    let stream = sim.stream_create().expect("stream");
    let at = committed(&sim, 3);
    sim.fill(stream, on(at, GRANULE.get()), GRANULE, PATTERN).expect("queued");
    sim.decommit(at, GRANULE, GRANULE).expect("before it");
    sim.decommit(on(at, 2 * GRANULE.get()), GRANULE, GRANULE).expect("behind it");
    sim.synchronize().expect("done");
    sim.assert_no_faults();
}

#[test]
fn work_on_reserved_memory_that_is_bare_or_on_none_loses_the_context() {
    for bare in [0, 2] {
        let sim = device(Order::Synchronous);
        let stream = sim.stream_create().expect("stream");
        let at = committed(&sim, 1);
        let wrong = if bare == 0 { DeviceAddress::new(64) } else { on(at, bare << 20) };
        let launched = sim.add(stream, wrong, ByteSize::new(1), 1);
        assert_eq!(launched, Err(DriverError::IllegalAddress { call: "cuLaunchKernel" }));
        assert_eq!(sim.faults_total(), 1);
    }
}

#[test]
fn a_copy_waits_for_itself_and_for_no_stream() {
    let sim = device(Order::Lazy);
    let stream = sim.stream_create().expect("stream");
    let at = committed(&sim, 2);
    let (to, size) = (on(at, GRANULE.get() + 1), ByteSize::kib(300));
    sim.fill(stream, at, size, PATTERN).expect("queued");
    sim.copy(at, to, size).expect("copied, too early");
    sim.synchronize().expect("done");
    let early = sim.check(stream, to, size, PATTERN).expect("queued");
    sim.synchronize().expect("done");
    assert!(matches!(sim.outcome(early), Outcome::Differs { .. }));
    sim.copy(at, to, size).expect("copied");
    let late = sim.check(stream, to, size, PATTERN).expect("queued");
    sim.synchronize().expect("done");
    assert_eq!(sim.outcome(late), Outcome::Held);
    let overlap = Err(DriverError::Overlap { from: at, to: on(at, 9), size });
    assert_eq!(sim.copy(at, on(at, 9), size), overlap);
    assert_eq!(sim.copy_async(at, on(at, 9), size, stream), overlap);
    let illegal = sim.copy(at, on(at, 2 * GRANULE.get()), size);
    assert_eq!(illegal, Err(DriverError::IllegalAddress { call: "cuMemcpyDtoD" }));
}

#[test]
fn contents_go_to_a_store_and_come_back_to_the_same_addresses() {
    let sim = device(Order::Lazy);
    let stream = sim.stream_create().expect("stream");
    let (at, size) = (committed(&sim, 2), ByteSize::mib(4));
    let store = sim.host_store_create(size).expect("host memory");
    let written = ByteSize::new(GRANULE.get() + 5);
    sim.fill(stream, on(at, 3), written, PATTERN).expect("queued");
    sim.offload(at, store, stream).expect("queued");
    sim.stream_synchronize(stream).expect("done");
    sim.decommit(at, size, GRANULE).expect("done with");
    sim.commit(at, size, GRANULE).expect("memory");
    sim.restore(store, at, stream).expect("queued");
    let held = sim.check(stream, on(at, 3), written, PATTERN).expect("queued");
    sim.stream_synchronize(stream).expect("done");
    assert_eq!(sim.outcome(held), Outcome::Held);
    sim.host_store_destroy(store).expect("done with");
    sim.assert_no_faults();
    assert_eq!(code(sim.offload(at, store, stream)), Some(400));
}

/// The ring: its buffers are used again and again, and hold what the device wrote only once that
/// is done.
#[test]
fn what_cannot_be_locked_goes_to_a_store_and_comes_back_through_a_small_ring() {
    let orders = [Order::Lazy, Order::Synchronous, Order::Random { seed: 7 }];
    for (order, limit) in orders.into_iter().flat_map(|order| [(order, 0), (order, 5), (order, 8)])
    {
        let sim = device(order);
        // Of a ring of 4 x 2 MiB, this many MiB can be locked.
        sim.set_lock_limit(ByteSize::mib(limit));
        let stream = sim.stream_create().expect("stream");
        let (at, size) = (committed(&sim, 11), ByteSize::mib(22));
        let (taken, offset) = (ByteSize::mib(17), 3 << 20 | 5);
        let store = sim.host_store_create(size).expect("pageable, then");
        let locked = sim.calls(Call::HostAlloc);
        for mark in 1..=2 {
            let span = HostStore { at: store.at + offset, size: taken };
            sim.fill(stream, at, size, Pattern::new(mark)).expect("queued");
            sim.offload(at, span, stream).expect("copied");
            sim.fill(stream, at, size, Pattern::new(99)).expect("queued");
            sim.restore(span, at, stream).expect("queued");
            let held = sim.check(stream, at, taken, Pattern::new(mark)).expect("queued");
            sim.stream_synchronize(stream).expect("done");
            assert_eq!(sim.outcome(held), Outcome::Held, "{order:?}, {limit} MiB locked");
        }
        let beyond = HostStore { at: store.at + offset, size };
        assert_eq!(code(sim.offload(at, beyond, stream)), Some(1), "beyond the store");
        assert_eq!(sim.calls(Call::HostAlloc), locked, "one ring for all copies");
        sim.host_store_destroy(store).expect("done with");
        assert_eq!(sim.leaks().host_blocks, 0, "the ring goes with the last store");
        assert!(sim.faults().iter().all(|fault| matches!(fault, Fault::NotReserved { .. })));
    }
}

/// While the end of its copies is not known, a ring is not used again, and it is freed in the end.
#[test]
fn a_ring_whose_copies_may_still_be_in_progress_is_set_aside() {
    let sim = device(Order::Lazy);
    sim.set_lock_limit(ByteSize::mib(64));
    let stream = sim.stream_create().expect("stream");
    let (at, size) = (committed(&sim, 64), ByteSize::mib(128));
    let store = sim.host_store_create(size).expect("pageable, then");
    for nth in 0..5 {
        let blocks = sim.leaks().host_blocks;
        sim.fail_nth(Some(Call::Offload), 3, SimError::Unknown);
        sim.fail_nth(Some(Call::StreamSynchronize), 0, SimError::Unknown);
        assert!(sim.offload(at, store, stream).is_err());
        sim.forget_failures();
        let more = if nth == 0 || nth == 4 { 0 } else { 4 };
        assert_eq!(sim.leaks().host_blocks, blocks + more, "in attempt {nth}");
    }
    let refused = sim.restore(store, at, stream);
    assert!(matches!(refused, Err(DriverError::OutOfMemory { .. })), "{refused:?}");
    sim.synchronize().expect("done");
    sim.host_store_destroy(store).expect("done with");
    assert_eq!(sim.leaks().host_blocks, 0);
    sim.assert_no_faults();
}

#[test]
fn a_range_beyond_a_store_is_refused_and_a_store_is_not_given_back_before_its_copies() {
    let sim = device(Order::Lazy);
    let stream = sim.stream_create().expect("stream");
    let (at, size) = (committed(&sim, 1), ByteSize::kib(64));
    let store = sim.host_store_create(size).expect("host memory");
    for first in [store.at + 1, store.at + size.get(), u64::MAX] {
        let beyond = HostStore { at: first, size };
        assert_eq!(code(sim.restore(beyond, at, stream)), Some(1), "{first:#x}");
    }
    sim.offload(at, store, stream).expect("queued");
    sim.host_store_destroy(store).expect("it waits for nothing");
    assert_eq!(code(sim.synchronize()), Some(700));
    let work = WorkKind::Offload;
    let (host, faults) = (DeviceAddress::new(store.at), sim.faults());
    let range = Range { at: store.at, size: size.get() };
    assert_eq!(
        faults[3..],
        [
            Fault::HostGoneBeforeDone { at: host, stream, work },
            Fault::IllegalAddress { stream: Some(stream), work, range, bare: host },
        ]
    );
}

#[test]
fn host_memory_has_a_limit_and_page_locking_one_of_its_own() {
    let sim = device(Order::Lazy);
    let size = ByteSize::kib(64);
    sim.set_host_limit(ByteSize::kib(192));
    sim.set_lock_limit(ByteSize::kib(128));
    let store = sim.host_store_create(size).expect("stores are locked");
    let locked = sim.host_alloc(size, HostMemory::PageLocked);
    locked.expect("within the limit");
    let limit = ByteSize::kib(128);
    let refused = Err(DriverError::LockLimit { requested: size, limit });
    assert_eq!(sim.host_alloc(size, HostMemory::PageLocked), refused);
    sim.host_alloc(size, HostMemory::Pageable).expect("within the host's");
    let requested = size;
    let full = DriverError::OutOfMemory { call: "cuMemHostAlloc", requested };
    assert_eq!(sim.host_alloc(size, HostMemory::Pageable), Err(full.clone()));
    assert_eq!(sim.host_store_create(size).map(drop), Err(full));
    assert_eq!((sim.leaks().host_blocks, sim.leaks().host_stores), (2, 1));
    sim.host_store_destroy(store).expect("nothing refers to it");
    for size in [ByteSize::ZERO, ByteSize::new(1)] {
        let refused = sim.host_store_create(size);
        assert!(matches!(refused, Err(DriverError::Misaligned { .. })), "{refused:?}");
    }
}

#[test]
fn what_the_device_does_not_offer_is_a_typed_error() {
    let options = SimOptions { virtual_memory: false, page_locked: false, ..SimOptions::default() };
    let sim = SimDriver::new(options);
    let can = sim.capabilities();
    assert!(!can.virtual_memory && !can.page_locked);
    assert!(!can.host_access && !can.host_backed && can.asynchronous);
    let what = "cuMemAddressReserve";
    assert_eq!(sim.reserve(GRANULE), Err(DriverError::Unsupported { what }));
    let what = "cuMemHostAlloc";
    let refused = sim.host_alloc(ByteSize::kib(64), HostMemory::PageLocked);
    assert_eq!(refused, Err(DriverError::Unsupported { what }));
    let store = sim.host_store_create(ByteSize::kib(64)).expect("pageable, then");
    sim.host_store_destroy(store).expect("nothing refers to it");
    sim.host_alloc(ByteSize::kib(64), HostMemory::Pageable).expect("pageable is there");
    assert_eq!(sim.host_pointer(DeviceAddress::new(1 << 36)), None);
}

#[test]
fn neighbouring_reservations_are_not_one_range() {
    let sim = device(Order::Lazy);
    let (first, second) = (committed(&sim, 2), committed(&sim, 2));
    assert_eq!(second, on(first, ByteSize::mib(4).get()));
    let (across, size) = (on(first, GRANULE.get()), ByteSize::mib(4));
    assert_eq!(code(sim.decommit(across, size, GRANULE)), Some(1));
    sim.decommit(across, GRANULE, GRANULE).expect("in the first");
    sim.decommit(second, GRANULE, GRANULE).expect("in the second");
    assert_eq!(code(sim.commit(across, size, GRANULE)), Some(1));
    let refused = |call| Fault::NotReserved { call, range: range(across, size) };
    assert_eq!(sim.faults(), [refused(Call::Unmap), refused(Call::Map)]);
    assert_eq!(sim.leaks().handles, 2);
}

#[test]
fn a_pinned_pool_lives_on_the_simulation_and_meets_its_failures() {
    let sim = Arc::new(device(Order::Lazy));
    let (clock, config) = (Arc::new(SystemClock::new()), PinnedConfig::new("test"));
    let pool = PinnedPool::open(sim.clone(), clock, config).expect("a driver");
    let buffer = pool.alloc_from(&[7_u8; 1000]).expect("host memory");
    assert_eq!((buffer.to_vec(), sim.leaks().host_blocks), (Ok(vec![7; 1000]), 1));
    sim.lose_context();
    let refused = pool.alloc::<u8>(1 << 30).map(|buffer| buffer.len());
    let Err(DeviceError::Driver(error)) = refused else { panic!("{refused:?}") };
    assert!(error.is_context_lost(), "{error}");
    assert_eq!(buffer.to_vec(), Ok(vec![7; 1000]), "host memory outlives the context");
}
