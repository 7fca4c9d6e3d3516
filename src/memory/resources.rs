//! Resources, which are loaded on first use and unloaded when idle, connected with heap, ledger and
//! worker.
//!
//! `lowtide_admission::managed` defines the life cycle of a resource; here it gets its idle time,
//! its own arenas, and the worker that unloads it.
//!
//! Invariant: a registered resource is unloaded by the worker, and its memory is reserved in the
//! ledgers.

use std::sync::Arc;

use crate::BoxError;
use lowtide_admission::{Managed, ManagedBuilder, Resource as _};

use super::devices::ResourceArena;
use super::own_arena::OwnArena;
use super::{Memory, MemoryError};

impl Memory {
    /// Returns a builder for a resource that is loaded on first use, with the configured idle time.
    /// Pass it to [`Memory::register`] when it is complete.
    ///
    /// The loader and the clean-up must not hold this `Memory`: the registry holds the loader, so
    /// both would keep each other and the threads alive until [`Memory::shutdown`] is called. Let
    /// them hold a [`WeakMemory`](super::WeakMemory), or a device arena, instead.
    ///
    /// If [`Heap`](crate::heap::Heap) is the global allocator, allocations of the loader on its own
    /// thread go to a [`HostArena`](crate::heap::HostArena) with the resource's name, and all of
    /// its memory is released after the clean-up. An allocation that outlives the resource, such as
    /// a shared cache, keeps that arena. To use no such arena, set [`ManagedBuilder::load_scope`]
    /// to `None`.
    ///
    /// ```
    /// use lowtide::device::Region;
    /// use lowtide::{ByteSize, Memory};
    ///
    /// let memory = Memory::builder().start()?;
    /// let arena = memory.open_arena("embedder")?;
    /// let size = ByteSize::mib(4);
    /// let load = move || Ok(arena.alloc_from(&vec![1.0_f32; 1 << 20], Region::Stable)?);
    /// let cost = memory.cost(ByteSize::ZERO, size);
    /// let weights = memory.register(memory.managed("weights", load).cost(cost))?;
    /// println!("{:?}", weights.acquire_blocking()?); // loads; stays loaded while it is used
    /// # drop(weights);
    /// # Ok::<(), lowtide::BoxError>(())
    /// ```
    pub fn managed<T: Send + Sync + 'static>(
        &self,
        name: &str,
        load: impl Fn() -> Result<T, BoxError> + Send + Sync + 'static,
    ) -> ManagedBuilder<T> {
        self.enclosed(name, ResourceArena::default(), load)
    }

    pub(super) fn enclosed<T: Send + Sync + 'static>(
        &self,
        name: &str,
        device: ResourceArena,
        load: impl Fn() -> Result<T, BoxError> + Send + Sync + 'static,
    ) -> ManagedBuilder<T> {
        let shared = &self.0.shared;
        let builder = Managed::builder(name, load).idle(shared.config.idle_unload.value);
        builder.load_scope(Some(OwnArena::of(name, shared, device)))
    }

    /// Builds and registers the resource. It is unloaded when idle or under pressure, and stays
    /// registered, with its loader, as long as this `Memory` lives. A loader that holds a `Memory`
    /// keeps it alive (see [`Memory::managed`]).
    ///
    /// A cost above the ceiling of a cgroup's limit is only a diagnostic, because that limit may be
    /// raised. Until then each acquire fails with
    /// [`AcquireError::Rejected`](crate::admission::AcquireError::Rejected) and
    /// [`Rejected::TooLarge`](crate::admission::Rejected::TooLarge), which has no retry time.
    ///
    /// # Errors
    /// [`MemoryError::ResourceTooLarge`] if the cost is above the ceiling of the configured limit
    /// or of the machine's memory, [`MemoryError::Resource`],
    /// [`MemoryError::Forked`].
    pub fn register<T: Send + Sync + 'static>(
        &self,
        builder: ManagedBuilder<T>,
    ) -> Result<Managed<T>, MemoryError> {
        let shared = &self.0.shared;
        shared.check_here()?;
        let managed = builder.build(Arc::clone(&shared.clock), Some(shared.admission.clone()));
        let stats = managed.stats();
        shared.check_fits(&stats)?;
        shared.resources.add(Arc::new(managed.clone()))?;
        shared.note_misfit(&stats);
        Ok(managed)
    }
}
