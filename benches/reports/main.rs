//! Load reports: what they cost, and that a gRPC client reads them.
//!
//! `cargo bench --bench reports` measures the cost. With `--python PATH`, an interpreter that has
//! the packages `grpcio` and `xds-protos`, it only lets that client read the reports of a server;
//! `.ci/grpc` installs them and does this.
//!
//! Exit codes: 0 every goal held; 1 one was missed, or something could not be measured.
#![expect(unsafe_code, reason = "an allocator that counts")]
#![expect(clippy::print_stdout, reason = "a program that shows something")]
#![expect(clippy::disallowed_methods, reason = "it measures real time")]
#![expect(clippy::cast_precision_loss, reason = "figures of a bench are far below 2^52")]

#[path = "../common/mod.rs"]
#[allow(dead_code, reason = "other benches use more of it")]
mod common;
mod cost;
#[path = "../common/counting.rs"]
mod counting;
mod grpc;

use std::ffi::OsString;
use std::process::ExitCode;

use clap::Parser;

#[global_allocator]
static ALLOCATOR: counting::Counting = counting::Counting(cost::note_allocation);

#[derive(Debug, Parser)]
#[command(about = "What load reports cost, and that a gRPC client reads them")]
struct Cli {
    /// Let the gRPC client of this Python interpreter read reports.
    #[arg(long)]
    python: Option<OsString>,
    /// Judges no time, and leaves out what measures nothing else.
    #[arg(long)]
    counted: bool,
}

fn main() -> ExitCode {
    common::main(|cli: Cli| match &cli.python {
        Some(python) => grpc::read(python),
        None => cost::measure(cli.counted),
    })
}
