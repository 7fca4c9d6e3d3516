//! Releases the idle memory of handles that blocks touch in part.
//!
//! A handle leaves as a whole, so its idle granules are stuck while a block touches another one. If
//! more than a hundredth of the committed memory is stuck, the contents of a handle are copied out,
//! the handle is released, and the granules that blocks touch get handles of their own, at the same
//! addresses and with the same contents.
//!
//! It is like a move of the blocks ([`move_block`](super::move_block)) to the place where they are:
//! no lease is held meanwhile, entering waits for the end of one handle, and a block that may not
//! move keeps its handle.
//!
//! If memory for the touched granules cannot be committed again, or their contents cannot be
//! copied, the contents are lost; then every further use of the blocks is an error.
//!
//! Invariant: a block is whole at its address, or known to be lost.

use super::alloc::{commit, ensure_committed};
use super::call::CallKind;
use super::compact::hold;
use super::completion::complete_live;
use super::move_block::{ROUNDS_MAX, is_busy};
use super::port::Port;
use crate::driver::{DeviceAddress, DriverError};
use crate::index::Span;
use crate::state::arena::ArenaState;
use crate::state::compact::plan::Hold;
use crate::state::moves::MovingBatch;
use crate::state::pending::Claim;
use crate::state::region::{AllocRequest, Leaving, Placement};
use crate::state::region_index::BlockName;
use crate::state::segment::Run;
use crate::types::compact::CompactOptions;
use crate::types::region::Region;
use lowtide_core::bytes::ByteSize;
use lowtide_core::log;

/// The maximum number of handles that one call divides: some 2 ms of driver calls and copies for
/// handles of 64 MiB. A guess.
const HANDLES_MAX: usize = 16;

/// A handle that is being divided.
struct Split {
    handle: Leaving,
    /// The granules that blocks touched at the start, in runs.
    touched: Vec<Run>,
    /// The place for their contents meanwhile.
    scratch: Placement,
}

/// An error after which the handle was not divided; `true` if contents were lost.
struct Failure {
    error: DriverError,
    is_lost: bool,
}

/// Divides handles until no more than a hundredth of the committed memory is stuck, or none can be
/// divided. Returns the number of granules released. A failure is logged.
pub(crate) async fn release_stuck(port: &Port<'_>) -> u64 {
    let mut granules = 0;
    for _ in 0..HANDLES_MAX {
        let Some(handle) = port.with(|state| choose(state)) else { break };
        let Some(released) = split(port, handle).await else { break };
        granules += released;
    }
    granules
}

/// Returns the handle with the most stuck memory of those whose blocks may move.
fn choose(state: &ArenaState) -> Option<Leaving> {
    if !state.is_stuck() || is_busy(state) || state.sleep.may_be_copied() {
        return None;
    }
    let handles = Region::ALL.into_iter().flat_map(|region| {
        let stuck = state.region(region).segment.stuck_handles();
        stuck.into_iter().map(move |(run, idle)| (region, run, idle))
    });
    let mut handles: Vec<_> = handles.collect();
    handles.sort_by_key(|&(.., idle)| std::cmp::Reverse(idle));
    let mut handles = handles.into_iter();
    let (region, run, _) = handles.find(|&(region, run, _)| may_divide(state, region, run))?;
    Some(state.region(region).leaving(region, run))
}

/// Returns `true` if every block that touches a handle may move, and nothing there is pending.
fn may_divide(state: &ArenaState, region: Region, handle: Run) -> bool {
    let options = CompactOptions::new(region);
    let span = span_of(state, region, handle);
    let moves = |&(span, id): &(Span, BlockName)| {
        matches!(hold(state, options, id, span), Hold::Moves { .. })
    };
    let region = state.region(region);
    region.pending.is_clear(span) && region.blocks_over(span).all(|block| moves(&block))
}

/// Divides a handle. Returns the number of granules released; `None` if it stays.
async fn split(port: &Port<'_>, handle: Leaving) -> Option<u64> {
    let scratch = take_scratch(port, handle).await?;
    let mut released = None;
    if let Some(split) = begin(port, handle, scratch).await {
        let divided = divide(port, &split).await;
        port.with(|state| end(port, state, handle.region, divided.as_ref().err()));
        match divided {
            Ok(()) => released = Some(handle.run.granules() - sum_of(&split.touched)),
            Err(Failure { error, is_lost }) => {
                let arena = port.with(|state| state.name.clone());
                port.outside(|| log!(warn, arena, %error, is_lost, "dividing a handle failed"))
                    .await;
            }
        }
    }
    port.with(|state| {
        state.region_mut(handle.region).pins.end_operation(scratch.id);
        state.cancel_placement(handle.region, scratch, Claim::default(), port.clock);
    });
    released
}

/// Takes a place for the contents of a handle, and commits it. Returns `None` if there is no room.
async fn take_scratch(port: &Port<'_>, handle: Leaving) -> Option<Placement> {
    let region = handle.region;
    let scratch = port.with(|state| {
        let touched = state.region(region).segment.touched_runs(handle.run);
        let size = ByteSize::new(state.bytes_of(sum_of(&touched)));
        let wanted = AllocRequest::new(size, ByteSize::new(state.bytes_of(1)))?;
        let beside = span_of(state, region, handle.run);
        let scratch = state.region_mut(region).place_beside(wanted, beside)?;
        state.region_mut(region).pins.begin_operation(scratch.id);
        Some(scratch)
    })?;
    if ensure_committed(port, region, scratch.span).await.is_ok() {
        return Some(scratch);
    }
    port.with(|state| {
        state.region_mut(region).pins.end_operation(scratch.id);
        state.cancel_placement(region, scratch, Claim::default(), port.clock);
    });
    None
}

/// Waits until no work uses live blocks, and marks the handle as leaving and its blocks as moving.
async fn begin(port: &Port<'_>, handle: Leaving, scratch: Placement) -> Option<Split> {
    for _ in 0..ROUNDS_MAX {
        if !complete_live(port, false).await.unwrap_or(false) {
            return None;
        }
        let begun = port.with(|state| {
            let is_proved = state.moves.is_proved() && state.sleep.is_use_known();
            if state.capabilities.asynchronous && !is_proved {
                return Some(None); // a lease was granted meanwhile
            }
            try_begin(state, handle, scratch).map(Some)
        })?;
        if let Some(split) = begun {
            return Some(split);
        }
    }
    None
}

/// Marks the handle and its blocks, if they are still as they were chosen.
fn try_begin(state: &mut ArenaState, handle: Leaving, scratch: Placement) -> Option<Split> {
    let Leaving { region, run, .. } = handle;
    let segment = &state.region(region).segment;
    let span = span_of(state, region, run);
    let touched = segment.touched_runs(run);
    let is_same = segment.handle_of(run.range().start) == run.range() && segment.is_committed(span);
    let fits = state.bytes_of(sum_of(&touched)) <= scratch.span.size;
    let is_free = !is_busy(state) && !state.sleep.may_be_copied();
    if !(is_same && fits && is_free && may_divide(state, region, run)) {
        return None;
    }
    let blocks: Vec<_> = state.region(region).blocks_over(span).map(|(_, id)| id).collect();
    state.moves.moving = Some(MovingBatch::new(region, blocks.into_iter()));
    state.region_mut(region).begin_part(run);
    Some(Split { handle, touched, scratch })
}

/// Copies the contents out, replaces the handle, and copies them back.
async fn divide(port: &Port<'_>, split: &Split) -> Result<(), Failure> {
    let Leaving { region, at, size, handle, .. } = split.handle;
    let stays = |port: &Port<'_>| {
        port.with(|state| state.end_leave(split.handle, false, port.clock));
    };
    if let Err(error) = copy(port, split, Direction::Out).await {
        stays(port);
        return Err(Failure { error, is_lost: false });
    }
    if let Err(error) = port.does(CallKind::Decommit { at, size, handle }).await {
        // The handle is still there, without its contents.
        stays(port);
        let is_lost = copy(port, split, Direction::Back).await.is_err();
        return Err(Failure { error, is_lost });
    }
    let runs = port.with(|state| {
        state.end_leave(split.handle, true, port.clock);
        let segment = &mut state.region_mut(region).segment;
        let runs = split.touched.iter().flat_map(|&run| segment.begin_commit_of(run));
        runs.collect()
    });
    let lost = |error| Failure { error, is_lost: true };
    commit(port, region, runs).await.map_err(lost)?;
    copy(port, split, Direction::Back).await.map_err(lost)
}

/// The direction of a copy: from the handle to the scratch memory, or back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Direction {
    Out,
    Back,
}

/// Copies the contents of the touched granules, and waits for each copy.
async fn copy(port: &Port<'_>, split: &Split, direction: Direction) -> Result<(), DriverError> {
    let mut scratch = split.scratch.at;
    for &run in &split.touched {
        let place = port.with(|state| state.region(split.handle.region).segment.place_of(run));
        let (at, size): (DeviceAddress, ByteSize) = place;
        let (from, to) = match direction {
            Direction::Out => (at, scratch),
            Direction::Back => (scratch, at),
        };
        port.does(CallKind::Copy { from, to, size }).await?;
        scratch = scratch.checked_add(size).unwrap_or(scratch);
    }
    Ok(())
}

/// Ends the move of the blocks, and frees those whose owners freed them meanwhile.
fn end(port: &Port<'_>, state: &mut ArenaState, region: Region, failure: Option<&Failure>) {
    let Some(batch) = state.moves.moving.take() else { return };
    for (id, freed) in batch.into_blocks() {
        if failure.is_some_and(|failure| failure.is_lost) {
            state.region_mut(region).lose(id);
        }
        if let Some(freed) = freed {
            state.release(region, freed, port.clock);
        }
    }
}

/// Returns the offsets of a run.
fn span_of(state: &ArenaState, region: Region, run: Run) -> Span {
    let segment = &state.region(region).segment;
    let (at, size) = segment.place_of(run);
    Span { offset: segment.offset_of(at).unwrap_or_default().get(), size: size.get() }
}

fn sum_of(runs: &[Run]) -> u64 {
    runs.iter().map(|run| run.granules()).sum()
}
