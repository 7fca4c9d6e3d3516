//! Tests with a real ONNX Runtime, whose shared library `ORT_DYLIB_PATH` names. Without it they
//! pass, and print `skipped:`. Each has a process of its own, as ONNX Runtime allows one environment.

use std::path::PathBuf;

use lowtide::Memory;
use lowtide::config::DeviceChoice;
use test_fork::test;

use super::*;

#[expect(clippy::disallowed_methods, reason = "names the library under test")]
fn library() -> Option<PathBuf> {
    let path = std::env::var_os("ORT_DYLIB_PATH");
    if path.is_none() {
        println!("skipped: ORT_DYLIB_PATH names no ONNX Runtime");
    }
    path.map(PathBuf::from)
}

fn memory() -> Memory {
    Memory::builder().device(DeviceChoice::Host).start().unwrap()
}

#[test]
fn it_opens() {
    let Some(library) = library() else { return };
    let memory = memory();
    let runtime = Runtime::open(&memory, &library).unwrap();
    println!("{runtime:?}");
}
