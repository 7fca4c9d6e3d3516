//! Waking: commits every granule that a block touches, and restores the contents. Contents are
//! copied while later granules are being committed.
//!
//! Operations that need memory wait here until the arena is awake, and wake it if it sleeps.
//!
//! Entering is possible only after the host has seen the last copy complete. If memory is short,
//! the memory of blocks that were freed meanwhile is skipped, and the wake is retried for some
//! time. A failed wake is undone: the arena stays asleep, and its copies are complete. The copies
//! are discarded only when the arena is awake.
//!
//! Invariants: while the arena is not awake, all kept contents are in the copies; nothing is copied
//! to an address without a block.

use std::task::Waker;
use std::time::Duration;

use super::callbacks::{is_within, is_within_budget};
use super::commit::release_granules;
use super::completion::check_capturing;
use super::context::OpContext;
use super::shortage::call_for_room;
use super::stores;
use crate::driver::DriverError;
use crate::state::{
    AllocFailure, ArenaState, Cause, PlacedRun, Run, Search, SleepPhase, StoredCopy,
};
use crate::types::{DeviceError, Region, Result, SleepReport};
use lowtide_core::clock::Bell;
use lowtide_core::sync::caught;
use lowtide_core::{ByteSize, log};
use tracing::level_filters::LevelFilter;

/// The number of retries of a wake that found too little memory.
const RETRIES: u32 = 8;

/// The bytes to commit at a time: the copy of one part runs while the next part is being committed.
/// A guess: a commit of four handles of 64 MiB takes about 1 ms, and their copy 5 ms.
const COMMIT_STEP: ByteSize = ByteSize::mib(256);

/// All granules to restore, and the number of runs that are committed.
#[derive(Debug)]
struct Incoming {
    runs: Vec<PlacedRun>,
    committed: usize,
}

impl Incoming {
    fn next(&self) -> Option<PlacedRun> {
        self.runs.get(self.committed).copied()
    }

    /// Returns the bytes that are not committed yet.
    fn missing(&self) -> ByteSize {
        self.runs[self.committed..].iter().map(|run| run.size).sum()
    }
}

/// Waits until the arena is awake, waking it if it sleeps. Costs one branch if the arena is awake.
/// The arena may fall asleep again at the operation's next wait.
///
/// # Errors
/// The errors of a wake.
#[inline]
pub(crate) async fn awake(cx: &OpContext<'_>) -> Result<()> {
    if cx.with(|state| state.is_usable()) {
        return Ok(());
    }
    // Boxed: the operations that call this stay small.
    Box::pin(wait_awake(cx)).await
}

async fn wait_awake(cx: &OpContext<'_>) -> Result<()> {
    let before = cx.with(|state| state.sleep.attempts);
    loop {
        match cx.with(|state| state.sleep.phase) {
            SleepPhase::Awake | SleepPhase::Draining(_) => return Ok(()),
            // This may be the callback that the waking thread waits for.
            SleepPhase::Waking if is_within() => return Err(cx.with(|state| state.not_awake())),
            SleepPhase::Waking => {
                cx.wait_while(|state| state.sleep.phase == SleepPhase::Waking).await
            }
            // This may be the thread that puts the arena to sleep.
            SleepPhase::Suspending if is_within_budget() => {
                return Err(cx.with(|state| state.not_awake()));
            }
            SleepPhase::Suspending => {
                cx.with(|state| state.sleep.entering += 1);
                cx.wait_while(is_suspending).await;
                cx.with(|state| state.sleep.entering -= 1);
            }
            SleepPhase::Asleep => {
                if let Some(error) = cx.with(|state| state.sleep.failed_since(before)) {
                    return Err(error);
                }
                let wake_timeout = cx.with(begin_wake);
                resume(cx, wake_timeout).await?;
            }
        }
    }
}

fn is_suspending(state: &ArenaState) -> bool {
    state.sleep.phase == SleepPhase::Suspending
}

/// Wakes the arena, or waits for the operation that is waking it.
///
/// # Errors
/// `State` if it is awake; the errors of the wake.
pub(crate) async fn wake(cx: &OpContext<'_>) -> Result<SleepReport> {
    let before = cx.with(|state| state.sleep.attempts);
    // A sleep in progress ends first.
    if !is_within_budget() {
        cx.wait_while(is_suspending).await;
    }
    match cx.with(|state| state.sleep.phase) {
        SleepPhase::Asleep => resume(cx, cx.with(begin_wake)).await,
        SleepPhase::Waking if !is_within() => {
            cx.wait_while(|state| state.sleep.phase == SleepPhase::Waking).await;
            let failed = cx.with(|state| state.sleep.failed_since(before));
            failed.map_or_else(|| Ok(SleepReport::default()), Err)
        }
        _ => Err(cx.with(|state| state.not_awake())),
    }
}

/// Wakes the arena if it is asleep, without waiting for a transition in progress or for memory.
///
/// # Errors
/// `State` if it is not asleep; the errors of the wake.
pub(crate) async fn wake_at_once(cx: &OpContext<'_>) -> Result<SleepReport> {
    if cx.with(|state| state.sleep.phase) != SleepPhase::Asleep {
        return Err(cx.with(|state| state.not_awake()));
    }
    cx.with(begin_wake);
    resume(cx, Duration::ZERO).await
}

/// Wakes a sleeping arena that has no blocks left, and releases its stores. Makes no other driver
/// call.
pub(crate) async fn wake_if_empty(cx: &OpContext<'_>) {
    if cx.with(|state| sleeps_empty(state)) {
        let _ = wake(cx).await; // another thread may have woken it first
        stores::release_idle(cx).await;
    }
}

/// Returns `true` if the arena sleeps and has no blocks left.
pub(crate) fn sleeps_empty(state: &ArenaState) -> bool {
    state.sleep.phase == SleepPhase::Asleep && state.live() == 0
}

/// Marks a sleeping arena as waking; returns the time for which the wake may retry.
pub(crate) fn begin_wake(state: &mut ArenaState) -> Duration {
    state.sleep.phase = SleepPhase::Waking;
    state.sleep.config.wake_timeout
}

/// Completes a wake: the arena is awake, or asleep again after an error. If memory is short,
/// retries for `wake_timeout`.
pub(crate) async fn resume(cx: &OpContext<'_>, wake_timeout: Duration) -> Result<SleepReport> {
    let runs = cx.with(|state| mark_incoming(state, true));
    let mut incoming = Incoming { runs, committed: 0 };
    match restore(cx, &mut incoming, wake_timeout).await {
        Ok(restored) => Ok(finish(cx, &incoming.runs, restored).await),
        // In the child of a callback that forked, the state is out of reach.
        Err(DeviceError::Forked) => Err(DeviceError::Forked),
        Err(error) => Err(abort(cx, &incoming, stores::copy_error(cx, error)).await),
    }
}

/// Commits all memory and copies the contents back; returns the bytes copied.
async fn restore(
    cx: &OpContext<'_>,
    incoming: &mut Incoming,
    wake_timeout: Duration,
) -> Result<ByteSize> {
    // The wait for the copies would invalidate a capture.
    let has_copies = |state: &mut ArenaState| {
        let saved = state.sleep.saved.as_ref();
        saved.is_some_and(|saved| saved.is_touched(|of| &state.region(of).segment))
    };
    if cx.with(has_copies) {
        check_capturing(cx).await?;
    }
    let (mut restored, mut retries) = (ByteSize::ZERO, RETRIES);
    let pause = wake_timeout / RETRIES;
    while let Some(run) = commit_step(cx, incoming, &mut retries, pause).await? {
        let copies = |state: &ArenaState| touched_copies(state, run.region, run.run);
        restored = restored.saturating_add(stores::queue_copies(cx, copies).await?);
    }
    restored = restored.saturating_add(stores::queue_copies(cx, stayed_copies).await?);
    stores::complete_own_copies(cx).await?;
    Ok(restored)
}

/// Commits the next run to restore, and returns it; `None` if none is left. If memory is short,
/// calls the callbacks and waits between retries.
async fn commit_step(
    cx: &OpContext<'_>,
    incoming: &mut Incoming,
    retries: &mut u32,
    pause: Duration,
) -> Result<Option<PlacedRun>> {
    while let Some(next) = incoming.next() {
        let outcome = match commit_next(cx, incoming).await {
            Err(failure) if failure.is_shortage() => {
                let mut attempt = async |_: Search| commit_next(cx, incoming).await;
                call_for_room(cx, next.region, failure, &mut attempt).await
            }
            outcome => outcome,
        };
        match outcome {
            Ok(committed) => return Ok(committed),
            Err(failure) if failure.is_shortage() && *retries > 0 && !pause.is_zero() => {
                *retries -= 1;
                // The bell never rings: only time passes.
                cx.wait_until(Bell::new(), cx.clock.now() + pause).await;
            }
            Err(failure) => return Err(without(*failure.error, incoming.missing())),
        }
    }
    Ok(None)
}

/// Commits the next run to restore, and returns it. Memory being committed counts as committed, and
/// so counts against a limit that was lowered meanwhile.
async fn commit_next(
    cx: &OpContext<'_>,
    incoming: &mut Incoming,
) -> Result<Option<PlacedRun>, AllocFailure> {
    // Each turn but the last skips a granule to restore, or releases one that is idle.
    while let Some(next) = incoming.next() {
        let over = cx.with(|state| state.over_limit(0));
        let (cause, bytes) = if over > 0 {
            (Cause::Limit { over }, over)
        } else {
            match cx.commit(next).await {
                Ok(()) => {
                    incoming.committed += 1;
                    return Ok(Some(next));
                }
                Err(DriverError::OutOfMemory { .. }) if next.run.has_large_handles() => {
                    cx.with(|state| in_small_handles(state, incoming));
                    continue;
                }
                Err(DriverError::OutOfMemory { .. }) => (Cause::Device, next.size.get()),
                Err(error) => return Err(AllocFailure::of_driver(error)),
            }
        };
        if !make_room(cx, incoming, bytes).await {
            let failure = AllocFailure::of(cause, next.size.get());
            return Err(cx.with(|state| failure.with_figures(state)));
        }
    }
    Ok(None)
}

/// Skips memory of blocks that were freed meanwhile, or else releases idle memory, such as that of
/// a freed block with [`Contents::Stay`](crate::Contents::Stay). Returns `true` if there was any.
async fn make_room(cx: &OpContext<'_>, incoming: &mut Incoming, bytes: u64) -> bool {
    if cx.with(|state| skip_freed(state, incoming)) {
        return true;
    }
    // Memory of a block that was freed may still be the target of a copy.
    if stores::complete_own_copies(cx).await.is_err() {
        return false;
    }
    let granules = cx.with(|state| state.granules_for(bytes));
    release_granules(cx, granules, None).await.granules > 0
}

/// Makes the arena awake. The stores become idle, and stay in the accounting.
async fn finish(cx: &OpContext<'_>, runs: &[PlacedRun], restored: ByteSize) -> SleepReport {
    let committed = runs.iter().map(|run| run.size).sum();
    // All memory is committed. This comes before the arena is awake, because it may be asleep again
    // the moment after.
    cx.surroundings.set_asleep(false);
    let wakers = cx.with(|state| {
        for run in runs {
            state.end_commit(*run, true);
        }
        let now = cx.clock.now();
        let saved = state.sleep.saved.take();
        state.sleep.idle.put(saved.map(|saved| saved.stores).unwrap_or_default(), now);
        state.totals.wakes_total += 1;
        state.sleep.end_wake(None, now);
        state
            .events
            .push("wake", |line| line.bytes("committed", committed).bytes("restored", restored));
        state.sleep.finish(SleepPhase::Awake)
    });
    call_wakers(cx, wakers).await;
    if LevelFilter::current() >= LevelFilter::INFO {
        cx.log(|arena| log!(info, arena, %committed, %restored, "arena awake")).await;
    }
    SleepReport { memory: committed, copied: restored, ..SleepReport::default() }
}

/// Releases the memory of a failed wake. The arena is asleep again.
async fn abort(cx: &OpContext<'_>, incoming: &Incoming, error: DeviceError) -> DeviceError {
    let Incoming { runs, committed } = incoming;
    // Copies in progress keep their memory here: the next wake fills it again.
    let is_done = stores::complete_own_copies(cx).await.is_ok();
    let mut stays = Vec::with_capacity(runs.len());
    for (nth, &run) in runs.iter().enumerate() {
        let has_left = nth >= *committed || (is_done && cx.decommit(run).await.is_ok());
        stays.push(!has_left);
    }
    let wakers = cx.with(|state| {
        for (run, &stays) in runs.iter().zip(&stays) {
            state.end_commit(*run, stays);
        }
        state.totals.wake_failures_total += 1;
        state.sleep.end_wake(Some(error.clone()), cx.clock.now());
        state.events.push("wake_failed", |line| line.text("error", &error));
        state.sleep.finish(SleepPhase::Asleep)
    });
    call_wakers(cx, wakers).await;
    cx.log(|arena| log!(warn, arena, %error, "arena wake failed")).await;
    error
}

/// Ends a wake for which no thread could be started. The arena is asleep again.
pub(crate) async fn fail_wake(cx: &OpContext<'_>, error: DeviceError) -> DeviceError {
    abort(cx, &Incoming { runs: Vec::new(), committed: 0 }, error).await
}

/// Wakes the futures that wait for the end of a transition.
pub(super) async fn call_wakers(cx: &OpContext<'_>, wakers: Vec<Waker>) {
    if wakers.is_empty() {
        return;
    }
    let wake = |waker: Waker| drop(caught(|| waker.wake()));
    cx.outside(|| wakers.into_iter().for_each(wake)).await;
}

/// Returns the error of a wake. `missing` bytes were counted as committed but were never committed.
fn without(mut error: DeviceError, missing: ByteSize) -> DeviceError {
    if let DeviceError::OutOfMemory { committed, .. } = &mut error {
        *committed = committed.saturating_sub(missing);
    }
    error
}

/// Marks the memory to restore as committing, in large handles if `is_large`. No handle has a
/// granule that no block touches.
fn mark_incoming(state: &mut ArenaState, is_large: bool) -> Vec<PlacedRun> {
    let granules_max = usize::try_from(state.granules_for(COMMIT_STEP.get())).unwrap_or(1);
    let committed = state.memory().backed.max(state.live());
    let handle_max = if is_large { state.handle_max(committed) } else { 1 };
    let mut runs = Vec::new();
    for region in Region::ALL {
        let of = state.region_mut(region);
        let marked = of.segment.begin_return(granules_max, handle_max);
        runs.extend(marked.into_iter().map(|run| of.placed_run(run)));
    }
    runs
}

/// Divides the next run to restore into handles of one granule.
fn in_small_handles(state: &mut ArenaState, incoming: &mut Incoming) {
    let Some(next) = incoming.next() else { return };
    state.end_commit(next, false);
    let small = mark_incoming(state, false);
    incoming.runs.splice(incoming.committed..=incoming.committed, small);
}

/// Skips memory to restore that no block touches any more. Returns `true` if there was any.
fn skip_freed(state: &mut ArenaState, incoming: &mut Incoming) -> bool {
    let before = incoming.missing();
    for run in incoming.runs.split_off(incoming.committed) {
        state.end_commit(run, false);
    }
    incoming.runs.extend(mark_incoming(state, true));
    incoming.missing() < before
}

/// Returns the copies of the saved contents of a run that blocks still touch.
fn touched_copies(state: &ArenaState, region: Region, run: Run) -> Vec<StoredCopy> {
    let (segment, saved) = (&state.region(region).segment, state.sleep.saved.as_ref());
    saved.map(|saved| saved.touched_copies(region, run, segment)).unwrap_or_default()
}

/// Returns the copies of saved contents to memory that was committed before the wake: a sleep or a
/// wake that failed could not release the memory, and it may have lost the contents.
fn stayed_copies(state: &ArenaState) -> Vec<StoredCopy> {
    let mut copies = Vec::new();
    if state.memory().there() == 0 {
        return copies; // no memory stayed, as usual
    }
    for region in Region::ALL {
        for run in state.region(region).segment.committed_runs() {
            copies.extend(touched_copies(state, region, run));
        }
    }
    copies
}

// Grants leases. While a lease is held, the arena is open and no block moves.
//
// Invariant: `leases held = leases entered - leases dropped`, in the process of the arena.

/// Waits until the arena is awake, waking it if it sleeps, and counts a lease.
///
/// # Errors
/// The errors of a wake.
pub(crate) async fn enter(cx: &OpContext<'_>) -> Result<()> {
    loop {
        awake(cx).await?;
        if try_enter(cx).await? {
            return Ok(());
        }
    }
}

/// Counts a lease after the end of a move in progress. Returns `false` if the arena sleeps and must
/// be woken first.
///
/// # Errors
/// Those of the sleep state, which rejects leases.
pub(crate) async fn try_enter(cx: &OpContext<'_>) -> Result<bool> {
    if cx.with(|state| state.moves.moving.is_some()) {
        // A compaction in progress sees this and starts no further batch, so each thread waits for
        // at most one.
        cx.with(|state| state.moves.entering += 1);
        cx.wait_while(|state| state.moves.moving.is_some()).await;
        cx.with(|state| state.moves.entering -= 1);
    }
    cx.with(|state| {
        // The arena may have fallen asleep meanwhile.
        if !state.is_usable() {
            return Ok(false);
        }
        state.enter().map(|()| true)
    })
}
