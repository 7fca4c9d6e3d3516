//! The service of the README under bodies that need several times their length: how often the
//! kernel kills it.
//!
//! Each run is a process of its own in a memory cgroup of 256 MiB; the clients are outside. The
//! handler keeps the parsed value across a wait, as one does that asks another service. A process
//! that survives by refusing everything shows in the numbers of requests that were served.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use axum::extract::DefaultBodyLimit;
use axum::{Json, Router, routing::post};
use bytes::Bytes;
use http::{Request, StatusCode};
use lowtide::service::{ContentLength, MemoryLayer};
use lowtide::{BoxError, ByteSize, Memory};
use serde_json::{Value, json};
use tokio::runtime::Runtime;
use tokio::time::{Instant, sleep, timeout_at};

use crate::common::http::{Http, client, send};
use crate::{Cli, start};

const RUNS: u32 = 20;
/// The numbers with `--ci`: of ordinary bodies, and of each kind that is made large on purpose.
const SAMPLE_RUNS: (u32, u32) = (5, 1);
/// The time for which the clients send.
const LOAD: Duration = Duration::from_secs(5);
const BIG_CLIENTS: usize = 12;
const SMALL_CLIENTS: usize = 20;
const BIG: usize = 5 << 20;
const SMALL: usize = 2 << 10;
/// The length of a body of small objects, which need 89 times that: less than the limit.
const OBJECTS: usize = 1 << 20;
/// Between two requests of a small client, and before one that was refused is sent again.
const PAUSE: Duration = Duration::from_millis(50);
/// The time for which the handler waits with the value in its hands.
const WORK: Duration = Duration::from_millis(50);
/// The name of this part.
const PART: &str = "readme";

pub(crate) fn run(cli: &Cli) -> Result<(), BoxError> {
    crate::stage(cli, serve, measure)
}

fn measure(runtime: &Runtime, is_sample: bool) -> Result<(), BoxError> {
    let (runs, hostile_runs) = if is_sample { SAMPLE_RUNS } else { (RUNS, RUNS) };
    let ordinary = stage(runtime, runs, &ordinary(BIG))?;
    println!("figure faults.readme.runs {runs} runs");
    println!("figure faults.readme.kills {} runs", ordinary.kills);
    println!("figure faults.readme.big_served {} requests/run", median(ordinary.big));
    println!("figure faults.readme.small_served {} requests/run", median(ordinary.small));
    println!("figure faults.readme.small_refused {} requests/run", median(ordinary.small_refused));
    let ones = format!("[{}1]", "1,".repeat(BIG / 2 - 1));
    let hostile = stage(runtime, hostile_runs, &ones.into())?;
    println!("figure faults.readme.hostile_runs {hostile_runs} runs");
    println!("figure faults.readme.hostile_kills {} runs", hostile.kills);
    println!("figure faults.readme.hostile_small_served {} requests/run", median(hostile.small));
    let object = r#"{"a":1},"#;
    let objects = format!("[{}0]", object.repeat(OBJECTS / object.len()));
    let objects = stage(runtime, hostile_runs, &objects.into())?;
    println!("figure faults.readme.objects_runs {hostile_runs} runs");
    println!("figure faults.readme.objects_kills {} runs", objects.kills);
    println!("figure faults.readme.objects_small_served {} requests/run", median(objects.small));
    let kills = [ordinary.kills, hostile.kills, objects.kills];
    match kills {
        [0, 0, 0] => Ok(()),
        kills => Err(format!("killed, of each kind of body: {kills:?} runs").into()),
    }
}

/// Objects as services exchange them, of about these many bytes.
fn ordinary(bytes: usize) -> Bytes {
    let mut text = String::from("[");
    for id in 0.. {
        let user = json!({
            "id": id,
            "name": format!("user {id}"),
            "email": format!("user{id}@example.com"),
            "active": id % 3 == 0,
            "score": 0.25,
            "tags": ["one", "two"],
        });
        text.push_str(&user.to_string());
        if text.len() >= bytes {
            break;
        }
        text.push(',');
    }
    text.push(']');
    text.into()
}

#[derive(Default)]
struct Outcome {
    kills: u64,
    big: Vec<u64>,
    small: Vec<u64>,
    small_refused: Vec<u64>,
}

fn median(mut of: Vec<u64>) -> u64 {
    of.sort_unstable();
    of.get(of.len() / 2).copied().unwrap_or(0)
}

/// Runs the service so many times, under clients of this big body and of small ones.
fn stage(runtime: &Runtime, runs: u32, big: &Bytes) -> Result<Outcome, BoxError> {
    let mut outcome = Outcome::default();
    for _ in 0..runs {
        let (service, address) = start(PART)?;
        let served = runtime.block_on(load(address, big.clone()));
        outcome.kills += service.end();
        for (all, one) in [&mut outcome.big, &mut outcome.small, &mut outcome.small_refused]
            .into_iter()
            .zip(served)
        {
            all.push(one);
        }
    }
    Ok(outcome)
}

/// Requests served to big clients and to small ones, and small ones refused.
async fn load(address: SocketAddr, big: Bytes) -> [u64; 3] {
    let client = client();
    let counts: Arc<[AtomicU64; 4]> = Arc::default();
    let end = Instant::now() + LOAD;
    let small = ordinary(SMALL);
    let big = (0..BIG_CLIENTS).map(|_| (big.clone(), 0));
    let all = big.chain((0..SMALL_CLIENTS).map(|_| (small.clone(), 1)));
    let clients: Vec<_> = all
        .map(|(body, place)| {
            let ask = ask(client.clone(), address, body, Arc::clone(&counts), place);
            tokio::spawn(timeout_at(end, ask))
        })
        .collect();
    for client in clients {
        let _ = client.await;
    }
    [0, 1, 3].map(|at| counts[at].load(Ordering::Relaxed))
}

/// Sends the body again and again; counts what was served at `place`, and what was refused two
/// places on.
async fn ask(
    client: Http,
    address: SocketAddr,
    body: Bytes,
    counts: Arc<[AtomicU64; 4]>,
    place: usize,
) {
    loop {
        let request = Request::post(format!("http://{address}/json"));
        let request = request.header("content-type", "application/json");
        let mut served = false;
        if let Ok((status, _)) = send(&client, request, body.clone()).await {
            served = status == StatusCode::OK;
            counts[if served { place } else { place + 2 }].fetch_add(1, Ordering::Relaxed);
        }
        if !served || place == 1 {
            sleep(PAUSE).await;
        }
    }
}

/// The README's service, with a handler for JSON in place of one for text.
#[tokio::main]
async fn serve() -> Result<(), BoxError> {
    let memory = Memory::builder().start()?;
    let estimate = ContentLength::new(ByteSize::mib(2)).factor(2.0).least(ByteSize::kib(16));
    let parse = |Json(value): Json<Value>| async move {
        sleep(WORK).await;
        value.as_array().map_or(0, Vec::len).to_string()
    };
    let routes = Router::new()
        .route("/json", post(parse))
        .layer(MemoryLayer::new(memory.admission().clone(), estimate))
        .layer(DefaultBodyLimit::max(2 * BIG));
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await?;
    println!("{}", listener.local_addr()?);
    Ok(axum::serve(listener, routes).await?)
}
