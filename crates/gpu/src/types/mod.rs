//! Values of the public interface: configuration, errors, figures.

pub(crate) mod compact;
pub(crate) mod config;
pub(crate) mod error;
pub(crate) mod sleep;
pub(crate) mod snapshot;

pub use compact::{CompactOptions, CompactReport, DeviceCosts, Moved};
pub use config::{ArenaConfig, Growth};
pub(crate) use error::Result;
pub use error::{Bound, DeviceError, DeviceErrorWith, Shortage};
pub use sleep::{Contents, HostBudget, SleepConfig, SleepOptions, SleepReport, SleepState};
pub use snapshot::{ArenaGlance, ArenaSnapshot, RegionSnapshot};

lowtide_core::named_enum! {
    /// The part of an arena for one kind of lifetime. Neither has a fixed share of the memory.
    ///
    /// Long-lived blocks among short-lived ones would pin granules that could be released.
    /// ```
    /// use std::sync::Arc;
    /// use lowtide_gpu::clock::SystemClock;
    /// use lowtide_gpu::{ArenaConfig, DeviceArena, HostDriver, Region};
    ///
    /// let clock = Arc::new(SystemClock::new());
    /// let arena = DeviceArena::open(Arc::new(HostDriver::new()), clock, ArenaConfig::new("a"))?;
    /// let weights = arena.alloc::<f32>(1 << 20, Region::Stable)?; // while the model is loaded
    /// let activations = arena.alloc::<f32>(1 << 16, Region::Dynamic)?; // while a request runs
    /// drop(activations);
    /// arena.purge()?; // only memory for the weights stays committed
    /// let snapshot = arena.snapshot();
    /// assert!(snapshot.idle.is_zero() && snapshot.active == snapshot.committed);
    /// # drop(weights);
    /// # Ok::<(), lowtide_gpu::DeviceError>(())
    /// ```
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
    pub enum Region {
        /// Long-lived data: weights, tables.
        Stable = "stable",
        /// Short-lived data: activations, caches, requests.
        #[default]
        Dynamic = "dynamic",
    }
}

impl Region {
    /// Returns its index in [`Region::ALL`].
    #[must_use]
    pub const fn number(self) -> usize {
        self as usize
    }
}
