//! Resizes live blocks in place, or by copying them to another block.
//!
//! Invariant: after an error the block is unchanged.

use super::access::{check_whole, wait_until_still};
use super::commit::ensure_committed;
use super::completion::complete_all;
use super::context::OpContext;
use super::resume::awake;
use super::shortage::run_ladder;
use crate::driver::DriverError;
use crate::state::failure::AllocFailure;
use crate::state::region::{Placement, Search};
use crate::types::Region;
use lowtide_core::bytes::ByteSize;

/// Resizes a live block in place; returns `None` if the block cannot grow there.
///
/// # Errors
/// A shortage; `ContentsLost`. The block is
/// unchanged.
pub(crate) async fn resize_in_place(
    cx: &OpContext<'_>,
    region: Region,
    placed: Placement,
    requested: u64,
) -> Result<Option<Placement>, AllocFailure> {
    // The arena may fall asleep while the block moves, and the block may move while the arena
    // wakes.
    loop {
        awake(cx).await.map_err(AllocFailure::uncounted)?;
        if !cx.with(|state| state.moves.is_moving(region, placed.id)) {
            break;
        }
        wait_until_still(cx, region, placed.id).await;
    }
    // The block's place is current here: no later check is made.
    cx.with(|state| check_whole(state, region, placed)).map_err(AllocFailure::uncounted)?;
    let begun = cx.with(|state| {
        let resized = state.begin_resize(region, placed, requested)?;
        state.region_mut(region).pins.begin_operation(resized.id);
        Some(resized)
    });
    let Some(resized) = begun else { return Ok(None) };
    let outcome = ensure_committed(cx, region, resized.span).await;
    cx.with(|state| {
        state.region_mut(region).pins.end_operation(resized.id);
        state.end_resize(region, [placed, resized], outcome.is_ok());
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
    region: Region,
    placed: Placement,
    requested: u64,
) -> Result<Option<Placement>, AllocFailure> {
    let attempt = async |_: Search| resize_in_place(cx, region, placed, requested).await;
    match attempt(Search::Usual).await {
        Err(failure) if failure.is_shortage() => run_ladder(cx, region, attempt).await,
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
    region: Region,
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
            let pins = &mut state.region_mut(region).pins;
            if pins.take_discarded(old.id) {
                // The copied contents were discarded before. The block is not cached when freed: a
                // cache would keep this setting.
                pins.discard(new.id);
                new.moves = Placement::STALE;
            }
            state.release_after(region, old, &[]);
        } else {
            state.release_after(region, new, &[]);
            state.events.push("alloc_failed", |line| {
                let line = line.text("kind", "resize").text("region", region.name());
                line.number("bytes", new.requested).text("why", "driver")
            });
        }
    });
    copied.map(|()| new)
}
