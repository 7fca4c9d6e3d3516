//! Sleep and streams under loom: work started under leases, streams that end, memory that is taken
//! from another stream.
//!
//! Invariant: no memory leaves before the host has seen the work on it complete; the model's
//! decommit checks that.

use super::*;
use crate::models::lanes::{give, granule as on_lane, lane};

fn open_beside_work(limit_granules: u64) -> (DeviceArena, Arc<Model>) {
    let driver = Model { asynchronous: true, ..Model::default() };
    open_on(limit_granules, driver)
}

#[test]
fn the_work_that_a_lease_let_in_is_waited_for_before_a_sleep() {
    for is_named in [true, false] {
        loom::model(move || {
            let (arena, driver) = open_beside_work(2);
            let lane = lane(&arena, 1);
            let buffer = granule(&arena);
            let device = Arc::clone(&driver);
            both(arena.clone(), &driver, sleep, move |arena| {
                let lease = if is_named { lane.enter() } else { arena.enter() };
                let lease = lease.expect("awake, or woken");
                assert_backed(&device, &buffer, &lease);
                let at = buffer.address(&lease).expect("ours").expect("not empty");
                lock(&device.work).give(lane.stream(), at, buffer.bytes());
                drop((lease, buffer, lane));
            });
        });
    }
}

#[test]
fn a_stream_that_ends_beside_a_sleep_is_waited_for_all_the_same() {
    loom::model(|| {
        let (arena, driver) = open_beside_work(2);
        let lane = lane(&arena, 1);
        let buffer = granule(&arena);
        {
            let lease = lane.enter().expect("awake");
            let at = buffer.address(&lease).expect("ours").expect("not empty");
            lock(&driver.work).give(lane.stream(), at, buffer.bytes());
        }
        let device = Arc::clone(&driver);
        both(arena, &driver, sleep, move |_| {
            let stream = lane.stream();
            drop(lane);
            lock(&device.work).destroy(stream);
            drop(buffer);
        });
    });
}

#[test]
fn what_is_taken_from_another_stream_beside_a_sleep_is_waited_for_by_it() {
    loom::model(|| {
        let (arena, driver) = open_beside_work(1);
        let (one, two) = (lane(&arena, 1), lane(&arena, 2));
        let first = on_lane(&one).expect("room");
        give(&driver, &one, &first);
        drop(first);
        let device = Arc::clone(&driver);
        both(arena, &driver, sleep, move |_| {
            let second = on_lane(&two).expect("after the first");
            let lease = two.enter().expect("awake, or woken");
            assert_backed(&device, &second, &lease);
            drop(lease);
            give(&device, &two, &second);
            drop((second, one, two));
        });
    });
}
