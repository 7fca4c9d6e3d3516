//! The reason an allocation failed, with the figures of that moment.
//!
//! Invariant: if the limit was the bound, `active + the granules the block needs > limit` by the
//! error's own figures. If no free span can hold the block at a granule's start, a neighbour whose
//! memory is being committed may cost one granule more; that is retried.

use crate::driver::DriverError;
use crate::state::arena::ArenaState;
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
        let limit = (Bound::Limit, ByteSize::ZERO);
        Self::new(cause, out_of_memory("", ByteSize::new(requested), limit, [0; 5]))
    }

    /// Adds the current figures. The block that found no memory has no place any more, and so
    /// occupies no free space.
    pub(crate) fn with_figures(self, state: &ArenaState) -> Self {
        let DeviceError::OutOfMemory { requested, .. } = *self.error else { return self };
        let bound = if self.cause == Cause::Device { Bound::Driver } else { Bound::Limit };
        let (live, active) = (state.live(), state.memory().active);
        let holes = active.saturating_sub(live + state.pending());
        let [one, other] = Region::ALL.map(|region| state.region(region).largest_free());
        let figures = [live, active, state.memory().backed, holes, one.max(other)];
        Self::new(self.cause, out_of_memory(&state.name, requested, (bound, state.limit), figures))
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

/// Creates the error of an allocation that found no memory. The figures are those of live, active
/// and committed memory, of the holes, and of the largest free span.
fn out_of_memory(
    arena: &str,
    requested: ByteSize,
    (bound, limit): (Bound, ByteSize),
    figures: [u64; 5],
) -> DeviceError {
    let [live, active, committed, holes, largest_free] = figures.map(ByteSize::new);
    DeviceError::OutOfMemory {
        arena: arena.into(),
        requested,
        live,
        active,
        committed,
        limit,
        bound,
        holes,
        largest_free,
        recoverable: ByteSize::ZERO,
    }
}
