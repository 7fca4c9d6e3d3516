//! Contexts of threads: another device's, none, and ends in threads that never used CUDA.
//!
//! Invariant: what was current in a thread before a call of ours is current after it.

use std::sync::Arc;
use std::thread;

use cudarc::driver::CudaContext;
use cudarc::driver::result::ctx::get_current;
use lowtide_fake_cuda::Fake;
use lowtide_gpu::Region;
use lowtide_gpu::driver::Driver as _;

use super::support::{Bed, LAZY, UNIT, check, life, write};

/// The number of the context that is current in this thread; 0 for none.
fn current() -> usize {
    get_current().expect("answered").map_or(0, |context| context.addr())
}

#[test]
fn another_devices_context_stays_current() {
    let fake = Fake::start(LAZY);
    let bed = Bed::new();
    let other = CudaContext::new(1).expect("the other device");
    let theirs = other.cu_ctx().addr();
    other.bind_to_thread().expect("current");
    let arena = bed.arena();
    let lane = arena.cuda_lane(&bed.one).expect("a lane");
    let block = lane.alloc::<u8>(3 * UNIT, Region::Dynamic).expect("room");
    drop(block);
    lane.end_run().expect("marked");
    bed.settle(&arena);
    arena.purge().expect("purged");
    bed.driver.headroom().expect("asked");
    assert_eq!(current(), theirs);
    // A call of ours that fails, too.
    fake.fail(c"cuMemCreate", 1, 999);
    lane.alloc::<u8>(3 * UNIT, Region::Dynamic).expect_err("refused");
    assert_eq!(current(), theirs);
    drop(lane);
    arena.close().expect("closed");
    drop(arena);
    assert_eq!(current(), theirs);
    let Bed { driver, one, two, context, .. } = bed;
    drop((one, two, context)); // cudarc makes its own current
    other.bind_to_thread().expect("current");
    drop(driver);
    assert_eq!(current(), theirs);
    drop(other);
    fake.assert_clean();
}

/// cudarc made its own current, and left it so.
#[test]
fn another_devices_context_stays_current_when_a_view_is_made_and_when_it_is_freed() {
    let fake = Fake::start(LAZY);
    let bed = Bed::new();
    let arena = bed.arena();
    let lane = arena.cuda_lane(&bed.one).expect("a lane");
    let mut buffer = lane.alloc::<u8>(UNIT, Region::Dynamic).expect("room");
    let other = CudaContext::new(1).expect("the other device");
    let theirs = other.cu_ctx().addr();
    let lease = lane.enter().expect("awake");
    let _ = buffer.cuda(&lease).expect("a view");
    assert_eq!(current(), theirs);
    fake.fail(c"cuEventCreate", 2, 2);
    drop(lease);
    buffer.resize(2 * UNIT).expect("room");
    let lease = lane.enter().expect("awake");
    buffer.cuda(&lease).expect_err("no event");
    assert_eq!(current(), theirs);
    drop(lease);
    write(&bed.two, &mut buffer, 1).expect("queued");
    other.bind_to_thread().expect("current");
    drop(buffer);
    assert_eq!(current(), theirs);
    drop(lane);
    arena.close().expect("closed");
    drop((arena, bed, other));
    fake.assert_clean();
}

#[test]
fn a_thread_without_a_context_can_do_all_that_others_can() {
    let fake = Fake::start(LAZY);
    let bed = Bed::new();
    let lives = thread::scope(|scope| {
        let life = scope.spawn(|| {
            assert_eq!(current(), 0);
            life(&bed, &mut || {}).0
        });
        life.join().expect("no panic")
    });
    assert_eq!(lives, Vec::<String>::new());
    drop(bed);
    fake.assert_clean();
}

#[test]
fn buffers_end_in_threads_that_never_used_the_device() {
    let fake = Fake::start(LAZY);
    let bed = Bed::new();
    let arena = bed.arena();
    let lane = arena.cuda_lane(&bed.one).expect("a lane");
    for value in 0..4 {
        let mut viewed = lane.alloc::<u8>(2 * UNIT, Region::Dynamic).expect("room");
        let bare = lane.alloc::<u8>(UNIT, Region::Dynamic).expect("room");
        write(&bed.two, &mut viewed, 100 + value).expect("queued");
        thread::spawn(move || drop((viewed, bare))).join().expect("no panic");
        let mut next = lane.alloc::<u8>(2 * UNIT, Region::Dynamic).expect("room");
        write(&bed.one, &mut next, value).expect("queued");
        bed.two.synchronize().expect("done");
        check(&bed.one, &next, value);
    }
    assert_eq!(arena.snapshot().parked_errors_total, 0);
    drop(lane);
    arena.close().expect("closed");
    drop((arena, bed));
    fake.assert_clean();
}

#[test]
fn the_last_of_a_device_ends_in_another_thread() {
    let fake = Fake::start(LAZY);
    let Bed { driver, context, one, two, clock } = Bed::new();
    let bed = Bed { driver: Arc::clone(&driver), context, one, two, clock };
    let arena = bed.arena();
    drop((arena, bed));
    assert_eq!(fake.retains(0), 1);
    thread::spawn(move || drop(driver)).join().expect("no panic");
    assert_eq!(fake.retains(0), 0);
    fake.assert_clean();
}

/// The first call of ours left the device's context current in it.
#[test]
fn a_thread_without_a_context_has_none_after_our_calls() {
    let fake = Fake::start(LAZY);
    let bed = Bed::new();
    let arena = bed.arena();
    let lane = arena.cuda_lane(&bed.one).expect("a lane");
    let act = || {
        assert_eq!(current(), 0);
        drop(lane.alloc::<u8>(3 * UNIT, Region::Dynamic).expect("room"));
        lane.end_run().expect("marked");
        arena.purge().expect("looked");
        bed.driver.headroom().expect("asked");
        bed.driver.synchronize().expect("done");
        assert_eq!(current(), 0);
        fake.fail(c"cuMemGetInfo_v2", 1, 999);
        bed.driver.headroom().expect_err("refused");
        assert_eq!(current(), 0, "after a call that failed");
    };
    thread::scope(|scope| scope.spawn(act).join().expect("no panic"));
    drop(lane);
    arena.close().expect("closed");
    drop((arena, bed));
    fake.assert_clean();
}

/// cudarc left the device's context current, and so it stayed.
#[test]
fn a_thread_without_a_context_has_none_after_a_view_is_made_and_freed() {
    let fake = Fake::start(LAZY);
    let bed = Bed::new();
    let arena = bed.arena();
    let lane = arena.cuda_lane(&bed.one).expect("a lane");
    let buffer = lane.alloc::<u8>(UNIT, Region::Dynamic).expect("room");
    let act = move || {
        assert_eq!(current(), 0);
        let lease = lane.enter().expect("awake");
        let _ = buffer.cuda(&lease).expect("a view");
        assert_eq!(current(), 0, "after it is made");
        drop(lease);
        drop(buffer);
        assert_eq!(current(), 0, "after it is freed");
        drop(lane);
        assert_eq!(current(), 0);
    };
    thread::scope(|scope| scope.spawn(act).join().expect("no panic"));
    arena.close().expect("closed");
    drop((arena, bed));
    fake.assert_clean();
}
