//! A process for each part: its deadline, what it writes, and how it ends.
//!
//! The program starts itself once a part. A part that panics, aborts, hangs or loses the device's
//! context ends with its process, and what it wrote until then is kept. This process makes no CUDA
//! call, so nothing that happens to a device reaches it. The results file is replaced after each
//! part.
//!
//! Bound: a part has its deadline, or what is left of the budget if that is less, and
//! [`DYING`] to end after it was killed.
//!
//! Invariant: every wanted part is in the report's list of parts exactly once.

use std::io::{self, BufRead, BufReader};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::{RecvTimeoutError, sync_channel};
use std::thread;
use std::time::Duration;

use clap::ValueEnum;
use lowtide_gpu::clock::{Bell, Clock, Moment, SystemClock};

use super::cli::Args;
use super::report::{Ended, Report};
use super::{PARTS, Part};

/// A part does not begin with less time than this.
const LEAST: Duration = Duration::from_secs(1);

/// The time that a killed process has to end.
const DYING: Duration = Duration::from_secs(5);

/// The time between two looks at a process that closed its output.
const LOOK: Duration = Duration::from_millis(10);

/// The number of lines of a child that wait to be read.
const LINES: usize = 1 << 10;

/// Returns the command that runs a part in a process of its own.
pub(crate) type Start<'a> = &'a dyn Fn(Part) -> io::Result<Command>;

/// Runs every wanted part in a process of its own, the device's identification first.
pub(crate) fn supervise(args: &Args, report: &mut Report<'_>, start: Start<'_>) {
    let clock = SystemClock::new();
    let end = clock.now() + args.budget;
    let mut skipped = None;
    for part in PARTS.iter().filter(|part| args.wants(part.name)) {
        let left = end - clock.now();
        let limit = args.deadline(part).min(left);
        let is_late = (left < LEAST).then_some("no time left in the budget");
        if let Some(why) = skipped.or(is_late) {
            report.part(part.name, Ended::Skipped(why), Duration::ZERO);
        } else {
            report.line(&format!("part: {} (at most {limit:.0?})", part.name));
            let began = clock.now();
            let ended = run(&clock, part, limit, report, start);
            if part.name == PARTS[0].name && ended != Ended::Ran {
                skipped = Some("the device was not identified");
            }
            report.part(part.name, ended, clock.now() - began);
        }
        if let Some(path) = &args.json {
            report.save(path);
        }
        if report.skipped.is_some() {
            return;
        }
    }
}

/// Runs a part, and takes what it writes.
fn run(
    clock: &SystemClock,
    part: Part,
    limit: Duration,
    report: &mut Report<'_>,
    start: Start<'_>,
) -> Ended {
    let started = start(part)
        .and_then(|mut command| command.stdin(Stdio::null()).stdout(Stdio::piped()).spawn());
    let mut child = match started {
        Ok(child) => child,
        Err(error) => {
            report.fail(part.name, format!("cannot start a process: {error}"));
            return Ended::Failed;
        }
    };
    let end = clock.now() + limit;
    let failures = report.failed.len();
    report.ended = false;
    let is_whole = take(clock, &mut child, end, report);
    let status = if is_whole { wait(clock, &mut child, end) } else { None };
    let Some(status) = status else {
        // An error means that it has just ended.
        let _ = child.kill();
        if wait(clock, &mut child, clock.now() + DYING).is_none() {
            report.line(&format!("process {} did not exit within 5 s of being killed", child.id()));
        }
        return Ended::Killed(limit);
    };
    if !std::mem::take(&mut report.ended) {
        return Ended::Died(status.to_string());
    }
    if report.failed.len() > failures { Ended::Failed } else { Ended::Ran }
}

/// Takes lines until the output ends: `true`; or until the time is over: `false`. A thread reads
/// them, which ends with the output.
fn take(clock: &SystemClock, child: &mut Child, end: Moment, report: &mut Report<'_>) -> bool {
    let Some(output) = child.stdout.take() else { return true };
    let (sender, lines) = sync_channel(LINES);
    thread::spawn(move || {
        let lines = BufReader::new(output).split(b'\n').map_while(Result::ok);
        for line in lines.map(|line| String::from_utf8_lossy(&line).into_owned()) {
            if sender.send(line).is_err() {
                break;
            }
        }
    });
    loop {
        match lines.recv_timeout(end - clock.now()) {
            Ok(line) => report.take(&line),
            Err(RecvTimeoutError::Disconnected) => return true,
            Err(RecvTimeoutError::Timeout) => {
                // What had arrived by then.
                lines.try_iter().take(LINES).for_each(|line| report.take(&line));
                return false;
            }
        }
    }
}

/// Waits for a process to end, until then.
fn wait(clock: &SystemClock, child: &mut Child, end: Moment) -> Option<ExitStatus> {
    let bell = Bell::new();
    loop {
        // An error of the query is no status either.
        if let Ok(Some(status)) = child.try_wait() {
            return Some(status);
        }
        let now = clock.now();
        if now >= end {
            return None;
        }
        // No other thread notifies this bell, so this waits until the time.
        clock.wait_until(&bell, (now + LOOK).min(end));
    }
}

/// A planted fault in the process of a part.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Plant {
    /// Ends the process by a signal.
    Abort,
    /// Never returns.
    Hang,
    /// Panics.
    Panic,
    /// Loses the device's context, before the part begins.
    Lose,
}

impl Plant {
    /// Does it; a lost context is the work of the part's start.
    #[expect(clippy::panic, reason = "a planted fault")]
    pub(crate) fn set_off(self) {
        match self {
            Self::Abort => std::process::abort(),
            Self::Hang => loop {
                thread::park();
            },
            Self::Panic => panic!("a planted panic"),
            Self::Lose => {}
        }
    }
}
