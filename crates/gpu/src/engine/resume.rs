//! Waking: memory behind every granule that a block touches, then the contents.
//!
//! Operations that need memory wait here until the arena is awake, and wake it if it sleeps.

use super::port::Port;
use super::sleep::phase::Phase;
use crate::types::error::DeviceError;

/// Waits until the arena is awake; wakes it if it sleeps. Costs one branch if it is awake. It may
/// fall asleep again when the operation waits next.
///
/// # Errors
/// The errors of a wake.
#[inline]
pub(crate) async fn awake(port: &Port<'_>) -> Result<(), DeviceError> {
    if port.with(|state| state.sleep.is_open()) {
        return Ok(());
    }
    // Boxed: the operations that call this stay small.
    Box::pin(wait_awake(port)).await
}

async fn wait_awake(port: &Port<'_>) -> Result<(), DeviceError> {
    let before = port.with(|state| state.sleep.attempts);
    loop {
        match port.with(|state| state.sleep.phase) {
            Phase::Awake | Phase::Draining(_) => return Ok(()),
            // Perhaps the thread that wakes it, which waits for this callback.
            Phase::Waking if port.caller.is_within_callback => return Err(not_awake(port)),
            Phase::Waking => port.wait().await,
            // Perhaps the thread that puts it to sleep.
            Phase::Falling if port.caller.is_within_budget => return Err(not_awake(port)),
            Phase::Falling => {
                port.with(|state| state.sleep.entering += 1);
                port.wait().await;
                port.with(|state| state.sleep.entering -= 1);
            }
            Phase::Asleep => {
                if let Some(error) = port.with(|state| state.sleep.failed_since(before)) {
                    return Err(error);
                }
                port.with(|state| state.sleep.phase = Phase::Waking);
                port.outside(|| port.surroundings.wake()).await?;
            }
        }
    }
}

/// Returns the error of an operation that the arena's state does not allow.
pub(super) fn not_awake(port: &Port<'_>) -> DeviceError {
    port.with(|state| DeviceError::State { arena: state.name.clone(), state: state.sleep.state() })
}
