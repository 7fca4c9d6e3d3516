//! Overload: what keeps a service alive when more comes in than its memory can hold.
//!
//! The proxy of `examples/proxy` runs as a child process in a memory cgroup of its own, under
//! open-loop load from this process: requests come at seeded Poisson times whether or not the
//! last ones were answered, each holds its memory for seconds, and latency counts from the time at
//! which a request was to be sent. The same load meets each policy in turn. lowtide's service takes
//! the `LOWTIDE_*` variables that this process has.
//!
//! Exit codes: 0 done; 1 lowtide's service was killed, or a cell could not be run, or (`--ci`)
//! nothing died without admission; 2 no memory cgroup can be made here.
#![expect(clippy::print_stdout, clippy::print_stderr, reason = "a program that shows something")]
#![expect(clippy::disallowed_methods, reason = "it measures real time")]

#[path = "../../examples/proxy/app.rs"]
#[allow(dead_code, reason = "the proxy itself uses more of it")]
mod app;
mod cell;
#[path = "../../examples/proxy/chance.rs"]
mod chance;
#[path = "../../examples/proxy/embed.rs"]
mod embed;
mod fleet;
#[path = "../../examples/proxy/forward.rs"]
mod forward;
mod load;
mod mixed;
#[path = "../../examples/proxy/model.rs"]
#[allow(dead_code, reason = "the demonstration looks at its arena")]
mod model;
mod offer;
mod poll;
mod streams;
#[path = "../../examples/proxy/upstream.rs"]
mod upstream;

use std::net::{Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use axum::Router;
use axum::extract::Request;
use axum::http::StatusCode;
use axum::http::request::Parts;
use axum::middleware::{Next, from_fn};
use axum::response::IntoResponse as _;
use clap::Parser;
use common::figures::Figures;
use lowtide::config::Config;
use lowtide::metrics::prometheus;
use lowtide::service::MemoryLayer;
use lowtide::{BoxError, ByteSize, Memory};
use lowtide_admission::{Admission, Cost, Signals};
use tokio::net::TcpListener;
use tokio::sync::watch;

use crate::app::FORWARD_COST;
use crate::cell::{Cell, LIMIT, Runner, Service};
use crate::offer::{Mix, Policy, Sending, held};

lowtide::global_allocator!(balanced);

/// A service in a small memory cgroup, under more load than it can hold.
#[derive(Clone, Debug, Parser)]
#[expect(clippy::struct_excessive_bools, reason = "arguments of a command")]
struct Cli {
    /// Of arrivals, sizes and holds, the same for each policy; of what `--survive` draws.
    #[arg(long, default_value_t = 7)]
    seed: u64,
    /// The time for which requests are offered: 10 s, with `--survive` and `--measured` 30 s.
    #[arg(long, value_parser = humantime::parse_duration)]
    lasts: Option<Duration>,
    /// The time that each body takes to send; it holds what has arrived for as much longer.
    #[arg(long, default_value = "0s", value_parser = humantime::parse_duration)]
    body: Duration,
    /// The fixed budget of bytes, in percent of the limit.
    #[arg(long, default_value_t = 80)]
    budget: u32,
    /// So many runs of lowtide, drawn by the seed over loads, estimates and mixes.
    #[arg(long, value_name = "RUNS")]
    survive: Option<u32>,
    /// Sheds where the load fits, and goodput beside the best static budget: 20 minutes.
    #[arg(long)]
    measured: bool,
    /// 400 small requests at once, and the same with six at a time.
    #[arg(long)]
    burst: bool,
    /// 400 streams whose clients stop reading.
    #[arg(long)]
    streams: bool,
    /// Small requests beside large ones, in three mixes of so many rounds.
    #[arg(long, value_name = "ROUNDS")]
    mixed: Option<u32>,
    /// One poll that needs more than the limit, in so many rounds: minutes each.
    #[arg(long, value_name = "ROUNDS")]
    poll: Option<u32>,
    /// One case of `--poll`, without times, such as `json.1.5`.
    #[arg(long, requires = "poll")]
    only: Option<String>,
    /// Three services of different sizes behind Envoy, whose program this is, balanced by load
    /// reports and in turn.
    #[arg(long, value_name = "FILE")]
    envoy: Option<PathBuf>,
    /// Three short runs of lowtide and one without admission, which has to die: under 90 seconds.
    /// With `--envoy` one short pair: load reports have to leave less than half as many requests
    /// unserved.
    #[arg(long)]
    ci: bool,
    /// Be the service.
    #[arg(long, hide = true)]
    serve: Option<String>,
}

fn main() -> ExitCode {
    let has = |wanted: &str| std::env::args().any(|word| word == wanted);
    if has("--bench")
        && !has("--serve")
        && !has("--envoy")
        && let Err(cause) = cell::check()
    {
        eprintln!("overload: needs a memory cgroup of its own (root, or a delegated one): {cause}");
        return ExitCode::from(2);
    }
    common::main(|cli: Cli| match &cli.serve {
        Some(settings) => serve(settings).map(|()| true),
        None => all(&cli),
    })
}

/// Runs what was asked for and prints what came of it. Returns `true` if lowtide's service
/// survived.
fn all(cli: &Cli) -> Result<bool, BoxError> {
    // A descriptor for each request under way, here and in the child.
    common::process::raise_descriptors()?;
    let usual = if cli.survive.is_some() || cli.measured { 30 } else { 10 };
    let base = Cell {
        policy: Policy::Lowtide,
        load: 4.0,
        mix: Mix::Heavy,
        estimate: 1.0,
        lasts: cli.lasts.unwrap_or_else(|| Duration::from_secs(usual)),
        seed: cli.seed,
        sending: Sending { body: cli.body, ..Sending::default() },
        service: Service::Proxy,
    };
    let mut runner = Runner { base, figures: Figures::default(), lost: 0 };
    let held = if cli.burst {
        cell::burst(&runner.base, &mut runner.figures)?
    } else if cli.streams {
        streams::run(&runner.base, &mut runner.figures)?
    } else if let Some(rounds) = cli.mixed {
        mixed::run(&runner.base, rounds, &mut runner.figures)?
    } else if cli.poll.is_some() {
        poll::run(&runner.base, cli, &mut runner.figures)?
    } else if let Some(envoy) = &cli.envoy {
        fleet::run(&runner.base, envoy, cli.ci, &mut runner.figures)?
    } else if cli.ci {
        runner.ci()?
    } else if let Some(runs) = cli.survive {
        runner.survive(runs)?
    } else if cli.measured {
        runner.measured()?
    } else {
        runner.compare(cli.budget)?
    };
    Ok(runner.figures.print() && held && runner.lost == 0)
}

// The service under load, in a process of its own: the proxy under one policy.
//
// The policies differ in what admits a request and in nothing else: one binary, the same settings
// of jemalloc at start, the same proxy and text service behind it. It judges nothing. It ends when
// its standard input does.

/// The part of the limit at which a threshold on the resident set rejects, and its interval.
const THRESHOLD: f64 = 0.85;
const SAMPLED_EVERY: Duration = Duration::from_millis(10);
/// Open connections of the proxy at most.
const CONNECTIONS: usize = 1024;

/// Serves until standard input ends. Prints its address when requests are welcome.
#[tokio::main]
async fn serve(settings: &str) -> Result<(), BoxError> {
    let settings: Cell = serde_json::from_str(settings)?;
    match settings.service {
        Service::Streams => streams::serve().await,
        Service::Mixed { limit } => mixed::serve(limit).await,
        Service::Fleet => fleet::serve().await,
        Service::Poll => poll::serve().await,
        Service::Proxy | Service::WaitingProxy => {
            let running = start(&settings).await?;
            println!("{}", running.address);
            common::told_to_end().await
        }
    }
}

/// The text service behind the policy, and the proxy before it.
async fn start(settings: &Cell) -> Result<app::Running, BoxError> {
    let mut builder = Memory::builder().prometheus()?; // each policy has a recorder
    if settings.service == Service::Proxy {
        builder = builder.max_wait(Duration::ZERO);
    }
    let memory = (settings.policy == Policy::Lowtide).then(|| builder.start()).transpose()?;
    let routes = admitted(load::routes(), settings, memory.as_ref())?;
    let back = serve_routes(routes).await?;
    let mut options = app::Options {
        upstream: Some(format!("http://{back}/").parse()?),
        ..app::Options::default()
    };
    options.limits.connections = CONNECTIONS;
    app::start(options, memory, || prometheus::render().unwrap_or_default()).await
}

/// Serves routes at an address that it returns, with the proxy's own bound on hyper's buffers, which
/// no request books: else connections that are kept open hold nearly as much as the bodies.
async fn serve_routes(routes: Router) -> std::io::Result<SocketAddr> {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await?;
    let address = listener.local_addr()?;
    let (until, phase) = watch::channel(app::serve::Phase::Serving);
    let serving = app::serve::serve(listener, routes, None, &Admission::new(), phase);
    tokio::spawn(async move {
        let _until = until;
        serving.await
    });
    Ok(address)
}

fn admitted(routes: Router, settings: &Cell, memory: Option<&Memory>) -> Result<Router, BoxError> {
    let wrong = settings.estimate;
    let estimate = move |head: &Parts| {
        let length = head.headers.get("content-length").and_then(|text| text.to_str().ok());
        let body = ByteSize::new(length.and_then(|text| text.parse().ok()).unwrap_or(0));
        Cost::host(held(body).scaled(wrong))
    };
    Ok(match settings.policy {
        Policy::None => routes,
        Policy::Rss10 => below_threshold(routes)?,
        Policy::Static(percent) => {
            let part = f64::from(percent) / 100.0;
            let admission = Admission::with_limit(LIMIT.scaled(part));
            // The proxy has no layer of its own then: its part is booked here as well.
            let whole = move |head: &Parts| estimate(head).and_host(FORWARD_COST);
            routes.layer(MemoryLayer::new(admission, whole))
        }
        Policy::Lowtide => {
            let memory = memory.ok_or("lowtide without its memory")?;
            let layer = MemoryLayer::new(memory.admission().clone(), estimate);
            if settings.service == Service::WaitingProxy {
                routes.layer(layer.with_max_wait(Duration::ZERO))
            } else if wrong > 0.0 {
                routes.layer(layer)
            } else {
                routes.layer(memory.layer().with_max_wait(Config::MAX_WAIT))
            }
        }
    })
}

/// Rejects while the resident set, as last sampled, is above the threshold.
fn below_threshold(routes: Router) -> std::io::Result<Router> {
    let above = Arc::new(AtomicBool::new(false));
    let (signals, told) = (Signals::open(), Arc::clone(&above));
    // Ends with the process.
    std::thread::Builder::new().name("threshold".to_owned()).spawn(move || {
        loop {
            let signal = signals.sample();
            let mark = signal.limit.bytes.scaled(THRESHOLD);
            told.store(signal.rss.is_some_and(|rss| rss > mark), Ordering::Relaxed);
            std::thread::sleep(SAMPLED_EVERY);
        }
    })?;
    Ok(routes.layer(from_fn(move |request: Request, next: Next| {
        let is_above = above.load(Ordering::Relaxed);
        async move {
            if is_above {
                return StatusCode::SERVICE_UNAVAILABLE.into_response();
            }
            next.run(request).await
        }
    })))
}
