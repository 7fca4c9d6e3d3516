//! Serves the metrics in the Prometheus text format.
//!
//! [`Builder::prometheus`](crate::memory::Builder::prometheus) installs a recorder, and the worker
//! of a [`Memory`](crate::Memory) does its upkeep. An application with a recorder of its own does
//! not need this module; see [`histograms`](super::histograms).
//!
//! Invariant: every histogram of the table has buckets, so that none is exported as a summary.
//!
//! ```
//! use lowtide::Memory;
//! use lowtide::metrics::prometheus;
//!
//! let memory = Memory::builder().prometheus()?.start()?;
//! assert!(prometheus::render().is_some()); // `Endpoints` answers `/metrics` with it
//! # drop(memory);
//! # Ok::<(), lowtide::BoxError>(())
//! ```

use std::sync::Mutex;

use metrics_exporter_prometheus::{BuildError, Matcher, PrometheusBuilder, PrometheusHandle};

use crate::sync::lock;

/// The handle of the recorder that [`install`] installed.
static INSTALLED: Mutex<Option<PrometheusHandle>> = Mutex::new(None);

/// Installs a Prometheus recorder for this process, once; further calls do nothing.
///
/// # Errors
/// The exporter's error, if the application has installed another recorder.
pub(crate) fn install() -> Result<(), BuildError> {
    // Under the lock, so that two threads do not both install one.
    let mut installed = lock(&INSTALLED);
    if installed.is_none() {
        let mut builder = PrometheusBuilder::new();
        for (name, buckets) in super::histograms() {
            builder = builder.set_buckets_for_metric(Matcher::Full(name.to_owned()), buckets)?;
        }
        *installed = Some(builder.install_recorder()?);
    }
    Ok(())
}

/// Returns the metrics in the Prometheus text format; `None` without
/// [`Builder::prometheus`](crate::memory::Builder::prometheus).
#[must_use]
pub fn render() -> Option<String> {
    let handle = lock(&INSTALLED).clone();
    handle.map(|handle| handle.render())
}

/// Moves the samples of histograms into their buckets, which would otherwise grow until the next
/// scrape.
pub(crate) fn run_upkeep() {
    let handle = lock(&INSTALLED).clone();
    handle.into_iter().for_each(|handle| handle.run_upkeep());
}
