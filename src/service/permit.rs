//! A request's permit, which the response body and handlers share.
//!
//! If the admission belongs to a running `Memory`, allocations and frees of the request on the
//! threads that poll it are measured (`heap::meter`), and the permit grows accordingly between
//! polls. That never fails, since the memory is already in use; it counts against the allowance, so
//! other requests may be rejected.
//!
//! Not measured: allocations of spawned tasks and C code, and a body without a declared length,
//! whose frames the connection allocates and the handler frees. A declared body counts as held once
//! the request has allocated as much.
//!
//! Invariants: the reservation is released when the last handle is dropped; `peak` never falls;
//! measured bytes are never negative, so that no request adds room for another.

use std::sync::Arc;

use crate::bytes::ByteSize;
use crate::sync::{Mutex, MutexGuard, lock};
use lowtide_admission::{Permit, Rejected};

use lowtide_heap::meter::{self, Moved};

use super::exempt::ExemptShare;
use super::learned::{Lesson, Trial};

/// The permit of a request, found in the request's extensions. A handler uses it to reserve more
/// while a body of unknown length arrives.
///
/// ```
/// use http::{Request, Response};
/// use lowtide::ByteSize;
/// use lowtide::service::{SharedPermit, rejection};
///
/// /// Called by a handler for each piece of the body.
/// fn take<B>(request: &Request<B>, piece: &[u8]) -> Result<(), Response<String>> {
///     let permit = request.extensions().get::<SharedPermit>(); // none without the layer
///     let reserved = permit.map(|permit| permit.grow(ByteSize::of(piece.len())));
///     reserved.transpose().map(drop).map_err(|rejected| rejection(&rejected))
/// }
/// # assert!(take(&Request::new(()), b"ebb").is_ok());
/// ```
#[derive(Clone, Debug)]
pub struct SharedPermit(Arc<PermitInner>);

#[derive(Debug)]
struct PermitInner {
    /// `true` if its allocations are measured.
    is_measured: bool,
    held: Mutex<Held>,
}

/// The layer's data of an admitted request.
#[derive(Debug, Default)]
pub(super) struct Terms {
    /// The recipient of the measured memory.
    pub(super) lesson: Option<Lesson>,
    /// The share of a request that is exempt by its path.
    pub(super) share: Option<ExemptShare>,
    /// The slot of a large request whose route is not known yet.
    pub(super) slot: Option<Trial>,
    /// The declared length of its body, if it is measured.
    pub(super) measured: Option<u64>,
}

/// The measured memory of a request.
#[derive(Debug, Default)]
struct Meter {
    /// The declared length of its body.
    announced: u64,
    /// All bytes that it has allocated.
    allocated: u64,
    live: u64,
    peak: u64,
}

impl Meter {
    /// Adds the allocations of a piece of work. Returns the bytes held now.
    fn add(&mut self, moved: Moved) -> ByteSize {
        self.allocated = self.allocated.saturating_add(moved.allocated);
        // Frames of the body are allocated by the connection and freed by the handler.
        let body = self.announced.min(self.allocated);
        let high = self.live.saturating_add(moved.peak);
        self.live = self.live.saturating_add(moved.allocated).saturating_sub(moved.freed);
        self.peak = self.peak.max(high.max(self.live).saturating_add(body));
        ByteSize::new(self.live.saturating_add(body))
    }
}

#[derive(Debug)]
struct Held {
    permit: Permit,
    /// The largest amount that the request is known to have held or requested, without the initial
    /// reservation.
    peak: Option<ByteSize>,
    meter: Meter,
    /// Set if its handler answered: `true` for success.
    answer: Option<bool>,
    terms: Terms,
}

impl SharedPermit {
    pub(super) fn new(permit: Permit, terms: Terms) -> Self {
        let is_measured = terms.measured.is_some();
        let announced = terms.measured.unwrap_or(0);
        let meter = Meter { announced, ..Meter::default() };
        let held = Held { permit, peak: None, meter, answer: None, terms };
        Self(Arc::new(PermitInner { is_measured, held: Mutex::new(held) }))
    }

    /// Runs work of this request on the calling thread, and reserves the memory that it leaves
    /// allocated. For work that a handler moves to other threads; the layer does the same for the
    /// handler's future and for the response body. If requests are not measured, because the
    /// admission belongs to no `Memory` or jemalloc is not the global allocator, it only runs the
    /// work.
    ///
    /// ```
    /// # async fn parse(permit: lowtide::service::SharedPermit, text: String) {
    /// tokio::task::spawn_blocking(move || permit.measure(|| text.to_uppercase()));
    /// # }
    /// ```
    pub fn measure<R>(&self, work: impl FnOnce() -> R) -> R {
        self.measure_until_handed(work, |_| 0)
    }

    /// The same, if `handed` bytes of the result belong to another owner from now on.
    pub(super) fn measure_until_handed<R>(
        &self,
        work: impl FnOnce() -> R,
        handed: impl FnOnce(&R) -> usize,
    ) -> R {
        if !self.0.is_measured {
            return work();
        }
        let (result, moved) = meter::measure(work);
        if let Some(mut moved) = moved {
            moved.freed = moved.freed.saturating_add(handed(&result) as u64);
            if moved != Moved::default() {
                self.held().attribute(moved);
            }
        }
        result
    }

    /// Records that its handler answered.
    pub(super) fn answered(&self, success: bool) {
        let mut held = self.held();
        held.answer = Some(success);
        // A failure does not show the need of the route.
        if let Some(slot) = &mut held.terms.slot {
            slot.succeeded = success;
        }
    }

    fn held(&self) -> MutexGuard<'_, Held> {
        lock(&self.0.held)
    }

    /// Reserves more memory.
    ///
    /// # Errors
    /// [`Rejected`] if it does not fit. The earlier reservation is unchanged.
    pub fn grow(&self, bytes: ByteSize) -> Result<(), Rejected> {
        let mut held = self.held();
        // The request, whether or not it fits: the estimate did not suffice.
        let wanted = held.permit.cost().host.saturating_add(bytes);
        held.peak = held.peak.max(Some(wanted));
        held.grow(bytes)
    }

    /// Reports the total host memory that the request holds now. Reserves the difference if that
    /// exceeds the reservation, and records the largest amount reported, from which
    /// [`Learned`](super::Learned) learns. Releases nothing: see [`SharedPermit::shrink`].
    ///
    /// # Errors
    /// [`Rejected`] if it does not fit. The earlier reservation is unchanged.
    pub fn hold(&self, bytes: ByteSize) -> Result<(), Rejected> {
        let mut held = self.held();
        held.peak = held.peak.max(Some(bytes));
        let more = bytes.saturating_sub(held.permit.cost().host);
        if more.is_zero() { Ok(()) } else { held.grow(more) }
    }

    /// Releases a part of the reservation.
    pub fn shrink(&self, bytes: ByteSize) {
        self.held().permit.shrink(bytes);
    }

    /// Returns the reserved host memory.
    #[must_use]
    pub fn reserved(&self) -> ByteSize {
        self.held().permit.cost().host
    }

    /// Returns the largest amount that was reported, or reserved by growing; `None` without either.
    #[must_use]
    pub fn peak(&self) -> Option<ByteSize> {
        self.held().peak
    }
}

impl Held {
    fn grow(&mut self, bytes: ByteSize) -> Result<(), Rejected> {
        let before = self.permit.cost().host;
        self.permit.grow(bytes)?;
        if let Some(share) = &mut self.terms.share {
            // An exempt permit grows by what 64 bits hold.
            share.grow(self.permit.cost().host.saturating_sub(before));
        }
        Ok(())
    }

    fn attribute(&mut self, moved: Moved) {
        let held = self.meter.add(moved);
        let more = self.permit.raise(held);
        if let Some(share) = &mut self.terms.share {
            share.grow(more);
        }
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        let Some(lesson) = self.terms.lesson.take() else { return };
        let measured = self.terms.measured.map(|_| ByteSize::new(self.meter.peak));
        if self.answer == Some(true)
            && let Some(peak) = self.peak.max(measured)
        {
            return lesson.learn(peak);
        }
        // The request was cancelled or failed: the memory that it held is no evidence of its full
        // need.
        if let Some(peak) = self.peak {
            lesson.learn(peak);
        }
        if let Some(measured) = measured {
            lesson.learn_at_least(measured);
        }
    }
}
