//! The streams that an arena knows: which of their work is known to be complete, and which stream
//! waits for which. Pure accounting: no driver call, no lock. Events are handles here. They are
//! reused, and destroyed at the end of the arena.
//!
//! Frees are counted in epochs. A use belongs to the epoch that was open when the block was freed.
//! An event recorded after an epoch was closed completes only when every use of that epoch and of
//! earlier ones is complete. So one event serves all blocks freed since the last event, and a
//! stream that alone reuses its blocks needs no event.
//!
//! Invariants: `done < open`; an event belongs to a closed epoch; stream numbers are never reused,
//! so if the driver reuses a handle, that is another stream.

use std::collections::BTreeMap;
use std::ops::{Bound, Range};

use crate::driver::{EventHandle, StreamHandle};

/// The number of a stream in its arena. No number is used twice.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct StreamKey(u64);

impl StreamKey {
    /// No particular stream: any work of the device. Used for a block whose stream is unknown, and
    /// for a stream that ended before an event could be recorded on it. Only a wait for the whole
    /// device proves the end of such a use, and only calls of the program make that wait.
    pub(crate) const CONTEXT: Self = Self(0);

    #[cfg(test)]
    pub(crate) const fn new(number: u64) -> Self {
        Self(number)
    }
}

/// A use of a block. It is complete when all work that the stream had at the end of the epoch is
/// complete.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct StreamUse {
    pub(crate) stream: StreamKey,
    pub(crate) epoch: u64,
}

/// An event of the arena. An operation that got the event holds it until it releases it; the event
/// is not recorded again before that.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct StreamEvent {
    nth: usize,
    pub(crate) handle: EventHandle,
}

/// The choice of an event to query in the search for the last complete one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Pick {
    First,
    Last,
    Middle,
}

/// The way to wait for a stream's uses.
#[derive(Clone, Debug)]
pub(crate) enum Wait {
    /// The uses are complete, or already precede the next work of the asking stream.
    Nothing,
    /// Wait for this event, of that epoch.
    For(StreamEvent, u64),
    /// Wait for an event that is still to be recorded on the stream of the use. Its epoch is this
    /// one, which is closed now.
    Record(u64),
    /// Wait for all work of the device.
    Context,
}

#[derive(Debug, Default)]
struct StreamState {
    /// `None` for the context, and for a stream that has ended.
    handle: Option<StreamHandle>,
    lanes: usize,
    /// The number of raw blocks and allocations that use the stream without a lane.
    guests: usize,
    /// The number of driver calls in progress with the handle, by threads without a lane of the
    /// stream.
    exported: usize,
    /// The epoch of blocks that are freed now.
    open: u64,
    /// All uses up to this epoch are known to be complete.
    done: u64,
    /// The epoch of the last use.
    used: u64,
    /// The recorded events by epoch.
    events: BTreeMap<u64, StreamEvent>,
    /// For other streams, the epoch up to which their uses precede this stream's next work.
    after: BTreeMap<StreamKey, u64>,
}

impl StreamState {
    fn new(handle: Option<StreamHandle>) -> Self {
        Self { handle, open: 1, ..Self::default() }
    }

    const fn is_unused(&self) -> bool {
        self.lanes == 0 && self.guests == 0
    }

    /// Returns `true` if the stream has a use without a later event.
    fn is_unmarked(&self) -> bool {
        let last = self.events.last_key_value().map_or(self.done, |(&epoch, _)| epoch);
        self.used > last
    }
}

/// All streams of an arena.
#[derive(Debug, Default)]
pub(crate) struct StreamTable {
    known: BTreeMap<StreamKey, StreamState>,
    by_handle: BTreeMap<StreamHandle, StreamKey>,
    last: StreamKey,
    /// The streams of which the program said that they capture a graph.
    pub(crate) capturing: Vec<StreamHandle>,
    /// The number of operations that hold each event, by the event's number.
    holders: Vec<u32>,
    /// Events that are not recorded.
    spare: Vec<StreamEvent>,
    /// When this many events are in use, they are queried before another one is created.
    crowd: usize,
}

/// The minimum number of recorded events before an arena queries them for reuse. A guess: many
/// times the number of events that a service's lanes have in progress between two checks.
const CROWD_MIN: usize = 64;

impl StreamTable {
    pub(crate) fn new() -> Self {
        let known = BTreeMap::from([(StreamKey::CONTEXT, StreamState::new(None))]);
        Self { known, crowd: CROWD_MIN, ..Self::default() }
    }

    /// Records one more lane of a stream.
    pub(crate) fn enter(&mut self, handle: StreamHandle) -> StreamKey {
        let key = self.key_of(handle);
        self.known.get_mut(&key).into_iter().for_each(|stream| stream.lanes += 1);
        key
    }

    /// Returns the key of a stream, which is known from here on, and until a lane or a guest leaves
    /// it.
    pub(crate) fn key_of(&mut self, handle: StreamHandle) -> StreamKey {
        *self.by_handle.entry(handle).or_insert_with(|| {
            self.last = StreamKey(self.last.0 + 1);
            self.known.insert(self.last, StreamState::new(Some(handle)));
            self.last
        })
    }

    /// Returns the key of a stream that has not ended; `None` if it is unknown.
    pub(crate) fn find(&self, handle: StreamHandle) -> Option<StreamKey> {
        self.by_handle.get(&handle).copied()
    }

    /// Records that a lane is dropped. Returns `true` if no other lane or guest uses the stream,
    /// which has then ended for the arena.
    pub(crate) fn leave(&mut self, key: StreamKey) -> bool {
        let Some(stream) = self.known.get_mut(&key) else { return false };
        stream.lanes = stream.lanes.saturating_sub(1);
        stream.is_unused()
    }

    /// Records one more raw block, or call, that uses a stream without a lane.
    pub(crate) fn add_guest(&mut self, key: StreamKey) {
        self.known.get_mut(&key).into_iter().for_each(|stream| stream.guests += 1);
    }

    /// Like [`StreamTable::leave`], for a guest.
    pub(crate) fn leave_guest(&mut self, key: StreamKey) -> bool {
        let Some(stream) = self.known.get_mut(&key) else { return false };
        stream.guests = stream.guests.saturating_sub(1);
        stream.is_unused()
    }

    /// Returns `true` if neither a lane nor a guest uses the stream.
    pub(crate) fn is_unused(&self, key: StreamKey) -> bool {
        self.known.get(&key).is_some_and(StreamState::is_unused)
    }

    /// Returns `true` if one of these streams captures a graph; without streams, if any does.
    #[inline]
    pub(crate) fn captures(&self, streams: &[StreamKey]) -> bool {
        let is_one = |handle| self.capturing.contains(&handle);
        let captures = |&key: &StreamKey| self.handle(key).is_some_and(is_one);
        !self.capturing.is_empty() && (streams.is_empty() || streams.iter().any(captures))
    }

    /// Forgets the handle of a stream that neither a lane nor a guest uses. The driver may reuse
    /// the handle for another stream.
    pub(crate) fn retire(&mut self, key: StreamKey) {
        if self.is_unused(key) {
            self.lose(key);
        }
    }

    /// Forgets the handle of a stream that was destroyed, or is about to be. Only a lane vouches
    /// for its stream, so returns `false` for a stream with lanes.
    pub(crate) fn lose(&mut self, key: StreamKey) -> bool {
        let Some(stream) = self.known.get_mut(&key).filter(|stream| stream.lanes == 0) else {
            return false;
        };
        if let Some(handle) = stream.handle.take() {
            self.by_handle.remove(&handle);
        }
        true
    }

    /// Returns the handle of a stream that has not ended, for one driver call.
    pub(crate) fn export(&mut self, key: StreamKey) -> Option<StreamHandle> {
        let stream = self.known.get_mut(&key)?;
        let handle = stream.handle?;
        stream.exported += 1;
        Some(handle)
    }

    /// Records that the call has ended.
    pub(crate) fn returned(&mut self, key: StreamKey) {
        self.known.get_mut(&key).into_iter().for_each(|stream| stream.exported -= 1);
    }

    /// Returns `true` if calls are in progress with the handle of a stream that has ended.
    pub(crate) fn is_lent(&self, key: StreamKey) -> bool {
        self.known.get(&key).is_some_and(|stream| stream.handle.is_none() && stream.exported > 0)
    }

    /// Forgets an ended stream without pending uses.
    pub(crate) fn forget(&mut self, key: StreamKey, is_pending: bool) {
        let ended = |stream: &StreamState| {
            stream.handle.is_none() && stream.exported == 0 && stream.done >= stream.used
        };
        if key != StreamKey::CONTEXT && !is_pending && self.known.get(&key).is_some_and(ended) {
            // Two threads that waited at the same time recorded an event each: the later one is not
            // queried.
            let gone = self.known.remove(&key);
            self.spare.extend(gone.into_iter().flat_map(|stream| stream.events.into_values()));
            for stream in self.known.values_mut() {
                stream.after.remove(&key);
            }
        }
    }

    /// Returns a use that ends now, for a block that is being freed.
    pub(crate) fn use_now(&mut self, key: StreamKey) -> StreamUse {
        let is_there = self.handle(key).is_some();
        let stream = if is_there { key } else { StreamKey::CONTEXT };
        let epoch = self.known.get_mut(&stream).map_or(0, |stream| {
            stream.used = stream.open;
            stream.open
        });
        StreamUse { stream, epoch }
    }

    /// Returns `true` if a use is known to be complete.
    pub(crate) fn is_done(&self, of: StreamUse) -> bool {
        self.known.get(&of.stream).is_none_or(|stream| stream.done >= of.epoch)
    }

    /// Closes the epoch that is needed so that a stream about to end can be waited for. Returns the
    /// epoch of the event to record; `None` if no event is needed.
    pub(crate) fn close(&mut self, key: StreamKey) -> Option<u64> {
        let stream = self.known.get_mut(&key)?;
        if !stream.is_unmarked() {
            return None;
        }
        let epoch = stream.open;
        stream.open += 1;
        Some(epoch)
    }

    /// Returns the handle of a stream that has not ended.
    pub(crate) fn handle(&self, key: StreamKey) -> Option<StreamHandle> {
        self.known.get(&key)?.handle
    }

    /// Returns the wait that orders `taker`, or the host, after a use. There is none if the use was
    /// on the same stream, if `taker` already waits for it, or if it is complete.
    pub(crate) fn required_wait(&mut self, of: StreamUse, taker: Option<StreamKey>) -> Wait {
        if taker == Some(of.stream) {
            return Wait::Nothing;
        }
        if let Some(taker) = taker.and_then(|taker| self.known.get(&taker))
            && taker.after.get(&of.stream).is_some_and(|&epoch| epoch >= of.epoch)
        {
            return Wait::Nothing;
        }
        // A stream that is no longer known has no pending uses.
        let Some(stream) = self.known.get_mut(&of.stream) else { return Wait::Nothing };
        if stream.done >= of.epoch {
            return Wait::Nothing;
        }
        if let Some((&epoch, &event)) = stream.events.range(of.epoch..).next() {
            self.holders[event.nth] += 1;
            return Wait::For(event, epoch);
        }
        if stream.handle.is_none() {
            return Wait::Context;
        }
        let epoch = stream.open;
        stream.open += 1;
        Wait::Record(epoch)
    }

    /// Records that an event was recorded after its epoch was closed.
    pub(crate) fn recorded(&mut self, key: StreamKey, epoch: u64, event: StreamEvent) {
        match self.known.get_mut(&key) {
            Some(stream) if stream.done < epoch => {
                stream.events.insert(epoch, event);
            }
            _ => self.spare.push(event),
        }
    }

    /// Records that the next work of `taker` comes after all uses of `of` up to that epoch.
    pub(crate) fn ordered(&mut self, taker: StreamKey, of: StreamKey, epoch: u64) {
        if let Some(taker) = self.known.get_mut(&taker) {
            let after = taker.after.entry(of).or_default();
            *after = epoch.max(*after);
        }
    }

    /// Records that a stream has completed its uses up to an epoch.
    pub(crate) fn complete(&mut self, key: StreamKey, epoch: u64) {
        let Some(stream) = self.known.get_mut(&key) else { return };
        stream.done = stream.done.max(epoch);
        let later = stream.events.split_off(&(epoch + 1));
        let done = std::mem::replace(&mut stream.events, later);
        self.spare.extend(done.into_values());
    }

    /// Closes the current epoch of every stream: memory freed until now belongs to closed epochs.
    pub(crate) fn close_all(&mut self) -> Vec<StreamUse> {
        let close = |(&stream, of): (&StreamKey, &mut StreamState)| {
            of.open += 1;
            StreamUse { stream, epoch: of.open - 1 }
        };
        self.known.iter_mut().map(close).collect()
    }

    /// Returns the first recorded event, of any stream, that is not known to be complete, and holds
    /// it.
    pub(crate) fn waiting(&mut self) -> Option<(StreamUse, StreamEvent)> {
        let first = |(&stream, of): (&StreamKey, &StreamState)| {
            let (&epoch, &event) = of.events.first_key_value()?;
            Some((StreamUse { stream, epoch }, event))
        };
        let (of, event) = self.known.iter().find_map(first)?;
        self.holders[event.nth] += 1;
        Some((of, event))
    }

    /// Returns the next stream after one that has events which are not known to be complete.
    pub(crate) fn next_with_events(&self, after: Option<StreamKey>) -> Option<StreamKey> {
        self.next_after(after, |stream| !stream.events.is_empty())
    }

    /// Returns an event of a stream between two epochs, and holds the event; `None` if there is
    /// none.
    pub(crate) fn event_between(
        &mut self,
        stream: StreamKey,
        epochs: Range<u64>,
        pick: Pick,
    ) -> Option<(u64, StreamEvent)> {
        let mut events = self.known.get(&stream)?.events.range(epochs.clone());
        let (&epoch, &event) = match pick {
            Pick::First => events.next(),
            Pick::Last => events.next_back(),
            Pick::Middle => {
                let middle = events.clone().count() / 2;
                events.nth(middle)
            }
        }?;
        self.holders[event.nth] += 1;
        Some((epoch, event))
    }

    /// Adds an event that was created. The creating operation holds it.
    pub(crate) fn add_event(&mut self, handle: EventHandle) -> StreamEvent {
        self.holders.push(1);
        StreamEvent { nth: self.holders.len() - 1, handle }
    }

    /// Releases an event that an operation holds.
    pub(crate) fn release_event(&mut self, event: StreamEvent) {
        self.holders[event.nth] -= 1;
    }

    /// Returns `true` if enough events are recorded that they should be queried.
    pub(crate) const fn is_crowded(&self) -> bool {
        self.holders.len() - self.spare.len() >= self.crowd
    }

    /// Like [`StreamTable::spare`], after the events were queried. They are queried again only when
    /// there are twice as many as are left, so that each is queried a few times at most.
    pub(crate) fn spare_after_query(&mut self) -> Option<StreamEvent> {
        let recorded = self.holders.len() - self.spare.len();
        self.crowd = recorded.saturating_mul(2).max(CROWD_MIN);
        self.spare()
    }

    /// Returns the next stream after one that has not ended.
    pub(crate) fn next_alive(&self, after: Option<StreamKey>) -> Option<StreamKey> {
        self.next_after(after, |stream| stream.handle.is_some())
    }

    fn next_after(
        &self,
        after: Option<StreamKey>,
        is_wanted: impl Fn(&StreamState) -> bool,
    ) -> Option<StreamKey> {
        let from = after.map_or(Bound::Unbounded, Bound::Excluded);
        let mut later = self.known.range((from, Bound::Unbounded));
        later.find(|(_, stream)| is_wanted(stream)).map(|(&key, _)| key)
    }

    /// Returns an event that no operation holds, to be recorded again, and holds it.
    pub(crate) fn spare(&mut self) -> Option<StreamEvent> {
        let at = self.spare.iter().position(|event| self.holders[event.nth] == 0)?;
        let event = self.spare.swap_remove(at);
        self.holders[event.nth] += 1;
        Some(event)
    }

    /// Returns an event that was not recorded.
    pub(crate) fn restore(&mut self, event: StreamEvent) {
        self.release_event(event);
        self.spare.push(event);
    }

    /// Takes out all events, at the end of the arena.
    pub(crate) fn take_events(&mut self) -> Vec<EventHandle> {
        let recorded = self.known.values_mut().flat_map(|of| std::mem::take(&mut of.events));
        let recorded = recorded.map(|(_, event)| event);
        let all: Vec<_> = recorded.chain(std::mem::take(&mut self.spare)).collect();
        all.into_iter().map(|event| event.handle).collect()
    }

    /// Returns `true` if an event proves the end of some use, or will once it is recorded.
    pub(crate) fn is_provable(&self) -> bool {
        let marks = |stream: &StreamState| stream.handle.is_some() && stream.is_unmarked();
        self.known.values().any(|stream| !stream.events.is_empty() || marks(stream))
    }

    /// Returns the next stream after one whose uses no event covers yet, including the context.
    pub(crate) fn next_unmarked(&self, after: Option<StreamKey>) -> Option<StreamKey> {
        self.next_after(after, StreamState::is_unmarked)
    }

    /// Counts all work of every stream until now as uses of memory.
    pub(crate) fn use_all_now(&mut self) {
        for stream in self.known.values_mut().filter(|stream| stream.handle.is_some()) {
            stream.used = stream.open;
        }
    }

    /// Returns `true` if a stream has ended before an event could be recorded after its uses.
    pub(crate) fn has_lost_uses(&self) -> bool {
        let mut known = self.known.iter().filter(|(stream, _)| **stream != StreamKey::CONTEXT);
        known.any(|(_, of)| of.handle.is_none() && of.is_unmarked())
    }

    /// Returns the last use of every stream that is not known to be complete, except those of
    /// unknown streams.
    pub(crate) fn unfinished(&self) -> impl Iterator<Item = StreamUse> {
        let known = self.known.iter().filter(|(stream, _)| **stream != StreamKey::CONTEXT);
        let unfinished = known.filter(|(_, of)| of.used > of.done);
        unfinished.map(|(&stream, of)| StreamUse { stream, epoch: of.used })
    }

    /// Checks the invariants.
    ///
    /// # Panics
    /// If an invariant is violated.
    pub(crate) fn validate(&self) {
        for (&handle, key) in &self.by_handle {
            assert_eq!(self.known.get(key).and_then(|stream| stream.handle), Some(handle));
        }
        for stream in self.known.values() {
            assert!(stream.done < stream.open, "only closed epochs are done");
            assert!(stream.events.keys().all(|&epoch| stream.done < epoch && epoch < stream.open));
        }
    }
}

#[cfg(all(test, not(lowtide_loom)))]
mod tests {
    use super::*;

    impl StreamTable {
        /// Returns the number of known streams.
        fn count(&self) -> usize {
            self.known.len() - 1
        }
    }

    #[test]
    fn one_event_serves_all_epochs_before_it_and_is_used_again() {
        let mut streams = StreamTable::new();
        let (one, two) = (StreamHandle::new(11), StreamHandle::new(22));
        let (a, b) = (streams.enter(one), streams.enter(two));
        let first = streams.use_now(a);
        assert!(matches!(streams.required_wait(first, Some(a)), Wait::Nothing), "its own order");
        let Wait::Record(epoch) = streams.required_wait(first, Some(b)) else { panic!("no event") };
        assert_eq!((streams.handle(a), epoch), (Some(one), first.epoch));
        let event = streams.add_event(EventHandle::new(1));
        streams.recorded(a, epoch, event);
        streams.release_event(event);
        let Wait::For(event, 1) = streams.required_wait(first, Some(b)) else { panic!("no event") };
        streams.ordered(b, a, epoch);
        assert!(matches!(streams.required_wait(first, Some(b)), Wait::Nothing), "it waits already");
        assert!(matches!(streams.required_wait(first, None), Wait::For(_, 1)), "the host does not");
        streams.release_event(event);
        let second = streams.use_now(a);
        assert!(second > first && matches!(streams.required_wait(second, None), Wait::Record(2)));
        streams.complete(a, epoch);
        assert!(matches!(streams.required_wait(first, None), Wait::Nothing));
        assert!(streams.spare().is_none(), "the host still holds it");
        streams.release_event(event);
        assert!(streams.spare().is_some() && streams.spare().is_none());
        streams.validate();
    }

    #[test]
    fn a_stream_is_not_forgotten_while_a_call_is_made_with_its_handle() {
        let mut streams = StreamTable::new();
        let handle = StreamHandle::new(11);
        let key = streams.enter(handle);
        assert_eq!(streams.export(key), Some(handle));
        assert!(!streams.is_lent(key), "it has not ended: nobody need wait");
        assert!(streams.leave(key));
        streams.retire(key);
        streams.forget(key, false);
        assert!(streams.is_lent(key) && streams.export(key).is_none());
        streams.returned(key);
        assert!(!streams.is_lent(key));
        streams.forget(key, false);
        assert_eq!(streams.count(), 0);
    }

    /// Regression test: such an event was lost. It was never destroyed, nor recorded again.
    #[test]
    fn an_event_that_nobody_needed_any_more_when_its_stream_was_forgotten_is_spare() {
        let mut streams = StreamTable::new();
        let key = streams.enter(StreamHandle::new(11));
        let of = streams.use_now(key);
        // Two threads wait for the use at the same time: neither finds an event.
        let waits = [streams.required_wait(of, None), streams.required_wait(of, None)];
        let [Wait::Record(first), Wait::Record(second)] = waits else { panic!("an event") };
        for (epoch, handle) in [(first, 1), (second, 2)] {
            let event = streams.add_event(EventHandle::new(handle));
            streams.recorded(key, epoch, event);
            streams.release_event(event);
        }
        assert!(streams.leave(key));
        streams.retire(key);
        streams.complete(key, of.epoch);
        streams.forget(key, false);
        assert_eq!((streams.count(), streams.spare.len()), (0, 2));
    }

    #[test]
    fn a_handle_that_is_given_again_is_of_another_stream() {
        let mut streams = StreamTable::new();
        let handle = StreamHandle::new(11);
        let old = streams.enter(handle);
        assert_eq!(streams.enter(handle), old);
        assert!(!streams.leave(old));
        let of_old = streams.use_now(old);
        assert!(streams.leave(old));
        streams.retire(old);
        let new = streams.enter(handle);
        assert_ne!(new, old);
        assert!(
            matches!(streams.required_wait(of_old, Some(new)), Wait::Context),
            "nobody recorded"
        );
        assert_eq!(streams.use_now(old).stream, StreamKey::CONTEXT);
        streams.forget(old, true);
        assert_eq!(streams.count(), 2);
        streams.forget(old, false);
        assert_eq!(streams.count(), 2, "its use is nowhere written down, and not complete");
        streams.complete(old, of_old.epoch);
        streams.forget(old, false);
        assert_eq!(streams.count(), 1);
        streams.validate();
    }
}
