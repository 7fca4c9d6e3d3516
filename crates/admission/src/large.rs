//! The running requests that hold much memory.
//!
//! The tower layer adds a request when it is measured to hold [`LARGE_MIN`] or more, so that small
//! requests cost nothing. Operators read the largest ([`Admission::largest`]). The registry keeps
//! handles that do not keep a request; requests that have ended are removed when another is added,
//! or when the registry is read.
//!
//! Invariant: at most [`LARGE_MAX`] requests are registered. Of more, the largest are.

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use lowtide_core::bytes::ByteSize;
use lowtide_core::clock::Moment;

#[cfg(doc)]
use super::admission::Admission;

/// A request that holds at least so much is registered. An estimate: well above what a small
/// request needs.
#[doc(hidden)]
pub const LARGE_MIN: ByteSize = ByteSize::kib(256);
/// The maximum number of registered requests. If each holds [`LARGE_MIN`], they hold 256 MiB.
const LARGE_MAX: usize = 1024;

/// A registered request.
#[doc(hidden)]
pub trait LargeRequest: Send + Sync {
    /// Returns the bytes that it holds; `None` if it has ended.
    fn live(&self) -> Option<ByteSize>;

    /// Describes it at a time of the control loop's clock; `None` if it has ended.
    fn describe(&self, now: Moment) -> Option<RequestMemory>;
}

/// The memory of a running request.
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
pub struct RequestMemory {
    /// The HTTP method.
    pub method: String,
    /// The route, shortened to 64 bytes: the pattern that axum matched, the gRPC method, or else
    /// the first segment of the path.
    pub route: String,
    /// The bytes that it holds.
    pub live: ByteSize,
    /// The largest number of bytes that it held.
    pub peak: ByteSize,
    /// The bytes that it reserved when it was admitted.
    pub claim: ByteSize,
    /// The time since it was admitted, to about 250 ms.
    pub age: Duration,
}

/// The registry of one admission.
#[derive(Default)]
pub(super) struct LargeRequests {
    requests: Mutex<Vec<Arc<dyn LargeRequest>>>,
    /// The time of the last tick of the control loop, in nanoseconds.
    now: AtomicU64,
}

impl LargeRequests {
    /// Starts over.
    pub(super) fn begin(&self) {
        self.requests().clear();
        self.now.store(0, Ordering::Relaxed);
    }

    /// Adds a request that holds `live` bytes. If there is no place, it takes that of the smallest,
    /// or is not added if it is the smallest itself.
    #[cold]
    pub(super) fn add(&self, request: Arc<dyn LargeRequest>, live: ByteSize) {
        let mut requests = self.requests();
        requests.retain(|other| other.live().is_some());
        if requests.len() < LARGE_MAX {
            return requests.push(request);
        }
        let held = |other: &Arc<dyn LargeRequest>| other.live().unwrap_or_default();
        let smallest = requests.iter_mut().min_by_key(|other| held(other));
        if let Some(smallest) = smallest.filter(|smallest| held(smallest) < live) {
            *smallest = request;
        }
    }

    /// Returns the `most` requests that hold most, the largest first.
    pub(super) fn largest(&self, most: usize, now: Moment) -> Vec<RequestMemory> {
        let requests = {
            let mut requests = self.requests();
            requests.retain(|request| request.live().is_some());
            requests.clone()
        };
        let mut largest: Vec<_> =
            requests.iter().filter_map(|request| request.describe(now)).collect();
        largest.sort_by_key(|request| std::cmp::Reverse(request.live));
        largest.truncate(most);
        largest
    }

    fn requests(&self) -> MutexGuard<'_, Vec<Arc<dyn LargeRequest>>> {
        self.requests.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the time of the last tick of the control loop.
    #[inline]
    pub(super) fn now(&self) -> Moment {
        Moment::after_origin(Duration::from_nanos(self.now.load(Ordering::Relaxed)))
    }

    /// Sets the time. Called by the control loop at each tick.
    pub(super) fn set_now(&self, now: Moment) {
        let nanos = u64::try_from(now.since_origin().as_nanos()).unwrap_or(u64::MAX);
        self.now.store(nanos, Ordering::Relaxed);
    }
}

impl fmt::Debug for LargeRequests {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LargeRequests").field("now", &self.now()).finish_non_exhaustive()
    }
}

#[cfg(all(test, not(lowtide_loom)))]
mod tests {
    use super::*;

    struct Request(AtomicU64);

    impl LargeRequest for Request {
        fn live(&self) -> Option<ByteSize> {
            let live = self.0.load(Ordering::Relaxed);
            (live > 0).then_some(ByteSize::new(live))
        }

        fn describe(&self, now: Moment) -> Option<RequestMemory> {
            let live = self.live()?;
            Some(RequestMemory {
                method: "POST".to_owned(),
                route: "upload".to_owned(),
                live,
                peak: live,
                claim: ByteSize::ZERO,
                age: now - Moment::ORIGIN,
            })
        }
    }

    #[test]
    fn of_more_requests_than_places_the_largest_are_registered() {
        let large = LargeRequests::default();
        let more = LARGE_MAX as u64 + 500;
        let requests: Vec<_> = (1..=more).map(|live| Arc::new(Request(live.into()))).collect();
        // From both ends, so that small ones arrive late, too.
        for (one, other) in requests.iter().zip(requests.iter().rev()).take(requests.len() / 2) {
            for request in [one, other] {
                let live = request.live().expect("it runs");
                large.add(Arc::clone(request) as Arc<dyn LargeRequest>, live);
            }
        }
        let live = |most| -> Vec<u64> {
            large.largest(most, Moment::ORIGIN).iter().map(|of| of.live.get()).collect()
        };
        assert_eq!(live(usize::MAX), (501..=more).rev().collect::<Vec<_>>());
        assert_eq!(live(2), [more, more - 1]);
        requests.iter().skip(600).for_each(|request| request.0.store(0, Ordering::Relaxed));
        assert_eq!(live(usize::MAX).len(), 100, "ended requests leave");
        assert_eq!(large.requests().len(), 100, "and are no longer kept");
    }
}
