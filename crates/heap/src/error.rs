//! Errors of the process heap, as values.
//!
//! They mean that jemalloc refused a call. A missing platform feature is [`Unsupported`] in a
//! result, and a setting that differs from the request is a [`Difference`](super::Difference).
//!
//! Invariant: every error names the control and the operation.

use std::error::Error;
use std::fmt;

use super::mallctl::ARENA_LIMIT;

/// A failed operation on the process heap.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum HostError {
    /// jemalloc refused a control call.
    Mallctl {
        /// The control's name, as in jemalloc's manual.
        name: &'static str,
        /// The operation.
        act: Act,
        /// jemalloc's answer.
        refusal: Refusal,
    },
    /// jemalloc was built without statistics.
    NoStatistics,
    /// jemalloc has an arena per CPU, and cannot return a thread that was bound to another arena.
    ArenasByCpu {
        /// The value of `percpu_arena`.
        found: &'static str,
    },
    /// Rust's allocations cannot be redirected into an arena: they do not reach
    /// [`Heap`](super::Heap), or the system is not Linux.
    NotRedirected,
    /// The object was created before a fork and is used in the child.
    Forked,
}

impl fmt::Display for HostError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Mallctl { name, act, refusal } => {
                write!(f, "jemalloc refused to {act} its control {name:?}: {refusal}")
            }
            Self::NoStatistics => f.write_str(
                "jemalloc has no statistics: expected config.stats = true, found false \
                 (a library named by JEMALLOC_OVERRIDE must be built with statistics)",
            ),
            Self::ArenasByCpu { found } => write!(
                f,
                "a thread could not leave the arena again: expected opt.percpu_arena = disabled, \
                 found {found}"
            ),
            Self::NotRedirected => f.write_str(
                "allocations cannot be redirected into the arena: expected lowtide's `Heap` as \
                 global allocator, on Linux",
            ),
            Self::Forked => f.write_str(
                "the heap object was created before a fork and is used in the child: expected a \
                 new one",
            ),
        }
    }
}

impl Error for HostError {}

lowtide_core::named_enum! {
    /// An operation on a control.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    #[non_exhaustive]
    pub enum Act {
        /// Look up its name.
        Find = "find",
        /// Read its value.
        Read = "read",
        /// Write a value.
        Write = "write",
        /// Trigger its action, for a control without a value.
        Perform = "perform",
    }
}

/// jemalloc's answer to a refused call, in words.
#[derive(Clone, Copy, PartialEq)]
pub struct Refusal(Answer);

#[derive(Clone, Copy, PartialEq)]
enum Answer {
    /// From a call with a value.
    Explained(tikv_jemalloc_ctl::Error),
    /// The `errno` value from a call without one.
    Code(i32),
    /// Ours: jemalloc would not check this index.
    NoSuchArena(u32),
}

impl Refusal {
    pub(crate) const fn explained(error: tikv_jemalloc_ctl::Error) -> Self {
        Self(Answer::Explained(error))
    }

    pub(crate) const fn code(code: i32) -> Self {
        Self(Answer::Code(code))
    }

    pub(crate) const fn no_such_arena(arena: u32) -> Self {
        Self(Answer::NoSuchArena(arena))
    }

    /// Returns `true` if jemalloc answered EFAULT, "failed in some way not related to reading or
    /// writing".
    pub(crate) fn is_fault(self) -> bool {
        self.0 == Answer::Code(libc::EFAULT)
    }
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            Answer::Explained(error) => write!(f, "{error}"),
            Answer::Code(code) => write!(f, "error code {code}, expected 0"),
            Answer::NoSuchArena(arena) => {
                write!(f, "arena index {arena} is out of range: expected below {ARENA_LIMIT}")
            }
        }
    }
}

impl fmt::Debug for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Refusal({self})")
    }
}

/// The reason this process does not support an operation on a heap.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Unsupported {
    /// The operating system is not Linux.
    NotLinux,
    /// The C library is not glibc.
    NotGlibc,
    /// This glibc has no such function, or the process cannot look it up.
    SymbolMissing(&'static str),
    /// Rust's allocations do not reach jemalloc, so it has nothing to release.
    NoJemalloc,
}

impl fmt::Display for Unsupported {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NotLinux => f.write_str("not Linux"),
            Self::NotGlibc => f.write_str("the C library is not glibc"),
            Self::SymbolMissing(name) => {
                write!(f, "this glibc has no function {name:?}: expected glibc 2.33 or later")
            }
            Self::NoJemalloc => f.write_str("jemalloc is not the global allocator"),
        }
    }
}

impl Error for Unsupported {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_names_the_control_the_act_and_the_answer() {
        let refusal = Refusal::code(libc::EFAULT);
        let error = HostError::Mallctl { name: "arena.4096.purge", act: Act::Perform, refusal };
        let text = error.to_string();
        for part in ["arena.4096.purge", "perform", "14"] {
            assert!(text.contains(part), "{text}");
        }
        assert!(refusal.is_fault() && !Refusal::code(libc::EPERM).is_fault());
    }
}
