//! Services that grow until the kernel kills them, and what the next start says of them.
//!
//! Each run has a cgroup of its own, and so has the start that follows, as with a container that is
//! restarted: the kernel's count of kills starts at zero. Controls are killed far below the limit.

use std::collections::BTreeMap;
use std::fs;
use std::hint::black_box;
use std::os::unix::process::ExitStatusExt as _;
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use clap::ValueEnum;
use lowtide::{BoxError, ByteSize, Memory};

use crate::cgroup::Group;

/// The limit of each service.
const LIMIT: ByteSize = ByteSize::mib(256);
/// What a control holds at most when it is killed.
const CONTROL: ByteSize = ByteSize::mib(100);
/// The bytes per second of the slow runs.
const SLOW: [u32; 5] = [16 << 20, 32 << 20, 64 << 20, 96 << 20, 128 << 20];
/// The runs as fast as the kernel clears pages.
const FAST: usize = 5;
/// The controls.
const CONTROLS: usize = 4;
/// The longest time of a run.
const PATIENCE: Duration = Duration::from_secs(60);
/// The time between two looks from outside.
const LOOK_EVERY: Duration = Duration::from_millis(1);
/// The time from the start to the growth: a service that has run for a while.
const BEFORE: Duration = Duration::from_millis(1500);

/// A call site that grows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Growth {
    /// Large blocks of Rust code.
    Blocks,
    /// Small entries of a map.
    Entries,
}

impl Growth {
    const ALL: [Self; 2] = [Self::Blocks, Self::Entries];

    const fn name(self) -> &'static str {
        match self {
            Self::Blocks => "blocks",
            Self::Entries => "entries",
        }
    }
}

/// Is a service that grows until it is killed.
pub(crate) fn grow(recording: &Path, growth: Growth, rate: u32) -> Result<(), BoxError> {
    let memory = Memory::builder().memory_limit(LIMIT).flight_recorder(recording).start()?;
    std::thread::sleep(BEFORE);
    let (start, mut grown) = (Instant::now(), ByteSize::ZERO);
    let (mut blocks, mut entries) = (Vec::new(), BTreeMap::new());
    // Twice the limit: it is killed long before.
    while grown < LIMIT.scaled(2.0) {
        grown = grown.saturating_add(match growth {
            Growth::Blocks => {
                blocks.push(black_box(vec![1_u8; 1 << 20]));
                ByteSize::mib(1)
            }
            Growth::Entries => {
                for _ in 0..64 {
                    entries.insert(entries.len(), black_box(vec![1_u8; 1000]));
                }
                ByteSize::new(64_000)
            }
        });
        while rate > 0 && start.elapsed().as_secs_f64() * f64::from(rate) < grown.as_f64() {
            std::thread::sleep(LOOK_EVERY);
        }
    }
    drop((memory, blocks, entries));
    Err("it was not killed".into())
}

/// Starts as the next run, and prints the cause in the first line and the summary in the second.
pub(crate) fn tell(recording: &Path) -> Result<(), BoxError> {
    let memory = Memory::builder().memory_limit(LIMIT).flight_recorder(recording).start()?;
    let last = memory.last_exit().ok_or("no recording")?;
    println!("{}\n{}", last.cause, last.summary);
    Ok(())
}

/// Prints the figures. Returns whether the goal holds.
pub(crate) fn measure() -> Result<bool, BoxError> {
    let has_groups = Group::make(&name("check"), Some(LIMIT.get()));
    if let Err(reason) = &has_groups {
        println!("no memory cgroup ({reason}): services are killed when they pass the limit");
    }
    let has_groups = has_groups.is_ok();
    let fast = std::iter::repeat_n(0, FAST);
    let rates: Vec<_> = SLOW.into_iter().chain(fast).collect();
    let (mut told, mut runs) = (0, 0);
    for growth in Growth::ALL {
        for &rate in &rates {
            let (cause, summary) = run(growth, rate, has_groups, None)?;
            println!("{}, {}: {cause}: {summary}", growth.name(), speed(rate));
            told += u32::from(cause == "out_of_memory");
            runs += 1;
        }
    }
    let mut false_alarms = 0;
    for growth in Growth::ALL.into_iter().cycle().take(CONTROLS) {
        let (cause, summary) = run(growth, 32 << 20, has_groups, Some(CONTROL))?;
        println!("control: {cause}: {summary}");
        false_alarms += u32::from(cause != "killed");
    }
    println!("of {runs} runs and {CONTROLS} controls");
    println!("figure questions.killed.cause_told {told} runs");
    println!("figure questions.killed.false_alarms {false_alarms} controls");
    Ok(told == runs && false_alarms == 0)
}

fn speed(rate: u32) -> String {
    if rate == 0 { "fast".to_owned() } else { format!("{}/s", ByteSize::new(rate.into())) }
}

fn name(what: &str) -> String {
    format!("lowtide-flight-{}-{what}", std::process::id())
}

/// Lets a service grow until it is killed: by the kernel, by this process at the limit if there
/// are no cgroups, or by this process at `kill_at`. Returns what the next start tells.
fn run(
    growth: Growth,
    rate: u32,
    has_groups: bool,
    kill_at: Option<ByteSize>,
) -> Result<(String, String), BoxError> {
    let folder = tempfile::tempdir()?;
    let recording = folder.path().join("recording");
    {
        let group = has_groups.then(|| Group::make(&name("run"), Some(LIMIT.get()))).transpose()?;
        let mut command = inside(group.as_ref())?;
        command.args(["--be", "grow", "--growth", growth.name()]);
        command.args(["--rate", &rate.to_string(), "--recording"]);
        let mut service = Service(command.arg(&recording).stdout(Stdio::null()).spawn()?);
        let kill_at = kill_at.or_else(|| group.is_none().then_some(LIMIT));
        service.end(kill_at)?;
    }
    let group = has_groups.then(|| Group::make(&name("next"), Some(LIMIT.get()))).transpose()?;
    let told =
        inside(group.as_ref())?.args(["--be", "tell", "--recording"]).arg(&recording).output()?;
    let Output { status, stdout, stderr } = &told;
    let text = String::from_utf8_lossy(stdout);
    let lines = text.split_once('\n').filter(|_| status.success());
    let (cause, summary) = lines.ok_or_else(|| String::from_utf8_lossy(stderr).into_owned())?;
    Ok((cause.to_owned(), summary.trim().to_owned()))
}

/// This program, inside a cgroup: a shell enters that and becomes the program.
fn inside(group: Option<&Group>) -> Result<Command, BoxError> {
    let own = std::env::current_exe()?;
    let Some(group) = group else { return Ok(Command::new(own)) };
    let mut command = Command::new("/bin/sh");
    command.args(["-c", "echo $$ >\"$0\" && exec \"$@\""]).arg(group.entrance()).arg(own);
    Ok(command)
}

/// A service, which ends with this.
struct Service(Child);

impl Service {
    /// Waits until it is killed, or kills it when it holds so much.
    fn end(&mut self, kill_at: Option<ByteSize>) -> Result<(), BoxError> {
        let statm = format!("/proc/{}/statm", self.0.id());
        let deadline = Instant::now() + PATIENCE;
        while Instant::now() < deadline {
            if let Some(status) = self.0.try_wait()? {
                let is_killed = status.signal() == Some(libc::SIGKILL);
                return if is_killed { Ok(()) } else { Err(format!("it ended: {status}").into()) };
            }
            let text = fs::read_to_string(&statm).unwrap_or_default();
            let pages = text.split(' ').nth(1).and_then(|pages| pages.parse::<u64>().ok());
            let held = ByteSize::new(pages.unwrap_or_default() * 4096);
            if kill_at.is_some_and(|kill_at| held >= kill_at) {
                self.0.kill()?;
            }
            std::thread::sleep(LOOK_EVERY);
        }
        Err("it was not killed in time".into())
    }
}

impl Drop for Service {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}
