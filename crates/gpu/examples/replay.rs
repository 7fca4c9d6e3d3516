//! Replays a recording of a device arena on the host driver, and compares the outcomes.
//!
//! `cargo run --release --example replay -- arena.log`; with `--rmm`, the CSV log of RMM's
//! `logging_resource_adaptor`. Memory is committed as recorded and never touched: on Linux it uses
//! address space and almost no memory. `--limit` bounds it nevertheless. If the recorded granules
//! are smaller than the host driver supports, its own are used.
//!
//! Exit code 0: the outcomes are equal, or the recording has none; 1: they differ; 2: the recording
//! could not be read or replayed.
//!
//! Invariant: everything printed is about the replay, except for the lines that name the recording.
#![expect(clippy::print_stdout, reason = "the figures are the product")]

use std::error::Error;
use std::fs::File;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;

use clap::Parser;
use lowtide_gpu::ByteSize;
use lowtide_gpu::driver::Driver;
use lowtide_gpu::record::Log;
use lowtide_gpu::{ArenaConfig, HostDriver};

/// Replays a recording of a device arena on the host driver.
#[derive(Parser)]
struct Args {
    /// The recording.
    path: PathBuf,
    /// The recording is a log of RMM.
    #[arg(long)]
    rmm: bool,
    /// The most bytes to commit, instead of the recorded limit.
    #[arg(long)]
    limit: Option<u64>,
}

fn main() -> ExitCode {
    match replay(&Args::parse()) {
        Ok(code) => code,
        Err(error) => {
            println!("failed: {error}");
            ExitCode::from(2)
        }
    }
}

fn replay(args: &Args) -> Result<ExitCode, Box<dyn Error>> {
    let file = File::open(&args.path)?;
    let log = if args.rmm { Log::from_rmm(file)? } else { Log::read(file)? };
    let config = log.header().config();
    let limit = args.limit.map_or(config.limit, ByteSize::new);
    let driver: Arc<dyn Driver> = Arc::new(HostDriver::new());
    // Settings that the host driver does not support are rejected at line 2.
    let smallest = driver.capabilities().granularity;
    let granule = config.granule.filter(|granule| *granule >= smallest);
    let replayed = log.replay(driver, ArenaConfig { limit, granule, ..config })?;
    let at_end = &replayed.snapshot;
    println!("recorded   {:?} on {}", log.header().name, log.header().backend);
    println!("operations {}, skipped {}", replayed.operations, replayed.skipped);
    println!("live       {} at the end, {} at the peak", at_end.live, at_end.live_peak);
    println!("committed  {} at the end, {} at the peak", at_end.committed, at_end.committed_peak);
    println!("calls      {} commits, {} decommits", at_end.commits_total, at_end.decommits_total);
    println!("sleeps     {}, {} wakes", at_end.sleeps_total, at_end.wakes_total);
    println!("failures   {:?}", at_end.alloc_failures_total);
    println!("hash       {}", replayed.hash);
    match log.closing() {
        Some(closing) => println!("recorded   {}", closing.hash),
        None => println!("recorded   no hash"),
    }
    match replayed.first_difference {
        Some(line) => println!("first difference in line {line}"),
        None => println!("all recorded outcomes are equal"),
    }
    let is_other = replayed.first_difference.is_some() || replayed.matches() == Some(false);
    Ok(ExitCode::from(u8::from(is_other)))
}
