//! The service of `tide-onnx` without lowtide: glibc's allocator, and a session with the defaults
//! of ONNX Runtime that is loaded once and kept. `tide-onnx` starts it.

use std::process::ExitCode;

#[global_allocator]
static HEAP: std::alloc::System = std::alloc::System;

fn main() -> ExitCode {
    lowtide_onnx::tide::record_without_lowtide()
}
