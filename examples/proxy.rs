//! A reverse proxy that returns unused memory.
//!
//! It forwards all requests to `--upstream` (or to a small built-in text service), serves
//! `POST /embed` from a model that is loaded on first use and unloaded when idle, and reports its
//! memory at `/metrics`, `/healthz`, `/readyz` and `/memory`.
//!
//! Memory settings are the crate's own `LOWTIDE_*` variables; the options here are the proxy's.
//!
//! Exit codes: 0 after a signal; 75 if memory was exhausted and `LOWTIDE_EXHAUSTION_POLICY` is
//! `exit`; 2 for invalid arguments; 1 for other errors. A supervisor restarts it after 75.

#[path = "proxy/app.rs"]
#[allow(dead_code, reason = "other programs that start it read more of it")]
mod app;
#[path = "proxy/chance.rs"]
mod chance;
#[path = "proxy/cli.rs"]
mod cli;
#[path = "proxy/embed.rs"]
mod embed;
#[path = "proxy/forward.rs"]
mod forward;
#[path = "proxy/model.rs"]
#[allow(dead_code, reason = "other programs look at its arena")]
mod model;
#[path = "proxy/upstream.rs"]
mod upstream;

use std::process::ExitCode;

#[cfg(feature = "profiling")]
lowtide::global_allocator!(balanced, prof: true, lg_prof_sample: 23);
#[cfg(not(feature = "profiling"))]
lowtide::global_allocator!(balanced);

fn main() -> ExitCode {
    cli::run("proxy", std::env::args_os()).into()
}
