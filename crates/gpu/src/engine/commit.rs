//! Commits the missing granules of a span, within the limit: for blocks that are placed, resized or
//! moved.
//!
//! If the limit or the device leaves no room, idle memory elsewhere is moved or released first. A
//! commit waits for another operation's driver call only if it needs a granule of that call.
//!
//! Invariant: `backed + being committed <= limit` at every commit.

use super::context::OpContext;
use super::release::{ReleasedGranules, release_granules};
use super::remap::remap_idle;
use crate::driver::DriverError;
use crate::index::Span;
use crate::state::arena::{ArenaState, CommitOptions};
use crate::state::failure::{AllocFailure, Cause};
use crate::state::region::Region;
use crate::state::segment::Runs;

/// The attempts of an allocation on a full device in addition to one per idle granule. Each attempt
/// releases at least one granule, so more attempts are needed only if other processes take memory.
pub(super) const ATTEMPTS_BESIDE: u64 = 16;

/// The bound that a commit would exceed.
#[derive(Clone, Copy)]
pub(super) enum ExceededBound {
    /// The arena's limit, for a commit of this many bytes.
    Limit(u64),
    /// The device's memory, for a commit of this many granules.
    Device(u64),
}

/// The outcome of making room after a shortage.
pub(super) enum ShortageOutcome {
    /// Idle granules were released, or moved to the granules that need memory.
    Freed,
    /// The lock was released and nothing was gained: check again.
    Retry,
    /// Another operation is releasing idle granules, or committing ahead.
    InProgress,
    /// All idle granules together are not enough.
    None(Cause),
}

/// Commits every granule of a placed span.
///
/// Each turn of the loop commits something, makes some room or waits for a driver call. Under the
/// limit the loop ends only when no room can be made: if a turn gains nothing, other operations
/// have committed.
pub(crate) async fn ensure_committed(
    cx: &OpContext<'_>,
    region: Region,
    span: Span,
) -> Result<(), AllocFailure> {
    // The attempts that are left after the device was first full.
    let mut attempts = None;
    let (mut remaps, mut options) = cx.with(|state| {
        let (grow, large_handles) = (state.steps.grow(), state.capabilities.handles);
        (state.capabilities.remap, CommitOptions { grow, large_handles })
    });
    loop {
        let shortage = match cx.with(|state| next_commit(state, region, span, options)) {
            // This ends with the calls in progress: no granule of a placed span starts to leave,
            // and a neighbour's commit in progress ends as committed or as bare.
            None => {
                cx.wait_while(|state| state.region(region).segment.missing(span).is_moving).await;
                continue;
            }
            Some(Err(shortage)) => shortage,
            Some(Ok(runs)) => {
                let large_handles = runs.iter().any(|run| run.has_large_handles());
                match commit(cx, region, runs).await {
                    // The runs were all that was bare, and memory that blocks touch does not leave.
                    Ok(()) => return Ok(()),
                    // The commit may succeed without the growth, or with small handles.
                    Err(DriverError::OutOfMemory { .. }) if options.grow || large_handles => {
                        let large_handles = options.grow && large_handles;
                        options = CommitOptions { grow: false, large_handles };
                        continue;
                    }
                    Err(DriverError::OutOfMemory { .. }) => {
                        let left = attempts.unwrap_or_else(|| cx.with(|state| attempts_max(state)));
                        if left == 0 {
                            return Err(AllocFailure::of(Cause::Device, span.size));
                        }
                        attempts = Some(left - 1);
                        let missing = cx.with(|state| state.region(region).segment.missing(span));
                        ExceededBound::Device(missing.granules)
                    }
                    Err(error) => return Err(AllocFailure::of_driver(error)),
                }
            }
        };
        match make_room(cx, (region, span), shortage, &mut remaps).await? {
            ShortageOutcome::Freed | ShortageOutcome::Retry => {}
            ShortageOutcome::InProgress => cx.wait_for_result(|_| true).await,
            ShortageOutcome::None(cause) => return Err(AllocFailure::of(cause, span.size)),
        }
    }
}

/// Returns the number of attempts of a commit on a full device.
fn attempts_max(state: &ArenaState) -> u64 {
    ATTEMPTS_BESIDE + state.granules_for(state.releasable())
}

/// Marks the missing runs of a placed span, none if nothing is missing, as committing, if they fit
/// under the limit; returns `None` while a driver call is in progress for one of its granules.
#[inline]
fn next_commit(
    state: &mut ArenaState,
    region: Region,
    span: Span,
    options: CommitOptions,
) -> Option<Result<Runs, ExceededBound>> {
    let missing = state.region(region).segment.missing(span);
    let bytes = state.bytes_of(missing.granules);
    if missing.is_moving {
        return None;
    }
    Some(if bytes == 0 {
        Ok(Runs::new())
    } else if state.over_limit(bytes) > 0 {
        Err(ExceededBound::Limit(bytes))
    } else {
        Ok(state.begin_commit(region, span, bytes, options))
    })
}

/// Commits marked runs in order until one fails, and records every result.
async fn commit(cx: &OpContext<'_>, region: Region, runs: Runs) -> Result<(), DriverError> {
    let mut outcome = Ok(());
    for run in runs {
        if outcome.is_ok() {
            let run = cx.with(|state| state.region(region).placed_run(region, run));
            outcome = cx.commit(run).await;
        }
        cx.with(|state| state.end_commit(region, run, outcome.is_ok()));
    }
    outcome
}

/// Moves idle granules to a span that needs memory, or releases them, if that can help.
async fn make_room(
    cx: &OpContext<'_>,
    (region, span): (Region, Span),
    shortage: ExceededBound,
    remaps: &mut bool,
) -> Result<ShortageOutcome, AllocFailure> {
    let granules = match cx.with(|state| assess(state, shortage)) {
        Ok(granules) => granules,
        Err(cause) => return Ok(ShortageOutcome::None(cause)),
    };
    // More granules must leave than the span needs only if the limit was lowered.
    let missing = cx.with(|state| state.region(region).segment.missing(span)).granules;
    if *remaps && granules <= missing {
        let (moved, error) = remap_idle(cx, region, span, granules).await;
        *remaps = error.is_none();
        if moved > 0 {
            return Ok(ShortageOutcome::Freed);
        }
        if !*remaps {
            return Ok(ShortageOutcome::Retry);
        }
    }
    let leave = if *remaps && granules > missing { granules - missing } else { granules };
    release_idle(cx, leave).await
}

/// Releases about this many idle granules.
pub(super) async fn release_idle(
    cx: &OpContext<'_>,
    granules: u64,
) -> Result<ShortageOutcome, AllocFailure> {
    match release_granules(cx, granules, None).await {
        // A failed trim is ignored: there is room without it, or the driver reports an error.
        ReleasedGranules { error: Some(error), is_of_trim: false, .. } => {
            Err(AllocFailure::of_driver(error))
        }
        ReleasedGranules { granules: 1.., .. } => Ok(ShortageOutcome::Freed),
        ReleasedGranules { unlocked: true, .. } => Ok(ShortageOutcome::Retry),
        // No granule could be marked, so another operation is releasing the idle granules counted
        // above, or is committing them ahead.
        ReleasedGranules { .. } => Ok(ShortageOutcome::InProgress),
    }
}

/// Returns the number of idle granules to release for a shortage, or the cause of the error if all
/// idle granules are too few.
pub(super) fn assess(state: &ArenaState, shortage: ExceededBound) -> Result<u64, Cause> {
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
