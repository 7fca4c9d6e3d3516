//! A service in a process and a memory cgroup of its own, so that the kernel may kill it.

use std::io::{BufRead, BufReader};
use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};

use lowtide::{BoxError, ByteSize};

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

impl Service {
    /// Returns the entrance of this process's cgroup if it is to be the service of this part.
    pub(crate) fn entrance(part: &str) -> Option<PathBuf> {
        let mut after = std::env::args().skip_while(|argument| argument != part).skip(1);
        after.next().filter(|argument| !argument.starts_with('-')).map(PathBuf::from)
    }

    /// Returns why no cgroup can be created here.
    pub(crate) fn missing() -> Option<String> {
        Group::make(&name("check"), Some(LIMIT.get())).err()
    }

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
