//! Sleep beside streams: what is waited for before memory leaves.
#![expect(unsafe_code, reason = "a lane is of a stream that the caller vouches for")]

use lowtide_cuda_sim::{Call, Order, Outcome, Pattern, SimError};
use lowtide_gpu::ByteSize;
use lowtide_gpu::clock::Clock as _;
use lowtide_gpu::driver::Driver as _;
use lowtide_gpu::{Contents, DeviceError, Region, SleepState};

use super::states::NOW;
use super::support::{Bed, MIB, at};

#[test]
fn the_work_that_was_queued_under_a_lease_is_done_before_memory_leaves() {
    for order in [Order::Lazy, Order::Random { seed: 3 }] {
        let bed = Bed::new(order);
        let lane = bed.lane();
        let buffer = lane.alloc::<u8>(MIB, Region::Dynamic).expect("room");
        let others = bed.sim.stream_create().expect("a stream");
        bed.sim
            .fill(
                others,
                {
                    let lease = lane.enter().expect("a lease");
                    bed.mark(&buffer, &lease, 5);
                    at(&buffer, &lease)
                },
                ByteSize::new(0),
                Pattern::new(1),
            )
            .expect("nothing is written");
        let whole = bed.sim.calls(Call::Synchronize);
        bed.arena.sleep(NOW).expect("asleep");
        assert_eq!(bed.sim.calls(Call::Synchronize), whole, "the lease named its stream");
        bed.assert_marked(&buffer, 5);
        // And that of a lease which names none is waited for with all else.
        bed.arena.sleep(NOW).expect("asleep");
        assert_eq!(bed.sim.calls(Call::Synchronize), whole + 1);
        bed.assert_marked(&buffer, 5);
        drop((buffer, lane));
        bed.sim.stream_destroy(others).expect("a stream");
        bed.end();
    }
}

#[test]
fn where_blocks_are_out_by_address_all_work_of_the_device_is_waited_for() {
    let bed = Bed::new(Order::Lazy);
    let lane = bed.lane();
    let raw = bed.arena.alloc_raw(ByteSize::kib(64), ByteSize::new(256), Region::Dynamic);
    let raw = raw.expect("room");
    let elsewhere = bed.sim.stream_create().expect("a stream");
    let lease = lane.enter().expect("a lease, which names another stream");
    bed.sim.fill(elsewhere, raw.at, raw.size, Pattern::new(7)).expect("queued");
    drop(lease);
    bed.arena.sleep(NOW).expect("asleep");
    let lease = bed.arena.enter().expect("a lease");
    let check = bed.sim.check(elsewhere, raw.at, raw.size, Pattern::new(7)).expect("queued");
    bed.sim.stream_synchronize(elsewhere).expect("done");
    assert_eq!(bed.sim.outcome(check), Outcome::Held);
    drop((lease, lane));
    bed.arena.free(raw.at).expect("live");
    bed.sim.stream_destroy(elsewhere).expect("a stream");
    bed.end();
}

#[test]
fn a_stream_that_ended_after_its_lease_is_waited_for() {
    let bed = Bed::new(Order::Lazy);
    let buffer = bed.arena.alloc::<u8>(MIB / 16, Region::Dynamic).expect("room");
    let stream = bed.sim.stream_create().expect("a stream");
    // SAFETY: the simulation looks whether a stream is there.
    let lane = unsafe { bed.arena.lane(stream) }.expect("a lane");
    {
        let mut lease = bed.arena.enter().expect("a lease");
        lease.record_use(&lane).expect("ours");
        bed.sim.fill(stream, at(&buffer, &lease), buffer.bytes(), Pattern::new(8)).expect("queued");
    }
    drop(lane);
    bed.sim.stream_destroy(stream).expect("its work goes on");
    bed.arena.sleep(NOW).expect("asleep");
    bed.assert_marked(&buffer, 8);
    drop(buffer);
    bed.end();
}

#[test]
fn what_is_freed_while_uses_are_waited_for_is_waited_for_too() {
    let bed = Bed::new(Order::Lazy);
    let (kept, lane) = (bed.marked(MIB, Region::Stable, 1), bed.lane());
    let freed = lane.alloc::<u8>(MIB, Region::Dynamic).expect("room");
    bed.mark(&freed, &lane.enter().expect("a lease"), 2);
    bed.sim.before(Call::Synchronize, 0, move || drop(freed));
    bed.arena.sleep(NOW).expect("asleep");
    let snapshot = bed.arena.snapshot();
    snapshot.validate();
    assert_eq!((snapshot.pending, snapshot.committed), (ByteSize::ZERO, ByteSize::ZERO));
    bed.assert_marked(&kept, 1);
    drop((kept, lane));
    bed.end();
}

#[test]
fn it_stays_awake_while_a_stream_captures_a_graph() {
    let bed = Bed::new(Order::Lazy);
    let (lane, kept) = (bed.lane(), bed.marked(MIB, Region::Dynamic, 1));
    bed.sim.begin_capture(bed.stream).expect("captures");
    let refused = bed.arena.sleep(NOW).expect_err("captures");
    assert!(matches!(refused, DeviceError::Capturing { .. }), "{refused}");
    let graph = bed.sim.end_capture(bed.stream).expect("not spoiled");
    bed.sim.graph_destroy(graph).expect("done");
    bed.arena.sleep(NOW).expect("asleep");
    bed.assert_marked(&kept, 1);
    drop((kept, lane));
    bed.end();
}

/// The wait for the copies of a wake spoiled a capture that had begun while the arena slept.
#[test]
fn a_wake_while_a_stream_captures_is_refused_and_spoils_nothing() {
    let bed = Bed::new(Order::Lazy);
    let (kept, lane) = (bed.marked(MIB / 16, Region::Stable, 1), bed.lane());
    bed.arena.sleep(NOW).expect("asleep");
    bed.sim.begin_capture(bed.stream).expect("nothing captures");
    let before = bed.sim.calls(Call::Create);
    assert!(matches!(bed.arena.enter(), Err(DeviceError::Capturing { .. })));
    assert_eq!(bed.sim.calls(Call::Create), before, "refused before memory is committed");
    assert_eq!(bed.arena.state(), SleepState::Asleep);
    let graph = bed.sim.end_capture(bed.stream).expect("not spoiled");
    bed.sim.graph_destroy(graph).expect("a graph");
    bed.assert_marked(&kept, 1);
    drop((kept, lane));
    bed.end();
}

/// A wake without copies waits for nothing: a capture does not keep the arena asleep.
#[test]
fn a_wake_that_copies_nothing_back_succeeds_while_a_stream_captures() {
    let bed = Bed::new(Order::Lazy);
    let (kept, lane) = (bed.marked(MIB, Region::Stable, 1), bed.lane());
    let mut lost = bed.marked(MIB, Region::Dynamic, 2);
    lost.set_contents(Some(Contents::Discard)).expect("here");
    bed.arena.sleep(NOW).expect("asleep");
    drop(kept); // the only contents that were saved
    bed.sim.begin_capture(bed.stream).expect("nothing captures");
    let woken = bed.arena.wake().expect("it needs no wait");
    assert_eq!((woken.memory, woken.copied), (ByteSize::mib(1), ByteSize::ZERO));
    let graph = bed.sim.end_capture(bed.stream).expect("not spoiled");
    bed.sim.graph_destroy(graph).expect("a graph");
    assert!(lost.take_discarded());
    drop((lost, lane));
    bed.end();
}

/// The bug: a stream that began to capture while copies were on their way had its capture spoiled
/// by the wait for them, and by the next one. Either way is refused, and the copies are waited for
/// when nothing captures.
#[test]
fn a_capture_that_began_while_contents_were_copied_was_spoiled_by_the_wait() {
    for call in [Call::Offload, Call::Restore] {
        let bed = Bed::new(Order::Lazy);
        let (kept, lane) = (bed.marked(MIB / 16, Region::Stable, 1), bed.lane());
        if call == Call::Restore {
            bed.arena.sleep(NOW).expect("asleep");
        }
        let (sim, stream) = (bed.sim.clone(), bed.stream);
        bed.sim.before(call, 0, move || sim.begin_capture(stream).expect("nothing captures"));
        let refused = match call {
            Call::Offload => bed.arena.sleep(NOW).map(drop).expect_err("captures"),
            _ => bed.arena.wake().map(drop).expect_err("captures"),
        };
        assert!(matches!(refused, DeviceError::Capturing { .. }), "{refused}");
        // Whoever looks meanwhile, or wants it awake, spoils nothing either.
        let _ = (bed.arena.purge(), bed.arena.decay(bed.sim.clock().now()));
        let graph = bed.sim.end_capture(bed.stream).expect("not spoiled");
        bed.sim.graph_destroy(graph).expect("a graph");
        bed.assert_marked(&kept, 1);
        bed.arena.purge().expect("nothing captures");
        assert_eq!(bed.arena.snapshot().offloaded, ByteSize::ZERO);
        drop((kept, lane));
        bed.end();
    }
}

/// One look at idle memory may wait for copies twice: for a store that is to go back, and before
/// memory leaves. What begins to capture between the two is not spoiled by the second.
#[test]
fn a_capture_that_begins_between_two_waits_for_copies_is_not_spoiled() {
    let bed = Bed::new(Order::Lazy);
    let (kept, lane) = (bed.marked(MIB / 16, Region::Stable, 1), bed.lane());
    drop(bed.marked(MIB, Region::Dynamic, 2));
    bed.sim.fail_always(Call::StreamSynchronize, Some(SimError::Unknown));
    assert!(bed.arena.sleep(NOW).is_err());
    bed.sim.forget_failures();
    assert!(!bed.arena.snapshot().offloaded.is_zero(), "a copy may work on its store");
    // The first wait fails; before the second it is asked whether a stream captures.
    bed.sim.fail_nth(Some(Call::StreamSynchronize), 0, SimError::Unknown);
    let waits = bed.sim.calls(Call::StreamSynchronize);
    let (sim, stream) = (bed.sim.clone(), bed.stream);
    bed.sim.before(Call::StreamSynchronize, 0, move || {
        let begin = sim.clone();
        sim.before(Call::StreamIsCapturing, 0, move || begin.begin_capture(stream).expect("none"));
    });
    let refused = bed.arena.purge().expect_err("captures");
    assert!(matches!(&refused, DeviceError::Driver(error) if error.code() == Some(900)));
    assert_eq!(bed.sim.calls(Call::StreamSynchronize), waits + 1, "the second was not made");
    let graph = bed.sim.end_capture(bed.stream).expect("not spoiled");
    bed.sim.graph_destroy(graph).expect("a graph");
    assert_eq!(bed.arena.purge(), Ok(ByteSize::mib(1)));
    bed.assert_marked(&kept, 1);
    drop((kept, lane));
    bed.end();
}
