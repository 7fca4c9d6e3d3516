//! A request's permit as several hold it: the response body, and handlers that want more.
//!
//! Invariant: what was booked is given back when the last handle is gone.

use std::sync::Arc;

use crate::bytes::ByteSize;
use crate::control::{Permit, Rejected};
use crate::sync::{Mutex, lock};

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
pub struct SharedPermit(Arc<Mutex<Permit>>);

impl SharedPermit {
    pub(super) fn new(permit: Permit) -> Self {
        Self(Arc::new(Mutex::new(permit)))
    }

    /// Books more.
    ///
    /// # Errors
    /// Where it does not fit; what was booked before stays booked.
    pub fn grow(&self, bytes: ByteSize) -> Result<(), Rejected> {
        lock(&self.0).grow(bytes)
    }

    /// Gives back a part of what was booked.
    pub fn shrink(&self, bytes: ByteSize) {
        lock(&self.0).shrink(bytes);
    }
}
