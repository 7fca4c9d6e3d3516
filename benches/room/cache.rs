//! A cache of 80 % of the limit, and a load of requests for which it leaves no room.
//!
//! The service is a process of its own in a memory cgroup, or, where none can be made, under
//! `LOWTIDE_MEMORY_LIMIT`. It fills its cache, registers it as a reclaimer, and then sends itself
//! requests through the tower layer. A request allocates what it announces, and looks up entries,
//! so that the cache grows again.
//!
//! Invariant: every rejection counts, since the cache holds more than any request needs when its
//! load begins, and shrinks only for requests.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::Bytes;
use common::figures::{Figures, count};
use common::own;
use common::process::Process;
use http::{Extensions, Request, Response, StatusCode};
use http_body_util::{Empty, Full};
use lowtide::admission::{Cost, Reclaimable, RejectReason};
use lowtide::service::MemoryLayer;
use lowtide::{BoxError, ByteSize, Memory};
use lowtide_core::sync::lock;
use tokio::time::{Instant, sleep};
use tower::{Layer as _, Service as _, ServiceExt as _};

use common::chance::Chance;

/// The limit of the service.
const LIMIT: ByteSize = ByteSize::mib(256);
/// An entry of the cache, and so many that they fill 80 % of the limit.
const ENTRY: usize = 64 << 10;
const ENTRIES: usize = 3277;
/// The keys that are looked up.
const KEYS: usize = ENTRIES * 5 / 4;
/// The clients, and what each of their requests needs.
const CLIENTS: u64 = 8;
const REQUEST: usize = 4 << 20;
/// Every so many requests of a client one needs so many times as much.
const LARGE_EACH: u64 = 20;
const LARGE: usize = 6;
/// The time for which a request holds its memory.
const WORK: Duration = Duration::from_millis(20);

/// The time of load.
const LASTS: Duration = Duration::from_secs(20);

/// Runs the service, and adds the figures.
pub(crate) fn measure(figures: &mut Figures) -> Result<(), BoxError> {
    let seen = run()?;
    let [sheds, served] = seen.unwrap_or_default();
    figures.at_least("room.cache.requests", served, "requests", 1.0);
    figures.at_most("room.cache.kills", count(seen.is_none().into()), "kills", 0.0);
    figures.at_most("room.cache.sheds", sheds, "requests", 0.0);
    Ok(())
}

/// Returns the requests that were rejected, and those that were served; `None` if the service was
/// killed.
fn run() -> Result<Option<[f64; 2]>, BoxError> {
    let mut service = Process::start_in_group(&own(&["serve", "cache"])?, LIMIT)?;
    if service.folder().is_none() {
        println!("no cgroup can be made here, so nothing can be killed");
    }
    let sheds = service.first_line();
    if service.is_killed()? {
        return Ok(None);
    }
    Ok(Some([sheds?, service.first_line()?]))
}

/// Entries by key.
type Cache = Mutex<BTreeMap<usize, Vec<u8>>>;

/// Looks an entry up, and inserts it if it is missing.
fn look_up(cache: &Cache, key: usize) {
    let mut entries = lock(cache);
    if entries.len() < ENTRIES {
        entries.entry(key).or_insert_with(|| vec![1; ENTRY]);
    }
}

fn shrink(cache: &Cache, wanted: ByteSize) -> ByteSize {
    let mut released = ByteSize::ZERO;
    while released < wanted && lock(cache).pop_first().is_some() {
        released = released.saturating_add(ByteSize::of(ENTRY));
    }
    released
}

/// Is the service, and prints the requests that were rejected and served.
pub(crate) fn serve() -> Result<(), BoxError> {
    let memory = Memory::start()?;
    let mut watch = memory.admission().watch_level();
    let cache = Arc::new(Cache::default());
    (0..ENTRIES).for_each(|key| look_up(&cache, key));
    // An idle service samples every 250 ms, and this took less.
    watch.wait_for_change(Duration::from_secs(5)).ok_or("the level does not rise")?;
    let (held, shrunk) = (Arc::clone(&cache), Arc::clone(&cache));
    let held = move || ByteSize::of(lock(&held).len() * ENTRY);
    let reclaimable = Reclaimable::new("cache", held, move |wanted| shrink(&shrunk, wanted));
    let _reclaimer = memory.reclaimer(reclaimable)?;
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    let served = runtime.block_on(async {
        let until = Instant::now() + LASTS;
        let clients = (0..CLIENTS).map(|nth| {
            let chance = Chance::new(CLIENTS + nth);
            tokio::spawn(send(memory.clone(), Arc::clone(&cache), chance, until))
        });
        let mut served = 0;
        for client in clients.collect::<Vec<_>>() {
            served += client.await??;
        }
        Ok::<_, BoxError>(served)
    })?;
    let stats = memory.admission().stats();
    let sheds: u64 = RejectReason::ALL.into_iter().map(|why| stats.rejected_total(why)).sum();
    println!("{sheds}\n{served}");
    memory.shutdown_blocking(Duration::from_secs(5)).into_result()?;
    Ok(())
}

/// A request: its bytes, and the keys that it looks up.
#[derive(Clone, Copy, Default)]
struct Ask(usize, [usize; 4]);

/// Sends requests until the time is over. Returns the number served.
async fn send(
    memory: Memory,
    cache: Arc<Cache>,
    mut chance: Chance,
    until: Instant,
) -> Result<u64, Infallible> {
    let ask = |of: &Extensions| of.get::<Ask>().copied().unwrap_or_default();
    let needs =
        move |head: &http::request::Parts| Cost::host(ByteSize::of(ask(&head.extensions).0));
    let handler = tower::service_fn(move |request: Request<_>| {
        let (cache, Ask(bytes, keys)) = (Arc::clone(&cache), ask(request.extensions()));
        async move {
            let work = vec![1_u8; bytes];
            keys.iter().for_each(|key| look_up(&cache, *key));
            sleep(WORK).await;
            let sum = work.iter().step_by(4096).map(|byte| u64::from(*byte)).sum::<u64>();
            Ok::<_, Infallible>(Response::new(Full::<Bytes>::from(sum.to_string())))
        }
    });
    let mut service = MemoryLayer::new(memory.admission().clone(), needs).layer(handler);
    let (mut served, mut sent) = (0, 0_u64);
    while Instant::now() < until {
        sent += 1;
        let times = if sent.is_multiple_of(LARGE_EACH) { LARGE } else { 1 };
        let mut request = Request::new(Empty::<Bytes>::new());
        let keys = std::array::from_fn(|_| chance.below(KEYS));
        request.extensions_mut().insert(Ask(REQUEST * times, keys));
        let response = service.ready().await?.call(request).await?;
        if response.status() == StatusCode::OK {
            served += 1;
        } else {
            sleep(WORK).await;
        }
    }
    Ok(served)
}
