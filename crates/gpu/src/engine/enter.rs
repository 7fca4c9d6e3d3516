//! Leases: while a lease is held, the arena is open and no block moves.
//!
//! Invariant: `leases held = leases entered - leases dropped`, in the process of the arena.

use super::place::wait_for_move;
use super::port::Port;
use super::resume::awake;
use crate::types::error::DeviceError;

/// Waits until the arena is awake, waking it if it sleeps, and counts a lease.
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

/// Counts a lease after the end of a move in progress. Returns `false` if the arena sleeps and must
/// be woken first.
///
/// # Errors
/// Those of the sleep state, which rejects leases.
pub(crate) async fn try_enter(port: &Port<'_>) -> Result<bool, DeviceError> {
    wait_for_move(port).await;
    port.with(|state| {
        // The arena may have fallen asleep meanwhile.
        if !state.sleep.is_open() {
            return Ok(false);
        }
        state.enter(port.clock).map(|()| true)
    })
}
