//! The shared library as programs in other languages see it: in C, linked and through `dlopen`, on
//! the host and on the fake CUDA driver; the header in C and C++; from Python by ctypes; and its
//! symbols.
//!
//! Programs are compiled by the system's compiler, which building jemalloc needs as well. What is
//! missing otherwise is named as skipped.

#![expect(clippy::print_stdout, reason = "what is skipped is named")]

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Command;

use tempfile::TempDir;

const C: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/c/abi.c");
const PYTHON: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/python/abi.py");
const INCLUDE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/include");
const HEADER: &str = include_str!("../include/lowtide.h");

/// Returns the path of a library that Cargo built beside this test.
fn library(name: &str) -> PathBuf {
    let program = std::env::current_exe().expect("a path");
    let folder = program.parent().expect("a folder");
    let path = folder.join(name);
    assert!(path.exists(), "no {name} in {}", folder.display());
    path
}

/// Runs a command to its end and returns what it printed; `None` if there is no such program.
fn output(command: &mut Command) -> Option<String> {
    let output = match command.env_remove("GLIBC_TUNABLES").output() {
        Ok(output) => output,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
            println!("skipped: no {}", command.get_program().display());
            return None;
        }
        Err(error) => panic!("{command:?}: {error}"),
    };
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let (out, errors) = (text(&output.stdout), text(&output.stderr));
    assert!(output.status.success(), "{command:?}: {}\n{out}{errors}", output.status);
    Some(out)
}

/// Compiles the program in C; returns its path.
fn compiled(folder: &TempDir, arguments: &[&str]) -> PathBuf {
    let program = folder.path().join("abi");
    let mut command = Command::new("cc");
    command.args(["-std=gnu11", "-Wall", "-Wextra", "-Werror", "-I", INCLUDE, "-o"]);
    command.arg(&program).arg(C).args(arguments).arg("-ldl");
    output(&mut command).expect("a C compiler, as for jemalloc");
    program
}

fn runs(command: &mut Command) {
    assert_eq!(output(command).expect("compiled"), "held\n");
}

#[test]
fn a_program_in_c_loads_the_library_and_all_holds() {
    let folder = tempfile::tempdir().expect("a folder");
    runs(Command::new(compiled(&folder, &[])).arg(library("liblowtide_c.so")));
}

#[test]
fn a_program_in_c_is_linked_with_the_library_by_its_versioned_name() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = library("liblowtide_c.so");
    std::os::unix::fs::symlink(&path, folder.path().join("liblowtide_c.so.1")).expect("a link");
    let program = compiled(&folder, &["-DLINKED", &path.to_string_lossy()]);
    runs(Command::new(program).env("LD_LIBRARY_PATH", folder.path()));
}

#[test]
fn a_program_in_c_allocates_on_two_devices_and_their_streams() {
    let folder = tempfile::tempdir().expect("a folder");
    let (ours, fake) = (library("liblowtide_c.so"), library("liblowtide_fake_cuda.so"));
    runs(Command::new(compiled(&folder, &[])).arg(ours).arg(fake));
}

#[test]
fn the_header_is_c_and_cpp() {
    for (compiler, language, standards) in
        [("cc", "c", ["c99", "c11", "c17"]), ("c++", "c++", ["c++11", "c++17", "c++20"])]
    {
        for standard in standards {
            let standard = format!("-std={standard}");
            let mut command = Command::new(compiler);
            command.args([
                "-x",
                language,
                &standard,
                "-Wall",
                "-Wextra",
                "-Werror",
                "-fsyntax-only",
            ]);
            if output(command.arg(Path::new(INCLUDE).join("lowtide.h"))).is_none() {
                break;
            }
        }
    }
}

/// The functions that the header declares.
fn declared() -> BTreeSet<&'static str> {
    let code = HEADER.lines().filter(|line| !line.starts_with(" *") && !line.starts_with("/*"));
    let functions = code.filter_map(|line| line.split_once('(')).map(|(before, _)| before);
    let names = functions.map(|before| before.rsplit([' ', '*']).next().unwrap_or_default());
    names.filter(|name| name.starts_with("lowtide_")).collect()
}

#[test]
fn the_library_exports_what_the_header_declares_and_no_allocator() {
    let mut nm = Command::new("nm");
    let Some(text) = output(nm.args(["-D", "--defined-only"]).arg(library("liblowtide_c.so")))
    else {
        return;
    };
    let exported: BTreeSet<_> =
        text.lines().filter_map(|line| line.split_whitespace().nth(2)).collect();
    assert_eq!(exported, declared());
    assert!(exported.len() > 20, "{exported:?}");
}

#[test]
fn the_library_needs_no_static_thread_local_memory_and_stays_loaded() {
    let mut readelf = Command::new("readelf");
    let Some(text) = output(readelf.args(["-dW"]).arg(library("liblowtide_c.so"))) else { return };
    assert!(!text.contains("STATIC_TLS"), "{text}");
    assert!(text.contains("NODELETE") && text.contains("[liblowtide_c.so.1]"), "{text}");
    let name = format!("[liblowtide_c.so.{}]", lowtide_c::LOWTIDE_ABI_MAJOR);
    assert!(text.contains(&name), "the name has another version than {name}:\n{text}");
}

#[test]
fn a_program_in_python_calls_the_library_by_ctypes() {
    let mut python = Command::new("python3");
    if let Some(text) = output(python.arg(PYTHON).arg(library("liblowtide_c.so"))) {
        assert_eq!(text, "held\n");
    }
}
