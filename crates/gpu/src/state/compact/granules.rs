//! Clears granules, or whole segments on drivers that release segments: moves their blocks into
//! holes of others that stay active.
//!
//! Those with the fewest bytes to move per granule or byte freed come first. Each is cleared
//! completely or not at all. A pass that clears one is followed by another, because moved blocks
//! leave holes. A pass that clears none is the last. No idle segment is used as a target, so an
//! emptied segment takes no block.
//!
//! Invariant: after each cleared granule or segment, fewer of them are active than before it.

use super::layout_model::{LayoutModel, ModelBlock};
use super::plan::{Draft, Hold, places};
use crate::index::{ALIGN, Span};

/// The number of free spans examined for one block, the smallest that fit first.
const LOOKS: usize = 16;

/// The number of granules, or segments, in a row that could not be cleared before a pass ends.
/// Later ones cost more.
const MISSES_MAX: usize = 256;

/// A granule or a segment that might be cleared.
#[derive(Clone, Copy)]
struct ClearCandidate {
    area: Span,
    /// The bytes of the blocks that touch it.
    bytes: u64,
    /// The granules that are free without these blocks, or the bytes of the segment.
    freed: u64,
}

/// Makes the plan for granules, or for segments in the order of offsets.
pub(super) fn plan(draft: &mut Draft, segments: Option<&[Span]>) {
    for _ in 0..draft.passes {
        let (mut gained, mut misses) = (false, 0);
        for candidate in candidates(draft, segments) {
            if clear(draft, segments, candidate) {
                (gained, misses) = (true, 0);
            } else {
                misses += 1;
            }
            if misses == MISSES_MAX {
                break;
            }
        }
        if !gained {
            return;
        }
    }
}

/// Returns the bytes of the segments that have blocks.
pub(super) fn active_bytes(model: &LayoutModel, segments: &[Span]) -> u64 {
    let active = segments.iter().filter(|segment| is_active(model, **segment));
    active.map(|segment| segment.size).sum()
}

/// Returns `true` if there are blocks in a segment. Blocks do not cross its ends.
fn is_active(model: &LayoutModel, segment: Span) -> bool {
    model.before(segment.end()).is_some_and(|last| last.span.offset >= segment.offset)
}

/// Returns the granules at the ends of blocks, or the segments, those with the least cost per gain
/// first.
fn candidates(draft: &Draft, segments: Option<&[Span]>) -> Vec<ClearCandidate> {
    let model = &draft.model;
    let areas = segments.map_or_else(|| granules(model), <[Span]>::to_vec);
    let assess = |area| {
        let touching = model.touching(area);
        let hull = hull(&touching)?;
        let bytes = touching.iter().map(|block| block.span.size).sum();
        let movable = touching.iter().all(|&block| draft.is_movable(block));
        let freed = if segments.is_some() { area.size } else { model.alone(hull).max(1) };
        let worth = movable && bytes <= draft.left();
        worth.then_some(ClearCandidate { area, bytes, freed })
    };
    let mut candidates: Vec<ClearCandidate> = areas.into_iter().filter_map(assess).collect();
    // Compares the bytes moved per gain, without a division.
    candidates.sort_by(|a, b| {
        let product = |c: &ClearCandidate, other: &ClearCandidate| {
            u128::from(c.bytes) * u128::from(other.freed)
        };
        product(a, b).cmp(&product(b, a)).then(a.area.offset.cmp(&b.area.offset))
    });
    candidates
}

/// Returns the granules at the ends of blocks that may move.
fn granules(model: &LayoutModel) -> Vec<Span> {
    let mut granules: Vec<u64> = Vec::new();
    for part in model.parts() {
        if matches!(part.hold, Some(Hold::Moves { .. })) {
            granules.push(part.span.offset / model.granule);
            granules.push((part.span.end() - 1) / model.granule);
        }
    }
    granules.dedup();
    let size = model.granule;
    granules.into_iter().map(|granule| Span { offset: granule * size, size }).collect()
}

/// Moves all blocks out of a granule or a segment, or none. Returns `true` if it was cleared.
fn clear(draft: &mut Draft, segments: Option<&[Span]>, candidate: ClearCandidate) -> bool {
    let mut touching = draft.model.touching(candidate.area);
    let bytes = touching.iter().map(|block| block.span.size).sum::<u64>();
    let movable = touching.iter().all(|&block| draft.is_movable(block));
    let Some(hull) = hull(&touching) else { return false };
    // Blocks that have moved to a segment since it was assessed do not move again.
    let is_as_assessed = segments.is_none() || bytes == candidate.bytes;
    if !movable || !is_as_assessed || bytes > draft.left() {
        return false;
    }
    let (moves, active, freed) = (draft.moves.len(), draft.model.active, draft.model.alone(hull));
    // The largest blocks first, because the fewest holes can take them.
    touching.sort_by_key(|block| std::cmp::Reverse(block.span.size));
    let mut made_active = 0;
    for block in touching {
        let place = match segments {
            Some(segments) => place(draft, segments, block).map(|to| (to, 0)),
            None => draft.place(block, candidate.area, None),
        };
        made_active += place.map_or(0, |(_, active)| active);
        match place {
            Some((to, _)) if segments.is_some() || made_active < freed => draft.relocate(block, to),
            _ => break,
        }
    }
    let gained = segments.is_some() || draft.model.active < active;
    let is_cleared = gained && draft.model.touching(candidate.area).is_empty();
    if !is_cleared {
        draft.undo(moves);
    }
    is_cleared
}

/// Returns a place for a block in another active segment: in the smallest free span that fits.
fn place(draft: &Draft, segments: &[Span], block: ModelBlock) -> Option<u64> {
    let Hold::Moves { align, .. } = block.hold else { return None };
    let (size, from) = (block.span.size, block.span.offset);
    let is_target = |span: &Span| {
        let nth = segments.partition_point(|segment| segment.end() <= span.offset);
        let segment = segments.get(nth).filter(|segment| segment.offset <= span.offset);
        segment.is_some_and(|&segment| {
            let is_own = (segment.offset..segment.end()).contains(&from);
            !is_own && is_active(&draft.model, segment)
        })
    };
    let spans = draft.model.at_least(size, from).filter(is_target).take(LOOKS);
    let nowhere = Span { offset: 0, size: 0 };
    let mut all = spans.flat_map(|span| places(span, nowhere, size, align.max(ALIGN)));
    all.next()
}

/// Returns the span from the first block to the end of the last.
fn hull(blocks: &[ModelBlock]) -> Option<Span> {
    let (first, last) = (blocks.first()?.span, blocks.last()?.span);
    Some(Span { offset: first.offset, size: last.end() - first.offset })
}

#[cfg(all(test, not(lowtide_loom)))]
mod tests {
    use super::super::plan::{CompactPlan, CompactTarget, LayoutPart, Move, PASSES_MAX, plan};
    use super::*;
    use crate::index::End;
    use crate::tests::Chance;

    const GRANULE: u64 = 4096;

    /// Returns segments of random sizes with walls between them, and blocks in them.
    fn layout(chance: &mut Chance) -> (Vec<LayoutPart>, Vec<Span>) {
        let (mut parts, mut segments, mut at) = (Vec::new(), Vec::new(), 0);
        for _ in 0..=chance.below(20) {
            let size = GRANULE * (1 + chance.below(4));
            segments.push(Span { offset: at, size });
            let end = at + size;
            let is_empty = chance.below(4) == 0;
            while at < end {
                let size = (ALIGN * (1 + chance.below(8))).min(end - at);
                let before: Option<&mut LayoutPart> = parts.last_mut();
                if is_empty || chance.below(2) == 0 {
                    match before.filter(|part| part.hold.is_none()) {
                        Some(part) => part.span.size += size,
                        None => {
                            parts.push(LayoutPart { span: Span { offset: at, size }, hold: None })
                        }
                    }
                } else {
                    let moves = Hold::Moves { end: End::Low, align: ALIGN };
                    let hold = if chance.below(20) == 0 { Hold::Stays } else { moves };
                    parts.push(LayoutPart { span: Span { offset: at, size }, hold: Some(hold) });
                }
                at += size;
            }
            let wall = Span { offset: at, size: GRANULE };
            parts.push(LayoutPart { span: wall, hold: Some(Hold::Stays) });
            at += GRANULE;
        }
        (parts, segments)
    }

    /// Applies the moves to the parts, in order. Each move goes into space that is free then.
    fn carry_out(parts: &[LayoutPart], plan: &CompactPlan) -> Vec<Span> {
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
            let target = CompactTarget::Segments(&segments);
            let plan = plan(&parts, GRANULE, target, budget, PASSES_MAX);
            let active = |blocks: &[Span]| -> Vec<bool> {
                let touches =
                    |of: &Span, block: &Span| block.offset < of.end() && of.offset < block.end();
                segments.iter().map(|of| blocks.iter().any(|it| touches(of, it))).collect()
            };
            let (was, is) =
                (active(&carry_out(&parts, &CompactPlan { moves: vec![], ..plan.clone() })), {
                    active(&carry_out(&parts, &plan))
                });
            let bytes = |active: &[bool]| -> u64 {
                segments.iter().zip(active).filter(|(_, it)| **it).map(|(of, _)| of.size).sum()
            };
            assert!(is.iter().zip(&was).all(|(is, was)| *was || !is), "one was opened");
            assert_eq!(plan.active, [bytes(&was) / GRANULE, bytes(&is) / GRANULE]);
            let moved: u64 = plan.moves.iter().map(|made| made.size).sum();
            assert!(moved <= budget && plan.moves.is_empty() == (was == is));
            emptied += u64::from(was != is);
        }
        assert!(emptied > 200, "{emptied} plans emptied something");
    }

    #[test]
    fn the_emptiest_goes_first_and_the_budget_holds() {
        let block = |offset, size| {
            let hold = Hold::Moves { end: End::Low, align: ALIGN };
            LayoutPart { span: Span { offset, size }, hold: Some(hold) }
        };
        let free = |offset, size| LayoutPart { span: Span { offset, size }, hold: None };
        let wall =
            |offset| LayoutPart { span: Span { offset, size: 4096 }, hold: Some(Hold::Stays) };
        let parts = [
            block(0, 2048),
            free(2048, 2048),
            wall(4096),
            block(8192, 256),
            free(8448, 3840),
            wall(12_288),
        ];
        let segments = [0, 8192].map(|offset| Span { offset, size: 4096 });
        let target = CompactTarget::Segments(&segments);
        let of = |budget| plan(&parts, GRANULE, target, budget, PASSES_MAX).moves;
        assert_eq!(of(u64::MAX), [Move { from: 8192, to: 2048, size: 256 }]);
        assert_eq!(of(255), []);
    }
}
