//! A service that leaks: the time until it serves again under the policy `exit`, and what it serves
//! under `serve-one`.
//!
//! The service is a process of its own with a limit of [`LIMIT`], in real time. Memory leaks on
//! a path outside the memory layer, so that no request owns it. Clients send requests all the time;
//! they are in this process, which restarts the service as a supervisor does, at once and if it
//! fails.

use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use axum::Router;
use axum::extract::Path;
use axum::routing::post;
use bytes::Bytes;
use http::{Request, StatusCode};
use lowtide::{BoxError, ByteSize, Memory};
use lowtide_core::sync::lock;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, timeout};

use crate::common::figures::{Figures, count};
use crate::common::http::{Http, client, get, send};
use crate::common::own;
use crate::common::process::Process;

/// The limit of the service.
const LIMIT: ByteSize = ByteSize::mib(128);
/// The bytes of a request, which its handler copies and holds for [`WORK`].
const BODY: usize = 64 << 10;
const WORK: Duration = Duration::from_millis(5);
const CLIENTS: usize = 4;
/// Before a client that was rejected sends again.
const PAUSE: Duration = Duration::from_millis(20);
/// One leak.
const LEAK_KIB: u64 = 128;
const LEAK_EVERY: Duration = Duration::from_millis(10);
/// The part of the limit to which memory leaks under `exit`.
const LEAKED: f64 = 0.86;
/// The parts of the limit at which the goodput under `serve-one` is measured, and for how long.
const PARTS: [(f64, &str); 4] = [
    (0.0, "no_leak_mib_s"),
    (0.86, "serve_one_86_mib_s"),
    (0.90, "serve_one_90_mib_s"),
    (0.92, "serve_one_92_mib_s"),
];
const MEASURED_FOR: Duration = Duration::from_secs(10);
/// The longest accepted seconds without service.
const EXIT_MOST: f64 = 120.0;
/// A bench that takes longer has failed.
const PATIENCE: Duration = Duration::from_secs(240);

/// The service: it leaks what it is asked to leak.
#[tokio::main]
pub(crate) async fn serve() -> Result<(), BoxError> {
    let memory = Memory::start()?;
    let work = |body: Bytes| async move {
        let copy = body.to_vec();
        sleep(WORK).await;
        if copy == body { StatusCode::OK } else { StatusCode::BAD_REQUEST }
    };
    let leak = |Path(kib): Path<usize>| async move {
        let _: &mut [u8] = vec![1; kib << 10].leak();
    };
    let routes = Router::new()
        .route("/work", post(work))
        .layer(memory.layer())
        .route("/leak/{kib}", post(leak))
        .merge(memory.routes());
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await?;
    println!("{}", listener.local_addr()?);
    axum::serve(listener, routes).with_graceful_shutdown(memory.terminated()?).await?;
    Ok(memory.shutdown_async(Duration::from_secs(5)).await.into_result()?)
}

/// Runs both policies and adds their figures.
#[tokio::main]
pub(crate) async fn measure(figures: &mut Figures) -> Result<(), BoxError> {
    for (policy, figure) in [("exit", "exit_s"), ("exit:0s", "exit_old_s")] {
        let took = timeout(PATIENCE, exit(policy)).await??;
        figures.at_most(format!("room.leak.{figure}"), took.as_secs_f64(), "s", EXIT_MOST);
    }
    serve_one(figures).await
}

/// Returns the time from the first request rejected as exhausted, or from the end of the process if
/// none was, to the next one that is served. With a minimum uptime of zero it is that of a process
/// that is old enough.
async fn exit(policy: &str) -> Result<Duration, BoxError> {
    let (mut service, mut address) = start(policy)?;
    let seen = Arc::new(Mutex::new(Seen { address, served: 0, exhausted: None, again: None }));
    let _load = load(&seen);
    let http = client();
    loop {
        // What requests hold comes and goes, so it leaks on until it is exhausted.
        let is_leaking = lock(&seen).exhausted.is_none();
        if is_leaking {
            let _ = leak_to(&http, address, LEAKED).await;
        }
        let times = (lock(&seen).exhausted, lock(&seen).again);
        if let (Some(exhausted), Some(again)) = times {
            return Ok(again - exhausted);
        }
        if let Some(status) = service.ended() {
            if status.success() {
                return Err("it ended without a failure: no supervisor restarts it".into());
            }
            // One that is old enough may end before it rejects a request as exhausted.
            lock(&seen).exhausted.get_or_insert_with(Instant::now);
            (service, address) = start(policy)?;
            lock(&seen).address = address;
        }
        sleep(Duration::from_millis(5)).await;
    }
}

/// Adds the goodput at each leak, in MiB per second.
async fn serve_one(figures: &mut Figures) -> Result<(), BoxError> {
    let (_service, address) = start("serve-one")?;
    let seen = Arc::new(Mutex::new(Seen { address, served: 0, exhausted: None, again: None }));
    let _load = load(&seen);
    let (http, mut goodput) = (client(), 0.0);
    for (part, figure) in PARTS {
        let exhausted = async {
            leak_to(&http, address, part).await?;
            // Requests were rejected for some seconds.
            while part > 0.0 && host(&http, address).await?["exhausted"] != true {
                sleep(PAUSE).await;
            }
            Ok::<_, BoxError>(())
        };
        timeout(PATIENCE, exhausted).await??;
        let before = lock(&seen).served;
        sleep(MEASURED_FOR).await;
        let served = ByteSize::of(BODY).as_f64() * count(lock(&seen).served - before);
        goodput = served / ByteSize::mib(1).as_f64() / MEASURED_FOR.as_secs_f64();
        figures.add(format!("room.leak.{figure}"), goodput, "MiB/s");
    }
    figures.at_least("room.leak.serve_one_mib_s", goodput, "MiB/s", 0.001);
    Ok(())
}

/// Starts this program as the service, and waits until it prints its address.
fn start(policy: &str) -> Result<(Process, SocketAddr), BoxError> {
    let mut command = own()?;
    command.arg("serve-leaking").env("LOWTIDE_MEMORY_LIMIT", LIMIT.exact());
    command.env("LOWTIDE_EXHAUSTION_POLICY", policy);
    let mut process = Process::start(command)?;
    let address = process.first_line()?;
    Ok((process, address))
}

/// Leaks until the process needs this part of its limit. New connections would need some of it.
async fn leak_to(http: &Http, address: SocketAddr, part: f64) -> Result<(), BoxError> {
    while host(http, address).await?["required_bytes"].as_f64().ok_or("no figure")?
        < LIMIT.as_f64() * part
    {
        let request = Request::post(format!("http://{address}/leak/{LEAK_KIB}"));
        send(http, request, Bytes::new()).await?;
        sleep(LEAK_EVERY).await;
    }
    Ok(())
}

/// Returns the service's figures of the host.
async fn host(http: &Http, address: SocketAddr) -> Result<serde_json::Value, BoxError> {
    let text = get(http, &format!("http://{address}/memory")).await?;
    Ok(serde_json::from_slice::<serde_json::Value>(&text)?["host"].take())
}

/// The service that is asked, and the times of the first request rejected as exhausted and of the
/// first one served after it.
struct Seen {
    address: SocketAddr,
    served: u64,
    exhausted: Option<Instant>,
    again: Option<Instant>,
}

/// Starts clients, which end with the returned value.
fn load(seen: &Arc<Mutex<Seen>>) -> JoinSet<()> {
    let clients = (0..CLIENTS).map(|_| {
        let seen = Arc::clone(seen);
        async move {
            let (http, body) = (client(), Bytes::from(vec![1; BODY]));
            loop {
                let address = lock(&seen).address;
                let request = Request::post(format!("http://{address}/work"));
                match send(&http, request, body.clone()).await {
                    Ok((StatusCode::OK, _)) => {
                        let mut seen = lock(&seen);
                        seen.served += 1;
                        if seen.exhausted.is_some() {
                            seen.again.get_or_insert_with(Instant::now);
                        }
                        continue;
                    }
                    Ok((_, text)) if text.windows(9).any(|part| part == b"exhausted") => {
                        lock(&seen).exhausted.get_or_insert_with(Instant::now);
                    }
                    _ => {}
                }
                sleep(PAUSE).await;
            }
        }
    });
    clients.collect()
}
