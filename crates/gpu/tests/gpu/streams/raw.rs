//! Raw blocks on lanes: what the driver hears of them, and what it does not.
//!
//! That work is waited for is a case of the contract of every driver.

use lowtide_cuda_sim::{Call, Order, Outcome, Pattern};
use lowtide_gpu::ByteSize;

use super::{DYNAMIC, lane, open};

const SIZE: ByteSize = ByteSize::mib(3);
const ANY: ByteSize = ByteSize::new(1);

#[test]
fn a_lane_takes_its_raw_block_again_at_once_and_the_driver_hears_nothing_of_it() {
    let (arena, sim) = open(Order::Lazy, ByteSize::mib(4));
    let lane = lane(&arena, &sim);
    let first = lane.alloc_raw(SIZE, ANY, DYNAMIC).expect("room");
    let mut checks = Vec::new();
    for mark in 0..10 {
        let block =
            if mark == 0 { first } else { lane.alloc_raw(SIZE, ANY, DYNAMIC).expect("room") };
        assert_eq!(block.at, first.at);
        let pattern = Pattern::new(mark);
        sim.fill(lane.stream(), block.at, SIZE, pattern).expect("queued");
        checks.push(sim.check(lane.stream(), block.at, SIZE, pattern).expect("queued"));
        lane.free(block.at).expect("live");
    }
    for call in [Call::StreamWaitEvent, Call::EventRecord, Call::Synchronize] {
        assert_eq!(sim.calls(call), 0, "{call:?}");
    }
    sim.run_all();
    assert!(checks.into_iter().all(|check| sim.outcome(check) == Outcome::Held));
    sim.assert_no_faults();
}

#[test]
fn another_lane_takes_a_raw_block_after_one_wait_of_its_stream_and_no_thread_waits() {
    let (arena, sim) = open(Order::Lazy, ByteSize::mib(4));
    let (one, two) = (lane(&arena, &sim), lane(&arena, &sim));
    let block = one.alloc_raw(SIZE, ANY, DYNAMIC).expect("room");
    sim.fill(one.stream(), block.at, SIZE, Pattern::new(1)).expect("queued");
    one.free(block.at).expect("live");
    let taken = two.alloc_raw(SIZE, ANY, DYNAMIC).expect("room");
    assert_eq!((taken.at, sim.calls(Call::StreamWaitEvent)), (block.at, 1));
    for call in [Call::EventSynchronize, Call::Synchronize] {
        assert_eq!(sim.calls(call), 0, "{call:?}");
    }
    two.free(taken.at).expect("live");
}
