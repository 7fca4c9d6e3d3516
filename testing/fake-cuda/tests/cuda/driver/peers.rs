//! Memory that other devices and network cards access.
//!
//! Invariant: all memory of an arena is accessible to the devices that were asked for, at any time.
#![expect(unsafe_code, reason = "raw calls that query access and properties")]

use std::time::Duration;

use cudarc::driver::sys::{self, CUresult};
use lowtide_fake_cuda::{Fake, Options};
use lowtide_gpu::driver::DeviceAddress;
use lowtide_gpu::driver::cuda::{CudaDriver, CudaOptions};
use lowtide_gpu::{Buffer, CompactOptions, DeviceArena, Region, SleepOptions};

use super::support::{Bed, LAZY, UNIT, life};

/// Returns `true` if a device may read and write at an address.
fn has_access(device: i32, at: DeviceAddress) -> bool {
    let (location, mut flags) = ([1, device], 0);
    // SAFETY: a pointer to a local, and to a place of a device, which is two numbers (cuda.h).
    let code =
        unsafe { sys::cuMemGetAccess(&raw mut flags, (&raw const location).cast(), at.get()) };
    assert_eq!(code, CUresult::CUDA_SUCCESS);
    flags == 3
}

/// Returns `true` if network cards may access the memory at an address.
fn is_for_network_cards(at: DeviceAddress) -> bool {
    let (mut handle, mut properties) = (0, [0_u8; 32]);
    let at = std::ptr::without_provenance_mut(usize::try_from(at.get()).expect("64 bits"));
    // SAFETY: a pointer to a local; the address is looked up and not followed.
    let code = unsafe { sys::cuMemRetainAllocationHandle(&raw mut handle, at) };
    assert_eq!(code, CUresult::CUDA_SUCCESS);
    let to = (&raw mut properties).cast();
    // SAFETY: a handle, and room for its properties, which are 32 bytes (cuda.h).
    let code = unsafe { sys::cuMemGetAllocationPropertiesFromHandle(to, handle) };
    assert_eq!(code, CUresult::CUDA_SUCCESS);
    // SAFETY: the handle, which was retained once.
    assert_eq!(unsafe { sys::cuMemRelease(handle) }, CUresult::CUDA_SUCCESS);
    properties[25] == 1 // gpuDirectRDMACapable
}

fn addresses(arena: &DeviceArena, buffers: &[Buffer<u8>]) -> Vec<DeviceAddress> {
    let lease = arena.enter().expect("awake");
    buffers.iter().map(|buffer| buffer.address(&lease).expect("ours").expect("not empty")).collect()
}

/// Reported in llama.cpp#24491 and XLA#40852: kernels of a device failed on memory of another, and
/// in vLLM#29569 and Mooncake#2511: network cards could not register memory.
#[test]
fn peers_and_network_cards_access_all_memory_also_after_a_sleep_and_a_move() {
    let fake = Fake::start(Options { devices: 3, ..LAZY });
    let asked = CudaOptions { peers: &[0, 2], rdma: true, ..CudaOptions::default() };
    for options in [CudaOptions::default(), asked] {
        let bed = Bed::over(CudaDriver::open(options).expect("a device"));
        let arena = bed.arena();
        let mut buffers: Vec<_> = (0..8)
            .map(|nth| {
                let region = if nth % 2 == 0 { Region::Stable } else { Region::Dynamic };
                arena.alloc::<u8>(UNIT + UNIT / 2, region).expect("room")
            })
            .collect();
        let check = |buffers: &[Buffer<u8>]| {
            for at in addresses(&arena, buffers) {
                let access = [0, 1, 2].map(|device| has_access(device, at));
                assert_eq!(access, [true, false, options == asked], "{at}");
                assert_eq!(is_for_network_cards(at), options == asked, "{at}");
            }
        };
        check(&buffers);
        let drain = Duration::ZERO;
        arena.sleep(SleepOptions { drain, ..SleepOptions::default() }).expect("asleep");
        arena.wake().expect("awake");
        check(&buffers);
        // Idle memory moves to a place where it is needed.
        buffers.truncate(5);
        arena.wait_for_pending().expect("waited");
        arena.compact(CompactOptions::new(Region::Dynamic), |_| {}).expect("compacted");
        buffers.push(arena.alloc::<u8>(6 * UNIT, Region::Dynamic).expect("room"));
        check(&buffers);
        drop(buffers);
        arena.close().expect("closed");
        drop(arena);
        assert_eq!(life(&bed, &mut || ()).0, Vec::<String>::new());
        drop(bed);
        fake.assert_clean();
    }
}
