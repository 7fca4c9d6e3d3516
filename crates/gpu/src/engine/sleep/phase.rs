//! The states of an arena, and which thread waits for which: accounting under the arena's lock, and
//! the gate that every allocation and every lease passes.
//!
//! There is one more state than the four shown: a draining arena without a lease is on its way
//! down, and from then on entering waits for its end.
//!
//! Invariants: `leases > 0 => awake or draining`; one thread at a time puts it to sleep or wakes
//! it; a thread that waits for a wake gets its result, and one wake serves all waiting threads.

use std::any::Any;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::Arc;
use std::task::Waker;

use super::SleepState;
use super::stores::{Between, Saved};
use super::{HostBudget, SleepConfig};
use crate::driver::HostStore;
use crate::exec::handles::OwnedStream;
use crate::exec::inner::ArenaInner;
use crate::state::arena::ArenaState;
use crate::state::streams::StreamKey;
use crate::types::error::DeviceError;
use lowtide_core::bytes::ByteSize;
use lowtide_core::clock::{Bell, Clock, Moment};

/// The phase of an arena between awake and asleep.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(in crate::engine) enum Phase {
    #[default]
    Awake,
    /// Waits for leases: the number of the drain.
    Draining(u64),
    /// Falling asleep: entering is blocked.
    Falling,
    Asleep,
    /// On the way up.
    Waking,
}

/// The sleep state of an arena.
#[derive(Default)]
pub(crate) struct Sleep {
    pub(in crate::engine) phase: Phase,
    /// Drains begun.
    pub(super) drains: u64,
    /// Rung when the last lease is dropped, or the drain is cancelled.
    pub(super) bell: Option<Arc<Bell>>,
    /// The number of threads that want to enter while the arena is falling asleep.
    pub(in crate::engine) entering: u32,
    /// Every use of every block is known to be complete, and none begins before it is awake.
    pub(super) is_quiet: bool,
    /// Streams on which leases were used, since that was last waited for.
    pub(super) used: BTreeSet<StreamKey>,
    /// Wakes that have ended, and how the last one failed.
    pub(in crate::engine) attempts: u64,
    pub(super) failure: Option<DeviceError>,
    /// Wakers of futures, by the id of the wait; and the last id.
    pub(super) wakers: BTreeMap<u64, Waker>,
    pub(super) waits: u64,
    /// The stream of the copies, once there was one.
    pub(in crate::engine) stream: Option<Arc<OwnedStream>>,
    pub(super) budget: Option<Arc<dyn HostBudget>>,
    /// The contents of sleeping blocks.
    pub(super) saved: Option<Saved>,
    pub(super) between: Between,
    /// Times that copies were begun on that stream; up to which of them the host has seen the end.
    pub(in crate::engine) copying: u64,
    pub(in crate::engine) copied: u64,
    /// `true` if the thread that began the last of them may queue more.
    pub(super) is_queueing: bool,
    /// Stores that the driver has not freed, and their reservation until it has.
    pub(super) left: Vec<(HostStore, ByteSize)>,
    pub(super) booked: Vec<Box<dyn Any + Send>>,
    /// Since when a lease was held without a pause; when the last one went.
    pub(super) leased_since: Moment,
    pub(super) left_at: Moment,
    /// When it was opened or woken.
    pub(super) awake_since: Moment,
    /// It does not fall asleep by itself before: the last time it failed.
    pub(super) not_before: Moment,
    /// It was said that it cannot sleep on its driver.
    pub(super) lay_awake: bool,
    pub(super) sleeps: u64,
    pub(super) wakes: u64,
    pub(super) wake_failures: u64,
}

impl Sleep {
    /// Of an arena that is opened now.
    pub(crate) fn new(now: Moment, config: &SleepConfig) -> Self {
        let between = Between::of(config.keep_stores);
        Self { between, leased_since: now, left_at: now, awake_since: now, ..Self::default() }
    }

    pub(crate) const fn state(&self) -> SleepState {
        match self.phase {
            Phase::Awake => SleepState::Awake,
            Phase::Draining(_) | Phase::Falling => SleepState::Draining,
            Phase::Asleep => SleepState::Asleep,
            Phase::Waking => SleepState::Waking,
        }
    }

    /// Returns `true` if memory may be used and handed out.
    #[inline]
    pub(crate) const fn is_open(&self) -> bool {
        matches!(self.phase, Phase::Awake | Phase::Draining(_))
    }

    /// Returns `true` if blocks may be moved.
    pub(crate) fn is_awake(&self) -> bool {
        self.phase == Phase::Awake
    }

    /// Returns `true` if a copy of a sleep or a wake may still use memory of the arena.
    pub(crate) const fn may_be_copied(&self) -> bool {
        self.copied < self.copying
    }

    /// Returns `true` if a thread may queue more of them: only that thread knows when the last one
    /// is done.
    pub(crate) const fn is_queueing(&self) -> bool {
        self.is_queueing
    }

    /// Returns `true` if memory freed now has only completed uses.
    pub(crate) const fn is_quiet(&self) -> bool {
        self.is_quiet
    }

    /// Host memory that holds contents, or stays for them, or that the driver did not take back.
    pub(crate) fn offloaded(&self) -> ByteSize {
        let stores =
            [self.saved.as_ref(), self.between.kept()].into_iter().flatten().map(Saved::bytes);
        stores.chain(self.left.iter().map(|(_, size)| *size)).sum()
    }

    /// Sleeps, wakes, and wakes that failed.
    pub(crate) const fn totals(&self) -> [u64; 3] {
        [self.sleeps, self.wakes, self.wake_failures]
    }

    /// Records that a stream was used under a lease.
    pub(crate) fn note_used(&mut self, stream: StreamKey) {
        self.used.insert(stream);
    }

    /// Records the last use of memory, once no lease is held.
    pub(crate) fn note_unused(&mut self, now: Moment) {
        self.left_at = self.left_at.max(now);
    }

    /// Forgets a stream; returns `true` if it was used under a lease, and that was not waited for.
    pub(crate) fn forget_used(&mut self, stream: StreamKey) -> bool {
        self.used.remove(&stream)
    }

    /// Returns the streams used under leases until now, `None` if unknown; [`Sleep::complete`]
    /// clears them.
    pub(crate) fn used(&self) -> Option<Vec<StreamKey>> {
        let is_known = !self.used.contains(&StreamKey::CONTEXT);
        is_known.then(|| self.used.iter().copied().collect())
    }

    /// Records that the work of all dropped leases is complete.
    pub(crate) fn complete(&mut self) {
        self.used.clear();
    }

    /// Returns `true` if a thread or future waits for the arena to be awake.
    pub(super) fn is_wanted(&self) -> bool {
        self.entering > 0 || !self.wakers.is_empty()
    }

    /// Changes the phase; the returned wakers are to be called with no lock held.
    #[must_use]
    pub(super) fn go(&mut self, phase: Phase) -> Vec<Waker> {
        self.phase = phase;
        self.is_queueing = false;
        std::mem::take(&mut self.wakers).into_values().collect()
    }

    /// Ends a drain, if one is under way.
    fn cancel_drain(&mut self) {
        if matches!(self.phase, Phase::Draining(_)) {
            self.phase = Phase::Awake;
            if let Some(bell) = self.bell.take() {
                bell.ring();
            }
        }
    }
}

impl ArenaState {
    /// Records one more lease of an open arena, which cancels a drain.
    ///
    /// # Errors
    /// `TooManyLeases`.
    pub(crate) fn enter(&mut self, clock: &dyn Clock) -> Result<(), DeviceError> {
        debug_assert!(self.sleep.is_open(), "nobody gets in else");
        let leases = self.leases.checked_add(1);
        self.leases = leases.ok_or(DeviceError::TooManyLeases { limit: u32::MAX })?;
        if self.leases == 1 {
            self.sleep.leased_since = clock.now();
        }
        self.sleep.cancel_drain();
        Ok(())
    }

    /// Records that a lease was dropped.
    pub(crate) fn leave(&mut self, clock: &dyn Clock) {
        self.leases -= 1;
        if self.leases == 0 {
            self.sleep.left_at = clock.now();
            if let Some(bell) = &self.sleep.bell {
                bell.ring();
            }
        }
    }

    /// Returns `true` if calls are in progress that place, move, commit or release.
    pub(super) fn is_busy(&self) -> bool {
        let moving = |region: &crate::state::region::RegionState| {
            region.arriving + region.segment.committing() + region.segment.leaving()
        };
        self.moves.moving.is_some() || self.total(moving) > 0
    }
}

impl ArenaInner {
    pub(super) fn not_awake(&self, books: &ArenaState) -> DeviceError {
        DeviceError::State { arena: self.name.clone(), state: books.sleep.state() }
    }

    /// Notifies of the end of a call that a thread putting the arena to sleep waits for.
    pub(crate) fn note_quieter(&self, books: &ArenaState) {
        if books.sleep.phase == Phase::Falling {}
    }
}

impl Sleep {
    /// Returns the error of the wake that was in progress, or came, since this many had ended.
    pub(in crate::engine) fn failed_since(&self, attempts: u64) -> Option<DeviceError> {
        self.failure.clone().filter(|_| self.attempts > attempts)
    }
}

impl fmt::Debug for Sleep {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Sleep")
            .field("phase", &self.phase)
            .field("offloaded", &self.offloaded())
            .finish_non_exhaustive()
    }
}
