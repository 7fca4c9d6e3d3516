//! Resources, which are loaded on first use and unloaded when idle, connected with heap, ledger and
//! worker.
//!
//! `lowtide_admission::managed` defines the life cycle of a resource; here it gets its idle time,
//! its own arenas, and the worker that unloads it.
//!
//! Invariant: a registered resource is unloaded by the worker, and its memory is reserved in the
//! ledgers. Memory of a reclaimer is not.

use std::sync::Arc;
use std::time::Duration;

#[cfg(feature = "device")]
use crate::device::DeviceArena;
use crate::{BoxError, config::ConfigError};
use lowtide_admission::{Cost, LoadScope, Managed, ManagedBuilder, Reclaimable, Reclaimer};

use super::error::MemoryError;
use super::manager::Memory;
use super::own_arena::{OwnArena, OwnDevice};

impl Memory {
    /// Returns a builder for a resource that is loaded on first use, with the configured idle time.
    /// [`ResourceBuilder::register`] registers it.
    ///
    /// The loader and the clean-up must not hold this `Memory`: the registry holds the loader, so
    /// both would keep each other and the threads alive until [`Memory::shutdown_blocking`] is
    /// called. Let them hold a [`WeakMemory`](super::WeakMemory), or a device arena, instead.
    ///
    /// If [`Heap`](crate::heap::Heap) is the global allocator, allocations of the loader on its own
    /// thread go to a [`HostArena`](crate::heap::HostArena) with the resource's name, and all of
    /// its memory is released after the clean-up. An allocation that outlives the resource, such as
    /// a shared cache, keeps that arena. To use no such arena, set [`ResourceBuilder::load_scope`]
    /// to `None`.
    ///
    /// ```
    /// use lowtide::device::Region;
    /// use lowtide::{ByteSize, Cost, Memory};
    ///
    /// let memory = Memory::builder().start()?;
    /// let arena = memory.devices().open_arena("embedder")?;
    /// let load = move || Ok(arena.alloc_from(&vec![1.0_f32; 1 << 20], Region::Stable)?);
    /// let weights = memory.managed("weights", load);
    /// let weights = weights.cost(Cost::device(ByteSize::mib(4))).register()?;
    /// println!("{:?}", weights.acquire_blocking()?); // loads; stays loaded while it is used
    /// # drop(weights);
    /// # Ok::<(), lowtide::BoxError>(())
    /// ```
    pub fn managed<T: Send + Sync + 'static>(
        &self,
        name: &str,
        load: impl Fn() -> Result<T, BoxError> + Send + Sync + 'static,
    ) -> ResourceBuilder<T> {
        self.enclosed(name, None, load)
    }

    pub(super) fn enclosed<T: Send + Sync + 'static>(
        &self,
        name: &str,
        device: Option<OwnDevice>,
        load: impl Fn() -> Result<T, BoxError> + Send + Sync + 'static,
    ) -> ResourceBuilder<T> {
        let shared = &self.0.shared;
        let builder = Managed::builder(name, load).idle(shared.config.idle_unload.value);
        let builder = builder.load_scope(Some(OwnArena::of(name, shared, device)));
        ResourceBuilder { memory: self.clone(), builder }
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
}

/// A builder for a resource that is loaded on first use, from [`Memory::managed`]. Its settings are
/// those of [`ManagedBuilder`]. It keeps the `Memory` running.
#[must_use = "a resource that is not registered is never loaded"]
pub struct ResourceBuilder<T: Send + Sync + 'static> {
    memory: Memory,
    builder: ManagedBuilder<T>,
}

impl<T: Send + Sync + 'static> ResourceBuilder<T> {
    /// Sets the bytes that the resource holds while it is loaded: see [`ManagedBuilder::cost`]. If
    /// device memory is host memory, host and device share one budget, and the whole cost is host
    /// memory.
    pub fn cost(self, cost: Cost) -> Self {
        let cost = self.memory.admission().state().by_budget(cost);
        self.set(|builder| builder.cost(cost))
    }

    /// Sets the idle time after which the resource is unloaded. Default: the configured one.
    pub fn idle(self, idle: Duration) -> Self {
        self.set(|builder| builder.idle(idle))
    }

    /// Sets the minimum time that the resource stays: see [`ManagedBuilder::min_residency`].
    pub fn min_residency(self, time: Duration) -> Self {
        self.set(|builder| builder.min_residency(time))
    }

    /// Sets the pause after failed loads.
    pub fn backoff(self, first: Duration, max: Duration) -> Self {
        self.set(|builder| builder.backoff(first, max))
    }

    /// Sets the time that a load may take: see [`ManagedBuilder::load_timeout`].
    pub fn load_timeout(self, timeout: Duration) -> Self {
        self.set(|builder| builder.load_timeout(timeout))
    }

    /// Sets the clean-up: see [`ManagedBuilder::unload`].
    pub fn unload(self, unload: impl Fn(T) + Send + Sync + 'static) -> Self {
        self.set(|builder| builder.unload(unload))
    }

    /// Sets the scope within which loads and clean-ups run. Default: arenas of its own.
    pub fn load_scope(self, scope: Option<Arc<dyn LoadScope>>) -> Self {
        self.set(|builder| builder.load_scope(scope))
    }

    fn set(self, set: impl FnOnce(ManagedBuilder<T>) -> ManagedBuilder<T>) -> Self {
        Self { builder: set(self.builder), ..self }
    }

    /// Builds and registers the resource. It is unloaded when idle or under pressure, and stays
    /// registered, with its loader, as long as the `Memory` lives. A loader that holds a `Memory`
    /// keeps it alive (see [`Memory::managed`]).
    ///
    /// A cost that does not fit below the ceiling next to the memory of the process is only a
    /// diagnostic: a cgroup's limit may be raised. Until then each acquire fails immediately with
    /// [`ResourceError::Rejected`](crate::admission::ResourceError::Rejected) and
    /// [`Rejected::TooLarge`](crate::admission::Rejected::TooLarge), which has no retry time.
    ///
    /// # Errors
    /// [`MemoryError::ResourceTooLarge`] if the cost is above the ceiling of the configured limit
    /// or of the machine's memory, [`MemoryError::Resource`], [`MemoryError::Options`] if the name
    /// is empty, [`MemoryError::Forked`].
    pub fn register(self) -> Result<Managed<T>, MemoryError> {
        let shared = &self.memory.0.shared;
        shared.check_here()?;
        let clock = Arc::clone(&shared.clock);
        let managed = self.builder.build(clock, Some(shared.admission.clone()));
        let stats = managed.stats();
        if stats.name.is_empty() {
            return Err(ConfigError::bad("name", "", "the name of a resource").into());
        }
        shared.check_fits(&stats)?;
        shared.resources.add(&managed)?;
        shared.note_misfit(&stats);
        Ok(managed)
    }
}

lowtide_core::debug_as!([T: Send + Sync + 'static] ResourceBuilder<T>, |it| builder: it.builder);

#[cfg(feature = "device")]
impl Memory {
    /// Returns a builder for a resource whose device memory is in this arena, which contains
    /// nothing else. If the arena's memory after a load exceeds the declared
    /// [`cost`](ResourceBuilder::cost), the measured amount is reserved from then on. Memory freed
    /// by the clean-up is released to the driver immediately. Memory that a request allocates in
    /// the arena may stay until the arena decays.
    ///
    /// ```
    /// use lowtide::device::Region;
    /// use lowtide::{ByteSize, Cost, Memory};
    ///
    /// let memory = Memory::builder().start()?;
    /// let arena = memory.devices().open_arena("embedder")?;
    /// let weights = memory.managed_in(&arena, "weights", |arena| {
    ///     Ok(arena.alloc_from(&vec![1.0_f32; 1 << 20], Region::Stable)?)
    /// });
    /// let weights = weights.cost(Cost::device(ByteSize::mib(1))).register()?;
    /// drop(weights.acquire_blocking()?);
    /// let stats = weights.stats();
    /// let found = stats.cost.host.saturating_add(stats.cost.device);
    /// assert!(found >= ByteSize::mib(4)); // not 1 MiB: the next load reserves the measured amount
    /// # Ok::<(), lowtide::BoxError>(())
    /// ```
    pub fn managed_in<T: Send + Sync + 'static>(
        &self,
        arena: &DeviceArena,
        name: &str,
        load: impl Fn(&DeviceArena) -> Result<T, BoxError> + Send + Sync + 'static,
    ) -> ResourceBuilder<T> {
        let of_load = arena.clone();
        self.enclosed(name, Some(arena.clone()), move || load(&of_load))
    }
}
