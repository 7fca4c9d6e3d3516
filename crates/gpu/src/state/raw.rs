//! Raw blocks by their address, and the streams that use them.
//!
//! A raw block has a list of the streams that use it. If the list is unknown, any stream may use
//! the block, and only a wait for the whole device proves that its memory is unused. The block
//! refers to streams by number and holds no lane, because a lane holds the arena. A stream that
//! ends before the block is freed counts as unknown.
//!
//! Invariant: an address is known from the call that returned it until the block is freed.

use std::collections::BTreeMap;

use smallvec::SmallVec;

use crate::driver::{DeviceAddress, StreamHandle};
use crate::state::region::{LaneNumber, Placement};
use crate::state::streams::{StreamKey, StreamTable};

/// The maximum number of streams that a raw block remembers. With one more, the block counts as
/// used by any stream. Twice the 32 streams that PyTorch has in a pool.
const USERS_MAX: usize = 64;

/// The streams that use a raw block, each once; none if any stream may use it. One takes no memory
/// of its own.
#[derive(Debug, Default)]
pub(crate) struct Users(SmallVec<[StreamKey; 1]>);

impl Users {
    pub(crate) fn of(first: Option<StreamKey>) -> Self {
        Self(first.into_iter().collect())
    }

    /// Adds a stream. Returns `true` if it was unknown; for a block that any stream may use, none
    /// is.
    pub(crate) fn add(&mut self, stream: StreamKey) -> bool {
        if self.0.is_empty() || self.0.contains(&stream) {
            return false;
        }
        if self.0.len() < USERS_MAX {
            self.0.push(stream);
        } else {
            self.0.clear();
        }
        true
    }

    /// Returns the streams; none if they are unknown.
    pub(crate) fn streams(&self) -> &[StreamKey] {
        &self.0
    }
}

/// The user of a raw block in a call.
#[derive(Clone, Copy, Debug)]
pub(crate) enum RawUser {
    /// A lane. No stream if the driver's work needs no order; no number if, moreover, nothing
    /// observes the arena.
    Lane(Option<StreamKey>, Option<LaneNumber>),
    /// A stream without a lane, of a driver whose work needs an order. It exists during the call,
    /// and until the raw blocks that use it are freed.
    Guest(StreamHandle),
}

impl RawUser {
    pub(crate) const fn is_guest(self) -> bool {
        matches!(self, Self::Guest(_))
    }

    /// Returns the number of the lane.
    pub(crate) const fn number(self) -> Option<LaneNumber> {
        if let Self::Lane(_, number) = self { number } else { None }
    }

    /// Returns the stream, which is known from here on.
    pub(crate) fn stream(self, streams: &mut StreamTable) -> Option<StreamKey> {
        match self {
            Self::Lane(stream, _) => stream,
            Self::Guest(handle) => Some(streams.key_of(handle)),
        }
    }
}

/// A live raw block, and the streams that use it.
#[derive(Debug)]
pub(crate) struct RawUse {
    pub(crate) placed: Placement,
    pub(crate) users: Users,
    /// `true` if the block counts as a guest of its streams, which no lane vouches for.
    pub(crate) is_guest: bool,
    /// `true` if the block was allocated while its stream captured a graph.
    pub(crate) is_captured: bool,
}

impl RawUse {
    /// Returns the streams that the block counts as a guest of.
    pub(crate) fn guests(&self) -> &[StreamKey] {
        if self.is_guest { self.users.streams() } else { &[] }
    }
}

/// The live raw blocks of an arena.
pub(crate) type RawBlocks = BTreeMap<DeviceAddress, RawUse>;

#[cfg(all(test, not(lowtide_loom)))]
mod tests {
    use super::*;

    #[test]
    fn a_block_knows_each_stream_once_and_beyond_the_most_it_is_any_streams() {
        let key = StreamKey::new;
        let mut users = Users::of(Some(key(1)));
        assert_eq!(users.streams(), [key(1)]);
        assert!(!users.add(key(1)));
        for number in 2..=USERS_MAX as u64 {
            assert!(users.add(key(number)) && !users.add(key(number)));
        }
        let all: Vec<_> = (1..=USERS_MAX as u64).map(key).collect();
        assert_eq!(users.streams(), all);
        assert!(!users.add(key(7)), "known");
        assert!(users.add(key(1_000)));
        assert_eq!(users.streams(), []);
        assert!(!users.add(key(1_001)), "any stream already");
        assert_eq!(Users::of(None).streams(), []);
    }
}
