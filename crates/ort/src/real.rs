//! Tests with a real ONNX Runtime, whose shared library `ORT_DYLIB_PATH` names when they are built.
//! Without it they pass, and print `skipped:`. Each has a process of its own, as ONNX Runtime has
//! one environment for each.

use std::fs;
use std::path::{Path, PathBuf};
use std::thread::park_timeout;
use std::time::Duration;

use lowtide::config::arena::{ArenaOptions, SHRINK_OPTION};
use lowtide::config::{DeviceChoice, Profile};
use lowtide::device::DeviceArena;
use lowtide::heap::HostArena;
use lowtide::memory::Slot;
use lowtide::{BoxError, ByteSize, Memory};
use ort::session::Session;
use ort::value::TensorRef;
use tempfile::TempDir;
use test_fork::test;

use super::session::{ENV_ALLOCATORS, PATTERN, SPINNING, SessionSettings};
use super::verify::{WIDTH, model};
use super::*;

/// Of the small model, for ones: three products over [`WIDTH`] columns, plus 1.
const ANSWER: f32 = 262_145.0;
/// Looks for a condition, 20 ms apart.
const LOOKS_MAX: u32 = 500;

pub(crate) fn library() -> Option<PathBuf> {
    let path = option_env!("ORT_DYLIB_PATH");
    if path.is_none() {
        println!("skipped: ORT_DYLIB_PATH named no ONNX Runtime");
    }
    path.map(PathBuf::from)
}

fn memory() -> Memory {
    Memory::builder().device(DeviceChoice::Host).start().unwrap()
}

fn opened() -> Option<(Memory, Runtime)> {
    let (library, memory) = (library()?, memory());
    let runtime = Runtime::open(&memory, library).unwrap();
    Some((memory, runtime))
}

fn in_file(folder: &Path, bytes: &[u8]) -> PathBuf {
    let path = folder.join("model.onnx");
    fs::write(&path, bytes).unwrap();
    path
}

/// Writes the small model to a folder, which is removed when its handle is dropped.
pub(crate) fn small_model() -> (TempDir, PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    let path = in_file(folder.path(), &model::encoded());
    (folder, path)
}

/// Runs the small model on so many rows of ones, and checks the answer.
pub(crate) fn run(session: &mut Session, rows: usize) -> Result<(), BoxError> {
    let input = vec![1.0_f32; rows * WIDTH];
    let input = TensorRef::from_array_view(([rows, WIDTH], &*input))?;
    let outputs = session.run(ort::inputs![input])?;
    let (_, values) = outputs[0].try_extract_tensor::<f32>()?;
    let is_right = values.len() == rows * WIDTH && values.iter().all(|value| *value == ANSWER);
    if is_right { Ok(()) } else { Err("a wrong answer".into()) }
}

pub(crate) fn wait_until(what: &str, holds: impl Fn() -> bool) {
    for _ in 0..LOOKS_MAX {
        if holds() {
            return;
        }
        park_timeout(Duration::from_millis(20));
    }
    panic!("never happened: {what}");
}

#[test]
fn it_opens_once_and_after_a_failure() {
    let Some(library) = library() else { return };
    let memory = memory();
    let wrong = Runtime::open(&memory, "/nonexistent.so");
    assert!(matches!(wrong, Err(OrtError::Library { .. })), "{wrong:?}");
    let runtime = Runtime::open(&memory, &library).unwrap();
    assert!(runtime.version().starts_with("1."), "{runtime:?}");
    let again = Runtime::open(&memory, &library);
    assert!(matches!(again, Err(OrtError::AlreadyOpen { .. })), "{again:?}");
}

#[test]
fn a_setting_that_the_runtime_does_not_follow_is_observed() {
    let Some((_memory, runtime)) = opened() else { return };
    let said = SessionSettings::of(Profile::Balanced, 2);
    for (key, other) in [(ENV_ALLOCATORS, "0"), (PATTERN, "true"), (SPINNING, "1")] {
        let applied = said.with(key, other);
        let stats = || runtime.allocator().stats();
        let observed = verify::try_out(runtime.environment(), &applied, stats).unwrap();
        let error = observed.compare(&said, runtime.version()).unwrap_err();
        assert!(matches!(&error, OrtError::NotInForce { key: of, .. } if *of == key), "{error}");
    }
}

#[test]
fn a_session_is_loaded_once_and_returns_all_when_it_is_unloaded() {
    let Some((memory, runtime)) = opened() else { return };
    let (_folder, model) = small_model();
    let session = runtime.session("small", &model).idle(Duration::from_secs(3_600));
    let session = session.register().unwrap();
    assert!(!session.stats().loaded);
    std::thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| run(&mut session.acquire_blocking().unwrap().lock(), 100).unwrap());
        }
    });
    let stats = session.stats();
    assert_eq!(stats.loads_ok_total, 1);
    let held = stats.measured.map_or(0, |cost| cost.host.get());
    assert!(held > 32 << 10, "the packed weights are measured: {stats:?}");
    let threads = memory.snapshot().cpus.whole().unwrap_or(1).saturating_sub(1);
    let loaded = session.acquire_blocking().unwrap();
    assert_eq!(loaded.threads(), usize::try_from(threads).unwrap());
    drop(loaded);
    session.unload_now(Duration::from_secs(5)).unwrap();
    assert!(runtime.allocator().stats().in_use.is_zero(), "{runtime:?}");
    let names = fs::read_dir("/proc/self/task").unwrap().flatten();
    let names = names.filter_map(|task| fs::read_to_string(task.path().join("comm")).ok());
    assert_eq!(names.filter(|name| name.starts_with("ort-")).count(), 0);
    run(&mut session.acquire_blocking().unwrap().lock(), 1).unwrap(); // it loads again
}

#[test]
fn memory_of_runs_is_released_when_idle() {
    let Some((memory, runtime)) = opened() else { return };
    let (_folder, model) = small_model();
    let session = runtime.session("small", &model).register().unwrap();
    let held = session.acquire_blocking().unwrap();
    run(&mut held.lock(), 65_536).unwrap(); // blocks of 16 MiB
    let committed = || memory.snapshot().devices.arenas[0].committed;
    assert!(committed() >= ByteSize::mib(16), "{}", committed());
    wait_until("the arena decays", || committed().is_zero());
    run(&mut held.lock(), 65_536).unwrap();
    runtime.allocator().shrink();
    assert!(committed().is_zero(), "a shrink does not wait");
}

#[test]
fn a_heap_arena_serves_runs_too() {
    let Some(library) = library() else { return };
    let memory = Memory::builder().device(DeviceChoice::None).start().unwrap();
    let runtime = Runtime::open(&memory, &library).unwrap();
    let (_folder, model) = small_model();
    let session = runtime.session("small", &model).register().unwrap();
    run(&mut session.acquire_blocking().unwrap().lock(), 1_000).unwrap();
    let arenas = HostArena::all().unwrap();
    assert!(arenas.iter().any(|(name, _)| name == "onnxruntime"), "{arenas:?}");
    assert!(runtime.allocator().stats().allocs > 0);
}

#[test]
fn a_model_that_cannot_be_loaded_is_named_and_the_service_goes_on() {
    let Some((_memory, runtime)) = opened() else { return };
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.onnx");
    let session = runtime.session("small", &path).backoff(Duration::ZERO, Duration::ZERO);
    let session = session.register().unwrap();
    let text = |kind: fn(&OrtError) -> bool| {
        let error = session.acquire_blocking().unwrap_err();
        let found = OrtError::of(&error).unwrap_or_else(|| panic!("no OrtError in {error:?}"));
        assert!(kind(found), "{found:?}");
        let text = found.to_string();
        assert!(text.contains(&*path.to_string_lossy()), "{text}");
        assert!(text.contains("expected"), "{text}");
        println!("{text}");
    };
    text(|error| matches!(error, OrtError::ModelFile { .. })); // missing
    fs::write(&path, b"not a model").unwrap();
    text(|error| matches!(error, OrtError::Model { .. }));
    let whole = model::encoded();
    fs::write(&path, &whole[..whole.len() / 2]).unwrap(); // cut off
    text(|error| matches!(error, OrtError::Model { .. }));
    let (external, data) = model::external("model.onnx.data");
    fs::write(&path, &external).unwrap();
    text(|error| matches!(error, OrtError::ExternalData { .. })); // missing
    let data_path = folder.path().join("model.onnx.data");
    fs::write(&data_path, &data[..data.len() / 2]).unwrap();
    text(|error| matches!(error, OrtError::ExternalData { .. })); // too short
    fs::write(&data_path, &data).unwrap();
    run(&mut session.acquire_blocking().unwrap().lock(), 3).unwrap();
    assert_eq!(session.stats().loads_failed_total, 5);
}

#[test]
fn a_value_that_is_kept_keeps_its_session_and_can_be_dropped_later() {
    let Some((_memory, runtime)) = opened() else { return };
    let (_folder, model) = small_model();
    let session = runtime.session("small", &model).register().unwrap();
    let loaded = session.acquire_blocking().unwrap();
    let input = vec![1.0_f32; WIDTH];
    let value = {
        let mut run = loaded.lock();
        let view = TensorRef::from_array_view(([1, WIDTH], &*input)).unwrap();
        let mut outputs = run.run(ort::inputs![view]).unwrap();
        outputs.remove("out").unwrap()
    };
    drop(loaded);
    session.unload_now(Duration::from_secs(5)).unwrap();
    assert!(!runtime.allocator().stats().in_use.is_zero());
    assert_eq!(value.try_extract_tensor::<f32>().unwrap().1[0], ANSWER);
    drop(value);
    assert!(runtime.allocator().stats().in_use.is_zero());
}

/// The cases of `docs/ARENA_OPTIONS.md`: an arena that is shared under ONNX Runtime's own keys.
#[test]
fn a_shared_arena_rules_over_session_keys_and_can_be_replaced_and_shrunk() {
    let Some(library) = library() else { return };
    let memory = memory();
    let slot = Slot::device("CPUExecutionProvider", 0);
    let process = [("ep_factory.CPUExecutionProvider.arena.max_mem", "67108864")];
    let process = ArenaOptions::of_process("CPUExecutionProvider", process).unwrap();
    memory.devices().share_arena(&slot, &process).unwrap();
    let key = ("ep.cpuexecutionprovider.arena.max_mem", "1048576");
    let options = ArenaOptions::of_session("CPUExecutionProvider", [key]).unwrap();
    let used = memory.devices().use_arena(&slot, &options).unwrap();
    assert_eq!(used.report.conflicts.len(), 1, "{used:?}");
    let runtime = Runtime::open_in(&memory, &library, RunArena::Slot(used)).unwrap();

    let (_folder, model) = small_model();
    let session = runtime.session_with("small", &model, move |builder| {
        Ok(builder.with_config_entry(key.0, key.1).map_err(|error| error.to_string())?)
    });
    let session = session.register().unwrap();
    let held = session.acquire_blocking().unwrap();
    // Blocks of 16 MiB: above the session's key, below the shared limit.
    run(&mut held.lock(), 65_536).unwrap();
    let committed = || -> ByteSize {
        memory.snapshot().devices.arenas.iter().map(|arena| arena.committed).sum()
    };
    assert!(committed() >= ByteSize::mib(16));
    assert_eq!(runtime.allocator().stats().overflows, 0);
    // Blocks of 64 MiB: two are above the shared limit, which holds. The heap serves the rest, as
    // ONNX Runtime would crash.
    run(&mut held.lock(), 262_144).unwrap();
    let overflows = runtime.allocator().stats().overflows;
    assert!(overflows > 0 && committed() <= ByteSize::mib(64), "{}", committed());

    // The same session, after a replacement.
    let larger = ArenaOptions::from_keys([("arena.max_mem", "536870912")]).unwrap();
    memory.devices().replace_arena(&slot, &larger).unwrap();
    run(&mut held.lock(), 262_144).unwrap();
    wait_until("the old arena is drained", || memory.snapshot().devices.draining.is_empty());

    assert_eq!(runtime.allocator().stats().overflows, overflows);
    let before = committed();
    assert!(before >= ByteSize::mib(128), "{before}");
    let ends = memory.devices().run([(SHRINK_OPTION, "gpu:0")]).unwrap();
    run(&mut held.lock(), 10).unwrap();
    assert!(ends.end()[0].released >= ByteSize::mib(128));
    assert_eq!(committed(), ByteSize::ZERO);
}

#[test]
fn a_shared_arena_grows_by_its_own_steps_in_a_session_that_asks_for_others() {
    let Some(library) = library() else { return };
    let memory = memory();
    let slot = Slot::device("CPUExecutionProvider", 0);
    let process = [("ep_factory.CPUExecutionProvider.arena.initial_chunk_size_bytes", "33554432")];
    let process = ArenaOptions::of_process("CPUExecutionProvider", process).unwrap();
    memory.devices().share_arena(&slot, &process).unwrap();
    let used = memory.devices().use_arena(&slot, &ArenaOptions::default()).unwrap();
    let runtime = Runtime::open_in(&memory, &library, RunArena::Slot(used)).unwrap();
    let (_folder, model) = small_model();
    let session = runtime.session_with("small", &model, |builder| {
        let key = "ep.cpuexecutionprovider.arena.initial_chunk_size_bytes";
        Ok(builder.with_config_entry(key, "2097152").map_err(|error| error.to_string())?)
    });
    let session = session.register().unwrap();
    let held = session.acquire_blocking().unwrap();
    let committed = || -> ByteSize {
        memory.snapshot().devices.arenas.iter().map(|arena| arena.committed).sum()
    };
    run(&mut held.lock(), 10).unwrap();
    assert!(committed() >= ByteSize::mib(32), "the first step: {}", committed());
    let exact = ArenaOptions::from_keys([("arena.extend_strategy", "1")]).unwrap();
    memory.devices().replace_arena(&slot, &exact).unwrap();
    wait_until("the old arena is drained", || memory.snapshot().devices.draining.is_empty());
    run(&mut held.lock(), 10).unwrap();
    assert!(committed() <= ByteSize::mib(4), "no more than the blocks: {}", committed());
}

/// Runs on the CPU have no stream: the memory of a run is free as soon as its outputs are dropped.
#[test]
fn a_run_leaves_no_block_behind_when_its_outputs_are_dropped() {
    let Some((memory, runtime)) = opened() else { return };
    let (_folder, model) = small_model();
    let session = runtime.session("small", &model).register().unwrap();
    let held = session.acquire_blocking().unwrap();
    let before = runtime.allocator().stats();
    for rows in [1, 1_000, 65_536] {
        run(&mut held.lock(), rows).unwrap();
    }
    let after = runtime.allocator().stats();
    assert!(after.allocs > before.allocs && after.max_in_use > ByteSize::mib(16));
    assert_eq!(after.in_use, before.in_use);
    assert!(memory.snapshot().devices.arenas[0].live.is_zero());
}

/// ONNX Runtime's own option finds no arena of its own kind.
#[test]
fn the_shrink_option_of_a_run_is_an_error_and_ours_is_a_call() {
    let Some(library) = library() else { return };
    let memory = memory();
    let arena: DeviceArena = memory.devices().open_arena("runs").unwrap();
    let runtime = Runtime::open_in(&memory, &library, RunArena::Device(arena.clone())).unwrap();
    let (_folder, model) = small_model();
    let session = runtime.session("small", &model).register().unwrap();
    let held = session.acquire_blocking().unwrap();
    let mut options = ort::session::RunOptions::new().unwrap();
    options.set(SHRINK_OPTION, "cpu:0").unwrap();
    let input = vec![1.0_f32; WIDTH];
    let view = TensorRef::from_array_view(([1, WIDTH], &*input)).unwrap();
    let ran = held.lock().run_with_options(ort::inputs![view], &options).map(drop);
    assert!(ran.is_err());
    run(&mut held.lock(), 65_536).unwrap();
    assert!(arena.glance().committed > ByteSize::mib(16));
    runtime.allocator().shrink();
    assert!(arena.glance().committed.is_zero());
}
