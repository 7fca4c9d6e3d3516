//! Operations of the engine for callers that are no operations yet.

use crate::driver::DriverError;
use crate::engine::{alloc, completion, resume};
use crate::exec::executor::Locked;
use crate::exec::inner::ArenaInner;
use crate::index::Span;
use crate::state::failure::AllocFailure;
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
