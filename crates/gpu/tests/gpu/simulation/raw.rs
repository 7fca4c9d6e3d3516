//! The single calls below the driver, without any library around them: pools, host memory, tasks.

use std::sync::Arc;

use lowtide_cuda_sim::raw::{self, HostBytes, HostKind, KERNELS, Kernel, Place};
use lowtide_cuda_sim::{Call, CaptureMode, Fault, Order, SimDriver, SimError, SimOptions};
use lowtide_gpu::ByteSize;
use lowtide_gpu::driver::Driver as _;

use super::Numbers;

const MIB: u64 = 1 << 20;
const SIZE: u64 = 2 * MIB;

/// Memory of the host, as a test has it.
fn bytes(size: usize, value: u8) -> Arc<HostBytes> {
    Arc::new(HostBytes::owned(vec![value; size]))
}

fn first(bytes: &HostBytes) -> u8 {
    let mut byte = [0];
    bytes.read(0, &mut byte);
    byte[0]
}

fn begins_with(bytes: &HostBytes, value: u8) {
    assert_eq!(first(bytes), value);
}

fn device(order: Order) -> SimDriver {
    SimDriver::new(SimOptions { order, capacity: ByteSize::gib(2), ..SimOptions::default() })
}

fn kernel(name: &str) -> &'static Kernel {
    KERNELS.iter().find(|kernel| kernel.name == name).expect("in the table")
}

/// The address of the host memory in these tests.
const HOST: u64 = 0x1000;

/// A round through all single calls; the first error ends it.
fn round(sim: &SimDriver) -> Result<(), u32> {
    let raw = sim.raw();
    let at = raw.address_reserve(2 * SIZE, 0)?;
    let handle = raw.create(SIZE)?;
    raw.map(at, SIZE, 0, handle)?;
    raw.set_access(at, SIZE, true)?;
    let again = raw.retain_handle(at)?;
    raw.release(again)?;
    let (stream, other) = (raw.stream_create(false)?, raw.stream_create(true)?);
    let event = raw.event_create()?;
    raw.set_async(at, &[7], 4_096, stream)?;
    raw.event_record(event, stream)?;
    raw.stream_wait_event(other, event)?;
    raw.launch(kernel("copy_u8"), &[at, at + MIB, 4_096], other)?;
    let target = bytes(100, 0);
    raw.copy_async(Place::Host(target.clone(), 0), Place::Device(at), 100, other)?;
    raw.host_function(other, Box::new(|| {}))?;
    raw.stream_query(other)?;
    raw.stream_synchronize(other)?;
    begins_with(&target, 7);
    for kind in [HostKind::Locked, HostKind::Registered, HostKind::Managed] {
        raw.host_enter(100, kind)?;
        raw.host_insert(HOST, kind, bytes(100, 3))?;
        raw.copy_async(Place::Device(at), Place::Device(HOST), 100, other)?;
        raw.stream_synchronize(other)?;
        raw.host_remove(HOST, kind)?;
    }
    let source = bytes(100, 4);
    raw.copy_async(Place::Device(at), Place::Host(source, 0), 100, raw.legacy_stream()?)?;
    raw.copy_async(Place::Device(at + MIB), Place::Device(at), 100, stream)?;
    let plain = raw.alloc(100)?;
    raw.free(plain)?;
    let pool = raw.pool_create(0)?;
    let pooled = raw.alloc_async(Some(pool), 100, stream)?;
    raw.free_async(pooled, stream)?;
    raw.pool_trim(pool, 0)?;
    raw.pool_destroy(pool)?;
    raw.begin_capture(stream, CaptureMode::Global)?;
    raw.set_async(at, &[8], 4_096, stream)?;
    let graph = raw.end_capture(stream)?;
    let run = raw.graph_instantiate(graph)?;
    raw.graph_destroy(graph)?;
    raw.graph_launch(run, stream)?;
    raw.graph_destroy(run)?;
    raw.event_query(event)?;
    raw.event_synchronize(event)?;
    raw.synchronize()?;
    raw.memory_info()?;
    raw.event_destroy(event)?;
    raw.stream_destroy(stream)?;
    raw.stream_destroy(other)?;
    raw.unmap(at, SIZE)?;
    raw.release(handle)?;
    raw.address_free(at, 2 * SIZE)
}

/// The calls that a program makes through the driver, and that have no single form.
const OF_THE_DRIVER: [Call; 2] = [Call::Copy, Call::StreamIsCapturing];

#[test]
fn any_single_call_can_fail_and_a_failed_call_has_no_effect() {
    let whole = device(Order::Lazy);
    round(&whole).expect("nothing fails");
    whole.assert_no_faults();
    let left = whole.raw().numbers();
    assert_eq!(left, raw::Numbers::default());
    for call in Call::ALL.into_iter().filter(|call| !OF_THE_DRIVER.contains(call)) {
        assert!(whole.calls(call) > 0, "{call:?} is not in the round");
    }
    for order in [Order::Lazy, Order::Synchronous, Order::Random { seed: 9 }] {
        for nth in 0..whole.calls_total() {
            for error in [SimError::OutOfMemory, SimError::Unknown, SimError::LaunchFailed] {
                let sim = device(order);
                sim.fail_nth(None, nth, error);
                assert_eq!(round(&sim), Err(error.code()), "call {nth} of {order:?}");
                sim.validate();
                assert_eq!(sim.faults(), [], "call {nth} of {order:?}, {error:?}");
            }
        }
    }
}

#[test]
fn a_task_kept_in_a_graph_is_done_at_each_launch_and_gone_with_it() {
    let sim = device(Order::Lazy);
    let raw = sim.raw();
    let (stream, at) = (raw.stream_create(false).expect("one"), raw.alloc(8).expect("room"));
    let target = bytes(8, 0);
    raw.begin_capture(stream, CaptureMode::Global).expect("begun");
    let (to, from) = (Place::Host(target.clone(), 0), Place::Device(at));
    raw.copy_async(to, from, 8, stream).expect("captured");
    let graph = raw.end_capture(stream).expect("ended");
    for value in [1, 2] {
        raw.set_async(at, &[value], 8, stream).expect("queued");
        raw.graph_launch(graph, stream).expect("queued");
        raw.stream_synchronize(stream).expect("done");
        assert_eq!(first(&target), value);
    }
    raw.graph_launch(graph, stream).expect("queued");
    raw.graph_destroy(graph).expect("gone");
    assert_eq!(Arc::strong_count(&target), 2, "queued still");
    raw.stream_synchronize(stream).expect("done");
    assert_eq!(Arc::strong_count(&target), 1);
}

#[test]
fn a_capture_that_was_spoiled_keeps_no_task() {
    let sim = device(Order::Lazy);
    let raw = sim.raw();
    let (stream, at) = (raw.stream_create(false).expect("one"), raw.alloc(8).expect("room"));
    let target = bytes(8, 0);
    raw.begin_capture(stream, CaptureMode::Global).expect("begun");
    let (to, from) = (Place::Host(target.clone(), 0), Place::Device(at));
    raw.copy_async(to, from, 8, stream).expect("captured");
    assert_eq!(raw.alloc_async(None, 8, stream), Err(900));
    assert_eq!(raw.stream_capture_status(stream), Ok(2));
    assert_eq!(raw.end_capture(stream), Err(901));
    assert_eq!(Arc::strong_count(&target), 1);
    assert!(matches!(sim.faults()[..], [Fault::CaptureSpoiled { .. }]));
}

#[test]
fn a_kernel_with_a_delay_lets_as_many_turns_pass_as_it_takes_milliseconds() {
    let sim = device(Order::Lazy);
    let raw = sim.raw();
    let (stream, at) = (raw.stream_create(false).unwrap(), raw.alloc(SIZE).unwrap());
    raw.launch(kernel("torture_fill"), &[at, 16, 1, 3_000_000], stream).unwrap();
    for _ in 0..3 {
        sim.advance(1);
        assert!(!raw.stream_query(stream).unwrap());
    }
    sim.advance(1);
    assert!(raw.stream_query(stream).unwrap());
    // Of other seeds every word differs, and a wait runs through any delay.
    let counts = at + MIB;
    raw.set_async(counts, &[0], 24, stream).unwrap();
    for seed in [1, 2] {
        let arguments = [at, 16, seed, 50_000_000, counts];
        raw.launch(kernel("torture_check"), &arguments, stream).unwrap();
    }
    let found = bytes(24, 9);
    let (to, from) = (Place::Host(found.clone(), 0), Place::Device(counts));
    raw.copy_async(to, from, 24, stream).unwrap();
    raw.stream_synchronize(stream).unwrap();
    let mut words = [0; 24];
    found.read(0, &mut words);
    assert_eq!((words[0], words[8]), (16, 2));
}

#[test]
fn the_default_stream_and_those_that_block_wait_for_each_other() {
    let sim = device(Order::Lazy);
    let raw = sim.raw();
    let (blocking, apart) = (raw.stream_create(true), raw.stream_create(false));
    let (blocking, apart) = (blocking.expect("one"), apart.expect("two"));
    let legacy = raw.legacy_stream().expect("the default one");
    let at = raw.alloc(8).expect("room");
    raw.set_async(at, &[1], 8, blocking).expect("queued");
    raw.set_async(at, &[2], 8, apart).expect("queued");
    raw.set_async(at, &[3], 8, legacy).expect("queued");
    raw.stream_synchronize(legacy).expect("done");
    assert_eq!(raw.stream_query(blocking), Ok(true), "before the default one");
    assert_eq!(raw.stream_query(apart), Ok(false));
    raw.set_async(at, &[4], 8, legacy).expect("queued");
    raw.set_async(at, &[5], 8, blocking).expect("queued");
    raw.stream_synchronize(blocking).expect("done");
    assert_eq!(raw.stream_query(legacy), Ok(true), "before the blocking one");
    raw.begin_capture(blocking, CaptureMode::Global).expect("begun");
    assert_eq!(raw.legacy_stream(), Err(906), "would be ordered with the capture");
}

#[test]
fn random_programs_over_pools_keep_the_books() {
    for seed in 0..50 {
        let sim = device(Order::Random { seed });
        let raw = sim.raw();
        let streams = [raw.stream_create(false), raw.stream_create(true)];
        let streams = streams.map(|stream| stream.expect("a stream"));
        let pools = [raw.pool_create(0), raw.pool_create(4 * MIB)].map(|pool| pool.expect("one"));
        raw.pool(pools[0], |it| it.threshold = MIB).expect("set");
        let mut live: Vec<(u64, usize)> = Vec::new();
        let mut chance = Numbers::new(seed);
        let mut draw = |below: u64| usize::try_from(chance.below(below)).expect("small");
        for _ in 0..150 {
            let (on, pool) = (draw(2), pools[draw(2)]);
            match draw(8) {
                0..=2 => {
                    let size = 1 + draw(MIB) as u64;
                    if let Ok(at) = raw.alloc_async(Some(pool), size, streams[on]) {
                        raw.set_async(at + size - 1, &[1], 1, streams[on]).expect("queued");
                        live.push((at, on));
                    }
                }
                3 | 4 if !live.is_empty() => {
                    let (at, on) = live.swap_remove(draw(live.len() as u64));
                    raw.free_async(at, streams[on]).expect("queued");
                }
                5 if !live.is_empty() => {
                    raw.free(live.swap_remove(draw(live.len() as u64)).0).expect("freed");
                }
                6 => raw.stream_synchronize(streams[on]).expect("done"),
                _ => raw.pool_trim(pool, 0).expect("trimmed"),
            }
            sim.validate();
        }
        for (at, on) in live {
            raw.free_async(at, streams[on]).expect("queued");
        }
        raw.synchronize().expect("done");
        pools.iter().for_each(|pool| raw.pool_destroy(*pool).expect("destroyed"));
        assert_eq!(raw.numbers().taken_bytes, 0, "seed {seed}");
        assert_eq!(sim.faults(), [], "seed {seed}");
        assert_eq!(sim.headroom(), Ok(Some(ByteSize::mib(1536))), "seed {seed}");
    }
}
