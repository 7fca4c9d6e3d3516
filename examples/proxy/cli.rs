//! The proxy as a program: options, start, end on a signal, and the `healthcheck` subcommand.
//!
//! It forwards nothing itself; `app` does. Invariant: from the first request that is taken on,
//! SIGTERM ends the program in order, within the drain, the grace and what the memory's end takes.

use std::ffi::{OsStr, OsString};
use std::io::IsTerminal as _;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use axum::http::Uri;
use clap::builder::BoolishValueParser;
use clap::error::ErrorKind;
use clap::{CommandFactory as _, Parser, Subcommand};
use http_body_util::{BodyExt as _, Empty};
use hyper_util::client::legacy::Client;
use hyper_util::rt::TokioExecutor;
use lowtide::metrics::prometheus;
use lowtide::service::AdminToken;
use lowtide::{BoxError, ByteSize, Memory};
use tokio::runtime::Handle;
use tokio::signal::unix::{SignalKind, signal};
use tracing::Level;
use tracing_subscriber::EnvFilter;

use crate::app;
use crate::app::serve::Limits;
use crate::forward::{Forward, whole};

/// How long a health check may take.
const HEALTH_PATIENCE: Duration = Duration::from_secs(3);

#[derive(Debug, Parser)]
#[command(about = "A reverse proxy that gives its memory back", version)]
struct Cli {
    /// Where to listen.
    #[arg(long, env = "PROXY_LISTEN", default_value = "127.0.0.1:8080", global = true)]
    listen: SocketAddr,
    /// Where operators are answered, on connections of their own: /healthz, /readyz, /metrics,
    /// /memory and verbs, which --listen then forwards as all else. Unset, or the same: there.
    #[arg(long, env = "PROXY_OPERATORS", global = true)]
    operators: Option<SocketAddr>,
    /// Names by which operators reach /memory and /metrics, with commas between them. Requests to
    /// localhost and to IP addresses are always answered, those to other names never: a page of
    /// another site may have its own name lead here.
    #[arg(long, env = "PROXY_HOSTS", value_delimiter = ',', global = true)]
    hosts: Vec<String>,
    /// Where requests go, e.g. <http://10.0.0.7:9000>; without it a small text service is started.
    #[arg(long, env = "PROXY_UPSTREAM", value_parser = upstream)]
    upstream: Option<Uri>,
    /// Size of the embedding model's weights, at least 64 MiB.
    #[arg(long, env = "PROXY_WEIGHTS", default_value = "64m", value_parser = weights)]
    weights: ByteSize,
    /// Seed of the weights.
    #[arg(long, env = "PROXY_SEED", default_value_t = 1)]
    seed: u64,
    /// How long the model may be idle before it is unloaded; default: as the profile says.
    #[arg(long, env = "PROXY_IDLE_UNLOAD", value_parser = humantime::parse_duration)]
    idle_unload: Option<Duration>,
    /// How long the upstream may keep a request waiting: until the head of its answer, before 504,
    /// and between two parts of its answer, before the connection is closed; 0s for no bound.
    #[arg(long, env = "PROXY_RESPONSE_TIMEOUT", value_parser = humantime::parse_duration)]
    #[arg(default_value = "60s")]
    response_timeout: Duration,
    /// How long after SIGTERM all is still served, while /readyz answers 503 and each answer ends
    /// its connection, so that no client sends its next request to one that closes; 0s for none.
    #[arg(long, env = "PROXY_DRAIN", value_parser = humantime::parse_duration)]
    #[arg(default_value = "1s")]
    drain: Duration,
    /// How long requests may take to end after that.
    #[arg(long, env = "PROXY_GRACE", value_parser = humantime::parse_duration)]
    #[arg(default_value = "10s")]
    grace: Duration,
    /// How long a request's body that does not go on is waited for, before 408.
    #[arg(long, env = "PROXY_BODY_PATIENCE", value_parser = humantime::parse_duration)]
    #[arg(default_value = "10s")]
    body_patience: Duration,
    /// How long the head of a request is waited for, and so how long a connection may be idle.
    #[arg(long, env = "PROXY_HEAD_PATIENCE", value_parser = humantime::parse_duration)]
    #[arg(default_value = "10s")]
    head_patience: Duration,
    /// Connections at once; others wait. Each takes up to 3 descriptors: no more are taken than
    /// (`ulimit -n` - 48) / 3.
    #[arg(long, env = "PROXY_CONNECTIONS", default_value = "512", value_parser = connections)]
    connections: usize,
    /// Hear verbs (purge, trim, sleep, wake, unload, snapshot) of this machine, under /memory.
    #[arg(long, env = "PROXY_ADMIN", value_parser = BoolishValueParser::new())]
    admin: bool,
    /// Hear verbs of whoever has the token in this file: 32 to 256 characters, in one line.
    #[arg(long, env = "PROXY_ADMIN_TOKEN_FILE")]
    admin_token_file: Option<PathBuf>,
    #[command(subcommand)]
    command: Option<Command>,
}

#[derive(Clone, Copy, Debug, Subcommand)]
enum Command {
    /// Asks the proxy at --operators, or else --listen, for /healthz and exits 0 when it is well.
    Healthcheck,
}

fn upstream(text: &str) -> Result<Uri, String> {
    let upstream = text.parse().map_err(|error| format!("{error}"))?;
    Forward::new(&upstream).map(|_| upstream)
}

fn weights(text: &str) -> Result<ByteSize, String> {
    let size: ByteSize = text.parse().map_err(|error| format!("{error}"))?;
    if size < ByteSize::mib(64) {
        return Err(format!("{size} of weights: expected 64 MiB or more"));
    }
    Ok(size)
}

fn connections(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(count) if count > 0 => Ok(count),
        _ => Err("expected a number above 0".to_owned()),
    }
}

/// The token in a file, which ends with a line's end or without.
fn token_in(file: &Path) -> Result<AdminToken, BoxError> {
    let text = std::fs::read_to_string(file)
        .map_err(|error| format!("the token in {} cannot be read: {error}", file.display()))?;
    let token = AdminToken::new(text.trim_end_matches(['\r', '\n']));
    Ok(token.map_err(|error| format!("{}: {error}", file.display()))?)
}

/// Runs the program with these arguments, the first of which is its name. Ends the process itself
/// where they are wrong or ask for help.
pub(crate) fn main(arguments: impl Iterator<Item = OsString>) -> Result<(), BoxError> {
    let cli = Cli::parse_from(arguments);
    // Not clap's `conflicts_with`: a variable that says `false` would be a conflict to that.
    if cli.admin && cli.admin_token_file.is_some() {
        let text = "--admin (PROXY_ADMIN) hears all of this machine: expected it, or \
                    --admin-token-file (PROXY_ADMIN_TOKEN_FILE), not both";
        Cli::command().error(ErrorKind::ArgumentConflict, text).exit();
    }
    log();
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .on_thread_start(lowtide::memory::on_thread_start)
        .on_thread_park(lowtide::host::on_thread_park)
        .build()?;
    match cli.command {
        None => runtime.block_on(run(cli)),
        Some(Command::Healthcheck) => {
            runtime.block_on(healthcheck(cli.operators.unwrap_or(cli.listen)))
        }
    }
}

/// Starts the log, on standard output. Lines that cannot be written are lost, and nothing else is:
/// by default the subscriber reports them with `eprintln!`, which panics in the code that logs if
/// standard error cannot be written either (a full disk, a closed pipe).
fn log() {
    #[expect(clippy::disallowed_methods, reason = "no setting: what all programs go by")]
    let no_color = std::env::var_os("NO_COLOR");
    // Not `from_env_lossy`, which reports what it cannot read with `eprintln!`.
    let asked = EnvFilter::builder().with_default_directive(Level::INFO.into()).from_env();
    let (filter, wrong) = match asked {
        Ok(filter) => (filter, None),
        Err(error) => (EnvFilter::default().add_directive(Level::INFO.into()), Some(error)),
    };
    tracing_subscriber::fmt()
        .with_ansi(is_coloured(std::io::stdout().is_terminal(), no_color.as_deref()))
        .log_internal_errors(false)
        .with_env_filter(filter)
        .init();
    if let Some(error) = wrong {
        tracing::warn!(%error, "RUST_LOG ignored");
    }
}

/// Whether the log has colour codes: on a terminal, unless `NO_COLOR` says something.
pub(crate) fn is_coloured(is_terminal: bool, no_color: Option<&OsStr>) -> bool {
    is_terminal && no_color.is_none_or(OsStr::is_empty)
}

/// Has parked workers run, so that they empty their caches when they park again.
fn wake(runtime: &Handle) {
    for _ in 0..runtime.metrics().num_workers() {
        runtime.spawn(async {});
    }
}

async fn run(cli: Cli) -> Result<(), BoxError> {
    let hears = match &cli.admin_token_file {
        Some(file) => app::Hears::Token(token_in(file)?),
        None if cli.admin => app::Hears::Loopback,
        None => app::Hears::Nobody,
    };
    let recorder =
        prometheus::configure(prometheus::PrometheusBuilder::new())?.install_recorder()?;
    let upkeep = recorder.clone();
    let workers = Handle::current();
    let memory = Memory::builder()
        .with_environment()?
        .after_publish(move || upkeep.run_upkeep())
        .after_tcache_flush_request(move || wake(&workers))
        .start()?;
    let options = app::Options {
        listen: cli.listen,
        operators: cli.operators.filter(|at| *at != cli.listen),
        hosts: cli.hosts,
        upstream: cli.upstream,
        response_timeout: Some(cli.response_timeout).filter(|time| !time.is_zero()),
        weights: cli.weights,
        seed: cli.seed,
        idle_unload: cli.idle_unload,
        limits: Limits {
            body_patience: cli.body_patience,
            head_patience: cli.head_patience,
            connections: cli.connections,
        },
        hears,
    };
    // Before it listens: whoever sees it listen may send a signal.
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    let running = app::start(options, Some(memory.clone()), move || recorder.render()).await?;
    let mut signalled = async || {
        tokio::select! {
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
        }
    };
    signalled().await;
    tracing::info!(drain = ?cli.drain, grace = ?cli.grace, "stopping");
    if !cli.drain.is_zero() {
        // A second signal ends it.
        tokio::select! {
            () = running.drain(cli.drain) => {}
            () = signalled() => {}
        }
    }
    let ended = running.stop(cli.grace).await;
    // It waits for threads, which an asynchronous thread must not.
    let report =
        tokio::task::spawn_blocking(move || memory.shutdown(Duration::from_secs(5))).await?;
    tracing::info!(all_requests_ended = ended, %report, "stopped");
    Ok(())
}

async fn healthcheck(at: SocketAddr) -> Result<(), BoxError> {
    let at =
        if at.ip().is_unspecified() { SocketAddr::from(([127, 0, 0, 1], at.port())) } else { at };
    let client: Client<_, Empty<hyper::body::Bytes>> =
        Client::builder(TokioExecutor::new()).build_http();
    let asked = client.get(format!("http://{at}/healthz").parse()?);
    let ask = async {
        let answer = asked.await.map_err(|error| format!("{at} is not well: {}", whole(&error)))?;
        let status = answer.status();
        let text = answer.into_body().collect().await?.to_bytes();
        Ok::<_, BoxError>((status, text))
    };
    let (status, text) = tokio::time::timeout(HEALTH_PATIENCE, ask)
        .await
        .map_err(|_| format!("{at} did not answer within {HEALTH_PATIENCE:?}"))??;
    if status.is_success() {
        return Ok(());
    }
    Err(format!("{at} answered {status}: {}", String::from_utf8_lossy(&text)).into())
}
