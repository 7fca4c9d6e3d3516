//! Adds the memory of a request to the figures of its route and its tenant.
//!
//! The permit calls it when a request ends, and when the live bytes that it reports change. The
//! record of a route is kept with what is learned of the route, so most requests look nothing up.
//!
//! Invariant: each measured request that is not exempt counts for one route, and for one tenant if
//! it has one; its live bytes are subtracted from the records to which they were added.

use std::fmt;
use std::sync::{Arc, OnceLock};

use crate::bytes::ByteSize;
use lowtide_admission::{NameSource, Permit, Usage, shortened};
use lowtide_heap::unmeasured;

use super::learned::Lesson;
use super::permit::Origin;

/// The tenant of a request: the customer, project or key for which it runs. A trusted layer around
/// [`MemoryLayer`](super::MemoryLayer) inserts it into the request's extensions, for example after
/// authentication. Large requests are then listed with their tenant, and the memory of each tenant
/// is published.
///
/// Names are shortened to 64 bytes. The first 32 tenants of a process have figures of their own, so
/// don't use names that clients choose freely: they could take all places.
///
/// ```
/// use http::Request;
/// use lowtide::service::Tenant;
///
/// /// Called before the memory layer. Create the tenants once: clones are cheap.
/// fn authenticated<B>(mut request: Request<B>, tenant: &Tenant) -> Request<B> {
///     request.extensions_mut().insert(tenant.clone());
///     request
/// }
/// # let request = authenticated(Request::new(()), &Tenant::new("acme"));
/// # assert_eq!(request.extensions().get::<Tenant>().unwrap().name(), "acme");
/// ```
#[derive(Clone, PartialEq, Eq)]
pub struct Tenant(Arc<str>);

impl Tenant {
    /// Creates a tenant with this name.
    #[must_use]
    pub fn new(name: &str) -> Self {
        Self(shortened(name).into())
    }

    /// Returns its name, shortened to 64 bytes.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.0
    }
}

impl fmt::Debug for Tenant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Tenant").field(&self.name()).finish()
    }
}

/// The record of a route, once it has one.
#[derive(Debug)]
pub(super) struct KeptUsage {
    usage: OnceLock<Arc<Usage>>,
    is_of_one_route: bool,
}

impl KeptUsage {
    /// Creates a place for the record of requests that all have the same route.
    pub(super) const fn of_one_route() -> Self {
        Self { usage: OnceLock::new(), is_of_one_route: true }
    }

    /// Creates a place for the record of the first route of requests that may have several.
    pub(super) const fn of_any_route() -> Self {
        Self { usage: OnceLock::new(), is_of_one_route: false }
    }

    /// Passes the record of this route to `act`, or that of all routes without one.
    #[inline]
    fn with<R>(
        &self,
        permit: &Permit,
        origin: &Origin,
        succeeded: bool,
        act: impl FnOnce(&Arc<Usage>) -> R,
    ) -> R {
        let is_kept = |usage: &&Arc<Usage>| self.is_of_one_route || is_of(usage, origin);
        match self.usage.get().filter(is_kept) {
            Some(usage) => act(usage),
            None => act(&self.look_up(permit, origin, succeeded)),
        }
    }

    #[cold]
    fn look_up(&self, permit: &Permit, origin: &Origin, succeeded: bool) -> Arc<Usage> {
        let source = match (origin.is_matched, succeeded) {
            (true, _) => NameSource::Program,
            (false, true) => NameSource::Client,
            (false, false) => NameSource::Unproved,
        };
        let (method, route) = (origin.method.as_str(), origin.route.to_string());
        unmeasured(|| {
            let usage = permit.usage_of_route(method, &route, source);
            if is_of(&usage, origin) {
                let _ = self.usage.set(Arc::clone(&usage));
            }
            usage
        })
    }
}

fn is_of(usage: &Usage, origin: &Origin) -> bool {
    usage.is(origin.method.as_str(), origin.route.as_bytes())
}

/// The records to which the live bytes of a request were added.
#[derive(Debug)]
pub(super) struct LiveIn {
    route: Arc<Usage>,
    tenant: Option<Arc<Usage>>,
}

impl LiveIn {
    /// Returns the records of a running request.
    #[cold]
    pub(super) fn new(permit: &Permit, origin: &Origin, lesson: &Lesson) -> Self {
        let route = lesson.usage().with(permit, origin, false, Arc::clone);
        let tenant = origin.tenant.as_ref().map(|tenant| of_tenant(permit, tenant));
        Self { route, tenant }
    }

    /// Replaces the live bytes of the request.
    pub(super) fn change(&self, before: ByteSize, after: ByteSize) {
        self.route.change_live(before, after);
        if let Some(tenant) = &self.tenant {
            tenant.change_live(before, after);
        }
    }
}

/// Adds a request that has ended.
#[inline]
pub(super) fn add(
    permit: &Permit,
    origin: &Origin,
    lesson: &Lesson,
    succeeded: bool,
    (peak, claim): (ByteSize, ByteSize),
) {
    lesson.usage().with(permit, origin, succeeded, |route| route.add(peak, claim));
    if let Some(tenant) = &origin.tenant {
        of_tenant(permit, tenant).add(peak, claim);
    }
}

fn of_tenant(permit: &Permit, tenant: &Tenant) -> Arc<Usage> {
    unmeasured(|| permit.usage_of_tenant(tenant.name()))
}
