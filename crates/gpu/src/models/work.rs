//! The queued and completed work of the model's streams: a count for each, and the dependencies.
//!
//! Work completes by an explicit step: a wait of the host, or a thread of the model. A piece of
//! work is a range that a stream touches.
//!
//! Invariant: a queued piece overlaps no uncompleted piece of another stream, unless its stream
//! comes after that piece.

use std::collections::BTreeMap;

use crate::driver::{DeviceAddress, EventHandle, StreamHandle};
use lowtide_core::bytes::ByteSize;

/// The progress of each stream: the number of completed pieces.
type Reached = BTreeMap<StreamHandle, usize>;

#[derive(Debug, Default)]
pub(super) struct Work {
    streams: BTreeMap<StreamHandle, Stream>,
    /// The work before each event.
    events: Vec<Reached>,
}

#[derive(Debug, Default)]
struct Stream {
    pieces: Vec<(u64, u64)>,
    done: usize,
    /// The progress of other streams that precedes this stream's next work.
    after: Reached,
    destroyed: bool,
}

impl Work {
    /// Queues work on a range.
    pub(super) fn give(&mut self, stream: StreamHandle, at: DeviceAddress, size: ByteSize) {
        self.assert_there(stream);
        let range = (at.get(), at.get() + size.get());
        let after = self.streams.entry(stream).or_default().after.clone();
        for (other, their) in self.streams.iter().filter(|(other, _)| **other != stream) {
            let from = their.done.max(after.get(other).copied().unwrap_or(0));
            let left = their.pieces.get(from..).unwrap_or(&[]);
            assert!(left.iter().all(|&piece| is_apart(piece, range)), "{other:?} is at work there");
        }
        self.streams.entry(stream).or_default().pieces.push(range);
    }

    /// Asserts that no work on a range is left.
    pub(super) fn assert_done(&self, at: DeviceAddress, size: ByteSize) {
        let range = (at.get(), at.get() + size.get());
        for (stream, its) in &self.streams {
            let left = &its.pieces[its.done..];
            assert!(
                left.iter().all(|&piece| is_apart(piece, range)),
                "{stream:?} is at work there"
            );
        }
    }

    pub(super) fn assert_there(&self, stream: StreamHandle) {
        let destroyed = self.streams.get(&stream).is_some_and(|stream| stream.destroyed);
        assert!(!destroyed, "a call with the handle of a stream that is gone");
    }

    /// Destroys the stream. Its work continues.
    pub(super) fn destroy(&mut self, stream: StreamHandle) {
        self.streams.entry(stream).or_default().destroyed = true;
    }

    pub(super) fn event(&mut self) -> EventHandle {
        self.events.push(Reached::new());
        EventHandle::new(self.events.len() as u64)
    }

    pub(super) fn record(&mut self, event: EventHandle, stream: StreamHandle) {
        self.assert_there(stream);
        let its = self.streams.entry(stream).or_default();
        let mut reached = its.after.clone();
        reached.insert(stream, its.pieces.len());
        self.events[index(event)] = reached;
    }

    pub(super) fn wait(&mut self, stream: StreamHandle, event: EventHandle) {
        self.assert_there(stream);
        let after = &mut self.streams.entry(stream).or_default().after;
        for (&other, &count) in &self.events[index(event)] {
            let known = after.entry(other).or_default();
            *known = count.max(*known);
        }
    }

    pub(super) fn is_done(&self, event: EventHandle) -> bool {
        let done = |stream, count| self.streams.get(stream).is_none_or(|it| it.done >= count);
        self.events[index(event)].iter().all(|(stream, &count)| done(stream, count))
    }

    /// Completes the work up to an event, and the work that it depends on.
    pub(super) fn finish_event(&mut self, event: EventHandle) {
        for (&stream, &count) in &self.events[index(event)] {
            let its = self.streams.entry(stream).or_default();
            its.done = its.done.max(count);
        }
    }

    pub(super) fn finish_all(&mut self) {
        for its in self.streams.values_mut() {
            its.done = its.pieces.len();
        }
    }
}

/// Returns the index of an event.
fn index(event: EventHandle) -> usize {
    usize::try_from(event.get() - 1).expect("small")
}

/// Returns `true` if two ranges do not overlap.
const fn is_apart(one: (u64, u64), other: (u64, u64)) -> bool {
    one.1 <= other.0 || other.1 <= one.0
}
