//! The proxy as a library, so that the demonstration, the bench and the tests can start it in their
//! own process.
//!
//! The routes `/metrics`, `/healthz`, `/readyz` and `/memory`, with the admin commands below it if
//! enabled, are exempt from admission; `POST /embed` and all other requests, which are forwarded,
//! pass the memory layer. If operators have a separate address, these routes are served only there,
//! out of reach of clients and their connections. With `memory: None` the same service runs
//! unmanaged: no request is rejected, no slow client is ended, and no memory is released.
//!
//! A program chooses the model of `/embed` by its module `model`: the built-in one (`model.rs`), or
//! one in ONNX Runtime (`examples/onnx`).

pub(crate) mod serve;
pub(crate) mod silence;

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use axum::Router;
use axum::extract::{ConnectInfo, Request};
use axum::http::request::Parts;
use axum::http::{StatusCode, Uri};
use axum::response::Response;
use axum::routing::post;
use clap::builder::{BoolishValueParser, PossibleValuesParser, TypedValueParser as _};
use clap::{Args, FromArgMatches as _};
use lowtide::ByteSize;
use lowtide::admission::{Admission, Cost};
use lowtide::service::Endpoints;
use lowtide::{BoxError, Memory};
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio::task::JoinHandle;

use self::serve::{Limits, OPERATORS, Phase, serve};
use crate::embed::{self, Embedder};
use crate::forward::{self, Forward};
use crate::model::{self, ManagedModel};
use crate::upstream;

/// Host bytes that a forwarded request takes on its way through: two connections, each with a
/// buffer to read into and one to write from.
pub(crate) const FORWARD_COST: ByteSize = ByteSize::of(4 * forward::BUFFER_MAX);

/// The rate at which clients must send bodies and take responses. A guess: a poor line's.
const RATE_MIN: ByteSize = ByteSize::kib(16);

/// The options of the proxy.
#[derive(Debug, Args)]
pub(crate) struct Options {
    /// Address to listen on.
    #[arg(long, env = "PROXY_LISTEN", default_value = "127.0.0.1:8080", global = true)]
    pub(crate) listen: SocketAddr,
    /// Separate address for operators: /healthz, /readyz, /metrics, /memory and admin commands,
    /// which --listen then forwards like any other path. Default: the address of --listen.
    #[arg(long, env = "PROXY_OPERATORS", global = true)]
    pub(crate) operators: Option<SocketAddr>,
    /// Host names by which operators reach /memory and /metrics, separated by commas. Requests to
    /// localhost and to IP addresses are always answered, those to other names never, because
    /// another site's page may point its own name at this address.
    #[arg(long, env = "PROXY_HOSTS", value_delimiter = ',', global = true)]
    pub(crate) hosts: Vec<String>,
    /// Upstream address, e.g. `http://10.0.0.7:9000`; without it a small text service is started.
    #[arg(long, env = "PROXY_UPSTREAM", value_parser = upstream)]
    pub(crate) upstream: Option<Uri>,
    #[command(flatten)]
    pub(crate) model: model::Settings,
    /// Idle time before the model is unloaded; default: the profile's.
    #[arg(long, env = "PROXY_IDLE_UNLOAD", value_parser = humantime::parse_duration)]
    pub(crate) idle_unload: Option<Duration>,
    /// Longest time that the upstream may be silent: before the head of its response (504), and
    /// between two parts of its response (the connection is closed); 0s for no limit.
    #[arg(long, env = "PROXY_RESPONSE_TIMEOUT", value_parser = humantime::parse_duration)]
    #[arg(default_value = "60s")]
    pub(crate) response_timeout: Duration,
    #[command(flatten)]
    pub(crate) limits: Limits,
    /// Add an ORCA load report to each response, for load balancers, which should remove it: header
    /// endpoint-load-metrics. Those of the upstream are always dropped.
    #[arg(long, env = "PROXY_LOAD_REPORTS", default_value = "off")]
    #[arg(value_parser = PossibleValuesParser::new(["off", "text"]).map(|name| name == "text"))]
    pub(crate) load_reports: bool,
    /// Accept admin commands (purge, trim, sleep, wake, unload, fit) from this machine,
    /// under /memory.
    #[arg(long, env = "PROXY_ADMIN", value_parser = BoolishValueParser::new(), global = true)]
    pub(crate) admin: bool,
    /// Accept admin commands with the token in this file: 32 to 256 characters, in one line.
    #[arg(long, env = "PROXY_ADMIN_TOKEN_FILE", global = true)]
    pub(crate) admin_token_file: Option<PathBuf>,
}

impl Default for Options {
    /// Returns those of a command line that sets none, with any port.
    fn default() -> Self {
        let command = Self::augment_args(clap::Command::new("proxy"));
        let matches = command.get_matches_from(["proxy", "--listen=127.0.0.1:0"]);
        Self::from_arg_matches(&matches).unwrap_or_else(|error| error.exit())
    }
}

/// The token in a file, which ends with a line's end or without.
pub(crate) fn token_text(file: &Path) -> Result<String, BoxError> {
    let text = std::fs::read_to_string(file)
        .map_err(|error| format!("cannot read the token in {}: {error}", file.display()))?;
    Ok(text.trim_end_matches(['\r', '\n']).to_owned())
}

fn upstream(text: &str) -> Result<Uri, String> {
    let upstream = text.parse().map_err(|error| format!("{error}"))?;
    Forward::new(&upstream).map(|_| upstream)
}

/// A proxy that runs.
#[derive(Debug)]
pub(crate) struct Running {
    /// The address that it listens on.
    pub(crate) address: SocketAddr,
    /// The address for operators.
    pub(crate) operators: SocketAddr,
    /// The model.
    pub(crate) model: ManagedModel,
    memory: Option<Memory>,
    phase: watch::Sender<Phase>,
    servers: Vec<JoinHandle<()>>,
    /// The built-in upstream, and its phase: it ends after the proxy's own requests.
    own_upstream: Option<(watch::Sender<Phase>, JoinHandle<()>)>,
}

impl Running {
    /// Serves for this long as before, and prepares clients for the end: each answer ends its
    /// connection, and with a `Memory` `/readyz` answers 503.
    ///
    /// A connection that is closed while it is idle may be closed just as the client sends its next
    /// request, which is lost then. An answer with `Connection: close` tells the client in time.
    pub(crate) async fn drain(&self, time: Duration) {
        self.memory.iter().for_each(Memory::set_ending);
        self.phase.send_replace(Phase::Draining);
        tokio::time::sleep(time).await;
    }

    /// Takes no new connections, lets requests under way end until the deadline, and says whether
    /// all of them did.
    pub(crate) async fn stop(self, deadline: Duration) -> bool {
        self.phase.send_replace(Phase::Ending);
        let (own_phase, own) = self.own_upstream.unzip();
        let aborts: Vec<_> =
            self.servers.iter().chain(&own).map(JoinHandle::abort_handle).collect();
        let all = async {
            futures_util::future::join_all(self.servers).await;
            drop(own_phase); // ends it
            futures_util::future::join_all(own).await;
        };
        let ended = tokio::time::timeout(deadline, all).await.is_ok();
        aborts.iter().for_each(tokio::task::AbortHandle::abort);
        ended
    }
}

/// Starts the proxy; `render` gives the text of `/metrics`.
pub(crate) async fn start(
    options: Options,
    memory: Option<Memory>,
    render: impl Fn() -> String + Send + Sync + 'static,
) -> Result<Running, BoxError> {
    // First what may well fail, so that nothing is left of a start that did.
    let mut endpoints =
        Endpoints::new(memory.clone()).with_metrics(render).with_hosts(options.hosts.clone());
    if options.admin {
        endpoints = endpoints.with_local_admin();
    }
    if let Some(file) = &options.admin_token_file {
        let accepted = endpoints.with_admin_token(&token_text(file)?);
        endpoints = accepted.map_err(|error| format!("{}: {error}", file.display()))?;
    }
    let (front, address) = listen(options.listen).await?;
    let aside = match options.operators {
        Some(at) => Some(listen(at).await?),
        None => None,
    };
    let admission =
        memory.as_ref().map_or_else(Admission::new, |memory| memory.admission().clone());
    let (upstream, own_upstream) = match &options.upstream {
        Some(upstream) => (upstream.clone(), None),
        None => {
            let mut routes = upstream::routes();
            if let Some(memory) = &memory {
                let estimate = |request: &Parts| {
                    let announced = content_length(request).unwrap_or(0);
                    let words = request.uri.path() == "/words";
                    let bytes = if words { upstream::words_cost(announced) } else { 64 << 10 };
                    Cost::host(ByteSize::new(bytes))
                };
                // A bound: `words` refuses a text that needs more.
                let layer = memory.layer().with_estimate(estimate);
                routes = routes.layer(layer.without_slow_start());
            }
            let listener = TcpListener::bind((std::net::Ipv4Addr::LOCALHOST, 0)).await?;
            let address = listener.local_addr()?;
            let (own_phase, phase) = watch::channel(Phase::Serving);
            let server = serve(listener, routes, None, &admission, phase);
            (format!("http://{address}/").parse()?, Some((own_phase, server)))
        }
    };
    let response_timeout = Some(options.response_timeout).filter(|time| !time.is_zero());
    let forward = Forward::new(&upstream)?.with_response_timeout(response_timeout);
    let model = ManagedModel::open(&options.model, options.idle_unload, memory.as_ref())?;
    let embedder = Embedder::new(model.clone());
    let managed = memory.is_some();
    let (phase, phases) = watch::channel(Phase::Serving);
    let mut servers = Vec::new();
    // The small upstream admits in the same ledger: requests wait in front of it, and not for the
    // little that forwarding them takes as well.
    let waits = own_upstream.is_none();
    let grace = options.limits.body_timeout;
    let reports = options.load_reports;
    let mut routes = clients_routes(forward, embedder, memory.as_ref(), waits, grace, reports);
    let mut operators = address;
    if let Some((listener, at)) = aside {
        let limits = Limits { connections: OPERATORS, ..options.limits };
        let theirs = endpoints.into_routes().fallback(unknown_path);
        servers.push(serve(listener, theirs, Some(limits), &admission, phases.clone()));
        operators = at;
    } else {
        // Outside the memory layer.
        routes = routes.merge(endpoints.into_routes());
    }
    let limits = Some(options.limits.within_descriptors());
    servers.push(serve(front, routes, limits, &admission, phases));
    tracing::info!(%address, %operators, %upstream, managed, "the proxy is listening");
    Ok(Running { address, operators, model, memory, phase, servers, own_upstream })
}

/// Answers a path that the operators' port does not have.
async fn unknown_path(uri: Uri) -> Response {
    let [paths, commands] = [&Endpoints::PATHS, Endpoints::ADMIN_PATHS].map(|of| of.join(", "));
    let reason = format!("no {}: expected {paths}, or with PROXY_ADMIN {commands}", uri.path());
    *embed::refusal(StatusCode::NOT_FOUND, reason)
}

async fn listen(at: SocketAddr) -> Result<(TcpListener, SocketAddr), BoxError> {
    let listener =
        TcpListener::bind(at).await.map_err(|error| format!("cannot listen on {at}: {error}"))?;
    let address = listener.local_addr()?;
    Ok((listener, address))
}

/// Builds the routes that pass the memory layer.
fn clients_routes(
    forward: Forward,
    embedder: Embedder,
    memory: Option<&Memory>,
    forward_waits: bool,
    grace: Duration,
    reports: bool,
) -> Router {
    let embed = post(move |request| {
        let embedder = embedder.clone();
        async move { embedder.answer(request).await }
    })
    .fallback(Embedder::wrong_method);
    // A plain handler: the router's own wrappers would give answers to HEAD a length of 0.
    let forward = move |request: Request| {
        let forward = forward.clone();
        let from = request.extensions().get::<ConnectInfo<SocketAddr>>().map(|from| from.0);
        async move { forward.forward(request, from).await }
    };
    let (mut embed, mut forward) =
        (Router::new().route("/embed", embed), Router::new().fallback(forward));
    if let Some(memory) = memory {
        let mut layer = memory.layer();
        if reports {
            // One for both routes: the rates are those of the proxy.
            layer = layer.with_load_reports();
        }
        let estimate = move |request: &Parts| {
            if request.uri.path() == "/embed" {
                let announced = content_length(request).unwrap_or(0);
                Cost::host(embed::host_cost(announced)).and_device(model::DEVICE_COST)
            } else {
                Cost::host(FORWARD_COST)
            }
        };
        // Bounds: bodies stream through, and the model plans its memory.
        let layer =
            layer.with_estimate(estimate).without_slow_start().with_min_data_rate(RATE_MIN, grace);
        embed = embed.layer(layer.clone());
        let layer = if forward_waits { layer } else { layer.with_max_wait(Duration::ZERO) };
        forward = forward.layer(layer);
    }
    embed.merge(forward)
}

fn content_length(request: &Parts) -> Option<u64> {
    request.headers.get("content-length")?.to_str().ok()?.parse().ok()
}
