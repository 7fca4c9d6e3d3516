//! The planner: rules first, then probes downward from the best plan, within a budget.
//!
//! Every part gets a plan by rules. Then the highest part is probed until a proof shows that it
//! cannot be lower, or the budget ends: lowering any other part improves nothing. Its only clock is
//! the one passed in, which is read between orders and every few nodes; without a time limit the
//! same problem and budget produce the same plan.
//!
//! Invariant: the plan is no worse than that of any rule that ran, and is verified.

use std::collections::BTreeMap;
use std::time::Duration;

use lowtide_core::bytes::ByteSize;
use lowtide_core::clock::{Clock, Moment};

use super::dive::{Bonus, Dive};
use super::error::PlanError;
use super::order;
use super::order::{Heuristic, Placer, Traits};
use super::part::{PartPlan, Subproblem, Subproblems, Walls};
use super::planned::{Plan, PlannedPlace};
use super::probe::Probe;
use super::problem::{BufferId, Problem};
use super::search::{HEIGHT_MAX, ITEMS_MAX};
use super::shape::{Shapes, lcm};

/// The most items of a part that is searched exactly. Searches are deep, and keep a list of
/// remaining items for each level: 16 MiB for this many.
pub(super) const EXACT_MAX: usize = 2_000;

/// The random bonus of dives: up to this fraction of an item's size.
const DRAWN: Bonus = Bonus::Drawn(64);

/// The dives that come before all but the first rule.
const DIVES: [Bonus; 8] = {
    let mut dives = [DRAWN; 8];
    dives[0] = Bonus::Size;
    dives[1] = Bonus::None;
    dives
};

/// The default time limit of a plan.
const TIME: Duration = Duration::from_secs(1);

/// Creates plans.
///
/// ```
/// use lowtide_planner::ByteSize;
/// use lowtide_planner::clock::SystemClock;
/// use lowtide_planner::{Demand, Planner, Problem};
///
/// let mut problem = Problem::new();
/// for (size, live) in [(4, 0..3), (8, 1..2), (4, 2..5), (8, 3..5)] {
///     problem.add(Demand::new("layer", ByteSize::kib(size), live))?;
/// }
/// let plan = Planner::new(&SystemClock::new()).plan(&problem)?;
/// assert_eq!(plan.peak(), ByteSize::kib(12));
/// assert!(plan.is_optimal());
/// # Ok::<(), lowtide_planner::PlanError>(())
/// ```
pub struct Planner<'a> {
    pub(super) clock: &'a dyn Clock,
    /// The limits of time and nodes.
    pub(super) budget: (Duration, u64),
    enough: ByteSize,
    pub(super) segment_limit: Option<ByteSize>,
    on_better: Box<dyn FnMut(ByteSize) + 'a>,
}

lowtide_core::debug_as!(Planner<'_>, |it| budget: it.budget, enough: it.enough);

impl<'a> Planner<'a> {
    /// Creates a planner that uses this clock, with a time limit of one second.
    #[must_use]
    pub fn new(clock: &'a dyn Clock) -> Self {
        let on_better = Box::new(|_| ());
        let (budget, enough, segment_limit) = ((TIME, u64::MAX), ByteSize::ZERO, None);
        Self { clock, budget, enough, segment_limit, on_better }
    }

    /// Sets the budget of each plan: a time limit by the planner's clock, and a limit of nodes of
    /// the exact search and items placed by dives, each of which takes 5 to 50 us. One rule always
    /// runs to its end. By default a second, and as many nodes as that gives.
    #[must_use]
    pub fn budget(self, time: Duration, nodes: u64) -> Self {
        Self { budget: (time, nodes), ..self }
    }

    /// Sets a sufficient peak: a plan that needs no more is not improved further.
    #[must_use]
    pub fn enough(self, enough: ByteSize) -> Self {
        Self { enough, ..self }
    }

    /// Sets a maximum segment size; plans then use several segments instead of one.
    ///
    /// A larger buffer gets a segment of its own size, which other buffers use while it is not
    /// live. There is no plan if the limit is zero, an offset is fixed, or the least common
    /// multiple of all alignments is 1 GiB or more: [`PlanError::NoSegment`].
    #[must_use]
    pub fn segments_of(self, limit: ByteSize) -> Self {
        Self { segment_limit: Some(limit), ..self }
    }

    /// Sets a callback that receives the peak of each better plan as it is found.
    #[must_use]
    pub fn on_better(self, on_better: impl FnMut(ByteSize) + 'a) -> Self {
        Self { on_better: Box::new(on_better), ..self }
    }

    /// Plans a problem, as well as the budget allows.
    ///
    /// # Errors
    /// [`PlanError`] if buffers cannot share memory as requested, or fixed offsets overlap.
    pub fn plan(&mut self, problem: &Problem) -> Result<Plan, PlanError> {
        self.plan_within(problem, self.budget, self.segment_limit)
    }

    /// Plans within this budget, in segments of this maximum size.
    pub(super) fn plan_within(
        &mut self,
        problem: &Problem,
        (time, nodes): (Duration, u64),
        segment_limit: Option<ByteSize>,
    ) -> Result<Plan, PlanError> {
        let deadline = self.clock.now() + time;
        let mut shapes = Shapes::of(problem)?;
        problem.verify_apart(&shapes, |at| shapes.list[at].fixed)?;
        let walls = match segment_limit {
            Some(limit) => Walls::of(problem, &mut shapes, limit)?,
            None => Walls::default(),
        };
        let parts = Subproblems::of(&shapes, &walls);
        let mut solver = Solver {
            clock: self.clock,
            deadline,
            unit: parts.unit,
            enough: self.enough.get() / parts.unit,
            nodes,
            spent: 0,
            best: u64::MAX,
            on_better: &mut *self.on_better,
        };
        let (tracks, bound) = solver.solve(&parts, &shapes);
        let nodes = solver.spent;
        let offsets = tracks.iter().map(|track| &track.best.offsets);
        let plan = assembled(problem, &shapes, &parts, &walls, offsets)?;
        // A proof about the range with walls says nothing about the sum of the segments.
        let bound = if walls.is_none() { bound * parts.unit } else { 0 };
        Ok(Plan { bound: plan.bound.max(ByteSize::new(bound)).min(plan.peak), nodes, ..plan })
    }
}

impl Problem {
    /// Returns a lower bound for any plan: the most memory live at once, with the certain cost of
    /// alignments. O(n log n).
    ///
    /// # Errors
    /// [`PlanError`] if buffers cannot share memory as requested.
    pub fn lower_bound(&self) -> Result<ByteSize, PlanError> {
        let parts = Subproblems::of(&Shapes::of(self)?, &Walls::default());
        Ok(ByteSize::new(parts.bound() * parts.unit))
    }

    /// Returns an upper bound of the memory that a planner uses for this problem, in addition to
    /// the problem itself.
    ///
    /// With `n` the buffers and their gaps, and `m` the smaller of `n` and 2,000, the limit of the
    /// exact search: `64 KiB + 1 KiB n + 8 KiB m + 8 m^2` bytes, at most 50 MiB of it for the
    /// search. About twice the measured value; a test enforces it.
    #[must_use]
    pub fn planning_bytes(&self) -> ByteSize {
        let gaps: usize = self.demands().iter().map(|demand| demand.gaps.len()).sum();
        let all = ByteSize::of(self.demands().len() + gaps).get();
        let searched = all.min(EXACT_MAX as u64);
        let search = ByteSize::new((8 << 10) * searched + 8 * searched * searched);
        ByteSize::kib(64).saturating_add(ByteSize::kib(all)).saturating_add(search)
    }

    /// Plans with one rule alone: the result of another project's planner for this problem.
    ///
    /// # Errors
    /// As for [`Planner::plan`].
    pub fn plan_by(&self, rule: Heuristic) -> Result<Plan, PlanError> {
        let shapes = Shapes::of(self)?;
        self.verify_apart(&shapes, |at| shapes.list[at].fixed)?;
        let walls = Walls::default();
        let parts = Subproblems::of(&shapes, &walls);
        let (rule, fit) = rule.rule();
        let by_rule = |part: &Subproblem| {
            let mut placer = Placer::new(part);
            let order = order::order(&Traits::of(part, &shapes), rule);
            placer.run(&order, fit, rule.is_online(), u64::MAX, &mut || false);
            placer.offsets
        };
        assembled(self, &shapes, &parts, &walls, parts.list.iter().map(by_rule))
    }
}

/// Combines the offsets of all parts into a verified plan; its bound is the most memory live at
/// once.
fn assembled<O: AsRef<[u64]>>(
    problem: &Problem,
    shapes: &Shapes,
    parts: &Subproblems,
    walls: &Walls,
    offsets: impl Iterator<Item = O>,
) -> Result<Plan, PlanError> {
    let mut roots = vec![0; shapes.list.len()];
    for (part, offsets) in parts.list.iter().zip(offsets) {
        for (item, offset) in part.items.iter().zip(offsets.as_ref()) {
            roots[item.shape as usize] = offset * parts.unit;
        }
    }
    // Segments by their start, with the end of their contents.
    let mut segments: BTreeMap<u64, u64> = BTreeMap::new();
    for (at, offset) in roots.iter().enumerate().filter(|(at, _)| shapes.size(*at) > 0) {
        let end = segments.entry(walls.start(*offset)).or_insert(0);
        *end = (*end).max(offset + shapes.size(at));
    }
    let starts: Vec<u64> = segments.keys().copied().collect();
    let flat = spread(problem, shapes, &roots);
    // By the segment of the shared memory: a view of no bytes may lie at the end of that.
    let place = |id: BufferId| {
        if problem.is_external(id) {
            return PlannedPlace { segment: PlannedPlace::ELSEWHERE, offset: 0 };
        }
        let start = walls.start(flat[problem.unions.root(id.0).0 as usize]);
        // A buffer that needs no memory may lie beyond all of them.
        let segment = starts.partition_point(|other| *other < start).min(starts.len().max(1) - 1);
        let offset = flat[id.index()].saturating_sub(start);
        PlannedPlace { segment: u32::try_from(segment).unwrap_or(u32::MAX), offset }
    };
    let places: Box<[PlannedPlace]> = problem.ids().map(place).collect();
    let sizes = segments.iter().map(|(start, end)| ByteSize::new(end - start));
    let segments: Box<[ByteSize]> = sizes.collect();
    let peak = segments.iter().copied().sum();
    // Walls raise the bound of the range, and say nothing about the sum of segments; what
    // alignments cost in one segment they need not cost in several.
    let is_flat = walls.is_none();
    let live = if is_flat { parts.bound() * parts.unit } else { shapes.live_most() };
    let bound = ByteSize::new(live).min(peak);
    let aligns = problem.demands().iter().map(|demand| demand.align);
    let align = aligns.fold(1, |all, align| lcm(all, align).unwrap_or(u64::MAX));
    let own = problem.unnamed();
    let plan = Plan { places, segments, peak, bound, nodes: 0, align, problem: own };
    plan.verify(problem).map_err(|error| PlanError::Refuted(Box::new(error)))?;
    Ok(plan)
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

/// The progress of one part.
struct Track<'a> {
    best: PartPlan,
    /// No plan of the part has a smaller peak.
    bound: u64,
    /// The dive that is repeated if the part is too large to search.
    dive: Option<Box<Dive<'a>>>,
    probe: Option<Box<Probe<'a>>>,
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
    fn solve<'p>(&mut self, parts: &'p Subproblems, shapes: &Shapes) -> (Vec<Track<'p>>, u64) {
        let bound = parts.bound();
        let goal = bound.max(self.enough);
        let mut tracks = Vec::with_capacity(parts.list.len());
        for part in &parts.list {
            let track = self.track(part, shapes, goal);
            tracks.push(track);
        }
        self.report(&tracks);
        self.by_steps(&mut tracks, goal);
        let proved = tracks.iter().map(|track| track.bound).max().unwrap_or(0);
        (tracks, bound.max(proved))
    }

    /// A part's plan by rules: the first rule always, the others where time allows.
    fn track<'p>(&mut self, part: &'p Subproblem, shapes: &Shapes, goal: u64) -> Track<'p> {
        let traits = Traits::of(part, shapes);
        let mut best = PartPlan { peak: u64::MAX, offsets: Vec::new() };
        let is_small = part.items.len() <= EXACT_MAX.min(ITEMS_MAX);
        self.try_rules(part, &traits, goal, &order::FIRST, &mut best);
        // Dives are better than all other rules, and faster for many items.
        let mut dive = Dive::suits(part).then(|| Dive::new(part));
        for bonus in DIVES {
            if let Some(dive) = &mut dive {
                self.try_dive(dive, bonus, goal, &mut best);
            }
        }
        self.try_rules(part, &traits, goal, &order::ONLINE, &mut best);
        self.try_rules(part, &traits, goal, &order::OFFLINE, &mut best);
        if let Some(dive) = dive.filter(|_| !is_small) {
            return Track { best, bound: part.bound, dive: Some(Box::new(dive)), probe: None };
        }
        // The search is better than more rules, if it can be used.
        if !is_small || part.is_sliding {
            let classes: Vec<_> = order::classes().collect();
            self.try_rules(part, &traits, goal, &classes, &mut best);
        }
        let is_probed = is_small && best.peak > goal && best.peak < HEIGHT_MAX;
        let probe = is_probed.then(|| Box::new(Probe::new(part, &traits, best.peak)));
        Track { best, bound: part.bound, dive: None, probe }
    }

    fn try_rules(
        &self,
        part: &Subproblem,
        traits: &[Traits],
        goal: u64,
        rules: &[order::Ruled],
        best: &mut PartPlan,
    ) {
        let mut placer = Placer::new(part);
        for &(rule, fit) in rules {
            let is_first = best.offsets.is_empty();
            if best.peak <= goal || !is_first && self.is_over() {
                return;
            }
            let order = order::order(traits, rule);
            let mut stop = || !is_first && self.is_over();
            if let Some(peak) = placer.run(&order, fit, rule.is_online(), best.peak, &mut stop) {
                best.peak = peak;
                best.offsets.clone_from(&placer.offsets);
            }
        }
    }

    fn try_dive(&mut self, dive: &mut Dive<'_>, bonus: Bonus, goal: u64, best: &mut PartPlan) {
        if best.peak <= goal || self.is_over() {
            return;
        }
        let found = dive.run(bonus, best.peak, &mut || self.is_over());
        self.spent += dive.placed;
        if let Some(peak) = found {
            best.peak = peak;
            best.offsets.clone_from(&dive.offsets);
        }
    }

    fn is_over(&self) -> bool {
        self.clock.now() >= self.deadline
    }

    /// Lowers the highest part, until it cannot be lower or the budget ends.
    fn by_steps(&mut self, tracks: &mut [Track<'_>], goal: u64) {
        while !self.is_over() && self.nodes > self.spent {
            let highest = tracks.iter_mut().max_by_key(|track| track.best.peak);
            let Some(Track { best, bound, dive, probe }) = highest else { return };
            match (dive, probe) {
                (_, Some(probe)) if best.peak > goal && probe.low < best.peak => {
                    self.probe(probe, best, goal);
                    *bound = probe.proved();
                }
                (Some(dive), None) if best.peak > goal => self.try_dive(dive, DRAWN, goal, best),
                _ => return,
            }
            self.report(tracks);
        }
    }

    fn probe(&mut self, probe: &mut Probe<'_>, best: &mut PartPlan, goal: u64) {
        let (clock, deadline) = (self.clock, self.deadline);
        let before = probe.nodes;
        let is_enough = self.enough >= probe.low;
        let nodes = self.nodes - self.spent;
        probe.step(best, goal, is_enough, nodes, &mut || clock.now() >= deadline);
        self.spent += probe.nodes - before;
    }

    fn report(&mut self, tracks: &[Track<'_>]) {
        let peak = tracks.iter().map(|track| track.best.peak).max().unwrap_or(0);
        if peak < self.best {
            self.best = peak;
            (self.on_better)(ByteSize::new(peak * self.unit));
        }
    }
}
