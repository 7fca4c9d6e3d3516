//! Operations of the engine for callers that are no operations yet.
#![expect(unsafe_code, reason = "until sleep is an operation")]

use crate::driver::{DeviceAddress, DriverError};
use crate::engine::alloc::{self, AllocTarget, Begun};
use crate::engine::release::{self, Released};
use crate::engine::{completion, import, resize, retry};
use crate::exec::executor::Locked;
use crate::exec::inner::ArenaInner;
use crate::state::aging::Ages;
use crate::state::failure::AllocFailure;
use crate::state::region::{AllocRequest, Placement, Search};
use crate::state::streams::StreamKey;
use crate::types::error::DeviceError;
use crate::types::region::Region;
use lowtide_core::bytes::ByteSize;

impl ArenaInner {
    pub(crate) fn complete_all(&self) -> Result<(), DriverError> {
        self.run(completion::complete_all)
    }
    pub(crate) fn complete_used(&self) -> Result<(), DeviceError> {
        self.run(completion::complete_used)
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

    pub(crate) fn give_back<'a>(
        &'a self,
        books: Locked<'a>,
        granules: u64,
        ages: Option<Ages>,
    ) -> (Locked<'a>, Released) {
        drop(books);
        let given = self.run(async |port| release::give_back(port, granules, ages).await);
        (self.lock(), given)
    }

    pub(crate) fn ask_for_room<T>(
        &self,
        region: Region,
        failure: AllocFailure,
        attempt: &(dyn Fn(Search) -> Result<T, AllocFailure> + '_),
    ) -> Result<T, AllocFailure> {
        self.run(async |port| {
            let attempt = async |search| port.outside(|| attempt(search)).await;
            retry::call_for_room(port, region, failure, &attempt).await
        })
    }

    pub(crate) fn is_whole(&self) -> bool {
        !self.capabilities.virtual_memory
    }

    pub(crate) unsafe fn take_away(
        &self,
        at: DeviceAddress,
        size: ByteSize,
    ) -> Result<(), DriverError> {
        if self.is_whole() {
            // SAFETY: the contract of this function; a marked run of pieces is a whole segment.
            unsafe { self.driver.segment_destroy(at, size) }
        } else {
            // SAFETY: the contract of this function; a run lies in the region's one reservation.
            unsafe { self.driver.decommit(at, size) }
        }
    }
    pub(crate) fn release_adopted(&self) -> u64 {
        self.run(import::release_imports)
    }
}
