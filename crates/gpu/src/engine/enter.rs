//! Leases: an arena is open, and no block moves, while one is held.
//!
//! Invariant: `leases held = leases entered - leases dropped`, in the process of the arena.

use super::place::wait_for_move;
use super::port::Port;
use super::resume::awake;
use crate::types::error::DeviceError;

/// Waits until the arena is awake, wakes it if it sleeps, and counts a lease.
///
/// # Errors
/// The errors of a wake.
pub(crate) async fn enter(port: &Port<'_>) -> Result<(), DeviceError> {
    loop {
        awake(port).await?;
        if try_enter(port).await? {
            return Ok(());
        }
    }
}

/// Counts a lease after the end of the move in progress. Returns `false` if the arena sleeps: it
/// must be woken first.
///
/// # Errors
/// As the sleep state refuses leases.
pub(crate) async fn try_enter(port: &Port<'_>) -> Result<bool, DeviceError> {
    wait_for_move(port).await;
    port.with(|state| {
        // It may have fallen asleep meanwhile.
        if !state.sleep.is_open() {
            return Ok(false);
        }
        state.enter(port.clock).map(|()| true)
    })
}
