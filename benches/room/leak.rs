//! A service that leaks: the time until it serves again under the policy `exit`, and what it serves
//! under `serve-one`.
//!
//! The service is a process of its own with a limit of [`LIMIT`], in real time. Memory leaks on
//! a path outside the memory layer, so that no request owns it. Clients send requests all the time;
//! they are in this process, which restarts the service as a supervisor does, at once and if it
//! fails.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use axum::Router;
use axum::extract::Path;
use axum::routing::post;
use bytes::Bytes;
use http::{Request, StatusCode};
use lowtide::clock::{Clock, Moment, SystemClock};
use lowtide::{BoxError, ByteSize, Memory};
use tokio::runtime::Runtime;
use tokio::task::JoinHandle;
use tokio::time::sleep;

use crate::common::figures::Figures;
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
pub(crate) fn measure(figures: &mut Figures) -> Result<(), BoxError> {
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    for (policy, name) in [("exit", "room.leak.exit_s"), ("exit:0s", "room.leak.exit_old_s")] {
        let took = measure_exit(&runtime, policy)?;
        figures.at_most(name, took.as_secs_f64(), "s", EXIT_MOST.as_secs_f64());
    }
    measure_serve_one(&runtime, figures)
}

/// Returns the time from the first request rejected as exhausted, or from the end of the process if
/// none was, to the next one that is served. With a minimum uptime of zero it is that of a process
/// that is old enough.
fn measure_exit(runtime: &Runtime, policy: &str) -> Result<Duration, BoxError> {
    let mut service = Service::start(policy)?;
    let load = Load::start(runtime, service.address);
    runtime.block_on(service.leak_to(LEAKED))?;
    let mut codes = Vec::new();
    let (exhausted, served) = loop {
        if let Some(times) = load.seen().times() {
            break times;
        }
        if load.clock.now() > Moment::ORIGIN + PATIENCE {
            return Err("it does not serve again".into());
        }
        if let Some(status) = service.process.ended() {
            codes.push(status.code());
            if status.success() {
                return Err("it ended without a failure: no supervisor restarts it".into());
            }
            // One that is old enough may end before it rejects a request as exhausted.
            let now = load.clock.now();
            load.seen().exhausted.get_or_insert(now);
            service = Service::start(policy)?;
            load.seen().address = service.address;
        }
        runtime.block_on(async { sleep(Duration::from_millis(5)).await });
    };
    load.end(runtime)?;
    let took = served - exhausted;
    let after = exhausted.since_origin();
    println!("{policy}: exhausted {after:.1?} after the start, exit codes {codes:?}");
    Ok(took)
}

/// Adds the goodput without a leak and at each, in MiB per second; at the largest it must be above 0.
fn measure_serve_one(runtime: &Runtime, figures: &mut Figures) -> Result<(), BoxError> {
    let service = Service::start("serve-one")?;
    let load = Load::start(runtime, service.address);
    let mut goodput = 0.0;
    for part in [0.0].into_iter().chain(PARTS) {
        let outcome = runtime.block_on(async {
            service.leak_to(part).await?;
            // Until it is exhausted: requests were rejected for some seconds.
            let began = load.clock.now();
            while part > 0.0 && !service.memory().await?.exhausted {
                if load.clock.now() - began > PATIENCE {
                    return Err("it is not exhausted".into());
                }
                sleep(PAUSE).await;
            }
            let (before, began) = (load.served.load(Ordering::Relaxed), load.clock.now());
            let (mut peak, mut looks, mut ready) = (ByteSize::ZERO, 0_u32, 0_u32);
            while load.clock.now() - began < MEASURED_FOR {
                peak = peak.max(service.memory().await?.physical);
                ready += u32::from(service.is_ready().await);
                looks += 1;
                sleep(Duration::from_millis(100)).await;
            }
            let served = load.served.load(Ordering::Relaxed) - before;
            let seconds = (load.clock.now() - began).as_secs_f64();
            let required = service.memory().await?.required;
            Ok::<_, BoxError>((served, seconds, peak, ready, looks, required))
        })?;
        let (served, seconds, peak, ready, looks, required) = outcome;
        let of_limit = |bytes: ByteSize| 100.0 * bytes.as_f64() / LIMIT.as_f64();
        goodput =
            ByteSize::new(served * BODY as u64).as_f64() / ByteSize::mib(1).as_f64() / seconds;
        println!(
            "serve-one: {goodput:.3} MiB/s at {:.1} % of the limit, {:.1} % at most, ready in \
             {ready} of {looks} looks",
            of_limit(required),
            of_limit(peak)
        );
        let name = if part > 0.0 {
            format!("room.leak.serve_one_{:.0}_mib_s", 100.0 * part)
        } else {
            "room.leak.no_leak_mib_s".to_owned()
        };
        figures.add(name, goodput, "MiB/s");
    }
    load.end(runtime)?;
    figures.at_least("room.leak.serve_one_mib_s", goodput, "MiB/s", f64::MIN_POSITIVE);
    Ok(())
}

/// A service that runs.
struct Service {
    process: Process,
    address: SocketAddr,
    http: Http,
}

/// What the service says of its memory.
struct Said {
    required: ByteSize,
    physical: ByteSize,
    exhausted: bool,
}

impl Service {
    /// Starts this program as the service, and waits until it prints its address.
    fn start(policy: &str) -> Result<Self, BoxError> {
        let mut command = own()?;
        command.arg("serve-leaking").env("LOWTIDE_MEMORY_LIMIT", LIMIT.exact());
        command.env("LOWTIDE_EXHAUSTION_POLICY", policy);
        let mut process = Process::start(command)?;
        let address = process.first_line()?;
        Ok(Self { process, address, http: client() })
    }

    /// Leaks until the process needs this part of its limit.
    async fn leak_to(&self, part: f64) -> Result<(), BoxError> {
        let began = SystemClock::new();
        while self.memory().await?.required < LIMIT.scaled(part) {
            let request = Request::post(self.url(&format!("leak/{LEAK_KIB}")));
            send(&self.http, request, Bytes::new()).await?;
            sleep(LEAK_EVERY).await;
            if began.now() > Moment::ORIGIN + PATIENCE {
                return Err("the leak does not grow".into());
            }
        }
        Ok(())
    }

    async fn memory(&self) -> Result<Said, BoxError> {
        let text = get(&self.http, &self.url("memory")).await?;
        let document: serde_json::Value = serde_json::from_slice(&text)?;
        let host = &document["host"];
        let bytes = |name: &str| host[name].as_u64().map(ByteSize::new).ok_or("no figure");
        Ok(Said {
            required: bytes("required_bytes")?,
            physical: bytes("physical_bytes")?,
            exhausted: host["exhausted"] == true,
        })
    }

    async fn is_ready(&self) -> bool {
        get(&self.http, &self.url("readyz")).await.is_ok()
    }

    fn url(&self, path: &str) -> String {
        format!("http://{}/{path}", self.address)
    }
}

/// Clients that send requests until it ends.
struct Load {
    clock: Arc<SystemClock>,
    seen: Arc<Mutex<Seen>>,
    served: Arc<AtomicU64>,
    is_over: Arc<AtomicBool>,
    clients: Vec<JoinHandle<()>>,
}

/// The service that is asked, and the times of the first request rejected as exhausted and of the
/// first one served after it.
struct Seen {
    address: SocketAddr,
    exhausted: Option<Moment>,
    served: Option<Moment>,
}

impl Seen {
    fn times(&self) -> Option<(Moment, Moment)> {
        self.exhausted.zip(self.served)
    }
}

impl Load {
    fn start(runtime: &Runtime, address: SocketAddr) -> Self {
        let seen = Arc::new(Mutex::new(Seen { address, exhausted: None, served: None }));
        let mut load = Self {
            clock: Arc::new(SystemClock::new()),
            seen,
            served: Arc::default(),
            is_over: Arc::default(),
            clients: Vec::new(),
        };
        load.clients = (0..CLIENTS).map(|_| runtime.spawn(load.client())).collect();
        load
    }

    fn seen(&self) -> std::sync::MutexGuard<'_, Seen> {
        self.seen.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn client(&self) -> impl Future<Output = ()> + use<> {
        let (clock, seen) = (Arc::clone(&self.clock), Arc::clone(&self.seen));
        let (served, is_over) = (Arc::clone(&self.served), Arc::clone(&self.is_over));
        async move {
            let (http, body) = (client(), Bytes::from(vec![1; BODY]));
            let lock = || seen.lock().unwrap_or_else(PoisonError::into_inner);
            while !is_over.load(Ordering::Relaxed) {
                let address = lock().address;
                let request = Request::post(format!("http://{address}/work"));
                let answer = send(&http, request, body.clone()).await;
                let now = clock.now();
                match answer {
                    Ok((StatusCode::OK, _)) => {
                        served.fetch_add(1, Ordering::Relaxed);
                        let mut seen = lock();
                        if seen.exhausted.is_some() {
                            seen.served.get_or_insert(now);
                        }
                        continue;
                    }
                    Ok((_, text)) if text.windows(9).any(|part| part == b"exhausted") => {
                        lock().exhausted.get_or_insert(now);
                    }
                    _ => {}
                }
                sleep(PAUSE).await;
            }
        }
    }

    fn end(self, runtime: &Runtime) -> Result<(), BoxError> {
        self.is_over.store(true, Ordering::Relaxed);
        for client in self.clients {
            runtime.block_on(client)?;
        }
        Ok(())
    }
}
