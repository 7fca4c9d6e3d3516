//! The reason an allocation failed, with the figures for its caller.
//!
//! The figures are of the moment of the failure, under one hold of the lock. The gain of a
//! compaction is planned afterwards, on a copy, and only for an error that a caller gets. `commit`
//! makes the decision.
//!
//! Invariant: if the limit was the bound, `active + the granules the block needs > limit` by the
//! error's own figures. If no free span can hold the block at a granule's start, a neighbour whose
//! memory is being committed may cost one granule more; that is retried 16 times.

use crate::engine::compact::plan::{self, Target};
use crate::engine::compact::{CompactOptions, Goal};
use crate::engine::proof::is_unwaited;
use crate::exec::inner::ArenaInner;
use crate::index::End;
use crate::state::arena::ArenaState;
use crate::state::event::FailedRequest;
use crate::state::region::{Region, RegionState};
use crate::types::error::{Bound, DeviceError};
use lowtide_core::bytes::ByteSize;
use lowtide_core::clock::Moment;
use lowtide_core::log;

/// The number of blocks and free spans planned for in each range of each region: a plan then takes
/// about 4 ms (`benches/time`).
const PARTS_MAX: usize = 256;

/// The time between plans, as a multiple of the last plan's duration: errors come in bursts, and
/// all of their plans together take no more than a 32nd of a core.
const PLANS_APART: u32 = 31;

/// The result of the last plan for an error.
#[derive(Debug, Default)]
pub(crate) struct CompactionEstimate {
    /// When the next may be made; never, while one is.
    next: Moment,
    recoverable: u64,
}

/// The reason an allocation failed, as the failures are counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Cause {
    /// So many bytes of granules would have to fall idle.
    Limit {
        over: u64,
    },
    Device,
    Addresses,
    Driver,
    /// The arena was closed, or the block was lost: no want of memory, and not counted.
    Uncounted,
}

/// An allocation that failed.
#[derive(Debug)]
pub(crate) struct AllocFailure {
    pub(crate) cause: Cause,
    pub(crate) error: DeviceError,
}

impl AllocFailure {
    /// Creates a refusal for lack of memory. [`AllocFailure::told`] adds its figures.
    pub(crate) const fn of(cause: Cause, requested: u64) -> Self {
        const NONE: ByteSize = ByteSize::ZERO;
        let error = DeviceError::OutOfMemory {
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
        Self { cause, error }
    }

    /// Adds the current figures: the block that found no memory has no place any more, and so takes
    /// no free space.
    pub(crate) fn told(self, books: &ArenaState) -> Self {
        match self.error {
            DeviceError::OutOfMemory { requested, .. } => {
                let bound = if self.cause == Cause::Device { Bound::Driver } else { Bound::Limit };
                Self { error: books.out_of_memory(requested, bound), ..self }
            }
            _ => self,
        }
    }

    /// Returns `true` if memory or addresses were short, in an arena that is awake.
    pub(crate) const fn is_shortage(&self) -> bool {
        !matches!(self.cause, Cause::Uncounted) && self.error.is_out_of_memory()
    }

    /// Returns `true` if by its own figures there is room under the limit.
    pub(crate) fn is_contradicted(&self, granule: ByteSize) -> bool {
        let DeviceError::OutOfMemory { requested, active, limit, bound: Bound::Limit, .. } =
            self.error
        else {
            return false;
        };
        let needed = requested.next_multiple_of(granule).unwrap_or(ByteSize::MAX);
        self.is_shortage() && active.saturating_add(needed) <= limit
    }

    /// Returns `true` if there was something to wait for that a capture forbids, or may forbid.
    pub(crate) fn is_by_capture(&self) -> bool {
        matches!(&self.error, DeviceError::Driver(error) if is_unwaited(error))
    }

    /// One that is no want of memory.
    pub(crate) const fn uncounted(error: DeviceError) -> Self {
        Self { cause: Cause::Uncounted, error }
    }
}

impl ArenaState {
    /// Creates the error of an allocation that finds no memory.
    fn out_of_memory(&self, requested: ByteSize, bound: Bound) -> DeviceError {
        let regions = Region::ALL.map(|region| self.region(region));
        let largest_free = regions.into_iter().map(RegionState::largest_free).max();
        DeviceError::OutOfMemory {
            requested,
            live: ByteSize::new(self.live()),
            active: ByteSize::new(self.active()),
            committed: ByteSize::new(self.backed()),
            limit: self.limit,
            bound,
            holes: ByteSize::new(self.active().saturating_sub(self.live() + self.pending())),
            largest_free: ByteSize::new(largest_free.unwrap_or(0)),
            recoverable: ByteSize::ZERO,
        }
    }
}

impl ArenaInner {
    /// Counts a refusal, and returns its error.
    pub(crate) fn note_refusal(
        &self,
        region: Region,
        refusal: AllocFailure,
        request: FailedRequest,
    ) -> DeviceError {
        let AllocFailure { cause, mut error } = refusal;
        if self.check_here().is_err() {
            return DeviceError::Forked; // a callback forked, and this is the child
        }
        if matches!(cause, Cause::Uncounted) {
            log!(debug, arena = self.name, %error, "allocation failed");
            return error;
        }
        match &mut error {
            DeviceError::OutOfMemory { recoverable, holes, .. } => {
                self.plan(|outlook| outlook.recoverable = self.recoverable());
                let granule = self.granule.get();
                let known = self.lock().outlook.recoverable.min(holes.get() / granule * granule);
                *recoverable = ByteSize::new(known);
            }
            DeviceError::OutOfAddresses { requested, largest_span, compacted_span, .. } => {
                *compacted_span = *largest_span;
                self.plan(|_| {
                    *compacted_span = self.compacted_span(region, *requested).max(*largest_span);
                });
            }
            _ => {}
        }
        self.lock().note_failure(request, (cause, &error), &*self.clock);
        log!(debug, arena = self.name, %error, "allocation failed");
        error
    }

    /// Makes a plan, with no lock held, if the last one was long enough ago.
    fn plan(&self, plan: impl FnOnce(&mut CompactionEstimate)) {
        let from = self.clock.now();
        let mut books = self.lock();
        if from < books.outlook.next {
            return;
        }
        books.outlook.next = Moment::NEVER;
        let mut outlook = CompactionEstimate {
            recoverable: books.outlook.recoverable,
            ..CompactionEstimate::default()
        };
        drop(books);
        plan(&mut outlook);
        let now = self.clock.now();
        outlook.next = now + (now - from).saturating_mul(PLANS_APART);
        self.lock().outlook = outlook;
    }

    /// Bytes of granules that a compaction of both regions would make idle.
    fn recoverable(&self) -> u64 {
        let granule = self.granule.get();
        let mut granules = 0;
        for region in Region::ALL {
            for end in [End::Low, End::High] {
                let books = self.lock();
                let of = books.region(region);
                let used = of.live() + of.pending.bytes();
                let holes = of.segment.active().saturating_sub(used);
                // Nothing moves to memory that the device may still use.
                if holes < granule || of.pending.bytes() > 0 {
                    continue;
                }
                let parts = books.first_parts(CompactOptions::new(region), end, PARTS_MAX);
                let segments = of.segment.segments();
                drop(books);
                let target = segments.as_deref().map_or(Target::Granules, Target::Segments);
                let [before, after] = plan::outlook(&parts, granule, target).active;
                granules += before.saturating_sub(after);
            }
        }
        granules * granule
    }

    /// The longest free span of addresses that a compaction for a block would make.
    fn compacted_span(&self, region: Region, wanted: ByteSize) -> ByteSize {
        let goal = Goal::Contiguous(wanted);
        let options = CompactOptions { goal, ..CompactOptions::new(region) };
        let parts = self.lock().first_parts(options, End::Low, PARTS_MAX);
        let target = Target::Contiguous(wanted.get());
        ByteSize::new(plan::outlook(&parts, self.granule.get(), target).largest[1])
    }
}
