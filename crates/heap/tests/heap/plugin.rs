//! A shared library with this allocator, loaded and closed at run time, as Python loads an
//! extension.
//!
//! Reported as jemalloc#937, jemalloc#1122 and jemalloc#1890.
//!
//! The test builds a second jemalloc, so it runs only with `disable_initial_exec_tls`.
#![cfg(all(target_os = "linux", target_env = "gnu", feature = "disable_initial_exec_tls"))]
#![expect(unsafe_code, reason = "a library is loaded, and its function is called")]

use std::ffi::{CStr, CString};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread;

use test_fork::test;

const SOURCE: &str = r#"
// Its pages wait for the purge: by the default decay time, the background thread releases some
// before it on a slow machine, or is at work on an arena, which a purge then leaves to it.
lowtide_heap::global_allocator!(balanced, dirty_decay_ms: 3_600_000);

/// Allocates and frees this many MiB, and returns how many were released.
#[unsafe(no_mangle)]
pub extern "C" fn plugin_run(mib: usize) -> u64 {
    drop((0..mib * 16).map(|_| vec![1_u8; 64 << 10]).collect::<Vec<_>>());
    lowtide_heap::purge_now().map_or(0, |report| report.released().get() >> 20)
}
"#;

/// Builds the library as a package of its own, with the versions of this workspace.
fn build(features: &str) -> PathBuf {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("plugin");
    let heap = Path::new(env!("CARGO_MANIFEST_DIR"));
    let manifest = format!(
        "[package]\nname = \"plugin\"\nversion = \"0.0.0\"\nedition = \"2024\"\n[workspace]\n\
         [lib]\npath = \"lib.rs\"\ncrate-type = [\"cdylib\"]\n[dependencies.lowtide-heap]\n\
         path = {heap:?}\nfeatures = [{features}]\n"
    );
    fs::create_dir_all(&folder).expect("created");
    fs::write(folder.join("Cargo.toml"), manifest).expect("written");
    fs::write(folder.join("lib.rs"), SOURCE).expect("written");
    fs::copy(heap.join("../../Cargo.lock"), folder.join("Cargo.lock")).expect("copied");
    let target = folder.join("target");
    let output = Command::new(env!("CARGO"))
        .args(["build", "--offline", "--target-dir"])
        .arg(&target)
        .current_dir(&folder)
        .output()
        .expect("cargo starts");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    target.join("debug/libplugin.so")
}

fn is_mapped() -> bool {
    fs::read_to_string("/proc/self/maps").expect("own mappings").contains("libplugin.so")
}

#[test]
fn a_library_with_this_allocator_is_loaded_at_run_time_and_survives_its_close() {
    let path = build("\"disable_initial_exec_tls\"");
    let name = CString::new(path.to_str().expect("text")).expect("no NUL");
    // SAFETY: the library's constructors set up its allocator and nothing of this program's.
    let library = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
    if library.is_null() {
        // SAFETY: takes nothing.
        let error = unsafe { libc::dlerror() };
        // SAFETY: an error was found, and its text stays until the next call on this thread.
        let error = unsafe { CStr::from_ptr(error) };
        panic!("{}", error.to_string_lossy());
    }
    // SAFETY: the handle is open, and the name is a C string.
    let found = unsafe { libc::dlsym(library, c"plugin_run".as_ptr()) };
    assert!(!found.is_null());
    // SAFETY: the function above, with this signature.
    let run =
        unsafe { std::mem::transmute::<*mut libc::c_void, extern "C" fn(usize) -> u64>(found) };
    assert!(run(64) >= 56, "its burst is released");
    let threads: Vec<_> = (0..8).map(|_| thread::spawn(move || run(4))).collect();
    // SAFETY: the handle is open, and is closed once.
    assert_eq!(unsafe { libc::dlclose(library) }, 0);
    assert!(is_mapped(), "its threads run on");
    for thread in threads {
        thread.join().expect("no panic");
    }
    assert!(run(64) >= 56, "the heap works on");
}
