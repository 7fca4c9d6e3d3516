//! The least peak of a small problem, found by trying every offset of every buffer.
//!
//! It knows lifetimes, gaps, windows, alignments and fixed offsets, and nothing of how the planner
//! thinks: buffers are placed in the order in which they were added, at any multiple of their
//! alignment, and compared step by step. For some eight buffers of some bytes.
//!
//! Invariant: no offsets without an overlap have a smaller peak.

use lowtide::device::plan::{Demand, Problem};

/// The least peak in bytes.
pub(crate) fn least_peak(problem: &Problem) -> u64 {
    let demands = problem.demands();
    let needs: Vec<Vec<(i64, u64, u64)>> = demands.iter().map(by_step).collect();
    (0..).find(|height| fits(demands, &needs, *height, &mut Vec::new())).expect("some height")
}

/// Each step at which a buffer needs something, and from where to where.
fn by_step(demand: &Demand) -> Vec<(i64, u64, u64)> {
    let at = |step: i64| {
        let gap = demand.gaps.iter().find(|gap| gap.span.contains(&step));
        match gap.map(|gap| gap.window) {
            None => Some((step, 0, demand.size.get())),
            Some(None) => None,
            Some(Some(window)) => Some((step, window.low, window.high)),
        }
    };
    let all = demand.live.clone().filter_map(at);
    all.filter(|(_, low, high)| low < high).collect()
}

fn fits(
    demands: &[Demand],
    needs: &[Vec<(i64, u64, u64)>],
    height: u64,
    offsets: &mut Vec<u64>,
) -> bool {
    let at = offsets.len();
    let Some(demand) = demands.get(at) else { return true };
    let top = needs[at].iter().map(|need| need.2).max().unwrap_or(0);
    let end = (height + 1).saturating_sub(top);
    let tried: Vec<u64> = match demand.offset {
        Some(fixed) => {
            if top == 0 || fixed < end {
                vec![fixed]
            } else {
                Vec::new()
            }
        }
        None if top == 0 => vec![0],
        None => (0..end).filter(|offset| offset % demand.align == 0).collect(),
    };
    tried.into_iter().any(|offset| {
        let apart = (0..at).all(|other| !meet(&needs[at], offset, &needs[other], offsets[other]));
        offsets.push(offset);
        let found = apart && fits(demands, needs, height, offsets);
        offsets.pop();
        found
    })
}

fn meet(one: &[(i64, u64, u64)], at: u64, other: &[(i64, u64, u64)], other_at: u64) -> bool {
    one.iter().any(|(step, low, high)| {
        let beside = other.iter().find(|need| need.0 == *step);
        beside.is_some_and(|need| at + low < other_at + need.2 && other_at + need.1 < at + high)
    })
}
