//! Proves that device work is complete: records, queries and waits for events.
//!
//! No driver call frees, unmaps or reuses memory because its work is likely done. A use is complete
//! when the host has seen an event that was recorded after it, and precedes a stream's next work if
//! that stream was made to wait for such an event. All driver calls are made without a lock.
//!
//! Two kinds of use have no event: memory used without naming a stream ([`StreamKey::CONTEXT`]),
//! and a stream that ended before an event could be recorded on it. Only a wait for the whole
//! context proves those ([`ArenaInner::complete_all`]): events on all known streams prove nothing,
//! because the work may be on another stream, and an event of the whole context
//! (`cuCtxRecordEvent`) breaks captures like the wait does. While any stream captures a graph, the
//! wait fails and invalidates every capture in the context, and an arena sees only the streams of
//! its lanes. So it is made only in calls of the program, which knows when it captures: an
//! allocation that takes the memory, a purge, trim, shrink, sleep, compaction, move or close. A
//! decay never waits so, nor does background work ([`is_background`]: the worker of a `Memory`);
//! such memory stays pending until a call of the program has proved it.
//!
//! Invariants: a use counts as complete only after the host has seen it; neither a decay nor
//! background work waits for the context.
#![expect(unsafe_code, reason = "handles of lanes' streams are used")]

use std::sync::Arc;

use crate::driver::DriverError;
use crate::exec::handles::{DriverEvent, LiveStream};
use crate::exec::inner::ArenaInner;
use crate::state::arena::ArenaState;
use crate::state::pending::Uses;
use crate::state::region::Region;
use crate::state::streams::{StreamKey, Use, Wait};
use crate::types::error::DeviceError;
use lowtide_core::bytes::ByteSize;
use lowtide_core::clock::Clock;
use lowtide_core::sync::is_background;

/// `CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED`: the driver's answer to a wait that would invalidate a
/// capture, returned here without calling it.
const CAPTURES: u32 = 900;

/// The answer to a call that is not made, because a stream captures a graph.
pub(crate) fn captures(call: &'static str) -> DriverError {
    DriverError::of_cuda(call, CAPTURES, ByteSize::ZERO)
}

/// Returns `true` for that answer, or the driver's own of that kind.
pub(crate) fn is_captures(error: &DriverError) -> bool {
    error.code() == Some(i64::from(CAPTURES))
}

/// Returns `true` if a wait was refused because of a capture, or because there may be one.
pub(crate) fn is_unwaited(error: &DriverError) -> bool {
    is_captures(error) || matches!(error, DriverError::Background { .. })
}

impl ArenaInner {
    /// Orders the next work of a stream, or of the next user if none is given, after these uses.
    /// With a stream the device waits; without one this thread does. While a stream captures a
    /// graph no wait that would invalidate it is made.
    ///
    /// # Errors
    /// The driver's; [`CAPTURES`] for a capture. Nothing is reused then.
    pub(crate) fn come_after(
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

    /// Returns the event to wait for so that `taker` comes after a use, and its epoch; `None` if it
    /// already does.
    fn event_after(
        &self,
        of: Use,
        taker: Option<StreamKey>,
    ) -> Result<Option<(Arc<DriverEvent>, u64)>, DriverError> {
        loop {
            let wait = self.lock().streams.how(of, taker);
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
        event: &DriverEvent,
        of: Use,
        taker: Option<StreamKey>,
    ) -> Result<(), DriverError> {
        let handle = taker.and_then(|taker| Some((taker, self.lock().streams.handle(taker)?)));
        if let Some((taker, handle)) = handle {
            // SAFETY: the caller allocates for a lane of this stream, and holds the lane until this
            // returns: the stream exists until the lane is dropped (contract of
            // `DeviceArena::lane`), and it is of this arena's driver.
            let stream = unsafe { LiveStream::new(&*self.driver, handle) };
            if stream.is_capturing()? {
                return Err(captures("cuStreamWaitEvent"));
            }
            stream.wait_for(event)?;
            self.lock().streams.ordered(taker, of.stream, of.epoch);
            return Ok(());
        }
        if self.is_any_capturing()? {
            return Err(captures("cuEventSynchronize"));
        }
        event.wait()?;
        self.lock().settle(of.stream, of.epoch, &*self.clock);
        Ok(())
    }

    /// Records the end of a stream's work until now, so that others can wait for it. Does not wait.
    ///
    /// # Errors
    /// The driver's; [`CAPTURES`] while the stream captures a graph.
    pub(crate) fn mark_end(&self, stream: StreamKey) -> Result<(), DriverError> {
        let closed = self.lock().streams.close(stream);
        let recorded = closed.and_then(|epoch| self.record(stream, epoch));
        recorded.map_or(Ok(()), |event| event.map(drop))
    }

    /// Forgets a stream of which the last lane is gone; no call is made with its handle any more
    /// when this returns.
    pub(crate) fn end_stream(&self, stream: StreamKey) {
        let mut books = self.lock();
        books.streams.retire(stream);
        while books.streams.is_lent(stream) {
            books = books.wait();
        }
        books.forget_stream(stream);
    }

    /// Makes a call with the handle of a stream of which this thread need not have a lane. The call
    /// does not wait. `None` if the stream has ended.
    fn on_stream<T>(
        &self,
        stream: StreamKey,
        call: impl FnOnce(LiveStream<'_>) -> Result<T, DriverError>,
    ) -> Option<Result<T, DriverError>> {
        let handle = self.lock().streams.export(stream)?;
        // SAFETY: a handle that the accounting has is that of a stream with a lane, which exists.
        // The drop of the last lane waits in `end_stream` until the call is recorded as returned
        // below, and the stream exists until that drop returns (contract of `DeviceArena::lane`).
        let answer = call(unsafe { LiveStream::new(&*self.driver, handle) });
        if self.lock().streams.returned(stream) {}
        Some(answer)
    }

    /// Returns `true` if a stream captures a graph.
    pub(crate) fn is_any_capturing(&self) -> Result<bool, DriverError> {
        let alive = self.lock().streams.alive();
        for stream in alive {
            let asked = self.on_stream(stream, |live| live.is_capturing()); // not for an ended one
            if asked.transpose()? == Some(true) {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Records an event of a closed epoch; `None` if the stream has ended. Not while the stream
    /// captures a graph: the event would become part of that, never complete, and querying it would
    /// invalidate the capture. Another thread may begin one at any time, so this is checked again
    /// after the record, and an event that may have been captured is ignored.
    fn record(
        &self,
        stream: StreamKey,
        epoch: u64,
    ) -> Option<Result<Arc<DriverEvent>, DriverError>> {
        let event = match self.event_to_record() {
            Ok(event) => event,
            Err(error) => return Some(Err(error)),
        };
        let recorded = self.on_stream(stream, |live| {
            if live.is_capturing()? {
                return Err(captures("cuEventRecord"));
            }
            event.record(live)?;
            if live.is_capturing()? {
                return Err(captures("cuEventRecord"));
            }
            Ok(())
        });
        let mut books = self.lock();
        if matches!(recorded, Some(Ok(()))) {
            books.streams.recorded(stream, epoch, Arc::clone(&event));
        } else {
            books.streams.put_back(Arc::clone(&event));
        }
        Some(recorded?.map(|()| event))
    }

    /// Checks which freed memory is no longer used, and records it: records missing events, and
    /// queries recorded ones. If that cannot prove everything it waits for the whole device if it
    /// may, unless a lane's stream captures a graph. Otherwise the rest stays pending, as in
    /// background work.
    ///
    /// # Errors
    /// The driver's.
    pub(crate) fn look_for_ends(&self, may_wait: bool) -> Result<(), DriverError> {
        if !self.capabilities.asynchronous || !self.lock().is_awaiting() {
            return Ok(());
        }
        let unmarked = self.lock().streams.unmarked();
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

    /// Queries the recorded events, and records completed ones. One or two queries for a stream
    /// that has completed nothing or everything; else a binary search.
    ///
    /// # Errors
    /// The driver's.
    pub(crate) fn ask_events(&self) -> Result<(), DriverError> {
        let streams = self.lock().streams.with_events();
        for stream in streams {
            let events = self.lock().streams.events_of(stream);
            let done = Self::count_complete(&events)?;
            // The last of them proves its epoch and all before.
            let proved = done.checked_sub(1).map(|last| events[last].0);
            drop(events);
            if let Some(epoch) = proved {
                self.lock().settle(stream, epoch, &*self.clock);
            }
        }
        Ok(())
    }

    /// Returns the number of a stream's complete events. Events complete in order, so the last
    /// complete one counts them.
    fn count_complete(events: &[(u64, Arc<DriverEvent>)]) -> Result<usize, DriverError> {
        // Known to be complete; may be; queried next: the first, the last, then the middle.
        let (mut done, mut most, mut next) = (0, events.len(), 0);
        while done < most {
            debug_assert!((done..most).contains(&next), "{next} in {done}..{most}");
            if events[next].1.is_complete()? {
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

    /// Returns an event to record: one that no thread waits for any more, else a new one. If many
    /// are recorded those are queried first, so that there are at most about twice as many as
    /// epochs in progress, even if no thread checks for idle memory. The next check reports its
    /// failure.
    fn event_to_record(&self) -> Result<Arc<DriverEvent>, DriverError> {
        if let Some(event) = self.lock().streams.spare() {
            return Ok(event);
        }
        if self.lock().streams.is_crowded() {
            let _ = self.ask_events();
            let mut books = self.lock();
            books.streams.note_asked();
            if let Some(event) = books.streams.spare() {
                return Ok(event);
            }
        }
        let event = DriverEvent::new(&self.driver)?;
        self.lock().streams.note_made();
        Ok(Arc::new(event))
    }

    /// Waits until every recorded use is complete: of freed memory, of the streams of lanes, and of
    /// leases. If a stream is unknown, raw blocks exist, or memory is imported, it waits for the
    /// whole device. No lease is held, and none is granted meanwhile.
    ///
    /// # Errors
    /// `Capturing`; the driver's.
    pub(crate) fn complete_used(&self) -> Result<(), DeviceError> {
        if !self.capabilities.asynchronous {
            return Ok(());
        }
        if self.is_any_capturing()? {
            return Err(DeviceError::Capturing { arena: self.name.clone() });
        }
        let mut books = self.lock();
        let is_ours = books.raw.is_empty() && books.outstanding.imported.count() == 0;
        let known = books.sleep.used().filter(|_| is_ours);
        for stream in books.streams.alive() {
            books.streams.use_now(stream);
        }
        let is_known = known.is_some();
        drop(books);
        if !(is_known && self.complete_by_events()?) {
            self.complete_all()?;
        }
        self.lock().sleep.complete();
        Ok(())
    }

    /// Waits until the work of all freed memory is complete: for events of its streams, or for the
    /// whole device if a stream is unknown.
    ///
    /// # Errors
    /// `Capturing`; the driver's.
    pub(crate) fn complete_pending(&self) -> Result<(), DeviceError> {
        if !self.capabilities.asynchronous || !self.lock().is_awaiting() {
            return Ok(());
        }
        if self.is_any_capturing()? {
            return Err(DeviceError::Capturing { arena: self.name.clone() });
        }
        if !self.complete_by_events()? {
            self.complete_all()?;
        }
        Ok(())
    }

    /// Waits for an event behind the recorded uses of every stream; returns `false` if a use has
    /// none and can get none.
    fn complete_by_events(&self) -> Result<bool, DriverError> {
        let unmarked = self.lock().streams.unmarked();
        let is_marked =
            |&stream: &StreamKey| self.is_markable(stream) && self.mark_end(stream).is_ok();
        if !unmarked.iter().all(is_marked) {
            return Ok(false);
        }
        self.wait_for_ends()?;
        // One that ended meanwhile may have done so without an event.
        Ok(self.lock().streams.unmarked().is_empty())
    }

    /// Returns `true` if an event can be recorded on a stream: on one that has not ended.
    fn is_markable(&self, stream: StreamKey) -> bool {
        self.lock().streams.handle(stream).is_some()
    }

    /// Waits for every event that is recorded.
    fn wait_for_ends(&self) -> Result<(), DriverError> {
        loop {
            let waiting = self.lock().streams.waiting();
            if waiting.is_empty() {
                return Ok(());
            }
            for (of, event) in waiting {
                event.wait()?;
                drop(event);
                self.lock().settle(of.stream, of.epoch, &*self.clock);
            }
        }
    }

    /// Waits until the device has completed all its work, and records it. Does nothing on a driver
    /// with synchronous work.
    ///
    /// # Errors
    /// The driver's: the device may still work. [`CAPTURES`] while the stream of a lane captures a
    /// graph, which the wait would invalidate. `Background` in background work, before any call:
    /// see the head of this file.
    pub(crate) fn complete_all(&self) -> Result<(), DriverError> {
        if !self.capabilities.asynchronous {
            return Ok(());
        }
        if is_background() {
            return Err(DriverError::Background { call: "cuCtxSynchronize" });
        }
        if self.is_any_capturing()? {
            return Err(captures("cuCtxSynchronize"));
        }
        let closed = self.lock().streams.close_all();
        self.driver.synchronize()?;
        let mut books = self.lock();
        for Use { stream, epoch } in closed {
            books.settle(stream, epoch, &*self.clock);
        }
        drop(books);
        Ok(())
    }
}

impl ArenaState {
    /// Returns the uses to wait for when a block used by these streams, or by unknown ones, is
    /// freed.
    pub(crate) fn uses(&mut self, streams: &[StreamKey]) -> Uses {
        if !self.asynchronous {
            return Uses::NONE;
        }
        if streams.is_empty() {
            return Uses::of([self.streams.use_now(StreamKey::CONTEXT)]);
        }
        Uses::of(streams.iter().map(|&stream| self.streams.use_now(stream)))
    }

    /// Returns `true` if something waits for the end of work.
    fn is_awaiting(&self) -> bool {
        self.pending() > 0 || self.outstanding.imported.is_waiting()
    }

    /// Bytes that were freed and may still be worked on.
    pub(crate) fn pending(&self) -> u64 {
        self.total(|region| region.pending.bytes())
    }

    /// Records that a stream has completed all uses up to an epoch.
    pub(crate) fn settle(&mut self, stream: StreamKey, epoch: u64, clock: &dyn Clock) {
        self.streams.complete(stream, epoch);
        for region in Region::ALL {
            for span in self.region_mut(region).settle(stream, epoch) {
                self.note_idle(region, span, clock);
            }
        }
        self.forget_stream(stream);
    }

    /// Forgets a stream that has ended and left nothing pending.
    pub(crate) fn forget_stream(&mut self, stream: StreamKey) {
        let is_pending = Region::ALL.iter().any(|&region| self.region(region).pending.has(stream));
        self.streams.forget(stream, is_pending);
    }
}
