//! The kernel's figures for this process.

use std::fs;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::{Scope, ScopedJoinHandle, sleep};
use std::time::Duration;

use crate::BoxError;

/// The time between two looks at the anonymous memory during a burst.
const LOOK: Duration = Duration::from_millis(1);
/// Clock ticks per second in `/proc/self/stat`, on every Linux.
const TICKS: f64 = 100.0;

/// Anonymous memory, in MiB.
pub fn anonymous_mib() -> Result<f64, BoxError> {
    mib("/proc/self/smaps_rollup", "Anonymous:")
}

/// The largest resident set since [`reset_peak`], in MiB.
pub(crate) fn peak_mib() -> Result<f64, BoxError> {
    mib("/proc/self/status", "VmHWM:")
}

/// Makes the present resident set the peak.
pub(crate) fn reset_peak() -> Result<(), BoxError> {
    Ok(fs::write("/proc/self/clear_refs", "5")?)
}

/// What the process used so far.
#[derive(Clone, Copy, Debug)]
pub struct Used {
    /// Page faults without a read of a file.
    pub faults: f64,
    /// Seconds of CPU time of all threads, to a hundredth.
    pub cpu_seconds: f64,
}

/// Reads what the process used so far.
///
/// # Errors
/// The kernel's file cannot be read.
pub fn used() -> Result<Used, BoxError> {
    let stat = fs::read_to_string("/proc/self/stat")?;
    // The name of the program, in parentheses, may hold spaces.
    let fields = stat.rsplit_once(')').map_or("", |(_, fields)| fields);
    let fields: Vec<_> = fields.split_whitespace().collect();
    let field = |number: usize| -> Result<f64, BoxError> {
        let text = fields.get(number).ok_or("/proc/self/stat is too short")?;
        Ok(text.parse()?)
    };
    Ok(Used { faults: field(7)?, cpu_seconds: (field(11)? + field(12)?) / TICKS })
}

fn mib(file: &str, field: &str) -> Result<f64, BoxError> {
    let text = fs::read_to_string(file)?;
    let line = text.lines().find_map(|line| line.strip_prefix(field));
    let kib = line.and_then(|line| line.trim().strip_suffix("kB"));
    let kib: f64 = kib.ok_or_else(|| format!("{file} has no {field}"))?.trim().parse()?;
    Ok(kib / 1024.0)
}

/// The largest anonymous memory that a thread sees, which looks every millisecond.
#[derive(Debug, Default)]
pub(crate) struct AnonymousPeak {
    ended: AtomicBool,
    kib: AtomicU64,
}

impl AnonymousPeak {
    /// Starts to look.
    pub(crate) fn start<'s>(&'s self, scope: &'s Scope<'s, '_>) -> ScopedJoinHandle<'s, ()> {
        scope.spawn(|| {
            while !self.ended.load(Ordering::SeqCst) {
                if let Ok(text) = fs::read_to_string("/proc/self/status") {
                    let line = text.lines().find_map(|line| line.strip_prefix("RssAnon:"));
                    let kib = line.and_then(|line| line.trim().strip_suffix("kB"));
                    let kib = kib.and_then(|kib| kib.trim().parse().ok()).unwrap_or(0);
                    self.kib.fetch_max(kib, Ordering::SeqCst);
                }
                sleep(LOOK);
            }
        })
    }

    /// Ends it, and returns MiB.
    pub(crate) fn end(&self) -> f64 {
        self.ended.store(true, Ordering::SeqCst);
        let kib = u32::try_from(self.kib.load(Ordering::SeqCst)).unwrap_or(u32::MAX);
        f64::from(kib) / 1024.0
    }
}
