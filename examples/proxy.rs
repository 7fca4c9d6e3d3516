//! A reverse proxy that gives its memory back.
//!
//! It forwards everything to `--upstream` (or to a small text service of its own), answers
//! `POST /embed` from a model that is loaded on first use and unloaded when idle, and shows what
//! its memory does at `/metrics`, `/healthz`, `/readyz` and `/memory`.
//!
//! Memory settings are the crate's own `LOWTIDE_*` variables; the options here are the proxy's.
#![expect(clippy::print_stderr, reason = "the subcommand's answer and start-up errors")]

#[path = "proxy/app.rs"]
#[allow(dead_code, reason = "other programs that start it read more of it")]
mod app;
#[path = "proxy/embed.rs"]
mod embed;
#[path = "proxy/forward.rs"]
mod forward;
#[path = "proxy/model.rs"]
mod model;
#[path = "proxy/upstream.rs"]
mod upstream;

use std::net::SocketAddr;
use std::process::ExitCode;
use std::time::Duration;

use axum::http::Uri;
use clap::{Parser, Subcommand};
use http_body_util::{BodyExt as _, Empty};
use hyper_util::client::legacy::Client;
use hyper_util::rt::TokioExecutor;
use lowtide::metrics::prometheus;
use lowtide::{BoxError, ByteSize, Memory};
use tokio::signal::unix::{SignalKind, signal};

#[global_allocator]
static HEAP: lowtide::host::Heap = lowtide::host::Heap;

lowtide::heap_profile!(balanced);

/// How long a health check may take.
const HEALTH_PATIENCE: Duration = Duration::from_secs(3);

#[derive(Debug, Parser)]
#[command(about = "A reverse proxy that gives its memory back", version)]
struct Cli {
    /// Where to listen.
    #[arg(long, env = "PROXY_LISTEN", default_value = "127.0.0.1:8080", global = true)]
    listen: SocketAddr,
    /// Where requests go, e.g. <http://10.0.0.7:9000>; without it a small text service is started.
    #[arg(long, env = "PROXY_UPSTREAM")]
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
    /// How long requests may take to end after SIGTERM.
    #[arg(long, env = "PROXY_GRACE", value_parser = humantime::parse_duration)]
    #[arg(default_value = "10s")]
    grace: Duration,
    #[command(subcommand)]
    command: Option<Command>,
}

#[derive(Clone, Copy, Debug, Subcommand)]
enum Command {
    /// Asks the proxy at --listen for /healthz and exits 0 when it is well.
    Healthcheck,
}

fn weights(text: &str) -> Result<ByteSize, String> {
    let size: ByteSize = text.parse().map_err(|error| format!("{error}"))?;
    if size < ByteSize::mib(64) {
        return Err(format!("{size} of weights: expected 64 MiB or more"));
    }
    Ok(size)
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    tracing_subscriber::fmt()
        .with_env_filter(
            tracing_subscriber::EnvFilter::builder()
                .with_default_directive(tracing::Level::INFO.into())
                .from_env_lossy(),
        )
        .init();
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build();
    let done = match (runtime, cli.command) {
        (Ok(runtime), None) => runtime.block_on(run(cli)),
        (Ok(runtime), Some(Command::Healthcheck)) => runtime.block_on(healthcheck(cli.listen)),
        (Err(error), _) => Err(error.into()),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("proxy: {error}");
            ExitCode::FAILURE
        }
    }
}

async fn run(cli: Cli) -> Result<(), BoxError> {
    let recorder =
        prometheus::configure(prometheus::PrometheusBuilder::new())?.install_recorder()?;
    let upkeep = recorder.clone();
    let memory =
        Memory::builder().with_environment()?.after_publish(move || upkeep.run_upkeep()).start()?;
    let options = app::Options {
        listen: cli.listen,
        upstream: cli.upstream,
        weights: cli.weights,
        seed: cli.seed,
        idle_unload: cli.idle_unload,
    };
    let running = app::start(options, Some(memory.clone()), move || recorder.render()).await?;
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    tokio::select! {
        _ = terminate.recv() => {}
        _ = interrupt.recv() => {}
    }
    tracing::info!(grace = ?cli.grace, "stopping");
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
    let answer = tokio::time::timeout(HEALTH_PATIENCE, asked)
        .await
        .map_err(|_| format!("{at} did not answer within {HEALTH_PATIENCE:?}"))??;
    let status = answer.status();
    let text = answer.into_body().collect().await?.to_bytes();
    if status.is_success() {
        return Ok(());
    }
    Err(format!("{at} answered {status}: {}", String::from_utf8_lossy(&text)).into())
}
