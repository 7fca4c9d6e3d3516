//! Cuts the moves of a plan into batches that are copied at the same time.
//!
//! Invariant: no place of one block in a batch, old or new, overlaps a place of another, so the
//! moves of a batch need no order.

use std::collections::BTreeMap;

use super::plan::Move;

/// The bounds of a batch. A move that exceeds them is a batch of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct BatchLimit {
    pub(crate) bytes: u64,
    pub(crate) copies: u64,
}

/// Returns the number of moves in the first batch of a plan: at least one, if there is a move.
pub(crate) fn first_batch(moves: &[Move], limit: BatchLimit) -> usize {
    let (mut bytes, mut copies) = (0_u64, 0_u64);
    // The ends of the places, by offset.
    let mut places: BTreeMap<u64, u64> = BTreeMap::new();
    for (nth, &made) in moves.iter().enumerate() {
        let spans = [made.source(), made.destination()];
        let is_used = |offset: u64, end: u64| {
            places.range(..end).next_back().is_some_and(|(_, &other)| other > offset)
        };
        (bytes, copies) = (bytes + made.size, copies + made.copies());
        let is_full = bytes > limit.bytes || copies > limit.copies;
        let depends = spans.iter().any(|span| is_used(span.offset, span.end()));
        if nth > 0 && (is_full || depends) {
            return nth;
        }
        if made.overlaps() {
            let [from, to] = spans;
            places.insert(from.offset.min(to.offset), from.end().max(to.end()));
        } else {
            places.extend(spans.map(|span| (span.offset, span.end())));
        }
    }
    moves.len()
}

#[cfg(all(test, not(lowtide_loom)))]
mod tests {
    use super::*;

    const LIMIT: BatchLimit = BatchLimit { bytes: 35, copies: 8 };

    fn first(moves: &[(u64, u64, u64)]) -> usize {
        let moves: Vec<_> = moves.iter().map(|&(from, to, size)| Move { from, to, size }).collect();
        first_batch(&moves, LIMIT)
    }

    #[test]
    fn a_batch_has_as_many_moves_as_the_limits_allow_and_at_least_one() {
        let moves = [(0, 100, 10), (10, 110, 10), (20, 120, 10), (30, 130, 10)];
        assert_eq!(first(&moves), 3);
        assert_eq!(first(&[(0, 100, 50), (50, 150, 1)]), 1);
        // A slide by 1 of 10 bytes takes ten copies.
        assert_eq!(first(&[(0, 100, 1), (11, 10, 10)]), 1);
        assert_eq!(first(&[]), 0);
    }

    #[test]
    fn a_move_that_depends_on_another_is_in_a_later_batch() {
        assert_eq!(first(&[(0, 100, 10), (50, 5, 10)]), 1, "into a place that is left");
        assert_eq!(first(&[(0, 100, 10), (100, 200, 10)]), 1, "the same block");
        assert_eq!(first(&[(10, 5, 10), (20, 15, 5)]), 1, "into a place that a slide leaves");
        assert_eq!(first(&[(0, 100, 10), (20, 110, 10), (10, 90, 10)]), 3, "all apart");
    }
}
