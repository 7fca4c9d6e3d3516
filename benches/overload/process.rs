//! Processes of a bench: this program again, as a service in its cgroup or as the source of load.
//!
//! Invariant: a process ends with its handle, and every wait has an end.

use std::io::{BufRead as _, BufReader};
use std::net::SocketAddr;
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use lowtide::BoxError;

use crate::cgroup::Group;

/// The longest time that a service may take to listen.
const START_PATIENCE: Duration = Duration::from_secs(10);
/// The longest time that a killed process may take to be gone, and its cgroup to be empty.
const END_PATIENCE: Duration = Duration::from_secs(5);
/// The time between two looks.
const LOOK_EVERY: Duration = Duration::from_millis(5);

/// This program, with as many file descriptors as it may have: it needs one for each request under
/// way.
pub(crate) fn own() -> Result<Command, BoxError> {
    let run = "ulimit -S -n \"$(ulimit -H -n)\"; exec \"$@\"";
    let mut command = Command::new("/bin/sh");
    command.args(["-c", run, "own"]).arg(std::env::current_exe()?);
    Ok(command)
}

/// The same inside a cgroup: a shell enters it and becomes the program, so that none of its memory
/// is charged elsewhere.
pub(crate) fn entering(group: &Group) -> Result<Command, BoxError> {
    let enter = "ulimit -S -n \"$(ulimit -H -n)\"; echo $$ >\"$0\" && exec \"$@\"";
    let mut command = Command::new("/bin/sh");
    command.args(["-c", enter]).arg(group.entrance()).arg(std::env::current_exe()?);
    Ok(command)
}

/// A process of ours; it is killed when this is dropped.
pub(crate) struct Process(pub(crate) Child);

impl Process {
    /// Starts a program that reads its standard input until its end, and writes to a pipe.
    pub(crate) fn start(mut command: Command) -> Result<Self, BoxError> {
        Ok(Self(command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?))
    }

    /// Waits until it listens, and says where.
    pub(crate) fn addresses(&mut self) -> Result<(SocketAddr, SocketAddr), BoxError> {
        let output = self.0.stdout.take().ok_or("no pipe from the service")?;
        let (tell, told) = mpsc::sync_channel(1);
        // Ends with the first line, or with the service.
        std::thread::spawn(move || {
            let mut line = String::new();
            let read = BufReader::new(output).read_line(&mut line);
            let _ = tell.send(read.map(|_| line));
        });
        let line = told.recv_timeout(START_PATIENCE)??;
        let addresses =
            line.trim().strip_prefix("listening ").and_then(|rest| rest.split_once(' '));
        let (front, back) = addresses.ok_or_else(|| format!("the service said {line:?}"))?;
        Ok((front.parse()?, back.parse()?))
    }

    /// Returns its exit status if it has ended.
    pub(crate) fn ended(&mut self) -> Option<ExitStatus> {
        self.0.try_wait().ok().flatten()
    }

    /// Kills it and waits until it is gone.
    pub(crate) fn end(&mut self) -> Result<(), BoxError> {
        let deadline = Instant::now() + END_PATIENCE;
        let _ = self.0.kill();
        while self.ended().is_none() {
            if Instant::now() > deadline {
                return Err("a process cannot be killed".into());
            }
            std::thread::sleep(LOOK_EVERY);
        }
        Ok(())
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.end();
    }
}

/// Removes the cgroup, which may take a moment after its last process.
pub(crate) fn remove(folder: &Path) {
    let deadline = Instant::now() + END_PATIENCE;
    while folder.exists() && Instant::now() < deadline {
        if std::fs::remove_dir(folder).is_err() {
            std::thread::sleep(LOOK_EVERY);
        }
    }
}
