//! The time limits of an admitted request: how long it may hold its permit, and the pace of its
//! bodies, a minimum rate at which clients send requests and take responses.
//!
//! The control loop checks them, for requests that the layer has registered (`permit`). A request
//! whose limit has passed is cancelled if its handler has not answered. Otherwise its response is
//! cut: the body ends with an error when the connection polls it next. A connection whose client
//! takes nothing polls no body, and is closed (`connections`).
//!
//! A body has a credit of time. Waiting for the client spends it, and bytes earn it back at the
//! minimum rate, so a client may pause for the grace period and has to keep up the rate on average.
//! Nothing is spent while the handler works, or while the request waits for room (`body`).
//!
//! A response is handed to the connection in advance, and its bytes are in buffers when they earn
//! their time. So its credit may exceed the grace period by the time of [`BUFFERED`], and of the
//! part that was handed over last.
//!
//! Time is that of the control loop's ticks, so a wait may count for as much as the time between
//! two ticks. Time in which this process stands still, or a thread of its runtime is blocked, is
//! not the client's. So the loop wakes the task that reads a body each time half of the credit is
//! spent, and nothing more is spent until the task has read ([`Pace::probe`]). Without credit, a
//! body ends only if two such reads in a row come promptly and find nothing. A late tick of the
//! loop spends little more than half of a credit.
//!
//! Invariants: a response is cut only while a part of it is not sent; the credit of a request's
//! body is at most the grace period.

use std::sync::{Arc, Weak};
use std::task::Waker;
use std::time::Duration;

use crate::bytes::ByteSize;
use crate::clock::Moment;
use crate::sync::atomic::{AtomicBool, Ordering};
use crate::sync::{Mutex, MutexGuard, lock};
use lowtide_admission::{
    Admission, Rejected,
    layer::{LargeRequest, RequestFigures},
};

use super::connections::ConnectionState;

/// The time limits of a request.
#[derive(Debug)]
pub(super) struct TimeLimits {
    /// `None` without a bound.
    max_hold: Option<Duration>,
    /// The pace of the request's body, and of the response.
    paces: Option<(Pace, Pace)>,
    connection: Option<Weak<ConnectionState>>,
    unsent: Mutex<Weak<UnsentParts>>,
    is_cut: AtomicBool,
    /// The task of the connection, while it waits for the handler.
    sender: Mutex<Option<Waker>>,
}

/// The parts of a response that are not sent, each of which has a handle. If the response was cut,
/// they mark its connection as overdue: it is closed if its client takes nothing of them.
pub(super) type UnsentParts = Mutex<Option<Arc<()>>>;

impl TimeLimits {
    /// Creates the limits of a request on this connection.
    pub(super) fn new(
        max_hold: Option<Duration>,
        rate: Option<MinDataRate>,
        connection: Option<Weak<ConnectionState>>,
    ) -> Self {
        Self {
            max_hold,
            paces: rate.map(|rate| (Pace::new(rate, ByteSize::ZERO), Pace::new(rate, BUFFERED))),
            connection,
            unsent: Mutex::default(),
            is_cut: AtomicBool::new(false),
            sender: Mutex::new(None),
        }
    }

    /// Returns the pace of the request's body.
    pub(super) fn request(&self) -> Option<&Pace> {
        self.paces.as_ref().map(|(request, _)| request)
    }

    /// Returns the pace of the response.
    pub(super) fn response(&self) -> Option<&Pace> {
        self.paces.as_ref().map(|(_, response)| response)
    }

    /// Returns `true` if a part of the response is not sent.
    pub(super) fn is_sending(&self) -> bool {
        lock(&self.unsent).strong_count() > 0
    }

    /// Returns the limit that has passed for a request of this age.
    pub(super) fn passed(&self, age: Duration, now: Moment) -> Option<Rejected> {
        if let Some(most) = self.max_hold.filter(|most| age >= *most) {
            return Some(Rejected::HeldTooLong { most });
        }
        let response = self.response()?;
        response.is_spent(now).then(|| response.rate.too_slow())
    }

    /// Keeps the waker of the connection while it waits for the handler.
    pub(super) fn wait_for_handler(&self, waker: &Waker) {
        lock(&self.sender).get_or_insert_with(|| waker.clone()).clone_from(waker);
    }

    /// Ends the response.
    pub(super) fn cut(&self) {
        self.is_cut.store(true, Ordering::SeqCst);
        let unsent = lock(&self.unsent).upgrade();
        let connection = self.connection.as_ref().and_then(Weak::upgrade);
        if let Some((unsent, connection)) = unsent.zip(connection) {
            *lock(&unsent) = Some(Arc::clone(&connection.overdue));
        }
        let sender = lock(&self.sender).take();
        sender.into_iter().for_each(Waker::wake);
    }

    pub(super) fn is_cut(&self) -> bool {
        self.is_cut.load(Ordering::SeqCst)
    }

    /// Returns a handle for a part of the response, which is dropped once that is sent.
    pub(super) fn begin_part(&self) -> Arc<UnsentParts> {
        let mut unsent = lock(&self.unsent);
        let part = unsent.upgrade().unwrap_or_default();
        *unsent = Arc::downgrade(&part);
        part
    }
}

/// The part of a response that the buffers between the server and a slow client hold. An estimate:
/// the buffers of hyper and the kernel hold 400 KiB and more, and the kernel takes more of a
/// response only when a third of its buffer is free.
const BUFFERED: ByteSize = ByteSize::mib(1);

/// A read within this time after its wake is prompt. An estimate: the longest time between two ticks
/// while requests are held.
const PROMPT: Duration = Duration::from_millis(250);

/// A minimum rate at which a client must send the body of a request and take the response, and the
/// time for which it may pause or be slower.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct MinDataRate {
    pub(super) bytes_per_second: ByteSize,
    pub(super) grace: Duration,
}

impl MinDataRate {
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
    pub(super) rate: MinDataRate,
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
    /// The time at which that task was woken to read once more, if it has not.
    woken_at: Option<Moment>,
    /// The prompt reads without credit.
    vain: u8,
}

impl PaceState {
    /// Returns the longest wait until the next look at it.
    fn due(&self) -> Duration {
        if self.credit <= PROMPT { self.credit } else { self.credit / 2 }
    }

    /// Ends the wait for the client. If that was longer than due, the control loop was late.
    fn settle(&mut self, now: Moment, most: Duration) {
        if let Some(since) = self.since.take() {
            let spent = (now - since).min(self.due() + PROMPT);
            self.credit = self.credit.saturating_sub(spent).min(most);
        }
    }
}

impl Pace {
    /// Creates the pace of a body of which so many bytes may be in buffers.
    fn new(rate: MinDataRate, buffered: ByteSize) -> Self {
        let (credit, since, waker, woken_at) = (rate.grace, None, None, None);
        let state = Mutex::new(PaceState { credit, since, waker, woken_at, vain: 0 });
        Self { rate, most: rate.grace.saturating_add(rate.time_of(buffered)), state }
    }

    /// Ends the wait for the client, and adds the time of so many bytes to the credit.
    fn earn(&self, bytes: usize, now: Moment) -> MutexGuard<'_, PaceState> {
        let mut state = lock(&self.state);
        state.settle(now, self.most);
        let earned = self.rate.time_of(ByteSize::of(bytes));
        state.credit = state.credit.saturating_add(earned);
        state
    }

    /// Ends the wait for the client, of which so many bytes have arrived.
    pub(super) fn received(&self, bytes: usize, now: Moment) {
        let mut state = self.earn(bytes, now);
        state.credit = state.credit.min(self.most);
        state.woken_at = None;
    }

    /// Waits for the client, in a task with this waker that has read and found nothing. Returns
    /// `false` if the body must end.
    pub(super) fn wait(&self, waker: &Waker, now: Moment) -> bool {
        let mut state = lock(&self.state);
        state.settle(now, self.most);
        match state.woken_at.take() {
            Some(at) if now - at > PROMPT => state.vain = 0,
            Some(_) if state.credit.is_zero() => state.vain += 1,
            _ if state.credit > self.most / 4 => state.vain = 0,
            _ => {}
        }
        if state.vain > 1 {
            return false;
        }
        state.since = Some(now);
        state.waker.get_or_insert_with(|| waker.clone()).clone_from(waker);
        true
    }

    /// Waits until the client has taken so many bytes, which the connection has.
    pub(super) fn send(&self, bytes: usize, now: Moment) {
        self.earn(bytes, now).since = Some(now);
    }

    /// Spends the time since the last tick. Returns `true` if it was waited for without credit.
    pub(super) fn is_spent(&self, now: Moment) -> bool {
        let mut state = lock(&self.state);
        if state.since.is_none() {
            return false;
        }
        state.settle(now, Duration::MAX);
        state.since = Some(now);
        state.credit.is_zero()
    }

    /// Wakes the task that reads the body if half of its credit was spent since its last read.
    pub(super) fn probe(&self, now: Moment) {
        let mut state = lock(&self.state);
        if state.since.is_some_and(|since| now - since >= state.due()) {
            state.settle(now, self.most);
            state.woken_at = Some(now);
            let waker = state.waker.take();
            drop(state);
            waker.into_iter().for_each(Waker::wake);
        }
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
        let (admission, pace) = (admission.clone(), Pace::new(rate, ByteSize::ZERO));
        let registered = Arc::new(Self { admission, pace });
        registered.admission.state().register(Arc::new(WeakPace(Arc::downgrade(&registered))));
        registered
    }

    /// Like [`Pace::received`].
    pub(super) fn received(&self, bytes: usize) {
        self.pace.received(bytes, self.admission.state().last_tick());
    }

    /// Like [`Pace::wait`].
    pub(super) fn wait(&self, waker: &Waker) -> bool {
        self.pace.wait(waker, self.admission.state().last_tick())
    }
}

/// A pace that does not keep its body.
struct WeakPace(Weak<RegisteredPace>);

impl LargeRequest for WeakPace {
    fn figures(&self) -> Option<RequestFigures> {
        self.0.upgrade().map(|_| RequestFigures::default())
    }

    fn check_time(&self, now: Moment) {
        let Some(registered) = self.0.upgrade() else { return };
        registered.pace.probe(now);
    }
}

#[cfg(all(test, not(lowtide_loom)))]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::task::Wake;

    use super::*;

    const GRACE: Duration = Duration::from_secs(10);
    const SECOND: Duration = Duration::from_secs(1);
    const TICK: Duration = Duration::from_millis(100);
    /// The time of two reads without credit.
    const READS: Duration = Duration::from_millis(200);

    fn rate(bytes: u64) -> MinDataRate {
        MinDataRate { bytes_per_second: ByteSize::new(bytes), grace: GRACE }
    }

    #[derive(Default)]
    struct Woken(AtomicBool);

    impl Wake for Woken {
        fn wake(self: Arc<Self>) {
            self.0.store(true, Ordering::Relaxed);
        }
    }

    /// Waits for so long, in a task that reads promptly once it is woken. Returns `false` if the
    /// body ends.
    fn waits(pace: &Pace, now: &mut Moment, time: Duration) -> bool {
        let (task, until) = (Arc::new(Woken::default()), *now + time);
        let waker = Waker::from(Arc::clone(&task));
        let mut goes_on = pace.wait(&waker, *now);
        while goes_on && *now < until {
            *now = *now + TICK.min(until - *now);
            pace.probe(*now);
            goes_on = !task.0.swap(false, Ordering::Relaxed) || pace.wait(&waker, *now);
        }
        goes_on
    }

    /// Returns `true` if a response is spent after this time.
    fn is_spent_after(pace: &Pace, now: &mut Moment, time: Duration) -> bool {
        let until = *now + time;
        while *now < until {
            *now = *now + TICK.min(until - *now);
            if pace.is_spent(*now) {
                return true;
            }
        }
        false
    }

    #[test]
    fn a_body_at_the_minimum_rate_never_ends_and_a_slower_one_does() {
        for (bytes, is_enough) in [(1000, true), (999, false), (1, false)] {
            let (pace, mut now) = (Pace::new(rate(1000), ByteSize::ZERO), Moment::ORIGIN);
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
        let (pace, mut now) = (Pace::new(rate(1000), ByteSize::ZERO), Moment::ORIGIN);
        assert!(waits(&pace, &mut now, SECOND));
        pace.received(1 << 30, now);
        assert!(waits(&pace, &mut now, GRACE - SECOND));
        assert!(!waits(&pace, &mut now, SECOND + READS));
    }

    #[test]
    fn only_the_time_of_waits_counts() {
        let (pace, mut now) = (Pace::new(rate(1000), ByteSize::ZERO), Moment::ORIGIN);
        for _ in 0..9 {
            assert!(waits(&pace, &mut now, SECOND));
            pace.received(0, now);
            now = now + 100 * GRACE;
        }
        assert!(!waits(&pace, &mut now, SECOND + READS));
    }

    /// jetty#4641, KestrelHttpServer#2855: a service that stood still ended what its clients sent.
    #[test]
    fn time_in_which_the_service_stands_still_is_not_the_clients() {
        for standstill in [GRACE, 100 * GRACE] {
            let (pace, mut now) = (Pace::new(rate(1000), ByteSize::ZERO), Moment::ORIGIN);
            // The thread of the task is blocked, also when little credit is left.
            for credit in [GRACE, SECOND, TICK] {
                assert!(waits(&pace, &mut now, GRACE - credit));
                for _ in 0..standstill.as_millis() / TICK.as_millis() {
                    now = now + TICK;
                    pace.probe(now);
                }
                assert!(pace.wait(Waker::noop(), now), "it reads once more");
                pace.received(10_000, now);
            }
            // The process is stopped.
            assert!(waits(&pace, &mut now, SECOND));
            now = now + standstill;
            assert!(waits(&pace, &mut now, SECOND));
            assert!(!waits(&pace, &mut now, GRACE), "the client is silent");
            let (pace, mut now) = (Pace::new(rate(1 << 20), BUFFERED), now);
            pace.send(0, now);
            now = now + standstill;
            assert!(!pace.is_spent(now));
            assert!(is_spent_after(&pace, &mut now, GRACE));
        }
    }

    #[test]
    fn a_large_part_of_a_response_may_take_its_time_and_that_of_the_buffers() {
        let rate = rate(ByteSize::mib(1).get());
        let (pace, mut now) = (Pace::new(rate, BUFFERED), Moment::ORIGIN);
        pace.send(100 << 20, now);
        assert!(!is_spent_after(&pace, &mut now, GRACE + 99 * SECOND));
        assert!(is_spent_after(&pace, &mut now, SECOND));
        // Of what was taken at once, no more than the buffers hold counts.
        let (pace, mut now) = (Pace::new(rate, BUFFERED), Moment::ORIGIN);
        pace.send(100 << 20, now);
        pace.send(0, now + SECOND);
        now = now + SECOND;
        assert!(!is_spent_after(&pace, &mut now, GRACE));
        assert!(is_spent_after(&pace, &mut now, SECOND));
    }

    #[test]
    fn without_a_rate_any_byte_within_the_grace_period_is_enough() {
        let (pace, mut now) = (Pace::new(rate(0), ByteSize::ZERO), Moment::ORIGIN);
        for _ in 0..1000 {
            assert!(waits(&pace, &mut now, GRACE - SECOND));
            pace.received(1, now);
        }
        assert!(!waits(&pace, &mut now, GRACE + READS));
    }
}
