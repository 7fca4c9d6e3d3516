//! Pool governors of a `Memory`: their decay is called on the worker.
//!
//! It opens none and ends none: a governor belongs to who opened it, and is forgotten when that
//! drops it.
//!
//! Invariant: no call of a driver under the lock.

use std::sync::{Arc, Weak};

use super::error::{Diagnostic, MemoryError};
use super::shared::Shared;
use super::{Memory, Moment};
use crate::device::driver::cuda::PoolGovernor;
use crate::sync::{Mutex, lock};

/// The governors that still live, and some that no longer do.
pub(super) type Governors = Mutex<Vec<Weak<PoolGovernor>>>;

impl Memory {
    /// Has this `Memory` call the governor's [`PoolGovernor::decay`] on its worker, once in each
    /// metrics interval, for as long as both live. A failure is a note. To ask for it twice changes
    /// nothing.
    ///
    /// The pool keeps its own decay time: neither a purge of this `Memory` nor the watermark of the
    /// device shortens that; [`PoolGovernor::trim`] gives back all. The worker never waits for the
    /// context, so that it spoils no capture of a graph: memory whose free no wait of the program
    /// has shown to be complete (`cuStreamSynchronize` after the free, for example) stays in the
    /// pool until one has. [`PoolGovernor::decay`] waits itself when the program calls it.
    ///
    /// # Errors
    /// [`MemoryError::Forked`].
    pub fn govern(&self, governor: &Arc<PoolGovernor>) -> Result<(), MemoryError> {
        let shared = &self.0.shared;
        shared.check_here()?;
        let new = Arc::downgrade(governor);
        let mut governors = lock(&shared.governors);
        governors.retain(|one| one.strong_count() > 0 && !one.ptr_eq(&new));
        governors.push(new);
        Ok(())
    }
}

impl Shared {
    /// Gives back what nobody used for long enough in the pools that are governed.
    pub(super) fn decay_governors(&self, now: Moment) {
        if self.check_here().is_err() {
            return;
        }
        let all = lock(&self.governors).clone();
        for governor in all.iter().filter_map(Weak::upgrade) {
            if let Err(error) = governor.decay(now) {
                let text = format!("governor of {}: {error}", governor.device());
                self.diagnostic(Diagnostic::warning("device", text));
            }
        }
    }
}
