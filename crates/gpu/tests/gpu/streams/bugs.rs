//! Bugs of other allocators about streams and lifetimes, by their numbers there: one test for each
//! that ours does not have.
//!
//! Elsewhere: waits and questions that spoil a capture (F9, cudarc#590: `capture.rs`), streams that
//! end (`ends.rs`), a stream for each request (onnxruntime#29351: `main.rs`). Bugs of sleep and
//! wake, of peers and of pools are not about what is here.
//!
//! Invariant: a test is named after what must not happen any more, as a claim that it does not.

use lowtide_cuda_sim::{Call, Order, SimError};
use lowtide_gpu::ByteSize;
use lowtide_gpu::driver::Driver as _;

use super::{DYNAMIC, MIB, assert_sound, at, fill, lane, lane_of, open};

/// pytorch#196258, and the same in vLLM#43020 and #45615, TensorRT-LLM#11641, cuda-python#2886:
/// memory was unmapped after a wait for something else than the work on it.
#[test]
fn a_stream_that_was_waited_for_proves_nothing_about_another() {
    let (arena, sim) = open(Order::Lazy, ByteSize::mib(64));
    let (one, two) = (lane(&arena, &sim), lane(&arena, &sim));
    let (first, second) = (one.alloc::<u8>(8 * MIB, DYNAMIC), two.alloc::<u8>(8 * MIB, DYNAMIC));
    let (first, second) = (first.expect("room"), second.expect("room"));
    let checks = [fill(&sim, one.stream(), &first, 1), fill(&sim, two.stream(), &second, 2)];
    drop((first, second));
    arena.purge().expect("records events");
    sim.stream_synchronize(two.stream()).expect("done");
    assert_eq!(arena.purge(), Ok(ByteSize::mib(8)), "of the stream that was waited for");
    sim.stream_synchronize(one.stream()).expect("done");
    assert_eq!(arena.purge(), Ok(ByteSize::mib(8)));
    assert_sound(&sim, &checks);
}

/// stark-backend#362: a wait of one stream for another was taken for one of the host.
#[test]
fn a_stream_that_waits_proves_nothing_to_the_host() {
    let (arena, sim) = open(Order::Lazy, ByteSize::mib(8));
    let (one, two) = (lane(&arena, &sim), lane(&arena, &sim));
    let first = one.alloc::<u8>(8 * MIB, DYNAMIC).expect("room");
    let check = fill(&sim, one.stream(), &first, 1);
    drop(first);
    drop(two.alloc::<u8>(8 * MIB, DYNAMIC).expect("its stream waits"));
    assert_eq!(sim.calls(Call::StreamWaitEvent), 1);
    assert_eq!(arena.purge(), Ok(ByteSize::ZERO), "the device has done nothing yet");
    sim.run_all();
    assert_eq!(arena.purge(), Ok(ByteSize::mib(8)));
    assert_sound(&sim, &[check]);
}

/// pytorch#140044, #179443, #180666: a use on another stream counted until the block was freed,
/// and so for whatever that stream was given in the meantime and after. A run that has ended is
/// waited for up to its end.
#[test]
fn a_use_ends_with_its_run_and_not_with_what_the_stream_is_given_later() {
    let (arena, sim) = open(Order::Lazy, ByteSize::mib(8));
    let (one, two) = (lane(&arena, &sim), lane(&arena, &sim));
    let first = one.alloc::<u8>(8 * MIB, DYNAMIC).expect("room");
    let check = fill(&sim, one.stream(), &first, 1);
    drop(first);
    one.end_run().expect("an event");
    for tag in 0..100 {
        sim.host_function(one.stream(), tag).expect("queued"); // another run
    }
    let second = two.alloc::<u8>(8 * MIB, DYNAMIC).expect("its stream waits");
    let other = fill(&sim, two.stream(), &second, 2);
    sim.stream_synchronize(two.stream()).expect("done");
    assert_eq!(sim.unfinished(), 100, "the other run is not waited for");
    assert_sound(&sim, &[check, other]);
}

/// cudarc c and f: where no event could be made, the block was lost, or the program.
#[test]
fn no_block_is_lost_where_no_event_can_be_made() {
    let (arena, sim) = open(Order::Lazy, ByteSize::mib(8));
    let (one, two) = (lane(&arena, &sim), lane(&arena, &sim));
    let first = one.alloc::<u8>(8 * MIB, DYNAMIC).expect("room");
    let check = fill(&sim, one.stream(), &first, 1);
    drop(first);
    sim.fail_always(Call::EventCreate, Some(SimError::OutOfMemory));
    let second = two.alloc::<u8>(8 * MIB, DYNAMIC).expect("after all work of the device");
    let other = fill(&sim, two.stream(), &second, 2);
    drop((second, one));
    assert_eq!(arena.purge(), Ok(ByteSize::mib(8)), "after all work of the device");
    assert_sound(&sim, &[check, other]);
    assert_eq!(sim.leaks().events, 0);
}

/// cuda-python#2882: 64 buffers of 64 MiB were closed, and 4 GiB of handles stayed.
#[test]
fn sixty_four_buffers_that_are_gone_leave_no_handle() {
    let (arena, sim) = open(Order::Lazy, ByteSize::gib(4));
    let lane = lane(&arena, &sim);
    let buffers: Vec<_> =
        (0..64).map(|_| lane.alloc::<u8>(64 * MIB, DYNAMIC).expect("room")).collect();
    assert_eq!(sim.leaks().committed, ByteSize::gib(4));
    drop(buffers);
    lane.end_run().expect("an event");
    sim.run_all();
    assert_eq!(arena.purge(), Ok(ByteSize::gib(4)));
    assert_eq!((sim.leaks().handles, sim.leaks().committed), (0, ByteSize::ZERO));
}

/// mistral.rs#2113: what was unloaded stayed, because its end found no context. An arena whose
/// streams have done their work leaves nothing when it is dropped, though nobody asked before.
#[test]
fn an_arena_that_is_dropped_when_its_work_is_done_leaves_nothing() {
    let (arena, sim) = open(Order::Lazy, ByteSize::mib(64));
    let stream = sim.stream_create().expect("a stream");
    let lane = lane_of(&arena, stream);
    let buffer = lane.alloc::<u8>(32 * MIB, DYNAMIC).expect("room");
    let check = fill(&sim, stream, &buffer, 1);
    drop((buffer, lane));
    sim.run_all();
    drop(arena);
    sim.stream_destroy(stream).expect("there");
    assert!(sim.leaks().is_empty(), "{:?}", sim.leaks());
    assert_sound(&sim, &[check]);
}

/// Event creation is dear beside other threads (PyTorch's pool of events, F15): there was one for
/// each free.
#[test]
fn a_thousand_hand_overs_need_a_few_events() {
    let (arena, sim) = open(Order::Lazy, ByteSize::mib(8));
    let lanes = [lane(&arena, &sim), lane(&arena, &sim)];
    for turn in 0..1_000 {
        let buffer = lanes[turn % 2].alloc::<u8>(8 * MIB, DYNAMIC).expect("its stream waits");
        drop(buffer);
        lanes[turn % 2].end_run().expect("an event");
        if turn % 8 == 7 {
            sim.run_all();
            arena.purge().expect("asks");
        }
    }
    assert!(sim.calls(Call::EventCreate) <= 16, "{} events", sim.calls(Call::EventCreate));
    assert_sound(&sim, &[]);
}

/// ONNX Runtime 3 (#32342): a block that never had a stream was anybody's, as if it had been waited
/// for.
#[test]
fn a_block_that_never_had_a_stream_is_nobodys_before_all_work_is_done() {
    let (arena, sim) = open(Order::Lazy, ByteSize::mib(8));
    let (one, two) = (lane(&arena, &sim), lane(&arena, &sim));
    let never = arena.alloc::<u8>(8 * MIB, DYNAMIC).expect("room");
    let check = fill(&sim, one.stream(), &never, 1);
    drop(never);
    let taken = two.alloc::<u8>(8 * MIB, DYNAMIC).expect("after all work of the device");
    assert_eq!((sim.unfinished(), sim.calls(Call::Synchronize)), (0, 1));
    let other = fill(&sim, two.stream(), &taken, 2);
    assert_sound(&sim, &[check, other]);
}

/// ONNX Runtime 5, MUSA's `SplitRemainderTracksSameOwner`: the rest of a block that was cut forgot
/// its stream.
#[test]
fn the_rest_of_a_block_that_was_cut_is_waited_for_as_well() {
    let (arena, sim) = open(Order::Lazy, ByteSize::mib(8));
    let [one, two, three] = [1, 2, 3].map(|_| lane(&arena, &sim));
    let whole = one.alloc::<u8>(8 * MIB, DYNAMIC).expect("room");
    let mut checks = vec![fill(&sim, one.stream(), &whole, 1)];
    drop(whole);
    let cut = two.alloc::<u8>(2 * MIB, DYNAMIC).expect("a part of it");
    checks.push(fill(&sim, two.stream(), &cut, 2));
    let rest = three.alloc::<u8>(6 * MIB, DYNAMIC).expect("the rest");
    assert_eq!(sim.calls(Call::StreamWaitEvent), 2, "each stream waits for the first");
    checks.push(fill(&sim, three.stream(), &rest, 3));
    arena.validate();
    assert_sound(&sim, &checks);
}

/// ONNX Runtime 6, MUSA's `ProducerReleaseAfterTransferPreservesConsumer`: a block went from one
/// stream to another, and the end of the first one's run made it anybody's.
#[test]
fn the_end_of_a_run_gives_up_nothing_that_another_stream_has_taken_over() {
    let (arena, sim) = open(Order::Lazy, ByteSize::mib(8));
    let [one, two, three] = [1, 2, 3].map(|_| lane(&arena, &sim));
    let first = one.alloc::<u8>(8 * MIB, DYNAMIC).expect("room");
    let mut checks = vec![fill(&sim, one.stream(), &first, 1)];
    let place = at(&first);
    drop(first);
    let second = two.alloc::<u8>(8 * MIB, DYNAMIC).expect("its stream waits");
    checks.push(fill(&sim, two.stream(), &second, 2));
    one.end_run().expect("nothing of its own is left");
    sim.stream_synchronize(one.stream()).expect("done");
    arena.purge().expect("asks");
    drop(second);
    let third = three.alloc::<u8>(8 * MIB, DYNAMIC).expect("its stream waits");
    assert_eq!((at(&third), sim.calls(Call::StreamWaitEvent)), (place, 2));
    checks.push(fill(&sim, three.stream(), &third, 3));
    assert_sound(&sim, &checks);
}
