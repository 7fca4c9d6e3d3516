//! The service under load, in a process of its own: the proxy under one policy.
//!
//! The policies differ in what admits a request and in nothing else: one binary, the same settings
//! of jemalloc at start, the same proxy and text service behind it. It judges nothing; what it saw
//! it says at `/report`, at the text service's own address, beside all admission. It ends when its
//! standard input does.

use std::net::Ipv4Addr;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use axum::http::request::Parts;
use axum::middleware::from_fn;
use axum::routing::get;
use axum::{Json, Router};
use lowtide::config::Config;
use lowtide::decay::DecayTime;
use lowtide::device::DeviceArena;
use lowtide::memory::Builder;
use lowtide::metrics::prometheus;
use lowtide::service::MemoryLayer;
use lowtide::{BoxError, ByteSize, Memory};
use lowtide_admission::{Admission, Budget, Cost, RejectReason};
use lowtide_cuda_sim::{DriverCosts, Order, SimDriver, SimOptions};
use serde::{Deserialize, Serialize};
use tokio::net::TcpListener;
use tokio::sync::watch;

use crate::app::{self, FORWARD_COST};
use crate::books::Books;
use crate::hold::{self, Unplaced};
use crate::policy::Policy;
use crate::watch::Watch;
use crate::{envoy, gates, mix};

/// The settings of the service.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Settings {
    /// The name of what admits.
    pub(crate) policy: String,
    /// The factor by which estimates from the body's length are multiplied, to make them wrong; 0
    /// if the service gives none.
    pub(crate) estimate: f64,
    /// The limit of the cgroup.
    pub(crate) limit_bytes: u64,
    /// Open connections of the proxy at most.
    pub(crate) connections: usize,
    /// The limit of the simulated device that holds the second copy; `None` if it lies on the host.
    pub(crate) device_bytes: Option<u64>,
    /// `true` if a request holds its body once, and not twice.
    pub(crate) one_copy: bool,
    /// The program of the policy `envoy80`.
    pub(crate) envoy: Option<PathBuf>,
    /// `true` if jemalloc never returns a page by itself.
    pub(crate) decay_off: bool,
    pub(crate) queue: Queue,
}

/// Where lowtide's requests wait for room. The proxy and the service admit in one ledger.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Queue {
    /// In front of the service that holds bodies, and not for the little that forwarding them takes
    /// as well.
    #[default]
    Service,
    /// In the proxy, for its model.
    Proxy,
    /// Nowhere.
    None,
}

/// The figures of the service.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct Report {
    /// Milliseconds of each refusal at the text service: whole, and without waits for its body.
    pub(crate) refusals: Vec<[f32; 2]>,
    /// Changes of lowtide's level on the host.
    pub(crate) level_changes: u64,
    /// Requests turned away, by reason.
    pub(crate) shed: Vec<(String, u64)>,
    /// The factors by which estimates were multiplied while the ledger was at least half full, in
    /// the ledger that binds.
    pub(crate) k: Vec<f64>,
    /// MiB that were booked then.
    pub(crate) booked_mib: Vec<f64>,
    /// The most that the arena had committed.
    pub(crate) device_peak_bytes: u64,
    /// Requests that were admitted and for which the arena had no room.
    pub(crate) unplaced: u64,
}

/// Serves until standard input ends. Prints `listening FRONT BACK` when requests are welcome.
pub(crate) fn serve(settings: &str) -> Result<(), BoxError> {
    let settings: Settings = serde_json::from_str(settings)?;
    if let Policy::Envoy(percent) = settings.policy.parse()? {
        return envoy::serve(settings.envoy.as_deref().ok_or("no --envoy")?, percent);
    }
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    let (running, back) = runtime.block_on(start(&settings))?;
    println!("listening {} {back}", running.address);
    std::io::copy(&mut std::io::stdin(), &mut std::io::sink())?;
    Ok(())
}

/// The text service behind the policy, and the proxy before it.
async fn start(settings: &Settings) -> Result<(app::Running, std::net::SocketAddr), BoxError> {
    let policy: Policy = settings.policy.parse()?;
    let builder = Memory::builder().prometheus()?; // each policy is measured by its metrics
    let render = || prometheus::render().unwrap_or_default();
    let memory = match policy {
        Policy::Lowtide => Some(memory(settings, builder)?),
        _ => None,
    };
    let arena = match (&memory, settings.device_bytes) {
        (Some(memory), Some(_)) => Some(memory.open_arena("requests")?),
        _ => None,
    };
    let (watch, unplaced) = (Watch::new(), Unplaced::default());
    let budget = if arena.is_some() { Budget::Device } else { Budget::Host };
    let books = memory.as_ref().map(|memory| Books::watch(memory, budget)).transpose()?;
    let routes = hold::routes(arena.clone(), Arc::clone(&unplaced), !settings.one_copy);
    let routes = admitted(routes, policy, settings, memory.as_ref())?;
    let watching = watch.clone();
    let routes = routes.layer(from_fn(move |request, next| watching.clone().run(request, next)));
    let told = memory.clone();
    let report = move || {
        let mut report = reported(&watch, &unplaced, told.as_ref(), arena.as_ref(), &render());
        if let Some(books) = &books {
            (report.k, report.booked_mib) = books.told();
        }
        async move { Json(report) }
    };
    let routes = routes.route("/report", get(report));
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await?;
    let back = listener.local_addr()?;
    // With the proxy's own bound on hyper's buffers, which no request books: else connections that
    // are kept open hold nearly as much as the bodies.
    let (until, phase) = watch::channel(app::serve::Phase::Serving);
    let serving = app::serve::serve(listener, routes, None, &Admission::new(), phase);
    tokio::spawn(async move {
        let _until = until;
        serving.await
    });
    let mut options = app::Options {
        upstream: Some(format!("http://{back}/").parse()?),
        ..app::Options::default()
    };
    options.limits.connections = settings.connections;
    Ok((app::start(options, memory, render).await?, back))
}

fn admitted(
    routes: Router,
    policy: Policy,
    settings: &Settings,
    memory: Option<&Memory>,
) -> Result<Router, BoxError> {
    let (wrong, on_device) = (settings.estimate, settings.device_bytes.is_some());
    let held = move |head: &Parts| {
        let length = head.headers.get("content-length").and_then(|text| text.to_str().ok());
        let body = ByteSize::new(length.and_then(|text| text.parse().ok()).unwrap_or(0));
        if on_device {
            Cost::host(body.scaled(wrong)).and_device(body.scaled(wrong))
        } else {
            Cost::host(mix::held(body).scaled(wrong))
        }
    };
    Ok(match policy {
        Policy::None | Policy::Envoy(_) => routes,
        Policy::Concurrency(most) => gates::concurrency(routes, most),
        Policy::Rss250 => gates::sampled(routes, Duration::from_millis(250))?,
        Policy::Rss10 => gates::sampled(routes, Duration::from_millis(10))?,
        Policy::Fresh => gates::fresh(routes),
        Policy::Static(percent) => {
            let part = f64::from(percent.ok_or("a static budget without a number")?) / 100.0;
            let admission = Admission::with_limit(ByteSize::new(settings.limit_bytes).scaled(part));
            // The proxy has no layer of its own then: its part is booked here as well.
            let whole = move |head: &Parts| held(head).and_host(FORWARD_COST);
            routes.layer(MemoryLayer::new(admission, whole))
        }
        Policy::Lowtide => {
            let memory = memory.ok_or("lowtide without its memory")?;
            if settings.queue != Queue::Service {
                let layer = MemoryLayer::new(memory.admission().clone(), held);
                routes.layer(layer.with_max_wait(Duration::ZERO))
            } else if wrong > 0.0 {
                routes.layer(MemoryLayer::new(memory.admission().clone(), held))
            } else {
                routes.layer(memory.layer().with_max_wait(Config::MAX_WAIT))
            }
        }
    })
}

fn memory(settings: &Settings, mut builder: Builder) -> Result<Memory, BoxError> {
    if settings.queue != Queue::Proxy {
        builder = builder.max_wait(Duration::ZERO);
    }
    if settings.decay_off {
        builder = builder.heap_decay(DecayTime::Never);
    }
    if let Some(bytes) = settings.device_bytes {
        // A device of which nobody else takes anything; the host cannot reach its memory, which
        // therefore takes none of the host's.
        let device = SimDriver::new(SimOptions {
            order: Order::Synchronous,
            costs: DriverCosts::zero(),
            context_overhead: ByteSize::ZERO,
            ..SimOptions::default()
        });
        builder = builder.driver(Arc::new(device)).device_limit(ByteSize::new(bytes));
    }
    Ok(builder.start()?)
}

fn reported(
    watch: &Watch,
    unplaced: &Unplaced,
    memory: Option<&Memory>,
    arena: Option<&DeviceArena>,
    metrics: &str,
) -> Report {
    let mut report = Report {
        refusals: watch.refusals(),
        unplaced: unplaced.load(Ordering::Relaxed),
        device_peak_bytes: arena.map_or(0, |arena| arena.snapshot().committed_peak.get()),
        level_changes: transitions(metrics),
        ..Report::default()
    };
    if let Some(memory) = memory {
        let stats = memory.admission().stats();
        let shed = |why: RejectReason| (why.name().to_owned(), stats.rejected_total(why));
        report.shed = RejectReason::ALL.map(shed).into();
    }
    report
}

/// The sum of the changes of level, as the metrics tell them.
fn transitions(metrics: &str) -> u64 {
    let name = "lowtide_pressure_transitions_total{";
    let counts = metrics.lines().filter(|line| line.starts_with(name));
    counts.filter_map(|line| line.rsplit_once(' ')?.1.parse::<u64>().ok()).sum()
}
