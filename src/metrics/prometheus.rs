//! Configuration for serving the metrics with metrics-exporter-prometheus.
//!
//! It sets buckets and installs nothing. The application installs the recorder, renders it, and
//! calls its upkeep every few seconds, for example in `Memory::builder().after_publish(..)`.
//! Otherwise histogram samples accumulate until the next scrape. If the exporter listens itself
//! (its feature `http-listener`, `build` or `install`), its own task renders and runs the upkeep.
//!
//! Invariant: every histogram of the table has buckets, so that none is exported as a summary.
//!
//! With the features `service` and `prometheus`:
//!
//! ```
//! # #[cfg(feature = "service")] {
//! use lowtide::Memory;
//! use lowtide::metrics::prometheus::{PrometheusBuilder, configure};
//! use lowtide::service::Endpoints;
//!
//! let recorder = configure(PrometheusBuilder::new())?.install_recorder()?;
//! let upkeep = recorder.clone();
//! let memory = Memory::builder()
//!     .after_publish(move || upkeep.run_upkeep()) // or histograms grow until they are scraped
//!     .start()?;
//! let endpoints = Endpoints::new(Some(memory)).with_metrics(move || recorder.render());
//! let answer = endpoints.answer("/metrics"); // the application routes it
//! assert!(answer.is_some());
//! # }
//! # Ok::<(), lowtide::BoxError>(())
//! ```

pub use metrics_exporter_prometheus::{BuildError, PrometheusBuilder, PrometheusHandle};

use std::sync::{Mutex, OnceLock, PoisonError};

use metrics_exporter_prometheus::Matcher;

use super::names::{Kind, SECONDS_BUCKETS, TABLE};

/// The content type of the text that [`PrometheusHandle::render`] returns.
pub const CONTENT_TYPE: &str = "text/plain; version=0.0.4; charset=utf-8";

/// The handle of the recorder that [`install`] installed.
static INSTALLED: OnceLock<PrometheusHandle> = OnceLock::new();

/// Installs a Prometheus recorder for this process, once; further calls do nothing.
///
/// # Errors
/// The exporter's error, if the application has installed another recorder.
pub(crate) fn install() -> Result<(), BuildError> {
    // Under a lock, so that two threads do not both install one.
    static INSTALLING: Mutex<()> = Mutex::new(());
    let _guard = INSTALLING.lock().unwrap_or_else(PoisonError::into_inner);
    if INSTALLED.get().is_none() {
        let _ = INSTALLED.set(configure(PrometheusBuilder::new())?.install_recorder()?);
    }
    Ok(())
}

/// Returns the metrics in the Prometheus text format; `None` without
/// [`Builder::prometheus`](crate::memory::Builder::prometheus).
#[must_use]
pub fn render() -> Option<String> {
    INSTALLED.get().map(PrometheusHandle::render)
}

/// Moves the samples of histograms into their buckets, which would otherwise grow until the next
/// scrape.
pub(crate) fn run_upkeep() {
    if let Some(handle) = INSTALLED.get() {
        handle.run_upkeep();
    }
}

/// Adds the buckets of this crate's histograms to the builder.
///
/// # Errors
/// The same as for [`PrometheusBuilder::set_buckets_for_metric`], which does not fail for these
/// buckets.
pub fn configure(mut builder: PrometheusBuilder) -> Result<PrometheusBuilder, BuildError> {
    for metric in TABLE.iter().filter(|metric| metric.kind == Kind::Histogram) {
        let whole = Matcher::Full(metric.name.to_owned());
        builder = builder.set_buckets_for_metric(whole, SECONDS_BUCKETS)?;
    }
    Ok(builder)
}
