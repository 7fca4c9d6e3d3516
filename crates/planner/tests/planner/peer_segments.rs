//! A model of GGML's graph allocator with segments of a largest size, written from its source as
//! the online allocator that it is.
//!
//! As `peers`, for one buffer type whose buffers have a largest size.
//!
//! Invariant: the totals are those of the original for alignments of 1, below 256 free blocks.

use lowtide_planner::Problem;

use super::peers::events;

/// GGML's segment: what is free of it, as (offset, size) in order, and how far it was used.
#[derive(Default)]
struct Segment {
    free: Vec<(u64, u64)>,
    used: u64,
}

/// `ggml-alloc.c` for segments of at most `limit`: the sum of what each was used of. `None` where
/// there would be more than 256 free blocks, at which the process ends. The quirk is GGML's: the
/// last segment with a block that fits wins, however well an earlier one fits.
pub(crate) fn ggml_segments(problem: &Problem, limit: u64) -> Option<u64> {
    let mut segments: Vec<Segment> = Vec::new();
    let mut places = vec![(0, 0); problem.demands().len()];
    for (_, begins, at) in events(problem) {
        let size = problem.demands()[at].size.get();
        if begins {
            let (which, block) = ggml_block(&mut segments, size, limit);
            let segment = &mut segments[which];
            places[at] = (which, segment.free[block].0);
            segment.used = segment.used.max(segment.free[block].0 + size);
            segment.free[block].0 += size;
            segment.free[block].1 -= size;
            segment.free.retain(|free| free.1 > 0);
            continue;
        }
        let free = &mut segments[places[at].0].free;
        let offset = places[at].1;
        let mut block = free.partition_point(|free| free.0 < offset);
        free.insert(block, (offset, size));
        if block > 0 && free[block - 1].0 + free[block - 1].1 == offset {
            free[block - 1].1 += free.remove(block).1;
            block -= 1;
        }
        if block + 1 < free.len() && free[block].0 + free[block].1 == free[block + 1].0 {
            free[block].1 += free.remove(block + 1).1;
        }
        if free.len() > 256 {
            return None;
        }
    }
    Some(segments.iter().map(|segment| segment.used).sum())
}

/// Which segment and which free block of it GGML takes.
fn ggml_block(segments: &mut Vec<Segment>, size: u64, limit: u64) -> (usize, usize) {
    let mut best = None;
    for (which, segment) in segments.iter().enumerate() {
        let mut least = u64::MAX;
        for (block, free) in segment.free.iter().enumerate().rev().skip(1).rev() {
            if free.1 >= size && free.1 <= least {
                (best, least) = (Some((which, block)), free.1);
            }
        }
    }
    if let Some(best) = best {
        return best;
    }
    let mut most = i128::MIN;
    for (which, segment) in segments.iter().enumerate() {
        let Some((block, free)) = segment.free.iter().enumerate().next_back() else { continue };
        let reuse = i128::from(segment.used) - i128::from(free.0) - i128::from(size);
        let is_better = most < 0 && reuse > most || reuse >= 0 && reuse < most;
        if free.1 >= size && is_better {
            (best, most) = (Some((which, block)), reuse);
        }
    }
    best.unwrap_or_else(|| {
        let size = if segments.len() == 15 { u64::MAX / 2 } else { size.max(limit) };
        segments.push(Segment { free: vec![(0, size)], used: 0 });
        (segments.len() - 1, 0)
    })
}
