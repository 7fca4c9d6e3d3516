//! The fake is found by who loaded it by its path, and by nobody else.

use std::process::Command;

use lowtide::device::driver::cuda::{Probe, probe};
use lowtide_fake_driver::{Fake, Options};

/// Set in a child of this test: it probes without having loaded the library.
const CHILD: &str = "FAKE_CUDA_CHILD";

#[test]
fn a_program_that_did_not_load_it_never_finds_it() {
    let fake = Fake::start(Options { driver_version: 98_760, ..Options::default() });
    assert_eq!(probe(), Probe::Devices { count: 2, driver_version: 98_760 });
    // The child has the loader's paths that Cargo gave this test.
    let program = std::env::current_exe().expect("this program");
    let child = Command::new(program)
        .args(["--exact", "fake::away::child_probes", "--nocapture"])
        .env(CHILD, "1")
        .output()
        .expect("runs");
    let said = String::from_utf8_lossy(&child.stdout).into_owned();
    assert!(child.status.success() && said.contains("child found: "), "{child:?}");
    assert!(!said.contains("98.76") && !said.contains("12.8"), "{said}");
    assert!(fake.calls(c"cuInit") > 0);
}

#[test]
fn it_is_found_under_both_names_also_where_another_library_has_one() {
    let _fake = Fake::start(Options::default());
    let folder = tempfile::tempdir().expect("a folder");
    // A library with the name that is no driver: found by a search, it would be in the way.
    let maps = std::fs::read_to_string("/proc/self/maps").expect("readable");
    let mut paths = maps.lines().filter_map(|line| line.split_whitespace().nth(5));
    let libc = paths.find(|path| path.contains("/libc.so")).expect("glibc");
    std::os::unix::fs::symlink(libc, folder.path().join("libcuda.so")).expect("linked");
    let program = std::env::current_exe().expect("this program");
    let child = Command::new(program)
        .args(["--exact", "fake::away::child_counts", "--nocapture"])
        .env(CHILD, "1")
        .env("LD_LIBRARY_PATH", folder.path())
        .env_remove("CUDA_VISIBLE_DEVICES")
        .output()
        .expect("runs");
    let said = String::from_utf8_lossy(&child.stdout);
    assert!(said.contains("child saw: lowtide simulated device 0"), "{child:?}");
}

/// Does nothing but in the child.
#[test]
#[expect(clippy::disallowed_methods, reason = "how this process is told that it is a child")]
fn child_probes() {
    if std::env::var_os(CHILD).is_some() {
        println!("child found: {}", probe());
    }
}

#[test]
fn the_variable_of_visible_devices_is_respected_when_the_driver_starts() {
    // By a child each, because the environment of this process is shared.
    let _fake = Fake::start(Options::default());
    let program = std::env::current_exe().expect("this program");
    let count = |visible: &str| {
        let child = Command::new(&program)
            .args(["--exact", "fake::away::child_counts", "--nocapture"])
            .env(CHILD, "1")
            .env("CUDA_VISIBLE_DEVICES", visible)
            .output()
            .expect("runs");
        let said = String::from_utf8_lossy(&child.stdout).into_owned();
        let (_, found) = said.split_once("child saw: ").expect("it said what it saw");
        found.lines().next().unwrap_or_default().to_owned()
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

#[test]
#[expect(clippy::disallowed_methods, reason = "how this process is told that it is a child")]
fn child_counts() {
    if std::env::var_os(CHILD).is_none() {
        return;
    }
    let _fake = Fake::start(Options::default());
    let Probe::Devices { count, .. } = probe() else {
        println!("child saw: ");
        return;
    };
    let names = (0..count as usize).map(|at| super::raw::context(at).name().expect("a name"));
    println!("child saw: {}", names.collect::<Vec<_>>().join(", "));
}
