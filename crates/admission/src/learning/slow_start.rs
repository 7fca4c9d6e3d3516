//! Limits the concurrent requests of a route while their need is unknown.
//!
//! At first as many run as fit if each needs [`EXPANSION`] times its estimate, but at least one.
//! Each success raises the limit by as many again, so the limit at least doubles in each
//! generation.
//!
//! Time raises the limit too, so that a route with long requests does not wait for their end: it
//! doubles with each [`STEP`] in which requests ran without a break. Time counts from when a body
//! has arrived, since a request holds less than it will while its body arrives. It starts again
//! when a request grows beyond its claim. It does not count while a request is polled, since the
//! memory of a poll is measured when the poll ends. If no body arrives, a step takes [`ARRIVING`]
//! times as long; so a client that sends nothing cannot block a route forever.
//!
//! Pure: the caller passes the time and the room, and keeps one instance for each route under a
//! lock.
//!
//! Invariants: while it is active, `running <= limit` after each entry; it ends after a given
//! number of successes, and does not limit requests from [`STEPS`] steps on until none runs.

use std::time::Duration;

use lowtide_core::bytes::ByteSize;
use lowtide_core::clock::Moment;

/// The multiple of its estimate that a request of an unknown route may need, in addition to the
/// ledger's correction factor: JSON of small values needs up to 89 times its length, and the
/// default estimate is twice the length.
const EXPANSION: u64 = 64;
/// If at least this many requests may run at first, they are not limited.
const MANY: u32 = 64;
/// The time in which the limit doubles.
const STEP: Duration = Duration::from_millis(125);
/// The number of steps after which the limit is lifted.
const STEPS: u32 = 8;
/// The time after which the limit is lifted, counted from when a body has arrived.
pub const LASTS: Duration = Duration::from_secs(1);
/// How many times longer a step takes while no body has arrived: 64 s until the limit is lifted.
const ARRIVING: u32 = 64;

const _: () = assert!(STEP.as_millis() * STEPS as u128 == LASTS.as_millis(), "both say when");

/// The requests of one route.
#[derive(Debug)]
pub(super) struct SlowStart {
    running: u32,
    /// The number of polls, and of other pieces of work, that run now.
    working: u32,
    succeeded: u32,
    /// The number of successes after which the need is known.
    successes: u32,
    /// The time since which requests have run without a break.
    since: Option<Moment>,
    /// The time from which steps count: a body arrived, or after that a request grew.
    arrived: Option<Moment>,
    /// The time at which the last request left, if it had run for [`LASTS`] and failed.
    failed: Option<Moment>,
}

/// Too many requests run already.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TooManyRunning(pub u32);

impl SlowStart {
    /// Creates one that ends after so many successes.
    pub(super) const fn new(successes: u32) -> Self {
        let (since, arrived, failed) = (None, None, None);
        Self { running: 0, working: 0, succeeded: 0, successes, since, arrived, failed }
    }

    /// Returns the number of requests with this estimate that may run at first in this room; `None`
    /// if that is [`MANY`] or more.
    #[inline]
    pub(super) fn first(estimate: ByteSize, room: ByteSize) -> Option<u32> {
        let each = estimate.get().saturating_mul(EXPANSION);
        let fit = room.get().checked_div(each)?;
        let first = u32::try_from(fit).unwrap_or(MANY).max(1);
        (first < MANY).then_some(first)
    }

    /// Returns `true` if the need is known.
    pub(super) const fn is_over(&self) -> bool {
        self.succeeded >= self.successes
    }

    /// Lets one more request run if the limit allows it. `first` is the limit at the start.
    /// [`SlowStart::leave`] ends the request.
    pub(super) fn enter(&mut self, first: u32, now: Moment) -> Result<(), TooManyRunning> {
        // A client that reconnects at once after each failure makes no break.
        let is_break = self.failed.take().is_some_and(|failed| now - failed >= STEP);
        if is_break && self.running == 0 {
            self.since = None;
        }
        let since = *self.since.get_or_insert(now);
        let steps = self.arrived.map_or(0, |at| steps(now, at, STEP));
        let steps = steps.max(self::steps(now, since, STEP * ARRIVING));
        let steps = if self.working > 0 { 0 } else { steps };
        let limit = first.saturating_mul((1 + self.succeeded).max(1 << steps));
        if !self.is_over() && steps < STEPS && self.running >= limit {
            return Err(TooManyRunning(self.running));
        }
        self.running += 1;
        Ok(())
    }

    /// Records that the body of a request has arrived.
    pub(super) fn arrive(&mut self, now: Moment) {
        self.arrived.get_or_insert(now);
    }

    /// Begins work of a request.
    pub(super) fn begin_work(&mut self) {
        self.working += 1;
    }

    /// Ends work of a request. `grew` is `true` if the request grew beyond its claim by it.
    pub(super) fn end_work(&mut self, grew: bool, now: Moment) {
        self.working = self.working.saturating_sub(1);
        if grew && let Some(arrived) = &mut self.arrived {
            *arrived = now;
        }
    }

    /// Ends a request that entered at that time.
    pub(super) fn leave(&mut self, succeeded: bool, entered: Moment, now: Moment) {
        self.running = self.running.saturating_sub(1);
        self.succeeded = self.succeeded.saturating_add(u32::from(succeeded));
        if self.running == 0 {
            self.arrived = None;
            self.failed = (!succeeded && now - entered >= LASTS).then_some(now);
            self.since = self.since.filter(|_| self.failed.is_some());
        }
    }
}

/// Returns the number of steps from `since` to `now`, at most [`STEPS`].
fn steps(now: Moment, since: Moment, step: Duration) -> u32 {
    let steps = (now - since).as_millis() / step.as_millis();
    u32::try_from(steps).unwrap_or(STEPS).min(STEPS)
}

#[cfg(all(test, not(lowtide_loom)))]
mod tests {
    use super::*;

    /// Enters until rejected, at most 1000 times. Returns the number of requests that entered.
    fn fill(route: &mut SlowStart, now: Moment) -> u32 {
        let entered = (0..1000).take_while(|_| route.enter(1, now).is_ok()).count();
        u32::try_from(entered).expect("at most 1000")
    }

    #[test]
    fn twice_as_many_run_in_each_generation_until_the_need_is_known() {
        let mut route = SlowStart::new(8);
        let now = Moment::ORIGIN;
        for generation in [1, 2, 4] {
            assert_eq!(fill(&mut route, now), generation);
            assert_eq!(route.enter(1, now), Err(TooManyRunning(generation)));
            assert_eq!(route.enter(2, now), Ok(()), "one that needs half as much");
            leave(&mut route, false);
            (0..generation).for_each(|_| leave(&mut route, true));
        }
        assert!(!route.is_over());
        assert_eq!(fill(&mut route, now), 8);
        leave(&mut route, true);
        assert!(route.is_over());
        assert_eq!(fill(&mut route, now), 1000);
    }

    /// Ends one that has just begun.
    fn leave(route: &mut SlowStart, succeeded: bool) {
        route.leave(succeeded, Moment::ORIGIN, Moment::ORIGIN);
    }

    /// The bug: a client that declared a body, sent none, left after some seconds and reconnected
    /// at once blocked all others forever.
    #[test]
    fn one_client_that_sends_nothing_again_and_again_holds_up_a_route_for_a_minute() {
        let mut route = SlowStart::new(8);
        let mut now = Moment::ORIGIN;
        let mut waited = 0;
        while route.enter(1, now) == Ok(()) && route.enter(1, now).is_err() {
            let entered = now;
            now = now + 7 * LASTS;
            waited += 7;
            route.leave(false, entered, now);
            now = now + STEP / 2;
            assert!(waited < 100, "{waited} s");
        }
        assert_eq!(waited, 14, "two may run after eight seconds");
        let mut route = SlowStart::new(8);
        for second in 0..20 {
            let now = Moment::ORIGIN + second * LASTS;
            assert_eq!(route.enter(1, now), Ok(()));
            assert_eq!(route.enter(1, now), Err(TooManyRunning(1)), "a break, or a quick failure");
            route.leave(false, now, now + LASTS / 2);
        }
    }

    #[test]
    fn as_many_run_at_first_as_fit_if_each_needs_64_times_its_estimate() {
        let first =
            |mib: u64, room: u64| SlowStart::first(ByteSize::mib(mib), ByteSize::mib(64 * room));
        assert_eq!([first(10, 9), first(10, 19), first(10, 20)], [Some(1), Some(1), Some(2)]);
        assert_eq!([first(10, 0), first(1, 63), first(1, 64)], [Some(1), Some(63), None]);
        let first = SlowStart::first(ByteSize::ZERO, ByteSize::ZERO);
        assert_eq!(first, None, "no bytes always fit");
        assert_eq!(SlowStart::first(ByteSize::MAX, ByteSize::MAX), Some(1));
    }

    #[test]
    fn requests_that_last_long_hold_nothing_up_for_more_than_a_second() {
        let mut route = SlowStart::new(8);
        let mut running = 0;
        route.arrive(Moment::ORIGIN);
        for step in 0..STEPS {
            running += fill(&mut route, Moment::ORIGIN + STEP * step);
            assert_eq!(running, 1 << step);
        }
        assert_eq!(fill(&mut route, Moment::ORIGIN + LASTS), 1000);
    }

    /// The bug: a parser that worked on one body for longer than a step let a second one in, and
    /// both together needed more than the limit.
    #[test]
    fn time_does_not_count_while_one_works_or_grows() {
        let mut route = SlowStart::new(8);
        assert_eq!(fill(&mut route, Moment::ORIGIN), 1);
        route.arrive(Moment::ORIGIN);
        route.begin_work();
        let second = Moment::ORIGIN + LASTS;
        assert_eq!(fill(&mut route, second), 0, "it works");
        route.end_work(true, second);
        assert_eq!(fill(&mut route, second), 0, "it has grown");
        route.begin_work();
        route.end_work(false, second + STEP);
        assert_eq!(fill(&mut route, second + STEP), 1);
    }

    /// Requests whose bodies took seconds to arrive were all admitted after one second, when they
    /// held little, and the kernel killed the service.
    #[test]
    fn bodies_that_still_arrive_lift_no_limit_for_a_minute() {
        let mut route = SlowStart::new(8);
        for second in 0..8 {
            let now = Moment::ORIGIN + LASTS * second;
            assert_eq!(fill(&mut route, now), u32::from(second == 0), "{second}");
        }
        assert_eq!(fill(&mut route, Moment::ORIGIN + STEP * ARRIVING), 1);
        assert_eq!(fill(&mut route, Moment::ORIGIN + LASTS * ARRIVING), 1000);
    }

    #[test]
    fn requests_that_ended_without_an_answer_teach_nothing_and_latch_nothing() {
        let mut route = SlowStart::new(8);
        for round in 0..100 {
            let now = Moment::ORIGIN + LASTS * round;
            assert_eq!(fill(&mut route, now), 1, "{round}");
            leave(&mut route, false);
        }
        assert!(!route.is_over());
    }
}
