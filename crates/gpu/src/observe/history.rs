//! The last events of an arena, in a ring of fixed size.
//!
//! A history observes an arena that was opened with one. The ring is allocated once; when it is
//! full, a new event replaces the oldest. It keeps the parts of an event that a map shows.
//!
//! Invariant: `events <= capacity <= HISTORY_MAX`, oldest first.

use crate::exec::observer::Observer;
use crate::observe::visualize::MapEvent;
use crate::state::event::{ArenaEvent, MemoryShortage, SequencedEvent};
use crate::state::region::Placement;
use lowtide_core::bytes::ByteSize;
use lowtide_core::clock::Moment;
use lowtide_core::sync::{Mutex, lock};

/// The maximum number of events that an arena keeps: 262,144, which are 8 MiB, and about 40 MiB as
/// a snapshot for `memory_viz`. Its viewer is slow above 100 MiB.
pub(crate) const HISTORY_MAX: usize = 1 << 18;

/// The kept events of an arena.
#[derive(Debug)]
pub(crate) struct History {
    capacity: usize,
    ring: Mutex<Ring>,
}

#[derive(Debug)]
struct Ring {
    events: Vec<MapEvent>,
    /// The index of the next event, once the ring is full.
    next: usize,
}

impl History {
    /// Creates a history of the last `events` events, at most [`HISTORY_MAX`]; `None` for 0.
    pub(crate) fn new(events: usize) -> Option<Self> {
        let capacity = events.min(HISTORY_MAX);
        let ring = || Ring { events: Vec::with_capacity(capacity), next: 0 };
        (capacity > 0).then(|| Self { capacity, ring: Mutex::new(ring()) })
    }

    /// Returns the kept events, oldest first.
    pub(crate) fn events(&self) -> Vec<MapEvent> {
        let ring = lock(&self.ring);
        let (newer, older) = ring.events.split_at(ring.next);
        [older, newer].concat()
    }
}

impl Observer for History {
    fn observe(&self, events: &[SequencedEvent]) {
        let mut ring = lock(&self.ring);
        for SequencedEvent { at, event, .. } in events {
            for shown in shown(*at, event).into_iter().flatten() {
                ring.push(shown, self.capacity);
            }
        }
    }

    fn metadata(&self) -> usize {
        self.capacity * size_of::<MapEvent>()
    }
}

impl Ring {
    fn push(&mut self, event: MapEvent, capacity: usize) {
        if self.events.len() < capacity {
            self.events.push(event);
        } else if let Some(oldest) = self.events.get_mut(self.next) {
            *oldest = event;
            self.next = (self.next + 1) % capacity;
        }
    }
}

/// Returns the entries of an event in a map: a move is a free and an allocation.
fn shown(at: Moment, event: &ArenaEvent) -> [Option<MapEvent>; 2] {
    let alloc = |Placement { at: address, requested, .. }: Placement| {
        let (address, size) = (address.get(), ByteSize::new(requested));
        Some(MapEvent::Alloc { at, address, size })
    };
    let free = |Placement { at: address, requested, .. }: Placement| {
        let (address, size) = (address.get(), ByteSize::new(requested));
        Some(MapEvent::Free { at, address, size })
    };
    match *event {
        ArenaEvent::Allocated { placed, .. } => [alloc(placed), None],
        ArenaEvent::Freed { placed, .. } => [free(placed), None],
        ArenaEvent::Resized { before, after, .. } => {
            [free(Placement { at: after.at, ..before }), alloc(after)]
        }
        ArenaEvent::Moved { from, to, size, .. } => {
            let [from, to] = [from, to].map(|location| location.address.get());
            let freed = MapEvent::Free { at, address: from, size };
            [Some(freed), Some(MapEvent::Alloc { at, address: to, size })]
        }
        ArenaEvent::Committed { at: address, size } => {
            [Some(MapEvent::Commit { at, address: address.get(), size }), None]
        }
        ArenaEvent::Decommitted { at: address, size } => {
            [Some(MapEvent::Decommit { at, address: address.get(), size }), None]
        }
        ArenaEvent::Remapped { from, to, size } => {
            let gone = MapEvent::Decommit { at, address: from.get(), size };
            [Some(gone), Some(MapEvent::Commit { at, address: to.get(), size })]
        }
        ArenaEvent::AllocFailed {
            shortage: Some(MemoryShortage { requested, headroom }), ..
        } => [Some(MapEvent::OutOfMemory { at, requested, headroom }), None],
        _ => [None, None],
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::driver::DeviceAddress;

    fn record(history: &History, addresses: std::ops::Range<u64>) {
        let event = |address| SequencedEvent {
            sequence: address,
            at: Moment::ORIGIN,
            event: ArenaEvent::Committed {
                at: DeviceAddress::new(address),
                size: ByteSize::new(1),
            },
        };
        history.observe(&addresses.map(event).collect::<Vec<_>>());
    }

    fn addresses(history: &History) -> Vec<u64> {
        let address = |event: &MapEvent| match *event {
            MapEvent::Commit { address, .. } => address,
            _ => panic!("{event:?} was not recorded"),
        };
        history.events().iter().map(address).collect()
    }

    #[test]
    fn the_last_events_are_kept_oldest_first_without_growing() {
        let history = History::new(4).expect("events are kept");
        let room = lock(&history.ring).events.capacity();
        record(&history, 0..3);
        assert_eq!(addresses(&history), [0, 1, 2]);
        record(&history, 3..10);
        assert_eq!(addresses(&history), [6, 7, 8, 9]);
        assert_eq!(lock(&history.ring).events.capacity(), room, "allocated once");
    }

    #[test]
    fn no_event_is_kept_unless_asked_for_and_never_more_than_the_bound() {
        assert!(History::new(0).is_none());
        assert_eq!(History::new(usize::MAX).map(|history| history.capacity), Some(HISTORY_MAX));
    }
}
