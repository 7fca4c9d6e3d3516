//! A cache of 80 % of the limit, and a load of requests for which it leaves no room.
//!
//! The service is a process of its own in a memory cgroup, or, where none can be made, under
//! `LOWTIDE_MEMORY_LIMIT`. It fills its cache, registers it as a reclaimer, and then sends itself
//! requests through the tower layer. A request allocates what it announces, and looks up entries,
//! so that the cache grows again. It runs once more without the reclaimer, for comparison.
//!
//! Invariant: every rejection counts, since the cache holds more than any request needs when its
//! load begins, and shrinks only for requests.

use std::collections::{BTreeMap, VecDeque};
use std::convert::Infallible;
use std::fmt;
use std::io::Read as _;
use std::os::unix::process::ExitStatusExt as _;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use clap::Args;
use http::{Request, Response, StatusCode};
use http_body_util::{Empty, Full};
use lowtide::admission::{Cost, Reclaimable, RejectReason};
use lowtide::clock::{Clock as _, Moment, SystemClock};
use lowtide::service::MemoryLayer;
use lowtide::{BoxError, ByteSize, Memory};
use tower::{Service as _, ServiceBuilder, ServiceExt as _};

use crate::common::own;
use crate::common::process::Process;

/// The limit of the service.
const LIMIT: ByteSize = ByteSize::mib(256);
/// The part of it that the cache fills.
const FILLED: f64 = 0.8;
/// An entry of the cache.
const ENTRY: usize = 64 << 10;
/// The clients, and what each of their requests needs.
const CLIENTS: u64 = 8;
const REQUEST: ByteSize = ByteSize::mib(4);
/// Every so many requests of a client one needs so many times as much.
const LARGE_EACH: u64 = 20;
const LARGE: u64 = 6;
/// The time for which a request holds its memory.
const WORK: Duration = Duration::from_millis(20);
/// The lookups of a request.
const LOOKUPS: u64 = 4;

#[derive(Debug, Clone, Args)]
pub(crate) struct Arguments {
    /// The seconds of load.
    #[arg(long, default_value_t = 20)]
    seconds: u64,
    /// The seed of the lookups.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Is the service.
    #[arg(long, hide = true)]
    serve: bool,
    /// Does not register the cache.
    #[arg(long, hide = true)]
    unregistered: bool,
}

/// Runs the service with and without its reclaimer, and prints the figures. Returns `true` if every
/// goal held.
pub(crate) fn measure(arguments: &Arguments) -> Result<bool, BoxError> {
    if arguments.serve {
        return serve(arguments).map(|()| true);
    }
    println!("seed {}", arguments.seed);
    println!("not registered: {}", run(arguments, false)?);
    let with = run(arguments, true)?;
    println!("registered: {with}");
    println!("figure room.cache.requests {} requests", with.served);
    println!("figure room.cache.kills {} kills", with.kills);
    println!("figure room.cache.sheds {} requests", with.sheds);
    Ok(with.kills == 0 && with.sheds == 0 && with.served > 0)
}

/// What came of a run.
#[derive(Debug, Default)]
struct Outcome {
    served: u64,
    sheds: u64,
    kills: u64,
    /// Calls of the reclaimer, and MiB that it released.
    calls: u64,
    released_mib: u64,
    /// MiB of the cache at the end.
    cache_mib: u64,
    /// The longest time of a request in milliseconds, waits included.
    longest_ms: u64,
}

impl fmt::Display for Outcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { served, sheds, kills, calls, released_mib, cache_mib, longest_ms } = self;
        write!(
            f,
            "{served} served, {sheds} rejected, {kills} kills, longest {longest_ms} ms; \
             {released_mib} MiB released in {calls} calls, {cache_mib} MiB left"
        )
    }
}

fn run(arguments: &Arguments, is_registered: bool) -> Result<Outcome, BoxError> {
    let mut command = own()?;
    command.args(["cache", "--serve", "--seconds", &arguments.seconds.to_string()]);
    command.args(["--seed", &arguments.seed.to_string()]);
    command.args((!is_registered).then_some("--unregistered"));
    let mut service = Process::start_in_group(&command, LIMIT)?;
    if service.folder().is_none() {
        println!("no cgroup can be made here, so nothing can be killed");
    }
    let (mut text, output) = (String::new(), service.child.stdout.take());
    output.ok_or("no output")?.read_to_string(&mut text)?;
    if service.child.wait()?.signal() == Some(9) {
        return Ok(Outcome { kills: 1, ..Outcome::default() });
    }
    let numbers = text.split_whitespace().map(str::parse).collect::<Result<Vec<u64>, _>>()?;
    let [served, sheds, calls, released_mib, cache_mib, longest_ms] = numbers[..] else {
        return Err(format!("unexpected output of the service: {text:?}").into());
    };
    Ok(Outcome { served, sheds, kills: 0, calls, released_mib, cache_mib, longest_ms })
}

/// Entries by key, and their keys in the order of insertion.
type Entries = (BTreeMap<u64, Vec<u8>>, VecDeque<u64>);

#[derive(Debug, Default)]
struct Cache {
    entries: Mutex<Entries>,
    bytes: AtomicU64,
}

impl Cache {
    fn bytes(&self) -> ByteSize {
        ByteSize::new(self.bytes.load(Ordering::Relaxed))
    }

    /// Looks an entry up, and inserts it if it is missing.
    fn look_up(&self, key: u64, most: ByteSize) {
        let mut entries = self.entries.lock().unwrap_or_else(PoisonError::into_inner);
        let (map, order) = &mut *entries;
        if map.contains_key(&key) || self.bytes() >= most {
            return;
        }
        map.insert(key, vec![1; ENTRY]);
        order.push_back(key);
        self.bytes.fetch_add(ENTRY as u64, Ordering::Relaxed);
    }

    fn shrink(&self, wanted: ByteSize) -> ByteSize {
        let mut released = ByteSize::ZERO;
        let mut entries = self.entries.lock().unwrap_or_else(PoisonError::into_inner);
        let (map, order) = &mut *entries;
        while released < wanted
            && let Some(key) = order.pop_front()
        {
            let bytes = map.remove(&key).map_or(0, |entry| entry.len() as u64);
            self.bytes.fetch_sub(bytes, Ordering::Relaxed);
            released = released.saturating_add(ByteSize::new(bytes));
        }
        released
    }
}

/// Is the service, and prints what came of it.
fn serve(arguments: &Arguments) -> Result<(), BoxError> {
    let memory = Memory::start()?;
    let mut watch = memory.admission().watch_level();
    let (cache, most) = (Arc::new(Cache::default()), LIMIT.scaled(FILLED));
    let keys = most.get() / ENTRY as u64 * 5 / 4;
    let mut fills = 0..;
    while cache.bytes() < most {
        cache.look_up(fills.next().unwrap_or_default(), most);
    }
    // An idle service samples every 250 ms, and this took less.
    watch.wait_for_change(Duration::from_secs(5)).ok_or("the level does not rise")?;
    let (held, shrunk) = (Arc::clone(&cache), Arc::clone(&cache));
    let reclaimable =
        Reclaimable::new("cache", move || held.bytes(), move |wanted| shrunk.shrink(wanted));
    let reclaimer =
        if arguments.unregistered { None } else { Some(memory.reclaimer(reclaimable)?) };
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    let clock = SystemClock::new();
    let until = clock.now() + Duration::from_secs(arguments.seconds);
    let load = async {
        let clients = (0..CLIENTS).map(|nth| {
            let seed = arguments.seed.wrapping_mul(CLIENTS).wrapping_add(nth);
            tokio::spawn(send(
                memory.clone(),
                Arc::clone(&cache),
                keys,
                seed,
                (clock.clone(), until),
            ))
        });
        let clients: Vec<_> = clients.collect();
        let (mut served, mut longest) = (0, Duration::ZERO);
        for client in clients {
            let (of_client, longest_of_client) = client.await??;
            served += of_client;
            longest = longest.max(longest_of_client);
        }
        Ok::<_, BoxError>((served, longest))
    };
    let (served, longest) = runtime.block_on(load)?;
    let stats = memory.admission().stats();
    let sheds: u64 = RejectReason::ALL.into_iter().map(|why| stats.rejected_total(why)).sum();
    let (calls, released) = reclaimer.map_or((0, 0), |reclaimer| {
        let stats = reclaimer.stats();
        (stats.calls_total, stats.released_total.get() >> 20)
    });
    let cache_mib = cache.bytes().get() >> 20;
    println!("{served} {sheds} {calls} {released} {cache_mib} {}", longest.as_millis());
    memory.shutdown_blocking(Duration::from_secs(5)).into_result()?;
    Ok(())
}

/// Sends requests until the time is over. Returns the number served, and the longest time of one.
async fn send(
    memory: Memory,
    cache: Arc<Cache>,
    keys: u64,
    mut seed: u64,
    (clock, until): (SystemClock, Moment),
) -> Result<(u64, Duration), Infallible> {
    let needs = |head: &http::request::Parts| {
        let bytes = head.extensions.get::<ByteSize>().copied().unwrap_or(REQUEST);
        Cost::host(bytes)
    };
    let handler = tower::service_fn(move |request: Request<_>| {
        let cache = Arc::clone(&cache);
        let bytes = request.extensions().get::<ByteSize>().copied().unwrap_or(REQUEST);
        let mut random = request.extensions().get::<u64>().copied().unwrap_or(1);
        async move {
            let work = vec![1_u8; bytes.as_usize().unwrap_or(0)];
            for _ in 0..LOOKUPS {
                cache.look_up(next(&mut random) % keys, LIMIT.scaled(FILLED));
            }
            tokio::time::sleep(WORK).await;
            let sum = work.iter().step_by(4096).map(|byte| u64::from(*byte)).sum::<u64>();
            Ok::<_, Infallible>(Response::new(Full::<bytes::Bytes>::from(sum.to_string())))
        }
    });
    let mut service = ServiceBuilder::new()
        .layer(MemoryLayer::new(memory.admission().clone(), needs))
        .service(handler);
    let (mut served, mut longest) = (0, Duration::ZERO);
    let mut sent: u64 = 0;
    while clock.now() < until {
        sent += 1;
        let times = if sent.is_multiple_of(LARGE_EACH) { LARGE } else { 1 };
        let mut request = Request::new(Empty::<bytes::Bytes>::new());
        request.extensions_mut().insert(ByteSize::new(REQUEST.get() * times));
        request.extensions_mut().insert(next(&mut seed));
        let start = clock.now();
        let response = service.ready().await?.call(request).await?;
        let is_served = response.status() == StatusCode::OK;
        served += u64::from(is_served);
        longest = longest.max(clock.now() - start);
        if !is_served {
            tokio::time::sleep(WORK).await;
        }
    }
    Ok((served, longest))
}

/// Marsaglia's xorshift, of a state that is not zero.
fn next(state: &mut u64) -> u64 {
    *state |= 1;
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    *state
}
