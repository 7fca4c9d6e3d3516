//! Models of two allocators in use elsewhere, GGML's graph allocator and ONNX Runtime's memory
//! pattern, written from their sources as the online allocators that they are.
//!
//! Buffers are allocated at their first steps and freed at their ends, frees first. They know no
//! gaps, windows and fixed offsets.
//!
//! Invariant: the peaks are those of the originals for one buffer type, one block without a
//! limit of size, and alignments of 1.

use lowtide_planner::Problem;

/// Buffers in the order of events: at each step the frees, then the allocations as given.
pub(crate) fn events(problem: &Problem) -> Vec<(i64, bool, usize)> {
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
            release(&mut free, offsets[at], size);
        }
    }
    peak
}

fn release(free: &mut Vec<(u64, u64)>, offset: u64, size: u64) {
    let which = free.partition_point(|block| block.0 < offset);
    free.insert(which, (offset, size));
    if which + 1 < free.len() && free[which].0 + free[which].1 == free[which + 1].0 {
        free[which].1 += free.remove(which + 1).1;
    }
    if which > 0 && free[which - 1].0 + free[which - 1].1 == free[which].0 {
        free[which - 1].1 += free.remove(which).1;
    }
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
