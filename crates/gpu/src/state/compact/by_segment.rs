//! Empties whole segments, on drivers that release segments and not granules: moves the blocks of a
//! segment into holes of other segments that stay active.
//!
//! Segments with the fewest bytes to move per byte made idle come first. Each segment is emptied
//! completely or not at all. No idle segment is used as a target. An emptied segment takes no
//! block, so each pass empties at least one segment or is the last.
//!
//! Invariant: after each emptied segment, the bytes of active segments are fewer than before.

use super::granules::try_each;
use super::layout_model::Block;
use super::plan::{Draft, Hold, Move, places};
use crate::index::{ALIGN, Span};

/// The number of free spans examined for one block, the smallest that fit first.
const LOOKS: usize = 16;

/// The number of blocks that touch each segment. Segments are in the order of offsets.
struct Counts<'a> {
    segments: &'a [Span],
    blocks: Vec<usize>,
}

impl Counts<'_> {
    /// Returns the index of the segment that an offset lies in.
    fn nth(&self, offset: u64) -> Option<usize> {
        let nth = self.segments.partition_point(|span| span.end() <= offset);
        self.segments.get(nth).filter(|span| span.offset <= offset).map(|_| nth)
    }

    /// Returns the bytes of the segments that a block touches.
    fn active(&self) -> u64 {
        let active = self.segments.iter().zip(&self.blocks).filter(|(_, blocks)| **blocks > 0);
        active.map(|(span, _)| span.size).sum()
    }

    fn relocate(&mut self, from: u64, to: u64) {
        if let (Some(from), Some(to)) = (self.nth(from), self.nth(to)) {
            self.blocks[from] -= 1;
            self.blocks[to] += 1;
        }
    }
}

/// Makes the plan. Returns the bytes of active segments before and after.
pub(super) fn plan(draft: &mut Draft, segments: &[Span]) -> [u64; 2] {
    let blocks = segments.iter().map(|&span| draft.model.touching(span).len()).collect();
    let mut counts = Counts { segments, blocks };
    let before = counts.active();
    for _ in 0..draft.passes {
        let candidates = candidates(draft, &counts);
        if !try_each(candidates, |(bytes, nth)| empty(draft, &mut counts, nth, bytes)) {
            break;
        }
    }
    [before, counts.active()]
}

/// Returns the segments that might be emptied, with the bytes of their blocks. Segments with the
/// least cost per gain come first.
fn candidates(draft: &Draft, counts: &Counts<'_>) -> Vec<(u64, usize)> {
    let assess = |nth: usize| {
        let blocks = draft.model.touching(counts.segments[nth]);
        let bytes = blocks.iter().map(|block| block.span.size).sum::<u64>();
        let movable = blocks.iter().all(|&block| draft.is_movable(block));
        let worth = !blocks.is_empty() && movable && bytes <= draft.left();
        worth.then_some((bytes, counts.segments[nth].size, nth))
    };
    let mut candidates: Vec<_> = (0..counts.segments.len()).filter_map(assess).collect();
    // Compares the bytes moved per byte freed, without a division.
    candidates.sort_by(|a, b| {
        let product = |bytes: u64, size: u64| u128::from(bytes) * u128::from(size);
        product(a.0, b.1).cmp(&product(b.0, a.1)).then(a.2.cmp(&b.2))
    });
    candidates.into_iter().map(|(bytes, _, nth)| (bytes, nth)).collect()
}

/// Moves all blocks out of a segment, or none if other blocks have moved here since it was
/// assessed. Returns `true` if the segment was emptied.
fn empty(draft: &mut Draft, counts: &mut Counts<'_>, nth: usize, assessed: u64) -> bool {
    let mut blocks = draft.model.touching(counts.segments[nth]);
    let bytes = blocks.iter().map(|block| block.span.size).sum::<u64>();
    if bytes != assessed || bytes > draft.left() {
        return false;
    }
    // The largest blocks first, because the fewest holes can take them.
    blocks.sort_by_key(|block| std::cmp::Reverse(block.span.size));
    let moves = draft.moves.len();
    for block in blocks {
        let to = if draft.is_movable(block) { place(draft, counts, block, nth) } else { None };
        let Some(to) = to else {
            let undone: Vec<Move> = draft.moves[moves..].to_vec();
            undone.iter().for_each(|made| counts.relocate(made.to, made.from));
            draft.undo(moves);
            return false;
        };
        counts.relocate(block.span.offset, to);
        draft.relocate(block, to);
    }
    true
}

/// Returns a place for a block in another active segment: in the smallest free span that fits.
fn place(draft: &Draft, counts: &Counts<'_>, block: Block, from: usize) -> Option<u64> {
    let Hold::Moves { align, .. } = block.hold else { return None };
    let size = block.span.size;
    let is_active = |span: &Span| {
        counts.nth(span.offset).is_some_and(|nth| nth != from && counts.blocks[nth] > 0)
    };
    let spans = draft.model.at_least(size, block.span.offset).filter(is_active).take(LOOKS);
    let nowhere = Span { offset: 0, size: 0 };
    let mut all = spans.flat_map(|span| places(span, nowhere, size, align.max(ALIGN)));
    all.next()
}

#[cfg(all(test, not(lowtide_loom)))]
mod tests {
    use super::super::plan::{Part, Plan, Target, plan};
    use super::*;
    use crate::index::End;
    use crate::tests::compact::Chance;

    const GRANULE: u64 = 4096;

    /// Returns segments of random sizes with walls between them, and blocks in them.
    fn layout(chance: &mut Chance) -> (Vec<Part>, Vec<Span>) {
        let (mut parts, mut segments, mut at) = (Vec::new(), Vec::new(), 0);
        for _ in 0..=chance.below(20) {
            let size = GRANULE * (1 + chance.below(4));
            segments.push(Span { offset: at, size });
            let end = at + size;
            let is_empty = chance.below(4) == 0;
            while at < end {
                let size = (ALIGN * (1 + chance.below(8))).min(end - at);
                let before: Option<&mut Part> = parts.last_mut();
                if is_empty || chance.below(2) == 0 {
                    match before.filter(|part| part.hold.is_none()) {
                        Some(part) => part.span.size += size,
                        None => parts.push(Part { span: Span { offset: at, size }, hold: None }),
                    }
                } else {
                    let moves = Hold::Moves { end: End::Low, align: ALIGN };
                    let hold = if chance.below(20) == 0 { Hold::Stays } else { moves };
                    parts.push(Part { span: Span { offset: at, size }, hold: Some(hold) });
                }
                at += size;
            }
            let wall = Span { offset: at, size: GRANULE };
            parts.push(Part { span: wall, hold: Some(Hold::Stays) });
            at += GRANULE;
        }
        (parts, segments)
    }

    /// Applies the moves to the parts, in order. Each move goes into space that is free then.
    fn carry_out(parts: &[Part], plan: &Plan) -> Vec<Span> {
        let blocks = parts.iter().filter(|part| part.hold.is_some());
        let mut blocks: Vec<Span> = blocks.map(|part| part.span).collect();
        for made in &plan.moves {
            let nth = blocks.iter().position(|&span| span == made.source()).expect("it is there");
            blocks.swap_remove(nth);
            let to = made.destination();
            let clear = |span: &Span| span.end() <= to.offset || to.end() <= span.offset;
            assert!(blocks.iter().all(clear), "{made:?} goes where something is");
            blocks.push(to);
        }
        blocks
    }

    #[test]
    fn segments_are_emptied_whole_and_none_is_opened() {
        let seed = 0x0DD5_EED5;
        println!("seed {seed:#x}");
        let mut chance = Chance(seed);
        let mut emptied = 0;
        for _ in 0..2000 {
            let (parts, segments) = layout(&mut chance);
            let budget = if chance.below(2) == 0 { u64::MAX } else { chance.below(40_000) };
            let plan = plan(&parts, GRANULE, Target::Segments(&segments), budget);
            let active = |blocks: &[Span]| -> Vec<bool> {
                let touches =
                    |of: &Span, block: &Span| block.offset < of.end() && of.offset < block.end();
                segments.iter().map(|of| blocks.iter().any(|it| touches(of, it))).collect()
            };
            let (was, is) =
                (active(&carry_out(&parts, &Plan { moves: vec![], ..plan.clone() })), {
                    active(&carry_out(&parts, &plan))
                });
            let bytes = |active: &[bool]| -> u64 {
                segments.iter().zip(active).filter(|(_, it)| **it).map(|(of, _)| of.size).sum()
            };
            assert!(is.iter().zip(&was).all(|(is, was)| *was || !is), "one was opened");
            assert_eq!(plan.active, [bytes(&was) / GRANULE, bytes(&is) / GRANULE]);
            assert!(plan.bytes <= budget && plan.moves.is_empty() == (was == is));
            emptied += u64::from(was != is);
        }
        assert!(emptied > 200, "{emptied} plans emptied something");
    }

    #[test]
    fn the_emptiest_goes_first_and_the_budget_holds() {
        let block = |offset, size| {
            let hold = Hold::Moves { end: End::Low, align: ALIGN };
            Part { span: Span { offset, size }, hold: Some(hold) }
        };
        let free = |offset, size| Part { span: Span { offset, size }, hold: None };
        let wall = |offset| Part { span: Span { offset, size: 4096 }, hold: Some(Hold::Stays) };
        let parts = [
            block(0, 2048),
            free(2048, 2048),
            wall(4096),
            block(8192, 256),
            free(8448, 3840),
            wall(12_288),
        ];
        let segments = [0, 8192].map(|offset| Span { offset, size: 4096 });
        let of = |budget| plan(&parts, GRANULE, Target::Segments(&segments), budget).moves;
        assert_eq!(of(u64::MAX), [Move { from: 8192, to: 2048, size: 256 }]);
        assert_eq!(of(255), []);
    }
}
