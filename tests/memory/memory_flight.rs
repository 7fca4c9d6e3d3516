//! The flight recorder: a run that was killed, or ended in any other way, is told by the next one.
//!
//! A test that kills a run starts this program again, as `child`, and reads copies of its recording
//! until that has what it waits for.
#![cfg(target_os = "linux")]

use std::convert::Infallible;
use std::fs::{self, File};
use std::future::Future as _;
use std::os::fd::AsRawFd as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::task::{Context, Waker};
use std::time::Duration;

use http::{Request, Response};
use http_body_util::{BodyExt as _, Full};
use lowtide::admission::{Cost, Signals};
use lowtide::config::DeviceChoice;
use lowtide::memory::{AdminCommand, Builder, Event, ExitCause, FlightSample, LastExit};
use lowtide::service::{Endpoints, RequestBody};
use lowtide::{ByteSize, Memory};
use tempfile::TempDir;
use tower::{Layer as _, Service as _, service_fn};
use tracing_subscriber::layer::SubscriberExt as _;

use crate::service_slow::Fed;
use crate::support::{PATIENCE, Tree, threads, until, until_no_threads};

const SOON: Duration = Duration::from_secs(5);
/// Names the recording and the way of the child.
const PATH: &str = "TEST_FLIGHT_PATH";
const WAY: &str = "TEST_FLIGHT_WAY";

fn folder() -> (TempDir, PathBuf) {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("recording");
    (folder, path)
}

fn recorded(path: &Path) -> Builder {
    Memory::builder().without_environment().device(DeviceChoice::Host).flight_recorder(path)
}

fn off(memory: &Memory) -> Vec<String> {
    let all = memory.report().diagnostics().into_iter();
    let about = all.filter(|found| found.about == "flight_recorder");
    about.inspect(|found| assert!(found.is_problem, "{found}")).map(|it| it.text).collect()
}

/// Reads a copy of a recording that is in use.
fn so_far(path: &Path) -> Option<LastExit> {
    let (_folder, copy) = folder();
    fs::copy(path, &copy).ok()?;
    let memory = Memory::builder().detached().flight_recorder(&copy).start().ok()?;
    let found = memory.report().last_exit().cloned();
    assert!(memory.shutdown_blocking(SOON).is_clean());
    found
}

/// A service of its own process, killed when this is dropped.
struct Service(Child);

impl Service {
    fn start(way: &str, path: &Path) -> Self {
        let mut command = Command::new(std::env::current_exe().expect("this program"));
        command.args(["--exact", "memory_flight::child", "--nocapture", "--test-threads=1"]);
        command.env_clear().env(PATH, path).env(WAY, way);
        Self(command.stdin(Stdio::piped()).stdout(Stdio::null()).spawn().expect("starts"))
    }

    /// Waits until its recording is so, kills it, and returns what the next start tells.
    fn killed_when(mut self, path: &Path, is_so: impl Fn(&LastExit) -> bool) -> (u32, LastExit) {
        until("the recording is so", || so_far(path).is_some_and(|last| is_so(&last)));
        self.0.kill().expect("killed");
        self.0.wait().expect("ended");
        (self.0.id(), told(path))
    }
}

impl Drop for Service {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Starts the next run, and returns what it tells about the last one.
fn told(path: &Path) -> LastExit {
    let memory = recorded(path).start().expect("starts");
    assert_eq!(off(&memory), [""; 0]);
    let last = memory.report().last_exit().expect("there was a run").clone();
    assert!(memory.shutdown_blocking(SOON).is_clean());
    until_no_threads();
    last
}

/// The service of the other tests: it runs until it is killed. Without its variables it does
/// nothing.
#[test]
#[expect(clippy::disallowed_methods, reason = "how this process is told what it is to do")]
#[expect(clippy::exit, reason = "one of the ways ends without the end of the tests")]
fn child() {
    let (Ok(path), Ok(way)) = (std::env::var(PATH), std::env::var(WAY)) else { return };
    let tree = Tree::new(ByteSize::mib(100));
    let memory = recorded(Path::new(&path)).signals(tree.open()).start().expect("starts");
    let permit = memory.admission().try_admit(Cost::host(ByteSize::mib(3))).expect("fits");
    match &*way {
        "quiet" => drop(memory.admin().run(AdminCommand::Purge).expect("accepted")),
        "full" => tree.hold(97),
        "asked to end" => memory.set_ending(),
        "ends" => {
            drop(permit);
            assert!(memory.shutdown_blocking(SOON).is_clean());
            return;
        }
        "exits" => {
            drop((permit, memory));
            std::process::exit(0);
        }
        other => panic!("{other}"),
    }
    // Until the other process ends, if it does not kill this one.
    let _ = std::io::copy(&mut std::io::stdin(), &mut std::io::sink());
    std::process::abort();
}

#[test_fork::test]
fn a_run_that_was_killed_is_told_with_its_samples_and_events() {
    let (_folder, path) = folder();
    let service = Service::start("quiet", &path);
    let (pid, last) = service.killed_when(&path, |last| {
        let sample = last.samples.last();
        let is_told = |event: &Event| event.kind == "admin" && event.about.is_empty();
        sample.is_some_and(|sample| !sample.heap_live.is_zero() && sample.held == 1)
            && last.events.iter().any(is_told)
    });
    assert_eq!((last.cause, last.pid), (ExitCause::Killed, pid), "{}", last.summary);
    let sample = last.samples.last().expect("one at least");
    assert_eq!((sample.physical, sample.limit), (ByteSize::mib(10), ByteSize::mib(100)));
    assert_eq!((sample.held, sample.reserved), (1, ByteSize::mib(3)));
    assert_eq!(last.at, Some(sample.at));
    assert!(last.started_at <= sample.at, "{last:?}");
    let event = last.events.iter().find(|event| event.kind == "admin").expect("recorded");
    assert!(event.text.starts_with("purge done"), "{event:?}");
}

#[test_fork::test]
fn a_run_that_was_killed_at_its_limit_ran_out_of_memory() {
    let (_folder, path) = folder();
    let service = Service::start("full", &path);
    let at_limit = |last: &LastExit| {
        last.samples.last().is_some_and(|sample| sample.physical == ByteSize::mib(97))
    };
    let (_, last) = service.killed_when(&path, at_limit);
    assert_eq!(last.cause, ExitCause::OutOfMemory, "{}", last.summary);
    assert!(last.summary.contains("97.0 MiB, 97 % of the limit of 100.0 MiB"), "{}", last.summary);
}

#[test_fork::test]
fn a_run_that_was_killed_while_it_ended_is_told_so() {
    let (_folder, path) = folder();
    let service = Service::start("asked to end", &path);
    let is_asked = |last: &LastExit| last.samples.last().is_some_and(|sample| sample.ending);
    let (_, last) = service.killed_when(&path, is_asked);
    assert_eq!(last.cause, ExitCause::KilledWhileEnding, "{}", last.summary);
}

#[test_fork::test]
fn a_run_that_ended_in_order_is_told_by_the_next_one_in_json_and_in_one_log_line() {
    let (_folder, path) = folder();
    let mut service = Service::start("ends", &path);
    assert!(service.0.wait().expect("ended").success());
    let log = Arc::new(Mutex::new(Vec::new()));
    let written = Arc::clone(&log);
    let writer = move || Lines(Arc::clone(&written));
    let layer = tracing_subscriber::fmt::layer().with_ansi(false).with_writer(writer);
    let _logged = tracing::subscriber::set_default(tracing_subscriber::registry().with(layer));
    let memory = recorded(&path).start().expect("starts");
    let last = memory.report().last_exit().expect("there was a run");
    assert_eq!((last.cause, last.pid), (ExitCause::Shutdown, service.0.id()), "{}", last.summary);
    let text = String::from_utf8(log.lock().expect("no panic").clone()).expect("UTF-8");
    let lines: Vec<_> = text.lines().filter(|line| line.contains("previous run ended")).collect();
    let [line] = lines.as_slice() else { panic!("{text}") };
    assert!(line.contains("INFO") && line.contains("shut down in order"), "{line}");

    let endpoints = Endpoints::new(Some(memory.clone()));
    let request = Request::get("/memory?with=last_exit").body(()).expect("a request");
    let answer = endpoints.answer_request(&request).expect("an endpoint");
    let body: serde_json::Value = serde_json::from_slice(answer.body()).expect("JSON");
    let part = &body["last_exit"];
    assert_eq!((&part["cause"], &part["orderly"]), (&"shutdown".into(), &true.into()));
    assert_eq!(part["pid"], service.0.id());
    let columns = part["samples"].as_object().expect("by column");
    let lengths = columns.values().map(|column| column.as_array().map(Vec::len));
    assert!(lengths.into_iter().all(|length| length == Some(last.samples.len())), "{part}");
    assert!(memory.shutdown_blocking(SOON).is_clean());
}

/// A log in memory.
struct Lines(Arc<Mutex<Vec<u8>>>);

impl std::io::Write for Lines {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.lock().expect("no panic").extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

#[test_fork::test]
fn a_request_in_progress_is_in_the_recording_with_its_route() {
    let (_folder, path) = folder();
    let memory = recorded(&path).memory_limit(ByteSize::gib(1)).start().expect("starts");
    let handler = service_fn(|request: Request<RequestBody<Fed>>| async move {
        let body = request.into_body().collect().await.map(|body| body.to_bytes());
        Ok::<_, Infallible>(Response::new(Full::new(body.unwrap_or_default())))
    });
    let mut service = memory.layer().layer(handler);
    let body = Fed::default();
    body.arrives(4);
    let request = Request::post("/upload/7").header("content-length", 1 << 20).body(body);
    let mut call = Box::pin(service.call(request.expect("a request")));
    let waits = call.as_mut().poll(&mut Context::from_waker(Waker::noop()));
    assert!(waits.is_pending(), "its body does not end");
    until("it is recorded", || {
        let permits = so_far(&path).map(|last| last.permits).unwrap_or_default();
        permits.iter().any(|permit| {
            (&*permit.method, &*permit.route) == ("POST", "upload") && !permit.reserved.is_zero()
        })
    });
    drop(call);
    assert!(memory.shutdown_blocking(SOON).is_clean());
}

#[test_fork::test]
fn a_third_thread_records_and_ends_with_the_others() {
    let (_folder, path) = folder();
    let memory = recorded(&path).start().expect("starts");
    assert!(memory.report().last_exit().is_none(), "the first run");
    until("three threads run", || {
        threads() == ["lowtide-control", "lowtide-flight", "lowtide-worker"]
    });
    assert!(memory.shutdown_blocking(SOON).is_clean());
    until_no_threads();
    // The lock is free for the next one in the same process.
    assert_eq!(told(&path).cause, ExitCause::Shutdown);
}

#[test_fork::test]
fn a_run_without_a_shutdown_is_told_as_dropped_or_as_a_panic() {
    let (_folder, path) = folder();
    drop(recorded(&path).start().expect("starts"));
    assert_eq!(told_once_unlocked(&path).cause, ExitCause::Dropped);
    let memory = recorded(&path).start().expect("starts");
    let panicked = std::thread::spawn(move || {
        let _memory = memory;
        panic!("as planned");
    });
    assert!(panicked.join().is_err());
    assert_eq!(told_once_unlocked(&path).cause, ExitCause::Panicked);
}

/// Bug: a process that exited as soon as its `Memory` was dropped was reported as killed, because
/// the end had not been written yet.
#[test_fork::test]
fn a_process_that_exits_as_its_memory_is_dropped_is_not_reported_as_killed() {
    for _ in 0..10 {
        let (_folder, path) = folder();
        let mut service = Service::start("exits", &path);
        assert!(service.0.wait().expect("ended").success());
        assert_eq!(told(&path).cause, ExitCause::Dropped);
    }
}

/// The recorder's thread of a `Memory` that was dropped releases the lock when it ends, which it
/// may do before it has its name.
fn told_once_unlocked(path: &Path) -> LastExit {
    let mut last = None;
    until("the recording is unlocked", || {
        let memory = Memory::builder().detached().flight_recorder(path).start().expect("starts");
        if off(&memory).is_empty() {
            last = memory.report().last_exit().cloned();
        }
        assert!(memory.shutdown_blocking(SOON).is_clean());
        last.is_some()
    });
    last.expect("the recording")
}

#[test_fork::test]
fn a_recording_that_another_memory_writes_is_a_diagnostic_and_the_service_goes_on() {
    let (_folder, path) = folder();
    let detached = || Memory::builder().detached().flight_recorder(&path).start().expect("starts");
    let (first, second) = (detached(), detached());
    assert_eq!(off(&first), [""; 0]);
    let [text] = off(&second).try_into().expect("one diagnostic");
    let expected = "is locked: another process, or another `Memory`, records into it";
    assert!(text.contains(expected), "{text}");
    assert!(
        second.report().last_exit().is_none() && second.admission().try_admit(Cost::ZERO).is_ok()
    );
    for memory in [first, second] {
        assert!(memory.shutdown_blocking(SOON).is_clean());
    }
    // The first one ends in order, and the third one finds its recording.
    let third = detached();
    assert_eq!(third.report().last_exit().map(|last| last.cause), Some(ExitCause::Shutdown));
    assert!(third.shutdown_blocking(SOON).is_clean());
}

#[test_fork::test]
fn a_file_that_cannot_be_created_is_a_diagnostic_and_the_service_goes_on() {
    let (folder, path) = folder();
    fs::write(&path, "precious").expect("written");
    for (path, expected) in [
        (Path::new("/proc/self/recording"), "cannot open"),
        (&folder.path().join("none/recording"), "cannot open"),
        (folder.path(), "is a folder: expected a file"),
        (&path, "is not a recording"),
        (Path::new("/dev/full"), "is a device: expected a file"),
    ] {
        let memory = recorded(path).start().expect("starts");
        let [text] = off(&memory).try_into().expect("one diagnostic");
        assert!(text.starts_with("off: ") && text.contains(expected), "{text}");
        assert!(memory.admission().try_admit(Cost::ZERO).is_ok());
        assert!(memory.shutdown_blocking(SOON).is_clean());
        until_no_threads();
    }
    assert_eq!(fs::read(&path).expect("there"), b"precious");
}

#[test_fork::test]
fn a_recording_that_is_truncated_in_use_ends_neither_the_recorder_nor_the_service() {
    let (_folder, path) = folder();
    let memory = recorded(&path).start().expect("starts");
    until("it records", || so_far(&path).is_some());
    File::options().write(true).open(&path).expect("there").set_len(0).expect("cut");
    until("it is said", || {
        let said = off(&memory);
        said.iter().any(|text| text.contains("recording is incomplete: cannot write"))
    });
    assert!(memory.shutdown_blocking(PATIENCE).is_clean());
}

/// The flags of a descriptor, negative if it is not open.
#[expect(unsafe_code, reason = "fcntl is a C call")]
fn flags(number: i32) -> i32 {
    // SAFETY: takes a number and touches no memory.
    unsafe { libc::fcntl(number, libc::F_GETFD) }
}

/// The open descriptors of this process.
fn descriptors() -> Vec<i32> {
    let listed = fs::read_dir("/proc/self/fd").expect("listed");
    let names = listed.map(|entry| entry.expect("an entry").file_name().into_string());
    let mut numbers: Vec<i32> =
        names.map(|name| name.expect("ASCII").parse().expect("one")).collect();
    // That of the list itself is closed by now.
    numbers.retain(|number| flags(*number) >= 0);
    numbers
}

/// Case T: a program that closes descriptors which it did not open (`close_range`, a daemon), and
/// opens files of its own. The bug: the recorder wrote into them, their text was believed as
/// figures of memory, and the end of the run closed them.
#[test_fork::test]
#[expect(unsafe_code, reason = "close and dup2 are C calls")]
fn files_that_get_the_numbers_of_closed_descriptors_stay_the_applications() {
    let tree = Tree::new(ByteSize::mib(100));
    for signals in [&Signals::open as &dyn Fn() -> Signals, &|| tree.open()] {
        let (folder, path) = folder();
        // SAFETY: nothing in this child of the test reads from there.
        unsafe { libc::close(0) };
        let others = descriptors();
        let memory = recorded(&path).signals(signals()).start().expect("starts");
        let mut ours = Vec::new();
        // A file that is read once has a low number for a moment.
        until("all that stays open has a high number", || {
            ours = descriptors();
            ours.retain(|number| !others.contains(number));
            ours.iter().all(|number| *number >= 128)
        });
        let passed_on = ours.iter().find(|number| flags(**number) & libc::FD_CLOEXEC == 0);
        assert_eq!(passed_on, None, "a program that is executed gets it");

        let (own, text) = (folder.path().join("own"), "9999999999 9999999999 0 0 0 0 0\n");
        fs::write(&own, text).expect("written");
        let file = File::options().read(true).write(true).open(&own).expect("opened");
        let last = || so_far(&path).and_then(|last| last.samples.last().copied());
        until("a sample is recorded", || last().is_some());
        let before = last().expect("recorded");
        for number in &ours {
            // SAFETY: closes a file of the crate, as this test is about, and touches no memory.
            assert_eq!(unsafe { libc::dup2(file.as_raw_fd(), *number) }, *number);
        }
        let seconds = Duration::from_secs(2);
        let goes_on = |last: FlightSample| last.uptime > before.uptime + seconds;
        until("the recording goes on", || last().is_some_and(goes_on));
        let after = last().expect("recorded");
        assert_eq!((after.limit, after.level), (before.limit, before.level));
        assert!(after.physical < ByteSize::gib(1), "{} is the application's text", after.physical);
        assert!(memory.shutdown_blocking(SOON).is_clean());
        until_no_threads();
        assert_eq!(fs::read_to_string(&own).expect("read"), text);
        let closed = ours.iter().find(|number| flags(**number) < 0);
        assert_eq!(closed, None, "the application's was closed");
    }
}
