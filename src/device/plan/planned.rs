//! A plan: where each buffer of a problem lies, and how good that is known to be.
//!
//! It is made by [`Planner`](super::Planner) only, and verified before anybody sees it. It holds
//! offsets and no memory.
//!
//! Invariants: `bound <= peak`; `is_optimal` exactly if no plan of the problem has a smaller peak
//! and that was proved.

use super::error::PlanFault;
use super::problem::{BufferId, Problem};
use crate::bytes::ByteSize;

/// Offsets for all buffers of a [`Problem`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Plan {
    pub(super) offsets: Box<[u64]>,
    pub(super) peak: ByteSize,
    pub(super) bound: ByteSize,
    pub(super) nodes: u64,
}

impl Plan {
    /// Where a buffer lies, in bytes from the start of the memory. Where it needs none, because it
    /// is external, has no bytes or is never live, the offset means nothing. O(1).
    ///
    /// # Panics
    /// If the number is of another problem and beyond this one's.
    #[must_use]
    #[inline]
    pub fn offset(&self, id: BufferId) -> u64 {
        self.offsets[id.index()]
    }

    /// The offsets of all buffers, in their order.
    #[must_use]
    pub const fn offsets(&self) -> &[u64] {
        &self.offsets
    }

    /// How much memory the plan needs.
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

    /// Nodes of the exact search that it took.
    #[must_use]
    pub const fn nodes(&self) -> u64 {
        self.nodes
    }

    /// Checks the plan against a problem: the one that it was made for, or another one.
    ///
    /// # Errors
    /// [`PlanFault`], for the first fault.
    pub fn verify(&self, problem: &Problem) -> Result<(), PlanFault> {
        let needed = problem.verify(&self.offsets)?;
        if needed > self.peak {
            let (name, peak) = (String::from("the topmost buffer"), self.peak.get());
            return Err(PlanFault::BeyondPeak { name, end: needed.get(), peak });
        }
        Ok(())
    }
}
