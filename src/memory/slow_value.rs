//! A value that is slow to read, such as an answer of a driver or of the kernel.
//!
//! A thread of its own reads it and ends. The caller waits for [`ANSWER_WAIT`] at most, so it may
//! be a thread of an async runtime; the control loop and the worker read no such value.
//!
//! Invariant: at most one read is in progress, and at most one begins in the time for which a value
//! is kept.

use std::io;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use crate::clock::{Bell, Clock, Moment};
use crate::sync::{Mutex, caught, lock};

/// The longest wait for a value in one call.
const ANSWER_WAIT: Duration = Duration::from_millis(50);

/// The stack size of the thread that reads.
const STACK: usize = 256 << 10;

/// The last value, and the read in progress.
#[derive(Debug)]
pub(super) struct SlowValue<T>(Arc<Mutex<SlowReading<T>>>);

/// The state of a value, after a call.
#[derive(Clone, Debug)]
pub(super) struct SlowReading<T> {
    /// The last value, with the begin of its read.
    pub(super) last: Option<(Moment, T)>,
    /// The begin of the read in progress.
    pub(super) begun: Option<Moment>,
    /// `true` if this call began a read, and that has ended.
    #[cfg_attr(not(feature = "cuda"), allow(dead_code, reason = "for devices"))]
    pub(super) is_new: bool,
}

impl<T> Default for SlowValue<T> {
    fn default() -> Self {
        Self(Arc::new(Mutex::new(SlowReading { last: None, begun: None, is_new: false })))
    }
}

impl<T: Clone + Send + 'static> SlowValue<T> {
    /// Reads the value on a thread of this name, unless the last one is younger than `kept` or a
    /// read is in progress. A read that panics leaves the last value.
    ///
    /// # Errors
    /// The operating system's error if the thread cannot be started.
    pub(super) fn read(
        &self,
        clock: &dyn Clock,
        thread: &str,
        kept: Duration,
        read: impl FnOnce() -> T + Send + 'static,
    ) -> io::Result<SlowReading<T>> {
        let now = clock.now();
        let mut state = lock(&self.0);
        let is_kept = state.last.as_ref().is_some_and(|(at, _)| now - *at < kept);
        if is_kept || state.begun.is_some() {
            return Ok(state.clone());
        }
        state.begun = Some(now);
        drop(state);
        let (shared, bell) = (Arc::clone(&self.0), Bell::new());
        let rings = Arc::clone(&bell);
        let builder = thread::Builder::new().name(thread.to_owned()).stack_size(STACK);
        let started = builder.spawn(move || {
            // Everything that the read owns is dropped before the ring.
            let value = caught(read);
            let mut state = lock(&shared);
            if let Ok(value) = value {
                state.last = Some((now, value));
            }
            state.begun = None;
            drop(state);
            rings.ring();
        });
        started.inspect_err(|_| lock(&self.0).begun = None)?;
        let deadline = now + ANSWER_WAIT;
        // Ends at the deadline at the latest: each iteration waits until then, or for the value.
        while lock(&self.0).begun.is_some() && clock.now() < deadline {
            clock.wait_until(&bell, deadline);
        }
        let state = lock(&self.0).clone();
        Ok(SlowReading { is_new: state.begun.is_none(), ..state })
    }
}

#[cfg(all(test, not(lowtide_loom)))]
mod tests {
    use std::sync::mpsc;

    use super::*;
    use crate::clock::{ManualClock, SystemClock};

    const KEPT: Duration = Duration::from_secs(5);

    #[test]
    fn a_value_is_read_once_in_the_time_for_which_it_is_kept() {
        let (clock, value) = (ManualClock::new(), SlowValue::default());
        let read = |figure| value.read(&clock, "test", KEPT, move || figure).expect("a thread");
        let found = |reading: SlowReading<u32>| reading.last.map(|(_, figure)| figure);
        assert_eq!(found(read(1)), Some(1));
        clock.advance(KEPT - Duration::from_millis(1));
        assert_eq!(found(read(2)), Some(1), "kept");
        clock.advance(Duration::from_millis(1));
        assert_eq!(found(read(3)), Some(3));
    }

    #[test]
    fn a_read_that_hangs_costs_one_thread_and_no_caller_waits_for_its_end() {
        let (clock, value) = (SystemClock::new(), SlowValue::default());
        let (end, ended) = mpsc::channel::<()>();
        let hangs = move || ended.recv().map_or(1, |()| 2);
        let first = value.read(&clock, "test", KEPT, hangs).expect("a thread");
        assert!(first.last.is_none() && first.begun.is_some() && !first.is_new);
        let second = value.read(&clock, "test", KEPT, || panic!("one is in progress"));
        assert!(second.expect("no thread is needed").begun.is_some());
        drop(end);
        let last = || lock(&value.0).last.as_ref().map(|(_, figure)| *figure);
        while last().is_none() {
            thread::yield_now();
        }
        assert_eq!(last(), Some(1));
    }

    #[test]
    fn a_read_that_panics_leaves_the_last_value() {
        let (clock, value) = (ManualClock::new(), SlowValue::default());
        value.read(&clock, "test", KEPT, || 1).expect("a thread");
        clock.advance(KEPT);
        let reading = value.read(&clock, "test", KEPT, || panic!("as planned")).expect("a thread");
        assert_eq!((reading.last.map(|(_, figure)| figure), reading.begun), (Some(1), None));
    }
}
