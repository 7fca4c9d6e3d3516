//! A process under measurement, seen from the driver: what it says, and what it has resident.
//!
//! Invariant: it ends with this, whatever happens.

use std::io::{BufRead as _, BufReader};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::time::Duration;

use retention::BoxError;
use retention::statm::Process;

use crate::Contestant;

/// The longest time that a process may take to print a line.
const PATIENCE: Duration = Duration::from_secs(300);

/// A process that runs.
pub(crate) struct Running {
    child: Child,
    input: Option<ChildStdin>,
    lines: Receiver<String>,
    /// The kernel's figures for it.
    pub(crate) process: Process,
}

impl Running {
    /// Starts one of these with arguments, the way last.
    pub(crate) fn start(who: &Contestant, arguments: &[&str]) -> Result<Self, BoxError> {
        let mut command = Command::new(who.program);
        command.args(arguments).stdin(Stdio::piped()).stdout(Stdio::piped());
        for name in ["MALLOC_ARENA_MAX", "MALLOC_CONF", crate::contestants::CONF] {
            command.env_remove(name);
        }
        if !who.way.is_empty() {
            command.arg(&who.way);
        }
        if let Some((name, value)) = &who.variable {
            command.env(name, value);
        }
        let mut child = command.spawn()?;
        let (input, output) = (child.stdin.take(), child.stdout.take());
        let process = Process::other(child.id());
        let (tell, lines) = mpsc::channel();
        let running = Self { child, input, lines, process };
        let output = output.ok_or("no pipe from the child")?;
        // Ends with the child.
        std::thread::spawn(move || {
            for line in BufReader::new(output).lines().map_while(Result::ok) {
                if tell.send(line).is_err() {
                    return;
                }
            }
        });
        Ok(running)
    }

    /// Reads its next line, which begins with this word, and returns the rest of the line.
    pub(crate) fn expect(&self, word: &str) -> Result<String, BoxError> {
        self.expect_within(word, PATIENCE)?.ok_or_else(|| format!("no {word:?} in time").into())
    }

    /// The same; nothing where it says nothing for so long.
    pub(crate) fn expect_within(
        &self,
        word: &str,
        patience: Duration,
    ) -> Result<Option<String>, BoxError> {
        let line = match self.lines.recv_timeout(patience) {
            Ok(line) => line,
            Err(RecvTimeoutError::Timeout) => return Ok(None),
            Err(RecvTimeoutError::Disconnected) => {
                return Err(format!("it ended before it said {word:?}").into());
            }
        };
        let rest = line.strip_prefix(word);
        Ok(Some(rest.ok_or_else(|| format!("it said {line:?}: expected {word:?}"))?.to_owned()))
    }

    /// Ends its standard input and waits for its end.
    pub(crate) fn end(mut self) -> Result<(), BoxError> {
        drop(self.input.take());
        let status = self.child.wait()?;
        if status.success() { Ok(()) } else { Err(format!("it ended with {status}").into()) }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The value of `name=value` in what it said.
pub(crate) fn field(said: &str, name: &str) -> Result<f64, BoxError> {
    let value = said.split_whitespace().find_map(|word| word.strip_prefix(name)?.strip_prefix('='));
    Ok(value.ok_or_else(|| format!("it said {said:?}: no {name}"))?.parse()?)
}
