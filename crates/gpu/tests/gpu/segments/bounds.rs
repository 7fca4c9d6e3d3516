//! Limit and device: what is refused, what goes first, and what is told.

use super::*;

#[test]
fn where_the_limit_is_full_of_idle_segments_they_go_and_it_is_tried_again() {
    let bed = Bed::limited(8);
    drop(bed.stable(6).expect("room"));
    bed.settle();
    let whole = bed.dynamic(8).expect("the other region's goes");
    assert_eq!(bed.figures(), [8, 8, 8]);
    let refused = bed.dynamic(1).expect_err("it is full");
    match &refused {
        DeviceError::OutOfMemory { active, committed, limit, requested, .. } => {
            assert_eq!([active, committed, limit], [&ByteSize::mib(8); 3]);
            assert_eq!(*requested, ByteSize::mib(1));
        }
        other => panic!("{other:?}"),
    }
    drop(whole);
    drop(bed.dynamic(1).expect("pending memory is waited for"));
    bed.end();
}

#[test]
fn no_more_is_given_back_for_the_limit_than_is_in_the_way() {
    let bed = Bed::limited(72);
    let large = bed.dynamic(56).expect("room");
    drop([2, 4, 8].map(|mib| bed.dynamic(mib).expect("room")));
    bed.settle();
    assert_eq!(bed.figures(), [70, 56, 56]);
    // 6 are wanted and 2 are left: of 2, 4 and 8 the 4 do.
    let stable = bed.stable(6).expect("room");
    assert_eq!(bed.figures(), [72, 62, 62]);
    assert_eq!(bed.sim.calls(Call::Free), 1);
    drop((large, stable));
    bed.end();
}

#[test]
fn where_the_device_is_full_idle_segments_go_and_a_pool_is_trimmed() {
    for pool in [false, true] {
        let bed = Bed::open(pool, |_| {});
        bed.sim.set_capacity(ByteSize::mib(512 + 32));
        let live = bed.stable(2).expect("room");
        drop([10, 10, 10].map(|mib| bed.dynamic(mib).expect("room")));
        bed.settle();
        assert_eq!(bed.on_device(), [32, 32]);
        let large = bed.dynamic(28).expect("all of the idle ones go");
        assert_eq!((bed.figures(), bed.on_device()), ([30, 30, 30], [30, 30]));
        let refused = bed.dynamic(4).expect_err("the device is full");
        assert!(refused.is_out_of_memory(), "{refused}");
        assert_eq!(bed.snapshot().alloc_failures_device_total, 1);
        bed.sim.set_neighbours(ByteSize::mib(2));
        assert!(bed.stable(1).is_err());
        drop((live, large));
        bed.end();
    }
}

/// A limit that was lowered: what is above it goes first.
#[test]
fn under_a_lowered_limit_idle_segments_go_and_no_more_is_obtained() {
    let bed = Bed::limited(64);
    let live = bed.stable(4).expect("room");
    drop([8, 16].map(|mib| bed.dynamic(mib).expect("room")));
    bed.settle();
    bed.set_limit(ByteSize::mib(6));
    let small = bed.stable(1).expect("4 and 2 are within it");
    assert_eq!(bed.figures(), [6, 6, 5]);
    bed.set_limit(ByteSize::mib(2));
    assert!(bed.dynamic(1).is_err());
    let beside = bed.stable(1).expect("its segment has room");
    drop((live, small, beside));
    bed.end();
}

#[test]
fn callbacks_are_asked_where_nothing_is_idle() {
    let bed = Bed::limited(4);
    let cache = Arc::new(std::sync::Mutex::new(vec![bed.dynamic(4).expect("room")]));
    let evict = bed.on_shortage({
        let cache = Arc::clone(&cache);
        move |_| cache.try_lock().is_ok_and(|mut cache| cache.pop().is_some())
    });
    let needed = bed.stable(4).expect("the cache gives way");
    assert_eq!(bed.figures(), [4, 4, 4]);
    drop((evict, needed));
    bed.end();
}

#[test]
fn what_is_larger_than_the_reserve_is_refused_and_offsets_do_not_run_out_below_it() {
    let bed = Bed::open(false, |config| config.reserve = ByteSize::mib(384));
    assert!(matches!(bed.dynamic(385), Err(DeviceError::TooLarge { .. })));
    // Segments of one block, each with a wall beside it.
    let mut all: Vec<_> = (0..32).map(|_| bed.dynamic(12).expect("room")).collect();
    let mut nth = 0;
    all.retain(|_| {
        nth += 1;
        nth % 2 == 0
    });
    bed.settle();
    bed.purge().expect("no call fails");
    let whole = bed.dynamic(384).expect("the offsets go on");
    assert_eq!(bed.figures(), [576, 576, 576]);
    drop((all, whole));
    bed.end();
}

/// The bug: a trim that failed refused a block for which room had been made.
#[test]
fn a_trim_that_fails_refuses_no_block_that_has_room() {
    let bed = Bed::open(true, |config| config.limit = ByteSize::mib(8));
    drop(bed.dynamic(6).expect("room"));
    bed.settle();
    bed.sim.fail_always(Call::PoolTrim, Some(SimError::InvalidValue));
    let whole = bed.stable(8).expect("the limit has room");
    assert_eq!(bed.figures(), [8, 8, 8]);
    let refused = bed.stable(1).expect_err("the limit is full");
    assert!(refused.is_out_of_memory(), "{refused}");
    drop(whole);
    bed.end();
}

/// The bug: what the pool had kept for want of a trim was not asked for when the device was full.
#[test]
fn what_a_pool_kept_for_want_of_a_trim_goes_when_the_device_is_full() {
    let bed = Bed::open(true, |_| {});
    bed.sim.set_capacity(ByteSize::mib(512 + 64));
    drop(bed.dynamic(40).expect("room"));
    bed.settle();
    bed.sim.fail_always(Call::PoolTrim, Some(SimError::InvalidValue));
    assert!(bed.purge().is_err());
    assert_eq!((bed.figures(), bed.on_device()), ([0; 3], [0, 40]));
    let refused = bed.stable(60).expect_err("the pool keeps it still");
    assert!(refused.is_out_of_memory(), "{refused}");
    bed.sim.forget_failures();
    let large = bed.stable(60).expect("the pool gives it up");
    assert_eq!((bed.figures(), bed.on_device()), ([60, 60, 60], [60, 60]));
    drop(large);
    bed.end();
}
