//! Releases the idle memory of handles that blocks touch in part.
//!
//! A handle leaves as a whole, so its idle granules are stuck while a block touches another one. A
//! division copies the granules that blocks touch to new memory, in handles of one granule,
//! releases the handle, and moves the new memory to the same addresses ([`Driver::remap`]). From
//! the first call on nothing is allocated, so another process cannot prevent the end. A decay
//! divides handles if more than a hundredth of the committed memory is stuck and has expired; a
//! purge, and an allocation that is short of memory, divide all they can.
//!
//! It is like a move of the blocks ([`move_block`](super::move_block)) to the place where they are:
//! no lease is held meanwhile, entering waits for the end of one handle, and a block that may not
//! move keeps its handle. It does not wait for work: while work may use a block, every handle
//! stays. Without room for the new memory, or without remaps, handles stay as well.
//!
//! If the driver fails after it has released the handle, the contents are lost; then every further
//! use of the blocks is an error.
//!
//! Invariant: a block is whole at its address, or known to be lost.
//!
//! [`Driver::remap`]: crate::driver::Driver::remap

use std::time::Duration;

use super::commit::{Pair, release_granules, remap};
use super::completion::{Proof, complete_live};
use super::context::OpContext;
use super::move_block::{hold, is_busy};
use crate::driver::DriverError;
use crate::index::{BlockId, Span};
use crate::state::{
    Ages, AllocRequest, ArenaState, CommitOptions, Dependencies, Hold, PlacedRun, Placement,
    RequestOrigin, Run, Runs,
};
use crate::types::{CompactOptions, Region};
use lowtide_core::clock::Moment;
use lowtide_core::log;

/// The maximum number of handles that one call divides: some 2 ms of driver calls and copies for
/// handles of 64 MiB. A guess.
const HANDLES_MAX: usize = 16;

/// The time after a failed division until the next: another process may have taken the memory, or
/// the limit left no room. A guess.
const RETRY_AFTER: Duration = Duration::from_secs(10);

/// A handle that is being divided.
struct Split {
    handle: PlacedRun,
    /// The granules that blocks touched at the start, in runs.
    touched: Runs,
    /// The new memory.
    scratch: Placement,
}

/// Divides handles. With ages, only if too much memory is stuck, and only handles whose idle
/// memory has expired. Returns the number of granules released; 0 if no handle can be divided now.
/// A failure is logged.
pub(crate) async fn release_stuck(cx: &OpContext<'_>, ages: Option<Ages>) -> u64 {
    let mut granules = 0;
    for _ in 0..HANDLES_MAX {
        let may_begin = cx.with(|state| {
            let stuck = if ages.is_some() { state.is_stuck() } else { state.memory().stuck > 0 };
            stuck && state.capabilities.remap && !is_busy(state) && !state.sleep.may_be_copied()
        });
        if !may_begin {
            break;
        }
        if !complete_live(cx, Proof::Query).await.unwrap_or(false) {
            break;
        }
        let Some(handle) = cx.with(|state| choose(state, ages)) else {
            // What has not expired yet is due later.
            cx.with(|state| {
                if choose(state, None).is_none() {
                    state.divide_from = Moment::NEVER;
                }
            });
            break;
        };
        if ages.is_none() && make_room(cx, handle).await {
            continue; // the handle may be gone
        }
        let Some(released) = split(cx, handle).await else {
            cx.with(|state| state.divide_from = cx.clock.now() + RETRY_AFTER);
            break;
        };
        granules += released;
    }
    granules
}

/// Returns the handle with the most stuck memory of those whose blocks may move.
fn choose(state: &ArenaState, ages: Option<Ages>) -> Option<PlacedRun> {
    let best = |region: Region| {
        let of = state.region(region);
        let mut handles = of.segment.stuck_handles(ages);
        handles.sort_by_key(|&(_, idle)| std::cmp::Reverse(idle));
        let blocks: Vec<_> = of.live_blocks().collect();
        let found = |&(run, _): &(Run, u64)| may_divide(state, region, run, &blocks);
        handles.into_iter().find(found).map(|(run, idle)| (of.placed_run(run), idle))
    };
    let best = Region::ALL.into_iter().filter_map(best).max_by_key(|&(_, idle)| idle);
    best.map(|(handle, _)| handle)
}

/// Returns `true` if every block that touches a handle may move, and nothing there is pending.
/// `blocks` are the blocks of the region in address order.
fn may_divide(state: &ArenaState, region: Region, run: Run, blocks: &[(Span, BlockId)]) -> bool {
    let options = CompactOptions::new(region);
    let span = state.region(region).segment.span_of(run);
    let mut blocks = over(blocks, span).iter();
    state.region(region).pending.is_clear(span)
        && blocks.all(|&(span, id)| matches!(hold(state, options, id, span), Hold::Moves { .. }))
}

/// Returns those of the blocks, in address order, that overlap a span.
fn over(blocks: &[(Span, BlockId)], of: Span) -> &[(Span, BlockId)] {
    let first = blocks.partition_point(|(span, _)| span.end() <= of.offset);
    let end = blocks.partition_point(|(span, _)| span.offset < of.end());
    &blocks[first..end]
}

/// Divides a handle. Returns the number of granules released; `None` if it stays.
async fn split(cx: &OpContext<'_>, handle: PlacedRun) -> Option<u64> {
    let scratch = take_scratch(cx, handle).await?;
    let mut released = None;
    if let Some(split) = cx.with(|state| begin(state, handle, scratch)) {
        let divided = divide(cx, &split).await;
        let is_lost = divided.as_ref().is_err_and(|&(_, is_lost)| is_lost);
        cx.with(|state| end(state, is_lost));
        match divided {
            Ok(()) => released = Some(handle.run.granules() - sum_of(&split.touched)),
            Err((error, is_lost)) => {
                cx.log(|arena| log!(warn, arena, %error, is_lost, "dividing a handle failed"))
                    .await;
            }
        }
    }
    return_scratch(cx, scratch);
    released
}

/// Releases idle memory if the limit leaves no room for the new memory of a handle. Returns `true`
/// if it has released some.
async fn make_room(cx: &OpContext<'_>, handle: PlacedRun) -> bool {
    let over = cx.with(|state| {
        let touched = state.region(handle.region).segment.touched_runs(handle.run);
        state.granules_for(state.over_limit(state.bytes_of(sum_of(&touched))))
    });
    over > 0 && release_granules(cx, over, None).await.granules > 0
}

/// Takes a place without memory, and commits it in handles of one granule. Returns `None` if there
/// is no room.
async fn take_scratch(cx: &OpContext<'_>, handle: PlacedRun) -> Option<Placement> {
    let region = handle.region;
    let (scratch, run) = cx.with(|state| {
        let touched = state.region(region).segment.touched_runs(handle.run);
        let size = state.bytes_of(sum_of(&touched));
        if size == 0 || state.over_limit(size) > 0 {
            return None;
        }
        let wanted = AllocRequest::new(region, size, state.bytes_of(1), RequestOrigin::BUFFER);
        let scratch = state.region_mut(region).place_bare(&wanted)?;
        let options = CommitOptions { grow: false, large_handles: false };
        let mut runs = state.begin_commit(region, scratch.span, size, options);
        debug_assert_eq!(runs.len(), 1, "all of it was bare, in one half");
        Some((scratch, runs.pop()?))
    })?;
    let placed = cx.with(|state| state.region(region).placed_run(run));
    let committed = cx.commit(placed).await;
    cx.with(|state| state.end_commit(placed, committed.is_ok()));
    if committed.is_ok() {
        return Some(scratch);
    }
    return_scratch(cx, scratch);
    None
}

fn return_scratch(cx: &OpContext<'_>, scratch: Placement) {
    cx.with(|state| state.cancel_placement(scratch, Dependencies::new()));
}

/// Marks the handle as leaving and its blocks as moving, if they are still as they were chosen, and
/// no work uses live blocks.
fn begin(state: &mut ArenaState, handle: PlacedRun, scratch: Placement) -> Option<Split> {
    let PlacedRun { region, run, .. } = handle;
    // A block may have got the memory of a raw one since the proof, in the order of their stream:
    // work on the raw one, which needs no lease, may still write to it.
    let is_written = state.streams.unfinished().next().is_some();
    if is_written || !state.are_live_unused() || is_busy(state) || state.sleep.may_be_copied() {
        return None;
    }
    let segment = &state.region(region).segment;
    let span = segment.span_of(run);
    let touched = segment.touched_runs(run);
    let is_handle = segment.handle_of(run.range().start) == run.range();
    let is_same = is_handle && segment.missing(span).is_nothing();
    let fits = state.bytes_of(sum_of(&touched)) == scratch.span.size;
    let blocks: Vec<_> = state.region(region).live_blocks().collect();
    if !(is_same && fits && may_divide(state, region, run, &blocks)) {
        return None;
    }
    state.moves.moving = Some(over(&blocks, span).iter().map(|&(_, id)| (id, None)).collect());
    state.region_mut(region).begin_part(run);
    Some(Split { handle, touched, scratch })
}

/// Copies the contents to the new memory, releases the handle, and moves the new memory to where
/// the contents were.
///
/// # Errors
/// The driver's, and `true` if contents were lost; the handle was not divided.
async fn divide(cx: &OpContext<'_>, split: &Split) -> Result<(), (DriverError, bool)> {
    if let Err(error) = copy(cx, split, false).await {
        cx.with(|state| state.end_leave(split.handle, false));
        return Err((error, false));
    }
    if let Err(error) = cx.decommit(split.handle).await {
        // The handle is still there, without its contents.
        let is_lost = copy(cx, split, true).await.is_err();
        cx.with(|state| state.end_leave(split.handle, false));
        return Err((error, is_lost));
    }
    let pairs = cx.with(|state| begin_remaps(state, split));
    let (_, error) = remap(cx, pairs).await;
    error.map_or(Ok(()), |error| Err((error, true)))
}

/// Records that the handle is released, and marks the new memory as leaving for the granules that
/// blocks touch. Returns the runs in pairs of the same length.
fn begin_remaps(state: &mut ArenaState, split: &Split) -> Vec<Pair> {
    let Split { handle, touched, scratch } = split;
    state.end_leave(*handle, true);
    let of = state.region_mut(handle.region);
    let mut first = of.segment.granules_of(scratch.span).start;
    let mut pairs = Vec::with_capacity(touched.len());
    for run in touched {
        let count = run.range().len();
        let from = Run::of(&(first..first + count));
        first += count;
        of.begin_part(from);
        of.segment.begin_arrive(of.segment.span_of(*run), run.granules());
        let from = of.placed_run(from);
        pairs.push(Pair { from, region: handle.region, to: *run });
    }
    pairs
}

/// Copies the contents of the touched granules to the new memory, or back, and waits for each copy.
async fn copy(cx: &OpContext<'_>, split: &Split, is_back: bool) -> Result<(), DriverError> {
    let mut scratch = split.scratch.at;
    for &run in &split.touched {
        let (at, size) = cx.with(|state| state.region(split.handle.region).segment.place_of(run));
        let (from, to) = if is_back { (scratch, at) } else { (at, scratch) };
        cx.copy(from, to, size).await?;
        scratch = scratch.checked_add(size).unwrap_or(scratch);
    }
    Ok(())
}

/// Ends the move of the blocks, and frees those whose owners freed them meanwhile.
fn end(state: &mut ArenaState, is_lost: bool) {
    for (id, freed) in state.moves.moving.take().into_iter().flatten() {
        if is_lost {
            state.region_mut(id.region()).lose(id);
        }
        if let Some((placed, streams)) = freed {
            state.release_after(placed, &streams);
        }
    }
}

fn sum_of(runs: &[Run]) -> u64 {
    runs.iter().map(|run| run.granules()).sum()
}
