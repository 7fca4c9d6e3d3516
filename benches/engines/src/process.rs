//! The kernel's figures for a process, and the requests of a burst.

#[path = "../../../crates/admission/tests/admission/sim/chance.rs"]
#[allow(dead_code, reason = "others use more of it")]
mod chance;

use std::fs;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::{Scope, sleep};
use std::time::Duration;

use self::chance::Chance;
use super::BoxError;

/// The time between two looks at the anonymous memory during a burst.
const LOOK: Duration = Duration::from_millis(1);
/// Clock ticks per second in `/proc/PID/stat`, on every Linux.
const TICKS: f64 = 100.0;

/// What this process used so far.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Used {
    /// Page faults without a read of a file.
    pub(crate) faults: f64,
    /// Seconds of CPU time of all threads, those that ended too, to a hundredth.
    pub(crate) cpu_seconds: f64,
}

/// Anonymous memory, in MiB.
pub(crate) fn anonymous_mib() -> Result<f64, BoxError> {
    mib("smaps_rollup", "Anonymous:")
}

/// The largest resident set since [`reset_peak`], in MiB.
pub(crate) fn peak_mib() -> Result<f64, BoxError> {
    mib("status", "VmHWM:")
}

/// Makes the present resident set the peak.
pub(crate) fn reset_peak() -> Result<(), BoxError> {
    Ok(fs::write("/proc/self/clear_refs", "5")?)
}

/// Reads what the process used so far.
pub(crate) fn used() -> Result<Used, BoxError> {
    let stat = fs::read_to_string("/proc/self/stat")?;
    // The name of the program, in parentheses, may hold spaces.
    let fields = stat.rsplit_once(')').map_or("", |(_, fields)| fields);
    let fields: Vec<_> = fields.split_whitespace().collect();
    let field = |number: usize| -> Result<f64, BoxError> {
        Ok(fields.get(number).ok_or("/proc/self/stat is too short")?.parse()?)
    };
    Ok(Used { faults: field(7)?, cpu_seconds: (field(11)? + field(12)?) / TICKS })
}

fn mib(file: &str, field: &str) -> Result<f64, BoxError> {
    let text = fs::read_to_string(format!("/proc/self/{file}"))?;
    let line = text.lines().find_map(|line| line.strip_prefix(field));
    let kib = line.and_then(|line| line.trim().strip_suffix("kB"));
    let kib: f64 = kib.ok_or_else(|| format!("{file} has no {field}"))?.trim().parse()?;
    Ok(kib / 1024.0)
}

/// The largest anonymous memory that a thread sees, which looks every millisecond.
#[derive(Debug, Default)]
pub(crate) struct AnonymousPeak {
    ended: AtomicBool,
    mib: AtomicU64,
}

impl AnonymousPeak {
    /// Starts to look.
    pub(crate) fn start<'s>(&'s self, scope: &'s Scope<'s, '_>) {
        scope.spawn(|| {
            while !self.ended.load(Ordering::SeqCst) {
                let mib = mib("status", "RssAnon:").unwrap_or(0.0);
                // Positive numbers are ordered as their bits are.
                self.mib.fetch_max(mib.to_bits(), Ordering::SeqCst);
                sleep(LOOK);
            }
        });
    }

    /// Ends it, and returns MiB.
    pub(crate) fn end(&self) -> f64 {
        self.ended.store(true, Ordering::SeqCst);
        f64::from_bits(self.mib.load(Ordering::SeqCst))
    }
}

// The requests of a burst: many short ones, some long, of 1 to 8 rows.

/// Rows of one length.
#[derive(Debug)]
pub(crate) struct Batch {
    pub(crate) rows: usize,
    pub(crate) length: usize,
    pub(crate) ids: Vec<i64>,
    pub(crate) mask: Vec<i64>,
    pub(crate) types: Vec<i64>,
}

/// Rows, and the tokens of requests with so many, before the shuffle.
const SHAPES: [(usize, &[usize]); 4] = [
    (1, &[10, 16, 24, 48, 80, 120, 240]),
    (2, &[24, 80, 240]),
    (4, &[40, 80, 160]),
    (8, &[24, 80, 240]),
];
const REQUESTS: usize = 32;
/// Tokens of words in the vocabulary of BERT.
const WORDS: std::ops::Range<i64> = 1_996..30_522;

/// The requests of one burst.
pub(crate) fn batches(seed: u64) -> impl Iterator<Item = Batch> {
    let mut random = Chance::new(seed);
    let of = |(rows, lengths): &(usize, &'static [usize])| {
        let rows = *rows;
        lengths.iter().map(move |length| (rows, *length))
    };
    let mut shapes: Vec<_> = SHAPES.iter().cycle().flat_map(of).take(REQUESTS).collect();
    for last in (1..shapes.len()).rev() {
        shapes.swap(last, random.below(last + 1));
    }
    shapes.into_iter().map(move |(rows, length)| {
        let length = length + random.below(1 + length / 4);
        let ids = words(&mut random, rows * length);
        Batch { rows, length, ids, mask: vec![1; rows * length], types: vec![0; rows * length] }
    })
}

fn words(random: &mut Chance, count: usize) -> Vec<i64> {
    let range = WORDS.end.abs_diff(WORDS.start);
    (0..count).map(|_| WORDS.start.saturating_add_unsigned((random.next() >> 1) % range)).collect()
}
