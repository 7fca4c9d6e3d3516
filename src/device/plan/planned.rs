//! A plan: where each buffer of a problem lies, and how good that is known to be.
//!
//! It is made by [`Planner`](super::Planner) only, and verified before anybody sees it. It holds
//! offsets and no memory.
//!
//! Invariants: `bound <= peak`; `is_optimal` exactly if no plan of the problem has a smaller peak
//! and that was proved.

use super::error::PlanFault;
use super::problem::{BufferId, Problem, TOTAL_MAX};
use super::reuse::Fingerprint;
use super::shape::{Shapes, gcd};
use crate::bytes::ByteSize;

/// Where a buffer lies.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Place {
    /// Which of the plan's segments; [`Place::ELSEWHERE`] for memory of the caller's own.
    pub segment: u32,
    /// Bytes from the segment's start.
    pub offset: u64,
}

impl Place {
    /// The segment of what lies in memory of the caller's own.
    pub const ELSEWHERE: u32 = u32::MAX;
}

/// Places for all buffers of a [`Problem`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Plan {
    pub(super) places: Box<[Place]>,
    /// How much memory each segment needs.
    pub(super) segments: Box<[ByteSize]>,
    pub(super) peak: ByteSize,
    pub(super) bound: ByteSize,
    pub(super) nodes: u64,
    /// What it was planned for.
    pub(super) align: u64,
    pub(super) fingerprint: Fingerprint,
    pub(super) sizes: Box<[ByteSize]>,
}

impl Plan {
    /// Where a buffer lies, in bytes from the start of its segment: of the memory, where the plan
    /// has one segment. Where it needs none, because it is external, has no bytes or is never live,
    /// that means nothing. O(1).
    ///
    /// # Panics
    /// If the number is of another problem and beyond this one's.
    #[must_use]
    #[inline]
    pub fn offset(&self, id: BufferId) -> u64 {
        self.places[id.index()].offset
    }

    /// The segment in which a buffer lies, and where. O(1).
    ///
    /// # Panics
    /// As [`Plan::offset`].
    #[must_use]
    #[inline]
    pub fn place(&self, id: BufferId) -> Place {
        self.places[id.index()]
    }

    /// The places of all buffers, in their order.
    #[must_use]
    pub const fn places(&self) -> &[Place] {
        &self.places
    }

    /// How much memory each segment needs: one, unless the planner was told of a largest size.
    #[must_use]
    pub const fn segments(&self) -> &[ByteSize] {
        &self.segments
    }

    /// How much memory the plan needs, in all segments together.
    #[must_use]
    pub const fn peak(&self) -> ByteSize {
        self.peak
    }

    /// How much any plan needs: the most that is live at once, or more where that was proved.
    #[must_use]
    pub const fn bound(&self) -> ByteSize {
        self.bound
    }

    /// What might still be gained: `peak - bound`.
    #[must_use]
    pub const fn gap(&self) -> ByteSize {
        self.peak.saturating_sub(self.bound)
    }

    /// Whether it is proved that no plan has a smaller peak. Where a search proved it, that rests
    /// on no two of its states having the same hash of 64 bits.
    #[must_use]
    pub fn is_optimal(&self) -> bool {
        self.peak == self.bound
    }

    /// Offsets are good in memory that begins at a multiple of this many bytes: the least
    /// multiple of all alignments, or `u64::MAX` where that is larger.
    #[must_use]
    pub const fn align(&self) -> u64 {
        self.align
    }

    /// Nodes of the exact search that it took.
    #[must_use]
    pub const fn nodes(&self) -> u64 {
        self.nodes
    }

    /// Checks the plan against a problem: the one that it was made for, or another one. O(n log n).
    ///
    /// # Errors
    /// [`PlanFault`], for the first fault.
    pub fn verify(&self, problem: &Problem) -> Result<(), PlanFault> {
        let (found, expected) = (self.places.len(), problem.demands().len());
        if found != expected {
            return Err(PlanFault::Count { found, expected });
        }
        // Segments are laid out apart, at multiples of every alignment.
        let mut stride = self.segments.iter().max().map_or(0, |size| size.get());
        if self.segments.len() > 1 {
            let mut common = 1_u64;
            for demand in problem.demands() {
                let align = demand.align;
                let multiple = (common / gcd(common, align)).checked_mul(align);
                common =
                    multiple.filter(|multiple| *multiple <= TOTAL_MAX >> 32).ok_or_else(|| {
                        let (name, offset) = (demand.name.clone(), 0);
                        PlanFault::Misaligned { name, offset, align }
                    })?;
            }
            stride = stride.next_multiple_of(common);
        }
        let flat = |place: &Place| match place.segment {
            Place::ELSEWHERE => 0, // which nobody looks at
            segment => u64::from(segment) * stride + place.offset,
        };
        let flat: Vec<u64> = self.places.iter().map(flat).collect();
        problem.verify(&flat)?;
        let shapes = Shapes::of(problem)?;
        for (at, shape) in shapes.list.iter().enumerate() {
            let Place { segment, offset } = self.place(shape.root);
            let size = self.segments.get(segment as usize).map_or(0, |size| size.get());
            let end = shapes.needs(at).iter().map(|need| offset + need.window.high).max();
            if let Some(end) = end.filter(|end| *end > size) {
                let name = problem.demands()[shape.root.index()].name.clone();
                return Err(PlanFault::BeyondPeak { name, end, peak: size });
            }
        }
        Ok(())
    }
}
