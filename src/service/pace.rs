//! The pace of bodies: a minimum rate at which clients send requests and take responses.
//!
//! A body has a credit of time. Waiting for the client spends it, and bytes earn it back at the
//! minimum rate, so a client may pause for the grace period and has to keep up the rate on average.
//! Nothing is spent while the handler works, or while the request waits for room (`body`).
//!
//! A response is handed to the connection in advance, and its bytes are in buffers when they earn
//! their time. So its credit may exceed the grace period by the time of [`BUFFERED`], and of the
//! part that was handed over last.
//!
//! Time is that of the control loop's ticks, which wake a task that has waited for as long as its
//! credit lasts ([`Pace::wake_if_spent`]). It reads no clock, so a wait may count for as much as
//! the time between two ticks.
//!
//! Invariant: the credit of a request's body is at most the grace period.

use std::sync::{Arc, Weak};
use std::task::Waker;
use std::time::Duration;

use crate::bytes::ByteSize;
use crate::clock::Moment;
use crate::sync::{Mutex, lock};
use lowtide_admission::{Admission, LargeRequest, Rejected};

/// The part of a response that the buffers between the server and a slow client hold. An estimate:
/// the buffers of hyper and the kernel hold 400 KiB and more, and the kernel takes more of a
/// response only when a third of its buffer is free.
const BUFFERED: ByteSize = ByteSize::mib(1);

/// A minimum rate at which a client must send the body of a request and take the response
/// ([`MemoryLayer::with_min_data_rate`](super::MemoryLayer::with_min_data_rate)).
///
/// ```
/// use std::time::Duration;
/// use lowtide::ByteSize;
/// use lowtide::service::MinDataRate;
///
/// // A poor line's rate, and pauses of up to ten seconds.
/// let _rate = MinDataRate::new(ByteSize::kib(16), Duration::from_secs(10));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MinDataRate {
    bytes_per_second: ByteSize,
    grace: Duration,
}

impl MinDataRate {
    /// Creates a rate in bytes per second, with the time that a client may pause or be slower.
    ///
    /// With zero bytes per second, a byte in each grace period is enough for a request, and a
    /// response does not end once a part of it was sent. Choose a grace period of a second or more;
    /// with zero, a body ends when its client has to be waited for at all.
    #[must_use]
    pub const fn new(bytes_per_second: ByteSize, grace: Duration) -> Self {
        Self { bytes_per_second, grace }
    }

    /// Returns the time in which so many bytes are to be sent.
    fn time_of(&self, bytes: ByteSize) -> Duration {
        if bytes.is_zero() {
            return Duration::ZERO;
        }
        let nanos = u128::from(bytes.get()) * Duration::from_secs(1).as_nanos();
        let nanos = nanos.checked_div(self.bytes_per_second.get().into());
        let nanos = nanos.and_then(|nanos| u64::try_from(nanos).ok());
        nanos.map_or(Duration::MAX, Duration::from_nanos)
    }

    /// Returns the rejection of a client that is slower.
    pub(super) const fn too_slow(self) -> Rejected {
        let Self { bytes_per_second, grace } = self;
        Rejected::SlowClient { bytes_per_second, grace }
    }
}

/// The pace of one body.
#[derive(Debug)]
pub(super) struct Pace {
    rate: MinDataRate,
    /// The largest credit between two waits.
    most: Duration,
    state: Mutex<PaceState>,
}

#[derive(Debug)]
struct PaceState {
    credit: Duration,
    /// The start of the wait for the client.
    since: Option<Moment>,
    /// The task that waits.
    waker: Option<Waker>,
}

impl PaceState {
    /// Ends the wait for the client.
    fn settle(&mut self, now: Moment, most: Duration) {
        if let Some(since) = self.since.take() {
            self.credit = self.credit.saturating_sub(now - since).min(most);
        }
    }
}

impl Pace {
    /// Creates the pace of a request's body.
    pub(super) fn of_request(rate: MinDataRate) -> Self {
        Self::new(rate, rate.grace)
    }

    /// Creates the pace of a response's body.
    pub(super) fn of_response(rate: MinDataRate) -> Self {
        Self::new(rate, rate.grace.saturating_add(rate.time_of(BUFFERED)))
    }

    fn new(rate: MinDataRate, most: Duration) -> Self {
        let state = PaceState { credit: rate.grace, since: None, waker: None };
        Self { rate, most, state: Mutex::new(state) }
    }

    /// Ends the wait for the client, of which so many bytes have arrived.
    pub(super) fn received(&self, bytes: usize, now: Moment) {
        let mut state = lock(&self.state);
        state.settle(now, self.most);
        let earned = self.rate.time_of(ByteSize::of(bytes));
        state.credit = state.credit.saturating_add(earned).min(self.most);
    }

    /// Waits for the client, in a task with this waker. Returns `false` without credit.
    pub(super) fn wait(&self, waker: &Waker, now: Moment) -> bool {
        let mut state = lock(&self.state);
        state.settle(now, self.most);
        if state.credit.is_zero() {
            return false;
        }
        state.since = Some(now);
        if !state.waker.as_ref().is_some_and(|kept| kept.will_wake(waker)) {
            state.waker = Some(waker.clone());
        }
        true
    }

    /// Waits until the client has taken so many bytes, which the connection has.
    pub(super) fn send(&self, bytes: usize, now: Moment) {
        let mut state = lock(&self.state);
        state.settle(now, self.most);
        let earned = self.rate.time_of(ByteSize::of(bytes));
        state.credit = state.credit.saturating_add(earned);
        state.since = Some(now);
    }

    /// Returns `true` if the client has been waited for as long as the credit lasts.
    pub(super) fn is_spent(&self, now: Moment) -> bool {
        let state = lock(&self.state);
        state.since.is_some_and(|since| now - since >= state.credit)
    }

    /// Wakes the task that has waited for as long as the credit lasts.
    pub(super) fn wake_if_spent(&self, now: Moment) {
        if self.is_spent(now) {
            let waker = lock(&self.state).waker.take();
            waker.into_iter().for_each(Waker::wake);
        }
    }

    pub(super) const fn rate(&self) -> MinDataRate {
        self.rate
    }
}

/// The pace of a body that belongs to no admitted request, which the control loop wakes.
#[derive(Debug)]
pub(super) struct RegisteredPace {
    admission: Admission,
    pace: Pace,
}

impl RegisteredPace {
    pub(super) fn new(rate: MinDataRate, admission: &Admission) -> Arc<Self> {
        let (admission, pace) = (admission.clone(), Pace::of_request(rate));
        let registered = Arc::new(Self { admission, pace });
        registered.admission.register(Arc::new(WeakPace(Arc::downgrade(&registered))));
        registered
    }

    /// Like [`Pace::received`].
    pub(super) fn received(&self, bytes: usize) {
        self.pace.received(bytes, self.admission.last_tick());
    }

    /// Like [`Pace::wait`].
    pub(super) fn wait(&self, waker: &Waker) -> bool {
        self.pace.wait(waker, self.admission.last_tick())
    }
}

/// A pace that does not keep its body.
struct WeakPace(Weak<RegisteredPace>);

impl LargeRequest for WeakPace {
    fn reserved(&self) -> Option<ByteSize> {
        self.0.upgrade().map(|_| ByteSize::ZERO)
    }

    fn has_time_limit(&self) -> bool {
        true
    }

    fn check_time(&self, now: Moment) {
        if let Some(registered) = self.0.upgrade() {
            registered.pace.wake_if_spent(now);
        }
    }
}

#[cfg(all(test, not(lowtide_loom)))]
mod tests {
    use super::*;

    const GRACE: Duration = Duration::from_secs(10);
    const SECOND: Duration = Duration::from_secs(1);

    fn rate(bytes: u64) -> MinDataRate {
        MinDataRate::new(ByteSize::new(bytes), GRACE)
    }

    /// Waits for so long, and returns `true` if there is credit left.
    fn waits(pace: &Pace, now: &mut Moment, time: Duration) -> bool {
        assert!(pace.wait(Waker::noop(), *now));
        *now = *now + time;
        !pace.is_spent(*now)
    }

    #[test]
    fn a_body_at_the_minimum_rate_never_ends_and_a_slower_one_does() {
        for (bytes, is_enough) in [(1000, true), (999, false), (1, false)] {
            let (pace, mut now) = (Pace::of_request(rate(1000)), Moment::ORIGIN);
            let mut seconds = 0;
            while seconds < 100_000 && waits(&pace, &mut now, SECOND) {
                pace.received(bytes, now);
                seconds += 1;
            }
            assert_eq!(seconds == 100_000, is_enough, "{bytes} B/s: {seconds} s");
        }
    }

    /// A client that is fast at first must not earn the time to hold its request for hours.
    #[test]
    fn a_request_earns_no_more_than_the_grace_period() {
        let (pace, mut now) = (Pace::of_request(rate(1000)), Moment::ORIGIN);
        assert!(waits(&pace, &mut now, SECOND));
        pace.received(1 << 30, now);
        assert!(waits(&pace, &mut now, GRACE - SECOND));
        assert!(!waits(&pace, &mut now, SECOND));
    }

    #[test]
    fn only_the_time_of_waits_counts() {
        let (pace, mut now) = (Pace::of_request(rate(1000)), Moment::ORIGIN);
        for _ in 0..9 {
            assert!(waits(&pace, &mut now, SECOND));
            pace.received(0, now);
            now = now + 100 * GRACE;
        }
        assert!(!waits(&pace, &mut now, SECOND));
        pace.received(0, now);
        assert!(!pace.wait(Waker::noop(), now), "no credit is left");
    }

    #[test]
    fn a_large_part_of_a_response_may_take_its_time_and_that_of_the_buffers() {
        let rate = rate(ByteSize::mib(1).get());
        let (pace, begun) = (Pace::of_response(rate), Moment::ORIGIN);
        pace.send(100 << 20, begun);
        let due = begun + GRACE + 100 * SECOND;
        assert!(!pace.is_spent(begun + (due - begun - SECOND)));
        assert!(pace.is_spent(due));
        // Of what was taken at once, no more than the buffers hold counts.
        let later = begun + SECOND;
        pace.send(0, later);
        assert!(!pace.is_spent(later + GRACE));
        assert!(pace.is_spent(later + GRACE + SECOND));
    }

    #[test]
    fn without_a_rate_any_byte_within_the_grace_period_is_enough() {
        let (pace, mut now) = (Pace::of_request(rate(0)), Moment::ORIGIN);
        for _ in 0..1000 {
            assert!(waits(&pace, &mut now, GRACE - SECOND));
            pace.received(1, now);
        }
        assert!(!waits(&pace, &mut now, GRACE));
    }
}
