//! Releases idle memory: after its idle time (decay), all of it (purge), or down to a size (trim).
//!
//! This module decides how much to release and in which order, never when; a control thread or the
//! program calls it. It needs neither a stream nor a lease, because only granules that no block
//! touches leave.
//!
//! The rule of decommit: a granule leaves only when every use of it is complete. On a driver with
//! synchronous work a freed block has no uses left. On other drivers freed memory is pending, and
//! so active, until its uses are known to be complete (`engine::completion`).
//!
//! Invariants: a decay releases no memory that was in use within the decay time; after enough
//! calls, given the bound per call, no memory has been idle for longer.

use std::time::Duration;

use crate::api::arena::DeviceArena;
use crate::engine::commit::{release_down_to, release_granules};
use crate::engine::completion::{self, look_for_ends};
use crate::engine::context::Surroundings as _;
use crate::engine::import;
use crate::engine::resume::{sleeps_empty, wake_if_empty};
use crate::engine::split::release_stuck;
use crate::engine::stores;
use crate::exec::ArenaInner;
use crate::state::ArenaState;
use crate::types::Result;
#[cfg(doc)]
use crate::types::error::DeviceError;
use lowtide_core::clock::Moment;
use lowtide_core::decay::DecayTime;
use lowtide_core::{ByteSize, log};

/// The delay until freed memory that a stream may still use is checked again. A guess.
const LOOK_AGAIN: Duration = Duration::from_millis(100);

impl DeviceArena {
    /// Releases the memory that has been idle for the decay time at `now`, and returns its bytes.
    /// While the arena is in use, expired memory may stay for up to a sixteenth of the decay time
    /// longer, so that it leaves in few calls. [`DeviceArena::next_decay`] is the time of the next
    /// call.
    ///
    /// Makes at most 32 decommits; if that is not enough, the next call is due `now`. Never waits
    /// for a stream or the device: memory that a stream may still use stays, and the next call is
    /// due soon. So it can be called at any time, even while a stream of the context captures a
    /// graph.
    ///
    /// On a driver with handles and remaps it also divides up to 16 handles that blocks use in
    /// part, if more than a hundredth of the committed memory is idle in such handles, and if it
    /// has expired. Leases wait while the contents of one handle are copied: well below 1 ms.
    ///
    /// On a driver with streams, memory freed without a lane (buffers of [`DeviceArena::alloc`],
    /// exported buffers, imported memory) stays pending until a call of the program has waited for
    /// the device: an allocation that takes it, [`DeviceArena::purge`], [`DeviceArena::trim`],
    /// [`DeviceArena::shrink`], [`DeviceArena::sleep`], [`DeviceArena::wait_for_pending`] or
    /// [`DeviceArena::close`]. Calls the release functions of imported memory whose work is known
    /// to be complete. Holds the lock while it checks every idle granule.
    ///
    /// # Errors
    /// [`DeviceError::Driver`], with earlier releases accounted for; [`DeviceError::Forked`].
    pub fn decay(&self, now: Moment) -> Result<ByteSize> {
        let inner = self.inner();
        inner.check_here()?;
        inner.cool_caches();
        inner.run(wake_if_empty);
        inner.run(async |cx| stores::decay(cx, now).await);
        inner.run(async |cx| look_for_ends(cx, false).await)?;
        inner.run(import::release_imports);
        let (given, released) = inner.run(async |cx| {
            let ages = cx.with(|state| state.aging.ages(now));
            let mut given = release_granules(cx, u64::MAX, Some(ages)).await;
            given.granules += release_stuck(cx, Some(ages)).await;
            cx.with(|state| {
                state.set_looked(now, given.error.is_some());
                let released = ByteSize::new(state.bytes_of(given.granules));
                state.events.push("decay", |line| {
                    line.bytes("released", released).flag("ok", given.error.is_none())
                });
                (given, released)
            })
        });
        inner.debug_validate();
        if let Some(error) = given.error {
            return Err(error.into());
        }
        if !released.is_zero() {
            log!(debug, arena = self.name(), %released, "idle memory decayed");
        }
        Ok(released)
    }

    /// Returns the time for the next [`DeviceArena::decay`], which may have passed;
    /// [`Moment::NEVER`] if nothing is idle, or idle memory never decays. No notification follows
    /// when that changes: check again. Takes the lock for a few additions.
    #[must_use]
    pub fn next_decay(&self) -> Moment {
        let inner = self.inner();
        inner.run_here(|state| inner.next_look(state)).unwrap_or(Moment::NEVER)
    }

    /// Sets the time that idle memory stays; memory that is idle now counts as idle since now.
    pub fn set_decay(&self, time: DecayTime) {
        let inner = self.inner();
        if inner.check_here().is_ok() {
            inner.caches.set(|rules| rules.at_once = time == DecayTime::AtOnce);
            if time == DecayTime::AtOnce {
                inner.empty_caches();
            }
            inner.run_now(|state| state.set_decay(time));
        }
    }

    /// Releases all idle memory now and returns its bytes. Makes as many driver calls as needed,
    /// none with the lock held.
    ///
    /// On a driver with streams, memory freed on a lane becomes idle when a check (a decay, a
    /// purge, a trim) has seen that its work is complete. The first check after the free may only
    /// queue the query, so that a later one releases the memory, even if the program has waited for
    /// the stream itself. [`DeviceArena::close`] waits.
    ///
    /// If memory was freed without a lane, it waits for all work of the context. That fails with
    /// code 900, and invalidates the capture, while a stream of the context captures a graph. The
    /// arena sees captures of its lanes, and does not wait then. On the worker of a `Memory` it
    /// never waits, and such memory stays pending.
    ///
    /// # Errors
    /// [`DeviceError::Driver`], with earlier releases accounted for; [`DeviceError::Forked`].
    pub fn purge(&self) -> Result<ByteSize> {
        self.trim(ByteSize::ZERO)
    }

    /// Releases all idle memory, resets growth to its first step, like ONNX Runtime's `Shrink`, and
    /// returns the bytes released. One live block keeps only its granules, not a whole region.
    ///
    /// # Errors
    /// The errors of [`DeviceArena::purge`].
    pub fn shrink(&self) -> Result<ByteSize> {
        self.down_to(ByteSize::ZERO, "shrink", |state, bytes| {
            state.totals.shrinks_total += 1;
            state.totals.shrunk_bytes_total += bytes;
            state.steps.shrunk();
        })
    }

    /// Releases idle memory until at most `keep` bytes are committed, or nothing is idle, and
    /// returns the bytes released.
    ///
    /// # Errors
    /// [`DeviceError::Driver`], with earlier releases accounted for; [`DeviceError::Forked`].
    pub fn trim(&self, keep: ByteSize) -> Result<ByteSize> {
        self.down_to(keep, "trim", |state, bytes| {
            state.totals.trims_total += 1;
            state.totals.trimmed_bytes_total += bytes;
        })
    }

    /// Waits until the work of all freed memory is complete, so that a following
    /// [`DeviceArena::purge`] releases it, and the work of earlier leases that name no lane, so
    /// that a following [`DeviceArena::compact`] moves blocks. Memory freed on lanes needs an event
    /// of each lane's stream; other memory and such leases need the whole device. Returns at once
    /// if there is no such work.
    ///
    /// # Errors
    /// [`DeviceError::Capturing`] while the stream of a lane captures a graph, before any wait;
    /// [`DeviceError::Driver`], [`DeviceError::Forked`].
    pub fn wait_for_pending(&self) -> Result<()> {
        self.inner().check_here()?;
        self.inner().run(completion::complete_pending)
    }

    fn down_to(
        &self,
        keep: ByteSize,
        act: &'static str,
        note: impl FnOnce(&mut ArenaState, u64),
    ) -> Result<ByteSize> {
        let inner = self.inner();
        inner.check_here()?;
        inner.empty_caches();
        inner.run(wake_if_empty);
        inner.run(stores::release_over_limit);
        inner.run(async |cx| look_for_ends(cx, true).await)?;
        inner.run(import::release_imports);
        let (released, error) = inner.run(async |cx| {
            let (mut granules, error) = release_down_to(cx, keep).await;
            // Each turn but the last divides a handle. New handles are stuck in none.
            while error.is_none() && cx.with(|state| state.memory().backed) > keep.get() {
                match release_stuck(cx, None).await {
                    0 => break,
                    released => granules += released,
                }
            }
            cx.with(|state| {
                let bytes = state.bytes_of(granules);
                note(state, bytes);
                state
                    .events
                    .push(act, |line| line.number("released", bytes).flag("ok", error.is_none()));
                (ByteSize::new(bytes), error)
            })
        });
        inner.debug_validate();
        if !released.is_zero() {
            log!(debug, arena = self.name(), %keep, %released, "idle memory released");
        }
        error.map_or(Ok(released), |error| Err(error.into()))
    }
}

impl ArenaInner {
    /// Returns the time of the next check of idle memory, caches, pending memory, idle stores, or
    /// the host memory of a sleeping arena without blocks.
    pub(crate) fn next_look(&self, state: &ArenaState) -> Moment {
        let due =
            if self.caches_hold() { state.due().min(state.aging.cache_due()) } else { state.due() };
        // Counted from the last check, not from now: otherwise the time would move with each call.
        let again = state.aging.looked_at + LOOK_AGAIN;
        // A store that the driver does not free stays due.
        let due = due.min(stores::store_due(state).max(again));
        // A handle that cannot be divided now stays due.
        let due = due.min(state.stuck_due().max(again));
        // Uses that no event proves wait for a call of the program, which checks them itself.
        let is_pending = state.pending() > 0 && state.streams.is_provable();
        if sleeps_empty(state) {
            Moment::ORIGIN
        } else if is_pending || state.untrimmed || state.outstanding.imported.waiting() > 0 {
            due.min(again)
        } else {
            due
        }
    }
}
