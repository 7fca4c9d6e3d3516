//! A sort that spills because requests of the service need the memory.
//!
//! `cargo run --example sort` sorts 64 MiB twice, with a ledger of 256 MiB: first alone, then with
//! a request that takes 200 MiB when a quarter of the rows have been read. The second sort spills
//! and completes, and the request has its bytes.
#![expect(clippy::print_stdout, reason = "the figures are the product")]

mod run;

use std::sync::{Arc, Mutex};

use datafusion_common::Result;
use lowtide_admission::{Admission, Budget, ByteSize, Cost};
use lowtide_datafusion::AdmissionMemoryPool;

const LIMIT: ByteSize = ByteSize::mib(256);
const REQUEST: ByteSize = ByteSize::mib(200);
const BATCHES: usize = (64 << 20) / run::BATCH_BYTES;

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<()> {
    println!("ledger of {LIMIT}; resident at the start {}", resident("VmRSS"));
    println!("\nalone:");
    sort_next_to(None).await?;
    println!("\nwith a request of {REQUEST}:");
    sort_next_to(Some(REQUEST)).await?;
    println!("\nresident peak of both {}", resident("VmHWM"));
    Ok(())
}

async fn sort_next_to(request: Option<ByteSize>) -> Result<()> {
    let admission = Admission::with_limit(LIMIT);
    let pool = Arc::new(AdmissionMemoryPool::new(admission.clone()).with_min(ByteSize::mib(16)));
    let admitted = Arc::new(Mutex::new(None));

    // In a service, this is the layer that admits requests.
    let (door, permit) = (admission.clone(), Arc::clone(&admitted));
    let between = move |batch| {
        if let Some(bytes) = request.filter(|_| batch == BATCHES / 4) {
            let answer = door.try_admit(Cost::host(bytes));
            println!("  request of {bytes}: {}", describe(&answer));
            *permit.lock().unwrap_or_else(|poisoned| poisoned.into_inner()) = answer.ok();
        }
    };
    let sorted = run::sort(pool.clone(), BATCHES, between).await?;

    let stats = pool.stats();
    println!("  sorted {}: {}", ByteSize::of(sorted.bytes), sorted.is_sorted && sorted.is_complete);
    println!("  spilled {} in {} files", ByteSize::of(sorted.spilled_bytes), sorted.spills);
    println!("  reserved at most {}, denied {} times", stats.reserved_peak, stats.denied_total);
    if let Some(denied) = stats.last_denied {
        println!("  last denial: {denied}");
    }
    drop(admitted);
    println!("  reserved at the end {}", admission.ledger(Budget::Host).reserved());
    Ok(())
}

fn describe<T, E: std::fmt::Display>(answer: &std::result::Result<T, E>) -> String {
    answer.as_ref().map_or_else(ToString::to_string, |_| "admitted".to_owned())
}

/// Returns a figure of `/proc/self/status`; zero where there is no such file.
fn resident(name: &str) -> ByteSize {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
    let kib = line.and_then(|line| line.trim().trim_end_matches(" kB").parse().ok());
    ByteSize::kib(kib.unwrap_or(0))
}
