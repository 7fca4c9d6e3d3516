//! A service that leaks: the time until it serves again under the policy `exit`, and what it serves
//! under `serve-one`.
//!
//! The service is a process of its own with a limit of [`LIMIT`], in real time. Memory leaks on
//! a path outside the memory layer, so that no request owns it. Clients send requests all the time;
//! they are in this process, which restarts the service as a supervisor does, at once and if it
//! fails.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

use axum::Router;
use axum::extract::Path;
use axum::routing::post;
use bytes::Bytes;
use common::figures::Figures;
use common::http::{Http, client, get_json, send};
use common::own;
use common::process::Process;
use http::{Request, StatusCode};
use lowtide::{BoxError, ByteSize, Memory};
use lowtide_core::sync::lock;
use serde_json::Value;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, timeout};

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
const PARTS: [f64; 3] = [0.86, 0.90, 0.92];
const MEASURED_FOR: Duration = Duration::from_secs(10);
/// The longest accepted time without service.
const EXIT_MOST: Duration = Duration::from_secs(120);
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
    Ok(memory.shutdown(Duration::from_secs(5)).await.into_result()?)
}

/// Runs both policies and adds their figures.
#[tokio::main]
pub(crate) async fn measure(figures: &mut Figures) -> Result<(), BoxError> {
    for (policy, name) in [("exit", "room.leak.exit_s"), ("exit:0s", "room.leak.exit_old_s")] {
        let took = timeout(PATIENCE, measure_exit(policy)).await??;
        figures.at_most(name, took.as_secs_f64(), "s", EXIT_MOST.as_secs_f64());
    }
    measure_serve_one(figures).await
}

/// Returns the time from the first request rejected as exhausted, or from the end of the process if
/// none was, to the next one that is served. With a minimum uptime of zero it is that of a process
/// that is old enough.
async fn measure_exit(policy: &str) -> Result<Duration, BoxError> {
    let mut service = Service::start(policy)?;
    let (load, _clients) = Load::start(service.address);
    service.leak_to(LEAKED).await?;
    loop {
        if let Some((exhausted, served)) = load.exhausted.get().zip(load.served_again.get()) {
            return Ok(*served - *exhausted);
        }
        if let Some(status) = service.process.ended() {
            if status.success() {
                return Err("it ended without a failure: no supervisor restarts it".into());
            }
            // One that is old enough may end before it rejects a request as exhausted.
            load.exhausted.get_or_init(Instant::now);
            service = Service::start(policy)?;
            *lock(&load.address) = service.address;
        }
        sleep(Duration::from_millis(5)).await;
    }
}

/// Adds the goodput without a leak and at each, in MiB per second; at the largest it must be above 0.
async fn measure_serve_one(figures: &mut Figures) -> Result<(), BoxError> {
    let service = Service::start("serve-one")?;
    let (load, _clients) = Load::start(service.address);
    let mut goodput = 0.0;
    for part in [0.0].into_iter().chain(PARTS) {
        timeout(PATIENCE, service.leak_to(part)).await??;
        let exhausted = async {
            // Requests were rejected for some seconds.
            while part > 0.0 && service.host().await?["exhausted"] != true {
                sleep(PAUSE).await;
            }
            Ok::<_, BoxError>(())
        };
        timeout(PATIENCE, exhausted).await??;
        let (before, began) = (load.served.load(Ordering::Relaxed), Instant::now());
        sleep(MEASURED_FOR).await;
        let served = load.served.load(Ordering::Relaxed) - before;
        let mib = ByteSize::new(served * BODY as u64).as_f64() / ByteSize::mib(1).as_f64();
        goodput = mib / began.elapsed().as_secs_f64();
        let name = if part > 0.0 {
            format!("room.leak.serve_one_{:.0}_mib_s", 100.0 * part)
        } else {
            "room.leak.no_leak_mib_s".to_owned()
        };
        figures.add(name, goodput, "MiB/s");
    }
    figures.at_least("room.leak.serve_one_mib_s", goodput, "MiB/s", f64::MIN_POSITIVE);
    Ok(())
}

/// A service that runs.
struct Service {
    process: Process,
    address: SocketAddr,
    http: Http,
}

impl Service {
    /// Starts this program as the service, and waits until it prints its address.
    fn start(policy: &str) -> Result<Self, BoxError> {
        let mut command = own(&["serve", "leak"])?;
        command.env("LOWTIDE_MEMORY_LIMIT", LIMIT.exact());
        command.env("LOWTIDE_EXHAUSTION_POLICY", policy);
        let mut process = Process::start(command)?;
        let address = process.first_line()?;
        Ok(Self { process, address, http: client() })
    }

    /// Leaks until the process needs this part of its limit.
    async fn leak_to(&self, part: f64) -> Result<(), BoxError> {
        let url = format!("http://{}/leak/{LEAK_KIB}", self.address);
        while self.host().await?["required_bytes"].as_u64().ok_or("no figure")?
            < LIMIT.scaled(part).get()
        {
            send(&self.http, Request::post(&url), Bytes::new()).await?;
            sleep(LEAK_EVERY).await;
        }
        Ok(())
    }

    /// Returns what it says of its memory.
    async fn host(&self) -> Result<Value, BoxError> {
        let url = format!("http://{}/memory", self.address);
        Ok(get_json(&self.http, &url).await?["host"].take())
    }
}

/// The load: the service that is asked, the requests served, the time of the first one rejected as
/// exhausted, and of the first one served after it.
struct Load {
    address: Mutex<SocketAddr>,
    served: AtomicU64,
    exhausted: OnceLock<Instant>,
    served_again: OnceLock<Instant>,
}

impl Load {
    /// Starts clients, which end with the second value.
    fn start(address: SocketAddr) -> (Arc<Self>, JoinSet<()>) {
        let (served, exhausted, served_again) = Default::default();
        let load = Arc::new(Self { address: Mutex::new(address), served, exhausted, served_again });
        let clients = (0..CLIENTS).map(|_| Arc::clone(&load).send()).collect();
        (load, clients)
    }

    async fn send(self: Arc<Self>) {
        let (http, body) = (client(), Bytes::from(vec![1; BODY]));
        loop {
            let address = *lock(&self.address);
            let request = Request::post(format!("http://{address}/work"));
            match send(&http, request, body.clone()).await {
                Ok((StatusCode::OK, _)) => {
                    self.served.fetch_add(1, Ordering::Relaxed);
                    if self.exhausted.get().is_some() {
                        self.served_again.get_or_init(Instant::now);
                    }
                    continue;
                }
                Ok((_, text)) if text.windows(9).any(|part| part == b"exhausted") => {
                    self.exhausted.get_or_init(Instant::now);
                }
                _ => {}
            }
            sleep(PAUSE).await;
        }
    }
}
