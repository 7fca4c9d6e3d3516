//! ONNX Runtime's two tests of an arena that knows streams, as claims about ours: its script of two
//! streams, and the one in which a stream secures another's block.
//!
//! Where theirs keeps a block from other streams until its run has ended, ours hands it on with an
//! event that the taker's stream waits for: so the claims are about waits and not about addresses.
//!
//! Invariant: what one stream may still work on is never another's without a wait.

use lowtide_cuda_sim::{Call, Order, SimDriver};
use lowtide_gpu::ByteSize;

use super::{DYNAMIC, MIB, assert_sound, at, fill, lane, open};

fn waits(sim: &SimDriver) -> u64 {
    sim.calls(Call::StreamWaitEvent)
}

/// `StreamAwareArena`, `TwoStreamAllocation`, its first half: a freed block is its own stream's at
/// once and another's only after a wait; what a run has released merges, and is anybody's.
#[test]
fn a_freed_block_is_its_own_streams_at_once_and_anothers_after_a_wait_or_the_end_of_the_run() {
    let (arena, sim) = open(Order::Lazy, ByteSize::mib(6));
    let (one, two) = (lane(&arena, &sim), lane(&arena, &sim));
    let first = one.alloc::<u8>(2 * MIB, DYNAMIC).expect("room");
    let second = two.alloc::<u8>(2 * MIB, DYNAMIC).expect("room");
    assert_ne!(at(&first), at(&second));
    let place = at(&first);
    let mut checks = vec![fill(&sim, one.stream(), &first, 1)];
    checks.push(fill(&sim, two.stream(), &second, 2));
    drop(first);

    // Its own stream has it back, and the driver hears nothing.
    let again = one.alloc::<u8>(2 * MIB, DYNAMIC).expect("room");
    assert_eq!((at(&again), waits(&sim)), (place, 0));
    checks.push(fill(&sim, one.stream(), &again, 3));
    drop(again);

    // The other has it after a wait, while the device has done nothing yet.
    let taken = two.alloc::<u8>(2 * MIB, DYNAMIC).expect("room");
    assert_eq!((at(&taken), waits(&sim)), (place, 1));
    checks.push(fill(&sim, two.stream(), &taken, 4));

    // Both runs end, and their work: neighbours of two streams are one span, and nobody waits.
    drop((taken, second));
    one.end_run().expect("an event");
    two.end_run().expect("an event");
    sim.run_all();
    arena.purge().expect("sees what is done");
    let three = lane(&arena, &sim);
    let merged = three.alloc::<u8>(6 * MIB, DYNAMIC).expect("one span");
    assert_eq!((at(&merged), waits(&sim)), (place, 1));
    checks.push(fill(&sim, three.stream(), &merged, 5));
    arena.validate();
    assert_sound(&sim, &checks);
}

/// Its second half: after a wait, what was freed before it needs none any more, and what was freed
/// later does.
#[test]
fn after_a_wait_older_blocks_need_none_and_newer_ones_do() {
    let (arena, sim) = open(Order::Lazy, ByteSize::mib(6));
    let (one, two) = (lane(&arena, &sim), lane(&arena, &sim));
    let [older, other, newer] = [1, 2, 3].map(|_| one.alloc::<u8>(2 * MIB, DYNAMIC).expect("room"));
    let places = [&older, &other, &newer].map(at);
    let mut checks = Vec::new();
    for (mark, buffer) in [(1, &older), (2, &other), (3, &newer)] {
        checks.push(fill(&sim, one.stream(), buffer, mark));
    }
    drop((older, other));
    let taken = two.alloc::<u8>(2 * MIB, DYNAMIC).expect("room");
    assert_eq!((at(&taken), waits(&sim)), (places[0], 1));
    checks.push(fill(&sim, two.stream(), &taken, 4));

    // The wait was for all that the first stream had been given by then.
    let beside = two.alloc::<u8>(2 * MIB, DYNAMIC).expect("room");
    assert_eq!((at(&beside), waits(&sim)), (places[1], 1));
    checks.push(fill(&sim, two.stream(), &beside, 5));

    // What is freed after it is not.
    checks.push(fill(&sim, one.stream(), &newer, 6));
    drop(newer);
    let last = two.alloc::<u8>(2 * MIB, DYNAMIC).expect("room");
    assert_eq!((at(&last), waits(&sim)), (places[2], 2));
    checks.push(fill(&sim, two.stream(), &last, 7));
    arena.validate();
    assert_sound(&sim, &checks);
}

/// The test of securing a block: a stream gets the block of another by waiting for that one, where
/// there is no other memory; and one that has no owner without a wait.
#[test]
fn a_stream_secures_anothers_block_by_a_wait_and_an_idle_one_without() {
    let (arena, sim) = open(Order::Lazy, ByteSize::mib(2));
    let (one, two) = (lane(&arena, &sim), lane(&arena, &sim));
    let idle = arena.alloc::<u8>(MIB, DYNAMIC).expect("room");
    drop(idle);
    sim.stream_synchronize(one.stream()).expect("nothing is queued");
    let first = one.alloc::<u8>(2 * MIB, DYNAMIC).expect("after all work of the device");
    assert_eq!((waits(&sim), sim.calls(Call::Synchronize)), (0, 1));
    let place = at(&first);
    let check = fill(&sim, one.stream(), &first, 1);
    drop(first);
    let secured = two.alloc::<u8>(2 * MIB, DYNAMIC).expect("the other's");
    assert_eq!((at(&secured), waits(&sim)), (place, 1));
    assert_eq!(sim.calls(Call::Synchronize), 1, "no thread waited");
    let second = fill(&sim, two.stream(), &secured, 2);
    sim.stream_synchronize(two.stream()).expect("what it waited for comes first");
    assert_sound(&sim, &[check, second]);
    drop(secured);
    two.end_run().expect("an event");
    sim.stream_synchronize(two.stream()).expect("done");
    arena.purge().expect("the event is asked");
    let unowned = one.alloc::<u8>(2 * MIB, DYNAMIC).expect("nobody's");
    assert_eq!(waits(&sim), 1);
    drop(unowned);
}
