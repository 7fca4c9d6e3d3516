//! The reasons why a signal is not available.

use std::io;
use std::path::{Path, PathBuf};

use thiserror::Error;

/// A signal that is not available.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
#[non_exhaustive]
pub enum SignalError {
    /// A file could not be read.
    #[error("cannot read {path}: {error}", path = path.display(), error = os_error(*code))]
    Unreadable {
        /// The path of the file.
        path: PathBuf,
        /// The operating system's error code.
        code: i32,
    },
    /// A file does not have the expected content.
    #[error("{path} is malformed: expected {expected}", path = path.display())]
    Malformed {
        /// The path of the file.
        path: PathBuf,
        /// The expected content.
        expected: &'static str,
    },
    /// No memory cgroup is visible: only the machine's memory is known to limit this process.
    #[error("no memory cgroup is visible to this process")]
    NoCgroup,
    /// The process's cgroup lies outside the mounts that are visible here, or under a mount from
    /// another cgroup namespace that does not show it, so the mount's root is read instead.
    #[error(
        "cgroup {cgroup:?} is outside the mount {root:?}, so its limit is not known and the root \
         of the mount is read: set LOWTIDE_MEMORY_LIMIT to its limit"
    )]
    Outside {
        /// The path of the process's cgroup.
        cgroup: String,
        /// The root of the mount.
        root: String,
    },
    /// The cgroup has more levels than are read.
    #[error(
        "the cgroup is more than {looked_at} levels deep: limits of further ancestors are ignored"
    )]
    Deep {
        /// The number of levels read.
        looked_at: usize,
    },
    /// The cgroup has no pressure information (PSI): the kernel lacks it (`CONFIG_PSI`, `psi=0`),
    /// version 2 is not mounted here, or this is the root, whose figures are the machine's.
    #[error(
        "memory pressure (PSI) of the cgroup is not available: {}",
        path.as_ref().map_or_else(
            || "no version 2 cgroup below the root is visible".to_owned(),
            |path| format!("cannot read {}", path.display()),
        )
    )]
    NoPsi {
        /// The path of the file, if there is a cgroup.
        path: Option<PathBuf>,
    },
    /// This operating system has no such signals.
    #[error("memory signals are not available on {system}: expected /proc and cgroups")]
    Unsupported {
        /// The operating system.
        system: &'static str,
    },
}

impl SignalError {
    /// Returns the error for a file that could not be read.
    pub(super) fn unreadable(path: &Path, error: &io::Error) -> Self {
        Self::Unreadable { path: path.to_owned(), code: error.raw_os_error().unwrap_or_default() }
    }

    /// Returns `true` if the file does not exist, as opposed to one that cannot be read.
    pub(super) fn is_absent(&self) -> bool {
        let Self::Unreadable { code, .. } = self else { return false };
        [libc::ENOENT, libc::ENOTDIR].contains(code)
    }

    /// Returns `true` if the signal may become available without a change of the system.
    pub(super) fn is_passing(&self) -> bool {
        match self {
            Self::Unreadable { .. } => !self.is_absent(),
            Self::Malformed { .. } => true,
            _ => false,
        }
    }
}

fn os_error(code: i32) -> io::Error {
    io::Error::from_raw_os_error(code)
}
