//! Contents in host memory: reserves host memory from the budget, copies contents out and back, and
//! releases the stores.
//!
//! Copies run on the arena's own stream, one copy for each run of granules. All copies are queued
//! first, and then waited for once.
//!
//! Page-locking host memory, and releasing it, takes longer than filling it. So stores are created
//! ahead of a sleep ([`prepare`]), and a wake only makes them idle. Idle stores are used by the
//! next sleep. A decay, a purge or a sleep that failed releases them: those beyond the limit, and
//! those that live blocks do not need.
//!
//! Invariants: while a store exists, its bytes stay reserved in the host budget; a store is
//! released only after the host has seen every copy from and to the store complete, and is
//! overwritten only by later copies on the same stream; no store is created or released during a
//! wake.
#![expect(unsafe_code, reason = "copies memory to stores and back")]

use super::callbacks::call_budget;
use super::completion::{is_any_capturing, own_stream};
use super::context::OpContext;
use crate::driver::DriverError;
use crate::state::ArenaState;
use crate::state::sleep::{
    HostReservation, OutgoingRun, Saved, SleepPhase, SleepStore, StoredCopy, lay_out,
};
use crate::types::error::{DeviceError, captures, is_captures};
use crate::types::{Contents, HostBudget, Region, Result, SleepOptions};
use lowtide_core::clock::Moment;
use lowtide_core::{ByteSize, log};

/// Copies the contents to keep into idle stores, creates the stores that are missing, and waits for
/// the copies. Returns `None` if no contents are kept.
///
/// # Errors
/// `HostBudget`, `Capturing`, or the driver's. No device memory was released, and the stores are
/// idle.
pub(super) async fn save(cx: &OpContext<'_>, outgoing: &[OutgoingRun]) -> Result<Option<Saved>> {
    let kept = outgoing.iter().filter(|run| run.contents == Contents::Keep);
    let kept = kept.map(|run| (run.place.region, run.place.run));
    let (mut saved, missing) = cx.with(|state| {
        let stores = std::mem::take(&mut state.sleep.idle.stores);
        let sizes: Vec<_> = stores.iter().map(|store| store.memory.size).collect();
        let (runs, missing) = lay_out(kept, ByteSize::new(state.bytes_of(1)), &sizes);
        (Saved { runs, stores }, missing)
    });
    let is_empty = saved.runs.is_empty();
    let outcome = if is_empty { Ok(()) } else { fill(cx, &mut saved, &missing).await };
    let surplus = if outcome.is_ok() { saved.take_surplus() } else { Vec::new() };
    cx.with(|state| state.sleep.idle.put(surplus, cx.clock.now()));
    match outcome {
        Ok(()) => Ok((!is_empty).then_some(saved)),
        Err(error) => {
            restore(cx, saved);
            Err(copy_error(cx, error))
        }
    }
}

/// Makes the stores of a sleep that did not happen idle.
pub(super) fn restore(cx: &OpContext<'_>, saved: Saved) {
    cx.with(|state| state.sleep.idle.put(saved.stores, cx.clock.now()));
}

/// Creates the missing stores, and copies the contents into all of them.
async fn fill(cx: &OpContext<'_>, saved: &mut Saved, missing: &[ByteSize]) -> Result<()> {
    let add = |store| {
        saved.stores.push(store);
        true
    };
    create(cx, missing, add).await?;
    let stream = own_stream(cx).await?;
    let copies = cx.with(|state| {
        state.sleep.begin_copies();
        saved.copies(|region| &state.region(region).segment)
    });
    for (at, to) in copies {
        // SAFETY: committed granules that stay marked as leaving until the copies are complete, a
        // store that the operation holds, and the arena's own stream.
        cx.outside(|| unsafe { cx.driver.offload(at, to, stream) }).await?;
    }
    Ok(complete_own_copies(cx).await?)
}

/// Creates the stores that a sleep with these options would need, while `goes_on` holds and the
/// arena is awake. Returns the bytes created; zero if another operation creates some.
///
/// # Errors
/// `State` if the arena is not awake, `HostBudget`, or the driver's; stores created before stay.
pub(crate) async fn prepare(
    cx: &OpContext<'_>,
    options: SleepOptions,
    goes_on: impl Fn(&ArenaState) -> bool,
) -> Result<ByteSize> {
    if !cx.with(|state| state.is_usable()) {
        return Err(cx.with(|state| state.not_awake()));
    }
    let Some(missing) = cx.with(|state| {
        let is_host = state.capabilities.counts_as_host();
        let of = |(region, usual)| state.region(region).kept_granules((usual, is_host));
        let kept = [(Region::Stable, options.stable), (Region::Dynamic, options.dynamic)].map(of);
        let kept = ByteSize::new(state.bytes_of(kept.iter().sum()));
        state.sleep.idle.begin_prepare(kept, ByteSize::new(state.bytes_of(1)))
    }) else {
        return Ok(ByteSize::ZERO);
    };
    let mut bytes = ByteSize::ZERO;
    let add = |store: SleepStore| {
        bytes = bytes.saturating_add(store.memory.size);
        cx.with(|state| {
            state.sleep.idle.put(vec![store], cx.clock.now());
            state.is_usable() && goes_on(state)
        })
    };
    let outcome = create(cx, &missing, add).await;
    cx.with(|state| state.sleep.idle.is_preparing = false);
    if !bytes.is_zero() {
        cx.log(|arena| log!(debug, arena, %bytes, "host memory for a sleep allocated")).await;
    }
    outcome.map(|()| bytes)
}

/// Returns the error of a sleep or a wake, whose copies cannot be made during a capture.
pub(super) fn copy_error(cx: &OpContext<'_>, error: DeviceError) -> DeviceError {
    match error {
        DeviceError::Driver(error) if is_captures(&error) => {
            DeviceError::Capturing { arena: cx.with(|state| state.name.clone()) }
        }
        error => error,
    }
}

/// Creates stores, until `add` returns `false`. Host memory for all of them is reserved before the
/// first is created, that for the last one first.
async fn create(
    cx: &OpContext<'_>,
    sizes: &[ByteSize],
    mut add: impl FnMut(SleepStore) -> bool,
) -> Result<()> {
    if sizes.is_empty() {
        return Ok(());
    }
    let budget = cx.with(|state| state.sleep.budget.clone());
    let (mut reserved, mut outcome) = (Vec::new(), Ok(()));
    if let Some(budget) = budget.as_deref() {
        outcome = reserve(cx, budget, sizes, &mut reserved).await;
    }
    for &size in sizes.iter().filter(|_| outcome.is_ok()) {
        let memory = match cx.outside(|| cx.driver.host_store_create(size)).await {
            Ok(memory) => memory,
            Err(error) => {
                outcome = Err(error.into());
                break;
            }
        };
        let mut reservation = reserved.pop();
        if let (Some(budget), Some(reservation)) = (&budget, &mut reservation) {
            let _ = cx.outside(|| call_budget(|| budget.settle(&mut **reservation))).await;
        }
        if !add(SleepStore { memory, reservation }) {
            break;
        }
    }
    // The budget may have been replaced meanwhile, so this may drop it.
    let _ = cx.outside(|| call_budget(|| drop((reserved, budget)))).await;
    outcome
}

/// Reserves host memory for each store, the last one first.
async fn reserve(
    cx: &OpContext<'_>,
    budget: &dyn HostBudget,
    sizes: &[ByteSize],
    reserved: &mut Vec<HostReservation>,
) -> Result<()> {
    for &size in sizes.iter().rev() {
        match cx.outside(|| call_budget(|| budget.reserve(size))).await {
            Ok(Ok(reservation)) => reserved.push(reservation),
            Ok(Err(reason)) => {
                let (arena, bytes) =
                    (cx.with(|state| state.name.clone()), sizes.iter().copied().sum());
                return Err(DeviceError::HostBudget { arena, bytes, reason });
            }
            Err(message) => return Err(DeviceError::Callback { message }),
        }
    }
    Ok(())
}

/// Queues copies of saved contents to their places, and does not wait for them. Returns the bytes.
/// From here on, frees continue, but no idle memory leaves: current places stay valid.
///
/// # Errors
/// The driver's; copies may be in progress.
pub(super) async fn queue_copies(
    cx: &OpContext<'_>,
    copies: impl Fn(&ArenaState) -> Vec<StoredCopy>,
) -> Result<ByteSize, DriverError> {
    let (copies, stream) = cx.with(|state| {
        let copies = copies(state);
        if !copies.is_empty() {
            state.sleep.begin_copies();
        }
        (copies, state.sleep.stream)
    });
    for &(at, from) in &copies {
        let stream = stream.expect("contents are saved on the arena's stream");
        // SAFETY: committed granules of an arena that is not awake, a filled store that is in the
        // state or held by the operation, and the arena's own stream. No lease is granted before
        // the copies are complete.
        cx.outside(|| unsafe { cx.driver.restore(from, at, stream) }).await?;
    }
    Ok(copies.iter().map(|(_, from)| from.size).sum())
}

/// Waits for the copies that this operation has queued.
///
/// # Errors
/// As [`complete_copies`].
pub(super) fn complete_own_copies(
    cx: &OpContext<'_>,
) -> impl Future<Output = Result<(), DriverError>> {
    cx.with(|state| state.sleep.is_queueing = false);
    complete_copies(cx)
}

/// Waits for the copies that are queued now, if any may be in progress. While another operation
/// queues more, only that operation knows when they are complete.
///
/// # Errors
/// The driver's, or [`CAPTURES`](crate::types::error::CAPTURES) if a stream captures a graph; the
/// copies may still be in progress.
pub(super) async fn complete_copies(cx: &OpContext<'_>) -> Result<(), DriverError> {
    let stream = cx.with(|state| state.sleep.stream.filter(|_| state.sleep.may_be_copied()));
    let Some(stream) = stream else { return Ok(()) };
    let queued = cx.with(|state| state.sleep.queued());
    if is_any_capturing(cx).await? {
        return Err(captures("cuStreamSynchronize"));
    }
    cx.synchronize(stream).await?;
    // The host has seen the end of these.
    cx.with(|state| state.sleep.copied = state.sleep.copied.max(queued.unwrap_or(0)));
    Ok(())
}

/// Sets the limit of idle stores, and releases what exceeds it.
pub(crate) async fn set_stores_max(cx: &OpContext<'_>, stores_max: ByteSize) {
    cx.with(|state| {
        state.sleep.config.stores_max = stores_max;
        state.sleep.idle.prepared = ByteSize::ZERO;
    });
    release_over_limit(cx).await;
}

/// Releases all idle stores. Returns their bytes.
pub(crate) async fn release_idle(cx: &OpContext<'_>) -> ByteSize {
    release_while(cx, |_| true).await
}

/// Releases the idle stores beyond the limit.
pub(crate) async fn release_over_limit(cx: &OpContext<'_>) {
    release_while(cx, |state| state.sleep.idle.is_over(state.sleep.config.stores_max)).await;
}

/// Releases the idle stores that are due at `now`.
pub(crate) async fn decay(cx: &OpContext<'_>, now: Moment) {
    release_while(cx, |state| store_due(state) <= now).await;
}

/// Returns the time at which the next idle store is to be released; never during a wake.
pub(crate) fn store_due(state: &ArenaState) -> Moment {
    let sleep = &state.sleep;
    if sleep.phase == SleepPhase::Waking {
        return Moment::NEVER;
    }
    let need = if state.is_usable() { state.memory().active } else { 0 };
    sleep.idle.due(sleep.config.stores_max, ByteSize::new(need), state.aging.time)
}

/// Releases idle stores, the last one first, while they are in excess, and returns their bytes.
/// Ends when a wake begins: releasing a store keeps the driver busy. Stores that the driver does
/// not free stay idle.
async fn release_while(cx: &OpContext<'_>, is_excess: impl Fn(&ArenaState) -> bool) -> ByteSize {
    let (released, left) = destroy_while(cx, is_excess).await;
    if !left.is_empty() {
        let bytes: ByteSize = left.iter().map(|store| store.memory.size).sum();
        let left = left.into_iter().rev().collect();
        cx.with(|state| state.sleep.idle.put(left, cx.clock.now()));
        cx.log(|arena| log!(warn, arena, %bytes, "host memory of a sleep not released yet")).await;
    }
    if !released.is_zero() {
        cx.log(|arena| log!(debug, arena, bytes = %released, "host memory of a sleep released"))
            .await;
    }
    released
}

/// Destroys idle stores, the last one first, while they are in excess. Returns the bytes of those
/// that are gone, and the others.
async fn destroy_while(
    cx: &OpContext<'_>,
    is_excess: impl Fn(&ArenaState) -> bool,
) -> (ByteSize, Vec<SleepStore>) {
    let (mut released, mut left) = (ByteSize::ZERO, Vec::new());
    loop {
        let last = cx.with(|state| {
            let may = state.sleep.phase != SleepPhase::Waking;
            if may && is_excess(state) { state.sleep.idle.stores.pop() } else { None }
        });
        let Some(store) = last else { break };
        let memory = store.memory;
        let mut destroyed = complete_copies(cx).await;
        if destroyed.is_ok() {
            // SAFETY: the store is no longer in the state, and no copy of it is in progress.
            destroyed = cx.outside(|| unsafe { cx.driver.host_store_destroy(memory) }).await;
        }
        match destroyed {
            Ok(()) => {
                released = released.saturating_add(store.memory.size);
                if store.reservation.is_some() {
                    let _ = cx.outside(|| call_budget(|| drop(store))).await;
                }
            }
            Err(_) => left.push(store),
        }
    }
    (released, left)
}

/// Releases the host memory of sleep at the end of the arena. Does not wait: stores that a copy may
/// still use are leaked.
pub(crate) async fn end(cx: &OpContext<'_>) {
    let is_copying = cx.with(|state| {
        let stores = state.sleep.saved.take().map(|saved| saved.stores);
        state.sleep.idle.put(stores.unwrap_or_default(), cx.clock.now());
        state.sleep.may_be_copied()
    });
    let mut left = Vec::new();
    if !is_copying {
        (_, left) = destroy_while(cx, |_| true).await;
    }
    left.extend(cx.with(|state| std::mem::take(&mut state.sleep.idle.stores)));
    if !left.is_empty() {
        let bytes: ByteSize = left.iter().map(|store| store.memory.size).sum();
        cx.log(|arena| log!(warn, arena, %bytes, "arena dropped, host memory of its sleep leaked"))
            .await;
    }
    let budget = cx.with(|state| state.sleep.budget.take());
    let _ = cx.outside(|| call_budget(|| drop((budget, left)))).await; // nothing unwinds out of a drop
}
