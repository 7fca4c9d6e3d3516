//! Fixtures for the tests of a running `Memory`: waiting with an end, names of threads, a file tree
//! that says how full the cgroup is.
#![allow(dead_code, reason = "each test program takes its part of this")]

use std::fs::{self, File};
use std::io::Write as _;
use std::path::Path;
use std::process::{Command, Output};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use lowtide::admission::Signals;
use lowtide::clock::{Bell, Clock, ManualClock, SystemClock};
use lowtide::memory::Shutdown;
use lowtide::{ByteSize, Memory};
use tempfile::TempDir;

/// The longest time that a test waits for an event: a machine that does much else needs a part of
/// it, and a test that hangs fails.
pub(crate) const PATIENCE: Duration = Duration::from_secs(120);
const MIB: u64 = 1 << 20;

/// Tells a process of [`run_again`] that it is one.
const RUN_AGAIN: &str = "RUN_AGAIN_OF_TEST";

/// Runs a test of this program, named in full, again in a process with these variables alone.
/// Returns what it printed. Panics in such a process: the variables had no effect there, and the
/// process would start itself without end.
pub(crate) fn run_again(test: &str, variables: &[(&str, &str)]) -> Output {
    #[expect(clippy::disallowed_methods, reason = "how the test tells its own process of this")]
    let runs_again = std::env::var_os(RUN_AGAIN).is_some();
    assert!(!runs_again, "{test}: {variables:?} had no effect");
    let own = std::env::current_exe().expect("this program");
    let output = Command::new(own)
        .args(["--exact", test, "--nocapture"])
        .env_clear()
        .envs(variables.iter().copied())
        .env(RUN_AGAIN, "1")
        .output()
        .expect("runs");
    let [text, errors] = [&output.stdout, &output.stderr].map(|of| String::from_utf8_lossy(of));
    let ran = output.status.success() && text.contains("running 1 test");
    assert!(ran, "{test}: {text}{errors}");
    output
}

/// Waits for a condition.
pub(crate) fn until(what: &str, mut condition: impl FnMut() -> bool) {
    let clock = SystemClock::new();
    let deadline = clock.now() + PATIENCE;
    let bell = Bell::new();
    while !condition() {
        assert!(clock.now() < deadline, "never: {what}");
        clock.wait_until(&bell, clock.now() + Duration::from_micros(500));
    }
}

/// Moves the time on, step by step, until a condition holds.
pub(crate) fn advance_until(
    clock: &ManualClock,
    step: Duration,
    what: &str,
    mut condition: impl FnMut() -> bool,
) {
    until(what, || {
        if condition() {
            return true;
        }
        clock.advance(step);
        false
    });
}

/// A shutdown on a thread of its own.
pub(crate) fn shutdown_apart(memory: &Memory, deadline: Duration) -> JoinHandle<Shutdown> {
    let memory = memory.clone();
    thread::spawn(move || memory.shutdown_blocking(deadline))
}

/// Names of this process's threads that begin with `lowtide-`, sorted.
pub(crate) fn threads() -> Vec<String> {
    let tasks = fs::read_dir("/proc/self/task").expect("own threads");
    // A thread may end between the listing and the reading.
    let names = tasks.filter_map(|task| fs::read_to_string(task.ok()?.path().join("comm")).ok());
    let mut names: Vec<_> = names.map(|name| name.trim().to_owned()).collect();
    names.retain(|name| name.starts_with("lowtide-"));
    names.sort();
    names
}

/// Waits until both threads of a `Memory` run under their names.
pub(crate) fn until_both_threads() {
    until("both threads run", || threads() == ["lowtide-control", "lowtide-worker"]);
}

/// Waits for the end of a tick, until both threads of a `Memory` rest. A request ends with its last
/// handle, and a tick may have that for a moment.
pub(crate) fn rest(clock: &ManualClock) {
    assert!(clock.wait_for_waiters(2, PATIENCE), "both threads rest");
}

/// Waits until no thread of ours is left.
pub(crate) fn until_no_threads() {
    until("the threads end", || threads().is_empty());
}

/// A process in a version 2 cgroup with a limit.
pub(crate) struct Tree(TempDir);

impl Tree {
    /// A process of 10 MiB in a cgroup with this limit.
    pub(crate) fn new(limit: ByteSize) -> Self {
        let tree = Self(tempfile::tempdir().expect("a folder"));
        tree.write("proc/self/statm", "20000 2560 0 5 0 123 0\n");
        tree.write("proc/self/status", "RssAnon:\t10240 kB\nRssFile:\t0 kB\nRssShmem:\t0 kB\n");
        tree.write("proc/meminfo", "MemTotal:       33554432 kB\n");
        tree.write("proc/self/cgroup", "0::/app\n");
        let mount = "41 31 0:38 / /sys/fs/cgroup rw shared:4 - cgroup2 cgroup2 rw\n";
        tree.write("proc/self/mountinfo", mount);
        tree.limit(limit);
        tree.cgroup("memory.high", "max");
        tree.cgroup("memory.events", "low 0\nhigh 0\nmax 0\noom 0\noom_kill 0");
        tree.cgroup("cgroup.type", "domain");
        tree.stall(0, 0);
        tree.hold(10);
        tree
    }

    /// The cgroup holds this much anonymous memory, and a little page cache that does not count.
    pub(crate) fn hold(&self, mib: u64) {
        self.hold_and_cache(mib, 1);
    }

    /// The cgroup holds this much anonymous memory, and page cache that does not count.
    pub(crate) fn hold_and_cache(&self, mib: u64, cache_mib: u64) {
        let (anon, file) = (mib * MIB, cache_mib * MIB / 2);
        self.cgroup(
            "memory.stat",
            &format!("anon {anon}\nshmem 0\ninactive_file {file}\nactive_file {file}"),
        );
        self.cgroup("memory.current", &(anon + 2 * file).to_string());
    }

    /// The cgroup's limit is this from now on.
    pub(crate) fn limit(&self, limit: ByteSize) {
        self.limit_text(&limit.get().to_string());
    }

    /// The file of its limit says this.
    pub(crate) fn limit_text(&self, text: &str) {
        self.cgroup("memory.max", text);
    }

    /// Its tasks have waited for memory so long, some of them and all.
    pub(crate) fn stall(&self, some_us: u64, full_us: u64) {
        let line = |kind, total| format!("{kind} avg10=1.50 avg60=0.00 avg300=0.00 total={total}");
        let text = format!("{}\n{}", line("some", some_us), line("full", full_us));
        self.cgroup("memory.pressure", &text);
    }

    /// The process is moved to a cgroup with this limit, or one that cannot be read.
    pub(crate) fn move_to(&self, name: &str, limit: Option<ByteSize>) {
        let at = |file: &str| format!("sys/fs/cgroup/{name}/{file}");
        self.write(&at("memory.current"), "10485760\n");
        self.write(&at("memory.stat"), "anon 10485760\ninactive_file 0\nactive_file 0\n");
        match limit {
            Some(limit) => self.write(&at("memory.max"), &format!("{}\n", limit.get())),
            None => fs::create_dir(self.0.path().join(at("memory.max"))).expect("a folder"),
        }
        self.write("proc/self/cgroup", &format!("0::/{name}\n"));
    }

    /// The kernel has no PSI.
    pub(crate) fn without_psi(&self) {
        fs::remove_file(self.0.path().join("sys/fs/cgroup/app/memory.pressure")).expect("removed");
    }

    /// The kernel has killed so many of its processes since it was made.
    pub(crate) fn killed(&self, count: u64) {
        self.cgroup(
            "memory.events",
            &format!("low 0\nhigh 0\nmax 7\noom {count}\noom_kill {count}"),
        );
    }

    pub(crate) fn open(&self) -> Signals {
        Signals::open_at(self.0.path())
    }

    fn cgroup(&self, file: &str, text: &str) {
        self.write(&format!("sys/fs/cgroup/app/{file}"), &format!("{text}\n"));
    }

    /// As the kernel changes such a file: whoever reads it meanwhile sees the old text or the new,
    /// never an empty file, because it is written over, not emptied first.
    fn write(&self, path: &str, text: &str) {
        let path: &Path = &self.0.path().join(path);
        fs::create_dir_all(path.parent().expect("a folder")).expect("created");
        let mut file =
            File::options().create(true).truncate(false).write(true).open(path).expect("opened");
        let length = usize::try_from(file.metadata().expect("of a file").len()).expect("small");
        let mut text = text.to_owned();
        text.extend(std::iter::repeat_n('\n', length.saturating_sub(text.len())));
        file.write_all(text.as_bytes()).expect("written");
    }
}

/// Signals of a system that shows nothing of itself.
pub(crate) fn nothing_to_read() -> Signals {
    Signals::open_at(tempfile::tempdir().expect("a folder").path())
}
