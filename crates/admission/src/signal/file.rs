//! A descriptor that is kept open and read from its start each time, and its lines by key.
//!
//! It knows no file format: parsers get the bytes. A read does not allocate.
//!
//! Invariant: a parser sees at most [`TEXT_MAX`] or [`LINE_MAX`] bytes and no truncated last line:
//! `seen = text up to its last newline`.

use std::fs::File;
use std::io;
use std::io::{ErrorKind, Read};
use std::path::{Path, PathBuf};

use lowtide_core::kernel::number;
use thiserror::Error;

/// The largest text of a repeated read. `memory.stat` is below 4,096 bytes by the kernel's own
/// buffer, `/proc/self/status` about 1,500.
const TEXT_MAX: usize = 8192;
/// The largest text of one line; `statm` has seven numbers.
const LINE_MAX: usize = 256;
/// The largest file that is read at the start; a mountinfo of a busy node has some hundred KiB.
const START_MAX: u64 = 4 << 20;

/// An open file, read from its start each time.
#[derive(Debug)]
pub(super) struct SignalFile {
    file: lowtide_core::file::KeptFile,
}

impl SignalFile {
    /// Opens the file and reads it once, because some cgroup files open but do not read.
    pub(super) fn open(path: &Path) -> Result<Self, SignalError> {
        let opened = lowtide_core::file::KeptFile::open(path);
        let opened = opened.and_then(|file| file.read_at(&mut [0; 1], 0).map(|_| file));
        opened.map(|file| Self { file }).map_err(|error| SignalError::unreadable(path, &error))
    }

    /// Like [`SignalFile::open`]; `None`, with an entry in `missing`, if it cannot be read.
    pub(super) fn open_noted(path: &Path, missing: &mut Vec<SignalError>) -> Option<Self> {
        Self::open(path).map_err(|error| missing.push(error)).ok()
    }

    /// Like [`SignalFile::open_noted`], without an entry if there is no such file.
    pub(super) fn open_if_any(path: &Path, missing: &mut Vec<SignalError>) -> Option<Self> {
        let opened = Self::open(path);
        missing.extend(opened.as_ref().err().filter(|error| !error.is_absent()).cloned());
        opened.ok()
    }

    /// Returns the result of `parse` for the current text; `None` if the file cannot be read or is
    /// empty.
    pub(super) fn read<T>(&self, parse: impl FnOnce(&[u8]) -> T) -> Option<T> {
        self.read_into(&mut [0; TEXT_MAX]).map(parse)
    }

    /// Like [`SignalFile::read`] for a text of one line, without a buffer of 8 KiB to clear.
    pub(super) fn read_line<T>(&self, parse: impl FnOnce(&[u8]) -> T) -> Option<T> {
        self.read_into(&mut [0; LINE_MAX]).map(parse)
    }

    fn read_into<'a>(&self, buffer: &'a mut [u8]) -> Option<&'a [u8]> {
        let mut filled = 0;
        // Ends: each iteration reads at least one byte or leaves; interruptions are bounded too.
        let mut interruptions = 0;
        while filled < buffer.len() {
            let rest = buffer.get_mut(filled..)?;
            match self.file.read_at(rest, u64::try_from(filled).ok()?) {
                Ok(0) => break,
                Ok(count) => filled += count,
                Err(error) if error.kind() == ErrorKind::Interrupted && interruptions < 8 => {
                    interruptions += 1;
                    continue;
                }
                Err(_) => return None,
            }
            // The kernel writes each of these files in one piece, so a final newline is its end and
            // saves one more system call.
            if buffer.get(filled - 1) == Some(&b'\n') {
                break;
            }
        }
        if filled == buffer.len() {
            // Cut: up to its last line.
            filled = buffer.iter().rposition(|&byte| byte == b'\n').map_or(0, |at| at + 1);
        }
        buffer.get(..filled).filter(|text| !text.is_empty())
    }
}

/// Reads a whole file at the start; truncated at [`START_MAX`].
pub(super) fn read_whole(path: &Path) -> Result<Vec<u8>, SignalError> {
    let mut text = Vec::new();
    let read = File::open(path).and_then(|file| file.take(START_MAX).read_to_end(&mut text));
    read.map(|_| text).map_err(|error| SignalError::unreadable(path, &error))
}

/// Returns the number in the line `key number`; other lines are skipped.
pub(super) fn keyed(text: &[u8], key: &[u8]) -> Option<u64> {
    text.split(|&byte| byte == b'\n').find_map(|line| {
        let rest = line.strip_prefix(key)?;
        let (first, rest) = rest.split_first()?;
        (*first == b' ').then(|| number(rest)).flatten()
    })
}

// The reasons why a signal is not available.
/// A signal that is not available.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
#[non_exhaustive]
pub enum SignalError {
    /// A file could not be read.
    #[error("cannot read {path}: {error}", path = path.display(), error = io::Error::from_raw_os_error(*code))]
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
        let is_of_reading = matches!(self, Self::Unreadable { .. } | Self::Malformed { .. });
        is_of_reading && !self.is_absent()
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn a_key_matches_whole_and_at_the_start_of_a_line() {
        let text = b"anon_thp 5\nnot anon 6\nanon 7\nshmem\nbad x\n";
        assert_eq!(keyed(text, b"anon"), Some(7));
        assert_eq!(keyed(text, b"shmem"), None);
        assert_eq!(keyed(text, b"bad"), None);
        assert_eq!(keyed(b"", b"anon"), None);
    }

    #[test]
    fn a_kept_file_sees_what_was_written_after_it_was_opened() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("value");
        fs::write(&path, "1\n").expect("written");
        let kept = SignalFile::open(&path).expect("opens");
        fs::write(&path, "23\n").expect("written");
        assert_eq!(kept.read(number).flatten(), Some(23));
        fs::write(&path, "").expect("written");
        assert_eq!(kept.read(number), None);
    }

    #[test]
    fn a_text_that_is_too_long_is_cut_at_a_line() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("stat");
        let text = "key 123456789\n".repeat(1000);
        fs::write(&path, &text[..text.len() - 3]).expect("written");
        let kept = SignalFile::open(&path).expect("opens");
        let ends = kept.read(|seen| (seen.len() <= TEXT_MAX, seen.last() == Some(&b'\n')));
        assert_eq!(ends, Some((true, true)));
    }

    #[test]
    fn what_is_missing_is_a_typed_error() {
        let path = Path::new("/nonexistent/file");
        let expected = SignalError::Unreadable { path: path.to_owned(), code: libc::ENOENT };
        assert_eq!(SignalFile::open(path).expect_err("missing"), expected);
        assert_eq!(read_whole(path).expect_err("missing"), expected);
    }
}
