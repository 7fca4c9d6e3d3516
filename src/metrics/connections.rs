//! Counts of the process's connections. Servers that bound them count; the publisher reads.

use std::sync::atomic::{AtomicU64, Ordering};

use super::record::MetricsWriter;

/// The open connections.
pub(crate) static OPEN: AtomicU64 = AtomicU64::new(0);
/// The connections that were closed, in the order of [`CloseReason::ALL`].
static CLOSED: [AtomicU64; CloseReason::ALL.len()] =
    [const { AtomicU64::new(0) }; CloseReason::ALL.len()];

lowtide_core::named_enum! {
    /// Why a connection is closed.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub(crate) enum CloseReason {
        /// It got no place.
        Refused = "refused",
        /// It had made no progress for longest, and another needed its place.
        Displaced = "displaced",
        /// Its client took nothing of a response while memory was short.
        Stalled = "stalled",
        /// Its client took nothing of a response whose time limit had passed.
        Overdue = "overdue",
    }
}

impl CloseReason {
    /// Counts a connection.
    pub(crate) fn count(self) {
        if let Some(total) = CLOSED.get(self as usize) {
            total.fetch_add(1, Ordering::Relaxed);
        }
    }
}

/// Publishes the counts.
pub(crate) fn publish(writer: MetricsWriter) {
    let closed = CloseReason::ALL.iter().zip(&CLOSED);
    let closed = closed.map(|(reason, total)| (reason.name(), total.load(Ordering::Relaxed)));
    writer.connections(OPEN.load(Ordering::Relaxed), closed);
}
