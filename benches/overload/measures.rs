//! The figures of a cell.
//!
//! Goodput is that of the steady part: answers that ended after the longest hold had passed once
//! and before the load ended, over that time. What was shed, and how the classes shared, is of all
//! requests. A request without an outcome is failed: what was under way when its service died.
//!
//! Invariant: `served + shed + failed = offered`, in requests and in bytes, of each class.

use std::fmt;
use std::time::Duration;

use crate::cell::Outcome;
use crate::common::figures::{Figures, count, part, quantile};
use crate::load::{Fate, Seen};
use crate::mix::{CLASSES, HOLD};
use crate::schedule::Offer;

/// Bytes of a MiB.
const MIB: f64 = 1_048_576.0;
/// A route and size is learned after so many requests.
const LEARNED: usize = 30;

/// The numbers of one cell.
#[derive(Clone, Debug, Default)]
pub(crate) struct Measures {
    /// MiB of bodies that were served a second.
    goodput_mib: f64,
    /// The same of the second half of the time: once everything is learned.
    pub(crate) learned_goodput_mib: f64,
    /// The part of the offered bytes that was shed.
    shed_bytes: f64,
    /// Requests of each class that were shed.
    pub(crate) sheds: [u64; CLASSES.len()],
    /// The same after the first [`LEARNED`] requests of each class.
    pub(crate) learned_sheds: [u64; CLASSES.len()],
    /// The number of all requests after those.
    pub(crate) learned_sent: u64,
    /// Of each class: its part of the served bytes over its part of the offered ones.
    pub(crate) shares: [f64; CLASSES.len()],
    /// Latency of what was served beyond the hold that it asked for, of each class.
    p99s_ms: [f64; CLASSES.len()],
    /// Highest working set.
    peak_mib: f64,
    /// The delay of the sending, 99th percentile in milliseconds.
    late_p99_ms: f64,
    /// `true` if the service ended too early.
    pub(crate) died: bool,
    /// Killed for memory.
    pub(crate) oom_kills: u64,
}

/// Bytes of one class, and the requests of it that were shed.
#[derive(Clone, Copy, Debug, Default)]
struct Sums {
    offered: f64,
    served: f64,
    shed: f64,
    sheds: u64,
}

impl Measures {
    /// Of this offer and what came of it.
    pub(crate) fn of(offer: &Offer, outcome: &Outcome) -> Self {
        let seen = &outcome.seen;
        let sums = sums(offer, seen);
        let total = |of: fn(&Sums) -> f64| sums.iter().map(of).sum::<f64>();
        let (offered, served) = (total(|sum| sum.offered), total(|sum| sum.served));
        let (from, to) = steady(offer.lasts());
        let goodput_since = |from: f64| {
            let in_time = |one: &&Seen| {
                one.fate == Fate::Served && (from..=to).contains(&(one.at + one.took))
            };
            let bytes = seen.iter().filter(in_time).map(|one| one.bytes).sum();
            1e3 * count(bytes) / MIB / (to - from)
        };
        let p99 = |class: usize| {
            let of_class = seen.iter().filter(|one| one.fate == Fate::Served && one.class == class);
            quantile(&of_class.map(|one| one.took - one.hold).collect::<Vec<_>>(), 0.99)
        };
        let sent = seen.iter().filter(|one| one.took > 0.0).map(|one| one.late);
        let learned = |class| learned(seen, class);
        Self {
            goodput_mib: goodput_since(from),
            learned_goodput_mib: goodput_since(from.max(to / 2.0)),
            shed_bytes: part(total(|sum| sum.shed), offered),
            sheds: sums.map(|sum| sum.sheds),
            learned_sheds: std::array::from_fn(|class| {
                learned(class).filter(|one| one.fate == Fate::Shed).count() as u64
            }),
            learned_sent: (0..CLASSES.len()).map(|class| learned(class).count() as u64).sum(),
            shares: sums.map(|sum| part(part(sum.served, served), part(sum.offered, offered))),
            p99s_ms: std::array::from_fn(p99),
            peak_mib: outcome.peak.as_f64() / MIB,
            late_p99_ms: quantile(&sent.collect::<Vec<_>>(), 0.99),
            died: outcome.died,
            oom_kills: outcome.oom_kills,
        }
    }

    /// Writes them down under this name.
    pub(crate) fn tell(&self, name: &str, figures: &mut Figures) {
        let mut add = |end: &str, value: f64, unit| {
            figures.add(format!("overload.{name}.{end}"), value, unit);
        };
        add("oom_kills", count(self.oom_kills), "kills");
        add("shed_bytes_ratio", self.shed_bytes, "ratio");
        add("sheds_small", count(self.sheds[0]), "requests");
        add("peak_mib", self.peak_mib, "MiB");
        for (class, share) in CLASSES.iter().zip(self.shares) {
            add(&format!("share.{class}"), share, "ratio");
        }
        for (class, late) in CLASSES.iter().zip(self.p99s_ms) {
            add(&format!("p99_ms.{class}"), late, "ms");
        }
        add("goodput_mib_s", self.goodput_mib, "MiB/s");
        add("learned_goodput_mib_s", self.learned_goodput_mib, "MiB/s");
    }
}

impl fmt::Display for Measures {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let end = match (self.died, self.oom_kills) {
            (false, _) => "survived",
            (true, 0) => "died",
            (true, _) => "OOM-killed",
        };
        write!(
            f,
            "{:>5.1} MiB/s, {:>4.1} % of the bytes shed, shares {:.2?}, p99 {:.0?} ms, peak {:.0} \
             MiB, sent {:.1} ms late, {end}",
            self.goodput_mib,
            100.0 * self.shed_bytes,
            self.shares,
            self.p99s_ms,
            self.peak_mib,
            self.late_p99_ms
        )
    }
}

/// The steady part in milliseconds; all of it where the load is too short for one.
fn steady(lasts: Duration) -> (f64, f64) {
    let (from, to) = (HOLD[1].as_secs_f64() * 1e3, lasts.as_secs_f64() * 1e3);
    if to > from * 1.5 { (from, to) } else { (0.0, to) }
}

fn sums(offer: &Offer, seen: &[Seen]) -> [Sums; CLASSES.len()] {
    let mut sums = [Sums::default(); CLASSES.len()];
    // Offered is what the schedule says: what was under way when the time was up is in no tally.
    for arrival in offer.arrivals() {
        sums[arrival.class].offered += arrival.size.as_f64();
    }
    for one in seen {
        let sum = &mut sums[one.class];
        match one.fate {
            Fate::Served => sum.served += count(one.bytes),
            Fate::Shed => {
                sum.shed += count(one.bytes);
                sum.sheds += 1;
            }
            Fate::Failed => {}
        }
    }
    sums
}

/// Returns the requests of a class after its first ones.
fn learned(seen: &[Seen], class: usize) -> impl Iterator<Item = &Seen> {
    let mut all: Vec<&Seen> = seen.iter().filter(|one| one.class == class).collect();
    all.sort_by(|one, other| one.at.total_cmp(&other.at));
    all.into_iter().skip(LEARNED)
}
