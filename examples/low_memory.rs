//! The low-memory profile under four times the load that fits: what does not fit is turned away,
//! the limit is never met, and what was taken goes back at once.
//!
//! `cargo run --example low_memory` gives itself 64 MiB beyond what is held at the start, keeps
//! four times as many requests at the door as fit, and says what was served, what was shed, how
//! high memory rose and where it was a moment later. It ends with what ONNX Runtime beside it would
//! be told.
#![expect(clippy::print_stdout, reason = "the figures are the product")]

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use lowtide::clock::{Bell, Clock as _, SystemClock};
use lowtide::config::Profile;
use lowtide::control::{Cost, Signals};
use lowtide::{BoxError, ByteSize, Memory};

#[global_allocator]
static HEAP: lowtide::host::Heap = lowtide::host::Heap;
// What jemalloc fixes before `main`; `Profile::LowMemory` below moves the rest.
lowtide::heap_profile!(low_memory);

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
        .with_environment()?
        .start()?;
    memory.diagnostics().iter().for_each(|note| println!("note: {note}"));
    let limit = memory.snapshot().signal.limit.bytes;
    println!("{base} are held; the limit is {limit}; {CLIENTS} clients, {REQUEST} each");

    let clock = SystemClock::new();
    let end = clock.now() + LOAD;
    let mut peak = ByteSize::ZERO;
    std::thread::scope(|scope| {
        for _ in 0..CLIENTS {
            scope.spawn(|| client(&memory));
        }
        while clock.now() < end {
            clock.wait_until(&Bell::new(), clock.now() + Duration::from_millis(5));
            peak = peak.max(memory.snapshot().physical);
        }
        OVER.store(true, Ordering::Relaxed);
    });
    let (served, shed) = (SERVED.load(Ordering::Relaxed), SHED.load(Ordering::Relaxed));
    println!("under load: {served} served, {shed} shed, {peak} at most");

    let deadline = clock.now() + PATIENCE;
    let enough = base.saturating_add(ByteSize::mib(12));
    while memory.snapshot().physical > enough {
        if clock.now() > deadline {
            return Err(format!("{} are held after the load", memory.snapshot().physical).into());
        }
        clock.wait_until(&Bell::new(), clock.now() + Duration::from_millis(20));
    }
    println!("after it: {}", memory.snapshot().physical);

    println!("\nONNX Runtime in this process, for each session:");
    let cpus = memory.snapshot().cpus.whole().unwrap_or(1);
    for setting in memory.config().profile.value.onnxruntime(cpus) {
        println!("  {:?} {} = {}", setting.place, setting.key, setting.value);
    }
    let ended = memory.shutdown(Duration::from_secs(5));
    for (holds, what) in [
        (served > 0, "something is served"),
        (shed > 0, "something is shed"),
        (peak < limit, "the limit is not met"),
        (ended.is_clean(), "nothing is outstanding"),
    ] {
        if !holds {
            return Err(format!("does not hold: {what}").into());
        }
    }
    Ok(())
}

/// Asks again and again until the load is over: what a request says that it needs, it touches.
fn client(memory: &Memory) {
    let clock = SystemClock::new();
    let pause = |time| clock.wait_until(&Bell::new(), clock.now() + time);
    while !OVER.load(Ordering::Relaxed) {
        let Ok(permit) = memory.admission().try_admit(Cost::host(REQUEST)) else {
            SHED.fetch_add(1, Ordering::Relaxed);
            pause(Duration::from_millis(20)); // a client would wait for `Rejected::retry_after`
            continue;
        };
        let body = vec![1_u8; REQUEST.as_usize().unwrap_or(0)];
        pause(Duration::from_millis(10)); // the work
        drop(body);
        drop(permit);
        SERVED.fetch_add(1, Ordering::Relaxed);
    }
}
