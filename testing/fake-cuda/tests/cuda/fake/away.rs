//! The fake is found by who loaded it by its path, and by nobody else.
//!
//! Each test runs again in a child process, which has an environment of its own and no library
//! but what it loads.

use std::process::Command;

use lowtide_fake_cuda::{Fake, Options};
use lowtide_gpu::driver::cuda::CudaDriver;

/// Set in a child.
const CHILD: &str = "FAKE_CUDA_CHILD";

#[expect(clippy::disallowed_methods, reason = "how this process is told that it is a child")]
fn is_child() -> bool {
    std::env::var_os(CHILD).is_some()
}

/// Runs a test of this file again, in a child that `set` prepares; the line that it printed after
/// `child saw: `.
#[track_caller]
fn child_of(test: &str, set: impl FnOnce(&mut Command)) -> String {
    let (_, module) = module_path!().split_once("::").expect("a module of the program");
    let mut command = Command::new(std::env::current_exe().expect("this program"));
    command.args(["--exact", &format!("{module}::{test}"), "--nocapture"]).env(CHILD, "1");
    set(&mut command);
    let child = command.output().expect("runs");
    assert!(child.status.success(), "{child:?}");
    let said = String::from_utf8_lossy(&child.stdout);
    let (_, saw) = said.split_once("child saw: ").expect("it said what it saw");
    saw.lines().next().unwrap_or_default().to_owned()
}

/// Loads the library, and prints the names of the devices that the driver shows.
#[expect(clippy::print_stdout, reason = "a child process says what it saw")]
fn say_devices() {
    let _fake = Fake::start(Options::default());
    let Ok(devices) = CudaDriver::devices() else {
        println!("child saw: ");
        return;
    };
    let names = (0..devices.len()).map(|at| super::raw::context(at).name().expect("a name"));
    println!("child saw: {}", names.collect::<Vec<_>>().join(", "));
}

#[test]
fn a_program_that_did_not_load_it_never_finds_it() {
    if is_child() {
        println!("child saw: {:?}", CudaDriver::devices());
        return;
    }
    let fake = Fake::start(Options::default());
    assert_eq!(CudaDriver::devices().expect("loaded").len(), 2);
    // The child has the loader's paths that Cargo gave this test.
    let found = child_of("a_program_that_did_not_load_it_never_finds_it", |_| {});
    assert!(!found.contains("lowtide simulated device"), "{found}");
    assert!(fake.calls(c"cuInit") > 0);
}

#[test]
fn it_is_found_under_both_names_also_where_another_library_has_one() {
    if is_child() {
        return say_devices();
    }
    let folder = tempfile::tempdir().expect("a folder");
    // A library with the name that is no driver: found by a search, it would be in the way.
    let maps = std::fs::read_to_string("/proc/self/maps").expect("readable");
    let mut paths = maps.lines().filter_map(|line| line.split_whitespace().nth(5));
    let libc = paths.find(|path| path.contains("/libc.so")).expect("glibc");
    std::os::unix::fs::symlink(libc, folder.path().join("libcuda.so")).expect("linked");
    let test = "it_is_found_under_both_names_also_where_another_library_has_one";
    let found = child_of(test, |command| {
        command.env("LD_LIBRARY_PATH", folder.path()).env_remove("CUDA_VISIBLE_DEVICES");
    });
    assert!(found.starts_with("lowtide simulated device 0"), "{found}");
}

#[test]
fn the_variable_of_visible_devices_is_respected_when_the_driver_starts() {
    if is_child() {
        return say_devices();
    }
    // By a child each, because the driver reads it once.
    let test = "the_variable_of_visible_devices_is_respected_when_the_driver_starts";
    let count = |visible: &str| {
        child_of(test, |command| {
            command.env("CUDA_VISIBLE_DEVICES", visible);
        })
    };
    let first = "lowtide simulated device 0";
    let second = "lowtide simulated device 1";
    assert_eq!(count("0,1"), format!("{first}, {second}"));
    assert_eq!(count("1"), second);
    assert_eq!(count("1,0"), format!("{second}, {first}"));
    assert_eq!(count("1,9,0"), second);
    assert_eq!(count(""), "");
    assert_eq!(count("GPU-6c6f7774-6964-652d-6661-6b652d677031"), second);
}
