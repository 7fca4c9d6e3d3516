//! The file of a recording: opened, locked, read, allocated, mapped, written in place.
//!
//! It is written through a mapping, which an application that closes descriptors cannot turn into
//! one of its own files, as it can the number of a descriptor. The kernel copies into the mapping
//! (`process_vm_writev`), so where a store would be a SIGBUS, because another process truncated the
//! file or a file system that copies on write has no room, there is an error value. Where a sandbox
//! forbids that call, it is `pwrite`, after a check that the number is still the file's. What was
//! written survives SIGKILL, because the page cache is the kernel's. No signal can come out of this
//! module: a file size limit of the process, which sends SIGXFSZ, is checked first.
//!
//! At the start the whole file is allocated and each page is written once, so a full disk shows
//! then. An exclusive lock (`flock`) excludes another `Memory` with the same path, in this process
//! or another. A forked child shares the lock until it ends or calls `exec`.
//!
//! Nothing here waits: a FIFO, a device, a folder or a symbolic link is an error, and so is a file
//! that is locked or is not a recording. If the file is replaced while it is in use, writes
//! continue and the recording is lost; if it is truncated, they fail.
#![expect(unsafe_code, reason = "flock, mmap and what allocates and copies are C calls")]

use std::fs::{File, OpenOptions, Permissions};
use std::io::{self, Read as _};
use std::os::unix::prelude::*;
use std::path::{Path, PathBuf};
use std::ptr::{self, NonNull};

use lowtide_core::file::OwnedFile;
use lowtide_core::kernel::file_size_limit;
use thiserror::Error;

use super::format::{FILE_BYTES, FileContents, HALVES_AT, MARK, read};

/// The bytes that are written at once when the pages are touched.
const TOUCHED: usize = 64 << 10;
/// Only the service's user may read it: it contains routes and tenants.
const MODE: u32 = 0o600;

/// An error that prevents a recording.
#[derive(Debug, Error)]
pub(super) enum FlightError {
    #[error("cannot {act} {path:?}: {error}")]
    Io { act: &'static str, path: PathBuf, error: io::Error },
    #[error("{path:?} is {found}: expected a file, or a path at which one can be created")]
    NotAFile { path: PathBuf, found: &'static str },
    #[error("{path:?} is locked: another process, or another `Memory`, records into it")]
    Locked { path: PathBuf },
    #[error("{path:?} is not a recording: expected one, an empty file or no file")]
    Foreign { path: PathBuf },
    #[error("the file size limit is {limit} bytes: expected at least {FILE_BYTES} (ulimit -f)")]
    SizeLimit { limit: u64 },
    #[error("cannot allocate {FILE_BYTES} bytes at {path:?}: {error}")]
    Allocate { path: PathBuf, error: io::Error },
}

/// A file that is locked.
#[derive(Debug)]
pub(super) struct LockedFile {
    file: OwnedFile,
    path: PathBuf,
}

/// A file that is locked, allocated and mapped.
#[derive(Debug)]
pub(in crate::memory) struct FlightFile {
    map: Map,
    /// On some file systems the lock ends with the descriptor.
    locked: LockedFile,
    /// The number of halves that were written.
    halves: u64,
}

impl LockedFile {
    /// Opens or creates the file, locks it, and reads what the last run left.
    pub(super) fn open(path: &Path) -> Result<(Self, FileContents), FlightError> {
        let owned = || path.to_owned();
        let io = |act| move |error| FlightError::Io { act, path: path.to_owned(), error };
        if let Ok(found) = path.symlink_metadata() {
            check_kind(path, found.file_type())?;
        }
        // It may have been replaced since: no symbolic link is followed, and a FIFO does not block.
        let flags = libc::O_NOFOLLOW | libc::O_NONBLOCK | libc::O_NOCTTY;
        let mut options = OpenOptions::new();
        options.read(true).write(true).create(true).truncate(false);
        let file = options.mode(MODE).custom_flags(flags).open(path).map_err(io("open"))?;
        let found = file.metadata().map_err(io("open"))?;
        check_kind(path, found.file_type())?;
        lock(&file).map_err(|error| match error.kind() {
            io::ErrorKind::WouldBlock => FlightError::Locked { path: owned() },
            _ => io("lock")(error),
        })?;
        let mut bytes = Vec::with_capacity(FILE_BYTES);
        let file = OwnedFile::new(file).map_err(io("open"))?;
        file.file().take(FILE_BYTES as u64).read_to_end(&mut bytes).map_err(io("read"))?;
        let contents = match read(&bytes) {
            // The newest half may have been cut off.
            FileContents::Recording(_) if bytes.len() < FILE_BYTES => FileContents::Unreadable,
            other => other,
        };
        // A longer file is not ours, even if it begins with zeros, as an image does.
        let is_longer = found.len() > FILE_BYTES as u64;
        if contents == FileContents::Foreign || (contents == FileContents::Nothing && is_longer) {
            return Err(FlightError::Foreign { path: owned() });
        }
        Ok((Self { file, path: owned() }, contents))
    }

    /// Erases the file, allocates and maps all of it, and writes each page once.
    pub(super) fn prepare(self) -> Result<FlightFile, FlightError> {
        let limit = file_size_limit().get();
        if limit < FILE_BYTES as u64 {
            return Err(FlightError::SizeLimit { limit });
        }
        let (file, path) = (self.file.file(), || self.path.clone());
        let io = |act| move |error| FlightError::Io { act, path: path(), error };
        // It may have been made with another mode; some file systems have none.
        let _ = file.set_permissions(Permissions::from_mode(MODE));
        let length = file.set_len(FILE_BYTES as u64).and_then(|()| allocate(file));
        let filled = length.map_err(|error| FlightError::Allocate { path: path(), error });
        let mapped = filled.and_then(|()| {
            let map = Map::of(file).map_err(io("map"))?;
            fill(&map, &self.file).map_err(io("write"))?;
            Ok(map)
        });
        match mapped {
            Ok(map) => Ok(FlightFile { map, locked: self, halves: 0 }),
            Err(error) => {
                // Without room for all of it, it takes none. If that fails too, it stays as it is.
                let _ = file.set_len(0);
                Err(error)
            }
        }
    }
}

fn fill(map: &Map, file: &OwnedFile) -> io::Result<()> {
    // The mark first, and never over it: a start that is interrupted leaves a recording.
    map.write(file, MARK, 0)?;
    let zeros = vec![0; TOUCHED];
    for at in (0..FILE_BYTES).step_by(TOUCHED) {
        let kept = if at == 0 { MARK.len() } else { 0 };
        map.write(file, zeros.get(kept..).unwrap_or_default(), at + kept)?;
    }
    Ok(())
}

impl FlightFile {
    /// Returns the sequence number of the next half.
    pub(super) const fn next_half(&self) -> u64 {
        self.halves + 1
    }

    /// Writes a half over the older one.
    pub(super) fn write_half(&mut self, bytes: &[u8]) -> Result<(), FlightError> {
        self.halves += 1;
        let at = HALVES_AT[usize::from(self.halves % 2 == 1)];
        let LockedFile { file, path } = &self.locked;
        let written = self.map.write(file, bytes, at);
        written.map_err(|error| FlightError::Io { act: "write", path: path.clone(), error })
    }
}

/// The whole file in memory, shared with it.
#[derive(Debug)]
struct Map(NonNull<u8>);

// SAFETY: the mapping belongs to the value, and no thread has a reference into it.
unsafe impl Send for Map {}

impl Map {
    fn of(file: &File) -> io::Result<Self> {
        let rights = libc::PROT_READ | libc::PROT_WRITE;
        let fd = file.as_raw_fd();
        // SAFETY: a new mapping, at an address that the kernel chooses.
        let map =
            unsafe { libc::mmap(ptr::null_mut(), FILE_BYTES, rights, libc::MAP_SHARED, fd, 0) };
        let mapped = NonNull::new(map.cast()).filter(|_| map != libc::MAP_FAILED);
        mapped.map(Self).ok_or_else(io::Error::last_os_error)
    }

    /// Has the kernel copy the bytes to this offset of the file that is mapped.
    fn write(&self, file: &OwnedFile, bytes: &[u8], at: usize) -> io::Result<()> {
        let is_inside = at.checked_add(bytes.len()).is_some_and(|end| end <= FILE_BYTES);
        if !is_inside {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        // SAFETY: inside the mapping.
        let to = unsafe { self.0.add(at) };
        match copy(bytes, to) {
            Ok(length) if length == bytes.len() => Ok(()),
            Err(error) if error.raw_os_error() != Some(libc::EFAULT) => {
                // A sandbox forbids the call.
                if file.is_own() { file.file().write_all_at(bytes, at as u64) } else { Err(error) }
            }
            _ => Err(io::Error::other("the file was truncated, or its file system is full")),
        }
    }
}

impl Drop for Map {
    fn drop(&mut self) {
        // SAFETY: the whole mapping, which nothing refers to any more. It fails for no such one.
        unsafe { libc::munmap(self.0.as_ptr().cast(), FILE_BYTES) };
    }
}

/// Returns the number of bytes that were copied; where a store would be a SIGBUS, it ends.
#[cfg(target_os = "linux")]
fn copy(bytes: &[u8], to: NonNull<u8>) -> io::Result<usize> {
    let iov_len = bytes.len();
    let from = libc::iovec { iov_base: bytes.as_ptr().cast_mut().cast(), iov_len };
    let to = libc::iovec { iov_base: to.as_ptr().cast(), iov_len };
    // SAFETY: has no preconditions.
    let own = unsafe { libc::getpid() };
    // SAFETY: `from` is read only, and `to` is a part of the mapping, to which nothing refers.
    let copied = unsafe { libc::process_vm_writev(own, &raw const from, 1, &raw const to, 1, 0) };
    usize::try_from(copied).map_err(|_| io::Error::last_os_error())
}

#[cfg(not(target_os = "linux"))]
#[expect(clippy::unnecessary_wraps, reason = "as on Linux")]
fn copy(bytes: &[u8], to: NonNull<u8>) -> io::Result<usize> {
    // SAFETY: a part of the mapping, to which nothing refers.
    unsafe { ptr::copy_nonoverlapping(bytes.as_ptr(), to.as_ptr(), bytes.len()) };
    Ok(bytes.len())
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
