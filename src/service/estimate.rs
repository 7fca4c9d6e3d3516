//! What a request will need, told from its head: the trait, and estimators that are ready.
//!
//! An estimate may be wrong: the ledger multiplies all of them by what they were found to need.
//! What costs is to be wrong unevenly, since then small requests pay for large ones; so estimate
//! by what the size of a request follows from. Nothing here reads a body.
//!
//! Invariant: an estimate never wraps: what is too large for 64 bits is [`ByteSize::MAX`].

use http::header::{CONTENT_LENGTH, TRANSFER_ENCODING};
use http::request::Parts;
use http::{HeaderName, Method, Version};

use crate::bytes::ByteSize;
use crate::control::{Cost, Priority};

use super::learned::Lesson;

/// What a request will need, told from its head: a closure that gives its [`Cost`], or its cost and
/// [`Priority`], is one. Ready-made ones are [`ContentLength`], [`FromHeader`], [`Constant`] and
/// [`Learned`](super::Learned).
///
/// ```
/// use http::request::Parts;
/// use lowtide::ByteSize;
/// use lowtide::control::{Admission, Cost, Priority};
/// use lowtide::service::MemoryLayer;
///
/// let flat = |_: &Parts| Cost::host(ByteSize::mib(1));
/// let by_path = |head: &Parts| match head.uri.path() {
///     "/report" => (Cost::host(ByteSize::mib(64)), Priority::Low), // shed first
///     _ => (Cost::host(ByteSize::mib(1)), Priority::Normal),
/// };
/// let admission = Admission::with_limit(ByteSize::gib(1));
/// let _layer = MemoryLayer::new(admission.clone(), flat);
/// let _layer = MemoryLayer::new(admission, by_path);
/// ```
pub trait Estimate: Send + Sync + 'static {
    /// The bytes it will need at its peak, and how it fares under pressure.
    fn estimate(&self, head: &Parts) -> (Cost, Priority);

    /// As [`Estimate::estimate`], and who is to be told what the request held in the end: nobody,
    /// unless an estimator that learns says so. This is what the layer calls; an estimator around
    /// another one passes it on.
    fn estimate_to_learn(&self, head: &Parts) -> Estimated {
        let (cost, priority) = self.estimate(head);
        Estimated { cost, priority, lesson: None }
    }
}

/// An estimate, and where what really happened goes.
#[derive(Clone, Debug)]
pub struct Estimated {
    /// The bytes that the request will need at its peak.
    pub cost: Cost,
    /// How it fares under pressure.
    pub priority: Priority,
    /// What learns from it.
    pub lesson: Option<Lesson>,
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

/// The same for every request.
///
/// ```
/// use lowtide::ByteSize;
/// use lowtide::control::{Cost, Priority};
/// use lowtide::service::{Constant, Estimate};
///
/// let cost = Cost::host(ByteSize::mib(1)).and_device(ByteSize::mib(64));
/// let (head, ()) = http::Request::new(()).into_parts();
/// let estimate = Constant::new(cost).priority(Priority::Low);
/// assert_eq!(estimate.estimate(&head), (cost, Priority::Low));
/// ```
#[derive(Clone, Copy, Debug)]
pub struct Constant {
    cost: Cost,
    priority: Priority,
}

impl Constant {
    /// This cost, at normal priority.
    #[must_use]
    pub const fn new(cost: Cost) -> Self {
        Self { cost, priority: Priority::Normal }
    }

    /// At this priority.
    #[must_use]
    pub const fn priority(mut self, priority: Priority) -> Self {
        self.priority = priority;
        self
    }
}

impl Estimate for Constant {
    fn estimate(&self, _: &Parts) -> (Cost, Priority) {
        (self.cost, self.priority)
    }
}

/// By the length of the body: `max(least, length x factor)`, and what is given for a body whose
/// length is not announced.
///
/// Who asks announces the length, and books it until the request ends though no byte may ever come:
/// put a layer that refuses lengths beyond what the handler reads, and a timeout of bodies, around
/// the memory layer.
///
/// A request without a body has the length 0: one of HTTP/1 that announces neither a length nor an
/// encoding, and GET, HEAD, OPTIONS and TRACE of any version without either. A length that is
/// no number counts as not announced.
///
/// ```
/// use lowtide::ByteSize;
/// use lowtide::service::{ContentLength, Estimate};
///
/// // The body, and twice as much for what is made of it; 4 MiB where it comes in pieces.
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
pub struct ContentLength {
    unknown: ByteSize,
    factor: f64,
    least: ByteSize,
    priority: Priority,
}

impl ContentLength {
    /// The body's length, and this much where it is not announced.
    #[must_use]
    pub const fn new(unknown: ByteSize) -> Self {
        Self { unknown, factor: 1.0, least: ByteSize::ZERO, priority: Priority::Normal }
    }

    /// Multiplied by this: what a byte of the body comes to, the byte itself included.
    ///
    /// # Panics
    /// Where it is negative or no number.
    #[must_use]
    pub fn factor(mut self, factor: f64) -> Self {
        assert!(factor >= 0.0, "the factor {factor} of a length: expected 0 or more");
        self.factor = factor;
        self
    }

    /// Never less than this, which is what a request without a body costs.
    #[must_use]
    pub const fn least(mut self, least: ByteSize) -> Self {
        self.least = least;
        self
    }

    /// At this priority.
    #[must_use]
    pub const fn priority(mut self, priority: Priority) -> Self {
        self.priority = priority;
        self
    }
}

impl Estimate for ContentLength {
    fn estimate(&self, head: &Parts) -> (Cost, Priority) {
        let bytes = match body_length(head) {
            Some(length) => scaled(length, self.factor),
            None => self.unknown,
        };
        (Cost::host(bytes.max(self.least)), self.priority)
    }
}

/// The length of the body as the head announces it; `None` where it has one of unknown length.
pub(super) fn body_length(head: &Parts) -> Option<ByteSize> {
    if head.headers.contains_key(TRANSFER_ENCODING) {
        return None;
    }
    if let Some(length) = head.headers.get(CONTENT_LENGTH) {
        return number(length.as_bytes());
    }
    let bare = [Method::GET, Method::HEAD, Method::OPTIONS, Method::TRACE].contains(&head.method);
    (bare || head.version <= Version::HTTP_11).then_some(ByteSize::ZERO)
}

/// Digits as an amount; more than 64 bits hold is the most that they hold.
fn number(text: &[u8]) -> Option<ByteSize> {
    let digits = !text.is_empty() && text.iter().all(u8::is_ascii_digit);
    let add = |sum: u64, digit: &u8| sum.checked_mul(10)?.checked_add(u64::from(digit - b'0'));
    digits.then(|| text.iter().try_fold(0, add).map_or(ByteSize::MAX, ByteSize::new))
}

/// Exact where the factor is a whole number, so that no estimate is off by rounding.
fn scaled(length: ByteSize, factor: f64) -> ByteSize {
    if length == ByteSize::MAX && factor >= 1.0 { length } else { length.scaled(factor) }
}

/// By a header that says how much is needed, in bytes or as `512KiB`: set by a gateway or by
/// clients that are trusted, since whoever sets it decides what is booked.
///
/// Of several such headers the largest counts. One that says no amount counts as none.
///
/// ```
/// use http::HeaderName;
/// use lowtide::ByteSize;
/// use lowtide::service::{Estimate, FromHeader};
///
/// let name = HeaderName::from_static("x-memory-needed");
/// let estimate = FromHeader::new(name, ByteSize::mib(1)).least(ByteSize::kib(16));
/// let of = |request: http::request::Builder| {
///     estimate.estimate(&request.body(()).unwrap().into_parts().0).0.host
/// };
/// assert_eq!(of(http::Request::get("/").header("x-memory-needed", "24MiB")), ByteSize::mib(24));
/// assert_eq!(of(http::Request::get("/").header("x-memory-needed", "0")), ByteSize::kib(16));
/// assert_eq!(of(http::Request::get("/")), ByteSize::mib(1));
/// ```
#[derive(Clone, Debug)]
pub struct FromHeader {
    name: HeaderName,
    unknown: ByteSize,
    least: ByteSize,
    priority: Priority,
}

impl FromHeader {
    /// What this header says, and this much without it.
    #[must_use]
    pub const fn new(name: HeaderName, unknown: ByteSize) -> Self {
        Self { name, unknown, least: ByteSize::ZERO, priority: Priority::Normal }
    }

    /// Never less than this.
    #[must_use]
    pub const fn least(mut self, least: ByteSize) -> Self {
        self.least = least;
        self
    }

    /// At this priority.
    #[must_use]
    pub const fn priority(mut self, priority: Priority) -> Self {
        self.priority = priority;
        self
    }
}

impl Estimate for FromHeader {
    fn estimate(&self, head: &Parts) -> (Cost, Priority) {
        let amount = |value: &http::HeaderValue| {
            number(value.as_bytes()).or_else(|| value.to_str().ok()?.parse().ok())
        };
        let said = head.headers.get_all(&self.name).iter().filter_map(amount).max();
        (Cost::host(said.unwrap_or(self.unknown).max(self.least)), self.priority)
    }
}
