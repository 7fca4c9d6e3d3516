//! Lanes under loom: memory that one stream freed and another takes, while a third thread checks
//! for completed work, and streams that end.
//!
//! Invariant: work on a span comes after all earlier work on it, by its own stream's order or by a
//! wait; no call is made with the handle of a destroyed stream.

use super::*;

/// Creates a lane of the stream with this number. The model checks that the stream exists.
pub(super) fn lane(arena: &DeviceArena, number: u64) -> Lane {
    // SAFETY: the model looks whether a stream is there.
    unsafe { arena.lane(StreamHandle::new(number)) }.expect("a lane")
}

/// Queues work on a buffer on a lane's stream.
pub(super) fn give(driver: &Model, lane: &Lane, buffer: &Buffer<u8>) {
    let lease = buffer.enter().expect("a lease");
    let at = buffer.address(&lease).expect("ours").expect("not empty");
    lock(&driver.work).give(lane.stream(), at, buffer.bytes());
}

pub(super) fn granule(lane: &Lane) -> Result<Buffer<u8>, DeviceError> {
    lane.alloc(512, Region::Dynamic)
}

#[test]
fn what_one_lane_frees_another_takes_after_its_work() {
    loom::model(|| {
        let (arena, driver) = open_beside_streams(1);
        let (one, two) = (lane(&arena, 1), lane(&arena, 2));
        let buffer = granule(&one).expect("room");
        give(&driver, &one, &buffer);
        let device = Arc::clone(&driver);
        let take = move |_: &DeviceArena| {
            // There is room once the other thread has freed it.
            if let Ok(buffer) = granule(&two) {
                give(&device, &two, &buffer);
            }
        };
        both(arena, &driver, take, move |_| {
            drop(buffer);
            one.end_run().expect("an event");
        });
    });
}

#[test]
fn two_who_take_parts_of_what_a_third_freed_both_come_after_it() {
    loom::model(|| {
        let (arena, driver) = open_beside_streams(2);
        let [one, two, three] = [1, 2, 3].map(|number| lane(&arena, number));
        let whole = one.alloc::<u8>(1024, Region::Dynamic).expect("room");
        give(&driver, &one, &whole);
        drop(whole);
        let device = Arc::clone(&driver);
        let take = move |_: &DeviceArena| {
            let part = granule(&two).expect("a half of it");
            give(&device, &two, &part);
        };
        let device = Arc::clone(&driver);
        both(arena, &driver, take, move |_| {
            let part = granule(&three).expect("the other");
            give(&device, &three, &part);
            drop(one);
        });
    });
}

#[test]
fn what_a_lane_takes_back_is_not_given_back_by_who_saw_its_end() {
    let mut model = loom::model::Builder::new();
    model.preemption_bound = Some(2);
    model.check(|| {
        let (arena, driver) = open_beside_streams(1);
        let (one, two) = (lane(&arena, 1), lane(&arena, 2));
        let buffer = granule(&one).expect("room");
        give(&driver, &one, &buffer);
        drop(buffer);
        one.end_run().expect("an event");
        let device = Arc::clone(&driver);
        let worker = loom::thread::spawn(move || lock(&device.work).finish_all());
        let purge = |arena: &DeviceArena| {
            arena.purge().expect("what is done");
        };
        let device = Arc::clone(&driver);
        both(arena, &driver, purge, move |_| {
            let buffer = granule(&two).expect("before it left, or after");
            give(&device, &two, &buffer);
        });
        worker.join().expect("no panic");
    });
}

#[test]
fn a_stream_ends_while_another_takes_what_it_freed() {
    loom::model(|| {
        let (arena, driver) = open_beside_streams(1);
        let (one, two) = (lane(&arena, 1), lane(&arena, 2));
        let buffer = granule(&one).expect("room");
        give(&driver, &one, &buffer);
        drop(buffer);
        let device = Arc::clone(&driver);
        let end_it = move |_: &DeviceArena| {
            let stream = one.stream();
            drop(one);
            lock(&device.work).destroy(stream);
        };
        let device = Arc::clone(&driver);
        both(arena, &driver, end_it, move |_| {
            let buffer = granule(&two).expect("its stream waits");
            give(&device, &two, &buffer);
        });
    });
}
