//! The processes that stand idle, seen from both sides.
//!
//! One ends when its standard input does, so none outlives the bench. Invariant: what a managed one
//! has and a bare one has not is a started `Memory` with an arena and a resource, and nothing else.

use std::io::{BufRead as _, BufReader, Read as _};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use lowtide::memory::Builder;
use lowtide::{BoxError, Memory};

/// The longest time that a child may take to print a line.
const PATIENCE: Duration = Duration::from_secs(20);

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
            let arena = memory.open_arena("idle")?;
            let resource = memory.register(memory.managed("idle", || Ok(vec![0_u8; 1024])))?;
            Some((arena, resource))
        }
        None => None,
    };
    println!("started {}", took.as_secs_f64() * 1e3);
    if !start_only {
        std::io::stdin().read_to_end(&mut Vec::new())?;
    }
    drop(held);
    Ok(())
}

/// An idle process; it ends with this.
pub(crate) struct Idler {
    /// Its kind.
    pub(crate) kind: Kind,
    child: Child,
}

impl Idler {
    /// Starts one and waits until it is idle.
    pub(crate) fn spawn(kind: Kind) -> Result<Self, BoxError> {
        let mut child = command(kind)?.spawn()?;
        let said = said(&mut child);
        let idler = Self { kind, child };
        said?;
        Ok(idler)
    }

    /// Its process id.
    pub(crate) fn id(&self) -> u32 {
        self.child.id()
    }
}

impl Drop for Idler {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Returns the time that `Memory::start` takes in a process of its own, in milliseconds.
pub(crate) fn start_millis(kind: Kind) -> Result<f64, BoxError> {
    let mut child = command(kind)?.arg("--start").spawn()?;
    let said = said(&mut child);
    let _ = child.kill();
    child.wait()?;
    said
}

fn command(kind: Kind) -> Result<Command, BoxError> {
    let mut command = Command::new(std::env::current_exe()?);
    command.args(["--be", kind.name()]).stdin(Stdio::piped()).stdout(Stdio::piped());
    Ok(command)
}

/// The milliseconds that the child says it took to start.
fn said(child: &mut Child) -> Result<f64, BoxError> {
    let output = child.stdout.take().ok_or("no pipe to the child")?;
    let (tell, told) = mpsc::sync_channel(1);
    // Ends with the first line, or with the child.
    std::thread::spawn(move || {
        let mut line = String::new();
        let read = BufReader::new(output).read_line(&mut line);
        let _ = tell.send(read.map(|_| line));
    });
    let line = told.recv_timeout(PATIENCE)??;
    let millis = line.trim().strip_prefix("started ");
    Ok(millis.ok_or_else(|| format!("the child said {line:?}"))?.parse()?)
}
