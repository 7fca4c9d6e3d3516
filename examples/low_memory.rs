//! The low-memory profile under four times the load that fits: excess requests are rejected, the
//! limit is never reached, and memory is released at once.
//!
//! `cargo run --example low_memory` sets a limit 64 MiB above the memory in use at the start, sends
//! four times as many requests as fit, and prints the requests served and rejected, the peak of
//! memory, and the memory in use a moment later. It ends with matching settings for ONNX Runtime.
#![expect(clippy::print_stdout, reason = "the figures are the product")]
#![expect(clippy::disallowed_methods, reason = "clients wait in real time")]

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::sleep;
use std::time::{Duration, Instant};

use lowtide::admission::{Cost, Signals};
use lowtide::config::Profile;
use lowtide::{BoxError, ByteSize, Memory};

// The settings that jemalloc reads before `main`; `Profile::LowMemory` below changes the rest.
lowtide::global_allocator!(low_memory);

const ROOM: ByteSize = ByteSize::mib(64);
const REQUEST: ByteSize = ByteSize::mib(2);
/// Four times as many as have room: those under way would need 256 MiB.
const CLIENTS: u64 = 4 * (ROOM.get() / REQUEST.get());
const LOAD: Duration = Duration::from_secs(2);
const PATIENCE: Duration = Duration::from_secs(30);

static OVER: AtomicBool = AtomicBool::new(false);
static SERVED: AtomicU64 = AtomicU64::new(0);
static SHED: AtomicU64 = AtomicU64::new(0);

fn main() -> Result<(), BoxError> {
    let base = Signals::open().sample().physical;
    let memory = Memory::builder()
        .profile(Profile::LowMemory)
        .memory_limit(base.saturating_add(ROOM))
        .start()?;
    memory.report().diagnostics().iter().for_each(|note| println!("diagnostic: {note}"));
    let limit = memory.snapshot().signal.limit.bytes;
    println!("{base} in use; the limit is {limit}; {CLIENTS} clients, {REQUEST} each");

    let end = Instant::now() + LOAD;
    let mut peak = ByteSize::ZERO;
    std::thread::scope(|scope| {
        for _ in 0..CLIENTS {
            scope.spawn(|| client(&memory));
        }
        while Instant::now() < end {
            sleep(Duration::from_millis(5));
            peak = peak.max(memory.snapshot().physical);
        }
        OVER.store(true, Ordering::Relaxed);
    });
    let (served, shed) = (SERVED.load(Ordering::Relaxed), SHED.load(Ordering::Relaxed));
    println!("under load: {served} served, {shed} rejected, peak {peak}");

    let deadline = Instant::now() + PATIENCE;
    let enough = base.saturating_add(ByteSize::mib(12));
    while memory.snapshot().physical > enough {
        if Instant::now() > deadline {
            return Err(format!("{} in use after the load", memory.snapshot().physical).into());
        }
        sleep(Duration::from_millis(20));
    }
    println!("afterwards: {}", memory.snapshot().physical);

    println!("\nONNX Runtime in this process, for each session:");
    let cpus = memory.snapshot().cpus.whole().unwrap_or(1);
    for (name, value) in memory.config().profile.value.onnxruntime(cpus) {
        let kind = if name.starts_with("session.") { "SessionEntry" } else { "SessionOption" };
        println!("  {kind} {name} = {value}");
    }
    if served == 0 || shed == 0 || peak >= limit {
        return Err("expected some requests of both kinds, and a peak below the limit".into());
    }
    Ok(memory.shutdown_blocking(Duration::from_secs(5)).into_result()?)
}

/// Asks again and again until the load is over: what a request says that it needs, it touches.
fn client(memory: &Memory) {
    while !OVER.load(Ordering::Relaxed) {
        let Ok(permit) = memory.admission().try_admit(Cost::host(REQUEST)) else {
            SHED.fetch_add(1, Ordering::Relaxed);
            sleep(Duration::from_millis(20)); // a client would wait for `Rejected::retry_after`
            continue;
        };
        let body = vec![1_u8; REQUEST.as_usize().unwrap_or(0)];
        sleep(Duration::from_millis(10)); // the work
        drop((body, permit));
        SERVED.fetch_add(1, Ordering::Relaxed);
    }
}
