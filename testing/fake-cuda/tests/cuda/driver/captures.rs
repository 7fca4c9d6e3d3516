//! Captures of graphs by others, on streams that are no lanes, and what the driver layer does
//! beside them.
//!
//! Invariant: a capture that is begun outside is spoiled by no call but a wait for the context.
#![expect(unsafe_code, reason = "the raw call that exchanges a thread's capture mode")]

use std::ptr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::Duration;

use cudarc::driver::sys::{self, CUgraphInstantiate_flags, CUstreamCaptureMode};
use cudarc::driver::{CudaContext, CudaGraph, CudaStream, DevicePtr as _};
use lowtide::ByteSize;
use lowtide::clock::{Clock as _, Moment};
use lowtide::decay::DecayTime;
use lowtide_fake_cuda::{Fake, Options};
use lowtide_gpu::driver::cuda::{CudaDriver, DeviceChoice, PoolGovernor};
use lowtide_gpu::driver::{DeviceAddress, Driver as _, DriverError, HostMemory, StreamHandle};
use lowtide_gpu::{DeviceError, Lane, Region, SleepOptions};

use super::open::WAYS;
use super::support::{Bed, LAZY, UNIT, check, end, life, start, write};

const GLOBAL: CUstreamCaptureMode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_GLOBAL;
const LOCAL: CUstreamCaptureMode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
const RELAXED: CUstreamCaptureMode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;

/// Sets this thread's mode; the one before.
fn exchange(mode: CUstreamCaptureMode) -> CUstreamCaptureMode {
    let mut mode = mode;
    // SAFETY: a pointer to a local that holds a mode.
    let code = unsafe { sys::cuThreadExchangeStreamCaptureMode(&raw mut mode) };
    assert_eq!(code, sys::CUresult::CUDA_SUCCESS);
    mode
}

/// The mode of this thread.
fn mode() -> CUstreamCaptureMode {
    let mode = exchange(GLOBAL);
    exchange(mode);
    mode
}

/// When all that is idle has been so for its decay time.
fn late() -> Moment {
    Moment::ORIGIN + Duration::from_secs(60)
}

/// A stream that no arena knows.
fn foreign(context: &Arc<CudaContext>) -> Arc<CudaStream> {
    context.new_stream().expect("a stream")
}

/// Ends a capture; whether it was sound.
fn is_sound(stream: &Arc<CudaStream>) -> bool {
    let flags = CUgraphInstantiate_flags::CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH;
    // An empty graph is no graph to cudarc; a spoiled one is an error.
    stream.end_capture(flags).is_ok()
}

#[test]
fn a_decay_of_any_thread_spoils_no_capture_of_a_stream_that_is_no_lane() {
    for own_thread in [true, false] {
        let (fake, bed, arena, lane) = start();
        let stream = foreign(&bed.context);
        for _ in 0..4 {
            drop(lane.alloc::<u8>(2 * UNIT, Region::Dynamic).expect("room"));
            drop(arena.alloc::<u8>(UNIT, Region::Dynamic).expect("room"));
            stream.begin_capture(GLOBAL).expect("begun");
            let decay = || arena.decay(late()).map(drop);
            let looked = if own_thread {
                decay()
            } else {
                thread::scope(|scope| scope.spawn(decay).join().expect("no panic"))
            };
            assert_eq!(looked, Ok(()));
            fake.run(0, u64::MAX);
            assert!(is_sound(&stream), "own thread: {own_thread}");
            arena.decay(late()).expect("looked");
        }
        arena.purge().expect("waits, and no stream captures");
        assert_eq!(arena.snapshot().pending, ByteSize::ZERO);
        drop(stream);
        end((fake, bed, arena, lane));
    }
}

/// A stream that is ordered with the legacy default stream.
fn blocking() -> sys::CUstream {
    let mut stream = ptr::null_mut();
    // SAFETY: a pointer to a local; the device's context is current in this thread.
    let code = unsafe { sys::cuStreamCreate(&raw mut stream, 0) };
    assert_eq!(code, sys::CUresult::CUDA_SUCCESS);
    stream
}

#[test]
fn a_lane_of_the_legacy_stream_is_waited_for_and_spoils_no_capture_that_it_depends_on() {
    let (fake, bed, arena, lane) = start();
    // SAFETY: the legacy default stream always exists.
    let legacy = unsafe { arena.lane(StreamHandle::LEGACY) }.expect("a lane");
    let (size, align) = (ByteSize::of(16 * UNIT), ByteSize::new(1));
    for _ in 0..4 {
        let block = legacy.alloc_raw(size, align, Region::Dynamic).expect("room");
        // SAFETY: a live block of this size.
        let code = unsafe { sys::cuMemsetD8Async(block.at.get(), 1, 16 * UNIT, ptr::null_mut()) };
        assert_eq!(code, sys::CUresult::CUDA_SUCCESS);
        legacy.free(block.at).expect("live");
        // More than half of the limit: the lane gets what the legacy stream has just freed.
        let mut taken = lane.alloc::<u8>(16 * UNIT, Region::Dynamic).expect("room");
        write(&bed.one, &mut taken, 2).expect("queued");
        check(&bed.one, &taken, 2);
    }
    let block = legacy.alloc_raw(size, align, Region::Dynamic).expect("room");
    legacy.free(block.at).expect("live");
    let stream = blocking();
    // SAFETY: the stream exists.
    let code = unsafe { sys::cuStreamBeginCapture_v2(stream, RELAXED) };
    assert_eq!(code, sys::CUresult::CUDA_SUCCESS);
    // No event can be recorded on the legacy stream now, so there is no order to take it in.
    let refused = lane.alloc::<u8>(16 * UNIT, Region::Dynamic).expect_err("it may be in use");
    assert!(refused.is_out_of_memory() || matches!(refused, DeviceError::Driver(_)), "{refused}");
    arena.decay(late()).expect("looked");
    let mut graph = ptr::null_mut();
    // SAFETY: the stream exists and captures; a pointer to a local.
    let code = unsafe { sys::cuStreamEndCapture(stream, &raw mut graph) };
    assert_eq!(code, sys::CUresult::CUDA_SUCCESS, "the capture was spoiled");
    // SAFETY: a graph that is used no more.
    assert_eq!(unsafe { sys::cuGraphDestroy(graph) }, sys::CUresult::CUDA_SUCCESS);
    drop(lane.alloc::<u8>(16 * UNIT, Region::Dynamic).expect("room, after a wait"));
    // SAFETY: a stream that is used no more.
    assert_eq!(unsafe { sys::cuStreamDestroy_v2(stream) }, sys::CUresult::CUDA_SUCCESS);
    drop(legacy);
    end((fake, bed, arena, lane));
}

#[test]
fn no_rung_spoils_a_capture_when_it_takes_memory_and_gives_it_back() {
    for (options, _) in WAYS {
        let fake = Fake::start(LAZY);
        let bed = Bed::over(CudaDriver::open(options).expect("a device"));
        let arena = bed.arena();
        let lane = arena.cuda_lane(&bed.one).expect("a lane");
        let stream = foreign(&bed.context);
        stream.begin_capture(GLOBAL).expect("begun");
        let kept = lane.alloc::<u8>(2 * UNIT, Region::Stable).expect("room");
        drop(lane.alloc::<u8>(3 * UNIT, Region::Dynamic).expect("room"));
        lane.end_run().expect("marked");
        arena.decay(late()).expect("looked");
        fake.run(0, u64::MAX);
        arena.decay(late()).expect("looked");
        arena.purge().expect("all is proved by events");
        let _ = bed.driver.headroom().expect("answered");
        let size = lowtide_gpu::driver::HOST_GRANULARITY;
        let locked = bed.driver.host_alloc(size, HostMemory::PageLocked);
        locked.expect("room"); // left to the fake, which is reset by the next test
        if arena.capabilities().virtual_memory {
            let drain = Duration::ZERO;
            arena.sleep(SleepOptions { drain, ..SleepOptions::default() }).expect("asleep");
            arena.wake().expect("awake");
        }
        assert!(is_sound(&stream), "{options:?}");
        drop((kept, lane, stream));
        arena.close().expect("closed");
    }
}

#[test]
fn a_device_opens_beside_a_capture_and_does_not_spoil_it() {
    let fake = Fake::start(LAZY);
    let bed = Bed::new();
    let stream = foreign(&bed.context);
    stream.begin_capture(GLOBAL).expect("begun");
    for (options, _) in WAYS {
        drop(CudaDriver::open(options).expect("a device"));
    }
    assert!(is_sound(&stream));
    drop((stream, bed));
    fake.assert_clean();
}

#[test]
fn a_thread_keeps_its_capture_mode_through_all_calls_and_those_that_fail() {
    for before in [GLOBAL, LOCAL, RELAXED] {
        let fake = Fake::start(LAZY);
        let bed = Bed::new();
        exchange(before);
        assert_eq!(life(&bed, &mut || assert_eq!(mode(), before)).0, Vec::<String>::new());
        fake.fail(c"cuMemGetInfo_v2", 1, 999);
        assert!(matches!(bed.driver.headroom(), Err(DriverError::Refused { code: 999, .. })));
        assert_eq!(mode(), before);
        drop(bed);
        assert_eq!(mode(), before);
        exchange(GLOBAL);
        fake.assert_clean();
    }
}

/// When a temporary of a graph is dropped, and when its view was taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Dropped {
    Within,
    WithinViewedBefore,
    After,
}

/// Captures the clearing of a temporary. Returns the graph, and the temporary's address.
fn graph_of(bed: &Bed, lane: &Lane, dropped: Dropped) -> (CudaGraph, DeviceAddress) {
    let mut temporary = lane.alloc::<u8>(2 * UNIT, Region::Dynamic).expect("room");
    let lease = lane.enter().expect("awake");
    let at = temporary.address(&lease).expect("ours").expect("not empty");
    if dropped == Dropped::WithinViewedBefore {
        let mut view = temporary.cuda_mut(&lease).expect("a view");
        bed.one.begin_capture(RELAXED).expect("begun");
        bed.one.memset_zeros(&mut view).expect("captured");
    } else {
        bed.one.begin_capture(RELAXED).expect("begun");
        bed.one.memset_zeros(&mut temporary.cuda_mut(&lease).expect("a view")).expect("captured");
    }
    let flags = CUgraphInstantiate_flags::CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH;
    let mut temporary = Some(temporary);
    if dropped != Dropped::After {
        temporary = None;
    }
    let graph = bed.one.end_capture(flags).expect("not spoiled").expect("a graph");
    drop(temporary);
    (graph, at)
}

/// Reported in cubecl #1612: the launch cleared the next buffer in the temporary's place.
#[test]
fn a_graph_that_is_launched_again_writes_to_no_later_buffer() {
    use Dropped::{After, Within, WithinViewedBefore};
    for (tracked, dropped) in [false, true]
        .into_iter()
        .flat_map(|of| [Within, WithinViewedBefore, After].map(|at| (of, at)))
    {
        let (fake, bed, arena, lane) = start();
        if !tracked {
            // SAFETY: one stream uses the slices.
            unsafe { bed.context.disable_event_tracking() };
        }
        let (graph, at) = graph_of(&bed, &lane, dropped);
        let what = format!("tracked {tracked}, {dropped:?}");
        assert_eq!(arena.snapshot().captured, ByteSize::of(2 * UNIT), "{what}");
        // All that the limit leaves, so that a free place would be taken.
        let all = std::iter::from_fn(|| lane.alloc::<u8>(2 * UNIT, Region::Dynamic).ok());
        let mut others: Vec<_> = all.collect();
        for other in &mut others {
            write(&bed.one, other, 7).expect("queued");
        }
        graph.launch().expect("queued");
        others.iter().for_each(|other| check(&bed.one, other, 7));
        drop(others);
        assert_eq!(arena.reset(), Ok(ByteSize::ZERO));
        assert!(arena.close().is_err_and(|error| matches!(error, DeviceError::LiveBlocks { .. })));
        drop(graph);
        // SAFETY: the only graph is destroyed.
        assert_eq!(unsafe { arena.release_captured() }, Ok(ByteSize::of(2 * UNIT)));
        assert_eq!(arena.snapshot().captured, ByteSize::ZERO);
        arena.purge().expect("waits");
        let again = lane.alloc::<u8>(2 * UNIT, Region::Dynamic).expect("room");
        let lease = lane.enter().expect("awake");
        assert_eq!(again.address(&lease), Ok(Some(at)), "{what}");
        drop((again, lease));
        end((fake, bed, arena, lane));
    }
}

/// What is neither viewed in a capture nor freed in one is reused as always.
#[test]
fn buffers_beside_a_capture_are_reused() {
    let (fake, bed, arena, lane) = start();
    bed.one.begin_capture(RELAXED).expect("begun");
    drop(lane.alloc::<u8>(2 * UNIT, Region::Dynamic).expect("room"));
    let other = arena.cuda_lane(&bed.two).expect("a lane");
    let mut buffer = other.alloc::<u8>(2 * UNIT, Region::Dynamic).expect("room");
    write(&bed.two, &mut buffer, 1).expect("queued");
    drop(buffer);
    assert_eq!(arena.snapshot().captured, ByteSize::ZERO);
    assert!(is_sound(&bed.one));
    drop(other);
    end((fake, bed, arena, lane));
}

/// A slice whose events were recorded before a capture spoiled it when its buffer was dropped: 905.
#[test]
fn a_buffer_that_is_dropped_in_a_capture_does_not_spoil_it() {
    let (fake, bed, arena, lane) = start();
    for _ in 0..8 {
        let mut buffer = lane.alloc::<u8>(2 * UNIT, Region::Dynamic).expect("room");
        write(&bed.one, &mut buffer, 1).expect("queued");
        bed.one.begin_capture(RELAXED).expect("begun");
        drop(buffer);
        let fresh = lane.alloc::<u8>(UNIT, Region::Dynamic).expect("room");
        let _ = fresh.cuda(&lane.enter().expect("awake")).expect("a view");
        assert!(is_sound(&bed.one));
        drop(fresh);
        // SAFETY: no graph was made.
        unsafe { arena.release_captured() }.expect("this process");
    }
    end((fake, bed, arena, lane));
}

/// Reported in pytorch#190308 and #180395: captures that an error invalidated, or that were given
/// up, kept memory for ever.
#[test]
fn captures_that_are_given_up_leave_no_memory_behind() {
    for is_invalidated in [true, false] {
        let (fake, bed, arena, lane) = start();
        for _ in 0..20 {
            let stream = foreign(&bed.context);
            let capturing = arena.cuda_lane(&stream).expect("a lane");
            let before = capturing.alloc::<u8>(8 * UNIT, Region::Dynamic).expect("room");
            stream.begin_capture(GLOBAL).expect("begun");
            let within = capturing.alloc::<u8>(8 * UNIT, Region::Dynamic).expect("room");
            drop((before, within));
            if is_invalidated {
                bed.context.synchronize().expect_err("a capture");
                assert!(!is_sound(&stream));
            }
            drop((capturing, stream));
            bed.clock.advance(Duration::from_secs(1));
            arena.decay(bed.clock.now()).expect("looked");
        }
        arena.wait_for_pending().expect("waited");
        arena.purge().expect("nothing is live");
        assert_eq!(arena.snapshot().committed, ByteSize::ZERO);
        drop(lane.alloc::<u8>(24 * UNIT, Region::Dynamic).expect("the whole limit"));
        drop(lane);
        arena.close().expect("nothing is live");
        drop((arena, bed));
        assert_eq!(fake.faults().contains("CaptureSpoiled"), is_invalidated);
        assert!(fake.leaks().is_empty());
    }
}

/// The release function freed the memory of a graph.
#[test]
fn imported_memory_that_a_graph_captured_is_released_after_the_graph() {
    let (fake, bed, arena, lane) = start();
    let slice = bed.one.clone_htod(&[1_u8; 512]).expect("memory");
    let (at, calls) = (slice.device_ptr(&bed.one).0, Arc::new(AtomicUsize::new(0)));
    let (counted, release) = (Arc::clone(&calls), move |_, _| drop(slice));
    let release = move |at, size| {
        counted.fetch_add(1, Ordering::Relaxed);
        release(at, size);
    };
    // SAFETY: the slice exists, used by no other code, until the release drops it.
    let imported = unsafe { lane.import::<u8>(DeviceAddress::new(at), 512, release) };
    let mut imported = imported.expect("imported");
    bed.one.begin_capture(RELAXED).expect("begun");
    {
        let lease = lane.enter().expect("awake");
        bed.one.memset_zeros(&mut imported.cuda_mut(&lease).expect("a view")).expect("captured");
    }
    drop(imported);
    let flags = CUgraphInstantiate_flags::CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH;
    let graph = bed.one.end_capture(flags).expect("not spoiled").expect("a graph");
    for _ in 0..2 {
        graph.launch().expect("queued");
        arena.purge().expect("waits");
        assert_eq!(calls.load(Ordering::Relaxed), 0);
    }
    drop(graph);
    // SAFETY: the only graph is destroyed.
    unsafe { arena.release_captured() }.expect("this process");
    arena.purge().expect("waits");
    assert_eq!(calls.load(Ordering::Relaxed), 1);
    end((fake, bed, arena, lane));
}

/// The worker of a `Memory` is such a thread.
#[test]
fn a_governor_spoils_no_capture_in_the_background() {
    let fake = Fake::start(Options { devices: 1, ..LAZY });
    let governor = PoolGovernor::open(DeviceChoice::Ordinal(0), None, DecayTime::AtOnce);
    let governor = governor.expect("a governor");
    let context = CudaContext::new(0).expect("a context");
    let (stream, capturing) = (foreign(&context), foreign(&context));
    drop(stream.clone_htod(&[1_u8; 1 << 16]).expect("memory"));
    let reserved = || governor.report(ByteSize::ZERO).expect("answered").reserved;
    capturing.begin_capture(GLOBAL).expect("begun");
    let background = lowtide_core::sync::background();
    assert_eq!(governor.decay(Moment::ORIGIN), Ok(ByteSize::ZERO), "no wait has shown its end");
    drop(background);
    assert!(is_sound(&capturing));
    assert!(!reserved().is_zero());
    stream.synchronize().expect("done");
    let background = lowtide_core::sync::background();
    governor.decay(Moment::ORIGIN).expect("looked");
    drop(background);
    assert!(reserved().is_zero(), "what a wait of the program has shown goes back");
    drop((stream, capturing, context, governor));
    fake.assert_clean();
}
