//! Contents in host memory: stores, the map of their contents, and the copies out and back.
//!
//! Copies run on the arena's own stream, one for each run of granules, all queued and then waited
//! for once. A store is at most 1 GiB, so that no single allocation is as large as the device.
//!
//! Invariants: saved contents are reserved with the host budget while their store exists; a store
//! is released only after the host has seen every copy from and to it complete, and overwritten
//! only after those copies, on the same stream.
#![expect(unsafe_code, reason = "drivers copy by address, and do not check stores")]

use lowtide_core::log;
use std::any::Any;
use std::cell::Cell;
use std::sync::Arc;

use super::HostBudget;
use super::contents::{Contents, OutgoingRun};
use crate::driver::{DeviceAddress, DriverError, HOST_GRANULARITY, HostStore, StoreSpan};
use crate::exec::executor::Locked;
use crate::exec::handles::OwnedStream;
use crate::exec::inner::ArenaInner;
use crate::state::arena::ArenaState;
use crate::state::ground::Backing;
use crate::state::region::Region;
use crate::state::segment::Run;
use crate::types::error::DeviceError;
use crate::types::error::{captures, is_captures};
use lowtide_core::bytes::ByteSize;
use lowtide_core::sync::caught;

/// The largest store, if granules are no larger.
const STORE_MAX: ByteSize = ByteSize::gib(1);

/// Granules whose contents are in one store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Copy {
    pub(super) region: Region,
    pub(super) run: Run,
    /// The index of the store.
    store: usize,
    offset: ByteSize,
}

/// Contents out of the way; between sleeps, the stores for them.
pub(super) struct Saved {
    pub(super) copies: Vec<Copy>,
    pub(super) stores: Vec<(HostStore, ByteSize)>,
    /// Dropped when the stores are released.
    booking: Option<Box<dyn Any + Send>>,
}

/// The treatment of stores between a wake and the next sleep.
#[derive(Default)]
pub(super) enum Between {
    /// They are released.
    #[default]
    Release,
    /// They stay, those of the last sleep.
    Keep(Option<Saved>),
}

impl Between {
    pub(super) const fn of(keep_stores: bool) -> Self {
        if keep_stores { Self::Keep(None) } else { Self::Release }
    }

    pub(super) const fn kept(&self) -> Option<&Saved> {
        if let Self::Keep(kept) = self { kept.as_ref() } else { None }
    }

    pub(super) fn take(&mut self) -> Option<Saved> {
        if let Self::Keep(kept) = self { kept.take() } else { None }
    }

    /// Keeps stores, or returns those to release.
    pub(super) fn put(&mut self, saved: Saved) -> Option<Saved> {
        if let Self::Keep(kept) = self { kept.replace(saved) } else { Some(saved) }
    }
}

/// A budget of host memory, and a reservation with it.
type Booking = (Arc<dyn HostBudget>, Box<dyn Any + Send>);

#[cfg(not(lowtide_loom))]
thread_local! {
    /// `true` while this thread is within a call of a host budget.
    static BOOKING: Cell<bool> = const { Cell::new(false) };
}
#[cfg(lowtide_loom)]
loom::thread_local! {
    static BOOKING: Cell<bool> = Cell::new(false);
}

/// Returns `true` if this thread is within a call of a host budget, and so may be the one putting
/// the arena to sleep: it must not wait for the end of that.
pub(crate) fn is_booking() -> bool {
    BOOKING.with(Cell::get)
}

/// Calls or drops the budget's foreign code, with no lock held.
fn theirs<T>(act: impl FnOnce() -> T) -> Result<T, String> {
    let before = BOOKING.with(|of| of.replace(true));
    let outcome = caught(act);
    BOOKING.with(|of| of.set(before));
    outcome
}

/// One copy: the device address and the span of a store.
pub(super) type StoredCopy = (DeviceAddress, StoreSpan);

/// Lays granules out over stores; returns the sizes of these.
pub(super) fn lay_out(parts: &[OutgoingRun], granularity: ByteSize) -> (Vec<Copy>, Vec<ByteSize>) {
    let store_granules = (STORE_MAX.get() / granularity.get()).max(1);
    let bytes = |granules: u64| ByteSize::new(granules * granularity.get());
    let (mut copies, mut sizes) = (Vec::new(), Vec::new());
    let mut used = store_granules; // of the last store
    for part in parts.iter().filter(|part| part.contents == Contents::Keep) {
        let range = part.run.range();
        let mut at = range.start;
        while at < range.end {
            if used == store_granules {
                sizes.push(ByteSize::ZERO);
                used = 0;
            }
            let room = usize::try_from(store_granules - used).unwrap_or(usize::MAX);
            let end = range.end.min(at.saturating_add(room));
            let run = Run::of(&(at..end));
            let (store, offset) = (sizes.len() - 1, bytes(used));
            copies.push(Copy { region: part.region, run, store, offset });
            used += run.granules();
            sizes[store] = bytes(used);
            at = end;
        }
    }
    for size in &mut sizes {
        *size = size.next_multiple_of(HOST_GRANULARITY).unwrap_or(*size);
    }
    (copies, sizes)
}

impl Saved {
    /// Returns the current and saved place of the granules of a copy, or some of them.
    fn place(&self, copy: &Copy, run: Run, segment: &Backing) -> StoredCopy {
        let (at, size) = segment.place_of(run);
        let (from, _) = segment.place_of(copy.run);
        let into = at.offset_from(from).unwrap_or_default();
        let (store, _) = self.stores[copy.store];
        (at, StoreSpan { store, offset: copy.offset.saturating_add(into), size })
    }

    /// Host memory of its stores.
    pub(super) fn bytes(&self) -> ByteSize {
        self.stores.iter().map(|(_, size)| *size).sum()
    }

    /// Every copy of all that was saved.
    pub(super) fn places(&self, books: &ArenaState) -> Vec<StoredCopy> {
        let place = |copy: &Copy| self.place(copy, copy.run, &books.region(copy.region).segment);
        self.copies.iter().map(place).collect()
    }

    /// Returns the copies of memory that blocks still touch.
    pub(super) fn wanted_places(&self, books: &ArenaState) -> Vec<StoredCopy> {
        let wanted = |copy: &Copy| {
            let segment = &books.region(copy.region).segment;
            let runs = segment.touched_runs(copy.run).into_iter();
            runs.map(|run| self.place(copy, run, segment)).collect::<Vec<_>>()
        };
        self.copies.iter().flat_map(wanted).collect()
    }
}

impl ArenaInner {
    /// Copies contents to keep into host memory, which is reserved first, and waits for the copies;
    /// `None` if there is nothing to keep.
    ///
    /// # Errors
    /// `HostBudget`, `Capturing`, or the driver's. No memory was released, and nothing stays
    /// reserved except for stores that the driver does not free.
    pub(super) fn save(&self, parts: &[OutgoingRun]) -> Result<Option<Saved>, DeviceError> {
        let (copies, sizes) = lay_out(parts, self.granule);
        if copies.is_empty() {
            return Ok(None);
        }
        let (budget, mut saved) = match self.kept_for(&sizes) {
            Some(kept) => (None, Saved { copies, ..kept }),
            None => {
                let (budget, booking) = self.book(sizes.iter().copied().sum())?.unzip();
                (budget, Saved { copies, stores: Vec::new(), booking })
            }
        };
        let outcome = self.copy_out(&mut saved, &sizes);
        if outcome.is_ok()
            && let Some((budget, booking)) = budget.as_ref().zip(saved.booking.as_mut())
        {
            let _ = theirs(|| budget.settle(&mut **booking));
        }
        let _ = theirs(|| drop(budget)); // another may have taken its place
        match outcome {
            Ok(()) => Ok(Some(saved)),
            Err(error) => {
                self.let_go(saved);
                Err(self.told_of_copies(error))
            }
        }
    }

    /// Returns the stores kept after the last wake; `None` if there are none, or they are too small
    /// and released.
    fn kept_for(&self, sizes: &[ByteSize]) -> Option<Saved> {
        let kept = self.lock().sleep.between.take();
        let kept = kept?;
        let mut pairs = sizes.iter().zip(&kept.stores);
        if sizes.len() <= kept.stores.len() && pairs.all(|(size, (_, has))| size <= has) {
            return Some(kept);
        }
        self.let_go(kept);
        None
    }

    /// Returns the error for copies that could not be made or waited for.
    pub(super) fn told_of_copies(&self, error: DriverError) -> DeviceError {
        if is_captures(&error) {
            return DeviceError::Capturing { arena: self.name.clone() };
        }
        error.into()
    }

    fn book(&self, bytes: ByteSize) -> Result<Option<Booking>, DeviceError> {
        let budget = self.lock().sleep.budget.clone();
        let Some(budget) = budget else { return Ok(None) };
        let error = match theirs(|| budget.reserve(bytes)) {
            Ok(Ok(booked)) => return Ok(Some((budget, booked))),
            Ok(Err(reason)) => DeviceError::HostBudget { arena: self.name.clone(), bytes, reason },
            Err(message) => DeviceError::Callback { message },
        };
        let _ = theirs(|| drop(budget)); // another may have taken its place
        Err(error)
    }

    fn copy_out(&self, saved: &mut Saved, sizes: &[ByteSize]) -> Result<(), DriverError> {
        for &size in sizes.iter().skip(saved.stores.len()) {
            saved.stores.push((self.driver.host_store_create(size)?, size));
        }
        let stream = self.copy_stream()?;
        let places = saved.places(&self.lock());
        for (at, span) in places {
            // SAFETY: the part is committed and marked as leaving, which happens only after the
            // copies were waited for; no lease is held, so that nothing writes to it. The store was
            // laid out for these parts, is in `saved` until the copies are complete, and is not
            // copied to or from otherwise. The stream is the arena's.
            unsafe { self.driver.offload(at, span, stream.live().handle()) }?;
        }
        self.wait_for_own(&stream)
    }

    /// Copies the saved contents of these places back, and waits; returns the bytes copied.
    ///
    /// # Errors
    /// The driver's; copies may still be in progress.
    pub(super) fn copy_back(
        &self,
        places: impl Fn(&ArenaState) -> Vec<StoredCopy>,
    ) -> Result<ByteSize, DriverError> {
        if places(&self.lock()).is_empty() {
            return Ok(ByteSize::ZERO);
        }
        let stream = self.copy_stream()?;
        // Frees continue, but from here on no idle memory leaves: current places stay valid.
        let places = places(&self.lock());
        for &(at, span) in &places {
            // SAFETY: a place that a block touches, which is committed and whose memory does not
            // leave while copies are queued; no lease is held until they are complete, so that
            // nothing else uses it. The store is in `saved`, filled by copies of this stream, and
            // destroyed only when the copies are known to be complete. The stream is the arena's.
            unsafe { self.driver.restore(span, at, stream.live().handle()) }?;
        }
        self.wait_for_own(&stream)?;
        Ok(places.iter().map(|(_, span)| span.size).sum())
    }

    /// Waits for the copies of an earlier sleep or wake, if any may be in progress.
    ///
    /// # Errors
    /// The driver's: they may still be in progress.
    pub(super) fn complete_copies(&self) -> Result<(), DriverError> {
        let books = self.lock();
        let stream = books.sleep.stream.clone().filter(|_| books.sleep.may_be_copied());
        drop(books);
        stream.map_or(Ok(()), |stream| self.wait_for_copies(&stream))
    }

    /// Returns `true` if no copy is in progress, as the host has seen.
    pub(super) fn copies_are_done(&self) -> bool {
        let books = self.lock();
        let stream = books.sleep.stream.clone().filter(|_| books.sleep.may_be_copied());
        drop(books);
        stream.is_none_or(|stream| self.wait_for_own(&stream).is_ok())
    }

    /// Sets if stores are kept between sleeps; releases the kept ones.
    pub(super) fn set_between(&self, keep_stores: bool) {
        let before = std::mem::replace(&mut self.lock().sleep.between, Between::of(keep_stores));
        if let Between::Keep(Some(kept)) = before {
            self.let_go(kept);
        }
    }

    /// Releases the stores kept between sleeps; returns their bytes.
    pub(crate) fn release_kept(&self) -> ByteSize {
        let kept = self.lock().sleep.between.take();
        let Some(kept) = kept else { return ByteSize::ZERO };
        let bytes = kept.bytes();
        self.let_go(kept);
        bytes
    }

    /// Releases the stores and their reservation; those that the driver does not free are retried
    /// later, and stay reserved.
    pub(super) fn let_go(&self, saved: Saved) {
        let Saved { stores, booking, .. } = saved;
        let mut books = self.lock();
        books.sleep.left.extend(stores);
        books.sleep.booked.extend(booking);
        drop(books);
        self.give_stores_back();
    }

    /// Retries to release the stores that are left.
    pub(crate) fn give_stores_back(&self) {
        let mut books = self.lock();
        let stores = std::mem::take(&mut books.sleep.left);
        // Together with its stores: a concurrent caller must not release it before them.
        let mut booked = std::mem::take(&mut books.sleep.booked);
        if stores.is_empty() && booked.is_empty() {
            return;
        }
        let is_copying = books.sleep.may_be_copied() && !stores.is_empty();
        let stream = books.sleep.stream.clone().filter(|_| is_copying);
        drop(books);
        let is_done = stream.is_none_or(|stream| self.wait_for_copies(&stream).is_ok());
        // SAFETY: a store that was given up: only this call knows it, and copies from and to it are
        // on the stream of the copies, which was waited for if any may be in progress.
        let destroy = |store| unsafe { self.driver.host_store_destroy(store) }.is_ok();
        let left = stores.into_iter().filter(|&(store, _)| !(is_done && destroy(store)));
        let left: Vec<_> = left.collect();
        let bytes: ByteSize = left.iter().map(|(_, size)| *size).sum();
        let mut books = self.lock();
        if !left.is_empty() {
            books.sleep.left.extend(left);
            books.sleep.booked.append(&mut booked);
        }
        drop(books);
        let _ = theirs(|| drop(booked));
        if !bytes.is_zero() {
            log!(warn, arena = self.name, %bytes, "host memory of a sleep not released yet");
        }
    }

    /// Waits for the copies that are queued now. While a thread queues more, only that thread knows
    /// when they are complete.
    fn wait_for_copies(&self, stream: &OwnedStream) -> Result<(), DriverError> {
        let books = self.lock();
        let copying = (!books.sleep.is_queueing).then_some(books.sleep.copying);
        drop(books);
        if self.is_any_capturing()? {
            return Err(captures("cuStreamSynchronize"));
        }
        stream.live().synchronize()?;
        if let Some(copying) = copying {
            let copied = &mut self.lock().sleep.copied;
            *copied = copying.max(*copied);
        }
        Ok(())
    }

    /// Waits for the copies of this thread, which is putting the arena to sleep or waking it and
    /// has queued all. Not if a stream has begun to capture a graph meanwhile.
    fn wait_for_own(&self, stream: &OwnedStream) -> Result<(), DriverError> {
        self.lock().sleep.is_queueing = false;
        if self.is_any_capturing()? {
            return Err(captures("cuStreamSynchronize"));
        }
        stream.live().synchronize()?;
        let mut books = self.lock();
        books.sleep.copied = books.sleep.copying;
        Ok(())
    }

    /// Waits for copies that could not be waited for when they were made; returns `true` if none is
    /// in progress. Not for those of a thread that queues more: it waits for them itself, before it
    /// is done. A thread that has a place without memory never meets such a thread.
    ///
    /// # Errors
    /// The driver's: they may still be in progress.
    pub(crate) fn end_copies<'a>(
        &'a self,
        books: Locked<'a>,
    ) -> (Locked<'a>, Result<bool, DriverError>) {
        let idle = books.sleep.stream.clone().filter(|_| !books.sleep.is_queueing);
        let Some(stream) = idle else {
            return (books, Ok(false));
        };
        drop(books);
        let waited = self.wait_for_copies(&stream);
        let books = self.lock();
        let is_over = !books.sleep.may_be_copied();
        (books, waited.map(|()| is_over))
    }

    /// The stream of the copies, of which some are under way from here on.
    fn copy_stream(&self) -> Result<Arc<OwnedStream>, DriverError> {
        let known = self.lock().sleep.stream.clone();
        let stream = match known {
            Some(stream) => stream,
            None => Arc::new(OwnedStream::new(&self.driver)?),
        };
        let mut books = self.lock();
        books.sleep.stream = Some(Arc::clone(&stream));
        books.sleep.copying += 1;
        books.sleep.is_queueing = true;
        Ok(stream)
    }

    /// Releases the driver's resources of sleep at the end of the arena. Does not wait, so that
    /// stores which a copy may still use are leaked.
    pub(crate) fn end_sleep(&self) {
        let mut books = self.lock();
        let stream = books.sleep.stream.take();
        let (saved, kept) = (books.sleep.saved.take(), books.sleep.between.take());
        for saved in [saved, kept].into_iter().flatten() {
            books.sleep.left.extend(saved.stores);
            books.sleep.booked.extend(saved.booking);
        }
        let is_copying = books.sleep.may_be_copied();
        drop(books);
        if !is_copying {
            self.give_stores_back();
        }
        let mut books = self.lock();
        let left = (books.sleep.budget.take(), std::mem::take(&mut books.sleep.booked));
        drop(books);
        let _ = theirs(|| drop(left)); // nothing unwinds out of a drop
        drop(stream);
    }
}

#[cfg(all(test, not(lowtide_loom)))]
mod tests {
    use super::*;

    fn part(range: std::ops::Range<usize>, contents: Contents) -> OutgoingRun {
        let (at, size) = (DeviceAddress::new(0), ByteSize::ZERO);
        OutgoingRun { region: Region::Dynamic, run: Run::of(&range), at, size, contents }
    }

    #[test]
    fn what_is_kept_lies_in_stores_of_a_gibibyte_at_most() {
        let parts = [
            part(0..500, Contents::Keep),
            part(500..510, Contents::Discard),
            part(600..1200, Contents::Keep),
            part(2000..2001, Contents::Keep),
        ];
        let (copies, sizes) = lay_out(&parts, ByteSize::mib(2));
        assert_eq!(sizes, [ByteSize::gib(1), ByteSize::gib(1), ByteSize::mib(2 * 77)]);
        let seen: Vec<_> = copies
            .iter()
            .map(|copy| (copy.run.range(), copy.store, copy.offset.get() >> 21))
            .collect();
        assert_eq!(
            seen,
            [
                (0..500, 0, 0),
                (600..612, 0, 500),
                (612..1124, 1, 0),
                (1124..1200, 2, 0),
                (2000..2001, 2, 76),
            ]
        );
        let (copies, sizes) = lay_out(&parts[3..], ByteSize::kib(4));
        assert_eq!((copies.len(), sizes), (1, vec![HOST_GRANULARITY]));
        assert_eq!(lay_out(&parts[1..2], ByteSize::mib(2)), (Vec::new(), Vec::new()));
    }
}
