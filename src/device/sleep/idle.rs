//! When an arena falls asleep by itself: after a time without a lease, and some time awake.
//!
//! It watches no time: who does asks when to come again.
//!
//! Invariant: `asleep by itself => now >= last lease's end + idle_after, now >= awake + residency`.

use super::phase::Phase;
use std::time::Duration;

use super::{SleepConfig, SleepOptions, Slept};
use crate::clock::Moment;
use crate::device::arena::DeviceArena;
use crate::device::books::Books;
use crate::device::error::DeviceError;
use crate::device::shared::Shared;

/// How soon an arena that could not fall asleep tries again. A guess.
const AGAIN: Duration = Duration::from_secs(10);

impl DeviceArena {
    /// Falls asleep if nobody has held a lease for [`SleepConfig::idle_after`] at `now`, and it has
    /// been awake for [`SleepConfig::residency`]; `None` where that is not so. Waits for no lease;
    /// else as [`DeviceArena::sleep`].
    ///
    /// Allocations and frees are no leases. An arena without memory stays awake.
    ///
    /// # Errors
    /// As [`DeviceArena::sleep`].
    ///
    /// [`SleepConfig::idle_after`]: super::SleepConfig::idle_after
    /// [`SleepConfig::residency`]: super::SleepConfig::residency
    pub fn sleep_if_idle(&self, now: Moment) -> Result<Option<Slept>, DeviceError> {
        self.shared().check_here()?;
        if self.next_sleep() > now {
            return Ok(None);
        }
        let options = SleepOptions { drain: Duration::ZERO, ..self.shared().sleep.options };
        match self.sleep(options) {
            Ok(slept) => Ok(Some(slept)),
            // Somebody was quicker, and so it is not idle.
            Err(
                DeviceError::Leased { .. }
                | DeviceError::SleepCancelled { .. }
                | DeviceError::State { .. },
            ) => Ok(None),
            Err(error) => {
                self.shared().books().sleep.not_before = now + AGAIN;
                Err(error)
            }
        }
    }

    /// When [`DeviceArena::sleep_if_idle`] should next be called; [`Moment::NEVER`] where it is not
    /// to sleep by itself, is not awake, has no memory, has blocks given out by address, or a lease
    /// is held. Takes the lock for a few comparisons.
    #[must_use]
    pub fn next_sleep(&self) -> Moment {
        let shared = self.shared();
        if shared.check_here().is_err() || shared.is_closed() {
            return Moment::NEVER;
        }
        shared.sleep_due(&shared.books())
    }
}

impl Shared {
    fn sleep_due(&self, books: &Books) -> Moment {
        let SleepConfig { idle_after, residency, .. } = self.sleep;
        let Some(idle_after) = idle_after else { return Moment::NEVER };
        let sleep = &books.sleep;
        let is_idle = sleep.phase == Phase::Awake && books.leases == 0;
        if !is_idle || books.backed() == 0 || !books.raw.is_empty() {
            return Moment::NEVER;
        }
        let due = (sleep.left_at + idle_after).max(sleep.awake_since + residency);
        due.max(sleep.not_before)
    }
}
