//! The last uses of a resource, and how costly it is to unload it.
//!
//! The cell records the end of each use. The score that follows from them decides the order in
//! which idle resources are unloaded, for an eviction and under pressure.
//!
//! The algorithm is LNC-R (Scheuermann, Shim and Vingralek, 1996, "WATCHMAN: A Data Warehouse
//! Intelligent Cache Manager"), with the rate of uses of LRU-K (O'Neil, O'Neil and Weikum, 1993).
//! A resource is worth `uses per second x load time / bytes`: the time that it will cost to load it
//! again, for each byte that its unload releases. The uses per second are those since the end of
//! the K-th last use. They fall while the resource is idle, so that no use counts forever, and they
//! are remembered while it is not loaded. GDSF weighs the same quantities, but forgets the uses of
//! a resource that it evicts.
//!
//! A burst of uses that is over would count as K uses for a long time. So a resource counts as used
//! no more often than once in a quarter of its present idle time. Of resources whose uses are
//! independent, one in fifty is idle for that long by chance.
//!
//! Invariant: at most [`USES_MAX`] uses are remembered, the last ones.
//!
//! It deliberately knows neither guards nor minimum residency: its caller asks about resources that
//! may be unloaded.

use std::time::Duration;

use lowtide_core::bytes::ByteSize;
use lowtide_core::clock::Moment;

/// The number of uses that are remembered. The more, the closer to the best order if popularity
/// does not change, and the later a change shows. With 10 resources and room for 3, the hit ratios
/// of 8, 32 and 64 differ by less than 0.01 (the bench `room`).
const USES_MAX: usize = 32;
/// An idle time of so many intervals ends a burst.
const INTERVALS_IDLE: u32 = 4;

/// The ends of the last uses of a resource.
#[derive(Clone, Debug)]
pub(super) struct Uses {
    /// A ring; the oldest is at `next` once it is full, and at 0 before.
    ends: [Moment; USES_MAX],
    next: usize,
    len: usize,
}

impl Uses {
    pub(super) const fn new() -> Self {
        Self { ends: [Moment::ORIGIN; USES_MAX], next: 0, len: 0 }
    }

    /// Records the end of a use.
    pub(super) fn record(&mut self, end: Moment) {
        if let Some(slot) = self.ends.get_mut(self.next) {
            *slot = end;
        }
        self.next = (self.next + 1) % USES_MAX;
        self.len = (self.len + 1).min(USES_MAX);
    }

    /// Returns the mean time between two uses up to now. A resource that was never used counts as
    /// used once when it was loaded.
    pub(super) fn interval(&self, loaded_at: Moment, now: Moment) -> Duration {
        let oldest = if self.len < USES_MAX { 0 } else { self.next };
        let newest = (self.next + USES_MAX - 1) % USES_MAX;
        let at = |index: usize| {
            let end = self.ends.get(index).copied().filter(|_| self.len > 0);
            end.unwrap_or(loaded_at)
        };
        let count = u32::try_from(self.len.max(1)).unwrap_or(u32::MAX);
        let mean = (now - at(oldest)) / count;
        mean.max((now - at(newest).max(loaded_at)) / INTERVALS_IDLE)
    }
}

/// Returns the score of a resource: the larger, the sooner it is unloaded. The reciprocal of what
/// the resource is worth.
pub(super) fn score(bytes: ByteSize, interval: Duration, load: Duration) -> f64 {
    bytes.as_f64() * interval.as_secs_f64() / load.max(Duration::from_millis(1)).as_secs_f64()
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    fn at(seconds: u32) -> Moment {
        Moment::ORIGIN + SECOND * seconds
    }

    /// Uses that end at these seconds.
    fn uses(ends: impl IntoIterator<Item = u32>) -> Uses {
        let mut uses = Uses::new();
        ends.into_iter().for_each(|end| uses.record(at(end)));
        uses
    }

    #[test]
    fn a_single_use_counts_by_its_idle_time_alone() {
        assert_eq!(uses([3]).interval(at(1), at(10)), 7 * SECOND);
    }

    #[test]
    fn a_resource_that_was_never_used_counts_from_its_load() {
        assert_eq!(uses([]).interval(at(4), at(10)), 6 * SECOND);
    }

    #[test]
    fn a_resource_that_was_just_loaded_again_is_not_idle_since_its_last_use() {
        let burst = uses(std::iter::repeat_n(0, 32));
        assert_eq!(burst.interval(at(600), at(640)), Duration::from_millis(20_000));
    }

    #[test]
    fn the_interval_is_the_mean_since_the_oldest_use_that_is_remembered() {
        assert_eq!(uses([0, 1, 5, 8]).interval(at(0), at(12)), 3 * SECOND);
        // 100 uses, one every 2 s: the last 32 began to count 64 s ago.
        let regular = uses((0..100).map(|nth| 2 * nth));
        assert_eq!(regular.interval(at(0), at(200)), 2 * SECOND);
    }

    #[test]
    fn uses_before_the_last_32_do_not_count() {
        let (slow, none) = ((0..50).map(|nth| 100 * nth), std::iter::empty());
        let fast = || (0..32).map(|nth| 5000 + nth);
        let after_slow = uses(slow.chain(fast())).interval(at(0), at(5040));
        assert_eq!(after_slow, uses(none.chain(fast())).interval(at(0), at(5040)));
    }

    #[test]
    fn a_burst_that_is_over_counts_by_its_idle_time() {
        let burst = uses(std::iter::repeat_n(0, 32));
        assert_eq!(burst.interval(at(0), at(600)), 150 * SECOND);
    }

    #[test]
    fn of_two_resources_the_one_that_costs_less_time_per_byte_goes_first() {
        let of = |mib, interval: u32, load: u32| {
            score(ByteSize::mib(mib), SECOND * interval, SECOND * load)
        };
        assert!(of(2, 1, 1) > of(1, 1, 1), "more bytes");
        assert!(of(1, 2, 1) > of(1, 1, 1), "fewer uses");
        assert!(of(1, 1, 1) > of(1, 1, 2), "a shorter load");
        assert!(score(ByteSize::mib(1), SECOND, Duration::ZERO).is_finite());
    }
}
