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
#[path = "../index/chance.rs"]
#[allow(dead_code, reason = "another bench draws sizes too")]
mod chance;
mod count;
mod handlers;

use std::process::ExitCode;

use clap::Parser;
use common::figures::Figures;
use lowtide::{BoxError, ByteSize};
use lowtide_admission::learning::{Kind, Needs, Room};

use crate::chance::Chance;

lowtide::global_allocator!(balanced);

/// What the layer attributes to requests, and what that costs.
#[derive(Debug, Parser)]
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

pub(crate) struct NoOwner;

impl lowtide::heap::AccountOwner for NoOwner {}

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
    learned(&mut figures);
    if !cli.count {
        accuracy::measure(&mut figures)?;
    }
    count::measure(&mut figures)?;
    Ok(figures.print())
}

// How many requests a route takes to learn: until what it reserves stays within 10 % of the true
// mean of their needs.

/// Routes, each with its own random needs.
const ROUTES: u64 = 200;
/// Requests of a route.
const REQUESTS: usize = 400;
/// The accepted error.
const ERROR_MAX: f64 = 0.1;
/// Requests until the error is accepted, in nine of ten routes.
const GOAL: f64 = 30.0;

/// Returns the need of a request: around 10 MiB, most of them within 15 % of that.
fn need(chance: &mut Chance) -> f64 {
    let sum: f64 = (0..4).map(|_| chance.unit()).sum();
    10.0 * 1024.0 * 1024.0 * (0.7 + 0.15 * sum)
}

/// Measures it.
fn learned(figures: &mut Figures) {
    let truth = {
        let mut chance = Chance::new(7);
        (0..100_000).map(|_| need(&mut chance)).sum::<f64>() / 100_000.0
    };
    let mut after: Vec<_> = (1..=ROUTES).map(|seed| requests(seed, truth)).collect();
    after.sort_unstable();
    let most = after.get(after.len() * 90 / 100).copied().unwrap_or(REQUESTS);
    figures.at_most("measured.learned_after_requests", most as f64, "requests", GOAL);
}

/// Returns the number of requests after which the claim of a route stays near the truth.
fn requests(seed: u64, truth: f64) -> usize {
    let (needs, mut chance) = (Needs::default(), Chance::new(seed));
    let kind = Kind { route: 1, is_declared: true, has_many_routes: false };
    let request = needs.of(kind, ByteSize::mib(1), false);
    let mut wrong = 0;
    for nth in 1..=REQUESTS {
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "of some MiB")]
        request.learn(ByteSize::new(need(&mut chance) as u64));
        let claim = request.claim(Room::UNLIMITED).as_f64();
        if (claim / truth - 1.0).abs() > ERROR_MAX {
            wrong = nth;
        }
    }
    wrong
}
