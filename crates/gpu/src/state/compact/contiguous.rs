//! Makes free space contiguous: clears a window into holes elsewhere, or slides blocks together.
//!
//! A window is a range of the wanted size without a fixed block. Its blocks move into holes outside
//! of the window, each to a separate place. If no window can be cleared, or if sliding moves fewer
//! bytes, the blocks between some neighbouring gaps slide together, low ones down and high ones up,
//! which joins these gaps into one. No block slides past a fixed block. If a fixed block limits the
//! result, blocks next to the largest free span move into holes elsewhere.
//!
//! With a budget only the first of these moves are made. The remaining ones then cost less than
//! before, so further calls continue with them or with a cheaper alternative, and terminate.
//!
//! Invariant: the largest free span never becomes smaller, not even between moves.

use std::collections::VecDeque;

use super::layout_model::ModelBlock;
use super::plan::{Draft, Hold, LayoutPart, PIECES_MAX};
use crate::index::{ALIGN, End, Span};

/// The maximum number of windows to try to clear in one pass, the cheapest first. A guess.
const WINDOWS_MAX: usize = 8;

/// Neighbouring gaps to join, and the blocks between them.
struct GapRun {
    blocks: Vec<ModelBlock>,
    bytes: u64,
    /// For each direction, down and up: `true` if all blocks may slide without too many copies.
    ways: [bool; 2],
}

pub(super) fn plan(draft: &mut Draft, size: u64) {
    // Usually one pass is enough.
    for _ in 0..draft.passes {
        let before = draft.largest();
        pass(draft, size);
        if draft.largest() == before {
            return;
        }
    }
}

fn pass(draft: &mut Draft, size: u64) {
    let parts = draft.model.parts();
    let free = parts.iter().filter(|part| part.hold.is_none());
    let size = size.min(free.map(|part| part.span.size).sum());
    if draft.largest() >= size {
        return;
    }
    let reach = sections(draft, &parts).map(free_bytes).max().unwrap_or(0);
    if size > reach && clear_a_window(draft, &parts, size, u64::MAX) {
        return;
    }
    if draft.largest() >= reach {
        return grow(draft);
    }
    let size = size.min(reach);
    let Some(run) = cheapest_run(draft, &parts, size) else { return grow(draft) };
    if !clear_a_window(draft, &parts, size, run.bytes) {
        slide(draft, &run);
    }
}

/// Clears the cheapest window that can be cleared for at most this many bytes, as far as the budget
/// allows. Returns `true` if there is one.
fn clear_a_window(draft: &mut Draft, parts: &[LayoutPart], size: u64, bytes_max: u64) -> bool {
    let spared = draft.model.largest();
    for (_, window) in windows(draft, parts, size, bytes_max) {
        let moves = draft.moves.len();
        let mut touching = draft.model.touching(window);
        touching.sort_by_key(|block| std::cmp::Reverse(block.span.size));
        let done = touching.into_iter().all(|block| {
            let place = draft.place(block, window, spared);
            place.inspect(|&(to, _)| draft.relocate(block, to)).is_some()
        });
        if !done {
            draft.undo(moves);
            continue;
        }
        while draft.bytes > draft.budget {
            draft.undo(draft.moves.len() - 1);
        }
        return true;
    }
    false
}

/// Returns the cheapest windows, each with the bytes of the blocks that touch it; of equal ones the
/// highest first.
fn windows(draft: &Draft, parts: &[LayoutPart], size: u64, bytes_max: u64) -> Vec<(u64, Span)> {
    // Sums before each part: the bytes of blocks, and the number of blocks that stay.
    let mut sums = Vec::with_capacity(parts.len() + 1);
    let mut sum = (0, 0);
    for &part in parts {
        sums.push(sum);
        if let Some(hold) = part.hold {
            let stays = !draft.is_movable(ModelBlock { span: part.span, hold });
            sum = (sum.0 + part.span.size, sum.1 + usize::from(stays));
        }
    }
    sums.push(sum);
    let end = parts.last().map_or(0, |part| part.span.end());
    let mut windows = Vec::new();
    for part in parts.iter().filter(|part| part.hold.is_none()) {
        let starts = [Some(part.span.offset), part.span.end().checked_sub(size)];
        for offset in starts.into_iter().flatten() {
            let span = Span { offset, size };
            if offset.checked_add(size).is_none_or(|window_end| window_end > end) {
                continue;
            }
            let first = parts.partition_point(|part| part.span.end() <= span.offset);
            let last = parts.partition_point(|part| part.span.offset < span.end());
            let bytes = sums[last].0 - sums[first].0;
            if sums[last].1 == sums[first].1 && bytes <= bytes_max {
                windows.push((bytes, span));
            }
        }
    }
    windows.sort_by_key(|&(bytes, span)| (bytes, std::cmp::Reverse(span.offset)));
    windows.dedup_by_key(|(_, span)| span.offset);
    windows.truncate(WINDOWS_MAX);
    windows
}

/// Moves a block next to the largest free span into a hole elsewhere.
fn grow(draft: &mut Draft) {
    let Some(span) = draft.model.largest() else { return };
    let neighbours = [draft.model.before(span.offset), draft.model.after(span.end())];
    for block in neighbours.into_iter().flatten() {
        if !draft.is_movable(block) || block.span.size > draft.left() {
            continue;
        }
        let offset = span.offset.min(block.span.offset);
        let end = span.end().max(block.span.end());
        let cleared = Span { offset, size: end - offset };
        if let Some((to, _)) = draft.place(block, cleared, None) {
            return draft.relocate(block, to);
        }
    }
}

/// Returns the parts between blocks that do not slide.
fn sections<'a>(
    draft: &'a Draft,
    parts: &'a [LayoutPart],
) -> impl Iterator<Item = &'a [LayoutPart]> {
    parts.split(move |part| match part.hold {
        None => false,
        Some(hold) => {
            let block = ModelBlock { span: part.span, hold };
            let aligned = matches!(hold, Hold::Moves { align, .. } if align > ALIGN);
            aligned || !draft.is_movable(block)
        }
    })
}

fn free_bytes(section: &[LayoutPart]) -> u64 {
    section.iter().filter(|part| part.hold.is_none()).map(|part| part.span.size).sum()
}

/// Returns the neighbouring gaps of at least this many bytes in total with the fewest bytes between
/// them. O(parts).
fn cheapest_run(draft: &Draft, parts: &[LayoutPart], size: u64) -> Option<GapRun> {
    let mut best: Option<(u64, &[LayoutPart], [bool; 2])> = None;
    for section in sections(draft, parts) {
        // The parts `[first, last]` of the section, from a gap to a gap.
        let (mut first, mut free, mut moved) = (0, 0, 0);
        let mut tallest = Tallest::default();
        for (last, part) in section.iter().enumerate() {
            if part.hold.is_some() {
                moved += part.span.size;
                tallest.add(last, part.span.size);
                continue;
            }
            free += part.span.size;
            while free >= size {
                let gap = section[first];
                let starts_with_gap = gap.hold.is_none();
                let cheapest = best.as_ref().is_none_or(|(bytes, ..)| moved <= *bytes);
                if starts_with_gap && cheapest {
                    let ways = ways([gap, *part], tallest.of_those_from(first));
                    if ways != [false; 2] {
                        best = Some((moved, &section[first..=last], ways));
                    }
                }
                if starts_with_gap {
                    free -= gap.span.size;
                } else {
                    moved -= gap.span.size;
                }
                first += 1;
            }
        }
    }
    let (bytes, run, ways) = best?;
    let blocks =
        run.iter().filter_map(|part| Some(ModelBlock { span: part.span, hold: part.hold? }));
    Some(GapRun { blocks: blocks.collect(), bytes, ways })
}

/// The largest block of a sliding range of parts. Each block is added and removed once.
#[derive(Default)]
struct Tallest {
    /// Place and size of the blocks that are larger than every later block, so sizes decrease.
    blocks: VecDeque<(usize, u64)>,
}

impl Tallest {
    fn add(&mut self, at: usize, size: u64) {
        while self.blocks.back().is_some_and(|&(_, last)| last <= size) {
            self.blocks.pop_back();
        }
        self.blocks.push_back((at, size));
    }

    /// Returns the size of the largest block from this place on; 0 if there is none.
    fn of_those_from(&mut self, first: usize) -> u64 {
        while self.blocks.front().is_some_and(|&(at, _)| at < first) {
            self.blocks.pop_front();
        }
        self.blocks.front().map_or(0, |&(_, size)| size)
    }
}

/// Returns `true`, per direction, if all blocks of a run, up to the largest, can slide: down into
/// the first gap, and up into the last. The gap grows on the way.
fn ways(ends: [LayoutPart; 2], largest: u64) -> [bool; 2] {
    ends.map(|gap| gap.span.size.saturating_mul(PIECES_MAX) >= largest)
}

/// Slides the blocks of a run away from one point, to both sides.
fn slide(draft: &mut Draft, run: &GapRun) {
    let (down, up) = run.blocks.split_at(match run.ways {
        [true, true] => parting(&run.blocks),
        [true, false] => run.blocks.len(),
        [false, _] => 0,
    });
    for &block in down {
        let Some(gap) = draft.model.gap_below(block.span.offset) else { return };
        if block.span.size > draft.left() {
            return;
        }
        draft.relocate(block, gap.offset);
    }
    for &block in up.iter().rev() {
        let Some(gap) = draft.model.gap_above(block.span.end()) else { return };
        if block.span.size > draft.left() {
            return;
        }
        draft.relocate(block, gap.end() - block.span.size);
    }
}

/// Returns the number of blocks that slide down, so that the fewest bytes leave their end.
fn parting(blocks: &[ModelBlock]) -> usize {
    let is_high = |block: &ModelBlock| matches!(block.hold, Hold::Moves { end: End::High, .. });
    let low = blocks.iter().filter(|block| !is_high(block));
    let mut astray = low.map(|block| block.span.size).sum::<u64>();
    let (mut best, mut parting) = (astray, 0);
    for (nth, block) in blocks.iter().enumerate() {
        if is_high(block) {
            astray += block.span.size;
        } else {
            astray -= block.span.size;
        }
        if astray <= best {
            (best, parting) = (astray, nth + 1);
        }
    }
    parting
}

#[cfg(all(test, not(lowtide_loom)))]
mod tests {
    use super::*;
    use crate::tests::Chance;

    /// Regression test: each range was walked for its largest block, 9 billion steps for 100,000
    /// blocks.
    #[test]
    fn the_largest_block_of_a_stretch_was_looked_for_in_all_of_it() {
        let seed = 0x51ED_270B;
        println!("seed {seed:#x}");
        let mut chance = Chance(seed);
        let sizes: Vec<u64> = (0..2000).map(|_| 1 + chance.below(50)).collect();
        let (mut tallest, mut first) = (Tallest::default(), 0);
        for (at, &size) in sizes.iter().enumerate() {
            tallest.add(at, size);
            for _ in 0..chance.below(3) {
                first = (first + 1).min(at + 1);
                let expected = sizes[first..=at].iter().copied().max().unwrap_or(0);
                assert_eq!(tallest.of_those_from(first), expected, "from {first} to {at}");
            }
        }
        assert!(tallest.blocks.len() <= 50, "one for each size at most");
    }
}
