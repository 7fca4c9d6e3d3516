//! Waking: memory behind every granule that a block touches, then the contents.
//!
//! Entering is possible only after the host has seen the last copy complete. If memory is short,
//! the part of blocks freed meanwhile is skipped, and the wake is retried for some time. A failed
//! wake is undone: the arena stays asleep, with complete copies. The copies are discarded only when
//! it is awake.
//!
//! Invariants: while the arena is not awake, all kept contents are in the copies; nothing is copied
//! to an address without a block.
#![expect(unsafe_code, reason = "memory comes back, and leaves again if not all does")]

use lowtide_core::log;
use std::cell::RefCell;
use std::time::Duration;

use super::phase::{Phase, Sleep};
use super::stores::{StoredCopy, is_booking};
use super::{SleepState, WakeReport};
use crate::driver::{DeviceAddress, DriverError};
use crate::engine::refusal::{AllocFailure, Cause};
use crate::engine::shortage::is_within;
use crate::exec::inner::ArenaInner;
use crate::state::arena::ArenaState;
use crate::state::event::ArenaEvent;
use crate::state::region::{Region, Search};
use crate::state::segment::Run;
use crate::types::error::DeviceError;
use lowtide_core::bytes::ByteSize;
use lowtide_core::clock::{Bell, Clock};

/// The number of retries of a wake without enough memory.
const RETRIES: u32 = 8;

/// Granules on their way back.
#[derive(Clone, Copy, Debug)]
struct Return {
    region: Region,
    run: Run,
    at: DeviceAddress,
    size: ByteSize,
}

/// All that is to come back, and how much of it is there.
#[derive(Debug)]
struct Returning {
    runs: Vec<Return>,
    back: usize,
}

impl Returning {
    fn next(&self) -> Option<Return> {
        self.runs.get(self.back).copied()
    }

    fn bytes(&self) -> ByteSize {
        self.runs.iter().map(|to| to.size).sum()
    }

    /// Bytes that are not there yet.
    fn missing(&self) -> ByteSize {
        self.runs[self.back..].iter().map(|to| to.size).sum()
    }
}

impl ArenaInner {
    /// Wakes the arena, or waits for the thread that does.
    pub(super) fn wake(&self) -> Result<WakeReport, DeviceError> {
        let mut books = self.lock();
        let before = books.sleep.attempts;
        // A sleep in progress ends first.
        while books.sleep.phase == Phase::Falling && !is_booking() {
            books = books.wait();
        }
        match books.sleep.phase {
            Phase::Asleep => {
                books.sleep.phase = Phase::Waking;
                drop(books);
                self.rise(self.sleep.wake_timeout)
            }
            Phase::Waking if is_within() => Err(self.not_awake(&books)),
            Phase::Waking => {
                while books.sleep.phase == Phase::Waking {
                    books = books.wait();
                }
                books.sleep.failed_since(before).map_or_else(|| Ok(WakeReport::default()), Err)
            }
            Phase::Awake | Phase::Draining(_) | Phase::Falling => Err(self.not_awake(&books)),
        }
    }

    /// Wakes the arena if it is asleep, without waiting: neither for a transition in progress, nor
    /// for memory.
    pub(super) fn wake_at_once(&self) -> Result<WakeReport, DeviceError> {
        let mut books = self.lock();
        if books.sleep.phase != Phase::Asleep {
            return Err(self.not_awake(&books));
        }
        books.sleep.phase = Phase::Waking;
        drop(books);
        self.rise(Duration::ZERO)
    }

    /// From waking to awake, or asleep again; for memory that is short it waits so long.
    pub(super) fn rise(&self, wake_timeout: Duration) -> Result<WakeReport, DeviceError> {
        let mut books = self.lock();
        let runs = books.begin_rise();
        let copies = !books.wanted_places().is_empty();
        drop(books);
        let returning = RefCell::new(Returning { runs, back: 0 });
        let outcome = self
            .check_capture(copies)
            .and_then(|()| self.have_back(&returning, wake_timeout))
            .and_then(|()| {
                self.copy_back(ArenaState::wanted_places)
                    .map_err(|error| self.told_of_copies(error))
            });
        let Returning { runs, back } = returning.into_inner();
        let woken = match outcome {
            Ok(restored) => Ok(self.stand_up(&runs, restored)),
            Err(error) => Err(self.sleep_on(&runs, back, error)),
        };
        self.flush_events();
        woken
    }

    /// Refuses to wait for copies while a stream captures a graph, which that would spoil.
    fn check_capture(&self, copies: bool) -> Result<(), DeviceError> {
        if copies && self.is_any_capturing()? {
            return Err(DeviceError::Capturing { arena: self.name.clone() });
        }
        Ok(())
    }

    /// Commits all memory to restore; calls the callbacks if memory is short, and waits a while.
    fn have_back(
        &self,
        returning: &RefCell<Returning>,
        wake_timeout: Duration,
    ) -> Result<(), DeviceError> {
        let mut retries = RETRIES;
        let pause = wake_timeout / RETRIES;
        // Never rung: only time passes.
        let bell = Bell::new();
        loop {
            let Some(next) = returning.borrow().next() else { return Ok(()) };
            let has = |_| self.try_back(&mut returning.borrow_mut());
            let outcome = match has(Search::Usual) {
                Err(refusal) if refusal.is_shortage() => {
                    self.ask_for_room(next.region, refusal, &has)
                }
                outcome => outcome,
            };
            match outcome {
                Ok(()) => {}
                Err(refusal) if refusal.is_shortage() && retries > 0 && !pause.is_zero() => {
                    retries -= 1;
                    self.clock.wait_until(&bell, self.clock.now() + pause);
                }
                Err(refusal) => {
                    return Err(without(refusal.error, returning.borrow().missing()));
                }
            }
        }
    }

    /// Commits the next run to restore. Memory in progress counts as committed, and so against a
    /// limit that was lowered meanwhile.
    fn try_back(&self, returning: &mut Returning) -> Result<(), AllocFailure> {
        // Each turn but the last gives up a granule that was to come, or one that is idle.
        while let Some(to) = returning.next() {
            let over = self.lock().over_limit(0);
            let cause = if over > 0 {
                Cause::Limit { over }
            } else {
                // SAFETY: bare granules of a reservation that `begin_rise` marked as committing,
                // and that is ended when the wake is: no other call is in progress for them.
                match unsafe { self.driver.commit(to.at, to.size) } {
                    Ok(()) => {
                        returning.back += 1;
                        return Ok(());
                    }
                    Err(DriverError::OutOfMemory { .. }) => Cause::Device,
                    Err(error) => {
                        return Err(AllocFailure { cause: Cause::Driver, error: error.into() });
                    }
                }
            };
            let bytes = if over > 0 { over } else { to.size.get() };
            if !self.make_way(returning, bytes) {
                return Err(AllocFailure::of(cause, to.size.get()).told(&self.lock()));
            }
        }
        Ok(())
    }

    /// Gives up memory of blocks that were freed meanwhile, or else idle memory, such as that of a
    /// freed block that was to stay; returns `true` if there was any.
    fn make_way(&self, returning: &mut Returning, bytes: u64) -> bool {
        let mut books = self.lock();
        if books.spare(returning, &*self.clock) {
            return true;
        }
        let granules = books.granules_for(bytes);
        let (books, given) = self.give_back(books, granules, None);
        drop(books);
        given.granules > 0
    }

    /// Awake: the copies are given up, and their host memory unless it is to stay.
    fn stand_up(&self, returns: &[Return], restored: ByteSize) -> WakeReport {
        let mut over = None;
        let woken = WakeReport { committed: returns.iter().map(|to| to.size).sum(), restored };
        self.arrive_at(Phase::Awake, |books| {
            for to in returns {
                books.end_commit(to.region, to.run, true, &*self.clock);
            }
            books.note_committed();
            // Stores kept for the next sleep are kept under the lock: they are always accounted
            // for.
            let Sleep { saved: stores, between, .. } = &mut books.sleep;
            over = stores.take().and_then(|stores| between.put(stores));
            books.sleep.awake_since = self.clock.now();
            books.sleep.left_at = books.sleep.awake_since;
            books.end_wake(None);
            // Under the lock: it may be asleep again the moment after.
            self.fronts.set_asleep(false);
            books.events.push(&*self.clock, || ArenaEvent::Woke { report: woken });
        });
        if let Some(over) = over {
            self.let_go(over);
        }
        let (arena, committed) = (&self.name, woken.committed);
        log!(info, arena, %committed, %restored, "arena woke up");
        woken
    }

    /// Asleep again: restored memory leaves.
    fn sleep_on(&self, returns: &[Return], back: usize, error: DeviceError) -> DeviceError {
        // Copies in progress keep their memory here: the next wake fills it again.
        let is_done = self.copies_are_done();
        let stays = |(nth, to): (usize, &Return)| {
            // SAFETY: committed by this wake, which has it marked still: no lease was granted, so
            // that nothing used it but the copies, and those are complete if this is called.
            let decommit = || unsafe { self.driver.decommit(to.at, to.size) }.is_err();
            nth < back && (!is_done || decommit())
        };
        let stay: Vec<_> = returns.iter().enumerate().map(stays).collect();
        self.arrive_at(Phase::Asleep, |books| {
            for (to, &stays) in returns.iter().zip(&stay) {
                books.end_commit(to.region, to.run, stays, &*self.clock);
            }
            books.note_committed();
            books.end_wake(Some(error.clone()));
            books.events.push(&*self.clock, || ArenaEvent::WakeFailed);
        });
        log!(warn, arena = self.name, %error, "arena wake failed");
        error
    }

    /// Gives up the copies of an arena that sleeps with nothing left to wake for: it is awake then.
    /// Makes no other call of the driver.
    pub(crate) fn wake_of_nothing(&self) {
        let books = self.lock();
        let is_over = books.sleep.state() == SleepState::Asleep && books.live() == 0;
        let is_left = !books.sleep.left.is_empty();
        drop(books);
        if is_over {
            let _ = self.wake(); // another may be quicker
        }
        if is_over || is_left {
            self.give_stores_back();
        }
    }
}

/// The error of a wake, of which so many bytes did not come: they were counted as committed.
fn without(mut error: DeviceError, missing: ByteSize) -> DeviceError {
    if let DeviceError::OutOfMemory { committed, .. } = &mut error {
        *committed = committed.saturating_sub(missing);
    }
    error
}

impl ArenaState {
    /// Marks the memory to restore.
    fn begin_rise(&mut self) -> Vec<Return> {
        let granules_max = usize::try_from(self.run_max()).unwrap_or(usize::MAX);
        let mut returns = Vec::new();
        for region in Region::ALL {
            let segment = &mut self.region_mut(region).segment;
            for whole in segment.begin_return() {
                let range = whole.range();
                for start in range.clone().step_by(granules_max) {
                    let run = Run::of(&(start..range.end.min(start + granules_max)));
                    let (at, size) = segment.place_of(run);
                    returns.push(Return { region, run, at, size });
                }
            }
        }
        returns
    }

    /// Skips memory still to restore that no block touches any more; returns `true` if there was
    /// any.
    fn spare(&mut self, returning: &mut Returning, clock: &dyn Clock) -> bool {
        let before = returning.bytes();
        for to in returning.runs.split_off(returning.back) {
            self.end_commit(to.region, to.run, false, clock);
        }
        returning.runs.extend(self.begin_rise());
        returning.bytes() < before
    }

    /// Returns the saved contents that blocks still touch, and their places.
    fn wanted_places(&self) -> Vec<StoredCopy> {
        self.sleep.saved.as_ref().map(|saved| saved.wanted_places(self)).unwrap_or_default()
    }

    /// Counts a wake that has ended.
    pub(super) fn end_wake(&mut self, failure: Option<DeviceError>) {
        let sleep = &mut self.sleep;
        sleep.attempts += 1;
        match failure {
            None => sleep.wakes += 1,
            Some(_) => sleep.wake_failures += 1,
        }
        sleep.failure = failure;
    }
}
