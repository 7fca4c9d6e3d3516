//! Moves one block: takes a place, copies the contents with the lock released, and moves the block
//! there.
//!
//! No lease is held while a block moves, and entering waits for the end of this one move. If the
//! block's owner frees the block meanwhile, the move ends first, and then the block is freed.
//! Pinning or resizing the block waits.
//!
//! A failed copy is undone: for a slide, each piece is copied back, in reverse order. Only if that
//! fails too are the contents lost; then every further use of the block is an error.
//!
//! Invariant: a block is whole at its recorded place, or known to be lost.

use super::alloc::ensure_committed;
use super::call::CallKind;
use super::compact::hold;
use super::completion::complete_all;
use super::port::Port;
use crate::driver::{DeviceAddress, DriverError};
use crate::state::arena::ArenaState;
use crate::state::compact::plan::{Hold, Move};
use crate::state::event::{ArenaEvent, Location};
use crate::state::moves::Moving;
use crate::state::pending::Claim;
use crate::state::region::Placement;
use crate::state::region_index::BlockName;
use crate::types::compact::CompactOptions;
use crate::types::error::DeviceError;
use crate::types::region::Region;
use lowtide_core::bytes::ByteSize;
use lowtide_core::clock::Clock;

/// The result of one move.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum MoveOutcome {
    /// The block is at its new place.
    Moved {
        from: DeviceAddress,
        to: DeviceAddress,
        /// The owner freed the block meanwhile.
        is_freed: bool,
        /// The bytes of granules that this move made idle, and the bytes that it made active.
        idle: u64,
        active: u64,
    },
    /// The block or its new place has changed, or there is no memory for it.
    Skipped,
    /// A lease is held or requested, or the arena sleeps or is falling asleep.
    Busy,
}

/// The place that was taken for a block, and the bytes of granules that the place made active.
#[derive(Clone, Copy, Debug)]
struct NewPlace {
    placed: Placement,
    active: u64,
}

/// A copy that failed; `true` if it could not be undone either.
struct FailedCopy {
    error: DriverError,
    is_lost: bool,
}

/// Moves a block if it may still move and is still at the place that the plan recorded.
///
/// # Errors
/// Those of the commit of its new place and of the copy, with the block at its old place;
/// `ContentsLost`.
pub(crate) async fn move_block(
    port: &Port<'_>,
    options: CompactOptions,
    id: BlockName,
    made: Move,
) -> Result<MoveOutcome, DeviceError> {
    let region = options.region;
    let new = match port.with(|state| take_place(state, options, id, made)) {
        Ok(new) => new,
        Err(refused) => return Ok(refused),
    };
    let refused = match ensure_committed(port, region, new.placed.span).await {
        // The lock was released if there was memory to commit or a call to wait for.
        Ok(()) => port.with(|state| refuses(state, options, id, made)).map(Ok),
        Err(failure) if failure.error.is_out_of_memory() => Some(Ok(MoveOutcome::Skipped)),
        Err(failure) => Some(Err(*failure.error)),
    };
    if let Some(refused) = refused {
        port.with(|state| state.cancel_placement(region, new.placed, Claim::default(), port.clock));
        return refused;
    }
    let ends = port.with(|state| begin(state, region, id, made));
    let copied = copy_unused(port, ends, made).await;
    let (is_freed, idle) =
        port.with(|state| end(state, (region, id), made, new, &copied, port.clock));
    let [from, to] = ends;
    match copied {
        Ok(()) => Ok(MoveOutcome::Moved { from, to, is_freed, idle, active: new.active }),
        Err(FailedCopy { is_lost: true, .. }) if !is_freed => {
            Err(DeviceError::ContentsLost { region, size: ByteSize::new(made.size) })
        }
        Err(failed) => Err(failed.error.into()),
    }
}

/// Takes the planned place for a block, as arriving.
fn take_place(
    state: &mut ArenaState,
    options: CompactOptions,
    id: BlockName,
    made: Move,
) -> Result<NewPlace, MoveOutcome> {
    if let Some(refused) = refuses(state, options, id, made) {
        return Err(refused);
    }
    let (region, span) = (options.region, made.room());
    let active = state.active();
    let placed = state.region_mut(region).take_room(span).ok_or(MoveOutcome::Skipped)?;
    let wanting = state.region(region).segment.wanting(span);
    let active = state.active() - active + state.bytes_of(wanting);
    Ok(NewPlace { placed, active })
}

/// Marks a block as moving. Returns its old and its new address.
fn begin(state: &mut ArenaState, region: Region, id: BlockName, made: Move) -> [DeviceAddress; 2] {
    state.moves.moving = Some(Moving { region, id, freed: None });
    let segment = &state.region(region).segment;
    [made.from, made.to].map(|offset| segment.address_of(ByteSize::new(offset)))
}

/// Records the end of a move. Returns `true` if the block's owner freed the block meanwhile, and
/// the bytes of granules that became idle.
fn end(
    state: &mut ArenaState,
    (region, id): (Region, BlockName),
    made: Move,
    new: NewPlace,
    copied: &Result<(), FailedCopy>,
    clock: &dyn Clock,
) -> (bool, u64) {
    let freed = state.moves.moving.take().and_then(|moving| moving.freed);
    let mut idle = 0;
    if copied.is_ok() {
        let from = address_of(state, region, id);
        idle = trade(state, region, (id, made.size), new.placed, clock);
        state.readdress(region, from, id);
    } else {
        state.cancel_placement(region, new.placed, Claim::default(), clock);
    }
    if copied.as_ref().is_err_and(|failed| failed.is_lost) && freed.is_none() {
        state.region_mut(region).lose(id);
    }
    if let Some(freed) = freed {
        state.release(region, freed, clock);
    }
    (freed.is_some(), idle)
}

/// Copies a block that no work uses: waits for started work first. No lease is held and none is
/// granted, so no new work starts.
async fn copy_unused(
    port: &Port<'_>,
    ends: [DeviceAddress; 2],
    made: Move,
) -> Result<(), FailedCopy> {
    complete_all(port).await.map_err(|error| FailedCopy { error, is_lost: false })?;
    let mut done = Vec::new();
    for piece in made.pieces() {
        if let Err(error) = copy_piece(port, ends, made, piece).await {
            let is_lost = undo(port, ends, made, done).await.is_err();
            return Err(FailedCopy { error, is_lost });
        }
        done.push(piece);
    }
    Ok(())
}

/// Copies pieces back, in reverse order.
async fn undo(
    port: &Port<'_>,
    ends: [DeviceAddress; 2],
    made: Move,
    done: Vec<Move>,
) -> Result<(), DriverError> {
    for Move { from, to, size } in done.into_iter().rev() {
        copy_piece(port, ends, made, Move { from: to, to: from, size }).await?;
    }
    Ok(())
}

/// Copies a piece of a block. Both places are committed: the block is live, and the move holds the
/// new place. While `moving` is set no lease is granted, and so no slice and no new work of the
/// block. The ends of one piece do not overlap: [`Move::pieces`] cuts a slide accordingly.
async fn copy_piece(
    port: &Port<'_>,
    ends: [DeviceAddress; 2],
    made: Move,
    piece: Move,
) -> Result<(), DriverError> {
    // Overlapping places are one range of addresses; others are separate.
    let address = |offset: u64| {
        let [old, new] = [(made.from, ends[0]), (made.to, ends[1])];
        let is_old = (made.from..made.from + made.size).contains(&offset);
        let (start, at) = if is_old { old } else { new };
        at.checked_add(ByteSize::new(offset.saturating_sub(start))).unwrap_or(at)
    };
    let (from, to) = (address(piece.from), address(piece.to));
    port.does(CallKind::Copy { from, to, size: ByteSize::new(piece.size) }).await
}

/// Moves a block of this size to the place taken for it. Returns the bytes of granules that are no
/// longer active.
fn trade(
    state: &mut ArenaState,
    region: Region,
    (id, size): (BlockName, u64),
    room: Placement,
    clock: &dyn Clock,
) -> u64 {
    let active = state.active();
    state.totals.moves += 1;
    state.totals.moved_bytes += size;
    let from = address_of(state, region, id);
    let old = state.region(region).span_of(id);
    if state.region_mut(region).trade(id, room) {
        for left in [Some(room.span), old.ok()].into_iter().flatten() {
            state.note_idle(region, left, clock);
        }
    }
    let to = address_of(state, region, id);
    // The requested size is not known here, so the event has the block's size.
    let (size, segment) = (ByteSize::new(size), &state.region(region).segment);
    let [from, to] = [from, to].map(|address| Location {
        offset: segment.offset_of(address).unwrap_or_default(),
        address,
    });
    state.events.push(clock, || ArenaEvent::Moved { region, id, from, to, size });
    active.saturating_sub(state.active())
}

fn address_of(state: &ArenaState, region: Region, id: BlockName) -> DeviceAddress {
    let region = state.region(region);
    let offset = region.span_of(id).map_or(0, |span| span.offset);
    region.segment.address_of(ByteSize::new(offset))
}

/// Returns the reason a move cannot be made now; `None` if it can.
fn refuses(
    state: &ArenaState,
    options: CompactOptions,
    id: BlockName,
    made: Move,
) -> Option<MoveOutcome> {
    let is_moving = state.moves.moving.is_some() || state.moves.entering > 0;
    if state.leases > 0 || is_moving || !state.sleep.is_awake() {
        return Some(MoveOutcome::Busy);
    }
    // Checked first: if the block was freed, its memory may be gone too.
    if state.region(options.region).span_of(id) != Ok(made.source()) {
        return Some(MoveOutcome::Skipped);
    }
    let fits = match hold(state, options, id, made.source()) {
        Hold::Moves { align, .. } => made.to.is_multiple_of(align),
        Hold::Stays | Hold::Wall => false,
    };
    // A block stays in its range.
    let is_beside = state.region(options.region).is_of_one_range(made.source(), made.destination());
    (!fits || !is_beside).then_some(MoveOutcome::Skipped)
}
