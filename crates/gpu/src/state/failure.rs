//! The reason an allocation failed, with the figures of that moment.
//!
//! Invariant: if the limit was the bound, `active + the granules the block needs > limit` by the
//! error's own figures. If no free span can hold the block at a granule's start, a neighbour whose
//! memory is being committed may cost one granule more; that is retried.

use crate::driver::DriverError;
use crate::state::arena::ArenaState;
use crate::state::region::RegionState;
use crate::types::Region;
use crate::types::error::{Bound, DeviceError, is_unwaited};
use lowtide_core::bytes::ByteSize;
use lowtide_core::clock::Moment;

/// The result of the last plan for an error.
#[derive(Debug, Default)]
pub(crate) struct CompactionEstimate {
    /// The time at which the next plan may be made; never while one is being made.
    pub(crate) next: Moment,
    pub(crate) recoverable: u64,
}

/// The reason an allocation failed, as the failures are counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Cause {
    /// This many bytes of granules would have to become idle.
    Limit {
        over: u64,
    },
    Device,
    Addresses,
    Driver,
    /// The arena was closed, or the block was lost. No memory was short, and the failure is not
    /// counted.
    Uncounted,
}

/// An allocation that failed.
#[derive(Debug)]
pub(crate) struct AllocFailure {
    pub(crate) cause: Cause,
    pub(crate) error: Box<DeviceError>,
}

impl AllocFailure {
    /// Creates a failure. Its error is boxed, so that the results of operations are small.
    pub(crate) fn new(cause: Cause, error: impl Into<DeviceError>) -> Self {
        Self { cause, error: Box::new(error.into()) }
    }

    /// Creates the failure of an allocation for lack of memory. [`AllocFailure::with_figures`] adds
    /// its figures.
    pub(crate) fn of(cause: Cause, requested: u64) -> Self {
        const NONE: ByteSize = ByteSize::ZERO;
        let error = DeviceError::OutOfMemory {
            arena: Box::default(),
            requested: ByteSize::new(requested),
            live: NONE,
            active: NONE,
            committed: NONE,
            limit: NONE,
            bound: Bound::Limit,
            holes: NONE,
            largest_free: NONE,
            recoverable: NONE,
        };
        Self::new(cause, error)
    }

    /// Adds the current figures. The block that found no memory has no place any more, and so
    /// occupies no free space.
    pub(crate) fn with_figures(self, state: &ArenaState) -> Self {
        match *self.error {
            DeviceError::OutOfMemory { requested, .. } => {
                let bound = if self.cause == Cause::Device { Bound::Driver } else { Bound::Limit };
                Self::new(self.cause, out_of_memory(state, requested, bound))
            }
            _ => self,
        }
    }

    /// Returns `true` if memory or addresses were short, in an arena that is awake.
    pub(crate) fn is_shortage(&self) -> bool {
        !matches!(self.cause, Cause::Uncounted) && self.error.is_out_of_memory()
    }

    /// Returns `true` if there is room under the limit by the failure's own figures.
    pub(crate) fn is_contradicted(&self, granule: ByteSize) -> bool {
        let DeviceError::OutOfMemory { requested, active, limit, bound: Bound::Limit, .. } =
            *self.error
        else {
            return false;
        };
        let needed = requested.next_multiple_of(granule).unwrap_or(ByteSize::MAX);
        self.is_shortage() && active.saturating_add(needed) <= limit
    }

    /// Returns `true` if a wait would have helped, but a capture forbids it, or may forbid it.
    pub(crate) fn is_by_capture(&self) -> bool {
        matches!(&*self.error, DeviceError::Driver(error) if is_unwaited(error))
    }

    /// Creates the failure of a driver call.
    pub(crate) fn of_driver(error: DriverError) -> Self {
        Self::new(Cause::Driver, error)
    }

    /// Creates a failure that is not a lack of memory.
    pub(crate) fn uncounted(error: DeviceError) -> Self {
        Self::new(Cause::Uncounted, error)
    }
}

/// Creates the error of an allocation that found no memory.
fn out_of_memory(state: &ArenaState, requested: ByteSize, bound: Bound) -> DeviceError {
    let regions = Region::ALL.map(|region| state.region(region));
    let largest_free = regions.into_iter().map(RegionState::largest_free).max();
    DeviceError::OutOfMemory {
        arena: state.name.as_str().into(),
        requested,
        live: ByteSize::new(state.live()),
        active: ByteSize::new(state.active()),
        committed: ByteSize::new(state.backed()),
        limit: state.limit,
        bound,
        holes: ByteSize::new(state.active().saturating_sub(state.live() + state.pending())),
        largest_free: ByteSize::new(largest_free.unwrap_or(0)),
        recoverable: ByteSize::ZERO,
    }
}
