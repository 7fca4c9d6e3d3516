//! The events of a run in their order: a queue in virtual time.
//!
//! Invariant: events come in the order of their moments, those of one moment as they were posted.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use lowtide_admission::clock::Moment;

/// Something that happens.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Event {
    /// The control loop ticks.
    Tick,
    /// The worker looks at its queue.
    Work,
    /// A request comes, or only the time to look at the load again.
    Arrival { comes: bool },
    /// A part of a request's body arrives.
    Part(u64),
    /// A request ends.
    End(u64),
    /// The memory of a request goes.
    Freed(u64),
    /// A request asks for the resource again.
    Ask(u64),
    /// The neighbour, and the limit, move.
    Around,
    /// The watched values are read.
    Look,
}

/// The events to come.
#[derive(Debug, Default)]
pub(crate) struct Events {
    heap: BinaryHeap<Reverse<(Moment, u64, Event)>>,
    posted: u64,
}

impl Events {
    pub(crate) fn post(&mut self, at: Moment, event: Event) {
        self.posted += 1;
        self.heap.push(Reverse((at, self.posted, event)));
    }

    /// The next one until then.
    pub(crate) fn next(&mut self, until: Moment) -> Option<(Moment, Event)> {
        let Reverse((at, _, _)) = self.heap.peek()?;
        if *at > until {
            return None;
        }
        self.heap.pop().map(|Reverse((at, _, event))| (at, event))
    }
}
