//! Processes that a bench starts, in memory cgroups if they are to be limited.
//!
//! Invariant: a process ends with its value, and its cgroup after it.
#![expect(clippy::disallowed_methods, reason = "processes are waited for")]

use std::fs;
use std::io::{BufRead as _, BufReader};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::os::unix::process::ExitStatusExt as _;
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::str::FromStr;
use std::sync::Barrier;
use std::sync::mpsc::{self, Receiver};
use std::thread::sleep;
use std::time::{Duration, Instant};

use lowtide::heap::purge_now;
use lowtide::{BoxError, ByteSize};

#[path = "../../examples/comparison/cgroup.rs"]
mod cgroup;
pub use self::cgroup::Group;

/// The longest time until a process prints a line, and until it accepts connections.
const LINE_PATIENCE: Duration = Duration::from_secs(300);
const START_PATIENCE: Duration = Duration::from_secs(20);
/// The longest time until a cgroup is empty after its process was killed, in looks.
const LOOKS_MAX: u32 = 1000;
const LOOK_EVERY: Duration = Duration::from_millis(5);

/// A process, which is killed with its value.
pub struct Process {
    pub child: Child,
    group: Option<Group>,
    lines: Option<Receiver<String>>,
}

impl Process {
    /// Starts a program, which may read its standard input until its end, and writes to a pipe.
    pub fn start(mut command: Command) -> Result<Self, BoxError> {
        Self::spawn(command.stdin(Stdio::piped()).stdout(Stdio::piped()))
    }

    /// Starts a program.
    pub fn spawn(command: &mut Command) -> Result<Self, BoxError> {
        let child = command.spawn();
        let child = child.map_err(|error| format!("{:?}: {error}", command.get_program()))?;
        Ok(Self { child, group: None, lines: None })
    }

    /// Starts a program in a memory cgroup with this limit. If no cgroup can be made, the program
    /// only gets the limit by `LOWTIDE_MEMORY_LIMIT`.
    pub fn start_in_group(command: &Command, limit: ByteSize) -> Result<Self, BoxError> {
        let group = group(limit).ok();
        let entrance = group.as_ref().map_or_else(|| "/dev/null".into(), Group::entrance);
        // A shell enters and becomes the program, so that no memory is charged elsewhere.
        let enter = "echo $$ >\"$0\" && exec \"$@\"";
        let mut shell = Command::new("/bin/sh");
        shell.args(["-c", enter]).arg(entrance).arg(command.get_program());
        shell.args(command.get_args());
        shell.envs(command.get_envs().filter_map(|(name, value)| Some((name, value?))));
        if group.is_none() {
            shell.env("LOWTIDE_MEMORY_LIMIT", limit.exact());
        }
        let mut process = Self::start(shell)?;
        process.group = group;
        Ok(process)
    }

    /// Returns the folder of its cgroup, if it has one.
    pub fn folder(&self) -> Option<&Path> {
        self.group.as_ref().map(|group| &*group.folder)
    }

    /// Changes the limit of its cgroup.
    pub fn set_limit(&self, limit: ByteSize) -> std::io::Result<()> {
        self.folder().map_or(Ok(()), |folder| cgroup::set_limit(folder, limit.get()))
    }

    /// Waits for its first line, and reads it.
    pub fn first_line<T: FromStr>(&mut self) -> Result<T, BoxError> {
        let line = self.line()?;
        line.trim().parse().map_err(|_| format!("a process said {line:?}").into())
    }

    /// Waits for its next line.
    pub fn line(&mut self) -> Result<String, BoxError> {
        if let Some(output) = self.child.stdout.take() {
            let (tell, lines) = mpsc::channel();
            self.lines = Some(lines);
            // Ends with the process.
            std::thread::spawn(move || {
                let lines = BufReader::new(output).lines().map_while(Result::ok);
                lines.for_each(|line| drop(tell.send(line)));
            });
        }
        let lines = self.lines.as_ref().ok_or("no pipe from the process")?;
        Ok(lines.recv_timeout(LINE_PATIENCE)?)
    }

    /// Waits until it accepts connections.
    pub fn accepts(&mut self, at: SocketAddr) -> Result<(), BoxError> {
        let end = Instant::now() + START_PATIENCE;
        while TcpStream::connect(at).is_err() {
            if let Some(status) = self.ended() {
                return Err(format!("it ended: {status}").into());
            }
            if Instant::now() > end {
                return Err("it accepts no connections".into());
            }
            sleep(LOOK_EVERY);
        }
        Ok(())
    }

    /// Ends its standard input, and waits for its end.
    pub fn finish(&mut self) -> Result<(), BoxError> {
        drop(self.child.stdin.take());
        let status = self.child.wait()?;
        if status.success() { Ok(()) } else { Err(format!("it ended: {status}").into()) }
    }

    /// Waits for its end. Returns `true` if it was killed.
    pub fn is_killed(&mut self) -> std::io::Result<bool> {
        Ok(self.child.wait()?.signal() == Some(libc::SIGKILL))
    }

    /// Returns its exit status if it has ended.
    pub fn ended(&mut self) -> Option<ExitStatus> {
        self.child.try_wait().ok().flatten()
    }

    /// Kills it. Returns the number of processes of its cgroup that the kernel killed for memory,
    /// and at least 1 if it had ended before.
    pub fn end(mut self) -> u64 {
        let has_ended = u64::from(self.ended().is_some());
        self.folder().and_then(oom_kills).unwrap_or(0).max(has_ended)
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        // It may take a moment until the group is empty.
        let Some(folder) = self.folder() else { return };
        for _ in 0..LOOKS_MAX {
            if fs::remove_dir(folder).is_ok() || !folder.exists() {
                return;
            }
            sleep(LOOK_EVERY);
        }
    }
}

/// Lets this process, and those that it starts, have all the file descriptors that they may.
///
/// # Errors
/// The kernel's.
#[expect(unsafe_code, reason = "the C library's limits")]
pub fn raise_descriptors() -> std::io::Result<()> {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: a place for the limit.
    let mut failed = unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut limit) };
    if failed == 0 {
        limit.rlim_cur = limit.rlim_max;
        // SAFETY: a limit.
        failed = unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &raw const limit) };
    }
    if failed == 0 { Ok(()) } else { Err(std::io::Error::last_os_error()) }
}

/// Makes a memory cgroup with this limit, or says why none can be made here.
pub fn group(limit: ByteSize) -> Result<Group, String> {
    use std::sync::atomic::{AtomicU32, Ordering};
    static NUMBER: AtomicU32 = AtomicU32::new(0);
    let number = NUMBER.fetch_add(1, Ordering::Relaxed);
    Group::make(&format!("lowtide-bench-{}-{number}", std::process::id()), limit.get())
}

/// Returns an address of this machine that was free a moment ago.
pub fn free_port() -> std::io::Result<SocketAddr> {
    TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?.local_addr()
}

/// Returns all that a cgroup is charged with, page cache too.
pub fn usage(folder: &Path) -> Option<ByteSize> {
    let read = |name: &&str| fs::read_to_string(folder.join(name)).ok();
    let text = ["memory.current", "memory.usage_in_bytes"].iter().find_map(read)?;
    Some(ByteSize::new(text.trim().parse().ok()?))
}

/// Returns the number of processes of a cgroup that the kernel has killed for memory.
pub fn oom_kills(folder: &Path) -> Option<u64> {
    let read = |name: &&str| kernel_value(folder.join(name), "oom_kill ").ok();
    ["memory.events", "memory.oom_control"].iter().find_map(read)
}

/// Returns the number after a key in a file of the kernel, such as `VmRSS:` in
/// `/proc/self/status`.
pub fn kernel_value(file: impl AsRef<Path>, key: &str) -> Result<u64, BoxError> {
    let text = fs::read_to_string(file)?;
    let line = text.lines().find_map(|line| line.strip_prefix(key));
    let number = line.and_then(|line| line.split_whitespace().next()?.parse().ok());
    number.ok_or_else(|| format!("no {key}").into())
}

/// Returns the resident KiB of this process while 8 threads, which have done this work, wait. Idle
/// pages are purged first, since a service's decay releases them within seconds.
pub fn resident_at_rest(work: impl Fn() + Sync) -> Result<u64, BoxError> {
    let done = Barrier::new(9);
    std::thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| {
                work();
                done.wait();
                done.wait();
            });
        }
        done.wait();
        purge_now()?;
        let resident = kernel_value("/proc/self/smaps_rollup", "Rss:");
        done.wait();
        resident
    })
}

/// Returns the name of each thread of a process and its nanoseconds on a CPU, by `schedstat`. The ticks
/// of its `stat` are 10 ms, which is more than an idle second costs.
pub fn threads(process: u32) -> Result<Vec<(String, u64)>, BoxError> {
    let mut threads = Vec::new();
    for entry in fs::read_dir(format!("/proc/{process}/task"))? {
        let folder = entry?.path();
        let read = |name: &str| fs::read_to_string(folder.join(name));
        // One that ended since it was listed has no files.
        let (Ok(name), Ok(text)) = (read("comm"), read("schedstat")) else { continue };
        let nanos = text.split_whitespace().next().ok_or("schedstat has other fields")?;
        threads.push((name.trim().to_owned(), nanos.parse()?));
    }
    Ok(threads)
}

/// Returns the nanoseconds on a CPU of the thread of this process with this name.
pub fn nanos_of(name: &str) -> Result<u64, BoxError> {
    let thread = threads(std::process::id())?.into_iter().find(|thread| thread.0 == name);
    Ok(thread.ok_or_else(|| format!("no thread {name}"))?.1)
}
