//! Problems out of graphs: nodes in the order in which they are computed, each with its operands.
//!
//! A node's result is live from its own step to that of the last node which reads it, or a view of
//! it. Where a node may overwrite an operand, and is its last reader, the result takes that
//! operand's place. It computes nothing and orders nothing.
//!
//! Invariant: step `n` is that of the `n`th node; what is there before the first node is an input.

use super::error::PlanError;
use super::problem::{BufferId, Demand, Problem, Role};
use crate::bytes::ByteSize;

/// A value of a [`Graph`]: an input, a node's result, or a view.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ValueId(usize);

/// A graph whose nodes are added in the order in which they are computed.
///
/// ```
/// use lowtide::ByteSize;
/// use lowtide::clock::SystemClock;
/// use lowtide::device::plan::{Graph, Planner};
///
/// let mut graph = Graph::new();
/// let x = graph.input("x", ByteSize::kib(16));
/// let sum = graph.node("sum", ByteSize::kib(16), &[x, x], true);
/// let half = graph.view("half", sum, ByteSize::kib(8).get(), ByteSize::kib(8));
/// let y = graph.node("y", ByteSize::kib(8), &[half], true);
/// graph.keep(y);
/// let (problem, buffers) = graph.problem(1)?;
/// let plan = Planner::new(&SystemClock::new()).plan(&problem)?;
/// assert_eq!(plan.peak(), ByteSize::kib(16)); // all of it in the place of `x`
/// # Ok::<(), lowtide::device::plan::PlanError>(())
/// ```
#[derive(Clone, Debug, Default)]
pub struct Graph {
    values: Vec<Value>,
    /// The steps that there are so far.
    steps: i64,
}

/// Where a value comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Origin {
    Input,
    External,
    Node,
    /// Part of another value, from this byte on.
    View(usize, u64),
}

#[derive(Clone, Debug)]
struct Value {
    name: String,
    size: ByteSize,
    origin: Origin,
    operands: Vec<usize>,
    overwrites: bool,
    is_kept: bool,
    kind: u32,
    first: i64,
    /// After the last step that reads it, views of it included.
    end: i64,
}

impl Graph {
    /// A graph without nodes.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Something that is there before the first step, in memory of the plan.
    pub fn input(&mut self, name: impl Into<String>, size: ByteSize) -> ValueId {
        self.add(name.into(), size, Origin::Input, &[], false)
    }

    /// Something that lies in memory of the caller's own.
    pub fn external(&mut self, name: impl Into<String>, size: ByteSize) -> ValueId {
        self.add(name.into(), size, Origin::External, &[], false)
    }

    /// The next node: reads its operands, writes its result. Where `overwrites` is set it may do so
    /// in the place of an operand.
    pub fn node(
        &mut self,
        name: impl Into<String>,
        size: ByteSize,
        operands: &[ValueId],
        overwrites: bool,
    ) -> ValueId {
        self.steps += 1;
        self.add(name.into(), size, Origin::Node, operands, overwrites)
    }

    /// Part of a value, from the byte `at` on; it takes no step.
    pub fn view(
        &mut self,
        name: impl Into<String>,
        of: ValueId,
        at: u64,
        size: ByteSize,
    ) -> ValueId {
        self.add(name.into(), size, Origin::View(of.0, at), &[], false)
    }

    /// Says that a value is read after the last step: nothing comes into its place.
    pub fn keep(&mut self, value: ValueId) {
        let mut at = value.0;
        loop {
            self.values[at].is_kept = true;
            match self.values[at].origin {
                Origin::View(of, _) => at = of,
                _ => return,
            }
        }
    }

    /// Says in which kind of memory a value lies; it is 0 where nothing is said. Each kind has a
    /// problem of its own, with the same steps.
    pub fn set_kind(&mut self, value: ValueId, kind: u32) {
        self.values[value.0].kind = kind;
    }

    fn add(
        &mut self,
        name: String,
        size: ByteSize,
        origin: Origin,
        operands: &[ValueId],
        overwrites: bool,
    ) -> ValueId {
        // An input is there at step 0, before the first node's step 1.
        let is_there = matches!(origin, Origin::Input | Origin::External);
        let first = if is_there { 0 } else { self.steps };
        let operands: Vec<usize> = operands.iter().map(|operand| operand.0).collect();
        // A view keeps what it is of until it was made, and as long as it is read.
        let viewed = if let Origin::View(of, _) = origin { Some(of) } else { None };
        for operand in operands.iter().chain(&viewed) {
            let mut at = *operand;
            loop {
                self.values[at].end = self.values[at].end.max(self.steps + 1);
                match self.values[at].origin {
                    Origin::View(of, _) => at = of,
                    _ => break,
                }
            }
        }
        let (is_kept, kind, end) = (false, 0, first + 1);
        let value = Value { name, size, origin, operands, overwrites, is_kept, kind, first, end };
        self.values.push(value);
        ValueId(self.values.len() - 1)
    }

    /// The problem of the first kind of memory, and each value's buffer, in the order in which they
    /// were added. Every offset is to be a multiple of `align`.
    ///
    /// # Errors
    /// [`PlanError`], where a view reaches beyond its value, or sizes are too large.
    ///
    /// # Panics
    /// If `align` is zero.
    pub fn problem(&self, align: u64) -> Result<(Problem, Vec<BufferId>), PlanError> {
        self.problem_of(0, align)
    }

    /// The same for another kind of memory: what lies in others is external to it.
    ///
    /// # Errors
    /// As [`Graph::problem`].
    ///
    /// # Panics
    /// If `align` is zero.
    pub fn problem_of(&self, kind: u32, align: u64) -> Result<(Problem, Vec<BufferId>), PlanError> {
        assert!(align > 0, "an alignment of no bytes");
        let mut problem = Problem::new();
        let mut ids = Vec::with_capacity(self.values.len());
        for (at, value) in self.values.iter().enumerate() {
            let role = match value.origin {
                _ if self.kind_of(at) != kind => Role::External,
                Origin::External => Role::External,
                Origin::Input if value.is_kept => Role::Through,
                Origin::Input => Role::Input,
                _ if value.is_kept => Role::Output,
                _ => Role::Inner,
            };
            let is_view = matches!(value.origin, Origin::View(..));
            let align = if is_view { 1 } else { align };
            let live = value.first..value.end;
            let demand = Demand::new(value.name.clone(), value.size, live);
            ids.push(problem.add(Demand { align, role, ..demand })?);
        }
        for (at, value) in self.values.iter().enumerate() {
            if let Origin::View(of, from) = value.origin {
                problem.view(ids[at], ids[of], from)?;
            }
        }
        let mut taken = vec![false; self.values.len()];
        for (at, value) in self.values.iter().enumerate().filter(|(_, value)| value.overwrites) {
            let may = |operand: &&usize| self.may_replace(at, **operand, &taken);
            let found = value.operands.iter().find(may).filter(|_| self.kind_of(at) == kind);
            if let Some(&operand) = found {
                taken[operand] = true;
                problem.reuse(ids[at], ids[operand])?;
            }
        }
        Ok((problem, ids))
    }

    /// The kind of memory in which a value lies: a view's is that of what it is of.
    fn kind_of(&self, at: usize) -> u32 {
        let mut at = at;
        while let Origin::View(of, _) = self.values[at].origin {
            at = of;
        }
        self.values[at].kind
    }

    /// Whether a node is the last to read an operand that has memory of its own.
    fn may_replace(&self, node: usize, operand: usize, taken: &[bool]) -> bool {
        let (own, below) = (&self.values[node], &self.values[operand]);
        let has_memory = matches!(below.origin, Origin::Input | Origin::Node);
        let is_last = below.end == own.first + 1 && !below.is_kept;
        let same = own.kind == below.kind;
        same && has_memory && is_last && !taken[operand] && own.size <= below.size
    }
}
