//! Clears granules: moves the blocks that touch one into holes of other active granules.
//!
//! Granules are tried in the order of bytes to move per granule freed, each completely or not at
//! all. A pass that frees a granule is followed by another, because moved blocks leave holes. A
//! pass that frees none is the last.
//!
//! Invariant: after each cleared granule, fewer granules are active than before it.

use super::layout_model::{Block, LayoutModel};
use super::plan::{Draft, Hold};
use crate::index::Span;

/// The number of granules, or segments, in a row that could not be cleared before a pass ends.
/// Later ones cost more.
const MISSES_MAX: usize = 256;

/// A granule that might be cleared.
struct Candidate {
    granule: u64,
    /// The bytes of the blocks that touch the granule.
    bytes: u64,
    /// The number of granules that are free without these blocks.
    freed: u64,
}

pub(super) fn plan(draft: &mut Draft) {
    for _ in 0..draft.passes {
        let candidates = candidates(draft);
        if !try_each(candidates, |candidate| clear(draft, candidate.granule)) {
            return;
        }
    }
}

/// Makes one pass: tries each candidate in turn, until too many in a row have failed. Returns
/// `true` if any succeeded.
pub(super) fn try_each<T>(candidates: Vec<T>, mut done: impl FnMut(T) -> bool) -> bool {
    let (mut gained, mut misses) = (false, 0);
    for candidate in candidates {
        if done(candidate) {
            (gained, misses) = (true, 0);
        } else {
            misses += 1;
        }
        if misses == MISSES_MAX {
            break;
        }
    }
    gained
}

/// Returns the granules at the ends of blocks, those with the least cost per gain first.
fn candidates(draft: &Draft) -> Vec<Candidate> {
    let model = &draft.model;
    let mut granules: Vec<u64> = Vec::new();
    for part in model.parts() {
        if matches!(part.hold, Some(Hold::Moves { .. })) {
            granules.push(part.span.offset / model.granule());
            granules.push((part.span.end() - 1) / model.granule());
        }
    }
    granules.dedup();
    let assess = |granule| {
        let touching = model.touching(span_of(model, granule));
        let hull = hull(&touching)?;
        let bytes = touching.iter().map(|block| block.span.size).sum();
        let movable = touching.iter().all(|&block| draft.is_movable(block));
        let worth = movable && bytes <= draft.left();
        worth.then(|| Candidate { granule, bytes, freed: model.alone(hull) })
    };
    let mut candidates: Vec<Candidate> = granules.into_iter().filter_map(assess).collect();
    // Compares the bytes moved per granule freed, without a division.
    candidates.sort_by(|a, b| {
        let product =
            |c: &Candidate, other: &Candidate| u128::from(c.bytes) * u128::from(other.freed.max(1));
        product(a, b).cmp(&product(b, a)).then(a.granule.cmp(&b.granule))
    });
    candidates
}

/// Moves all blocks out of a granule, or none. Returns `true` if the granule was cleared.
fn clear(draft: &mut Draft, granule: u64) -> bool {
    let cleared = span_of(&draft.model, granule);
    let mut touching = draft.model.touching(cleared);
    let bytes = touching.iter().map(|block| block.span.size).sum::<u64>();
    let movable = touching.iter().all(|&block| draft.is_movable(block));
    let Some(hull) = hull(&touching) else { return false };
    if !movable || bytes > draft.left() {
        return false;
    }
    let (moves, active, freed) = (draft.moves.len(), draft.model.active(), draft.model.alone(hull));
    // The largest blocks first, because the fewest holes can take them.
    touching.sort_by_key(|block| std::cmp::Reverse(block.span.size));
    let mut made_active = 0;
    for block in touching {
        let place = draft.place(block, cleared, None);
        made_active += place.map_or(freed, |(_, active)| active);
        match place {
            Some((to, _)) if made_active < freed => draft.relocate(block, to),
            _ => break,
        }
    }
    let gained = draft.model.active() < active;
    let whole = draft.model.touching(cleared).is_empty();
    if !(gained && whole) {
        draft.undo(moves);
    }
    gained && whole
}

fn span_of(model: &LayoutModel, granule: u64) -> Span {
    Span { offset: granule * model.granule(), size: model.granule() }
}

/// Returns the span from the first block to the end of the last.
fn hull(blocks: &[Block]) -> Option<Span> {
    let (first, last) = (blocks.first()?.span, blocks.last()?.span);
    Some(Span { offset: first.offset, size: last.end() - first.offset })
}
