//! The shape of each piece of memory over time: the bytes of it that are needed at each step.
//!
//! Buffers that share memory form one shape, which is live while any of them is. This module places
//! nothing. No other item is placed between two buffers of one shape that are live at once: the
//! need at a step is one window.
//!
//! Invariants: the pieces of a shape are in time order and do not overlap; every buffer with memory
//! is in exactly one shape.

use std::collections::BTreeMap;
use std::ops::Range;

use super::error::PlanError;
use super::problem::{BufferId, Demand, Problem};

/// A window of a shape, needed at the steps of a span.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ShapeNeed {
    pub(super) first: i64,
    pub(super) end: i64,
    pub(super) low: u64,
    pub(super) high: u64,
}

/// Memory that is placed as one.
#[derive(Clone, Copy, Debug)]
pub(super) struct Shape {
    /// The buffer whose offset is the shape's.
    pub(super) root: BufferId,
    /// A multiple of every buffer's alignment.
    pub(super) align: u64,
    pub(super) fixed: Option<u64>,
    /// The start of its needs in the list of all; they end at the next one's start.
    from: usize,
}

/// All shapes of a problem.
#[derive(Clone, Debug, Default)]
pub(super) struct Shapes {
    pub(super) list: Vec<Shape>,
    needs: Vec<ShapeNeed>,
}

impl Shapes {
    /// The needs of the shape with this number.
    pub(super) fn needs(&self, at: usize) -> &[ShapeNeed] {
        let end = self.list.get(at + 1).map_or(self.needs.len(), |next| next.from);
        self.list.get(at).map_or(&[], |shape| &self.needs[shape.from..end])
    }

    /// Returns the end of the highest window of a shape.
    pub(super) fn size(&self, at: usize) -> u64 {
        self.needs(at).iter().map(|need| need.high).max().unwrap_or(0)
    }

    /// The most bytes that are needed at one step, alignments not looked at. O(n log n).
    pub(super) fn live_most(&self) -> u64 {
        let needs = self.needs.iter();
        most_live(needs.map(|need| (need.first, need.end, need.high - need.low)))
    }

    /// Returns `true` if two shapes are ever live at once, ignoring gaps.
    pub(super) fn meet(&self, one: usize, other: usize) -> bool {
        let span = |at: usize| {
            let needs = self.needs(at);
            needs.first().zip(needs.last()).map(|(first, last)| (first.first, last.end))
        };
        let spans = span(one).zip(span(other));
        spans.is_some_and(|((from, to), (first, end))| from < end && first < to)
    }

    /// Builds the shapes in the order of their roots, external ones separately.
    ///
    /// # Errors
    /// [`PlanError`] if buffers cannot share memory as requested.
    pub(super) fn of(problem: &Problem) -> Result<Self, PlanError> {
        let span = problem.span();
        let mut shapes = Self::default();
        let sharing = Sharing::of(problem);
        for id in problem.ids() {
            let demand = &problem.demands()[id.index()];
            if problem.unions.over(id.0).is_some() || problem.is_external(id) {
                continue;
            }
            let from = shapes.needs.len();
            let shape = Shape { root: id, align: demand.align, fixed: demand.offset, from };
            let members = sharing.members(id);
            if members.len() < 2 {
                own_needs(demand, &problem.held(demand, &span), &mut shapes.needs);
                shapes.list.push(shape);
            } else {
                let shape = joined(problem, shape, members)?;
                shared_needs(problem, &span, &sharing, members, &mut shapes.needs)?;
                shapes.list.push(shape);
            }
        }
        Ok(shapes)
    }
}

/// The needs of a buffer by itself.
fn own_needs(demand: &Demand, held: &Range<i64>, needs: &mut Vec<ShapeNeed>) {
    let mut push = |first: i64, end: i64, window: &Range<u64>| {
        if first < end && !window.is_empty() {
            needs.push(ShapeNeed { first, end, low: window.start, high: window.end });
        }
    };
    let whole = 0..demand.size.get();
    let mut at = held.start;
    for gap in &demand.gaps {
        push(at, gap.span.start, &whole);
        if let Some(window) = &gap.window {
            push(gap.span.start, gap.span.end, window);
        }
        at = gap.span.end;
    }
    push(at, held.end, &whole);
}

/// Buffers by the root whose memory they share.
struct Sharing {
    /// Root and member; only if any memory is shared.
    pairs: Vec<(u32, u32)>,
    /// For each buffer: the buffer that holds its contents (for a view, its base).
    contents: Vec<u32>,
}

impl Sharing {
    fn of(problem: &Problem) -> Self {
        if problem.unions.is_trivial() {
            return Self { pairs: Vec::new(), contents: Vec::new() };
        }
        let mut pairs: Vec<_> =
            problem.ids().map(|id| (problem.unions.root(id.0).0, id.0)).collect();
        pairs.sort_unstable();
        Self { pairs, contents: contents(problem) }
    }

    fn members(&self, root: BufferId) -> &[(u32, u32)] {
        let from = self.pairs.partition_point(|pair| pair.0 < root.0);
        let count = self.pairs[from..].partition_point(|pair| pair.0 == root.0);
        &self.pairs[from..from + count]
    }
}

/// Returns the buffer that holds each buffer's contents: for a view, its final base. O(n): each
/// walk ends at a known result.
fn contents(problem: &Problem) -> Vec<u32> {
    const UNKNOWN: u32 = u32::MAX;
    let mut contents = vec![UNKNOWN; problem.demands().len()];
    let mut walked = Vec::new();
    for id in problem.ids() {
        let mut at = id.0;
        while contents[at as usize] == UNKNOWN {
            walked.push(at);
            match problem.unions.over(at) {
                Some(over) if !problem.unions.replaces(at) => at = over,
                _ => contents[at as usize] = at,
            }
        }
        let content = contents[at as usize];
        walked.drain(..).for_each(|at| contents[at as usize] = content);
    }
    contents
}

/// The alignment and the fixed offset of all members together.
fn joined(problem: &Problem, root: Shape, members: &[(u32, u32)]) -> Result<Shape, PlanError> {
    let mut joined = root;
    for &(_, member) in members {
        let (demand, at) = (&problem.demands()[member as usize], problem.unions.root(member).1);
        let wrong = || PlanError::CannotShare {
            name: demand.name.clone(),
            over: problem.demands()[root.root.index()].name.clone(),
            at,
        };
        let fixed = demand.offset.map(|offset| offset.checked_sub(at).ok_or_else(wrong));
        let fixed = fixed.transpose()?;
        if at % demand.align != 0 || fixed.is_some_and(|own| joined.fixed.unwrap_or(own) != own) {
            return Err(wrong());
        }
        joined.fixed = joined.fixed.or(fixed);
        joined.align = multiple(joined.align, demand.align).ok_or_else(wrong)?;
    }
    match joined.fixed {
        Some(offset) if offset % joined.align != 0 => {
            let name = problem.demands()[root.root.index()].name.clone();
            Err(PlanError::Misaligned { name, offset, align: joined.align })
        }
        _ => Ok(joined),
    }
}

/// Returns the least common multiple if it is one of both, whose sum is limited, or so small that as
/// many as there are buffers are within the limit.
fn multiple(a: u64, b: u64) -> Option<u64> {
    lcm(a, b).filter(|of| [a, b].contains(of) || *of <= super::problem::TOTAL_MAX >> 32)
}

/// Returns the least common multiple of two numbers above zero; `None` if it exceeds 64 bits.
pub(super) const fn lcm(a: u64, b: u64) -> Option<u64> {
    (a / gcd(a, b)).checked_mul(b)
}

/// Returns the most bytes of spans, each from a start to an end, at one time.
pub(super) fn most_live<T: Ord>(spans: impl Iterator<Item = (T, T, u64)>) -> u64 {
    // Ends come before starts: they take away.
    let events = spans.flat_map(|(from, to, bytes)| [(from, true, bytes), (to, false, bytes)]);
    let mut events: Vec<_> = events.collect();
    events.sort_unstable();
    let (mut live, mut most) = (0, 0);
    for (_, begins, bytes) in events {
        live = if begins { live + bytes } else { live - bytes };
        most = most.max(live);
    }
    most
}

/// The greatest common divisor; that of 0 and any number is the number.
pub(super) const fn gcd(mut a: u64, mut b: u64) -> u64 {
    while b != 0 {
        (a, b) = (b, a % b);
    }
    a
}

/// A member of a shape, over time.
struct Member<'a> {
    id: u32,
    demand: &'a Demand,
    held: Range<i64>,
    window: Range<u64>,
    /// The buffer that holds its contents.
    content: u32,
    /// The start of that buffer's lifetime.
    written: i64,
    /// The contents that it overwrites.
    replaces: Option<u32>,
}

/// The needs of members together: at each step the window around all that are live.
fn shared_needs(
    problem: &Problem,
    span: &Range<i64>,
    sharing: &Sharing,
    members: &[(u32, u32)],
    needs: &mut Vec<ShapeNeed>,
) -> Result<(), PlanError> {
    let member = |member: &(u32, u32)| member_of(problem, span, sharing, member.1);
    let mut members: Vec<Member<'_>> = members.iter().map(member).collect();
    members.retain(|member| !member.held.is_empty() && !member.window.is_empty());
    members.sort_by_key(|member| (member.held.start, member.id));
    let mut times: Vec<i64> = members.iter().flat_map(|m| [m.held.start, m.held.end]).collect();
    times.sort_unstable();
    times.dedup();
    let from = needs.len();
    // Live buffers by the holder of their contents: only pairs with different holders need a check.
    let (mut coming, mut live) = (0, BTreeMap::<u32, Vec<usize>>::new());
    for pair in times.windows(2) {
        let (first, end) = (pair[0], pair[1]);
        live.retain(|_, same| {
            same.retain(|at| members[*at].held.end > first);
            !same.is_empty()
        });
        while let Some(member) = members.get(coming).filter(|m| m.held.start <= first) {
            let others = live.iter().filter(|(content, _)| **content != member.content);
            for &other in others.flat_map(|(_, same)| same) {
                check_reuse(&members[other], member)?;
            }
            live.entry(member.content).or_default().push(coming);
            coming += 1;
        }
        let windows = live.values().flatten().map(|at| &members[*at].window);
        let around = windows.map(|window| (window.start, window.end));
        let around = around.reduce(|a, b| (a.0.min(b.0), a.1.max(b.1)));
        let Some((low, high)) = around else { continue };
        match needs[from..].last_mut() {
            Some(last) if last.end == first && (last.low, last.high) == (low, high) => {
                last.end = end
            }
            _ => needs.push(ShapeNeed { first, end, low, high }),
        }
    }
    Ok(())
}

fn member_of<'a>(
    problem: &'a Problem,
    span: &Range<i64>,
    sharing: &Sharing,
    id: u32,
) -> Member<'a> {
    let content = |id: u32| sharing.contents[id as usize];
    let demand = &problem.demands()[id as usize];
    let low = problem.unions.root(id).1;
    let own = content(id);
    Member {
        id,
        demand,
        held: problem.held(demand, span),
        window: low..low + demand.size.get(),
        content: own,
        written: problem.held(&problem.demands()[own as usize], span).start,
        replaces: problem.unions.over(own).map(content),
    }
}

/// Checks two members with different contents that are live at once, the earlier one first: either
/// their windows are disjoint, or one overwrites the other at this step. Views of either may begin
/// then too.
fn check_reuse(first: &Member<'_>, second: &Member<'_>) -> Result<(), PlanError> {
    let apart = first.window.end <= second.window.start || second.window.end <= first.window.start;
    let overwrites = |child: &Member<'_>, parent: &Member<'_>| {
        child.replaces == Some(parent.content)
            && parent.held.end - 1 == child.written
            && child.held.start >= child.written
    };
    let overwrites = overwrites(second, first) || overwrites(first, second);
    if apart || overwrites {
        return Ok(());
    }
    // The overwriting buffer is named first, if it is one of the two.
    let (name, over) =
        if first.replaces == Some(second.content) { (first, second) } else { (second, first) };
    Err(PlanError::ReuseBeforeLastUse {
        name: name.demand.name.clone(),
        first: name.held.start,
        over: over.demand.name.clone(),
        end: over.held.end,
    })
}

// The sharing of memory: a union-find forest with one tree per piece of memory.
//
// It knows numbers and distances, but no sizes and no times. Paths are halved on each walk while
// the forest is built.
//
// Invariant: following `over` from any buffer ends at a root, whose distance is the sum of those
// on the way.

/// The forest of shared memory.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Unions {
    links: Vec<Link>,
}

/// One buffer's place in the forest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Link {
    /// The buffer whose memory it shares; itself if none.
    over: u32,
    /// `true` if it overwrites that buffer, `false` if it is a view of it.
    replaces: bool,
    /// A buffer nearer to the root, and the distance from its start.
    up: u32,
    at: u64,
}

impl Unions {
    /// Adds a buffer that shares no memory.
    pub(super) fn add(&mut self) {
        // More than 2^32 are refused before they come here.
        let own = u32::try_from(self.links.len()).unwrap_or(u32::MAX);
        self.links.push(Link { over: own, replaces: false, up: own, at: 0 });
    }

    /// Joins a root to another buffer; `false` if it is not a root, or the buffer is in its own
    /// tree.
    pub(super) fn join(&mut self, child: u32, over: u32, at: u64, replaces: bool) -> bool {
        let root = self.root_halving(over);
        if self.links[child as usize].over != child || root == child {
            return false;
        }
        self.links[child as usize] = Link { over, replaces, up: over, at };
        true
    }

    fn root_halving(&mut self, of: u32) -> u32 {
        let mut node = of as usize;
        loop {
            let link = self.links[node];
            let up = self.links[link.up as usize];
            if up.up == link.up {
                return link.up;
            }
            self.links[node] = Link { up: up.up, at: link.at + up.at, ..link };
            node = up.up as usize;
        }
    }

    /// The buffer whose memory this one shares in the end, and how far beyond its start.
    pub(super) fn root(&self, of: u32) -> (u32, u64) {
        let (mut node, mut at) = (of, 0);
        loop {
            let link = self.links[node as usize];
            if link.up == node {
                return (node, at);
            }
            (node, at) = (link.up, at + link.at);
        }
    }

    /// Whom it was said to lie over.
    pub(super) fn over(&self, of: u32) -> Option<u32> {
        let over = self.links[of as usize].over;
        (over != of).then_some(over)
    }

    /// Returns `true` if it overwrites the buffer whose memory it shares.
    pub(super) fn replaces(&self, of: u32) -> bool {
        self.links[of as usize].replaces
    }

    /// Returns `true` if no memory is shared.
    pub(super) fn is_trivial(&self) -> bool {
        self.links.iter().zip(0..).all(|(link, own)| link.over == own)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use lowtide_core::bytes::ByteSize;

    fn buffer(problem: &mut Problem, name: &str, size: u64, live: Range<i64>) -> BufferId {
        problem.add(Demand::new(name, ByteSize::new(size), live)).expect("a plain buffer")
    }

    fn needs(problem: &Problem) -> Vec<(i64, i64, u64, u64)> {
        let shapes = Shapes::of(problem).expect("it can share");
        let all = (0..shapes.list.len()).flat_map(|at| shapes.needs(at).to_vec());
        all.map(|need| (need.first, need.end, need.low, need.high)).collect()
    }

    #[test]
    fn the_tail_of_what_is_overwritten_in_place_is_free_afterwards() {
        let mut problem = Problem::new();
        let parent = buffer(&mut problem, "parent", 24, 0..3);
        let child = buffer(&mut problem, "child", 8, 2..5);
        problem.reuse(child, parent).expect("it is smaller");
        assert_eq!(needs(&problem), [(0, 3, 0, 24), (3, 5, 0, 8)]);
    }

    #[test]
    fn a_view_keeps_its_part_and_no_more_once_the_rest_was_read() {
        let mut problem = Problem::new();
        let whole = buffer(&mut problem, "whole", 24, 0..2);
        let view = buffer(&mut problem, "view", 8, 1..4);
        problem.view(view, whole, 16).expect("it lies within");
        assert_eq!(needs(&problem), [(0, 2, 0, 24), (2, 4, 16, 24)]);
    }

    #[test]
    fn in_place_before_the_last_use_is_refused_by_name_views_included() {
        for (view_end, legal) in [(3, true), (4, false)] {
            let mut problem = Problem::new();
            let parent = buffer(&mut problem, "parent", 24, 0..2);
            let view = buffer(&mut problem, "view", 24, 1..view_end);
            let child = buffer(&mut problem, "child", 8, 2..5);
            problem.view(view, parent, 0).expect("it lies within");
            problem.reuse(child, parent).expect("it is smaller");
            let found = Shapes::of(&problem);
            assert_eq!(found.is_ok(), legal);
            if let Err(error) = found {
                let expected = "child: cannot overwrite view at step 2: it is live until 4";
                assert_eq!(error.to_string(), expected);
            }
        }
    }

    #[test]
    fn a_view_of_what_overwrites_may_begin_with_it_and_not_before() {
        for (begins, legal) in [(2, true), (3, true), (1, false)] {
            let mut problem = Problem::new();
            let parent = buffer(&mut problem, "parent", 24, 0..3);
            let child = buffer(&mut problem, "child", 24, 2..4);
            let view = buffer(&mut problem, "view", 8, begins..6);
            problem.reuse(child, parent).expect("it is as large");
            problem.view(view, child, 8).expect("it lies within");
            assert_eq!(Shapes::of(&problem).is_ok(), legal, "from step {begins}");
        }
    }

    #[test]
    fn two_cannot_overwrite_the_same_buffer() {
        let mut problem = Problem::new();
        let parent = buffer(&mut problem, "parent", 24, 0..3);
        for name in ["one", "two"] {
            let child = buffer(&mut problem, name, 8, 2..5);
            problem.reuse(child, parent).expect("checked when it is solved");
        }
        assert!(matches!(Shapes::of(&problem), Err(PlanError::ReuseBeforeLastUse { .. })));
    }

    #[test]
    fn an_output_is_never_overwritten() {
        let mut problem = Problem::new();
        let parent = super::super::problem::Role::Output;
        let parent = Demand { role: parent, ..Demand::new("parent", ByteSize::new(8), 0..3) };
        let parent = problem.add(parent).expect("a plain buffer");
        let child = buffer(&mut problem, "child", 8, 2..5);
        problem.reuse(child, parent).expect("checked when it is solved");
        assert!(matches!(Shapes::of(&problem), Err(PlanError::ReuseBeforeLastUse { .. })));
    }

    #[test]
    fn inputs_are_there_from_the_start_and_outputs_until_the_end() {
        let mut problem = Problem::new();
        buffer(&mut problem, "inner", 4, 0..9);
        for role in [Role::Input, Role::Output, Role::Through, Role::External] {
            let demand = Demand::new("other", ByteSize::new(8), 3..5);
            problem.add(Demand { role, ..demand }).expect("a plain buffer");
        }
        use super::super::problem::Role;
        assert_eq!(needs(&problem), [(0, 9, 0, 4), (0, 5, 0, 8), (3, 9, 0, 8), (0, 9, 0, 8)]);
    }
}
