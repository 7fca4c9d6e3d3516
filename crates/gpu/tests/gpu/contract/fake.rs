//! A CUDA device of the fake driver library as a device of the suite, in each order of work.
//!
//! Apart from `cuda`, which a program that measures a real device has as well. It proves logic and
//! no speed.
//!
//! Invariant: a test ends with no fault on record and nothing left.

use lowtide_cuda_sim::sample;
use lowtide_fake_cuda::{Fake, Options};
use lowtide_gpu::ByteSize;
use lowtide_gpu::driver::Backend;
use lowtide_gpu::driver::cuda::CudaOptions;

use super::cuda::Cuda;
use super::run;

/// A granule of 64 KiB, so that there are few bytes to move.
const SMALL: Options = Options { granularity: 64 << 10, ..SYNCHRONOUS };
const SYNCHRONOUS: Options = Options {
    order: 2,
    flags: 0,
    seed: 0,
    capacity: 0,
    granularity: 0,
    address_space: 0,
    context_overhead: 0,
    devices: 1,
    driver_version: 12_080,
};

fn run_over(options: Options, cuda: CudaOptions) {
    let fake = Fake::start(options);
    let device = Cuda::open(cuda).expect("a device");
    run(&device);
    drop(device);
    fake.validate(0);
    fake.assert_clean();
}

/// Each way to memory, in pieces of 64 KiB or more where so much is said.
fn ways(handle: Option<ByteSize>) -> [CudaOptions; 4] {
    let way = |backend, managed| CudaOptions { backend, managed, handle, ..CudaOptions::default() };
    [
        way(Some(Backend::CudaVirtualMemory), false),
        way(Some(Backend::CudaPool), false),
        way(Some(Backend::CudaPlain), false),
        way(None, true),
    ]
}

#[test]
fn cuda_keeps_it_when_work_is_done_at_once() {
    run_over(SYNCHRONOUS, CudaOptions::default());
    let ways = ways(Some(ByteSize::kib(64))).into_iter();
    for options in ways.take(if cfg!(lowtide_soak) { 4 } else { 1 }) {
        println!("{options:?}");
        run_over(SMALL, options);
    }
}

#[test]
fn cuda_keeps_it_when_work_is_done_as_late_as_may_be() {
    run_over(Options { order: 0, ..SYNCHRONOUS }, CudaOptions::default());
    for options in ways(Some(ByteSize::kib(64))) {
        println!("{options:?}");
        run_over(Options { order: 0, ..SMALL }, options);
    }
    for options in ways(Some(ByteSize::kib(256))) {
        println!("{options:?}");
        // For segments: addresses that are no multiples of it.
        run_over(Options { order: 0, granularity: 16 << 10, ..SMALL }, options);
    }
}

#[test]
fn cuda_keeps_it_when_work_is_done_in_random_order() {
    let [space, segments @ ..] = ways(Some(ByteSize::kib(64)));
    for (seed, other) in (0..sample(100)).zip(segments.into_iter().cycle()) {
        for options in [space, other] {
            println!("seed {seed}, {options:?}");
            run_over(Options { order: 1, seed, ..SMALL }, options);
        }
    }
}

/// The driver refuses to create a pool of our own.
#[test]
fn cuda_keeps_it_with_the_devices_own_pool() {
    let flags = Options::NO_VIRTUAL_MEMORY | Options::NO_POOL_CREATE;
    let options = CudaOptions { handle: Some(ByteSize::kib(64)), ..CudaOptions::default() };
    for order in 0..=2 {
        run_over(Options { order, flags, seed: 7, ..SMALL }, options);
    }
}
