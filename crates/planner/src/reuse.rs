//! Reuse of plans: smaller shapes, buckets of shapes, small changes.
//!
//! A plan serves another problem if every buffer has the same size or less and everything else is
//! equal: lifetimes, alignments, gaps, roles, fixed offsets, and the sharing of memory with its
//! offsets. A view at a third of a size that changes is therefore another problem each time; a view
//! at a fixed stride is not. External memory may have any size. GGML compares only numbers and
//! sizes of tensors, so for a graph with different connections it can reuse offsets at which the
//! graph overwrites itself. Here all of it goes into a 128-bit hash.
//!
//! Invariant: a plan that serves a problem passes `verify` for it.

use std::collections::BTreeMap;

use super::error::PlanError;
use super::planned::Plan;
use super::problem::Problem;
use super::shape::Shapes;
use super::solve::Planner;
use lowtide_core::bytes::ByteSize;

impl Plan {
    /// Checks that the plan also serves this problem. O(n); allocates only for an error.
    ///
    /// # Errors
    /// [`PlanError::OtherShape`], or [`PlanError::LargerThanPlanned`] for the first such buffer.
    pub fn serves(&self, problem: &Problem) -> Result<(), PlanError> {
        if problem.fingerprint() != self.fingerprint {
            return Err(PlanError::OtherShape);
        }
        for ((id, demand), planned) in problem.ids().zip(problem.demands()).zip(&self.sizes) {
            if demand.size > *planned && !problem.is_external(id) {
                let (name, size, planned) = (demand.name.clone(), demand.size, *planned);
                return Err(PlanError::LargerThanPlanned { name, size, planned });
            }
        }
        Ok(())
    }
}

impl Planner<'_> {
    /// Plans a problem with a few changes: unchanged buffers keep their places, with all buffers
    /// that share their memory, and the rest is placed around them. Buffers are compared by number,
    /// so new ones must come last. Faster than a new plan, but less compact.
    ///
    /// It applies only if `before` has one segment and the plan is valid for it; otherwise the
    /// whole problem is planned again.
    ///
    /// # Errors
    /// As for [`Planner::plan`].
    pub fn replan(
        &mut self,
        problem: &Problem,
        before: &Problem,
        plan: &Plan,
    ) -> Result<Plan, PlanError> {
        let is_flat = plan.segments().len() <= 1 && self.segment_limit.is_none();
        if !is_flat || plan.verify(before).is_err() {
            return self.plan(problem);
        }
        let (now, old) = (Shapes::of(problem)?, Shapes::of(before)?);
        let mut pinned = problem.clone();
        for (at, shape) in now.list.iter().enumerate() {
            // Both lists are in the order of the roots.
            let Ok(was) = old.list.binary_search_by_key(&shape.root, |old| old.root) else {
                continue;
            };
            let is_aligned = plan.offset(shape.root).is_multiple_of(shape.align);
            if is_aligned && shape.fixed == old.list[was].fixed && now.needs(at) == old.needs(was) {
                pinned.pin(shape.root, plan.offset(shape.root));
            }
        }
        let planned = match self.plan(&pinned) {
            // A new fixed offset, where something was.
            Err(PlanError::FixedOverlap { .. }) => return self.plan(problem),
            planned => planned?,
        };
        // A proof about the pinned buffers says nothing about the problem itself.
        let bound = problem.lower_bound()?.min(planned.peak);
        Ok(Plan { fingerprint: problem.fingerprint(), bound, ..planned })
    }
}

/// A cache of plans by bucket of shapes, such as the next power of two of a batch size.
///
/// Each bucket has one plan, in which every buffer has its largest size in any problem so far. For
/// problems of one fingerprint, planning soon stops. A problem with another fingerprint replaces
/// the bucket's plan, so use separate buckets for them.
#[derive(Clone, Debug, Default)]
pub struct PlanCache {
    plans: BTreeMap<u64, Plan>,
}

impl PlanCache {
    /// Creates an empty cache.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Returns the bucket's plan if it serves the problem. Otherwise makes a new one in its place,
    /// which serves both problems if only sizes differ.
    ///
    /// # Errors
    /// As for [`Planner::plan`].
    pub fn plan(
        &mut self,
        bucket: u64,
        problem: &Problem,
        planner: &mut Planner<'_>,
    ) -> Result<&Plan, PlanError> {
        if self.plans.get(&bucket).is_none_or(|plan| plan.serves(problem).is_err()) {
            let before = self.plans.get(&bucket);
            let same = before.filter(|plan| plan.fingerprint == problem.fingerprint());
            let plan = match same {
                Some(before) => planner.plan(&problem.at_least(&before.sizes))?,
                None => planner.plan(problem)?,
            };
            self.plans.insert(bucket, plan);
        }
        Ok(&self.plans[&bucket])
    }

    /// Returns the plans by bucket.
    #[must_use]
    pub const fn plans(&self) -> &BTreeMap<u64, Plan> {
        &self.plans
    }

    /// Returns the memory needed for all of these plans, segment by segment: the largest of each.
    #[must_use]
    pub fn segments(&self) -> Vec<ByteSize> {
        let mut most: Vec<ByteSize> = Vec::new();
        for plan in self.plans.values() {
            most.resize(most.len().max(plan.segments().len()), ByteSize::ZERO);
            for (most, size) in most.iter_mut().zip(plan.segments()) {
                *most = (*most).max(*size);
            }
        }
        most
    }
}
