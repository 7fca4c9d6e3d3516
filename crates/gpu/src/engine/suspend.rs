//! Puts an arena to sleep: waits for leases and for all work, saves contents, and releases memory.
//!
//! The order makes this safe. Once no lease is held, no operation can enter. Then the host waits
//! for every recorded use. Then contents are copied out, and the copies are waited for. Only then
//! does the first granule leave; until then only marks have changed. If a granule cannot be
//! released, the released ones are committed again and filled from the copies. If that fails too,
//! the remaining granules are released as far as possible, and the arena sleeps: the copies are
//! complete.
//!
//! `next_sleep` decides when an arena may sleep by itself; the control loop and
//! [`sleep_if_idle`](crate::DeviceArena::sleep_if_idle) ask it.
//!
//! Invariants: every granule that was committed is marked until its call's result is recorded; when
//! the arena is asleep, memory that is still committed was to stay, or the driver did not release
//! it and its contents are in the copies;
//! `idle sleep => now >= last lease's end + idle_after, now >= awake since + min_awake`.

use super::completion::complete_used;
use super::context::{OpContext, ShutCaches};
use super::resume::call_wakers;
use super::stores;
use crate::driver::DriverError;
use crate::state::{ArenaState, OutgoingRun, Saved, SleepPhase};
use crate::types::{Contents, DeviceError, Region, Result, SleepOptions, SleepReport, SleepState};
use lowtide_core::bytes::ByteSize;
use lowtide_core::clock::Moment;

/// The maximum number of waits for all uses. If more memory is freed during each of them, the arena
/// stays awake. A guess.
const ROUNDS_MAX: usize = 16;

/// A sleep in progress.
#[derive(Default)]
struct Suspension {
    /// The memory to release, marked as leaving.
    runs: Vec<OutgoingRun>,
    saved: Option<Saved>,
}

/// Puts an arena that is awake to sleep.
///
/// # Errors
/// Those of [`DeviceArena::sleep`](crate::DeviceArena::sleep).
pub(crate) async fn suspend(cx: &OpContext<'_>, options: SleepOptions) -> Result<SleepReport> {
    cx.with(|state| check_same_address(state))?;
    // Read before the state is visible: a clock advanced from then on reaches the deadline.
    let deadline = cx.clock.now() + options.drain;
    let Some(drain) = cx.with(|state| state.sleep.begin_drain()) else {
        let error = cx.with(|state| state.not_awake());
        return Err(cx.with(|state| recorded(state, error)));
    };
    // Cached blocks have memory, and caches hand them out without the arena's lock.
    let _shut = cx.outside(|| ShutCaches::shut(cx.surroundings)).await;
    match drain_leases(cx, (drain, deadline)).await {
        Ok(()) => release_memory(cx, options).await,
        Err(error) => Err(error),
    }
}

/// Fails if a block is live and the driver cannot restore its address.
fn check_same_address(state: &ArenaState) -> Result<()> {
    if state.capabilities.virtual_memory || state.live() == 0 {
        return Ok(());
    }
    let what = "waking at the same addresses";
    Err(DeviceError::Unsupported { what, backend: state.backend })
}

/// Waits until no lease is held, and then blocks new leases.
async fn drain_leases(cx: &OpContext<'_>, (drain, deadline): (u64, Moment)) -> Result<()> {
    loop {
        let now = cx.clock.now();
        let bell = cx.with(|state| {
            if state.sleep.phase != SleepPhase::Draining(drain) {
                let error = cancelled(state);
                return Err(recorded(state, error));
            }
            let (arena, count) = (state.name.clone(), state.outstanding.exported_count);
            let error = if count > 0 {
                let bytes = ByteSize::new(state.outstanding.exported_bytes);
                DeviceError::Exported { arena, count, bytes }
            } else if state.leases == 0 {
                state.sleep.end_drain(SleepPhase::Suspending);
                return Ok(None);
            } else if let Some(bell) = state.sleep.bell.clone().filter(|_| now < deadline) {
                return Ok(Some(bell));
            } else {
                let held_for = now - state.sleep.leased_since;
                DeviceError::Leased { arena, leases: state.leases, held_for }
            };
            state.sleep.end_drain(SleepPhase::Awake);
            Err(recorded(state, error))
        })?;
        let Some(bell) = bell else { return Ok(()) };
        cx.wait_until(bell, deadline).await;
    }
}

fn cancelled(state: &ArenaState) -> DeviceError {
    DeviceError::SleepCancelled { arena: state.name.clone() }
}

/// Records the reason the arena does not fall asleep, and returns the error.
fn recorded(state: &mut ArenaState, error: DeviceError) -> DeviceError {
    let now = state.sleep.state();
    state.note_sleepless(&error, now);
    error
}

/// Runs the steps from the last lease to the end of the sleep. The arena is awake again after an
/// error.
async fn release_memory(cx: &OpContext<'_>, options: SleepOptions) -> Result<SleepReport> {
    let mut suspension = Suspension::default();
    if let Err(error) = prepare(cx, options, &mut suspension).await {
        return Err(abort(cx, suspension, 0, error).await);
    }
    match release_runs(cx, &suspension.runs).await {
        Ok(()) => {
            let gone = vec![true; suspension.runs.len()];
            Ok(finish(cx, suspension, &gone, None).await)
        }
        Err((nth, error)) => Err(rollback(cx, suspension, nth, error).await),
    }
}

/// Marks the memory to release, and saves its contents. If this fails, no memory has left.
async fn prepare(
    cx: &OpContext<'_>,
    options: SleepOptions,
    suspension: &mut Suspension,
) -> Result<()> {
    suspension.runs = mark_outgoing(cx, options).await?;
    suspension.saved = stores::save(cx, &suspension.runs).await?;
    cx.with(|state| if state.sleep.is_wanted() { Err(cancelled(state)) } else { Ok(()) })
}

/// Waits for the calls that were in progress when the last lease was dropped, and for all uses of
/// memory. Then marks the memory to release.
async fn mark_outgoing(cx: &OpContext<'_>, options: SleepOptions) -> Result<Vec<OutgoingRun>> {
    for _ in 0..ROUNDS_MAX {
        cx.wait_while(is_busy).await;
        complete_used(cx).await?;
        stores::complete_copies(cx).await?;
        // This also waits for the uses of memory that was freed meanwhile.
        if !cx.with(|state| is_busy(state) || state.pending() > 0) {
            cx.with(|state| check_same_address(state))?;
            return Ok(cx.with(|state| {
                state.sleep.is_quiet = true;
                outgoing_runs(state, options)
            }));
        }
    }
    Err(cx.with(|state| cancelled(state)))
}

/// Returns `true` while calls that place, move, commit or release are in progress.
pub(crate) fn is_busy(state: &ArenaState) -> bool {
    let memory = state.memory();
    let is_arriving = |&region: &Region| state.region(region).arriving > 0;
    state.moves.moving.is_some()
        || memory.committing + memory.leaving > 0
        || Region::ALL.iter().any(is_arriving)
}

/// Marks all memory as leaving except memory that stays. Memory without kept contents comes last:
/// if a later run is not released, only such memory is lost.
fn outgoing_runs(state: &mut ArenaState, options: SleepOptions) -> Vec<OutgoingRun> {
    let run_max = state.run_max();
    let is_host = state.capabilities.counts_as_host();
    let mut runs = Vec::new();
    for (region, usual) in [(Region::Stable, options.stable), (Region::Dynamic, options.dynamic)] {
        let of = state.region_mut(region);
        runs.extend(of.begin_suspend((usual, is_host), run_max));
    }
    runs.sort_by_key(|run| run.contents != Contents::Keep);
    runs
}

/// Releases the memory of all runs, in order. The error has the number of the run that was not
/// released; the runs before it are released.
async fn release_runs(
    cx: &OpContext<'_>,
    runs: &[OutgoingRun],
) -> Result<(), (usize, DriverError)> {
    for (nth, run) in runs.iter().enumerate() {
        cx.decommit(run.place).await.map_err(|error| (nth, error))?;
    }
    if cx.with(|state| state.is_whole()) && cx.outside(|| cx.driver.trim()).await.is_err() {
        cx.with(|state| state.untrimmed = true); // for the next decay
    }
    Ok(())
}

/// Undoes a sleep of which no memory of live blocks has left: the arena is awake again. The first
/// `gone` runs have left.
async fn abort(
    cx: &OpContext<'_>,
    Suspension { runs, saved }: Suspension,
    gone: usize,
    error: DeviceError,
) -> DeviceError {
    let wakers = cx.with(|state| {
        for (at, run) in runs.iter().enumerate() {
            state.end_leave(run.place, at < gone);
        }
        state.untrimmed |= gone > 0;
        state.note_sleepless(&error, SleepState::Awake);
        state.sleep.finish(SleepPhase::Awake)
    });
    call_wakers(cx, wakers).await;
    // The arena is open: nothing waits for this.
    if let Some(saved) = saved {
        stores::restore(cx, saved);
    }
    if matches!(error, DeviceError::SleepCancelled { .. }) {
        stores::release_over_limit(cx).await;
    } else {
        stores::release_idle(cx).await;
    }
    error
}

/// Restores the runs before one that was not released. If that fails, releases all runs that can
/// be.
async fn rollback(
    cx: &OpContext<'_>,
    suspension: Suspension,
    nth: usize,
    error: DriverError,
) -> DeviceError {
    let error = DeviceError::from(error);
    if cx.with(|state| state.is_whole()) {
        return abort(cx, suspension, nth, error).await; // no block is live
    }
    let mut committed = 0;
    if restore(cx, &suspension, nth, &mut committed).await.is_ok() {
        // The contents of the run that did not leave are lost as well.
        cx.with(|state| note_discarded(state, &suspension.runs[..=nth]));
        return abort(cx, suspension, 0, error).await;
    }
    // Copies in progress keep their memory here.
    let is_done = stores::complete_own_copies(cx).await.is_ok();
    let mut gone = Vec::with_capacity(suspension.runs.len());
    for (at, run) in suspension.runs.iter().enumerate() {
        let is_gone = at < nth && at >= committed;
        gone.push(is_gone || (is_done && cx.decommit(run.place).await.is_ok()));
    }
    finish(cx, suspension, &gone, Some(&error)).await;
    error
}

/// Commits the first `nth` runs again, and restores their contents.
async fn restore(
    cx: &OpContext<'_>,
    suspension: &Suspension,
    nth: usize,
    committed: &mut usize,
) -> Result<(), DriverError> {
    for run in &suspension.runs[..nth] {
        cx.commit(run.place).await?;
        *committed += 1;
    }
    let copies = |state: &ArenaState| {
        let of = |region| &state.region(region).segment;
        suspension.saved.as_ref().map(|saved| saved.copies(of)).unwrap_or_default()
    };
    stores::queue_copies(cx, copies).await?;
    stores::complete_own_copies(cx).await
}

/// Makes the arena asleep, and records the released runs; with an error if one was not released.
async fn finish(
    cx: &OpContext<'_>,
    suspension: Suspension,
    gone: &[bool],
    error: Option<&DeviceError>,
) -> SleepReport {
    let Suspension { runs, saved } = suspension;
    let kept = runs.iter().filter(|run| run.contents == Contents::Keep);
    let copied = kept.map(|run| run.place.size).sum();
    let mut report = SleepReport { copied, ..SleepReport::default() };
    cx.surroundings.set_asleep(true);
    let wakers = cx.with(|state| {
        note_discarded(state, &runs);
        for (OutgoingRun { place, .. }, &is_gone) in runs.iter().zip(gone) {
            state.end_leave(*place, is_gone);
            if is_gone {
                report.memory = report.memory.saturating_add(place.size);
            }
        }
        state.sleep.saved = saved;
        state.totals.sleeps_total += 1;
        report.stayed = ByteSize::new(state.memory().backed);
        match error {
            None => state.events.push("sleep", |line| {
                line.bytes("released", report.memory)
                    .bytes("offloaded", report.copied)
                    .bytes("stayed", report.stayed)
            }),
            Some(error) => state.note_sleepless(error, SleepState::Asleep),
        }
        state.sleep.finish(SleepPhase::Asleep)
    });
    call_wakers(cx, wakers).await;
    report
}

/// Records which blocks lose their contents with these runs.
fn note_discarded(state: &mut ArenaState, runs: &[OutgoingRun]) {
    for region in Region::ALL {
        let is_lost =
            |run: &&OutgoingRun| run.place.region == region && run.contents == Contents::Discard;
        let lost = runs.iter().filter(is_lost).map(|run| run.place.run.range());
        state.region_mut(region).note_discarded(lost.collect());
    }
}

/// Returns the time at which an arena that stays idle may fall asleep by itself.
pub(crate) fn next_sleep(state: &ArenaState) -> Moment {
    let is_used = state.leases > 0 || !state.raw.is_empty() || state.outstanding.exported_count > 0;
    // If the driver cannot restore the same addresses, only idle memory is released.
    let memory = state.memory();
    let releases_idle = !state.capabilities.virtual_memory;
    let is_empty = memory.backed == 0 || releases_idle && memory.idle() == 0;
    if state.is_closed || is_used || is_empty {
        Moment::NEVER
    } else {
        state.sleep.due().unwrap_or(Moment::NEVER)
    }
}
