//! Resources, which are loaded on first use and unloaded when idle, connected with heap, ledger and
//! worker.
//!
//! `lowtide_admission::managed` defines the life cycle of a resource; here it gets its idle time,
//! its own arenas, and the worker that unloads it.
//!
//! Invariant: a registered resource is unloaded by the worker, and its memory is reserved in the
//! ledgers. Memory of a reclaimer is not.

use std::sync::Arc;

use crate::BoxError;
use lowtide_admission::{
    LevelWatch, Managed, ManagedBuilder, Reclaimable, Reclaimer, Resource as _,
};

use super::error::MemoryError;
use super::manager::Memory;
use super::own_arena::{DeviceMemory, OwnArena};

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
        self.enclosed(name, None, load)
    }

    pub(super) fn enclosed<T: Send + Sync + 'static>(
        &self,
        name: &str,
        device: Option<Box<dyn DeviceMemory>>,
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
    /// A cost above what the ceiling of the limit leaves beside the least that the process has held
    /// in the last one to two minutes is only a diagnostic, because a cgroup's limit may be raised.
    /// Until then each acquire fails immediately with
    /// [`ResourceError::Rejected`](crate::admission::ResourceError::Rejected) and
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

    /// Registers memory that the application can release on request, such as a cache, until the
    /// returned handle is dropped.
    ///
    /// A request or a load that does not fit first asks reclaimers, in one order with idle
    /// resources ([`Reclaimable::cost_per_gib`]): for what the requests that wait need, and no
    /// more. Then the heap is purged. The request waits in the queue until the memory is measured
    /// as free, and is rejected only if that does not happen in time. Level high asks too, for what
    /// the process holds above the lowest threshold.
    ///
    /// A reclaimer's bytes are counted as every other live heap memory: they lower the allowance
    /// until they are freed, whatever the functions return. Both functions run on temporary threads
    /// of this crate, never twice at once: a slow one delays no admission and no tick, and other
    /// memory is released if it takes longer than a second. They may use admission. A panic is
    /// caught and counted, and becomes a diagnostic. After a call that released little, the pause
    /// before the next one doubles, from 100 ms up to 10 s; a panic counts as such.
    ///
    /// At most 64 names are known in the life of a `Memory`. The functions must not hold this
    /// `Memory`, which they would keep alive ([`Memory::downgrade`]). A
    /// [detached](super::Builder::detached) `Memory` measures no memory, so it asks no reclaimer.
    ///
    /// ```
    /// use std::collections::VecDeque;
    /// use std::sync::{Arc, Mutex, PoisonError};
    /// use lowtide::admission::Reclaimable;
    /// use lowtide::{ByteSize, Memory};
    ///
    /// /// Pages, the oldest first.
    /// #[derive(Default)]
    /// struct Cache(Mutex<VecDeque<Vec<u8>>>);
    ///
    /// impl Cache {
    ///     fn bytes(&self) -> ByteSize {
    ///         let pages = self.0.lock().unwrap_or_else(PoisonError::into_inner);
    ///         pages.iter().map(|page| ByteSize::of(page.len())).sum()
    ///     }
    ///
    ///     fn shrink(&self, wanted: ByteSize) -> ByteSize {
    ///         let mut pages = self.0.lock().unwrap_or_else(PoisonError::into_inner);
    ///         let mut released = ByteSize::ZERO;
    ///         while released < wanted && let Some(page) = pages.pop_front() {
    ///             released = released.saturating_add(ByteSize::of(page.len()));
    ///         }
    ///         released
    ///     }
    /// }
    ///
    /// let memory = Memory::start()?;
    /// let cache = Arc::new(Cache::default());
    /// let (held, shrunk) = (Arc::clone(&cache), Arc::clone(&cache));
    /// let release = move |wanted| shrunk.shrink(wanted);
    /// let pages = Reclaimable::new("pages", move || held.bytes(), release);
    /// let reclaimer = memory.reclaimer(pages)?; // keep it as long as the cache
    /// # assert_eq!(reclaimer.name(), "pages");
    /// # Ok::<(), lowtide::BoxError>(())
    /// ```
    ///
    /// # Errors
    /// [`MemoryError::Resource`] if the name is taken or 64 names are known,
    /// [`MemoryError::Forked`].
    pub fn reclaimer(&self, reclaimable: Reclaimable) -> Result<Reclaimer, MemoryError> {
        let shared = &self.0.shared;
        shared.check_here()?;
        let (admission, clock) = (&shared.admission, Arc::clone(&shared.clock));
        Ok(shared.resources.add_reclaimer(reclaimable, admission, clock)?)
    }

    /// Returns a watch of the pressure on host memory, for background work that pauses while memory
    /// is short. It needs no async runtime, and does not keep this `Memory` running.
    ///
    /// ```
    /// # async fn run() -> Result<(), lowtide::BoxError> {
    /// use lowtide::admission::Level;
    ///
    /// let memory = lowtide::Memory::start()?;
    /// let mut watch = memory.watch_level();
    /// while watch.level() >= Level::High {
    ///     watch.changed().await; // or, without a runtime: `wait_for_change`
    /// }
    /// # Ok(())
    /// # }
    /// ```
    #[must_use]
    pub fn watch_level(&self) -> LevelWatch {
        self.admission().watch_level()
    }
}
