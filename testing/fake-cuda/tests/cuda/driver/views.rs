//! Buffers as cudarc sees them: what a view costs, what it orders, when there is none.
//!
//! Invariant: work that cudarc was given through a view comes before whatever the arena does next
//! with that memory.
#![expect(unsafe_code, reason = "a kernel is launched, whose arguments only its caller knows")]

use std::sync::Arc;
use std::time::Duration;

use cudarc::driver::{
    CudaContext, CudaStream, DevicePtr as _, LaunchConfig, PushKernelArg as _, result,
};
use cudarc::nvrtc::Ptx;
use lowtide::clock::ManualClock;
use lowtide_gpu::{
    Buffer, CompactOptions, DeviceArena, DeviceError, HostDriver, Lane, Lease, Region,
    SleepOptions, SleepState,
};

use super::support::{Bed, UNIT, check, end, read, start, write};

fn alloc(lane: &Lane, size: usize) -> Buffer<u8> {
    lane.alloc(size, Region::Dynamic).expect("room")
}

/// Returns the address at which a view begins.
fn place(stream: &Arc<CudaStream>, buffer: &Buffer<u8>, lease: &Lease) -> u64 {
    buffer.cuda(lease).expect("a view").device_ptr(stream).0
}

#[test]
fn a_buffer_that_is_never_viewed_costs_no_call() {
    let (fake, bed, arena, lane) = start();
    drop(alloc(&lane, UNIT));
    let before = fake.calls_total();
    for _ in 0..50 {
        drop(alloc(&lane, UNIT));
    }
    assert_eq!(fake.calls_total(), before);
    end((fake, bed, arena, lane));
}

#[test]
fn the_first_view_makes_two_events_and_the_next_none() {
    let (fake, bed, arena, lane) = start();
    let mut buffer = alloc(&lane, UNIT);
    let lease = lane.enter().expect("awake");
    let before = fake.calls(c"cuEventCreate");
    let _ = buffer.cuda(&lease).expect("a view");
    assert_eq!(fake.calls(c"cuEventCreate"), before + 2);
    let before = fake.calls_total();
    for _ in 0..10 {
        let _ = (buffer.cuda(&lease).expect("a view"), buffer.cuda(&lease).expect("a second"));
        let _ = buffer.cuda_mut(&lease).expect("a view");
    }
    assert_eq!(fake.calls_total(), before);
    drop((lease, buffer));
    end((fake, bed, arena, lane));
}

#[test]
fn streams_that_use_a_buffer_by_views_are_ordered() {
    let (fake, bed, arena, lane) = start();
    let mut buffer = alloc(&lane, 2 * UNIT);
    for turn in 0..4 {
        let (writer, reader) =
            if turn % 2 == 0 { (&bed.one, &bed.two) } else { (&bed.two, &bed.one) };
        write(writer, &mut buffer, turn).expect("queued");
        check(reader, &buffer, turn);
    }
    drop(buffer);
    end((fake, bed, arena, lane));
}

#[test]
fn what_another_stream_does_by_a_view_is_done_before_the_memory_is_anothers() {
    let (fake, bed, arena, lane) = start();
    for value in 0..8 {
        let mut buffer = alloc(&lane, 2 * UNIT);
        write(&bed.two, &mut buffer, 100).expect("queued");
        drop(buffer);
        let mut next = alloc(&lane, 2 * UNIT);
        write(&bed.one, &mut next, value).expect("queued");
        bed.two.synchronize().expect("done");
        check(&bed.one, &next, value);
    }
    end((fake, bed, arena, lane));
}

#[test]
fn after_a_move_the_view_is_where_the_buffer_is() {
    let (fake, bed, arena, lane) = start();
    let mut blocks: Vec<_> = (0..24).map(|_| alloc(&lane, UNIT / 4)).collect();
    for (block, value) in blocks.iter_mut().zip(0..) {
        write(&bed.two, block, value).expect("queued");
    }
    let mut kept: Vec<_> = blocks.into_iter().zip(0..).step_by(3).collect();
    let lease = lane.enter().expect("awake");
    let before: Vec<_> = kept.iter().map(|(block, _)| place(&bed.one, block, &lease)).collect();
    drop(lease);
    bed.settle(&arena);
    let done = arena.compact(CompactOptions::new(Region::Dynamic), |_| {}).expect("compacted");
    assert_eq!(done.moves, 0, "any stream may use what was viewed");
    arena.wait_for_pending().expect("waits for all streams");
    let done = arena.compact(CompactOptions::new(Region::Dynamic), |_| {}).expect("compacted");
    assert!(done.moves > 0, "{done:?}");
    let lease = lane.enter().expect("awake");
    let after: Vec<_> = kept.iter().map(|(block, _)| place(&bed.one, block, &lease)).collect();
    assert_ne!(before, after);
    for ((block, _), after) in kept.iter().zip(after) {
        assert_eq!(block.address(&lease).expect("ours").map(|at| at.get()), Some(after));
    }
    drop(lease);
    for (block, value) in &mut kept {
        check(&bed.two, block, *value);
        write(&bed.two, block, *value + 50).expect("queued");
        check(&bed.one, block, *value + 50);
    }
    drop(kept);
    end((fake, bed, arena, lane));
}

#[test]
fn after_a_resize_the_view_is_where_and_as_long_as_the_buffer_is() {
    let (fake, bed, arena, lane) = start();
    let mut buffer = alloc(&lane, UNIT);
    let beside = alloc(&lane, UNIT);
    for (len, value) in [(3 * UNIT, 1), (UNIT / 2, 2), (UNIT / 2 + 1, 3), (0, 4), (UNIT, 5)] {
        // The work of the other stream is not done when the size changes.
        write(&bed.two, &mut buffer, value).expect("queued");
        let old = buffer.len();
        buffer.resize(len).expect("room");
        let mut rest = alloc(&lane, UNIT / 2);
        write(&bed.one, &mut rest, 200).expect("queued");
        bed.two.synchronize().expect("done");
        check(&bed.one, &rest, 200);
        let lease = lane.enter().expect("awake");
        assert_eq!(buffer.cuda(&lease).expect("a view").len(), len);
        let at = buffer.address(&lease).expect("ours").map_or(0, |at| at.get());
        assert_eq!(place(&bed.one, &buffer, &lease), at);
        drop(lease);
        let bytes = read(&bed.one, &buffer).expect("read");
        assert!(bytes[..old.min(len)].iter().all(|&byte| byte == value), "{old} to {len}");
    }
    drop((buffer, beside));
    end((fake, bed, arena, lane));
}

#[test]
fn a_buffer_of_no_cudarc_stream_has_no_view() {
    let (fake, bed, arena, lane) = start();
    let mut buffer = arena.alloc::<u8>(UNIT, Region::Stable).expect("room");
    let lease = arena.enter().expect("awake");
    let error = buffer.cuda(&lease).expect_err("of no lane");
    assert!(matches!(&error, DeviceError::NoStream { arena } if arena == "cuda"), "{error}");
    assert!(matches!(buffer.cuda_mut(&lease), Err(DeviceError::NoStream { .. })));
    drop((lease, buffer));
    end((fake, bed, arena, lane));
}

#[test]
fn a_stream_that_the_arena_cannot_use_makes_no_lane() {
    let (fake, bed, arena, lane) = start();
    let other = CudaContext::new(1).expect("the other device");
    let theirs = other.new_stream().expect("a stream");
    let null = bed.context.default_stream();
    let on_host = {
        let (driver, clock) = (Arc::new(HostDriver::new()), Arc::new(ManualClock::new()));
        DeviceArena::open(driver, clock, Bed::config()).expect("on the host")
    };
    for refused in [
        arena.cuda_lane(&null),
        arena.cuda_lane(&theirs),
        arena.cuda_lane(&bed.context.per_thread_stream()),
        on_host.cuda_lane(&bed.one),
    ] {
        let error = refused.expect_err("no lane");
        assert!(matches!(error, DeviceError::ForeignStream { .. }), "{error}");
    }
    drop((null, theirs, other, on_host));
    end((fake, bed, arena, lane));
}

#[test]
fn without_an_event_there_is_no_view_and_the_next_one_is_had() {
    for nth in [1, 2] {
        let (fake, bed, arena, lane) = start();
        let buffer = alloc(&lane, UNIT);
        let lease = lane.enter().expect("awake");
        fake.fail(c"cuEventCreate", nth, 2);
        let error = buffer.cuda(&lease).expect_err("no event");
        assert!(matches!(error, DeviceError::View { .. }), "{error}");
        let _ = buffer.cuda(&lease).expect("a view");
        drop((lease, buffer));
        assert_eq!(arena.snapshot().parked_errors_total, 0);
        end((fake, bed, arena, lane));
    }
}

#[test]
fn a_view_of_a_sleeping_arena_wakes_it() {
    let (fake, bed, arena, lane) = start();
    let mut buffer = lane.alloc::<u8>(UNIT, Region::Stable).expect("room");
    write(&bed.one, &mut buffer, 7).expect("queued");
    for _ in 0..2 {
        arena.sleep(keeps()).expect("asleep");
        assert_eq!(arena.state(), SleepState::Asleep);
        check(&bed.two, &buffer, 7);
        assert_eq!(arena.state(), SleepState::Awake);
    }
    drop(buffer);
    end((fake, bed, arena, lane));
}

fn keeps() -> SleepOptions {
    SleepOptions { drain: Duration::ZERO, ..SleepOptions::default() }
}

/// Memory left while another stream, which cudarc had ordered, was to write to it.
#[test]
fn a_sleep_waits_for_other_streams_that_used_views_under_the_lease_of_one_lane() {
    let (fake, bed, arena, lane) = start();
    let mut buffer = lane.alloc::<u8>(2 * UNIT, Region::Stable).expect("room");
    for value in 1..4 {
        let lease = lane.enter().expect("awake");
        let bytes = vec![value; 2 * UNIT];
        let mut view = buffer.cuda_mut(&lease).expect("a view");
        bed.two.memcpy_htod(&bytes, &mut view).expect("queued");
        drop(lease);
        arena.sleep(keeps()).expect("asleep");
        bed.two.synchronize().expect("no illegal address");
        let lease = lane.enter().expect("awake");
        let found = bed.one.clone_dtoh(buffer.cuda(&lease).expect("a view")).expect("read");
        assert_eq!(found, bytes);
    }
    drop(buffer);
    end((fake, bed, arena, lane));
}

#[test]
fn an_error_that_a_freed_view_leaves_is_counted_and_nobody_elses() {
    for nth in [1, 2] {
        let (fake, bed, arena, lane) = start();
        let mut buffer = alloc(&lane, UNIT);
        write(&bed.two, &mut buffer, 1).expect("queued");
        fake.fail(c"cuStreamWaitEvent", nth, 999);
        drop(buffer);
        assert_eq!(arena.snapshot().parked_errors_total, 1);
        let number = bed.one.clone_htod(&[1_u8]).expect("nobody else's error comes out");
        drop(number);
        end((fake, bed, arena, lane));
    }
}

/// The memory was handed to the lane at once, before the other stream's write to it.
#[test]
fn a_view_whose_stream_could_not_be_made_to_wait_is_waited_for_otherwise() {
    for nth in [1, 2] {
        let (fake, bed, arena, lane) = start();
        let mut buffer = alloc(&lane, 2 * UNIT);
        write(&bed.two, &mut buffer, 100).expect("queued");
        fake.fail(c"cuStreamWaitEvent", nth, 999);
        drop(buffer);
        let mut next = alloc(&lane, 2 * UNIT);
        write(&bed.one, &mut next, 1).expect("queued");
        bed.one.synchronize().expect("done");
        bed.two.synchronize().expect("done");
        check(&bed.one, &next, 1);
        drop(next);
        end((fake, bed, arena, lane));
    }
}

/// The new view knew nothing of the other stream, nor did the lane.
#[test]
fn after_a_resize_a_stream_that_could_not_be_made_to_wait_is_waited_for_otherwise() {
    for nor_the_device in [false, true] {
        let (fake, bed, arena, lane) = start();
        let mut buffer = alloc(&lane, 2 * UNIT);
        write(&bed.two, &mut buffer, 100).expect("queued");
        buffer.resize(UNIT).expect("where it is");
        let lease = lane.enter().expect("awake");
        fake.fail(c"cuStreamWaitEvent", 1, 999);
        if nor_the_device {
            fake.fail(c"cuCtxSynchronize", 1, 999);
            let error = buffer.cuda(&lease).expect_err("nobody waited");
            assert!(matches!(error, DeviceError::Driver(_)), "{error}");
        } else {
            let _ = buffer.cuda(&lease).expect("a view");
        }
        drop((lease, buffer));
        let mut next = alloc(&lane, UNIT);
        write(&bed.one, &mut next, 1).expect("queued");
        bed.one.synchronize().expect("done");
        bed.two.synchronize().expect("done");
        check(&bed.one, &next, 1);
        drop(next);
        end((fake, bed, arena, lane));
    }
}

#[test]
fn an_error_that_others_parked_stays_theirs() {
    let (fake, bed, arena, lane) = start();
    let mut buffer = alloc(&lane, UNIT);
    write(&bed.two, &mut buffer, 1).expect("queued");
    let theirs =
        cudarc::driver::DriverError(cudarc::driver::sys::cudaError_enum::CUDA_ERROR_INVALID_VALUE);
    bed.context.record_err::<()>(Err(theirs));
    drop(buffer);
    assert_eq!(arena.snapshot().parked_errors_total, 0);
    assert_eq!(bed.context.check_err(), Err(theirs));
    end((fake, bed, arena, lane));
}

#[test]
fn a_kernel_on_another_stream_works_on_a_view() {
    let (fake, bed, arena, lane) = start();
    let mut numbers = lane.alloc::<u32>(1_000, Region::Dynamic).expect("room");
    let text = ".version 8.0\n.target sm_90\n.address_size 64\n";
    let module = bed.context.load_module(Ptx::from_src(text)).expect("a PTX text");
    let fill = module.load_function("fill_u32").expect("a kernel");
    let lease = lane.enter().expect("awake");
    let (value, count) = (7_u32, 1_000_u64);
    {
        let mut view = numbers.cuda_mut(&lease).expect("a view");
        let mut launch = bed.two.launch_builder(&fill);
        launch.arg(&mut view).arg(&value).arg(&count);
        // SAFETY: the arguments are those of the kernel, and the view has that many numbers.
        let _ = unsafe { launch.launch(LaunchConfig::for_num_elems(1)) }.expect("queued");
    }
    let found = bed.one.clone_dtoh(numbers.cuda(&lease).expect("a view")).expect("read");
    assert_eq!(found, vec![7; 1_000]);
    drop((lease, numbers, fill, module));
    end((fake, bed, arena, lane));
}

/// Uses a buffer by a view, often enough that its size is cached.
fn heat(bed: &Bed, lane: &Lane) {
    for value in 0..8 {
        let mut buffer = alloc(lane, 2 * UNIT);
        write(&bed.one, &mut buffer, value).expect("queued");
    }
}

#[test]
fn a_warm_request_with_a_view_creates_no_event_and_adds_three_calls_to_cudarcs() {
    let (fake, bed, arena, lane) = start();
    heat(&bed, &lane);
    let mut buffer = alloc(&lane, 2 * UNIT);
    let before = fake.calls_total();
    write(&bed.one, &mut buffer, 1).expect("queued");
    let cudarcs = fake.calls_total() - before;
    drop(buffer);
    let (before, created) = (fake.calls_total(), fake.calls(c"cuEventCreate"));
    let mut buffer = alloc(&lane, 2 * UNIT);
    write(&bed.one, &mut buffer, 1).expect("queued");
    drop(buffer);
    assert_eq!(fake.calls_total() - before, cudarcs + 3, "a query of the capture, two waits");
    drop(alloc(&lane, 2 * UNIT));
    assert_eq!(fake.calls_total() - before, cudarcs + 3, "none without a view");
    assert_eq!(fake.calls(c"cuEventCreate"), created);
    end((fake, bed, arena, lane));
}

/// The lane's stream waited for the other stream, so the lane may use the address alone.
#[test]
fn what_another_stream_does_by_a_view_is_done_before_a_cached_block_is_used_by_address() {
    let (fake, bed, arena, lane) = start();
    heat(&bed, &lane);
    for value in 0..8 {
        let mut buffer = alloc(&lane, 2 * UNIT);
        write(&bed.two, &mut buffer, 100).expect("queued");
        drop(buffer);
        let next = alloc(&lane, 2 * UNIT);
        let lease = lane.enter().expect("awake");
        let at = next.address(&lease).expect("ours").expect("not empty").get();
        // SAFETY: a live block of this size, which the lane's stream may write.
        let queued = unsafe { result::memset_d8_async(at, value, 2 * UNIT, bed.one.cu_stream()) };
        queued.expect("queued");
        drop(lease);
        bed.one.synchronize().expect("done");
        bed.two.synchronize().expect("done");
        check(&bed.one, &next, value);
    }
    end((fake, bed, arena, lane));
}

#[test]
fn a_cached_block_of_another_type_or_length_gets_a_view_of_its_own() {
    let (fake, bed, arena, lane) = start();
    heat(&bed, &lane);
    let lease = lane.enter().expect("awake");
    let numbers = lane.alloc::<u32>(UNIT / 2, Region::Dynamic).expect("room");
    assert_eq!(numbers.cuda(&lease).expect("a view").len(), UNIT / 2);
    drop(numbers);
    let shorter = alloc(&lane, 2 * UNIT - 1);
    assert_eq!(shorter.cuda(&lease).expect("a view").len(), 2 * UNIT - 1);
    drop((lease, shorter));
    end((fake, bed, arena, lane));
}

/// Whoever empties a cache makes no calls on the lane's stream, which may capture.
#[test]
fn views_of_blocks_that_left_a_cache_are_discarded_by_their_lane() {
    let (fake, bed, arena, lane) = start();
    heat(&bed, &lane);
    assert!(!arena.snapshot().cached.is_zero());
    let before = [c"cuStreamWaitEvent", c"cuEventDestroy_v2"].map(|name| fake.calls(name));
    arena.set_thread_cache(lowtide::ByteSize::mib(1)); // empties the caches
    let after = [c"cuStreamWaitEvent", c"cuEventDestroy_v2"].map(|name| fake.calls(name));
    assert_eq!(before, after);
    let other = alloc(&lane, UNIT);
    let lease = lane.enter().expect("awake");
    let _ = other.cuda(&lease).expect("a view");
    assert_eq!(fake.calls(c"cuEventDestroy_v2"), before[1] + 2, "the cached block's");
    drop((lease, other));
    heat(&bed, &lane);
    end((fake, bed, arena, lane)); // nothing is left
}
