//! The parts of a request's head that are kept while it runs: method, route, tenant.

use std::fmt;
use std::sync::Arc;

use http::{HeaderValue, Method, Version};

use lowtide_admission::layer::{NAME_MAX, shortened};

/// The parts of a request's head that name it to operators and select the answer.
#[derive(Clone, Debug)]
pub(super) struct Origin {
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

impl fmt::Debug for RouteLabel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&self.to_string(), f)
    }
}

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
