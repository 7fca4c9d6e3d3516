//! Raw blocks: identified by address from their allocation until they are freed.
//!
//! An unknown address is an error with the reason, and changes nothing.

use super::place::wait_until_still;
use super::port::Port;
use crate::driver::DeviceAddress;
use crate::state::arena::ArenaState;
use crate::state::event::{ArenaEvent, FreeCause};
use crate::state::raw::{LaneUser, RawUse, Users};
use crate::state::region::Placement;
use crate::state::region_index::BlockName;
use crate::state::streams::StreamKey;
use crate::types::error::DeviceError;
use crate::types::region::Region;
use lowtide_core::bytes::ByteSize;
use lowtide_core::clock::Clock;

/// Records an allocated block as raw. Returns the block's place, which may have changed since the
/// allocation and is fixed from here on.
pub(crate) async fn register(
    port: &Port<'_>,
    region: Region,
    placed: Placement,
    user: Option<StreamKey>,
) -> Placement {
    wait_until_still(port, region, placed.id).await;
    port.with(|state| {
        let placed = state.region(region).refreshed(placed);
        state.raw.insert(region, placed, user);
        placed
    })
}

/// Frees a raw block. Its last use was by the lane, if one is given.
///
/// # Errors
/// Those of [`find`].
pub(crate) fn free(
    state: &mut ArenaState,
    at: DeviceAddress,
    user: Option<LaneUser>,
    clock: &dyn Clock,
) -> Result<(Region, Placement), DeviceError> {
    let Some(mut raw) = state.raw.remove(at) else { return Err(unknown(state, at)) };
    if let Some(user) = user
        && raw.add(user)
    {
        note_use(state, (raw.region, raw.placed.id), user, clock);
    }
    release(state, &raw, false, clock);
    Ok((raw.region, raw.placed))
}

/// Records that the stream of a lane uses a raw block.
///
/// # Errors
/// Those of [`find`].
pub(crate) fn record_use(
    state: &mut ArenaState,
    at: DeviceAddress,
    user: LaneUser,
    clock: &dyn Clock,
) -> Result<(), DeviceError> {
    let Some(raw) = state.raw.get_mut(at) else { return Err(unknown(state, at)) };
    let block = (raw.region, raw.placed.id);
    if raw.add(user) {
        note_use(state, block, user, clock);
    }
    Ok(())
}

/// Records that any stream may use a raw block.
///
/// # Errors
/// Those of [`find`].
pub(crate) fn record_unknown_use(
    state: &mut ArenaState,
    at: DeviceAddress,
) -> Result<(), DeviceError> {
    let Some(raw) = state.raw.get_mut(at) else { return Err(unknown(state, at)) };
    raw.users = Users::ANY;
    Ok(())
}

/// Records the new size of a raw block that was resized in place.
pub(crate) fn note_resized(state: &mut ArenaState, at: DeviceAddress, resized: Placement) {
    let raw = state.raw.get_mut(at);
    debug_assert!(raw.is_some(), "only its owner resizes and frees it");
    raw.into_iter().for_each(|raw| raw.placed = resized);
}

/// Returns the raw block at an address.
///
/// # Errors
/// `NotLive`, `InteriorAddress`, `ForeignAddress`.
pub(crate) fn find(
    state: &ArenaState,
    at: DeviceAddress,
) -> Result<(Region, Placement), DeviceError> {
    let raw = state.raw.get(at).ok_or_else(|| unknown(state, at))?;
    Ok((raw.region, raw.placed))
}

/// Returns the raw block that contains an address.
///
/// # Errors
/// Those of [`find`].
pub(crate) fn find_containing(
    state: &ArenaState,
    at: DeviceAddress,
) -> Result<(Region, Placement), DeviceError> {
    let raw = state.raw.containing(at).ok_or_else(|| unknown(state, at))?;
    Ok((raw.region, raw.placed))
}

/// Frees every raw block. Returns their bytes.
pub(crate) fn reset(state: &mut ArenaState, clock: &dyn Clock) -> ByteSize {
    let all = state.raw.take_all();
    all.iter().for_each(|raw| release(state, raw, true, clock));
    let blocks = all.len() as u64;
    let bytes = all.iter().map(|raw| ByteSize::new(raw.placed.span.size)).sum();
    state.events.push(clock, || ArenaEvent::RawReset { blocks, bytes });
    bytes
}

/// Frees a raw block whose address has already been forgotten.
fn release(state: &mut ArenaState, raw: &RawUse, is_reset: bool, clock: &dyn Clock) {
    raw.users.with(|streams, after| {
        let cause = if is_reset { FreeCause::Reset } else { FreeCause::Owner(after) };
        state.release_after(raw.region, raw.placed, (streams, cause), clock);
    });
}

fn note_use(
    state: &mut ArenaState,
    (region, id): (Region, BlockName),
    user: LaneUser,
    clock: &dyn Clock,
) {
    if let Some(lane) = user.number {
        state.events.push(clock, || ArenaEvent::Used { region, id, lane });
    }
}

/// Returns the reason an address is unknown. Walks the blocks of a region.
fn unknown(state: &ArenaState, at: DeviceAddress) -> DeviceError {
    for region in Region::ALL {
        let region = state.region(region);
        let Some(offset) = region.segment.offset_of(at) else { continue };
        let around = region.block_around(offset);
        return match around.filter(|span| span.offset < offset) {
            Some(span) => DeviceError::InteriorAddress {
                at,
                block: region.segment.address_of(span.offset),
                size: ByteSize::new(span.size),
            },
            None => DeviceError::NotLive { at },
        };
    }
    DeviceError::ForeignAddress { at, arena: state.name.clone() }
}
