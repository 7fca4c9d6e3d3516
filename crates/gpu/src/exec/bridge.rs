//! Operations of the engine for callers that are no operations yet.

use crate::driver::DriverError;
use crate::engine::alloc::{self, AllocTarget, Begun};
use crate::engine::{completion, resize, resume};
use crate::exec::executor::Locked;
use crate::exec::inner::ArenaInner;
use crate::index::Span;
use crate::state::failure::AllocFailure;
use crate::state::region::{AllocRequest, Placement};
use crate::state::streams::StreamKey;
use crate::types::error::DeviceError;
use crate::types::region::Region;

impl ArenaInner {
    /// Waits until the arena is awake; wakes it if it sleeps.
    #[inline]
    pub(crate) fn awake<'a>(&'a self, mut locked: Locked<'a>) -> Result<Locked<'a>, DeviceError> {
        while !locked.sleep.is_open() {
            drop(locked);
            self.run(resume::awake)?;
            locked = self.lock();
        }
        Ok(locked)
    }
    pub(crate) fn complete_all(&self) -> Result<(), DriverError> {
        self.run(completion::complete_all)
    }
    pub(crate) fn complete_pending(&self) -> Result<(), DeviceError> {
        self.run(completion::complete_pending)
    }
    pub(crate) fn is_any_capturing(&self) -> Result<bool, DriverError> {
        self.run(completion::is_any_capturing)
    }
    pub(crate) fn look_for_ends(&self, may_wait: bool) -> Result<(), DriverError> {
        self.run(async |port| completion::look_for_ends(port, may_wait).await)
    }
    pub(crate) fn mark_end(&self, stream: StreamKey) -> Result<(), DriverError> {
        self.run(async |port| completion::mark_end(port, stream).await)
    }
    pub(crate) fn end_stream(&self, stream: StreamKey) {
        self.run(async |port| completion::end_stream(port, stream).await);
    }
    /// Allocates a block with memory behind it. O(1), plus its granules if some must be committed.
    ///
    /// # Errors
    /// `OutOfAddresses`, `OutOfMemory`, or `Driver`.
    pub(crate) fn alloc_block(
        &self,
        region: Region,
        wanted: AllocRequest,
        taker: Option<StreamKey>,
    ) -> Result<Placement, DeviceError> {
        let target = AllocTarget { region, wanted, taker };
        let mut state = self.lock();
        let begun = alloc::begin(&mut state, &*self.clock, target);
        self.fronts.note_live(state.live(), state.limit.get());
        drop(state);
        let outcome = match begun {
            Begun::Done(placed) => Ok(placed),
            begun => self.run(async |port| alloc::alloc(port, target, begun).await),
        };
        self.pass_on();
        outcome
    }

    pub(crate) fn resize_in_place(
        &self,
        region: Region,
        placed: Placement,
        requested: u64,
    ) -> Result<Option<Placement>, DeviceError> {
        let resized =
            self.run(async |port| resize::resize_in_place(port, region, placed, requested).await);
        self.pass_on();
        resized
    }

    pub(crate) fn resize_by_copy(
        &self,
        region: Region,
        old: Placement,
        wanted: AllocRequest,
    ) -> Result<Placement, DeviceError> {
        let moved = self.run(async |port| resize::resize_by_copy(port, region, old, wanted).await);
        self.pass_on();
        moved
    }

    pub(crate) fn back<'a>(
        &'a self,
        books: Locked<'a>,
        region: Region,
        span: Span,
    ) -> (Locked<'a>, Result<(), AllocFailure>) {
        drop(books);
        let outcome = self.run(async |port| alloc::ensure_committed(port, region, span).await);
        (self.lock(), outcome)
    }
}
