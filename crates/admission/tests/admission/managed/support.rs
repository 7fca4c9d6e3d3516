//! Fixtures for the tests of managed resources: a door for loaders, a model that counts its copies.

use std::future::Future;
use std::pin::pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::task::{Context, Poll, Wake, Waker};
use std::thread::{self, Thread};
use std::time::Duration;

use lowtide_admission::clock::Clock as _;
use lowtide_admission::{Cost, LoadScope};
use lowtide_core::sync::lock;

pub(crate) const PATIENCE: Duration = Duration::from_secs(120);

/// Drives a future on this thread, without a runtime.
pub(crate) fn block_on<F: Future>(future: F) -> F::Output {
    struct Unpark(Thread);
    impl Wake for Unpark {
        fn wake(self: Arc<Self>) {
            self.0.unpark();
        }
    }
    let waker = Waker::from(Arc::new(Unpark(thread::current())));
    let mut future = pin!(future);
    loop {
        match future.as_mut().poll(&mut Context::from_waker(&waker)) {
            Poll::Ready(output) => return output,
            Poll::Pending => thread::park_timeout(PATIENCE),
        }
    }
}

/// A door that a loader waits at.
#[derive(Default)]
pub(crate) struct Gate {
    open: Mutex<bool>,
    changed: Condvar,
}

impl Gate {
    pub(crate) fn open(&self) {
        *lock(&self.open) = true;
        self.changed.notify_all();
    }

    pub(crate) fn pass(&self) {
        let open = lock(&self.open);
        let waited = self.changed.wait_timeout_while(open, PATIENCE, |open| !*open);
        let waited = waited.expect("no panic under the lock");
        assert!(!waited.1.timed_out(), "the gate was never opened");
    }
}

/// Counts its copies.
pub(crate) struct Model {
    pub(crate) copies: Arc<AtomicU64>,
}

impl Model {
    pub(crate) fn load(copies: &Arc<AtomicU64>) -> Self {
        assert_eq!(copies.fetch_add(1, Ordering::SeqCst), 0, "two copies");
        Self { copies: Arc::clone(copies) }
    }
}

impl Drop for Model {
    fn drop(&mut self) {
        self.copies.fetch_sub(1, Ordering::SeqCst);
    }
}

/// An enclosure in which this much is found after each load.
pub(crate) struct Holds(pub(crate) Cost);

impl LoadScope for Holds {
    fn load(&self, load: &mut dyn FnMut() -> bool) {
        load();
    }

    fn unload(&self, unload: &mut dyn FnMut()) -> Option<Cost> {
        unload();
        None
    }

    fn held(&self) -> Option<Cost> {
        Some(self.0)
    }
}

pub(crate) fn until(what: &str, condition: impl Fn() -> bool) {
    let clock = lowtide_admission::clock::SystemClock::new();
    let deadline = clock.now() + PATIENCE;
    while !condition() {
        assert!(clock.now() < deadline, "never: {what}");
        thread::yield_now();
    }
}
