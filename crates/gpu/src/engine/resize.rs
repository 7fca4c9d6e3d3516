//! Resizes live blocks: in place, or by a copy to another block.
//!
//! Invariant: after an error the block is unchanged.

use super::alloc::{AllocTarget, Begun, ensure_committed, try_alloc};
use super::alloc_error::record_failure;
use super::call::CallKind;
use super::completion::complete_all;
use super::place::{check_whole, wait_until_still};
use super::port::Port;
use super::resume::awake;
use super::retry::with_retry;
use crate::observe::record::hooks::{Origin, Refused};
use crate::observe::visualize::Act;
use crate::state::failure::{AllocFailure, Cause};
use crate::state::region::{AllocRequest, Placement};
use crate::types::error::DeviceError;
use crate::types::region::Region;
use lowtide_core::bytes::ByteSize;

/// Resizes a live block in place; `None` if it cannot grow there.
///
/// # Errors
/// The errors of an allocation, or `ContentsLost`; the block is unchanged.
pub(crate) async fn resize_in_place(
    port: &Port<'_>,
    region: Region,
    placed: Placement,
    requested: u64,
) -> Result<Option<Placement>, DeviceError> {
    let attempt = async |_| attempt_in_place(port, region, placed, requested).await;
    match with_retry(port, region, attempt).await {
        Ok(resized) => Ok(resized),
        Err(failure) => {
            let what = Refused::Resize(region, placed.id, requested);
            Err(record_failure(port, region, failure, what).await)
        }
    }
}

async fn attempt_in_place(
    port: &Port<'_>,
    region: Region,
    placed: Placement,
    requested: u64,
) -> Result<Option<Placement>, AllocFailure> {
    // It may fall asleep while the block moves, and move while it wakes.
    loop {
        awake(port).await.map_err(AllocFailure::uncounted)?;
        if !port.with(|state| state.moves.is_moving(region, placed.id)) {
            break;
        }
        wait_until_still(port, region, placed.id).await;
    }
    // The block's place is current here: a later check would not happen.
    port.with(|state| check_whole(state, region, placed)).map_err(AllocFailure::uncounted)?;
    let begun = port.with(|state| {
        let resized = state.begin_resize(region, placed, requested, port.clock)?;
        state.region_mut(region).pins.pin(resized.id);
        Some(resized)
    });
    let Some(resized) = begun else { return Ok(None) };
    let outcome = ensure_committed(port, region, resized.span).await;
    port.with(|state| {
        state.region_mut(region).pins.unpin(resized.id);
        state.end_resize(region, [placed, resized], outcome.is_ok(), port.clock);
        if let Err(failure) = outcome {
            return Err(failure.with_figures(state));
        }
        state.record(port.clock, Act::Free, Placement { at: resized.at, ..placed });
        state.record(port.clock, Act::Alloc, resized);
        state.tell_resize(port.clock, region, resized);
        Ok(Some(resized))
    })
}

/// Allocates a larger block, copies the contents of a live one and frees that. The caller holds a
/// lease, so that neither moves.
///
/// # Errors
/// The errors of an allocation, or the driver's if the copy fails; the old block is unchanged.
pub(crate) async fn resize_by_copy(
    port: &Port<'_>,
    region: Region,
    old: Placement,
    wanted: AllocRequest,
) -> Result<Placement, DeviceError> {
    let what = Refused::Resize(region, old.id, wanted.requested);
    let target = AllocTarget { region, wanted: wanted.by(Origin::RESIZE), taker: None };
    let mut new = match try_alloc(port, target, Begun::Not).await {
        Ok(new) => new,
        Err(failure) => return Err(record_failure(port, region, failure, what).await),
    };
    let size = ByteSize::new(old.requested.min(wanted.requested));
    // Uses of the old block by streams come before the copy. The caller owns that block and holds a
    // lease, so that neither moves or loses its memory; only this operation knows the new one.
    let mut copied = complete_all(port).await;
    if copied.is_ok() {
        copied = port.does(CallKind::Copy { from: old.at, to: new.at, size }).await;
    }
    port.with(|state| {
        if copied.is_ok() {
            let pins = &mut state.region_mut(region).pins;
            if pins.take_discarded(old.id) {
                // The copied contents were discarded before. The block is not cached when freed: a
                // cache would keep this setting.
                pins.discard(new.id);
                new.moves = Placement::STALE;
            }
            state.replace(region, old, new, port.clock);
        } else {
            state.release(region, new, port.clock);
            state.tell_refusal(port.clock, what, Cause::Driver);
        }
    });
    copied.map(|()| new).map_err(Into::into)
}
