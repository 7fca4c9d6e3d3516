//! The rule for when a heap profile is written: once the service has settled, early in a growth,
//! and near the limit.
//!
//! Pure: figures and times come from the sensor, on the control thread. It does not allocate.
//!
//! Invariant: each step is taken once until memory has fallen again.

use std::time::Duration;

use crate::bytes::ByteSize;
use crate::clock::Moment;

/// The time after the start at which the service counts as settled. An estimate.
const SETTLED: Duration = Duration::from_secs(10);
/// The minimum time between the last profile and one of the next growth, so that bursts write few.
const CAPTURED_AGAIN: Duration = Duration::from_secs(600);

/// The steps: shares of the way from the settled memory to the limit.
const STEPS: [(f64, CaptureCause); 6] = [
    (0.125, CaptureCause::Growth),
    (0.25, CaptureCause::Growth),
    (0.5, CaptureCause::Growth),
    (0.75, CaptureCause::Limit),
    (0.875, CaptureCause::Limit),
    (0.9375, CaptureCause::Limit),
];
/// The share below which memory counts as fallen.
const FALLEN: f64 = 0.0625;

lowtide_core::named_enum! {
    /// The reason for which a heap profile is written.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub(in crate::memory) enum CaptureCause {
        /// The service has settled after its start.
        Baseline = "baseline",
        /// Memory has grown by an eighth, a quarter or a half of the way to the limit.
        Growth = "growth",
        /// Memory is three quarters of the way to the limit, or nearer.
        Limit = "limit",
    }
}

/// The memory at the start, and the steps already taken.
#[derive(Debug, Default)]
pub(in crate::memory) struct CaptureTrigger {
    start: Option<Moment>,
    is_settled: bool,
    /// The least required memory: at first that of the first sample.
    baseline: ByteSize,
    /// The index of the next step.
    next: usize,
    /// The time of the last capture.
    last: Moment,
}

impl CaptureTrigger {
    /// Returns the cause for a profile at this sample, if there is one. `required` is the memory
    /// that counts against the limit and could not be released.
    pub(in crate::memory) fn see(
        &mut self,
        now: Moment,
        required: ByteSize,
        limit: ByteSize,
    ) -> Option<CaptureCause> {
        let start = *self.start.get_or_insert_with(|| {
            self.baseline = required;
            now
        });
        self.baseline = self.baseline.min(required);
        let cause = self.step(now, required, limit).or_else(|| {
            let settles = !self.is_settled && now - start >= SETTLED;
            settles.then(|| {
                self.is_settled = true;
                self.baseline = required;
                CaptureCause::Baseline
            })
        });
        if cause.is_some() {
            self.last = now;
        }
        cause
    }

    fn step(&mut self, now: Moment, required: ByteSize, limit: ByteSize) -> Option<CaptureCause> {
        if limit == ByteSize::MAX {
            return None;
        }
        let way = limit.saturating_sub(self.baseline);
        let at = |share| self.baseline.saturating_add(way.scaled(share));
        if self.next > 0 && required < at(FALLEN) && now - self.last >= CAPTURED_AGAIN {
            self.next = 0;
        }
        let passed = STEPS.iter().filter(|(share, _)| required >= at(*share)).count();
        if passed <= self.next {
            return None;
        }
        self.next = passed;
        STEPS.get(passed - 1).map(|(_, cause)| *cause)
    }
}

#[cfg(all(test, not(lowtide_loom)))]
mod tests {
    use super::*;

    const LIMIT: ByteSize = ByteSize::mib(180);

    fn at(millis: u64) -> Moment {
        Moment::after_origin(Duration::from_millis(millis))
    }

    #[test]
    fn a_slow_growth_is_captured_at_each_step_once() {
        let mut trigger = CaptureTrigger::default();
        let mut seen = Vec::new();
        // 20 MiB for a minute, then one more each second, with noise of a MiB.
        for second in 0..220 {
            let required = ByteSize::mib(20 + u64::saturating_sub(second, 60) + second % 2);
            if let Some(cause) = trigger.see(at(second * 1000), required, LIMIT) {
                seen.push((required.get() >> 20, cause.name()));
            }
        }
        let expected = [
            (20, "baseline"),
            (40, "growth"),
            (60, "growth"),
            (100, "growth"),
            (140, "limit"),
            (160, "limit"),
            (170, "limit"),
        ];
        assert_eq!(seen, expected);
    }

    #[test]
    fn a_fast_growth_at_the_start_is_captured_before_the_service_has_settled() {
        let mut trigger = CaptureTrigger::default();
        let causes = [20, 21, 65, 150, 178].map(|mib| {
            let cause = trigger.see(at(mib), ByteSize::mib(mib), LIMIT);
            cause.map(CaptureCause::name)
        });
        assert_eq!(causes, [None, None, Some("growth"), Some("limit"), Some("limit")]);
    }

    #[test]
    fn bursts_are_captured_again_only_after_ten_minutes() {
        let mut trigger = CaptureTrigger::default();
        let burst = |second: u64| if second % 60 == 59 { 120 } else { 20 };
        let seen = (0..3600).filter(|&second| {
            trigger.see(at(second * 1000), ByteSize::mib(burst(second)), LIMIT).is_some()
        });
        assert_eq!(seen.count(), 1 + 6, "the baseline, and six of sixty bursts");
    }

    #[test]
    fn without_a_limit_only_the_baseline_is_captured() {
        let mut trigger = CaptureTrigger::default();
        let see = |second: &u64| {
            trigger.see(at(second * 1000), ByteSize::gib(*second), ByteSize::MAX).is_some()
        };
        assert_eq!((0..100).filter(see).collect::<Vec<_>>(), [10]);
    }
}
