//! Why a setting of the heap came out otherwise than asked.
//!
//! Names and sentences only: who finds the cause is [`EffectiveConf`](super::EffectiveConf) for
//! what is fixed at start, and [`apply`](super::apply) for what moves later.
//!
//! Invariant: a cause that names a place names the one that this build of jemalloc reads.

use std::fmt;

use super::error::HostError;

/// A setting that came out otherwise than asked.
#[derive(Clone, Debug, PartialEq)]
pub struct Difference {
    /// jemalloc's name for it; `malloc_conf` for a text as a whole, `page` for the page size.
    pub setting: &'static str,
    /// What was asked for.
    pub asked: String,
    /// What is in effect.
    pub found: String,
    /// Why, as far as can be known.
    pub cause: Cause,
}

impl Difference {
    /// Whether only another start of the process can change it.
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
        write!(f, "{setting}: asked {asked}, found {found}: {cause}")
    }
}

/// A place from which jemalloc takes its configuration at start. A later one of these wins over an
/// earlier one, setting by setting.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum ConfSource {
    /// The string given when jemalloc was built (`JEMALLOC_SYS_WITH_MALLOC_CONF`).
    Build,
    /// The symbol of this name in the binary, as [`heap_profile!`](crate::heap_profile) exports it.
    Binary(&'static str),
    /// The name of the file that this symbolic link refers to.
    Symlink(&'static str),
    /// The environment variable of this name.
    Variable(&'static str),
    /// The symbol of this name in the binary, which wins over the variable.
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
                write!(f, "the binary's symbol {name}, which wins over every variable")
            }
        }
    }
}

/// Why a setting came out otherwise than asked.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum Cause {
    /// Another place than the one that asked set it.
    SetBy(ConfSource),
    /// No place that jemalloc reads names it; the binary carries no string under this symbol.
    NoSymbol(&'static str),
    /// No place that jemalloc reads names it.
    NotAsked,
    /// It stands where this build of jemalloc does not look.
    NotRead {
        /// Where it stands.
        written: &'static str,
        /// Where it would be read.
        read: &'static str,
    },
    /// jemalloc refused the value.
    Refused {
        /// Where it stands.
        by: ConfSource,
        /// What jemalloc takes.
        expected: &'static str,
    },
    /// jemalloc knows no setting of this name.
    Unknown(ConfSource),
    /// jemalloc read this place no further, so that nothing after it had any effect.
    Broken(ConfSource),
    /// jemalloc takes no more than this, from any later place.
    Capped {
        /// The most it takes.
        most: u64,
    },
    /// This build of jemalloc cannot run background threads on this platform (musl).
    NoBackgroundThreads,
    /// The kernel gives huge pages unasked, or has none.
    KernelHugePages,
    /// jemalloc was built for another page size than this kernel's.
    PageOfBuild,
    /// jemalloc counts whole milliseconds, within bounds.
    WholeMilliseconds {
        /// The most it takes.
        most: u64,
    },
    /// The value was outside what jemalloc takes while it runs.
    Bounds {
        /// The least it takes.
        least: u64,
        /// The most it takes, fixed at start.
        most: u64,
    },
    /// The arena that jemalloc makes for very large blocks: while background threads are off it is
    /// given a decay time of 0.
    LargeBlocks {
        /// The arena.
        arena: u32,
    },
    /// Something else sets it as well.
    SetElsewhere {
        /// In this arena; `None`: in all of them.
        arena: Option<u32>,
    },
    /// jemalloc refused the call.
    Error(HostError),
    /// Not found out.
    NotKnown,
}

impl fmt::Display for Cause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::SetBy(by) => write!(f, "set by {by}"),
            Self::NoSymbol(name) => write!(
                f,
                "no place that jemalloc reads asks for it: the binary carries no symbol {name} \
                 (lowtide::heap_profile! exports it)"
            ),
            Self::NotAsked => f.write_str("no place that jemalloc reads asks for it"),
            Self::NotRead { written, read } => {
                write!(f, "this build of jemalloc does not read {written}: it reads {read}")
            }
            Self::Refused { by, expected } => {
                write!(f, "jemalloc refused what {by} says: expected {expected}")
            }
            Self::Unknown(by) => {
                write!(f, "jemalloc knows no such setting; it stands in {by}")
            }
            Self::Broken(by) => write!(
                f,
                "jemalloc read {by} no further than here: expected name:value, names of letters, \
                 digits and _, separated by commas without spaces"
            ),
            Self::Capped { most } => {
                write!(f, "jemalloc takes at most {most}, which an earlier place or the build says")
            }
            Self::NoBackgroundThreads => {
                f.write_str("this build of jemalloc cannot run background threads on this platform")
            }
            Self::KernelHugePages => f.write_str(
                "as /sys/kernel/mm/transparent_hugepage/enabled says; thp:never keeps the heap out \
                 of it",
            ),
            Self::PageOfBuild => f.write_str(
                "jemalloc was built for larger pages than this kernel's, and gives back nothing \
                 smaller: build with JEMALLOC_SYS_WITH_LG_PAGE=12 for 4 KiB",
            ),
            Self::WholeMilliseconds { most } => {
                write!(f, "jemalloc counts whole milliseconds, from 1 to {most}")
            }
            Self::Bounds { least, most } => {
                write!(f, "jemalloc takes {least} to {most}, which was fixed at start")
            }
            Self::LargeBlocks { arena } => write!(
                f,
                "arena {arena} holds very large blocks only, and is given a decay time of 0 while \
                 background threads are off"
            ),
            Self::SetElsewhere { arena: Some(arena) } => {
                write!(f, "something else sets it as well, in arena {arena}")
            }
            Self::SetElsewhere { arena: None } => {
                f.write_str("something else set it at the same time")
            }
            Self::Error(error) => error.fmt(f),
            Self::NotKnown => f.write_str("jemalloc does not say why"),
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
        assert!(text.starts_with("background_thread: asked true, found false: this "), "{text}");
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
