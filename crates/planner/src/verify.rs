//! Verification of offsets: no overlap, alignments, fixed and shared places.
//!
//! One sweep over time with an ordered map of live shapes. It shares no code with the solver, and
//! accepts plans from any source.
//!
//! Invariant: offsets pass exactly if no byte is needed by two shapes at one step, every offset is
//! a multiple of its buffer's alignment, and every fixed or shared buffer is at its required place.

use std::collections::BTreeMap;

use super::error::PlanError;
use super::problem::Problem;
use super::shape::Shapes;
use lowtide_core::bytes::ByteSize;

impl Problem {
    /// Checks offsets, one for each buffer in order, and returns the number of bytes that they need
    /// in all. Offsets of external buffers are ignored. O(n log n).
    ///
    /// # Errors
    /// [`PlanError`] for the first fault in the order of steps.
    pub fn verify(&self, offsets: &[u64]) -> Result<ByteSize, PlanError> {
        let (found, expected) = (offsets.len(), self.demands().len());
        if found != expected {
            return Err(PlanError::OffsetCount { found, expected });
        }
        let shapes = Shapes::of(self)?;
        for id in self.ids().filter(|id| !self.is_external(*id)) {
            self.verify_one(id.0, offsets)?;
        }
        self.verify_apart(&shapes, |at| Some(offsets[shapes.list[at].root.index()]))?;
        let used = (0..shapes.list.len()).filter(|at| shapes.size(*at) > 0);
        let ends = used.map(|at| offsets[shapes.list[at].root.index()] + shapes.size(at));
        Ok(ByteSize::new(ends.max().unwrap_or(0)))
    }

    /// One buffer by itself.
    fn verify_one(&self, id: u32, offsets: &[u64]) -> Result<(), PlanError> {
        let (demand, offset) = (&self.demands()[id as usize], offsets[id as usize]);
        let name = || demand.name.clone();
        if offset % demand.align != 0 {
            return Err(PlanError::Misaligned { name: name(), offset, align: demand.align });
        }
        if let Some(fixed) = demand.offset.filter(|fixed| *fixed != offset) {
            return Err(PlanError::Moved { name: name(), offset, fixed });
        }
        let (root, at) = self.unions.root(id);
        let over_offset = offsets[root as usize];
        if over_offset.checked_add(at) != Some(offset) {
            let over = self.demands()[root as usize].name.clone();
            return Err(PlanError::Apart { name: name(), offset, over, over_offset });
        }
        if offset.checked_add(demand.size.get()).is_none() {
            return Err(PlanError::BeyondPeak { name: name(), end: u64::MAX, peak: u64::MAX });
        }
        Ok(())
    }

    /// Checks that no two shapes overlap, of those that have an offset.
    pub(super) fn verify_apart(
        &self,
        shapes: &Shapes,
        offset: impl Fn(usize) -> Option<u64>,
    ) -> Result<(), PlanError> {
        // Step, whether something begins there (ends come first), which shape, from where to where.
        let mut events = Vec::new();
        for at in 0..shapes.list.len() {
            let Some(offset) = offset(at) else { continue };
            for need in shapes.needs(at) {
                // The ends fit: `verify_one` has checked them, and `Problem::add` fixed ones.
                let (low, high) = (offset + need.low, offset + need.high);
                events.push((need.first, true, at, low, high));
                events.push((need.end, false, at, low, high));
            }
        }
        events.sort_unstable();
        let mut there: BTreeMap<u64, (u64, usize)> = BTreeMap::new();
        for (step, begins, second, low, high) in events {
            if !begins {
                there.remove(&low);
                continue;
            }
            // Those that are there do not overlap: the last one below `high` reaches highest.
            let below = there.range(..high).next_back();
            if let Some((_, &(_, first))) = below.filter(|(_, (end, _))| *end > low) {
                let name = |at: usize| self.demands()[shapes.list[at].root.index()].name.clone();
                let [at, other_offset] = [second, first].map(|at| offset(at).unwrap_or_default());
                let (name, other) = (name(second), name(first));
                return Err(PlanError::Overlap { name, offset: at, other, other_offset, step });
            }
            there.insert(low, (high, second));
        }
        Ok(())
    }
}
