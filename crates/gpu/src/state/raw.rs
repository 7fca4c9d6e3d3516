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
use crate::state::event::LaneNumber;
use crate::state::region::{Placement, RegionState};
use crate::state::region_index::BlockName;
use crate::state::streams::{StreamKey, StreamTable};
use crate::types::Region;

/// The maximum number of streams that a raw block remembers. With one more, the block counts as
/// used by any stream. Twice the 32 streams that PyTorch has in a pool.
const USERS_MAX: usize = 64;

/// The streams that use a raw block, each once; none if any stream may use it. One takes no memory
/// of its own.
#[derive(Debug, Default)]
pub(crate) struct Users(SmallVec<[StreamKey; 1]>);

impl Users {
    fn of(first: Option<StreamKey>) -> Self {
        Self(first.into_iter().collect())
    }

    /// Adds a stream. Returns `true` if it was unknown; for a block that any stream may use, none
    /// is.
    fn add(&mut self, stream: StreamKey) -> bool {
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
    pub(crate) region: Region,
    pub(crate) placed: Placement,
    pub(crate) users: Users,
    /// `true` if the block counts as a guest of its streams, which no lane vouches for.
    pub(crate) is_guest: bool,
    /// `true` if the block was allocated while its stream captured a graph.
    pub(crate) is_captured: bool,
}

impl RawUse {
    /// Adds the stream of a lane or a guest; returns `true` if the use was unknown.
    pub(crate) fn add(&mut self, stream: Option<StreamKey>) -> bool {
        stream.is_none_or(|stream| self.users.add(stream))
    }

    /// Returns the streams that the block counts as a guest of.
    pub(crate) fn guests(&self) -> &[StreamKey] {
        if self.is_guest { self.users.streams() } else { &[] }
    }
}

/// The live raw blocks of an arena.
#[derive(Debug, Default)]
pub(crate) struct RawBlocks {
    blocks: BTreeMap<DeviceAddress, RawUse>,
}

impl RawBlocks {
    pub(crate) fn is_empty(&self) -> bool {
        self.blocks.is_empty()
    }

    /// Returns the approximate bytes of this metadata.
    pub(crate) fn metadata(&self) -> usize {
        // The nodes of a tree are at least half full, and mostly two thirds.
        self.blocks.len() * size_of::<(DeviceAddress, RawUse)>() * 3 / 2
    }

    pub(crate) fn get(&self, at: DeviceAddress) -> Option<&RawUse> {
        self.blocks.get(&at)
    }

    pub(crate) fn get_mut(&mut self, at: DeviceAddress) -> Option<&mut RawUse> {
        self.blocks.get_mut(&at)
    }

    /// Returns the block that contains an address.
    pub(crate) fn containing(&self, at: DeviceAddress) -> Option<&RawUse> {
        let (start, raw) = self.blocks.range(..=at).next_back()?;
        (at.get() - start.get() < raw.placed.span.size).then_some(raw)
    }

    /// Records a block that a stream uses, or that any stream may use if none is given.
    pub(crate) fn insert(
        &mut self,
        region: Region,
        placed: Placement,
        (user, is_guest): (Option<StreamKey>, bool),
        is_captured: bool,
    ) {
        let raw = RawUse { region, placed, users: Users::of(user), is_guest, is_captured };
        let before = self.blocks.insert(placed.at, raw);
        debug_assert!(before.is_none(), "two live blocks begin at one address");
    }

    pub(crate) fn remove(&mut self, at: DeviceAddress) -> Option<RawUse> {
        self.blocks.remove(&at)
    }

    /// Takes all blocks out.
    pub(crate) fn take_all(&mut self) -> Vec<RawUse> {
        std::mem::take(&mut self.blocks).into_values().collect()
    }

    /// Records the new address of a block that was moved, if it is a raw block.
    pub(crate) fn readdress(
        &mut self,
        from: DeviceAddress,
        id: BlockName,
        moved: (Region, &RegionState),
    ) {
        let (region, state) = moved;
        let is_it = |raw: &&mut RawUse| raw.region == region && raw.placed.id == id;
        if self.blocks.get_mut(&from).as_ref().is_some_and(is_it)
            && let Some(mut raw) = self.blocks.remove(&from)
        {
            raw.placed = state.refreshed(raw.placed);
            self.blocks.insert(raw.placed.at, raw);
        }
    }
}

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
