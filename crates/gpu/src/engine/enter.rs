//! Leases: an arena is open, and no block moves, while one is held.
//!
//! Invariant: `leases held = leases entered - leases dropped`, in the process of the arena.

use super::place::wait_for_move;
use super::port::Port;
use crate::types::error::DeviceError;

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
