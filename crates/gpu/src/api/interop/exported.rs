//! A buffer whose address is known to foreign code: a C library, ONNX Runtime, a captured graph.
//!
//! The export owns the buffer, so safe code cannot free, resize or move it meanwhile; forgetting
//! the export leaks both. While an export exists the arena does not sleep. When the export ends,
//! the uses by foreign streams are unknown, so all work of the device is waited for.
//!
//! Invariant: `exports of the arena = Exported values that are not dropped`.

use std::fmt;
use std::sync::Arc;

use bytemuck::Pod;
use thiserror::Error;

use crate::api::buffer::Buffer;
use crate::api::compact::BlockPin;
use crate::api::lease::Lease;
use crate::driver::DeviceAddress;
use crate::exec::inner::ArenaInner;
use crate::state::streams::StreamKey;
use crate::types::error::DeviceError;
use lowtide_core::bytes::ByteSize;

/// A buffer exported to code that keeps its address; from [`Buffer::export`].
///
/// Dropping it ends the export and frees the buffer; [`Exported::end`] returns the buffer. Neither
/// waits or calls the driver.
#[must_use = "dropping it ends the export and frees the buffer"]
pub struct Exported<T: Pod> {
    // Dropped in this order: the block is freed last.
    loan: Loan,
    pin: BlockPin,
    buffer: Buffer<T>,
    at: DeviceAddress,
}

/// A failed export, with the buffer.
#[derive(Debug, Error)]
#[error("{error}")]
#[expect(clippy::exhaustive_structs, reason = "a buffer and why")]
pub struct ExportError<T: Pod> {
    /// The buffer, unchanged.
    pub buffer: Buffer<T>,
    /// The reason.
    pub error: DeviceError,
}

impl<T: Pod> From<ExportError<T>> for DeviceError {
    /// Returns the error; the buffer is freed.
    fn from(refused: ExportError<T>) -> Self {
        refused.error
    }
}

impl<T: Pod> Buffer<T> {
    /// Exports the buffer to code that keeps its address for longer than a lease: a C library, a
    /// session of ONNX Runtime, a graph that captured it. No lease is needed during the export.
    ///
    /// Until the export ends the block stays live and at its address, also during compactions, and
    /// the arena does not sleep ([`DeviceError::Exported`]). A sleeping arena is woken first.
    /// Afterwards the memory counts as used by any stream of the context, including those unknown
    /// to the arena: it is reused, moved, copied or released only after the host saw all of that
    /// work complete. So a buffer that was ever exported is freed like one without a lane, and its
    /// next user may wait for the whole device.
    ///
    /// The program orders the foreign work after earlier work of the buffer's stream, and the
    /// stream's next work after it, as without an arena.
    ///
    /// ```
    /// # use std::sync::Arc;
    /// # use lowtide_gpu::clock::SystemClock;
    /// use lowtide_gpu::{ArenaConfig, DeviceArena, DeviceError, HostDriver};
    /// use lowtide_gpu::{Region, SleepOptions};
    /// # let clock = Arc::new(SystemClock::new());
    /// # let arena = DeviceArena::open(Arc::new(HostDriver::new()), clock, ArenaConfig::new("a"))?;
    ///
    /// let weights = arena.alloc_from(&[1.0_f32; 64], Region::Stable)?;
    /// let exported = weights.export()?;
    /// let (at, bytes) = (exported.address(), exported.bytes()); // for the foreign code
    /// assert_eq!((at.get() % 256, bytes.get()), (0, 256));
    /// assert!(matches!(arena.sleep(SleepOptions::default()), Err(DeviceError::Exported { .. })));
    /// let weights = exported.end(); // the foreign code no longer uses the address
    /// arena.sleep(SleepOptions::default())?;
    /// # drop(weights);
    /// # Ok::<(), DeviceError>(())
    /// ```
    ///
    /// An exported buffer cannot be freed or resized:
    /// ```compile_fail,E0382
    /// # use lowtide_gpu::{Buffer, DeviceError};
    /// fn free_during_export(buffer: Buffer<f32>) -> Result<(), DeviceError> {
    ///     let exported = buffer.export()?;
    ///     drop(buffer);
    ///     Ok(())
    /// }
    /// ```
    ///
    /// # Errors
    /// With the buffer: [`DeviceError::ZeroSize`] if it has no bytes,
    /// [`DeviceError::ContentsLost`], [`DeviceError::Forked`]; otherwise the errors of
    /// [`DeviceArena::enter`](crate::DeviceArena::enter).
    pub fn export(mut self) -> Result<Exported<T>, ExportError<T>> {
        match self.begin_loan() {
            Ok((loan, pin, at)) => Ok(Exported { loan, pin, buffer: self, at }),
            Err(error) => Err(ExportError { buffer: self, error }),
        }
    }

    fn begin_loan(&mut self) -> Result<(Loan, BlockPin, DeviceAddress), DeviceError> {
        // While the lease is held the arena is awake and no block moves. When it is dropped, the
        // export is recorded.
        let lease = self.enter()?;
        let at = self.address(&lease)?.ok_or(DeviceError::ZeroSize)?;
        let pin = self.pin()?;
        let inner = Arc::clone(self.inner());
        self.note_foreign();
        let bytes = self.block_bytes();
        inner.run_now(|state| {
            state.outstanding.exported.count += 1;
            state.outstanding.exported.bytes += bytes;
        });
        Ok((Loan { inner, bytes }, pin, at))
    }
}

impl<T: Pod> Exported<T> {
    /// Returns the buffer's address, valid until this is dropped or ended.
    #[must_use]
    pub const fn address(&self) -> DeviceAddress {
        self.at
    }

    /// Returns the bytes of the elements, before rounding.
    #[must_use]
    pub const fn bytes(&self) -> ByteSize {
        self.buffer.bytes()
    }

    /// Returns the number of elements.
    #[must_use]
    pub const fn len(&self) -> usize {
        self.buffer.len()
    }

    /// Returns `false`: a buffer without bytes cannot be exported.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.buffer.is_empty()
    }

    /// Returns the buffer for reading under a lease. The caller ensures that foreign code does not
    /// write meanwhile.
    #[must_use]
    pub const fn buffer(&self) -> &Buffer<T> {
        &self.buffer
    }

    /// Ends the export and returns the buffer. Foreign code must not start further work with the
    /// address; work already started may continue.
    pub fn end(self) -> Buffer<T> {
        let Self { loan, pin, buffer, .. } = self;
        drop(loan);
        drop(pin);
        buffer
    }
}

impl<T: Pod> fmt::Debug for Exported<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Exported").field("at", &self.at).field("buffer", &self.buffer).finish()
    }
}

/// A count that keeps an arena from sleeping.
struct Loan {
    inner: Arc<ArenaInner>,
    bytes: u64,
}

impl Drop for Loan {
    /// Ends the export: only updates bookkeeping under the arena's lock. Does nothing in a forked
    /// child.
    fn drop(&mut self) {
        let _ = self.inner.run_here(|state| {
            state.outstanding.exported.count -= 1;
            state.outstanding.exported.bytes -= self.bytes;
            state.sleep.note_unused(self.inner.clock.now());
            if state.capabilities.asynchronous {
                state.sleep.note_used(StreamKey::CONTEXT);
            }
        });
    }
}

impl Lease {
    /// Checks that a lease belongs to this arena.
    ///
    /// # Errors
    /// `ForeignLease`, `Forked`.
    pub(crate) fn check_of(&self, inner: &Arc<ArenaInner>) -> Result<(), DeviceError> {
        inner.check_here()?;
        if Arc::ptr_eq(inner, &self.arena) {
            return Ok(());
        }
        Err(DeviceError::ForeignLease {
            buffer_of: inner.name.clone(),
            lease_of: self.arena.name.clone(),
        })
    }
}
