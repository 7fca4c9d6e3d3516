//! Envoy as the service under load, with its overload manager as the policy.
//!
//! Envoy collects each body, holds it for as long as the request asks, and answers it. There is no
//! service behind it, so a request holds its body once. `envoy.yaml` is its configuration.

use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use axum::routing::get;
use axum::{Json, Router};
use lowtide::BoxError;

use crate::service::Report;

const TEMPLATE: &str = include_str!("envoy.yaml");
/// The longest time from Envoy's start until it listens.
const START_PATIENCE: Duration = Duration::from_secs(8);
/// The time between two attempts to connect.
const LOOK_EVERY: Duration = Duration::from_millis(20);

/// Starts Envoy in this process's cgroup and serves until this process is killed or Envoy ends.
pub(crate) fn serve(program: &Path, percent: u32) -> Result<(), BoxError> {
    let front = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?.local_addr()?;
    let configuration = TEMPLATE
        .replace("PORT", &front.port().to_string())
        .replace("THRESHOLD", &(f64::from(percent) / 100.0).to_string());
    // Envoy ends with this process, even if this process is killed.
    let mut envoy = Command::new("setpriv")
        .args(["--pdeathsig", "KILL"])
        .arg(program)
        .args(["--disable-hot-restart", "--concurrency", "2", "--log-level", "error"])
        .args(["--config-yaml", &configuration])
        .spawn()?;
    let end = Instant::now() + START_PATIENCE;
    while TcpStream::connect(front).is_err() {
        if Instant::now() > end || envoy.try_wait()?.is_some() {
            return Err("Envoy did not start".into());
        }
        std::thread::sleep(LOOK_EVERY);
    }
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        let listener = tokio::net::TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await?;
        println!("listening {front} {}", listener.local_addr()?);
        let report = Router::new().route("/report", get(async || Json(Report::default())));
        let ended = tokio::task::spawn_blocking(move || envoy.wait());
        tokio::select! {
            served = axum::serve(listener, report) => Ok(served?),
            ended = ended => Err(format!("Envoy ended: {}", ended??).into()),
        }
    })
}
