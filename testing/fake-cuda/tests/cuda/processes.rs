//! The processes on each device of a `Memory`, over the fakes of CUDA and NVML, which have the same
//! memory.
//!
//! Other processes have the number 1, which is visible in each PID namespace, or one that no
//! process has.

use std::sync::Arc;
use std::time::Duration;

use axum::http::Request;
use cudarc::driver::CudaContext;
use lowtide::clock::{Clock, ManualClock};
use lowtide::config::DeviceChoice;
use lowtide::memory::DeviceProcesses;
use lowtide::service::Endpoints;
use lowtide::{ByteSize, Memory};
use lowtide_fake_cuda::{Fake, Guard, Options};
use lowtide_gpu::Region;
use serde_json::Value;

const SOON: Duration = Duration::from_secs(20);
const KEPT: Duration = Duration::from_secs(5);
const CONTEXT: ByteSize = ByteSize::mib(512);
const LIST: &std::ffi::CStr = c"nvmlDeviceGetComputeRunningProcesses_v3";

/// A number that no process has: above the largest `pid_max`.
const NOBODY: u32 = 5_000_000;

/// A number that some process has.
const FIRST: u32 = 1;

fn start(devices: u32, flags: u32) -> (Guard, Arc<ManualClock>, Memory) {
    let fake = Fake::start(Options { devices, flags, ..Options::default() });
    fake.nvml();
    let (clock, memory) = memory(DeviceChoice::CudaAll);
    (fake, clock, memory)
}

fn memory(device: DeviceChoice) -> (Arc<ManualClock>, Memory) {
    let clock = Arc::new(ManualClock::new());
    let builder = Memory::builder().device(device).clock(Arc::clone(&clock) as Arc<dyn Clock>);
    (clock, builder.start().expect("starts"))
}

/// The list of the only device, queried now.
fn fresh(clock: &ManualClock, memory: &Memory) -> DeviceProcesses {
    clock.advance(KEPT);
    let [list] = &memory.devices().processes()[..] else { panic!("one device") };
    list.clone()
}

fn sum(list: &DeviceProcesses) -> Option<ByteSize> {
    let parts = [list.context_overhead?, list.own_unmanaged?, list.other_processes?];
    Some(parts.into_iter().chain([list.arenas, list.unattributed?]).sum())
}

#[test]
fn the_memory_of_a_device_is_divided_among_arenas_context_this_process_others_and_a_rest() {
    let (fake, clock, memory) = start(1, 0);
    let arena = memory.devices().open_arena("weights").expect("an arena");
    let alone = fresh(&clock, &memory);
    assert_eq!((alone.used, sum(&alone)), (Some(CONTEXT), Some(CONTEXT)));
    let weights = arena.alloc::<u8>(64 << 20, Region::Stable).expect("room");
    let context = CudaContext::new(0).expect("the same context");
    let stream = context.new_stream().expect("a stream");
    let plain = stream.clone_htod(&[1_u8; 8 << 20]).expect("memory of cudarc");
    // 1 GiB of neighbours, of which NVML shows 768 MiB.
    fake.neighbours(0, 1 << 30);
    fake.process(0, 0, FIRST, 768 << 20);
    let list = fresh(&clock, &memory);
    let device = memory.devices().all().remove(0);
    assert_eq!((list.number, &list.device, &list.error), (0, &device.name, &None));
    assert_eq!(list.arenas, arena.snapshot().committed);
    assert_eq!(list.context_overhead, Some(CONTEXT));
    assert!(list.own_unmanaged >= Some(ByteSize::mib(8)), "{list:?}");
    assert_eq!(list.other_processes, Some(ByteSize::mib(768)));
    assert_eq!(list.unattributed, Some(ByteSize::mib(256)));
    assert_eq!(sum(&list), list.used, "{list:?}");
    let (free, total) = context.mem_get_info().expect("answers");
    assert_eq!(list.used, Some(ByteSize::of(total - free)), "as CUDA reports");
    let marks: Vec<_> = list.processes.iter().map(|it| (it.pid, it.is_this_process)).collect();
    assert_eq!(marks, [(FIRST, Some(false)), (std::process::id(), Some(true))]);
    drop((weights, plain, stream, context));
    arena.close().expect("nothing is live");
    drop(arena);
    assert!(memory.shutdown_blocking(SOON).is_clean());
}

/// The context overhead that CUDA's figures give contains neighbours of the start.
#[test]
fn a_neighbour_of_the_start_is_no_part_of_the_context_once_nvml_was_asked() {
    let fake = Fake::start(Options { devices: 1, ..Options::default() });
    fake.nvml();
    fake.neighbours(0, 4 << 30);
    fake.process(0, 0, FIRST, 4 << 30);
    let (clock, memory) = memory(DeviceChoice::Cuda);
    let arena = memory.devices().open_arena("weights").expect("an arena");
    let list = fresh(&clock, &memory);
    assert_eq!((list.context_overhead, list.own_unmanaged), (Some(CONTEXT), Some(ByteSize::ZERO)));
    let context = CudaContext::new(0).expect("the same context");
    let stream = context.new_stream().expect("a stream");
    let plain = stream.clone_htod(&[1_u8; 32 << 20]).expect("memory of cudarc");
    let list = fresh(&clock, &memory);
    assert_eq!(list.context_overhead, Some(CONTEXT));
    assert!(list.own_unmanaged >= Some(ByteSize::mib(32)), "{list:?}");
    drop((plain, stream, context, arena));
    assert!(memory.shutdown_blocking(SOON).is_clean());
}

#[test]
fn what_nvml_does_not_know_is_none_and_stays_in_the_rest() {
    let (fake, clock, memory) = start(1, 0);
    fake.neighbours(0, 1 << 30);
    fake.process(0, 0, NOBODY, u64::MAX);
    let list = fresh(&clock, &memory);
    assert_eq!(list.processes.last().map(|it| (it.pid, it.used)), Some((NOBODY, None)));
    assert_eq!(list.unattributed, Some(ByteSize::gib(1)));
    // This process under a number of another namespace.
    fake.own_pid(NOBODY + 1);
    let list = fresh(&clock, &memory);
    assert!(list.processes.iter().all(|it| it.is_this_process != Some(true)), "{list:?}");
    assert_eq!((list.context_overhead, list.own_unmanaged), (None, None));
    assert!(memory.shutdown_blocking(SOON).is_clean());
}

#[test]
fn a_list_that_is_empty_attributes_nothing_to_others() {
    let (fake, clock, memory) = start(1, 0);
    fake.own_pid(0);
    let list = fresh(&clock, &memory);
    assert_eq!((list.error, list.processes.len()), (None, 0));
    assert_eq!((list.other_processes, list.own_unmanaged), (None, None));
    assert_eq!((list.used, list.unattributed), (Some(CONTEXT), Some(CONTEXT)));
    assert!(memory.shutdown_blocking(SOON).is_clean());
}

#[test]
fn a_list_is_kept_for_five_seconds() {
    let (fake, clock, memory) = start(1, 0);
    let first = fresh(&clock, &memory);
    assert_eq!((first.age, fake.calls(LIST)), (Duration::ZERO, 1));
    fake.process(0, 0, NOBODY, 1 << 20);
    clock.advance(Duration::from_secs(4));
    let [kept] = &memory.devices().processes()[..] else { panic!("one device") };
    assert_eq!((kept.age, kept.processes.len()), (Duration::from_secs(4), 1));
    clock.advance(Duration::from_secs(1));
    let [next] = &memory.devices().processes()[..] else { panic!("one device") };
    assert_eq!((next.age, next.processes.len()), (Duration::ZERO, 2));
    assert_eq!((fake.calls(LIST), fake.calls(c"nvmlInit_v2")), (2, 1));
    assert!(memory.shutdown_blocking(SOON).is_clean());
}

#[test]
fn each_device_has_a_list_of_its_own_and_a_failure_is_of_one() {
    let (fake, clock, memory) = start(2, Options::MIG);
    fake.process(1, 0, NOBODY, 1 << 20);
    let lists = memory.devices().processes();
    let counts: Vec<_> = lists.iter().map(|it| (it.number, it.processes.len())).collect();
    assert_eq!(counts, [(0, 1), (1, 2)]);
    clock.advance(KEPT);
    fake.fail(LIST, 1, 4);
    let lists = memory.devices().processes();
    let error = lists[0].error.as_deref().expect("refused");
    assert!(error.contains("expected a user with access"), "{error}");
    assert_eq!((lists[0].used, lists[1].processes.len()), (None, 2));
    assert_eq!(notes(&memory), 0, "of one device");
    // NVML is opened again after a failure.
    clock.advance(KEPT);
    assert!(memory.devices().processes().iter().all(|it| it.error.is_none()));
    assert_eq!(fake.calls(c"nvmlInit_v2"), 2);
    assert!(memory.shutdown_blocking(SOON).is_clean());
}

/// The diagnostics about NVML, all of which are informational.
fn notes(memory: &Memory) -> usize {
    let all = memory.report().diagnostics();
    let notes: Vec<_> =
        all.iter().filter(|it| it.text.contains("processes on the device")).collect();
    assert!(notes.iter().all(|note| !note.is_problem), "{notes:?}");
    notes.len()
}

#[test]
fn a_driver_that_does_not_match_its_library_is_one_informational_diagnostic() {
    let (fake, clock, memory) = start(2, 0);
    for _ in 0..3 {
        clock.advance(KEPT);
        fake.fail(c"nvmlInit_v2", 1, 18);
        for list in memory.devices().processes() {
            let error = list.error.expect("a mismatch");
            assert!(error.contains("version mismatch"), "{error}");
        }
        assert_eq!(notes(&memory), 1);
    }
    assert!(memory.shutdown_blocking(SOON).is_clean());
}

/// In a process of its own, in which no other test has loaded the fake.
#[test_fork::test]
fn without_the_library_everything_else_works_and_one_informational_diagnostic_tells() {
    let fake = Fake::start(Options { devices: 1, ..Options::default() });
    let (clock, memory) = memory(DeviceChoice::Cuda);
    assert_eq!(notes(&memory), 0, "before it is asked for");
    for _ in 0..2 {
        let list = fresh(&clock, &memory);
        assert!(list.error.is_some() && list.processes.is_empty(), "{list:?}");
        assert_eq!(notes(&memory), 1);
    }
    let arena = memory.devices().open_arena("weights").expect("an arena");
    assert_eq!(fake.calls(LIST), 0);
    drop(arena);
    assert!(memory.shutdown_blocking(SOON).is_clean());
}

/// The bug that this prevents: NVML hangs if a device has fallen off the bus, and so did whatever
/// asked it.
#[test]
fn nvml_that_hangs_holds_no_caller_and_is_not_asked_again() {
    let fake = Fake::start(Options { devices: 1, ..Options::default() });
    fake.nvml();
    // Its time passes: the wait is real, and bounded.
    let memory = Memory::builder().device(DeviceChoice::Cuda).start().expect("starts");
    fake.hold_nvml(true);
    for _ in 0..3 {
        let list = memory.devices().processes().remove(0);
        let error = list.error.expect("no answer");
        assert!(error.starts_with("NVML has not answered for "), "{error}");
    }
    assert_eq!(fake.calls(LIST), 1);
    assert!(memory.shutdown_blocking(SOON).is_clean(), "the query holds nothing");
    fake.hold_nvml(false);
    let is_listed = || memory.devices().processes()[0].error.is_none();
    crate::memory::support::until("the answer that came late is shown", is_listed);
    assert_eq!(fake.calls(LIST), 1);
}

#[test]
fn the_endpoint_shows_the_lists_only_on_request() {
    let (fake, _clock, memory) = start(1, 0);
    fake.process(0, 0, NOBODY, u64::MAX);
    let endpoints = Endpoints::new(Some(memory.clone()));
    let json = |query: &str| -> Value {
        let request = Request::get(format!("/memory{query}")).body(()).expect("a request");
        let answer = endpoints.answer_request(&request).expect("a path of it");
        serde_json::from_slice(answer.body()).expect("JSON")
    };
    assert_eq!(json("").get("device_processes"), None);
    assert_eq!(fake.calls(c"nvmlInit_v2"), 0, "nothing is loaded");
    let told = json("?with=device_processes");
    let [list] = &told["device_processes"].as_array().expect("a list")[..] else {
        panic!("{told}");
    };
    assert_eq!(list["device"], told["device"]["devices"][0]["name"]);
    assert_eq!((&list["error"], &list["used_bytes"]), (&Value::Null, &CONTEXT.get().into()));
    let unknown = &list["processes"][1];
    assert_eq!((&unknown["pid"], &unknown["used_bytes"]), (&NOBODY.into(), &Value::Null));
    for name in ["arena_bytes", "context_overhead_bytes", "own_unmanaged_bytes"] {
        assert!(list.get(name).is_some(), "{name}");
    }
    assert!(memory.shutdown_blocking(SOON).is_clean());
}

#[test]
fn without_a_cuda_device_the_list_is_empty_and_nvml_is_not_asked() {
    let fake = Fake::start(Options { devices: 1, ..Options::default() });
    fake.nvml();
    for choice in [DeviceChoice::Host, DeviceChoice::None] {
        let (_clock, memory) = memory(choice);
        assert_eq!(memory.devices().processes(), []);
        assert!(memory.shutdown_blocking(SOON).is_clean());
    }
    assert_eq!(fake.calls(c"nvmlInit_v2"), 0);
}
