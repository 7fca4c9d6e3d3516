//! A request's permit as several hold it: the response body, and handlers that want more.
//!
//! Invariant: what was booked is given back when the last handle is gone; `peak` never falls.

use std::sync::Arc;

use crate::bytes::ByteSize;
use crate::control::{Permit, Rejected};
use crate::sync::{Mutex, lock};

use super::exempt::ExemptShare;
use super::learned::Lesson;

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
///     let booked = permit.map(|permit| permit.grow(ByteSize::of(piece.len())));
///     booked.transpose().map(drop).map_err(|rejected| rejection(&rejected))
/// }
/// # assert!(take(&Request::new(()), b"ebb").is_ok());
/// ```
#[derive(Clone, Debug)]
pub struct SharedPermit(Arc<Mutex<Held>>);

#[derive(Debug)]
struct Held {
    permit: Permit,
    /// The most that the request is known to have held, or to have wanted; what was only booked
    /// for it is not known to be.
    peak: Option<ByteSize>,
    lesson: Option<Lesson>,
    /// Of a request that is exempt by its path.
    share: Option<ExemptShare>,
}

impl SharedPermit {
    pub(super) fn new(permit: Permit, lesson: Option<Lesson>, share: Option<ExemptShare>) -> Self {
        Self(Arc::new(Mutex::new(Held { permit, peak: None, lesson, share })))
    }

    /// Books more.
    ///
    /// # Errors
    /// Where it does not fit; what was booked before stays booked.
    pub fn grow(&self, bytes: ByteSize) -> Result<(), Rejected> {
        let mut held = lock(&self.0);
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
        let mut held = lock(&self.0);
        held.peak = held.peak.max(Some(bytes));
        let more = bytes.saturating_sub(held.permit.cost().host);
        if more.is_zero() { Ok(()) } else { held.grow(more) }
    }

    /// Gives back a part of what was booked.
    pub fn shrink(&self, bytes: ByteSize) {
        lock(&self.0).permit.shrink(bytes);
    }

    /// What is booked of the host's memory.
    #[must_use]
    pub fn booked(&self) -> ByteSize {
        lock(&self.0).permit.cost().host
    }

    /// The most that the request said to hold, or booked by growing; `None` where it did neither.
    #[must_use]
    pub fn peak(&self) -> Option<ByteSize> {
        lock(&self.0).peak
    }
}

impl Held {
    fn grow(&mut self, bytes: ByteSize) -> Result<(), Rejected> {
        self.permit.grow(bytes)?;
        if let Some(share) = &mut self.share {
            share.grow(bytes);
        }
        Ok(())
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        if let Some((lesson, peak)) = self.lesson.take().zip(self.peak) {
            lesson.learn(peak);
        }
    }
}
