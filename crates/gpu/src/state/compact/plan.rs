//! Plans which blocks to move to which place, so that granules become free or free space
//! contiguous.
//!
//! Pure: blocks in, moves out. The plan calls no driver, takes no lock and reads no contents; the
//! executor checks that a block still exists before its move. Each move is possible once the moves
//! before it are done.
//!
//! * `Granules`: clears a granule by moving its blocks into holes of other active granules; those
//!   that free most for the bytes moved come first.
//! * `Segments`: the same for whole segments.
//! * `Contiguous`: clears a window into holes elsewhere, or slides blocks together, whichever moves
//!   fewer bytes.
//!
//! For granules and segments, a block that would move twice moves once if possible
//! (`without_detours`).
//!
//! Fixed blocks never move. Small and large blocks stay among their kind, towards the [`End`] that
//! they were placed from. The plan is good, not optimal: the optimum is a packing problem.
//!
//! Invariants: `sum of move sizes <= budget`; no fewer granules are idle after the moves
//! than before (`Granules`, `Segments`), and the largest free span is no smaller (`Contiguous`); if
//! neither would grow, the plan is empty or a part of one that a larger budget completes.

use std::collections::BTreeMap;

use super::layout_model::{LayoutModel, ModelBlock};
use super::{contiguous, granules};
use crate::index::{ALIGN, End, Span};

/// The restriction of a block's moves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Hold {
    /// The block may move to a multiple of `align` bytes, and belongs to this end of the region.
    Moves { end: End, align: u64 },
    /// The block stays.
    Stays,
    /// The block stays, and no block passes it. At most one block has this hold.
    Wall,
}

impl Hold {
    /// Returns `true` if a block of this kind may be next to a block of the other kind without
    /// mixing small and large blocks.
    fn is_kin(self, other: Self) -> bool {
        match (self, other) {
            (Self::Moves { end, .. }, Self::Moves { end: other, .. }) => end == other,
            (Self::Stays | Self::Wall, _) | (_, Self::Stays | Self::Wall) => true,
        }
    }
}

/// A block, or a free span.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct LayoutPart {
    pub(crate) span: Span,
    /// The restriction of the block; `None` for a free span.
    pub(crate) hold: Option<Hold>,
}

/// The target of a plan.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum CompactTarget<'a> {
    /// As many granules as possible without a block.
    Granules,
    /// As many bytes as possible in segments without a block. The segments are in the order of
    /// offsets, with walls between them.
    Segments(&'a [Span]),
    /// A free span of this size, or the largest possible.
    Contiguous(u64),
}

/// One block's move. If the old and the new place overlap, the block slides into the adjoining gap.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Move {
    pub(crate) from: u64,
    pub(crate) to: u64,
    pub(crate) size: u64,
}

impl Move {
    /// Returns the distance of the move.
    pub(crate) const fn distance(self) -> u64 {
        self.from.abs_diff(self.to)
    }

    /// Returns the number of copies that the move takes.
    pub(crate) const fn copies(self) -> u64 {
        if self.overlaps() { self.size.div_ceil(self.distance()) } else { 1 }
    }

    /// Returns `true` if the old and the new place overlap.
    pub(crate) const fn overlaps(self) -> bool {
        self.distance() < self.size
    }

    pub(crate) const fn source(self) -> Span {
        Span { offset: self.from, size: self.size }
    }

    pub(crate) const fn destination(self) -> Span {
        Span { offset: self.to, size: self.size }
    }

    /// Returns the span that must be free for the move: the new place, without the block's own part
    /// of it.
    pub(crate) const fn room(self) -> Span {
        if !self.overlaps() {
            self.destination()
        } else if self.to < self.from {
            Span { offset: self.to, size: self.from - self.to }
        } else {
            Span { offset: self.from + self.size, size: self.to - self.from }
        }
    }

    /// Returns copies that overlap neither themselves nor bytes still to be copied: one copy if the
    /// places are disjoint, otherwise pieces of at most the distance, the foremost first.
    pub(crate) fn pieces(self) -> impl Iterator<Item = Self> {
        let longest = if self.overlaps() { self.distance() } else { self.size };
        let mut done = 0;
        std::iter::from_fn(move || {
            let size = longest.min(self.size - done);
            done += size;
            let skip = if self.to < self.from { done - size } else { self.size - done };
            (size > 0).then_some(Self { from: self.from + skip, to: self.to + skip, size })
        })
    }
}

/// Moves, and their figures.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct CompactPlan {
    pub(crate) moves: Vec<Move>,
    /// The granules that a block touches, or whose segment a block touches, before and after.
    pub(crate) active: [u64; 2],
    /// The largest free span, before and after.
    pub(crate) largest: [u64; 2],
}

/// Plans a compaction of a region. Its parts are in address order and tile the region.
///
/// O(n log n) for each pass over n blocks; another pass follows only if the last one gained
/// something. With fewer `passes`, the gain is a lower bound of what more would gain.
pub(crate) fn plan(
    parts: &[LayoutPart],
    granule: u64,
    target: CompactTarget<'_>,
    budget: u64,
    passes: usize,
) -> CompactPlan {
    debug_assert!(granule.is_power_of_two());
    let model = LayoutModel::new(parts, granule);
    let mut draft = Draft { model, moves: Vec::new(), bytes: 0, budget, passes };
    let active = |model: &LayoutModel| match target {
        CompactTarget::Segments(segments) => granules::active_bytes(model, segments) / granule,
        CompactTarget::Granules | CompactTarget::Contiguous(_) => model.active,
    };
    let before = [active(&draft.model), draft.largest()];
    match target {
        CompactTarget::Granules => granules::plan(&mut draft, None),
        CompactTarget::Segments(segments) => granules::plan(&mut draft, Some(segments)),
        CompactTarget::Contiguous(size) => contiguous::plan(&mut draft, size),
    }
    if !matches!(target, CompactTarget::Contiguous(_)) {
        draft.moves = without_detours(&draft.moves);
        draft.bytes = draft.moves.iter().map(|made| made.size).sum();
    }
    debug_assert!(draft.bytes <= budget, "a plan keeps its budget");
    let active = [before[0], active(&draft.model)];
    let largest = [before[1], draft.largest()];
    CompactPlan { moves: draft.moves, active, largest }
}

/// A plan in the making.
#[derive(Clone, Debug)]
pub(super) struct Draft {
    pub(super) model: LayoutModel,
    pub(super) moves: Vec<Move>,
    pub(super) bytes: u64,
    pub(super) budget: u64,
    pub(super) passes: usize,
}

/// The maximum number of passes over all blocks. A guess.
pub(crate) const PASSES_MAX: usize = 64;

/// The number of passes if only the gain is of interest. A guess: the first gains most of it.
pub(crate) const OUTLOOK_PASSES: usize = 1;

/// The maximum number of copies for one block. A slide by a tiny part of the block takes a driver
/// call for each such part, and gains no more than that part. A guess: a thousand calls of a few
/// microseconds each.
pub(super) const PIECES_MAX: u64 = 1024;

/// The number of free spans examined for one block, the smallest that fit first.
const LOOKS: usize = 16;

impl Draft {
    /// Returns the rest of the budget.
    pub(super) const fn left(&self) -> u64 {
        self.budget - self.bytes
    }

    pub(super) fn largest(&self) -> u64 {
        self.model.largest().map_or(0, |span| span.size)
    }

    /// Returns `true` if a block may move and the budget can ever pay for the move.
    pub(super) const fn is_movable(&self, block: ModelBlock) -> bool {
        matches!(block.hold, Hold::Moves { .. }) && block.span.size <= self.budget
    }

    /// Moves a block on the model and records the move.
    pub(super) fn relocate(&mut self, block: ModelBlock, to: u64) {
        let Span { offset: from, size } = block.span;
        self.model.lift(block);
        self.model.put(ModelBlock { span: Span { offset: to, size }, ..block });
        self.moves.push(Move { from, to, size });
        self.bytes += size;
    }

    /// Undoes the moves after the first `count`.
    pub(super) fn undo(&mut self, count: usize) {
        while self.moves.len() > count {
            let Some(Move { from, to, size }) = self.moves.pop() else { break };
            let moved = self.model.after(to);
            debug_assert!(moved.is_some_and(|block| block.span.offset == to));
            if let Some(block) = moved {
                self.model.lift(block);
                self.model.put(ModelBlock { span: Span { offset: from, size }, ..block });
            }
            self.bytes -= size;
        }
    }

    /// Returns the best place for a block outside of `cleared` and of `spared`, and the number of
    /// granules that become active there. The fewest granules are best, then a place disjoint from
    /// the old one, then the smallest free span, then the place nearest to the block's end.
    /// Examines [`LOOKS`] free spans and the largest.
    pub(super) fn place(
        &mut self,
        block: ModelBlock,
        cleared: Span,
        spared: Option<Span>,
    ) -> Option<(u64, u64)> {
        let Hold::Moves { end, align } = block.hold else { return None };
        self.model.lift(block);
        let size = block.span.size;
        let within_reach = || self.model.at_least(size, block.span.offset);
        let spans = within_reach().take(LOOKS).chain(within_reach().next_back());
        let mut best: Option<[u64; 4]> = None;
        for span in spans {
            for at in places(span, cleared, size, align.max(ALIGN)) {
                let to = Span { offset: at, size };
                let spares = spared.is_none_or(|s| to.end() <= s.offset || s.end() <= to.offset);
                let made = Move { from: block.span.offset, to: at, size };
                let is_tedious = made.distance().saturating_mul(PIECES_MAX) < size;
                if is_tedious || !spares || !self.is_among_kin(to, block.hold) {
                    continue;
                }
                let overlaps = u64::from(made.overlaps());
                let far = if end == End::Low { at } else { u64::MAX - at };
                let rank = [self.model.alone(to), overlaps, span.size, far];
                best = Some(best.map_or(rank, |best| best.min(rank)));
            }
        }
        self.model.put(block);
        best.map(|[active, _, _, far]| (if end == End::Low { far } else { u64::MAX - far }, active))
    }

    /// Returns `true` if the nearest block on either side is of the same kind.
    fn is_among_kin(&self, place: Span, hold: Hold) -> bool {
        let below = self.model.before(place.offset);
        let below = below.map(|block| (place.offset - block.span.end(), block.hold));
        let above = self.model.after(place.end());
        let above = above.map(|block| (block.span.offset - place.end(), block.hold));
        let nearest = below.into_iter().chain(above).map(|(gap, _)| gap).min();
        let mut sides = below.into_iter().chain(above);
        nearest.is_none() || sides.any(|(gap, side)| Some(gap) == nearest && side.is_kin(hold))
    }
}

/// Returns the places at the ends of a free span, and next to the range to clear if that cuts the
/// span.
pub(super) fn places(free: Span, clear: Span, size: u64, align: u64) -> impl Iterator<Item = u64> {
    let cut = clear.offset.clamp(free.offset, free.end());
    let rest = clear.end().clamp(free.offset, free.end());
    let sides = [(free.offset, cut), (rest, free.end())];
    sides.into_iter().flat_map(move |(first, end)| {
        let low = first.checked_next_multiple_of(align);
        let high = end.checked_sub(size).map(|high| high / align * align);
        let fits = move |&at: &u64| at >= first && at.checked_add(size).is_some_and(|e| e <= end);
        low.into_iter().chain(high).filter(fits)
    })
}

// Cuts the moves of a plan into batches that are copied at the same time.
//
// Invariant: no place of one block in a batch, old or new, overlaps a place of another, so the
// moves of a batch need no order.

/// Returns the number of moves in the first batch of a plan, with at most these bytes and copies:
/// at least one, if there is a move.
pub(crate) fn first_batch(moves: &[Move], [bytes_max, copies_max]: [u64; 2]) -> usize {
    let (mut bytes, mut copies) = (0_u64, 0_u64);
    // The ends of the places, by offset.
    let mut places: BTreeMap<u64, u64> = BTreeMap::new();
    for (nth, &made) in moves.iter().enumerate() {
        let spans = [made.source(), made.destination()];
        let is_used = |offset: u64, end: u64| {
            places.range(..end).next_back().is_some_and(|(_, &other)| other > offset)
        };
        (bytes, copies) = (bytes + made.size, copies + made.copies());
        let is_full = bytes > bytes_max || copies > copies_max;
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

// Removes detours from a plan: a block that would move twice moves once, to its last place.
//
// Granules are cleared one after the other, so a block may move into a granule that is cleared
// later. Its first move is left out if nothing else uses the place that the block leaves before
// the second: the block stays there until then.
//
// Invariant: after all moves every block is where the plan with detours puts it, each move is
// still possible once the moves before it are done, and no byte more is moved.

/// Returns the moves without detours, in order. O(n log n).
pub(super) fn without_detours(moves: &[Move]) -> Vec<Move> {
    let mut made: Vec<Option<Move>> = Vec::with_capacity(moves.len());
    // The last move of each block that has moved, by the block's present offset.
    let mut last_moves: BTreeMap<u64, usize> = BTreeMap::new();
    // The spans that blocks have left, and that no block has used since. They do not overlap.
    let mut left: BTreeMap<u64, u64> = BTreeMap::new();
    for (nth, &second) in moves.iter().enumerate() {
        let mut next = second;
        if let Some(before) = last_moves.remove(&second.from)
            && let Some(first) = made[before]
            && left.get(&first.from) == Some(&first.size)
        {
            left.remove(&first.from);
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
        occupy(&mut left, next.destination());
        left.insert(next.from, next.size);
        last_moves.insert(next.to, nth);
        made.push(Some(next));
    }
    made.into_iter().flatten().collect()
}

/// Removes all spans of which a part is used now.
fn occupy(left: &mut BTreeMap<u64, u64>, used: Span) {
    let overlapping = left.range(..used.end()).rev();
    let overlapping = overlapping.take_while(|&(offset, size)| offset + size > used.offset);
    let offsets: Vec<u64> = overlapping.map(|(&offset, _)| offset).collect();
    for offset in offsets {
        left.remove(&offset);
    }
}

#[cfg(all(test, not(lowtide_loom)))]
mod tests {
    use super::*;

    const LIMIT: [u64; 2] = [35, 8];

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

#[cfg(all(test, not(lowtide_loom)))]
mod detour_tests {
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
