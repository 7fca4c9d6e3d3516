//! Pinned buffers and copies that are not complete: what safe code can do meanwhile, and what
//! becomes of memory of which it cannot be shown that a copy is complete.
//!
//! Invariant: what a copy reads is what was there when it was queued, and what a host reads is what
//! a copy wrote.
#![expect(unsafe_code, reason = "fork, and cudarc's switch of its tracking")]

use std::sync::Arc;

use cudarc::driver::sys::{CUgraphInstantiate_flags, CUstreamCaptureMode};
use lowtide::ByteSize;
use lowtide_fake_cuda::{Fake, Guard, Options};
use lowtide_gpu::clock::SystemClock;
use lowtide_gpu::driver::StreamHandle;
use lowtide_gpu::{Buffer, DeviceError, Lane, PinnedBuffer, PinnedConfig, PinnedPool, Region};

use super::pinned_schedule::{self, Done};
use super::support::{Bed, check, end, start, write};

/// One segment.
const SEGMENT: ByteSize = ByteSize::kib(64);
const LEN: usize = 4 << 10;

fn pool(bed: &Bed) -> PinnedPool {
    let config = PinnedConfig { segment: SEGMENT, ..PinnedConfig::new("staging") };
    PinnedPool::open(bed.driver.clone(), Arc::new(SystemClock::new()), config).expect("a pool")
}

fn filled(pool: &PinnedPool, byte: u8) -> PinnedBuffer<u8> {
    pool.alloc_from(&[byte; LEN]).expect("room")
}

fn device(lane: &Lane) -> Buffer<u8> {
    lane.alloc(LEN, Region::Dynamic).expect("room")
}

fn holds(buffer: &PinnedBuffer<u8>, byte: u8) {
    assert_eq!(buffer.to_vec(), Ok(vec![byte; LEN]));
}

/// Ends a test that let memory be quarantined, which is on record as locked.
fn end_with_locked((fake, bed, arena, lane): (Guard, Bed, lowtide_gpu::DeviceArena, Lane)) {
    drop(lane);
    arena.close().expect("closed");
    drop((arena, bed));
    assert_eq!(fake.faults(), "");
}

/// `fill(1); memcpy_htod; fill(2)` left 2 on the device.
#[test]
fn what_is_written_after_a_copy_by_cudarc_is_not_copied() {
    for tracks in [true, false] {
        let (fake, bed, arena, lane) = start();
        track(&bed, tracks);
        let (pool, mut to) = (pool(&bed), device(&lane));
        let mut from = filled(&pool, 1);
        let lease = lane.enter().expect("awake");
        let mut view = to.cuda_mut(&lease).expect("a view");
        let copied = bed.one.memcpy_htod(&from.cuda(&lane).expect("a view"), &mut view);
        copied.expect("queued");
        drop(lease);
        from.fill(2).expect("the copy is complete");
        check(&bed.one, &to, 1);
        drop((from, to, pool));
        end((fake, bed, arena, lane));
    }
}

/// `memcpy_dtoh` read 0.
#[test]
fn what_is_read_after_a_copy_by_cudarc_is_what_was_copied() {
    for tracks in [true, false] {
        let (fake, bed, arena, lane) = start();
        track(&bed, tracks);
        let (pool, mut from) = (pool(&bed), device(&lane));
        write(&bed.one, &mut from, 7).expect("queued");
        let mut to = filled(&pool, 0);
        let lease = lane.enter().expect("awake");
        let slice = from.cuda(&lease).expect("a view");
        let copied = bed.one.memcpy_dtoh(slice, &mut to.cuda(&lane).expect("a view"));
        copied.expect("queued");
        drop(lease);
        holds(&to, 7);
        drop((to, from, pool));
        end((fake, bed, arena, lane));
    }
}

/// A drop and a purge under a queued copy freed the memory.
#[test]
fn memory_of_a_dropped_copy_is_not_reused_or_freed_before_the_copy_is_complete() {
    let (fake, bed, arena, lane) = start();
    let (pool, mut to) = (pool(&bed), device(&lane));
    let copy = lane.copy_to_device(filled(&pool, 1), &mut to).expect("queued");
    assert_eq!(copy.is_complete(), Ok(false));
    drop(copy);
    assert_eq!(pool.purge(), Ok(ByteSize::ZERO));
    let snapshot = pool.snapshot();
    assert_eq!((snapshot.live(), snapshot.pending), (ByteSize::ZERO, ByteSize::of(LEN)));
    pool.validate();
    // All other blocks of the segment, and of the next one.
    let others: Vec<_> = (0..31).map(|_| filled(&pool, 2)).collect();
    check(&bed.one, &to, 1);
    drop(others);
    assert_eq!(pool.purge(), Ok(ByteSize::kib(128)));
    assert!(pool.snapshot().pending.is_zero());
    drop((to, pool));
    end((fake, bed, arena, lane));
}

#[test]
fn a_pending_block_is_used_again_once_its_copy_is_complete() {
    let (fake, bed, arena, lane) = start();
    let (pool, mut to) = (pool(&bed), device(&lane));
    let full: Vec<_> = (0..15).map(|_| filled(&pool, 2)).collect();
    drop(lane.copy_to_device(filled(&pool, 1), &mut to).expect("queued"));
    bed.one.synchronize().expect("done");
    drop(filled(&pool, 3));
    assert_eq!(pool.glance().committed, SEGMENT, "no second segment");
    drop((full, to, pool));
    end((fake, bed, arena, lane));
}

#[test]
fn a_copy_returns_its_buffer_when_it_is_complete() {
    let (fake, bed, arena, lane) = start();
    let (pool, mut middle) = (pool(&bed), device(&lane));
    let sent = lane.copy_to_device(filled(&pool, 5), &mut middle).expect("queued");
    let back = lane.copy_to_host(&mut middle, filled(&pool, 0)).expect("queued");
    assert_eq!((sent.is_complete(), back.is_complete()), (Ok(false), Ok(false)));
    holds(&back.wait().expect("complete"), 5);
    assert_eq!(sent.is_complete(), Ok(true));
    let mut again = sent.wait().expect("complete");
    again.fill(6).expect("it is ours again");
    drop((again, middle));
    // The end of a pool waits for what is queued.
    let mut other = device(&lane);
    drop(lane.copy_to_device(filled(&pool, 1), &mut other).expect("queued"));
    pool.close().expect("nothing is live");
    drop((other, pool));
    end((fake, bed, arena, lane));
}

/// The bug: the driver refused copies and waits on the legacy default stream, and each attempt left
/// its buffer quarantined.
#[test]
fn a_lane_of_the_legacy_stream_copies_pinned_buffers() {
    let (fake, bed, arena, lane) = start();
    // SAFETY: the legacy default stream always exists.
    let legacy = unsafe { arena.lane(StreamHandle::LEGACY) }.expect("a lane");
    let (pool, mut middle) = (pool(&bed), device(&legacy));
    let sent = legacy.copy_to_device(filled(&pool, 5), &mut middle).expect("queued");
    let back = legacy.copy_to_host(&mut middle, filled(&pool, 0)).expect("queued");
    holds(&back.wait().expect("complete"), 5);
    drop((sent, middle));
    pool.close().expect("nothing is live or quarantined");
    drop((pool, legacy));
    end((fake, bed, arena, lane));
}

/// cudarc's own wait answers an error that another call parked, and does not wait.
#[test]
fn an_event_that_cudarc_could_not_record_does_not_end_the_wait_for_a_copy() {
    let (fake, bed, arena, lane) = start();
    let (pool, mut to) = (pool(&bed), device(&lane));
    write(&bed.one, &mut to, 9).expect("the view has its events");
    let mut from = filled(&pool, 1);
    let lease = lane.enter().expect("awake");
    let mut view = to.cuda_mut(&lease).expect("a view");
    fake.fail(c"cuEventRecord", 1, 999);
    let copied = bed.one.memcpy_htod(&from.cuda(&lane).expect("a view"), &mut view);
    copied.expect("cudarc tells the next call");
    assert!(bed.context.check_err().is_err(), "the record failed, and so cudarc's wait");
    drop(lease);
    from.fill(2).expect("the view waited");
    check(&bed.one, &to, 1);
    drop((from, to, pool));
    end((fake, bed, arena, lane));
}

#[test]
fn a_wait_that_fails_quarantines_the_buffer_of_a_view() {
    let (fake, bed, arena, lane) = start();
    let (pool, mut to) = (pool(&bed), device(&lane));
    let mut from = filled(&pool, 1);
    let lease = lane.enter().expect("awake");
    let mut view = to.cuda_mut(&lease).expect("a view");
    let exported = from.cuda(&lane).expect("a view");
    // cudarc's wait and the view's.
    fake.fail(c"cuStreamSynchronize", 1, 999);
    bed.one.memcpy_htod(&exported, &mut view).expect("cudarc tells the next call");
    fake.fail(c"cuEventSynchronize", 1, 999);
    drop(exported);
    drop(lease);
    let _ = bed.context.check_err();
    assert_quarantined(&pool, from);
    check(&bed.one, &to, 1);
    drop((to, pool));
    end_with_locked((fake, bed, arena, lane));
}

#[test]
fn a_wait_that_fails_quarantines_the_buffer_of_a_copy() {
    for drops in [true, false] {
        let (fake, bed, arena, lane) = start();
        let (pool, mut to) = (pool(&bed), device(&lane));
        let copy = lane.copy_to_device(filled(&pool, 1), &mut to).expect("queued");
        if drops {
            drop(copy);
            fake.fail(c"cuEventQuery", 1, 999);
        } else {
            fake.fail(c"cuEventSynchronize", 1, 999);
            let error = copy.wait().expect_err("it failed");
            assert!(matches!(error, DeviceError::Driver(_)), "{error}");
        }
        assert_eq!(pool.purge(), Ok(ByteSize::ZERO));
        assert_eq!(pool.snapshot().quarantined, ByteSize::of(LEN));
        check(&bed.one, &to, 1);
        drop((to, pool));
        end_with_locked((fake, bed, arena, lane));
    }
}

/// With no event after it, the end of a copy is seen by a wait, or never.
#[test]
fn a_copy_whose_event_cannot_be_recorded_is_waited_for_or_quarantined() {
    for nor_a_wait in [false, true] {
        let (fake, bed, arena, lane) = start();
        let (pool, mut to) = (pool(&bed), device(&lane));
        let from = filled(&pool, 1);
        fake.fail(c"cuEventRecord", 1, 999);
        if nor_a_wait {
            fake.fail(c"cuEventSynchronize", 1, 999);
        }
        let started = lane.copy_to_device(from, &mut to);
        if nor_a_wait {
            let refused = started.expect_err("its end cannot be observed");
            assert!(matches!(refused.error, DeviceError::Driver(_)), "{refused}");
            assert_quarantined(&pool, *refused.value);
        } else {
            let copy = started.expect("it was waited for");
            assert_eq!(copy.is_complete(), Ok(true));
            copy.wait().expect("complete").fill(2).expect("complete");
        }
        check(&bed.one, &to, 1);
        drop((to, pool));
        if nor_a_wait {
            end_with_locked((fake, bed, arena, lane));
        } else {
            end((fake, bed, arena, lane));
        }
    }
}

#[track_caller]
fn assert_quarantined(pool: &PinnedPool, mut buffer: PinnedBuffer<u8>) {
    let refused = DeviceError::Quarantined { pool: "staging".to_owned() };
    assert_eq!(buffer.fill(2), Err(refused.clone()));
    assert_eq!(buffer.to_vec(), Err(refused.clone()));
    assert_eq!(buffer.resize(1), Err(refused));
    drop(buffer);
    assert_eq!(pool.purge(), Ok(ByteSize::ZERO));
    let snapshot = pool.snapshot();
    assert_eq!((snapshot.live(), snapshot.quarantined), (ByteSize::ZERO, ByteSize::of(LEN)));
    pool.validate();
}

#[test]
#[expect(clippy::mem_forget, reason = "safe code may")]
fn a_forgotten_view_leaves_its_buffer_quarantined() {
    let (fake, bed, arena, lane) = start();
    let pool = pool(&bed);
    let mut buffer = filled(&pool, 1);
    std::mem::forget(buffer.cuda(&lane).expect("a view"));
    assert_quarantined(&pool, buffer);
    drop(pool);
    // The lane in the view keeps the arena.
    drop(lane);
    drop((arena, bed));
    assert_eq!(fake.faults(), "");
}

/// A captured copy read or wrote the memory at each launch, whose it was by then.
#[test]
fn no_copy_of_a_pinned_buffer_is_captured() {
    let (fake, bed, arena, lane) = start();
    track(&bed, false);
    let (pool, mut to) = (pool(&bed), device(&lane));
    write(&bed.one, &mut to, 9).expect("queued");
    let mode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
    bed.one.begin_capture(mode).expect("begun");
    let refused = lane.copy_to_device(filled(&pool, 1), &mut to).expect_err("a capture");
    assert!(matches!(refused.error, DeviceError::Capturing { .. }), "{refused}");
    let mut from = *refused.value;
    holds(&from, 1);
    let graph = bed.one.end_capture(CUgraphInstantiate_flags(0)).expect("the capture is sound");
    graph.expect("a graph").launch().expect("launched");
    check(&bed.one, &to, 9);

    bed.one.begin_capture(mode).expect("begun");
    let lease = lane.enter().expect("awake");
    let mut view = to.cuda_mut(&lease).expect("a view");
    let copied = bed.one.memcpy_htod(&from.cuda(&lane).expect("a view"), &mut view);
    copied.expect("cudarc tells the next call");
    drop(lease);
    assert!(bed.context.check_err().is_err(), "a wait in a capture");
    bed.one.end_capture(CUgraphInstantiate_flags(0)).map(drop).expect_err("it was invalidated");
    from.fill(2).expect("nothing was queued");
    check(&bed.one, &to, 9);
    drop((from, to, pool));
    drop(lane);
    // It was viewed in a capture.
    // SAFETY: neither graph is launched any more.
    let released = unsafe { arena.release_captured() }.expect("this process");
    assert_eq!(released, ByteSize::kib(4));
    arena.close().expect("closed");
    drop((arena, bed));
    assert!(fake.faults().contains("CaptureSpoiled") && fake.leaks().is_empty());
}

/// The bug: a view that was dropped while its stream captured waited for the stream, which spoiled
/// the capture.
#[test]
fn a_view_dropped_in_a_capture_does_not_spoil_it() {
    let (fake, bed, arena, lane) = start();
    track(&bed, false);
    let (pool, mut to) = (pool(&bed), device(&lane));
    let mut from = filled(&pool, 1);
    let lease = lane.enter().expect("awake");
    let mut view = to.cuda_mut(&lease).expect("a view");
    let host = from.cuda(&lane).expect("a view");
    bed.one.memcpy_htod(&host, &mut view).expect("queued and waited for");
    drop(lease);
    let mode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
    bed.one.begin_capture(mode).expect("begun");
    drop(host);
    bed.one.end_capture(CUgraphInstantiate_flags(0)).map(drop).expect("the capture is sound");
    assert_quarantined(&pool, from);
    drop((pool, to));
    end_with_locked((fake, bed, arena, lane));
}

#[test]
#[should_panic(expected = "copy on another stream than the view's lane")]
fn a_view_is_of_one_stream() {
    let (_fake, bed, _arena, lane) = start();
    let (pool, mut to) = (pool(&bed), device(&lane));
    let mut from = filled(&pool, 1);
    let lease = lane.enter().expect("awake");
    let mut view = to.cuda_mut(&lease).expect("a view");
    let _ = bed.two.memcpy_htod(&from.cuda(&lane).expect("a view"), &mut view);
}

/// Page-locked memory of CUDA is shared with a forked child: what it wrote was the parent's.
#[test_fork::test]
fn a_forked_child_writes_nothing_to_page_locked_memory_of_its_parent() {
    let (fake, bed, arena, lane) = start();
    let pool = pool(&bed);
    let mut buffer = filled(&pool, 1);
    // SAFETY: the child compares two results and ends with `_exit`.
    let child = unsafe { libc::fork() };
    if child == 0 {
        let refused = matches!(buffer.fill(2), Err(DeviceError::Forked))
            && matches!(buffer.to_vec(), Err(DeviceError::Forked));
        // SAFETY: ends the child at once, without running the parent's exit handlers.
        unsafe { libc::_exit(i32::from(!refused)) };
    }
    assert!(child > 0, "fork failed");
    let mut status = 0;
    // SAFETY: `status` is a valid place for an int, and `child` is our own child.
    let waited = unsafe { libc::waitpid(child, &raw mut status, 0) };
    assert_eq!((waited, status), (child, 0));
    holds(&buffer, 1);
    drop((buffer, pool));
    end((fake, bed, arena, lane));
}

/// The number of random schedules: a hundred thousand in `.ci/run --soak`.
const SCHEDULES: u64 = if cfg!(lowtide_soak) { 100_000 } else { 60 };

#[test]
fn random_schedules_of_copies_never_race() {
    let fake = Fake::start(Options::default());
    let mut all = Done::default();
    for seed in 0..SCHEDULES {
        let bed = pinned_schedule::Bed::new(&fake, u32::from(seed % 2 == 1), seed);
        match bed.run(seed) {
            Ok(done) => all.add(done),
            Err(race) => panic!("{race}"),
        }
    }
    println!("{all:?}");
    assert!(all.quarantined_bytes > 0 && all.failed_calls > 0 && all.launches > 0, "{all:?}");
}

/// The fault that the schedules are there for, planted: they would find it.
#[test]
fn schedules_with_plain_slices_race() {
    let fake = Fake::start(Options::default());
    let raced = (0..50).filter(|&seed| {
        pinned_schedule::Bed::new(&fake, 0, seed).with_plain_slices().run(seed).is_err()
    });
    assert!(raced.count() > 10);
}

fn track(bed: &Bed, on: bool) {
    let context: &Arc<_> = &bed.context;
    if on {
        // SAFETY: each buffer is used by one stream only.
        unsafe { context.enable_event_tracking() };
    } else {
        // SAFETY: as above.
        unsafe { context.disable_event_tracking() };
    }
}
