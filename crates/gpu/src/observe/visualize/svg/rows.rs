//! Selects the parts of an arena's address space to draw, and their scale.
//!
//! Every row shows the same number of bytes, a power of two. Rows without committed memory are left
//! out, so that a few hundred MiB in a range of 512 GiB fill the picture.
//!
//! Invariant: at most `ROWS_MAX` rows, at most `SEGMENTS_MAX` segments.

use super::super::SegmentMap;

/// The maximum number of rows of all segments together.
pub(super) const ROWS_MAX: usize = 24;
/// The maximum number of segments that are drawn.
pub(super) const SEGMENTS_MAX: usize = 8;
/// The minimum number of bytes that a row shows: 16 MiB.
const ROW_MIN: u64 = 16 << 20;

const _: () = assert!(SEGMENTS_MAX <= ROWS_MAX, "on the largest scale each segment is one row");

/// Returns the number of bytes per row: the smallest power of two with which all rows fit.
pub(super) fn row_bytes(segments: &[SegmentMap]) -> u64 {
    let mut row = ROW_MIN;
    // At 2^63 bytes per row, each segment has at most two rows; no arena has so many addresses.
    while row < 1 << 62 {
        let count: usize = segments.iter().map(|segment| rows(segment, row).len()).sum();
        if count <= ROWS_MAX {
            break;
        }
        row *= 2;
    }
    row
}

/// Returns the numbers of a segment's rows with committed memory, at most as many as are drawn.
pub(super) fn rows(segment: &SegmentMap, row: u64) -> Vec<u64> {
    let mut rows: Vec<u64> = Vec::new();
    for (start, end) in segment.stretches() {
        let after = rows.last().map_or(0, |last| last + 1);
        let (first, last) = ((start / row).max(after), (end - 1) / row);
        let room = (ROWS_MAX + 1).saturating_sub(rows.len());
        rows.extend((first..=last).take(room));
    }
    rows
}
