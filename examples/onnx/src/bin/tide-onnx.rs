//! Shows the memory of the proxy with a real model over time, next to the same service without
//! lowtide, whose program `tide-onnx-glibc` must be in the same folder.

use std::process::ExitCode;

lowtide::global_allocator!(balanced);

fn main() -> ExitCode {
    lowtide_onnx::tide::show()
}
