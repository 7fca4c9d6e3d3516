//! Gives idle memory back: what has been idle for its time (decay), all of it (purge), down to a
//! size (trim).
//!
//! It decides how much and in what order, never when: a control thread, or whoever wants to, asks.
//! It needs no stream and no lease, because only granules that no block touches leave.
//!
//! The law of decommit: a granule leaves only when every use of it is complete. On a driver whose
//! work completes at once a freed block has no uses left; elsewhere freed memory is pending, and so
//! active, until its uses are known to be complete (`proof`).
//!
//! Invariants: a decay takes nothing that was in use within the decay time; after it, in as many
//! calls as the bound on each asks for, nothing has been idle for longer.

use std::time::Duration;

use super::aging::Ages;
use super::arena::DeviceArena;
use super::books::Books;
use super::driver::DriverError;
use super::error::DeviceError;
use super::picture::Act;
use super::record::{GivenUp, Operation, hooks};
use super::shared::Shared;
use crate::bytes::ByteSize;
use crate::clock::Moment;
use crate::decay::DecayTime;
use crate::sync::{MutexGuard, lock};

/// Driver calls that one look at idle memory makes at most. A guess, to be measured per driver.
pub(super) const CALLS_MAX: usize = 32;

/// How soon freed memory that a stream may still work on is looked at again. A guess.
const LOOK_AGAIN: Duration = Duration::from_millis(100);

/// What a call to [`DeviceArena::decay`] did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DecayReport {
    /// Bytes given back to the driver.
    pub released: ByteSize,
    /// When to call again: `now` where there is more to do, [`Moment::NEVER`] where nothing is
    /// idle or idle memory stays for ever.
    pub next: Moment,
}

/// What giving back came to.
#[derive(Debug)]
pub(super) struct GivenBack {
    /// Granules given back.
    pub(super) granules: u64,
    /// The driver's error, where a call failed; the granules of that call and of later ones stay.
    pub(super) error: Option<DriverError>,
    /// The call that failed, if any, was a trim: what was to leave has left the arena.
    pub(super) is_of_trim: bool,
    /// Whether the lock was given up meanwhile: what was counted before may be otherwise.
    pub(super) unlocked: bool,
}

impl DeviceArena {
    /// Gives back what has been idle for the decay time at `now`: all of it, and nothing that was
    /// in use since. While memory is used, what was idle for long enough waits for up to a
    /// sixteenth of the decay time more, so that it leaves in few calls.
    ///
    /// At most 32 decommits; where that is not enough, `next` is `now`. Never waits for a call of
    /// another thread, nor for a stream, nor for the device: memory that a stream may still work on
    /// stays, and `next` is soon. So it can be called at any time, also while any stream of the
    /// context captures a graph, which it does not spoil.
    ///
    /// On a driver with streams, memory that was freed without a lane (buffers of
    /// [`DeviceArena::alloc`], lent buffers, adopted memory) stays pending until a call of the
    /// program has waited for the device: an allocation that takes it, [`DeviceArena::purge`],
    /// [`DeviceArena::trim`], [`DeviceArena::shrink`], [`DeviceArena::sleep`],
    /// [`DeviceArena::compact`] or [`DeviceArena::close`]. Release functions of adopted memory
    /// whose work is known to be complete are called.
    /// Holds the lock while it looks at every idle granule.
    ///
    /// # Errors
    /// [`DeviceError::Driver`], after what was given back before is booked;
    /// [`DeviceError::Forked`].
    pub fn decay(&self, now: Moment) -> Result<DecayReport, DeviceError> {
        let shared = self.shared();
        shared.check_here()?;
        shared.cool_fronts();
        shared.wake_of_nothing();
        shared.look_for_ends(false)?;
        shared.release_adopted();
        let books = shared.books();
        let ages = books.aging.ages(now);
        let (mut books, given) = shared.give_back(books, u64::MAX, Some(ages));
        books.set_looked(now, given.error.is_some());
        let next = shared.next_look(&books);
        let released = ByteSize::new(books.bytes_of(given.granules));
        if let Some(recorder) = &shared.recorder {
            let outcome = GivenUp { released, done: given.error.is_none() };
            let now = recorder.since(now);
            books.tell(&*shared.clock, |_| Some(Operation::Decay { now, outcome }));
        }
        drop(books);
        shared.pass_on();
        shared.debug_validate();
        match given.error {
            Some(error) => Err(error.into()),
            None if released.is_zero() => Ok(DecayReport { released, next }),
            None => {
                log!(debug, arena = self.name(), %released, "idle memory decayed");
                Ok(DecayReport { released, next })
            }
        }
    }

    /// When [`DeviceArena::decay`] should next be called, which may be over; [`Moment::NEVER`]
    /// where nothing is idle now, or idle memory stays for ever. Nothing tells when that changes:
    /// look again.
    /// Takes the lock for a few additions.
    #[must_use]
    pub fn next_decay(&self) -> Moment {
        let shared = self.shared();
        if shared.check_here().is_err() {
            return Moment::NEVER;
        }
        shared.next_look(&shared.books())
    }

    /// Sets how long idle memory may stay; what is idle now counts as having gone idle now.
    pub fn set_decay(&self, time: DecayTime) {
        let shared = self.shared();
        if shared.check_here().is_ok() {
            let now = hooks::seen(shared.recorder.as_ref(), &*shared.clock);
            shared.fronts.set_decay(time);
            if time == DecayTime::AtOnce {
                shared.empty_fronts();
            }
            let mut books = shared.books();
            books.set_decay(time, now);
            books.tell(&*shared.clock, |_| Some(Operation::DecayTime { time }));
            drop(books);
            shared.pass_on();
        }
    }

    /// Gives all idle memory back now; returns how many bytes that was. Makes as many driver calls
    /// as that takes, none with the lock held.
    ///
    /// On a driver with streams what a lane freed is idle only once a look (a decay, a purge, a
    /// trim) has seen that its work is complete. The first look after the free may be what asks
    /// the device, so that a later one gives the memory back, even where the program has waited for
    /// the stream itself. [`DeviceArena::close`] waits.
    ///
    /// If memory was freed without a lane it waits for all work of the context. That fails with
    /// code 900, and spoils the capture, while a stream of the context captures a graph; the arena
    /// sees captures of its lanes, and does not wait then. On the worker of a `Memory` it never
    /// waits: such memory stays pending there.
    ///
    /// # Errors
    /// [`DeviceError::Driver`], after what was given back before is booked;
    /// [`DeviceError::Forked`].
    pub fn purge(&self) -> Result<ByteSize, DeviceError> {
        self.trim(ByteSize::ZERO)
    }

    /// Gives all idle memory back and lets growth start anew, as ONNX Runtime's `Shrink`; returns
    /// how many bytes that was. Here one live block keeps its granules, and not a whole region.
    ///
    /// # Errors
    /// As [`DeviceArena::purge`].
    pub fn shrink(&self) -> Result<ByteSize, DeviceError> {
        let told = |outcome| Some(Operation::Shrink { outcome });
        self.down_to(ByteSize::ZERO, told, |books, bytes| {
            books.totals.shrinks += 1;
            books.totals.shrunk_bytes += bytes;
            books.steps.shrunk();
        })
    }

    /// Gives idle memory back until at most `keep` bytes are committed, or nothing is idle;
    /// returns how many bytes that was.
    ///
    /// # Errors
    /// [`DeviceError::Driver`], after what was given back before is booked;
    /// [`DeviceError::Forked`].
    pub fn trim(&self, keep: ByteSize) -> Result<ByteSize, DeviceError> {
        self.down_to(keep, |outcome| Some(Operation::Trim { keep, outcome }), note_trim)
    }

    /// Gives all idle memory back, as a part of something else.
    pub(super) fn empty(&self) -> Result<(), DeviceError> {
        self.down_to(ByteSize::ZERO, |_| None, note_trim).map(drop)
    }

    fn down_to(
        &self,
        keep: ByteSize,
        told: impl FnOnce(GivenUp) -> Option<Operation>,
        note: impl FnOnce(&mut Books, u64),
    ) -> Result<ByteSize, DeviceError> {
        let shared = self.shared();
        shared.check_here()?;
        shared.empty_fronts();
        shared.wake_of_nothing();
        shared.look_for_ends(true)?;
        shared.release_adopted();
        let mut books = shared.books();
        let excess = books.backed().saturating_sub(books.leaving()).saturating_sub(keep.get());
        let granules = books.granules_for(excess.min(books.idle()));
        let mut released = 0;
        let mut error = None;
        // Each turn gives at least one granule back: at most `granules` turns. One more, where what
        // the driver keeps is to be trimmed.
        let mut untrimmed = books.untrimmed;
        while (released < granules || std::mem::take(&mut untrimmed)) && error.is_none() {
            let given;
            let left = granules.saturating_sub(released);
            (books, given) = shared.give_back(books, left, None);
            untrimmed = false;
            if given.granules == 0 && given.error.is_none() {
                break; // another thread took what was idle
            }
            released += given.granules;
            error = given.error;
        }
        let bytes = books.bytes_of(released);
        note(&mut books, bytes);
        let outcome = GivenUp { released: ByteSize::new(bytes), done: error.is_none() };
        books.tell(&*shared.clock, |_| told(outcome));
        drop(books);
        shared.pass_on();
        shared.debug_validate();
        let released = ByteSize::new(bytes);
        if !released.is_zero() {
            log!(debug, arena = self.name(), %keep, %released, "idle memory was given back");
        }
        error.map_or(Ok(released), |error| Err(error.into()))
    }
}

fn note_trim(books: &mut Books, bytes: u64) {
    books.totals.trims += 1;
    books.totals.trimmed_bytes += bytes;
}

impl Shared {
    /// When idle memory, what the fronts keep, what is pending, or the host memory of an arena that
    /// sleeps for nothing is to be looked at.
    fn next_look(&self, books: &Books) -> Moment {
        let due =
            if self.fronts_hold() { books.due().min(books.aging.front_due()) } else { books.due() };
        // Counted from the last look, not from now: whoever asks when would never see it come.
        let again = books.aging.looked_at() + LOOK_AGAIN;
        // What no event proves waits for a call of the program, which looks by itself.
        let is_pending = books.pending() > 0 && books.streams.is_provable();
        if books.sleeps_for_nothing() {
            Moment::ORIGIN
        } else if is_pending || books.untrimmed || books.outstanding.imported.is_waiting() {
            due.min(again)
        } else {
            due
        }
    }

    /// Gives back up to `granules` idle granules, in at most [`CALLS_MAX`] calls, with the lock
    /// given up around them; only those whose time is over, where ages are given. A segment that
    /// came whole goes whole, and where any did, the driver is told to keep nothing of them.
    pub(super) fn give_back<'a>(
        &'a self,
        mut books: MutexGuard<'a, Books>,
        granules: u64,
        ages: Option<Ages>,
    ) -> (MutexGuard<'a, Books>, GivenBack) {
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
            match self.take_away(place.at, place.size) {
                Ok(()) => done += 1,
                Err(failed) => {
                    error = Some(failed);
                    break;
                }
            }
        }
        let trims = untrimmed || (self.is_whole() && done > 0);
        let trimmed = if trims { self.driver.trim() } else { Ok(()) };
        let mut books = lock(&self.books);
        books.untrimmed |= trimmed.is_err();
        let is_of_trim = error.is_none();
        error = error.or_else(|| trimmed.err());
        for (nth, &place) in leaving.iter().enumerate() {
            books.end_leave(place, nth < done);
            if nth < done {
                books.history.record(&*self.clock, Act::Decommit, place.at.get(), place.size);
            }
        }
        self.settled.notify_all();
        let granules = leaving[..done].iter().map(|place| place.run.granules()).sum();
        (books, GivenBack { granules, error, is_of_trim, unlocked: true })
    }
}
