//! What two allocators in use elsewhere would make of a problem: GGML's graph allocator and ONNX
//! Runtime's memory pattern, written from their sources as the online allocators that they are.
//!
//! Buffers are allocated at their first steps and freed at their ends, frees first. They know no
//! gaps, windows and fixed offsets.
//!
//! Invariant: the peaks are those of the originals for one buffer type, one block without a
//! limit of size (or GGML's 16 segments), and alignments of 1.

use lowtide::device::plan::Problem;

/// Buffers in the order of events: at each step the frees, then the allocations as given.
fn events(problem: &Problem) -> Vec<(i64, bool, usize)> {
    let mut events = Vec::new();
    for (at, demand) in problem.demands().iter().enumerate() {
        if !demand.live.is_empty() && !demand.size.is_zero() {
            events.push((demand.live.start, true, at));
            events.push((demand.live.end, false, at));
        }
    }
    events.sort_unstable();
    events
}

/// `ggml-alloc.c`: free blocks in the order of offsets, the last of which reaches to the end of the
/// address space; best fit among all but that, the later one of equal ones.
pub(crate) fn ggml(problem: &Problem) -> u64 {
    let mut free: Vec<(u64, u64)> = vec![(0, u64::MAX / 2)];
    let mut offsets = vec![0; problem.demands().len()];
    let mut peak = 0;
    for (_, begins, at) in events(problem) {
        let size = problem.demands()[at].size.get();
        if begins {
            let inner = &free[..free.len() - 1];
            let fitting = inner.iter().enumerate().filter(|(_, block)| block.1 >= size);
            let best = fitting.rev().min_by_key(|(_, block)| block.1).map(|(which, _)| which);
            let which = best.unwrap_or(free.len() - 1);
            offsets[at] = free[which].0;
            free[which].0 += size;
            free[which].1 -= size;
            if free[which].1 == 0 {
                free.remove(which);
            }
            peak = peak.max(offsets[at] + size);
        } else {
            let which = free.partition_point(|block| block.0 < offsets[at]);
            free.insert(which, (offsets[at], size));
            if which + 1 < free.len() && free[which].0 + free[which].1 == free[which + 1].0 {
                free[which].1 += free.remove(which + 1).1;
            }
            if which > 0 && free[which - 1].0 + free[which - 1].1 == free[which].0 {
                free[which - 1].1 += free.remove(which).1;
            }
        }
    }
    peak
}

/// GGML's segment: what is free of it, as (offset, size) in order, and how far it was used.
#[derive(Default)]
struct Segment {
    free: Vec<(u64, u64)>,
    used: u64,
}

/// The same for segments of at most `limit`: the sum of what each was used of. `None` where there
/// would be more than 256 free blocks, at which the process ends. The quirk is GGML's: the last
/// segment with a block that fits wins, however well an earlier one fits.
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

/// `mem_pattern_planner.h`: the gap that wastes least, the first one of equal ones; what lies
/// between the last block and the peak so far is a gap as well. Events come as in a trace.
pub(crate) fn onnx_runtime(problem: &Problem) -> u64 {
    let mut blocks: Vec<(u64, u64, usize)> = Vec::new();
    let mut peak = 0;
    for (_, begins, at) in events(problem) {
        let size = problem.demands()[at].size.get();
        if !begins {
            blocks.retain(|block| block.2 != at);
            continue;
        }
        let (mut current, mut waste, mut best) = (0, u64::MAX, None);
        for block in &blocks {
            if block.0 >= current {
                let gap = block.0 - current;
                if gap >= size && gap - size < waste {
                    (waste, best) = (gap - size, Some(current));
                }
            }
            current = current.max(block.1);
        }
        if current < peak && peak - current >= size && peak - current - size < waste {
            best = Some(current);
        }
        let offset = best.unwrap_or(current);
        let which = blocks.partition_point(|block| block.0 < offset);
        blocks.insert(which, (offset, offset + size, at));
        peak = peak.max(offset + size);
    }
    peak
}
