//! Finds the current place of a block, and waits for a move in progress.
//!
//! Invariant: a place that is returned under a lease stays until the lease ends.

use super::port::Port;
use crate::state::arena::ArenaState;
use crate::state::region::Placement;
use crate::state::region_index::BlockName;
use crate::types::error::DeviceError;
use crate::types::region::Region;
use lowtide_core::bytes::ByteSize;

/// Waits for the end of the batch of moves in progress, before a lease is granted.
pub(crate) async fn wait_for_move(port: &Port<'_>) {
    if port.with(|state| state.moves.moving.is_none()) {
        return;
    }
    // A compaction in progress sees this and starts no further batch, so each thread waits for at
    // most one.
    port.with(|state| state.moves.entering += 1);
    port.wait_while(|state| state.moves.moving.is_some()).await;
    port.with(|state| state.moves.entering -= 1);
}

/// Waits until this block does not move.
pub(crate) async fn wait_until_still(port: &Port<'_>, region: Region, id: BlockName) {
    port.wait_while(|state| state.moves.is_moving(region, id)).await;
}

/// Returns the current place of a live block.
///
/// # Errors
/// `ContentsLost`.
pub(crate) async fn resolve(
    port: &Port<'_>,
    region: Region,
    placed: Placement,
) -> Result<Placement, DeviceError> {
    wait_until_still(port, region, placed.id).await;
    port.with(|state| {
        check_whole(state, region, placed)?;
        Ok(state.region(region).refreshed(placed))
    })
}

/// Checks that the contents of a block were not lost in a move.
///
/// # Errors
/// `ContentsLost`.
pub(crate) fn check_whole(
    state: &ArenaState,
    region: Region,
    placed: Placement,
) -> Result<(), DeviceError> {
    if state.region(region).pins.is_lost(placed.id) {
        let size = ByteSize::new(placed.span.size);
        return Err(DeviceError::ContentsLost { region, size });
    }
    Ok(())
}

/// Pins a block after the end of a move in progress. A pinned block does not move.
pub(crate) async fn pin(port: &Port<'_>, region: Region, id: BlockName) {
    wait_until_still(port, region, id).await;
    port.with(|state| {
        state.region_mut(region).pins.pin(id);
        state.events.push(port.clock, "pin", |line| {
            line.number("address", state.region(region).address_of(id))
        });
    });
}
