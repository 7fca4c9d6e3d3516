//! Admits large requests of routes whose need is not known: adds a lock and a clock to
//! `slow_start`.
//!
//! Invariant: a request that has entered leaves when its `Trial` is dropped.

use std::fmt;
use std::sync::Arc;

use lowtide_core::bytes::ByteSize;
use lowtide_core::clock::{Clock, Moment};
use lowtide_core::sync::{Mutex, lock};

use super::slow_start::{SlowStart, TooManyRunning};

/// The slow start of a route.
#[derive(Clone, Debug)]
pub(super) struct Trials(Arc<Mutex<SlowStart>>);

/// A large request of a route with unknown need; dropping it ends it. Boxed, because few requests
/// have one.
pub struct Trial {
    trials: Trials,
    clock: Arc<dyn Clock>,
    entered: Moment,
    /// `true` if its handler succeeded.
    pub succeeded: bool,
}

impl Trials {
    /// Creates one that ends after so many successes.
    pub(super) fn new(successes: u32) -> Self {
        Self(Arc::new(Mutex::new(SlowStart::new(successes))))
    }

    /// Admits a request with this estimate if the need of the route is known or few requests run.
    /// Reads the time only if needed.
    #[inline]
    pub(super) fn enter(
        &self,
        estimate: ByteSize,
        room: ByteSize,
        clock: &Arc<dyn Clock>,
    ) -> Result<Option<Box<Trial>>, TooManyRunning> {
        SlowStart::first(estimate, room).map_or(Ok(None), |first| self.enter_limited(first, clock))
    }

    fn enter_limited(
        &self,
        first: u32,
        clock: &Arc<dyn Clock>,
    ) -> Result<Option<Box<Trial>>, TooManyRunning> {
        let mut slow_start = lock(&self.0);
        if slow_start.is_over() {
            return Ok(None);
        }
        let entered = clock.now();
        slow_start.enter(first, entered)?;
        let (trials, clock) = (self.clone(), Arc::clone(clock));
        Ok(Some(Box::new(Trial { trials, clock, entered, succeeded: false })))
    }
}

impl Trial {
    /// Records that its body has arrived.
    pub fn arrived(&self) {
        lock(&self.trials.0).arrive(self.clock.now());
    }

    /// Records that it begins a piece of work.
    pub fn begins_work(&self) {
        lock(&self.trials.0).begin_work();
    }

    /// Records that it ends a piece of work, and if it grew beyond its claim by it.
    pub fn ends_work(&self, grew: bool) {
        lock(&self.trials.0).end_work(grew, self.clock.now());
    }
}

impl Drop for Trial {
    fn drop(&mut self) {
        lock(&self.trials.0).leave(self.succeeded, self.entered, self.clock.now());
    }
}

impl fmt::Debug for Trial {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Trial").field("succeeded", &self.succeeded).finish_non_exhaustive()
    }
}
