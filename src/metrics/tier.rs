//! The tiers of metrics.

use std::str::FromStr;

lowtide_core::named_enum! {
    /// The metrics that a `Memory` publishes. `docs/METRICS.md` names the tier of each.
    ///
    /// A metric that is not published costs nothing: its series are not written, and it is not
    /// described to the recorder.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
    #[non_exhaustive]
    pub enum MetricsTier {
        /// Those that the alerts and the dashboards `overview` and `device` need: some 45 names.
        #[default]
        Basic = "basic",
        /// All, with the internals of heap, arenas and admission: some 135 names.
        Detail = "detail",
    }
}

/// Parses the name of a tier. The error describes the accepted names.
impl FromStr for MetricsTier {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let tier = Self::ALL.into_iter().find(|tier| tier.name() == text);
        tier.ok_or("basic or detail")
    }
}
