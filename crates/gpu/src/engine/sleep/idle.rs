//! Idle sleep: an arena falls asleep after a time without a lease, and a minimum time awake.
//!
//! It does not watch the time: its caller asks when to call again.
//!
//! Invariant: `idle sleep => now >= last lease's end + idle_after, now >= awake since + min_awake`.

use lowtide_core::log;
use std::time::Duration;

use super::phase::Phase;
use super::{SleepOptions, SleepReport};
use crate::api::arena::DeviceArena;
use crate::exec::inner::ArenaInner;
use crate::state::arena::ArenaState;
use crate::types::error::DeviceError;
use lowtide_core::clock::Moment;

/// The delay before an arena that could not fall asleep, or was interrupted, tries again. A guess.
const AGAIN: Duration = Duration::from_secs(10);

impl DeviceArena {
    /// Puts the arena to sleep if no lease was held for [`SleepConfig::idle_after`] at `now`, and
    /// it has been awake for [`SleepConfig::min_awake`]; otherwise returns `None`. Does not wait
    /// for leases. Otherwise like [`DeviceArena::sleep`].
    ///
    /// On the worker of a `Memory` it does not wait for the whole device: an arena with leases
    /// without a lane stays awake there, with [`DriverError::Background`].
    ///
    /// On a driver without [`same_address_wake`](crate::driver::Capabilities) it releases
    /// idle memory instead, stays awake and returns `None`.
    ///
    /// Allocations and frees do not count as leases. An arena without memory stays awake, and so
    /// does one with raw blocks or exported buffers. If a lease or a free interrupts it, it returns
    /// `None`, and does not try again for 10 s; the same holds after an error.
    ///
    /// # Errors
    /// The errors of [`DeviceArena::sleep`].
    ///
    /// [`DriverError::Background`]: crate::driver::DriverError::Background
    /// [`SleepConfig::idle_after`]: super::SleepConfig::idle_after
    /// [`SleepConfig::min_awake`]: super::SleepConfig::min_awake
    pub fn sleep_if_idle(&self, now: Moment) -> Result<Option<SleepReport>, DeviceError> {
        self.inner().check_here()?;
        if self.next_sleep() > now {
            return Ok(None);
        }
        let inner = self.inner();
        if !inner.capabilities.same_address_wake {
            return self.lie_awake().map(|()| None);
        }
        let options = SleepOptions { drain: Duration::ZERO, ..inner.sleep.options };
        let outcome = self.try_sleep(options);
        let Err(error) = outcome else { return outcome.map(Some) };
        // An allocation that cancels it is no lease: without a pause it would be tried at once
        // again, and contents copied for nothing.
        let again = inner.clock.now() + AGAIN;
        let mut books = inner.lock();
        books.sleep.not_before = books.sleep.not_before.max(again);
        drop(books);
        log!(debug, arena = self.name(), %error, "arena idle sleep failed");
        match error {
            // Another thread was faster, and so it is not idle.
            DeviceError::Leased { .. }
            | DeviceError::Exported { .. }
            | DeviceError::SleepCancelled { .. }
            | DeviceError::State { .. } => Ok(None),
            error => Err(error),
        }
    }

    /// In place of a sleep from which there is no way back to the same addresses.
    fn lie_awake(&self) -> Result<(), DeviceError> {
        let inner = self.inner();
        let again = inner.clock.now() + AGAIN;
        let mut books = inner.lock();
        let is_first = !std::mem::replace(&mut books.sleep.lay_awake, true);
        books.sleep.not_before = books.sleep.not_before.max(again);
        drop(books);
        if is_first {
            let (arena, backend) = (self.name(), self.backend());
            log!(info, arena, %backend, "backend cannot sleep, releasing only idle memory");
        }
        self.purge().map(drop)
    }

    /// Returns the time for the next [`DeviceArena::sleep_if_idle`]; [`Moment::NEVER`] if idle
    /// sleep is off, a lease is held, or the arena is not awake, has no memory, or has raw blocks
    /// or exported buffers. Takes the lock for a few comparisons.
    #[must_use]
    pub fn next_sleep(&self) -> Moment {
        let inner = self.inner();
        if inner.check_here().is_err() {
            return Moment::NEVER;
        }
        inner.next_sleep(&inner.lock())
    }
}

impl ArenaInner {
    pub(crate) fn next_sleep(&self, books: &ArenaState) -> Moment {
        match self.sleep.idle_after {
            Some(idle_after) if !self.is_closed() => self.sleep_due(books, idle_after),
            _ => Moment::NEVER,
        }
    }

    fn sleep_due(&self, books: &ArenaState, idle_after: Duration) -> Moment {
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
        // Nothing to release.
        if !self.capabilities.same_address_wake && books.idle() == 0 {
            return Moment::NEVER;
        }
        let due = (sleep.left_at + idle_after).max(sleep.awake_since + min_awake);
        due.max(sleep.not_before)
    }
}

impl ArenaState {
    /// Returns `true` if it sleeps, and has no block left to wake for.
    pub(crate) fn sleeps_for_nothing(&self) -> bool {
        self.sleep.phase == Phase::Asleep && self.live() == 0
    }
}
