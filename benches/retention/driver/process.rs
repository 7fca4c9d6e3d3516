//! A process under measurement, seen from the driver: what it says, and what it has resident.
//!
//! Invariant: it ends with this, whatever happens.

use std::fs;
use std::io::{BufRead as _, BufReader};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{self, Receiver};
use std::time::Duration;

use retention::{BoxError, count};

use crate::Contestant;

/// Ticks of `stat` in a second: `USER_HZ`, 100 on every Linux that Rust runs on.
const TICKS: f64 = 100.0;
/// The longest time that a process may take to print a line.
const PATIENCE: Duration = Duration::from_secs(300);

/// A process that runs.
pub(crate) struct Running {
    child: Child,
    input: Option<ChildStdin>,
    lines: Receiver<String>,
}

impl Running {
    /// Starts one of these with arguments, the way last.
    pub(crate) fn start(who: &Contestant, arguments: &[&str]) -> Result<Self, BoxError> {
        let mut command = Command::new(who.program);
        command.args(arguments).stdin(Stdio::piped()).stdout(Stdio::piped());
        for name in ["MALLOC_CONF", crate::contestants::CONF] {
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
        let (tell, lines) = mpsc::channel();
        let running = Self { child, input, lines };
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
        let line = self.lines.recv_timeout(PATIENCE);
        let line = line.map_err(|error| format!("it did not say {word:?}: {error}"))?;
        let rest = line.strip_prefix(word);
        Ok(rest.ok_or_else(|| format!("it said {line:?}: expected {word:?}"))?.to_owned())
    }

    fn read(&self, file: &str) -> std::io::Result<String> {
        fs::read_to_string(format!("/proc/{}/{file}", self.child.id()))
    }

    /// Resident memory, all kinds of pages.
    pub(crate) fn resident_mib(&self) -> Result<f64, BoxError> {
        let text = self.read("statm")?;
        let pages: u64 = text.split(' ').nth(1).ok_or("statm has no second field")?.parse()?;
        Ok(count(pages * 4096) / 1_048_576.0)
    }

    /// A value of `status`, such as the peak of resident memory (`VmHWM:`).
    pub(crate) fn status_mib(&self, key: &str) -> Result<f64, BoxError> {
        let text = self.read("status")?;
        let line = text.lines().find_map(|line| line.strip_prefix(key));
        let kib = line.and_then(|line| line.trim().strip_suffix("kB"));
        let kib: u64 = kib.ok_or_else(|| format!("no {key}"))?.trim().parse()?;
        Ok(count(kib) / 1024.0)
    }

    /// Seconds of a processor that all its threads have had, those that ended too.
    pub(crate) fn processor_seconds(&self) -> Result<f64, BoxError> {
        let text = self.read("stat")?;
        let (_, fields) = text.rsplit_once(')').ok_or("stat has no name")?;
        let ticks = fields.split_whitespace().skip(11).take(2).map(str::parse::<f64>);
        Ok(ticks.sum::<Result<f64, _>>()? / TICKS)
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
