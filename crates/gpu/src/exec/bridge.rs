//! Operations of the engine for callers that are no operations yet.

use crate::driver::DriverError;
use crate::engine::{completion, resume, stores};
use crate::exec::executor::Locked;
use crate::exec::inner::ArenaInner;
use crate::state::pending::Uses;
use crate::state::streams::StreamKey;
use crate::types::error::DeviceError;

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
    pub(crate) fn end_copies<'a>(
        &'a self,
        locked: Locked<'a>,
    ) -> (Locked<'a>, Result<bool, DriverError>) {
        if locked.sleep.is_queueing() {
            return (locked, Ok(false));
        }
        drop(locked);
        let outcome = self.run(stores::end_copies);
        (self.lock(), outcome)
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
    pub(crate) fn come_after(
        &self,
        taker: Option<StreamKey>,
        uses: &Uses,
    ) -> Result<(), DriverError> {
        self.run(async |port| completion::come_after(port, taker, uses).await)
    }
}
