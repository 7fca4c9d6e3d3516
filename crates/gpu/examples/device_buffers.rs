//! Typed buffers in device memory: allocate, use through a lease, sleep, free.
//!
//! `cargo run --example device_buffers` opens an arena over the host driver, so it runs without a
//! GPU; on a GPU the calls are the same, and a buffer is viewed through cudarc instead of as a
//! slice. It prints live and committed memory at each step, and fails if unused memory stays
//! committed.
#![forbid(unsafe_code)]
#![expect(clippy::print_stdout, reason = "the figures are the product")]

use std::sync::Arc;
use std::time::Duration;

use lowtide_gpu::clock::{Clock as _, ManualClock};
use lowtide_gpu::decay::DecayTime;
use lowtide_gpu::{
    ArenaConfig, Buffer, Contents, DeviceArena, DeviceError, HostDriver, Region, SleepOptions,
};
use lowtide_gpu::{BoxError, ByteSize};

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

    // Long-lived and short-lived blocks have separate regions.
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
        other => return Err(format!("512 MiB fit into a limit of 256 MiB: {other:?}").into()),
    }

    requests.clear();
    show("requests done: idle", &arena);
    // Idle memory decays first, then the blocks that this thread cached for its next request.
    for _ in 0..3 {
        clock.advance(Duration::from_secs(2));
        println!("    decay released {}", arena.decay(clock.now())?);
    }
    show("6 s later", &arena);
    if arena.glance().committed > weights.bytes().saturating_add(ByteSize::mib(2)) {
        return Err("unused memory stays committed".into());
    }

    // Asleep, the address stays and the memory behind it is released. Contents that can be
    // restored, such as weights from a file, need not be kept: after the wake the buffer reports
    // that it must be filled.
    weights.set_contents(Some(Contents::Discard))?;
    println!("    sleep released {}", arena.sleep(SleepOptions::default())?.memory);
    show("asleep", &arena);
    if arena.glance().committed > ByteSize::ZERO {
        return Err("memory is committed while the arena sleeps".into());
    }
    let lease = arena.enter()?; // wakes it
    if weights.take_discarded() {
        weights.slice_mut(&lease)?.fill(0.5);
    }
    drop(lease);
    show("awake, refilled", &arena);
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
