//! Streams, events, and the work queued on them.
//!
//! An event marks a position in a stream. A wait takes the position that the event marks when the
//! wait is queued, so a later record or the event's destruction does not change it. Querying or
//! waiting for an event or a stream is unsafe during a capture, as the modes decide
//! ([`CaptureMode`](super::CaptureMode)). A wait for the whole context invalidates every capture in
//! it, in any mode; a query of a capturing stream or a captured event invalidates that capture.
//!
//! Invariant: an event is done iff the position that it marks is.

use super::call::Call;
use super::fault::{Fault, HandleKind, SimError};
use super::graph::Capture;
use super::memory::Range;
use super::model::{
    CAPTURED_EVENT, INVALID_VALUE, INVALIDATED, ISOLATION, Marked, Model, UNSUPPORTED,
};
use super::work::{InStore, Position, Work};
use lowtide_core::bytes::ByteSize;
use lowtide_gpu_driver::{DriverError, HostStore, StoreSpan, StreamHandle};

impl Model {
    pub(super) fn stream_create(&mut self) -> Result<StreamHandle, DriverError> {
        self.enter(Call::StreamCreate, ByteSize::ZERO)?;
        Ok(StreamHandle::new(self.queues.create()))
    }

    pub(super) fn stream_destroy(&mut self, stream: u64) -> Result<(), DriverError> {
        self.enter(Call::StreamDestroy, ByteSize::ZERO)?;
        self.live_stream(Call::StreamDestroy, stream)?;
        if let Some(capture) = self.captures.remove(&stream) {
            self.drop_tasks(&capture.work);
        }
        self.blocking.remove(&stream);
        self.queues.give_up(stream);
        Ok(())
    }

    pub(super) fn stream_wait_event(&mut self, stream: u64, event: u64) -> Result<(), DriverError> {
        let call = Call::StreamWaitEvent;
        self.enter(call, ByteSize::ZERO)?;
        self.live_stream(call, stream)?;
        let captures = self.captures.contains_key(&stream);
        match self.marked(call, event)? {
            Marked::Nothing => Ok(()),
            Marked::Position(_) if captures => Err(self.spoil_all(call, ISOLATION)),
            Marked::Position(position) if self.queues.is_done(position) => Ok(()),
            Marked::Position(position) => self.queue(call, stream, Work::Wait(position)),
            Marked::Captured(origin) if origin == stream && captures => Ok(()),
            Marked::Captured(origin) if captures || self.captures.contains_key(&origin) => {
                Err(self.spoil_all(call, ISOLATION))
            }
            Marked::Captured(_) => {
                Err(self.fail(call, SimError::Code(CAPTURED_EVENT), ByteSize::ZERO))
            }
        }
    }

    pub(super) fn stream_synchronize(&mut self, stream: u64) -> Result<(), DriverError> {
        self.enter(Call::StreamSynchronize, ByteSize::ZERO)?;
        self.live_stream(Call::StreamSynchronize, stream)?;
        self.forbid_of_stream(Call::StreamSynchronize, stream, UNSUPPORTED)?;
        self.wait_for(Call::StreamSynchronize, self.queues.end(stream))
    }

    pub(super) fn synchronize(&mut self) -> Result<(), DriverError> {
        self.enter(Call::Synchronize, ByteSize::ZERO)?;
        if !self.captures.is_empty() {
            return Err(self.spoil_all(Call::Synchronize, UNSUPPORTED));
        }
        self.run_all();
        self.lost_in(Call::Synchronize)
    }

    pub(super) fn is_capturing(&mut self, stream: u64) -> Result<bool, DriverError> {
        self.enter(Call::StreamIsCapturing, ByteSize::ZERO)?;
        self.live_stream(Call::StreamIsCapturing, stream)?;
        Ok(self.captures.contains_key(&stream))
    }

    pub(super) fn event_create(&mut self) -> Result<u64, DriverError> {
        self.enter(Call::EventCreate, ByteSize::ZERO)?;
        Ok(self.events.insert(Marked::Nothing))
    }

    pub(super) fn event_destroy(&mut self, event: u64) -> Result<(), DriverError> {
        let call = Call::EventDestroy;
        self.enter(call, ByteSize::ZERO)?;
        let gone = self.events.remove(event).is_some();
        if gone { Ok(()) } else { Err(self.stale(call, HandleKind::Event, event)) }
    }

    pub(super) fn event_record(&mut self, event: u64, stream: u64) -> Result<(), DriverError> {
        let call = Call::EventRecord;
        self.enter(call, ByteSize::ZERO)?;
        self.live_stream(call, stream)?;
        self.marked(call, event)?;
        let marked = match self.captures.get(&stream) {
            Some(capture) if capture.spoiled => {
                return Err(self.fail(call, SimError::Code(INVALIDATED), ByteSize::ZERO));
            }
            Some(_) => Marked::Captured(stream),
            None => {
                self.queue(call, stream, Work::Record)?;
                Marked::Position(self.queues.end(stream))
            }
        };
        if let Some(event) = self.events.get_mut(event) {
            *event = marked;
        }
        Ok(())
    }

    pub(super) fn event_query(&mut self, event: u64) -> Result<bool, DriverError> {
        let marked = self.ask(Call::EventQuery, event)?;
        let Some(position) = marked else { return Ok(true) };
        let done = self.queues.is_done(position);
        if done {
            self.observe(position);
        }
        Ok(done)
    }

    pub(super) fn event_synchronize(&mut self, event: u64) -> Result<(), DriverError> {
        let marked = self.ask(Call::EventSynchronize, event)?;
        marked.map_or(Ok(()), |position| self.wait_for(Call::EventSynchronize, position))
    }

    /// Checks that the host may query or wait for the event.
    fn ask(&mut self, call: Call, event: u64) -> Result<Option<Position>, DriverError> {
        self.enter(call, ByteSize::ZERO)?;
        match self.marked(call, event)? {
            Marked::Captured(origin) => {
                self.forbid_of_stream(call, origin, CAPTURED_EVENT)?;
                Err(self.fail(call, SimError::Code(CAPTURED_EVENT), ByteSize::ZERO))
            }
            Marked::Nothing => self.forbid_unsafe(call, UNSUPPORTED).map(|()| None),
            Marked::Position(position) => {
                self.forbid_unsafe(call, UNSUPPORTED).map(|()| Some(position))
            }
        }
    }

    /// Fails a question about a stream, or a wait for it, that it or another forbids by a capture.
    pub(super) fn forbid_of_stream(
        &mut self,
        call: Call,
        stream: u64,
        code: u32,
    ) -> Result<(), DriverError> {
        if self.captures.contains_key(&stream) {
            return Err(self.spoil(call, code, |of, _| of == stream));
        }
        self.forbid_unsafe(call, code)
    }

    /// Invalidates all captures, and says with what.
    pub(super) fn spoil_all(&mut self, call: Call, code: u32) -> DriverError {
        self.spoil(call, code, |_, _| true)
    }

    /// Invalidates the captures of which this holds, and says with what.
    pub(super) fn spoil(
        &mut self,
        call: Call,
        code: u32,
        of: impl Fn(u64, &Capture) -> bool,
    ) -> DriverError {
        let mut fresh = false;
        for (&stream, capture) in &mut self.captures {
            if of(stream, capture) {
                fresh |= !std::mem::replace(&mut capture.spoiled, true);
            }
        }
        if fresh {
            self.faults.add(Fault::CaptureSpoiled { call });
        }
        self.fail(call, SimError::Code(code), ByteSize::ZERO)
    }

    /// Queues work of a kind that is called for by itself.
    pub(super) fn start(&mut self, call: Call, stream: u64, work: Work) -> Result<(), DriverError> {
        self.enter(call, ByteSize::ZERO)?;
        self.live_stream(call, stream)?;
        self.queue(call, stream, work)
    }

    /// Queues a copy between device memory and a store.
    pub(super) fn transfer(
        &mut self,
        call: Call,
        stream: u64,
        device: u64,
        span: StoreSpan,
    ) -> Result<(), DriverError> {
        self.enter(call, span.size)?;
        self.live_stream(call, stream)?;
        self.check_span(call, span)?;
        let range = Range { at: device, size: span.size.get() };
        let part = InStore { store: span.store.get(), offset: span.offset.get() };
        let work = match call {
            Call::Offload => Work::Offload(range, part),
            _ => Work::Restore(part, range),
        };
        self.queue(call, stream, work)
    }

    /// Checks that the span lies inside a store.
    pub(super) fn check_span(&mut self, call: Call, span: StoreSpan) -> Result<(), DriverError> {
        let store = span.store.get();
        let Some(kept) = self.stores.get(store) else {
            return Err(self.stale(call, HandleKind::Store, store));
        };
        let end = span.offset.checked_add(span.size);
        if end.is_none_or(|end| end > ByteSize::of(kept.size())) {
            let fault = Fault::OutsideStore { call, store: span.store };
            return Err(self.refuse(call, fault, INVALID_VALUE));
        }
        Ok(())
    }

    pub(super) fn store_destroy(&mut self, store: u64) -> Result<(), DriverError> {
        let call = Call::HostFree;
        self.enter(call, ByteSize::ZERO)?;
        let Some(kept) = self.stores.get(store) else {
            return Err(self.stale(call, HandleKind::Store, store));
        };
        self.charge(call, 0, ByteSize::of(kept.size()));
        if let Some((stream, work)) = self.queues.find(|work| work.store() == Some(store)) {
            let (stream, work) = (StreamHandle::new(stream), work.kind());
            let store = HostStore::new(store);
            self.faults.add(Fault::StoreGoneBeforeDone { store, stream, work });
        }
        self.stores.remove(store);
        self.pageable_stores.remove(&store);
        Ok(())
    }
}
