//! The service under load, in a process of its own: the proxy under one policy.
//!
//! The policies differ in what admits a request and in nothing else: one binary, the same settings
//! of jemalloc at start, the same proxy and text service behind it. It judges nothing. It ends when
//! its standard input does.

use std::net::Ipv4Addr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use axum::Router;
use axum::extract::Request;
use axum::http::StatusCode;
use axum::http::request::Parts;
use axum::middleware::{Next, from_fn};
use axum::response::IntoResponse as _;
use common::process::free_port;
use lowtide::config::Config;
use lowtide::metrics::prometheus;
use lowtide::service::MemoryLayer;
use lowtide::{BoxError, ByteSize, Memory};
use lowtide_admission::{Admission, Cost, Signals};
use tokio::net::TcpListener;
use tokio::sync::watch;

use crate::app::{self, FORWARD_COST};
use crate::cell::Cell;
use crate::load;
use crate::offer::{Policy, held};

/// The part of the limit at which a threshold on the resident set rejects, and its interval.
const THRESHOLD: f64 = 0.85;
const SAMPLED_EVERY: Duration = Duration::from_millis(10);
/// The configuration of Envoy, which collects each body, holds it for as long as the request asks, and
/// answers it, with its overload manager as the policy. A request holds its body once.
const ENVOY: &str = include_str!("envoy.yaml");
/// Open connections of the proxy at most.
const CONNECTIONS: usize = 1024;

/// Serves until standard input ends. Prints its address when requests are welcome.
pub(crate) fn serve(settings: &str) -> Result<(), BoxError> {
    let settings: Cell = serde_json::from_str(settings)?;
    if let Policy::Envoy(percent) = settings.policy {
        let front = free_port()?;
        let configuration = ENVOY
            .replace("PORT", &front.port().to_string())
            .replace("THRESHOLD", &(f64::from(percent) / 100.0).to_string());
        let program = settings.envoy.ok_or("no --envoy")?;
        let mut envoy = common::start_envoy(&program, &configuration, front)?;
        println!("{front}");
        return Err(format!("Envoy ended: {}", envoy.child.wait()?).into());
    }
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    let running = runtime.block_on(start(&settings))?;
    println!("{}", running.address);
    std::io::copy(&mut std::io::stdin(), &mut std::io::sink())?;
    Ok(())
}

/// The text service behind the policy, and the proxy before it.
async fn start(settings: &Cell) -> Result<app::Running, BoxError> {
    let mut builder = Memory::builder().prometheus()?; // each policy has a recorder
    if !settings.waits_in_proxy {
        builder = builder.max_wait(Duration::ZERO);
    }
    let memory = (settings.policy == Policy::Lowtide).then(|| builder.start()).transpose()?;
    let routes = admitted(load::routes(!settings.one_copy), settings, memory.as_ref())?;
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
    options.limits.connections = CONNECTIONS;
    app::start(options, memory, || prometheus::render().unwrap_or_default()).await
}

fn admitted(routes: Router, settings: &Cell, memory: Option<&Memory>) -> Result<Router, BoxError> {
    let wrong = settings.estimate;
    let estimate = move |head: &Parts| {
        let length = head.headers.get("content-length").and_then(|text| text.to_str().ok());
        let body = ByteSize::new(length.and_then(|text| text.parse().ok()).unwrap_or(0));
        Cost::host(held(body).scaled(wrong))
    };
    Ok(match settings.policy {
        Policy::None | Policy::Envoy(_) => routes,
        Policy::Rss10 => below_threshold(routes)?,
        Policy::Static(percent) => {
            let part = f64::from(percent) / 100.0;
            let admission = Admission::with_limit(settings.limit().scaled(part));
            // The proxy has no layer of its own then: its part is booked here as well.
            let whole = move |head: &Parts| estimate(head).and_host(FORWARD_COST);
            routes.layer(MemoryLayer::new(admission, whole))
        }
        Policy::Lowtide => {
            let memory = memory.ok_or("lowtide without its memory")?;
            let layer = MemoryLayer::new(memory.admission().clone(), estimate);
            if settings.waits_in_proxy {
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
