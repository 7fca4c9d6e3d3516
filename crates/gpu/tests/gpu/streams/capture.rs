//! Captures of graphs beside an arena: what would spoil one is not done, and nothing of one stays
//! behind.
//!
//! Invariant: a capture that the program may end is not spoiled by the arena.

use std::sync::Arc;
use std::time::Duration;

use lowtide_cuda_sim::{Call, Order, Pattern, SimDriver};
use lowtide_gpu::ByteSize;
use lowtide_gpu::clock::Moment;
use lowtide_gpu::driver::Driver as _;
use lowtide_gpu::{DeviceArena, DeviceError, Lane};

use super::{DYNAMIC, MIB, assert_sound, at, fill, lane, open};

/// Ends a capture, and does what it captured.
fn end(sim: &SimDriver, lane: &Lane) {
    let graph = sim.end_capture(lane.stream()).expect("not spoiled");
    sim.graph_launch(graph, lane.stream()).expect("queued");
    sim.graph_destroy(graph).expect("done");
}

fn assert_refused(answer: Result<impl Sized, DeviceError>) {
    match answer {
        Err(DeviceError::Driver(error)) => assert_eq!(error.code(), Some(900), "{error}"),
        Err(error) => panic!("{error}"),
        Ok(_) => panic!("nothing was to be waited for"),
    }
}

/// Reported in cubecl#1612: later blocks had the memory of a graph's temporaries.
#[test]
fn raw_blocks_of_a_capture_are_held_until_they_are_released() {
    let (arena, sim) = open(Order::Lazy, ByteSize::mib(64));
    let lane = lane(&arena, &sim);
    let block = || lane.alloc_raw(ByteSize::mib(2), ByteSize::new(1), DYNAMIC).expect("room");
    let set = |captures| arena.set_capturing(lane.stream(), captures).expect("this process");
    let (before, stays) = (block(), block());
    set(true);
    let (within, after, unknown) = (block(), block(), block());
    // SAFETY: as above.
    unsafe { arena.free_on(before.at, lane.stream()) }.expect("live");
    lane.free(within.at).expect("live");
    assert!(matches!(
        arena.free(within.at),
        Err(DeviceError::InteriorAddress { .. } | DeviceError::NotLive { .. })
    ));
    arena.record_unknown_use(unknown.at).expect("live");
    arena.free(unknown.at).expect("live");
    set(false);
    assert_eq!(arena.snapshot().captured, ByteSize::mib(6));
    lane.free(after.at).expect("live");
    lane.free(stays.at).expect("live");
    assert_eq!(arena.snapshot().captured, ByteSize::mib(8), "allocated in the capture");
    let fresh: Vec<_> = (0..4).map(|_| block()).collect();
    for held in [before, within, after, unknown] {
        assert!(fresh.iter().all(|block| block.at != held.at));
    }
    assert_eq!(arena.reset(), Ok(ByteSize::mib(8)), "the captured blocks stay");
    assert_eq!(arena.snapshot().live, ByteSize::mib(8));
    // SAFETY: no graph was made.
    assert_eq!(unsafe { arena.release_captured() }, Ok(ByteSize::mib(8)));
    // SAFETY: as above.
    assert_eq!(unsafe { arena.release_captured() }, Ok(ByteSize::ZERO));
    sim.run_all();
    assert_eq!(arena.snapshot().live, ByteSize::ZERO);
    arena.validate();
    drop(lane);
    arena.close().expect("nothing is live");
}

/// A purge asked an event that had been recorded in the capture, then and ever after: 907.
#[test]
fn an_event_that_a_capture_would_take_is_recorded_after_it() {
    let (arena, sim) = open(Order::Lazy, ByteSize::mib(64));
    let lane = lane(&arena, &sim);
    let buffer = lane.alloc::<u8>(8 * MIB, DYNAMIC).expect("room");
    let check = fill(&sim, lane.stream(), &buffer, 1);
    drop(buffer);
    sim.begin_capture(lane.stream()).expect("captures");
    assert_refused(lane.end_run());
    assert_eq!(arena.purge(), Ok(ByteSize::ZERO));
    end(&sim, &lane);
    lane.end_run().expect("it captures no more");
    sim.run_all();
    assert_eq!(arena.purge(), Ok(ByteSize::mib(8)));
    assert_sound(&sim, &[check]);
}

/// The stream that captures was made to wait for an event of another: 905, and the capture spoiled.
#[test]
fn a_stream_that_captures_takes_memory_for_which_it_need_not_wait() {
    let (arena, sim) = open(Order::Lazy, ByteSize::mib(16));
    let (one, two) = (lane(&arena, &sim), lane(&arena, &sim));
    let freed = one.alloc::<u8>(8 * MIB, DYNAMIC).expect("room");
    let check = fill(&sim, one.stream(), &freed, 1);
    let place = at(&freed);
    drop(freed);
    sim.begin_capture(two.stream()).expect("captures");
    let fresh = two.alloc::<u8>(8 * MIB, DYNAMIC).expect("committed");
    assert_ne!(at(&fresh), place);
    assert!(two.alloc::<u8>(8 * MIB, DYNAMIC).is_err_and(|error| error.is_out_of_memory()));
    let captured = fill(&sim, two.stream(), &fresh, 2);
    end(&sim, &two);
    drop(two.alloc::<u8>(8 * MIB, DYNAMIC).expect("waits"));
    assert_sound(&sim, &[check, captured]);
}

/// Another stream waited for an event of the one that captures, and would have joined it.
#[test]
fn what_a_stream_that_captures_has_freed_is_passed_over() {
    let (arena, sim) = open(Order::Lazy, ByteSize::mib(16));
    let (one, two) = (lane(&arena, &sim), lane(&arena, &sim));
    drop(one.alloc::<u8>(8 * MIB, DYNAMIC).expect("room"));
    sim.begin_capture(one.stream()).expect("captures");
    let other = two.alloc::<u8>(8 * MIB, DYNAMIC).expect("committed");
    let check = fill(&sim, two.stream(), &other, 1);
    assert_eq!(sim.calls(Call::StreamWaitEvent), 0);
    assert!(two.alloc::<u8>(8 * MIB, DYNAMIC).is_err_and(|error| error.is_out_of_memory()));
    end(&sim, &one);
    drop(two.alloc::<u8>(8 * MIB, DYNAMIC).expect("waits"));
    assert_sound(&sim, &[check]);
}

/// Whoever waited for the whole device spoiled every capture: 900.
#[test]
fn nobody_waits_for_the_device_while_a_stream_captures() {
    let (arena, sim) = open(Order::Lazy, ByteSize::mib(16));
    let lane = lane(&arena, &sim);
    drop(arena.alloc::<u8>(8 * MIB, DYNAMIC).expect("room"));
    let mut kept = lane.alloc::<u8>(4 * MIB, DYNAMIC).expect("room");
    let beside = lane.alloc::<u8>(2 * MIB, DYNAMIC).expect("room");
    sim.fill(lane.stream(), at(&kept), kept.bytes(), Pattern::new(5)).expect("queued");
    sim.begin_capture(lane.stream()).expect("captures");
    let calls = sim.calls(Call::Synchronize);
    assert_refused(kept.resize(6 * MIB)); // it would have to be copied
    let refused = arena.alloc::<u8>(9 * MIB, DYNAMIC).map(drop);
    assert!(refused.is_err_and(|error| error.is_out_of_memory()));
    arena.purge().expect("what nobody uses");
    assert_eq!(sim.calls(Call::Synchronize), calls);
    end(&sim, &lane);
    let check = sim.check(lane.stream(), at(&kept), kept.bytes(), Pattern::new(5));
    kept.resize(6 * MIB).expect("copied");
    drop(beside);
    assert_sound(&sim, &[check.expect("queued")]);
    arena.validate();
}

/// Only the streams of lanes and of live blocks were asked: 900, and the capture spoiled.
#[test]
fn nobody_waits_for_the_device_in_a_capture_that_the_program_names() {
    let (arena, sim) = open(Order::Lazy, ByteSize::mib(16));
    let foreign = sim.stream_create().expect("a stream");
    drop(arena.alloc::<u8>(8 * MIB, DYNAMIC).expect("room"));
    arena.set_capturing(foreign, true).expect("this process");
    sim.begin_capture(foreign).expect("captures");
    let waits = sim.calls(Call::Synchronize);
    arena.purge().expect("what nobody uses");
    assert_eq!(sim.calls(Call::Synchronize), waits);
    let graph = sim.end_capture(foreign).expect("not spoiled");
    sim.graph_destroy(graph).expect("done");
    arena.set_capturing(foreign, false).expect("this process");
    assert_eq!(arena.purge(), Ok(ByteSize::mib(8)));
    assert_sound(&sim, &[]);
}

/// A lane that is dropped while its stream captures has no event; what it freed is waited for with
/// all other work, after the capture.
#[test]
fn a_lane_that_ends_in_a_capture_leaves_nothing_behind() {
    let (arena, sim): (DeviceArena, _) = open(Order::Lazy, ByteSize::mib(8));
    let gone = lane(&arena, &sim);
    let stream = gone.stream();
    let buffer = gone.alloc::<u8>(8 * MIB, DYNAMIC).expect("room");
    let check = fill(&sim, stream, &buffer, 1);
    sim.begin_capture(stream).expect("captures");
    drop((buffer, gone));
    let graph = sim.end_capture(stream).expect("not spoiled");
    sim.graph_destroy(graph).expect("done");
    sim.stream_destroy(stream).expect("its work goes on");
    let other = lane(&arena, &sim);
    let buffer = other.alloc::<u8>(8 * MIB, DYNAMIC).expect("after all work");
    let second = fill(&sim, other.stream(), &buffer, 2);
    drop(buffer);
    assert_sound(&sim, &[check, second]);
    arena.close().expect("nothing is live");
}

/// A decay waited for the whole device where memory was freed without a lane: that fails with 900
/// and spoils the capture of any stream, also of one that no lane knows.
#[test]
fn a_decay_waits_for_nothing_and_spoils_no_capture_of_a_stream_that_is_no_lane() {
    let (arena, sim) = open(Order::Lazy, ByteSize::mib(32));
    let lane = lane(&arena, &sim);
    let foreign = sim.stream_create().expect("a stream");
    let waits = sim.calls(Call::Synchronize);
    let of_none = arena.alloc::<u8>(8 * MIB, DYNAMIC).expect("room");
    drop((lane.alloc::<u8>(8 * MIB, DYNAMIC).expect("room"), of_none));
    sim.begin_capture(foreign).expect("captures");
    for _ in 0..2 {
        arena.decay(Moment::ORIGIN + Duration::from_secs(60)).expect("looked");
        sim.advance(usize::MAX);
    }
    assert_eq!(arena.snapshot().pending, ByteSize::mib(8), "what no event proves");
    assert_eq!(sim.calls(Call::Synchronize), waits);
    let graph = sim.end_capture(foreign).expect("not spoiled");
    sim.graph_destroy(graph).expect("done");
    assert_eq!(arena.next_decay(), Moment::NEVER, "it waits for a call of the program");
    arena.purge().expect("waits for the device");
    let snapshot = arena.snapshot();
    assert_eq!((snapshot.pending, snapshot.committed), (ByteSize::ZERO, ByteSize::ZERO));
    assert_sound(&sim, &[]);
}

/// The worker of a `Memory` runs jobs in the background, and what it calls as the program would
/// waits for nothing either.
#[test]
fn nothing_in_the_background_waits_for_the_device() {
    let (arena, sim) = open(Order::Lazy, ByteSize::mib(8));
    drop(arena.alloc::<u8>(8 * MIB, DYNAMIC).expect("room"));
    let waits = sim.calls(Call::Synchronize);
    let background = lowtide_core::sync::background();
    assert_eq!(arena.purge(), Ok(ByteSize::ZERO));
    assert_eq!(arena.shrink(), Ok(ByteSize::ZERO));
    let refused = arena.alloc::<u8>(8 * MIB, DYNAMIC).map(drop).expect_err("it is pending");
    assert!(refused.is_out_of_memory(), "{refused}");
    assert_eq!(sim.calls(Call::Synchronize), waits);
    drop(background);
    assert_eq!(arena.purge(), Ok(ByteSize::mib(8)));
    assert_sound(&sim, &[]);
}

/// A capture that begins just before an event is recorded takes the event; to ask that event
/// answered 907 and spoiled the capture.
#[test]
fn an_event_that_a_capture_took_is_never_asked() {
    let (arena, sim) = open(Order::Lazy, ByteSize::mib(8));
    let lane = lane(&arena, &sim);
    drop(lane.alloc::<u8>(8 * MIB, DYNAMIC).expect("room"));
    let (other, stream) = (Arc::clone(&sim), lane.stream());
    sim.before(Call::EventRecord, 0, move || other.begin_capture(stream).expect("captures"));
    for _ in 0..2 {
        arena.decay(Moment::ORIGIN).expect("looked");
    }
    end(&sim, &lane);
    for _ in 0..2 {
        arena.decay(Moment::ORIGIN).expect("looked");
        sim.advance(usize::MAX);
    }
    assert_eq!(arena.snapshot().pending, ByteSize::ZERO);
    assert_sound(&sim, &[]);
}
