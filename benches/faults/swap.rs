//! An idle model beside a second one and a large request: a limit of 128 MiB, models of 60 MiB, and
//! a request of 45 MiB.

use std::time::Duration;

use lowtide::clock::{Bell, Clock as _, SystemClock};
use lowtide::memory::Memory;
use lowtide::{BoxError, ByteSize};
use lowtide_admission::{Cost, Managed, Resource as _, UnloadReason};

const LIMIT: ByteSize = ByteSize::mib(128);
const MODEL: ByteSize = ByteSize::mib(60);
const REQUEST: ByteSize = ByteSize::mib(45);
/// Longer than a test waits: no model goes by itself.
const IDLE: Duration = Duration::from_secs(3600);

pub(crate) fn run() -> Result<(), BoxError> {
    let memory = Memory::builder().memory_limit(LIMIT).idle_unload(IDLE).start()?;
    let first = model(&memory, "first")?;
    let second = model(&memory, "second")?;
    drop(first.acquire_blocking()?);
    let swapped = second.acquire_blocking().map(drop);
    let loaded = [&first, &second].iter().filter(|model| model.stats().loaded).count();
    let second_loaded = u64::from(second.stats().loaded && loaded == 1);
    let evictions = evictions(&[&first, &second]);
    let served = serve(&memory);
    println!("figure faults.swap.loaded {second_loaded} models");
    println!("figure faults.swap.evictions {evictions} unloads");
    println!("figure faults.swap.request_served {} requests", u64::from(served.is_ok()));
    println!("{}", memory.shutdown_blocking(Duration::from_secs(5)));
    swapped?;
    served?;
    match (second_loaded, evictions) {
        (1, 1) => Ok(()),
        _ => Err("expected the second model loaded after one eviction".into()),
    }
}

fn model(memory: &Memory, name: &str) -> Result<Managed<Vec<u8>>, BoxError> {
    let load = || Ok(vec![1_u8; MODEL.as_usize().unwrap_or_default()]);
    Ok(memory.managed(name, load).cost(Cost::host(MODEL)).register()?)
}

fn evictions(models: &[&Managed<Vec<u8>>]) -> u64 {
    models.iter().map(|model| model.stats().unloads.total(UnloadReason::Eviction)).sum()
}

/// A request that comes again once, when it is told to.
fn serve(memory: &Memory) -> Result<(), BoxError> {
    let Err(rejected) = memory.admission().try_admit(Cost::host(REQUEST)) else { return Ok(()) };
    let wait =
        rejected.retry_after().ok_or("a request that fits later has a time to come again")?;
    println!("request: {rejected}");
    let clock = SystemClock::new();
    clock.wait_until(&Bell::new(), clock.now() + wait);
    drop(memory.admission().try_admit(Cost::host(REQUEST))?);
    Ok(())
}
