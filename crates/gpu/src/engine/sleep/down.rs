//! Falling asleep: no lease is left, all work is complete, contents are saved, the memory leaves.
//!
//! The order makes it safe. From the moment without a lease no thread can enter; then the host
//! waits for every recorded use; then contents are copied out, and the copies are waited for; only
//! then the first granule leaves. Until then only marks have changed. If a granule cannot be
//! released, the released ones are committed again and filled from the copies. If that fails too,
//! the rest is released as far as possible, and the arena sleeps: the copies are complete.
//!
//! Invariants: every granule that was committed is marked until its call's result is recorded; when
//! the arena is asleep, memory still committed was to stay, or was refused by the driver and is in
//! the copies.
#![expect(unsafe_code, reason = "the memory of live blocks is taken away")]

use super::contents::{self, Contents, OutgoingRun};
use super::phase::Phase;
use super::stores::Saved;
use super::{SleepOptions, SleepReport, SleepState};
use crate::driver::DriverError;
use crate::exec::inner::ArenaInner;
use crate::state::arena::ArenaState;
use crate::state::event::ArenaEvent;
use crate::state::region::Region;
use crate::state::segment::Run;
use crate::types::error::DeviceError;
use lowtide_core::bytes::ByteSize;
use lowtide_core::clock::{Bell, Moment};
use lowtide_core::sync::atomic::Ordering;
use lowtide_core::sync::caught;

/// The number of waits for all uses, if more memory is freed meanwhile, before the arena stays
/// awake. A guess.
const ROUNDS_MAX: usize = 16;

/// The progress of releasing parts: earlier ones are released.
struct FailedRelease {
    nth: usize,
    error: DriverError,
}

impl ArenaInner {
    /// Falls asleep, from awake.
    pub(super) fn sleep(&self, options: SleepOptions) -> Result<SleepReport, DeviceError> {
        // Before the state is visible: a clock advanced from then on reaches the deadline.
        let deadline = self.clock.now() + options.drain;
        let drain = self.begin_drain(options)?;
        // Cached blocks have memory, and are handed out without the arena's lock.
        let _shut = self.shut_fronts();
        self.drain((drain, deadline), options)?;
        self.fall(options)
    }

    /// Fails if a block is live whose address could not be restored.
    pub(super) fn check_way_back(&self, books: &ArenaState) -> Result<(), DeviceError> {
        if self.capabilities.same_address_wake || books.live() == 0 {
            return Ok(());
        }
        let what = "waking at the same addresses";
        Err(DeviceError::Unsupported { what, backend: self.driver.backend() })
    }

    /// Begins to wait for leases; returns the drain's number.
    fn begin_drain(&self, options: SleepOptions) -> Result<u64, DeviceError> {
        let mut books = self.lock();
        if books.sleep.phase != Phase::Awake {
            let error = self.not_awake(&books);
            return Err(self.told(&mut books, options, error));
        }
        books.sleep.drains += 1;
        let drain = books.sleep.drains;
        books.sleep.phase = Phase::Draining(drain);
        books.sleep.bell = Some(Bell::new());
        Ok(drain)
    }

    /// Waits until no lease is held, and blocks entering from then on.
    fn drain(
        &self,
        (drain, deadline): (u64, Moment),
        options: SleepOptions,
    ) -> Result<(), DeviceError> {
        loop {
            let mut books = self.lock();
            if books.sleep.phase != Phase::Draining(drain) {
                let error = DeviceError::SleepCancelled { arena: self.name.clone() };
                return Err(self.told(&mut books, options, error));
            }
            if books.outstanding.exported.count > 0 {
                (books.sleep.phase, books.sleep.bell) = (Phase::Awake, None);
                let (count, bytes) = (
                    books.outstanding.exported.count,
                    ByteSize::new(books.outstanding.exported.bytes),
                );
                let error = DeviceError::Exported { arena: self.name.clone(), count, bytes };
                return Err(self.told(&mut books, options, error));
            }
            let now = self.clock.now();
            let bell = match books.sleep.bell.clone() {
                Some(bell) if books.leases > 0 && now < deadline => bell,
                _ if books.leases > 0 => {
                    books.sleep.phase = Phase::Awake;
                    books.sleep.bell = None;
                    let error = DeviceError::Leased {
                        arena: self.name.clone(),
                        leases: books.leases,
                        held_for: now - books.sleep.leased_since,
                    };
                    return Err(self.told(&mut books, options, error));
                }
                _ => {
                    books.sleep.phase = Phase::Falling;
                    books.sleep.bell = None;
                    return Ok(());
                }
            };
            drop(books);
            self.clock.wait_until(&bell, deadline);
        }
    }

    /// Records the reason it does not fall asleep; returns the error.
    fn told(
        &self,
        books: &mut ArenaState,
        options: SleepOptions,
        error: DeviceError,
    ) -> DeviceError {
        let state = books.sleep.state();
        books.note_sleepless(&*self.clock, options, &error, state);
        error
    }

    /// From the last lease to asleep, or back.
    fn fall(&self, options: SleepOptions) -> Result<SleepReport, DeviceError> {
        let parts = match self.begin_fall(options) {
            Ok(parts) => parts,
            Err(error) => return Err(self.stay_up(options, &[], None, error)),
        };
        let saved = match self.save(&parts) {
            Ok(saved) => saved,
            Err(error) => return Err(self.stay_up(options, &parts, None, error)),
        };
        let is_wanted = self.lock().sleep.is_wanted();
        if is_wanted {
            let error = DeviceError::SleepCancelled { arena: self.name.clone() };
            return Err(self.stay_up(options, &parts, saved, error));
        }
        match self.give_away(&parts) {
            Ok(()) => Ok(self.lie_down(options, &parts, &vec![true; parts.len()], saved, None)),
            Err(failed) => Err(self.turn_back(options, &parts, failed, saved)),
        }
    }

    /// Waits for calls in progress when the last lease was dropped, and for all uses of memory;
    /// then marks the memory to release.
    fn begin_fall(&self, options: SleepOptions) -> Result<Vec<OutgoingRun>, DeviceError> {
        for _ in 0..ROUNDS_MAX {
            let mut books = self.lock();
            while books.is_busy() {
                books = books.wait();
            }
            drop(books);
            self.complete_used()?;
            self.complete_copies()?;
            let mut books = self.lock();
            // The uses of memory freed meanwhile are waited for as well.
            if !books.is_busy() && books.pending() == 0 {
                self.check_way_back(&books)?;
                books.sleep.is_quiet = true;
                return Ok(books.begin_fall(options, self.capabilities.counts_as_host()));
            }
        }
        Err(DeviceError::SleepCancelled { arena: self.name.clone() })
    }

    /// Lets the memory of all parts leave, in their order.
    fn give_away(&self, parts: &[OutgoingRun]) -> Result<(), FailedRelease> {
        for (nth, part) in parts.iter().enumerate() {
            // SAFETY: `begin_fall` marked the part under the lock. No lease is held and none is
            // granted, every recorded use is complete and no memory pending (`complete_used`), and
            // the copies out of it were waited for (`save`).
            let left = unsafe { self.take_away(part.at, part.size) };
            left.map_err(|error| FailedRelease { nth, error })?;
        }
        if self.is_whole() && self.driver.trim().is_err() {
            self.lock().untrimmed = true; // for the next decay
        }
        Ok(())
    }

    /// Nothing has left: awake again.
    fn stay_up(
        &self,
        options: SleepOptions,
        parts: &[OutgoingRun],
        saved: Option<Saved>,
        error: DeviceError,
    ) -> DeviceError {
        self.arrive_at(Phase::Awake, |books| {
            parts.iter().for_each(|part| books.end_part(part, false));
            books.note_sleepless(&*self.clock, options, &error, SleepState::Awake);
        });
        if let Some(saved) = saved {
            self.let_go(saved);
        }
        error
    }

    /// A part was not released: those before it are restored. If that fails, all parts leave that
    /// can.
    fn turn_back(
        &self,
        options: SleepOptions,
        parts: &[OutgoingRun],
        failed: FailedRelease,
        saved: Option<Saved>,
    ) -> DeviceError {
        let FailedRelease { nth, error } = failed;
        let error = DeviceError::from(error);
        let gone = &parts[..nth];
        if self.is_whole() {
            // No block is live, so none is lost.
            self.arrive_at(Phase::Awake, |books| {
                parts.iter().zip(0..).for_each(|(part, at)| books.end_part(part, at < nth));
                books.untrimmed |= nth > 0;
                books.note_sleepless(&*self.clock, options, &error, SleepState::Awake);
            });
            return error;
        }
        let mut back = 0;
        let returned = gone.iter().try_for_each(|part| {
            // SAFETY: a part that has left, and that this thread has marked still: bare granules of
            // a reservation, with no other call in progress.
            unsafe { self.driver.commit(part.at, part.size) }?;
            back += 1;
            Ok(())
        });
        // The contents of the one that did not leave are lost as well.
        let all = |books: &ArenaState| saved.as_ref().map(|saved| saved.places(books));
        let filled = returned.and_then(|()| self.copy_back(|books| all(books).unwrap_or_default()));
        if filled.is_ok() {
            self.arrive_at(Phase::Awake, |books| {
                books.note_discarded(&parts[..=nth]);
                parts.iter().for_each(|part| books.end_part(part, false));
                books.note_sleepless(&*self.clock, options, &error, SleepState::Awake);
            });
            if let Some(saved) = saved {
                self.let_go(saved);
            }
            return error;
        }
        // Copies that are under way keep their memory here.
        let is_done = self.copies_are_done();
        let leave = |(at, part): (usize, &OutgoingRun)| {
            let is_gone = at < nth && at >= back;
            if is_gone || !is_done {
                return is_gone;
            }
            // SAFETY: a part with memory, as it never left or came back, and that this thread has
            // marked still. Nothing used it since but the copies back, and those are complete.
            unsafe { self.driver.decommit(part.at, part.size) }.is_ok()
        };
        let left: Vec<_> = parts.iter().enumerate().map(leave).collect();
        self.lie_down(options, parts, &left, saved, Some(&error));
        error
    }

    /// Asleep: records the released parts; with an error if one was not released.
    fn lie_down(
        &self,
        options: SleepOptions,
        parts: &[OutgoingRun],
        left: &[bool],
        saved: Option<Saved>,
        error: Option<&DeviceError>,
    ) -> SleepReport {
        let mut slept = SleepReport::default();
        for part in parts.iter().filter(|part| part.contents == Contents::Keep) {
            slept.offloaded = slept.offloaded.saturating_add(part.size);
        }
        self.fronts.set_asleep(true);
        self.arrive_at(Phase::Asleep, |books| {
            books.note_discarded(parts);
            for (part, &is_gone) in parts.iter().zip(left) {
                books.end_part(part, is_gone);
                if is_gone {
                    let gone = ArenaEvent::Decommitted { at: part.at, size: part.size };
                    books.events.push(&*self.clock, || gone);
                    slept.released = slept.released.saturating_add(part.size);
                }
            }
            books.sleep.saved = saved;
            books.sleep.sleeps += 1;
            slept.stayed = ByteSize::new(books.backed());
            match error {
                None => {
                    let asleep = ArenaEvent::Asleep { options, report: slept };
                    books.events.push(&*self.clock, || asleep);
                }
                Some(error) => {
                    books.note_sleepless(&*self.clock, options, error, SleepState::Asleep);
                }
            }
        });
        slept
    }

    /// The end of a way down or up.
    pub(super) fn arrive_at(&self, phase: Phase, book: impl FnOnce(&mut ArenaState)) {
        let mut books = self.lock();
        book(&mut books);
        for region in Region::ALL {
            // Before the next lease is granted: its holder sees the earlier counts.
            let moves = books.region(region).moves();
            self.moves[region.number()].store(moves, Ordering::Relaxed);
        }
        books.sleep.is_quiet = phase == Phase::Asleep;
        let wakers = books.sleep.go(phase);
        drop(books);
        for waker in wakers {
            let _ = caught(|| waker.wake()); // not ours, and so with no lock held
        }
    }
}

impl ArenaState {
    /// Marks all memory as leaving except that which stays: memory without kept contents last,
    /// since only that is lost if a later part is not released.
    fn begin_fall(&mut self, options: SleepOptions, is_host: bool) -> Vec<OutgoingRun> {
        let mut parts = Vec::new();
        let granules_max = usize::try_from(self.run_max()).unwrap_or(usize::MAX);
        for region in Region::ALL {
            // A segment leaves whole.
            let is_whole = self.region(region).segment.is_whole();
            let granules_max = if is_whole { usize::MAX / 2 } else { granules_max };
            let usual = match region {
                Region::Stable => options.stable,
                Region::Dynamic => options.dynamic,
            };
            let books = self.region_mut(region);
            let wanted = books.wanted_contents(usual, is_host);
            let mut runs = Vec::new();
            for run in books.segment.committed_runs() {
                contents::cut(run, &wanted, granules_max, |range, contents| {
                    if contents != Contents::Stay {
                        runs.push((Run::of(&range), contents));
                    }
                });
            }
            for (run, contents) in runs {
                let (at, size) = books.segment.place_of(run);
                books.begin_part(run);
                parts.push(OutgoingRun { region, run, at, size, contents });
            }
        }
        parts.sort_by_key(|part| part.contents != Contents::Keep);
        parts
    }

    /// Records the release of a part, or its failure.
    fn end_part(&mut self, part: &OutgoingRun, is_gone: bool) {
        self.region_mut(part.region).end_leave(part.run, is_gone);
        if is_gone {
            self.totals.decommits += 1;
            self.totals.decommitted_bytes += part.size.get();
        }
        if self.idle() == 0 {
            self.aging.clear();
        }
    }
}
