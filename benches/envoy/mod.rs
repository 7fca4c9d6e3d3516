//! Envoy as a process, for benches.

use std::net::SocketAddr;
use std::path::Path;
use std::process::Command;

use lowtide::BoxError;

use crate::common::process::Process;

/// Starts Envoy with this configuration and waits until it listens at its address. It ends with
/// this process, even if this process is killed.
pub(crate) fn start(
    program: &Path,
    configuration: &str,
    front: SocketAddr,
) -> Result<Process, BoxError> {
    let mut command = Command::new("setpriv");
    command.args(["--pdeathsig", "KILL"]).arg(program);
    command.args(["--disable-hot-restart", "--concurrency", "2", "--log-level", "error"]);
    let mut envoy = Process::spawn(command.args(["--config-yaml", configuration]))?;
    envoy.accepts(front)?;
    Ok(envoy)
}
