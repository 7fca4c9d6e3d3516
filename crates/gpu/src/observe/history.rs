//! The last events of an arena, in a ring of fixed size.
//!
//! Recorded under the arena's lock, only if the arena was opened with a history. The ring is
//! allocated once; when it is full, a new event replaces the oldest.
//!
//! Invariant: `events <= capacity <= HISTORY_MAX`, oldest first.

use crate::observe::visualize::{Act, Event};
use crate::state::arena::ArenaState;
use crate::state::region::Placement;
use crate::types::error::DeviceError;
use lowtide_core::bytes::ByteSize;
use lowtide_core::clock::Clock;

/// The most events that an arena keeps: 262,144, which are 10 MiB, and about 40 MiB as a snapshot
/// for `memory_viz`. Its viewer is slow above 100 MiB.
pub(crate) const HISTORY_MAX: usize = 1 << 18;

/// A ring of events.
#[derive(Debug)]
pub(crate) struct History {
    capacity: usize,
    ring: Vec<Event>,
    /// The place of the next event, once the ring is full.
    next: usize,
}

impl History {
    /// Keeps the last `events`, at most [`HISTORY_MAX`]; none for 0.
    pub(crate) fn new(events: usize) -> Self {
        let capacity = events.min(HISTORY_MAX);
        Self { capacity, ring: Vec::with_capacity(capacity), next: 0 }
    }

    /// Records an event. One comparison if no events are kept; else it reads the clock and stores.
    pub(crate) fn record(&mut self, clock: &dyn Clock, act: Act, address: u64, size: ByteSize) {
        if self.capacity == 0 {
            return;
        }
        let event = Event { at: clock.now(), act, address, size };
        if self.ring.len() < self.capacity {
            self.ring.push(event);
        } else if let Some(oldest) = self.ring.get_mut(self.next) {
            *oldest = event;
            self.next = (self.next + 1) % self.capacity;
        }
    }

    /// Returns the allowed size of a thread cache: zero if events are kept, which it would hide.
    pub(crate) const fn front_kept(&self, front: ByteSize) -> ByteSize {
        if self.capacity > 0 { ByteSize::ZERO } else { front }
    }

    /// Bytes of the ring.
    pub(crate) const fn metadata(&self) -> usize {
        self.ring.capacity() * size_of::<Event>()
    }

    /// Returns the kept events, oldest first.
    pub(crate) fn events(&self) -> Vec<Event> {
        let (newer, older) = self.ring.split_at(self.next);
        [older, newer].concat()
    }
}

impl ArenaState {
    /// Records an event of a block.
    pub(crate) fn record(&mut self, clock: &dyn Clock, act: Act, placed: Placement) {
        self.history.record(clock, act, placed.at.get(), ByteSize::new(placed.requested));
    }

    /// Records that there was no memory for a block.
    pub(crate) fn record_refusal(&mut self, error: &DeviceError, clock: &dyn Clock) {
        if let DeviceError::OutOfMemory { requested, .. } = *error {
            let limited = self.limit != ByteSize::MAX;
            let headroom = self.limit.get().saturating_sub(self.backed()) * u64::from(limited);
            let act = Act::OutOfMemory { headroom: ByteSize::new(headroom) };
            self.history.record(clock, act, 0, requested);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use lowtide_core::clock::ManualClock;

    fn recorded(history: &mut History, addresses: std::ops::Range<u64>) {
        let clock = ManualClock::new();
        for address in addresses {
            history.record(&clock, Act::Alloc, address, ByteSize::new(1));
        }
    }

    #[test]
    fn the_last_events_are_kept_oldest_first_without_growing() {
        let mut history = History::new(4);
        let room = history.ring.capacity();
        recorded(&mut history, 0..3);
        assert!(history.events().iter().map(|event| event.address).eq(0..3));
        recorded(&mut history, 3..10);
        assert!(history.events().iter().map(|event| event.address).eq(6..10));
        assert_eq!(history.ring.capacity(), room, "allocated once");
    }

    #[test]
    fn no_event_is_kept_unless_asked_for_and_never_more_than_the_bound() {
        let mut history = History::new(0);
        recorded(&mut history, 0..3);
        assert!(history.events().is_empty());
        assert_eq!(History::new(usize::MAX).capacity, HISTORY_MAX);
    }
}
