//! The streams of load reports that wait for their next report.
//!
//! They need no timer of a runtime: the control loop looks at them with the requests that have time
//! limits, every 100 ms or at its next tick, and wakes those that are due. It wakes all when the
//! service is about to end.
//!
//! Invariants: at most [`STREAMS_MAX`] streams exist. No waker is called with the lock held.

use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Weak};
use std::task::Waker;

use lowtide_admission::layer::LargeRequest;

use crate::bytes::ByteSize;
use crate::clock::Moment;
use crate::sync::{Mutex, lock};

use super::LoadReports;

/// The streams of one layer at once. An estimate: balancers open one for each of their threads.
pub(super) const STREAMS_MAX: usize = 256;

/// The streams of one layer.
#[derive(Debug, Default)]
pub(super) struct Streams {
    count: AtomicUsize,
    waiting: Mutex<Vec<(u64, Moment, Waker)>>,
    next: AtomicU64,
    /// `true` once a service streams the reports.
    pub(super) is_served: AtomicBool,
}

impl Streams {
    /// Returns a slot for a further stream; `None` if there are too many.
    pub(super) fn acquire(reports: &Arc<LoadReports>) -> Option<StreamSlot> {
        let streams = &reports.streams;
        let add = |count: usize| (count < STREAMS_MAX).then_some(count + 1);
        streams.count.fetch_update(Ordering::Relaxed, Ordering::Relaxed, add).ok()?;
        let number = streams.next.fetch_add(1, Ordering::Relaxed);
        Some(StreamSlot { reports: Arc::clone(reports), number })
    }

    /// Wakes the streams that are due.
    fn wake(&self, is_due: impl Fn(Moment) -> bool) {
        // Bounded: none is added twice before it is polled, and then it is due later.
        for _ in 0..STREAMS_MAX {
            let mut waiting = lock(&self.waiting);
            let Some(at) = waiting.iter().position(|(_, due, _)| is_due(*due)) else { return };
            let (_, _, waker) = waiting.swap_remove(at);
            drop(waiting);
            waker.wake();
        }
    }
}

/// The slot of one stream.
#[derive(Debug)]
pub(super) struct StreamSlot {
    pub(super) reports: Arc<LoadReports>,
    number: u64,
}

impl StreamSlot {
    /// Wakes the task when it is due, by the control loop's clock. It has to look at the time again
    /// after this.
    pub(super) fn wait(&self, due: Moment, waker: &Waker) {
        let waker = waker.clone();
        let before = {
            let mut waiting = lock(&self.reports.streams.waiting);
            let found = waiting.iter_mut().find(|(number, ..)| *number == self.number);
            match found {
                Some(place) => Some(std::mem::replace(place, (self.number, due, waker))),
                None => {
                    waiting.push((self.number, due, waker));
                    None
                }
            }
        };
        drop(before);
    }
}

impl Drop for StreamSlot {
    fn drop(&mut self) {
        let streams = &self.reports.streams;
        streams.count.fetch_sub(1, Ordering::Relaxed);
        // In a forked child another thread may have held the lock.
        if self.reports.birth.is_here() {
            let mut waiting = lock(&streams.waiting);
            let at = waiting.iter().position(|(number, ..)| *number == self.number);
            let removed = at.map(|at| waiting.swap_remove(at));
            drop(waiting);
            drop(removed);
        }
    }
}

/// The streams of a layer in the control loop's registry, which keeps what has reserved most. They
/// say that they have reserved more than any request, so that they are kept.
pub(super) struct StreamTimer(Weak<LoadReports>);

impl StreamTimer {
    /// Adds the streams of a layer to the registry, once.
    pub(super) fn register(reports: &Arc<LoadReports>) {
        if !reports.streams.is_served.swap(true, Ordering::Relaxed) {
            reports.admission.state().register(Arc::new(Self(Arc::downgrade(reports))));
        }
    }
}

impl LargeRequest for StreamTimer {
    fn reserved(&self) -> Option<ByteSize> {
        self.0.upgrade().map(|_| ByteSize::MAX)
    }

    fn wake(&self) {
        if let Some(reports) = self.0.upgrade() {
            reports.streams.wake(|_| true);
        }
    }

    fn has_time_limit(&self) -> bool {
        true
    }

    fn check_time(&self, now: Moment) {
        if let Some(reports) = self.0.upgrade() {
            let ends = reports.is_ending();
            reports.streams.wake(|due| ends || due <= now);
        }
    }
}
