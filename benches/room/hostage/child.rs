//! A service as a child process, in a memory cgroup of its own if one can be made here.
//!
//! Invariant: the process ends with its value, and so does the cgroup.
#![expect(clippy::disallowed_methods, reason = "another process is waited for")]

use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use lowtide::{BoxError, ByteSize};

use crate::cgroup::Group;

/// The longest time from a start until the service accepts connections.
const START_PATIENCE: Duration = Duration::from_secs(10);
const LOOK_EVERY: Duration = Duration::from_millis(20);

/// A service that runs.
#[derive(Debug)]
pub(crate) struct Service {
    process: Child,
    pub(crate) at: SocketAddr,
    /// Without one, only the service itself keeps the limit.
    _group: Option<Group>,
}

impl Service {
    /// Starts a program under this limit and waits until it accepts connections at `at`.
    pub(crate) fn start(
        program: &Path,
        arguments: &[String],
        at: SocketAddr,
        limit: ByteSize,
    ) -> Result<Self, BoxError> {
        let name = format!("lowtide-hostage-{}-{}", std::process::id(), at.port());
        let group = Group::make(&name, Some(limit.get())).ok();
        let entrance = group.as_ref().map_or_else(|| "/dev/null".into(), Group::entrance);
        let enter = "ulimit -S -n \"$(ulimit -H -n)\"; echo $$ >\"$0\" && exec \"$@\"";
        let process = Command::new("/bin/sh")
            .args(["-c", enter])
            .arg(entrance)
            .arg(program)
            .args(arguments)
            .env("LOWTIDE_MEMORY_LIMIT", limit.get().to_string())
            .env("LOWTIDE_DEVICE", "host")
            .env("LOWTIDE_METRICS_INTERVAL", "100ms")
            .env("RUST_LOG", "error")
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .spawn()?;
        let mut service = Self { process, at, _group: group };
        let end = Instant::now() + START_PATIENCE;
        while TcpStream::connect(at).is_err() {
            if service.has_ended() || Instant::now() > end {
                return Err(format!("{} did not start", program.display()).into());
            }
            std::thread::sleep(LOOK_EVERY);
        }
        Ok(service)
    }

    /// Returns `true` if the process has ended by itself, or was killed.
    pub(crate) fn has_ended(&mut self) -> bool {
        !matches!(self.process.try_wait(), Ok(None))
    }

    /// Returns `true` if a cgroup has the limit.
    pub(crate) const fn is_confined(&self) -> bool {
        self._group.is_some()
    }
}

impl Drop for Service {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// Returns an address of this machine that was free a moment ago.
pub(crate) fn free_port() -> std::io::Result<SocketAddr> {
    TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?.local_addr()
}
