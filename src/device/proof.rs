//! Proof that work is complete: events recorded, waited for and asked, and what follows from that.
//!
//! No call of the driver frees, unmaps or reuses memory because it is likely to be done: a use is
//! complete when an event that was recorded after it is, as the host has seen, or comes before a
//! stream's next work because that stream was made to wait for such an event. All driver calls are
//! made with no lock held.
//!
//! Invariant: a use is booked as complete only after the host saw it.

use std::sync::Arc;

use super::books::Books;
use super::driver::sealed::Key;
use super::driver::{DriverError, StreamHandle};
use super::error::DeviceError;
use super::pending::Uses;
use super::region::Region;
use super::shared::Shared;
use super::streams::{Event, StreamKey, Use, Wait};
use crate::clock::Clock;

/// How many events of one stream a look asks at most.
const LOOKS_MAX: usize = 32;

impl Shared {
    /// Sees to it that the next work of a stream, or of whoever comes next where none is named,
    /// comes after these uses. With a stream, the device waits; without, this thread.
    ///
    /// # Errors
    /// As the driver; nothing is reused then.
    pub(super) fn come_after(
        &self,
        taker: Option<StreamKey>,
        uses: &Uses,
    ) -> Result<(), DriverError> {
        for of in uses.iter() {
            let wait = self.books().streams.how(of, taker);
            let (event, epoch) = match wait {
                Wait::Nothing => continue,
                Wait::Context => {
                    self.complete_all()?;
                    continue;
                }
                Wait::For(event, epoch) => (event, epoch),
                Wait::Record(handle, epoch) => match self.record(of.stream, handle, epoch) {
                    Ok(event) => (event, epoch),
                    Err(_) => {
                        // The stream may be gone; all work together is waited for in its stead.
                        self.complete_all()?;
                        continue;
                    }
                },
            };
            let handle = taker.and_then(|taker| Some((taker, self.books().streams.handle(taker)?)));
            match handle {
                Some((taker, handle)) => {
                    self.driver.stream_wait_event(handle, event.0, Key::new())?;
                    self.books().streams.ordered(taker, of.stream, epoch);
                }
                None => {
                    self.driver.event_synchronize(event.0, Key::new())?;
                    self.books().settle(of.stream, epoch, &*self.clock);
                }
            }
        }
        Ok(())
    }

    /// Lets the end of what a stream was given until now be waited for by others, without waiting.
    ///
    /// # Errors
    /// As the driver.
    pub(super) fn mark_end(&self, stream: StreamKey) -> Result<(), DriverError> {
        let closed = self.books().streams.close(stream);
        let Some((handle, epoch)) = closed else { return Ok(()) };
        self.record(stream, handle, epoch).map(drop)
    }

    /// Records an event of a closed epoch.
    fn record(
        &self,
        stream: StreamKey,
        handle: StreamHandle,
        epoch: u64,
    ) -> Result<Arc<Event>, DriverError> {
        let spare = self.books().streams.spare();
        let event = match spare {
            Some(event) => event,
            None => Arc::new(Event(self.driver.event_create()?)),
        };
        let recorded = self.driver.event_record(event.0, handle, Key::new());
        let mut books = self.books();
        match recorded {
            Ok(()) => {
                books.streams.recorded(stream, epoch, Arc::clone(&event));
                Ok(event)
            }
            Err(error) => {
                books.streams.put_back(event);
                Err(error)
            }
        }
    }

    /// Looks which freed memory is done with, and books it: records events where none is yet, and
    /// asks those that are. It waits only for memory of which nobody said which stream used it,
    /// and then for the whole device. Asks nothing while a stream captures a graph, which a
    /// question could spoil.
    ///
    /// # Errors
    /// As the driver.
    pub(super) fn look_for_ends(&self) -> Result<(), DriverError> {
        if !self.capabilities.asynchronous || self.books().pending() == 0 {
            return Ok(());
        }
        if self.is_any_capturing()? {
            return Ok(());
        }
        let unmarked = self.books().streams.unmarked();
        for stream in unmarked {
            if !self.is_markable(stream) || self.mark_end(stream).is_err() {
                return self.complete_all();
            }
        }
        self.ask_events()
    }

    /// Asks the events that are recorded, and books what is complete.
    ///
    /// # Errors
    /// As the driver.
    pub(super) fn ask_events(&self) -> Result<(), DriverError> {
        for _ in 0..LOOKS_MAX {
            let waiting = self.books().streams.waiting();
            let mut found = false;
            for (of, event) in waiting {
                if self.driver.event_query(event.0, Key::new())? {
                    found = true;
                    drop(event);
                    self.books().settle(of.stream, of.epoch, &*self.clock);
                }
            }
            if !found {
                break;
            }
        }
        Ok(())
    }

    /// Waits until every use on record is complete: of what was freed, of what the streams of lanes
    /// were given, and of what leases were held for. Where nobody said on which stream that was, or
    /// blocks are given out by address, it waits for the whole device. No lease is held, and none
    /// is given meanwhile.
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
        let known = books.sleep.used().filter(|_| books.raw.is_empty());
        for stream in books.streams.keys() {
            books.streams.use_now(stream);
        }
        let unmarked = books.streams.unmarked();
        drop(books);
        let is_marked =
            |&stream: &StreamKey| self.is_markable(stream) && self.mark_end(stream).is_ok();
        if known.is_some() && unmarked.iter().all(is_marked) {
            self.wait_for_ends()?;
        } else {
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

    /// Whether a stream captures a graph, which a question to an event, or a wait, could spoil.
    fn is_any_capturing(&self) -> Result<bool, DriverError> {
        let handles = self.books().streams.handles();
        for handle in handles {
            if self.driver.is_capturing(handle, Key::new())? {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Waits until the device has done all that it was given, and books it. Nothing, on a driver
    /// whose work is complete when its call returns.
    ///
    /// # Errors
    /// As the driver: the device may work on.
    pub(super) fn complete_all(&self) -> Result<(), DriverError> {
        if !self.capabilities.asynchronous {
            return Ok(());
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
