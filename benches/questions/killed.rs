//! Services that grow until they are killed: does the next start tell the cause, and does a heap
//! profile name the function that grew?
//!
//! `cargo bench -p lowtide-benches --features profiling --bench questions_killed`. Each run is a
//! process of its own in a memory cgroup, and the kernel kills it. If no cgroup can be made, the
//! process runs under `Builder::memory_limit`, and this program kills it at the limit. The start
//! that follows has a cgroup of its own, as with a container that is restarted: the kernel's count
//! of kills starts at zero. The newest profile is compared with the oldest of the run, as an
//! operator does. Controls are killed far below the limit.
//!
//! Invariant: a run counts only if the process was killed by signal 9.
//!
//! Exit codes: 0 every goal held; 1 one was missed, or something could not be measured.
#![expect(clippy::print_stdout, reason = "a program that prints figures")]
#![expect(clippy::disallowed_methods, reason = "it measures real time")]

#[path = "../../examples/tide/cgroup.rs"]
#[allow(dead_code, reason = "the tide enters its cgroup itself")]
mod cgroup;

use std::collections::BTreeMap;
use std::ffi::c_void;
use std::fs;
use std::hint::black_box;
use std::os::unix::process::ExitStatusExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use clap::{Args, Parser, Subcommand};
use lowtide::heap::{AllocationProfile, take_profile};
use lowtide::{BoxError, ByteSize, Memory};

use cgroup::Group;

lowtide::global_allocator!(balanced, prof: true, lg_prof_sample: 23);

/// The limit of each service.
const LIMIT: ByteSize = ByteSize::mib(192);
/// What a control holds when it is killed.
const CONTROL: ByteSize = ByteSize::mib(100);
/// What the service holds before it grows.
const HELD: ByteSize = ByteSize::mib(32);
/// The bytes of one step of a growth.
const BLOCK: usize = 64 << 10;
/// The rates of growth in MiB per second, each with each function that grows.
const RATES: [u64; 5] = [5, 20, 100, 300, 600];
/// The rate of services that grow as fast as the kernel clears pages: they must leave a cause, but
/// may be killed before a profile is written.
const FAST: u64 = 0;
const CONTROL_RATE: u64 = 32;
/// The time from the start to the growth: a service that has run for a while.
const BEFORE: Duration = Duration::from_millis(1500);
/// The longest time of a run.
const PATIENCE: Duration = Duration::from_secs(90);
/// The time between two looks.
const LOOK_EVERY: Duration = Duration::from_millis(1);

#[derive(Debug, Parser)]
#[command(about = "What a killed service leaves: the cause, and the function that grew")]
struct Cli {
    #[command(subcommand)]
    part: Option<Part>,
    /// As cargo calls it.
    #[arg(long, hide = true)]
    bench: bool,
}

#[derive(Debug, Subcommand)]
enum Part {
    /// Is the service that grows.
    #[command(hide = true)]
    Grow {
        site: usize,
        mib_per_second: u64,
        #[command(flatten)]
        place: Place,
    },
    /// Is the next start: prints the cause in the first line and the summary in the second.
    #[command(hide = true)]
    Tell {
        #[command(flatten)]
        place: Place,
    },
}

/// The folder of the recording and the profiles, and the cgroup.
#[derive(Debug, Args)]
struct Place {
    folder: PathBuf,
    /// The entrance of the cgroup.
    entrance: Option<PathBuf>,
}

impl Place {
    fn start(&self) -> Result<Memory, BoxError> {
        let builder = Memory::builder().without_environment();
        let builder = builder.flight_recorder(self.folder.join("recording"));
        let builder = builder.heap_profile_dir(self.folder.clone());
        let builder = match &self.entrance {
            Some(entrance) => {
                fs::write(entrance, std::process::id().to_string())?;
                builder
            }
            None => builder.memory_limit(LIMIT),
        };
        Ok(builder.start()?)
    }
}

fn main() -> Result<(), BoxError> {
    match Cli::parse().part {
        Some(Part::Grow { site, mib_per_second, place }) => grow(site, mib_per_second, &place),
        Some(Part::Tell { place }) => tell(&place),
        None => measure(),
    }
}

/// Prints the figures. A missed goal is an error.
fn measure() -> Result<(), BoxError> {
    let has_groups = make_group("check", 0, 0);
    if let Err(reason) = &has_groups {
        println!("no memory cgroup ({reason}): services are killed when they pass the limit");
    }
    let has_groups = has_groups.is_ok();
    let (mut told, mut named, mut false_alarms) = (0, 0, 0);
    for rate in RATES.into_iter().chain([FAST]) {
        for (site, left) in SITES.iter().zip(run_all(rate, has_groups, None)?) {
            println!("{}, {site}: {left}", speed(rate));
            told += usize::from(left.cause == "out_of_memory");
            named += usize::from(rate != FAST && left.profile.contains(site));
        }
    }
    for left in run_all(CONTROL_RATE, has_groups, Some(CONTROL))? {
        println!("control: {left}");
        false_alarms += usize::from(left.cause != "killed");
    }
    let (profiles, runs) = (RATES.len() * SITES.len(), (RATES.len() + 1) * SITES.len());
    println!("of {runs} causes, {profiles} names and {} controls", SITES.len());
    println!("figure questions.killed.cause_told {told} runs");
    println!("figure questions.killed.profile_named {named} runs");
    println!("figure questions.killed.false_alarms {false_alarms} controls");
    if told == runs && named == profiles && false_alarms == 0 {
        Ok(())
    } else {
        Err("a run without a cause or a name, or a false alarm".into())
    }
}

fn speed(rate: u64) -> String {
    if rate == FAST { "fast".to_owned() } else { format!("{rate} MiB/s") }
}

fn make_group(what: &str, site: usize, rate: u64) -> Result<Group, String> {
    let name = format!("lowtide-killed-{}-{what}-{site}-{rate}", std::process::id());
    Group::make(&name, Some(LIMIT.get()))
}

/// What a killed service left.
#[derive(Debug)]
struct Left {
    cause: String,
    summary: String,
    profile: String,
}

impl std::fmt::Display for Left {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}: {}; {}", self.cause, self.summary, self.profile)
    }
}

/// Lets a service grow from each site, all at once: the slow ones take half a minute.
fn run_all(rate: u64, has_groups: bool, kill_at: Option<ByteSize>) -> Result<Vec<Left>, BoxError> {
    std::thread::scope(|scope| {
        let runs =
            (0..SITES.len()).map(|site| scope.spawn(move || run(site, rate, has_groups, kill_at)));
        let runs: Vec<_> = runs.collect();
        runs.into_iter().map(|run| run.join().map_err(|_| "a run panicked")?).collect()
    })
}

/// Lets a service grow until it is killed: by the kernel, by this process at the limit if there
/// are no cgroups, or by this process at `kill_at`.
fn run(
    site: usize,
    rate: u64,
    has_groups: bool,
    kill_at: Option<ByteSize>,
) -> Result<Left, BoxError> {
    let folder = tempfile::tempdir()?;
    let group = |what| has_groups.then(|| make_group(what, site, rate)).transpose();
    {
        let group = group("run")?;
        let mut command = Command::new(std::env::current_exe()?);
        command.arg("grow").arg(site.to_string()).arg(rate.to_string()).arg(folder.path());
        command.args(group.as_ref().map(Group::entrance)).stdout(Stdio::null());
        let kill_at = kill_at.or_else(|| group.is_none().then_some(LIMIT));
        Service(command.spawn()?).end(kill_at)?;
    }
    let profile = grown(folder.path())?;
    let group = group("next")?;
    let mut command = Command::new(std::env::current_exe()?);
    command.arg("tell").arg(folder.path()).args(group.as_ref().map(Group::entrance));
    let Output { status, stdout, stderr } = command.output()?;
    let text = String::from_utf8_lossy(&stdout);
    let lines = text.split_once('\n').filter(|_| status.success());
    let (cause, summary) = lines.ok_or_else(|| String::from_utf8_lossy(&stderr).into_owned())?;
    Ok(Left { cause: cause.to_owned(), summary: summary.trim().to_owned(), profile })
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

/// Returns the functions that hold more in the newest profile than in the oldest, by the stack that
/// grew most.
fn grown(folder: &Path) -> Result<String, BoxError> {
    let mut files = Vec::new();
    for entry in fs::read_dir(folder)? {
        let path = entry?.path();
        if path.extension().is_some_and(|end| end == "heap") {
            files.push(path);
        }
    }
    files.sort_unstable();
    let (Some(first), Some(last)) = (files.first(), files.last()) else {
        return Ok("no profile".to_owned());
    };
    let read = |path: &Path| -> Result<_, BoxError> {
        Ok(AllocationProfile::parse(&fs::read_to_string(path)?)?)
    };
    let newest = read(last)?;
    let mut bytes: BTreeMap<_, _> = newest
        .stacks
        .iter()
        .map(|stack| (&stack.addresses, i128::from(stack.bytes.get())))
        .collect();
    let oldest = if first == last { None } else { Some(read(first)?) };
    for stack in oldest.iter().flat_map(|profile| &profile.stacks) {
        *bytes.entry(&stack.addresses).or_default() -= i128::from(stack.bytes.get());
    }
    let most = bytes.iter().max_by_key(|(_, bytes)| **bytes);
    let Some((stack, bytes)) = most else { return Ok("an empty profile".to_owned()) };
    let own = take_profile()?;
    let names = stack.iter().filter_map(|&address| name(address, &newest, &own));
    let names = names.filter(|name| name.contains("killed::"));
    let names: Vec<_> = names.collect();
    let (count, file) = (files.len(), last.file_name().unwrap_or_default().to_string_lossy());
    Ok(format!("{count} profiles, {file}: {} MiB in {}", bytes >> 20, names.join(" < ")))
}

/// Returns the name of a function of the other process, which runs the same program elsewhere.
fn name(address: u64, other: &AllocationProfile, own: &AllocationProfile) -> Option<String> {
    let of = other.mappings.iter().find(|of| (of.start..of.end).contains(&address))?;
    let same = |mapping: &&_| {
        let mapping: &lowtide::heap::ProfileMapping = mapping;
        (&mapping.path, mapping.offset) == (&of.path, of.offset)
    };
    let here = own.mappings.iter().find(same)?;
    let place = usize::try_from(address - 1 - of.start + here.start).ok()?;
    let mut name = None;
    backtrace::resolve(std::ptr::without_provenance_mut::<c_void>(place), |symbol| {
        name = symbol.name().map(|name| format!("{name:#}"));
    });
    name
}

fn tell(place: &Place) -> Result<(), BoxError> {
    let memory = place.start()?;
    let last = memory.last_exit().ok_or("no recording")?;
    println!("{}\n{}", last.cause, last.summary);
    Ok(())
}

fn grow(site: usize, mib_per_second: u64, place: &Place) -> Result<(), BoxError> {
    let memory = place.start()?;
    let held: Vec<_> = (0..HELD.get() / BLOCK as u64).map(|_| load()).collect();
    std::thread::sleep(BEFORE);
    let grow = [grow_cache, grow_sessions, grow_queue, grow_index][site];
    let per_second = ByteSize::mib(mib_per_second).as_f64();
    let (start, mut grown, mut bytes) = (Instant::now(), Vec::new(), ByteSize::ZERO);
    // Twice the limit: it is killed long before.
    while bytes < LIMIT.scaled(2.0) {
        grow(&mut grown);
        bytes = bytes.saturating_add(ByteSize::new(BLOCK as u64));
        black_box(work());
        while mib_per_second != FAST && start.elapsed().as_secs_f64() * per_second < bytes.as_f64()
        {
            std::thread::sleep(LOOK_EVERY);
        }
    }
    black_box((&held, &grown, &memory));
    Err("it was not killed".into())
}

/// What a request allocates and frees.
#[inline(never)]
fn work() -> usize {
    black_box(vec![1_u8; BLOCK / 2]).len()
}

#[inline(never)]
fn load() -> Vec<u8> {
    vec![1; BLOCK]
}

macro_rules! sites {
    ($($name:ident: $fill:literal, $size:literal;)*) => {
        const SITES: &[&str] = &[$(stringify!($name)),*];
        $(
            /// Adds a block's bytes; a fill of its own, so that no two functions are merged.
            #[inline(never)]
            fn $name(into: &mut Vec<Vec<u8>>) {
                into.extend((0..BLOCK / $size).map(|_| vec![$fill; $size]));
            }
        )*
    };
}

sites! {
    grow_cache: 2, 65_536;
    grow_sessions: 3, 1024;
    grow_queue: 4, 65_536;
    grow_index: 5, 1024;
}
