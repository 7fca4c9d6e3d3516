//! Shrinks by ONNX Runtime's selector, now and at the end of a run.
#![cfg(target_os = "linux")]

use std::time::Duration;

use lowtide::config::DeviceChoice;
use lowtide::config::arena::{ArenaOptions, SHRINK_OPTION};
use lowtide::decay::DecayTime;
use lowtide::device::Region;
use lowtide::memory::{MemoryError, Slot};
use lowtide::{ByteSize, Memory};
use test_fork::test;

use crate::support::until;

const SOON: Duration = Duration::from_secs(5);
const GRANULE: ByteSize = ByteSize::mib(2);

/// Idle memory stays unless somebody takes it.
fn start() -> Memory {
    let builder = Memory::builder().device(DeviceChoice::Host).device_decay(DecayTime::Never);
    builder.start().expect("starts")
}

#[test]
fn a_shrink_gives_each_targets_bytes() {
    let memory = start();
    let arena = memory.devices().open_arena("embedder").expect("opens");
    drop(arena.alloc::<u8>(6 << 20, Region::Dynamic).expect("room"));
    let kept = arena.alloc::<u8>(256, Region::Dynamic).expect("room");
    let shrunk = memory.devices().shrink("gpu:0;cpu:0").expect("both are here");
    let [gpu, cpu] = &shrunk[..] else { panic!("{shrunk:?}") };
    assert_eq!((gpu.target.to_string(), cpu.target.to_string()), ("gpu:0".into(), "cpu:0".into()));
    // One small block pins its granule, and not a whole region.
    let released = ByteSize::mib(6).saturating_sub(GRANULE);
    assert!(gpu.released >= released, "{gpu:?}");
    assert_eq!(arena.glance().committed, GRANULE);
    assert_eq!((&gpu.error, &cpu.error), (&None, &None));
    drop(kept);
    assert!(memory.shutdown_blocking(SOON).is_clean());
}

#[test]
fn a_shrink_without_an_arena_is_zero_bytes_and_no_error() {
    let memory = start();
    let shrunk = memory.devices().shrink("gpu:0").expect("no error");
    assert_eq!((shrunk[0].released, &shrunk[0].error), (ByteSize::ZERO, &None));
    assert!(memory.shutdown_blocking(SOON).is_clean());
    drop(memory);
    let memory = Memory::builder().device(DeviceChoice::None).start().expect("starts");
    let shrunk = memory.devices().shrink("gpu:0").expect("no error");
    let none = Some(MemoryError::NoDevice);
    assert_eq!((shrunk[0].released, &shrunk[0].error), (ByteSize::ZERO, &none));
    assert!(memory.shutdown_blocking(SOON).is_clean());
}

#[test]
fn a_wrong_selector_shrinks_nothing() {
    let memory = start();
    let arena = memory.devices().open_arena("embedder").expect("opens");
    drop(arena.alloc::<u8>(4 << 20, Region::Dynamic).expect("room"));
    let idle = arena.glance().idle;
    for selector in ["gpu:0;gpu:1", "gpu:0;cpu:1", "gpu:0;gpu:4294967295"] {
        let error = memory.devices().shrink(selector).expect_err("no such device");
        assert!(matches!(error, MemoryError::UnknownDevice { .. }), "{error}");
        assert!(error.to_string().ends_with("expected cpu:0 or gpu:0"), "{error}");
    }
    for selector in ["", "gpu:0;", "gpu:0;npu:0", "gpu:x", "gpu:0;gpu:0"] {
        let error = memory.devices().shrink(selector).expect_err("no selector");
        assert!(matches!(error, MemoryError::Options(_)), "{error}");
    }
    assert_eq!(arena.glance().idle, idle, "nothing was given back");
    assert!(memory.shutdown_blocking(SOON).is_clean());
}

#[test]
fn a_run_shrinks_when_it_ends_and_a_wrong_selector_does_not_begin_it() {
    let memory = start();
    let arena = memory.devices().open_arena("embedder").expect("opens");
    let options = |selector| [("run.tag", "x"), (SHRINK_OPTION, selector)];
    let refused = memory.devices().run(options("gpu:3")).expect_err("no such device");
    assert!(matches!(refused, MemoryError::UnknownDevice { .. }));
    let idle = || drop(arena.alloc::<u8>(4 << 20, Region::Dynamic).expect("room"));
    let run = memory.devices().run(options("gpu:0")).expect("begins");
    idle();
    let before = arena.glance().idle;
    assert!(!before.is_zero(), "not before the end");
    assert_eq!(run.end()[0].released, before);
    let refused = memory.devices().run(options("gpu")).expect_err("no target").to_string();
    assert!(refused.contains(SHRINK_OPTION), "{refused}");
    // Without a target nothing is shrunk.
    let run = memory.devices().run(options("")).expect("begins");
    idle();
    assert!(run.end().is_empty());
    assert!(!arena.glance().idle.is_zero());
    // A run that is dropped, as by an error, leaves it to the worker.
    drop(memory.devices().run(options("gpu:0;cpu:0")).expect("begins"));
    until("the worker shrinks", || arena.glance().idle.is_zero());
    assert!(memory.shutdown_blocking(SOON).is_clean());
}

#[test]
fn a_shrink_reaches_arenas_that_drain() {
    let memory = start();
    let slot = Slot::device("CudaEp", 0);
    let exact = ArenaOptions::from_keys([("arena.extend_strategy", "1")]).expect("valid");
    let session = memory.devices().use_arena(&slot, &exact).expect("opened");
    let held = session.alloc::<u8>(2 << 20, Region::Dynamic).expect("room");
    memory.devices().replace_arena(&slot, &ArenaOptions::new()).expect("replaced");
    drop(session.alloc::<u8>(8 << 20, Region::Dynamic).expect("room"));
    let shrunk = memory.devices().shrink("gpu:0").expect("here");
    assert!(shrunk[0].released >= ByteSize::mib(8).saturating_sub(GRANULE), "{shrunk:?}");
    let draining = &memory.snapshot().devices.draining[0];
    assert_eq!((draining.live, draining.idle), (ByteSize::mib(2), ByteSize::ZERO));
    drop((held, session));
    assert!(memory.shutdown_blocking(SOON).is_clean());
}

#[test]
fn pinned_pools_belong_to_the_host() {
    let memory = start();
    let slot = Slot::pinned("CudaEp", 0);
    let session = memory.devices().use_arena(&slot, &ArenaOptions::new()).expect("opened");
    drop(session.alloc_pinned::<u8>(1 << 20).expect("room"));
    let committed =
        || memory.devices().arena_slots()[0].arena.as_ref().map(|arena| arena.committed);
    assert!(committed() > Some(ByteSize::ZERO), "idle, below the watermark");
    memory.devices().shrink("gpu:0").expect("here");
    assert!(committed() > Some(ByteSize::ZERO), "not the device's");
    assert!(memory.devices().shrink("cpu:0").expect("here")[0].released >= ByteSize::mib(1));
    assert_eq!(committed(), Some(ByteSize::ZERO));
    drop(session);
    assert!(memory.shutdown_blocking(SOON).is_clean());
}

#[test]
fn selector_errors_are_values() {
    let error = start().devices().shrink("cpu").expect_err("no target");
    let text = "selector=\"cpu\": expected targets such as cpu:0;gpu:0: \"cpu\" is not with the \
                number of a device";
    assert_eq!(error.to_string(), text);
    assert!(matches!(error, MemoryError::Options(_)));
}
