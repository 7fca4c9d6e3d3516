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
//! [`ExhaustionPolicy`] says what follows besides the report: single requests are still admitted,
//! or the process asks for its restart. Memory of single requests that run may look like room, so
//! with them exhaustion ends once there has been room for [`REFUSED_FOR`].
//!
//! It reads no clock, purges nothing and ends no process.
//!
//! Invariants: `exhausted => most < smallest` at the last sample; under [`ExhaustionPolicy::Exit`]
//! no restart is asked for before `min_uptime`.

use std::time::Duration;

use lowtide_core::bytes::ByteSize;
use lowtide_core::clock::Moment;

/// The policy for memory that no request owns and that leaves no room for requests, such as a leak.
///
/// Whatever the policy, exhaustion is logged, published as a metric and shown by `/readyz`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum ExhaustionPolicy {
    /// Requests that do not fit are rejected as exhausted, and `/readyz` fails until there is room.
    /// The default.
    #[default]
    Report,
    /// One request at a time is admitted if it fits below the mark of [`Level::Critical`], 93 % of
    /// the limit, by its corrected estimate. Small requests, together a thirty-second of the
    /// ceiling, may run next to each other, since one may need another. `/readyz` fails once
    /// requests have been rejected for 5 s and none was admitted, until the next one is. After the
    /// grace period `/healthz` fails until there is room, so that an orchestrator restarts the
    /// process.
    ///
    /// [`Level::Critical`]: super::pressure::Level::Critical
    ServeOne {
        /// The time from the beginning of exhaustion until `/healthz` fails; zero for at once.
        grace: Duration,
    },
    /// The shutdown future completes (`Memory::terminated` of the package `lowtide`), and
    /// `/healthz` fails. The program ends itself in order, and its supervisor restarts it.
    Exit {
        /// The minimum uptime, which limits the rate of restarts: a younger process reports as
        /// under [`ExhaustionPolicy::Report`] until it is so old, and ends if it is still
        /// exhausted then. Zero for no minimum.
        min_uptime: Duration,
    },
}

impl ExhaustionPolicy {
    /// Serves one request at a time, with a grace period of 5 minutes: an estimate of the time in
    /// which an operator reacts to the alert.
    pub const SERVE_ONE: Self = Self::ServeOne { grace: Duration::from_secs(300) };
    /// Exits, at an uptime of at least 1 minute: a process that leaks at once is restarted once a
    /// minute at most, and any process is back within two.
    pub const EXIT: Self = Self::Exit { min_uptime: Duration::from_secs(60) };

    /// Returns the name used in configuration: `report`, `serve-one` or `exit`.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Report => "report",
            Self::ServeOne { .. } => "serve-one",
            Self::Exit { .. } => "exit",
        }
    }
}

/// The time for which requests are rejected before exhaustion is declared.
pub(super) const REFUSED_FOR: Duration = Duration::from_secs(5);

/// The room at a sample.
#[derive(Clone, Copy, Debug)]
pub(super) struct ExhaustionSample {
    /// The most that one request could reserve if all others had ended.
    pub(super) most: ByteSize,
    /// The smallest request.
    pub(super) smallest: ByteSize,
    /// Requests admitted since start, without exempt ones.
    pub(super) admitted_total: u64,
    /// Requests rejected since start for lack of room or by level.
    pub(super) refused_total: u64,
    /// The start of the last purge that has completed.
    pub(super) purged: Option<Moment>,
}

/// The state of the detection.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Exhaustion {
    policy: ExhaustionPolicy,
    /// The time of the first sample.
    started: Option<Moment>,
    /// The first and the last rejection without room; after the declaration, since the last
    /// admission.
    refused: Option<(Moment, Moment)>,
    refused_total: u64,
    admitted_total: u64,
    /// The first of the samples with room.
    room_since: Option<Moment>,
    purged: bool,
    /// The time when it was declared.
    declared: Option<Moment>,
    /// Set if the policy asks for a restart of the process.
    pub(super) needs_restart: bool,
}

impl Exhaustion {
    pub(super) fn new(policy: ExhaustionPolicy) -> Self {
        Self { policy, ..Self::default() }
    }

    /// Updates the state with a sample.
    pub(super) fn update(&mut self, now: Moment, room: ExhaustionSample) {
        let started = *self.started.get_or_insert(now);
        self.detect(now, room);
        let Some(declared) = self.declared else { return };
        self.needs_restart |= match self.policy {
            ExhaustionPolicy::Report => false,
            ExhaustionPolicy::ServeOne { grace } => now - declared >= grace,
            ExhaustionPolicy::Exit { min_uptime } => now - started >= min_uptime,
        };
    }

    fn detect(&mut self, now: Moment, room: ExhaustionSample) {
        let rejects = room.refused_total != self.refused_total;
        let admits = room.admitted_total != self.admitted_total;
        (self.refused_total, self.admitted_total) = (room.refused_total, room.admitted_total);
        if self.is_declared() && admits {
            self.refused = None;
        }
        // How long there has to be room.
        let lasts = if self.may_serve_one() { REFUSED_FOR } else { Duration::ZERO };
        if room.most < room.smallest {
            self.room_since = None;
        } else if now - *self.room_since.get_or_insert(now) >= lasts {
            (self.refused, self.purged, self.declared) = (None, false, None);
            // A process that has begun to end goes on.
            self.needs_restart &= matches!(self.policy, ExhaustionPolicy::Exit { .. });
            return;
        }
        if rejects {
            let (first, last) = self.refused.get_or_insert((now, now));
            debug_assert!(*first <= now);
            *last = now;
        }
        let Some((first, last)) = self.refused else { return };
        self.purged |= room.purged.is_some_and(|began| began >= first);
        if !self.is_declared() && self.purged && last - first >= REFUSED_FOR {
            (self.declared, self.refused) = (Some(now), None);
        }
    }

    /// Returns `true` if memory that no request owns leaves no room for requests.
    pub(super) const fn is_declared(&self) -> bool {
        self.declared.is_some()
    }

    /// Returns `true` if single requests may be admitted although there is no room.
    pub(super) const fn may_serve_one(&self) -> bool {
        self.is_declared() && matches!(self.policy, ExhaustionPolicy::ServeOne { .. })
    }

    /// Returns `true` if single requests may be admitted, and some were since requests have been
    /// rejected for [`REFUSED_FOR`].
    pub(super) fn serves_one(&self) -> bool {
        let refused = self.refused.is_some_and(|(first, last)| last - first >= REFUSED_FOR);
        self.may_serve_one() && !refused
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
    fn room(kib: u64, refused_total: u64, purged: Option<u64>) -> ExhaustionSample {
        let (most, smallest) = (ByteSize::kib(kib), ByteSize::kib(64));
        ExhaustionSample {
            most,
            smallest,
            admitted_total: 0,
            refused_total,
            purged: purged.map(at),
        }
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

    /// Returns the states after samples at these seconds without room, with a rejection and an
    /// admission in each: declared, serves one, needs a restart.
    fn without_room(exhaustion: &mut Exhaustion, seconds: [u64; 2]) -> [bool; 3] {
        for second in seconds[0]..=seconds[1] {
            let room = room(0, second + 1, Some(second * SECOND));
            exhaustion
                .update(at(second * SECOND), ExhaustionSample { admitted_total: second, ..room });
        }
        let Exhaustion { needs_restart, .. } = *exhaustion;
        [exhaustion.is_declared(), exhaustion.serves_one(), needs_restart]
    }

    #[test]
    fn reported_exhaustion_asks_for_no_restart_however_long_it_lasts() {
        let mut exhaustion = Exhaustion::new(ExhaustionPolicy::Report);
        assert_eq!(without_room(&mut exhaustion, [0, 100_000]), [true, false, false]);
    }

    #[test]
    fn single_requests_are_served_from_its_beginning_and_a_restart_is_wanted_after_the_grace() {
        let mut exhaustion = Exhaustion::new(ExhaustionPolicy::SERVE_ONE);
        assert_eq!(without_room(&mut exhaustion, [0, 4]), [false; 3]);
        assert_eq!(without_room(&mut exhaustion, [5, 304]), [true, true, false]);
        assert_eq!(without_room(&mut exhaustion, [305, 305]), [true; 3]);
        // A request that runs looks like room.
        exhaustion.update(at(306 * SECOND), room(64, 400, None));
        assert_eq!(without_room(&mut exhaustion, [307, 307]), [true; 3]);
        for second in 308..=312 {
            exhaustion.update(at(second * SECOND), room(64, 400, None));
            assert!(exhaustion.needs_restart, "{second}");
        }
        exhaustion.update(at(313 * SECOND), room(64, 400, None));
        assert!(!exhaustion.may_serve_one() && !exhaustion.needs_restart, "there is room");
        // The grace period begins again.
        assert_eq!(without_room(&mut exhaustion, [400, 704]), [true, true, false]);
        assert_eq!(without_room(&mut exhaustion, [705, 705]), [true; 3]);
    }

    #[test]
    fn a_service_that_admits_none_for_five_seconds_serves_none_until_the_next_is_admitted() {
        let mut exhaustion = Exhaustion::new(ExhaustionPolicy::SERVE_ONE);
        assert_eq!(without_room(&mut exhaustion, [0, 5]), [true, true, false]);
        let mut rejects = |from: u64, to: u64, admitted_total| {
            for second in from..=to {
                let room = ExhaustionSample { admitted_total, ..room(0, second + 1, None) };
                exhaustion.update(at(second * SECOND), room);
            }
            exhaustion.serves_one()
        };
        assert!(rejects(6, 10, 5) && !rejects(11, 20, 5));
        assert!(rejects(21, 25, 6), "one was admitted");
        assert!(!rejects(26, 30, 6));
    }

    #[test]
    fn an_old_process_ends_at_once_and_a_young_one_when_it_is_old_enough() {
        for (first, last, ends) in [(0, 59, false), (0, 60, true), (70, 74, false), (70, 75, true)]
        {
            let mut exhaustion = Exhaustion::new(ExhaustionPolicy::EXIT);
            exhaustion.update(at(0), room(64, 0, None));
            let declared = last - first >= REFUSED_FOR.as_secs();
            let states = without_room(&mut exhaustion, [first, last]);
            assert_eq!(states, [declared, false, ends], "{first} s to {last} s");
        }
    }

    #[test]
    fn a_young_process_that_has_room_again_does_not_end_and_one_that_ends_goes_on() {
        let mut exhaustion = Exhaustion::new(ExhaustionPolicy::EXIT);
        assert_eq!(without_room(&mut exhaustion, [0, 59]), [true, false, false]);
        exhaustion.update(at(60 * SECOND), room(64, 60, None));
        exhaustion.update(at(61 * SECOND), room(64, 60, None));
        assert!(!exhaustion.needs_restart);
        assert_eq!(without_room(&mut exhaustion, [62, 67]), [true, false, true]);
        exhaustion.update(at(68 * SECOND), room(64, 70, None));
        assert!(exhaustion.needs_restart && !exhaustion.is_declared());
    }
}
