//! The observations of a run, for its claims and figures.
//!
//! It judges nothing.
//!
//! Invariant: `admitted + shed = offered` in each class, in requests and in MiB.

use std::time::Duration;

use lowtide_admission::ByteSize;
use lowtide_admission::clock::Moment;
use lowtide_admission::learning::LESSONS_MIN;
use lowtide_admission::{Level, RejectReason, Trigger};

/// Of one class of sizes: requests and MiB.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Counts {
    pub(crate) requests: u64,
    pub(crate) mib: f64,
}

impl Counts {
    fn add(&mut self, mib: f64) {
        self.requests += 1;
        self.mib += mib;
    }
}

/// Of the time after the first seconds, and of each class that is known: until then estimates count
/// twice, or few requests run, because nothing has been measured.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Learned {
    offered: Counts,
    rejected: Counts,
    /// Those of the smallest class among them.
    pub(crate) small: u64,
}

impl Learned {
    /// The part of the bytes that was shed.
    pub(crate) fn shed_ratio(&self) -> f64 {
        self.rejected.mib / self.offered.mib.max(1e-9)
    }
}

/// The state when the load has been over for ten seconds.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct End {
    pub(crate) reserved: ByteSize,
    pub(crate) standing: ByteSize,
    pub(crate) held: u64,
    pub(crate) panics: u64,
    /// `true` if a fiftieth of the limit is admitted.
    pub(crate) admits: bool,
    pub(crate) level: Level,
    pub(crate) live: f64,
    pub(crate) dirty: f64,
    pub(crate) base: f64,
}

/// One look at what is learned.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Look {
    pub(crate) second: f64,
    pub(crate) k: f64,
    /// MiB.
    pub(crate) allowance: f64,
    pub(crate) reserved: f64,
    pub(crate) physical: f64,
    /// The reservation of a request of 1 MiB, as its route has taught.
    pub(crate) claim: f64,
}

/// All of it.
#[derive(Clone, Debug, Default)]
pub(crate) struct Seen {
    /// `true` if requests are measured.
    is_measured: bool,
    pub(crate) offered: [Counts; 3],
    pub(crate) served: [Counts; 3],
    pub(crate) rejected: [Counts; 3],
    pub(crate) learned: Learned,
    /// Of those shed, by reason in the order of [`RejectReason::ALL`].
    pub(crate) reasons: [u64; RejectReason::ALL.len()],
    /// When the last one was shed, and the last one that would have fitted for a quarter of a
    /// second by then.
    pub(crate) last_shed: Option<f64>,
    pub(crate) last_wasted: Option<f64>,
    pub(crate) wasted: u64,
    /// Since when there has been room for each that comes.
    roomy_since: Option<f64>,
    pub(crate) ticks: u64,
    pub(crate) jobs: u64,
    /// Changes of level: the second, and the new one.
    pub(crate) levels: Vec<(f64, Level)>,
    pub(crate) looks: Vec<Look>,
    purge_ended: Option<Moment>,
    /// MiB at the last two samples, and when a purge was decided.
    dirty: [f64; 2],
    wanted: f64,
    /// Purges of the loop that began sooner than 100 ms after the one before, for little.
    pub(crate) hasty: u64,
    /// `true` if the page cache ever was beyond the limit: the plant is wrong.
    pub(crate) beyond: bool,
    pub(crate) killed: Option<f64>,
    pub(crate) end: End,
}

/// The shortest pause between two purges that the loop decides on.
const PACE: Duration = Duration::from_millis(100);
/// MiB that are worth a purge within it: lowtide's default.
const WORTH: f64 = 16.0;
/// From this second on something has been learned: two lives of requests are over.
const LEARNED: f64 = 6.0;
/// After so long with room a shed is a wasted one.
const ROOMY: f64 = 0.25;

impl Seen {
    pub(super) fn new(is_measured: bool) -> Self {
        Self { is_measured, ..Self::default() }
    }

    pub(super) fn offers(&mut self, class: usize, mib: f64, second: f64, roomy: bool) {
        self.offered[class].add(mib);
        if self.knows(class, second) {
            self.learned.offered.add(mib);
        }
        if !roomy {
            self.roomy_since = None;
        } else if self.roomy_since.is_none() {
            self.roomy_since = Some(second);
        }
    }

    pub(super) fn sheds(&mut self, class: usize, mib: f64, second: f64, reason: RejectReason) {
        self.rejected[class].add(mib);
        self.reasons[reason as usize] += 1;
        if self.knows(class, second) {
            self.learned.rejected.add(mib);
            self.learned.small += u64::from(class == 0);
        }
        self.last_shed = Some(second);
        let may_know = !self.is_measured || self.knows(class, second);
        if may_know && self.roomy_since.is_some_and(|since| second - since > ROOMY) {
            self.last_wasted = Some(second);
            self.wasted += 1;
        }
    }

    /// Returns `true` if the first seconds are over, and the need of a class is known if it is
    /// measured.
    fn knows(&self, class: usize, second: f64) -> bool {
        let is_known = self.served[class].requests >= u64::from(LESSONS_MIN);
        second >= LEARNED && (is_known || !self.is_measured)
    }

    pub(super) fn serves(&mut self, class: usize, mib: f64) {
        self.served[class].add(mib);
    }

    /// The loop sees what is dirty now, or saw at the tick before.
    pub(super) const fn samples(&mut self, dirty: f64) {
        self.dirty = [dirty, self.dirty[0]];
    }

    /// The loop decides on a purge.
    pub(super) const fn decides(&mut self) {
        self.wanted = self.dirty[0].max(self.dirty[1]);
    }

    pub(super) fn purge_begins(&mut self, trigger: Trigger, now: Moment, within: bool) {
        let paced = !matches!(trigger, Trigger::Manual | Trigger::Unload);
        let hasty = self.purge_ended.is_some_and(|ended| now - ended < PACE);
        self.hasty += u64::from(paced && hasty && self.wanted < WORTH);
        self.beyond |= !within;
    }

    pub(super) fn purge_ends(&mut self, trigger: Trigger, now: Moment) {
        if !matches!(trigger, Trigger::Manual | Trigger::Unload) {
            self.purge_ended = Some(now);
        }
    }

    /// MiB of all classes.
    pub(crate) fn shed_mib(&self) -> f64 {
        self.rejected.iter().map(|class| class.mib).sum()
    }

    /// Changes of level a second between two seconds.
    pub(crate) fn changes_per_second(&self, from: f64, to: f64) -> f64 {
        let within = self.levels.iter().filter(|(at, _)| (from..to).contains(at)).count();
        f64::from(u32::try_from(within).unwrap_or(u32::MAX)) / (to - from)
    }
}
