//! Releases idle memory: after its idle time (decay), all of it (purge), or down to a size (trim).
//!
//! It decides how much and in which order, never when; a control thread or the program calls it. It
//! needs neither a stream nor a lease, because only granules that no block touches leave.
//!
//! The rule of decommit: a granule leaves only when every use of it is complete. On a driver with
//! synchronous work a freed block has no uses left; on others freed memory is pending, and so
//! active, until its uses are known to be complete (`proof`).
//!
//! Invariants: a decay releases no memory that was in use within the decay time; after it, with as
//! many calls as the bound per call requires, no memory has been idle for longer.
#![expect(unsafe_code, reason = "idle memory is taken away")]

use lowtide_core::log;
use std::time::Duration;

use crate::api::arena::DeviceArena;
use crate::driver::DriverError;
use crate::exec::executor::Locked;
use crate::exec::inner::ArenaInner;
use crate::state::aging::Ages;
use crate::state::arena::ArenaState;
use crate::state::event::{ArenaEvent, ReleaseCause};
use crate::types::error::DeviceError;
use lowtide_core::bytes::ByteSize;
use lowtide_core::clock::Moment;
use lowtide_core::decay::DecayTime;

/// Driver calls that one look at idle memory makes at most. A guess, to be measured per driver.
pub(crate) const CALLS_MAX: usize = 32;

/// The delay until freed memory that a stream may still use is checked again. A guess.
const LOOK_AGAIN: Duration = Duration::from_millis(100);

/// The result of [`DeviceArena::decay`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct DecayReport {
    /// Bytes released to the driver.
    pub released: ByteSize,
    /// The time of the next call: `now` if there is more to release, [`Moment::NEVER`] if nothing
    /// is idle or idle memory never decays.
    pub next: Moment,
}

/// The result of a release.
#[derive(Debug)]
pub(crate) struct GivenBack {
    /// Granules released.
    pub(crate) granules: u64,
    /// The driver's error, if a call failed; the granules of that call and of later ones stay.
    pub(crate) error: Option<DriverError>,
    /// `true` if the call that failed was a trim: the memory has left the arena.
    pub(crate) is_of_trim: bool,
    /// `true` if the lock was released meanwhile: earlier counts may have changed.
    pub(crate) unlocked: bool,
}

impl DeviceArena {
    /// Releases the memory that has been idle for the decay time at `now`. While the arena is in
    /// use, expired memory may stay for up to a sixteenth of the decay time longer, so that it
    /// leaves in few calls.
    ///
    /// Makes at most 32 decommits; if that is not enough, `next` is `now`. Never waits for another
    /// thread's call, a stream or the device: memory that a stream may still use stays, and `next`
    /// is soon. So it can be called at any time, even while a stream of the context captures a
    /// graph.
    ///
    /// On a driver with streams, memory freed without a lane (buffers of [`DeviceArena::alloc`],
    /// exported buffers, imported memory) stays pending until a call of the program has waited for
    /// the device: an allocation that takes it, [`DeviceArena::purge`], [`DeviceArena::trim`],
    /// [`DeviceArena::shrink`], [`DeviceArena::sleep`], [`DeviceArena::compact`] or
    /// [`DeviceArena::close`]. Calls the release functions of imported memory whose work is known
    /// to be complete. Holds the lock while it checks every idle granule.
    ///
    /// # Errors
    /// [`DeviceError::Driver`], with earlier releases accounted for; [`DeviceError::Forked`].
    pub fn decay(&self, now: Moment) -> Result<DecayReport, DeviceError> {
        let inner = self.inner();
        inner.check_here()?;
        inner.cool_fronts();
        inner.wake_of_nothing();
        inner.look_for_ends(false)?;
        inner.release_adopted();
        let books = inner.lock();
        let ages = books.aging.ages(now);
        let (mut books, given) = inner.give_back(books, u64::MAX, Some(ages));
        books.set_looked(now, given.error.is_some());
        let next = inner.next_look(&books);
        let released = ByteSize::new(books.bytes_of(given.granules));
        let (cause, done) = (ReleaseCause::Decay { now }, given.error.is_none());
        books.events.push(&*inner.clock, || ArenaEvent::Released { cause, released, done });
        drop(books);
        inner.flush_events();
        inner.debug_validate();
        match given.error {
            Some(error) => Err(error.into()),
            None if released.is_zero() => Ok(DecayReport { released, next }),
            None => {
                log!(debug, arena = self.name(), %released, "idle memory decayed");
                Ok(DecayReport { released, next })
            }
        }
    }

    /// Returns the time for the next [`DeviceArena::decay`], which may have passed;
    /// [`Moment::NEVER`] if nothing is idle, or idle memory never decays. No notification follows
    /// when that changes: check again. Takes the lock for a few additions.
    #[must_use]
    pub fn next_decay(&self) -> Moment {
        let inner = self.inner();
        if inner.check_here().is_err() {
            return Moment::NEVER;
        }
        inner.next_look(&inner.lock())
    }

    /// Sets the time that idle memory stays; memory that is idle now counts as idle since now.
    pub fn set_decay(&self, time: DecayTime) {
        let inner = self.inner();
        if inner.check_here().is_ok() {
            inner.fronts.set_decay(time);
            if time == DecayTime::AtOnce {
                inner.empty_fronts();
            }
            let mut books = inner.lock();
            books.set_decay(time, inner.clock.now());
            drop(books);
            inner.flush_events();
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
    pub fn purge(&self) -> Result<ByteSize, DeviceError> {
        self.trim(ByteSize::ZERO)
    }

    /// Releases all idle memory, resets growth to its first step, like ONNX Runtime's `Shrink`, and
    /// returns the bytes released. One live block keeps only its granules, not a whole region.
    ///
    /// # Errors
    /// The errors of [`DeviceArena::purge`].
    pub fn shrink(&self) -> Result<ByteSize, DeviceError> {
        self.down_to(ByteSize::ZERO, ReleaseCause::Shrink, |books, bytes| {
            books.totals.shrinks += 1;
            books.totals.shrunk_bytes += bytes;
            books.steps.shrunk();
        })
    }

    /// Releases idle memory until at most `keep` bytes are committed, or nothing is idle, and
    /// returns the bytes released.
    ///
    /// # Errors
    /// [`DeviceError::Driver`], with earlier releases accounted for; [`DeviceError::Forked`].
    pub fn trim(&self, keep: ByteSize) -> Result<ByteSize, DeviceError> {
        self.down_to(keep, ReleaseCause::Trim { keep }, note_trim)
    }

    /// Waits until the work of all freed memory is complete, so that a following
    /// [`DeviceArena::purge`] releases it. Memory freed on lanes needs an event of each lane's
    /// stream; other memory needs the whole device. Returns at once if nothing is pending.
    ///
    /// # Errors
    /// [`DeviceError::Capturing`] while the stream of a lane captures a graph, before any wait;
    /// [`DeviceError::Driver`], [`DeviceError::Forked`].
    pub fn wait_for_pending(&self) -> Result<(), DeviceError> {
        self.inner().check_here()?;
        self.inner().complete_pending()
    }

    /// Gives all idle memory back, as a part of something else.
    pub(crate) fn empty(&self) -> Result<(), DeviceError> {
        self.down_to(ByteSize::ZERO, ReleaseCause::Close, note_trim).map(drop)
    }

    fn down_to(
        &self,
        keep: ByteSize,
        cause: ReleaseCause,
        note: impl FnOnce(&mut ArenaState, u64),
    ) -> Result<ByteSize, DeviceError> {
        let inner = self.inner();
        inner.check_here()?;
        inner.empty_fronts();
        inner.wake_of_nothing();
        inner.look_for_ends(true)?;
        inner.release_adopted();
        let mut books = inner.lock();
        let excess = books.backed().saturating_sub(books.leaving()).saturating_sub(keep.get());
        let granules = books.granules_for(excess.min(books.idle()));
        let mut released = 0;
        let mut error = None;
        // Each turn releases at least one granule: at most `granules` turns. One more, if memory
        // kept by the driver is to be trimmed.
        let mut untrimmed = books.untrimmed;
        while (released < granules || std::mem::take(&mut untrimmed)) && error.is_none() {
            let given;
            let left = granules.saturating_sub(released);
            (books, given) = inner.give_back(books, left, None);
            untrimmed = false;
            if given.granules == 0 && given.error.is_none() {
                break; // another thread took the idle memory
            }
            released += given.granules;
            error = given.error;
        }
        let bytes = books.bytes_of(released);
        note(&mut books, bytes);
        let (released, done) = (ByteSize::new(bytes), error.is_none());
        books.events.push(&*inner.clock, || ArenaEvent::Released { cause, released, done });
        drop(books);
        inner.flush_events();
        inner.debug_validate();
        if !released.is_zero() {
            log!(debug, arena = self.name(), %keep, %released, "idle memory released");
        }
        error.map_or(Ok(released), |error| Err(error.into()))
    }
}

fn note_trim(books: &mut ArenaState, bytes: u64) {
    books.totals.trims += 1;
    books.totals.trimmed_bytes += bytes;
}

impl ArenaInner {
    /// Returns the time of the next check of idle memory, caches, pending memory, or the host
    /// memory of a sleeping arena without blocks.
    pub(crate) fn next_look(&self, books: &ArenaState) -> Moment {
        let due =
            if self.fronts_hold() { books.due().min(books.aging.front_due()) } else { books.due() };
        // Counted from the last check, not from now: otherwise the time would move with each call.
        let again = books.aging.looked_at() + LOOK_AGAIN;
        // Uses that no event proves wait for a call of the program, which checks by itself.
        let is_pending = books.pending() > 0 && books.streams.is_provable();
        if books.sleeps_for_nothing() {
            Moment::ORIGIN
        } else if is_pending || books.untrimmed || books.outstanding.imported.is_waiting() {
            due.min(again)
        } else {
            due
        }
    }

    /// Releases up to `granules` idle granules, in at most [`CALLS_MAX`] calls, with the lock
    /// released around them; with ages, only expired ones. A segment leaves whole, and then the
    /// driver must keep none of them.
    pub(crate) fn give_back<'a>(
        &'a self,
        mut books: Locked<'a>,
        granules: u64,
        ages: Option<Ages>,
    ) -> (Locked<'a>, GivenBack) {
        let unlocked = books.sleep.may_be_copied() && !books.sleep.is_queueing();
        if books.sleep.may_be_copied() {
            let outcome;
            (books, outcome) = self.end_copies(books);
            if !matches!(outcome, Ok(true)) {
                let (granules, error) = (0, outcome.err());
                return (books, GivenBack { granules, error, is_of_trim: false, unlocked });
            }
        }
        let leaving = books.begin_leave(granules, CALLS_MAX, ages);
        let untrimmed = std::mem::take(&mut books.untrimmed);
        if leaving.is_empty() && !untrimmed {
            let (granules, error) = (0, None);
            return (books, GivenBack { granules, error, is_of_trim: false, unlocked });
        }
        drop(books);
        let mut done = 0;
        let mut error = None;
        for place in &leaving {
            // SAFETY: `begin_leave` marked the run under the lock, and `end_leave` below ends that.
            // Only idle granules are marked: no live block touches them, and freed memory whose
            // uses are not known to be complete counts as touched. No copy of a sleep or a wake is
            // in progress: `end_copies` has waited above.
            match unsafe { self.take_away(place.at, place.size) } {
                Ok(()) => done += 1,
                Err(failed) => {
                    error = Some(failed);
                    break;
                }
            }
        }
        let trims = untrimmed || (self.is_whole() && done > 0);
        let trimmed = if trims { self.driver.trim() } else { Ok(()) };
        let mut books = self.lock();
        books.untrimmed |= trimmed.is_err();
        let is_of_trim = error.is_none();
        error = error.or_else(|| trimmed.err());
        for (nth, &place) in leaving.iter().enumerate() {
            books.end_leave(place, nth < done, &*self.clock);
        }
        let granules = leaving[..done].iter().map(|place| place.run.granules()).sum();
        (books, GivenBack { granules, error, is_of_trim, unlocked: true })
    }
}
