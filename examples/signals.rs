//! Prints the memory limit and the kernel's counters that lowtide finds on this system.
//!
//! `cargo run --example signals` prints one line of `name=value`. With `--hold 64m` it first
//! allocates that much memory; with `--watch` it prints a line for each line that it reads, so that
//! a script can change the cgroup in between. `.ci/limits` runs it under cgroups of every kind.
//!
//! Exit code 0: a limit was found; 1: none.
//!
//! Invariant: it reads the same sources as a service, through the same type, and writes to no
//! cgroup.
#![expect(clippy::print_stdout, reason = "the figures are the product")]

use std::io::BufRead;
use std::process::ExitCode;

use clap::Parser;
use lowtide::ByteSize;
use lowtide::admission::{EventCounts, Psi, Signals};

/// Prints the memory limit that lowtide finds on this system.
#[derive(Parser)]
struct Args {
    /// Allocate this much memory first.
    #[arg(long, default_value = "0")]
    hold: ByteSize,
    /// Print a line now and one for each line of the input.
    #[arg(long)]
    watch: bool,
}

fn main() -> ExitCode {
    let args = Args::parse();
    let signals = Signals::open();
    // Written to, so that there is memory behind every page.
    let held = vec![1_u8; args.hold.as_usize().unwrap_or(usize::MAX)];
    println!("{}", line(&signals));
    if args.watch {
        for _ in std::io::stdin().lock().lines().map_while(Result::ok) {
            signals.look();
            println!("{}", line(&signals));
        }
    }
    for missing in signals.missing() {
        println!("missing: {missing}");
    }
    let found = signals.sample().limit.is_known();
    // Used after the last line, so that it was held until then.
    if found && held.iter().all(|&byte| byte == 1) { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

fn line(signals: &Signals) -> String {
    let sample = signals.sample();
    let count =
        |count: Option<u64>| count.map_or_else(|| "-".to_owned(), |count| count.to_string());
    let events = signals.events().unwrap_or_default();
    let counts = |EventCounts { high, max, oom, oom_kill, .. }| {
        [high, max, oom, oom_kill].map(count).join(",")
    };
    let total = |psi: Psi| psi.some_total.as_micros().to_string();
    format!(
        "cgroup={} limit={} source={} physical={} rss={} charged={} own={} above={} psi={}",
        signals.cgroup().map_or_else(|| "-".to_owned(), |folder| folder.display().to_string()),
        sample.limit.bytes.get(),
        sample.limit.source.name(),
        sample.physical.get(),
        count(sample.rss.map(ByteSize::get)),
        count(sample.charged.map(ByteSize::get)),
        counts(events.own),
        counts(events.above),
        signals.psi().map_or_else(|| "-".to_owned(), total),
    )
}
