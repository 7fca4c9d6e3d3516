//! Registers callbacks for shortage of memory, and sets the costs by which the arena makes room.

use std::fmt;
use std::sync::Arc;

use super::arena::DeviceArena;
use crate::exec::callbacks::Callbacks;
use crate::types::compact::DeviceCosts;
use crate::types::error::Shortage;

/// Keeps a callback registered; see [`DeviceArena::on_shortage`].
#[must_use = "the callback is registered for as long as this is kept"]
pub struct ShortageCallback {
    callbacks: Arc<Callbacks>,
    number: u64,
}

impl DeviceArena {
    /// Registers a callback that releases memory when this arena has too little left: thread caches
    /// are empty, pending work of streams is complete, and all idle memory together would not be
    /// enough (then it stays committed). Called before an allocation, a resize or a wake fails. All
    /// registered callbacks are called in order of registration, on the thread that is short. Each
    /// returns `true` if it released memory. If any did, the allocation is retried once.
    ///
    /// A callback runs without a lock and may use the arena. Its own allocations call no callbacks;
    /// they fail if the arena is being woken. It must not wait for a thread that allocates here,
    /// which may be waiting for this run; nor for a lock that another thread holds while allocating
    /// here: use `try_lock`. A panic is counted and logged; the other callbacks still run.
    ///
    /// It stays registered until the return value is dropped. No call starts after that; a call in
    /// progress on another thread finishes, and the callback is dropped then. A callback that holds
    /// a handle of the arena keeps it open until then. In a forked child no callback is registered.
    ///
    /// ```
    /// use std::sync::{Arc, Mutex};
    /// use lowtide_gpu::ByteSize;
    /// use lowtide_gpu::clock::SystemClock;
    /// use lowtide_gpu::{ArenaConfig, DeviceArena, HostDriver, Region};
    ///
    /// let config = ArenaConfig { limit: ByteSize::mib(8), ..ArenaConfig::new("model") };
    /// let clock = Arc::new(SystemClock::new());
    /// let arena = DeviceArena::open(Arc::new(HostDriver::new()), clock, config)?;
    /// let cache = Arc::new(Mutex::new(vec![arena.alloc::<u8>(6 << 20, Region::Dynamic)?]));
    /// let evict = arena.on_shortage({
    ///     let cache = Arc::clone(&cache);
    ///     move |_| cache.try_lock().is_ok_and(|mut cache| cache.pop().is_some())
    /// });
    /// let needed = arena.alloc::<u8>(4 << 20, Region::Dynamic)?; // evicts the cache
    /// assert!(cache.lock().unwrap().is_empty());
    /// # drop((evict, needed));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn on_shortage(
        &self,
        callback: impl Fn(&Shortage<'_>) -> bool + Send + Sync + 'static,
    ) -> ShortageCallback {
        let callbacks = Arc::clone(&self.inner().callbacks);
        let number = callbacks.register(Box::new(callback));
        ShortageCallback { callbacks, number }
    }

    /// Sets the costs of the device's calls, for later operations. Does nothing in a forked child.
    ///
    /// They determine whether an arena that is short of memory remaps idle memory, or releases it
    /// and commits other memory. They also limit the batches of a
    /// [compaction](DeviceArena::compact).
    pub fn set_costs(&self, costs: DeviceCosts) {
        let _ = self.inner().run_here(|state| state.costs = costs);
    }
}

impl Drop for ShortageCallback {
    /// Removes the callback without waiting for a call in progress. Does nothing in a forked child.
    fn drop(&mut self) {
        self.callbacks.forget(self.number);
    }
}

impl fmt::Debug for ShortageCallback {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ShortageCallback").field("number", &self.number).finish_non_exhaustive()
    }
}
