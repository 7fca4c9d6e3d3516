//! Commits the missing granules of a span, within the limit: for blocks that are placed, resized or
//! moved.
//!
//! If the limit or the device leaves no room, idle memory elsewhere is moved or released first. A
//! commit waits for another operation's driver call only if it needs a granule of that call.
//!
//! Invariant: `backed + being committed <= limit` at every commit.
#![expect(unsafe_code, reason = "a remap takes memory away")]

use super::context::OpContext;
use super::stores::complete_copies;
use crate::driver::{DeviceAddress, DriverError};
use crate::index::Span;
use crate::state::{
    Ages, AllocFailure, ArenaState, Cause, CommitOptions, GranuleCall, PlacedRun, Run, Runs, START,
};
use crate::types::Region;
use lowtide_core::{ByteSize, log};

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
    if remaps {
        // To move an idle granule takes as many calls as to commit one.
        let pairs = cx.with(|state| match state.region(region).segment.missing(span).granules {
            1 => begin_remap(state, region, span, 1),
            _ => Vec::new(),
        });
        try_remap(cx, pairs, &mut remaps).await;
    }
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
                        let most = |state: &mut ArenaState| {
                            ATTEMPTS_BESIDE + state.granules_for(state.memory().releasable())
                        };
                        let left = attempts.unwrap_or_else(|| cx.with(most));
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
        let run = cx.with(|state| state.region(region).placed_run(run));
        if outcome.is_ok() {
            outcome = cx.commit(run).await;
        }
        cx.with(|state| state.end_commit(run, outcome.is_ok()));
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
        let pairs = cx.with(|state| begin_remap(state, region, span, granules));
        if try_remap(cx, pairs, remaps).await > 0 {
            return Ok(ShortageOutcome::Freed);
        }
        if !*remaps {
            return Ok(ShortageOutcome::Retry);
        }
    }
    let leave = if *remaps && granules > missing { granules - missing } else { granules };
    release_idle(cx, leave).await
}

/// Moves the memory of marked pairs, and returns the granules moved. After an error there are no
/// more remaps.
async fn try_remap(cx: &OpContext<'_>, pairs: Vec<Pair>, remaps: &mut bool) -> u64 {
    let (moved, error) = remap(cx, pairs).await;
    if let Some(error) = &error {
        cx.log(|arena| log!(debug, arena, %error, "remap failed")).await;
    }
    *remaps = error.is_none();
    moved
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
    let memory = state.memory();
    let idle = state.granules_for(memory.releasable());
    match shortage {
        ExceededBound::Limit(bytes) => {
            let granules = state.granules_for(state.over_limit(bytes));
            if idle >= granules {
                return Ok(granules);
            }
            let stays = (memory.backed - memory.releasable()).saturating_add(bytes);
            Err(Cause::Limit { over: stays.saturating_sub(state.limit.get()) })
        }
        ExceededBound::Device(_) if idle == 0 && !state.untrimmed => Err(Cause::Device),
        ExceededBound::Device(granules) => Ok(granules),
    }
}

// Moves memory from idle granules to granules that need it, if the driver supports that.
//
// When the limit or the device rejects a commit, idle granules can supply the memory. If the
// granules were released first, another process on the device could take their memory, and the
// device would create new handles; a remap releases nothing. So no idle memory is lost to
// fragmented addresses. The innermost idle granules go first, as in a release.
//
// As for every driver call, the lock is released: source granules are marked as leaving, target
// granules as arriving, and a thread that needs one of them waits for the result. The memory
// counts at the source until it has arrived, so it is never counted twice. A commit that is short
// of memory releases and commits instead if a remap fails, if the device's costs favour that, or if
// the idle handles have several granules: releasing such a handle and committing again takes as
// many calls as a remap.
//
// Invariant: the sum of backed granules is the same before, during and after.

/// The granules of one driver call: the source and the target of the memory.
#[derive(Clone, Copy, Debug)]
pub(super) struct Pair {
    pub(super) from: PlacedRun,
    pub(super) region: Region,
    pub(super) to: Run,
}

/// Moves the memory of marked pairs in order until a call fails, and records every result. Returns
/// the granules moved, and the driver's error.
pub(super) async fn remap(cx: &OpContext<'_>, pairs: Vec<Pair>) -> (u64, Option<DriverError>) {
    let (mut moved, mut failed) = (0, None);
    for pair in pairs {
        let (to, _) = cx.with(|state| state.region(pair.region).segment.place_of(pair.to));
        if failed.is_none() {
            let PlacedRun { at: from, size, handle, .. } = pair.from;
            // SAFETY: the source is marked as leaving and unused, the target as arriving.
            let call = || unsafe { cx.driver.remap(from, to, size, handle) };
            match cx.outside(call).await {
                Ok(()) => moved += pair.to.granules(),
                Err(error) => failed = Some(error),
            }
        }
        cx.with(|state| end_remap(state, pair, to, failed.is_none()));
    }
    (moved, failed)
}

/// Marks up to this many idle granules as leaving, and as many bare granules of a touched span as
/// arriving: at most [`CALLS_MAX`] pairs, plus one for each gap in the bare granules.
fn begin_remap(state: &mut ArenaState, region: Region, span: Span, granules: u64) -> Vec<Pair> {
    if state.sleep.may_be_copied() || !state.costs.prefers_remap() {
        return Vec::new(); // a release waits for copies first
    }
    let granules = granules.min(state.region(region).segment.bare(span));
    let (mut left, mut leaving, mut cursors) = (granules, Vec::new(), [START; Region::ALL.len()]);
    while leaving.len() < CALLS_MAX {
        let Some(next) = state.begin_leave(left, 1, &mut cursors, None) else { break };
        left -= next.run.granules();
        leaving.push(next);
    }
    let runs = state.region_mut(region).segment.begin_arrive(span, granules - left);
    pairs(state, region, leaving, runs)
}

/// Returns pairs of leaving and arriving runs of the same length, cut to fit.
fn pairs(state: &ArenaState, region: Region, leaving: Vec<PlacedRun>, runs: Vec<Run>) -> Vec<Pair> {
    let mut pairs = Vec::with_capacity(leaving.len() + runs.len());
    let mut runs = runs.into_iter();
    let mut next = runs.next();
    for from in leaving {
        let mut rest = Some(from.run);
        while let (Some(run), Some(to)) = (rest, next) {
            let (run, more) = run.split(to.granules());
            let (to, more_to) = to.split(run.granules());
            rest = more;
            next = more_to.or_else(|| runs.next());
            let (at, size) = state.region(from.region).segment.place_of(run);
            let from = PlacedRun { run, at, size, ..from };
            pairs.push(Pair { from, region, to });
        }
    }
    pairs
}

/// Records the result of a remap.
fn end_remap(state: &mut ArenaState, pair: Pair, at: DeviceAddress, done: bool) {
    let Pair { from, region, to } = pair;
    state.region_mut(from.region).end_leave(from.run, done);
    state.region_mut(region).segment.end(to, GranuleCall::Arrive, done);
    if done {
        state.totals.remaps_total += 1;
        state.totals.remapped_bytes_total += from.size.get();
        state.events.push("remap", |line| {
            line.bytes("size", from.size).address(from.at).number("to", at.get())
        });
    }
    state.note_result();
}

// Releases idle memory to the driver.
//
// This part decides how much to release and in which order, never when. The rule of decommit: a
// granule leaves only when every use of it is complete. On a driver with synchronous work a freed
// block has no uses left. On other drivers freed memory is pending, and so active, until its uses
// are known to be complete (`completion`).
//
// Invariant: only granules that no block touches leave.

/// The maximum number of driver calls in one pass over idle memory. A guess, to be measured per
/// driver.
const CALLS_MAX: usize = 32;

/// The result of a release.
#[derive(Debug, Default)]
pub(crate) struct ReleasedGranules {
    /// Granules released.
    pub(crate) granules: u64,
    /// The driver's error, if a call failed; the granules of that call and of later ones stay.
    pub(crate) error: Option<DriverError>,
    /// `true` if the call that failed was a trim: the memory has left the arena.
    pub(crate) is_of_trim: bool,
    /// `true` if the lock was released meanwhile: earlier counts may have changed.
    pub(crate) unlocked: bool,
}

/// Releases up to `granules` idle granules, in at most [`CALLS_MAX`] calls; with ages, only expired
/// ones. A segment leaves whole, and then the driver is trimmed so that it keeps no segment.
pub(crate) async fn release_granules(
    cx: &OpContext<'_>,
    granules: u64,
    ages: Option<Ages>,
) -> ReleasedGranules {
    let mut released = ReleasedGranules::default();
    if cx.with(|state| state.sleep.may_be_copied()) {
        // An operation that still queues copies waits for them itself before it ends. An operation
        // whose block lacks memory never meets such an operation.
        released.unlocked = cx.with(|state| !state.sleep.is_queueing);
        if released.unlocked {
            released.error = complete_copies(cx).await.err();
        }
        if cx.with(|state| state.sleep.may_be_copied()) {
            return released;
        }
    }
    let untrimmed = cx.with(|state| std::mem::take(&mut state.untrimmed));
    let mut cursors = [START; Region::ALL.len()];
    for _ in 0..CALLS_MAX {
        let left = granules.saturating_sub(released.granules);
        let next = cx.with(|state| state.begin_leave(left, usize::MAX, &mut cursors, ages));
        let Some(leaving) = next else { break };
        released.unlocked = true;
        let outcome = cx.decommit(leaving).await;
        cx.with(|state| state.end_leave(leaving, outcome.is_ok()));
        if let Err(error) = outcome {
            released.error = Some(error);
            break;
        }
        released.granules += leaving.run.granules();
    }
    trim(cx, untrimmed, &mut released).await;
    released
}

/// Releases idle memory until at most `keep` bytes are committed, or nothing is idle. Returns the
/// granules released, and the driver's error.
pub(crate) async fn release_down_to(
    cx: &OpContext<'_>,
    keep: ByteSize,
) -> (u64, Option<DriverError>) {
    // Memory that the driver kept is trimmed as well, so at least one turn is made.
    let (granules, mut untrimmed) = cx.with(|state| {
        let memory = state.memory();
        let excess = memory.backed.saturating_sub(memory.leaving).saturating_sub(keep.get());
        (state.granules_for(excess.min(memory.idle())), state.untrimmed)
    });
    let mut released = 0;
    // Each turn except the last releases at least one granule: at most `granules` turns.
    while released < granules || std::mem::take(&mut untrimmed) {
        untrimmed = false;
        let given = release_granules(cx, granules.saturating_sub(released), None).await;
        released += given.granules;
        // If none was released, another operation took the idle memory.
        if given.error.is_some() || given.granules == 0 {
            return (released, given.error);
        }
    }
    (released, None)
}

/// Trims the driver, so that it keeps no memory of released segments.
async fn trim(cx: &OpContext<'_>, untrimmed: bool, released: &mut ReleasedGranules) {
    let is_whole = cx.with(|state| state.is_whole());
    if !untrimmed && (!is_whole || released.granules == 0) {
        return;
    }
    released.unlocked = true;
    if let Err(error) = cx.outside(|| cx.driver.trim()).await {
        cx.with(|state| state.untrimmed = true);
        released.is_of_trim = released.error.is_none();
        released.error.get_or_insert(error);
    }
}
