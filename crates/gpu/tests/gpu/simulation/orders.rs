//! The orders of work: deterministic, different by seed, and free of deadlocks.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::thread;

use lowtide_cuda_sim::{Order, Pattern, SimDriver};
use lowtide_gpu::ByteSize;
use lowtide_gpu::driver::{Driver as _, EventHandle, StreamHandle};

use super::{GRANULE, Numbers, committed, device};

/// Random calls, all of them allowed; the memory they touch stays.
fn work_at_random(sim: &SimDriver, seed: u64, calls: usize) {
    let mut numbers = Numbers::new(seed);
    let at = committed(sim, 1);
    let mut streams: Vec<StreamHandle> = Vec::new();
    let mut events: Vec<EventHandle> = Vec::new();
    for _ in 0..8 {
        streams.push(sim.stream_create().expect("stream"));
        events.push(sim.event_create().expect("event"));
    }
    for _ in 0..calls {
        let stream = usize::try_from(numbers.below(8)).expect("small");
        let event = events[usize::try_from(numbers.below(8)).expect("small")];
        let size = ByteSize::new(1 + numbers.below(64));
        let done = match numbers.below(12) {
            0..=3 => sim.fill(streams[stream], at, size, Pattern::new(seed)),
            4 | 5 => sim.event_record(event, streams[stream]),
            6 | 7 => sim.stream_wait_event(streams[stream], event),
            8 => sim.event_query(event).map(drop),
            9 => sim.event_synchronize(event),
            10 if numbers.below(10) == 0 => {
                sim.stream_destroy(streams[stream]).expect("at once");
                streams[stream] = sim.stream_create().expect("stream");
                Ok(())
            }
            _ => sim.host_function(streams[stream], numbers.below(1 << 20)),
        };
        done.expect("allowed");
    }
    sim.validate();
    sim.synchronize().expect("done");
    sim.validate();
    sim.assert_no_faults();
    assert_eq!(sim.unfinished(), 0);
}

#[test]
fn the_same_seed_and_calls_give_the_same_log() {
    for seed in 0..20 {
        for order in [Order::Lazy, Order::Synchronous, Order::Random { seed }] {
            let [first, second] = [(); 2].map(|()| {
                let sim = device(order);
                work_at_random(&sim, seed, 500);
                sim
            });
            assert_eq!(first.log_hash(), second.log_hash(), "{order:?}, seed {seed}");
            assert_eq!(first.ran(), second.ran(), "{order:?}, seed {seed}");
        }
    }
}

#[test]
fn another_seed_gives_another_order_for_the_same_calls() {
    let mut hashes = BTreeSet::new();
    for seed in 0..50 {
        let sim = device(Order::Random { seed });
        work_at_random(&sim, 1, 200);
        hashes.insert(sim.log_hash());
    }
    assert_eq!(hashes.len(), 50);
}

#[test]
fn synchronous_work_is_done_when_its_call_returns() {
    let sim = device(Order::Synchronous);
    let stream = sim.stream_create().expect("stream");
    let mark = sim.event_create().expect("event");
    let at = committed(&sim, 1);
    for _ in 0..10 {
        sim.fill(stream, at, GRANULE, Pattern::new(1)).expect("done");
        sim.event_record(mark, stream).expect("done");
        assert_eq!((sim.unfinished(), sim.event_query(mark)), (0, Ok(true)));
    }
}

#[test]
fn random_order_leaves_work_undone_and_gets_on_with_it() {
    let (mut left, mut seen_done) = (0, 0);
    for seed in 0..50 {
        let sim = device(Order::Random { seed });
        let stream = sim.stream_create().expect("stream");
        let mark = sim.event_create().expect("event");
        sim.host_function(stream, 1).expect("queued");
        sim.event_record(mark, stream).expect("recorded");
        left += usize::from(sim.unfinished() > 0);
        // Asking is a call, and before each call other work may get on.
        let done = (0..200).any(|_| sim.event_query(mark).expect("asked"));
        seen_done += usize::from(done);
    }
    assert!(left >= 10, "{left} of 50 left work undone");
    assert_eq!(seen_done, 50);
}

#[test]
fn calls_of_several_threads_are_done_one_after_the_other() {
    let sim = Arc::new(device(Order::Random { seed: 4 }));
    let threads: Vec<_> = (0..4)
        .map(|seed| {
            let sim = Arc::clone(&sim);
            thread::spawn(move || work_at_random(&sim, seed, 2_000))
        })
        .collect();
    for thread in threads {
        thread.join().expect("no panic");
    }
    sim.validate();
}
