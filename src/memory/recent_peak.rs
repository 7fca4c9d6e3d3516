//! The largest value of about the last minute, so that a scrape does not miss a short peak.
//!
//! Pure: the time is an argument.

use std::time::Duration;

use crate::bytes::ByteSize;
use crate::clock::Moment;

/// Half of the time that a peak stays. A scrape sees every peak if scrapes are at most this far
/// apart.
const HALF: Duration = Duration::from_secs(30);

/// The largest value of the last 30 s to 60 s.
#[derive(Debug, Default)]
pub(super) struct RecentPeak {
    /// The largest values of the half that has ended, and of the current one.
    halves: [ByteSize; 2],
    began: Option<Moment>,
}

impl RecentPeak {
    /// Adds the largest value since the last call, and returns the peak.
    pub(super) fn add(&mut self, now: Moment, value: ByteSize) -> ByteSize {
        let [before, current] = self.halves;
        let began = *self.began.get_or_insert(now);
        self.halves = if now - began < HALF {
            [before, current.max(value)]
        } else {
            self.began = Some(now);
            [current, value]
        };
        let [before, current] = self.halves;
        before.max(current)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_peak_stays_for_at_least_30_s_and_at_most_60_s() {
        let at = |seconds| Moment::after_origin(Duration::from_secs(seconds));
        let (low, high) = (ByteSize::mib(10), ByteSize::mib(90));
        for peak_at in 0..40 {
            let mut peak = RecentPeak::default();
            for second in 0..120 {
                let value = if second == peak_at { high } else { low };
                let found = peak.add(at(second), value);
                let since = second.checked_sub(peak_at);
                let expected = match since {
                    Some(0..30) => Some(high),
                    Some(30..60) => None,
                    _ => Some(low),
                };
                assert!(
                    expected.is_none_or(|value| value == found),
                    "{peak_at}, {second}: {found}"
                );
            }
        }
    }
}
