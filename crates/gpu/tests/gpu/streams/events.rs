//! The number of events of an arena: it grows with the work under way, not with the number of runs.
//!
//! Invariant: events are counted at the simulation, so that none is forgotten.

use lowtide_cuda_sim::{Call, Order};
use lowtide_gpu::ByteSize;
use lowtide_gpu::driver::Driver as _;

use super::{DYNAMIC, MIB, assert_sound, fill, lane, lane_of, open};

/// Many times what is under way in these tests, and a small part of the runs.
const FEW: u64 = 130;

/// The bug: while nobody looked for idle memory, each turn of two lanes left an event behind.
#[test]
fn events_of_lanes_that_take_turns_are_used_again_though_nobody_looks() {
    let (arena, sim) = open(Order::Synchronous, ByteSize::mib(8));
    let (one, two) = (lane(&arena, &sim), lane(&arena, &sim));
    for _ in 0..2_000 {
        drop(one.alloc::<u8>(8 * MIB, DYNAMIC).expect("room"));
        drop(two.alloc::<u8>(8 * MIB, DYNAMIC).expect("room"));
    }
    let events = sim.calls(Call::EventCreate);
    assert!(events <= FEW, "{events} events");
    assert!(sim.calls(Call::EventQuery) <= 4_000, "each is asked a few times at most");
    arena.validate();
    assert_sound(&sim, &[]);
}

/// The same of a stream for each request, each of which was known for ever as well.
#[test]
fn streams_that_ended_are_forgotten_though_nobody_looks() {
    let (arena, sim) = open(Order::Synchronous, ByteSize::mib(8));
    for _ in 0..2_000 {
        let stream = sim.stream_create().expect("a stream");
        let lane = lane_of(&arena, stream);
        drop(lane.alloc::<u8>(8 * MIB, DYNAMIC).expect("room"));
        drop(lane);
        sim.stream_destroy(stream).expect("nobody has a lane of it");
    }
    let events = sim.calls(Call::EventCreate);
    assert!(events <= FEW, "{events} events");
    arena.validate();
    assert_sound(&sim, &[]);
}

/// The bug: a look asked 32 events of a stream at most, so that more runs than that between two
/// looks left more and more of them.
#[test]
fn a_look_finds_all_that_is_done_however_many_runs_that_was() {
    let (arena, sim) = open(Order::Lazy, ByteSize::mib(64));
    let one = lane(&arena, &sim);
    let (mut runs, mut checks) = (Vec::new(), Vec::new());
    for run in 0..40 {
        let buffer = one.alloc::<u8>(MIB, DYNAMIC).expect("room");
        checks.push(fill(&sim, one.stream(), &buffer, run));
        runs.push(buffer);
    }
    for buffer in runs {
        drop(buffer);
        one.end_run().expect("an event");
    }
    assert_eq!(arena.purge(), Ok(ByteSize::ZERO), "nothing is done");
    assert_eq!(sim.calls(Call::EventQuery), 1, "of a stream that has done nothing, one");
    assert_eq!(sim.calls(Call::EventRecord), 40);
    assert!(sim.advance(80 + 20) == 100, "all launches, and half of the events");
    let asked = sim.calls(Call::EventQuery);
    assert_eq!(arena.purge(), Ok(ByteSize::mib(20)));
    let asked = sim.calls(Call::EventQuery) - asked;
    assert!(asked <= 2 + 6, "{asked} questions");
    sim.run_all();
    let asked = sim.calls(Call::EventQuery);
    assert_eq!(arena.purge(), Ok(ByteSize::mib(20)));
    assert_eq!(sim.calls(Call::EventQuery) - asked, 2, "the first and the last");
    assert_sound(&sim, &checks);
}

#[test]
fn events_are_asked_and_used_again_while_a_stream_captures() {
    let (arena, sim) = open(Order::Synchronous, ByteSize::mib(64));
    let (one, two) = (lane(&arena, &sim), lane(&arena, &sim));
    sim.begin_capture(two.stream()).expect("captures");
    for _ in 0..200 {
        drop(one.alloc::<u8>(MIB, DYNAMIC).expect("room"));
        one.end_run().expect("an event");
    }
    assert_eq!(sim.calls(Call::EventCreate), 64, "then those that are done");
    let graph = sim.end_capture(two.stream()).expect("not spoiled");
    sim.graph_destroy(graph).expect("done");
    drop(one.alloc::<u8>(MIB, DYNAMIC).expect("room"));
    one.end_run().expect("an event");
    assert_eq!(sim.calls(Call::EventCreate), 64);
    assert_sound(&sim, &[]);
}
