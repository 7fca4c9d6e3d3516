//! The policies that admit requests, by name.
//!
//! Values only; `gates` and `service` make them work.

use std::fmt;
use std::str::FromStr;

/// The limits on requests under way that are tried.
pub(crate) const CONCURRENCY: [u32; 7] = [16, 32, 48, 64, 96, 128, 256];

/// A policy that admits requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Policy {
    /// Nothing: every request is served.
    None,
    /// So many requests under way at most.
    Concurrency(u32),
    /// A threshold on the resident set, sampled each 250 ms.
    Rss250,
    /// A threshold on the resident set, sampled each 10 ms.
    Rss10,
    /// A threshold on the resident set, read afresh for each request.
    Fresh,
    /// A fixed budget of bytes, in percent of the limit; `None`: the best that the model finds.
    Static(Option<u32>),
    /// Envoy, with a threshold on its heap in percent of the limit in `envoy.yaml`.
    Envoy(u32),
    /// lowtide, with its defaults.
    Lowtide,
}

impl fmt::Display for Policy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = match self {
            Self::None => "none".to_owned(),
            Self::Concurrency(most) => format!("conc{most}"),
            Self::Rss250 => "rss250".to_owned(),
            Self::Rss10 => "rss10".to_owned(),
            Self::Fresh => "fresh".to_owned(),
            Self::Static(None) => "static".to_owned(),
            Self::Static(Some(percent)) => format!("static{percent}"),
            Self::Envoy(percent) => format!("envoy{percent}"),
            Self::Lowtide => "lowtide".to_owned(),
        };
        f.pad(&name)
    }
}

impl FromStr for Policy {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        let number = |prefix: &str| -> Option<u32> { name.strip_prefix(prefix)?.parse().ok() };
        let percent = |prefix| number(prefix).filter(|part| (1..=100).contains(part));
        match name {
            "none" => Ok(Self::None),
            "rss250" => Ok(Self::Rss250),
            "rss10" => Ok(Self::Rss10),
            "fresh" => Ok(Self::Fresh),
            "static" => Ok(Self::Static(None)),
            "lowtide" => Ok(Self::Lowtide),
            _ => number("conc")
                .map(Self::Concurrency)
                .or_else(|| percent("static").map(|part| Self::Static(Some(part))))
                .or_else(|| percent("envoy").map(Self::Envoy))
                .ok_or_else(|| {
                    format!(
                        "{name}: expected none, conc16 (a number), rss250, rss10, fresh, static, \
                         static80 (percent), envoy80 (percent) or lowtide"
                    )
                }),
        }
    }
}
