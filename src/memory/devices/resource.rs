//! The device arena of a resource, which contains nothing else: it is measured, and purged when the
//! resource is unloaded.

use crate::BoxError;
use crate::bytes::ByteSize;
use crate::device::DeviceArena;
use crate::memory::manager::Memory;
use crate::memory::own_arena::DeviceMemory;
use crate::memory::resources::ResourceBuilder;

impl Memory {
    /// Returns a builder for a resource whose device memory is in this arena, which contains
    /// nothing else. If the arena's memory after a load exceeds the declared
    /// [`cost`](ResourceBuilder::cost), the measured amount is reserved from then on. Memory freed
    /// by the clean-up is released to the driver immediately. Memory that a request allocates in
    /// the arena may stay until the arena decays.
    ///
    /// ```
    /// use lowtide::admission::Resource as _;
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
        self.enclosed(name, Some(Box::new(arena.clone())), move || load(&of_load))
    }
}

impl DeviceMemory for DeviceArena {
    fn committed(&self) -> ByteSize {
        self.snapshot().committed
    }

    fn active(&self) -> ByteSize {
        self.snapshot().active
    }

    fn purge_from(&self, before: ByteSize) -> ByteSize {
        // If the driver fails, idle memory decays later.
        let _ = self.purge();
        before.saturating_sub(self.snapshot().committed)
    }

    fn counts_as_host(&self) -> bool {
        self.capabilities().counts_as_host()
    }
}
