//! Decides when memory that no request owns leaves no room for requests.
//!
//! Pure, and owned by the control loop. A leak leads to this state: every request is rejected, and
//! no request that ends makes room. Exhaustion is declared once requests have been rejected for
//! [`REFUSED_FOR`] while not even the smallest would fit if all others had ended, and a purge that
//! started during that time has completed. It ends with the first sample that has room, with or
//! without requests, so that a service recovers after its load balancer stopped sending requests.
//!
//! The smallest request is the least one of the smallest size class in which a request was admitted
//! or did not fit since start, as estimated or learned; one byte before the first request.
//!
//! It reads no clock and purges nothing.
//!
//! Invariant: `exhausted => most < smallest` at the last sample.

use std::time::Duration;

use lowtide_core::bytes::ByteSize;
use lowtide_core::clock::Moment;

/// The time for which requests are rejected before exhaustion is declared.
pub(super) const REFUSED_FOR: Duration = Duration::from_secs(5);

/// The room at a sample.
#[derive(Clone, Copy, Debug)]
pub(super) struct Room {
    /// The most that one request could reserve if all others had ended.
    pub(super) most: ByteSize,
    /// The smallest request.
    pub(super) smallest: ByteSize,
    /// Requests rejected since start for lack of room or by level.
    pub(super) refused_total: u64,
    /// The start of the last purge that has completed.
    pub(super) purged: Option<Moment>,
}

/// The state of the detection.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Exhaustion {
    /// The first and the last rejection without room.
    refused: Option<(Moment, Moment)>,
    refused_total: u64,
    purged: bool,
    is_declared: bool,
}

impl Exhaustion {
    /// Updates the state with a sample.
    pub(super) fn update(&mut self, now: Moment, room: Room) {
        let rejects = room.refused_total != self.refused_total;
        self.refused_total = room.refused_total;
        if room.most >= room.smallest {
            *self = Self { refused_total: room.refused_total, ..Self::default() };
            return;
        }
        if rejects {
            let (first, last) = self.refused.get_or_insert((now, now));
            debug_assert!(*first <= now);
            *last = now;
        }
        let Some((first, last)) = self.refused else { return };
        self.purged |= room.purged.is_some_and(|began| began >= first);
        self.is_declared |= self.purged && last - first >= REFUSED_FOR;
    }

    /// Returns `true` if memory that no request owns leaves no room for requests.
    pub(super) const fn is_declared(&self) -> bool {
        self.is_declared
    }

    /// Returns `true` if a purge has yet to show that it makes no room.
    pub(super) const fn wants_purge(&self) -> bool {
        self.refused.is_some() && !self.purged
    }
}

#[cfg(all(test, not(lowtide_loom)))]
mod tests {
    use super::*;

    const SECOND: u64 = 1000;

    fn at(millis: u64) -> Moment {
        Moment::after_origin(Duration::from_millis(millis))
    }

    /// Requests of 64 KiB and more, rejected so often, with room for this many KiB.
    fn room(kib: u64, refused_total: u64, purged: Option<u64>) -> Room {
        let (most, smallest) = (ByteSize::kib(kib), ByteSize::kib(64));
        Room { most, smallest, refused_total, purged: purged.map(at) }
    }

    #[test]
    fn it_takes_five_seconds_of_rejections_and_a_purge_that_completed_in_them() {
        for (purged, declared) in [(None, false), (Some(999), false), (Some(SECOND), true)] {
            let mut exhaustion = Exhaustion::default();
            exhaustion.update(at(0), room(0, 0, None));
            assert!(!exhaustion.wants_purge(), "no request was rejected");
            for (nth, millis) in (SECOND..6 * SECOND).step_by(100).enumerate() {
                exhaustion.update(at(millis), room(63, nth as u64 + 1, purged));
                assert!(!exhaustion.is_declared(), "after {millis} ms");
                assert_eq!(exhaustion.wants_purge(), !declared);
            }
            exhaustion.update(at(6 * SECOND), room(63, 100, purged));
            assert_eq!(exhaustion.is_declared(), declared, "{purged:?}");
        }
    }

    #[test]
    fn a_service_without_requests_is_not_exhausted_and_one_that_has_them_rarely_is() {
        let mut exhaustion = Exhaustion::default();
        exhaustion.update(at(0), room(0, 1, Some(0)));
        for second in 1..100 {
            exhaustion.update(at(second * SECOND), room(0, 1, Some(0)));
            assert!(!exhaustion.is_declared(), "one request was rejected");
        }
        exhaustion.update(at(100 * SECOND), room(0, 2, Some(0)));
        assert!(exhaustion.is_declared());
    }

    #[test]
    fn it_ends_with_the_first_sample_that_has_room_and_begins_from_the_start() {
        let mut exhaustion = Exhaustion::default();
        for second in 0..10 {
            exhaustion.update(at(second * SECOND), room(0, second + 1, Some(0)));
        }
        assert!(exhaustion.is_declared());
        for second in 10..100 {
            exhaustion.update(at(second * SECOND), room(0, 10, Some(0)));
            assert!(exhaustion.is_declared(), "no requests come any more");
        }
        exhaustion.update(at(100 * SECOND), room(64, 10, Some(0)));
        assert!(!exhaustion.is_declared() && !exhaustion.wants_purge());
        for second in 101..106 {
            let purged = Some(101 * SECOND);
            exhaustion.update(at(second * SECOND), room(0, second, purged));
            assert!(!exhaustion.is_declared());
        }
        exhaustion.update(at(106 * SECOND), room(0, 106, Some(101 * SECOND)));
        assert!(exhaustion.is_declared());
    }
}
