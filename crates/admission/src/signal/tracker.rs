//! Follows the kernel's signals from one tick to the next.
//!
//! A full reading takes `memory.stat` and the limits of each level of the cgroup: six files and
//! some 15 us. The control loop samples up to a hundred times per second, so [`SignalTracker`]
//! reads two files in each sample, `statm` and the cgroup's usage, and the others only if they can
//! change a decision: if memory moved by more than [`Signal::tolerance`], if usage is that close to
//! the cgroup's limit, where the kernel replaces page cache by other memory, and after a bounded
//! time. Without a limit of a cgroup, `statm` is enough. Once a second it looks for another cgroup
//! and other limits of the process. It decides nothing.
//!
//! Invariants: with `usage` and `anonymous` the changes since the last full reading,
//! `physical = physical then + max(usage, anonymous)`; both are at most the tolerance. Without a
//! limit of a cgroup, `usage` is the resident set. The last
//! full reading is at most [`MOVING_MAX`] old, or [`STILL_MAX`] if nothing has changed.
//!
//! Growth of this process is in the next sample. So is growth of the rest of the cgroup, unless it
//! replaces page cache. The error until the next full reading: `physical` is too small by at most
//! `min(shrunk, others)`, with `shrunk` the page cache that was dropped and `others` the growth of
//! the rest of the cgroup; below the limit, page cache is dropped when files are deleted. It is too
//! large by at most `max(cached, released)`, with `cached` the growth of page cache and `released`
//! what the rest of the cgroup released.

use std::sync::Arc;
use std::time::Duration;

use lowtide_core::bytes::ByteSize;
use lowtide_core::clock::Moment;

use super::signals::{CountedBy, Glance, Signal, Signals};

/// The maximum age of a full reading while memory moves: limits that change, and memory of others
/// that replaces page cache, show only in the next one.
const MOVING_MAX: Duration = Duration::from_millis(100);
/// The same while nothing moves: two of three ticks of an idle service then read one or two files.
const STILL_MAX: Duration = Duration::from_millis(750);
/// The time between two looks for another cgroup and other limits of the process.
const LOOK_EVERY: Duration = Duration::from_secs(1);
/// The tolerance is the room under the limit divided by this. A guess: at most 1.6 % of what is
/// left, so it vanishes at the limit.
const TOLERANCE_PART: u64 = 64;

impl Signal {
    /// Returns the bytes by which memory may have moved without a full reading: a sixty-fourth of
    /// the room under the limit.
    #[must_use]
    pub const fn tolerance(&self) -> ByteSize {
        ByteSize::new(self.limit.bytes.saturating_sub(self.physical).get() / TOLERANCE_PART)
    }
}

/// Takes samples of [`Signals`] at a lower cost than [`Signals::sample`]. Owned by one thread.
#[derive(Debug)]
pub struct SignalTracker {
    signals: Arc<Signals>,
    last: Option<FullReading>,
    looked: Option<Moment>,
}

/// A full reading.
#[derive(Clone, Copy, Debug)]
struct FullReading {
    at: Moment,
    glance: Glance,
    signal: Signal,
    counted: CountedBy,
    /// Another one is a reason for the next full reading: the limit is another, and the tolerance.
    fit: Option<ByteSize>,
}

impl SignalTracker {
    /// Creates a tracker that has not sampled yet.
    #[must_use]
    pub const fn new(signals: Arc<Signals>) -> Self {
        Self { signals, last: None, looked: None }
    }

    /// Returns `true` while a [fit](Signals::set_fit) is in force.
    #[must_use]
    pub fn has_fit(&self) -> bool {
        self.signals.fit().is_some()
    }

    /// Takes a sample, and [looks](Signals::look) once a second. Allocates nothing unless the
    /// process has come into another cgroup, or files of its own cannot be read.
    pub fn sample(&mut self, now: Moment) -> Signal {
        let looked = *self.looked.get_or_insert(now);
        if now - looked >= LOOK_EVERY {
            self.looked = Some(now);
            if self.signals.look() {
                self.last = None;
            }
        }
        let needs_usage = self.last.is_none_or(|last| last.counted != CountedBy::Process);
        let resident = self.signals.statm();
        let usage = if needs_usage { self.signals.usage() } else { None };
        let glance = Glance { resident, usage };
        let fit = self.signals.fit();
        let last = self.last.filter(|last| last.fit == fit);
        if let Some(signal) = last.and_then(|last| last.at(glance, now)) {
            return signal;
        }
        let usage = if needs_usage { usage } else { self.signals.usage() };
        let (signal, counted) = self.signals.read(Glance { resident, usage });
        let usage = usage.filter(|_| counted != CountedBy::Process);
        let glance = Glance { resident, usage };
        self.last = Some(FullReading { at: now, glance, signal, counted, fit });
        signal
    }
}

impl FullReading {
    /// Returns the signal at a later glance, or `None` if it needs a full reading.
    fn at(&self, glance: Glance, now: Moment) -> Option<Signal> {
        let age = now - self.at;
        if glance == self.glance {
            return (age < STILL_MAX).then_some(self.signal);
        }
        if age >= MOVING_MAX {
            return None;
        }
        let (before, resident) = (self.glance.resident?, glance.resident?);
        let tolerance = self.signal.tolerance().get();
        // Both are far below 2^63, so the difference is exact.
        let change = |of: ByteSize, now: ByteSize| now.get().wrapping_sub(of.get()).cast_signed();
        let all = match self.counted {
            // Growth of mapped files counts until the next full reading: it may be shared memory.
            CountedBy::Process => change(before.rss, resident.rss),
            CountedBy::Cgroup(limit)
                if glance.usage?.get().saturating_add(tolerance) >= limit.get() =>
            {
                return None;
            }
            CountedBy::Cgroup(_) => change(self.glance.usage?, glance.usage?),
            CountedBy::Unknown => return None,
        };
        let anonymous = change(before.anon, resident.anon);
        if all.unsigned_abs().max(anonymous.unsigned_abs()) > tolerance {
            return None;
        }
        let physical = self.signal.physical.get().saturating_add_signed(all.max(anonymous));
        let physical = ByteSize::new(physical);
        let (rss, anonymous) = (Some(resident.rss), Some(resident.anon));
        let usage = self.signal.usage.and(glance.usage);
        Some(Signal { rss, anonymous, physical, usage, ..self.signal })
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Limit, LimitSource};
    use super::*;
    use lowtide_core::kernel::Statm;

    const LIMIT: ByteSize = ByteSize::mib(1024);

    /// The memory of a cgroup, in MiB.
    #[derive(Clone, Copy, Debug)]
    struct Held {
        own: u64,
        others: u64,
        cache: u64,
    }

    impl Held {
        fn glance(self) -> Glance {
            let (own, none) = (ByteSize::mib(self.own), ByteSize::ZERO);
            let resident = Statm { rss: own, anon: own, mapped: none, data: none };
            let usage = ByteSize::mib(self.own + self.others + self.cache);
            Glance { resident: Some(resident), usage: Some(usage) }
        }

        fn physical(self) -> u64 {
            self.own + self.others
        }

        fn reading(self) -> FullReading {
            let limit = Limit { bytes: LIMIT, source: LimitSource::Cgroup };
            let physical = ByteSize::mib(self.physical());
            let signal = Signal { physical, limit, ..Signal::default() };
            let (at, glance) = (Moment::ORIGIN, self.glance());
            FullReading { at, glance, signal, counted: CountedBy::Cgroup(LIMIT), fit: None }
        }
    }

    /// 256 MiB physical, so that 12 MiB may move without a full reading.
    const THEN: Held = Held { own: 128, others: 128, cache: 128 };

    fn physical(now: Held) -> Option<u64> {
        let signal = THEN.reading().at(now.glance(), Moment::ORIGIN)?;
        Some(signal.physical.get() >> 20)
    }

    #[test]
    fn the_error_is_what_replaced_page_cache_or_moved_outside_the_process() {
        let around = |mib: u64| (mib - 14..mib + 15).step_by(2);
        let (mut derived, mut full) = (0, 0);
        for own in around(THEN.own) {
            for others in around(THEN.others) {
                for cache in around(THEN.cache) {
                    let now = Held { own, others, cache };
                    let Some(found) = physical(now) else {
                        full += 1;
                        continue;
                    };
                    derived += 1;
                    let shrunk = THEN.cache.saturating_sub(cache);
                    let grown = others.saturating_sub(THEN.others);
                    let (cached, released) =
                        (cache.saturating_sub(THEN.cache), THEN.others.saturating_sub(others));
                    let real = now.physical();
                    assert!(found + shrunk.min(grown) >= real, "{now:?}: {found}");
                    assert!(found <= real + cached.max(released), "{now:?}: {found}");
                }
            }
        }
        assert!(derived > 1000 && full > 1000, "{derived} derived, {full} full readings");
    }

    #[test]
    fn growth_of_the_process_is_seen_although_page_cache_makes_room_for_it() {
        assert_eq!(physical(Held { own: 138, cache: 118, ..THEN }), Some(266));
        assert_eq!(physical(Held { own: 138, ..THEN }), Some(266));
        assert_eq!(physical(Held { others: 138, ..THEN }), Some(266));
        assert_eq!(physical(Held { own: 118, ..THEN }), Some(246), "it released memory");
        assert_eq!(physical(Held { cache: 118, ..THEN }), Some(256), "a file was deleted");
    }

    #[test]
    fn what_moves_by_more_than_the_tolerance_is_read_in_full() {
        for (own, cache) in [(141, 115), (128, 141), (128, 115), (115, 128)] {
            assert_eq!(physical(Held { own, cache, ..THEN }), None, "{own} {cache}");
        }
    }

    #[test]
    fn at_the_limit_of_the_cgroup_each_sample_is_a_full_reading() {
        let full = Held { cache: 760, ..THEN };
        let reading = full.reading();
        let at = |held: Held| reading.at(held.glance(), Moment::ORIGIN).is_some();
        assert!(at(full), "nothing has moved");
        // The kernel has given a page of cache to another process.
        assert!(!at(Held { others: 129, cache: 759, own: 129 }));
        assert!(!at(Held { cache: 759, ..full }));
        let below = Held { cache: 740, ..THEN };
        let reading = below.reading();
        let grown = Held { cache: 741, ..below };
        assert!(reading.at(grown.glance(), Moment::ORIGIN).is_some());
    }

    #[test]
    fn a_full_reading_ages() {
        let reading = THEN.reading();
        let at = |held: Held, millis| {
            let now = Moment::after_origin(Duration::from_millis(millis));
            reading.at(held.glance(), now).is_some()
        };
        let moved = Held { own: 129, ..THEN };
        assert!(at(moved, 99) && !at(moved, 100));
        assert!(at(THEN, 749) && !at(THEN, 750));
    }

    #[test]
    fn the_resident_set_needs_no_other_file() {
        let reading = FullReading { counted: CountedBy::Process, ..THEN.reading() };
        let glance = |own| Glance { usage: None, ..Held { own, ..THEN }.glance() };
        let signal = reading.at(glance(138), Moment::ORIGIN).expect("derived");
        assert_eq!(signal.physical, ByteSize::mib(266));
        assert!(reading.at(glance(900), Moment::ORIGIN).is_none(), "which kind of memory it is");
        let glance = glance(138);
        let unknown = FullReading { counted: CountedBy::Unknown, ..reading };
        assert!(unknown.at(glance, Moment::ORIGIN).is_none());
    }
}
