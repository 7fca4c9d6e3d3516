//! Operations of the engine for callers that are no operations yet.
#![expect(unsafe_code, reason = "until sleep is an operation")]

use crate::driver::{DeviceAddress, DriverError};
use crate::engine::alloc;
use crate::engine::release::{self, Released};
use crate::engine::{completion, resume, retry};
use crate::exec::executor::Locked;
use crate::exec::inner::ArenaInner;
use crate::index::Span;
use crate::state::aging::Ages;
use crate::state::failure::AllocFailure;
use crate::state::region::Search;
use crate::state::streams::StreamKey;
use crate::types::error::DeviceError;
use crate::types::region::Region;
use lowtide_core::bytes::ByteSize;

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
    pub(crate) fn mark_end(&self, stream: StreamKey) -> Result<(), DriverError> {
        self.run(async |port| completion::mark_end(port, stream).await)
    }
    pub(crate) fn end_stream(&self, stream: StreamKey) {
        self.run(async |port| completion::end_stream(port, stream).await);
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
}
