//! The layout of a region for the plan of a compaction.
//!
//! A plan is made from a copy of the layout, with the lock released. [`move_block`] then makes its
//! moves, in batches.
//!
//! [`move_block`]: super::move_block

use std::collections::BTreeMap;
use std::time::Duration;

use crate::index::{End, Span};
use crate::state::arena::ArenaState;
use crate::state::compact::plan::{self, CompactPlan, CompactTarget, Hold, LayoutPart};
use crate::state::raw::RawUse;
use crate::state::region_index::BlockName;
use crate::types::Region;
use crate::types::compact::CompactOptions;

/// The time for which the copies of a batch may block leases, unless one block needs more.
const BLOCKED_MAX: Duration = Duration::from_millis(1);

/// The layout of a region at one instant.
#[derive(Debug)]
pub(crate) struct Layout {
    parts: Vec<LayoutPart>,
    /// The segments, on drivers that allocate segments.
    segments: Option<Vec<Span>>,
    granule: u64,
}

impl Layout {
    /// Copies the layout of the region of a compaction: O(blocks).
    pub(crate) fn of(state: &ArenaState, options: CompactOptions) -> Self {
        let mut parts: Vec<_> = parts_of(state, options, End::Low).collect();
        // A requested free span is for a large block.
        if options.contiguous.is_none() {
            // The wall between the ranges is a block that does not move.
            let wall = state.region(options.region).index.wall();
            parts.extend(wall.map(|span| LayoutPart { span, hold: Some(Hold::Wall) }));
            parts.extend(parts_of(state, options, End::High));
        }
        Self::new(state, options.region, parts)
    }

    /// Copies the first blocks and free spans of one range of a region, at most this many; the last
    /// of them is fixed, since its successor is unknown.
    pub(crate) fn first(
        state: &ArenaState,
        options: CompactOptions,
        end: End,
        parts_max: usize,
    ) -> Self {
        let mut parts: Vec<_> = parts_of(state, options, end).take(parts_max).collect();
        if parts.len() == parts_max
            && let Some(last) = parts.last_mut()
        {
            last.hold = Some(Hold::Stays);
        }
        Self::new(state, options.region, parts)
    }

    fn new(state: &ArenaState, region: Region, parts: Vec<LayoutPart>) -> Self {
        let segments = state.region(region).segment.segments();
        Self { parts, segments, granule: state.bytes_of(1) }
    }

    /// Plans a compaction in at most this many passes.
    pub(crate) fn plan(&self, options: CompactOptions, passes: usize) -> CompactPlan {
        let target = match (options.contiguous, self.segments.as_deref()) {
            (Some(size), _) => CompactTarget::Contiguous(size.get()),
            (None, Some(segments)) => CompactTarget::Segments(segments),
            (None, None) => CompactTarget::Granules,
        };
        plan::plan(&self.parts, self.granule, target, options.budget.get(), passes)
    }
}

/// Returns the names of the blocks of a region, by offset.
pub(crate) fn names(state: &ArenaState, region: Region) -> BTreeMap<u64, BlockName> {
    let blocks = state.region(region).index.blocks();
    blocks.filter_map(|(span, id)| Some((span.offset, id?))).collect()
}

/// Returns the maximum bytes and copies of a batch: one block on a driver that copies before its
/// call returns, which a batch would not make faster.
pub(crate) fn batch_limit(state: &ArenaState) -> [u64; 2] {
    if state.capabilities.asynchronous { state.costs.copied_within(BLOCKED_MAX) } else { [0, 0] }
}

/// Returns the blocks and free spans of one range of a region in address order.
fn parts_of(
    state: &ArenaState,
    options: CompactOptions,
    end: End,
) -> impl Iterator<Item = LayoutPart> {
    let blocks = state.region(options.region).index.blocks_of(end);
    blocks.map(move |(span, id)| LayoutPart {
        span,
        hold: id.map(|id| hold(state, options, id, span)),
    })
}

/// Returns if and how a block may move.
pub(super) fn hold(state: &ArenaState, options: CompactOptions, id: BlockName, span: Span) -> Hold {
    let region = state.region(options.region);
    if region.segment.is_held(span.offset) {
        return Hold::Stays;
    }
    if !options.moves_raw && raw_at(state, options.region, span.offset).is_some() {
        return Hold::Stays;
    }
    region.pins.hold(id, id.end())
}

/// Returns the raw block at an offset of a region.
pub(super) fn raw_at(state: &ArenaState, region: Region, offset: u64) -> Option<&RawUse> {
    if state.raw.is_empty() {
        return None;
    }
    state.raw.get(&state.region(region).segment.address_of(offset))
}
