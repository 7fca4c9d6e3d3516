//! One move: takes a place, copies the contents with the lock released, and moves the block there.
//!
//! No lease is held while a block moves, and entering waits for the end of this one move. The
//! block's owner may free it meanwhile: the move ends, then the block is freed. Pinning or resizing
//! it waits.
//!
//! A failed copy is undone: for a slide, each piece is copied back, in reverse order. Only if that
//! fails too are the contents lost, and every further use of the block is an error.
//!
//! Invariant: a block is whole at its recorded place, or known to be lost.
#![expect(unsafe_code, reason = "contents are copied to another place")]

use super::CompactOptions;
use super::plan::{Hold, Move};
use crate::driver::{DeviceAddress, DriverError};
use crate::exec::executor::Locked;
use crate::exec::inner::ArenaInner;
use crate::state::arena::ArenaState;
use crate::state::pending::Claim;
use crate::state::ranges::BlockName;
use crate::state::region::{Placement, Region};
use crate::types::error::DeviceError;
use lowtide_core::bytes::ByteSize;

/// The block that moves now.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Moving {
    pub(crate) region: Region,
    pub(crate) id: BlockName,
    /// Its owner has freed it.
    pub(crate) freed: Option<Placement>,
}

/// The result of one move.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Step {
    /// The block is at its new place.
    Moved {
        from: DeviceAddress,
        to: DeviceAddress,
        /// Its owner freed it meanwhile.
        is_freed: bool,
        /// Bytes of granules that were active and are idle by this move, and the reverse.
        idle: u64,
        active: u64,
    },
    /// The block or its new place has changed, or there is no memory for it.
    Skipped,
    /// A lease is held or requested; or the arena sleeps, or is falling asleep.
    Busy,
}

/// A copy that failed, and whether it could not be undone.
struct FailedCopy {
    error: DriverError,
    is_lost: bool,
}

impl ArenaInner {
    /// Moves a block, if it may still move and is still at the planned place.
    pub(super) fn move_block(
        &self,
        options: CompactOptions,
        id: BlockName,
        made: Move,
    ) -> Result<Step, DeviceError> {
        let region = options.region;
        let mut books = self.lock();
        if let Some(refused) = refuses(&books, options, id, made) {
            return Ok(refused);
        }
        let Some((room, active)) = books.take_room(region, made.room()) else {
            return Ok(Step::Skipped);
        };
        let outcome;
        (books, outcome) = self.back(books, region, room.span);
        // The lock was released if there was something to commit or to wait for.
        let refused = match outcome {
            Ok(()) => refuses(&books, options, id, made).map(Ok),
            Err(refusal) if refusal.error.is_out_of_memory() => Some(Ok(Step::Skipped)),
            Err(refusal) => Some(Err(refusal.error)),
        };
        if let Some(refused) = refused {
            books.withdraw(region, room, Claim::default(), &*self.clock);
            return refused;
        }
        books.moving = Some(Moving { region, id, freed: None });
        let segment = &books.region(region).segment;
        let [from, to] =
            [made.from, made.to].map(|offset| segment.address_of(ByteSize::new(offset)));
        drop(books);
        // No lease is held, so no work on the block starts; work already started is waited for.
        let complete = self.complete_all().map_err(|error| FailedCopy { error, is_lost: false });
        // SAFETY: `back` committed the new place, which `take_room` holds for this move; the block
        // is live, so that its granules stay. `moving` keeps leases from being granted, and so
        // slices and new work from the block; work that was started is complete.
        let outcome = complete.and_then(|()| unsafe { self.copy_pieces([from, to], made) });
        let mut books = self.lock();
        let freed = books.moving.take().and_then(|moving| moving.freed);
        let mut idle = 0;
        if outcome.is_ok() {
            idle = books.trade(region, (id, made.size), room, &*self.clock);
            books.readdress(region, from, id);
        } else {
            books.withdraw(region, room, Claim::default(), &*self.clock);
        }
        if outcome.as_ref().is_err_and(|failed| failed.is_lost) && freed.is_none() {
            books.region_mut(region).lose(id);
        }
        if let Some(freed) = freed {
            books.release(region, freed, &*self.clock);
        }
        drop(books);
        match outcome {
            Ok(()) => Ok(Step::Moved { from, to, is_freed: freed.is_some(), idle, active }),
            Err(FailedCopy { is_lost: true, .. }) if freed.is_none() => {
                Err(DeviceError::ContentsLost { region, size: ByteSize::new(made.size) })
            }
            Err(failed) => Err(failed.error.into()),
        }
    }

    /// Copies a block piece by piece; undoes the copies if one fails.
    ///
    /// # Safety
    /// Both places of the move are committed and held for it, and nothing uses them meanwhile.
    unsafe fn copy_pieces(&self, ends: [DeviceAddress; 2], made: Move) -> Result<(), FailedCopy> {
        // Overlapping places are one range of addresses; others are separate.
        let address = |offset: u64| {
            let [(start, at), other] = [(made.from, ends[0]), (made.to, ends[1])];
            let (start, at) = if (made.from..made.from + made.size).contains(&offset) {
                (start, at)
            } else {
                other
            };
            at.checked_add(ByteSize::new(offset.saturating_sub(start))).unwrap_or(at)
        };
        let copy = |piece: Move| {
            let size = ByteSize::new(piece.size);
            // SAFETY: parts of the two places, which nothing else uses (contract of this function).
            // The ends of one piece do not overlap: `pieces` cuts a slide so.
            unsafe { self.driver.copy(address(piece.from), address(piece.to), size) }
        };
        let mut done = Vec::new();
        for piece in made.pieces() {
            if let Err(error) = copy(piece) {
                let undone = done.into_iter().rev().try_for_each(|Move { from, to, size }| {
                    copy(Move { from: to, to: from, size })
                });
                return Err(FailedCopy { error, is_lost: undone.is_err() });
            }
            done.push(piece);
        }
        Ok(())
    }

    /// Waits for the end of the move in progress, before a lease is granted.
    pub(crate) fn wait_for_move<'a>(&'a self, mut books: Locked<'a>) -> Locked<'a> {
        if books.moving.is_none() {
            return books;
        }
        // Seen by the mover, which then makes no further move: each waits for one at most.
        books.entering += 1;
        while books.moving.is_some() {
            books = books.wait();
        }
        books.entering -= 1;
        books
    }

    /// Waits until this block does not move.
    pub(crate) fn wait_until_still<'a>(
        &'a self,
        mut books: Locked<'a>,
        region: Region,
        id: BlockName,
    ) -> Locked<'a> {
        while books.moving.is_some_and(|moving| (moving.region, moving.id) == (region, id)) {
            books = books.wait();
        }
        books
    }

    /// Returns `true` if this is the block's current place.
    #[inline]
    pub(crate) fn is_fresh(&self, region: Region, placed: &Placement) -> bool {
        placed.moves == self.moves(region)
    }

    /// Returns the current place of a live block.
    ///
    /// # Errors
    /// `ContentsLost`.
    pub(crate) fn resolve(
        &self,
        region: Region,
        placed: Placement,
    ) -> Result<Placement, DeviceError> {
        let books = self.wait_until_still(self.lock(), region, placed.id);
        check_whole(&books, region, placed)?;
        Ok(books.region(region).refreshed(placed))
    }
}

/// Refuses a block whose contents were lost in a move.
///
/// # Errors
/// `ContentsLost`.
pub(crate) fn check_whole(
    books: &ArenaState,
    region: Region,
    placed: Placement,
) -> Result<(), DeviceError> {
    if books.region(region).is_lost(placed.id) {
        let size = ByteSize::new(placed.span.size);
        return Err(DeviceError::ContentsLost { region, size });
    }
    Ok(())
}

/// Returns the reason a move cannot be made now, if any.
fn refuses(books: &ArenaState, options: CompactOptions, id: BlockName, made: Move) -> Option<Step> {
    if books.leases > 0 || books.entering > 0 || !books.sleep.is_awake() {
        return Some(Step::Busy);
    }
    // Checked first: if the block is freed, its memory may be too.
    if books.region(options.region).span_of(id) != Ok(made.source()) {
        return Some(Step::Skipped);
    }
    let fits = match books.hold(options, id, made.source()) {
        Hold::Moves { align, .. } => made.to.is_multiple_of(align),
        Hold::Stays | Hold::Wall => false,
    };
    // Blocks keep to their range.
    let is_beside = books.region(options.region).is_of_one_range(made.source(), made.destination());
    (!fits || !is_beside).then_some(Step::Skipped)
}
