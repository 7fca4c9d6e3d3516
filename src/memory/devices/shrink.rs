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

use std::time::Duration;

use crate::bytes::ByteSize;
use crate::config::arena::{SHRINK_OPTION, ShrinkTarget, targets};
use crate::device::DeviceError;
use crate::memory::devices::MemoryDevices;
use crate::memory::error::{Diagnostic, MemoryError};
use crate::memory::manager::Memory;
use crate::memory::shared::Shared;
use crate::sync::lock;
use lowtide_admission::Job;

/// The result of a shrink for one target.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Shrunk {
    /// The target, such as `gpu:0`.
    pub target: String,
    /// The released bytes; zero if nothing was idle, or there is no arena.
    pub released: ByteSize,
    /// The first failure of a part; the other parts were shrunk. [`MemoryError::NoDevice`] and
    /// [`MemoryError::CannotPurge`] if this process does not support it.
    pub error: Option<MemoryError>,
    /// The duration.
    pub took: Duration,
}

impl MemoryDevices<'_> {
    /// Shrinks the targets of the selector on this thread. Returns one result for each target, in
    /// the order of the selector. Takes about 0.1 ms for each MiB released.
    ///
    /// ```
    /// use lowtide::Memory;
    /// use lowtide::memory::MemoryError;
    ///
    /// let memory = Memory::builder().start()?;
    /// let shrunk = memory.devices().shrink("cpu:0;gpu:0")?;
    /// assert_eq!(shrunk.len(), 2); // each with its bytes, or the reason for none
    /// assert!(matches!(memory.devices().shrink("gpu:7"), Err(MemoryError::UnknownDevice { .. })));
    /// # Ok::<(), lowtide::BoxError>(())
    /// ```
    ///
    /// # Errors
    /// [`MemoryError`] if the selector is invalid, a target is unknown, or this is a forked child.
    /// Nothing is shrunk then.
    pub fn shrink(&self, selector: &str) -> Result<Vec<Shrunk>, MemoryError> {
        let (shared, targets) = (self.shared(), targets("selector", selector)?);
        shared.check_targets(&targets)?;
        Ok(shared.shrink(targets))
    }

    /// Starts a run with these options, of which `memory.enable_memory_arena_shrinkage` names the
    /// targets to shrink when it ends; an empty value names none, as in ONNX Runtime. The targets
    /// are checked now, so that a run with an unknown target does not start.
    ///
    /// ```
    /// use lowtide::Memory;
    /// use lowtide::config::arena::SHRINK_OPTION;
    ///
    /// let memory = Memory::builder().start()?;
    /// let run = memory.devices().run([(SHRINK_OPTION, "gpu:0")])?;
    /// // ... inference ...
    /// println!("{}", run.end()[0].released);
    /// # Ok::<(), lowtide::BoxError>(())
    /// ```
    ///
    /// # Errors
    /// [`MemoryError`] if the selector is invalid, a target is unknown, or this is a forked child.
    pub fn run<K: AsRef<str>, V: AsRef<str>>(
        &self,
        options: impl IntoIterator<Item = (K, V)>,
    ) -> Result<Run, MemoryError> {
        let mut shrink = Vec::new();
        for (key, selector) in options {
            if key.as_ref() == SHRINK_OPTION && !selector.as_ref().is_empty() {
                shrink = targets(SHRINK_OPTION, selector.as_ref())?;
            }
        }
        self.shared().check_targets(&shrink)?;
        Ok(Run { memory: self.memory.clone(), shrink })
    }
}

/// A run, at the end of which its targets are shrunk.
#[derive(Debug)]
#[must_use = "a run ends when this is dropped"]
pub struct Run {
    memory: Memory,
    shrink: Vec<ShrinkTarget>,
}

impl Run {
    /// Ends the run and shrinks its targets on this thread. Returns one result for each target.
    /// Failures are in the results; they do not affect the run itself.
    pub fn end(mut self) -> Vec<Shrunk> {
        let targets = std::mem::take(&mut self.shrink);
        self.memory.0.shared.here(|shared| shared.shrink(targets))
    }
}

impl Drop for Run {
    /// Leaves the shrink to the worker, since a drop never blocks. A failure becomes a diagnostic.
    /// After a shutdown, and in a forked child, nothing is shrunk.
    fn drop(&mut self) {
        let shared = &self.memory.0.shared;
        if !self.shrink.is_empty() && shared.check_here().is_ok() {
            lock(&shared.devices.shrinks).extend(&self.shrink);
            shared.state.post(Job::DecayDevice);
        }
    }
}

impl Shared {
    fn check_targets(&self, targets: &[ShrinkTarget]) -> Result<(), MemoryError> {
        self.check_here()?;
        let devices = (0..).take(self.devices.list.len().max(1)).map(ShrinkTarget::Gpu);
        let known: Vec<_> = std::iter::once(ShrinkTarget::Cpu(0)).chain(devices).collect();
        match targets.iter().find(|target| !known.contains(target)) {
            Some(unknown) => Err(MemoryError::unknown_device(unknown, &known)),
            None => Ok(()),
        }
    }

    /// Shrinks the targets of dropped runs.
    pub(in crate::memory) fn shrink_asked(&self) {
        let asked = std::mem::take(&mut *lock(&self.devices.shrinks));
        let failures = self.shrink(asked).into_iter().filter_map(|it| it.error);
        for error in failures.filter(|error| !is_unsupported(error)) {
            self.add_diagnostic(Diagnostic::warning("device", error.to_string()));
        }
    }

    fn shrink(&self, targets: impl IntoIterator<Item = ShrinkTarget>) -> Vec<Shrunk> {
        let one = |target: ShrinkTarget| {
            let start = self.clock.now();
            let (released, error) = match target {
                ShrinkTarget::Cpu(_) => self.shrink_host(),
                ShrinkTarget::Gpu(number) => self.shrink_arenas(number),
            };
            Shrunk { target: target.to_string(), released, error, took: self.clock.now() - start }
        };
        targets.into_iter().map(one).collect()
    }

    /// Shrinks the heap, the pinned pools, and host memory kept between sleeps.
    fn shrink_host(&self) -> (ByteSize, Option<MemoryError>) {
        let stores = self.release_stores();
        let pools: Vec<_> = self.pools().collect();
        let purged = pools.iter().map(|pool| (pool.name(), pool.purge())).collect();
        let (of_pools, pool_error) = sum_of(purged);
        let (of_heap, heap_error) = self.shrink_heap();
        let released = stores.saturating_add(of_pools).saturating_add(of_heap);
        let is_supported = !(pools.is_empty() && released.is_zero());
        let heap_error = heap_error.filter(|error| !(is_supported && is_unsupported(error)));
        (released, pool_error.or(heap_error))
    }

    fn shrink_heap(&self) -> (ByteSize, Option<MemoryError>) {
        let report = match self.purge_heap() {
            Ok(report) => report,
            Err(error) => return (ByteSize::ZERO, Some(MemoryError::Heap(error))),
        };
        let error = match (report.jemalloc, report.libc) {
            (Err(jemalloc), Err(libc)) => Some(MemoryError::CannotPurge { jemalloc, libc }),
            _ => {
                let bytes = report.unreleased;
                report.failure.map(|cause| MemoryError::Unreleased { bytes, cause })
            }
        };
        (report.released(), error)
    }

    fn shrink_arenas(&self, number: u32) -> (ByteSize, Option<MemoryError>) {
        let Some(device) = self.devices.list.iter().find(|it| it.number == number) else {
            return (ByteSize::ZERO, Some(MemoryError::NoDevice));
        };
        let arenas: Vec<_> = self.arenas_on(device).collect();
        sum_of(arenas.iter().map(|arena| (arena.name(), arena.shrink())).collect())
    }
}

/// Returns the sum of the released bytes, and the first failure.
fn sum_of(parts: Vec<(&str, Result<ByteSize, DeviceError>)>) -> (ByteSize, Option<MemoryError>) {
    let (mut sum, mut failed) = (ByteSize::ZERO, None);
    for (arena, released) in parts {
        match released {
            Ok(bytes) => sum = sum.saturating_add(bytes),
            Err(error) => {
                let (arena, cause) = (arena.to_owned(), Box::new(error.into()));
                failed.get_or_insert(MemoryError::ShrinkArena { arena, cause });
            }
        }
    }
    (sum, failed)
}

const fn is_unsupported(error: &MemoryError) -> bool {
    matches!(error, MemoryError::NoDevice | MemoryError::CannotPurge { .. })
}
