//! Metrics: the histograms that an exporter has to know, and the text for Prometheus.
//!
//! A [`Memory`](crate::Memory) reads snapshots and writes them to the `metrics` facade under the
//! names in `docs/METRICS.md`. With the feature `prometheus`, `Builder::prometheus` installs a
//! recorder; nothing else does. An application that installs its own gives it the buckets of
//! [`histograms`].

// Values are published through the macros at each call, never through kept handles: a handle
// created before the application's recorder, or removed by its idle timeout, would silently lose
// values.

#[doc(hidden)]
#[macro_use]
pub mod names;
pub(crate) mod process;
#[cfg(feature = "prometheus")]
pub mod prometheus;
#[doc(hidden)]
pub mod record;

pub use names::MetricsTier;

use names::{MetricKind, SECONDS_BUCKETS, TABLE};

/// Returns the name of each histogram and the upper bounds of its buckets, in seconds.
///
/// A recorder of the application needs them: without buckets, many exporters publish a summary.
///
/// ```
/// use metrics_exporter_prometheus::{Matcher, PrometheusBuilder};
///
/// let mut builder = PrometheusBuilder::new();
/// for (name, buckets) in lowtide::metrics::histograms() {
///     builder = builder.set_buckets_for_metric(Matcher::Full(name.to_owned()), buckets)?;
/// }
/// let recorder = builder.install_recorder()?;
/// let upkeep = recorder.clone();
/// let memory = lowtide::Memory::builder()
///     .after_publish(move || upkeep.run_upkeep()) // or samples accumulate until the next scrape
///     .start()?;
/// # drop((memory, recorder));
/// # Ok::<(), lowtide::BoxError>(())
/// ```
pub fn histograms() -> impl Iterator<Item = (&'static str, &'static [f64])> {
    let histograms = TABLE.iter().filter(|metric| metric.kind == MetricKind::Histogram);
    histograms.map(|metric| (metric.name, SECONDS_BUCKETS))
}
