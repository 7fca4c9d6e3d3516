//! The policies that admit requests, by name.
//!
//! Values only; `service` makes them work.

use std::fmt;
use std::str::FromStr;

/// A policy that admits requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Policy {
    /// Nothing: every request is served.
    None,
    /// A threshold on the resident set, sampled each 10 ms.
    Rss10,
    /// A fixed budget of bytes, in percent of the limit.
    Static(u32),
    /// Envoy, with a threshold on its heap in percent of the limit in `envoy.yaml`.
    Envoy(u32),
    /// lowtide, with its defaults.
    Lowtide,
}

impl fmt::Display for Policy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::None => f.write_str("none"),
            Self::Rss10 => f.write_str("rss10"),
            Self::Static(percent) => write!(f, "static{percent}"),
            Self::Envoy(percent) => write!(f, "envoy{percent}"),
            Self::Lowtide => f.write_str("lowtide"),
        }
    }
}

impl FromStr for Policy {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        let percent = |prefix: &str| {
            let number = name.strip_prefix(prefix)?.parse::<u32>().ok()?;
            (1..=100).contains(&number).then_some(number)
        };
        match name {
            "none" => Ok(Self::None),
            "rss10" => Ok(Self::Rss10),
            "lowtide" => Ok(Self::Lowtide),
            _ => {
                let found = percent("static")
                    .map(Self::Static)
                    .or_else(|| percent("envoy").map(Self::Envoy));
                found.ok_or_else(|| {
                    format!(
                        "{name}: expected none, rss10, static80 (percent), envoy80 (percent) or \
                         lowtide"
                    )
                })
            }
        }
    }
}
