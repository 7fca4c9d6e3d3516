//! The figures of a cell.
//!
//! Goodput is that of the steady part: answers that ended after the longest hold had passed once
//! and before the load ended, over that time. What was shed, and how the classes shared, is of all
//! requests. A request without an outcome is failed: what was under way when its service died.
//!
//! Invariant: `served + shed + failed = offered`, in requests and in bytes, of each class.

use std::time::Duration;

use crate::cell::Outcome;
use crate::figures::{Figures, count, part, quantile};
use crate::load::{Fate, Seen};
use crate::mix::{CLASSES, HOLD};
use crate::schedule::Offer;

/// Bytes of a MiB.
pub(crate) const MIB: f64 = 1_048_576.0;
/// A cell is void where the sending began later than this, at its 99th percentile.
const LATE_MAX_MS: f64 = 5.0;
/// A cell is void where more of the processors' time was used, by whomever.
const BUSY_MAX: f64 = 0.80;

/// A route and size is learned after so many requests.
const LEARNED: usize = 30;

/// The numbers of one cell.
#[derive(Clone, Debug, Default)]
pub(crate) struct Measures {
    /// Served a second, in requests and in MiB of their bodies.
    pub(crate) served: f64,
    /// As said.
    pub(crate) goodput_mib: f64,
    /// The same of the second half of the time: once everything is learned.
    pub(crate) learned_goodput_mib: f64,
    /// The part of the offered bytes that was shed, and that failed.
    pub(crate) shed_bytes: f64,
    /// As said.
    pub(crate) failed_bytes: f64,
    /// Requests of each class that were shed.
    pub(crate) sheds: [u64; CLASSES.len()],
    /// The same after the first [`LEARNED`] requests of each class.
    pub(crate) learned_sheds: [u64; CLASSES.len()],
    /// The number of all requests after those.
    pub(crate) learned_sent: u64,
    /// Of each class: its part of the served bytes over its part of the offered ones.
    pub(crate) shares: [f64; CLASSES.len()],
    /// Latency of what was served beyond the hold that it asked for.
    pub(crate) p99_ms: f64,
    /// The same of each class.
    pub(crate) p99s_ms: [f64; CLASSES.len()],
    /// A refusal in the service without waits for its body, and with them.
    pub(crate) shed_p99_ms: f64,
    /// As said.
    pub(crate) shed_whole_p99_ms: f64,
    /// The same as the client sees it, sending included.
    pub(crate) shed_client_p99_ms: f64,
    /// Highest working set.
    pub(crate) peak_mib: f64,
    /// Changes of level a second.
    pub(crate) level_changes: f64,
    /// The delay of the sending, 99th percentile in milliseconds.
    pub(crate) late_p99_ms: f64,
    /// The part of the processors' time that was used.
    pub(crate) busy: f64,
    /// Killed for memory.
    pub(crate) oom_kills: u64,
}

/// Requests and bytes of one class.
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
        let seen = &outcome.tally.seen;
        let sums = sums(offer, seen);
        let total = |of: fn(&Sums) -> f64| sums.iter().map(of).sum::<f64>();
        let (offered, served) = (total(|sum| sum.offered), total(|sum| sum.served));
        let shed = total(|sum| sum.shed);
        let share = |sum: Sums| part(part(sum.served, served), part(sum.offered, offered));
        let (from, to) = steady(offer.lasts());
        let since = |one: &&Seen, from: f64| {
            one.fate == Fate::Served && (from..=to).contains(&(one.at + one.took))
        };
        let in_time = |one: &&Seen| since(one, from);
        let seconds = (to - from) / 1e3;
        let goodput_since = |from: f64| {
            let bytes = seen.iter().filter(|one| since(one, from)).map(|one| one.bytes).sum();
            1e3 * count(bytes) / MIB / (to - from)
        };
        let p99 = |fate: Fate, of: fn(&Seen) -> f64| p99(seen, |one| one.fate == fate, of);
        let refusals = |at: usize| {
            let all = outcome.report.refusals.iter();
            quantile(&all.map(|refusal| f64::from(refusal[at])).collect::<Vec<_>>(), 0.99)
        };
        Self {
            served: count(seen.iter().filter(in_time).count() as u64) / seconds,
            goodput_mib: goodput_since(from),
            learned_goodput_mib: goodput_since(from.max(to / 2.0)),
            shed_bytes: part(shed, offered),
            failed_bytes: part(offered - served - shed, offered),
            sheds: sums.map(|sum| sum.sheds),
            learned_sheds: std::array::from_fn(|class| {
                learned(seen, class).filter(|one| one.fate == Fate::Shed).count() as u64
            }),
            learned_sent: (0..CLASSES.len()).map(|class| learned(seen, class).count() as u64).sum(),
            shares: sums.map(share),
            p99_ms: p99(Fate::Served, |one| one.took - one.hold),
            p99s_ms: std::array::from_fn(|class| {
                let which = |one: &Seen| one.fate == Fate::Served && one.class == class;
                self::p99(seen, which, |one| one.took - one.hold)
            }),
            shed_p99_ms: refusals(1),
            shed_whole_p99_ms: refusals(0),
            shed_client_p99_ms: p99(Fate::Shed, |one| one.took),
            peak_mib: outcome.peak.as_f64() / MIB,
            level_changes: count(outcome.report.level_changes) / offer.lasts().as_secs_f64(),
            late_p99_ms: self::p99(seen, |one| one.took > 0.0, |one| one.late),
            busy: outcome.busy,
            oom_kills: outcome.oom_kills,
        }
    }

    /// Returns the reason why the cell's times are void, if they are.
    pub(crate) fn void(&self) -> Option<String> {
        if self.late_p99_ms > LATE_MAX_MS {
            return Some(format!("the load was {:.1} ms late", self.late_p99_ms));
        }
        (self.busy > BUSY_MAX).then(|| format!("{:.0} % of the CPU was used", 100.0 * self.busy))
    }

    /// Writes them down under this name.
    pub(crate) fn tell(&self, name: &str, figures: &mut Figures) {
        let mut add = |end: &str, value: f64, unit| {
            figures.add(&format!("overload.{name}.{end}"), value, unit);
        };
        add("oom_kills", count(self.oom_kills), "kills");
        add("shed_bytes_ratio", self.shed_bytes, "ratio");
        add("sheds_small", count(self.sheds[0]), "requests");
        add("learned_sheds", count(self.learned_sheds.iter().sum()), "requests");
        add("learned_sheds_small", count(self.learned_sheds[0]), "requests");
        add("peak_mib", self.peak_mib, "MiB");
        add("void", f64::from(u8::from(self.void().is_some())), "cells");
        for (class, share) in CLASSES.iter().zip(self.shares) {
            add(&format!("share.{class}"), share, "ratio");
        }
        for (class, late) in CLASSES.iter().zip(self.p99s_ms) {
            add(&format!("p99_ms.{class}"), late, "ms");
        }
        add("goodput_mib_s", self.goodput_mib, "MiB/s");
        add("learned_goodput_mib_s", self.learned_goodput_mib, "MiB/s");
        add("p99_ms", self.p99_ms, "ms");
        add("shed_p99_ms", self.shed_p99_ms, "ms");
        add("shed_whole_p99_ms", self.shed_whole_p99_ms, "ms");
        add("shed_client_p99_ms", self.shed_client_p99_ms, "ms");
        add("level_changes_per_s", self.level_changes, "1/s");
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

fn p99(seen: &[Seen], which: impl Fn(&Seen) -> bool, of: impl Fn(&Seen) -> f64) -> f64 {
    let values: Vec<f64> = seen.iter().filter(|one| which(one)).map(of).collect();
    quantile(&values, 0.99)
}
