//! The processes on a device by NVML, over the fake of its library, which has the same memory as
//! the fake driver.

use lowtide::ByteSize;
use lowtide_fake_cuda::{Fake, Guard, Options};
use lowtide_gpu::driver::cuda::{
    CudaDriver, CudaOptions, DeviceChoice, DeviceUsage, Nvml, ProcessUsage,
};
use lowtide_gpu::driver::{DeviceUuid, Driver as _, DriverError};

use super::support::LAZY;

const OVERHEAD: u64 = 300 << 20;
const COMPUTE: &std::ffi::CStr = c"nvmlDeviceGetComputeRunningProcesses_v3";

/// A number that no process has: above the largest `pid_max`.
const NOBODY: u32 = 5_000_000;

fn start(flags: u32) -> (Guard, CudaDriver, DeviceUuid) {
    let fake = Fake::start(Options { flags, context_overhead: OVERHEAD, ..LAZY });
    fake.nvml();
    let driver = CudaDriver::open(CudaOptions::default()).expect("a device");
    let uuid = driver.uuid().expect("of CUDA");
    (fake, driver, uuid)
}

fn usage(uuid: DeviceUuid) -> Result<DeviceUsage, DriverError> {
    Nvml::open()?.usage(uuid)
}

fn pids(usage: &DeviceUsage) -> Vec<u32> {
    usage.processes.iter().map(|process| process.pid).collect()
}

fn own(usage: &DeviceUsage) -> Option<&ProcessUsage> {
    usage.processes.iter().find(|process| process.pid == std::process::id())
}

#[test]
fn nvml_lists_this_process_with_the_memory_that_cuda_reports_as_used() {
    let (fake, driver, uuid) = start(0);
    let at = driver.reserve(ByteSize::mib(8)).expect("addresses");
    let size = ByteSize::mib(4);
    #[expect(unsafe_code, reason = "memory of the reservation above")]
    // SAFETY: a bare part of the reservation.
    unsafe { driver.commit(at, size, size) }.expect("memory");
    fake.neighbours(0, 1 << 30);
    fake.process(0, 0, NOBODY, 1 << 30);
    let usage = usage(uuid).expect("listed");
    let memory = driver.device_memory().expect("answers").expect("known");
    assert_eq!(usage.used, Some(memory.total.saturating_sub(memory.free)));
    assert_eq!(pids(&usage), [NOBODY, std::process::id()], "the largest first");
    assert_eq!(usage.processes[1].used, Some(ByteSize::new(OVERHEAD).saturating_add(size)));
    let sum: ByteSize = usage.processes.iter().filter_map(|process| process.used).sum();
    assert_eq!(Some(sum), usage.used);
    assert_eq!((usage.omitted, usage.omitted_bytes), (0, ByteSize::ZERO));
    assert_eq!(fake.nvml_sessions(), 0, "ended with the drop");
    #[expect(unsafe_code, reason = "memory of the reservation above")]
    // SAFETY: what was committed, in one handle, and no work uses it.
    unsafe { driver.decommit(at, size, size) }.expect("gone");
    #[expect(unsafe_code, reason = "the reservation above")]
    // SAFETY: the whole reservation, with nothing in it.
    unsafe { driver.unreserve(at, ByteSize::mib(8)) }.expect("gone");
    drop(driver);
    fake.assert_clean();
}

/// On the host's namespace. In a container the numbers of invisible processes make it unknown.
#[test]
fn a_process_is_marked_and_named_if_its_number_is_certainly_of_this_namespace() {
    let (fake, _driver, uuid) = start(0);
    let alone = usage(uuid).expect("listed");
    let this = own(&alone).expect("listed");
    assert_eq!(this.is_this_process, Some(true));
    let comm = std::fs::read_to_string("/proc/self/comm").expect("Linux");
    assert_eq!(this.name.as_deref(), Some(comm.trim_end()));
    fake.process(0, 0, NOBODY, 1 << 30);
    let usage = usage(uuid).expect("listed");
    let other = &usage.processes[0];
    let namespace = std::fs::read_link("/proc/self/ns/pid").expect("Linux");
    let found = [other, &usage.processes[1]].map(|it| it.is_this_process);
    if namespace.to_str() == Some("pid:[4026531836]") {
        assert_eq!(found, [Some(false), Some(true)]);
        let name = format!("/usr/bin/process-{NOBODY}");
        assert_eq!(other.name, Some(name), "NVML's, as /proc has none");
    } else {
        assert_eq!((found, other.name.as_deref()), ([None, None], None));
    }
}

#[test]
fn a_process_of_the_host_is_not_taken_for_this_one() {
    let (fake, _driver, uuid) = start(0);
    fake.own_pid(NOBODY);
    let found = usage(uuid).expect("listed");
    assert_eq!(pids(&found), [NOBODY]);
    assert_ne!(found.processes[0].is_this_process, Some(true));
    fake.own_pid(0);
    assert_eq!(pids(&usage(uuid).expect("listed")), [0; 0]);
}

#[test]
fn memory_that_nvml_does_not_know_is_none_and_not_zero() {
    let (fake, _driver, uuid) = start(0);
    fake.process(0, 0, NOBODY, u64::MAX);
    fake.process(0, 0, NOBODY + 1, 0);
    let usage = usage(uuid).expect("listed");
    let used: Vec<_> = usage.processes.iter().map(|it| it.used).collect();
    assert_eq!(used, [Some(ByteSize::new(OVERHEAD)), Some(ByteSize::ZERO), None]);
    // The total is unknown as well if no function reports it.
    let nvml = Nvml::open_with(&|name| !name.contains("MemoryInfo")).expect("opens");
    assert_eq!(nvml.usage(uuid).expect("listed").used, None);
    for (name, code) in [(c"nvmlDeviceGetMemoryInfo", 3), (c"nvmlDeviceGetMemoryInfo_v2", 25)] {
        fake.fail(name, 1, code);
    }
    assert_eq!(nvml_usage_twice(uuid), [None, Some(ByteSize::new(OVERHEAD))]);
}

fn nvml_usage_twice(uuid: DeviceUuid) -> [Option<ByteSize>; 2] {
    [(); 2].map(|()| usage(uuid).expect("listed").used)
}

#[test]
fn older_drivers_have_other_names_and_other_sizes_of_entries() {
    let (fake, _driver, uuid) = start(0);
    for nth in 0..3 {
        fake.process(0, 0, NOBODY + nth, u64::from(nth) << 20);
    }
    for words in [2, 3, 4] {
        fake.entry_words(words);
        let usage = usage(uuid).expect("listed");
        let used: Vec<_> = usage.processes.iter().map(|it| it.used).collect();
        let others = [2, 1, 0].map(|mib| Some(ByteSize::mib(mib)));
        assert_eq!(used[0], Some(ByteSize::new(OVERHEAD)), "{words} words");
        assert_eq!(used[1..], others, "{words} words");
    }
    let nvml = Nvml::open_with(&|name| name != "nvmlDeviceGetMemoryInfo_v2").expect("opens");
    assert_eq!(nvml.usage(uuid).expect("listed").used, Some(ByteSize::new(OVERHEAD)));
    let nvml = Nvml::open_with(&|name| !name.ends_with("Processes_v3")).expect("opens");
    assert_eq!(pids(&nvml.usage(uuid).expect("listed")).len(), 4, "by the function of 450");
    assert_eq!(fake.calls(c"nvmlDeviceGetComputeRunningProcesses_v2"), 1);
    for (function, hidden) in [
        ("nvmlInit_v2", "Init"),
        ("nvmlDeviceGetComputeRunningProcesses_v3", "ComputeRunningProcesses"),
    ] {
        let error = Nvml::open_with(&|name| !name.contains(hidden)).expect_err(hidden);
        assert_eq!(error, DriverError::NoFunction { function });
    }
}

#[test]
fn of_many_processes_the_64_with_most_memory_are_listed() {
    let (fake, _driver, uuid) = start(0);
    for nth in 0..300 {
        fake.process(0, 0, NOBODY + nth, u64::from(nth) << 10);
    }
    let found = usage(uuid).expect("the list is asked for again with more room");
    assert_eq!((found.processes.len(), found.omitted), (64, 237));
    assert_eq!(pids(&found)[..2], [std::process::id(), NOBODY + 299]);
    assert_eq!(found.omitted_bytes, ByteSize::kib((0..237).sum()));
    assert_eq!(fake.calls(COMPUTE), 2);
    // This process stays in the list, with the number of a process that has least.
    fake.own_pid(0);
    fake.process(0, 0, std::process::id(), 0);
    let usage = usage(uuid).expect("listed");
    assert_eq!((usage.processes.len(), usage.omitted), (64, 237));
    let is_certain = usage.processes.iter().all(|it| it.is_this_process.is_some());
    assert_eq!(own(&usage).is_some(), is_certain);
}

#[test]
fn a_list_that_grows_with_each_call_ends_with_an_error() {
    let (fake, _driver, uuid) = start(0);
    fake.fail(COMPUTE, 1, 7);
    assert_eq!(usage(uuid).expect("at the second attempt").processes.len(), 1);
    fake.forget_failures();
    let before = fake.calls(COMPUTE);
    for nth in 1..=3 {
        fake.fail(COMPUTE, nth, 7);
    }
    let error = usage(uuid).expect_err("three attempts");
    let function = "nvmlDeviceGetComputeRunningProcesses_v3";
    assert!(error.to_string().starts_with(&format!("{function} failed")), "{error}");
    assert_eq!(error.code(), Some(7));
    assert_eq!(fake.calls(COMPUTE) - before, 3);
}

#[test]
fn a_process_in_several_lists_appears_once_and_a_list_that_is_refused_is_left_out() {
    let (fake, _driver, uuid) = start(0);
    fake.process(0, 0, NOBODY, 2 << 20);
    fake.process(0, 1, NOBODY, 2 << 20);
    fake.process(0, 2, NOBODY + 1, 1 << 20);
    let all = [std::process::id(), NOBODY, NOBODY + 1];
    assert_eq!(pids(&usage(uuid).expect("listed")), all);
    fake.fail(c"nvmlDeviceGetMPSComputeRunningProcesses_v3", 1, 3);
    fake.fail(c"nvmlDeviceGetGraphicsRunningProcesses_v3", 1, 3);
    assert_eq!(pids(&usage(uuid).expect("listed")), all[..2]);
}

#[test]
fn each_call_that_fails_is_named_with_its_result() {
    let (fake, _driver, uuid) = start(0);
    for (function, call, code, name) in [
        ("nvmlInit", c"nvmlInit_v2", 18, "Driver/library version mismatch: "),
        ("nvmlInit", c"nvmlInit_v2", 9, "Unknown Error: "),
        ("nvmlInit", c"nvmlInit_v2", 12, "Unknown Error: "),
        ("nvmlDeviceGetHandleByUUID", c"nvmlDeviceGetHandleByUUID", 4, "Unknown Error: "),
        ("nvmlDeviceGetComputeRunningProcesses_v3", COMPUTE, 3, "Unknown Error: "),
        ("nvmlDeviceGetComputeRunningProcesses_v3", COMPUTE, 4, "Unknown Error: "),
        ("nvmlDeviceGetComputeRunningProcesses_v3", COMPUTE, 15, "Unknown Error ("),
        ("nvmlDeviceGetComputeRunningProcesses_v3", COMPUTE, 999, "Unknown Error ("),
    ] {
        fake.fail(call, 1, code);
        let error = usage(uuid).expect_err(name);
        assert_eq!(error.code(), Some(i64::from(code)));
        let text = error.to_string();
        assert!(text.starts_with(&format!("{function} failed: {name}")), "{text}");
        assert_eq!(fake.nvml_sessions(), 0);
        assert!(usage(uuid).is_ok(), "once");
    }
}

#[test]
fn a_mig_instance_is_found_by_its_own_uuid_and_an_unknown_one_is_named() {
    let (fake, _driver, uuid) = start(Options::MIG);
    assert_eq!(pids(&usage(uuid).expect("listed")), [std::process::id()]);
    assert_eq!(fake.calls(c"nvmlDeviceGetHandleByUUID"), 2, "as a GPU first");
    let unknown = DeviceUuid::new([7; 16]);
    assert_eq!(usage(unknown), Err(DriverError::UnknownToNvml { uuid: unknown }));
}

#[test]
fn each_of_two_devices_has_its_own_processes() {
    let (fake, first, uuid) = start(0);
    let options = CudaOptions { device: DeviceChoice::Ordinal(1), ..CudaOptions::default() };
    let devices = CudaDriver::devices().expect("two");
    fake.process(1, 0, NOBODY, 1 << 20);
    assert_eq!(pids(&usage(uuid).expect("listed")), [std::process::id()]);
    assert_eq!(pids(&usage(devices[1].uuid).expect("listed")), [NOBODY], "no context of ours");
    let second = CudaDriver::open(options).expect("a device");
    assert_eq!(pids(&usage(devices[1].uuid).expect("listed")), [std::process::id(), NOBODY]);
    drop((first, second));
    assert_eq!(pids(&usage(uuid).expect("listed")), [0; 0]);
    fake.assert_clean();
}
