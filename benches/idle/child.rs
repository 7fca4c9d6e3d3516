//! The processes that stand idle, seen from both sides.
//!
//! One ends when its standard input does, so none outlives the bench. Invariant: what a managed one
//! has and a bare one has not is a started `Memory` with an arena and a resource, and nothing else.

use std::io::Read as _;
use std::time::Instant;

use lowtide::memory::Builder;
use lowtide::{BoxError, Memory};

use crate::common::own;
use crate::common::process::Process;

/// The kinds of processes that stand idle.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, clap::ValueEnum)]
pub(crate) enum Kind {
    /// A recorder of metrics, and no `Memory`.
    Bare,
    /// A `Memory` with its default settings.
    Managed,
    /// A `Memory` that wants no jemalloc threads.
    NoThreads,
}

impl Kind {
    /// All of them.
    pub(crate) const ALL: [Self; 3] = [Self::Bare, Self::Managed, Self::NoThreads];

    /// Its name on the command line.
    const fn name(self) -> &'static str {
        match self {
            Self::Bare => "bare",
            Self::Managed => "managed",
            Self::NoThreads => "no-threads",
        }
    }

    /// Its name in the table.
    pub(crate) const fn title(self) -> &'static str {
        match self {
            Self::Bare => "no Memory",
            Self::Managed => "Memory, defaults",
            Self::NoThreads => "Memory, no jemalloc threads",
        }
    }

    /// Its name in figures.
    pub(crate) const fn figure(self) -> &'static str {
        match self {
            Self::Bare => "bare",
            Self::Managed => "managed",
            Self::NoThreads => "no_threads",
        }
    }
}

/// Is such a process until standard input ends, or with `start_only` until it has started.
pub(crate) fn be(kind: Kind, start_only: bool) -> Result<(), BoxError> {
    let managed = Memory::builder().prometheus()?; // each kind has a recorder
    let builder = match kind {
        Kind::Bare => None,
        Kind::Managed => Some(managed),
        Kind::NoThreads => Some(managed.background_threads(0)),
    };
    let before = Instant::now();
    let memory = builder.map(Builder::start);
    let took = before.elapsed();
    let memory = memory.transpose()?;
    let held = match &memory {
        Some(memory) => {
            let arena = memory.devices().open_arena("idle")?;
            let resource = memory.managed("idle", || Ok(vec![0_u8; 1024])).register()?;
            Some((arena, resource))
        }
        None => None,
    };
    println!("{}", took.as_secs_f64() * 1e3);
    if !start_only {
        std::io::stdin().read_to_end(&mut Vec::new())?;
    }
    drop(held);
    Ok(())
}

/// Starts a process and waits until it is idle.
pub(crate) fn spawn(kind: Kind) -> Result<Process, BoxError> {
    let mut command = own()?;
    command.args(["--be", kind.name()]);
    let mut process = Process::start(command)?;
    process.first_line::<f64>()?;
    Ok(process)
}

/// Returns the time that `Memory::start` takes in a process of its own, in milliseconds.
pub(crate) fn start_millis(kind: Kind) -> Result<f64, BoxError> {
    let mut command = own()?;
    command.args(["--be", kind.name(), "--start"]);
    Process::start(command)?.first_line()
}
