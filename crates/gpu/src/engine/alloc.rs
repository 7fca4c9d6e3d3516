//! Allocates blocks: finds a place and commits its missing granules, within the limit.
//!
//! The first step places a block. If all of the block's memory is committed and nothing else uses
//! it, the operation is complete. Otherwise the block is pinned and the operation continues: it
//! commits the missing granules, or allocates a segment on drivers without virtual memory, and
//! orders the block after earlier uses of its memory. An operation waits for another one's driver
//! call only if it needs a granule of that call.
//!
//! The module `retry` has the steps after a shortage.
//!
//! Invariants: `backed + being committed <= limit` at every commit; the limit fails an allocation
//! only if `active` plus the granules or the segment that the block needs exceed the limit; after
//! an error the block is free again, and memory that was committed for it is idle.

use super::call::{Answer, CallKind};
use super::completion::come_after;
use super::port::Port;
use super::release::{Released, give_back};
use super::remap::remap_idle;
use super::resume::awake;
use super::retry::run_ladder;
use crate::driver::DriverError;
use crate::index::Span;
use crate::state::arena::{ArenaState, CommitOptions};
use crate::state::failure::{AllocFailure, Cause};
use crate::state::pending::Claim;
use crate::state::region::{AllocTarget, PlacedRun, Placement, Region, Search};
use crate::state::segment::Runs;
use crate::types::error::DeviceError;
use lowtide_core::bytes::ByteSize;
use lowtide_core::clock::Clock;

/// The attempts of an allocation on a full device in addition to one per idle granule. Each attempt
/// releases at least one granule, so more attempts are needed only if other processes take memory.
pub(super) const ATTEMPTS_BESIDE: u64 = 16;

/// The result of the first step of an allocation.
#[derive(Debug)]
pub(crate) enum Begun {
    /// The block is live.
    Done(Placement),
    /// The block has a place and is pinned there, but lacks memory, or its memory is in use.
    Placed(Placement, Claim),
    /// No place was found, or the arena is not awake.
    Not,
}

/// The bound that a commit would exceed.
#[derive(Clone, Copy)]
enum ExceededBound {
    /// The arena's limit, for a commit of this many bytes.
    Limit(u64),
    /// The device's memory, for a commit of this many granules.
    Device(u64),
}

/// The next action of a commit.
enum NextCommit {
    /// Nothing is left to commit.
    Nothing,
    /// Wait for a driver call in progress.
    Wait,
    /// Commit these runs, which are marked as committing.
    Runs(Runs),
    Short(ExceededBound),
}

/// The outcome of making room after a shortage.
enum ShortageOutcome {
    /// Idle granules were released, or moved to the granules that need memory.
    Made,
    /// The lock was released and nothing was gained: check again.
    Tried,
    /// Another operation is releasing idle granules, or committing ahead.
    Coming,
    /// All idle granules together are not enough.
    None(Cause),
}

/// Makes the first step of an allocation.
#[inline]
pub(crate) fn begin(state: &mut ArenaState, clock: &dyn Clock, target: AllocTarget) -> Begun {
    if !state.sleep.is_open() {
        return Begun::Not;
    }
    match state.place(target, Search::Usual) {
        Ok((placed, claim)) => begin_at(state, clock, target, placed, claim),
        Err(_) => Begun::Not,
    }
}

/// Completes the allocation of a placed block if its memory is committed and no other stream may
/// still use it; otherwise pins the block.
#[inline]
fn begin_at(
    state: &mut ArenaState,
    clock: &dyn Clock,
    target: AllocTarget,
    placed: Placement,
    claim: Claim,
) -> Begun {
    let region = state.region_mut(target.region);
    let is_ordered = claim.is_of(target.taker);
    if is_ordered && region.segment.missing(placed.span).is_nothing() && !state.is_closed {
        state.mark_live(target.region, target.wanted, placed, clock);
        return Begun::Done(placed);
    }
    state.region_mut(target.region).pins.begin_operation(placed.id);
    Begun::Placed(placed, claim)
}

/// Makes one attempt of an allocation, with this extent of the search.
pub(super) async fn attempt(
    port: &Port<'_>,
    target: AllocTarget,
    search: Search,
) -> Result<Placement, AllocFailure> {
    awake(port).await.map_err(AllocFailure::uncounted)?;
    let found = port.with(|state| state.place(target, search));
    let (placed, claim) = match found {
        Ok(found) => found,
        Err(failure) if port.with(|state| state.is_whole()) => {
            place_in_new_segment(port, failure, target, search).await?
        }
        Err(failure) => return Err(failure),
    };
    match port.with(|state| begin_at(state, port.clock, target, placed, claim)) {
        Begun::Placed(placed, claim) => complete(port, target, placed, claim).await,
        Begun::Done(_) | Begun::Not => Ok(placed),
    }
}

/// Completes the allocation of a block that is placed and pinned.
pub(super) async fn complete(
    port: &Port<'_>,
    target: AllocTarget,
    placed: Placement,
    claim: Claim,
) -> Result<Placement, AllocFailure> {
    let region = target.region;
    let mut outcome = ensure_committed(port, region, placed.span).await;
    if outcome.is_ok() && !claim.parts.is_empty() {
        let ordered = come_after(port, target.taker, &claim.uses()).await;
        outcome = ordered.map_err(AllocFailure::of_driver);
    }
    port.with(|state| {
        if outcome.is_ok() && state.is_closed {
            // The arena was closed while the memory was being committed.
            let closed = DeviceError::Closed { arena: state.name.clone() };
            outcome = Err(AllocFailure::uncounted(closed));
        }
        match outcome {
            Ok(()) => {
                state.region_mut(region).pins.end_operation(placed.id);
                state.mark_live(region, target.wanted, placed, port.clock);
                Ok(placed)
            }
            Err(failure) => {
                state.cancel_placement(region, placed, claim, port.clock);
                Err(failure.with_figures(state))
            }
        }
    })
}

/// Commits every granule of a placed span.
///
/// Each turn of the loop commits something, makes some room or waits for a driver call. Under the
/// limit the loop ends only when no room can be made: if a turn gains nothing, other operations
/// have committed.
pub(crate) async fn ensure_committed(
    port: &Port<'_>,
    region: Region,
    span: Span,
) -> Result<(), AllocFailure> {
    // The attempts that are left after the device was first full.
    let mut attempts = None;
    let (mut remaps, mut options) = port.with(|state| {
        let (grow, large_handles) = (state.steps.grow(), state.capabilities.handles);
        (state.capabilities.remap, CommitOptions { grow, large_handles })
    });
    loop {
        let shortage = match port.with(|state| next_commit(state, region, span, options)) {
            NextCommit::Nothing => return Ok(()),
            // This ends with the calls in progress: no granule of a placed span starts to leave,
            // and a neighbour's commit in progress ends as committed or as bare.
            NextCommit::Wait => {
                port.wait_while(|state| state.region(region).segment.missing(span).is_moving).await;
                continue;
            }
            // The runs were all that was bare, and memory that blocks touch does not leave.
            NextCommit::Runs(runs) => {
                let large_handles = runs.iter().any(|run| run.has_large_handles());
                match commit(port, region, runs).await {
                    Ok(()) => return Ok(()),
                    // The commit may succeed without the growth, or with small handles.
                    Err(DriverError::OutOfMemory { .. }) if options.grow || large_handles => {
                        let large_handles = options.grow && large_handles;
                        options = CommitOptions { grow: false, large_handles };
                        continue;
                    }
                    Err(DriverError::OutOfMemory { .. }) => {
                        let left =
                            attempts.unwrap_or_else(|| port.with(|state| attempts_max(state)));
                        if left == 0 {
                            return Err(AllocFailure::of(Cause::Device, span.size));
                        }
                        attempts = Some(left - 1);
                        let missing = port.with(|state| state.region(region).segment.missing(span));
                        ExceededBound::Device(missing.granules)
                    }
                    Err(error) => return Err(AllocFailure::of_driver(error)),
                }
            }
            NextCommit::Short(shortage) => shortage,
        };
        match make_room(port, (region, span), shortage, &mut remaps).await? {
            ShortageOutcome::Made | ShortageOutcome::Tried => {}
            ShortageOutcome::Coming => port.wait_for_result(|_| true).await,
            ShortageOutcome::None(cause) => return Err(AllocFailure::of(cause, span.size)),
        }
    }
}

/// Returns the number of attempts of a commit on a full device.
fn attempts_max(state: &ArenaState) -> u64 {
    ATTEMPTS_BESIDE + state.granules_for(state.releasable())
}

/// Returns how to go on with the commit of a placed span, and marks the runs to commit.
fn next_commit(
    state: &mut ArenaState,
    region: Region,
    span: Span,
    options: CommitOptions,
) -> NextCommit {
    let missing = state.region(region).segment.missing(span);
    if missing.is_moving {
        return NextCommit::Wait;
    }
    let bytes = state.bytes_of(missing.granules);
    if bytes == 0 {
        NextCommit::Nothing
    } else if state.over_limit(bytes) > 0 {
        NextCommit::Short(ExceededBound::Limit(bytes))
    } else {
        NextCommit::Runs(state.begin_commit(region, span, bytes, options))
    }
}

/// Commits marked runs in order until one fails, and records every result.
async fn commit(port: &Port<'_>, region: Region, runs: Runs) -> Result<(), DriverError> {
    let mut outcome = Ok(());
    for run in runs {
        if outcome.is_ok() {
            let PlacedRun { at, size, handle, .. } =
                port.with(|state| state.region(region).placed_run(region, run));
            outcome = port.does(CallKind::Commit { at, size, handle }).await;
        }
        port.with(|state| state.end_commit(region, run, outcome.is_ok(), port.clock));
    }
    outcome
}

/// Moves idle granules to a span that needs memory, or releases them, if that can help.
async fn make_room(
    port: &Port<'_>,
    (region, span): (Region, Span),
    shortage: ExceededBound,
    remaps: &mut bool,
) -> Result<ShortageOutcome, AllocFailure> {
    let granules = match port.with(|state| assess(state, shortage)) {
        Ok(granules) => granules,
        Err(cause) => return Ok(ShortageOutcome::None(cause)),
    };
    // More granules must leave than the span needs only if the limit was lowered.
    let missing = port.with(|state| state.region(region).segment.missing(span)).granules;
    if *remaps && granules <= missing {
        let moved = remap_idle(port, region, span, granules).await;
        *remaps = moved.error.is_none();
        if moved.granules > 0 {
            return Ok(ShortageOutcome::Made);
        }
        if !*remaps {
            return Ok(ShortageOutcome::Tried);
        }
    }
    let leave = if *remaps && granules > missing { granules - missing } else { granules };
    release_idle(port, leave).await
}

/// Releases about this many idle granules.
async fn release_idle(port: &Port<'_>, granules: u64) -> Result<ShortageOutcome, AllocFailure> {
    match give_back(port, granules, None).await {
        // A failed trim is ignored: there is room without it, or the driver reports an error.
        Released { error: Some(error), is_of_trim: false, .. } => {
            Err(AllocFailure::of_driver(error))
        }
        Released { granules: 1.., .. } => Ok(ShortageOutcome::Made),
        Released { unlocked: true, .. } => Ok(ShortageOutcome::Tried),
        // No granule could be marked, so another operation is releasing the idle granules counted
        // above, or is committing them ahead.
        Released { .. } => Ok(ShortageOutcome::Coming),
    }
}

/// Returns the number of idle granules to release for a shortage, or the cause of the error if all
/// idle granules are too few.
fn assess(state: &ArenaState, shortage: ExceededBound) -> Result<u64, Cause> {
    let idle = state.granules_for(state.releasable());
    match shortage {
        ExceededBound::Limit(bytes) => {
            let granules = state.granules_for(state.over_limit(bytes));
            if idle >= granules {
                return Ok(granules);
            }
            let stays = (state.backed() - state.releasable()).saturating_add(bytes);
            Err(Cause::Limit { over: stays.saturating_sub(state.limit.get()) })
        }
        ExceededBound::Device(_) if idle == 0 && !state.untrimmed => Err(Cause::Device),
        ExceededBound::Device(granules) => Ok(granules),
    }
}

/// Places a block that found no place, on a driver that allocates whole segments. The index offers
/// only memory that exists, so the segment is allocated first. Other operations may allocate their
/// own segments meanwhile, or wait if only the limit prevents that.
///
/// Each turn of the loop allocates a segment, makes some room or waits for a driver call.
async fn place_in_new_segment(
    port: &Port<'_>,
    mut no_place: AllocFailure,
    target: AllocTarget,
    search: Search,
) -> Result<(Placement, Claim), AllocFailure> {
    let AllocTarget { region, wanted, .. } = target;
    let (mut attempts, mut grow, granules, needed) = port.with(|state| {
        let attempts = ATTEMPTS_BESIDE + state.granules_for(state.idle());
        let granules = state.granules_for(wanted.size);
        (attempts, state.steps.grow(), granules, state.bytes_of(granules))
    });
    let fail = |port: &Port<'_>, cause| {
        port.with(|state| AllocFailure::of(cause, wanted.size).with_figures(state))
    };
    loop {
        let mut shortage = ExceededBound::Limit(needed);
        if port.with(|state| state.over_limit(needed)) == 0 {
            let marked = port.with(|state| state.begin_segment(target, search, needed, grow));
            let Some(span) = marked else { return Err(no_place) };
            shortage = match create_segment(port, target, span).await {
                Ok(Some(placed)) => return Ok((placed, Claim::default())),
                Ok(None) => return Err(no_place),
                // The call may succeed without the growth.
                Err(DriverError::OutOfMemory { .. }) if grow => {
                    grow = false;
                    continue;
                }
                Err(DriverError::OutOfMemory { .. }) if attempts > 0 => {
                    ExceededBound::Device(granules)
                }
                Err(DriverError::OutOfMemory { .. }) => return Err(fail(port, Cause::Device)),
                Err(error) => return Err(AllocFailure::of_driver(error)),
            };
            attempts -= 1;
        }
        let assessed = port.with(|state| assess(state, shortage));
        let room = match assessed {
            Ok(granules) => release_idle(port, granules).await?,
            Err(cause) => ShortageOutcome::None(cause),
        };
        match room {
            ShortageOutcome::Made | ShortageOutcome::Tried => {}
            ShortageOutcome::Coming => port.wait_for_result(|state| state.sleep.is_open()).await,
            // A segment that arrives for another operation may have room for this block as well.
            ShortageOutcome::None(Cause::Limit { .. })
                if port.with(|state| state.region(region).segment.committing()) > 0 =>
            {
                port.wait_for_result(|state| state.sleep.is_open()).await;
            }
            ShortageOutcome::None(cause) => return Err(fail(port, cause)),
        }
        // The arena may have fallen asleep: nothing of this block was recorded.
        awake(port).await.map_err(AllocFailure::uncounted)?;
        match port.with(|state| state.place(target, search)) {
            Ok(found) => return Ok(found),
            Err(failure) => no_place = failure,
        }
    }
}

/// Allocates a marked segment, and places the block in it.
async fn create_segment(
    port: &Port<'_>,
    AllocTarget { region, wanted, .. }: AllocTarget,
    span: Span,
) -> Result<Option<Placement>, DriverError> {
    let created = port.perform(CallKind::CreateSegment { size: ByteSize::new(span.size) }).await;
    port.with(|state| {
        let at = match created {
            Ok(Answer::Address(at)) => Some(at),
            _ => None,
        };
        state.end_segment(region, span, at, port.clock);
        created.map(|_| state.region_mut(region).place_in(wanted, span))
    })
}

/// Continues an allocation after its first step. If memory is short, it empties caches,
/// commits, waits, and makes the steps after a shortage (`retry`).
///
/// # Errors
/// A shortage; the errors of a wake.
pub(crate) async fn alloc(
    port: &Port<'_>,
    (target, mut begun): (AllocTarget, Begun),
) -> Result<Placement, AllocFailure> {
    let region = target.region;
    // Cached memory is used before more is committed. That of other lanes would need a wait.
    if port.surroundings.caches_hold()
        && port.with(|state| lacks_memory(state, region, &begun))
        && port.outside(|| port.surroundings.empty_caches_for(target.taker)).await
    {
        begun = port.with(|state| begin_again(state, port.clock, target, begun));
    }
    let mut outcome = match begun {
        Begun::Done(placed) => Ok(placed),
        Begun::Placed(placed, claim) => complete(port, target, placed, claim).await,
        Begun::Not => attempt(port, target, Search::Usual).await,
    };
    outcome = without_wait(port, target, outcome).await;
    if outcome.as_ref().is_err_and(AllocFailure::is_shortage) {
        outcome = run_ladder(port, region, async |search| {
            without_wait(port, target, attempt(port, target, search).await).await
        })
        .await;
    }
    if outcome.is_ok() {
        port.with(|state| port.surroundings.note_live(state.live(), state.limit.get()));
    }
    outcome
}

/// Retries an allocation for which a stream capture forbids a wait, with memory that needs none or
/// can be committed.
async fn without_wait(
    port: &Port<'_>,
    target: AllocTarget,
    outcome: Result<Placement, AllocFailure>,
) -> Result<Placement, AllocFailure> {
    match outcome {
        Err(failure) if failure.is_by_capture() => attempt(port, target, Search::Clear).await,
        outcome => outcome,
    }
}

/// Returns `true` if a block has no place, or a place without memory.
fn lacks_memory(state: &ArenaState, region: Region, begun: &Begun) -> bool {
    match begun {
        Begun::Done(_) => false,
        Begun::Placed(placed, _) => !state.region(region).segment.missing(placed.span).is_nothing(),
        Begun::Not => true,
    }
}

/// Makes the first step again, after memory was freed. A block that was placed gives its place up.
fn begin_again(
    state: &mut ArenaState,
    clock: &dyn Clock,
    target: AllocTarget,
    begun: Begun,
) -> Begun {
    if let Begun::Placed(placed, claim) = begun {
        state.cancel_placement(target.region, placed, claim, clock);
    }
    begin(state, clock, target)
}
