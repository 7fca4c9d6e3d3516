//! The numbers of blocks and streams in a recording: small, ascending, never reused.
//!
//! The arena's name of a block changes when a resize moves the block; its number does not. Lanes
//! have the arena's numbers.
//!
//! Invariant:
//! `known blocks = blocks of the arena that were recorded as allocated and not as freed`.

use std::collections::BTreeMap;

use crate::driver::StreamHandle;
use crate::state::region::Region;
use crate::state::region_index::BlockName;

/// The numbers of one recording.
#[derive(Debug, Default)]
pub(super) struct Numbers {
    blocks: BTreeMap<(usize, BlockName), NumberedBlock>,
    last_block: u64,
    streams: BTreeMap<StreamHandle, NumberedStream>,
    last_stream: u64,
}

#[derive(Clone, Copy, Debug)]
struct NumberedBlock {
    number: u64,
    /// `true` for a raw block.
    is_raw: bool,
}

#[derive(Debug)]
struct NumberedStream {
    number: u64,
    lanes: u64,
}

impl Numbers {
    /// Returns a new number for a block that was allocated.
    pub(super) fn give(&mut self, region: Region, id: BlockName, is_raw: bool) -> u64 {
        self.last_block += 1;
        let known = NumberedBlock { number: self.last_block, is_raw };
        self.blocks.insert((region.number(), id), known);
        known.number
    }

    /// Returns the number of a block; `None` if it is not in the recording.
    pub(super) fn of(&self, region: Region, id: BlockName) -> Option<u64> {
        self.blocks.get(&(region.number(), id)).map(|known| known.number)
    }

    /// Returns and removes the number of a block that is freed.
    pub(super) fn take(&mut self, region: Region, id: BlockName) -> Option<u64> {
        self.blocks.remove(&(region.number(), id)).map(|known| known.number)
    }

    /// Passes the number of a block on to the block that replaces it.
    pub(super) fn pass(&mut self, region: Region, from: BlockName, to: BlockName) -> Option<u64> {
        let known = self.blocks.remove(&(region.number(), from))?;
        self.blocks.insert((region.number(), to), known);
        Some(known.number)
    }

    /// Removes all raw blocks.
    pub(super) fn forget_raw(&mut self) {
        self.blocks.retain(|_, known| !known.is_raw);
    }

    /// Returns the number of the stream of a new lane.
    pub(super) fn enter(&mut self, handle: StreamHandle) -> u64 {
        let stream = self.streams.entry(handle).or_insert_with(|| {
            self.last_stream += 1;
            NumberedStream { number: self.last_stream, lanes: 0 }
        });
        stream.lanes += 1;
        stream.number
    }

    /// Records that a lane of a stream was dropped.
    pub(super) fn leave(&mut self, handle: StreamHandle) {
        if let Some(stream) = self.streams.get_mut(&handle) {
            stream.lanes -= 1;
            if stream.lanes == 0 {
                self.streams.remove(&handle);
            }
        }
    }
}
