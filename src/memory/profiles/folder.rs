//! The folder of heap profiles: their names, and how many are kept.
//!
//! A file is written under another name first, so that a killed process leaves no half profile
//! under its name. One folder belongs to one instance of a service.
//!
//! Invariant: at most [`FILES_MAX`] files of this run and [`EARLIER_MAX`] of earlier ones are kept.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::bytes::ByteSize;
use lowtide_heap::HostError;

/// The maximum number of profiles of this run: the first and the last ones are kept.
const FILES_MAX: usize = 8;
/// The maximum size of all profiles of this run; the first and the last one are kept in any case.
const BYTES_MAX: ByteSize = ByteSize::mib(32);
/// The maximum number of profiles of earlier runs: the newest are kept.
const EARLIER_MAX: usize = 16;

const START: &str = "lowtide-";
const END: &str = ".heap";
const UNFINISHED: &str = ".heap.part";

/// The profiles of this run.
#[derive(Debug)]
pub(super) struct Folder {
    path: PathBuf,
    /// The time of the start and the process number, which tell runs apart.
    run: String,
    /// The number of profiles written.
    count: u64,
    files: Vec<(PathBuf, ByteSize)>,
}

impl Folder {
    /// Checks at the start that files can be created in the folder, which is created if it does not
    /// exist.
    pub(super) fn check(path: &Path) -> io::Result<()> {
        fs::create_dir_all(path)?;
        let file = path.join(format!("{START}{}{UNFINISHED}", std::process::id()));
        fs::File::create_new(&file)?;
        fs::remove_file(&file)
    }

    /// Creates the folder if it does not exist, and removes old profiles of earlier runs.
    pub(super) fn open(path: &Path, since_epoch: Duration) -> io::Result<Self> {
        fs::create_dir_all(path)?;
        let mut earlier = Vec::new();
        for entry in fs::read_dir(path)? {
            let Ok(entry) = entry else { continue };
            // Names of others may be in the way: a folder, a link, a file of another user.
            if !entry.file_type().is_ok_and(|kind| kind.is_file()) {
                continue;
            }
            let path = entry.path();
            let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
            if !name.starts_with(START) {
                continue;
            }
            if name.ends_with(UNFINISHED) {
                let _ = fs::remove_file(&path);
            } else if name.ends_with(END) {
                earlier.push(path);
            }
        }
        earlier.sort_unstable();
        let surplus = earlier.len().saturating_sub(EARLIER_MAX);
        for path in earlier.iter().take(surplus) {
            let _ = fs::remove_file(path);
        }
        let run = format!("{:010}-{}", since_epoch.as_secs(), std::process::id());
        Ok(Self { path: path.to_owned(), run, count: 0, files: Vec::new() })
    }

    /// Writes a profile, and removes those that are too many. Returns its path and size.
    pub(super) fn write(
        &mut self,
        cause: &str,
        required: ByteSize,
    ) -> Result<(PathBuf, ByteSize), HostError> {
        #[cfg(feature = "profiling")]
        let write = lowtide_heap::write_profile;
        #[cfg(not(feature = "profiling"))]
        let write = |_: &Path| Err(io::Error::from(io::ErrorKind::Unsupported).into());
        self.write_with(cause, required, write)
    }

    fn write_with(
        &mut self,
        cause: &str,
        required: ByteSize,
        write: impl FnOnce(&Path) -> Result<(), HostError>,
    ) -> Result<(PathBuf, ByteSize), HostError> {
        let (number, mib) = (self.count + 1, required.get() >> 20);
        let name = format!("{START}{}.{number:03}.{cause}.{mib}MiB", self.run);
        let unfinished = self.path.join(format!("{name}{UNFINISHED}"));
        let path = self.path.join(format!("{name}{END}"));
        let written = write(&unfinished).and_then(|()| {
            let size = fs::metadata(&unfinished)?.len();
            fs::rename(&unfinished, &path)?;
            Ok(ByteSize::new(size))
        });
        let size = match written {
            Ok(size) => size,
            Err(error) => {
                // Nothing more can be done about a file that stays; the next start removes it.
                let _ = fs::remove_file(&unfinished);
                return Err(error);
            }
        };
        self.count = number;
        self.files.push((path.clone(), size));
        let sum = |files: &[(_, ByteSize)]| files.iter().map(|(_, size)| *size).sum::<ByteSize>();
        while self.files.len() > 2 && (self.files.len() > FILES_MAX || sum(&self.files) > BYTES_MAX)
        {
            let (path, _) = self.files.remove(1);
            // An operator may have moved it.
            let _ = fs::remove_file(path);
        }
        Ok((path, size))
    }
}

#[cfg(all(test, not(lowtide_loom)))]
mod tests {
    use super::*;

    fn names(path: &Path) -> Vec<String> {
        let entries = fs::read_dir(path).expect("the folder");
        let name = |entry: io::Result<fs::DirEntry>| {
            entry.expect("an entry").file_name().to_string_lossy().into_owned()
        };
        let mut names: Vec<_> = entries.map(name).collect();
        names.sort_unstable();
        names
    }

    fn text(size: usize) -> impl Fn(&Path) -> Result<(), HostError> {
        move |path| Ok(fs::write(path, vec![b' '; size])?)
    }

    #[test]
    fn the_first_and_the_last_profiles_are_kept() {
        let parent = tempfile::tempdir().expect("a folder");
        let path = parent.path().join("profiles");
        let mut folder = Folder::open(&path, Duration::from_secs(1_790_000_000)).expect("created");
        for nth in 1..=20 {
            folder.write_with("growth", ByteSize::mib(100 + nth), text(10)).expect("written");
        }
        let id = std::process::id();
        let name = |nth| format!("lowtide-1790000000-{id}.{nth:03}.growth.{}MiB.heap", 100 + nth);
        assert_eq!(names(&path), [1, 14, 15, 16, 17, 18, 19, 20].map(name));
        folder.write_with("limit", ByteSize::ZERO, text(40 << 20)).expect("written");
        assert_eq!(names(&path).len(), 2, "the first and the large one");
    }

    #[test]
    fn earlier_runs_keep_their_newest_profiles_and_other_files_stay() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path();
        for nth in 0..40 {
            text(1)(&path.join(format!("lowtide-{nth:010}-1.001.limit.9MiB.heap"))).expect("made");
        }
        text(1)(&path.join("lowtide-0000000001-1.002.limit.9MiB.heap.part")).expect("made");
        text(1)(&path.join("notes.heap")).expect("made");
        Folder::open(path, Duration::from_secs(99)).expect("opened");
        let left = names(path);
        assert_eq!(left.len(), EARLIER_MAX + 1);
        assert_eq!(left[0], "lowtide-0000000024-1.001.limit.9MiB.heap");
        assert_eq!(left[EARLIER_MAX], "notes.heap");
    }

    #[test]
    fn a_profile_that_cannot_be_written_leaves_no_file() {
        let parent = tempfile::tempdir().expect("a folder");
        let mut folder = Folder::open(parent.path(), Duration::ZERO).expect("opened");
        let full = |path: &Path| {
            text(1)(path)?;
            Err(io::Error::from(io::ErrorKind::StorageFull).into())
        };
        assert!(folder.write_with("limit", ByteSize::ZERO, full).is_err());
        assert_eq!(names(parent.path()), [""; 0]);
        let file = parent.path().join("file");
        text(1)(&file).expect("made");
        assert!(Folder::open(&file, Duration::ZERO).is_err(), "a file is no folder");
    }
}
