//! The proxy with a sentence encoder in ONNX Runtime. Options, variables and exit codes are those
//! of `examples/proxy.rs`, with a model instead of the size of weights.

use std::process::ExitCode;

lowtide::global_allocator!(balanced);

fn main() -> ExitCode {
    lowtide_onnx::run_proxy()
}
