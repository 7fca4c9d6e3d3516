//! A service in a process and a memory cgroup of its own, so that the kernel may kill it.

use std::io::{BufRead, BufReader};
use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};

use lowtide::{BoxError, ByteSize};
use tokio::runtime::Runtime;

use crate::cgroup::Group;

/// The limit of the cgroup.
const LIMIT: ByteSize = ByteSize::mib(256);

/// A service that runs.
pub(crate) struct Service {
    process: Child,
    pub(crate) address: SocketAddr,
    // Removed after the process has ended.
    _group: Group,
}

/// Runs the part: as its service if this process is to be that, else as its clients. The service
/// gets the entrance of its cgroup.
pub(crate) fn stage(
    part: &str,
    serve: fn(PathBuf) -> Result<(), BoxError>,
    measure: fn(&Runtime) -> Result<(), BoxError>,
) -> Result<(), BoxError> {
    let mut after = std::env::args().skip_while(|argument| argument != part).skip(1);
    if let Some(entrance) = after.next().filter(|argument| !argument.starts_with('-')) {
        return serve(entrance.into());
    }
    if let Err(reason) = Group::make(&name("check"), Some(LIMIT.get())) {
        println!("skipped: {reason}");
        return Ok(());
    }
    measure(&tokio::runtime::Builder::new_multi_thread().enable_all().build()?)
}

impl Service {
    /// Starts this program as the service of this part, and waits until it prints its address.
    pub(crate) fn start(part: &str) -> Result<Self, BoxError> {
        let group = Group::make(&name(part), Some(LIMIT.get()))?;
        let mut process = Command::new(std::env::current_exe()?)
            .arg(part)
            .arg(group.entrance())
            .stdout(Stdio::piped())
            .spawn()?;
        let output = process.stdout.take().ok_or("no output")?;
        let mut line = String::new();
        BufReader::new(output).read_line(&mut line)?;
        Ok(Self { process, address: line.trim().parse()?, _group: group })
    }

    /// Ends the service, and returns `true` if it had ended before.
    pub(crate) fn end(mut self) -> Result<bool, BoxError> {
        let has_ended = self.process.try_wait()?.is_some();
        if !has_ended {
            self.process.kill()?;
            self.process.wait()?;
        }
        Ok(has_ended)
    }
}

fn name(part: &str) -> String {
    format!("lowtide-{part}-{}", std::process::id())
}
