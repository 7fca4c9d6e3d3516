//! The memory of measured requests by route and by tenant, for operators.
//!
//! The tower layer adds a request when it ends, with three atomic additions for its route and three
//! for its tenant. While it runs, its live bytes are updated only when they have changed by 64 KiB,
//! so small requests cost no more. Metrics and `/memory` read the records
//! ([`Usages::read`]).
//!
//! Clients choose some names of routes: paths for which no router matched a pattern. Such a name
//! gets a record only after a request with it has succeeded, and only while less than half of the
//! records are used. All requests without a record of their own are added to one named `other`.
//!
//! Invariants: at most [`ROUTES_MAX`] + 1 routes and [`TENANTS_MAX`] + 1 tenants have a record,
//! with names of at most [`NAME_MAX`] bytes; a record lasts as long as its admission, so that
//! totals never fall; `live` is the sum of what the running requests reported.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use lowtide_core::bytes::{ByteSize, prefix};

use super::cost::RejectReason;
use super::shared::atomic::{AtomicU64, Ordering};

/// The maximum number of routes with a record of their own. An estimate: more than most services
/// have, and some hundred series.
const ROUTES_MAX: usize = 64;
/// The maximum number of tenants with a record of their own. An estimate.
const TENANTS_MAX: usize = 32;
/// The maximum length of a name, in bytes.
pub const NAME_MAX: usize = 64;
/// The name of the routes, methods and tenants without a record of their own.
const OTHER: &str = "other";
/// The methods that have names of their own. Clients may send any other.
const METHODS: [&str; 9] =
    ["GET", "POST", "PUT", "DELETE", "PATCH", "HEAD", "OPTIONS", "CONNECT", "TRACE"];

/// Returns the first [`NAME_MAX`] bytes of a name, less an incomplete character.
#[inline]
pub fn shortened(name: &str) -> &str {
    prefix(name, NAME_MAX)
}

/// The memory of measured requests with the same route, or of the same tenant.
///
/// A running request counts from 64 KiB on, with an accuracy of 64 KiB. Exempt requests are not
/// counted.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
pub struct MemoryUsage {
    /// The HTTP method, `other` for one that RFC 9110 and RFC 5789 do not define; empty for a
    /// tenant.
    pub method: &'static str,
    /// The route or the tenant, shortened to 64 bytes; `other` for all without a record of their
    /// own.
    pub name: String,
    /// The bytes that the running requests hold.
    pub live: ByteSize,
    /// The largest number of bytes that they held together.
    pub live_peak: ByteSize,
    /// The requests that have ended.
    pub requests_total: u64,
    /// The sum of the peaks of the ended requests: the largest number of bytes that each held.
    pub peak_bytes_total: u64,
    /// The sum of the claims of the ended requests: the bytes that each reserved.
    pub claim_bytes_total: u64,
    /// The ended requests that only observe mode admitted, in the order of [`RejectReason::ALL`].
    pub observed: [u64; RejectReason::ALL.len()],
}

impl MemoryUsage {
    /// Returns the mean of the peaks of the requests that have ended; `None` without any.
    #[must_use]
    pub fn mean_peak(&self) -> Option<ByteSize> {
        self.peak_bytes_total.checked_div(self.requests_total).map(ByteSize::new)
    }

    /// Returns the mean of their claims; `None` without any.
    #[must_use]
    pub fn mean_claim(&self) -> Option<ByteSize> {
        self.claim_bytes_total.checked_div(self.requests_total).map(ByteSize::new)
    }
}

/// The record of a route or a tenant.
#[derive(Debug, Default)]
pub struct Usage {
    /// Empty for a tenant.
    method: &'static str,
    name: Box<str>,
    live: AtomicU64,
    live_peak: AtomicU64,
    requests: AtomicU64,
    peaks: AtomicU64,
    claims: AtomicU64,
    observed: [AtomicU64; RejectReason::ALL.len()],
}

impl Usage {
    fn new(method: &'static str, name: &str) -> Self {
        Self { method, name: name.into(), ..Self::default() }
    }

    /// Returns `true` if this is the record of this route.
    #[inline]
    pub fn is(&self, method: &str, name: &[u8]) -> bool {
        self.name.as_bytes() == name && self.method == method
    }

    /// Replaces what a running request holds.
    pub fn change_live(&self, before: ByteSize, after: ByteSize) {
        let more = after.get().wrapping_sub(before.get());
        let live = self.live.fetch_add(more, Ordering::Relaxed).wrapping_add(more);
        if live > self.live_peak.load(Ordering::Relaxed) {
            self.live_peak.fetch_max(live, Ordering::Relaxed);
        }
    }

    /// Adds a request that has ended, with the reason for which it would have waited or been
    /// rejected if observe mode had not admitted it.
    #[inline]
    pub fn add(&self, peak: ByteSize, claim: ByteSize, observed: Option<RejectReason>) {
        self.requests.fetch_add(1, Ordering::Relaxed);
        self.peaks.fetch_add(peak.get(), Ordering::Relaxed);
        self.claims.fetch_add(claim.get(), Ordering::Relaxed);
        if let Some(count) = observed.and_then(|reason| self.observed.get(reason as usize)) {
            count.fetch_add(1, Ordering::Relaxed);
        }
    }

    fn read(&self) -> MemoryUsage {
        let read = |of: &AtomicU64| of.load(Ordering::Relaxed);
        MemoryUsage {
            method: self.method,
            name: self.name.to_string(),
            live: ByteSize::new(read(&self.live)),
            live_peak: ByteSize::new(read(&self.live_peak)),
            requests_total: read(&self.requests),
            peak_bytes_total: read(&self.peaks),
            claim_bytes_total: read(&self.claims),
            observed: self.observed.each_ref().map(read),
        }
    }
}

/// The records of the routes, or of the tenants, of one admission.
#[derive(Debug, Default)]
pub struct Usages(Mutex<UsageRecords>);

#[derive(Debug, Default)]
struct UsageRecords {
    /// The shortest names first, otherwise in the order of names and methods.
    named: Vec<Arc<Usage>>,
    other: Option<Arc<Usage>>,
}

impl Usages {
    /// Starts over.
    pub(super) fn begin(&self) {
        *self.records() = UsageRecords::default();
    }

    /// Returns the record of the memory of a route, or that of all routes without one. A route that
    /// is no pattern of the program is named by a client: it gets a record once a request of it has
    /// succeeded, and only if few routes have one. Takes a lock.
    #[must_use]
    pub fn of_route(
        &self,
        method: &str,
        name: &str,
        is_pattern: bool,
        succeeded: bool,
    ) -> Arc<Usage> {
        let known = METHODS.into_iter().find(|known| *known == method).unwrap_or(OTHER);
        let most = match (is_pattern, succeeded) {
            (true, _) => ROUTES_MAX,
            (false, true) => ROUTES_MAX / 2,
            (false, false) => 0,
        };
        self.of(known, name, most)
    }

    /// Returns the record of the memory of a tenant, or that of all tenants without one. Takes a
    /// lock.
    #[must_use]
    pub fn of_tenant(&self, name: &str) -> Arc<Usage> {
        self.of("", name, TENANTS_MAX)
    }

    fn records(&self) -> MutexGuard<'_, UsageRecords> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the record of a name, which is created if fewer than `most` exist.
    fn of(&self, method: &'static str, name: &str, most: usize) -> Arc<Usage> {
        let name = shortened(name);
        let UsageRecords { named, other } = &mut *self.records();
        let key = (name.len(), name, method);
        let found = named.binary_search_by(|of| (of.name.len(), &*of.name, of.method).cmp(&key));
        // In Prometheus, a label with an empty value counts as missing.
        let may_have = !name.is_empty() && name != OTHER;
        if let Ok(at) = found
            && let Some(of) = named.get(at)
        {
            return Arc::clone(of);
        }
        if let Err(at) = found
            && may_have
            && named.len() < most
        {
            let of = Arc::new(Usage::new(method, name));
            named.insert(at, Arc::clone(&of));
            return of;
        }
        let method = if method.is_empty() { method } else { OTHER };
        Arc::clone(other.get_or_insert_with(|| Arc::new(Usage::new(method, OTHER))))
    }

    /// Returns the memory of each, the largest first. Allocates, and takes a lock for about a
    /// microsecond.
    #[must_use]
    pub fn read(&self) -> Vec<MemoryUsage> {
        let all: Vec<_> = {
            let records = self.records();
            records.named.iter().chain(&records.other).map(Arc::clone).collect()
        };
        let mut all: Vec<_> = all.iter().map(|of| of.read()).collect();
        all.sort_by_key(|of| std::cmp::Reverse((of.live, of.peak_bytes_total)));
        all
    }
}

#[cfg(all(test, not(lowtide_loom)))]
mod tests {
    use super::*;

    const MIB: ByteSize = ByteSize::mib(1);

    #[test]
    fn a_name_keeps_its_record_and_more_names_than_records_share_one() {
        let (usages, tenants) = (Usages::default(), Usages::default());
        for nth in 0..1_000 {
            let name = format!("/{nth}");
            usages.of_route("GET", &name, false, false).add(MIB, MIB, None);
            assert!(usages.read().iter().all(|of| of.name == OTHER), "{name}: not proved");
        }
        for nth in 0..1_000 {
            usages.of_route("GET", &format!("/{nth}"), false, true).add(MIB, MIB, None);
        }
        assert_eq!(usages.read().len(), ROUTES_MAX / 2 + 1, "clients leave room");
        for nth in 0..1_000 {
            usages.of_route("GET", &format!("/{nth}/{{id}}"), true, false).add(MIB, MIB, None);
            tenants.of_tenant(&format!("tenant {nth}")).add(MIB, MIB, None);
        }
        let routes = usages.read();
        assert_eq!((routes.len(), tenants.read().len()), (ROUTES_MAX + 1, TENANTS_MAX + 1));
        let all: u64 = routes.iter().map(|of| of.requests_total).sum();
        assert_eq!(all, 3_000, "each is counted once");
        assert_eq!((routes[0].method, &*routes[0].name), (OTHER, OTHER), "it has most");
        let of = usages.of_route("GET", "/7", false, false);
        assert!(of.is("GET", b"/7"), "it has a record already");
        usages.begin();
        assert_eq!(usages.read(), vec![]);
    }

    #[test]
    fn methods_and_names_are_bounded_whatever_a_client_sends() {
        let usages = Usages::default();
        let long = "é".repeat(1 << 19);
        for method in ["GET", "BREW", "\"\n"] {
            usages.of_route(method, &long, true, false).add(MIB, MIB, None);
        }
        let routes = usages.read();
        let methods: Vec<_> = routes.iter().map(|of| of.method).collect();
        assert_eq!(methods, [OTHER, "GET"], "the larger first");
        assert!(routes.iter().all(|of| of.name == "é".repeat(NAME_MAX / 2)));
        for name in ["", OTHER] {
            let of = usages.of_route("GET", name, true, false);
            assert!(of.is(OTHER, OTHER.as_bytes()), "{name:?}");
            assert!(Usages::default().of_tenant(name).is("", OTHER.as_bytes()), "{name:?}");
        }
        assert_eq!(shortened(&format!("{}é", "x".repeat(NAME_MAX - 1))).len(), NAME_MAX - 1);
    }

    #[test]
    fn live_is_the_sum_of_what_requests_hold_and_peak_its_largest() {
        let usages = Usages::default();
        let of = usages.of_tenant("a");
        of.change_live(ByteSize::ZERO, ByteSize::mib(3));
        of.change_live(ByteSize::ZERO, ByteSize::mib(4));
        of.change_live(ByteSize::mib(3), ByteSize::mib(1));
        let memory = &usages.read()[0];
        assert_eq!((memory.live, memory.live_peak), (ByteSize::mib(5), ByteSize::mib(7)));
        assert_eq!((memory.mean_peak(), memory.mean_claim()), (None, None));
        of.change_live(ByteSize::mib(4), ByteSize::ZERO);
        of.change_live(MIB, ByteSize::ZERO);
        of.add(ByteSize::mib(3), MIB, Some(RejectReason::Full));
        of.add(ByteSize::mib(4), ByteSize::ZERO, None);
        let memory = &usages.read()[0];
        assert_eq!((memory.live, memory.live_peak), (ByteSize::ZERO, ByteSize::mib(7)));
        assert_eq!(memory.mean_peak(), Some(ByteSize::kib(3_584)));
        assert_eq!(memory.mean_claim(), Some(ByteSize::kib(512)));
    }
}
