//! Envoy as the service under load, with its overload manager as the policy.
//!
//! Envoy collects each body, holds it for as long as the request asks, and answers it. There is no
//! service behind it, so a request holds its body once. `envoy.yaml` is its configuration.

use std::path::Path;

use lowtide::BoxError;

use crate::common::process::free_port;

const TEMPLATE: &str = include_str!("envoy.yaml");

/// Starts Envoy in this process's cgroup and serves until this process is killed or Envoy ends.
pub(crate) fn serve(program: &Path, percent: u32) -> Result<(), BoxError> {
    let front = free_port()?;
    let configuration = TEMPLATE
        .replace("PORT", &front.port().to_string())
        .replace("THRESHOLD", &(f64::from(percent) / 100.0).to_string());
    let mut envoy = crate::envoy_process::start(program, &configuration, front)?;
    println!("{front}");
    Err(format!("Envoy ended: {}", envoy.wait()?).into())
}
