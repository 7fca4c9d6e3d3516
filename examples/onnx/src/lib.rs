//! The proxy (`examples/proxy`) with a real model: `POST /embed` is answered by a sentence encoder
//! in ONNX Runtime, such as all-MiniLM-L6-v2. All other files are the proxy's own.
//!
//! Programs: `proxy-onnx` is the proxy, `tide-onnx` shows its memory next to that of
//! `tide-onnx-glibc`, the same service without lowtide. `docs/ENGINES.md` has the commands.

#[path = "../../proxy/app.rs"]
#[allow(dead_code, reason = "the tests of the proxy use more of it")]
mod app;
#[path = "../../proxy/chance.rs"]
mod chance;
#[path = "../../proxy/cli.rs"]
mod cli;
#[path = "../../proxy/embed.rs"]
mod embed;
#[path = "../../proxy/forward.rs"]
mod forward;
#[path = "../../tide/load.rs"]
#[expect(clippy::disallowed_methods, reason = "it measures real time")]
mod load;
mod model;
pub mod tide;
#[path = "../../proxy/upstream.rs"]
mod upstream;

#[cfg(test)]
mod tests;

use std::io::Write as _;
use std::process::ExitCode;

#[cfg(test)]
lowtide::global_allocator!(balanced);

/// Runs the proxy.
pub fn run_proxy() -> ExitCode {
    let done = cli::main(std::env::args_os());
    if let Err(error) = &done {
        // Not `eprintln!`, which panics if standard error is closed or full.
        let _ = writeln!(std::io::stderr(), "proxy-onnx: {error}");
    }
    cli::exit_code(&done).into()
}
