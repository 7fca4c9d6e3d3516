//! Services that grow until they are killed: does the next start tell the cause, and does a heap
//! profile name the function that grew?
//!
//! Each run is a process of its own in a memory cgroup, and the kernel kills it. If no cgroup can be
//! made, the process runs under `Builder::memory_limit`, and this program kills it at the limit. The
//! start that follows has a cgroup of its own, as with a container that is restarted: the kernel's
//! count of kills starts at zero. The newest profile is compared with the oldest of the run, as an
//! operator does. Controls are killed far below the limit.
//!
//! Invariant: a run counts only if the process was killed by signal 9.

use std::collections::BTreeMap;
use std::ffi::c_void;
use std::fs;
use std::hint::black_box;
use std::os::unix::process::ExitStatusExt as _;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use common::figures::{Figures, count};
use common::own;
use common::process::{self, Process, kernel_value};
use lowtide::heap::{AllocationProfile, take_profile};
use lowtide::{BoxError, ByteSize, Memory};

/// Several services end at once, and one profile is taken at a time.
static TAKING: Mutex<()> = Mutex::new(());

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
/// The rate, not in MiB, of services that grow as fast as the kernel clears pages: they must leave a cause, but
/// may be killed before a profile is written.
const FAST: u64 = 0;
const CONTROL_RATE: u64 = 32;
/// The time from the start to the growth: a service that has run for a while.
const BEFORE: Duration = Duration::from_millis(1500);
/// The longest time of a run.
const PATIENCE: Duration = Duration::from_secs(90);
/// The time between two looks.
const LOOK_EVERY: Duration = Duration::from_millis(1);

/// Starts a `Memory` with the recording and the profiles of this folder.
fn start(folder: &Path) -> Result<Memory, BoxError> {
    let builder = Memory::builder().flight_recorder(folder.join("recording"));
    Ok(builder.heap_profile_dir(folder.to_owned()).start()?)
}

/// Prints the figures. Returns `true` if every goal held.
pub(crate) fn measure() -> Result<bool, BoxError> {
    if let Err(reason) = process::group(LIMIT) {
        println!("no memory cgroup ({reason}): services are killed when they pass the limit");
    }
    let (mut told, mut named, mut false_alarms) = (0, 0, 0);
    for rate in RATES.into_iter().chain([FAST]) {
        for (site, left) in SITES.iter().zip(run_all(rate, None)?) {
            println!("{rate} MiB/s, {site}: {}", left.join("; "));
            let [cause, _, profile] = left;
            told += u64::from(cause == "out_of_memory");
            named += u64::from(rate != FAST && profile.contains(site));
        }
    }
    for left in run_all(CONTROL_RATE, Some(CONTROL))? {
        println!("control: {}", left.join("; "));
        false_alarms += u64::from(left[0] != "killed");
    }
    let mut figures = Figures::default();
    let least = |rates: usize| count((rates * SITES.len()) as u64);
    let name = |what: &str| format!("questions.killed.{what}");
    figures.at_least(name("cause_told"), count(told), "runs", least(RATES.len() + 1));
    figures.at_least(name("profile_named"), count(named), "runs", least(RATES.len()));
    figures.at_most(name("false_alarms"), count(false_alarms), "controls", 0.0);
    Ok(figures.print())
}

/// What a killed service left: the cause, the summary, and what the profile names.
type Left = [String; 3];

/// Lets a service grow from each site, all at once: the slow ones take half a minute.
fn run_all(rate: u64, kill_at: Option<ByteSize>) -> Result<Vec<Left>, BoxError> {
    std::thread::scope(|scope| {
        let runs = (0..SITES.len()).map(|site| scope.spawn(move || run(site, rate, kill_at)));
        let runs: Vec<_> = runs.collect();
        runs.into_iter().map(|run| run.join().map_err(|_| "a run panicked")?).collect()
    })
}

/// Lets a service grow until it is killed: by the kernel, by this process at the limit if there
/// are no cgroups, or by this process at `kill_at`.
fn run(site: usize, rate: u64, kill_at: Option<ByteSize>) -> Result<Left, BoxError> {
    let folder = tempfile::tempdir()?;
    {
        let mut command = own(&["grow", &site.to_string(), &rate.to_string()])?;
        command.arg(folder.path());
        let mut service = Process::start_in_group(&command, LIMIT)?;
        let kill_at = kill_at.or_else(|| service.folder().is_none().then_some(LIMIT));
        wait_for_end(&mut service, kill_at)?;
    }
    let profile = grown(folder.path())?;
    let mut command = own(&["tell"])?;
    let mut next = Process::start_in_group(command.arg(folder.path()), LIMIT)?;
    Ok([next.line()?, next.line()?, profile])
}

/// Waits until a service is killed, or kills it when it holds so much.
fn wait_for_end(service: &mut Process, kill_at: Option<ByteSize>) -> Result<(), BoxError> {
    let status = format!("/proc/{}/status", service.child.id());
    let deadline = Instant::now() + PATIENCE;
    while Instant::now() < deadline {
        if let Some(status) = service.ended() {
            let is_killed = status.signal() == Some(libc::SIGKILL);
            return if is_killed { Ok(()) } else { Err(format!("it ended: {status}").into()) };
        }
        let held = ByteSize::kib(kernel_value(&status, "VmRSS:").unwrap_or_default());
        if kill_at.is_some_and(|kill_at| held >= kill_at) {
            service.child.kill()?;
        }
        std::thread::sleep(LOOK_EVERY);
    }
    Err("it was not killed in time".into())
}

/// Returns the functions that hold more in the newest profile than in the oldest, by the stack that
/// grew most.
fn grown(folder: &Path) -> Result<String, BoxError> {
    let entries = fs::read_dir(folder)?.map(|entry| Ok(entry?.path()));
    let mut files = entries.collect::<std::io::Result<Vec<PathBuf>>>()?;
    files.retain(|path| path.extension().is_some_and(|end| end == "heap"));
    files.sort_unstable();
    let (Some(first), Some(last)) = (files.first(), files.last()) else {
        return Ok("no profile".to_owned());
    };
    let read = |path: &Path| -> Result<_, BoxError> {
        Ok(AllocationProfile::parse(&fs::read_to_string(path)?)?)
    };
    let newest = read(last)?;
    let oldest = if first == last { AllocationProfile::default() } else { read(first)? };
    let mut bytes = BTreeMap::<_, i128>::new();
    for (profile, sign) in [(&newest, 1), (&oldest, -1)] {
        for stack in &profile.stacks {
            *bytes.entry(&stack.addresses).or_default() += sign * i128::from(stack.bytes.get());
        }
    }
    let most = bytes.iter().max_by_key(|(_, bytes)| **bytes);
    let Some((stack, bytes)) = most else { return Ok("an empty profile".to_owned()) };
    let own = {
        let _taking = TAKING.lock().unwrap_or_else(PoisonError::into_inner);
        take_profile()?
    };
    let names = stack.iter().filter_map(|&address| name(address, &newest, &own));
    let names: Vec<_> = names.filter(|name| name.contains("killed::")).collect();
    let (number, file) = (files.len(), last.file_name().unwrap_or_default().to_string_lossy());
    Ok(format!("{number} profiles, {file}: {} MiB in {}", bytes >> 20, names.join(" < ")))
}

/// Returns the name of a function of the other process, which runs the same program elsewhere.
fn name(address: u64, other: &AllocationProfile, own: &AllocationProfile) -> Option<String> {
    let of = other.mappings.iter().find(|of| (of.start..of.end).contains(&address))?;
    let here = own.mappings.iter().find(|it| (&it.path, it.offset) == (&of.path, of.offset))?;
    let place = usize::try_from(address - 1 - of.start + here.start).ok()?;
    let mut name = None;
    backtrace::resolve(std::ptr::without_provenance_mut::<c_void>(place), |symbol| {
        name = symbol.name().map(|name| format!("{name:#}"));
    });
    name
}

pub(crate) fn tell(folder: &Path) -> Result<(), BoxError> {
    let memory = start(folder)?;
    let last = memory.report().last_exit().ok_or("no recording")?;
    println!("{}\n{}", last.cause, last.summary);
    Ok(())
}

pub(crate) fn grow(site: usize, mib_per_second: u64, folder: &Path) -> Result<(), BoxError> {
    let memory = start(folder)?;
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
