//! Operations of the engine that several handles run.

use crate::driver::DriverError;
use crate::engine::{completion, import};
use crate::exec::inner::ArenaInner;
use crate::types::error::DeviceError;

impl ArenaInner {
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
    pub(crate) fn release_adopted(&self) -> u64 {
        self.run(import::release_imports)
    }
}
