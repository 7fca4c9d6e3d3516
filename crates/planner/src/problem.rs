//! The input of the planner: buffers with sizes and lifetimes, and the sharing of memory.
//!
//! It validates its input and solves nothing. `shape` combines buffers that share memory.
//!
//! Invariants: every buffer's gaps lie in its lifetime, in order, and do not overlap; the sum of
//! the sizes with their alignments and all fixed offsets is at most [`TOTAL_MAX`].

use std::ops::Range;

use lowtide_core::bytes::ByteSize;

use super::error::PlanError;
use super::shape::Unions;

/// The most that all buffers may have together, with alignments: sums and differences of offsets
/// then stay within 63 bits.
pub(super) const TOTAL_MAX: u64 = u64::MAX >> 2;

/// Buffers to plan, in the order of addition.
///
/// ```
/// use lowtide_planner::ByteSize;
/// use lowtide_planner::{Demand, Problem};
///
/// let mut problem = Problem::new();
/// let weights = problem.add(Demand::new("hidden", ByteSize::kib(64), 0..2))?;
/// let logits = problem.add(Demand::new("logits", ByteSize::kib(16), 1..3))?;
/// problem.reuse(logits, weights)?; // written in the place of what is read for the last time
/// assert_eq!(problem.lower_bound()?, ByteSize::kib(64));
/// # Ok::<(), lowtide_planner::PlanError>(())
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Problem {
    demands: Vec<Demand>,
    pub(super) unions: Unions,
    /// The sum of sizes, alignments and fixed offsets so far.
    total: u64,
}

impl Problem {
    /// Creates a problem without buffers.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a buffer.
    ///
    /// # Errors
    /// [`PlanError`] if the buffer itself is invalid, or there are too many.
    pub fn add(&mut self, demand: Demand) -> Result<BufferId, PlanError> {
        check(&demand)?;
        let Ok(number) = u32::try_from(self.demands.len()) else {
            return Err(PlanError::TooMany { name: demand.name, limit: u32::MAX });
        };
        let parts = [Some(demand.size.get()), Some(demand.align - 1), demand.offset];
        let sum = |sum: u64, part: u64| sum.checked_add(part).filter(|sum| *sum <= TOTAL_MAX);
        let Some(total) = parts.into_iter().flatten().try_fold(self.total, sum) else {
            let (name, size) = (demand.name, demand.size);
            return Err(PlanError::TooLarge { name, size, limit: ByteSize::new(TOTAL_MAX) });
        };
        self.total = total;
        self.demands.push(demand);
        self.unions.add();
        Ok(BufferId(number))
    }

    /// Makes `view` a part of `of`, from the byte `at` on, without memory of its own. If it is live
    /// longer than `of`, only that part of the memory stays in use.
    ///
    /// # Errors
    /// [`PlanError`] if it already shares memory, extends beyond `of`, or conflicts with the place.
    pub fn view(&mut self, view: BufferId, of: BufferId, at: u64) -> Result<(), PlanError> {
        self.share(view, of, at, false)
    }

    /// Makes `child` overwrite `parent` in place, from its first byte on. The first step of `child`
    /// may be the last one of `parent` and of every view of it; that is checked when the problem is
    /// solved, since views may be added later.
    ///
    /// # Errors
    /// [`PlanError`] if it already shares memory, is larger than `parent`, or conflicts with the
    /// place.
    pub fn reuse(&mut self, child: BufferId, parent: BufferId) -> Result<(), PlanError> {
        self.share(child, parent, 0, true)
    }

    fn share(
        &mut self,
        child: BufferId,
        over: BufferId,
        at: u64,
        replaces: bool,
    ) -> Result<(), PlanError> {
        let (below, above) = (self.known(over)?, self.known(child)?);
        let names = || (self.named(child), self.named(over));
        let (size, room) = (above.size.get(), below.size.get());
        if at.checked_add(size).is_none_or(|end| end > room) {
            let (name, over) = names();
            return Err(PlanError::BeyondOther { name, size, over, at, room });
        }
        if replaces && self.is_external(over) {
            let (name, over) = names();
            return Err(PlanError::ReuseOfExternal { name, over });
        }
        let is_elsewhere = above.role == Role::External && !self.is_external(over);
        if is_elsewhere || !above.gaps.is_empty() || !below.gaps.is_empty() {
            let (name, over) = names();
            return Err(PlanError::CannotShare { name, over, at });
        }
        if !self.unions.join(child.0, over.0, at, replaces) {
            let (name, over) = (self.named(child), self.named(over));
            return Err(PlanError::SharedTwice { name, over });
        }
        Ok(())
    }

    fn known(&self, id: BufferId) -> Result<&Demand, PlanError> {
        let unknown = PlanError::Unknown { number: id.0, count: self.demands.len() };
        self.demands.get(id.index()).ok_or(unknown)
    }

    /// Fixes a buffer at its offset in an earlier plan.
    pub(super) fn pin(&mut self, id: BufferId, offset: u64) {
        self.demands[id.index()].offset = Some(offset);
    }

    /// Returns the problem with each size raised to at least that of another one of its shape;
    /// `None` if they are too large together.
    pub(super) fn at_least(&self, other: &Self) -> Option<Self> {
        let mut larger = Self::new();
        for (demand, other) in self.demands.iter().zip(&other.demands) {
            let size = demand.size.max(other.size);
            larger.add(Demand { size, ..demand.clone() }).ok()?;
        }
        larger.unions.clone_from(&self.unions);
        Some(larger)
    }

    /// Returns the problem without names.
    pub(super) fn unnamed(&self) -> Self {
        let unnamed = |demand: &Demand| {
            let (live, gaps) = (demand.live.clone(), demand.gaps.clone());
            Demand { name: String::new(), live, gaps, ..*demand }
        };
        let demands = self.demands.iter().map(unnamed).collect();
        Self { demands, unions: self.unions.clone(), total: self.total }
    }

    /// Returns `true` if the other problem differs in nothing but names and sizes. O(n).
    pub(super) fn has_shape_of(&self, other: &Self) -> bool {
        let shape = |problem: &Self, id: BufferId| {
            let over = problem.unions.over(id.0);
            over.map(|over| (over, problem.unions.replaces(id.0), problem.unions.root(id.0).1))
        };
        let is_same = |(id, (one, two)): (BufferId, (&Demand, &Demand))| {
            let Demand { name: _, size: _, align, live, gaps, offset, role } = one;
            (align, live, gaps) == (&two.align, &two.live, &two.gaps)
                && (offset, role) == (&two.offset, &two.role)
                && shape(self, id) == shape(other, id)
        };
        let pairs = self.demands.iter().zip(&other.demands);
        self.demands.len() == other.demands.len() && self.ids().zip(pairs).all(is_same)
    }

    fn named(&self, id: BufferId) -> String {
        self.demands[id.index()].name.clone()
    }

    /// Returns the buffers, in the order of addition.
    #[must_use]
    pub fn demands(&self) -> &[Demand] {
        &self.demands
    }

    /// Returns the numbers of all buffers, in order.
    pub fn ids(&self) -> impl ExactSizeIterator<Item = BufferId> + use<> {
        (0..u32::try_from(self.demands.len()).unwrap_or(u32::MAX)).map(BufferId)
    }

    /// Returns `true` if the buffer, or its base buffer if it is a view, is external memory.
    #[must_use]
    pub fn is_external(&self, id: BufferId) -> bool {
        let root = self.unions.root(id.0).0;
        [id.index(), root as usize]
            .into_iter()
            .any(|at| self.demands.get(at).is_some_and(|demand| demand.role == Role::External))
    }

    /// From the first step of any buffer with memory to the end of the last one.
    pub(super) fn span(&self) -> Range<i64> {
        let own = self.demands.iter().filter(|d| d.role != Role::External && !d.live.is_empty());
        let first = own.clone().map(|demand| demand.live.start).min();
        let end = own.map(|demand| demand.live.end).max();
        first.unwrap_or(0)..end.unwrap_or(0)
    }

    /// The steps at which a buffer needs its memory, by its role.
    pub(super) fn held(&self, demand: &Demand, span: &Range<i64>) -> Range<i64> {
        let live = demand.live.clone();
        match demand.role {
            Role::Inner | Role::External => live,
            Role::Input => live.start.min(span.start)..live.end,
            Role::Output => live.start..live.end.max(span.end),
            Role::Through => live.start.min(span.start)..live.end.max(span.end),
        }
    }
}

/// Checks a buffer alone: its lifetime, alignment, gaps and fixed offset.
fn check(demand: &Demand) -> Result<(), PlanError> {
    let name = || demand.name.clone();
    let (size, Range { start: first, end }) = (demand.size.get(), demand.live.clone());
    if end < first {
        return Err(PlanError::Inverted { name: name(), first, end });
    }
    if demand.align == 0 {
        return Err(PlanError::NoAlign { name: name() });
    }
    let mut from = first;
    for gap in &demand.gaps {
        let Range { start, end: gap_end } = gap.span;
        if start < from || gap_end < start || gap_end > end {
            let (first, until) = (start, end);
            return Err(PlanError::Gap { name: name(), first, end: gap_end, from, until });
        }
        if let Some(window) = gap.window.clone().filter(|w| w.start > w.end || w.end > size) {
            return Err(PlanError::Window { name: name(), window, size });
        }
        from = gap_end;
    }
    match demand.offset {
        Some(offset) if offset % demand.align != 0 => {
            Err(PlanError::Misaligned { name: name(), offset, align: demand.align })
        }
        _ => Ok(()),
    }
}

// The values of a problem: buffers with sizes, lifetimes and alignments.
//
// A time is a step of the plan's user: an index into a graph's nodes, or a tick of a trace. A
// lifetime is half-open: `3..5` is live at steps 3 and 4. Any value can be built here;
// `Problem::add` checks it.

/// The number of a buffer of a problem, in the order of addition.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct BufferId(pub(super) u32);

impl BufferId {
    /// Returns the number, from 0.
    #[must_use]
    pub const fn index(self) -> usize {
        self.0 as usize
    }
}

/// A part of a lifetime in which only a window of the buffer is needed, or none of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Gap {
    /// The steps, half-open.
    pub span: Range<i64>,
    /// The bytes still needed; `None` for none.
    pub window: Option<Range<u64>>,
}

/// The relation of a buffer to the outside of the plan.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Role {
    /// Written first and read last within the plan.
    #[default]
    Inner,
    /// Present before the first step: live from then on, so no two inputs share memory.
    Input,
    /// Read after the last step: live until then, so its memory is not reused.
    Output,
    /// Both input and output: a trained weight, or a cache.
    Through,
    /// Memory owned by the caller: it gets no offset.
    External,
}

/// A buffer to plan: its size, lifetime and constraints.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Demand {
    /// The name, for errors and drawings; it need not be unique.
    pub name: String,
    /// The size; zero is allowed.
    pub size: ByteSize,
    /// The alignment of its offset in bytes; 1 for none.
    pub align: u64,
    /// The steps at which it is live, half-open; may be empty.
    pub live: Range<i64>,
    /// Parts of `live` in which less of the buffer is needed, in order.
    pub gaps: Vec<Gap>,
    /// A fixed offset, if any.
    pub offset: Option<u64>,
    /// The relation to the outside of the plan.
    pub role: Role,
}

impl Demand {
    /// Creates a buffer of this size that is live at these steps, without alignment and gaps.
    #[must_use]
    pub fn new(name: impl Into<String>, size: ByteSize, live: Range<i64>) -> Self {
        let (align, gaps, offset) = (1, Vec::new(), None);
        Self { name: name.into(), size, align, live, gaps, offset, role: Role::Inner }
    }
}
