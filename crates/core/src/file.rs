//! Open files whose descriptors the application may close.
//!
//! A program that becomes a daemon, or calls `close_range`, closes descriptors that it did not
//! open. The next file that it opens gets the lowest free number. An [`OwnedFile`] has a high
//! number, which the application gets last, knows whether the number is still its file, and closes
//! no other. A [`KeptFile`] is opened again when its number is lost.
//!
//! Before a write no check is quite enough, since the number may change hands after it: write
//! through a mapping.
//!
//! Invariant: once a number is lost, it is never this file again. So what was read before a
//! successful check was read from the file.
#![expect(unsafe_code, reason = "fcntl and getrlimit are C calls")]

use std::fs::{File, Metadata};
use std::io;
use std::mem::ManuallyDrop;
use std::os::fd::{AsRawFd as _, FromRawFd as _};
use std::os::unix::fs::{FileExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};
use std::sync::{PoisonError, RwLock};

/// The highest number that is asked for: the kernel's table of descriptors grows to the highest
/// one, with 8 bytes for each.
const NUMBER_MAX: libc::rlim_t = 4096;

/// An open file with a high number that is closed on `exec`.
#[derive(Debug)]
pub struct OwnedFile {
    file: ManuallyDrop<File>,
    id: (u64, u64),
}

impl OwnedFile {
    /// Moves the file to a number in the upper half of those that the process may have, at most
    /// 4,096, or leaves it where it is if none is free.
    ///
    /// # Errors
    /// That of `fstat`.
    pub fn new(file: File) -> io::Result<Self> {
        let id = id(&file.metadata()?);
        Ok(Self { file: ManuallyDrop::new(raised(file)), id })
    }

    /// Returns the file. Its number may be another file's by now.
    #[must_use]
    pub fn file(&self) -> &File {
        &self.file
    }

    /// Returns `true` if the number is this file's. Costs an `fstat`.
    #[must_use]
    pub fn is_own(&self) -> bool {
        self.file.metadata().is_ok_and(|found| id(&found) == self.id)
    }
}

impl Drop for OwnedFile {
    fn drop(&mut self) {
        if self.is_own() {
            // SAFETY: the file is not used after its drop.
            unsafe { ManuallyDrop::drop(&mut self.file) };
        }
    }
}

/// Returns the file's device and inode.
fn id(found: &Metadata) -> (u64, u64) {
    (found.dev(), found.ino())
}

fn raised(file: File) -> File {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: `limit` is a valid place for the result; after a failure it is 0.
    unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut limit) };
    let lowest = libc::c_int::try_from((limit.rlim_cur / 2).min(NUMBER_MAX)).unwrap_or(0);
    // SAFETY: takes a descriptor, which `file` keeps open, and touches no memory.
    let high = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_DUPFD_CLOEXEC, lowest) };
    if high < 0 {
        return file;
    }
    // SAFETY: the descriptor was made just now and belongs to no other object.
    unsafe { File::from_raw_fd(high) }
}

/// A file that is read again and again, and opened again if its number is lost.
#[derive(Debug)]
pub struct KeptFile {
    path: PathBuf,
    opened: RwLock<OwnedFile>,
}

impl KeptFile {
    /// Opens the file for reading.
    ///
    /// # Errors
    /// The operating system's.
    pub fn open(path: &Path) -> io::Result<Self> {
        Ok(Self { path: path.to_owned(), opened: RwLock::new(open(path)?) })
    }

    /// Reads at this offset from the file, never from another that has its number. Costs a `pread`
    /// and an `fstat`; allocates nothing unless the path is longer than 383 bytes.
    ///
    /// # Errors
    /// Those of `pread`, and those of `open` if the number was lost.
    pub fn read_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<usize> {
        let read = |opened: &OwnedFile, buffer: &mut [u8]| {
            let read = opened.file.read_at(buffer, offset);
            opened.is_own().then_some(read)
        };
        let opened = self.opened.read().unwrap_or_else(PoisonError::into_inner);
        if let Some(read) = read(&opened, buffer) {
            return read;
        }
        drop(opened);
        let mut opened = self.opened.write().unwrap_or_else(PoisonError::into_inner);
        if !opened.is_own() {
            *opened = open(&self.path)?;
        }
        read(&opened, buffer).unwrap_or_else(|| Err(io::Error::from_raw_os_error(libc::EBADF)))
    }
}

fn open(path: &Path) -> io::Result<OwnedFile> {
    File::open(path).and_then(OwnedFile::new)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Case T: a program closes all descriptors, and opens a file of its own.
    #[test]
    fn a_number_that_another_file_has_got_is_neither_read_nor_closed() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR"));
        let [ours, other] = ["src/file.rs", "src/lib.rs"].map(|name| folder.join(name));
        let kept = KeptFile::open(&ours).expect("opens");
        let number = kept.opened.read().expect("no panic").file.as_raw_fd();
        assert!(number >= 128, "{number}");
        let other = File::open(&other).expect("opens");
        // SAFETY: the kept file's number gets another file, as this test is about.
        let taken = unsafe { libc::dup2(other.as_raw_fd(), number) };
        // SAFETY: the descriptor was made just now and belongs to no other object.
        let taken = unsafe { File::from_raw_fd(taken) };
        let mut text = [0; 1024];
        for _ in 0..2 {
            let length = kept.read_at(&mut text, 0).expect("reads");
            let text = &text[..length];
            assert!(text.starts_with(b"//! Open files"), "{:?}", text.escape_ascii());
        }
        drop(kept);
        assert_eq!(id(&taken.metadata().expect("open")), id(&other.metadata().expect("open")));
    }
}
