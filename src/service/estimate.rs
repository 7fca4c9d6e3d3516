//! Estimates the memory of a request from its head: the trait, and ready-made estimators.
//!
//! An estimate may be wrong: the layer reserves what it has measured of earlier requests of the
//! same route and of a similar estimate. So estimate by the properties that determine the size of a
//! request. No estimator here reads a body.
//!
//! Invariant: an estimate never wraps: a value too large for 64 bits is [`ByteSize::MAX`].

use http::header::{CONTENT_LENGTH, TRANSFER_ENCODING};
use http::request::Parts;
use http::{HeaderName, HeaderValue, Method, Version};
use http_body::{Body, SizeHint};

use crate::bytes::ByteSize;
use lowtide_admission::{Cost, Priority};

/// The assumed memory of a request whose body has no declared length.
pub(super) const UNDECLARED: ByteSize = ByteSize::mib(2);

/// Estimates the memory of a request from its head. Implemented for a [`Cost`], or a [`Cost`] and a
/// [`Priority`], which is the same for every request, and for closures that return either.
/// Ready-made estimators are [`ContentLength`] and [`from_header`].
///
/// ```
/// use http::request::Parts;
/// use lowtide::ByteSize;
/// use lowtide::admission::{Admission, Cost, Priority};
/// use lowtide::service::MemoryLayer;
///
/// let flat = Cost::host(ByteSize::mib(1)).and_device(ByteSize::mib(64));
/// let by_path = |head: &Parts| match head.uri.path() {
///     "/report" => (Cost::host(ByteSize::mib(64)), Priority::Low), // rejected first
///     _ => (Cost::host(ByteSize::mib(1)), Priority::Normal),
/// };
/// let admission = Admission::with_limit(ByteSize::gib(1));
/// let _layer = MemoryLayer::new(admission.clone(), flat);
/// let _layer = MemoryLayer::new(admission, by_path);
/// ```
pub trait Estimate: Send + Sync + 'static {
    /// Returns the bytes that the request will need at its peak, and its priority under pressure.
    fn estimate(&self, head: &Parts) -> (Cost, Priority);

    /// The same for a body whose length was found before; `None` if there is a body of unknown
    /// length.
    #[doc(hidden)]
    #[inline]
    fn estimate_with_length(&self, head: &Parts, length: Option<ByteSize>) -> (Cost, Priority) {
        let _ = length;
        self.estimate(head)
    }
}

impl<F, R> Estimate for F
where
    F: Fn(&Parts) -> R + Send + Sync + 'static,
    R: Into<(Cost, Priority)>,
{
    fn estimate(&self, head: &Parts) -> (Cost, Priority) {
        self(head).into()
    }
}

impl Estimate for Cost {
    fn estimate(&self, _: &Parts) -> (Cost, Priority) {
        (*self, Priority::Normal)
    }
}

impl Estimate for (Cost, Priority) {
    fn estimate(&self, _: &Parts) -> (Cost, Priority) {
        *self
    }
}

/// Estimates by the length of the body: `max(least, length x factor)`, or a fixed amount if the
/// length is not declared.
///
/// The client declares the length, and its reservation lasts until the request ends, even if no
/// byte ever arrives. Therefore add a layer around the memory layer that rejects lengths above
/// those that the handler reads, and set a minimum rate
/// ([`MemoryLayer::with_min_data_rate`](super::MemoryLayer::with_min_data_rate)).
///
/// A request without a body has the length 0: an HTTP/1 request that declares neither a length nor
/// an encoding, and GET, HEAD, OPTIONS and TRACE of any version without either. An invalid length
/// counts as not declared. If an outer layer has replaced the body, for example to decompress it,
/// the layer estimates by the length that the new body reports, or as not declared if it has none.
///
/// ```
/// use lowtide::ByteSize;
/// use lowtide::service::{ContentLength, Estimate};
///
/// // Three bytes for each byte of the body; 4 MiB for a chunked body.
/// let estimate = ContentLength::new(ByteSize::mib(4)).factor(3.0).least(ByteSize::kib(64));
/// let of = |request: http::request::Builder| {
///     estimate.estimate(&request.body(()).unwrap().into_parts().0).0.host
/// };
/// let post = || http::Request::post("/");
/// assert_eq!(of(post().header("content-length", 1 << 20)), ByteSize::mib(3));
/// assert_eq!(of(post().header("transfer-encoding", "chunked")), ByteSize::mib(4));
/// assert_eq!(of(http::Request::get("/")), ByteSize::kib(64));
/// ```
#[derive(Clone, Copy, Debug)]
#[must_use]
pub struct ContentLength {
    unknown: ByteSize,
    factor: f64,
    least: ByteSize,
    priority: Priority,
}

impl Default for ContentLength {
    /// Twice the length of the body, at least 16 KiB; 2 MiB if no length is declared.
    fn default() -> Self {
        Self::new(UNDECLARED).factor(2.0).least(ByteSize::kib(16))
    }
}

impl ContentLength {
    /// Creates an estimator by the body's length, with this amount if it is not declared.
    pub const fn new(unknown: ByteSize) -> Self {
        Self { unknown, factor: 1.0, least: ByteSize::ZERO, priority: Priority::Normal }
    }

    /// Sets the bytes needed per byte of the body, including that byte itself.
    ///
    /// # Panics
    /// Panics if the factor is negative or not a number.
    pub fn factor(mut self, factor: f64) -> Self {
        assert!(factor >= 0.0, "factor {factor}: expected 0 or more");
        self.factor = factor;
        self
    }

    /// Sets the minimum estimate, which is also the estimate of a request without a body.
    pub const fn least(mut self, least: ByteSize) -> Self {
        self.least = least;
        self
    }

    /// Sets the priority.
    pub const fn priority(mut self, priority: Priority) -> Self {
        self.priority = priority;
        self
    }
}

impl Estimate for ContentLength {
    fn estimate(&self, head: &Parts) -> (Cost, Priority) {
        self.estimate_with_length(head, body_length(head))
    }

    #[inline]
    fn estimate_with_length(&self, _: &Parts, length: Option<ByteSize>) -> (Cost, Priority) {
        let bytes = match length {
            Some(length) => scaled(length, self.factor),
            None => self.unknown,
        };
        (Cost::host(bytes.max(self.least)), self.priority)
    }
}

/// The length of a body as [`note_length`] found it.
#[derive(Clone, Copy)]
struct BodyLength(Option<ByteSize>);

/// Records the length of the body where its head says something else, because a layer outside has
/// replaced the body: one that decompresses it removes the length from the head, and one with a
/// timeout tells none. Returns the length, as [`body_length`]. Only a layer outside, behind which the
/// request `is_inner`, has recorded another one.
pub(super) fn note_length(head: &mut Parts, body: &impl Body, is_inner: bool) -> Option<ByteSize> {
    let (declared, is_of_header) = head_length(head);
    let hint = if body.is_end_stream() { SizeHint::with_exact(0) } else { body.size_hint() };
    let length = match hint.exact().map(ByteSize::new) {
        _ if is_of_header => declared.map(|length| length.max(ByteSize::new(hint.lower()))),
        Some(exact) => Some(exact),
        // A body that tells nothing of itself is none if the method has none.
        None => declared.filter(|_| is_bare(&head.method) && hint.lower() == 0),
    };
    if length != declared {
        head.extensions.insert(BodyLength(length));
    } else if is_inner {
        head.extensions.remove::<BodyLength>();
    }
    length
}

/// Returns the length of the body; `None` if there is a body of unknown length.
pub(super) fn body_length(head: &Parts) -> Option<ByteSize> {
    match head.extensions.get() {
        Some(BodyLength(length)) => *length,
        None => head_length(head).0,
    }
}

fn is_bare(method: &Method) -> bool {
    matches!(*method, Method::GET | Method::HEAD | Method::OPTIONS | Method::TRACE)
}

/// Returns the length of the body that the head declares, and `true` if a header does.
fn head_length(head: &Parts) -> (Option<ByteSize>, bool) {
    if head.headers.contains_key(TRANSFER_ENCODING) {
        return (None, false);
    }
    if let Some(length) = head.headers.get(CONTENT_LENGTH) {
        let length = number(length.as_bytes());
        return (length, length.is_some());
    }
    let is_empty = head.version <= Version::HTTP_11 || is_bare(&head.method);
    (is_empty.then_some(ByteSize::ZERO), false)
}

/// Parses digits; a number above 64 bits becomes the largest 64-bit number.
fn number(text: &[u8]) -> Option<ByteSize> {
    let digits = !text.is_empty() && text.iter().all(u8::is_ascii_digit);
    let add = |sum: u64, digit: &u8| sum.checked_mul(10)?.checked_add(u64::from(digit - b'0'));
    digits.then(|| text.iter().try_fold(0, add).map_or(ByteSize::MAX, ByteSize::new))
}

/// Exact if the factor is a whole number, so that no estimate is rounded.
fn scaled(length: ByteSize, factor: f64) -> ByteSize {
    if length == ByteSize::MAX && factor >= 1.0 { length } else { length.scaled(factor) }
}

/// Returns an estimator that reads the estimate from a header, in bytes or with a unit such as
/// `512KiB`, and takes this amount for requests without it. The header must be set by a gateway or
/// by trusted clients, because it determines the reservation.
///
/// If there are several such headers, the largest value counts. An invalid value is ignored.
///
/// ```
/// use http::HeaderName;
/// use http::request::Parts;
/// use lowtide::ByteSize;
/// use lowtide::admission::Priority;
/// use lowtide::service::{Estimate, from_header};
///
/// let name = HeaderName::from_static("x-memory-needed");
/// let by_header = from_header(name, ByteSize::mib(1));
/// let low = move |head: &Parts| (by_header(head), Priority::Low); // rejected first
/// let of = |request: http::request::Builder| {
///     low.estimate(&request.body(()).unwrap().into_parts().0).0.host
/// };
/// assert_eq!(of(http::Request::get("/").header("x-memory-needed", "24MiB")), ByteSize::mib(24));
/// assert_eq!(of(http::Request::get("/")), ByteSize::mib(1));
/// ```
pub fn from_header(
    name: HeaderName,
    unknown: ByteSize,
) -> impl Fn(&Parts) -> Cost + Clone + Send + Sync + 'static {
    move |head| {
        let amount = |value: &HeaderValue| {
            number(value.as_bytes()).or_else(|| value.to_str().ok()?.parse().ok())
        };
        let said = head.headers.get_all(&name).iter().filter_map(amount).max();
        Cost::host(said.unwrap_or(unknown))
    }
}
