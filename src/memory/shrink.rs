//! Shrinks by selector, `cpu:0;gpu:0`, now or at the end of a run.
//!
//! `gpu:0` is every device arena of this `Memory`, those that drain included, whatever their rung:
//! where the host driver stands for a device, the selector of that device still names its arenas.
//! `cpu:0` is the process heap, jemalloc and the C library's, which is what stands here for ONNX
//! Runtime's arena in host memory, the pinned pools of slots, and host memory that stays between
//! sleeps. A selector thus means the same on a machine without a GPU.
//!
//! Every target is looked up before any is shrunk. A target without an arena is zero bytes, and no
//! error. What a run's guard is dropped with, without its end, is left to the worker.
//!
//! Invariant: the results are one for each target, in the order of the selector.

use std::fmt;
use std::sync::atomic::{AtomicU8, Ordering};
use std::time::Duration;

use thiserror::Error;

use crate::bytes::ByteSize;
use crate::config::arena::{RunOptions, SelectorError, Target, TargetKind, Targets};
use crate::control::Job;
use crate::device::{DeviceArena, DeviceError};
use crate::host::{HostError, Outcome};

use super::error::Diagnostic;
use super::shared::Shared;
use super::{Memory, MemoryError};

/// The targets that there are.
const TARGETS: [Target; 2] =
    [Target { kind: TargetKind::Cpu, id: 0 }, Target { kind: TargetKind::Gpu, id: 0 }];

/// Why nothing was shrunk.
#[derive(Clone, Debug, Error, PartialEq)]
#[non_exhaustive]
pub enum ShrinkError {
    /// The selector names no targets.
    #[error(transparent)]
    Selector(#[from] SelectorError),
    /// There is no such device.
    #[error("{target} is not here: expected {}", known())]
    UnknownTarget {
        /// What was named.
        target: Target,
    },
    /// This is a forked child, or something else that no part of this `Memory` can do now.
    #[error(transparent)]
    Memory(#[from] MemoryError),
}

fn known() -> String {
    TARGETS.map(|target| target.to_string()).join(" or ")
}

/// What a shrink gave back, target by target.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Shrunk {
    /// One for each, in the order of the selector.
    pub targets: Vec<ShrunkTarget>,
}

impl Shrunk {
    /// Bytes given back in all.
    #[must_use]
    pub fn released(&self) -> ByteSize {
        self.targets.iter().map(|target| target.outcome.released()).sum()
    }
}

/// What became of one target.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct ShrunkTarget {
    /// Which.
    pub target: Target,
    /// What came of it.
    pub outcome: ShrinkOutcome,
    /// How long it took.
    pub took: Duration,
}

/// What came of a target.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum ShrinkOutcome {
    /// So many bytes were given back; zero where nothing was idle, or there is no arena.
    Released(ByteSize),
    /// It cannot be done in this process.
    Unsupported {
        /// Why not.
        reason: String,
    },
    /// Some of it failed; the rest was done.
    Failed {
        /// Bytes that were given back all the same.
        released: ByteSize,
        /// The first failure.
        cause: ShrinkFailure,
    },
}

impl ShrinkOutcome {
    /// Bytes given back.
    #[must_use]
    pub const fn released(&self) -> ByteSize {
        match self {
            Self::Released(released) | Self::Failed { released, .. } => *released,
            Self::Unsupported { .. } => ByteSize::ZERO,
        }
    }
}

/// What failed in a shrink.
#[derive(Clone, Debug, Error, PartialEq)]
#[non_exhaustive]
pub enum ShrinkFailure {
    /// The process heap.
    #[error("the heap cannot be purged: {0}")]
    Heap(HostError),
    /// An arena.
    #[error("arena {arena:?} cannot be shrunk: {error}")]
    Arena {
        /// Its name.
        arena: String,
        /// What the driver said.
        error: DeviceError,
    },
}

impl Memory {
    /// Shrinks what the selector names, on this thread: about 0.1 ms for each MiB given back.
    ///
    /// ```
    /// use lowtide::Memory;
    /// use lowtide::memory::ShrinkError;
    ///
    /// let memory = Memory::builder().start()?;
    /// let shrunk = memory.shrink("cpu:0;gpu:0")?;
    /// assert_eq!(shrunk.targets.len(), 2); // each with its bytes, or why not
    /// assert!(matches!(memory.shrink("gpu:7"), Err(ShrinkError::UnknownTarget { .. })));
    /// # Ok::<(), lowtide::BoxError>(())
    /// ```
    ///
    /// # Errors
    /// [`ShrinkError`]; then nothing was shrunk.
    pub fn shrink(&self, selector: &str) -> Result<Shrunk, ShrinkError> {
        self.shrink_targets(&selector.parse()?)
    }

    /// As [`Memory::shrink`], for targets that were read before.
    ///
    /// # Errors
    /// [`ShrinkError`]; then nothing was shrunk.
    pub fn shrink_targets(&self, targets: &Targets) -> Result<Shrunk, ShrinkError> {
        let shared = &self.0.shared;
        shared.check_targets(targets)?;
        Ok(shared.shrink(targets.iter()))
    }

    /// Begins a run, at whose end is shrunk what its options say. The options are checked now, so
    /// that a run with a wrong selector does not begin.
    ///
    /// ```
    /// use lowtide::Memory;
    /// use lowtide::config::arena::{RunOptions, SHRINK_OPTION};
    ///
    /// let memory = Memory::builder().start()?;
    /// let run = memory.run(RunOptions::from_entries([(SHRINK_OPTION, "gpu:0")])?)?;
    /// // ... inference ...
    /// println!("{}", run.end().released());
    /// # Ok::<(), lowtide::BoxError>(())
    /// ```
    ///
    /// # Errors
    /// [`ShrinkError`].
    pub fn run(&self, options: RunOptions) -> Result<Run, ShrinkError> {
        let shared = &self.0.shared;
        shared.check_here().map_err(ShrinkError::from)?;
        options.shrink.as_ref().map_or(Ok(()), |targets| shared.check_targets(targets))?;
        Ok(Run { memory: self.clone(), shrink: options.shrink })
    }
}

/// A run; what is to be shrunk at its end is shrunk when it ends.
#[must_use = "a run ends when this is dropped"]
pub struct Run {
    memory: Memory,
    shrink: Option<Targets>,
}

impl Run {
    /// Ends it, and shrinks on this thread. What fails is in the result; the run has succeeded all
    /// the same.
    pub fn end(mut self) -> Shrunk {
        let shared = &self.memory.0.shared;
        match self.shrink.take() {
            Some(targets) if shared.check_here().is_ok() => shared.shrink(targets.iter()),
            _ => Shrunk::default(),
        }
    }
}

impl Drop for Run {
    /// Leaves the shrink to the worker, since a drop never blocks; what fails there is a note.
    /// After a shutdown, and in a forked child, nothing is shrunk.
    fn drop(&mut self) {
        let Some(targets) = self.shrink.take() else { return };
        let shared = &self.memory.0.shared;
        if shared.check_here().is_ok() {
            shared.shrinks.ask(targets.iter());
            shared.queue.push_one(Job::DecayDevice);
        }
    }
}

impl fmt::Debug for Run {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Run").field("shrink", &self.shrink).finish_non_exhaustive()
    }
}

/// Targets that the worker is to shrink: a bit for each, so that it is bounded.
#[derive(Debug, Default)]
pub(super) struct ShrinksAsked(AtomicU8);

impl ShrinksAsked {
    fn ask(&self, targets: impl Iterator<Item = Target>) {
        let bits = targets.filter_map(|target| TARGETS.iter().position(|known| *known == target));
        self.0.fetch_or(bits.fold(0, |bits, at| bits | 1 << at), Ordering::Release);
    }

    fn take(&self) -> impl Iterator<Item = Target> + use<> {
        let bits = self.0.swap(0, Ordering::Acquire);
        TARGETS.into_iter().enumerate().filter(move |(at, _)| bits & 1 << at != 0).map(|(_, t)| t)
    }
}

impl Shared {
    fn check_targets(&self, targets: &Targets) -> Result<(), ShrinkError> {
        self.check_here()?;
        let unknown = targets.iter().find(|target| !TARGETS.contains(target));
        unknown.map_or(Ok(()), |target| Err(ShrinkError::UnknownTarget { target }))
    }

    /// What runs that were dropped have left to the worker.
    pub(super) fn shrink_asked(&self) {
        for shrunk in self.shrink(self.shrinks.take()).targets {
            if let ShrinkOutcome::Failed { cause, .. } = shrunk.outcome {
                self.diagnostic(Diagnostic::warning("device", cause.to_string()));
            }
        }
    }

    fn shrink(&self, targets: impl Iterator<Item = Target>) -> Shrunk {
        let one = |target: Target| {
            let start = self.clock.now();
            let outcome = match target.kind {
                TargetKind::Cpu => self.shrink_host(),
                TargetKind::Gpu => self.shrink_arenas(),
            };
            ShrunkTarget { target, outcome, took: self.clock.now() - start }
        };
        Shrunk { targets: targets.map(one).collect() }
    }

    /// The heap, the pinned pools, and what stays between sleeps.
    fn shrink_host(&self) -> ShrinkOutcome {
        let mut released = self.arenas().iter().map(DeviceArena::release_stores).sum::<ByteSize>();
        let mut failed = None;
        let pools = self.pools();
        for (pool, _) in &pools {
            match pool.shrink() {
                Ok(bytes) => released = released.saturating_add(bytes),
                Err(error) => {
                    let arena = pool.name().to_owned();
                    failed = failed.or(Some(ShrinkFailure::Arena { arena, error }));
                }
            }
        }
        let heap = self.shrink_heap();
        released = released.saturating_add(heap.released());
        match (failed, heap) {
            (Some(cause), _) | (None, ShrinkOutcome::Failed { cause, .. }) => {
                ShrinkOutcome::Failed { released, cause }
            }
            (None, unsupported @ ShrinkOutcome::Unsupported { .. })
                if pools.is_empty() && released.is_zero() =>
            {
                unsupported
            }
            (None, _) => ShrinkOutcome::Released(released),
        }
    }

    fn shrink_heap(&self) -> ShrinkOutcome {
        match self.purge_heap() {
            Ok(report) => match (report.jemalloc.outcome, report.libc.outcome) {
                (Outcome::Unsupported(jemalloc), Outcome::Unsupported(libc)) => {
                    ShrinkOutcome::Unsupported { reason: format!("{jemalloc}; {libc}") }
                }
                _ => ShrinkOutcome::Released(report.released()),
            },
            Err(error) => {
                let cause = ShrinkFailure::Heap(error);
                ShrinkOutcome::Failed { released: ByteSize::ZERO, cause }
            }
        }
    }

    fn shrink_arenas(&self) -> ShrinkOutcome {
        if self.driver.is_none() {
            let reason = "LOWTIDE_DEVICE is none".to_owned();
            return ShrinkOutcome::Unsupported { reason };
        }
        let (mut released, mut failed) = (ByteSize::ZERO, None);
        for arena in self.arenas() {
            match arena.shrink() {
                Ok(bytes) => released = released.saturating_add(bytes),
                Err(error) => {
                    let arena = arena.name().to_owned();
                    failed = failed.or(Some(ShrinkFailure::Arena { arena, error }));
                }
            }
        }
        match failed {
            Some(cause) => ShrinkOutcome::Failed { released, cause },
            None => ShrinkOutcome::Released(released),
        }
    }
}
