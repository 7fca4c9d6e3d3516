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
    (user, is_guest): (Option<StreamKey>, bool),
) -> Placement {
    wait_until_still(port, region, placed.id).await;
    port.with(|state| {
        let placed = state.region(region).refreshed(placed);
        let is_captured = state.streams.captures(user.as_slice());
        state.raw.insert(region, placed, (user, is_guest), is_captured);
        user.filter(|_| is_guest).into_iter().for_each(|user| state.streams.add_guest(user));
        placed
    })
}

/// The streams that a raw block was the last guest of, to be ended at once.
pub(crate) type Left = Vec<StreamKey>;

/// Frees a raw block. Its last use was by the lane or the guest, if one is given.
///
/// # Errors
/// Those of [`find`].
pub(crate) fn free(
    state: &mut ArenaState,
    at: DeviceAddress,
    user: Option<LaneUser>,
    clock: &dyn Clock,
) -> Result<((Region, Placement), Left), DeviceError> {
    let Some(mut raw) = state.raw.remove(at) else { return Err(unknown(state, at)) };
    let mut left = guests(&raw);
    if let Some(user) = user
        && raw.add(user)
    {
        note_use(state, (raw.region, raw.placed.id), user, clock);
    }
    release(state, &raw, false, clock);
    left.retain(|&stream| state.streams.leave_guest(stream));
    Ok(((raw.region, raw.placed), left))
}

/// Records that the stream of a lane or a guest uses a raw block.
///
/// # Errors
/// Those of [`find`].
pub(crate) fn record_use(
    state: &mut ArenaState,
    at: DeviceAddress,
    user: LaneUser,
    clock: &dyn Clock,
) -> Result<Left, DeviceError> {
    let Some(raw) = state.raw.get_mut(at) else { return Err(unknown(state, at)) };
    let (block, mut left) = ((raw.region, raw.placed.id), guests(raw));
    if !raw.add(user) {
        return Ok(Left::new());
    }
    if !guests(raw).is_empty() {
        left.clear();
        user.stream.into_iter().for_each(|stream| state.streams.add_guest(stream));
    }
    left.retain(|&stream| state.streams.leave_guest(stream));
    note_use(state, block, user, clock);
    Ok(left)
}

/// Records that any stream may use a raw block.
///
/// # Errors
/// Those of [`find`].
pub(crate) fn record_unknown_use(
    state: &mut ArenaState,
    at: DeviceAddress,
) -> Result<Left, DeviceError> {
    let Some(raw) = state.raw.get_mut(at) else { return Err(unknown(state, at)) };
    let mut left = guests(raw);
    raw.users = Users::ANY;
    left.retain(|&stream| state.streams.leave_guest(stream));
    Ok(left)
}

/// Returns the streams that a raw block counts as a guest of.
fn guests(raw: &RawUse) -> Left {
    if raw.is_guest { raw.users.streams() } else { Left::new() }
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
pub(crate) fn reset(state: &mut ArenaState, clock: &dyn Clock) -> (ByteSize, Left) {
    let all = state.raw.take_all();
    all.iter().for_each(|raw| release(state, raw, true, clock));
    let mut left: Left = all.iter().flat_map(guests).collect();
    left.retain(|&stream| state.streams.leave_guest(stream));
    let blocks = all.len() as u64;
    let bytes = all.iter().map(|raw| ByteSize::new(raw.placed.span.size)).sum();
    state.events.push(clock, || ArenaEvent::RawReset { blocks, bytes });
    (bytes, left)
}

/// Frees a raw block whose address has already been forgotten; holds it if a graph may have
/// captured it.
fn release(state: &mut ArenaState, raw: &RawUse, is_reset: bool, clock: &dyn Clock) {
    raw.users.with(|streams, after| {
        if raw.is_captured || state.streams.captures(streams) {
            return state.hold_block(raw.region, raw.placed);
        }
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
