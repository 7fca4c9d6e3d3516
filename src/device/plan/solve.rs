//! The planner: rules first, then probes downward from the best, within a budget.
//!
//! Every part gets a plan by rules. Then the highest part is probed, until it is proved that it
//! cannot be lower or the budget ends: lowering any other one gains nothing. It has no clock but
//! the one that it is given, and asks that one between orders and every few nodes; without a
//! limit of time the same problem and budget give the same plan.
//!
//! Invariant: the plan is no worse than that of any rule that was run, and was verified.

use std::fmt;
use std::time::Duration;

use super::error::PlanError;
use super::order::{self, Traits};
use super::part::{Part, Parts};
use super::place::Placer;
use super::planned::Plan;
use super::probe::Probe;
use super::problem::Problem;
use super::search::{HEIGHT_MAX, ITEMS_MAX};
use super::shape::Shapes;
use crate::bytes::ByteSize;
use crate::clock::{Clock, Moment};

/// The most items of a part that is searched exactly. Searches are deep, and keep a list of what
/// is left for each level: 16 MiB for as many.
pub(super) const EXACT_MAX: usize = 2_000;

/// What a planner may spend.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Budget {
    /// Time, by the planner's clock. One rule is always run, however long it takes.
    pub time: Duration,
    /// Nodes of the exact search, of some 5 to 50 us each.
    pub nodes: u64,
}

impl Default for Budget {
    /// A second, and as many nodes as that gives.
    fn default() -> Self {
        Self { time: Duration::from_secs(1), nodes: u64::MAX }
    }
}

/// Makes plans.
///
/// ```
/// use lowtide::ByteSize;
/// use lowtide::clock::SystemClock;
/// use lowtide::device::plan::{Demand, Planner, Problem};
///
/// let mut problem = Problem::new();
/// for (size, live) in [(4, 0..3), (8, 1..2), (4, 2..5), (8, 3..5)] {
///     problem.add(Demand::new("layer", ByteSize::kib(size), live))?;
/// }
/// let plan = Planner::new(&SystemClock::new()).plan(&problem)?;
/// assert_eq!(plan.peak(), ByteSize::kib(12));
/// assert!(plan.is_optimal());
/// # Ok::<(), lowtide::device::plan::PlanError>(())
/// ```
pub struct Planner<'a> {
    clock: &'a dyn Clock,
    budget: Budget,
    enough: ByteSize,
    on_better: Box<dyn FnMut(ByteSize) + 'a>,
}

impl fmt::Debug for Planner<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (budget, enough) = (self.budget, self.enough);
        write!(f, "Planner {{ budget: {budget:?}, enough: {enough:?} }}")
    }
}

impl<'a> Planner<'a> {
    /// A planner that takes its time from this clock: a second, until told otherwise.
    #[must_use]
    pub fn new(clock: &'a dyn Clock) -> Self {
        let on_better = Box::new(|_| ());
        Self { clock, budget: Budget::default(), enough: ByteSize::ZERO, on_better }
    }

    /// What each plan may spend.
    #[must_use]
    pub fn budget(self, budget: Budget) -> Self {
        Self { budget, ..self }
    }

    /// The peak that is enough: a plan which needs no more is not improved.
    #[must_use]
    pub fn enough(self, enough: ByteSize) -> Self {
        Self { enough, ..self }
    }

    /// Is called with the peak whenever a better one is found.
    #[must_use]
    pub fn on_better(self, on_better: impl FnMut(ByteSize) + 'a) -> Self {
        Self { on_better: Box::new(on_better), ..self }
    }

    /// Plans a problem, as well as the budget allows.
    ///
    /// # Errors
    /// [`PlanError`], where buffers cannot share memory as they were said to, or fixed offsets lie
    /// over each other.
    pub fn plan(&mut self, problem: &Problem) -> Result<Plan, PlanError> {
        let deadline = self.clock.now() + self.budget.time;
        let shapes = Shapes::of(problem)?;
        problem.verify_fixed(&shapes)?;
        let parts = Parts::of(&shapes);
        let mut solver = Solver {
            clock: self.clock,
            deadline,
            unit: parts.unit,
            enough: self.enough.get() / parts.unit,
            nodes: self.budget.nodes,
            spent: 0,
            best: u64::MAX,
            on_better: &mut *self.on_better,
        };
        let (tracks, bound) = solver.solve(&parts, &shapes);
        let mut roots = vec![0; shapes.list.len()];
        for (part, track) in parts.list.iter().zip(&tracks) {
            for (item, offset) in part.items.iter().zip(track.offsets()) {
                roots[item.shape as usize] = offset * parts.unit;
            }
        }
        let offsets = spread(problem, &shapes, &roots);
        let found = problem.verify(&offsets);
        let peak = found.map_err(|fault| PlanError::Refuted(Box::new(fault)))?;
        let bound = ByteSize::new(bound * parts.unit).min(peak);
        Ok(Plan { offsets: offsets.into(), peak, bound, nodes: solver.spent })
    }
}

/// The offsets of all buffers, by those of the shapes that they are in.
fn spread(problem: &Problem, shapes: &Shapes, roots: &[u64]) -> Vec<u64> {
    let mut offsets = vec![0; problem.demands().len()];
    for (id, demand) in problem.ids().zip(problem.demands()) {
        offsets[id.index()] = demand.offset.unwrap_or(0);
    }
    for (shape, offset) in shapes.list.iter().zip(roots) {
        offsets[shape.root.index()] = shape.fixed.unwrap_or(*offset);
    }
    for id in problem.ids().filter(|id| problem.unions.over(id.0).is_some()) {
        let (root, at) = problem.unions.root(id.0);
        offsets[id.index()] = offsets[root as usize] + at;
    }
    offsets
}

/// How far one part has come.
enum Track<'a> {
    /// By rules only.
    Ruled {
        peak: u64,
        bound: u64,
        offsets: Vec<u64>,
    },
    Probed(Box<Probe<'a>>),
}

impl Track<'_> {
    fn peak(&self) -> u64 {
        match self {
            Self::Ruled { peak, .. } => *peak,
            Self::Probed(probe) => probe.peak,
        }
    }

    fn bound(&self) -> u64 {
        match self {
            Self::Ruled { bound, .. } => *bound,
            Self::Probed(probe) => probe.proved(),
        }
    }

    fn offsets(&self) -> &[u64] {
        match self {
            Self::Ruled { offsets, .. } => offsets,
            Self::Probed(probe) => &probe.offsets,
        }
    }
}

/// One problem that is being solved.
struct Solver<'a> {
    clock: &'a dyn Clock,
    deadline: Moment,
    unit: u64,
    enough: u64,
    nodes: u64,
    spent: u64,
    best: u64,
    on_better: &'a mut dyn FnMut(ByteSize),
}

impl Solver<'_> {
    /// A track for each part, and what no plan is below.
    fn solve<'p>(&mut self, parts: &'p Parts, shapes: &Shapes) -> (Vec<Track<'p>>, u64) {
        let bound = parts.bound();
        let goal = bound.max(self.enough);
        let mut tracks = Vec::with_capacity(parts.list.len());
        for part in &parts.list {
            let traits = Traits::of(part, shapes);
            let (peak, offsets) = self.by_rules(part, &traits, goal);
            let fits = part.items.len() <= EXACT_MAX.min(ITEMS_MAX) && peak < HEIGHT_MAX;
            tracks.push(if peak > goal && fits {
                Track::Probed(Box::new(Probe::new(part, &traits, peak, offsets)))
            } else {
                Track::Ruled { peak, bound: part.bound, offsets }
            });
        }
        self.report(&tracks);
        self.by_probes(&mut tracks, goal);
        let proved = tracks.iter().map(Track::bound).max().unwrap_or(0);
        (tracks, bound.max(proved))
    }

    /// The best plan of a part by rules: all of them where time allows, the first one always.
    fn by_rules(&self, part: &Part, traits: &[Traits], goal: u64) -> (u64, Vec<u64>) {
        let mut placer = Placer::new(part);
        let (mut best, mut offsets) = (u64::MAX, Vec::new());
        for (rule, fit) in order::all() {
            let found = placer.run(&order::order(traits, rule), fit, best);
            if let Some(peak) = found {
                best = peak;
                offsets.clear();
                offsets.extend_from_slice(placer.offsets());
            }
            if best <= goal || self.clock.now() >= self.deadline {
                break;
            }
        }
        (best, offsets)
    }

    /// Lowers the highest part, until it cannot be lower or the budget ends.
    fn by_probes(&mut self, tracks: &mut [Track<'_>], goal: u64) {
        while self.clock.now() < self.deadline && self.nodes > self.spent {
            let highest = (0..tracks.len()).max_by_key(|at| tracks[*at].peak());
            let Some(Track::Probed(probe)) = highest.map(|at| &mut tracks[at]) else { return };
            if probe.peak <= goal || probe.low >= probe.peak {
                return;
            }
            let (clock, deadline) = (self.clock, self.deadline);
            let before = probe.nodes;
            let is_enough = self.enough >= probe.low;
            let nodes = self.nodes - self.spent;
            probe.step(goal, is_enough, nodes, &mut || clock.now() >= deadline);
            self.spent += probe.nodes - before;
            self.report(tracks);
        }
    }

    fn report(&mut self, tracks: &[Track<'_>]) {
        let peak = tracks.iter().map(Track::peak).max().unwrap_or(0);
        if peak < self.best {
            self.best = peak;
            (self.on_better)(ByteSize::new(peak * self.unit));
        }
    }
}
