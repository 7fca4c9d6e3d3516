//! Shrinks by selector (`cpu:0;gpu:0`), now or at the end of a run.
//!
//! `gpu:0` means every arena of the first device, including draining ones, on every backend: arenas
//! of the host driver also belong to the device that it replaces. `gpu:1` means those of the
//! second. `cpu:0` means the process
//! heap (jemalloc's and the C library's, in the role of ONNX Runtime's arena in host memory), the
//! pinned pools of slots, and host memory kept between sleeps. A selector therefore has the same
//! meaning on a machine without a GPU.
//!
//! All targets are checked before any is shrunk. A target without an arena releases zero bytes and
//! is no error. If a run is dropped without `end`, the worker shrinks its targets.
//!
//! Invariant: there is one result for each target, in the order of the selector.

use std::fmt;
use std::time::Duration;

use crate::bytes::ByteSize;
use crate::config::arena::{ShrinkTarget, Targets};
use crate::device::DeviceError;
use crate::memory::devices::MemoryDevices;
use crate::memory::error::{Diagnostic, MemoryError};
use crate::memory::manager::Memory;
use crate::memory::shared::Shared;
use crate::sync::lock;
use lowtide_admission::Job;

use super::selector::known_targets;

/// The result of a shrink, by target.
#[derive(Clone, Debug, Default, PartialEq)]
#[non_exhaustive]
pub struct Shrunk {
    /// One result for each target, in the order of the selector.
    pub targets: Vec<ShrunkTarget>,
}

impl Shrunk {
    /// Returns all bytes released.
    #[must_use]
    pub fn released(&self) -> ByteSize {
        self.targets.iter().map(|target| target.outcome.released()).sum()
    }
}

/// The result for one target.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct ShrunkTarget {
    /// The target.
    pub target: ShrinkTarget,
    /// The outcome.
    pub outcome: ShrinkOutcome,
    /// The duration.
    pub took: Duration,
}

/// The outcome for a target.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum ShrinkOutcome {
    /// The released bytes; zero if nothing was idle, or there is no arena.
    Released(ByteSize),
    /// This process does not support it.
    Unsupported {
        /// The reason.
        reason: String,
    },
    /// A part failed; the rest was done.
    Failed {
        /// The bytes released by the other parts.
        released: ByteSize,
        /// The first failure.
        cause: MemoryError,
    },
}

impl ShrinkOutcome {
    /// Returns the released bytes.
    #[must_use]
    pub const fn released(&self) -> ByteSize {
        match self {
            Self::Released(released) | Self::Failed { released, .. } => *released,
            Self::Unsupported { .. } => ByteSize::ZERO,
        }
    }
}

impl MemoryDevices<'_> {
    /// Shrinks the targets of the selector on this thread. Takes about 0.1 ms for each MiB
    /// released.
    ///
    /// ```
    /// use lowtide::Memory;
    /// use lowtide::memory::MemoryError;
    ///
    /// let memory = Memory::builder().start()?;
    /// let shrunk = memory.devices().shrink("cpu:0;gpu:0")?;
    /// assert_eq!(shrunk.targets.len(), 2); // each with its bytes, or the reason for none
    /// assert!(matches!(memory.devices().shrink("gpu:7"), Err(MemoryError::UnknownTarget { .. })));
    /// # Ok::<(), lowtide::BoxError>(())
    /// ```
    ///
    /// # Errors
    /// [`MemoryError`] if the selector is invalid, a target is unknown, or this is a forked child.
    /// Nothing is shrunk then.
    pub fn shrink(&self, selector: &str) -> Result<Shrunk, MemoryError> {
        let (shared, targets) = (self.shared(), selector.parse()?);
        shared.check_targets(&targets)?;
        Ok(shared.shrink(targets.iter()))
    }

    /// Starts a run, at the end of which these targets are shrunk. They are checked now, so that a
    /// run with an unknown target does not start.
    ///
    /// ```
    /// use lowtide::Memory;
    /// use lowtide::config::arena::{SHRINK_OPTION, Targets};
    ///
    /// let memory = Memory::builder().start()?;
    /// let run = memory.devices().run(Targets::of_run([(SHRINK_OPTION, "gpu:0")])?)?;
    /// // ... inference ...
    /// println!("{}", run.end().released());
    /// # Ok::<(), lowtide::BoxError>(())
    /// ```
    ///
    /// # Errors
    /// [`MemoryError`] if a target is unknown, or this is a forked child.
    pub fn run(&self, shrink: Option<Targets>) -> Result<Run, MemoryError> {
        let shared = self.shared();
        shared.check_here()?;
        shrink.as_ref().map_or(Ok(()), |targets| shared.check_targets(targets))?;
        Ok(Run { memory: self.memory.clone(), shrink })
    }
}

/// A run, at the end of which its targets are shrunk.
#[must_use = "a run ends when this is dropped"]
pub struct Run {
    memory: Memory,
    shrink: Option<Targets>,
}

impl Run {
    /// Ends the run and shrinks its targets on this thread. Failures are in the result; they do not
    /// affect the run itself.
    pub fn end(mut self) -> Shrunk {
        let shared = &self.memory.0.shared;
        match self.shrink.take() {
            Some(targets) if shared.check_here().is_ok() => shared.shrink(targets.iter()),
            _ => Shrunk::default(),
        }
    }
}

impl Drop for Run {
    /// Leaves the shrink to the worker, since a drop never blocks. A failure becomes a diagnostic.
    /// After a shutdown, and in a forked child, nothing is shrunk.
    fn drop(&mut self) {
        let Some(targets) = self.shrink.take() else { return };
        let shared = &self.memory.0.shared;
        if shared.check_here().is_ok() {
            lock(&shared.devices.shrinks).extend(targets.iter());
            shared.queue.push_one(Job::DecayDevice);
        }
    }
}

impl fmt::Debug for Run {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Run").field("shrink", &self.shrink).finish_non_exhaustive()
    }
}

impl Shared {
    fn check_targets(&self, targets: &Targets) -> Result<(), MemoryError> {
        self.check_here()?;
        let devices = self.devices.list.len().max(1);
        let exists = |target: &ShrinkTarget| known_targets(devices).any(|known| known == *target);
        let unknown = targets.iter().find(|target| !exists(target));
        unknown.map_or(Ok(()), |target| Err(MemoryError::UnknownTarget { target, devices }))
    }

    /// Shrinks the targets of dropped runs.
    pub(in crate::memory) fn shrink_asked(&self) {
        let asked = std::mem::take(&mut *lock(&self.devices.shrinks));
        for shrunk in self.shrink(asked.into_iter()).targets {
            if let ShrinkOutcome::Failed { cause, .. } = shrunk.outcome {
                self.add_diagnostic(Diagnostic::warning("device", cause.to_string()));
            }
        }
    }

    fn shrink(&self, targets: impl Iterator<Item = ShrinkTarget>) -> Shrunk {
        let one = |target: ShrinkTarget| {
            let start = self.clock.now();
            let outcome = match target {
                ShrinkTarget::Cpu(_) => self.shrink_host(),
                ShrinkTarget::Gpu(number) => self.shrink_arenas(number),
            };
            ShrunkTarget { target, outcome, took: self.clock.now() - start }
        };
        Shrunk { targets: targets.map(one).collect() }
    }

    /// Shrinks the heap, the pinned pools, and host memory kept between sleeps.
    fn shrink_host(&self) -> ShrinkOutcome {
        let mut released = self.release_stores();
        let mut failed = None;
        let pools = self.pools();
        for pool in &pools {
            match pool.purge() {
                Ok(bytes) => released = released.saturating_add(bytes),
                Err(error) => {
                    failed.get_or_insert_with(|| cannot_shrink(pool.name(), error));
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
            Ok(report) => match (report.jemalloc, report.libc) {
                (Err(jemalloc), Err(libc)) => {
                    ShrinkOutcome::Unsupported { reason: format!("{jemalloc}; {libc}") }
                }
                _ => match report.failure {
                    Some(cause) => ShrinkOutcome::Failed {
                        released: report.released(),
                        cause: MemoryError::Unreleased { bytes: report.unreleased, cause },
                    },
                    None => ShrinkOutcome::Released(report.released()),
                },
            },
            Err(error) => {
                let cause = MemoryError::Heap(error);
                ShrinkOutcome::Failed { released: ByteSize::ZERO, cause }
            }
        }
    }

    fn shrink_arenas(&self, number: u32) -> ShrinkOutcome {
        let Some(device) = self.devices.list.iter().find(|it| it.number == number) else {
            let reason = "the configured device is none".to_owned();
            return ShrinkOutcome::Unsupported { reason };
        };
        let (mut released, mut failed) = (ByteSize::ZERO, None);
        for arena in self.arenas_on(device) {
            match arena.shrink() {
                Ok(bytes) => released = released.saturating_add(bytes),
                Err(error) => {
                    failed.get_or_insert_with(|| cannot_shrink(arena.name(), error));
                }
            }
        }
        match failed {
            Some(cause) => ShrinkOutcome::Failed { released, cause },
            None => ShrinkOutcome::Released(released),
        }
    }
}

fn cannot_shrink(arena: &str, error: DeviceError) -> MemoryError {
    MemoryError::ShrinkArena { arena: arena.to_owned(), cause: Box::new(error.into()) }
}
