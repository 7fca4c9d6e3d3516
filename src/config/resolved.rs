//! Values with their sources.

use std::fmt;

/// The source of a value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Source {
    /// A `LOWTIDE_*` variable.
    Environment,
    /// The program, through the builder.
    Code,
    /// The profile.
    Profile,
    /// The default, which is the same under every profile.
    Default,
}

impl fmt::Display for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Environment => "environment",
            Self::Code => "code",
            Self::Profile => "profile",
            Self::Default => "default",
        })
    }
}

/// A value and its source.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Resolved<T> {
    /// The value in force.
    pub value: T,
    /// The source of the value.
    pub source: Source,
}

/// Resolves a setting that profiles define.
pub(super) fn pick<T>(environment: Option<T>, code: Option<T>, profile: T) -> Resolved<T> {
    let said = environment.is_some() || code.is_some();
    let picked = pick_or(environment, code, profile);
    if said { picked } else { Resolved { source: Source::Profile, ..picked } }
}

/// Resolves a setting that no profile defines.
pub(super) fn pick_or<T>(environment: Option<T>, code: Option<T>, default: T) -> Resolved<T> {
    match (environment, code) {
        (Some(value), _) => Resolved { value, source: Source::Environment },
        (None, Some(value)) => Resolved { value, source: Source::Code },
        (None, None) => Resolved { value: default, source: Source::Default },
    }
}
