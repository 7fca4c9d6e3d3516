//! The wakers of the watches of a pressure level.
//!
//! Part of the state that admissions share; [`LevelWatch`](super::level_watch::LevelWatch) is the
//! handle of one watch.
//!
//! Invariant: no waker is called, cloned or dropped with the lock held.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::task::Waker;

/// The watches that wait for a change, each with its number.
#[derive(Debug, Default)]
pub(super) struct LevelWatches(Mutex<Vec<(u64, Waker)>>);

impl LevelWatches {
    fn wakers(&self) -> MutexGuard<'_, Vec<(u64, Waker)>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Wakes all, after a change.
    #[cold]
    pub(super) fn wake(&self) {
        let wakers = std::mem::take(&mut *self.wakers());
        wakers.into_iter().for_each(|(_, waker)| waker.wake());
    }

    /// Adds a waker, and returns the one that this watch had.
    pub(super) fn add(&self, number: u64, waker: Waker) -> Option<Waker> {
        let mut wakers = self.wakers();
        if let Some((_, place)) = wakers.iter_mut().find(|(other, _)| *other == number) {
            return Some(std::mem::replace(place, waker));
        }
        wakers.push((number, waker));
        None
    }

    pub(super) fn remove(&self, number: u64) -> Option<Waker> {
        let mut wakers = self.wakers();
        let at = wakers.iter().position(|(other, _)| *other == number)?;
        Some(wakers.swap_remove(at).1)
    }
}
