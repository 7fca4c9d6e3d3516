//! Envoy as the service under load, with its overload manager as the policy.
//!
//! Envoy collects each body, holds it for as long as the request asks, and answers it. There is no
//! service behind it, so a request holds its body once. `envoy.yaml` is its configuration.

use std::net::{Ipv4Addr, TcpListener};
use std::path::Path;

use axum::routing::get;
use axum::{Json, Router};
use lowtide::BoxError;

use crate::service::Report;

const TEMPLATE: &str = include_str!("envoy.yaml");

/// Starts Envoy in this process's cgroup and serves until this process is killed or Envoy ends.
pub(crate) fn serve(program: &Path, percent: u32) -> Result<(), BoxError> {
    let front = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?.local_addr()?;
    let configuration = TEMPLATE
        .replace("PORT", &front.port().to_string())
        .replace("THRESHOLD", &(f64::from(percent) / 100.0).to_string());
    let mut envoy = crate::envoy_process::start(program, &configuration, front)?;
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
