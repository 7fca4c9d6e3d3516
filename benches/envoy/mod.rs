//! Envoy as a process, for benches.

use std::net::{SocketAddr, TcpStream};
use std::path::Path;
use std::process::{Child, Command};
use std::time::{Duration, Instant};

use lowtide::BoxError;

/// The longest time from Envoy's start until it listens.
const START_PATIENCE: Duration = Duration::from_secs(8);
/// The time between two attempts to connect.
const LOOK_EVERY: Duration = Duration::from_millis(20);

/// Starts Envoy with this configuration and waits until it listens at its address. It ends with
/// this process, even if this process is killed.
pub(crate) fn start(
    program: &Path,
    configuration: &str,
    front: SocketAddr,
) -> Result<Child, BoxError> {
    let mut envoy = Command::new("setpriv")
        .args(["--pdeathsig", "KILL"])
        .arg(program)
        .args(["--disable-hot-restart", "--concurrency", "2", "--log-level", "error"])
        .args(["--config-yaml", configuration])
        .spawn()?;
    let end = Instant::now() + START_PATIENCE;
    while TcpStream::connect(front).is_err() {
        if Instant::now() > end || envoy.try_wait()?.is_some() {
            let _ = envoy.kill();
            return Err("Envoy did not start".into());
        }
        std::thread::sleep(LOOK_EVERY);
    }
    Ok(envoy)
}
