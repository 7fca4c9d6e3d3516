//! A plan: the offset of each buffer of a problem, and a bound on the plan's quality.
//!
//! Only a [`Planner`](super::Planner) creates plans, and each is verified before it is returned. A
//! plan holds offsets and no memory.
//!
//! Invariants: `bound <= peak`; `is_optimal` exactly if it is proved that no plan of the problem
//! has a smaller peak.

use std::collections::BTreeMap;

use lowtide_core::bytes::ByteSize;

use super::error::PlanError;
use super::problem::{BufferId, Problem, TOTAL_MAX};
use super::shape::{Shapes, lcm};
use super::solve::Planner;

/// The place of a buffer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PlannedPlace {
    /// The index of the plan's segment; [`PlannedPlace::ELSEWHERE`] for external memory.
    pub segment: u32,
    /// Bytes from the segment's start.
    pub offset: u64,
}

impl PlannedPlace {
    /// The segment index of external memory.
    pub const ELSEWHERE: u32 = u32::MAX;
}

/// Places for all buffers of a [`Problem`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Plan {
    pub(super) places: Box<[PlannedPlace]>,
    /// The size of each segment.
    pub(super) segments: Box<[ByteSize]>,
    pub(super) peak: ByteSize,
    pub(super) bound: ByteSize,
    pub(super) nodes: u64,
    /// The alignment that the plan requires.
    pub(super) align: u64,
    /// What it was made for, without names.
    pub(super) problem: Problem,
}

impl Plan {
    /// Returns the offset of a buffer in bytes from the start of its segment. With a single segment
    /// this is the offset in the plan's memory. The value is meaningless for a buffer that needs no
    /// memory because it is external, empty or never live. O(1).
    ///
    /// # Panics
    /// If the number belongs to another problem and is out of range for this one.
    #[must_use]
    #[inline]
    pub fn offset(&self, id: BufferId) -> u64 {
        self.places[id.index()].offset
    }

    /// Returns the segment and the offset of a buffer. O(1).
    ///
    /// # Panics
    /// As for [`Plan::offset`].
    #[must_use]
    #[inline]
    pub fn place(&self, id: BufferId) -> PlannedPlace {
        self.places[id.index()]
    }

    /// Returns the places of all buffers, in order.
    #[must_use]
    pub const fn places(&self) -> &[PlannedPlace] {
        &self.places
    }

    /// Returns the size of each segment: one, unless the planner has a maximum segment size.
    #[must_use]
    pub const fn segments(&self) -> &[ByteSize] {
        &self.segments
    }

    /// Returns the memory that the plan needs, in all segments together.
    #[must_use]
    pub const fn peak(&self) -> ByteSize {
        self.peak
    }

    /// Returns a lower bound for any plan: the most memory that is live at once, or more if that
    /// was proved.
    #[must_use]
    pub const fn bound(&self) -> ByteSize {
        self.bound
    }

    /// Returns the possible improvement: `peak - bound`.
    #[must_use]
    pub const fn gap(&self) -> ByteSize {
        self.peak.saturating_sub(self.bound)
    }

    /// Returns `true` if it is proved that no plan has a smaller peak. A proof by search assumes
    /// that no two of its states have the same 64-bit hash.
    #[must_use]
    pub fn is_optimal(&self) -> bool {
        self.peak == self.bound
    }

    /// Returns the alignment that the start of the memory needs for all offsets to be aligned: the
    /// least common multiple of all alignments, or `u64::MAX` if that is larger.
    #[must_use]
    pub const fn align(&self) -> u64 {
        self.align
    }

    /// Returns the number of nodes that the exact search visited.
    #[must_use]
    pub const fn nodes(&self) -> u64 {
        self.nodes
    }

    /// Checks the plan against a problem: the one that it was made for, or another one. O(n log n).
    ///
    /// # Errors
    /// [`PlanError`] for the first fault.
    pub fn verify(&self, problem: &Problem) -> Result<(), PlanError> {
        let (found, expected) = (self.places.len(), problem.demands().len());
        if found != expected {
            return Err(PlanError::OffsetCount { found, expected });
        }
        // Segments are laid out without overlap, at multiples of every alignment.
        let mut common = 1_u64;
        for demand in problem.demands().iter().filter(|_| self.segments.len() > 1) {
            let (align, multiple) = (demand.align, lcm(common, demand.align));
            let multiple = multiple.filter(|multiple| *multiple <= TOTAL_MAX >> 32);
            common = multiple.ok_or_else(|| PlanError::Misaligned {
                name: demand.name.clone(),
                offset: 0,
                align,
            })?;
        }
        let (mut starts, mut end) = (Vec::with_capacity(self.segments.len()), 0_u64);
        for size in &self.segments {
            starts.push(end);
            end = (end + size.get()).next_multiple_of(common);
        }
        let flat = |place: &PlannedPlace| match place.segment {
            PlannedPlace::ELSEWHERE => 0, // never used
            segment => starts.get(segment as usize).unwrap_or(&0) + place.offset,
        };
        let flat: Vec<u64> = self.places.iter().map(flat).collect();
        problem.verify(&flat)?;
        let shapes = Shapes::of(problem)?;
        for (at, shape) in shapes.list.iter().enumerate() {
            let PlannedPlace { segment, offset } = self.place(shape.root);
            let size = self.segments.get(segment as usize).map_or(0, |size| size.get());
            let end = shapes.needs(at).iter().map(|need| offset + need.high).max();
            if let Some(end) = end.filter(|end| *end > size) {
                let name = problem.demands()[shape.root.index()].name.clone();
                return Err(PlanError::BeyondPeak { name, end, peak: size });
            }
        }
        Ok(())
    }
}

// Reuse of plans: smaller shapes, buckets of shapes, small changes.
//
// A plan serves another problem if every buffer has the same size or less and everything else is
// equal: lifetimes, alignments, gaps, roles, fixed offsets, and the sharing of memory with its
// offsets. A view at a third of a size that changes is therefore another problem each time; a view
// at a fixed stride is not. External memory may have any size. GGML compares only numbers and
// sizes of tensors, so for a graph with different connections it can reuse offsets at which the
// graph overwrites itself. Here all of it is compared.
//
// Invariant: a plan that serves a problem passes `verify` for it.

impl Plan {
    /// Checks that the plan also serves this problem. O(n); allocates only for an error.
    ///
    /// # Errors
    /// [`PlanError::OtherShape`], or [`PlanError::LargerThanPlanned`] for the first such buffer.
    pub fn serves(&self, problem: &Problem) -> Result<(), PlanError> {
        if !problem.has_shape_of(&self.problem) {
            return Err(PlanError::OtherShape);
        }
        for (id, (demand, planned)) in
            problem.ids().zip(problem.demands().iter().zip(self.problem.demands()))
        {
            if demand.size > planned.size && !problem.is_external(id) {
                let (name, size, planned) = (demand.name.clone(), demand.size, planned.size);
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
            Err(PlanError::Overlap { .. }) => return self.plan(problem),
            planned => planned?,
        };
        // A proof about the pinned buffers says nothing about the problem itself.
        let bound = problem.lower_bound()?.min(planned.peak);
        Ok(Plan { problem: problem.unnamed(), bound, ..planned })
    }
}

/// A cache of plans by bucket of shapes, such as the next power of two of a batch size.
///
/// Each bucket has one plan, in which every buffer has its largest size in any problem so far. For
/// problems that differ only in sizes, planning soon stops. Any other problem, or one with which the
/// sum of these sizes is too large, replaces the bucket's plan, so use separate buckets for them.
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
            let same = before.filter(|plan| problem.has_shape_of(&plan.problem));
            let larger = same.and_then(|plan| problem.at_least(&plan.problem));
            let plan = planner.plan(larger.as_ref().unwrap_or(problem))?;
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
