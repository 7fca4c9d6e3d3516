//! The proxy as a program: options, start, shutdown on a signal, and the subcommands `healthcheck`
//! and `fit`.
//!
//! It forwards nothing itself; `app` does. Invariant: from the first accepted request on, SIGTERM
//! ends the program in order, within the drain, the grace period and the time that the memory's
//! shutdown takes. Exhausted memory does the same with the policy `exit`, and the program fails.

mod fit;

use std::ffi::{OsStr, OsString};
use std::io::{self, IsTerminal as _, Write as _};
use std::net::SocketAddr;
use std::time::Duration;

use axum::http::header::AUTHORIZATION;
use axum::http::{Request, StatusCode};
use clap::error::ErrorKind;
use clap::{CommandFactory as _, Parser, Subcommand};
use http_body_util::{BodyExt as _, Empty};
use hyper::body::Bytes;
use hyper_util::client::legacy::Client;
use hyper_util::rt::TokioExecutor;
use lowtide::memory::Shutdown;
use lowtide::metrics::prometheus;
use lowtide::{BoxError, Memory};
use tokio::runtime::Handle;
use tokio::signal::unix::{SignalKind, signal};
use tracing::level_filters::LevelFilter;
use tracing_subscriber::filter::{ParseError, Targets};
use tracing_subscriber::layer::SubscriberExt as _;
use tracing_subscriber::util::SubscriberInitExt as _;

use crate::app;
use crate::forward::whole;

/// The exit code after exhausted memory, from sysexits.h: a failure that may be gone in the next
/// attempt.
const EX_TEMPFAIL: u8 = 75;

/// The timeout of a health check, and of a request of another subcommand.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(3);

#[derive(Debug, Parser)]
#[command(about = "A reverse proxy that returns unused memory", version)]
struct Cli {
    #[command(flatten)]
    options: app::Options,
    /// Time after SIGTERM during which all requests are still served, /readyz returns 503 and each
    /// response closes its connection, so that no client sends its next request to a closing one;
    /// 0s for none.
    #[arg(long, env = "PROXY_DRAIN", value_parser = humantime::parse_duration)]
    #[arg(default_value = "1s")]
    drain: Duration,
    /// Time for requests to finish after the drain time.
    #[arg(long, env = "PROXY_GRACE", value_parser = humantime::parse_duration)]
    #[arg(default_value = "10s")]
    grace: Duration,
    #[command(subcommand)]
    command: Option<Command>,
}

#[derive(Clone, Debug, Subcommand)]
enum Command {
    /// Requests /healthz from the proxy at --operators, or else --listen, and exits with 0 if it is
    /// healthy.
    Healthcheck,
    /// Makes the proxy at --operators, or else --listen, fit in a smaller memory limit, before the
    /// limit of its container is lowered in place. Shows the progress, and exits with 0 if it fits,
    /// and 1 with the reason if not. Needs --admin there, or the file of --admin-token-file here.
    Fit(fit::Fit),
}

/// Runs the program with these arguments, the first of which is its name, and prints its error.
/// Returns its exit code.
pub(crate) fn run(name: &str, arguments: impl Iterator<Item = OsString>) -> u8 {
    let done = main(arguments);
    if let Err(error) = &done {
        // Not `eprintln!`, which panics if standard error is closed or full.
        let _ = writeln!(io::stderr(), "{name}: {error}");
    }
    exit_code(&done)
}

/// Exits the process itself if the arguments are invalid or request help.
fn main(arguments: impl Iterator<Item = OsString>) -> Result<(), BoxError> {
    let cli = Cli::parse_from(arguments);
    // Not clap's `conflicts_with`: a variable that says `false` would be a conflict to that.
    let token_file = &cli.options.admin_token_file;
    if cli.options.admin && token_file.is_some() {
        let text = "--admin (PROXY_ADMIN) accepts commands from this machine: expected it or \
            --admin-token-file (PROXY_ADMIN_TOKEN_FILE), not both";
        Cli::command().error(ErrorKind::ArgumentConflict, text).exit();
    }
    log();
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .on_thread_start(lowtide::memory::on_thread_start)
        .on_thread_park(lowtide::heap::on_thread_park)
        .build()?;
    match cli.command {
        None => runtime.block_on(serve(cli)),
        Some(Command::Healthcheck) => Ok(lowtide::service::healthcheck(cli.for_operators())?),
        Some(Command::Fit(ref fit)) => {
            let token = token_file.as_deref().map(app::token_text).transpose()?;
            runtime.block_on(fit.run(cli.for_operators(), token.as_deref()))
        }
    }
}

impl Cli {
    /// Returns the address at which the running proxy answers operators.
    fn for_operators(&self) -> SocketAddr {
        let at = self.options.operators.unwrap_or(self.options.listen);
        let here = SocketAddr::from(([127, 0, 0, 1], at.port()));
        if at.ip().is_unspecified() { here } else { at }
    }
}

/// Returns the exit code of a program that is done.
pub(crate) fn exit_code(done: &Result<(), BoxError>) -> u8 {
    let Err(error) = done else { return 0 };
    let report = error.downcast_ref::<Shutdown>();
    if report.is_some_and(|report| report.exhausted) { EX_TEMPFAIL } else { 1 }
}

/// Starts the log, on standard output. Lines that cannot be written are lost, and nothing else is:
/// by default the subscriber reports them with `eprintln!`, which panics in the code that logs if
/// standard error cannot be written either (a full disk, a closed pipe).
fn log() {
    #[expect(clippy::disallowed_methods, reason = "no setting: what all programs go by")]
    let no_color = std::env::var_os("NO_COLOR");
    #[expect(clippy::disallowed_methods, reason = "no setting: what all programs go by")]
    let asked = std::env::var_os("RUST_LOG").unwrap_or_default();
    let (filter, wrong) = match log_filter(&asked.to_string_lossy()) {
        Ok(filter) => (filter, None),
        Err(error) => (Targets::new().with_default(LevelFilter::INFO), Some(error)),
    };
    tracing_subscriber::fmt()
        .with_ansi(is_coloured(io::stdout().is_terminal(), no_color.as_deref()))
        .log_internal_errors(false)
        .with_max_level(LevelFilter::TRACE)
        .finish()
        .with(filter)
        .init();
    if let Some(error) = wrong {
        tracing::warn!(%error, "RUST_LOG ignored");
    }
}

/// Returns the filter of a `RUST_LOG`: a level, and levels of single targets, such as
/// `info,lowtide=debug`. Empty means `info`.
pub(crate) fn log_filter(text: &str) -> Result<Targets, ParseError> {
    let parts: Vec<_> = text.split(',').map(str::trim).filter(|part| !part.is_empty()).collect();
    if parts.is_empty() {
        return Ok(Targets::new().with_default(LevelFilter::INFO));
    }
    parts.join(",").parse()
}

/// Returns `true` if the log has colour codes: on a terminal, unless `NO_COLOR` is set.
pub(crate) fn is_coloured(is_terminal: bool, no_color: Option<&OsStr>) -> bool {
    is_terminal && no_color.is_none_or(OsStr::is_empty)
}

/// Has parked workers run, so that they empty their caches when they park again.
fn wake(runtime: &Handle) {
    for _ in 0..runtime.metrics().num_workers() {
        runtime.spawn(async {});
    }
}

async fn serve(cli: Cli) -> Result<(), BoxError> {
    let workers = Handle::current();
    let memory = Memory::builder()
        .prometheus()?
        .after_tcache_flush_request(move || wake(&workers))
        .start()?;
    let operators = cli.options.operators.filter(|at| *at != cli.options.listen);
    let options = app::Options { operators, ..cli.options };
    // Installed before it listens: a client that sees it listening may send a signal.
    let terminated = memory.terminated()?;
    let render = || prometheus::render().unwrap_or_default();
    let running = app::start(options, Some(memory.clone()), render).await?;
    terminated.await;
    tracing::info!(drain = ?cli.drain, grace = ?cli.grace, "stopping");
    if !cli.drain.is_zero() {
        // A second signal ends it.
        let mut terminate = signal(SignalKind::terminate())?;
        let mut interrupt = signal(SignalKind::interrupt())?;
        tokio::select! {
            () = running.drain(cli.drain) => {}
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
        }
    }
    let ended = running.stop(cli.grace).await;
    let report = memory.shutdown(Duration::from_secs(5)).await;
    tracing::info!(all_requests_ended = ended, %report, "stopped");
    // Other outstanding work is no reason to be restarted.
    if report.exhausted { Err(report.into()) } else { Ok(()) }
}

/// Sends a request to the running proxy, with this token for admin commands, and returns its answer.
async fn ask(
    at: SocketAddr,
    method: &str,
    path: &str,
    token: Option<&str>,
) -> Result<(StatusCode, Bytes), BoxError> {
    let request = Request::builder().method(method).uri(format!("http://{at}{path}"));
    let mut request = request.header("lowtide-admin", "1");
    if let Some(token) = token {
        request = request.header(AUTHORIZATION, format!("Bearer {token}"));
    }
    let client: Client<_, Empty<Bytes>> = Client::builder(TokioExecutor::new()).build_http();
    let asked = client.request(request.body(Empty::new())?);
    let ask = async {
        let answer =
            asked.await.map_err(|error| format!("cannot reach {at}: {}", whole(&error)))?;
        let status = answer.status();
        let text = answer.into_body().collect().await?.to_bytes();
        Ok::<_, BoxError>((status, text))
    };
    tokio::time::timeout(ANSWER_TIMEOUT, ask)
        .await
        .map_err(|_| format!("{at} did not answer within {ANSWER_TIMEOUT:?}"))?
}
