//! The tiers of metrics.

use std::fmt;
use std::str::FromStr;

/// The metrics that a `Memory` publishes. `docs/METRICS.md` names the tier of each.
///
/// A metric that is not published costs nothing: its series are not written, and it is not
/// described to the recorder.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
#[non_exhaustive]
pub enum MetricsTier {
    /// Those that the alerts and the dashboards `overview` and `device` need: some 45 names.
    #[default]
    Basic,
    /// All, with the internals of heap, arenas and admission: some 135 names.
    Detail,
}

impl MetricsTier {
    /// All tiers. Each contains the metrics of those before it.
    pub const ALL: [Self; 2] = [Self::Basic, Self::Detail];

    /// Returns the name used in configuration.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Basic => "basic",
            Self::Detail => "detail",
        }
    }
}

impl fmt::Display for MetricsTier {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
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
