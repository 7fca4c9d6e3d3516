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
use super::fault::{Fault, HandleKind, WorkKind};
use super::graph::Capture;
use super::memory::Range;
use super::model::{
    Answer, CAPTURED_EVENT, INVALID_VALUE, INVALIDATED, ISOLATION, Marked, Model, UNSUPPORTED,
};
use super::work::{Position, Work};
use lowtide_core::bytes::ByteSize;
use lowtide_gpu_driver::{DeviceAddress, DriverError, HostStore, StreamHandle};

impl Model {
    pub(super) fn stream_create(&mut self) -> Answer<StreamHandle> {
        self.enter(Call::StreamCreate, ByteSize::ZERO)?;
        Ok(StreamHandle::new(self.queues.create()))
    }

    pub(super) fn stream_destroy(&mut self, stream: u64) -> Answer {
        self.enter(Call::StreamDestroy, ByteSize::ZERO)?;
        self.live_stream(stream)?;
        if let Some(capture) = self.captures.remove(&stream) {
            self.drop_tasks(&capture.work);
        }
        self.blocking.remove(&stream);
        self.queues.give_up(stream);
        Ok(())
    }

    pub(super) fn stream_wait_event(&mut self, stream: u64, event: u64) -> Answer {
        self.enter(Call::StreamWaitEvent, ByteSize::ZERO)?;
        self.live_stream(stream)?;
        let captures = self.captures.contains_key(&stream);
        match self.marked(event)? {
            Marked::Nothing => Ok(()),
            Marked::Position(_) if captures => Err(self.spoil_all(ISOLATION)),
            Marked::Position(position) if self.queues.is_done(position) => Ok(()),
            Marked::Position(position) => self.queue(stream, Work::Wait(position)),
            Marked::Captured(origin) if origin == stream && captures => Ok(()),
            Marked::Captured(origin) if captures || self.captures.contains_key(&origin) => {
                Err(self.spoil_all(ISOLATION))
            }
            Marked::Captured(_) => Err(self.fail(CAPTURED_EVENT)),
        }
    }

    pub(super) fn stream_synchronize(&mut self, stream: u64) -> Answer {
        self.enter(Call::StreamSynchronize, ByteSize::ZERO)?;
        self.live_stream(stream)?;
        self.forbid_of_stream(stream, UNSUPPORTED)?;
        self.wait_for(self.queues.end(stream))?;
        self.pools_settle();
        Ok(())
    }

    pub(super) fn synchronize(&mut self) -> Answer {
        self.enter(Call::Synchronize, ByteSize::ZERO)?;
        if !self.captures.is_empty() {
            return Err(self.spoil_all(UNSUPPORTED));
        }
        self.run_all();
        self.lost_in()?;
        self.pools_settle();
        Ok(())
    }

    pub(super) fn is_capturing(&mut self, stream: u64) -> Answer<bool> {
        self.enter(Call::StreamIsCapturing, ByteSize::ZERO)?;
        self.live_stream(stream)?;
        Ok(self.captures.contains_key(&stream))
    }

    pub(super) fn event_create(&mut self) -> Answer<u64> {
        self.enter(Call::EventCreate, ByteSize::ZERO)?;
        Ok(self.events.insert(Marked::Nothing))
    }

    pub(super) fn event_destroy(&mut self, event: u64) -> Answer {
        self.enter(Call::EventDestroy, ByteSize::ZERO)?;
        let gone = self.events.remove(event).is_some();
        if gone { Ok(()) } else { Err(self.stale(HandleKind::Event, event)) }
    }

    pub(super) fn event_record(&mut self, event: u64, stream: u64) -> Answer {
        self.enter(Call::EventRecord, ByteSize::ZERO)?;
        self.live_stream(stream)?;
        self.marked(event)?;
        let marked = match self.captures.get(&stream) {
            Some(capture) if capture.spoiled => {
                return Err(self.fail(INVALIDATED));
            }
            Some(_) => Marked::Captured(stream),
            None => {
                self.queue(stream, Work::Record)?;
                Marked::Position(self.queues.end(stream))
            }
        };
        if let Some(event) = self.events.get_mut(event) {
            *event = marked;
        }
        Ok(())
    }

    pub(super) fn event_query(&mut self, event: u64) -> Answer<bool> {
        let marked = self.ask(Call::EventQuery, event)?;
        Ok(marked.is_none_or(|position| self.has_done(position)))
    }

    /// Returns `true` if a position is done, which the host then knows.
    pub(super) fn has_done(&mut self, position: Position) -> bool {
        let done = self.queues.is_done(position);
        if done {
            self.observe(position);
        }
        done
    }

    pub(super) fn event_synchronize(&mut self, event: u64) -> Answer {
        let marked = self.ask(Call::EventSynchronize, event)?;
        marked.map_or(Ok(()), |position| self.wait_for(position))?;
        self.pools_settle();
        Ok(())
    }

    /// Checks that the host may query or wait for the event.
    fn ask(&mut self, call: Call, event: u64) -> Answer<Option<Position>> {
        self.enter(call, ByteSize::ZERO)?;
        match self.marked(event)? {
            Marked::Captured(origin) => {
                self.forbid_of_stream(origin, CAPTURED_EVENT)?;
                Err(self.fail(CAPTURED_EVENT))
            }
            Marked::Nothing => self.forbid_unsafe(UNSUPPORTED).map(|()| None),
            Marked::Position(at) => self.forbid_unsafe(UNSUPPORTED).map(|()| Some(at)),
        }
    }

    /// Fails a question about a stream, or a wait for it, that it or another forbids by a capture.
    pub(super) fn forbid_of_stream(&mut self, stream: u64, code: u32) -> Answer {
        self.forbid_in_capture(stream, code)?;
        self.forbid_unsafe(code)
    }

    /// Fails a call that no capture of the stream allows.
    pub(super) fn forbid_in_capture(&mut self, stream: u64, code: u32) -> Answer {
        if self.captures.contains_key(&stream) {
            return Err(self.spoil(code, |of, _| of == stream));
        }
        Ok(())
    }

    /// Invalidates all captures, and says with what.
    pub(super) fn spoil_all(&mut self, code: u32) -> DriverError {
        self.spoil(code, |_, _| true)
    }

    /// Invalidates the captures of which this holds, and says with what.
    pub(super) fn spoil(&mut self, code: u32, of: impl Fn(u64, &Capture) -> bool) -> DriverError {
        let mut fresh = false;
        for (&stream, capture) in &mut self.captures {
            if of(stream, capture) {
                fresh |= !std::mem::replace(&mut capture.spoiled, true);
            }
        }
        if fresh {
            self.faults.push(Fault::CaptureSpoiled { call: self.call });
        }
        self.fail(code)
    }

    /// Queues work of a kind that is called for by itself.
    pub(super) fn start(&mut self, call: Call, stream: u64, work: Work) -> Answer {
        self.enter(call, ByteSize::ZERO)?;
        self.live_stream(stream)?;
        self.queue(stream, work)
    }

    /// Queues a copy between device memory and a part of a store.
    pub(super) fn transfer(
        &mut self,
        call: Call,
        stream: u64,
        device: u64,
        part: HostStore,
    ) -> Answer {
        self.enter(call, part.size)?;
        self.live_stream(stream)?;
        let store = self.check_part(part)?;
        let work = match call {
            Call::Offload => Work::Copy(Range { at: device, ..store }, store.at, WorkKind::Offload),
            _ => Work::Copy(store, device, WorkKind::Restore),
        };
        self.queue(stream, work)
    }

    /// Checks that the part lies inside a store.
    pub(super) fn check_part(&mut self, part: HostStore) -> Answer<Range> {
        let range = Range { at: part.at, size: part.size.get() };
        let Some((&at, &(size, _))) = self.stores.range(..=part.at).next_back() else {
            return Err(self.stale(HandleKind::Store, part.at));
        };
        if !(Range { at, size }).holds(range) {
            let fault = Fault::NotReserved { call: self.call, range };
            return Err(self.refuse(fault, INVALID_VALUE));
        }
        Ok(range)
    }

    pub(super) fn store_destroy(&mut self, at: u64) -> Answer {
        self.enter(Call::HostFree, ByteSize::ZERO)?;
        let Some(&(size, _)) = self.stores.get(&at) else {
            return Err(self.stale(HandleKind::Store, at));
        };
        self.charge(0, ByteSize::new(size));
        if let Some((stream, work)) = self.unfinished_in(Range { at, size }) {
            let at = DeviceAddress::new(at);
            self.faults.push(Fault::HostGoneBeforeDone { at, stream, work });
        }
        self.memory.displace(at);
        self.stores.remove(&at);
        Ok(())
    }
}
