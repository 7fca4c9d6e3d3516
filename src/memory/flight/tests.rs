//! Recordings that are torn, damaged, hostile; what is concluded from them; and the file of a
//! recording: what it may be, and what happens without room.

use std::fs;
use std::fs::File;
use std::os::unix::fs::{FileExt as _, MetadataExt as _, PermissionsExt as _, symlink};
use std::path::Path;
use std::time::Duration;

use crate::bytes::ByteSize;
use lowtide_admission::{Level, RequestMemory, RequestPhase};

use crate::memory::events::Event;

use super::file::{FlightError, LockedFile};
use super::format::{
    FILE_BYTES, FileContents, FlightSample, HalfWriter, MARK, RunEnd, RunIdentity, *,
};
use super::last_exit::{ExitCause, LastExit, Now};

const SECOND: Duration = Duration::from_secs(1);

/// Random numbers of a seed (Marsaglia's xorshift).
struct Chance(u64);

impl Chance {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    fn below(&mut self, end: usize) -> usize {
        usize::try_from(self.next() % end as u64).expect("below a usize")
    }
}

fn run() -> RunIdentity {
    let started_at = Duration::from_secs(1_700_000_000);
    RunIdentity { pid: 7, started_at, boot_id: [3; 16], cgroup: 4, version: "1.2.3".to_owned() }
}

fn sample(nth: u64) -> FlightSample {
    let mib = |count| ByteSize::mib(count);
    FlightSample {
        at: run().started_at + SECOND * u32::try_from(nth).expect("small"),
        uptime: Duration::from_secs(nth),
        physical: mib(100 + nth),
        growth: mib(1),
        limit: mib(1000),
        required: mib(90),
        heap_live: mib(60),
        heap_retained: mib(20),
        other: Some(mib(3)),
        device_live: mib(4),
        device_retained: mib(5),
        device_reserved: mib(6),
        reserved: mib(7),
        allowance: mib(8),
        ceiling: ByteSize::MAX,
        level: Level::High,
        held: 9,
        waiting: 10,
        rejected_total: 11,
        oom_kills: Some(12),
        exhausted: true,
        ending: false,
    }
}

fn permit(tenant: Option<&str>) -> RequestMemory {
    RequestMemory {
        method: "POST".to_owned(),
        route: "/words".to_owned(),
        tenant: tenant.map(str::to_owned),
        phase: RequestPhase::Receiving,
        reserved: ByteSize::mib(4),
        live: ByteSize::mib(3),
        peak: ByteSize::mib(5),
        claim: ByteSize::mib(2),
        spilled: ByteSize::mib(1),
        age: SECOND,
        is_cancelled: true,
    }
}

/// A recording with so many samples.
fn recording(samples: u64, end: RunEnd) -> FlightRecording {
    let event = |at, kind: &'static str| Event {
        at: Duration::from_secs(at),
        since: SECOND,
        kind: kind.into(),
        about: "host".to_owned(),
        text: "pressure high, was none".to_owned(),
        times: at,
        sum: 6,
    };
    let [host, device] = [ByteSize::mib(8), ByteSize::mib(9)];
    FlightRecording {
        run: run(),
        end,
        machine_kills: Some(5),
        samples: (0..samples).map(sample).collect(),
        events: vec![event(1, "level"), event(2, "reject")],
        permits: vec![permit(None), permit(Some("a"))],
        resources: vec![FlightResource { name: "model".into(), loaded: true, host, device }],
    }
}

/// Writes a recording as a half with this sequence number.
fn half(recording: &FlightRecording, sequence: u64) -> Vec<u8> {
    let mut writer = HalfWriter::new();
    writer.begin(&recording.run, recording.end, recording.machine_kills);
    writer.list(SAMPLES_MAX, recording.samples.iter());
    writer.list(EVENTS_MAX, recording.events.iter());
    writer.list(PERMITS_MAX, recording.permits.iter());
    writer.list(RESOURCES_MAX, recording.resources.iter());
    writer.finish(sequence).to_vec()
}

fn empty_file() -> Vec<u8> {
    let mut file = vec![0; FILE_BYTES];
    file[..MARK.len()].copy_from_slice(MARK);
    file
}

fn put(file: &mut [u8], at: usize, bytes: &[u8]) {
    file[at..at + bytes.len()].copy_from_slice(bytes);
}

/// Returns the number of samples of the recording in a file.
fn samples(file: &[u8]) -> Option<usize> {
    match read(file) {
        FileContents::Recording(recording) => Some(recording.samples.len()),
        _ => None,
    }
}

#[test]
fn a_recording_is_read_as_it_was_written() {
    let mut file = empty_file();
    assert_eq!(read(&file), FileContents::Nothing, "it was never written");
    for (nth, end) in RunEnd::ALL.into_iter().enumerate() {
        let written = recording(SAMPLES_MAX as u64, end);
        put(&mut file, HALVES_AT[nth % 2], &half(&written, nth as u64));
        assert_eq!(read(&file), FileContents::Recording(Box::new(written)));
    }
}

#[test]
fn lists_and_texts_are_cut_at_their_bounds_and_fit_in_a_half() {
    let mut all = recording(2 * SAMPLES_MAX as u64, RunEnd::Running);
    let long = "ä".repeat(1000);
    for event in &mut all.events {
        (event.kind, event.about, event.text) = (long.clone().into(), long.clone(), long.clone());
    }
    all.run.version = long.clone();
    all.events = all.events.iter().cycle().take(EVENTS_MAX).cloned().collect();
    let mut permit = permit(Some(&long));
    (permit.method, permit.route) = (long.clone(), long.clone());
    all.permits = vec![permit; 2 * PERMITS_MAX];
    all.resources = vec![all.resources[0].clone(); 2 * RESOURCES_MAX];
    let bytes = half(&all, 1);
    assert!(bytes.len() <= HALF_BYTES, "{}", bytes.len());
    let mut file = empty_file();
    put(&mut file, HALVES_AT[0], &bytes);
    let FileContents::Recording(found) = read(&file) else { panic!("it is whole") };
    assert_eq!((found.samples.len(), found.events.len()), (SAMPLES_MAX, EVENTS_MAX));
    assert_eq!((found.permits.len(), found.resources.len()), (PERMITS_MAX, RESOURCES_MAX));
    assert_eq!((found.events[0].text.len(), found.permits[0].route.len()), (400, 64));
}

#[test]
fn a_half_that_is_torn_at_any_byte_leaves_the_other_one() {
    let [before, newer] = [2, 3].map(|count| recording(count, RunEnd::Running));
    let (before, newer) = (half(&before, 8), half(&newer, 9));
    let mut file = empty_file();
    put(&mut file, HALVES_AT[1], &before);
    put(&mut file, HALVES_AT[0], &half(&recording(1, RunEnd::Running), 7));
    for torn in 0..=newer.len() {
        let mut file = file.clone();
        put(&mut file, HALVES_AT[0], &newer[..torn]);
        // The last bytes of the older half may be those of the newer one.
        let is_whole = file[HALVES_AT[0]..].starts_with(&newer);
        assert!(!is_whole || torn + 16 >= newer.len(), "torn at {torn}");
        let expected = if is_whole { 3 } else { 2 };
        assert_eq!(samples(&file), Some(expected), "torn at {torn}");
    }
}

#[test]
fn with_both_halves_damaged_the_cause_is_unknown() {
    let mut file = empty_file();
    for (at, sequence) in HALVES_AT.into_iter().zip(1..) {
        let mut bytes = half(&recording(2, RunEnd::ShutDown), sequence);
        bytes[100] ^= 1;
        put(&mut file, at, &bytes);
    }
    let found = read(&file);
    assert_eq!(found, FileContents::Unreadable);
    let last = LastExit::of(found, &Now::default()).expect("there was a run");
    assert_eq!((last.cause, last.samples.len()), (ExitCause::Unknown, 0));
}

#[test]
fn other_files_and_other_versions_are_told_apart() {
    assert_eq!(read(&[]), FileContents::Nothing);
    assert_eq!(read(&[0; 100]), FileContents::Nothing);
    assert_eq!(read(b"root:x:0:0"), FileContents::Foreign);
    assert_eq!(read(&MARK[..5]), FileContents::Foreign);
    let mut file = empty_file();
    put(&mut file, HALVES_AT[0], &half(&recording(2, RunEnd::Running), 1));
    assert_eq!(samples(&file[..HALVES_AT[1]]), Some(2), "the other half is cut off");
    file[MARK.len() - 2] = b'1';
    assert_eq!(read(&file), FileContents::Unreadable);
}

#[test]
fn no_bytes_make_the_reader_panic_or_read_beyond_its_bounds() {
    let whole = half(&recording(3, RunEnd::Running), 1);
    for seed in 1..=2_000_u64 {
        let mut chance = Chance(seed);
        let mut file = vec![0; HALVES_AT[1] + 2 * whole.len()];
        put(&mut file, 0, MARK);
        put(&mut file, HALVES_AT[0], &whole);
        match seed % 4 {
            // Flipped bits anywhere.
            0 => {
                for _ in 0..=chance.below(8) {
                    let at = chance.below(file.len());
                    file[at] ^= 1 << chance.below(8);
                }
            }
            // Cut off.
            1 => file.truncate(chance.below(file.len())),
            // Noise in place of a half.
            2 => {
                for byte in &mut file[HALVES_AT[0]..HALVES_AT[0] + whole.len()] {
                    *byte = chance.next().to_le_bytes()[0];
                }
            }
            // A payload of noise whose checksum is right.
            _ => {
                let mut writer = HalfWriter::new();
                writer.begin(&run(), RunEnd::Running, None);
                for _ in 0..chance.below(400) {
                    let (kind, about, text) = ("\u{1}".into(), "\0".into(), "\u{7f}".into());
                    let at = Duration::from_nanos(chance.next());
                    let [since, times, sum] = [at, at, at].map(|_| chance.next());
                    let since = Duration::from_nanos(since);
                    Event { at, since, kind, about, text, times, sum }.put(&mut writer);
                }
                put(&mut file, HALVES_AT[0], writer.finish(chance.next()));
            }
        }
        if let FileContents::Recording(found) = read(&file) {
            let counts = [found.samples.len(), found.events.len()];
            let bounds = [SAMPLES_MAX, EVENTS_MAX];
            assert!(counts.iter().zip(bounds).all(|(count, most)| *count <= most), "seed {seed}");
            let _ = LastExit::of(FileContents::Recording(found), &Now::default());
        }
    }
}

/// Every figure of a recording may be any number.
#[test]
fn no_payload_with_a_right_checksum_makes_the_conclusion_panic() {
    let whole = half(&recording(3, RunEnd::Running), 1);
    let mut read_in = 0;
    for at in 16..whole.len() {
        for length in [1, 8, 16] {
            for byte in [0, 1, 0x7f, 0xff] {
                let mut half = whole.clone();
                half.iter_mut().skip(at).take(length).for_each(|to| *to = byte);
                let sum = checksum(&half);
                put(&mut half, 4, &sum.to_le_bytes());
                let mut file = vec![0; HALVES_AT[0]];
                put(&mut file, 0, MARK);
                file.extend(half);
                let last = LastExit::of(read(&file), &Now::default()).expect("there was a run");
                read_in += usize::from(!last.samples.is_empty());
            }
        }
    }
    assert!(read_in > whole.len(), "{read_in} of them were read");
}

/// Returns the conclusion from a run that ended with this sample.
fn concluded(last: FlightSample, end: RunEnd, now: Now) -> LastExit {
    let mut recording = recording(2, end);
    recording.samples.push(last);
    let found = LastExit::of(FileContents::Recording(Box::new(recording)), &now);
    found.expect("there was a run")
}

#[test]
fn the_cause_follows_from_the_kernels_counts_and_the_memory_at_the_end() {
    let quiet = FlightSample { exhausted: false, level: Level::None, ..sample(60) };
    let at = |mib, growth| FlightSample {
        physical: ByteSize::mib(mib),
        growth: ByteSize::mib(growth),
        ..quiet
    };
    let here = Now { boot_id: [3; 16], cgroup: 4, cgroup_kills: Some(12), machine_kills: Some(5) };
    let (in_cgroup, on_machine) =
        (Now { cgroup_kills: Some(13), ..here }, Now { machine_kills: Some(6), ..here });
    let fresh_cgroup = Now { cgroup: 5, cgroup_kills: Some(20), ..here };
    let (ending, unlimited) = (
        FlightSample { ending: true, ..at(200, 0) },
        FlightSample { limit: ByteSize::MAX, ..at(2000, 0) },
    );
    let (running, memory) = (RunEnd::Running, ExitCause::OutOfMemory);
    for (case, last, end, now, cause) in [
        ("in order", at(990, 0), RunEnd::ShutDown, in_cgroup, ExitCause::Shutdown),
        ("by the policy", at(990, 0), RunEnd::Exhausted, here, ExitCause::Exhausted),
        ("dropped", at(990, 0), RunEnd::Dropped, here, ExitCause::Dropped),
        ("a panic", at(990, 0), RunEnd::Panicked, here, ExitCause::Panicked),
        ("a kill in the cgroup", at(100, 0), running, in_cgroup, memory),
        ("a kill in another cgroup", at(100, 0), running, fresh_cgroup, ExitCause::Killed),
        ("a kill on the machine", at(600, 0), running, on_machine, memory),
        ("a kill of another process", at(100, 0), running, on_machine, ExitCause::Killed),
        ("at the limit", at(931, 0), running, fresh_cgroup, memory),
        ("below the limit", at(929, 0), running, fresh_cgroup, ExitCause::Killed),
        ("fast growth", at(500, 4_600), running, fresh_cgroup, memory),
        ("slow growth", at(500, 1_000), running, fresh_cgroup, ExitCause::Killed),
        ("no limit", unlimited, running, here, ExitCause::Killed),
        ("asked to end", ending, running, here, ExitCause::KilledWhileEnding),
        ("a reboot", at(990, 0), running, Now { boot_id: [4; 16], ..here }, ExitCause::Rebooted),
        ("an unknown boot", at(990, 0), running, Now { boot_id: [0; 16], ..here }, memory),
    ] {
        let last = concluded(last, end, now);
        assert_eq!(last.cause, cause, "{case}: {}", last.summary);
    }
    let none = FlightRecording { samples: Vec::new(), ..recording(0, running) };
    let last = LastExit::of(FileContents::Recording(Box::new(none)), &here).expect("a run");
    assert_eq!((last.cause, last.at), (ExitCause::Killed, None));
}

#[test]
fn the_summary_has_the_figures_from_which_the_cause_was_concluded() {
    let mut last = sample(3_700);
    (last.physical, last.growth) = (ByteSize::mib(990), ByteSize::mib(300));
    let last = concluded(last, RunEnd::Running, Now::default());
    assert_eq!(
        last.summary,
        "killed most likely by the kernel's OOM killer, after 1h 1m 40s; physical memory was \
         990.0 MiB, 99 % of the limit of 1000.0 MiB, and grew by 300.0 MiB/s; memory that no \
         request owns left no room for requests; most of it was allocated since metrics were last \
         published; the largest request was POST /words with 3.0 MiB"
    );
    let last = concluded(sample(30), RunEnd::ShutDown, Now::default());
    assert_eq!(last.summary, "shut down in order after 30s");
    assert_eq!((last.pid, last.version.as_str()), (7, "1.2.3"));
}

fn opened(path: &Path) -> Result<FileContents, FlightError> {
    LockedFile::open(path).map(|(_, contents)| contents)
}

fn folder() -> tempfile::TempDir {
    tempfile::tempdir().expect("a folder")
}

/// Writes a run that has ended in order.
fn recorded(path: &Path) {
    let (file, _) = LockedFile::open(path).expect("opens");
    let mut file = file.prepare().expect("room");
    let (run, mut writer) = (RunIdentity::default(), HalfWriter::new());
    writer.begin(&run, RunEnd::ShutDown, None);
    (0..4).for_each(|_| writer.list(0, std::iter::empty::<&Event>()));
    file.write_half(writer.finish(file.next_half())).expect("written");
}

#[test]
fn a_file_is_allocated_whole_and_read_by_the_next_run() {
    let folder = folder();
    let path = folder.path().join("recording");
    assert_eq!(opened(&path).expect("created"), FileContents::Nothing);
    recorded(&path);
    let found = fs::metadata(&path).expect("there");
    assert_eq!(found.len(), FILE_BYTES as u64);
    let blocks = std::os::unix::fs::MetadataExt::blocks(&found);
    assert!(blocks * 512 >= found.len(), "{blocks} blocks");
    let contents = opened(&path).expect("opens again");
    assert!(matches!(contents, FileContents::Recording(of) if of.end == RunEnd::ShutDown));
}

#[test]
fn two_recorders_of_one_file_exclude_each_other() {
    let folder = folder();
    let path = folder.path().join("recording");
    let (first, _) = LockedFile::open(&path).expect("opens");
    let first = first.prepare().expect("room");
    assert!(matches!(opened(&path), Err(FlightError::Locked { .. })));
    drop(first);
    assert_eq!(opened(&path).expect("unlocked"), FileContents::Nothing);
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
    assert!(matches!(error, FlightError::Io { act: "open", .. }), "{error}");
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

/// The bug: a file that was there before, as `touch` makes it, could be read by all users.
#[test]
fn only_the_services_user_reads_a_recording_also_in_a_file_that_was_there() {
    let folder = folder();
    let path = folder.path().join("recording");
    fs::write(&path, "").expect("created");
    fs::set_permissions(&path, fs::Permissions::from_mode(0o644)).expect("its own");
    recorded(&path);
    assert_eq!(fs::metadata(&path).expect("there").mode() & 0o777, 0o600);
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
        let is_read = matches!(result, Ok(FileContents::Recording(_)));
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
    let (run, mut writer) = (RunIdentity::default(), HalfWriter::new());
    writer.begin(&run, RunEnd::Running, None);
    let error = file.write_half(writer.finish(file.next_half())).expect_err("no page to write to");
    assert!(error.to_string().contains("the file was truncated"), "{error}");
    drop(file);
    assert!(matches!(opened(&path), Ok(FileContents::Nothing)));
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
