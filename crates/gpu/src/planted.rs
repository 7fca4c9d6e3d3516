//! Faults that tests inject into an arena to check that they are detected; only with the feature
//! `simulation`.
//!
//! Each takes effect at the line that prevents the fault. No configuration enables one.
//!
//! Invariant: without the feature `Shared::planted` is false at compile time.

use super::shared::Shared;

/// An injected fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(not(feature = "simulation"), expect(unreachable_pub, reason = "for the feature"))]
#[non_exhaustive]
pub enum Planted {
    /// A stream that reuses another stream's memory does not wait for it.
    NoEventWait,
    /// Pending memory is reused as if its uses were complete.
    CrossStreamReuse,
    /// An event counts as complete without a query.
    EarlyUnmap,
    /// A stream stays known after its last lane is dropped.
    StaleOwner,
    /// The end of a stream does not wait for calls that use its handle.
    StaleCall,
    /// A use on another lane is not recorded.
    ForgottenUse,
    /// A compaction copies before the work on the block is complete.
    MoveBeforeDone,
    /// A failed allocation frees its space as if nothing had been pending there.
    LostClaim,
    /// A block that waits for the work of others may be moved meanwhile.
    MovesWhatArrives,
    /// An event is recorded while its stream captures a graph.
    CapturedEvent,
    /// A driver call is made with the arena's lock held.
    LockAcrossCall,
    /// The arena falls asleep without waiting for work under leases.
    SleepBeforeDone,
    /// The end of an export is not recorded as a use by any stream.
    ForgottenLoan,
    /// Imported memory is released without a wait.
    ReleaseBeforeDone,
}

#[cfg(feature = "simulation")]
impl Planted {
    /// All faults.
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

/// The fault injected into an arena.
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
    /// Returns `true` if this fault is injected.
    #[inline]
    pub(super) fn planted(&self, fault: Planted) -> bool {
        self.plants.has(fault)
    }
}

#[cfg(feature = "simulation")]
impl super::arena::DeviceArena {
    /// Injects a fault permanently; the first one stays.
    #[doc(hidden)]
    pub fn plant(&self, fault: Planted) {
        let _ = self.shared().plants.fault.set(fault);
    }
}
