//! Proof that work is complete: events recorded, waited for and asked, and what follows from that.
//!
//! No call of the driver frees, unmaps or reuses memory because it is likely to be done: a use is
//! complete when an event that was recorded after it is, as the host has seen, or comes before a
//! stream's next work because that stream was made to wait for such an event. All driver calls are
//! made with no lock held.
//!
//! Two kinds of use have no event: memory of which nobody said on which stream it is used
//! ([`StreamKey::CONTEXT`]), and a stream that ended before an event could be recorded on it. Only
//! a wait for the whole context proves those ([`Shared::complete_all`]). Events on all streams that
//! the arena knows would prove nothing, because the work may be on another; and an event of the
//! whole context (`cuCtxRecordEvent`) spoils captures as the wait does. The wait fails, and spoils
//! every capture in the context, while any stream captures a graph, and an arena cannot see streams
//! that are not its lanes. So it is made only in a call of the program, which knows when it
//! captures: an allocation that takes the memory, a purge, trim, shrink, sleep, compaction, move or
//! close. A decay never makes it, nor does background work ([`is_background`]: all that the worker
//! of a `Memory` does); such memory stays pending until a call of the program has proved it.
//!
//! Invariants: a use is booked as complete only after the host saw it; neither a decay nor
//! background work waits for the context.

use std::sync::Arc;

use super::books::Books;
use super::driver::sealed::Key;
use super::driver::{DriverError, StreamHandle};
use super::error::DeviceError;
use super::pending::Uses;
use super::planted::Planted;
use super::region::Region;
use super::shared::Shared;
use super::streams::{Event, StreamKey, Use, Wait};
use crate::bytes::ByteSize;
use crate::clock::Clock;
use crate::sync::{is_background, wait};

/// `CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED`: what the driver would answer to a wait that spoils a
/// capture, and what is answered in its stead.
const CAPTURES: u32 = 900;

/// The answer to a call that is not made, because a stream captures a graph.
pub(super) fn captures(call: &'static str) -> DriverError {
    DriverError::of_cuda(call, CAPTURES, ByteSize::ZERO)
}

/// Whether it is that answer, or the driver's own of that kind.
pub(super) fn is_captures(error: &DriverError) -> bool {
    error.code() == Some(i64::from(CAPTURES))
}

/// Whether a wait was refused because of a capture, or because there may be one.
pub(super) fn is_unwaited(error: &DriverError) -> bool {
    is_captures(error) || matches!(error, DriverError::Background { .. })
}

impl Shared {
    /// Sees to it that the next work of a stream, or of whoever comes next where none is named,
    /// comes after these uses. With a stream, the device waits; without, this thread. While a
    /// stream captures a graph nothing is waited for that would spoil it.
    ///
    /// # Errors
    /// As the driver; [`CAPTURES`] for a capture. Nothing is reused then.
    pub(super) fn come_after(
        &self,
        taker: Option<StreamKey>,
        uses: &Uses,
    ) -> Result<(), DriverError> {
        for of in uses.iter() {
            if let Some((event, epoch)) = self.event_after(of, taker)? {
                self.wait_for(&event, Use { epoch, ..of }, taker)?;
            }
        }
        Ok(())
    }

    /// The event to wait for so that `taker` comes after a use, and its epoch; `None` where it does
    /// now.
    fn event_after(
        &self,
        of: Use,
        taker: Option<StreamKey>,
    ) -> Result<Option<(Arc<Event>, u64)>, DriverError> {
        loop {
            let wait = self.books().streams.how(of, taker);
            match wait {
                Wait::Nothing => return Ok(None),
                Wait::For(event, epoch) => return Ok(Some((event, epoch))),
                Wait::Record(epoch) => match self.record(of.stream, epoch) {
                    Some(Ok(event)) => return Ok(Some((event, epoch))),
                    // It ended meanwhile, and so has an event, or is waited for with all others.
                    None => continue,
                    Some(Err(_)) => {}
                },
                Wait::Context => {}
            }
            return self.complete_all().map(|()| None);
        }
    }

    /// Lets a taker's stream, or this thread, wait for an event that was recorded after a use.
    fn wait_for(
        &self,
        event: &Event,
        of: Use,
        taker: Option<StreamKey>,
    ) -> Result<(), DriverError> {
        // The taker has a lane of its stream, so that the handle stays good.
        let handle = taker.and_then(|taker| Some((taker, self.books().streams.handle(taker)?)));
        if let Some((taker, handle)) = handle {
            if self.driver.is_capturing(handle, Key::new())? {
                return Err(captures("cuStreamWaitEvent"));
            }
            if !self.planted(Planted::NoEventWait) {
                self.driver.stream_wait_event(handle, event.0, Key::new())?;
            }
            self.books().streams.ordered(taker, of.stream, of.epoch);
            return Ok(());
        }
        if self.is_any_capturing()? {
            return Err(captures("cuEventSynchronize"));
        }
        self.driver.event_synchronize(event.0, Key::new())?;
        self.books().settle(of.stream, of.epoch, &*self.clock);
        Ok(())
    }

    /// Lets the end of what a stream was given until now be waited for by others, without waiting.
    ///
    /// # Errors
    /// As the driver; [`CAPTURES`] while the stream captures a graph.
    pub(super) fn mark_end(&self, stream: StreamKey) -> Result<(), DriverError> {
        let closed = self.books().streams.close(stream);
        let recorded = closed.and_then(|epoch| self.record(stream, epoch));
        recorded.map_or(Ok(()), |event| event.map(drop))
    }

    /// Forgets a stream of which the last lane is gone; no call is made with its handle any more
    /// when this returns.
    pub(super) fn end_stream(&self, stream: StreamKey) {
        if self.planted(Planted::StaleOwner) {
            return;
        }
        let mut books = self.books();
        books.streams.retire(stream);
        while books.streams.is_lent(stream) && !self.planted(Planted::StaleCall) {
            books = wait(&self.settled, books);
        }
        books.forget_stream(stream);
    }

    /// Makes a call with the handle of a stream of which this thread need not have a lane. The call
    /// waits for nothing. `None` where the stream has ended.
    fn on_stream<T>(
        &self,
        stream: StreamKey,
        call: impl FnOnce(StreamHandle) -> Result<T, DriverError>,
    ) -> Option<Result<T, DriverError>> {
        let handle = self.books().streams.export(stream)?;
        let answer = call(handle);
        if self.books().streams.returned(stream) {
            self.settled.notify_all();
        }
        Some(answer)
    }

    /// Whether a stream captures a graph.
    pub(super) fn is_any_capturing(&self) -> Result<bool, DriverError> {
        let alive = self.books().streams.alive();
        for stream in alive {
            let asked = self.on_stream(stream, |handle| {
                self.driver.is_capturing(handle, Key::new()) // of one that ended nobody asks
            });
            if asked.transpose()? == Some(true) {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Records an event of a closed epoch; `None` where the stream has ended. Not while the stream
    /// captures a graph: the event would be a part of that, never be complete, and to ask it would
    /// spoil the capture. Another thread may begin one at any time, so it is asked again after the
    /// record, and an event that may have been captured counts for nothing.
    fn record(&self, stream: StreamKey, epoch: u64) -> Option<Result<Arc<Event>, DriverError>> {
        let event = match self.event_to_record() {
            Ok(event) => event,
            Err(error) => return Some(Err(error)),
        };
        let recorded = self.on_stream(stream, |handle| {
            let checks = !self.planted(Planted::CapturedEvent);
            if checks && self.driver.is_capturing(handle, Key::new())? {
                return Err(captures("cuEventRecord"));
            }
            let locked = self.planted(Planted::LockAcrossCall).then(|| self.books());
            self.driver.event_record(event.0, handle, Key::new())?;
            drop(locked);
            if checks && self.driver.is_capturing(handle, Key::new())? {
                return Err(captures("cuEventRecord"));
            }
            Ok(())
        });
        let mut books = self.books();
        if matches!(recorded, Some(Ok(()))) {
            books.streams.recorded(stream, epoch, Arc::clone(&event));
        } else {
            books.streams.put_back(Arc::clone(&event));
        }
        Some(recorded?.map(|()| event))
    }

    /// Looks which freed memory is done with, and books it: records events where none is yet, and
    /// asks those that are. Where that cannot prove everything it waits for the whole device if it
    /// may, unless a lane's stream captures a graph. Otherwise the rest stays pending, as it does
    /// in background work.
    ///
    /// # Errors
    /// As the driver.
    pub(super) fn look_for_ends(&self, may_wait: bool) -> Result<(), DriverError> {
        if !self.capabilities.asynchronous || !self.books().is_awaiting() {
            return Ok(());
        }
        let unmarked = self.books().streams.unmarked();
        let (mut is_provable, mut failed) = (true, None);
        for stream in unmarked {
            let marked = if self.is_markable(stream) { Some(self.mark_end(stream)) } else { None };
            is_provable &= marked == Some(Ok(()));
            failed = failed.or_else(|| marked.and_then(Result::err));
        }
        let waits = may_wait && !is_background();
        if !is_provable && waits && !self.is_any_capturing()? {
            return self.complete_all();
        }
        self.ask_events()?;
        failed.filter(|error| !is_captures(error)).map_or(Ok(()), Err)
    }

    /// Asks the events that are recorded, and books what is complete. Of a stream that has done
    /// nothing or all, one or two of them; else as many as halving takes.
    ///
    /// # Errors
    /// As the driver.
    pub(super) fn ask_events(&self) -> Result<(), DriverError> {
        let streams = self.books().streams.with_events();
        for stream in streams {
            let events = self.books().streams.events_of(stream);
            let done = self.count_complete(&events)?;
            // The last of them proves its epoch and all before.
            let proved = done.checked_sub(1).map(|last| events[last].0);
            drop(events);
            if let Some(epoch) = proved {
                self.books().settle(stream, epoch, &*self.clock);
            }
        }
        Ok(())
    }

    /// How many of a stream's events are complete, which come in order: the last of so many is.
    fn count_complete(&self, events: &[(u64, Arc<Event>)]) -> Result<usize, DriverError> {
        // Known to be complete; may be; asked next: the first, the last, then the middle.
        let (mut done, mut most, mut next) = (0, events.len(), 0);
        while done < most {
            debug_assert!((done..most).contains(&next), "{next} in {done}..{most}");
            if self.is_complete(&events[next].1)? {
                let is_first = next == 0;
                done = next + 1;
                next = if is_first { most - 1 } else { usize::midpoint(done, most) };
            } else {
                most = next;
                next = usize::midpoint(done, most);
            }
        }
        Ok(done)
    }

    fn is_complete(&self, event: &Event) -> Result<bool, DriverError> {
        Ok(self.planted(Planted::EarlyUnmap) || self.driver.event_query(event.0, Key::new())?)
    }

    /// An event to record: one that nobody waits for any more, else a new one. Where many are
    /// recorded those are asked first, so that there are at most about twice as many as epochs are
    /// under way, whether or not anybody looks for idle memory. What that fails at, the next look
    /// is told.
    fn event_to_record(&self) -> Result<Arc<Event>, DriverError> {
        if let Some(event) = self.books().streams.spare() {
            return Ok(event);
        }
        if self.books().streams.is_crowded() {
            let _ = self.ask_events();
            let mut books = self.books();
            books.streams.note_asked();
            if let Some(event) = books.streams.spare() {
                return Ok(event);
            }
        }
        let event = self.driver.event_create()?;
        self.books().streams.note_made();
        Ok(Arc::new(Event(event)))
    }

    /// Waits until every use on record is complete: of what was freed, of what the streams of lanes
    /// were given, and of what leases were held for. Where nobody said on which stream that was, or
    /// blocks are given out by address, or memory of others is adopted, it waits for the whole
    /// device. No lease is held, and none is given meanwhile.
    ///
    /// # Errors
    /// `Capturing`; as the driver.
    pub(super) fn complete_used(&self) -> Result<(), DeviceError> {
        if !self.capabilities.asynchronous {
            return Ok(());
        }
        if self.is_any_capturing()? {
            return Err(DeviceError::Capturing { arena: self.name.clone() });
        }
        let mut books = self.books();
        let is_ours = books.raw.is_empty() && books.outstanding.imported.count() == 0;
        let known = books.sleep.used().filter(|_| is_ours);
        for stream in books.streams.alive() {
            books.streams.use_now(stream);
        }
        let unmarked = books.streams.unmarked();
        drop(books);
        let is_marked =
            |&stream: &StreamKey| self.is_markable(stream) && self.mark_end(stream).is_ok();
        let mut is_known = known.is_some() && unmarked.iter().all(is_marked);
        if is_known {
            self.wait_for_ends()?;
            // One that ended meanwhile may have done so without an event.
            is_known = self.books().streams.unmarked().is_empty();
        }
        if !is_known {
            self.complete_all()?;
        }
        self.books().sleep.complete();
        Ok(())
    }

    /// Whether an event can be recorded on a stream: on one that has not ended.
    fn is_markable(&self, stream: StreamKey) -> bool {
        self.books().streams.handle(stream).is_some()
    }

    /// Waits for every event that is recorded.
    fn wait_for_ends(&self) -> Result<(), DriverError> {
        loop {
            let waiting = self.books().streams.waiting();
            if waiting.is_empty() {
                return Ok(());
            }
            for (of, event) in waiting {
                self.driver.event_synchronize(event.0, Key::new())?;
                drop(event);
                self.books().settle(of.stream, of.epoch, &*self.clock);
            }
        }
    }

    /// Waits until the device has done all that it was given, and books it. Nothing, on a driver
    /// whose work is complete when its call returns.
    ///
    /// # Errors
    /// As the driver: the device may work on. [`CAPTURES`] while the stream of a lane captures a
    /// graph, which that would spoil. `Background` in background work, before any call: see the
    /// head of this file.
    pub(super) fn complete_all(&self) -> Result<(), DriverError> {
        if !self.capabilities.asynchronous {
            return Ok(());
        }
        if is_background() {
            return Err(DriverError::Background { call: "cuCtxSynchronize" });
        }
        if self.is_any_capturing()? {
            return Err(captures("cuCtxSynchronize"));
        }
        let closed = self.books().streams.close_all();
        self.driver.synchronize()?;
        let mut books = self.books();
        for Use { stream, epoch } in closed {
            books.settle(stream, epoch, &*self.clock);
        }
        drop(books);
        self.settled.notify_all();
        Ok(())
    }
}

impl Books {
    /// What a block that these streams used, or nobody said which, waits for when it is freed.
    pub(super) fn uses(&mut self, streams: &[StreamKey]) -> Uses {
        if !self.asynchronous {
            return Uses::NONE;
        }
        if streams.is_empty() {
            return Uses::of([self.streams.use_now(StreamKey::CONTEXT)]);
        }
        Uses::of(streams.iter().map(|&stream| self.streams.use_now(stream)))
    }

    /// Whether something waits for the end of work.
    fn is_awaiting(&self) -> bool {
        self.pending() > 0 || self.outstanding.imported.is_waiting()
    }

    /// Bytes that were freed and may still be worked on.
    pub(super) fn pending(&self) -> u64 {
        self.total(|region| region.pending.bytes())
    }

    /// Books that a stream is done with all uses up to an epoch.
    pub(super) fn settle(&mut self, stream: StreamKey, epoch: u64, clock: &dyn Clock) {
        self.streams.complete(stream, epoch);
        for region in Region::ALL {
            for span in self.region_mut(region).settle(stream, epoch) {
                self.note_idle(region, span, clock);
            }
        }
        self.forget_stream(stream);
    }

    /// Forgets a stream that has ended and left nothing pending.
    pub(super) fn forget_stream(&mut self, stream: StreamKey) {
        let is_pending = Region::ALL.iter().any(|&region| self.region(region).pending.has(stream));
        self.streams.forget(stream, is_pending);
    }
}
