//! Several kinds of memory: one problem for each, and one plan for each.
//!
//! Kinds share only steps, so each is solved separately, and the sum of their peaks is smallest if
//! each peak is. This module knows names of kinds and no devices.
//!
//! Invariant: there is a verified plan for every kind, in the order of the kinds.

use super::error::PlanError;
use super::planned::Plan;
use super::problem::Problem;
use super::solve::{PlanBudget, Planner};
use lowtide_core::bytes::ByteSize;

/// A kind of memory, and the problem to plan in it.
#[derive(Clone, Debug, Default)]
pub struct KindProblem {
    /// A unique name, for errors.
    pub name: String,
    /// The problem of this kind.
    pub problem: Problem,
    /// The maximum size of its segments; `None` for one segment of any size.
    pub segment_limit: Option<ByteSize>,
}

impl Planner<'_> {
    /// Plans several kinds of memory, each with its own maximum segment size instead of the
    /// planner's. Each kind may spend an even share of the budget that is left. Returns the plan of
    /// each kind, in order.
    ///
    /// ```
    /// use lowtide_planner::ByteSize;
    /// use lowtide_planner::clock::SystemClock;
    /// use lowtide_planner::{Demand, KindProblem, Plan, Planner, Problem};
    ///
    /// let (mut device, mut host) = (Problem::new(), Problem::new());
    /// device.add(Demand::new("hidden", ByteSize::kib(64), 0..2))?;
    /// device.add(Demand::new("logits", ByteSize::kib(16), 1..3))?;
    /// let sampled = host.add(Demand::new("sampled", ByteSize::kib(4), 2..4))?;
    /// let limit = Some(ByteSize::kib(64));
    /// let kinds = [
    ///     KindProblem { name: "device".into(), problem: device, segment_limit: limit },
    ///     KindProblem { name: "host".into(), problem: host, segment_limit: None },
    /// ];
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
    pub fn plan_kinds(&mut self, kinds: &[KindProblem]) -> Result<Vec<Plan>, PlanError> {
        for (at, kind) in kinds.iter().enumerate() {
            if kinds[..at].iter().any(|other| other.name == kind.name) {
                return Err(PlanError::KindTwice { name: kind.name.clone() });
            }
        }
        let (budget, limit) = (self.budget, self.segment_limit);
        let planned = self.plan_each(kinds, budget);
        (self.budget, self.segment_limit) = (budget, limit);
        planned
    }

    fn plan_each(
        &mut self,
        kinds: &[KindProblem],
        all: PlanBudget,
    ) -> Result<Vec<Plan>, PlanError> {
        let deadline = self.clock.now() + all.time;
        let (mut plans, mut nodes) = (Vec::with_capacity(kinds.len()), all.nodes);
        for (kind, left) in kinds.iter().zip((1..=kinds.len()).rev()) {
            let left = u32::try_from(left).unwrap_or(u32::MAX);
            let time = (deadline - self.clock.now()) / left;
            self.budget = PlanBudget { time, nodes: nodes / u64::from(left) };
            self.segment_limit = kind.segment_limit;
            let plan = self.plan(&kind.problem).map_err(|error| PlanError::InKind {
                kind: kind.name.clone(),
                error: Box::new(error),
            })?;
            nodes -= plan.nodes().min(nodes);
            plans.push(plan);
        }
        Ok(plans)
    }
}
