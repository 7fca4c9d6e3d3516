//! Pool governors of a `Memory`, which the worker decays.
//!
//! It opens and closes none: a governor belongs to its creator, and is removed from the list when
//! dropped.
//!
//! Invariant: no driver call under the lock.

use std::sync::{Arc, Weak};

use crate::clock::Moment;
use crate::device::driver::cuda::PoolGovernor;
use crate::memory::devices::MemoryDevices;
use crate::memory::error::{Diagnostic, MemoryError};
use crate::memory::shared::Shared;
use crate::sync::lock;

impl MemoryDevices<'_> {
    /// Calls [`PoolGovernor::decay`] of the governor on the worker, once in each metrics interval,
    /// while both exist. A failure becomes a diagnostic. Registering a governor twice has no
    /// effect.
    ///
    /// The pool keeps its own decay time: neither a purge of this `Memory` nor the watermark of the
    /// device shortens it; [`PoolGovernor::trim`] releases all idle memory. The worker never waits
    /// for the context, because that would invalidate a graph capture. Memory stays in the pool
    /// until the program has waited for its free to complete (for example with
    /// `cuStreamSynchronize`). [`PoolGovernor::decay`] waits itself if the program calls it.
    ///
    /// # Errors
    /// [`MemoryError::Forked`] in a forked child.
    pub fn govern(&self, governor: &Arc<PoolGovernor>) -> Result<(), MemoryError> {
        let shared = self.shared();
        shared.check_here()?;
        let new = Arc::downgrade(governor);
        let mut governors = lock(&shared.devices.governors);
        governors.retain(|one| one.strong_count() > 0 && !one.ptr_eq(&new));
        governors.push(new);
        Ok(())
    }
}

impl Shared {
    /// Releases the memory of governed pools that was unused for the decay time.
    pub(super) fn decay_governors(&self, now: Moment) {
        if self.check_here().is_err() {
            return;
        }
        let all = lock(&self.devices.governors).clone();
        for governor in all.iter().filter_map(Weak::upgrade) {
            if let Err(error) = governor.decay(now) {
                // A lost device is asked for nothing more.
                if error.is_context_lost() {
                    let lost = Arc::downgrade(&governor);
                    lock(&self.devices.governors).retain(|one| !one.ptr_eq(&lost));
                }
                let text = format!("pool governor of {}: {error}", governor.device());
                self.add_diagnostic(Diagnostic::warning("device", text));
            }
        }
    }
}
