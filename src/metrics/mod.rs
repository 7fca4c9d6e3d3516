//! Metrics: the table of names, and the publication of snapshots under them.
//!
//! It reads snapshots and writes to the `metrics` facade; it never installs a recorder. Values are
//! published through the macros at each call, never through kept handles: a handle created before
//! the application's recorder, or removed by its idle timeout, would silently lose values.

pub mod names;
#[cfg(feature = "prometheus")]
pub mod prometheus;
pub mod record;
