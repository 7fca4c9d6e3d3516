//! The steps after a shortage, from the cheapest to the last: empty the thread caches, wait for
//! pending work of streams, search every free span instead of the likely ones, divide handles that
//! blocks use in part, call the program's callbacks, and try places that depend on no neighbour. If
//! all steps fail, the error gets its figures here.
//!
//! Runs of callbacks do not overlap. If an operation is short of memory during another thread's
//! run, it waits for the end of that run and checks if the released memory was enough.
//!
//! Invariant: each step is made at most once, except for divisions and the last, which have bounds.

use super::callbacks::Called;
use super::commit::ATTEMPTS_BESIDE;
use super::completion::complete_all;
use super::context::{OpContext, ShutCaches};
use super::move_block::Layout;
use super::split::release_stuck;
use crate::index::End;
use crate::state::{AllocFailure, AllocRequest, Cause, OUTLOOK_PASSES, Search};
use crate::types::{Bound, CompactOptions, DeviceError, Region, Shortage};
use lowtide_core::clock::Moment;
use lowtide_core::{ByteSize, log};

/// Makes the steps after the first attempt. The caches are kept empty meanwhile.
pub(super) async fn run_ladder<T>(
    cx: &OpContext<'_>,
    region: Region,
    mut attempt: impl AsyncFnMut(Search) -> Result<T, AllocFailure>,
) -> Result<T, AllocFailure> {
    // Before the callbacks: after a fork in one of them the state is out of reach.
    let granule = ByteSize::new(cx.with(|state| state.bytes_of(1)));
    let (_shut, held) = cx.outside(|| ShutCaches::shut(cx.surroundings)).await;
    let mut outcome = Err(AllocFailure::of(Cause::Device, 0));
    if held {
        // The blocks of the caches may be usable in stream order, before any thread waits for them.
        outcome = attempt(Search::Usual).await;
    }
    if outcome.as_ref().is_err_and(AllocFailure::is_shortage) {
        outcome = after_pending(cx, &mut attempt).await;
    }
    // Each turn divides some handles for good: there are at most as many turns as handles.
    while outcome.as_ref().is_err_and(AllocFailure::is_shortage)
        && release_stuck(cx, None).await > 0
    {
        outcome = attempt(Search::Cheapest).await;
    }
    outcome = match outcome {
        Err(failure) if failure.is_shortage() => {
            call_for_room(cx, region, failure, &mut attempt).await
        }
        outcome => outcome,
    };
    // A neighbour that was freed meanwhile, or has no memory yet, left its granule to this block.
    let has_room = |failure: &AllocFailure| failure.is_contradicted(granule);
    for nth in 0..ATTEMPTS_BESIDE {
        if !outcome.as_ref().is_err_and(has_room) {
            break;
        }
        // Waits for the next result of a driver call if one is in progress: an operation whose
        // block lacks memory makes a call or waits for one. While a wake is in progress the next
        // attempt waits for its end, or fails: the waking thread may wait for this thread's
        // callback.
        if nth > 0 {
            cx.wait_for_result(|state| state.is_usable()).await;
        }
        outcome = match attempt(Search::Apart).await {
            Err(failure) if failure.cause == Cause::Addresses => attempt(Search::Cheapest).await,
            outcome => outcome,
        };
    }
    outcome
}

/// Makes an attempt at every free span after pending memory has become idle.
async fn after_pending<T>(
    cx: &OpContext<'_>,
    attempt: &mut impl AsyncFnMut(Search) -> Result<T, AllocFailure>,
) -> Result<T, AllocFailure> {
    if cx.with(|state| state.pending()) > 0 {
        let _ = complete_all(cx).await; // if this fails, memory stays pending
    }
    attempt(Search::Cheapest).await
}

/// Calls the callbacks and tries again. Returns the earlier failure if no callback released memory.
pub(crate) async fn call_for_room<T>(
    cx: &OpContext<'_>,
    region: Region,
    mut failure: AllocFailure,
    attempt: &mut impl AsyncFnMut(Search) -> Result<T, AllocFailure>,
) -> Result<T, AllocFailure> {
    let Some((turn, has_waited)) = cx.outside(|| cx.callbacks.take_turn()).await else {
        return Err(failure);
    };
    if has_waited {
        // Memory that was released for another thread may be enough for this operation as well.
        match after_pending(cx, attempt).await {
            Err(again) if again.is_shortage() => failure = again,
            outcome => return outcome,
        }
    }
    let arena = cx.with(|state| state.name.clone());
    let requested = match *failure.error {
        DeviceError::OutOfMemory { requested, .. }
        | DeviceError::OutOfAddresses { requested, .. } => requested,
        _ => ByteSize::ZERO,
    };
    let (bound, over) = match failure.cause {
        Cause::Limit { over } => (Bound::Limit, ByteSize::new(over)),
        Cause::Addresses => (Bound::Addresses, ByteSize::ZERO),
        Cause::Device | Cause::Driver | Cause::Uncounted => (Bound::Driver, ByteSize::ZERO),
    };
    let shortage = Shortage { arena: &arena, region, requested, bound, over };
    let called = cx.outside(|| turn.call(&shortage)).await;
    let Some(called) = called else { return Err(AllocFailure::uncounted(DeviceError::Forked)) };
    cx.with(|state| {
        state.totals.shortage_callbacks_total += called.calls;
        state.totals.shortage_panics_total += called.panics;
    });
    let Called { calls, released, .. } = called;
    cx.outside(|| log!(debug, arena, calls, released, "shortage callbacks called")).await;
    let outcome = if released { after_pending(cx, attempt).await } else { Err(failure) };
    drop(turn);
    outcome
}

// Counts failed allocations, and adds the gain of a compaction to their errors.
//
// The gain is planned on a copy of the state with the lock released, and only for errors that
// reach a caller.

/// The number of blocks and free spans that a plan covers in each range of each region. A plan then
/// takes about 4 ms.
const PARTS_MAX: usize = 256;

/// The time between plans, as a multiple of the last plan's duration. Errors come in bursts: with
/// this pause all of their plans together take at most a 32nd of a core.
const PLANS_APART: u32 = 31;

/// Counts a failure. Returns the error for the caller, with its figures.
pub(crate) async fn record_failure(
    cx: &OpContext<'_>,
    failure: AllocFailure,
    request: AllocRequest,
) -> DeviceError {
    let AllocFailure { cause, error } = failure;
    let mut error = *error;
    if matches!(cause, Cause::Uncounted) {
        cx.log(|arena| log!(debug, arena, %error, "allocation failed")).await;
        return error;
    }
    match &mut error {
        DeviceError::OutOfMemory { recoverable, holes, .. } => {
            if let Some(from) = begin_plan(cx) {
                let bytes = recoverable_bytes(cx).await;
                end_plan(cx, from, Some(bytes));
            }
            let known = cx.with(|state| {
                let granule = state.bytes_of(1);
                state.outlook.recoverable.min(holes.get() / granule * granule)
            });
            *recoverable = ByteSize::new(known);
        }
        DeviceError::OutOfAddresses { requested, largest_span, compacted_span, .. } => {
            *compacted_span = *largest_span;
            if let Some(from) = begin_plan(cx) {
                let planned = planned_span(cx, request.region, *requested).await;
                *compacted_span = planned.max(*largest_span);
                end_plan(cx, from, None);
            }
        }
        _ => {}
    }
    cx.with(|state| state.note_failure(&request, (cause, &error)));
    cx.log(|arena| log!(debug, arena, %error, "allocation failed")).await;
    error
}

/// Begins a plan if the last one was long enough ago. Returns the time of the start.
fn begin_plan(cx: &OpContext<'_>) -> Option<Moment> {
    let from = cx.clock.now();
    cx.with(|state| {
        let is_due = from >= state.outlook.next;
        if is_due {
            state.outlook.next = Moment::NEVER;
        }
        is_due.then_some(from)
    })
}

/// Ends a plan. Records the bytes that a compaction would make idle, if they were planned.
fn end_plan(cx: &OpContext<'_>, from: Moment, recoverable: Option<u64>) {
    let now = cx.clock.now();
    cx.with(|state| {
        state.outlook.next = now + (now - from).saturating_mul(PLANS_APART);
        state.outlook.recoverable = recoverable.unwrap_or(state.outlook.recoverable);
    });
}

/// Returns the bytes of granules that a compaction of both regions would make idle.
async fn recoverable_bytes(cx: &OpContext<'_>) -> u64 {
    let granule = cx.with(|state| state.bytes_of(1));
    let mut granules = 0;
    for region in Region::ALL {
        let options = CompactOptions::new(region);
        for end in [End::Low, End::High] {
            let copied = cx.with(|state| {
                let of = state.region(region);
                let used = of.live + of.pending.bytes;
                let holes = of.segment.memory().active.saturating_sub(used);
                // No block moves to memory that the device may still use.
                let helps = holes >= granule && of.pending.bytes == 0;
                helps.then(|| Layout::first(state, options, end, PARTS_MAX))
            });
            let Some(layout) = copied else { continue };
            let [before, after] = cx.outside(|| layout.plan(options, OUTLOOK_PASSES)).await.active;
            granules += before.saturating_sub(after);
        }
    }
    granules * granule
}

/// Returns the longest free span of addresses that a compaction for a block would make.
async fn planned_span(cx: &OpContext<'_>, region: Region, wanted: ByteSize) -> ByteSize {
    let options = CompactOptions { contiguous: Some(wanted), ..CompactOptions::new(region) };
    let layout = cx.with(|state| Layout::first(state, options, End::Low, PARTS_MAX));
    let planned = cx.outside(|| layout.plan(options, OUTLOOK_PASSES)).await;
    ByteSize::new(planned.largest[1])
}
