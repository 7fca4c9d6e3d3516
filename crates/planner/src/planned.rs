//! A plan: the offset of each buffer of a problem, and a bound on the plan's quality.
//!
//! Only a [`Planner`](super::Planner) creates plans, and each is verified before it is returned. A
//! plan holds offsets and no memory.
//!
//! Invariants: `bound <= peak`; `is_optimal` exactly if it is proved that no plan of the problem
//! has a smaller peak.

use super::demand::BufferId;
use super::error::PlanError;
use super::fingerprint::Fingerprint;
use super::problem::{Problem, TOTAL_MAX};
use super::shape::{Shapes, gcd};
use lowtide_core::bytes::ByteSize;

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
    pub(super) fingerprint: Fingerprint,
    pub(super) sizes: Box<[ByteSize]>,
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
        let mut stride = self.segments.iter().max().map_or(0, |size| size.get());
        if self.segments.len() > 1 {
            let mut common = 1_u64;
            for demand in problem.demands() {
                let align = demand.align;
                let multiple = (common / gcd(common, align)).checked_mul(align);
                common =
                    multiple.filter(|multiple| *multiple <= TOTAL_MAX >> 32).ok_or_else(|| {
                        let (name, offset) = (demand.name.clone(), 0);
                        PlanError::Misaligned { name, offset, align }
                    })?;
            }
            stride = stride.next_multiple_of(common);
        }
        let flat = |place: &PlannedPlace| match place.segment {
            PlannedPlace::ELSEWHERE => 0, // never used
            segment => u64::from(segment) * stride + place.offset,
        };
        let flat: Vec<u64> = self.places.iter().map(flat).collect();
        problem.verify(&flat)?;
        let shapes = Shapes::of(problem)?;
        for (at, shape) in shapes.list.iter().enumerate() {
            let PlannedPlace { segment, offset } = self.place(shape.root);
            let size = self.segments.get(segment as usize).map_or(0, |size| size.get());
            let end = shapes.needs(at).iter().map(|need| offset + need.window.high).max();
            if let Some(end) = end.filter(|end| *end > size) {
                let name = problem.demands()[shape.root.index()].name.clone();
                return Err(PlanError::BeyondPeak { name, end, peak: size });
            }
        }
        Ok(())
    }
}
