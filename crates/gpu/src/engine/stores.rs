//! Contents in host memory: reserves host memory from the budget, copies contents out and back, and
//! releases the stores.
//!
//! Copies run on the arena's own stream, one copy for each run of granules. All copies are queued
//! first, and then waited for once.
//!
//! Invariants: while a store exists, its bytes stay reserved in the host budget; a store is
//! released only after the host has seen every copy from and to the store complete, and is
//! overwritten only by later copies on the same stream.

use std::sync::Arc;

use super::call::{Answer, CallKind};
use super::completion::{is_any_capturing, own_stream};
use super::port::Port;
use crate::driver::{DriverError, StreamHandle};
use crate::state::arena::ArenaState;
use crate::state::contents::OutgoingRun;
use crate::state::sleep::{HostReservation, Saved, StoredCopy, lay_out};
use crate::types::error::{DeviceError, captures, is_captures};
use crate::types::sleep::{Contents, HostBudget};
use lowtide_core::bytes::ByteSize;
use lowtide_core::log;

/// Calls or drops the foreign code of a budget. The error is the message of a panic in that code.
async fn call_budget<T>(port: &Port<'_>, act: impl FnOnce() -> T) -> Result<T, String> {
    let (mut act, mut result) = (Some(act), None);
    let mut call = || result = act.take().map(|act| act());
    port.outside(|| port.surroundings.call_budget(&mut call)).await?;
    Ok(result.expect("the closure has run"))
}

/// Reserves host memory, copies the contents to keep into it, and waits for the copies. Returns
/// `None` if no contents are kept.
///
/// # Errors
/// `HostBudget`, `Capturing`, or the driver's. No device memory was released, and nothing stays
/// reserved except for stores that the driver does not free.
pub(super) async fn save(
    port: &Port<'_>,
    outgoing: &[OutgoingRun],
) -> Result<Option<Saved>, DeviceError> {
    let kept = outgoing.iter().filter(|run| run.contents == Contents::Keep);
    let kept = kept.map(|run| (run.place.region, run.place.run));
    let (runs, sizes) = lay_out(kept, ByteSize::new(port.with(|state| state.bytes_of(1))));
    if runs.is_empty() {
        return Ok(None);
    }
    let (budget, mut saved) = match kept_stores(port, &sizes).await {
        Some(kept) => (None, Saved { runs, ..kept }),
        None => {
            let (budget, reservation) = reserve(port, sizes.iter().copied().sum()).await?.unzip();
            (budget, Saved { runs, stores: Vec::new(), reservation })
        }
    };
    let outcome = copy_out(port, &mut saved, &sizes).await;
    if let Some(budget) = budget {
        if outcome.is_ok()
            && let Some(reservation) = &mut saved.reservation
        {
            let _ = call_budget(port, || budget.settle(&mut **reservation)).await;
        }
        let _ = call_budget(port, || drop(budget)).await; // another may have taken its place
    }
    match outcome {
        Ok(()) => Ok(Some(saved)),
        Err(error) => {
            release(port, saved).await;
            Err(copy_error(port, error))
        }
    }
}

/// Returns the stores kept after the last wake. Returns `None` if there are none, or if they were
/// too small; they are released then.
async fn kept_stores(port: &Port<'_>, sizes: &[ByteSize]) -> Option<Saved> {
    let kept = port.with(|state| state.sleep.kept.take())?;
    let mut pairs = sizes.iter().zip(&kept.stores);
    if sizes.len() <= kept.stores.len() && pairs.all(|(size, (_, has))| size <= has) {
        return Some(kept);
    }
    release(port, kept).await;
    None
}

/// Returns the error for copies that could not be queued or waited for.
pub(super) fn copy_error(port: &Port<'_>, error: DriverError) -> DeviceError {
    if is_captures(&error) {
        return DeviceError::Capturing { arena: port.with(|state| state.name.clone()) };
    }
    error.into()
}

/// Reserves host memory if the arena has a budget.
async fn reserve(
    port: &Port<'_>,
    bytes: ByteSize,
) -> Result<Option<(Arc<dyn HostBudget>, HostReservation)>, DeviceError> {
    let Some(budget) = port.with(|state| state.sleep.budget.clone()) else { return Ok(None) };
    let arena = port.with(|state| state.name.clone());
    let error = match call_budget(port, || budget.reserve(bytes)).await {
        Ok(Ok(reservation)) => return Ok(Some((budget, reservation))),
        Ok(Err(reason)) => DeviceError::HostBudget { arena, bytes, reason },
        Err(message) => DeviceError::Callback { message },
    };
    let _ = call_budget(port, || drop(budget)).await; // another may have taken its place
    Err(error)
}

/// Creates the missing stores, and copies contents into them.
async fn copy_out(
    port: &Port<'_>,
    saved: &mut Saved,
    sizes: &[ByteSize],
) -> Result<(), DriverError> {
    for &size in sizes.iter().skip(saved.stores.len()) {
        match port.perform(CallKind::CreateStore { size }).await? {
            Answer::Store(store) => saved.stores.push((store, size)),
            answer => unreachable!("{answer:?} to the creation of a store"),
        }
    }
    let stream = begin_copies(port).await?;
    let copies = port.with(|state| saved.copies(|region| &state.region(region).segment));
    for (at, to) in copies {
        port.does(CallKind::Offload { at, to, stream }).await?;
    }
    wait_for_own(port, stream).await
}

/// Queues copies of saved contents to their places, and does not wait for them. Returns the bytes.
/// From here on, frees continue, but no idle memory leaves: current places stay valid.
///
/// # Errors
/// The driver's; copies may be in progress.
pub(super) async fn queue_copies(
    port: &Port<'_>,
    copies: impl Fn(&ArenaState) -> Vec<StoredCopy>,
) -> Result<ByteSize, DriverError> {
    if port.with(|state| copies(state).is_empty()) {
        return Ok(ByteSize::ZERO);
    }
    let stream = begin_copies(port).await?;
    let copies = port.with(|state| copies(state));
    for &(at, from) in &copies {
        port.does(CallKind::Restore { from, at, stream }).await?;
    }
    Ok(copies.iter().map(|(_, span)| span.size).sum())
}

/// Waits for the copies that this operation has queued.
///
/// # Errors
/// The driver's; copies may still be in progress.
pub(super) async fn complete_own_copies(port: &Port<'_>) -> Result<(), DriverError> {
    match busy_stream(port) {
        Some(stream) => wait_for_own(port, stream).await,
        None => Ok(()),
    }
}

/// Returns the stream for copies. From here on, copies may be in progress on it.
async fn begin_copies(port: &Port<'_>) -> Result<StreamHandle, DriverError> {
    if let Some(stream) = port.with(|state| state.sleep.stream.filter(|_| state.sleep.is_queueing))
    {
        return Ok(stream);
    }
    let stream = own_stream(port).await?;
    port.with(|state| state.sleep.begin_copies());
    Ok(stream)
}

/// Waits for the copies of this operation, which suspends or resumes the arena and has queued them
/// all.
async fn wait_for_own(port: &Port<'_>, stream: StreamHandle) -> Result<(), DriverError> {
    port.with(|state| state.sleep.is_queueing = false);
    wait_for_copies(port, stream).await
}

/// Waits for the copies that are queued now. While another operation queues more, only that
/// operation knows when they are complete. Fails if a stream captures a graph.
async fn wait_for_copies(port: &Port<'_>, stream: StreamHandle) -> Result<(), DriverError> {
    let queued = port.with(|state| state.sleep.queued());
    if is_any_capturing(port).await? {
        return Err(captures("cuStreamSynchronize"));
    }
    port.does(CallKind::SynchronizeStream { stream }).await?;
    port.with(|state| state.sleep.end_copies(queued));
    Ok(())
}

/// Returns the stream on which copies may be in progress, if any.
fn busy_stream(port: &Port<'_>) -> Option<StreamHandle> {
    port.with(|state| state.sleep.stream.filter(|_| state.sleep.may_be_copied()))
}

/// Waits for the copies of an earlier sleep or wake, if any may be in progress.
///
/// # Errors
/// The driver's: the copies may still be in progress.
pub(super) async fn complete_copies(port: &Port<'_>) -> Result<(), DriverError> {
    match busy_stream(port) {
        Some(stream) => wait_for_copies(port, stream).await,
        None => Ok(()),
    }
}

/// Waits for copies that could not be waited for when they were made. Returns `true` if no copy is
/// in progress. Does not wait for the copies of an operation that still queues more: that operation
/// waits for them itself before it ends. An operation whose block lacks memory never meets such an
/// operation.
///
/// # Errors
/// The driver's: the copies may still be in progress.
pub(crate) async fn end_copies(port: &Port<'_>) -> Result<bool, DriverError> {
    let stream = port.with(|state| state.sleep.stream.filter(|_| !state.sleep.is_queueing));
    let Some(stream) = stream else { return Ok(false) };
    wait_for_copies(port, stream).await?;
    Ok(port.with(|state| !state.sleep.may_be_copied()))
}

/// Sets whether stores are kept between sleeps, and releases those kept until now.
pub(crate) async fn set_keep_stores(port: &Port<'_>, keep_stores: bool) {
    if let Some(kept) = port.with(|state| state.sleep.set_keep_stores(keep_stores)) {
        release(port, kept).await;
    }
}

/// Releases the stores kept between sleeps. Returns their bytes.
pub(crate) async fn release_kept(port: &Port<'_>) -> ByteSize {
    let Some(kept) = port.with(|state| state.sleep.kept.take()) else { return ByteSize::ZERO };
    let bytes = kept.bytes();
    release(port, kept).await;
    bytes
}

/// Releases stores and their reservation. Stores that the driver does not free are retried later,
/// and stay reserved.
pub(super) async fn release(port: &Port<'_>, saved: Saved) {
    port.with(|state| state.sleep.give_up(saved));
    retry_release(port).await;
}

/// Tries again to release the stores that the driver has not freed.
pub(super) async fn retry_release(port: &Port<'_>) {
    // Taken together with the stores: a concurrent caller must not release a reservation before
    // them.
    let (mut stores, reservations) = port.with(|state| state.sleep.take_unreleased());
    if stores.is_empty() && reservations.is_empty() {
        return;
    }
    let is_done = stores.is_empty() || complete_copies(port).await.is_ok();
    let mut left = Vec::new();
    for (store, size) in stores.drain(..) {
        if !is_done || port.does(CallKind::DestroyStore { store }).await.is_err() {
            left.push((store, size));
        }
    }
    let bytes: ByteSize = left.iter().map(|(_, size)| *size).sum();
    let released = port.with(|state| state.sleep.put_unreleased(left, reservations));
    if !released.is_empty() {
        let _ = call_budget(port, || drop(released)).await;
    }
    if !bytes.is_zero() {
        let arena = port.with(|state| state.name.clone());
        port.outside(|| log!(warn, arena, %bytes, "host memory of a sleep not released yet")).await;
    }
}

/// Releases the host memory of sleep at the end of the arena. Does not wait: stores that a copy may
/// still use are leaked.
pub(crate) async fn end(port: &Port<'_>) {
    let is_copying = port.with(|state| {
        let sleep = &mut state.sleep;
        for saved in [sleep.saved.take(), sleep.kept.take()].into_iter().flatten() {
            sleep.give_up(saved);
        }
        sleep.may_be_copied()
    });
    if !is_copying {
        retry_release(port).await;
    }
    let left = port.with(|state| (state.sleep.budget.take(), state.sleep.take_unreleased()));
    let _ = call_budget(port, || drop(left)).await; // nothing unwinds out of a drop
}
