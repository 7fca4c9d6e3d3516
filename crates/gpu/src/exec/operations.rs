//! Runs operations of the engine for the handles of an arena. An allocation and a resize run
//! several, one after the other, from the first step to the error.

use std::ops::ControlFlow;

use crate::driver::DriverError;
use crate::engine::alloc::{self, Begun};
use crate::engine::alloc_error::record_failure;
use crate::engine::port::Port;
use crate::engine::{completion, import, raw_block, resize};
use crate::exec::inner::ArenaInner;
use crate::state::arena::ArenaState;
use crate::state::event::Origin;
use crate::state::failure::AllocFailure;
use crate::state::raw::RawUser;
use crate::state::region::{AllocRequest, AllocTarget, Placement};
use crate::state::streams::StreamKey;
use crate::types::error::DeviceError;
use crate::types::region::Region;

impl ArenaInner {
    /// Allocates a block with committed memory. The stream may use the block immediately, in stream
    /// order; any stream may if `None`. O(1), plus the granules if some must be committed.
    ///
    /// # Errors
    /// `OutOfAddresses`, `OutOfMemory`, or `Driver`.
    pub(crate) fn alloc_block(
        &self,
        region: Region,
        wanted: AllocRequest,
        taker: Option<StreamKey>,
    ) -> Result<Placement, DeviceError> {
        self.alloc_target(AllocTarget { region, wanted, taker })
    }

    fn alloc_target(&self, target: AllocTarget) -> Result<Placement, DeviceError> {
        let first = |state: &mut ArenaState| {
            let begun = alloc::begin(state, &*self.clock, target);
            self.caches.note_live(state.live(), state.limit.get());
            match begun {
                Begun::Done(placed) => ControlFlow::Break(Ok(placed)),
                begun => ControlFlow::Continue((target, begun)),
            }
        };
        let outcome = self.run_after(first, alloc::alloc);
        let outcome =
            outcome.map_err(|failure| self.record_failure(target.region, failure, target.wanted));
        self.flush_events();
        outcome
    }

    /// Allocates a raw block, like [`ArenaInner::alloc_block`], for the next work of a user, or of
    /// any stream.
    ///
    /// # Errors
    /// Those of [`ArenaInner::alloc_block`].
    pub(crate) fn alloc_raw_block(
        &self,
        region: Region,
        wanted: AllocRequest,
        user: Option<RawUser>,
    ) -> Result<Placement, DeviceError> {
        let is_guest = user.is_some_and(RawUser::is_guest);
        let mut taker = None;
        let first = |state: &mut ArenaState| {
            taker = user.and_then(|user| raw_block::enter(state, user));
            let target = AllocTarget { region, wanted, taker };
            let begun = alloc::begin(state, &*self.clock, target);
            self.caches.note_live(state.live(), state.limit.get());
            if let Begun::Done(placed) = begun {
                raw_block::insert(state, region, placed, (taker, is_guest));
                return ControlFlow::Break(Ok(placed));
            }
            ControlFlow::Continue((target, begun))
        };
        let rest = async |port: &Port<'_>, begun| raw_block::alloc(port, begun, is_guest).await;
        let outcome = self.run_after(first, rest).map_err(|failure| {
            let error = self.record_failure(region, failure, wanted);
            self.leave_guest(taker.filter(|_| is_guest));
            error
        });
        self.flush_events();
        outcome
    }

    /// Records that a raw block is not a guest of a stream after all.
    #[cold]
    fn leave_guest(&self, stream: Option<StreamKey>) {
        let leave = |state: &mut ArenaState| stream.filter(|&key| state.streams.leave_guest(key));
        self.end_streams(self.run_here(leave).ok().flatten().as_slice());
    }

    /// Counts a failure, and returns the error for the caller.
    fn record_failure(
        &self,
        region: Region,
        failure: AllocFailure,
        what: AllocRequest,
    ) -> DeviceError {
        if self.check_here().is_err() {
            return DeviceError::Forked; // a callback forked, and this process is the child
        }
        self.run(async |port| record_failure(port, region, failure, what).await)
    }

    /// Resizes a live block in place; returns `None` if the block cannot grow there.
    ///
    /// # Errors
    /// The errors of an allocation, or `ContentsLost`; the block is unchanged.
    pub(crate) fn resize_in_place(
        &self,
        region: Region,
        placed: Placement,
        requested: u64,
    ) -> Result<Option<Placement>, DeviceError> {
        let outcome =
            self.run(async |port| resize::resize_in_place(port, region, placed, requested).await);
        let outcome = match outcome {
            Err(failure) if failure.is_shortage() => self.run(async |port| {
                resize::resize_after_shortage(port, region, placed, requested).await
            }),
            outcome => outcome,
        };
        let what = AllocRequest { size: requested, align: 1, requested, origin: Origin::RESIZE };
        let outcome = outcome.map_err(|failure| self.record_failure(region, failure, what));
        self.flush_events();
        outcome
    }

    /// Allocates a larger block, copies the contents of a live block to it, and frees the old
    /// block. The caller holds a lease, so neither block moves.
    ///
    /// # Errors
    /// The errors of an allocation, or the driver's if the copy fails; the old block is unchanged.
    pub(crate) fn resize_by_copy(
        &self,
        region: Region,
        old: Placement,
        wanted: AllocRequest,
    ) -> Result<Placement, DeviceError> {
        let target = AllocTarget { region, wanted: wanted.by(Origin::RESIZE), taker: None };
        let new = self.alloc_target(target)?;
        let copied = self.run(async |port| resize::copy_to(port, region, old, new).await);
        self.flush_events();
        copied.map_err(Into::into)
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

    pub(crate) fn release_imports(&self) -> u64 {
        self.run(import::release_imports)
    }
}
