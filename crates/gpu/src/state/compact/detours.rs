//! Removes detours from a plan: a block that would move twice moves once, to its last place.
//!
//! Granules are cleared one after the other, so a block may move into a granule that is cleared
//! later. Its first move is left out if nothing else uses the place that the block leaves before
//! the second: the block stays there until then.
//!
//! Invariant: after all moves every block is where the plan with detours puts it, each move is
//! still possible once the moves before it are done, and no byte more is moved.

use std::collections::BTreeMap;

use super::plan::Move;
use crate::index::Span;

/// Returns the moves without detours, in order. O(n log n).
pub(super) fn without_detours(moves: &[Move]) -> Vec<Move> {
    let mut made: Vec<Option<Move>> = Vec::with_capacity(moves.len());
    // The last move of each block that has moved, by the block's present offset.
    let mut last_moves: BTreeMap<u64, usize> = BTreeMap::new();
    let mut left = LeftSpans::default();
    for (nth, &second) in moves.iter().enumerate() {
        let mut next = second;
        if let Some(before) = last_moves.remove(&second.from)
            && let Some(first) = made[before]
            && left.take(first.source())
        {
            let direct = Move { from: first.from, ..second };
            if direct.distance() == 0 || !direct.overlaps() {
                made[before] = None;
                next = direct;
            }
        }
        if next.distance() == 0 {
            made.push(None); // back where it was
            continue;
        }
        left.occupy(next.destination());
        left.add(next.source());
        last_moves.insert(next.to, nth);
        made.push(Some(next));
    }
    made.into_iter().flatten().collect()
}

/// Spans that blocks have left, and that no block has used since. They do not overlap.
#[derive(Default)]
struct LeftSpans(BTreeMap<u64, u64>);

impl LeftSpans {
    fn add(&mut self, span: Span) {
        self.0.insert(span.offset, span.size);
    }

    /// Removes a span. Returns `false` if it is not there as a whole.
    fn take(&mut self, span: Span) -> bool {
        let is_there = self.0.get(&span.offset) == Some(&span.size);
        is_there && self.0.remove(&span.offset).is_some()
    }

    /// Removes all spans of which a part is used now.
    fn occupy(&mut self, used: Span) {
        let overlapping = self.0.range(..used.end()).rev();
        let overlapping = overlapping.take_while(|&(offset, size)| offset + size > used.offset);
        let offsets: Vec<u64> = overlapping.map(|(&offset, _)| offset).collect();
        for offset in offsets {
            self.0.remove(&offset);
        }
    }
}

#[cfg(all(test, not(lowtide_loom)))]
mod tests {
    use super::*;

    fn moves<const N: usize>(all: [(u64, u64); N]) -> Vec<Move> {
        all.map(|(from, to)| Move { from, to, size: 10 }).into()
    }

    #[test]
    fn a_block_that_would_move_twice_moves_once_and_last() {
        let twice = moves([(0, 100), (50, 200), (100, 300), (300, 400)]);
        assert_eq!(without_detours(&twice), moves([(50, 200), (0, 400)]));
    }

    #[test]
    fn a_block_that_would_come_back_stays() {
        assert_eq!(without_detours(&moves([(0, 100), (100, 0)])), []);
    }

    #[test]
    fn a_detour_stays_if_the_first_place_is_used_meanwhile() {
        let needed = moves([(0, 100), (50, 5), (100, 300)]);
        assert_eq!(without_detours(&needed), needed);
        // From the second place on it is a detour again.
        let partly = moves([(0, 100), (50, 5), (100, 300), (300, 400)]);
        assert_eq!(without_detours(&partly), moves([(0, 100), (50, 5), (100, 400)]));
    }

    #[test]
    fn two_jumps_do_not_become_a_slide() {
        let jumps = moves([(0, 100), (100, 5)]);
        assert_eq!(without_detours(&jumps), jumps);
    }
}
