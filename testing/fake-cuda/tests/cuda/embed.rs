//! The proxy's model on a CUDA device, over the fake of the driver's library: what comes of it is
//! what the host computes.
#![allow(dead_code, reason = "of the model a part is used here")]

#[path = "../../../../examples/proxy/model.rs"]
mod model;

use std::sync::Arc;

use lowtide::ByteSize;
use lowtide::clock::SystemClock;
use lowtide_fake_cuda::{Fake, Options};
use lowtide_gpu::driver::Driver;
use lowtide_gpu::driver::cuda::{CudaDriver, CudaOptions};
use lowtide_gpu::{ArenaConfig, DeviceArena, HostDriver, SleepOptions};
use model::{Model, ModelError};

const TABLE: ByteSize = ByteSize::mib(1);

fn arena(driver: Arc<dyn Driver>) -> DeviceArena {
    let config = ArenaConfig { reserve: ByteSize::gib(4), ..ArenaConfig::new("embedder") };
    DeviceArena::open(driver, Arc::new(SystemClock::new()), config).expect("an arena")
}

fn texts() -> Vec<String> {
    let long = "the quick brown fox jumps over the lazy dog ".repeat(40);
    vec!["a".to_owned(), "tides go out".to_owned(), long, "?".to_owned()]
}

#[test]
fn embeddings_of_the_device_are_those_of_the_host() {
    let host = arena(Arc::new(HostDriver::new()));
    let expected = Model::load(&host, TABLE, 7).and_then(|model| model.embed(&texts()));
    let expected = expected.expect("embeddings");
    for order in 0..3 {
        let fake = Fake::start(Options { order, seed: 5, devices: 1, ..Options::default() });
        let driver = CudaDriver::open(CudaOptions::default()).expect("a device");
        let arena = arena(Arc::new(driver));
        let model = Model::load(&arena, TABLE, 7).expect("loaded");
        assert_near(&model.embed(&texts()).expect("embeddings"), &expected);
        arena.sleep(SleepOptions::default()).expect("asleep");
        assert_near(&model.embed(&texts()).expect("it wakes"), &expected);
        drop(model);
        arena.close().expect("nothing is live");
        drop(arena);
        fake.assert_clean();
    }
}

/// Each number within a millionth of the vector's largest.
fn assert_near(found: &[Vec<f32>], expected: &[Vec<f32>]) {
    assert_eq!(found.len(), expected.len());
    for (found, expected) in found.iter().zip(expected) {
        let far = found.iter().zip(expected).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
        let largest = expected.iter().map(|number| number.abs()).fold(f32::MIN_POSITIVE, f32::max);
        assert!(found.len() == expected.len() && far < 1e-6 * largest, "{far} of {largest}");
    }
}

#[test]
fn kernels_that_do_not_load_and_memory_that_is_not_there_are_typed_errors() {
    let fake = Fake::start(Options { devices: 1, ..Options::default() });
    let driver = CudaDriver::open(CudaOptions::default()).expect("a device");
    let arena = arena(Arc::new(driver));
    fake.fail(c"cuModuleLoadData", 1, 218);
    let failed = Model::load(&arena, TABLE, 7).expect_err("bad PTX");
    assert!(matches!(failed, ModelError::Cuda(_)) && !failed.is_out_of_memory(), "{failed}");
    arena.set_limit(ByteSize::mib(1));
    let failed = Model::load(&arena, ByteSize::mib(8), 7).expect_err("too large");
    assert!(failed.is_out_of_memory(), "{failed}");
    drop(arena);
    fake.assert_clean();
}
