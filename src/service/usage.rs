//! Adds the memory of a request to the figures of its route and its tenant.
//!
//! The permit calls this module when a request ends, and when the live bytes that it reports
//! change. The record of a route is kept with the learned need of the route, so most requests need
//! no look-up.
//!
//! Invariant: each measured request that is not exempt counts for one route, and for one tenant if
//! it has one; its live bytes are subtracted from the records to which they were added.

use std::sync::Arc;

use crate::bytes::ByteSize;
use lowtide_admission::Permit;
use lowtide_admission::layer::{KeptUsage, NameSource, Usage};
use lowtide_heap::unmeasured;

use super::learned::Lesson;
use super::origin::{Origin, Tenant};

/// Passes the record of the request's route to `act`, or that of all routes without one.
#[inline]
fn with_route<R>(
    permit: &Permit,
    origin: &Origin,
    lesson: &Lesson,
    succeeded: bool,
    act: impl FnOnce(&Arc<Usage>) -> R,
) -> R {
    let kept = lesson.usage();
    match kept.get(|| (origin.method.as_str(), origin.route.as_bytes())) {
        Some(usage) => act(usage),
        None => act(&look_up(kept, permit, origin, succeeded)),
    }
}

#[cold]
fn look_up(kept: &KeptUsage, permit: &Permit, origin: &Origin, succeeded: bool) -> Arc<Usage> {
    let source = match (origin.is_matched, succeeded) {
        (true, _) => NameSource::Program,
        (false, true) => NameSource::Client,
        (false, false) => NameSource::Unproved,
    };
    let (method, route) = (origin.method.as_str(), origin.route.to_string());
    unmeasured(|| {
        let usage = permit.state().usage_of_route(method, &route, source);
        kept.keep(&usage, method, route.as_bytes());
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
    pub(super) fn new(permit: &Permit, origin: &Origin, lesson: &Lesson) -> Self {
        let route = with_route(permit, origin, lesson, false, Arc::clone);
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
    with_route(permit, origin, lesson, succeeded, |route| route.add(peak, claim));
    if let Some(tenant) = &origin.tenant {
        of_tenant(permit, tenant).add(peak, claim);
    }
}

fn of_tenant(permit: &Permit, tenant: &Tenant) -> Arc<Usage> {
    unmeasured(|| permit.state().usage_of_tenant(tenant.name()))
}
