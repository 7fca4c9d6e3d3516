//! Runs functions of the application on threads of their own, with a bounded wait.
//!
//! A function that hangs delays its caller by the bound at most.

use std::sync::Arc;
use std::thread;
use std::time::Duration;

use lowtide_core::clock::{Bell, Clock};
use lowtide_core::sync::{Mutex, lock};

/// Runs functions of the application on a new thread, and waits for the answer, at most for this
/// time. Returns `None` without one; the thread continues.
pub(super) fn elsewhere<T: Send + 'static>(
    clock: &dyn Clock,
    most: Duration,
    run: impl FnOnce() -> T + Send + 'static,
) -> Option<T> {
    let (answer, bell) = (Arc::new(Mutex::new(None)), Bell::new());
    let (answers, rings) = (Arc::clone(&answer), Arc::clone(&bell));
    let thread = thread::Builder::new().name("lowtide-reclaim".to_owned());
    let started = thread.spawn(move || {
        let ran = run();
        *lock(&answers) = Some(ran);
        rings.ring();
    });
    started.ok()?;
    let deadline = clock.now() + most;
    // Ends at the deadline at the latest: each iteration waits until then, or for the answer.
    loop {
        let answered = lock(&answer).take();
        if answered.is_some() || clock.now() >= deadline {
            return answered;
        }
        clock.wait_until(&bell, deadline);
    }
}
