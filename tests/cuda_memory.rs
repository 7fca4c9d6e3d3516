//! A `Memory` whose device arenas lie in CUDA memory, over the fake of the driver's library.
#![cfg(all(target_os = "linux", feature = "cuda"))]

use std::time::Duration;

use cudarc::driver::CudaContext;
use lowtide::config::DeviceChoice;
use lowtide::device::driver::Rung;
use lowtide::device::{Region, SleepOptions};
use lowtide::memory::StartError;
use lowtide::{ByteSize, Memory};
use lowtide_fake_driver::{Fake, Options};

const SOON: Duration = Duration::from_secs(20);

#[test]
fn arenas_lie_on_the_device_where_cuda_is_asked_for() {
    let fake = Fake::start(Options { devices: 1, ..Options::default() });
    let memory = Memory::builder().device(DeviceChoice::Cuda).start().expect("a device");
    let arena = memory.open_arena("embedder").expect("an arena");
    assert_eq!(arena.rung(), Rung::CudaVirtualMemory);
    let context = CudaContext::new(0).expect("the same context");
    let stream = context.new_stream().expect("a stream");
    let lane = arena.cuda_lane(&stream).expect("a lane");
    let mut weights = lane.alloc::<f32>(1 << 18, Region::Stable).expect("room");
    let values: Vec<f32> = (0_u16..1 << 8).map(f32::from).cycle().take(weights.len()).collect();
    let lease = lane.enter().expect("a lease");
    stream.memcpy_htod(&values, &mut weights.cuda_mut(&lease).expect("a view")).expect("there");
    drop(lease);
    arena.sleep(SleepOptions::default()).expect("asleep");
    assert_eq!(fake.numbers(0).mappings, 0, "its memory is gone");
    let lease = lane.enter().expect("awake");
    let back = stream.clone_dtoh(weights.cuda(&lease).expect("a view")).expect("back");
    assert_eq!(back, values);
    drop((lease, weights, lane, stream));
    // A drop waits for no work, and leaves the memory that is worked on.
    arena.close().expect("nothing is live");
    drop(arena);
    assert!(memory.shutdown(SOON).is_clean());
    drop((memory, context));
    fake.assert_clean();
}

#[test]
fn a_device_that_cannot_be_had_is_an_error_that_names_the_cause() {
    let flags = Options::NO_VIRTUAL_MEMORY;
    let fake = Fake::start(Options { devices: 1, flags, ..Options::default() });
    let failed = Memory::builder().device(DeviceChoice::Cuda).start();
    let Err(StartError::NoCuda { cause }) = failed else { panic!("{failed:?}") };
    let expected =
        "cuda_virtual_memory cannot be had on CUDA device 0: the device does not offer it";
    assert_eq!(cause, expected);
    fake.assert_clean();
}

#[test]
fn auto_takes_a_device_that_works_and_else_the_host() {
    let fake = Fake::start(Options { devices: 1, ..Options::default() });
    let rung = || {
        let memory = Memory::builder().device(DeviceChoice::Auto).start().expect("starts");
        let arena = memory.open_arena("embedder").expect("an arena");
        let rung = arena.rung();
        drop(arena);
        assert!(memory.shutdown(SOON).is_clean());
        rung
    };
    assert_eq!(rung(), Rung::CudaVirtualMemory);
    fake.assert_clean();
    // It claims virtual memory and refuses it, as shares of devices do.
    let flags = Options::NO_VIRTUAL_MEMORY | Options::CLAIMS_VIRTUAL_MEMORY;
    fake.reset(Options { devices: 1, flags, ..Options::default() });
    assert_eq!(rung(), Rung::Host);
    fake.assert_clean();
}

/// On the host nothing of the device is held.
#[test]
fn the_host_is_taken_where_it_is_asked_for() {
    let fake = Fake::start(Options { devices: 1, ..Options::default() });
    let memory = Memory::builder().device(DeviceChoice::Host).start().expect("starts");
    let arena = memory.open_arena("embedder").expect("an arena");
    assert_eq!((arena.rung(), fake.retains(0)), (Rung::Host, 0));
    let block = arena.alloc::<u8>(1 << 20, Region::Stable).expect("room");
    assert_eq!(block.bytes(), ByteSize::mib(1));
    drop((block, arena));
    assert!(memory.shutdown(SOON).is_clean());
    fake.assert_clean();
}
