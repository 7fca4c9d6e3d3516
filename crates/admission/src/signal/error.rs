//! The reasons why a signal is not available.

use std::path::PathBuf;

use thiserror::Error;

/// A signal that is not available.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
#[non_exhaustive]
pub enum SignalError {
    /// A file could not be read.
    #[error("cannot read {path}: {kind}", path = path.display())]
    Unreadable {
        /// The path of the file.
        path: PathBuf,
        /// The operating system's error.
        kind: std::io::ErrorKind,
    },
    /// A file does not have the expected content.
    #[error("{path} is malformed: expected {expected}", path = path.display())]
    Malformed {
        /// The path of the file.
        path: PathBuf,
        /// The expected content.
        expected: &'static str,
    },
    /// No memory cgroup is visible: only the machine's memory limits this process.
    #[error("no memory cgroup is visible to this process")]
    NoCgroup,
    /// The process's cgroup lies outside the mount that is visible here, so the mount's root stands
    /// for it.
    #[error("cgroup {cgroup:?} is outside the mount {root:?}: reading the root of the mount")]
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
