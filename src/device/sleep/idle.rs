//! When an arena falls asleep by itself: after a time without a lease, and some time awake.
//!
//! It watches no time: who does asks when to come again.
//!
//! Invariant: `asleep by itself => now >= last lease's end + idle_after, now >= awake + residency`.

use std::time::Duration;

use super::phase::Phase;
use super::{SleepOptions, SleepReport};
use crate::clock::Moment;
use crate::device::arena::DeviceArena;
use crate::device::books::Books;
use crate::device::error::DeviceError;
use crate::device::shared::Shared;

/// How soon an arena that could not fall asleep, or was wanted meanwhile, tries again. A guess.
const AGAIN: Duration = Duration::from_secs(10);

impl DeviceArena {
    /// Falls asleep if nobody has held a lease for [`SleepConfig::idle_after`] at `now`, and it has
    /// been awake for [`SleepConfig::min_awake`]; `None` where that is not so. Waits for no lease;
    /// else as [`DeviceArena::sleep`].
    ///
    /// On the worker of a `Memory` it does not wait for the whole device: an arena whose leases
    /// name no lane stays awake there, with [`DriverError::Background`].
    ///
    /// On a driver without [`same_address_wake`](crate::device::driver::Capabilities) it gives back
    /// what is idle in place of that, and stays awake: `None`.
    ///
    /// Allocations and frees are no leases. An arena without memory stays awake, and so does one
    /// that has blocks given out by address, or buffers that are lent. Where somebody was quicker
    /// (a lease, a free), `None` as well, and not again for 10 s; after an error neither.
    ///
    /// # Errors
    /// As [`DeviceArena::sleep`].
    ///
    /// [`DriverError::Background`]: crate::device::driver::DriverError::Background
    /// [`SleepConfig::idle_after`]: super::SleepConfig::idle_after
    /// [`SleepConfig::min_awake`]: super::SleepConfig::residency
    pub fn sleep_if_idle(&self, now: Moment) -> Result<Option<SleepReport>, DeviceError> {
        self.shared().check_here()?;
        if self.next_sleep() > now {
            return Ok(None);
        }
        let shared = self.shared();
        if !shared.capabilities.same_address_wake {
            return self.lie_awake().map(|()| None);
        }
        let options = SleepOptions { drain: Duration::ZERO, ..shared.sleep.options };
        let outcome = self.try_sleep(options);
        let Err(error) = outcome else { return outcome.map(Some) };
        // An allocation that cancels it is no lease: without a pause it would be tried at once
        // again, and contents copied for nothing.
        let again = shared.clock.now() + AGAIN;
        let mut books = shared.books();
        books.sleep.not_before = books.sleep.not_before.max(again);
        drop(books);
        log!(debug, arena = self.name(), %error, "the arena did not fall asleep by itself");
        match error {
            // Somebody was quicker, and so it is not idle.
            DeviceError::Leased { .. }
            | DeviceError::Exported { .. }
            | DeviceError::SleepCancelled { .. }
            | DeviceError::State { .. } => Ok(None),
            error => Err(error),
        }
    }

    /// In place of a sleep from which there is no way back to the same addresses.
    fn lie_awake(&self) -> Result<(), DeviceError> {
        let shared = self.shared();
        let again = shared.clock.now() + AGAIN;
        let mut books = shared.books();
        let is_first = !std::mem::replace(&mut books.sleep.lay_awake, true);
        books.sleep.not_before = books.sleep.not_before.max(again);
        drop(books);
        if is_first {
            let (arena, backend) = (self.name(), self.backend());
            log!(info, arena, %backend, "the arena cannot sleep: what is idle is given back");
        }
        self.purge().map(drop)
    }

    /// When [`DeviceArena::sleep_if_idle`] should next be called; [`Moment::NEVER`] where it is not
    /// to sleep by itself, is not awake, has no memory, has blocks given out by address or buffers
    /// that are lent, or a lease is held. Takes the lock for a few comparisons.
    #[must_use]
    pub fn next_sleep(&self) -> Moment {
        let shared = self.shared();
        if shared.check_here().is_err() || shared.is_closed() {
            return Moment::NEVER;
        }
        let Some(idle_after) = shared.sleep.idle_after else { return Moment::NEVER };
        shared.sleep_due(&shared.books(), idle_after)
    }
}

impl Shared {
    fn sleep_due(&self, books: &Books, idle_after: Duration) -> Moment {
        let min_awake = self.sleep.min_awake;
        let sleep = &books.sleep;
        let is_idle = sleep.phase == Phase::Awake && books.leases == 0;
        if !is_idle
            || books.backed() == 0
            || !books.raw.is_empty()
            || books.outstanding.exported.count > 0
        {
            return Moment::NEVER;
        }
        // Nothing to give back.
        if !self.capabilities.same_address_wake && books.idle() == 0 {
            return Moment::NEVER;
        }
        let due = (sleep.left_at + idle_after).max(sleep.awake_since + min_awake);
        due.max(sleep.not_before)
    }
}

impl Books {
    /// Whether it sleeps, and no block is left to wake for.
    pub(in crate::device) fn sleeps_for_nothing(&self) -> bool {
        self.sleep.phase == Phase::Asleep && self.live() == 0
    }
}
