//! Faults that tests plant into an arena, to see that they are found: with the feature
//! `simulation`, and nothing at all without it.
//!
//! Each stands where the line is that prevents it. No setting plants one.
//!
//! Invariant: without the feature `Shared::planted` is false, and known to be when it is compiled.

use super::shared::Shared;

/// A fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(not(feature = "simulation"), expect(unreachable_pub, reason = "for the feature"))]
#[non_exhaustive]
pub enum Planted {
    /// A stream that takes what another freed is not made to wait.
    NoEventWait,
    /// What is pending is taken as if its uses were complete.
    CrossStreamReuse,
    /// An event counts as complete without being asked.
    EarlyUnmap,
    /// A stream whose last lane is gone stays known.
    StaleOwner,
    /// The end of a stream does not wait for calls that are made with its handle.
    StaleCall,
    /// A use on another lane is not noted.
    ForgottenUse,
    /// A compaction copies before the work on the block is complete.
    MoveBeforeDone,
    /// An allocation that fails gives the space back as if nothing had been pending there.
    LostClaim,
    /// A block that waits for others' work may be moved meanwhile.
    MovesWhatArrives,
    /// An event is recorded while its stream captures a graph.
    CapturedEvent,
    /// A driver call is made with the arena's lock held.
    LockAcrossCall,
    /// The arena falls asleep without waiting for work that leases let in.
    SleepBeforeDone,
    /// The end of a loan is not noted as a use by any stream.
    ForgottenLoan,
    /// Adopted memory is released without a wait.
    ReleaseBeforeDone,
}

#[cfg(feature = "simulation")]
impl Planted {
    /// All of them.
    #[doc(hidden)]
    pub const ALL: [Self; 14] = [
        Self::NoEventWait,
        Self::CrossStreamReuse,
        Self::EarlyUnmap,
        Self::StaleOwner,
        Self::StaleCall,
        Self::ForgottenUse,
        Self::MoveBeforeDone,
        Self::LostClaim,
        Self::MovesWhatArrives,
        Self::CapturedEvent,
        Self::LockAcrossCall,
        Self::SleepBeforeDone,
        Self::ForgottenLoan,
        Self::ReleaseBeforeDone,
    ];
}

/// What is planted in an arena.
#[derive(Debug, Default)]
pub(super) struct Plants {
    #[cfg(feature = "simulation")]
    fault: std::sync::OnceLock<Planted>,
}

impl Plants {
    #[cfg(feature = "simulation")]
    fn has(&self, fault: Planted) -> bool {
        self.fault.get() == Some(&fault)
    }

    #[cfg(not(feature = "simulation"))]
    #[expect(clippy::unused_self, reason = "as with the feature")]
    const fn has(&self, _: Planted) -> bool {
        false
    }
}

impl Shared {
    /// Whether this fault is planted.
    #[inline]
    pub(super) fn planted(&self, fault: Planted) -> bool {
        self.plants.has(fault)
    }
}

#[cfg(feature = "simulation")]
impl super::arena::DeviceArena {
    /// Plants a fault, for good; the first one stays.
    #[doc(hidden)]
    pub fn plant(&self, fault: Planted) {
        let _ = self.shared().plants.fault.set(fault);
    }
}
