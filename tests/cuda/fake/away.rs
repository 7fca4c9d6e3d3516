//! The fake is found by who loaded it by its path, and by nobody else.
//!
//! Each test looks from a child process, which starts without the library and with an environment
//! of its own. Nothing before the call of `rusty_fork::fork` may load the library: the child passes
//! there as well.

use std::fs::File;
use std::io::{Read as _, Seek as _};

use lowtide::device::driver::cuda::{Probe, probe};
use lowtide_fake_driver::{Fake, Options};
use rusty_fork::{ChildWrapper, fork, rusty_fork_id, rusty_fork_test_name};

/// What a child that succeeded printed after this.
#[track_caller]
fn said(after: &str, child: &mut ChildWrapper, output: &mut File) -> String {
    let status = child.wait().expect("it ends");
    let mut text = String::new();
    output.rewind().expect("a file");
    output.read_to_string(&mut text).expect("text");
    assert!(status.success(), "{status}: {text}");
    let (_, found) = text.split_once(after).expect("it said what it saw");
    found.lines().next().unwrap_or_default().to_owned()
}

/// Loads the library, and prints the names of the devices that the driver shows.
#[expect(clippy::print_stdout, reason = "a child process says what it saw")]
fn say_devices() {
    let _fake = Fake::start(Options::default());
    let Probe::Devices { count, .. } = probe() else {
        println!("child saw: ");
        return;
    };
    let names = (0..count as usize).map(|at| super::raw::context(at).name().expect("a name"));
    println!("child saw: {}", names.collect::<Vec<_>>().join(", "));
}

#[test]
fn a_program_that_did_not_load_it_never_finds_it() {
    // The child has the loader's paths that Cargo gave this test.
    let check = |child: &mut ChildWrapper, output: &mut File| {
        let fake = Fake::start(Options { driver_version: 98_760, ..Options::default() });
        assert_eq!(probe(), Probe::Devices { count: 2, driver_version: 98_760 });
        let found = said("child found: ", child, output);
        assert!(!found.contains("98.76") && !found.contains("12.8"), "{found}");
        assert!(fake.calls(c"cuInit") > 0);
    };
    let name = rusty_fork_test_name!(a_program_that_did_not_load_it_never_finds_it);
    let look = || println!("child found: {}", probe());
    fork(name, rusty_fork_id!(), |_| (), check, look).expect("it starts");
}

#[test]
fn it_is_found_under_both_names_also_where_another_library_has_one() {
    let mut kept = None;
    let found = fork(
        rusty_fork_test_name!(it_is_found_under_both_names_also_where_another_library_has_one),
        rusty_fork_id!(),
        |command| {
            let folder = tempfile::tempdir().expect("a folder");
            // A library with the name that is no driver: found by a search, it would be in the way.
            let maps = std::fs::read_to_string("/proc/self/maps").expect("readable");
            let mut paths = maps.lines().filter_map(|line| line.split_whitespace().nth(5));
            let libc = paths.find(|path| path.contains("/libc.so")).expect("glibc");
            std::os::unix::fs::symlink(libc, folder.path().join("libcuda.so")).expect("linked");
            command.env("LD_LIBRARY_PATH", folder.path()).env_remove("CUDA_VISIBLE_DEVICES");
            kept = Some(folder);
        },
        |child, output| said("child saw: ", child, output),
        say_devices,
    );
    let found = found.expect("it starts");
    assert!(found.starts_with("lowtide simulated device 0"), "{found}");
}

#[test]
fn the_variable_of_visible_devices_is_respected_when_the_driver_starts() {
    // By a child each, because the driver reads it once.
    let count = |visible: &str| {
        fork(
            rusty_fork_test_name!(
                the_variable_of_visible_devices_is_respected_when_the_driver_starts
            ),
            rusty_fork_id!(),
            |command| {
                command.env("CUDA_VISIBLE_DEVICES", visible);
            },
            |child, output| said("child saw: ", child, output),
            say_devices,
        )
        .expect("it starts")
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
