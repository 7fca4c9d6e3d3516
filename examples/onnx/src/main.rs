//! `proxy-onnx` is the proxy (`examples/proxy`) with a real model: `POST /embed` is answered by a
//! sentence encoder in ONNX Runtime, such as all-MiniLM-L6-v2. All other files are the proxy's own.
//!
//! Options, variables and exit codes are those of `examples/proxy.rs`, with a model instead of the
//! size of weights. `docs/ENGINES.md` has the commands.

#[path = "../../proxy/app.rs"]
#[allow(dead_code, reason = "the tests of the proxy use more of it")]
mod app;
#[path = "../../proxy/cli.rs"]
mod cli;
#[path = "../../proxy/embed.rs"]
mod embed;
#[path = "../../proxy/forward.rs"]
mod forward;
mod model;
#[path = "../../proxy/upstream.rs"]
mod upstream;

#[cfg(test)]
mod tests;

use std::process::ExitCode;

lowtide::global_allocator!(balanced);

fn main() -> ExitCode {
    cli::run("proxy-onnx", std::env::args_os()).into()
}
