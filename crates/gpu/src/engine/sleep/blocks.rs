//! Per-block sleep settings and results: how their contents are treated, and if they were
//! discarded.
//!
//! Invariant: a discarded block is reported to its owner once for one or several losses, and to no
//! other caller.

use std::ops::Range;

use super::contents::{self, Contents, OutgoingRun};
use crate::state::arena::ArenaState;
use crate::state::ranges::BlockName;
use crate::state::region::{Region, RegionState};

impl RegionState {
    /// Returns the treatment of live blocks' granules, `usual` by default; on host memory kept
    /// contents stay in place.
    pub(super) fn wanted_contents(
        &self,
        usual: Contents,
        is_host: bool,
    ) -> Vec<(Range<usize>, Contents)> {
        let of = |name: BlockName| match self.pins.contents(name).unwrap_or(usual) {
            Contents::Keep if is_host => Contents::Stay,
            contents => contents,
        };
        let live = self.live_blocks();
        contents::wanted(live.map(|(span, name)| (self.segment.granules_of(span), of(name))))
    }

    /// Live bytes without memory behind them.
    pub(crate) fn asleep(&self) -> u64 {
        self.live_spans().map(|span| self.segment.bare_bytes(span)).sum()
    }
}

impl ArenaState {
    /// Notes the blocks whose contents are lost with these parts.
    pub(super) fn note_discarded(&mut self, parts: &[OutgoingRun]) {
        for region in Region::ALL {
            let lost =
                |part: &&OutgoingRun| part.region == region && part.contents == Contents::Discard;
            let mut runs: Vec<_> = parts.iter().filter(lost).map(|part| part.run.range()).collect();
            if runs.is_empty() {
                continue;
            }
            runs.sort_unstable_by_key(|run| run.start);
            let books = self.region_mut(region);
            let is_lost = |range: &Range<usize>| {
                let nth = runs.partition_point(|run| run.end <= range.start);
                runs.get(nth).is_some_and(|run| run.start < range.end)
            };
            let lost =
                books.live_blocks().filter(|(span, _)| is_lost(&books.segment.granules_of(*span)));
            let lost: Vec<_> = lost.map(|(_, name)| name).collect();
            // Buffers of older blocks are not cached when freed, since a cache would keep this
            // entry.
            books.moves += 1;
            lost.into_iter().for_each(|name| books.pins.discard(name));
        }
    }
}
