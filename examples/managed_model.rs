//! A model that is loaded on first use, once for all waiting requests, and unloaded when idle.
//!
//! `cargo run --example managed_model` sends eight requests at once, waits until the model is
//! unloaded, and sends another: two loads in all. The weights are in a device arena, over the host
//! driver here, and are reserved before they are loaded, so a model that does not fit is refused
//! and the service continues.
#![forbid(unsafe_code)]
#![expect(clippy::print_stdout, reason = "the figures are the product")]

use std::time::Duration;

use lowtide::admission::Managed;
use lowtide::config::DeviceChoice;
use lowtide::device::{Buffer, DeviceArena, Region};
use lowtide::{BoxError, ByteSize, Cost, Memory};

#[global_allocator]
static HEAP: lowtide::heap::Heap = lowtide::heap::Heap;

type Model = Managed<Buffer<f32>>;

const WEIGHTS: ByteSize = ByteSize::mib(32);
const IDLE: Duration = Duration::from_millis(300);
/// Longer than anything here takes.
const PATIENCE: Duration = Duration::from_secs(20);

fn load(arena: &DeviceArena) -> Result<Buffer<f32>, BoxError> {
    let count = WEIGHTS.as_usize().unwrap_or(usize::MAX) / size_of::<f32>();
    let mut weights = arena.alloc(count, Region::Stable)?;
    let lease = arena.enter()?;
    weights.slice_mut(&lease)?.fill(0.5);
    Ok(weights)
}

/// A request: holds a guard while it needs the model, and a lease while it reads the model's
/// memory.
async fn answer(arena: DeviceArena, model: Model) -> Result<f32, BoxError> {
    let weights = model.acquire().await?;
    let lease = arena.enter()?;
    Ok(weights.slice(&lease)?.iter().take(1 << 10).sum())
}

#[tokio::main]
async fn main() -> Result<(), BoxError> {
    let memory = Memory::builder()
        .memory_limit(ByteSize::mib(256))
        .device(DeviceChoice::Host)
        .device_decay(lowtide::decay::DecayTime::from_millis(100))
        .start()?;
    let arena = memory.devices().open_arena("embedder")?;
    let model = register(&memory, &arena, "embedder", WEIGHTS)?;
    show(&memory, "before the first request");

    let requests: Vec<_> =
        (0..8).map(|_| tokio::spawn(answer(arena.clone(), model.clone()))).collect();
    for request in requests {
        request.await??;
    }
    show(&memory, "eight requests at once");
    expect_loads(&memory, 1); // once for all waiting requests

    until(|| committed(&memory) == ByteSize::ZERO, "the idle model and its memory are released")
        .await?;
    show(&memory, "idle for a while");

    answer(arena.clone(), model.clone()).await?;
    show(&memory, "another request");
    expect_loads(&memory, 2);

    // One that can never fit is refused when it is registered, and all else goes on.
    let large = register(&memory, &arena, "too large", ByteSize::gib(1));
    let refused = large.err().ok_or("a model of 1 GiB fits into 256 MiB")?;
    println!("    refused: {refused}");
    answer(arena, model).await?;
    let end = memory.shutdown(Duration::from_secs(5)).await;
    println!("shut down: {end}");
    Ok(end.into_result()?)
}

fn register(
    memory: &Memory,
    arena: &DeviceArena,
    name: &str,
    weights: ByteSize,
) -> Result<Model, BoxError> {
    let arena = arena.clone();
    let model = memory.managed(name, move || load(&arena));
    let model = model.cost(Cost::device(weights)).idle(IDLE);
    Ok(model.register()?)
}

fn loads(memory: &Memory) -> u64 {
    memory.snapshot().resources.iter().map(|resource| resource.loads_ok_total).sum()
}

fn expect_loads(memory: &Memory, count: u64) {
    assert_eq!(loads(memory), count, "loads of the model");
}

fn committed(memory: &Memory) -> ByteSize {
    memory.snapshot().devices.arenas.iter().map(|arena| arena.committed).sum()
}

fn show(memory: &Memory, when: &str) {
    let reserved = memory.snapshot().host.reserved;
    let (loads, committed) = (loads(memory), committed(memory));
    println!("{when:26} loads {loads}  committed {committed}  reserved {reserved}");
}

async fn until(mut holds: impl FnMut() -> bool, what: &str) -> Result<(), BoxError> {
    let wait = async {
        while !holds() {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    tokio::time::timeout(PATIENCE, wait).await.map_err(|_| format!("did not happen: {what}").into())
}
