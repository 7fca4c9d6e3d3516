//! The file of a recording: opened, locked, read, allocated, written in place.
//!
//! It is written with `pwrite`, not through a mapping. Both survive SIGKILL, because the page cache
//! is the kernel's. A mapping becomes SIGBUS if another process truncates the file, or if a file
//! system that copies on write has no room; a failed `pwrite` is an error value. No signal can come
//! out of this module: a file size limit of the process, which sends SIGXFSZ, is checked first.
//!
//! At the start the whole file is allocated and each page is written once, so a full disk shows
//! then. An exclusive lock (`flock`) excludes another `Memory` with the same path, in this process
//! or another. A forked child shares the lock until it ends or calls `exec`.
//!
//! Nothing here waits: a FIFO, a device, a folder or a symbolic link is an error, and so is a file
//! that is locked or is not a recording. If the file is replaced or truncated
//! while it is in use, writes continue and the recording is lost.
#![expect(unsafe_code, reason = "flock, getrlimit and posix_fallocate are C calls")]

use std::fs::{File, OpenOptions};
use std::io::{self, Read as _};
use std::os::fd::AsRawFd as _;
use std::os::unix::fs::{FileExt as _, FileTypeExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};

use thiserror::Error;

use super::format::{Contents, FILE_BYTES, HALVES_AT, LOOKS_AT, MARK, read};

/// The bytes that are written at once when the pages are touched.
const TOUCHED: usize = 64 << 10;
/// Only the service's user may read it: it contains routes and tenants.
const MODE: u32 = 0o600;

/// An error that prevents a recording.
#[derive(Debug, Error)]
pub(super) enum FlightError {
    #[error("cannot open {path:?}: {error}")]
    Open { path: PathBuf, error: io::Error },
    #[error("{path:?} is {found}: expected a file, or a path at which one can be created")]
    NotAFile { path: PathBuf, found: &'static str },
    #[error("{path:?} is locked: another process, or another `Memory`, records into it")]
    Locked { path: PathBuf },
    #[error("cannot lock {path:?}: {error}")]
    Lock { path: PathBuf, error: io::Error },
    #[error("{path:?} is not a recording: expected one, an empty file or no file")]
    Foreign { path: PathBuf },
    #[error("cannot read {path:?}: {error}")]
    Read { path: PathBuf, error: io::Error },
    #[error("the file size limit is {limit} bytes: expected at least {FILE_BYTES} (ulimit -f)")]
    SizeLimit { limit: u64 },
    #[error("cannot allocate {FILE_BYTES} bytes at {path:?}: {error}")]
    Allocate { path: PathBuf, error: io::Error },
    #[error("cannot write {path:?}: {error}")]
    Write { path: PathBuf, error: io::Error },
}

/// A file that is locked, and after [`FlightFile::prepare`] allocated.
#[derive(Debug)]
pub(in crate::memory) struct FlightFile {
    file: File,
    path: PathBuf,
    /// The number of halves and of looks that were written.
    halves: u64,
    looks: u64,
}

impl FlightFile {
    /// Opens or creates the file, locks it, and reads what the last run left.
    pub(super) fn open(path: &Path) -> Result<(Self, Contents), FlightError> {
        let owned = || path.to_owned();
        if let Ok(found) = path.symlink_metadata() {
            check_kind(path, found.file_type())?;
        }
        // It may have been replaced since: no symbolic link is followed, and a FIFO does not block.
        let flags = libc::O_NOFOLLOW | libc::O_NONBLOCK | libc::O_NOCTTY;
        let mut options = OpenOptions::new();
        options.read(true).write(true).create(true).truncate(false);
        let file = options.mode(MODE).custom_flags(flags).open(path);
        let file = file.map_err(|error| FlightError::Open { path: owned(), error })?;
        let found = file.metadata().map_err(|error| FlightError::Open { path: owned(), error })?;
        check_kind(path, found.file_type())?;
        lock(&file).map_err(|error| match error.kind() {
            io::ErrorKind::WouldBlock => FlightError::Locked { path: owned() },
            _ => FlightError::Lock { path: owned(), error },
        })?;
        let mut bytes = Vec::with_capacity(FILE_BYTES);
        let read_all = (&file).take(FILE_BYTES as u64).read_to_end(&mut bytes);
        read_all.map_err(|error| FlightError::Read { path: owned(), error })?;
        let contents = match read(&bytes) {
            // The newest half may have been cut off.
            Contents::Recording(_) if bytes.len() < FILE_BYTES => Contents::Unreadable,
            other => other,
        };
        // A longer file is not ours, even if it begins with zeros, as an image does.
        let is_longer = found.len() > FILE_BYTES as u64;
        if contents == Contents::Foreign || (contents == Contents::Nothing && is_longer) {
            return Err(FlightError::Foreign { path: owned() });
        }
        Ok((Self { file, path: owned(), halves: 0, looks: 0 }, contents))
    }

    /// Erases the file, allocates all of it, and writes each page once.
    pub(super) fn prepare(&self) -> Result<(), FlightError> {
        let limit = size_limit();
        if limit < FILE_BYTES as u64 {
            return Err(FlightError::SizeLimit { limit });
        }
        self.fill().map_err(|error| {
            // Without room for all of it, it takes none. If that fails too, it stays as it is.
            let _ = self.file.set_len(0);
            FlightError::Allocate { path: self.path.clone(), error }
        })
    }

    fn fill(&self) -> io::Result<()> {
        self.file.set_len(FILE_BYTES as u64)?;
        allocate(&self.file)?;
        // The mark first, and never over it: a start that is interrupted leaves a recording.
        self.file.write_all_at(MARK, 0)?;
        let zeros = vec![0; TOUCHED];
        for at in (0..FILE_BYTES).step_by(TOUCHED) {
            let kept = if at == 0 { MARK.len() } else { 0 };
            self.file.write_all_at(zeros.get(kept..).unwrap_or_default(), (at + kept) as u64)?;
        }
        Ok(())
    }

    /// Returns the sequence number of the next half.
    pub(super) const fn next_half(&self) -> u64 {
        self.halves + 1
    }

    /// Returns the sequence number of the next look.
    pub(super) const fn next_look(&self) -> u64 {
        self.looks + 1
    }

    /// Writes a half over the older one.
    pub(super) fn write_half(&mut self, bytes: &[u8]) -> Result<(), FlightError> {
        self.halves += 1;
        self.write(bytes, HALVES_AT[usize::from(self.halves % 2 == 1)])
    }

    /// Writes a look over the older one.
    pub(super) fn write_look(&mut self, bytes: &[u8]) -> Result<(), FlightError> {
        self.looks += 1;
        self.write(bytes, LOOKS_AT[usize::from(self.looks % 2 == 1)])
    }

    fn write(&self, bytes: &[u8], at: usize) -> Result<(), FlightError> {
        let written = self.file.write_all_at(bytes, at as u64);
        written.map_err(|error| FlightError::Write { path: self.path.clone(), error })
    }
}

fn check_kind(path: &Path, kind: std::fs::FileType) -> Result<(), FlightError> {
    let found = match kind {
        _ if kind.is_file() => return Ok(()),
        _ if kind.is_dir() => "a folder",
        _ if kind.is_symlink() => "a symbolic link",
        _ if kind.is_fifo() => "a FIFO",
        _ if kind.is_socket() => "a socket",
        _ => "a device",
    };
    Err(FlightError::NotAFile { path: path.to_owned(), found })
}

/// Locks the file exclusively, without waiting.
fn lock(file: &File) -> io::Result<()> {
    // SAFETY: `flock` takes a descriptor, which `file` keeps open, and touches no memory.
    match unsafe { libc::flock(file.as_raw_fd(), libc::LOCK_EX | libc::LOCK_NB) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Returns the largest size of a file that this process may write, above which the kernel sends
/// SIGXFSZ.
fn size_limit() -> u64 {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: `limit` is a valid place for the result.
    let done = unsafe { libc::getrlimit(libc::RLIMIT_FSIZE, &raw mut limit) };
    if done == 0 { limit.rlim_cur } else { u64::MAX }
}

/// Allocates the file's blocks if the file system can without writing them. Otherwise the writes
/// that follow allocate them.
#[cfg(target_os = "linux")]
fn allocate(file: &File) -> io::Result<()> {
    let length = libc::off_t::try_from(FILE_BYTES).unwrap_or(libc::off_t::MAX);
    // SAFETY: `posix_fallocate` takes a descriptor, which `file` keeps open, and touches no memory.
    match unsafe { libc::posix_fallocate(file.as_raw_fd(), 0, length) } {
        0 | libc::EOPNOTSUPP | libc::EINVAL | libc::ENOSYS => Ok(()),
        error => Err(io::Error::from_raw_os_error(error)),
    }
}

#[cfg(not(target_os = "linux"))]
#[expect(clippy::unnecessary_wraps, reason = "as on Linux")]
const fn allocate(_: &File) -> io::Result<()> {
    Ok(())
}
