//! What can go wrong with the process heap, as values.
//!
//! Raised only when jemalloc itself refused; what a platform cannot do is [`Unsupported`] inside an
//! answer, and a setting that came out otherwise is a [`Difference`](super::Difference).
//!
//! Invariant: every error names the control and what was tried with it.

use std::fmt;

use thiserror::Error;

use super::mallctl::ARENA_LIMIT;

/// An operation on the process heap that failed.
#[derive(Clone, Debug, Error, PartialEq)]
#[non_exhaustive]
pub enum HostError {
    /// jemalloc refused a control call.
    #[error("jemalloc refused to {act} its control {name:?}: {refusal}")]
    Mallctl {
        /// Name of the control, as in jemalloc's manual.
        name: &'static str,
        /// What was tried.
        act: Act,
        /// jemalloc's answer.
        refusal: Refusal,
    },
    /// jemalloc was built without statistics.
    #[error(
        "jemalloc has no statistics: expected config.stats = true, found false \
         (a library named by JEMALLOC_OVERRIDE must be built with statistics)"
    )]
    NoStatistics,
    /// jemalloc has an arena for each CPU, and lets no thread go back to them that was bound to
    /// another.
    #[error(
        "a thread could not leave the arena again: expected opt.percpu_arena = disabled, found \
         {found}"
    )]
    ArenasByCpu {
        /// What `percpu_arena` is.
        found: &'static str,
    },
    /// The object was made before a fork, and this is the child.
    #[error("made before a fork and used in the child: make a new one in the child")]
    Forked,
}

/// What was tried with a control.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Act {
    /// Translate its name.
    Find,
    /// Read its value.
    Read,
    /// Write a value.
    Write,
    /// Have it done, for a control without a value.
    Perform,
}

impl fmt::Display for Act {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Find => "find",
            Self::Read => "read",
            Self::Write => "write",
            Self::Perform => "perform",
        })
    }
}

/// Why a control call was refused: jemalloc's answer, in words.
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

    /// Whether jemalloc answered EFAULT, "failed in some way not related to reading or writing".
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
                write!(f, "no arena can have the index {arena}: expected one below {ARENA_LIMIT}")
            }
        }
    }
}

impl fmt::Debug for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Refusal({self})")
    }
}

/// Why this process cannot do something to a heap.
#[derive(Clone, Copy, Debug, Error, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Unsupported {
    /// The operating system is not Linux.
    #[error("not Linux")]
    NotLinux,
    /// The C library is not glibc.
    #[error("the C library is not glibc")]
    NotGlibc,
    /// This glibc has no such function, or the process cannot look it up.
    #[error("this glibc has no function {0:?} that could be found")]
    SymbolMissing(&'static str),
    /// Rust's allocations do not reach jemalloc, so it holds nothing to give back.
    #[error("jemalloc is not the global allocator")]
    NoJemalloc,
}

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
