//! Requests that are exempt by their path, and the bound on the memory that they hold together.
//!
//! The layer requests a share for each such request, and the request's permit holds it. The
//! declared length of a body is trusted, because servers enforce it. This module neither reserves
//! memory nor counts requests.
//!
//! Invariant: `held` is the sum of all live shares.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use http::request::Parts;
use http_body::Body;

use crate::bytes::ByteSize;

use super::estimate::body_length;

/// Paths of health checks, which every [`MemoryLayer`](super::MemoryLayer) exempts: the calls of
/// gRPC's health protocol, and the paths of Kubernetes' own servers.
pub const HEALTH_PATHS: [&str; 5] = [
    "/grpc.health.v1.Health/Check",
    "/grpc.health.v1.Health/Watch",
    "/healthz",
    "/livez",
    "/readyz",
];

/// The maximum declared body length of a request that is exempt by its path, and the reservation of
/// one with unknown length. A gRPC health check is some tens of bytes long.
pub const EXEMPT_BODY_MAX: ByteSize = ByteSize::kib(64);

/// Exempt requests with a body may together hold the ceiling divided by this.
const CEILING_PART: u64 = 16;

/// The exempt paths of one layer, and the memory held by their requests. Clones share the latter.
#[derive(Clone, Debug, Default)]
pub(super) struct ExemptPaths {
    paths: BTreeSet<String>,
    /// A bit for the length of each path, modulo 64: most other paths need no look-up.
    lengths: u64,
    held: Arc<AtomicU64>,
}

impl ExemptPaths {
    /// Adds paths.
    pub(super) fn add<P: Into<String>>(&mut self, paths: impl IntoIterator<Item = P>) {
        self.paths.extend(paths.into_iter().map(Into::into));
        self.lengths = self.paths.iter().fold(0, |bits, path| bits | 1 << (path.len() % 64));
    }

    /// Returns `true` if requests for this path are exempt.
    #[inline]
    pub(super) fn contains(&self, path: &str) -> bool {
        self.lengths >> (path.len() % 64) & 1 == 1 && self.paths.contains(path)
    }

    /// Returns the share of a request for an exempt path; `None` if it declares too long a body, or
    /// if the others hold too much for another request with a body.
    pub(super) fn share(
        &self,
        head: &Parts,
        body: &impl Body,
        ceiling: ByteSize,
    ) -> Option<ExemptShare> {
        let upper = || body.size_hint().upper().map(ByteSize::new).or_else(|| body_length(head));
        let bytes = if body.is_end_stream() { Some(ByteSize::ZERO) } else { upper() };
        let bytes = bytes.unwrap_or(EXEMPT_BODY_MAX);
        if bytes > EXEMPT_BODY_MAX {
            return None;
        }
        let most = ceiling.get() / CEILING_PART;
        let add = |held: u64| {
            let sum = held.saturating_add(bytes.get());
            (bytes.is_zero() || sum <= most).then_some(sum)
        };
        self.held.fetch_update(Ordering::Relaxed, Ordering::Relaxed, add).ok()?;
        Some(ExemptShare { bytes, held: Arc::clone(&self.held) })
    }
}

/// The memory held by one exempt request, until dropped.
#[derive(Debug)]
pub(super) struct ExemptShare {
    /// What it has reserved.
    pub(super) bytes: ByteSize,
    held: Arc<AtomicU64>,
}

impl ExemptShare {
    /// Adds a further reservation of the request.
    pub(super) fn grow(&mut self, bytes: ByteSize) {
        self.bytes = self.bytes.saturating_add(bytes);
        self.held.fetch_add(bytes.get(), Ordering::Relaxed);
    }
}

impl Drop for ExemptShare {
    fn drop(&mut self) {
        self.held.fetch_sub(self.bytes.get(), Ordering::Relaxed);
    }
}
