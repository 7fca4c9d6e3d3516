//! Loads that wait for room in the queue of requests.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::thread;
use std::time::Duration;

use lowtide_admission::clock::{ManualClock, Moment};
use lowtide_admission::{
    Admission, Budget, ByteSize, Cost, Level, Managed, Rejected, ResourceError, Resources,
};

use super::support::{block_on, until};

/// An admission of 100 MiB whose deadlines pass.
fn timed() -> Admission {
    let admission = Admission::with_limit(ByteSize::mib(100));
    admission.state().tend_queue(Moment::ORIGIN);
    admission
}

fn mib(mib: u64) -> Cost {
    Cost::host(ByteSize::mib(mib))
}

fn model(admission: &Admission) -> Managed<u32> {
    let builder = Managed::builder("model", || Ok(7)).cost(mib(60));
    builder.build(Arc::new(ManualClock::new()), Some(admission.clone()))
}

fn poll<F: Future + Unpin>(load: &mut F) -> Poll<F::Output> {
    Pin::new(load).poll(&mut Context::from_waker(Waker::noop()))
}

/// The bug: while requests kept the ledger full, every use of the model was rejected.
#[test]
fn a_load_waits_for_requests_to_end_and_later_requests_leave_it_the_room() {
    let admission = timed();
    let (first, second) = (admission.try_admit(mib(50)), admission.try_admit(mib(50)));
    let model = model(&admission);
    let mut load = Box::pin(model.acquire());
    assert!(poll(&mut load).is_pending());
    assert_eq!(admission.stats().waiting, 1);
    drop(first);
    let later = admission.try_admit(mib(50)).map_err(drop);
    assert!(later.is_ok(), "at most as many bytes as it waits for may pass it");
    drop(second);
    let rejected = admission.try_admit(mib(50)).map(drop);
    assert!(matches!(rejected, Err(Rejected::Full { .. })), "{rejected:?}");
    drop(later);
    assert_eq!(*block_on(load).expect("there is room"), 7);
    let stats = (admission.stats().waiting, model.stats().loads_ok_total);
    assert_eq!((stats, model.stats().loads_refused_total), ((0, 1), 0));
}

/// The bug: `acquire_blocking` was rejected immediately; only `acquire` waited.
#[test]
fn a_thread_waits_for_the_room_of_its_load_as_a_future_does() {
    let admission = timed();
    let all = admission.try_admit(mib(100)).expect("fits");
    let model = model(&admission);
    let user = model.clone();
    let thread = thread::spawn(move || user.acquire_blocking().map(|value| *value));
    let waiting = || (admission.stats().waiting, model.stats().waiting);
    until("the load waits, and its thread counts once", || waiting() == (1, 1));
    drop(all);
    assert_eq!(thread.join().expect("no panic").expect("there is room"), 7);
    let stats = model.stats();
    assert_eq!((stats.waiting, stats.guards, stats.loads_refused_total), (0, 0, 0));
}

#[test]
fn a_thread_whose_load_waits_for_too_long_is_rejected() {
    let admission = timed();
    let _all = admission.try_admit(mib(100)).expect("fits");
    let model = model(&admission);
    let user = model.clone();
    let thread = thread::spawn(move || user.acquire_blocking().map(|value| *value));
    until("the load waits", || admission.stats().waiting == 1);
    for seconds in 1..=3 {
        admission.state().tend_queue(Moment::after_origin(Duration::from_secs(seconds)));
    }
    let error = thread.join().expect("no panic").expect_err("its time is over");
    assert!(matches!(error, ResourceError::Rejected { .. }), "{error:?}");
    assert_eq!((model.stats().loads_refused_total, model.stats().waiting), (1, 0));
}

/// The bug: a load with much temporary memory raised the level to critical for some hundred
/// milliseconds. All other loads were rejected then, even if an idle model could be evicted.
#[test]
fn a_load_waits_until_the_pressure_is_no_longer_critical() {
    let admission = timed();
    let model = model(&admission);
    admission.set_level(Level::Critical);
    let mut load = Box::pin(model.acquire());
    assert!(poll(&mut load).is_pending());
    let waits =
        |millis| admission.state().tend_queue(Moment::after_origin(Duration::from_millis(millis)));
    waits(10);
    assert!(poll(&mut load).is_pending(), "it is still critical");
    admission.set_level(Level::High);
    waits(20);
    assert_eq!(*block_on(load).expect("there is room"), 7);
    assert_eq!(model.stats().loads_refused_total, 0);
}

/// The bug: the end of a use woke no load. A load evicted the idle model only when its own wait
/// timed out.
#[test]
fn a_load_that_waits_evicts_a_model_in_the_tick_after_its_last_use() {
    let admission = timed();
    let (clock, resources) = (Arc::new(ManualClock::new()), Resources::new());
    resources.evict_for(&admission, clock.clone(), || {});
    let other = Managed::builder("other", || Ok(())).cost(mib(90));
    let other = other.build(clock, Some(admission.clone()));
    assert_eq!(resources.add(&other), Ok(()));
    let used = other.acquire_blocking().expect("fits");
    let model = model(&admission);
    let mut load = Box::pin(model.acquire());
    assert!(poll(&mut load).is_pending());
    drop(used);
    assert!(poll(&mut load).is_pending(), "no tick yet");
    admission.state().tend_queue(Moment::after_origin(Duration::from_millis(10)));
    assert_eq!(*block_on(load).expect("the other one is idle"), 7);
    assert!(!other.stats().loaded);
}

#[test]
fn a_load_that_waits_for_too_long_is_rejected_and_the_next_one_waits_again() {
    let admission = timed();
    let all = admission.try_admit(mib(100)).expect("fits");
    let model = model(&admission);
    let mut load = Box::pin(model.acquire());
    assert!(poll(&mut load).is_pending());
    for seconds in 1..=3 {
        admission.state().tend_queue(Moment::after_origin(Duration::from_secs(seconds)));
    }
    let Poll::Ready(Err(error)) = poll(&mut load) else { panic!("its time is over") };
    assert!(matches!(error, ResourceError::Rejected { .. }), "{error:?}");
    assert_eq!((model.stats().loads_refused_total, model.stats().waiting), (1, 0));
    let mut again = Box::pin(model.acquire());
    assert!(poll(&mut again).is_pending());
    drop(all);
    assert_eq!(*block_on(again).expect("there is room"), 7);
}

/// The bug: each of many callers began a wait of 2 s when the one before was rejected.
#[test]
fn all_that_wait_for_a_load_without_room_are_rejected_together() {
    let admission = timed();
    let all = admission.try_admit(mib(100)).expect("fits");
    let model = model(&admission);
    let mut loads: Vec<_> = (0..3).map(|_| Box::pin(model.acquire())).collect();
    assert!(loads.iter_mut().all(|load| poll(load).is_pending()));
    let user = model.clone();
    let thread = thread::spawn(move || user.acquire_blocking().map(|value| *value));
    until("the thread waits as well", || model.stats().waiting == 4);
    for seconds in 1..=3 {
        admission.state().tend_queue(Moment::after_origin(Duration::from_secs(seconds)));
    }
    for load in &mut loads {
        let found = poll(load);
        assert!(matches!(found, Poll::Ready(Err(ResourceError::Rejected { .. }))), "{found:?}");
    }
    let found = thread.join().expect("no panic");
    assert!(matches!(found, Err(ResourceError::Rejected { .. })), "{found:?}");
    assert_eq!((model.stats().loads_refused_total, model.stats().waiting), (1, 0));
    let mut later = Box::pin(model.acquire());
    assert!(poll(&mut later).is_pending());
    drop(all);
    assert_eq!(*block_on(later).expect("there is room"), 7);
}

#[test]
fn one_of_many_waits_in_the_queue_and_another_takes_over_when_it_leaves() {
    let admission = timed();
    let all = admission.try_admit(mib(100)).expect("fits");
    let model = model(&admission);
    let mut loads: Vec<_> = (0..5).map(|_| Box::pin(model.acquire())).collect();
    for load in &mut loads {
        assert!(poll(load).is_pending());
    }
    assert_eq!((admission.stats().waiting, model.stats().waiting), (1, 5));
    drop(loads.remove(0));
    assert_eq!(admission.stats().waiting, 0, "it has left");
    for load in &mut loads {
        assert!(poll(load).is_pending());
    }
    assert_eq!((admission.stats().waiting, model.stats().waiting), (1, 4));
    assert_eq!(model.stats().loads_refused_total, 0);
    drop(all);
    for load in loads {
        assert_eq!(*block_on(load).expect("there is room"), 7);
    }
    assert_eq!(model.stats().loads_ok_total, 1);
}

#[test]
fn closing_a_resource_ends_a_load_that_waits_for_room() {
    let admission = timed();
    let _all = admission.try_admit(mib(100)).expect("fits");
    let model = model(&admission);
    let mut load = Box::pin(model.acquire());
    assert!(poll(&mut load).is_pending());
    assert_eq!(model.close(Duration::ZERO), Ok(()), "nothing is loaded, and nothing is waited for");
    let Poll::Ready(Err(error)) = poll(&mut load) else { panic!("it is closed") };
    assert!(matches!(error, ResourceError::Closed { .. }), "{error:?}");
    drop(load);
    assert_eq!((admission.stats().waiting, model.stats().waiting), (0, 0));
}

#[test]
fn shutting_down_ends_a_load_that_waits_for_room() {
    let admission = timed();
    let _all = admission.try_admit(mib(100)).expect("fits");
    let model = model(&admission);
    let mut load = Box::pin(model.acquire());
    assert!(poll(&mut load).is_pending());
    admission.close();
    let Poll::Ready(Err(error)) = poll(&mut load) else { panic!("it is shut down") };
    assert!(matches!(error, ResourceError::Rejected { .. }), "{error:?}");
    until("it has left the queue", || admission.stats().waiting == 0);
}

#[test]
fn without_a_control_loop_or_with_too_large_a_cost_a_load_is_rejected_at_once() {
    let untimed = Admission::with_limit(ByteSize::mib(100));
    let _all = untimed.try_admit(mib(100)).expect("fits");
    assert!(matches!(poll(&mut Box::pin(model(&untimed).acquire())), Poll::Ready(Err(_))));
    let small = Admission::with_limit(ByteSize::mib(50));
    small.state().tend_queue(Moment::ORIGIN);
    assert!(matches!(poll(&mut Box::pin(model(&small).acquire())), Poll::Ready(Err(_))));
    assert_eq!(small.ledger(Budget::Host).reserved(), ByteSize::ZERO);
}
