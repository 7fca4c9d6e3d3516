//! Resources: what is loaded on first use and unloaded when it has been idle, joined with heap,
//! ledger and worker.
//!
//! How a resource lives is `control`'s; here it gets its idle time, arenas of its own, and somebody
//! who unloads it.
//!
//! Invariant: a registered resource is unloaded by the worker, booked with the ledgers.

use std::sync::Arc;

use crate::control::{LoadError, Managed, ManagedBuilder, Resource as _};
use crate::device::DeviceArena;

use super::own_arena::OwnArena;
use super::{Memory, MemoryError};

impl Memory {
    /// A resource that is loaded on first use, with the configured idle time; give it to
    /// [`Memory::register`] when it is complete.
    ///
    /// The loader must not hold this `Memory`: the registry holds the loader, so that the two would
    /// keep each other, and the threads, for ever, unless [`Memory::shutdown`] is called. Let it
    /// hold what it needs, mostly a [`DeviceArena`], or a [`WeakMemory`](super::WeakMemory). The
    /// same holds for the clean-up.
    ///
    /// Where [`Heap`](crate::host::Heap) is the global allocator, what the loader allocates on its
    /// own thread lies in a [`HostArena`](crate::host::HostArena) of the resource's name, all of
    /// which goes back after the clean-up. What the loader leaves elsewhere, such as a cache that
    /// all share, keeps that arena; [`ManagedBuilder::load_scope`] with `None` has none.
    ///
    /// ```
    /// use lowtide::control::LoadError;
    /// use lowtide::device::Region;
    /// use lowtide::{ByteSize, Memory};
    ///
    /// let memory = Memory::builder().start()?;
    /// let arena = memory.open_arena("embedder")?;
    /// let size = ByteSize::mib(4);
    /// let load = move || -> Result<_, LoadError> {
    ///     Ok(arena.alloc_from(&vec![1.0_f32; 1 << 20], Region::Stable)?)
    /// };
    /// let cost = memory.cost(ByteSize::ZERO, size);
    /// let weights = memory.register(memory.managed("weights", load).cost(cost))?;
    /// println!("{:?}", weights.acquire_blocking()?); // loads; stays while it is used
    /// # drop(weights);
    /// # Ok::<(), lowtide::BoxError>(())
    /// ```
    pub fn managed<T: Send + Sync + 'static>(
        &self,
        name: &str,
        load: impl Fn() -> Result<T, LoadError> + Send + Sync + 'static,
    ) -> ManagedBuilder<T> {
        self.enclosed(name, None, load)
    }

    /// The same for a resource whose device memory lies in this arena, with nothing else: what is
    /// found there after a load is what it is booked by, where that is more than its
    /// [`cost`](ManagedBuilder::cost), and what its clean-up frees goes back to the driver at once.
    /// What a request allocates there while it uses the resource may stay until the arena decays.
    ///
    /// ```
    /// use lowtide::control::Resource as _;
    /// use lowtide::device::Region;
    /// use lowtide::{ByteSize, Memory};
    ///
    /// let memory = Memory::builder().start()?;
    /// let arena = memory.open_arena("embedder")?;
    /// let weights = memory.managed_in(&arena, "weights", |arena| {
    ///     Ok(arena.alloc_from(&vec![1.0_f32; 1 << 20], Region::Stable)?)
    /// });
    /// let weights = memory.register(weights.cost(memory.cost(ByteSize::ZERO, ByteSize::mib(1))))?;
    /// drop(weights.acquire_blocking()?);
    /// let stats = weights.stats();
    /// let found = stats.cost.host.saturating_add(stats.cost.device);
    /// assert!(found >= ByteSize::mib(4)); // not 1: so much the next load books
    /// # Ok::<(), lowtide::BoxError>(())
    /// ```
    pub fn managed_in<T: Send + Sync + 'static>(
        &self,
        arena: &DeviceArena,
        name: &str,
        load: impl Fn(&DeviceArena) -> Result<T, LoadError> + Send + Sync + 'static,
    ) -> ManagedBuilder<T> {
        let of_load = arena.clone();
        self.enclosed(name, Some(arena.clone()), move || load(&of_load))
    }

    fn enclosed<T: Send + Sync + 'static>(
        &self,
        name: &str,
        device: Option<DeviceArena>,
        load: impl Fn() -> Result<T, LoadError> + Send + Sync + 'static,
    ) -> ManagedBuilder<T> {
        let shared = &self.0.shared;
        let builder = Managed::builder(name, load).idle(shared.config.idle_unload.value);
        builder.load_scope(Some(OwnArena::of(name, shared, device)))
    }

    /// Builds the resource and has it unloaded when it has been idle, or under pressure. It stays
    /// registered, and its loader with it, as long as this `Memory` lives; a loader that holds a
    /// `Memory` keeps it alive (see [`Memory::managed`]).
    ///
    /// A cost above the ceiling of the limit of a cgroup is noted once, because that limit may be
    /// raised: until then each acquire is
    /// [`AcquireError::Rejected`](crate::control::AcquireError::Rejected) with
    /// [`Rejected::TooLarge`](crate::control::Rejected::TooLarge), which has no time to retry
    /// after.
    ///
    /// # Errors
    /// [`MemoryError::ResourceTooLarge`] for a cost above the ceiling of the configured limit or of
    /// the machine's memory, [`MemoryError::TooManyResources`], [`MemoryError::DuplicateResource`],
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
