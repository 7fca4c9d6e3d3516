//! A buffer whose address is out: with a C library, ONNX Runtime, a graph that was captured.
//!
//! The loan owns the buffer, so that nothing in safe code frees, resizes or moves it meanwhile; who
//! forgets the loan leaks both. While one is out the arena does not sleep. When it ends nobody
//! says what foreign streams still do with the memory, so that all of it is waited for.
//!
//! Invariant: `loans of the arena = Lent values that are not dropped`.

use std::fmt;
use std::sync::Arc;

use bytemuck::Pod;
use thiserror::Error;

use crate::bytes::ByteSize;
use crate::device::buffer::Buffer;
use crate::device::compact::BlockPin;
use crate::device::driver::DeviceAddress;
use crate::device::error::DeviceError;
use crate::device::lease::Lease;
use crate::device::planted::Planted;
use crate::device::shared::Shared;
use crate::device::streams::StreamKey;

/// A buffer that is lent to code which keeps its address; from [`Buffer::export`].
///
/// Dropping it ends the loan and frees the buffer; [`Exported::end`] gives the buffer back. Neither
/// waits, nor calls the driver.
#[must_use = "the loan ends when this is dropped, and the buffer is freed"]
pub struct Exported<T: Pod> {
    // Dropped in this order: the block is freed last.
    loan: Loan,
    pin: BlockPin,
    buffer: Buffer<T>,
    at: DeviceAddress,
}

/// A loan that was not made, with the buffer.
#[derive(Debug, Error)]
#[error("{error}")]
#[expect(clippy::exhaustive_structs, reason = "a buffer and why")]
pub struct ExportError<T: Pod> {
    /// The buffer, as it was.
    pub buffer: Buffer<T>,
    /// Why.
    pub error: DeviceError,
}

impl<T: Pod> From<ExportError<T>> for DeviceError {
    /// The error; the buffer is freed.
    fn from(refused: ExportError<T>) -> Self {
        refused.error
    }
}

impl<T: Pod> Buffer<T> {
    /// Lends the buffer to code that keeps its address for longer than a lease: a library in C, a
    /// session of ONNX Runtime, a graph that captured it. No lease is needed while it is lent.
    ///
    /// Until the loan ends the block stays live and where it is, through compactions too, and the
    /// arena neither falls asleep by itself nor is put to sleep ([`DeviceError::Exported`]). A
    /// sleeping arena is woken first. When it ends, the memory counts as used by any stream of the
    /// context, those that the arena does not know included: it is handed on, moved, copied out or
    /// given back only after the host saw all of that complete. So a buffer that was ever lent is
    /// freed as one of no lane, and what comes next may wait for the whole device.
    ///
    /// That the foreign work comes after what the buffer's own stream was given before, and the
    /// stream's next work after it, is the program's part, as without an arena.
    ///
    /// ```
    /// # use std::sync::Arc;
    /// # use lowtide::clock::SystemClock;
    /// use lowtide::device::{ArenaConfig, DeviceArena, DeviceError, HostDriver};
    /// use lowtide::device::{Region, SleepOptions};
    /// # let clock = Arc::new(SystemClock::new());
    /// # let arena = DeviceArena::open(Arc::new(HostDriver::new()), clock, ArenaConfig::new("a"))?;
    ///
    /// let weights = arena.alloc_from(&[1.0_f32; 64], Region::Stable)?;
    /// let exported = weights.export()?;
    /// let (at, bytes) = (exported.address(), exported.bytes()); // for who keeps addresses
    /// assert_eq!((at.get() % 256, bytes.get()), (0, 256));
    /// assert!(matches!(arena.sleep(SleepOptions::default()), Err(DeviceError::Exported { .. })));
    /// let weights = exported.end(); // they have let go of the address
    /// arena.sleep(SleepOptions::default())?;
    /// # drop(weights);
    /// # Ok::<(), DeviceError>(())
    /// ```
    ///
    /// A buffer that is lent is not there to be freed or resized:
    /// ```compile_fail,E0382
    /// # use lowtide::device::{Buffer, DeviceError};
    /// fn free_under_a_loan(buffer: Buffer<f32>) -> Result<(), DeviceError> {
    ///     let exported = buffer.export()?;
    ///     drop(buffer);
    ///     Ok(())
    /// }
    /// ```
    ///
    /// # Errors
    /// With the buffer: [`DeviceError::ZeroSize`] for one without bytes,
    /// [`DeviceError::ContentsLost`], [`DeviceError::Forked`]; else as
    /// [`DeviceArena::enter`](crate::device::DeviceArena::enter).
    pub fn export(mut self) -> Result<Exported<T>, ExportError<T>> {
        match self.begin_loan() {
            Ok((loan, pin, at)) => Ok(Exported { loan, pin, buffer: self, at }),
            Err(error) => Err(ExportError { buffer: self, error }),
        }
    }

    fn begin_loan(&mut self) -> Result<(Loan, BlockPin, DeviceAddress), DeviceError> {
        // While it is held the arena is awake and nothing moves: when it goes, the loan stands.
        let lease = self.enter()?;
        let at = self.address(&lease)?.ok_or(DeviceError::ZeroSize)?;
        let pin = self.pin()?;
        let shared = Arc::clone(self.shared());
        if !shared.planted(Planted::ForgottenLoan) {
            self.note_foreign();
        }
        let bytes = self.block_bytes();
        shared.books().outstanding.exported.begin(bytes);
        Ok((Loan { shared, bytes }, pin, at))
    }
}

impl<T: Pod> Exported<T> {
    /// Where the buffer is, for as long as this is not dropped or ended.
    #[must_use]
    pub const fn address(&self) -> DeviceAddress {
        self.at
    }

    /// The bytes of its elements, before rounding.
    #[must_use]
    pub const fn bytes(&self) -> ByteSize {
        self.buffer.bytes()
    }

    /// The number of elements.
    #[must_use]
    pub const fn len(&self) -> usize {
        self.buffer.len()
    }

    /// Never: a buffer without bytes has no address to lend.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.buffer.is_empty()
    }

    /// The buffer, to look at under a lease. Whoever gave the address to code that writes answers
    /// for it that it does not write meanwhile.
    #[must_use]
    pub const fn buffer(&self) -> &Buffer<T> {
        &self.buffer
    }

    /// Ends the loan: whoever had the address has let go of it, and starts no work with it any
    /// more. Work that was started may go on.
    pub fn end(self) -> Buffer<T> {
        let Self { loan, pin, buffer, .. } = self;
        drop(loan);
        drop(pin);
        buffer
    }
}

impl<T: Pod> fmt::Debug for Exported<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Lent").field("at", &self.at).field("buffer", &self.buffer).finish()
    }
}

/// Keeps an arena from sleeping.
struct Loan {
    shared: Arc<Shared>,
    bytes: u64,
}

impl Drop for Loan {
    /// Bookkeeping under the arena's lock. In a forked child does nothing.
    fn drop(&mut self) {
        if self.shared.check_here().is_err() {
            return;
        }
        let forgets = self.shared.planted(Planted::ForgottenLoan);
        let mut books = self.shared.books();
        books.outstanding.exported.end(self.bytes);
        books.sleep.note_unused(self.shared.clock.now());
        if books.asynchronous && !forgets {
            books.sleep.note_used(StreamKey::CONTEXT);
        }
    }
}

impl Lease {
    /// Refuses a lease that is not of this arena.
    ///
    /// # Errors
    /// `ForeignLease`, `Forked`.
    pub(in crate::device) fn check_of(&self, shared: &Arc<Shared>) -> Result<(), DeviceError> {
        shared.check_here()?;
        if Arc::ptr_eq(shared, &self.arena) {
            return Ok(());
        }
        Err(DeviceError::ForeignLease {
            buffer_of: shared.name.clone(),
            lease_of: self.arena.name.clone(),
        })
    }
}
