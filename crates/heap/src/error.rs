//! Errors of the process heap, as values.
//!
//! A setting that differs from the request is a [`Difference`](super::Difference), and a missing
//! platform feature is [`Unsupported`] in a result.
//!
//! Invariant: every error of jemalloc names the control and the operation.

use std::fmt;
use std::io;

use lowtide_core::bytes::ByteSize;
use lowtide_core::fork::Birth;
use thiserror::Error;

use super::mallctl::{ARENA_LIMIT, ARENA_NAME_MAX};

/// The maximum size of a profile's text that is read. A profile has some 200 bytes for each call
/// stack, and one line for each mapping of the process.
pub(super) const PROFILE_TEXT_MAX: ByteSize = ByteSize::mib(64);

/// A failed operation on the process heap.
#[derive(Clone, Debug, Error, PartialEq)]
#[non_exhaustive]
pub enum HostError {
    /// jemalloc refused a control call.
    #[error(
        "jemalloc refused to {act} its control {name:?}: {}",
        io::Error::from_raw_os_error(*code)
    )]
    Mallctl {
        /// The control's name, as in jemalloc's manual.
        name: &'static str,
        /// The operation: find, read, write or perform.
        act: &'static str,
        /// jemalloc's answer, an `errno` value.
        code: i32,
    },
    /// jemalloc would not check this index of an arena.
    #[error("arena index {index} is out of range: expected below {ARENA_LIMIT}")]
    NoSuchArena {
        /// The index.
        index: u32,
    },
    /// jemalloc was built without statistics.
    #[error(
        "jemalloc has no statistics: expected config.stats = true, found false (a library named by \
         JEMALLOC_OVERRIDE must be built with statistics)"
    )]
    NoStatistics,
    /// jemalloc has an arena per CPU, and cannot return a thread that was bound to another arena.
    #[error(
        "a thread could not leave the arena again: expected opt.percpu_arena = disabled, found \
         {found}"
    )]
    ArenasByCpu {
        /// The value of `percpu_arena`.
        found: &'static str,
    },
    /// Rust's allocations cannot be redirected into an arena: they do not reach
    /// [`Heap`](super::Heap), or the system is not Linux.
    #[error(
        "allocations cannot be redirected into the arena: expected lowtide's `Heap` as global \
         allocator, on Linux"
    )]
    NotRedirected,
    /// The object was created before a fork and is used in the child.
    #[error(
        "the heap object was created before a fork and is used in the child: expected a new one"
    )]
    Forked,
    /// The name of an arena is empty, too long, or contains a NUL.
    #[error("invalid arena name {name:?}: expected 1 to {ARENA_NAME_MAX} bytes without a NUL")]
    ArenaName {
        /// The name.
        name: String,
    },
    /// Another arena has the name.
    #[error("arena name {name:?} is already in use: expected a unique name")]
    ArenaNameTaken {
        /// The name.
        name: String,
    },
    /// All arena indices are in use.
    #[error("no arena index is free: expected fewer than {ARENA_LIMIT} arenas")]
    NoArenaIndex,
    /// An arena cannot be retired, because pages have blocks that are live or in thread caches.
    #[error("cannot retire the arena: {bytes} of its pages have live or thread-cached blocks")]
    ArenaInUse {
        /// Bytes of these pages.
        bytes: ByteSize,
    },
    /// An arena cannot be retired, because a thread could not leave it at the end of a scope.
    #[error("cannot retire the arena: a thread is bound to it: expected that thread to end first")]
    ThreadBound,
    /// This build has no heap profiler.
    #[error("this build has no heap profiler: build with the feature `profiling`")]
    NoProfiler,
    /// The heap profiler is not active.
    #[error(
        "the heap profiler is not active: expected prof:true in jemalloc's settings when the \
         process starts"
    )]
    ProfilerNotActive,
    /// Another heap profile is being taken.
    #[error("another heap profile is being taken: try again")]
    ProfileBusy,
    /// The process may write files only up to this size (`RLIMIT_FSIZE`), above which the kernel
    /// would end it.
    #[error(
        "no heap profile: file size limit {limit} (ulimit -f), expected at least {PROFILE_TEXT_MAX}"
    )]
    FileSizeLimit {
        /// The limit.
        limit: ByteSize,
    },
    /// The file of a heap profile could not be created, read or renamed.
    #[error("cannot access the file of the heap profile: {error}")]
    ProfileFile {
        /// The system's message.
        error: String,
    },
    /// The folder for spilled memory is on a file system in memory.
    #[error("cannot spill to {dir}: {kind} is memory; expected a folder on a disk")]
    SpillInMemory {
        /// The folder.
        dir: String,
        /// The kind of file system.
        kind: &'static str,
    },
    /// The configured maximum, the limit of a file's size (`ulimit -f`) or the disk leaves too
    /// little room for spilled memory.
    #[error("cannot spill to {dir}: room for {room} (maximum, ulimit -f, disk), expected {least}")]
    SpillRoom {
        /// The folder.
        dir: String,
        /// The least of the three.
        room: ByteSize,
        /// The least.
        least: ByteSize,
    },
    /// The file for spilled memory could not be created or mapped.
    #[error(
        "cannot spill to {dir}: {error}; expected a writable folder, a file system with O_TMPFILE \
         and fallocate, and no mlockall"
    )]
    SpillFile {
        /// The folder.
        dir: String,
        /// The system's message.
        error: String,
    },
    /// A text is not a heap profile of jemalloc.
    #[error("line {line} of the heap profile: expected {expected}")]
    ProfileText {
        /// The number of the line, from 1.
        line: usize,
        /// The expected content.
        expected: &'static str,
    },
}

/// Returns an error in a child that was forked since the birth.
pub(super) fn check_birth(birth: Birth) -> Result<(), HostError> {
    if birth.is_here() { Ok(()) } else { Err(HostError::Forked) }
}

impl From<io::Error> for HostError {
    fn from(error: io::Error) -> Self {
        Self::ProfileFile { error: error.to_string() }
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_names_the_control_the_act_and_the_answer() {
        let code = libc::EFAULT;
        let error = HostError::Mallctl { name: "arena.4096.purge", act: "perform", code };
        let text = error.to_string();
        for part in ["arena.4096.purge", "perform", "14"] {
            assert!(text.contains(part), "{text}");
        }
    }
}
