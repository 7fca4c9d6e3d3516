//! Values that no call could take, and use after an end, by the public interface.
//!
//! Invariant: each is a typed error, after which all goes on.

use lowtide::ByteSize;
use lowtide_fake_cuda::Fake;
use lowtide_gpu::driver::{Driver as _, DriverError, HostMemory};
use lowtide_gpu::{DeviceError, Region};

use super::support::{Bed, Errors, LAZY, UNIT, check, life, write};

/// Sizes that are no number of granules, or beyond all addresses.
const ABSURD: [u64; 5] = [0, 1, UNIT as u64 + 1, u64::MAX, u64::MAX - 4_096];

#[test]
fn the_driver_names_sizes_that_it_cannot_take() {
    let fake = Fake::start(LAZY);
    let bed = Bed::new();
    for size in ABSURD.map(ByteSize::new) {
        let error = bed.driver.reserve(size).expect_err("no such range");
        assert!(matches!(error, DriverError::Misaligned { .. }), "{size}: {error}");
    }
    for size in [1 << 50, 1 << 62].map(ByteSize::new) {
        let error = bed.driver.reserve(size).expect_err("not so many addresses");
        assert!(matches!(error, DriverError::OutOfMemory { requested, .. } if requested == size));
    }
    for size in [0, 1, 4_097, u64::MAX].map(ByteSize::new) {
        let refused = [
            bed.driver.host_alloc(size, HostMemory::PageLocked).map(drop),
            bed.driver.host_store_create(size).map(drop),
        ];
        for error in refused.map(|it| it.expect_err("no such size")) {
            assert!(matches!(error, DriverError::Misaligned { .. }), "{size}: {error}");
        }
    }
    let most = ByteSize::new(u64::MAX - (UNIT as u64 - 1));
    let error = bed.driver.host_store_create(most).expect_err("not so much memory");
    assert!(matches!(error, DriverError::OutOfMemory { .. }), "{error}");
    assert_eq!(life(&bed, &mut || {}).0, Vec::<String>::new());
    drop(bed);
    fake.assert_clean();
}

#[test]
fn buffers_of_absurd_sizes_are_refused_and_others_are_well() {
    let fake = Fake::start(LAZY);
    let bed = Bed::new();
    let arena = bed.arena();
    let lane = arena.cuda_lane(&bed.one).expect("a lane");
    let mut buffer = lane.alloc::<u8>(UNIT, Region::Stable).expect("room");
    write(&bed.one, &mut buffer, 3).expect("queued");
    for len in [usize::MAX, usize::MAX / 2, 1 << 60, 1 << 40] {
        let error = lane.alloc::<u64>(len, Region::Dynamic).expect_err("no such buffer");
        assert!(matches!(error, DeviceError::TooLarge { .. }), "{len}: {error}");
        buffer.resize(len).expect_err("no such buffer");
        check(&bed.two, &buffer, 3);
    }
    let empty = lane.alloc::<u64>(0, Region::Dynamic).expect("nothing");
    let lease = lane.enter().expect("awake");
    assert!(empty.cuda(&lease).expect("a view of nothing").is_empty());
    drop((lease, empty, buffer, lane));
    arena.close().expect("closed");
    drop((arena, bed));
    fake.assert_clean();
}

#[test]
fn a_closed_arena_and_its_lanes_say_so() {
    let fake = Fake::start(LAZY);
    let bed = Bed::new();
    let arena = bed.arena();
    let lane = arena.cuda_lane(&bed.one).expect("a lane");
    arena.close().expect("closed");
    let refused = [
        arena.cuda_lane(&bed.two).map(drop),
        lane.alloc::<u8>(1, Region::Dynamic).map(drop),
        arena.alloc::<u8>(1, Region::Dynamic).map(drop),
        lane.enter().map(drop),
    ];
    for error in refused.map(|it| it.expect_err("closed")) {
        assert!(matches!(error, DeviceError::Closed { .. }), "{error}");
    }
    drop((lane, arena));
    // The device is there for another arena.
    let Errors(errors) = life(&bed, &mut || {});
    assert_eq!(errors, Vec::<String>::new());
    drop(bed);
    fake.assert_clean();
}
