//! Raw blocks: identified by address from their allocation until they are freed.
//!
//! An unknown address is an error with the reason, and changes nothing.

use super::alloc::{self, Begun};
use super::context::OpContext;
use super::move_block::wait_until_still;
use crate::driver::DeviceAddress;
use crate::state::{
    AllocFailure, AllocRequest, ArenaState, Placement, RawUse, RawUser, StreamKey, StreamTable,
    Users,
};
use crate::types::{DeviceError, Region, Result};
use lowtide_core::bytes::ByteSize;

/// Allocates a raw block after the first step. Returns the block's place, which is fixed from here
/// on.
///
/// # Errors
/// Those of [`alloc`](alloc::alloc).
pub(crate) async fn alloc(
    cx: &OpContext<'_>,
    (target, begun): (AllocRequest, Begun),
    is_guest: bool,
) -> Result<Placement, AllocFailure> {
    let placed = alloc::alloc(cx, (target, begun)).await?;
    wait_until_still(cx, placed.id).await;
    cx.with(|state| {
        let placed = state.region(target.region).refreshed(placed);
        insert(state, placed, (target.taker, is_guest));
        Ok(placed)
    })
}

/// Records an allocated block as raw.
pub(crate) fn insert(
    state: &mut ArenaState,
    placed: Placement,
    (user, is_guest): (Option<StreamKey>, bool),
) {
    let is_captured = state.streams.captures(user.as_slice());
    let raw = RawUse { placed, users: Users::of(user), is_guest, is_captured };
    let before = state.raw.insert(placed.at, raw);
    debug_assert!(before.is_none(), "two live blocks begin at one address");
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
    user: Option<RawUser>,
) -> Result<(Placement, Left)> {
    let Some(mut raw) = state.raw.remove(&at) else { return Err(unknown(state, at)) };
    let mut left = leave(&mut state.streams, &raw);
    if let Some(user) = user
        && add(&mut state.streams, &mut raw, user, &mut left)
    {
        user.number().into_iter().for_each(|lane| state.note_use(raw.placed.id, lane));
    }
    release(state, &raw);
    Ok((raw.placed, left))
}

/// Records that the stream of a lane or a guest uses a raw block.
///
/// # Errors
/// Those of [`find`].
pub(crate) fn record_use(state: &mut ArenaState, at: DeviceAddress, user: RawUser) -> Result<Left> {
    let Some(raw) = state.raw.get_mut(&at) else { return Err(unknown(state, at)) };
    let mut left = leave(&mut state.streams, raw);
    let (block, is_new) = (raw.placed.id, add(&mut state.streams, raw, user, &mut left));
    let guests = raw.guests();
    guests.iter().for_each(|&stream| state.streams.add_guest(stream));
    left.retain(|stream| !guests.contains(stream));
    if is_new {
        user.number().into_iter().for_each(|lane| state.note_use(block, lane));
    }
    Ok(left)
}

/// Records that any stream may use a raw block.
///
/// # Errors
/// Those of [`find`].
pub(crate) fn record_unknown_use(state: &mut ArenaState, at: DeviceAddress) -> Result<Left> {
    let Some(raw) = state.raw.get_mut(&at) else { return Err(unknown(state, at)) };
    let left = leave(&mut state.streams, raw);
    raw.users = Users::default();
    Ok(left)
}

/// Records that a raw block is a guest of no stream any more.
fn leave(streams: &mut StreamTable, raw: &RawUse) -> Left {
    raw.guests().iter().copied().filter(|&stream| streams.leave_guest(stream)).collect()
}

/// Adds the user of a call to the users of a raw block that was [left](leave). Returns `true` if
/// the use was unknown.
fn add(streams: &mut StreamTable, raw: &mut RawUse, user: RawUser, left: &mut Left) -> bool {
    let stream = user.stream(streams);
    if let Some(stream) = stream.filter(|_| user.is_guest())
        && streams.is_unused(stream)
        && !left.contains(&stream)
    {
        left.push(stream);
    }
    stream.is_none_or(|stream| raw.users.add(stream))
}

/// Returns the raw block at an address.
///
/// # Errors
/// `NotLive`, `InteriorAddress`, `ForeignAddress`.
pub(crate) fn find(state: &ArenaState, at: DeviceAddress) -> Result<Placement> {
    state.raw.get(&at).map(|raw| raw.placed).ok_or_else(|| unknown(state, at))
}

/// Returns the raw block that contains an address.
///
/// # Errors
/// Those of [`find`].
pub(crate) fn find_containing(state: &ArenaState, at: DeviceAddress) -> Result<Placement> {
    let before = state.raw.range(..=at).next_back();
    let around = before.filter(|(start, raw)| at.get() - start.get() < raw.placed.span.size);
    around.map(|(_, raw)| raw.placed).ok_or_else(|| unknown(state, at))
}

/// Frees every raw block. Returns their bytes.
pub(crate) fn reset(state: &mut ArenaState) -> (ByteSize, Left) {
    let all: Vec<_> = std::mem::take(&mut state.raw).into_values().collect();
    all.iter().for_each(|raw| release(state, raw));
    let left = all.iter().flat_map(|raw| leave(&mut state.streams, raw)).collect();
    let blocks = all.len() as u64;
    let bytes = all.iter().map(|raw| ByteSize::new(raw.placed.span.size)).sum();
    state.events.push("reset", |line| line.number("blocks", blocks).bytes("size", bytes));
    (bytes, left)
}

/// Frees a raw block whose address has already been forgotten; holds it if a graph may have
/// captured it.
fn release(state: &mut ArenaState, raw: &RawUse) {
    let streams = raw.users.streams();
    if raw.is_captured || state.streams.captures(streams) {
        return state.hold_block(raw.placed);
    }
    state.release_after(raw.placed, streams);
}

/// Returns the reason an address is unknown. Walks the blocks of a region.
fn unknown(state: &ArenaState, at: DeviceAddress) -> DeviceError {
    for region in Region::ALL {
        let region = state.region(region);
        let Some(offset) = region.segment.offset_of(at) else { continue };
        let mut spans = region.live_spans();
        return match spans.find(|span| span.offset < offset && offset < span.end()) {
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
