//! An arena beside streams, over the simulation: what is reused when, and what is never unmapped
//! too early.
//!
//! The simulation does nothing until something waits for it, or in an order of its own choice: a
//! wait that is missing here is seen each time, as a range that holds something else.

#![expect(unsafe_code, reason = "a lane is of a stream that the caller vouches for")]

mod batches;
mod bugs;
mod capture;
mod ends;
mod events;
mod fronts;
mod onnxruntime;
mod patterns;
mod raw;

use std::sync::Arc;

use lowtide_cuda_sim::{
    Call, DriverCosts, Order, Outcome, Pattern, SimDriver, SimError, SimOptions, Ticket,
};
use lowtide_gpu::ByteSize;
use lowtide_gpu::clock::Clock as _;
use lowtide_gpu::decay::DecayTime;
use lowtide_gpu::driver::{DeviceAddress, Driver as _, StreamHandle};
use lowtide_gpu::{ArenaConfig, Buffer, CompactOptions, DeviceArena, DeviceError, Lane, Region};

use crate::planned::counting::allocations;

const DYNAMIC: Region = Region::Dynamic;
const GRANULE: ByteSize = ByteSize::mib(2);
const MIB: usize = 1 << 20;

/// An arena of this limit over a device whose calls cost nothing.
fn open(order: Order, limit: ByteSize) -> (DeviceArena, Arc<SimDriver>) {
    let costs = DriverCosts::zero();
    let options = SimOptions { order, costs, ..SimOptions::default() };
    let sim = Arc::new(SimDriver::new(options));
    let config = ArenaConfig { limit, reserve: ByteSize::gib(64), ..ArenaConfig::new("streams") };
    let arena = DeviceArena::open(sim.clone(), Arc::new(sim.clock()), config);
    (arena.expect("open"), sim)
}

fn lane(arena: &DeviceArena, sim: &SimDriver) -> Lane {
    lane_of(arena, sim.stream_create().expect("a stream"))
}

fn lane_of(arena: &DeviceArena, stream: StreamHandle) -> Lane {
    // SAFETY: the simulation looks whether a stream is there.
    unsafe { arena.lane(stream) }.expect("a lane")
}

/// Returns the address of a buffer.
fn at(buffer: &Buffer<u8>) -> DeviceAddress {
    let lease = buffer.enter().expect("a lease");
    buffer.address(&lease).expect("ours").expect("not empty")
}

/// Work on a stream: writes a buffer, and has it checked after that.
fn fill(sim: &SimDriver, stream: StreamHandle, buffer: &Buffer<u8>, mark: u64) -> Ticket {
    let pattern = Pattern::new(mark);
    sim.fill(stream, at(buffer), buffer.bytes(), pattern).expect("queued");
    sim.check(stream, at(buffer), buffer.bytes(), pattern).expect("queued")
}

fn assert_sound(sim: &SimDriver, checks: &[Ticket]) {
    sim.run_all();
    for &check in checks {
        assert_eq!(sim.outcome(check), Outcome::Held);
    }
    sim.assert_no_faults();
    assert_eq!(sim.unsafe_unmaps(), 0);
}

/// A map showed such a block as free space, on granules that could be released.
#[test]
fn a_map_shows_a_freed_block_that_the_device_may_still_use_as_pending() {
    let (arena, sim) = open(Order::Lazy, ByteSize::mib(64));
    let lane = lane(&arena, &sim);
    let kept = lane.alloc::<u8>(MIB, DYNAMIC).expect("room");
    let freed = lane.alloc::<u8>(8 * MIB, DYNAMIC).expect("room");
    let check = fill(&sim, lane.stream(), &freed, 1);
    drop(freed);
    let (map, snapshot) = (arena.occupancy(64), arena.snapshot());
    let sum = |of: usize| {
        map.iter().flat_map(|region| &region.cells).map(|(_, sums)| sums[of]).sum::<ByteSize>()
    };
    assert_eq!([sum(0), sum(1)], [MIB, 8 * MIB].map(ByteSize::of));
    assert_eq!([snapshot.live, snapshot.pending], [MIB, 8 * MIB].map(ByteSize::of));
    assert_eq!((sum(2), sum(3)), (snapshot.active, snapshot.idle));
    assert_sound(&sim, &[check]);
    drop(kept);
}

#[test]
fn a_lane_takes_what_it_freed_at_once_and_the_driver_hears_nothing_of_it() {
    let (arena, sim) = open(Order::Lazy, ByteSize::mib(64));
    let lane = lane(&arena, &sim);
    let mut checks = Vec::new();
    let first = lane.alloc::<u8>(8 * MIB, DYNAMIC).expect("room");
    let place = at(&first);
    drop(first);
    let before = sim.calls_total();
    for turn in 0..1_000 {
        let buffer = lane.alloc::<u8>(8 * MIB, DYNAMIC).expect("room");
        assert_eq!(at(&buffer), place);
        if turn % 100 == 0 {
            let queued = sim.calls_total();
            checks.push(fill(&sim, lane.stream(), &buffer, turn));
            assert_eq!(sim.calls_total() - queued, 2);
        }
    }
    assert_eq!(sim.calls_total() - before, 20, "launches, and nothing else");
    let snapshot = arena.snapshot();
    assert_eq!((snapshot.live, snapshot.cached), (ByteSize::ZERO, ByteSize::mib(8)));
    assert_eq!((snapshot.active, snapshot.pending), (ByteSize::mib(8), ByteSize::ZERO));
    assert_eq!((snapshot.allocs_total, snapshot.frees_total), (1_001, 1_001));
    arena.validate();
    assert_sound(&sim, &checks);
}

/// The bug: the control loop read arenas by a glance, which copied the list of lanes in each tick.
#[test]
fn figures_for_the_control_loop_were_allocated_once_an_arena_had_lanes() {
    let (arena, sim) = open(Order::Lazy, ByteSize::mib(64));
    let lane = lane(&arena, &sim);
    drop(lane.alloc::<u8>(4 * MIB, DYNAMIC).expect("room"));
    let mut figures = None;
    let made = allocations(|| figures = Some(arena.control_figures()));
    let ((sizes, due), glance) = (figures.expect("read"), arena.glance());
    assert_eq!(made, 0);
    assert_eq!(sizes, [glance.committed, glance.idle]);
    assert_eq!(due, [arena.next_decay(), arena.next_sleep()]);
    assert!(sizes[0] > ByteSize::ZERO);
}

#[test]
fn another_lane_waits_in_its_stream_for_what_it_takes() {
    let (arena, sim) = open(Order::Lazy, ByteSize::mib(8));
    let (one, two) = (lane(&arena, &sim), lane(&arena, &sim));
    let mut checks = Vec::new();
    let buffer = one.alloc::<u8>(8 * MIB, DYNAMIC).expect("room");
    checks.push(fill(&sim, one.stream(), &buffer, 1));
    drop(buffer);
    let buffer = two.alloc::<u8>(8 * MIB, DYNAMIC).expect("the other's");
    assert_eq!((sim.calls(Call::EventRecord), sim.calls(Call::StreamWaitEvent)), (1, 1));
    checks.push(fill(&sim, two.stream(), &buffer, 2));
    assert!(sim.unfinished() > 0, "nobody waited but the stream");
    drop(buffer);
    // What it waits for already it does not wait for again.
    for _ in 0..10 {
        drop(two.alloc::<u8>(8 * MIB, DYNAMIC).expect("room"));
    }
    assert_eq!(sim.calls(Call::StreamWaitEvent), 1);
    sim.stream_synchronize(two.stream()).expect("done");
    assert_sound(&sim, &checks);
}

#[test]
fn a_use_on_another_stream_is_waited_for_as_well() {
    let (arena, sim) = open(Order::Lazy, ByteSize::mib(8));
    let (one, two) = (lane(&arena, &sim), lane(&arena, &sim));
    let mut buffer = one.alloc::<u8>(8 * MIB, DYNAMIC).expect("room");
    buffer.record_use(&two).expect("of this arena");
    buffer.record_use(&two).expect("twice is once");
    let check = fill(&sim, two.stream(), &buffer, 7);
    drop(buffer);
    // Its own lane must wait for the other.
    let buffer = one.alloc::<u8>(8 * MIB, DYNAMIC).expect("room");
    assert_eq!(sim.calls(Call::StreamWaitEvent), 1);
    let other = fill(&sim, one.stream(), &buffer, 8);
    assert_sound(&sim, &[check, other]);
    let (elsewhere, _) = open(Order::Lazy, ByteSize::mib(8));
    let foreign = lane(&elsewhere, &sim);
    let mut buffer = buffer;
    assert!(matches!(buffer.record_use(&foreign), Err(DeviceError::ForeignLane { .. })));
    // It spoke of a buffer, where there was none.
    let refused = buffer.enter().expect("a lease").record_use(&foreign).expect_err("not ours");
    assert_eq!(
        refused.to_string(),
        "lane of arena \"streams\" used with a buffer or lease of arena \"streams\""
    );
}

#[test]
fn memory_leaves_only_when_the_host_has_seen_that_its_uses_are_complete() {
    let (arena, sim) = open(Order::Lazy, ByteSize::mib(64));
    let lane = lane(&arena, &sim);
    let buffer = lane.alloc::<u8>(32 * MIB, DYNAMIC).expect("room");
    let check = fill(&sim, lane.stream(), &buffer, 1);
    drop(buffer);
    assert_eq!(arena.purge(), Ok(ByteSize::ZERO), "the device is at work on it");
    assert_eq!(sim.calls(Call::EventRecord), 1);
    sim.run_all();
    assert_eq!(arena.purge(), Ok(ByteSize::mib(32)));
    assert_eq!(arena.snapshot().committed, ByteSize::ZERO);
    assert_sound(&sim, &[check]);
}

#[test]
fn an_idle_arena_gives_all_back_though_its_streams_say_nothing() {
    let (arena, sim) = open(Order::Lazy, ByteSize::mib(64));
    arena.set_decay(DecayTime::Within(std::time::Duration::from_secs(10)));
    let lane = lane(&arena, &sim);
    let buffer = lane.alloc::<u8>(32 * MIB, DYNAMIC).expect("room");
    let check = fill(&sim, lane.stream(), &buffer, 1);
    drop(buffer);
    let clock = sim.clock();
    let start = clock.now();
    while !arena.glance().committed.is_zero() {
        arena.decay(clock.now()).expect("no error");
        let due = arena.next_decay();
        sim.advance(1); // the device works on, whatever is asked
        clock.advance(due.min(clock.now() + std::time::Duration::from_secs(1)) - clock.now());
        assert!(clock.now() - start < std::time::Duration::from_secs(20), "two decay times");
    }
    assert_sound(&sim, &[check]);
}

#[test]
fn a_fresh_stream_for_every_request_needs_no_more_than_two_requests() {
    let (arena, sim) = open(Order::Lazy, ByteSize::gib(8));
    let mut after_two = ByteSize::ZERO;
    for request in 0..lowtide_cuda_sim::sample(1_000) {
        let stream = sim.stream_create().expect("a stream");
        let lane = lane_of(&arena, stream);
        let buffer = lane.alloc::<u8>(1 << 30, DYNAMIC).expect("room");
        sim.fill(stream, at(&buffer), GRANULE, Pattern::new(request)).expect("queued");
        drop((buffer, lane));
        sim.stream_destroy(stream).expect("its work goes on");
        if request == 1 {
            after_two = arena.glance().committed;
        }
    }
    assert!(arena.glance().committed <= after_two, "{:?}", arena.glance());
    assert!(arena.glance().committed <= ByteSize::gib(2));
    arena.validate();
    arena.close().expect("nothing is live");
    assert_sound(&sim, &[]);
    assert_eq!(arena.snapshot().committed, ByteSize::ZERO);
}

#[test]
fn a_stream_that_was_destroyed_first_is_waited_for_with_all_others() {
    let (arena, sim) = open(Order::Lazy, ByteSize::mib(8));
    let gone = lane(&arena, &sim);
    let buffer = gone.alloc::<u8>(8 * MIB, DYNAMIC).expect("room");
    let check = fill(&sim, gone.stream(), &buffer, 1);
    sim.stream_destroy(gone.stream()).expect("too early, but allowed");
    drop((buffer, gone));
    let other = lane(&arena, &sim);
    let buffer = other.alloc::<u8>(8 * MIB, DYNAMIC).expect("after all work");
    assert_eq!(sim.unfinished(), 0);
    let second = fill(&sim, other.stream(), &buffer, 2);
    sim.run_all();
    assert_eq!([check, second].map(|ticket| sim.outcome(ticket)), [Outcome::Held; 2]);
    assert_eq!(sim.unsafe_unmaps(), 0);
}

#[test]
fn a_buffer_of_no_lane_is_reused_after_all_work_of_the_device() {
    let (arena, sim) = open(Order::Lazy, ByteSize::mib(8));
    let stream = sim.stream_create().expect("a stream");
    let buffer = arena.alloc::<u8>(8 * MIB, DYNAMIC).expect("room");
    let check = fill(&sim, stream, &buffer, 1);
    drop(buffer);
    assert_eq!(arena.snapshot().pending, ByteSize::mib(8));
    let buffer = arena.alloc::<u8>(8 * MIB, DYNAMIC).expect("after all work");
    assert_eq!(sim.unfinished(), 0);
    drop(buffer);
    let raw = arena.alloc_raw(ByteSize::mib(8), ByteSize::new(256), DYNAMIC).expect("room");
    arena.free(raw.at).expect("live");
    assert_sound(&sim, &[check]);
    assert_eq!(arena.purge(), Ok(ByteSize::mib(8)));
}

#[test]
fn what_is_done_goes_back_while_another_stream_captures_a_graph() {
    let (arena, sim) = open(Order::Lazy, ByteSize::mib(64));
    let (one, two) = (lane(&arena, &sim), lane(&arena, &sim));
    drop(one.alloc::<u8>(8 * MIB, DYNAMIC).expect("room"));
    one.end_run().expect("an event");
    sim.begin_capture(two.stream()).expect("captures");
    assert_eq!(arena.purge(), Ok(ByteSize::ZERO), "nothing is done");
    sim.run_all();
    assert_eq!(arena.purge(), Ok(ByteSize::mib(8)));
    let graph = sim.end_capture(two.stream()).expect("not spoiled");
    sim.graph_destroy(graph).expect("done");
    assert_sound(&sim, &[]);
}

#[test]
fn a_driver_that_fails_at_any_call_of_a_reuse_loses_nothing() {
    for call in [Call::EventCreate, Call::EventRecord, Call::StreamWaitEvent] {
        let (arena, sim) = open(Order::Lazy, ByteSize::mib(8));
        let (one, two) = (lane(&arena, &sim), lane(&arena, &sim));
        let buffer = one.alloc::<u8>(8 * MIB, DYNAMIC).expect("room");
        let check = fill(&sim, one.stream(), &buffer, 1);
        drop(buffer);
        sim.fail_nth(Some(call), 0, SimError::InvalidValue);
        let tried = two.alloc::<u8>(8 * MIB, DYNAMIC);
        arena.validate();
        sim.forget_failures();
        drop(tried);
        let buffer = two.alloc::<u8>(8 * MIB, DYNAMIC).expect("works on");
        let other = fill(&sim, two.stream(), &buffer, 2);
        drop(buffer);
        sim.run_all();
        assert_eq!(
            [check, other].map(|ticket| sim.outcome(ticket)),
            [Outcome::Held; 2],
            "{call:?}"
        );
        arena.close().expect("nothing is live");
        assert_eq!((arena.snapshot().committed, sim.unsafe_unmaps()), (ByteSize::ZERO, 0));
    }
}

#[test]
fn an_arena_that_is_dropped_while_the_device_works_on_keeps_that_memory() {
    let (arena, sim) = open(Order::Lazy, ByteSize::mib(64));
    let lane = lane(&arena, &sim);
    let buffer = lane.alloc::<u8>(8 * MIB, DYNAMIC).expect("room");
    let check = fill(&sim, lane.stream(), &buffer, 1);
    drop((buffer, lane, arena));
    assert_sound(&sim, &[check]);
    assert!(!sim.leaks().is_empty(), "kept, rather than unmapped under the device");
}

#[test]
fn a_resize_and_a_compaction_wait_for_the_work_on_what_they_copy() {
    let (arena, sim) = open(Order::Lazy, ByteSize::mib(64));
    arena.set_thread_cache(ByteSize::ZERO); // what is freed is pending at once
    let lane = lane(&arena, &sim);
    let mut buffers: Vec<_> =
        (0..8).map(|_| lane.alloc::<u8>(3 * MIB, DYNAMIC).expect("room")).collect();
    let pattern = Pattern::new(9);
    let at = |buffer: &Buffer<u8>| {
        let lease = lane.enter().expect("a lease");
        buffer.address(&lease).expect("ours").expect("not empty")
    };
    for buffer in &buffers {
        sim.fill(lane.stream(), at(buffer), buffer.bytes(), pattern).expect("queued");
    }
    for nth in [6, 4, 2] {
        drop(buffers.remove(nth));
    }
    buffers[0].resize(5 * MIB).expect("moved");
    let contiguous = Some(ByteSize::MAX);
    let options = CompactOptions { contiguous, ..CompactOptions::new(DYNAMIC) };
    let waits = sim.calls(Call::Synchronize);
    let done = arena.compact(options, |_| {}).expect("no error");
    assert!(done.moves > 0, "{done:?}");
    assert_eq!(sim.calls(Call::Synchronize), waits, "events are enough");
    let checks: Vec<_> = buffers
        .iter()
        .map(|buffer| sim.check(lane.stream(), at(buffer), ByteSize::mib(3), pattern))
        .collect::<Result<_, _>>()
        .expect("queued");
    arena.validate();
    assert_sound(&sim, &checks);
}

/// A compaction moved a block that another lane was still waiting to take over, and the block was
/// then booked as live at its old place.
#[test]
fn a_block_that_comes_after_anothers_work_is_not_moved_before_it_has_arrived() {
    let (arena, sim) = open(Order::Lazy, ByteSize::mib(64));
    let (one, two) = (lane(&arena, &sim), lane(&arena, &sim));
    let [low, beside, between, high] =
        [1, 1, 2, 1].map(|size| one.alloc::<u8>(size * MIB, DYNAMIC).expect("room"));
    let _stays = beside.pin().expect("a pin");
    drop(high);
    one.end_run().expect("an event");
    let (other, device) = (arena.clone(), Arc::clone(&sim));
    sim.before(Call::StreamWaitEvent, 0, move || {
        drop(low);
        other.purge().expect("an event is recorded");
        device.run_all();
        other.purge().expect("and asked");
        // There is room for what is being taken where it would cost no granule of its own.
        other.compact(CompactOptions::new(DYNAMIC), |_| {}).expect("no error");
        other.purge().expect("no error");
    });
    let taken = two.alloc::<u8>(MIB, DYNAMIC).expect("room");
    arena.validate();
    let check = fill(&sim, two.stream(), &taken, 1);
    drop((taken, beside, between));
    assert_sound(&sim, &[check]);
}
