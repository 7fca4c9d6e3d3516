//! A request's permit as several hold it: the response body, and handlers that want more.
//!
//! If the admission is a running `Memory`'s, what the request allocates and frees on the threads
//! that poll it is measured (`host/meter`), and the permit grows to it between polls. That is never
//! refused, since the memory is in use, and counts against the allowance, so that others are.
//!
//! Not seen: what spawned tasks and C code allocate, and a body that arrives without an announced
//! length, whose frames the connection allocates and the handler frees. An announced one counts as
//! held once the request has allocated as much.
//!
//! Invariants: what was booked is released when the last handle is gone; `peak` never falls;
//! measured bytes are never negative, so that no request lends room to another.

use std::sync::Arc;

use crate::bytes::ByteSize;
use crate::control::{Permit, Rejected};
use crate::sync::{Mutex, MutexGuard, lock};

use crate::host::meter::{self, Moved};

use super::exempt::ExemptShare;
use super::learned::{Lesson, Slot};

/// The permit of a request, in the request's extensions: a handler takes it from there to book
/// more while a body of unknown length arrives.
///
/// ```
/// use http::{Request, Response};
/// use lowtide::ByteSize;
/// use lowtide::service::{SharedPermit, rejection};
///
/// /// What a handler does as pieces arrive.
/// fn take<B>(request: &Request<B>, piece: &[u8]) -> Result<(), Response<String>> {
///     let permit = request.extensions().get::<SharedPermit>(); // none without the layer
///     let reserved = permit.map(|permit| permit.grow(ByteSize::of(piece.len())));
///     reserved.transpose().map(drop).map_err(|rejected| rejection(&rejected))
/// }
/// # assert!(take(&Request::new(()), b"ebb").is_ok());
/// ```
#[derive(Clone, Debug)]
pub struct SharedPermit(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    /// Whether what it allocates is measured.
    is_measured: bool,
    held: Mutex<Held>,
}

/// What the layer knows of a request that it admits.
#[derive(Debug, Default)]
pub(super) struct Terms {
    /// What learns from it.
    pub(super) lesson: Option<Lesson>,
    /// Of a request that is exempt by its path.
    pub(super) share: Option<ExemptShare>,
    /// Of a large request whose route is not known yet.
    pub(super) slot: Option<Slot>,
    /// The announced length of its body, if it is measured.
    pub(super) measured: Option<u64>,
}

/// What a request is measured to hold.
#[derive(Debug, Default)]
struct Meter {
    /// The announced length of its body.
    announced: u64,
    /// Bytes that it ever allocated.
    allocated: u64,
    live: u64,
    peak: u64,
}

impl Meter {
    /// Takes in what a piece of its work moved; what the request holds now.
    fn add(&mut self, moved: Moved) -> ByteSize {
        self.allocated = self.allocated.saturating_add(moved.allocated);
        // Frames of the body are freed by the handler and were allocated by the connection.
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
    /// The most that the request is known to have held, or to have wanted; what was only booked
    /// for it is not known to be.
    peak: Option<ByteSize>,
    meter: Meter,
    /// Whether its handler answered, and with success.
    answer: Option<bool>,
    terms: Terms,
}

impl SharedPermit {
    pub(super) fn new(permit: Permit, terms: Terms) -> Self {
        let is_measured = terms.measured.is_some();
        let announced = terms.measured.unwrap_or(0);
        let meter = Meter { announced, ..Meter::default() };
        let held = Held { permit, peak: None, meter, answer: None, terms };
        Self(Arc::new(Shared { is_measured, held: Mutex::new(held) }))
    }

    /// Runs work of this request on the calling thread, and books what it leaves allocated: for
    /// what a handler gives to other threads. The layer does the same for the handler's future and
    /// for the response body. Does no more than run the work if requests are not measured: with an
    /// admission that is no `Memory`'s, or another global allocator.
    ///
    /// ```
    /// # async fn parse(permit: lowtide::service::SharedPermit, text: String) {
    /// tokio::task::spawn_blocking(move || permit.measure(|| text.to_uppercase()));
    /// # }
    /// ```
    pub fn measure<R>(&self, work: impl FnOnce() -> R) -> R {
        self.measure_until_handed(work, |_| 0)
    }

    /// The same, where `handed` of the result's bytes are somebody else's from now on.
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

    /// Its handler answered.
    pub(super) fn answered(&self, success: bool) {
        let mut held = self.held();
        held.answer = Some(success);
        // A failure says nothing of what the route needs.
        if let Some(slot) = &mut held.terms.slot {
            slot.answered = success;
        }
    }

    fn held(&self) -> MutexGuard<'_, Held> {
        lock(&self.0.held)
    }

    /// Books more.
    ///
    /// # Errors
    /// Where it does not fit; what was booked before stays booked.
    pub fn grow(&self, bytes: ByteSize) -> Result<(), Rejected> {
        let mut held = self.held();
        // Wanted, whether or not it fits: what was estimated was not enough.
        let wanted = held.permit.cost().host.saturating_add(bytes);
        held.peak = held.peak.max(Some(wanted));
        held.grow(bytes)
    }

    /// Says that the request holds this much of the host's memory now, in all: books the difference
    /// where it is more than was booked, and remembers the most that was said, from which
    /// [`Learned`](super::Learned) learns. Gives nothing back: see [`SharedPermit::shrink`].
    ///
    /// # Errors
    /// Where it does not fit; what was booked before stays booked.
    pub fn hold(&self, bytes: ByteSize) -> Result<(), Rejected> {
        let mut held = self.held();
        held.peak = held.peak.max(Some(bytes));
        let more = bytes.saturating_sub(held.permit.cost().host);
        if more.is_zero() { Ok(()) } else { held.grow(more) }
    }

    /// Gives back a part of what was booked.
    pub fn shrink(&self, bytes: ByteSize) {
        self.held().permit.shrink(bytes);
    }

    /// What is booked of the host's memory.
    #[must_use]
    pub fn reserved(&self) -> ByteSize {
        self.held().permit.cost().host
    }

    /// The most that the request said to hold, or booked by growing; `None` where it did neither.
    #[must_use]
    pub fn peak(&self) -> Option<ByteSize> {
        self.held().peak
    }
}

impl Held {
    fn grow(&mut self, bytes: ByteSize) -> Result<(), Rejected> {
        self.permit.grow(bytes)?;
        if let Some(share) = &mut self.terms.share {
            share.grow(bytes);
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
        // It broke off or failed: what it held is no evidence of what it would have.
        if let Some(peak) = self.peak {
            lesson.learn(peak);
        }
        if let Some(measured) = measured {
            lesson.learn_at_least(measured);
        }
    }
}
