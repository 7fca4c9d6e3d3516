//! The recent history of a few figures, so that a viewer starts with the last minutes.
//!
//! One sample at each publication, in a ring that is allocated once. It measures nothing itself.
//!
//! Invariant: `points <= POINTS_MAX`, oldest first.

use std::collections::VecDeque;
use std::time::Duration;

use crate::bytes::ByteSize;
use crate::sync::{Mutex, lock};

/// The samples kept: five minutes if metrics are published each second; 17 KiB.
const POINTS_MAX: usize = 300;

/// A few figures at one instant.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct HistorySample {
    /// The time, since the Unix epoch.
    pub at: Duration,
    /// The memory that counts against the host's limit.
    pub physical: ByteSize,
    /// The live bytes of the heap; zero if they cannot be read.
    pub heap_live: ByteSize,
    /// The bytes that the heap retains.
    pub heap_retained: ByteSize,
    /// The live bytes of all device arenas that have memory, without sleeping ones.
    #[cfg(feature = "device")]
    pub device_live: ByteSize,
    /// The bytes that these arenas retain.
    #[cfg(feature = "device")]
    pub device_retained: ByteSize,
}

/// The ring of samples.
#[derive(Debug)]
pub(super) struct MetricsHistory(Mutex<VecDeque<HistorySample>>);

impl Default for MetricsHistory {
    fn default() -> Self {
        Self(Mutex::new(VecDeque::with_capacity(POINTS_MAX)))
    }
}

impl MetricsHistory {
    pub(super) fn add(&self, point: HistorySample) {
        let mut points = lock(&self.0);
        if points.len() == POINTS_MAX {
            points.pop_front();
        }
        points.push_back(point);
    }

    /// Returns the samples, oldest first.
    pub(super) fn all(&self) -> Vec<HistorySample> {
        lock(&self.0).iter().copied().collect()
    }
}

#[cfg(all(test, not(lowtide_loom)))]
mod tests {
    use super::*;

    #[test]
    fn the_last_points_are_kept_oldest_first_without_growing() {
        let history = MetricsHistory::default();
        let room = lock(&history.0).capacity();
        for nth in 0..1000 {
            history.add(HistorySample { at: Duration::from_secs(nth), ..HistorySample::default() });
        }
        let seconds: Vec<_> = history.all().iter().map(|point| point.at.as_secs()).collect();
        assert!(seconds.into_iter().eq(700..1000));
        assert_eq!(lock(&history.0).capacity(), room, "allocated once");
    }
}
