//! The cudarc slice of a block, which stays with the block in a lane's cache.
//!
//! A slice has two events by which cudarc orders the streams that use it. When a buffer is dropped,
//! the lane's stream waits for both, so that the lane's order includes the other streams. Then the
//! slice stays for the next buffer of that type, length and place, without a call.
//!
//! A block that leaves a cache leaves its slice to the lane: the lane discards it with the next
//! slice that it makes outside a capture, or at its end. A cache may be emptied with locks held or
//! in the background, and discarding a slice makes calls on the lane's stream.
//!
//! A graph keeps the address of a slice that it captured. Captures and launches are safe functions
//! of cudarc, so the slot asks: a lane's stream that captures when the buffer ends has captured it.
//! After the capture its events say so, which no stream may wait for. Without events each view
//! asks.
//!
//! Invariants: a slice has the address and the length of its buffer while any reference to it is
//! alive; no stream that captures is made to wait.
#![expect(unsafe_code, reason = "a slice of cudarc's is made of the arena's memory")]

use std::any::Any;
use std::mem::ManuallyDrop;
use std::ptr::with_exposed_provenance_mut;
use std::sync::Arc;

use bytemuck::Pod;
use cudarc::driver::result::ctx::{get_current, set_current};
use cudarc::driver::result::stream::{self, wait_event};
use cudarc::driver::sys::CUevent_wait_flags::CU_EVENT_WAIT_DEFAULT;
use cudarc::driver::sys::CUresult::{CUDA_ERROR_INVALID_CONTEXT, CUDA_ERROR_INVALID_HANDLE};
use cudarc::driver::sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_ACTIVE;
use cudarc::driver::{
    CudaSlice, CudaStream, DevicePtr as _, DevicePtrMut as _, DriverError, SyncOnDrop,
};
use lowtide_core::log;

use crate::engine::completion;
use crate::exec::inner::ArenaInner;
use crate::exec::lane::LaneInner;
use crate::types::error::{DeviceError, is_of_capture};
use lowtide_core::sync::atomic::Ordering;
use lowtide_core::sync::{Mutex, caught, lock};

/// The slice of a block, if the block was viewed. On the heap, since most blocks never are.
#[derive(Default)]
pub(crate) struct ViewSlot(Mutex<Option<Box<ViewState>>>);

#[derive(Default)]
struct ViewState {
    kept: Option<Box<dyn CachedView>>,
    /// `true` if other streams may have used the slice since the lane's stream waited for them.
    is_used: bool,
    /// `true` if the stream could not wait for the events that others recorded on a dropped slice.
    loose: bool,
    /// `true` if a view was given to a stream that captured a graph.
    captured: bool,
}

/// The order of a slice's stream after the streams that used the slice.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Order {
    /// The stream comes after all work that cudarc ordered.
    After,
    /// The work is to be waited for otherwise.
    Unknown,
    /// A graph has captured the work, and may repeat it at any time.
    Captured,
}

/// A slice of elements of some type.
pub(crate) trait CachedView: Any + Send + Sync {
    fn stream(&self) -> &Arc<CudaStream>;

    /// Makes the stream wait for the events of the slice, if their handles are known.
    fn wait(&self) -> Option<Result<(), DriverError>>;

    /// Makes the stream wait for the events of the slice. The stream's context is current.
    fn settle(&mut self) -> Result<(), DriverError>;

    /// Discards the slice without freeing its memory: its stream waits for the events recorded on
    /// it. Returns an error if cudarc parked one meanwhile.
    fn let_go(self: Box<Self>) -> Result<(), DriverError>;
}

/// On the heap, so that it does not move while references to the slice exist.
struct CachedSlice<T> {
    slice: ManuallyDrop<CudaSlice<T>>,
    at: u64,
    /// The handles of the slice's events, once they are known; zero for none.
    events: Option<[usize; 2]>,
}

impl<T: Pod> CachedView for CachedSlice<T> {
    fn stream(&self) -> &Arc<CudaStream> {
        self.slice.stream()
    }

    fn wait(&self) -> Option<Result<(), DriverError>> {
        let mut events = self.events?.into_iter().filter(|&event| event != 0);
        Some(events.try_for_each(|event| {
            let (stream, event) = (self.slice.stream(), with_exposed_provenance_mut(event));
            // SAFETY: a stream and an event of one context, which the slice keeps.
            unsafe { wait_event(stream.cu_stream(), event, CU_EVENT_WAIT_DEFAULT) }
        }))
    }

    fn settle(&mut self) -> Result<(), DriverError> {
        let stream = Arc::clone(self.slice.stream());
        self.wait().unwrap_or_else(|| {
            apart(&stream, || self.events = Some(events_of(&mut self.slice, &stream)))
        })
    }

    fn let_go(mut self: Box<Self>) -> Result<(), DriverError> {
        let stream = Arc::clone(self.slice.stream());
        apart(&stream, || {
            // SAFETY: taken once: `self` is gone after this.
            let slice = unsafe { ManuallyDrop::take(&mut self.slice) };
            let _ = slice.leak();
        })
    }
}

/// Makes a stream wait for the events of a slice, and returns the handles of the events.
fn events_of<T>(slice: &mut CudaSlice<T>, stream: &CudaStream) -> [usize; 2] {
    let handle = |mut recorded: SyncOnDrop<'_>| match &mut recorded {
        // Taken out, so that nothing is recorded.
        SyncOnDrop::Record(target) => {
            target.take().map_or(0, |(event, _)| event.cu_event().expose_provenance())
        }
        SyncOnDrop::Sync(_) => 0,
    };
    let written = handle(slice.device_ptr_mut(stream).1);
    let read = handle(slice.device_ptr(stream).1);
    [read, written]
}

/// Calls cudarc, and returns the error that it parked. An error that other code parked stays.
fn apart(stream: &CudaStream, act: impl FnOnce()) -> Result<(), DriverError> {
    let context = stream.context();
    let before = context.check_err();
    act();
    let ours = context.check_err();
    context.record_err(before);
    ours
}

impl ViewSlot {
    /// Returns the slice kept for this place; creates a slice if there is none. The slice is
    /// replaced when the place or the type changes.
    pub(crate) fn keep<T: Pod>(
        &self,
        inner: &ArenaInner,
        lane: Option<&LaneInner>,
        place: (u64, usize),
    ) -> Result<*const CudaSlice<T>, DeviceError> {
        let mut slot = lock(&self.0);
        let slot = slot.get_or_insert_default();
        let is_there = |kept: &CachedSlice<T>| (kept.at, kept.slice.len()) == place;
        if !slot.slice::<T>().is_some_and(is_there) {
            // No reference to a replaced slice exists: it would be under a lease, and no buffer
            // moves or is resized while a lease is held.
            let kept = slot.kept.take();
            let order = discard(inner, kept);
            slot.loose |= order == Order::Unknown;
            slot.captured |= order == Order::Captured;
            if slot.loose {
                inner.run(completion::complete_all)?;
                slot.loose = false;
            }
            if let Some(shard) = lane.and_then(|lane| lane.shard.as_ref()) {
                shard.discard_views(false);
            }
            slot.kept = Some(Box::new(make::<T>(inner, lane, place)?));
        }
        slot.is_used = true;
        let Some(kept) = slot.slice::<T>() else { return Err(no_stream(inner)) };
        let (slice, stream) = (&raw const *kept.slice, kept.stream());
        let has_events = stream.context().is_managing_stream_synchronization();
        slot.captured = slot.captured || (!has_events && is_capturing(stream));
        Ok(slice)
    }

    pub(crate) fn kept_mut<T: Pod>(&mut self) -> Option<&mut CudaSlice<T>> {
        let kept: &mut dyn Any = self.slot_mut().as_mut()?.kept.as_deref_mut()?;
        kept.downcast_mut::<CachedSlice<T>>().map(|kept| &mut *kept.slice)
    }

    /// Makes the slice's stream wait for the streams that used the slice, and keeps the slice.
    /// Discards the slice if that fails.
    pub(crate) fn settle(&mut self, inner: &ArenaInner) -> Order {
        let Some(slot) = self.slot_mut() else { return Order::After };
        if slot.loose {
            return self.discard(inner);
        }
        let Some(kept) = slot.kept.as_deref_mut().filter(|_| slot.is_used) else {
            return Order::After;
        };
        let stream = Arc::clone(kept.stream());
        slot.is_used = false;
        if !stream.context().is_managing_stream_synchronization() {
            return Order::After;
        }
        // A wait needs no current context, unless the driver says so: a query less.
        let outcome = match kept.wait() {
            Some(outcome) if !needs_context(outcome) => Ok(outcome),
            _ => keeping_current(&stream, || kept.settle()),
        };
        match order(inner, &outcome) {
            Order::Unknown => self.discard(inner),
            order => order,
        }
    }

    /// Returns `true` if other streams may have used the slice.
    pub(crate) fn is_used(&mut self) -> bool {
        self.slot_mut().as_ref().is_some_and(|slot| slot.is_used || slot.loose)
    }

    /// Returns `true` if a graph may have captured a use of the slice, as far as no event shows it.
    /// Asks if a lane captures only if the slice was used.
    pub(crate) fn is_captured(&mut self, ask: impl FnOnce() -> bool) -> bool {
        let slot = self.slot_mut().as_ref();
        slot.is_some_and(|slot| slot.captured || (slot.is_used && ask()))
    }

    /// Discards the slice.
    pub(crate) fn discard(&mut self, inner: &ArenaInner) -> Order {
        let Some(slot) = self.slot_mut().take() else { return Order::After };
        let order = discard(inner, slot.kept);
        if slot.loose && order == Order::After { Order::Unknown } else { order }
    }

    /// Takes the slice out.
    pub(crate) fn take(&mut self) -> Option<Box<dyn CachedView>> {
        self.slot_mut().as_mut()?.kept.take()
    }

    fn slot_mut(&mut self) -> &mut Option<Box<ViewState>> {
        self.0.get_mut().unwrap_or_else(std::sync::PoisonError::into_inner)
    }
}

impl ViewState {
    fn slice<T: Pod>(&self) -> Option<&CachedSlice<T>> {
        let kept: &dyn Any = self.kept.as_deref()?;
        kept.downcast_ref()
    }
}

/// The slices of blocks that left a lane's cache.
#[derive(Default)]
pub(crate) struct EndedViews {
    slices: Vec<Box<dyn CachedView>>,
    /// `true` if the lane has ended: nothing discards the slices later.
    is_over: bool,
}

impl EndedViews {
    /// Adds a slice. Returns the slice if the caller must discard it.
    pub(crate) fn add(&mut self, kept: Box<dyn CachedView>) -> Option<Box<dyn CachedView>> {
        if self.is_over {
            return Some(kept);
        }
        self.slices.push(kept);
        None
    }

    /// Takes out all slices; none while their stream captures, unless the lane has ended.
    pub(crate) fn take(&mut self, is_over: bool) -> Vec<Box<dyn CachedView>> {
        self.is_over |= is_over;
        let kept = self.slices.first().filter(|_| !is_over);
        if kept.is_some_and(|kept| is_capturing(kept.stream())) {
            return Vec::new();
        }
        std::mem::take(&mut self.slices)
    }
}

/// Creates a cudarc slice over the elements of a block, or of imported memory.
fn make<T: Pod>(
    inner: &ArenaInner,
    lane: Option<&LaneInner>,
    (at, len): (u64, usize),
) -> Result<CachedSlice<T>, DeviceError> {
    let stream = lane.and_then(LaneInner::cuda).ok_or_else(|| no_stream(inner))?;
    let made = keeping_current(stream, || {
        // SAFETY: the block is live, or the memory imported and not released; it has room for the
        // elements, and stays so until the slice is discarded, which frees nothing. The elements
        // are bytes of a Pod: any are a value.
        unsafe { stream.upgrade_device_ptr::<T>(at, len) }
    });
    let slice = made.map_err(|message| DeviceError::View { message })?;
    Ok(CachedSlice { slice: ManuallyDrop::new(slice), at, events: None })
}

/// Discards a slice.
pub(crate) fn discard(inner: &ArenaInner, kept: Option<Box<dyn CachedView>>) -> Order {
    let Some(kept) = kept else { return Order::After };
    if inner.check_here().is_err() {
        let _ = ManuallyDrop::new(kept); // its context belongs to the parent
        return Order::After;
    }
    // cudarc unwraps nothing here. If it did, nothing would unwind out of a drop.
    let stream = Arc::clone(kept.stream());
    order(inner, &keeping_current(&stream, || kept.let_go()))
}

/// Returns the order after an attempt to wait. Counts an error that a view left with cudarc.
fn order(inner: &ArenaInner, outcome: &Result<Result<(), DriverError>, String>) -> Order {
    match outcome {
        Ok(Ok(())) => Order::After,
        Ok(Err(DriverError(code))) if is_of_capture(*code as i64) => Order::Captured,
        _ => {
            inner.parked.fetch_add(1, Ordering::Relaxed);
            log!(warn, arena = inner.name, ?outcome, "buffer view free failed");
            Order::Unknown
        }
    }
}

/// Returns `true` if a call failed because of the thread's current context.
fn needs_context(outcome: Result<(), DriverError>) -> bool {
    let codes = [CUDA_ERROR_INVALID_CONTEXT, CUDA_ERROR_INVALID_HANDLE];
    outcome.is_err_and(|DriverError(code)| codes.contains(&code))
}

/// Returns `true` if a stream captures a graph. One call, which needs no context. The graph of an
/// invalidated capture cannot be launched, nor can one of a stream that gives no answer.
pub(crate) fn is_capturing(stream: &CudaStream) -> bool {
    // SAFETY: cudarc's stream, which it keeps.
    let status = unsafe { stream::is_capturing(stream.cu_stream()) };
    status == Ok(CU_STREAM_CAPTURE_STATUS_ACTIVE)
}

pub(crate) fn no_stream(inner: &ArenaInner) -> DeviceError {
    DeviceError::NoStream { arena: inner.name.clone() }
}

/// Calls cudarc with the context of its stream current. Afterwards the thread's earlier context, or
/// none, is restored, as after all calls of the arena. Returns cudarc's message if it panicked.
fn keeping_current<T>(stream: &CudaStream, act: impl FnOnce() -> T) -> Result<T, String> {
    let ours = stream.context().cu_ctx();
    let before = get_current().map(|context| context.unwrap_or(std::ptr::null_mut()));
    let other = before.ok().filter(|&context| context != ours);
    if other.is_some() {
        // SAFETY: the context of a stream of cudarc's, which keeps it. If it is lost, each call
        // below is an error.
        let _ = unsafe { set_current(ours) };
    }
    let outcome = caught(act);
    if let Some(context) = other {
        // SAFETY: it was current in this thread, or null, for none. If it is gone by now, that is
        // an error.
        let _ = unsafe { set_current(context) };
    }
    outcome
}

#[cfg(all(test, not(lowtide_loom)))]
mod tests {
    use super::*;
    use crate::exec::thread_cache::BlockHandle;

    /// The bug: each block held room for a view, so that its handle had 144 bytes and took 160.
    #[test]
    fn a_handle_has_one_of_mallocs_sizes_although_most_blocks_are_never_viewed() {
        assert_eq!((size_of::<ViewSlot>(), size_of::<BlockHandle>()), (16, 128));
    }
}
