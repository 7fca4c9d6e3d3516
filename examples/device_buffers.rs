//! Device memory as typed buffers: taken, used through a lease, put to sleep, given back.
//!
//! `cargo run --example device_buffers` opens an arena over the host driver, so that it runs
//! without a GPU; the calls are the same on one, where a buffer is viewed through cudarc instead of
//! as a slice. It shows live against committed memory at each step, and fails where memory that
//! nothing needs stays committed.
#![forbid(unsafe_code)]
#![expect(clippy::print_stdout, reason = "the figures are the product")]

use std::sync::Arc;
use std::time::Duration;

use lowtide::clock::{Clock as _, ManualClock};
use lowtide::decay::DecayTime;
use lowtide::device::{
    ArenaConfig, Buffer, Contents, DeviceArena, DeviceError, HostDriver, Region, SleepOptions,
};
use lowtide::{BoxError, ByteSize};

const WEIGHTS: usize = 4 << 20;
const REQUESTS: usize = 16;

fn main() -> Result<(), BoxError> {
    // A clock that is moved by hand; a service has a `Memory`, which opens arenas and keeps time.
    let clock = Arc::new(ManualClock::new());
    let config = ArenaConfig {
        limit: ByteSize::mib(256),
        decay: DecayTime::from_millis(1_000),
        ..ArenaConfig::new("embedder")
    };
    let arena = DeviceArena::open(Arc::new(HostDriver::new()), clock.clone(), config)?;
    show("opened", &arena);

    // What lives for long, and what comes and goes, lie in regions of their own.
    let mut weights = arena.alloc::<f32>(WEIGHTS, Region::Stable)?;
    let lease = arena.enter()?; // no slice without one: while it is held nothing moves or sleeps
    weights.slice_mut(&lease)?.fill(0.5);
    drop(lease);
    show("weights of 16 MiB", &arena);

    let mut requests: Vec<Buffer<f32>> = (0..REQUESTS)
        .map(|_| arena.alloc(1 << 20, Region::Dynamic))
        .collect::<Result<_, DeviceError>>()?;
    show("16 requests, 4 MiB each", &arena);

    // More than the limit is a typed error, and the arena works on.
    match arena.alloc::<u8>(512 << 20, Region::Dynamic) {
        Err(error @ DeviceError::OutOfMemory { .. }) => println!("    refused: {error}"),
        other => return Err(format!("512 MiB fit a limit of 256 MiB: {other:?}").into()),
    }

    requests.clear();
    show("requests over: idle", &arena);
    // First what is idle goes, then what this thread kept of its blocks for its next request.
    for _ in 0..3 {
        clock.advance(Duration::from_secs(2));
        println!("    decay gave back {}", arena.decay(clock.now())?.released);
    }
    show("6 s later", &arena);
    if arena.glance().committed > weights.bytes().saturating_add(ByteSize::mib(2)) {
        return Err("memory that nothing needs stays committed".into());
    }

    // Asleep, the address stays and the memory behind it goes. What can be had again, as weights
    // from a file can, need not be kept: after the wake the buffer says that it has to be filled.
    weights.set_contents(Some(Contents::Discard))?;
    println!("    sleep gave back {}", arena.sleep(SleepOptions::default())?.released);
    show("asleep", &arena);
    if arena.glance().committed > ByteSize::ZERO {
        return Err("memory is committed while the arena sleeps".into());
    }
    let lease = arena.enter()?; // wakes it
    if weights.take_discarded() {
        weights.slice_mut(&lease)?.fill(0.5);
    }
    drop(lease);
    show("awake, filled again", &arena);
    drop(weights);
    arena.purge()?;
    show("all freed, purged", &arena);
    arena.close()?;
    Ok(())
}

fn show(when: &str, arena: &DeviceArena) {
    let now = arena.glance();
    println!("{when:24} live {:>10}  committed {:>10}", text(now.live), text(now.committed));
}

fn text(size: ByteSize) -> String {
    size.to_string()
}
