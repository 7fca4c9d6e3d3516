//! Problems built from graphs: nodes in execution order, each with its operands.
//!
//! A node's result is live from its own step to that of the last node that reads it; if it is read
//! only through a view, only that part is. If a node may overwrite an operand and is its last
//! reader, the result takes that operand's place. Forward, backward and optimizer steps of a
//! training run are one graph, and so one plan. This module computes nothing and does not reorder
//! nodes.
//!
//! Invariant: step `n` is that of the `n`th node; a value that exists before the first node is an
//! input.

use lowtide_core::bytes::ByteSize;

use super::error::PlanError;
use super::planned::Plan;
use super::problem::{BufferId, Demand, Problem, Role};
use super::solve::Planner;

/// A graph whose nodes are added in execution order.
///
/// Its values (inputs, results of nodes, views) are numbered like the buffers of its problems.
///
/// # Panics
/// Its methods panic if a value comes from another graph and is out of range for this one, and
/// beyond 2³² values.
///
/// ```
/// use lowtide_planner::ByteSize;
/// use lowtide_planner::clock::SystemClock;
/// use lowtide_planner::{Graph, Planner};
///
/// let mut graph = Graph::new();
/// let x = graph.input("x", ByteSize::kib(16));
/// let sum = graph.node("sum", ByteSize::kib(16), &[x, x], true);
/// let half = graph.view("half", sum, ByteSize::kib(8).get(), ByteSize::kib(8));
/// let y = graph.node("y", ByteSize::kib(8), &[half], true);
/// graph.keep(y);
/// let problem = graph.problem(1)?;
/// let plan = Planner::new(&SystemClock::new()).plan(&problem)?;
/// assert_eq!(plan.peak(), ByteSize::kib(16)); // all of it in the place of `x`
/// assert_eq!(plan.offset(y), plan.offset(x));
/// # Ok::<(), lowtide_planner::PlanError>(())
/// ```
#[derive(Clone, Debug, Default)]
pub struct Graph {
    values: Vec<GraphValue>,
    /// The number of steps so far.
    steps: i64,
}

/// The source of a value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ValueOrigin {
    Input,
    External,
    Node,
    /// A part of another value, from this byte on.
    View(usize, u64),
}

#[derive(Clone, Debug)]
struct GraphValue {
    name: String,
    size: ByteSize,
    origin: ValueOrigin,
    operands: Vec<usize>,
    overwrites: bool,
    is_kept: bool,
    kind: u32,
    first: i64,
    /// One past the last step that reads it or makes a view of it.
    end: i64,
    /// The value that holds its bytes (itself unless it is a view), and the offset in it.
    content: (usize, u64),
    /// For the value that holds the bytes: one past the last step that reads any of it or makes a
    /// view of it, and `true` if any of it is kept.
    content_end: i64,
    is_content_kept: bool,
}

impl Graph {
    /// Creates an empty graph.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a value that exists before the first step, in memory of the plan.
    pub fn input(&mut self, name: impl Into<String>, size: ByteSize) -> BufferId {
        self.add(name.into(), size, ValueOrigin::Input, &[], false)
    }

    /// Adds a value in external memory, which the caller owns.
    pub fn external(&mut self, name: impl Into<String>, size: ByteSize) -> BufferId {
        self.add(name.into(), size, ValueOrigin::External, &[], false)
    }

    /// Adds the next node, which reads its operands and writes its result.
    ///
    /// If `overwrites` is set, the result may replace an operand, or the value of which that
    /// operand is a view from its first byte: the first operand that has no later reader and is not
    /// also read under another name. The node must then read each byte before it overwrites it, for
    /// any operand: if an operand's elements are in a different order, don't set `overwrites`.
    pub fn node(
        &mut self,
        name: impl Into<String>,
        size: ByteSize,
        operands: &[BufferId],
        overwrites: bool,
    ) -> BufferId {
        self.steps += 1;
        self.add(name.into(), size, ValueOrigin::Node, operands, overwrites)
    }

    /// Adds a view: a part of a value, from the byte `at` on. It takes no step.
    pub fn view(
        &mut self,
        name: impl Into<String>,
        of: BufferId,
        at: u64,
        size: ByteSize,
    ) -> BufferId {
        self.add(name.into(), size, ValueOrigin::View(of.index(), at), &[], false)
    }

    /// Marks a value as read after the last step, so its memory is not reused. If it is a view,
    /// only its part is kept.
    pub fn keep(&mut self, value: BufferId) {
        self.values[value.index()].is_kept = true;
        let content = self.values[value.index()].content.0;
        self.values[content].is_content_kept = true;
    }

    /// Sets the kind of memory of a value. The default is 0, or for a view the kind of its base
    /// value. Each kind has a problem of its own, with the same steps.
    pub fn set_kind(&mut self, value: BufferId, kind: u32) {
        self.values[value.index()].kind = kind;
    }

    fn add(
        &mut self,
        name: String,
        size: ByteSize,
        origin: ValueOrigin,
        operands: &[BufferId],
        overwrites: bool,
    ) -> BufferId {
        // An input is there at step 0, before the first node's step 1.
        let is_there = matches!(origin, ValueOrigin::Input | ValueOrigin::External);
        let first = if is_there { 0 } else { self.steps };
        let operands: Vec<usize> = operands.iter().map(|operand| operand.index()).collect();
        let end = self.steps + 1;
        let (own, mut content) = (self.values.len(), (self.values.len(), 0));
        // The base value is live until the view is made; from then on the view is, if it has a
        // reader.
        let is_view = if let ValueOrigin::View(of, from) = origin {
            let (root, at) = self.values[of].content;
            content = (root, at.saturating_add(from));
            self.values[of].end = self.values[of].end.max(end);
            self.values[root].content_end = self.values[root].content_end.max(end);
            true
        } else {
            false
        };
        for operand in &operands {
            let below = &mut self.values[*operand];
            below.end = below.end.max(end);
            let root = below.content.0;
            self.values[root].content_end = self.values[root].content_end.max(end);
        }
        self.values.push(GraphValue {
            name,
            size,
            origin,
            operands,
            overwrites,
            is_kept: false,
            kind: 0,
            first,
            end: if is_view { first } else { first + 1 },
            content,
            content_end: first + 1,
            is_content_kept: false,
        });
        BufferId(u32::try_from(own).expect("a number of 32 bits"))
    }

    /// Returns the problem of the first kind of memory. Every offset will be a multiple of `align`.
    ///
    /// # Errors
    /// [`PlanError`] if a view extends beyond its value, sizes are too large, or `align` is 0.
    pub fn problem(&self, align: u64) -> Result<Problem, PlanError> {
        self.problem_of(0, align)
    }

    /// Like [`Graph::problem`], for another kind of memory; values of other kinds are external to
    /// it.
    ///
    /// # Errors
    /// As for [`Graph::problem`].
    pub fn problem_of(&self, kind: u32, align: u64) -> Result<Problem, PlanError> {
        let mut problem = Problem::new();
        let mut ids = Vec::with_capacity(self.values.len());
        for (at, value) in self.values.iter().enumerate() {
            let role = match value.origin {
                _ if self.kind_of(at) != kind => Role::External,
                ValueOrigin::External => Role::External,
                ValueOrigin::Input if value.is_kept => Role::Through,
                ValueOrigin::Input => Role::Input,
                _ if value.is_kept => Role::Output,
                _ => Role::Inner,
            };
            let is_view = matches!(value.origin, ValueOrigin::View(..));
            let align = if is_view { 1 } else { align };
            let live = value.first..value.end;
            let demand = Demand::new(value.name.clone(), value.size, live);
            ids.push(problem.add(Demand { align, role, ..demand })?);
        }
        for (at, value) in self.values.iter().enumerate() {
            if let ValueOrigin::View(of, from) = value.origin {
                problem.view(ids[at], ids[of], from)?;
            }
        }
        let mut taken = vec![false; self.values.len()];
        for at in 0..self.values.len() {
            let found = self.replaced(at, &taken).filter(|_| self.kind_of(at) == kind);
            if let Some(below) = found {
                taken[below] = true;
                problem.reuse(ids[at], ids[below])?;
            }
        }
        Ok(problem)
    }

    /// Returns the problems of so many kinds of memory, the first for kind 0.
    ///
    /// # Errors
    /// As for [`Graph::problem`], and [`PlanError::NoKind`] if a value is of another kind.
    pub fn kinds(&self, align: u64, count: u32) -> Result<Vec<Problem>, PlanError> {
        let kinds =
            (0..count).map(|kind| self.problem_of(kind, align)).collect::<Result<_, _>>()?;
        let others = |at: &usize| self.kind_of(*at) >= count;
        if let Some(at) = (0..self.values.len()).find(others) {
            let (name, number) = (self.values[at].name.clone(), self.kind_of(at));
            return Err(PlanError::NoKind { name, number, count });
        }
        Ok(kinds)
    }

    /// Returns the kind of memory of a value; for a view that of its base value.
    #[must_use]
    pub fn kind(&self, value: BufferId) -> u32 {
        self.kind_of(value.index())
    }

    fn kind_of(&self, at: usize) -> u32 {
        self.values[self.values[at].content.0].kind
    }

    /// In whose place a node's result is written.
    fn replaced(&self, node: usize, taken: &[bool]) -> Option<usize> {
        let own = &self.values[node];
        let may = |operand: &usize| {
            let (content, from) = self.values[*operand].content;
            let below = &self.values[content];
            let is_single =
                |other: &usize| other == operand || self.values[*other].content.0 != content;
            let has_memory = matches!(below.origin, ValueOrigin::Input | ValueOrigin::Node);
            let is_last = below.content_end == own.first + 1 && !below.is_content_kept;
            let fits = from == 0 && own.size <= self.values[*operand].size;
            let is_free = has_memory && is_last && !taken[content] && own.kind == below.kind;
            (is_free && fits && own.operands.iter().all(is_single)).then_some(content)
        };
        let overwriting = Some(own).filter(|own| own.overwrites);
        overwriting.and_then(|own| own.operands.iter().find_map(may))
    }
}

// Several kinds of memory: one problem for each, and one plan for each.
//
// Kinds share only steps, so each is solved separately, and the sum of their peaks is smallest if
// each peak is. This module knows names of kinds and no devices.
//
// Invariant: there is a verified plan for every kind, in the order of the kinds.

impl Planner<'_> {
    /// Plans several kinds of memory: a unique name, for errors, the problem, and the maximum
    /// segment size, instead of the planner's (`None` for one segment of any size). Each kind may
    /// spend an even share of the budget that is left. Returns the plan of each kind, in order.
    ///
    /// ```
    /// use lowtide_planner::ByteSize;
    /// use lowtide_planner::clock::SystemClock;
    /// use lowtide_planner::{Demand, Plan, Planner, Problem};
    ///
    /// let (mut device, mut host) = (Problem::new(), Problem::new());
    /// device.add(Demand::new("hidden", ByteSize::kib(64), 0..2))?;
    /// device.add(Demand::new("logits", ByteSize::kib(16), 1..3))?;
    /// let sampled = host.add(Demand::new("sampled", ByteSize::kib(4), 2..4))?;
    /// let limit = Some(ByteSize::kib(64));
    /// let kinds = [("device", &device, limit), ("host", &host, None)];
    /// let plans = Planner::new(&SystemClock::new()).plan_kinds(&kinds)?;
    /// assert_eq!(plans[0].segments().len(), 2);
    /// assert_eq!(plans[1].offset(sampled), 0);
    /// assert_eq!(plans.iter().map(Plan::peak).sum::<ByteSize>(), ByteSize::kib(64 + 16 + 4));
    /// # Ok::<(), lowtide_planner::PlanError>(())
    /// ```
    ///
    /// # Errors
    /// [`PlanError::KindTwice`]; [`PlanError::InKind`], with an error of [`Planner::plan`] for one
    /// kind.
    pub fn plan_kinds(
        &mut self,
        kinds: &[(&str, &Problem, Option<ByteSize>)],
    ) -> Result<Vec<Plan>, PlanError> {
        for (at, (name, ..)) in kinds.iter().enumerate() {
            if kinds[..at].iter().any(|(other, ..)| other == name) {
                return Err(PlanError::KindTwice { name: (*name).into() });
            }
        }
        let (time, mut nodes) = self.budget;
        let (deadline, mut plans) = (self.clock.now() + time, Vec::with_capacity(kinds.len()));
        for ((kind, problem, limit), left) in kinds.iter().zip((1..=kinds.len()).rev()) {
            let left = u32::try_from(left).unwrap_or(u32::MAX);
            let time = (deadline - self.clock.now()) / left;
            let plan = self.plan_within(problem, (time, nodes / u64::from(left)), *limit);
            let plan = plan.map_err(|error| PlanError::InKind {
                kind: (*kind).into(),
                error: Box::new(error),
            })?;
            nodes -= plan.nodes().min(nodes);
            plans.push(plan);
        }
        Ok(plans)
    }
}
