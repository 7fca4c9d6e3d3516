//! The least peak of a small problem, found by trying every offset of every buffer.
//!
//! It knows lifetimes, gaps, windows, alignments, fixed offsets, roles and shared memory, and
//! nothing of how the planner thinks: pieces of memory are placed in the order in which their first
//! buffers were added, wherever alignments allow, and compared step by step. For some eight buffers
//! of some bytes.
//!
//! Invariant: no offsets without an overlap have a smaller peak.

use std::collections::BTreeMap;
use std::ops::Range;

use lowtide_planner::{Demand, Problem, Role};

use super::random::Share;

/// Memory that is placed as one.
struct Piece {
    /// From where to where something is needed at each step; `0..0` where nothing is.
    needs: Vec<(u64, u64)>,
    /// Of each buffer in it: where in the piece, its alignment, its fixed offset.
    members: Vec<(u64, u64, Option<u64>)>,
}

/// The least peak in bytes.
pub(crate) fn least_peak(problem: &Problem, shares: &[Share]) -> u64 {
    let pieces = pieces(problem, shares);
    let mut heights = live_most(problem, shares)..;
    heights.find(|height| fits(&pieces, *height, &mut Vec::new())).expect("some height")
}

/// The most bytes that are needed at one step.
pub(crate) fn live_most(problem: &Problem, shares: &[Share]) -> u64 {
    let pieces = pieces(problem, shares);
    let steps = pieces.first().map_or(0, |piece| piece.needs.len());
    let at =
        |step: usize| pieces.iter().map(|piece| piece.needs[step].1 - piece.needs[step].0).sum();
    (0..steps).map(at).max().unwrap_or(0)
}

fn pieces(problem: &Problem, shares: &[Share]) -> Vec<Piece> {
    let demands = problem.demands();
    let own = demands.iter().filter(|demand| demand.role != Role::External);
    let own = own.filter(|demand| !demand.live.is_empty());
    let first = own.clone().map(|demand| demand.live.start).min().unwrap_or(0);
    let end = own.map(|demand| demand.live.end).max().unwrap_or(0);
    // What is never live may be held nevertheless, by its role.
    let from = demands.iter().map(|demand| demand.live.start).min().unwrap_or(0).min(first);
    let until = demands.iter().map(|demand| demand.live.end).max().unwrap_or(0).max(end);
    let mut by_root: BTreeMap<usize, Piece> = BTreeMap::new();
    for (own, demand) in demands.iter().enumerate() {
        let (mut root, mut at) = (own, 0);
        while let Some(share) = shares.iter().find(|share| share.child == root) {
            (root, at) = (share.over, at + share.at);
        }
        if demands[root].role == Role::External || demand.role == Role::External {
            continue;
        }
        let steps = usize::try_from(until - from).expect("few steps");
        let empty = || Piece { needs: vec![(0, 0); steps], members: Vec::new() };
        let piece = by_root.entry(root).or_insert_with(empty);
        piece.members.push((at, demand.align, demand.offset));
        for step in held(demand, first..end) {
            let Some((low, high)) = needed(demand, step) else { continue };
            let need = &mut piece.needs[usize::try_from(step - from).expect("few steps")];
            let is_first = need.0 == need.1;
            let before = if is_first { (at + low, at + high) } else { *need };
            *need = (before.0.min(at + low), before.1.max(at + high));
        }
    }
    by_root.into_values().collect()
}

/// The steps at which a buffer has to be there, by its role, where steps are those of `span`.
fn held(demand: &Demand, span: Range<i64>) -> Range<i64> {
    let Range { start, end } = demand.live;
    match demand.role {
        Role::Input => start.min(span.start)..end,
        Role::Output => start..end.max(span.end),
        Role::Through => start.min(span.start)..end.max(span.end),
        _ => start..end,
    }
}

/// Returns the part of a buffer that is needed at a step.
fn needed(demand: &Demand, step: i64) -> Option<(u64, u64)> {
    let gap = demand.gaps.iter().find(|gap| gap.span.contains(&step));
    let window = match gap.map(|gap| gap.window.clone()) {
        None => (0, demand.size.get()),
        Some(None) => return None,
        Some(Some(window)) => (window.start, window.end),
    };
    (window.0 < window.1).then_some(window)
}

fn fits(pieces: &[Piece], height: u64, offsets: &mut Vec<u64>) -> bool {
    let own = offsets.len();
    let Some(piece) = pieces.get(own) else { return true };
    let top = piece.needs.iter().map(|need| need.1).max().unwrap_or(0);
    if top == 0 {
        offsets.push(0);
        let found = fits(pieces, height, offsets);
        offsets.pop();
        return found;
    }
    let may = |offset: &u64| {
        let member = |(at, align, fixed): &(u64, u64, Option<u64>)| {
            let own = offset + at;
            own.is_multiple_of(*align) && fixed.is_none_or(|fixed| fixed == own)
        };
        piece.members.iter().all(member)
    };
    (0..(height + 1).saturating_sub(top)).filter(may).any(|offset| {
        let meets = |other: usize| meet(&piece.needs, offset, &pieces[other].needs, offsets[other]);
        let apart = !(0..own).any(meets);
        offsets.push(offset);
        let found = apart && fits(pieces, height, offsets);
        offsets.pop();
        found
    })
}

fn meet(one: &[(u64, u64)], at: u64, other: &[(u64, u64)], other_at: u64) -> bool {
    one.iter().zip(other).any(|((low, high), (other_low, other_high))| {
        let is_empty = low == high || other_low == other_high;
        !is_empty && at + low < other_at + other_high && other_at + other_low < at + high
    })
}
