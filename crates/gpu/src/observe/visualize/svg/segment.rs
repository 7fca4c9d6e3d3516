//! One segment of the picture: a heading, its rows, and lines for the parts left out.
//!
//! Invariant: every row of the segment with committed memory is drawn, in address order.

use super::super::{BlockState, GranuleState, SegmentMap, bounds};
use super::rows::rows;
use super::strip::{Bar, Strip};
use super::{LEFT, Page, ROW_WIDTH, escaped, f64_of, grouped, mib, short};
use lowtide_core::bytes::ByteSize;

const BLOCKS_HEIGHT: usize = 24;
const GRANULES_HEIGHT: usize = 5;
const ROW_HEIGHT: usize = 44;

/// The width from which on a gap separates a granule from the next, and a line a block.
const APART_FROM: f64 = 3.0;
const APART: f64 = 1.0;
/// The minimum width of a block with a tooltip.
const SPEAKS_FROM: f64 = 6.0;

/// Part of the segment: a row.
#[derive(Clone, Copy)]
struct Row {
    start: u64,
    end: u64,
}

pub(super) fn draw(page: &mut Page, segment: &SegmentMap, row: u64, granule: ByteSize) {
    heading(page, segment);
    let mut drawn_to = 0;
    for number in rows(segment, row) {
        let start = number * row;
        bare(page, drawn_to, start);
        let part = Row { start, end: (start + row).min(segment.size.get()) };
        draw_row(page, segment, part, row, granule.get().max(1));
        drawn_to = part.end;
    }
    bare(page, drawn_to, segment.size.get());
}

fn heading(page: &mut Page, segment: &SegmentMap) {
    page.y += 44;
    page.text(36, page.y, "name", &escaped(&segment.region));
    let committed = [GranuleState::Active, GranuleState::Idle].map(|state| segment.backed(state));
    let blocks = grouped(&segment.blocks.len().to_string());
    let text = format!(
        "{} committed of {} at {:#x}, {blocks} blocks",
        mib(committed.into_iter().sum()),
        segment.size,
        segment.base
    );
    page.text(36 + 960 + 68, page.y, "muted right", &text);
    page.y += 14;
}

/// Draws a line for addresses that are left out, because no memory is committed there.
fn bare(page: &mut Page, from: u64, to: u64) {
    if from >= to {
        return;
    }
    let (left, y) = (LEFT, page.y + 8);
    let right = LEFT + ROW_WIDTH;
    let text = format!("{} bare", ByteSize::new(to - from));
    page.push(&format!("<path class=\"line\" d=\"M{left} {y}H{}\"/>", right - 130));
    page.text(right, y + 4, "muted right", &text);
    page.y += 26;
}

fn draw_row(page: &mut Page, segment: &SegmentMap, part: Row, row: u64, granule: u64) {
    let (top, beneath) = (page.y, page.y + BLOCKS_HEIGHT + 2);
    page.text(LEFT - 10, top + 16, "muted right", &offset(segment, part.start));
    let width = Strip::new(part.start, part.start + row, ROW_WIDTH).pixel(part.end);
    page.rect("bare", (f64_of(LEFT), top), width, BLOCKS_HEIGHT);
    page.rect("bare", (f64_of(LEFT), beneath), width, GRANULES_HEIGHT);
    let strip = || Strip::new(part.start, part.start + row, ROW_WIDTH);
    let states =
        [(GranuleState::Active, "hole", "active"), (GranuleState::Idle, "idle", "resting")];
    for (state, behind, class) in states {
        let (mut whole, mut each) = (strip(), strip());
        let runs = segment.granules.iter().filter(|run| run.state == state);
        for (start, end) in runs.map(|run| bounds(run.offset, run.size)) {
            let (start, end) = (start.max(part.start), end.min(part.end));
            if start >= end {
                continue;
            }
            whole.add(start, end);
            // If granules are too narrow to be visible, their run is drawn.
            let step = if row / granule <= 240 { granule } else { row };
            let mut at = start;
            while at < end {
                let next = (at / step + 1) * step;
                each.add(at, next.min(end));
                at = next;
            }
        }
        paths(page, behind, &whole.finish(), (top, BLOCKS_HEIGHT), 0.0);
        paths(page, class, &each.finish(), (beneath, GRANULES_HEIGHT), APART);
    }
    for (state, class) in [(BlockState::Live, "live"), (BlockState::Pending, "pending")] {
        blocks(page, segment, (part, row), (state, class));
    }
    page.y += ROW_HEIGHT;
}

/// Returns the offset of a row from the nearer end of its segment, because blocks come from both.
fn offset(segment: &SegmentMap, start: u64) -> String {
    let from_end = segment.size.get().saturating_sub(start);
    if start <= from_end {
        format!("+{}", ByteSize::new(start))
    } else {
        format!("end -{}", ByteSize::new(from_end))
    }
}

/// Draws the blocks of one state in a row.
fn blocks(
    page: &mut Page,
    segment: &SegmentMap,
    (part, row): (Row, u64),
    (state, class): (BlockState, &str),
) {
    let mut strip = Strip::new(part.start, part.start + row, ROW_WIDTH);
    let first = segment.blocks.partition_point(|b| bounds(b.offset, b.size).1 <= part.start);
    let here = segment.blocks[first..].iter().take_while(|b| b.offset.get() < part.end);
    let here: Vec<_> = here.filter(|block| block.state == state).collect();
    for block in &here {
        let (start, end) = bounds(block.offset, block.size);
        strip.add(start, end);
    }
    let (speaking, others): (Vec<_>, Vec<_>) =
        strip.finish().into_iter().partition(|bar| bar.span.is_some() && bar.width >= SPEAKS_FROM);
    paths(page, class, &others, (page.y, BLOCKS_HEIGHT), 0.0);
    let mut ends = String::new();
    for bar in speaking.iter().chain(&others).filter(|bar| bar.width >= APART_FROM) {
        let block = bar.span.and_then(|nth| here.get(nth));
        if block.is_some_and(|block| bounds(block.offset, block.size).1 < part.end) {
            let right = short(f64_of(LEFT) + bar.left + bar.width - APART);
            ends.push_str(&format!("M{right} {}h{APART}v{BLOCKS_HEIGHT}h-{APART}z", page.y));
        }
    }
    for bar in speaking {
        let Some(block) = bar.span.and_then(|nth| here.get(nth)) else { continue };
        let says = format!(
            "{class}: {}, requested {}, at +{} ({:#x})",
            block.size,
            block.requested,
            block.offset.exact(),
            segment.base.saturating_add(block.offset.get())
        );
        let (x, width) = (short(f64_of(LEFT) + bar.left), short(bar.width));
        let size = format!("y=\"{}\" width=\"{width}\" height=\"{BLOCKS_HEIGHT}\"", page.y);
        page.push(&format!(
            "<rect class=\"{class}\" x=\"{x}\" {size}><title>{says}</title></rect>"
        ));
    }
    if !ends.is_empty() {
        page.push(&format!("<path class=\"page\" opacity=\"0.7\" d=\"{ends}\"/>"));
    }
}

/// Draws bars, as one path for each shade.
fn paths(page: &mut Page, class: &str, bars: &[Bar], (y, height): (usize, usize), gap: f64) {
    let mut shades: Vec<f64> = bars.iter().map(|bar| bar.shade).collect();
    shades.sort_unstable_by(f64::total_cmp);
    shades.dedup();
    for shade in shades {
        let mut path = String::new();
        // Shades are eighths, and are compared exactly.
        for bar in bars.iter().filter(|bar| bar.shade.total_cmp(&shade).is_eq()) {
            let apart = if bar.width >= APART_FROM { gap } else { 0.0 };
            let (x, width) = (short(f64_of(LEFT) + bar.left), short(bar.width - apart));
            path.push_str(&format!("M{x} {y}h{width}v{height}h-{width}z"));
        }
        let opacity = if shade < 1.0 { format!(" opacity=\"{shade}\"") } else { String::new() };
        page.push(&format!("<path class=\"{class}\"{opacity} d=\"{path}\"/>"));
    }
}
