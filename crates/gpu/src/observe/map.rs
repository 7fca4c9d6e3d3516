//! Creates a map of an arena from its metadata, under the lock.
//!
//! A granule that is being committed or released counts as committed. A block whose memory is not
//! committed yet, or that is growing in place, counts as free, as in a snapshot.
//!
//! Invariant: the map shows one instant; its events lead up to that instant.

use crate::index::Span;
use crate::observe::visualize::{BlockSpan, BlockState, GranuleRun, GranuleState, SegmentMap};
use crate::state::arena::ArenaState;
use crate::state::backing::AddressRange;
use crate::types::region::Region;
use lowtide_core::bytes::ByteSize;

/// Returns the segments of a region.
pub(crate) fn segments(state: &ArenaState, region: Region) -> Vec<SegmentMap> {
    let ground = &state.region(region).segment;
    let spans: Vec<_> = state.region(region).live_spans().collect();
    let mut touched = Touched::new(&spans);
    let map = |AddressRange { at, span, backed }: AddressRange| {
        let first = spans.partition_point(|block| block.offset < span.offset);
        let inside = spans[first..].iter().take_while(|block| block.offset < span.end());
        let arrived = |block: &&Span| ground.missing(**block).is_nothing();
        let blocks = inside.filter(arrived).map(|block| {
            let (offset, size) = (block.offset - span.offset, ByteSize::new(block.size));
            let offset = ByteSize::new(offset);
            BlockSpan { offset, size, requested: size, state: BlockState::Live }
        });
        let blocks = blocks.collect();
        let mut granules = Vec::new();
        for (run, usage) in backed {
            match usage {
                Some(state) => {
                    let (offset, size) = (ByteSize::new(run.offset), ByteSize::new(run.size));
                    granules.push(GranuleRun { offset, size, state });
                }
                None => touched.cut(run.offset, run.end(), state.bytes_of(1), &mut granules),
            }
        }
        for run in &mut granules {
            run.offset = ByteSize::new(run.offset.get() - span.offset);
        }
        let (region, size) = (region.name().to_owned(), ByteSize::new(span.size));
        SegmentMap { region, base: at.get(), size, granules, blocks }
    };
    ground.stretches().into_iter().map(map).collect()
}

/// Distinguishes active from idle granules by the blocks that touch them, including arriving
/// blocks, in one pass.
struct Touched<'a> {
    spans: &'a [Span],
    next: usize,
}

impl<'a> Touched<'a> {
    const fn new(spans: &'a [Span]) -> Self {
        Self { spans, next: 0 }
    }

    /// Cuts backed granules into runs of one state.
    fn cut(&mut self, start: u64, end: u64, granule: u64, runs: &mut Vec<GranuleRun>) {
        let mut at = start;
        while at < end {
            let run_start = at;
            let (idle_to, active_to) = self.next_after(at, end, granule);
            at = if idle_to > at { idle_to } else { active_to };
            let state = if idle_to > run_start { GranuleState::Idle } else { GranuleState::Active };
            let (offset, size) = (ByteSize::new(run_start), ByteSize::new(at - run_start));
            match runs.last_mut().filter(|last| last.state == state) {
                Some(last) if last.offset.saturating_add(last.size) == offset => {
                    last.size = last.size.saturating_add(size);
                }
                _ => runs.push(GranuleRun { offset, size, state }),
            }
        }
    }

    /// Returns the end of the idle granules from `at` on, and the end of the granules that the next
    /// block keeps active.
    fn next_after(&mut self, at: u64, end: u64, granule: u64) -> (u64, u64) {
        while self.spans.get(self.next).is_some_and(|span| span.end() <= at) {
            self.next += 1;
        }
        match self.spans.get(self.next) {
            Some(span) if span.offset < end => {
                let first = span.offset / granule * granule;
                let last = span.end().next_multiple_of(granule);
                (first.max(at), last.min(end))
            }
            _ => (end, end),
        }
    }
}
