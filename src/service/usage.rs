//! The parts of a request's head that are kept while it runs (method, route, tenant), and the
//! figures of the route and the tenant to which its memory is added.
//!
//! The permit calls this module when a request ends, and when the live bytes that it reports
//! change. The record of a route is kept with the learned need of the route, so most requests need
//! no look-up.
//!
//! Invariant: each measured request that is not exempt counts for one route, and for one tenant if
//! it has one; its live bytes are subtracted from the records to which they were added.

use std::fmt;
use std::sync::Arc;

use http::{HeaderValue, Method, Version};

use crate::bytes::ByteSize;
use lowtide_admission::Permit;
use lowtide_admission::layer::{NAME_MAX, Usage, shortened};
use lowtide_admission::learning::Compared;
use lowtide_heap::unmeasured;

/// Returns the record of the request's route if it is kept with its need.
#[inline]
fn kept<'a>(need: &'a Compared, origin: &RequestOrigin) -> Option<&'a Arc<Usage>> {
    need.usage(|| (origin.method.as_str(), origin.route.as_bytes()))
}

/// Returns the record of the request's route, or that of all routes without one.
#[cold]
fn look_up(need: &Compared, permit: &Permit, origin: &RequestOrigin, success: bool) -> Arc<Usage> {
    let (method, route) = (origin.method.as_str(), origin.route.as_str());
    unmeasured(|| {
        let usage = permit.state().routes.of_route(method, route, origin.is_matched, success);
        // Records are not removed: a route that could have had one now finds them all taken.
        need.keep_usage(&usage, method, route.as_bytes(), origin.is_matched || success);
        usage
    })
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
    pub(super) fn new(permit: &Permit, origin: &RequestOrigin, need: &Compared) -> Self {
        let route = kept(need, origin).cloned();
        let route = route.unwrap_or_else(|| look_up(need, permit, origin, false));
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
    origin: &RequestOrigin,
    need: &Compared,
    succeeded: bool,
    (peak, claim): (ByteSize, ByteSize),
) {
    let observed = permit.observed();
    match kept(need, origin) {
        Some(route) => route.add(peak, claim, observed),
        None => look_up(need, permit, origin, succeeded).add(peak, claim, observed),
    }
    if let Some(tenant) = &origin.tenant {
        of_tenant(permit, tenant).add(peak, claim, observed);
    }
}

fn of_tenant(permit: &Permit, tenant: &Tenant) -> Arc<Usage> {
    unmeasured(|| permit.state().tenants.of_tenant(tenant.name()))
}

/// The parts of a request's head that name it to operators and select the answer.
#[derive(Clone, Debug)]
pub(super) struct RequestOrigin {
    pub(super) method: Method,
    pub(super) version: Version,
    pub(super) route: RouteLabel,
    /// `true` if the route is a pattern of the program.
    pub(super) is_matched: bool,
    pub(super) tenant: Option<Tenant>,
    pub(super) content_type: Option<HeaderValue>,
}

/// The name of a route, shortened to a fixed size, so that each request can have a copy.
#[derive(Clone, Copy)]
pub(super) struct RouteLabel {
    text: [u8; NAME_MAX],
    length: u8,
}

impl RouteLabel {
    pub(super) fn new(route: &str) -> Self {
        let route = shortened(route).as_bytes();
        let mut text = [0; NAME_MAX];
        if let Some(to) = text.get_mut(..route.len()) {
            to.copy_from_slice(route);
        }
        Self { text, length: u8::try_from(route.len()).unwrap_or_default() }
    }

    pub(super) fn as_bytes(&self) -> &[u8] {
        self.text.get(..self.length.into()).unwrap_or_default()
    }

    pub(super) fn as_str(&self) -> &str {
        std::str::from_utf8(self.as_bytes()).unwrap_or_default()
    }
}

impl fmt::Display for RouteLabel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

lowtide_core::debug_as!(RouteLabel, |label| text: label.as_str());

/// The tenant of a request: the customer, project or key for which it runs. A trusted layer around
/// [`MemoryLayer`](super::MemoryLayer) inserts it into the request's extensions, for example after
/// authentication. Large requests are then listed with their tenant, and the memory of each tenant
/// is published.
///
/// Names are shortened to 64 bytes. Only the first 32 tenants of a process have figures of their
/// own. Don't use names that clients choose freely, since they could use up these 32.
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
#[derive(Clone, Debug, PartialEq, Eq)]
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
