//! The causes why a heap setting differs from the requested value.
//!
//! Names and messages only. [`EffectiveConf`](super::EffectiveConf) finds the cause for settings
//! that are fixed at start, and [`apply`](super::apply) for those that can change later.
//!
//! Invariant: a cause that names a configuration source names one that this build of jemalloc
//! reads.

use std::fmt;

use super::error::HostError;

/// A setting that differs from the requested value.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Difference {
    /// jemalloc's name of the setting; `malloc_conf` for a whole configuration text, `page` for the
    /// page size.
    pub setting: &'static str,
    /// The requested value.
    pub asked: String,
    /// The value in effect.
    pub found: String,
    /// The cause, if known.
    pub cause: Cause,
}

impl Difference {
    /// Returns `true` if only a restart of the process can change it.
    #[must_use]
    pub const fn is_fixed_at_start(&self) -> bool {
        match super::knobs::knob(self.setting) {
            Some(knob) => !knob.moves,
            None => true,
        }
    }
}

impl fmt::Display for Difference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { setting, asked, found, cause } = self;
        write!(f, "{setting}: requested {asked}, found {found}: {cause}")
    }
}

/// A source of jemalloc's configuration at start. A later one overrides an earlier one, setting by
/// setting.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum ConfSource {
    /// The string set when jemalloc was built (`JEMALLOC_SYS_WITH_MALLOC_CONF`).
    Build,
    /// The symbol of this name in the binary, as exported by
    /// [`global_allocator!`](crate::global_allocator).
    Binary(&'static str),
    /// The name that this symbolic link refers to.
    Symlink(&'static str),
    /// The environment variable of this name.
    Variable(&'static str),
    /// The symbol of this name in the binary that overrides the variable.
    HarderSymbol(&'static str),
}

impl fmt::Display for ConfSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Build => f.write_str("the build of jemalloc (JEMALLOC_SYS_WITH_MALLOC_CONF)"),
            Self::Binary(name) => write!(f, "the binary's symbol {name}"),
            Self::Symlink(path) => write!(f, "the symbolic link {path}"),
            Self::Variable(name) => write!(f, "the variable {name}"),
            Self::HarderSymbol(name) => {
                write!(f, "the binary's symbol {name}, which overrides every variable")
            }
        }
    }
}

/// The cause why a setting differs from the requested value.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum Cause {
    /// Another source set it.
    SetBy(ConfSource),
    /// No source that jemalloc reads sets it, and the binary has no symbol of this name.
    NoSymbol(&'static str),
    /// No source that jemalloc reads sets it.
    NotAsked,
    /// It is set in a source that this build of jemalloc does not read.
    NotRead {
        /// The source that sets it.
        written: &'static str,
        /// The source that jemalloc reads.
        read: &'static str,
    },
    /// jemalloc refused the value.
    Refused {
        /// The source that sets it.
        by: ConfSource,
        /// The values that jemalloc accepts.
        expected: &'static str,
    },
    /// jemalloc has no setting of this name.
    Unknown(ConfSource),
    /// jemalloc stopped reading this source here, so everything after it was ignored.
    Broken(ConfSource),
    /// A limit from an earlier source caps the value.
    Capped {
        /// The largest value that jemalloc accepts.
        most: u64,
    },
    /// This build of jemalloc cannot run background threads on this platform (musl).
    NoBackgroundThreads,
    /// The kernel always gives huge pages, or has none.
    KernelHugePages,
    /// jemalloc was built for another page size than this kernel's.
    PageOfBuild,
    /// jemalloc counts whole milliseconds, within bounds.
    WholeMilliseconds {
        /// The largest value that jemalloc accepts, in ms.
        most: u64,
    },
    /// The value is outside the range that jemalloc accepts while it runs.
    Bounds {
        /// The smallest value that jemalloc accepts.
        least: u64,
        /// The largest value that jemalloc accepts, fixed at start.
        most: u64,
    },
    /// The setting is of the arena that jemalloc creates for very large blocks: without background
    /// threads its decay time is 0.
    LargeBlocks {
        /// The arena's index.
        arena: u32,
    },
    /// Other code sets it as well.
    SetElsewhere {
        /// The arena in which it was set; `None` for all of them.
        arena: Option<u32>,
    },
    /// jemalloc refused the call.
    Error(HostError),
    /// The cause is unknown.
    NotKnown,
}

impl fmt::Display for Cause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::SetBy(by) => write!(f, "set by {by}"),
            Self::NoSymbol(name) => write!(
                f,
                "set in no source that jemalloc reads: the binary has no symbol {name} \
                 (lowtide_heap::global_allocator! exports it)"
            ),
            Self::NotAsked => f.write_str("set in no source that jemalloc reads"),
            Self::NotRead { written, read } => {
                write!(f, "this build of jemalloc does not read {written}: it reads {read}")
            }
            Self::Refused { by, expected } => {
                write!(f, "jemalloc refused the value from {by}: expected {expected}")
            }
            Self::Unknown(by) => {
                write!(f, "unknown jemalloc setting in {by}")
            }
            Self::Broken(by) => write!(
                f,
                "jemalloc stopped reading {by} here: expected name:value, names of letters, \
                 digits and _, separated by commas without spaces"
            ),
            Self::Capped { most } => {
                write!(f, "jemalloc accepts at most {most}, set by an earlier source or its build")
            }
            Self::NoBackgroundThreads => {
                f.write_str("this build of jemalloc cannot run background threads on this platform")
            }
            Self::KernelHugePages => f.write_str(
                "as in /sys/kernel/mm/transparent_hugepage/enabled; thp:never keeps the heap out \
                 of huge pages",
            ),
            Self::PageOfBuild => f.write_str(
                "jemalloc was built for larger pages than this kernel's, and releases no \
                 smaller ones: build with JEMALLOC_SYS_WITH_LG_PAGE=12 for 4 KiB",
            ),
            Self::WholeMilliseconds { most } => {
                write!(f, "jemalloc counts whole milliseconds, from 1 to {most}")
            }
            Self::Bounds { least, most } => {
                write!(f, "jemalloc accepts {least} to {most}, fixed at start")
            }
            Self::LargeBlocks { arena } => write!(
                f,
                "arena {arena} holds only very large blocks, and has a decay time of 0 while \
                 background threads are off"
            ),
            Self::SetElsewhere { arena: Some(arena) } => {
                write!(f, "other code also sets it, in arena {arena}")
            }
            Self::SetElsewhere { arena: None } => f.write_str("other code set it at the same time"),
            Self::Error(error) => error.fmt(f),
            Self::NotKnown => f.write_str("unknown cause"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_difference_reads_as_a_sentence() {
        let difference = Difference {
            setting: "background_thread",
            asked: "true".into(),
            found: "false".into(),
            cause: Cause::NoBackgroundThreads,
        };
        let text = difference.to_string();
        assert!(
            text.starts_with("background_thread: requested true, found false: this "),
            "{text}"
        );
        assert!(!difference.is_fixed_at_start());
    }

    #[test]
    fn a_cause_names_the_place_that_is_read() {
        for (cause, text) in [
            (
                Cause::SetBy(ConfSource::Variable("_RJEM_MALLOC_CONF")),
                "set by the variable _RJEM_MALLOC_CONF",
            ),
            (
                Cause::NotRead { written: "MALLOC_CONF", read: "_RJEM_MALLOC_CONF" },
                "this build of jemalloc does not read MALLOC_CONF: it reads _RJEM_MALLOC_CONF",
            ),
        ] {
            assert_eq!(cause.to_string(), text);
        }
    }
}
