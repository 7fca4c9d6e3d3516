//! Unmodified cudarc: start, copies, kernels, streams and events, page-locked memory.

use std::sync::atomic::{AtomicU32, Ordering};

use cudarc::driver::CudaContext;
use lowtide_fake_cuda::{Fake, Options};
use lowtide_gpu::driver::cuda::CudaDriver;

use super::raw;

#[test]
fn a_probe_finds_the_devices_and_the_version() {
    let _fake = Fake::start(Options { devices: 2, driver_version: 12_080, ..Options::default() });
    assert_eq!(CudaDriver::devices().expect("the fake").len(), 2);
}

#[test]
fn two_devices_have_names_and_uuids_of_their_own() {
    let fake = Fake::start(Options::default());
    let (first, second) = (raw::context(0), raw::context(1));
    assert_eq!(CudaContext::device_count(), Ok(2));
    assert_ne!(first.uuid().expect("a UUID").bytes, second.uuid().expect("a UUID").bytes);
    assert_ne!(first.name(), second.name());
    assert_eq!(first.compute_capability(), Ok((9, 0)));
    assert!(first.has_async_alloc());
    assert_eq!((fake.retains(0), fake.retains(1)), (1, 1));
    drop((first, second));
    fake.assert_clean();
}

#[test]
fn bytes_go_to_the_device_within_it_and_back() {
    for order in 0..3 {
        let fake = Fake::start(Options { order, seed: 7, ..Options::default() });
        let stream = raw::context(0).new_stream().expect("a stream");
        let numbers: Vec<u32> = (0..1 << 16).collect();
        let there = stream.clone_htod(&numbers).expect("there");
        let mut other = raw::bare(&stream, numbers.len());
        stream.memcpy_dtod(&there, &mut other).expect("within");
        assert_eq!(stream.clone_dtoh(&other).expect("back"), numbers);
        let fresh = raw::bare(&stream, 4);
        assert_eq!(stream.clone_dtoh(&fresh), Ok(vec![0xA5A5_A5A5; 4]), "nobody's zeros");
        let zeros = stream.alloc_zeros::<u32>(5).expect("room");
        assert_eq!(stream.clone_dtoh(&zeros), Ok(vec![0; 5]));
        drop((there, other, fresh, zeros));
        stream.synchronize().expect("done");
        fake.validate(0);
        drop(stream);
        fake.assert_clean();
    }
}

#[test]
fn kernels_of_two_streams_are_ordered_by_cudarcs_events() {
    let fake = Fake::start(Options::default());
    let context = raw::context(0);
    let (first, second) = (context.new_stream().expect("one"), context.new_stream().expect("two"));
    let mut numbers = first.clone_htod(&vec![1_u32; 1_000]).expect("there");
    raw::fill(&second, &mut numbers, 7, 500);
    let found = first.clone_dtoh(&numbers).expect("back");
    assert!(found.iter().enumerate().all(|(at, found)| *found == if at < 500 { 7 } else { 1 }));
    drop((numbers, first, second));
    drop(context);
    fake.assert_clean();
}

#[test]
fn floats_are_added_and_bytes_copied_by_kernels() {
    let fake = Fake::start(Options::default());
    let stream = raw::context(0).new_stream().expect("a stream");
    let (left, right) = (raw::alloc(4_000).expect("room"), raw::alloc(4_000).expect("room"));
    let queue = stream.cu_stream();
    raw::synchronize().expect("nothing to wait for");
    raw::set(left, 0, 4_000, queue).expect("queued");
    let fill = raw::function(stream.context(), "fill_u32");
    let add = raw::function(stream.context(), "add_f32");
    let copy = raw::function(stream.context(), "copy_u8");
    raw::launch(&fill, &[left, u64::from(1.5_f32.to_bits()), 1_000], queue).expect("queued");
    raw::launch(&add, &[left, left, right, 1_000], queue).expect("queued");
    raw::launch(&copy, &[right, left, 4], queue).expect("queued");
    assert_eq!(raw::peek(right + 3_996, 4, queue), Ok(3.0_f32.to_le_bytes().to_vec()));
    assert_eq!(raw::peek(left, 4, queue), Ok(3.0_f32.to_le_bytes().to_vec()));
    assert_eq!(raw::peek(left + 4, 4, queue), Ok(1.5_f32.to_le_bytes().to_vec()));
    raw::free(left).expect("freed");
    raw::free(right).expect("freed");
    drop((fill, add, copy, stream));
    fake.assert_clean();
}

#[test]
fn a_function_of_the_host_runs_in_its_turn_and_may_call_nothing() {
    let fake = Fake::start(Options::default());
    let stream = raw::context(0).new_stream().expect("a stream");
    let answer = AtomicU32::new(0);
    raw::host_function(stream.cu_stream(), &answer).expect("done");
    assert_eq!(answer.load(Ordering::SeqCst), 800, "CUDA_ERROR_NOT_PERMITTED");
    drop(stream);
    fake.assert_clean();
}

#[test]
fn page_locked_memory_is_written_when_the_copy_is_done_and_managed_memory_by_both() {
    let fake = Fake::start(Options::default());
    let stream = raw::context(0).new_stream().expect("a stream");
    let at = raw::alloc(64).expect("room");
    raw::set(at, 9, 64, stream.cu_stream()).expect("queued");
    let mut pinned = raw::Pinned::new(64).expect("locked");
    pinned.copy_from(at, stream.cu_stream()).expect("queued");
    assert_eq!(pinned.bytes(), [0; 64], "nothing waited, so nothing is done");
    stream.synchronize().expect("done");
    assert_eq!(pinned.bytes(), [9; 64]);
    assert_eq!(fake.numbers(0).locked_bytes, 64);
    drop(pinned);
    let found = raw::through_managed(&stream, 10).expect("done");
    assert_eq!(found, [7, 7, 7, 7, 7, 0, 0, 0, 0, 0]);
    raw::free(at).expect("freed");
    drop(stream);
    fake.assert_clean();
}

#[test]
fn memory_of_the_host_is_page_locked_and_released_once() {
    let fake = Fake::start(Options::default());
    let stream = raw::context(0).new_stream().expect("a stream");
    let at = raw::alloc(64).expect("room");
    raw::set(at, 9, 64, stream.cu_stream()).expect("queued");
    let mut memory = vec![0_u8; 64];
    let address = memory.as_ptr().addr() as u64;
    assert_eq!(raw::memory_type(address), Err(1), "not known");
    raw::register(&mut memory).expect("locked");
    assert_eq!(raw::register(&mut memory[8..16]), Err(712), "some of it is");
    assert_eq!((raw::memory_type(address), raw::memory_type(at)), (Ok(1), Ok(2)));
    raw::copy_from(&mut memory, at, stream.cu_stream()).expect("queued");
    assert_eq!(memory, [0; 64], "nothing waited");
    raw::unregister(&mut memory).expect("the work with it was done first");
    assert_eq!(memory, [9; 64]);
    assert!(fake.faults().contains("HostGoneBeforeDone"), "and is on record");
    assert_eq!(raw::unregister(&mut memory), Err(713));
    raw::free(at).expect("freed");
    assert_eq!(raw::memory_type(at), Err(1));
    drop(stream);
    assert_eq!(fake.leaks(), "");
}

#[test]
fn a_capture_is_done_at_its_launch_and_again() {
    use cudarc::driver::sys::{CUgraphInstantiate_flags, CUstreamCaptureMode};
    let fake = Fake::start(Options::default());
    let context = raw::context(0);
    raw::untracked(&context);
    let stream = context.new_stream().expect("a stream");
    let mut numbers = stream.clone_htod(&[0_u32; 8]).expect("there");
    let mode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_GLOBAL;
    stream.begin_capture(mode).expect("begun");
    raw::fill(&stream, &mut numbers, 3, 8);
    let flags = CUgraphInstantiate_flags::CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH;
    let graph = stream.end_capture(flags).expect("ended").expect("a graph");
    assert_eq!(stream.clone_dtoh(&numbers), Ok(vec![0; 8]));
    for _ in 0..2 {
        stream.memset_zeros(&mut numbers).expect("queued");
        graph.launch().expect("queued");
        assert_eq!(stream.clone_dtoh(&numbers), Ok(vec![3; 8]));
    }
    drop((graph, numbers));
    stream.synchronize().expect("done");
    drop((stream, context));
    fake.assert_clean();
}

#[test]
fn a_text_that_is_no_ptx_is_refused() {
    let _fake = Fake::start(Options::default());
    let _context = raw::context(0);
    assert_eq!(raw::load(c"// nothing"), Err(218));
    assert!(raw::load(c"//\n.version 8.0").is_ok());
}
