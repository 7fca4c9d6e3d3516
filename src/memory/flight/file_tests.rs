//! The file of a recording: what it may be, and what happens without room.

use std::fs::{self, File};
use std::os::unix::fs::{FileExt as _, symlink};
use std::path::Path;

use super::file::{FlightError, LockedFile};
use super::format::{Contents, FILE_BYTES, FlightSample, MARK, Run, RunEnd, Writer};

fn opened(path: &Path) -> Result<Contents, FlightError> {
    LockedFile::open(path).map(|(_, contents)| contents)
}

fn folder() -> tempfile::TempDir {
    tempfile::tempdir().expect("a folder")
}

/// Writes a run that has ended in order.
fn recorded(path: &Path) {
    let (file, _) = LockedFile::open(path).expect("opens");
    let mut file = file.prepare().expect("room");
    let (run, mut writer) = (Run::default(), Writer::new());
    writer.begin(&run, RunEnd::ShutDown, None);
    (0..4).for_each(|_| {
        let list = writer.begin_list();
        writer.end_list(list, 0);
    });
    let bytes = writer.finish(&run, file.next_half()).to_vec();
    file.write_half(&bytes).expect("written");
}

#[test]
fn a_file_is_allocated_whole_and_read_by_the_next_run() {
    let folder = folder();
    let path = folder.path().join("recording");
    assert_eq!(opened(&path).expect("created"), Contents::Nothing);
    recorded(&path);
    let found = fs::metadata(&path).expect("there");
    assert_eq!(found.len(), FILE_BYTES as u64);
    let blocks = std::os::unix::fs::MetadataExt::blocks(&found);
    assert!(blocks * 512 >= found.len(), "{blocks} blocks");
    let contents = opened(&path).expect("opens again");
    assert!(matches!(contents, Contents::Recording(of) if of.end == RunEnd::ShutDown));
}

#[test]
fn two_recorders_of_one_file_exclude_each_other() {
    let folder = folder();
    let path = folder.path().join("recording");
    let (first, _) = LockedFile::open(&path).expect("opens");
    let first = first.prepare().expect("room");
    assert!(matches!(opened(&path), Err(FlightError::Locked { .. })));
    drop(first);
    assert_eq!(opened(&path).expect("unlocked"), Contents::Nothing);
}

#[test]
fn what_is_no_file_is_an_error_and_nothing_waits() {
    let folder = folder();
    let at = |name| folder.path().join(name);
    fs::create_dir(at("folder")).expect("created");
    recorded(&at("real"));
    symlink(at("real"), at("link")).expect("linked");
    symlink(at("nowhere"), at("dangling")).expect("linked");
    let fifo = std::ffi::CString::new(at("fifo").to_str().expect("plain")).expect("no zero");
    make_fifo(&fifo);
    let _socket = std::os::unix::net::UnixListener::bind(at("socket")).expect("bound");
    for (name, expected) in [
        ("folder", "a folder"),
        ("link", "a symbolic link"),
        ("dangling", "a symbolic link"),
        ("fifo", "a FIFO"),
        ("socket", "a socket"),
        ("/dev/full", "a device"),
    ] {
        let error = opened(&at(name)).expect_err(name);
        let is_this = matches!(&error, FlightError::NotAFile { found, .. } if *found == expected);
        assert!(is_this, "{name}: {error}");
    }
    let error = opened(&at("none/recording")).expect_err("no such folder");
    assert!(matches!(error, FlightError::Open { .. }), "{error}");
}

#[expect(unsafe_code, reason = "mkfifo is a C call")]
fn make_fifo(path: &std::ffi::CStr) {
    // SAFETY: `path` is a C string that lives for the call.
    let done = unsafe { libc::mkfifo(path.as_ptr(), 0o600) };
    assert_eq!(done, 0, "no FIFO");
}

#[test]
fn a_file_of_something_else_is_left_as_it_is() {
    let folder = folder();
    let path = folder.path().join("data");
    fs::write(&path, "precious").expect("written");
    assert!(matches!(opened(&path), Err(FlightError::Foreign { .. })));
    assert_eq!(fs::read(&path).expect("there"), b"precious");
}

#[test]
fn a_file_that_was_cut_or_extended_is_whole_again() {
    let folder = folder();
    let path = folder.path().join("recording");
    for length in [0, 3, MARK.len() as u64, 5_000, 300_000, 4 * FILE_BYTES as u64] {
        recorded(&path);
        let file = File::options().write(true).open(&path).expect("there");
        file.set_len(length).expect("changed");
        let result = opened(&path);
        let is_mark_cut = 0 < length && length < MARK.len() as u64;
        assert_eq!(result.is_err(), is_mark_cut, "{length}");
        // The bug: the older half of a file that was cut told of a kill that never was.
        let is_read = matches!(result, Ok(Contents::Recording(_)));
        assert_eq!(is_read, length > FILE_BYTES as u64, "{length}");
        if is_mark_cut {
            fs::remove_file(&path).expect("removed");
        }
        recorded(&path);
        assert_eq!(fs::metadata(&path).expect("there").len(), FILE_BYTES as u64);
    }
}

/// The bug that stores to a mapping would be: a page beyond the end of the file is a SIGBUS.
#[test]
fn a_file_that_is_truncated_while_it_is_in_use_is_an_error_and_no_signal() {
    let folder = folder();
    let path = folder.path().join("recording");
    let (file, _) = LockedFile::open(&path).expect("opens");
    let mut file = file.prepare().expect("room");
    File::options().write(true).open(&path).expect("there").set_len(0).expect("cut");
    let (run, mut writer) = (Run::default(), Writer::new());
    let look = writer.look(&run, file.next_look(), &FlightSample::default()).to_vec();
    let error = file.write_look(&look).expect_err("no page to write to");
    assert!(error.to_string().contains("the file was truncated"), "{error}");
    drop(file);
    assert!(matches!(opened(&path), Ok(Contents::Nothing)));
}

/// The bug: the mark was written last, so that a start that was killed meanwhile left a file which
/// no later start took for a recording.
#[test]
fn a_start_that_is_interrupted_leaves_a_recording() {
    let folder = folder();
    let path = folder.path().join("recording");
    recorded(&path);
    let file = File::options().write(true).open(&path).expect("there");
    // As far as the first piece.
    file.write_all_at(&[0; 4096], 64).expect("written");
    assert!(opened(&path).is_ok());
    // A longer file that begins with zeros is not ours.
    let image = folder.path().join("image");
    let file = File::create(&image).expect("created");
    file.set_len(FILE_BYTES as u64 + 1).expect("longer");
    assert!(matches!(opened(&image), Err(FlightError::Foreign { .. })));
    file.write_all_at(b"CD001", 32 << 10).expect("written");
    assert!(matches!(opened(&image), Err(FlightError::Foreign { .. })));
    assert_eq!(image.metadata().expect("there").len(), FILE_BYTES as u64 + 1, "as it was");
}

/// The bug that enabling it would have been: the kernel ends a process with SIGXFSZ that writes
/// beyond its file size limit.
#[cfg(target_os = "linux")]
#[expect(unsafe_code, reason = "setrlimit is a C call")]
#[test_fork::test]
fn a_file_size_limit_is_an_error_and_no_signal() {
    let folder = folder();
    let (file, _) = LockedFile::open(&folder.path().join("recording")).expect("opens");
    let limit = libc::rlimit { rlim_cur: 100_000, rlim_max: libc::RLIM_INFINITY };
    // SAFETY: `limit` is a valid value for the call.
    let done = unsafe { libc::setrlimit(libc::RLIMIT_FSIZE, &raw const limit) };
    assert_eq!(done, 0, "no limit");
    let error = file.prepare().expect_err("too small");
    assert!(matches!(error, FlightError::SizeLimit { limit: 100_000 }), "{error}");
}

/// Mounts a file system of 64 KiB in a name space of the process; `None` without the right to.
#[cfg(target_os = "linux")]
#[expect(unsafe_code, reason = "unshare and mount are C calls")]
fn small_disk(at: &Path) -> Option<()> {
    let at = std::ffi::CString::new(at.to_str()?).ok()?;
    // SAFETY: changes the name space of this thread and touches no memory.
    let apart = unsafe { libc::unshare(libc::CLONE_NEWNS) };
    let root = c"/".as_ptr();
    let private = libc::MS_REC | libc::MS_PRIVATE;
    // SAFETY: all are C strings or null, as the call allows for a change of propagation.
    let alone =
        unsafe { libc::mount(std::ptr::null(), root, std::ptr::null(), private, std::ptr::null()) };
    let (kind, size) = (c"tmpfs".as_ptr(), c"size=64k".as_ptr());
    // SAFETY: all are C strings that live for the call.
    let done = unsafe { libc::mount(kind, at.as_ptr(), kind, 0, size.cast()) };
    (apart == 0 && alone == 0 && done == 0).then_some(())
}

#[cfg(target_os = "linux")]
#[test_fork::test]
fn a_full_disk_is_an_error_at_the_start_and_keeps_no_room() {
    let folder = folder();
    if small_disk(folder.path()).is_none() {
        println!("skipped: no right to mount a small file system");
        return;
    }
    let path = folder.path().join("recording");
    let (file, _) = LockedFile::open(&path).expect("opens");
    let error = file.prepare().expect_err("no room");
    assert!(matches!(error, FlightError::Allocate { .. }), "{error}");
    assert_eq!(fs::metadata(&path).expect("there").len(), 0);
}
