//! Grants leases, finds the current place of a block, and waits for a move in progress. While a lease
//! is held, the arena is open and no block moves.
//!
//! Invariants: a place that is returned under a lease stays until the lease ends;
//! `leases held = leases entered - leases dropped`, in the process of the arena.

use super::context::OpContext;
use super::resume::awake;
use crate::state::arena::ArenaState;
use crate::state::region::Placement;
use crate::state::region_index::BlockName;
use crate::types::Region;
use crate::types::error::DeviceError;
use lowtide_core::bytes::ByteSize;

/// Waits for the end of the batch of moves in progress, before a lease is granted.
pub(crate) async fn wait_for_move(cx: &OpContext<'_>) {
    if cx.with(|state| state.moves.moving.is_none()) {
        return;
    }
    // A compaction in progress sees this and starts no further batch, so each thread waits for at
    // most one.
    cx.with(|state| state.moves.entering += 1);
    cx.wait_while(|state| state.moves.moving.is_some()).await;
    cx.with(|state| state.moves.entering -= 1);
}

/// Waits until this block does not move.
pub(crate) async fn wait_until_still(cx: &OpContext<'_>, region: Region, id: BlockName) {
    cx.wait_while(|state| state.moves.is_moving(region, id)).await;
}

/// Returns the current place of a live block.
///
/// # Errors
/// `ContentsLost`.
pub(crate) async fn resolve(
    cx: &OpContext<'_>,
    region: Region,
    placed: Placement,
) -> Result<Placement, DeviceError> {
    wait_until_still(cx, region, placed.id).await;
    cx.with(|state| {
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
pub(crate) async fn pin(cx: &OpContext<'_>, region: Region, id: BlockName) {
    wait_until_still(cx, region, id).await;
    cx.with(|state| {
        state.region_mut(region).pins.pin(id);
        state
            .events
            .push("pin", |line| line.number("address", state.region(region).address_of(id)));
    });
}

/// Waits until the arena is awake, waking it if it sleeps, and counts a lease.
///
/// # Errors
/// The errors of a wake.
pub(crate) async fn enter(cx: &OpContext<'_>) -> Result<(), DeviceError> {
    loop {
        awake(cx).await?;
        if try_enter(cx).await? {
            return Ok(());
        }
    }
}

/// Counts a lease after the end of a move in progress. Returns `false` if the arena sleeps and must
/// be woken first.
///
/// # Errors
/// Those of the sleep state, which rejects leases.
pub(crate) async fn try_enter(cx: &OpContext<'_>) -> Result<bool, DeviceError> {
    wait_for_move(cx).await;
    cx.with(|state| {
        // The arena may have fallen asleep meanwhile.
        if !state.sleep.is_open() {
            return Ok(false);
        }
        state.enter().map(|()| true)
    })
}
