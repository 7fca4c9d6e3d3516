//! Requests that wait for room: order, deadlines, and random schedules, some of those that
//! `benches/room` runs.

mod schedules;

use std::pin::{Pin, pin};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, Wake, Waker};
use std::thread;
use std::time::Duration;

use lowtide_admission::clock::{Clock as _, Moment, SystemClock};
use lowtide_admission::layer::{AdmissionState, Waiting};
use lowtide_admission::{
    Admission, Budget, ByteSize, Cost, Level, Permit, Priority, RejectReason, Rejected,
};

/// The number of schedules. `benches/room` runs 100,000.
const SEEDS: u64 = if cfg!(lowtide_soak) { 100_000 } else { 2_000 };

#[test]
fn no_schedule_exceeds_the_ceiling_deadlocks_or_leaves_a_request_unanswered_or_overtaken() {
    let (mut waited, mut rejected, mut passed, mut resumed) = (0, 0, 0, 0);
    for seed in 0..SEEDS {
        let seen = schedules::run(seed).unwrap_or_else(|fault| panic!("seed {seed}: {fault:?}"));
        waited += seen.waited;
        rejected += seen.rejected;
        passed += seen.passed;
        resumed += seen.resumed;
        assert!(seen.suspended >= seen.resumed, "seed {seed}");
    }
    println!("{SEEDS} seeds: {waited} waited, {rejected} rejected, {passed} times passed");
    println!("{resumed} resumed");
    assert!(waited > SEEDS && rejected > SEEDS && passed > SEEDS, "the schedules are too easy");
    assert!(resumed > SEEDS / 4, "{resumed}: too few bodies are slow");
}

const fn mib(mib: u64) -> Cost {
    Cost::host(ByteSize::mib(mib))
}

/// Counts how often it was woken.
#[derive(Default)]
struct Count(AtomicUsize);

impl Wake for Count {
    fn wake(self: Arc<Self>) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }
}

/// An admission of 100 MiB whose deadlines pass.
fn timed() -> Admission {
    let admission = Admission::with_limit(ByteSize::mib(100));
    admission.state().tend_queue(Moment::ORIGIN);
    admission
}

fn at(millis: u64) -> Moment {
    Moment::after_origin(Duration::from_millis(millis))
}

/// A request that waits, as the tower layer lets it.
struct Waits {
    state: &'static AdmissionState,
    waiting: Waiting,
    cost: Cost,
    priority: Priority,
}

impl Waits {
    fn new(admission: &Admission, mib: u64, priority: Priority, tenant: u64) -> Self {
        let cost = self::mib(mib);
        let (state, within) = (admission.state(), Some(Duration::from_secs(1)));
        let waiting = state.wait(cost, priority, tenant, within).expect("there is room");
        let mut waits = Self { state, waiting, cost, priority };
        assert!(waits.poll().is_pending(), "it does not fit yet");
        waits
    }

    fn poll(&mut self) -> Poll<Result<Permit, Rejected>> {
        let cx = Context::from_waker(Waker::noop());
        loop {
            match self.waiting.poll_turn(&cx) {
                Poll::Pending => return Poll::Pending,
                Poll::Ready(true) => {
                    let waiting = Some(&self.waiting);
                    let (cost, priority) = (self.cost, self.priority);
                    match self.state.try_admit_uncounted(waiting, cost, priority, None) {
                        Err(rejected) if rejected.may_wait() => {}
                        tried => return Poll::Ready(tried),
                    }
                }
                Poll::Ready(false) => return Poll::Ready(Err(Rejected::ShuttingDown)),
            }
        }
    }

    /// Returns its permit if it is admitted now.
    fn admitted(&mut self) -> Option<Permit> {
        match self.poll() {
            Poll::Ready(permit) => Some(permit.expect("it waits for bytes only")),
            Poll::Pending => None,
        }
    }
}

#[test]
fn waiting_requests_are_admitted_in_the_order_of_their_arrival() {
    let admission = timed();
    let all = admission.try_admit(mib(100)).expect("fits");
    let mut waits: Vec<_> =
        (0..3).map(|_| Waits::new(&admission, 50, Priority::Normal, 0)).collect();
    drop(all);
    // The last one polls first.
    let admitted: Vec<_> = waits.iter_mut().rev().map(Waits::admitted).collect();
    let fits: Vec<_> = admitted.iter().map(Option::is_some).collect();
    assert_eq!(fits, [false, true, true]);
    assert_eq!(admission.stats().waited_total, 2);
}

/// The bug: without a queue, a request that arrived when bytes became free took them from one that
/// had asked long before.
#[test]
fn a_request_that_does_not_wait_takes_no_room_from_one_that_does() {
    let admission = timed();
    let most = admission.try_admit(mib(90)).expect("fits");
    let mut waits = Waits::new(&admission, 20, Priority::Normal, 0);
    // As many bytes as it waits for may pass it.
    let passed = [admission.try_admit(mib(5)), admission.try_admit(mib(5))];
    assert!(passed.iter().all(Result::is_ok));
    drop(passed);
    let passed = admission.try_admit(mib(10)).expect("20 MiB have passed then");
    drop(passed);
    let full = admission.try_admit(mib(1)).expect_err("the room is kept");
    let Rejected::Full { reserved, allowance, .. } = full else { panic!("{full}") };
    assert_eq!((reserved, allowance), (ByteSize::mib(90), ByteSize::mib(90)), "{full}");
    drop(most);
    assert!(waits.admitted().is_some());
    assert!(admission.try_admit(mib(1)).is_ok());
}

/// The bug: an earlier request that was admitted counted as passing those behind it, and small
/// requests then waited behind large ones although they fitted.
#[test]
fn a_request_whose_turn_came_takes_nothing_from_what_may_pass_those_behind_it() {
    let admission = timed();
    let most = admission.try_admit(mib(90)).expect("fits");
    let mut first = Waits::new(&admission, 60, Priority::Normal, 0);
    let mut second = Waits::new(&admission, 60, Priority::Normal, 0);
    drop(most);
    let _first = first.admitted().expect("its turn");
    assert!(second.admitted().is_none());
    assert!(admission.try_admit(mib(40)).is_ok(), "40 of 60 MiB pass the second");
}

#[test]
fn priorities_come_in_their_order_until_a_ledger_of_bytes_has_passed() {
    let admission = timed();
    let mut held = admission.try_admit(mib(100)).expect("fits");
    let mut low = Waits::new(&admission, 60, Priority::Low, 0);
    for high_comes_first in [true, false] {
        let mut high = Waits::new(&admission, 60, Priority::High, 0);
        drop(held);
        let low = low.admitted();
        assert_eq!(low.is_none(), high_comes_first, "120 MiB would be more than a ledger");
        match low {
            None => held = high.admitted().expect("it comes first"),
            Some(_) => return,
        }
    }
}

#[test]
fn a_tenant_with_one_request_does_not_wait_for_all_of_another() {
    let admission = timed();
    let all = admission.try_admit(mib(100)).expect("fits");
    let mut busy: Vec<_> =
        (0..5).map(|_| Waits::new(&admission, 50, Priority::Normal, 1)).collect();
    let mut quiet = Waits::new(&admission, 50, Priority::Normal, 2);
    drop(all);
    let first = busy[0].admitted();
    assert!(first.is_some() && busy[1].admitted().is_none());
    assert!(quiet.admitted().is_some(), "it comes second, not sixth");
}

#[test]
fn a_request_that_waits_for_something_else_holds_up_no_other() {
    let admission = timed();
    let most = admission.try_admit(mib(90)).expect("fits");
    let measured = Waits::new(&admission, 20, Priority::Normal, 0);
    measured.waiting.lacks_other();
    for _ in 0..100 {
        drop(admission.try_admit(mib(10)).expect("fits"));
    }
    drop(most);
}

#[test]
fn the_deadline_ends_the_wait_at_the_next_tick() {
    let admission = timed();
    let all = admission.try_admit(mib(100)).expect("fits");
    let woken = Arc::new(Count::default());
    let mut waits = Waits::new(&admission, 1, Priority::Normal, 0);
    let waker = Waker::from(Arc::clone(&woken));
    assert!(waits.waiting.poll_turn(&Context::from_waker(&waker)).is_pending());
    admission.state().tend_queue(at(10));
    admission.state().tend_queue(at(1_009));
    assert_eq!((woken.0.load(Ordering::Relaxed), admission.stats().waiting), (0, 1));
    admission.state().tend_queue(at(1_010));
    assert_eq!((woken.0.load(Ordering::Relaxed), admission.stats().waiting), (1, 0));
    assert!(matches!(waits.poll(), Poll::Ready(Err(_))));
    assert_eq!(admission.stats().waited_time_total, Duration::from_secs(1));
    drop(all);
}

#[test]
fn without_a_control_loop_no_request_with_a_deadline_waits() {
    let admission = Admission::with_limit(ByteSize::mib(100));
    let within = Some(Duration::from_secs(1));
    assert!(admission.state().wait(mib(1), Priority::Normal, 0, within).is_none());
    assert!(admission.state().wait(mib(1), Priority::Normal, 0, None).is_some());
}

#[test]
fn the_queue_is_bounded_by_the_ceiling() {
    let admission = timed();
    let all = admission.try_admit(mib(100)).expect("fits");
    let wait = || admission.state().wait(mib(1), Priority::Normal, 0, None);
    let waiting: Vec<_> = std::iter::from_fn(wait).take(5_000).collect();
    assert_eq!(waiting.len(), 100 * 4, "one for each 256 KiB");
    drop(waiting);
    assert_eq!(admission.stats().waiting, 0);
    drop(all);
}

#[test]
fn a_request_that_was_woken_and_does_not_come_holds_up_others_for_ten_ticks() {
    let admission = timed();
    let all = admission.try_admit(mib(100)).expect("fits");
    let stuck = Waits::new(&admission, 60, Priority::Normal, 0);
    let mut next = Waits::new(&admission, 60, Priority::Normal, 0);
    drop(all);
    for tick in 1..10 {
        admission.state().tend_queue(at(tick * 10));
        assert!(next.admitted().is_none(), "the room is kept at tick {tick}");
    }
    admission.state().tend_queue(at(100));
    assert!(next.admitted().is_some());
    drop(stuck);
}

fn poll<F: Future + ?Sized>(future: &mut Pin<&mut F>, woken: &Arc<Count>) -> Poll<F::Output> {
    future.as_mut().poll(&mut Context::from_waker(&Waker::from(Arc::clone(woken))))
}

#[test]
fn a_reservation_waits_for_room_and_is_woken_when_it_fits() {
    let admission = Admission::with_limit(ByteSize::mib(100));
    let held = admission.try_admit(mib(60)).expect("fits");
    let woken = Arc::new(Count::default());
    let mut reserve = pin!(admission.reserve(mib(50)));
    assert!(poll(&mut reserve, &woken).is_pending());
    assert_eq!(admission.stats().waiting, 1);
    drop(held);
    assert_eq!(woken.0.load(Ordering::Relaxed), 1);
    let Poll::Ready(permit) = poll(&mut reserve, &woken) else { panic!("it fits") };
    assert_eq!(permit.expect("it fits").cost(), mib(50));
    assert_eq!(admission.stats().rejected, [0; 10], "waiting is no rejection");
}

#[test]
fn a_reservation_that_can_never_fit_or_comes_during_shutdown_ends_with_an_error() {
    let admission = Admission::with_limit(ByteSize::mib(100));
    let woken = Arc::new(Count::default());
    let mut large = pin!(admission.reserve(mib(101)));
    let Poll::Ready(Err(large)) = poll(&mut large, &woken) else { panic!("it never fits") };
    assert_eq!(large.reason(), RejectReason::TooLarge);
    let _held = admission.try_admit(mib(100)).expect("fits");
    let mut waits = pin!(admission.reserve(mib(1)));
    assert!(poll(&mut waits, &woken).is_pending());
    admission.close();
    assert_eq!(woken.0.load(Ordering::Relaxed), 1);
    let Poll::Ready(Err(closed)) = poll(&mut waits, &woken) else { panic!("waiting has ended") };
    assert_eq!(closed, Rejected::ShuttingDown);
    assert_eq!(admission.stats().rejected_total(RejectReason::ShuttingDown), 1);
}

#[test]
fn a_dropped_reservation_lets_those_behind_it_in() {
    let admission = Admission::with_limit(ByteSize::mib(100));
    let _held = admission.try_admit(mib(60)).expect("fits");
    let woken = Arc::new(Count::default());
    let mut first = Box::pin(admission.reserve(mib(50)));
    assert!(poll(&mut first.as_mut(), &woken).is_pending());
    // 30 MiB pass it, and it keeps the other 20.
    let passes = admission.try_admit(mib(30)).expect("30 of 50 MiB");
    let mut second = pin!(admission.reserve(mib(40)));
    assert!(poll(&mut second, &woken).is_pending());
    drop(passes);
    assert!(poll(&mut second, &woken).is_pending(), "70 MiB would have passed the first");
    drop(first);
    assert!(poll(&mut second, &woken).is_ready());
}

#[test]
fn requests_rejected_by_the_level_are_woken_when_it_falls() {
    let admission = timed();
    admission.set_level(Level::Critical);
    let mut waits = Waits::new(&admission, 1, Priority::Normal, 0);
    admission.set_level(Level::None);
    admission.state().tend_queue(at(10));
    assert!(waits.admitted().is_some());
}

/// Wakes a thread that waits for a future.
struct Unpark(thread::Thread);

impl Wake for Unpark {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }
}

/// Waits for a reservation on this thread. There are no ticks, so a lost wake is found.
fn block_on(admission: &Admission, cost: Cost) -> Permit {
    const PATIENCE: Duration = Duration::from_secs(120);
    let clock = SystemClock::new();
    let waker = Waker::from(Arc::new(Unpark(thread::current())));
    let mut reserve = pin!(admission.reserve(cost));
    loop {
        match reserve.as_mut().poll(&mut Context::from_waker(&waker)) {
            Poll::Ready(permit) => return permit.expect("it waits for bytes only"),
            Poll::Pending => {
                let begun = clock.now();
                thread::park_timeout(PATIENCE);
                assert!(clock.now() - begun < PATIENCE, "a wake was lost: {:?}", admission.stats());
            }
        }
    }
}

#[test]
fn no_wake_is_lost_between_threads() {
    let admission = Admission::with_limit(ByteSize::mib(100));
    thread::scope(|scope| {
        for thread in 0..8 {
            let admission = &admission;
            scope.spawn(move || {
                for turn in 0..2_000 {
                    // From small ones to such that need all of it.
                    let size = [1, 7, 30, 60, 100][(thread * 7 + turn * 3) % 5];
                    if turn % 9 == 0 {
                        // A client that leaves.
                        let woken = Arc::new(Count::default());
                        let _ = poll(&mut pin!(admission.reserve(mib(size))), &woken);
                    }
                    let permit = block_on(admission, mib(size));
                    if turn % 16 == 0 {
                        thread::yield_now();
                    }
                    drop(permit);
                }
            });
        }
    });
    let stats = admission.stats();
    println!("{} waited", stats.waited_total);
    assert_eq!((stats.waiting, stats.held()), (0, 0));
    assert!(stats.waited_total > 100, "{} waited: too easy", stats.waited_total);
}

/// The bug: a waker was dropped with the queue's lock held. Its drop may end another request that
/// waits, which takes the lock.
#[test]
fn a_waker_whose_drop_ends_another_wait_is_dropped_without_the_lock() {
    type Reserving = dyn Future<Output = Result<Permit, Rejected>> + Send;
    struct Holds(Mutex<Pin<Box<Reserving>>>);
    impl Wake for Holds {
        fn wake(self: Arc<Self>) {
            let _ = &self.0;
        }
    }
    let admission = Admission::with_limit(ByteSize::mib(100));
    let all = admission.try_admit(mib(100)).expect("fits");
    let woken = Arc::new(Count::default());
    let mut other = Box::pin(admission.reserve(mib(1)));
    assert!(poll(&mut other.as_mut(), &woken).is_pending());
    let mut reserve = pin!(admission.reserve(mib(1)));
    let holds = Waker::from(Arc::new(Holds(Mutex::new(other))));
    assert!(reserve.as_mut().poll(&mut Context::from_waker(&holds)).is_pending());
    drop(holds);
    // This waker replaces the last handle of that one.
    assert!(poll(&mut reserve, &woken).is_pending());
    assert_eq!(admission.stats().waiting, 1, "the other has left");
    drop(all);
}

/// A request of which `mib` are reserved, and suspended down to nothing.
fn suspended(admission: &Admission, mib: u64) -> Permit {
    let mut permit = admission.try_admit(self::mib(mib)).expect("fits");
    permit.suspend(ByteSize::ZERO);
    permit
}

/// Polls a suspended request that waits until it resumes.
fn resumed(permit: &mut Permit, waiting: &Waiting) -> bool {
    let cx = Context::from_waker(Waker::noop());
    while let Poll::Ready(is_turn) = waiting.poll_turn(&cx) {
        assert!(is_turn, "it waits");
        if permit.resume(Some(waiting), Priority::Normal).is_ok() {
            return true;
        }
    }
    false
}

/// The bug: the tag of a request that resumed counted as served, so that the first request of
/// another tenant came after all that were waiting.
#[test]
fn a_tenant_whose_suspended_request_resumes_does_not_delay_another_one() {
    let admission = timed();
    let mut slow = suspended(&admission, 10);
    let mut all = admission.try_admit(mib(100)).expect("fits");
    let mut busy: Vec<_> =
        (0..5).map(|_| Waits::new(&admission, 50, Priority::Normal, 1)).collect();
    let within = Duration::from_secs(1);
    let waiting = slow.wait_to_resume(Priority::Normal, 1, within).expect("room");
    assert!(!resumed(&mut slow, &waiting));
    all.shrink(slow.claim());
    assert!(resumed(&mut slow, &waiting), "it comes first");
    let mut quiet = Waits::new(&admission, 50, Priority::Normal, 2);
    drop((all, slow));
    let first = busy[0].admitted();
    assert!(first.is_some() && busy[1].admitted().is_none());
    assert!(quiet.admitted().is_some(), "it comes second, not sixth");
}

/// The bug: a queue full of requests that were not admitted yet made each suspended one fail.
#[test]
fn a_suspended_request_enters_a_queue_that_is_full_of_others() {
    let admission = timed();
    let mut slow = suspended(&admission, 10);
    let all = admission.try_admit(mib(100)).expect("fits");
    let wait = || admission.state().wait(mib(1), Priority::Normal, 0, None);
    let others: Vec<_> = std::iter::from_fn(wait).take(5_000).collect();
    let within = Duration::from_secs(1);
    let waiting = slow.wait_to_resume(Priority::Normal, 0, within);
    let waiting = waiting.expect("it was admitted before");
    assert!(!resumed(&mut slow, &waiting));
    drop(all);
    assert!(resumed(&mut slow, &waiting));
    drop(others);
}

/// The bug: it was rejected for lack of room at once, although shutting down admits no others.
#[test]
fn a_suspended_request_goes_on_waiting_when_admission_closes() {
    let admission = timed();
    let mut slow = suspended(&admission, 10);
    let all = admission.try_admit(mib(100)).expect("fits");
    let mut other = Waits::new(&admission, 10, Priority::Normal, 0);
    let within = Duration::from_secs(1);
    let waiting = slow.wait_to_resume(Priority::Normal, 0, within).expect("room");
    assert!(!resumed(&mut slow, &waiting));
    admission.close();
    assert!(matches!(other.poll(), Poll::Ready(Err(Rejected::ShuttingDown))));
    assert!(!resumed(&mut slow, &waiting));
    drop(all);
    assert!(resumed(&mut slow, &waiting));
}

/// Bug: it waited for its deadline, in front of others, for room that there could never be.
#[test]
fn a_request_that_the_ceiling_has_fallen_below_is_answered_and_holds_up_no_others() {
    let admission = timed();
    let all = admission.try_admit(mib(60)).expect("fits");
    let mut large = Waits::new(&admission, 80, Priority::Normal, 0);
    let mut small = Waits::new(&admission, 45, Priority::Normal, 0);
    admission.ledger(Budget::Host).set_measured(ByteSize::ZERO, ByteSize::mib(50));
    admission.state().tend_queue(at(10));
    let Poll::Ready(Err(rejected)) = large.poll() else { panic!("it waits on") };
    assert_eq!(rejected.reason(), RejectReason::TooLarge, "{rejected}");
    drop(large);
    drop(all);
    assert!(small.admitted().is_some());
}
