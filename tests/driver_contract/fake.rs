//! A CUDA device of the fake driver library as a device of the suite, in each order of work.
//!
//! Apart from `cuda`, which a program that measures a real device has as well. It proves logic and
//! no speed.
//!
//! Invariant: a test ends with no fault on record and nothing left.

use lowtide::ByteSize;
use lowtide::device::driver::cuda::CudaOptions;
use lowtide_fake_driver::{Fake, Options};

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
    context_floor: 0,
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

#[test]
fn cuda_keeps_it_when_work_is_done_at_once() {
    run_over(SYNCHRONOUS, CudaOptions::default());
}

#[test]
fn cuda_keeps_it_when_work_is_done_as_late_as_may_be() {
    run_over(Options { order: 0, ..SYNCHRONOUS }, CudaOptions::default());
    let handle = Some(ByteSize::kib(256));
    run_over(Options { order: 0, ..SMALL }, CudaOptions { handle, ..CudaOptions::default() });
}

#[test]
fn cuda_keeps_it_when_work_is_done_in_random_order() {
    for seed in 0..200 {
        println!("seed {seed}");
        run_over(Options { order: 1, seed, ..SMALL }, CudaOptions::default());
    }
}
