//! Counts failed allocations, and adds the gain of a compaction to their errors.
//!
//! The gain is planned on a copy of the state with the lock released, and only for errors that
//! reach a caller.

use super::compact::first_parts;
use super::context::OpContext;
use crate::index::End;
use crate::state::compact::plan::{self, Target};
use crate::state::failure::{AllocFailure, Cause};
use crate::state::region::AllocRequest;
use crate::types::Region;
use crate::types::compact::{CompactOptions, Goal};
use crate::types::error::DeviceError;
use lowtide_core::bytes::ByteSize;
use lowtide_core::clock::Moment;
use lowtide_core::log;

/// The number of blocks and free spans that a plan covers in each range of each region. A plan then
/// takes about 4 ms (`benches/time`).
const PARTS_MAX: usize = 256;

/// The time between plans, as a multiple of the last plan's duration. Errors come in bursts: with
/// this pause all of their plans together take at most a 32nd of a core.
const PLANS_APART: u32 = 31;

/// Counts a failure. Returns the error for the caller, with its figures.
pub(crate) async fn record_failure(
    cx: &OpContext<'_>,
    region: Region,
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
                let planned = planned_span(cx, region, *requested).await;
                *compacted_span = planned.max(*largest_span);
                end_plan(cx, from, None);
            }
        }
        _ => {}
    }
    cx.with(|state| state.note_failure((region, request), (cause, &error)));
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
        for end in [End::Low, End::High] {
            let copied = cx.with(|state| {
                let of = state.region(region);
                let used = of.live() + of.pending.bytes();
                let holes = of.segment.active().saturating_sub(used);
                // No block moves to memory that the device may still use.
                let helps = holes >= granule && of.pending.bytes() == 0;
                helps.then(|| {
                    let parts = first_parts(state, CompactOptions::new(region), end, PARTS_MAX);
                    (parts, of.segment.segments())
                })
            });
            let Some((parts, segments)) = copied else { continue };
            let target = segments.as_deref().map_or(Target::Granules, Target::Segments);
            let planned = cx.outside(|| plan::outlook(&parts, granule, target)).await;
            let [before, after] = planned.active;
            granules += before.saturating_sub(after);
        }
    }
    granules * granule
}

/// Returns the longest free span of addresses that a compaction for a block would make.
async fn planned_span(cx: &OpContext<'_>, region: Region, wanted: ByteSize) -> ByteSize {
    let goal = Goal::Contiguous(wanted);
    let options = CompactOptions { goal, ..CompactOptions::new(region) };
    let (parts, granule) =
        cx.with(|state| (first_parts(state, options, End::Low, PARTS_MAX), state.bytes_of(1)));
    let target = Target::Contiguous(wanted.get());
    let planned = cx.outside(|| plan::outlook(&parts, granule, target)).await;
    ByteSize::new(planned.largest[1])
}
