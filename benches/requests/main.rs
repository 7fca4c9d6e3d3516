//! Requests: what the layer attributes to each, beside what they hold, and what that costs.
//!
//! This process serves; the clients are a child, so that their memory does not count. In each case
//! some requests wait at the point where they hold most, and jemalloc's statistics show what they
//! hold together. Instructions are counted by callgrind, in processes of their own.
//!
//! Exit codes: 0 every goal held; 1 one was missed, or something could not be measured.
#![expect(clippy::print_stdout, reason = "a program that shows something")]
#![expect(clippy::disallowed_methods, reason = "it measures real time")]
#![expect(clippy::cast_precision_loss, reason = "figures of a bench are far below 2^52")]

mod accuracy;
mod cases;
#[path = "../index/chance.rs"]
#[allow(dead_code, reason = "another bench draws sizes too")]
mod chance;
#[path = "../common/mod.rs"]
#[allow(dead_code, reason = "other benches use more of it")]
mod common;
mod count;
mod handlers;
mod learned;

use std::process::ExitCode;

use clap::Parser;
use lowtide::BoxError;

use crate::common::figures::Figures;

lowtide::global_allocator!(balanced);

#[derive(Debug, Parser)]
#[command(about = "What the layer attributes to requests, and what that costs")]
struct Cli {
    /// Only instructions.
    #[arg(long)]
    count: bool,
    /// Be the process whose instructions are counted.
    #[arg(long, hide = true)]
    be: Option<String>,
    #[arg(long, hide = true, default_value_t = 0)]
    steps: usize,
    /// Be the clients.
    #[arg(long, hide = true)]
    client: Option<String>,
}

fn main() -> ExitCode {
    common::main(|cli: Cli| run(&cli))
}

/// Returns whether every goal held.
fn run(cli: &Cli) -> Result<bool, BoxError> {
    if let Some(counted) = &cli.be {
        return count::be(counted, cli.steps).map(|()| true);
    }
    if let Some(order) = &cli.client {
        return accuracy::be_clients(serde_json::from_str(order)?).map(|()| true);
    }
    let mut figures = Figures::default();
    learned::measure(&mut figures);
    if !cli.count {
        accuracy::measure(&mut figures)?;
    }
    count::measure(&mut figures)?;
    Ok(figures.print())
}
