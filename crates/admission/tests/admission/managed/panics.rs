//! Panics of what is not ours, in the worst places: each was a resource that hung for ever.
#![expect(unsafe_code, reason = "a waker with bad functions")]

use std::error::Error;
use std::fmt;
use std::future::Future as _;
use std::mem::ManuallyDrop;
use std::panic::{AssertUnwindSafe, catch_unwind, panic_any};
use std::ptr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock, Weak};
use std::task::{Context, RawWaker, RawWakerVTable, Wake, Waker};
use std::time::Duration;

use lowtide_admission::clock::ManualClock;
use lowtide_admission::{
    Admission, ByteSize, Maintenance, MaintenanceActions, Resources, Sample, Sensor, Settings,
    Trigger,
};
use lowtide_admission::{Job, LoadFailure, Managed, ResourceError};

use super::support::{Gate, until};

/// The payload of a panic, which panics again when it is dropped.
struct Bomb;

impl Drop for Bomb {
    fn drop(&mut self) {
        panic!("the payload panics");
    }
}

/// The bug: the drop of what the panic threw unwound past the end of the load, so that the
/// resource stayed "loading".
#[test]
fn a_loader_that_threw_what_panics_when_dropped_was_loading_for_ever() {
    let managed = Managed::<u8>::builder("model", || panic_any(Bomb))
        .backoff(Duration::ZERO, Duration::ZERO)
        .build(Arc::new(ManualClock::new()), None);
    for failures in 1..=2 {
        let error = managed.acquire_blocking().expect_err("panics");
        let ResourceError::Load { failure: LoadFailure::Panicked(message), .. } = error else {
            panic!("{error:?}");
        };
        assert_eq!(message, "no message");
        let stats = managed.stats();
        assert_eq!((stats.loading, stats.waiting), (false, 0));
        assert_eq!(stats.loads_failed_total, failures);
    }
}

/// The bug: the same in a clean-up left it "unloading".
#[test]
fn a_clean_up_that_threw_what_panics_when_dropped_was_unloading_for_ever() {
    let managed = Managed::builder("model", || Ok(1_u8))
        .unload(|_| panic_any(Bomb))
        .build(Arc::new(ManualClock::new()), None);
    for unloads in 1..=2 {
        assert_eq!(*managed.acquire_blocking().expect("loads"), 1);
        assert!(managed.unload_now(Duration::ZERO).expect("idle"));
        let stats = managed.stats();
        assert_eq!(
            (stats.unloads.iter().sum::<u64>(), stats.unload_panics_total),
            (unloads, unloads)
        );
    }
    drop(managed.acquire_blocking().expect("loads"));
    drop(managed); // Its last way out panics as well, and is caught.
}

/// An error that panics when it is dropped.
#[derive(Debug)]
struct BadError;

impl fmt::Display for BadError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a loader's error")
    }
}

impl Error for BadError {}

impl Drop for BadError {
    fn drop(&mut self) {
        panic!("an error panics");
    }
}

/// The bug: the next load dropped it after it had begun, and stayed "loading" without a loader.
#[test]
fn an_error_that_panics_when_dropped_was_loading_for_ever() {
    let clock = ManualClock::new();
    let managed = Managed::builder("model", || Err::<u8, _>(BadError.into()))
        .backoff(Duration::ZERO, Duration::ZERO)
        .build(Arc::new(clock), None);
    for failures in 1..=3 {
        let error = managed.acquire_blocking().map(drop).expect_err("it fails");
        let dropped = catch_unwind(AssertUnwindSafe(|| drop(error)));
        assert!(dropped.is_ok(), "the resource keeps it too");
        let stats = managed.stats();
        assert_eq!((stats.loading, stats.loads_failed_total), (false, failures));
    }
    let _ = ManuallyDrop::new(managed); // it would drop the last error
}

/// An error whose text looks at the resource, and panics.
#[derive(Debug)]
struct Textless(Weak<OnceLock<Managed<u8>>>);

impl fmt::Display for Textless {
    fn fmt(&self, _: &mut fmt::Formatter<'_>) -> fmt::Result {
        let managed = self.0.upgrade();
        let loads = managed.and_then(|managed| Some(managed.get()?.stats().loading));
        panic_any(format!("an error panics, loading: {loads:?}"))
    }
}

impl Error for Textless {}

/// The bug: the text was made for the log, with the lock held, before the load ended.
#[test]
fn an_error_that_panics_when_it_is_written_was_loading_for_ever() {
    let managed = Arc::new(OnceLock::new());
    let of = Arc::downgrade(&managed);
    let built = Managed::builder("model", move || Err::<u8, _>(Textless(of.clone()).into()))
        .backoff(Duration::ZERO, Duration::ZERO)
        .build(Arc::new(ManualClock::new()), None);
    let managed = managed.get_or_init(|| built);
    for failures in 1..=2 {
        let failed = catch_unwind(AssertUnwindSafe(|| managed.acquire_blocking().map(drop)));
        assert!(matches!(failed, Ok(Err(ResourceError::Load { .. }))));
        let stats = managed.stats();
        assert_eq!((stats.loading, stats.loads_failed_total), (false, failures));
    }
}

/// A waker that cannot be cloned.
const UNCLONEABLE: RawWakerVTable =
    RawWakerVTable::new(|_| panic!("a waker panics"), |_| {}, |_| {}, |_| {});

/// The bug: the load had begun, and no thread loaded.
#[test]
fn a_waker_that_panics_when_cloned_was_loading_for_ever() {
    let managed = Managed::builder("model", || Ok(1_u8)).build(Arc::new(ManualClock::new()), None);
    // SAFETY: its functions use no data.
    let waker = unsafe { Waker::from_raw(RawWaker::new(ptr::null(), &UNCLONEABLE)) };
    let mut acquire = Box::pin(managed.acquire());
    let poll = || acquire.as_mut().poll(&mut Context::from_waker(&waker)).is_ready();
    assert!(catch_unwind(AssertUnwindSafe(poll)).is_err());
    assert!(!managed.stats().loading);
    assert_eq!(*managed.acquire_blocking().expect("it loads"), 1);
}

struct BadWaker;

impl Wake for BadWaker {
    fn wake(self: Arc<Self>) {
        panic!("a waker panics");
    }
}

#[derive(Default)]
struct GoodWaker(AtomicU64);

impl Wake for GoodWaker {
    fn wake(self: Arc<Self>) {
        self.0.fetch_add(1, Ordering::SeqCst);
    }
}

/// The bug: the wakers after the one that panicked were dropped unused.
#[test]
fn a_waker_that_panics_cost_those_behind_it_their_wake_up() {
    let gate = Arc::new(Gate::default());
    let managed = {
        let gate = Arc::clone(&gate);
        Managed::builder("model", move || {
            gate.pass();
            Ok(1_u8)
        })
        .build(Arc::new(ManualClock::new()), None)
    };
    let (mut bad, mut good) = (Box::pin(managed.acquire()), Box::pin(managed.acquire()));
    let waker = Waker::from(Arc::new(BadWaker));
    assert!(bad.as_mut().poll(&mut Context::from_waker(&waker)).is_pending());
    let woken = Arc::new(GoodWaker::default());
    let waker = Waker::from(Arc::clone(&woken));
    assert!(good.as_mut().poll(&mut Context::from_waker(&waker)).is_pending());
    gate.open();
    until("it is woken", || woken.0.load(Ordering::SeqCst) == 1);
    let mut cx = Context::from_waker(Waker::noop());
    assert!(good.as_mut().poll(&mut cx).is_ready() && bad.as_mut().poll(&mut cx).is_ready());
}

/// The bug: the worker's thread ended by it.
#[test]
fn a_job_that_threw_what_panics_when_dropped_ended_the_worker() {
    struct BadHands;
    impl MaintenanceActions for BadHands {
        fn purge(&mut self, _: Trigger) -> ByteSize {
            panic_any(Bomb)
        }
    }
    struct Still;
    impl Sensor for Still {
        fn sample(&mut self, _: lowtide_admission::clock::Moment) -> Sample {
            Sample::default()
        }
    }
    let (settings, ladder) = (Settings::default(), Vec::new());
    let (admission, resources) = (Admission::new(), Resources::new());
    let maintenance = Maintenance::new(settings, Box::new(Still), admission, resources, ladder);
    let mut worker = maintenance.expect("settings").worker(Box::new(BadHands));
    for panics in 1..=2 {
        worker.run(Job::Purge { trigger: Trigger::Manual }, &ManualClock::new());
        assert_eq!(worker.panics_total(), panics);
    }
}
