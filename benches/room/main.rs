//! Room on demand: requests that wait for room, models that are evicted, a cache that shrinks,
//! services that leak, and clients that hold memory or connections and make no progress.
//!
//! `schedules` runs random schedules of requests that wait. `zipf` evicts models under requests by
//! Zipf's law and compares the hits with those of other policies. Both are in virtual time. `cache`
//! loads a service whose cache fills the limit, and `leak` exhausts services by leaks, under two
//! policies. A schedule that fails is shown with its seed and can be run again alone. `hostage` and
//! `h2` attack a real service, `fit` lets one fit in half of its limit, and `faults` repeats what
//! killed services.
//!
//! Exit codes: 0 every goal held; 1 one was missed.
#![expect(clippy::print_stdout, clippy::print_stderr, reason = "a program that shows something")]

mod cache;
mod faults;
mod fit;
mod hostage;
mod leak;
#[path = "../../crates/admission/tests/admission/waiting/schedules.rs"]
mod schedules;
#[path = "../../crates/admission/tests/admission/managed/zipf.rs"]
mod zipf;

use std::ops::RangeInclusive;
use std::process::ExitCode;

use clap::{Parser, Subcommand};
use common::figures::{Figures, count};
use lowtide::BoxError;
use tokio::runtime::{Builder, Runtime};

use crate::zipf::{CASES, Compared, FAULTS, Hits, NAMES};

lowtide::global_allocator!(balanced);

/// Requests that wait for room, evictions, caches, leaks and hostile clients.
#[derive(Debug, Parser)]
struct Cli {
    #[command(subcommand)]
    part: Part,
}

#[derive(Debug, Subcommand)]
enum Part {
    /// Random schedules of requests that wait for room.
    Schedules {
        /// The number of schedules.
        #[arg(long, default_value_t = 100_000)]
        count: u64,
        /// The first seed.
        #[arg(long, default_value_t = 0)]
        from: u64,
    },
    /// Evictions of models under requests by Zipf's law, compared with other policies.
    Zipf,
    /// Clients that hold memory or connections of a real service hostage: two minutes.
    Hostage,
    /// 10,000 connections of HTTP/2 to a service of 256 MiB.
    H2,
    /// A cache of 80 % of the limit under load.
    Cache,
    /// Services that a leak exhausts, under the policies `exit` and `serve-one`.
    Leak,
    /// The admin command `fit` under load, in a cgroup.
    Fit,
    /// Bodies and requests that killed services.
    Faults {
        /// Runs this part alone.
        part: Option<faults::Part>,
        /// Runs each less often.
        #[arg(long)]
        ci: bool,
    },
    /// Is the service of a part.
    #[command(hide = true)]
    Serve { of: String },
}

fn main() -> ExitCode {
    common::main(|cli: Cli| run(&cli.part))
}

/// Runs a part. Returns `true` if every goal held.
fn run(part: &Part) -> Result<bool, BoxError> {
    let mut figures = Figures::default();
    match part {
        Part::Schedules { count, from } => schedules(*count, *from, &mut figures),
        Part::Zipf => evictions(&mut figures),
        Part::Hostage => hostage::measure(&mut figures)?,
        Part::H2 => hostage::measure_connections(&mut figures)?,
        Part::Cache => cache::measure(&mut figures)?,
        Part::Leak => leak::measure(&mut figures)?,
        Part::Fit => fit::measure(&mut figures)?,
        Part::Faults { part, ci } => faults::measure(*part, *ci, &mut figures)?,
        Part::Serve { of } => match &**of {
            "hostage" => hostage::serve()?,
            "faults" => faults::serve()?,
            "fit" => fit::serve()?,
            "cache" => cache::serve()?,
            _ => leak::serve()?,
        },
    }
    Ok(figures.print())
}

/// Builds a runtime as the documents recommend it to services.
fn runtime() -> std::io::Result<Runtime> {
    Builder::new_multi_thread()
        .enable_all()
        .on_thread_start(lowtide::memory::on_thread_start)
        .on_thread_park(lowtide::heap::on_thread_park)
        .build()
}

/// Runs schedules and adds their figures.
fn schedules(run: u64, from: u64, figures: &mut Figures) {
    let mut failed = 0;
    for seed in from..from.saturating_add(run) {
        if let Err(fault) = schedules::run(seed) {
            failed += 1;
            eprintln!("seed {seed}: {fault}");
        }
    }
    figures.add("room.schedules.run", count(run), "schedules");
    figures.at_most("room.schedules.failed", count(failed), "schedules", 0.0);
}

// The figures of evictions under requests by Zipf's law; `zipf` serves them.

/// The least part of the hits of the best of LRU, LFU and GDSF in each case, as means of its seeds.
const HIT_RATIO_MIN: f64 = 0.97;

/// The requests of each case, and its seeds.
const REQUESTS: usize = 100_000;
const SEEDS: RangeInclusive<u64> = 1..=10;

/// Adds the figures of the cases.
fn evictions(figures: &mut Figures) {
    let mut faults = [0; FAULTS.len()];
    let mut least = Hits { requests: f64::INFINITY, load_time: f64::INFINITY };
    for case in CASES {
        let all: Vec<_> = SEEDS.map(|seed| zipf::compare(case, seed, REQUESTS)).collect();
        for compared in &all {
            faults.iter_mut().zip(compared.faults).for_each(|(sum, more)| *sum += more);
        }
        let mean = Compared::mean(&all);
        least = least.with(mean.ratio(), f64::min);
        for (name, hits) in NAMES.into_iter().zip(mean.hits) {
            figures.add(format!("room.zipf.{}.{name}", case.name), hits.requests, "ratio");
        }
    }
    for (name, found) in FAULTS.into_iter().zip(faults) {
        figures.at_most(format!("room.zipf.{name}"), count(found), "requests", 0.0);
    }
    figures.at_least("room.zipf.hit_ratio", least.requests, "of_the_best", HIT_RATIO_MIN);
    figures.add("room.zipf.saved_ratio", least.load_time, "of_the_best");
}
