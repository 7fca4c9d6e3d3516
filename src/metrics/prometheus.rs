//! What an application needs to serve these metrics with metrics-exporter-prometheus.
//!
//! It sets buckets and installs nothing. The application installs the recorder, renders it, and
//! calls its upkeep every few seconds (`Memory::builder().after_publish(..)` is a place for that),
//! or samples of histograms pile up until the next scrape. Where the exporter listens by itself
//! (its feature `http-listener`, `build` or `install`) its own task renders and runs the upkeep.
//!
//! Invariant: every histogram of the table has buckets, so that none is shown as a summary.
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

use metrics_exporter_prometheus::Matcher;

use super::names::{Kind, SECONDS_BUCKETS, TABLE};

/// The content type of the text that [`PrometheusHandle::render`] gives.
pub const CONTENT_TYPE: &str = "text/plain; version=0.0.4; charset=utf-8";

/// The builder with the buckets of this crate's histograms.
///
/// # Errors
/// As [`PrometheusBuilder::set_buckets_for_metric`]; not with the buckets of this crate.
pub fn configure(mut builder: PrometheusBuilder) -> Result<PrometheusBuilder, BuildError> {
    for metric in TABLE.iter().filter(|metric| metric.kind == Kind::Histogram) {
        let whole = Matcher::Full(metric.name.to_owned());
        builder = builder.set_buckets_for_metric(whole, SECONDS_BUCKETS)?;
    }
    Ok(builder)
}
