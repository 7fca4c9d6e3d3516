//! Services that grow until they are killed: does a heap profile name the function that grew?
//!
//! `cargo bench -p lowtide-benches --features profiling --bench questions_killed_profile`. Each run
//! is a process of its own in a memory cgroup, and the kernel kills it. If no cgroup can be made,
//! the process runs under `Builder::memory_limit`, and this program kills it once it reports that
//! it is full. Afterwards the newest profile in the folder is compared with the oldest of the run,
//! as an operator does.
//!
//! Invariant: a run counts only if the process was killed by signal 9.
#![expect(clippy::print_stdout, reason = "a program that prints figures")]

#[path = "../../examples/tide/cgroup.rs"]
#[allow(dead_code, reason = "the tide enters its cgroup itself")]
mod cgroup;

use std::collections::BTreeMap;
use std::ffi::c_void;
use std::hint::black_box;
use std::io::{BufRead as _, BufReader};
use std::os::unix::process::ExitStatusExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use clap::{Args, Parser, Subcommand};
use lowtide::clock::{Bell, Clock as _, SystemClock};
use lowtide::heap::{AllocationProfile, take_profile};
use lowtide::{BoxError, ByteSize, Memory};

use cgroup::Group;

lowtide::global_allocator!(balanced, prof: true, lg_prof_sample: 23);

const LIMIT: ByteSize = ByteSize::mib(192);
/// What the service holds before it grows.
const HELD: ByteSize = ByteSize::mib(32);
const BLOCK: usize = 64 << 10;
/// The rates of growth in MiB per second, each with each function that grows.
const RATES: [u64; 5] = [5, 20, 100, 300, 600];
const SITES: [&str; 4] = ["grow_cache", "grow_sessions", "grow_queue", "grow_index"];
/// The time of one step of a growth.
const STEP: Duration = Duration::from_millis(5);
const KILLED: i32 = 9;

#[derive(Debug, Parser)]
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
    Service(Service),
}

#[derive(Debug, Args)]
struct Service {
    site: usize,
    mib_per_second: u64,
    folder: PathBuf,
    /// The entrance of its cgroup.
    entrance: Option<PathBuf>,
}

fn main() -> Result<(), BoxError> {
    match Cli::parse().part {
        Some(Part::Service(service)) => serve(&service),
        None => measure(),
    }
}

fn measure() -> Result<(), BoxError> {
    let (mut named, mut runs) = (0, 0);
    for rate in RATES {
        // Those of one rate at once: the slow ones take half a minute.
        let begun: Vec<_> =
            (0..SITES.len()).map(|site| Run::begin(site, rate)).collect::<Result<_, _>>()?;
        for run in begun {
            let site = SITES[run.site];
            let found = run.end()?;
            println!("{rate} MiB/s, {site}: {found}");
            runs += 1;
            named += u64::from(found.contains(site));
        }
    }
    println!("of {runs} runs");
    println!("figure questions.killed.profile_named {named} runs");
    if named == runs { Ok(()) } else { Err(format!("{} runs without a name", runs - named).into()) }
}

/// A process that grows.
struct Run {
    site: usize,
    folder: tempfile::TempDir,
    child: Child,
    group: Option<Group>,
}

impl Run {
    fn begin(site: usize, rate: u64) -> Result<Self, BoxError> {
        let folder = tempfile::tempdir()?;
        let name = format!("lowtide-killed-{}-{site}-{rate}", std::process::id());
        let group = Group::make(&name, Some(LIMIT.get())).ok();
        let mut command = Command::new(std::env::current_exe()?);
        command.arg("service").arg(site.to_string()).arg(rate.to_string()).arg(folder.path());
        command.args(group.as_ref().map(Group::entrance));
        let child = command.stdout(Stdio::piped()).stderr(Stdio::null()).spawn()?;
        Ok(Self { site, folder, child, group })
    }

    /// Waits for the end, and returns the function that grew most.
    fn end(mut self) -> Result<String, BoxError> {
        let output = self.child.stdout.take().ok_or("no output")?;
        if self.group.is_none() {
            // A line says that it is full; without one it has ended.
            let _ = BufReader::new(output).lines().next();
            self.child.kill()?;
        }
        let status = self.child.wait()?;
        if status.signal() != Some(KILLED) {
            return Err(format!("{status}: expected signal {KILLED}").into());
        }
        grown(self.folder.path())
    }
}

/// Returns the functions that hold more in the newest profile than in the oldest, by the stack that
/// grew most.
fn grown(folder: &Path) -> Result<String, BoxError> {
    let mut files = Vec::new();
    for entry in std::fs::read_dir(folder)? {
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
        Ok(AllocationProfile::parse(&std::fs::read_to_string(path)?)?)
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
    let names = names.filter(|name| name.contains("killed_profile::"));
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

fn serve(service: &Service) -> Result<(), BoxError> {
    let mut builder =
        Memory::builder().without_environment().heap_profile_dir(service.folder.clone());
    match &service.entrance {
        Some(entrance) => std::fs::write(entrance, std::process::id().to_string())?,
        None => builder = builder.memory_limit(LIMIT),
    }
    let memory = builder.start()?;
    let held: Vec<_> = (0..HELD.get() / BLOCK as u64).map(|_| load()).collect();
    let grow = [grow_cache, grow_sessions, grow_queue, grow_index][service.site];
    let step = service.mib_per_second * 1024 * u64::try_from(STEP.as_millis())? / 1000;
    let (mut grown, mut kib) = (Vec::new(), 0);
    let (clock, bell) = (SystemClock::new(), Bell::new());
    let most = (LIMIT.get() >> 10) + 1024;
    loop {
        kib += step;
        while ((grown.len() * BLOCK) as u64) < kib << 10 {
            grown.push(grow());
            black_box(work());
        }
        if kib > most {
            println!("full");
            std::thread::park();
        }
        clock.wait_until(&bell, clock.now() + STEP);
        black_box((&held, &grown, &memory));
    }
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
    ($($name:ident: $fill:literal;)*) => {
        $(
            /// Grows the service; a fill of its own, so that no two functions are merged.
            #[inline(never)]
            fn $name() -> Vec<u8> {
                vec![$fill; BLOCK]
            }
        )*
    };
}

sites! {
    grow_cache: 2;
    grow_sessions: 3;
    grow_queue: 4;
    grow_index: 5;
}
