//! Metrics: the one table of names, and the publication of snapshots under them.
//!
//! It reads snapshots and writes the `metrics` facade; it never installs a recorder. Values are
//! published through the macros at each call, never through kept handles: a handle made before
//! the application's recorder, or outlived by an idle timeout, would be lost silently.

pub mod names;
#[cfg(feature = "prometheus")]
pub mod prometheus;
pub mod record;
