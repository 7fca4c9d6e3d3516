//! Allocates blocks: finds a place and commits its missing granules, within the limit.
//!
//! The first step places a block. If all of the block's memory is committed and nothing else uses
//! it, the operation is complete. Otherwise the block is pinned and the operation continues: it
//! commits the missing granules, or allocates a segment on drivers without virtual memory, and
//! orders the block after earlier uses of its memory. An operation waits for another one's driver
//! call only if it needs a granule of that call.
//!
//! The module `shortage` has the steps after a shortage.
//!
//! Invariants: `backed + being committed <= limit` at every commit; the limit fails an allocation
//! only if `active` plus the granules or the segment that the block needs exceed the limit; after
//! an error the block is free again, and memory that was committed for it is idle.

use super::commit::{
    ATTEMPTS_BESIDE, ExceededBound, ShortageOutcome, assess, ensure_committed, release_idle,
};
use super::completion::{complete_all, is_any_capturing, order_after};
use super::context::OpContext;
use super::move_block::{check_whole, wait_until_still};
use super::resume::awake;
use super::shortage::run_ladder;
use crate::driver::DriverError;
use crate::index::Span;
use crate::state::{
    AllocFailure, AllocRequest, ArenaState, Cause, Dependencies, Placement, Search, StreamUses,
};
use crate::types::DeviceError;
use lowtide_core::bytes::ByteSize;

/// The result of the first step of an allocation.
#[derive(Debug)]
pub(crate) enum Begun {
    /// The block is live.
    Done(Placement),
    /// The block has a place and is pinned there, but lacks memory, or its memory is in use.
    Placed(Placement, Dependencies),
    /// No place was found, or the arena is not awake.
    NotPlaced,
}

/// Makes the first step of an allocation.
#[inline]
pub(crate) fn begin(state: &mut ArenaState, target: &AllocRequest) -> Begun {
    if !state.is_usable() {
        return Begun::NotPlaced;
    }
    match state.place(target, Search::Usual) {
        Ok((placed, claim)) => begin_at(state, target, placed, claim),
        Err(_) => Begun::NotPlaced,
    }
}

/// Completes the allocation of a placed block if its memory is committed and no other stream may
/// still use it; otherwise pins the block.
#[inline]
fn begin_at(
    state: &mut ArenaState,
    target: &AllocRequest,
    placed: Placement,
    claim: Dependencies,
) -> Begun {
    let region = state.region_mut(target.region);
    let is_ordered = claim.iter().all(|(_, uses)| uses.is_of(target.taker));
    if is_ordered && region.segment.missing(placed.span).is_nothing() && !state.is_closed {
        state.mark_live(target, placed);
        return Begun::Done(placed);
    }
    state.region_mut(target.region).pins.begin_operation(placed.id);
    Begun::Placed(placed, claim)
}

/// Makes one attempt of an allocation, with this extent of the search.
pub(super) async fn attempt(
    cx: &OpContext<'_>,
    target: AllocRequest,
    search: Search,
) -> Result<Placement, AllocFailure> {
    awake(cx).await.map_err(AllocFailure::uncounted)?;
    let found = cx.with(|state| state.place(&target, search));
    let (placed, claim) = match found {
        Ok(found) => found,
        Err(failure) if cx.with(|state| state.is_whole()) => {
            place_in_new_segment(cx, failure, target, search).await?
        }
        Err(failure) => return Err(failure),
    };
    match cx.with(|state| begin_at(state, &target, placed, claim)) {
        Begun::Placed(placed, claim) => complete(cx, target, placed, claim).await,
        Begun::Done(_) | Begun::NotPlaced => Ok(placed),
    }
}

/// Completes the allocation of a block that is placed and pinned.
pub(super) async fn complete(
    cx: &OpContext<'_>,
    target: AllocRequest,
    placed: Placement,
    claim: Dependencies,
) -> Result<Placement, AllocFailure> {
    let region = target.region;
    let mut outcome = ensure_committed(cx, region, placed.span).await;
    if outcome.is_ok() && !claim.is_empty() {
        let uses = StreamUses::of(claim.iter().flat_map(|(_, uses)| uses.iter()));
        let ordered = order_after(cx, target.taker, &uses).await;
        outcome = ordered.map_err(AllocFailure::of_driver);
    }
    cx.with(|state| {
        if outcome.is_ok() && state.is_closed {
            // The arena was closed while the memory was being committed.
            let closed = DeviceError::Closed { arena: state.name.clone() };
            outcome = Err(AllocFailure::uncounted(closed));
        }
        match outcome {
            Ok(()) => {
                state.region_mut(region).pins.end_operation(placed.id);
                state.mark_live(&target, placed);
                Ok(placed)
            }
            Err(failure) => {
                state.cancel_placement(placed, claim);
                Err(failure.with_figures(state))
            }
        }
    })
}

/// Places a block that found no place, on a driver that allocates whole segments. The index offers
/// only memory that exists, so the segment is allocated first. Other operations may allocate their
/// own segments meanwhile, or wait if only the limit prevents that.
///
/// Each turn of the loop allocates a segment, makes some room or waits for a driver call.
async fn place_in_new_segment(
    cx: &OpContext<'_>,
    mut no_place: AllocFailure,
    target: AllocRequest,
    search: Search,
) -> Result<(Placement, Dependencies), AllocFailure> {
    let (mut attempts, mut grow, granules, needed, surplus) = cx.with(|state| {
        let attempts = ATTEMPTS_BESIDE + state.granules_for(state.memory().idle());
        let granules = state.granules_for(target.size);
        (attempts, true, granules, state.bytes_of(granules), state.surplus(granules))
    });
    // A plain driver waits for the device then, which would end a capture.
    if surplus > 0 && is_any_capturing(cx).await == Ok(false) {
        let _ = release_idle(cx, surplus).await; // if that fails, there is more than necessary
        awake(cx).await.map_err(AllocFailure::uncounted)?;
    }
    let fail = |cx: &OpContext<'_>, cause| {
        cx.with(|state| AllocFailure::of(cause, target.size).with_figures(state))
    };
    loop {
        let mut shortage = ExceededBound::Limit(needed);
        if cx.with(|state| state.over_limit(needed)) == 0 {
            let marked = cx.with(|state| state.begin_segment(&target, search, needed, grow));
            let Some(span) = marked else { return Err(no_place) };
            shortage = match create_segment(cx, target, span).await {
                Ok(Some(placed)) => return Ok((placed, Dependencies::new())),
                Ok(None) => return Err(no_place),
                // The call may succeed without what others would use.
                Err(DriverError::OutOfMemory { .. }) if span.size > needed => {
                    grow = false;
                    continue;
                }
                Err(DriverError::OutOfMemory { .. }) if attempts > 0 => {
                    ExceededBound::Device(granules)
                }
                Err(DriverError::OutOfMemory { .. }) => return Err(fail(cx, Cause::Device)),
                Err(error) => return Err(AllocFailure::of_driver(error)),
            };
            attempts -= 1;
        }
        let assessed = cx.with(|state| assess(state, shortage));
        let room = match assessed {
            Ok(granules) => release_idle(cx, granules).await?,
            Err(cause) => ShortageOutcome::None(cause),
        };
        match room {
            ShortageOutcome::Freed | ShortageOutcome::Retry => {}
            ShortageOutcome::InProgress => cx.wait_for_result(|state| state.is_usable()).await,
            // A segment that arrives for another operation may have room for this block as well.
            ShortageOutcome::None(Cause::Limit { .. })
                if cx.with(|state| state.region(target.region).segment.memory().committing) > 0 =>
            {
                cx.wait_for_result(|state| state.is_usable()).await;
            }
            ShortageOutcome::None(cause) => return Err(fail(cx, cause)),
        }
        // The arena may have fallen asleep: nothing of this block was recorded.
        awake(cx).await.map_err(AllocFailure::uncounted)?;
        match cx.with(|state| state.place(&target, search)) {
            Ok(found) => return Ok(found),
            Err(failure) => no_place = failure,
        }
    }
}

/// Allocates a marked segment, and places the block in it.
async fn create_segment(
    cx: &OpContext<'_>,
    target: AllocRequest,
    span: Span,
) -> Result<Option<Placement>, DriverError> {
    let created = cx.outside(|| cx.driver.segment_create(ByteSize::new(span.size))).await;
    cx.with(|state| {
        state.end_segment(target.region, span, created.as_ref().ok().copied());
        created.map(|_| state.region_mut(target.region).place_in(&target, span))
    })
}

/// Continues an allocation after its first step. If memory is short, it empties caches,
/// commits, waits, and makes the steps after a shortage (`shortage`).
///
/// # Errors
/// A shortage; the errors of a wake.
pub(crate) async fn alloc(
    cx: &OpContext<'_>,
    (target, mut begun): (AllocRequest, Begun),
) -> Result<Placement, AllocFailure> {
    let region = target.region;
    // Cached memory is used before more is committed. That of other lanes would need a wait.
    if cx.surroundings.caches_hold()
        && cx.with(|state| match &begun {
            Begun::Done(_) => false,
            Begun::Placed(placed, _) => {
                !state.region(region).segment.missing(placed.span).is_nothing()
            }
            Begun::NotPlaced => true,
        })
        && cx.outside(|| cx.surroundings.empty_caches_for(target.taker)).await
    {
        begun = cx.with(|state| {
            // Memory was freed: a block that was placed gives its place up.
            if let Begun::Placed(placed, claim) = begun {
                state.cancel_placement(placed, claim);
            }
            begin(state, &target)
        });
    }
    let mut outcome = match begun {
        Begun::Done(placed) => Ok(placed),
        Begun::Placed(placed, claim) => complete(cx, target, placed, claim).await,
        Begun::NotPlaced => attempt(cx, target, Search::Usual).await,
    };
    // If a stream capture forbids a wait: memory that needs none, or that can be committed.
    if outcome.as_ref().is_err_and(AllocFailure::is_by_capture) {
        outcome = attempt(cx, target, Search::Clear).await;
    }
    if outcome.as_ref().is_err_and(AllocFailure::is_shortage) {
        let attempt = async |search| match attempt(cx, target, search).await {
            Err(failure) if failure.is_by_capture() => attempt(cx, target, Search::Clear).await,
            outcome => outcome,
        };
        outcome = run_ladder(cx, region, attempt).await;
    }
    if outcome.is_ok() {
        cx.with(|state| cx.surroundings.note_live(state.live(), state.limit.get()));
    }
    outcome
}

// Resizes live blocks in place, or by copying them to another block.
//
// Invariant: after an error the block is unchanged.

/// Resizes a live block in place; returns `None` if the block cannot grow there
/// (`RegionState::begin_resize`).
///
/// # Errors
/// A shortage; `ContentsLost`. The block is
/// unchanged.
pub(crate) async fn resize_in_place(
    cx: &OpContext<'_>,
    placed: Placement,
    requested: u64,
) -> Result<Option<Placement>, AllocFailure> {
    // The arena may fall asleep while the block moves, and the block may move while the arena
    // wakes.
    loop {
        awake(cx).await.map_err(AllocFailure::uncounted)?;
        if !cx.with(|state| state.moves.is_moving(placed.id)) {
            break;
        }
        wait_until_still(cx, placed.id).await;
    }
    // The block's place is current here: no later check is made.
    cx.with(|state| check_whole(state, placed)).map_err(AllocFailure::uncounted)?;
    let region = placed.id.region();
    let begun = cx.with(|state| {
        let resized = state.begin_resize(placed, requested)?;
        state.region_mut(region).pins.begin_operation(resized.id);
        Some(resized)
    });
    let Some(resized) = begun else { return Ok(None) };
    let outcome = ensure_committed(cx, region, resized.span).await;
    cx.with(|state| {
        state.region_mut(region).pins.end_operation(resized.id);
        state.end_resize([placed, resized], outcome.is_ok());
        if let Err(failure) = outcome {
            return Err(failure.with_figures(state));
        }
        Ok(Some(resized))
    })
}

/// Resizes a live block in place, also if memory is short at first; returns `None` if the block
/// cannot grow there.
///
/// # Errors
/// Those of [`resize_in_place`].
pub(crate) async fn resize(
    cx: &OpContext<'_>,
    placed: Placement,
    requested: u64,
) -> Result<Option<Placement>, AllocFailure> {
    let attempt = async |_: Search| resize_in_place(cx, placed, requested).await;
    match attempt(Search::Usual).await {
        Err(failure) if failure.is_shortage() => run_ladder(cx, placed.id.region(), attempt).await,
        outcome => outcome,
    }
}

/// Copies the contents of a live block to a new one, and frees the old one. The caller holds a
/// lease, so neither block moves.
///
/// # Errors
/// The driver's: the old block is unchanged, and the new one free.
pub(crate) async fn copy_to(
    cx: &OpContext<'_>,
    old: Placement,
    mut new: Placement,
) -> Result<Placement, DriverError> {
    let size = ByteSize::new(old.requested.min(new.requested));
    // Uses of the old block by streams precede the copy. The caller owns the old block and holds a
    // lease, so neither block moves or loses its memory. Only this operation knows the new block.
    let mut copied = complete_all(cx).await;
    if copied.is_ok() {
        copied = cx.copy(old.at, new.at, size).await;
    }
    cx.with(|state| {
        if copied.is_ok() {
            let pins = &mut state.region_mut(new.id.region()).pins;
            if pins.take_discarded(old.id) {
                // The copied contents were discarded before. The block is not cached when freed: a
                // cache would keep this setting.
                pins.discard(new.id);
                new.moves = Placement::STALE;
            }
            state.release_after(old, &[]);
        } else {
            state.release_after(new, &[]);
            state.events.push("alloc_failed", |line| {
                let line = line.text("kind", "resize").text("region", new.id.region().name());
                line.number("bytes", new.requested).text("why", "driver")
            });
        }
    });
    copied.map(|()| new)
}
