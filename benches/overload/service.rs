//! The service under load, in a process of its own: the proxy under one policy.
//!
//! The policies differ in what admits a request and in nothing else: one binary, the same settings
//! of jemalloc at start, the same proxy and text service. The thresholds stand where lowtide's
//! layer stands, before the text service; they are this bench's own. It ends when its standard
//! input does.

use std::convert::Infallible;
use std::io::Read as _;
use std::net::Ipv4Addr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use axum::Router;
use axum::extract::Request;
use axum::http::StatusCode;
use axum::response::{IntoResponse as _, Response};
use futures_util::future::BoxFuture;
use http_body_util::BodyExt as _;
use lowtide::control::Signals;
use lowtide::metrics::prometheus;
use lowtide::{BoxError, Memory};
use tokio::net::TcpListener;
use tower::{Layer, Service, ServiceExt as _};

use crate::{app, upstream};

/// The part of the limit at which a threshold sheds.
const THRESHOLD: f64 = 0.85;

/// What admits a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, clap::ValueEnum)]
pub(crate) enum Policy {
    /// Nothing: every request is served.
    None,
    /// A threshold on the resident set, sampled each 250 ms.
    Rss250,
    /// A threshold on the resident set, sampled each 10 ms.
    Rss10,
    /// lowtide, with its defaults.
    Lowtide,
}

impl Policy {
    /// All of them, in the order in which they take turns.
    pub(crate) const ALL: [Self; 4] = [Self::None, Self::Rss250, Self::Rss10, Self::Lowtide];

    /// Its name on the command line and in the table.
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Rss250 => "rss250",
            Self::Rss10 => "rss10",
            Self::Lowtide => "lowtide",
        }
    }
}

/// Serves until standard input ends. Prints `listening ADDRESS` when requests are welcome.
pub(crate) fn serve(policy: Policy) -> Result<(), BoxError> {
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    let running = runtime.block_on(start(policy))?;
    println!("listening {}", running.address);
    let mut rest = Vec::new();
    std::io::stdin().read_to_end(&mut rest)?;
    Ok(())
}

async fn start(policy: Policy) -> Result<app::Running, BoxError> {
    let options = app::Options::default();
    match policy {
        Policy::None => app::start(options, None, String::new).await,
        Policy::Rss250 => behind_threshold(options, Duration::from_millis(250)).await,
        Policy::Rss10 => behind_threshold(options, Duration::from_millis(10)).await,
        Policy::Lowtide => {
            let recorder =
                prometheus::configure(prometheus::PrometheusBuilder::new())?.install_recorder()?;
            let upkeep = recorder.clone();
            let memory = Memory::builder().after_publish(move || upkeep.run_upkeep()).start()?;
            app::start(options, Some(memory), move || recorder.render()).await
        }
    }
}

/// The proxy without a memory, before a text service behind a threshold.
async fn behind_threshold(
    mut options: app::Options,
    every: Duration,
) -> Result<app::Running, BoxError> {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await?;
    options.upstream = Some(format!("http://{}/", listener.local_addr()?).parse()?);
    let routes: Router = upstream::routes().layer(Threshold::watch(every)?);
    tokio::spawn(async move { axum::serve(listener, routes).await });
    app::start(options, None, String::new).await
}

/// A layer that sheds while the resident set, as last sampled, is above the threshold.
#[derive(Clone, Debug)]
struct Threshold {
    above: Arc<AtomicBool>,
}

impl Threshold {
    fn watch(every: Duration) -> std::io::Result<Self> {
        let above = Arc::new(AtomicBool::new(false));
        let (signals, told) = (Signals::open(), Arc::clone(&above));
        // Ends with the process.
        std::thread::Builder::new().name("threshold".to_owned()).spawn(move || {
            loop {
                let signal = signals.sample();
                let mark = signal.limit.bytes.scaled(THRESHOLD);
                told.store(signal.rss.is_some_and(|rss| rss > mark), Ordering::Relaxed);
                std::thread::sleep(every);
            }
        })?;
        Ok(Self { above })
    }
}

impl<S> Layer<S> for Threshold {
    type Service = Guarded<S>;

    fn layer(&self, inner: S) -> Guarded<S> {
        Guarded { inner, above: Arc::clone(&self.above) }
    }
}

#[derive(Clone, Debug)]
struct Guarded<S> {
    inner: S,
    above: Arc<AtomicBool>,
}

impl<S> Service<Request> for Guarded<S>
where
    S: Service<Request, Response = Response, Error = Infallible> + Clone + Send + 'static,
    S::Future: Send,
{
    type Response = Response;
    type Error = Infallible;
    type Future = BoxFuture<'static, Result<Response, Infallible>>;

    fn poll_ready(
        &mut self,
        cx: &mut std::task::Context<'_>,
    ) -> std::task::Poll<Result<(), Infallible>> {
        self.inner.poll_ready(cx)
    }

    fn call(&mut self, request: Request) -> Self::Future {
        if self.above.load(Ordering::Relaxed) {
            return Box::pin(async move { Ok(shed(request).await) });
        }
        Box::pin(self.inner.clone().oneshot(request))
    }
}

/// Answers 503 when the body has been read and thrown away frame by frame, since a connection that
/// is closed on a client that still sends looks broken to it.
async fn shed(request: Request) -> Response {
    let mut body = request.into_body();
    // Ends with the body; this bench's own are at most 8 MiB.
    while let Some(Ok(frame)) = body.frame().await {
        drop(frame);
    }
    (StatusCode::SERVICE_UNAVAILABLE, [("retry-after", "1")], "not enough memory\n").into_response()
}
