//! What is written down of single blocks: what becomes of their contents, and what became of them.
//!
//! Invariant: a block is said to be discarded once for each time that its contents were lost, or
//! for several at once, and to nobody but its owner.

use std::ops::Range;

use super::contents::{self, Contents, Part};
use crate::device::books::Books;
use crate::device::ranges::BlockName;
use crate::device::region::{Region, RegionBooks};

impl RegionBooks {
    /// What live blocks want of their granules, where they do not say otherwise as is `usual`; on
    /// host memory what is kept stays.
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
    pub(in crate::device) fn asleep(&self) -> u64 {
        self.live_spans().map(|span| self.segment.bare_bytes(span)).sum()
    }
}

impl Books {
    /// Notes the blocks whose contents are lost with these parts.
    pub(super) fn note_discarded(&mut self, parts: &[Part]) {
        for region in Region::ALL {
            let lost = |part: &&Part| part.region == region && part.contents == Contents::Discard;
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
            // Whoever has a block from before does not give it to a thread's front, where it would
            // keep this note for somebody else.
            books.moves += 1;
            lost.into_iter().for_each(|name| books.pins.discard(name));
        }
    }
}
