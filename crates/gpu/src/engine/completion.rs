//! Proves that device work is complete: records, queries and waits for events.
//!
//! No driver call frees, unmaps or reuses memory because its work is likely done. A use is complete
//! when the host has seen an event that was recorded after it, and precedes a stream's next work if
//! that stream was made to wait for such an event.
//!
//! Two kinds of use have no event: memory used without naming a stream ([`StreamKey::CONTEXT`]),
//! and a stream that ended before an event could be recorded on it. Only a wait for the whole
//! context ([`complete_all`]) proves that these are complete. Events on all known streams prove
//! nothing, because the work may be on another stream; an event of the whole context
//! (`cuCtxRecordEvent`) breaks captures like the wait does. If any stream captures a graph, the
//! wait fails and invalidates every capture in the context, and an arena knows only the streams of
//! its lanes. So only calls of the program make this wait, because the program knows when it
//! captures: an allocation that takes the memory, a purge, trim, shrink, sleep, close or
//! `wait_for_pending`. A decay, a compaction or background work never waits for the context: such
//! memory stays pending, and blocks stay where they are, until such a call has proved the uses
//! complete.
//!
//! Invariants: a use counts as complete only after the host has seen it; neither a decay, a
//! compaction nor background work waits for the context.
#![expect(unsafe_code, reason = "the calls of drivers with streams and events are unsafe")]

use super::context::OpContext;
use crate::driver::{DriverError, StreamHandle};
use crate::state::{ArenaState, Pick, StreamEvent, StreamKey, StreamUse, StreamUses, Wait};
use crate::types::error::{DeviceError, captures, is_captures, is_of_capture};
use lowtide_core::sync::is_background;

/// Orders the next work of a stream after these uses, or the next user if no stream is given. With
/// a stream the device waits; without a stream this thread waits. While a stream captures a graph,
/// no wait is made that would invalidate the capture.
///
/// # Errors
/// The driver's; [`CAPTURES`](crate::types::error::CAPTURES) for a capture. Then nothing is reused.
pub(super) async fn order_after(
    cx: &OpContext<'_>,
    taker: Option<StreamKey>,
    uses: &StreamUses,
) -> Result<(), DriverError> {
    for of in uses.iter() {
        if let Some((event, epoch)) = event_after(cx, of, taker).await? {
            let waited = wait_for(cx, event, StreamUse { epoch, ..of }, taker).await;
            cx.with(|state| state.streams.release_event(event));
            waited?;
        }
    }
    Ok(())
}

/// Returns the event to wait for so that `taker` comes after a use, and the event's epoch. Returns
/// `None` if `taker` already comes after the use.
async fn event_after(
    cx: &OpContext<'_>,
    of: StreamUse,
    taker: Option<StreamKey>,
) -> Result<Option<(StreamEvent, u64)>, DriverError> {
    loop {
        match cx.with(|state| state.streams.required_wait(of, taker)) {
            Wait::Nothing => return Ok(None),
            Wait::For(event, epoch) => return Ok(Some((event, epoch))),
            Wait::Record(epoch) => match record(cx, of.stream, epoch).await {
                Some(Ok(event)) => return Ok(Some((event, epoch))),
                // The stream ended meanwhile: it has an event, or is waited for with all others.
                None => continue,
                Some(Err(_)) => {}
            },
            Wait::Context => {}
        }
        return complete_all(cx).await.map(|()| None);
    }
}

/// Makes a taker's stream, or this thread, wait for an event that was recorded after a use.
async fn wait_for(
    cx: &OpContext<'_>,
    event: StreamEvent,
    of: StreamUse,
    taker: Option<StreamKey>,
) -> Result<(), DriverError> {
    // The caller allocates for a lane of this stream, and holds the lane until the operation ends.
    let stream =
        taker.and_then(|taker| Some((taker, cx.with(|state| state.streams.handle(taker))?)));
    if let Some((taker, stream)) = stream {
        if cx.is_capturing(stream).await? {
            return Err(captures("cuStreamWaitEvent"));
        }
        // SAFETY: the event is the state's, and the caller holds the lane of the stream.
        cx.outside(|| unsafe { cx.driver.stream_wait_event(stream, event.handle) }).await?;
        cx.with(|state| state.streams.ordered(taker, of.stream, of.epoch));
        return Ok(());
    }
    if is_any_capturing(cx).await? {
        return Err(captures("cuEventSynchronize"));
    }
    cx.wait_for_event(event).await?;
    mark_complete(cx, of);
    Ok(())
}

/// Records that all uses of a stream up to an epoch are complete.
fn mark_complete(cx: &OpContext<'_>, of: StreamUse) {
    cx.with(|state| state.mark_complete(of.stream, of.epoch));
}

/// Records the end of a stream's work so far, so that others can wait for it. Does not wait.
///
/// # Errors
/// The driver's; [`CAPTURES`](crate::types::error::CAPTURES) while the stream captures a graph.
pub(crate) async fn mark_end(cx: &OpContext<'_>, stream: StreamKey) -> Result<(), DriverError> {
    let Some(epoch) = cx.with(|state| state.streams.close(stream)) else { return Ok(()) };
    let Some(recorded) = record(cx, stream, epoch).await else { return Ok(()) };
    let event = recorded?;
    cx.with(|state| state.streams.release_event(event));
    Ok(())
}

/// Records that a lane is dropped. If the stream has no other lane, marks the end of the stream's
/// work, if possible, and forgets the stream.
pub(crate) async fn leave_stream(cx: &OpContext<'_>, stream: StreamKey) {
    let is_last = cx.with(|state| {
        let is_last = state.streams.leave(stream);
        if is_last && state.sleep.used.remove(&stream) {
            // Work of the stream under leases is waited for by an event, or with all other work.
            state.streams.use_now(stream);
        }
        is_last
    });
    if is_last {
        end_stream(cx, stream, false).await;
    }
}

/// Records the end of the work of a stream that neither a lane nor a guest uses, if possible, and
/// forgets the stream. With `is_lost`, also a stream that guests use, which is about to be
/// destroyed. When this returns, no call uses the stream's handle any more.
pub(crate) async fn end_stream(cx: &OpContext<'_>, stream: StreamKey, is_lost: bool) {
    let _ = mark_end(cx, stream).await;
    if is_lost {
        cx.with(|state| state.streams.lose(stream));
    }
    cx.with(|state| state.streams.retire(stream));
    cx.wait_while(|state| state.streams.is_lent(stream)).await;
    cx.with(|state| state.forget_stream(stream));
}

/// Returns `true` if a stream captures a graph: one that the program names, or one of those that
/// the arena knows.
pub(crate) async fn is_any_capturing(cx: &OpContext<'_>) -> Result<bool, DriverError> {
    if cx.with(|state| !state.streams.capturing.is_empty()) {
        return Ok(true);
    }
    let mut last = None;
    while let Some(stream) = cx.with(|state| state.streams.next_alive(last)) {
        if is_capturing(cx, stream).await.transpose()? == Some(true) {
            return Ok(true);
        }
        last = Some(stream);
    }
    Ok(false)
}

/// Returns `true` if a stream captures a graph; `None` if the stream has ended.
async fn is_capturing(cx: &OpContext<'_>, key: StreamKey) -> Option<Result<bool, DriverError>> {
    let stream = cx.with(|state| state.streams.export(key))?;
    let answer = cx.is_capturing(stream).await;
    let is_gone = cx.with(|state| note_call(state, key, answer.as_ref().err()));
    (!is_gone).then_some(answer)
}

/// Records the end of a driver call with a stream's handle. A refused call ends a stream without
/// lanes: its owner may have destroyed it, and a call for another stream must not fail for that.
/// What the stream used is then waited for with all other work. Returns `true` if so.
fn note_call(state: &mut ArenaState, key: StreamKey, error: Option<&DriverError>) -> bool {
    state.streams.returned(key);
    let is_of_capture = |error: &DriverError| error.code().is_some_and(is_of_capture);
    let is_of_stream = |error: &&DriverError| !error.is_context_lost() && !is_of_capture(error);
    error.filter(is_of_stream).is_some() && state.streams.lose(key)
}

/// Records an event of a closed epoch and returns the event, held; `None` if the stream has ended.
async fn record(
    cx: &OpContext<'_>,
    key: StreamKey,
    epoch: u64,
) -> Option<Result<StreamEvent, DriverError>> {
    let event = match event_to_record(cx).await {
        Ok(event) => event,
        Err(error) => return Some(Err(error)),
    };
    // Dropping the last lane waits in `end_stream` until the handle is returned below.
    let Some(stream) = cx.with(|state| state.streams.export(key)) else {
        cx.with(|state| state.streams.restore(event));
        return None;
    };
    let recorded = record_uncaptured(cx, event, stream).await;
    let is_gone = cx.with(|state| {
        match recorded {
            Ok(()) => state.streams.recorded(key, epoch, event),
            Err(_) => state.streams.restore(event),
        }
        note_call(state, key, recorded.as_ref().err())
    });
    (!is_gone).then_some(recorded.map(|()| event))
}

/// Records an event, unless the stream captures a graph: the event would become part of the graph
/// and never complete, and querying it would invalidate the capture. Another thread may begin a
/// capture at any time, so this is checked again after the record.
async fn record_uncaptured(
    cx: &OpContext<'_>,
    event: StreamEvent,
    stream: StreamHandle,
) -> Result<(), DriverError> {
    if cx.is_capturing(stream).await? {
        return Err(captures("cuEventRecord"));
    }
    // SAFETY: an event of the state that no other operation uses, and a stream that exists until
    // the answer is recorded.
    cx.outside(|| unsafe { cx.driver.event_record(event.handle, stream) }).await?;
    if cx.is_capturing(stream).await? {
        return Err(captures("cuEventRecord"));
    }
    Ok(())
}

/// Determines which freed memory is no longer used, and records it: records missing events, and
/// queries recorded ones. If that is not enough and `may_wait` is set, waits for the whole device,
/// unless a lane's stream captures a graph. Otherwise the rest stays pending, as in background
/// work.
///
/// # Errors
/// The driver's.
pub(crate) async fn look_for_ends(cx: &OpContext<'_>, may_wait: bool) -> Result<(), DriverError> {
    if !cx.with(|state| state.capabilities.asynchronous && state.is_awaiting()) {
        return Ok(());
    }
    let (mut is_provable, mut failed, mut last) = (true, None, None);
    while let Some(stream) = cx.with(|state| state.streams.next_unmarked(last)) {
        last = Some(stream);
        let marked = match is_markable(cx, stream) {
            true => Some(mark_end(cx, stream).await),
            false => None,
        };
        is_provable &= marked == Some(Ok(())) && is_markable(cx, stream);
        failed = failed.or_else(|| marked.and_then(Result::err));
    }
    let waits = may_wait && !is_background();
    if !is_provable && waits && !is_any_capturing(cx).await? {
        return complete_all(cx).await;
    }
    query_events(cx).await?;
    failed.filter(|error| !is_captures(error)).map_or(Ok(()), Err)
}

/// Queries the recorded events, and records the completed ones. One or two queries are enough for a
/// stream that has completed nothing or everything. Otherwise a binary search is made, because
/// events complete in order.
///
/// # Errors
/// The driver's.
pub(crate) async fn query_events(cx: &OpContext<'_>) -> Result<(), DriverError> {
    let mut last = None;
    while let Some(stream) = cx.with(|state| state.streams.next_with_events(last)) {
        last = Some(stream);
        let (mut unknown, mut pick) = (0..u64::MAX, Pick::First);
        loop {
            let found = cx.with(|state| state.streams.event_between(stream, unknown.clone(), pick));
            let Some((epoch, event)) = found else { break };
            let is_complete = cx.query_event(event).await;
            cx.with(|state| state.streams.release_event(event));
            pick = match pick {
                Pick::First if is_complete == Ok(true) => Pick::Last,
                _ => Pick::Middle,
            };
            if is_complete? {
                mark_complete(cx, StreamUse { stream, epoch });
                unknown.start = epoch + 1;
            } else {
                unknown.end = epoch;
            }
        }
    }
    Ok(())
}

/// Returns an event to record: one that no operation holds any more, or a new one. If many events
/// are recorded, they are queried first, so that there are at most about twice as many events as
/// epochs in progress, even if no thread checks for idle memory. A failed query is reported by the
/// next check.
async fn event_to_record(cx: &OpContext<'_>) -> Result<StreamEvent, DriverError> {
    if let Some(event) = cx.with(|state| state.streams.spare()) {
        return Ok(event);
    }
    if cx.with(|state| state.streams.is_crowded()) {
        let _ = query_events(cx).await;
        if let Some(event) = cx.with(|state| state.streams.spare_after_query()) {
            return Ok(event);
        }
    }
    let handle = cx.outside(|| cx.driver.event_create()).await?;
    Ok(cx.with(|state| state.streams.add_event(handle)))
}

/// Waits until every recorded use is complete: uses of freed memory, of the streams of lanes, and
/// of leases. If a stream is unknown, raw blocks exist, or memory is imported, waits for the whole
/// device. No lease is held, and none is granted meanwhile.
///
/// # Errors
/// `Capturing`; the driver's.
pub(crate) async fn complete_used(cx: &OpContext<'_>) -> Result<(), DeviceError> {
    if !cx.with(|state| state.capabilities.asynchronous) {
        return Ok(());
    }
    check_capturing(cx).await?;
    let is_known = cx.with(|state| {
        let is_ours = state.raw.is_empty() && state.outstanding.imported.count() == 0;
        state.streams.use_all_now();
        state.sleep.is_use_known() && is_ours
    });
    if !(is_known && complete_by_events(cx).await?) {
        complete_all(cx).await?;
    }
    cx.with(|state| state.sleep.used.clear());
    Ok(())
}

/// Waits until all work on freed memory is complete, and work under leases that may be on any
/// stream: for events of the streams, or for the whole device if a stream is unknown.
///
/// # Errors
/// `Capturing`; the driver's.
pub(crate) async fn complete_pending(cx: &OpContext<'_>) -> Result<(), DeviceError> {
    let is_known = cx.with(|state| state.sleep.is_use_known() && !state.streams.has_lost_uses());
    if !cx.with(|state| state.capabilities.asynchronous && (!is_known || state.is_awaiting())) {
        return Ok(());
    }
    check_capturing(cx).await?;
    if !(is_known && complete_by_events(cx).await?) {
        complete_all(cx).await?;
    }
    Ok(())
}

/// The way to prove that no work uses live blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Proof {
    /// Queries events, and waits for nothing.
    Query,
    /// Waits for events, unless it is known.
    Wait,
    /// Waits for events in any case, because raw blocks are used without a lease.
    WaitAgain,
}

/// Proves by events that no work uses live blocks, and records that in [`MoveState`]. Makes no call
/// if it is known. Leases may be granted meanwhile; then nothing is recorded. Uses of freed memory
/// on unknown streams do not matter here.
///
/// Returns `false` if events cannot prove it: a stream is unknown or ended without an event, or
/// captures a graph, which a wait would invalidate; or if work is queried and not complete.
///
/// # Errors
/// The driver's.
///
/// [`MoveState`]: crate::state::moves::MoveState
pub(super) async fn complete_live(cx: &OpContext<'_>, proof: Proof) -> Result<bool, DriverError> {
    if !cx.with(|state| state.capabilities.asynchronous) {
        return Ok(true);
    }
    if !cx.with(|state| state.sleep.is_use_known()) || is_any_capturing(cx).await? {
        return Ok(false);
    }
    // Work on raw blocks needs no lease. Another block may have their memory by now.
    let is_known = |state: &mut ArenaState| {
        state.moves.is_proved() && state.streams.unfinished().next().is_none()
    };
    if proof != Proof::WaitAgain && cx.with(is_known) {
        return Ok(true);
    }
    let leases = cx.with(|state| state.unleased());
    let uses: Vec<_> = cx.with(|state| {
        // A later query asks for the events of an earlier one: a new event would not be complete.
        let is_asked = proof == Proof::Query && state.moves.is_asked(leases);
        if !is_asked {
            state.streams.use_all_now();
        }
        state.streams.unfinished().collect()
    });
    for of in &uses {
        match mark_end(cx, of.stream).await {
            Err(error) if is_captures(&error) => return Ok(false),
            marked => marked?,
        }
    }
    for of in uses {
        let (event, epoch) = match cx.with(|state| state.streams.required_wait(of, None)) {
            Wait::Nothing => continue,
            Wait::For(event, epoch) => (event, epoch),
            // The stream has ended without an event.
            Wait::Record(_) | Wait::Context => return Ok(false),
        };
        let is_complete = if proof == Proof::Query {
            cx.query_event(event).await
        } else {
            cx.wait_for_event(event).await.map(|()| true)
        };
        cx.with(|state| state.streams.release_event(event));
        if !is_complete? {
            return Ok(false);
        }
        mark_complete(cx, StreamUse { epoch, ..of });
    }
    cx.with(|state| {
        if state.sleep.is_use_known() {
            state.note_complete(leases)
        }
    });
    Ok(true)
}

/// Fails if a stream captures a graph, which a wait would invalidate.
///
/// # Errors
/// `Capturing`; the driver's.
pub(super) async fn check_capturing(cx: &OpContext<'_>) -> Result<(), DeviceError> {
    if is_any_capturing(cx).await? {
        return Err(DeviceError::Capturing { arena: cx.with(|state| state.name.clone()) });
    }
    Ok(())
}

/// Waits for an event after the recorded uses of every stream. Returns `false` if a use has no
/// event and can get none.
async fn complete_by_events(cx: &OpContext<'_>) -> Result<bool, DriverError> {
    let mut last = None;
    while let Some(stream) = cx.with(|state| state.streams.next_unmarked(last)) {
        if !is_markable(cx, stream) || mark_end(cx, stream).await.is_err() {
            return Ok(false);
        }
        last = Some(stream);
    }
    while let Some((of, event)) = cx.with(|state| state.streams.waiting()) {
        let waited = cx.wait_for_event(event).await;
        cx.with(|state| state.streams.release_event(event));
        waited?;
        mark_complete(cx, of);
    }
    // A stream that ended meanwhile may have no event.
    Ok(cx.with(|state| state.streams.next_unmarked(None)).is_none())
}

/// Returns the arena's own stream, on which it queues copies. Creates it at the first use.
///
/// # Errors
/// The driver's.
pub(super) async fn own_stream(cx: &OpContext<'_>) -> Result<StreamHandle, DriverError> {
    if let Some(stream) = cx.with(|state| state.sleep.stream) {
        return Ok(stream);
    }
    let stream = cx.outside(|| cx.driver.stream_create()).await?;
    cx.with(|state| state.sleep.stream = Some(stream));
    Ok(stream)
}

/// Returns `true` if an event can be recorded on a stream, which is so until the stream ends.
fn is_markable(cx: &OpContext<'_>, stream: StreamKey) -> bool {
    cx.with(|state| state.streams.handle(stream)).is_some()
}

/// Waits until the device has completed all its work, and records that. Does nothing on a driver
/// with synchronous work.
///
/// # Errors
/// The driver's: the device may still work. [`CAPTURES`](crate::types::error::CAPTURES) while the
/// stream of a lane captures a graph, which the wait would invalidate. `Background` in background
/// work, before any call: see the head of this file.
pub(crate) async fn complete_all(cx: &OpContext<'_>) -> Result<(), DriverError> {
    if !cx.with(|state| state.capabilities.asynchronous) {
        return Ok(());
    }
    if is_background() {
        return Err(DriverError::Background { call: "cuCtxSynchronize" });
    }
    if is_any_capturing(cx).await? {
        return Err(captures("cuCtxSynchronize"));
    }
    let (closed, leases) = cx.with(|state| {
        let is_exported = state.outstanding.exported_count > 0;
        (state.streams.close_all(), state.unleased().filter(|_| !is_exported))
    });
    cx.outside(|| cx.driver.synchronize()).await?;
    closed.into_iter().for_each(|of| mark_complete(cx, of));
    cx.with(|state| state.note_complete(leases));
    Ok(())
}
