//! A recorder for Prometheus with the buckets of the crate's histograms, as an application that has
//! one of its own builds it.

use metrics_exporter_prometheus::{Matcher, PrometheusBuilder};

/// Returns a builder with the buckets of all histograms.
pub(crate) fn builder() -> PrometheusBuilder {
    lowtide::metrics::histograms().fold(PrometheusBuilder::new(), |builder, (name, buckets)| {
        let builder = builder.set_buckets_for_metric(Matcher::Full(name.to_owned()), buckets);
        builder.expect("no histogram is without buckets")
    })
}
