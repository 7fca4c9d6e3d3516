//! The settings of device arenas that a program makes.

use std::sync::Arc;
use std::time::Duration;

use crate::bytes::ByteSize;
use crate::config::{DeviceBackend, DeviceChoice};
use crate::decay::DecayTime;
use crate::device::Contents;
use crate::device::driver::Driver;
use crate::memory::Builder;

macro_rules! setting {
    ($($(#[$doc:meta])* $name:ident => $field:ident: $kind:ty;)*) => {
        $($(#[$doc])*
        #[must_use]
        pub fn $name(mut self, value: $kind) -> Self {
            self.code.device.$field = Some(value);
            self
        })*
    };
}

/// Device arenas.
impl Builder {
    setting! {
        /// Sets the device on which arenas allocate: the default device if there are several.
        /// [`DeviceChoice::CudaAll`] opens every visible one. Default: the best that works.
        device => choice: DeviceChoice;
        /// Sets the way in which CUDA memory is allocated. Default: the first that works.
        device_backend => backend: DeviceBackend;
        /// Sets the limit of device memory for each arena, and of the budget of each device.
        /// Default: none. The ceiling of a budget is this times [`Builder::ceiling`]; until the
        /// [correction factor](Builder::correction_factor) is measured, half of that can be
        /// reserved. Devices whose memory counts in the host's budget have no budget of their own.
        device_limit => limit: ByteSize;
        /// Sets the share of the device's memory, in [0, 1), to keep free for its other users.
        /// Default: 0.05; 0 for none. If less is free, idle memory of our arenas is released before
        /// its decay time, until one and a half times this share is free. Live memory is never
        /// released.
        device_watermark => watermark: f64;
        /// Sets the time after which idle device memory is released. Default: 1 s, 5 s or 30 s, by
        /// profile.
        device_decay => decay: DecayTime;
        /// Sets the time without a lease after which a device arena goes to sleep, `None` for
        /// never. Default: never. See [`DeviceArena::sleep`](crate::device::DeviceArena::sleep) for
        /// the requirements on the arena's users.
        device_sleep_after => sleep_after: Option<Duration>;
        /// Sets the minimum time that a device arena stays awake after it was opened or woken.
        /// Default: 0.
        device_min_awake => min_awake: Duration;
        /// Sets the treatment of the stable region's contents when an idle arena goes to sleep.
        /// Default: keep.
        device_sleep_stable => sleep_stable: Contents;
        /// Sets the treatment of the dynamic region's contents when an idle arena goes to sleep.
        /// Default: keep.
        device_sleep_dynamic => sleep_dynamic: Contents;
    }

    /// Sets a driver for device arenas that the caller has opened, for example with options that
    /// have no setting, or a driver for tests. The configured device, also from the environment, is
    /// ignored then.
    ///
    /// ```no_run
    /// # #[cfg(feature = "cuda")] {
    /// use std::sync::Arc;
    /// use lowtide::device::driver::cuda::{CudaDriver, CudaOptions};
    /// use lowtide::{ByteSize, Memory};
    ///
    /// let handle = Some(ByteSize::mib(16));
    /// let driver = CudaDriver::open(CudaOptions { handle, ..CudaOptions::default() })?;
    /// let memory = Memory::builder().driver(Arc::new(driver)).start()?;
    /// # }
    /// # Ok::<(), lowtide::BoxError>(())
    /// ```
    #[must_use]
    pub fn driver(self, driver: Arc<dyn Driver>) -> Self {
        self.drivers([driver])
    }

    /// Like [`Builder::driver`], for several devices, the default one first: at most 16, each once.
    /// With an empty list the configured device is opened, as without this call;
    /// [`Builder::devices`] with an empty list opens none.
    ///
    /// With several host drivers a program for several devices runs without a GPU. Their memory
    /// counts in the host's budget, so [`Builder::device_limit`] limits their arenas, but not what
    /// [`Memory::reserve_on`](crate::Memory::reserve_on) reserves.
    ///
    /// ```
    /// use std::sync::Arc;
    /// use lowtide::device::HostDriver;
    /// use lowtide::device::driver::Driver;
    /// use lowtide::memory::DeviceSelector;
    /// use lowtide::{ByteSize, Memory};
    ///
    /// let two = [HostDriver::new(), HostDriver::new()].map(|it| Arc::new(it) as Arc<dyn Driver>);
    /// let memory = Memory::builder().drivers(two).start()?;
    /// let reserved = memory.reserve_on(DeviceSelector::Number(1), ByteSize::mib(8))?;
    /// let arena = memory.open_arena_on(reserved.device(), "on the second")?;
    /// assert_eq!(memory.devices().len(), 2);
    /// # drop(arena);
    /// # Ok::<(), lowtide::BoxError>(())
    /// ```
    #[must_use]
    pub fn drivers(mut self, drivers: impl IntoIterator<Item = Arc<dyn Driver>>) -> Self {
        self.drivers = drivers.into_iter().collect();
        self
    }

    /// Sets several CUDA devices, the default one first: at most 16, each once. Each has a budget,
    /// a watermark and series of its own; name one with a
    /// [`DeviceSelector`](crate::memory::DeviceSelector). The start fails if one cannot be opened.
    /// Every opened device holds a CUDA context: several hundred MiB of its memory. An empty list
    /// opens no device ([`DeviceChoice::None`]).
    ///
    /// ```no_run
    /// use lowtide::Memory;
    /// use lowtide::config::DeviceChoice;
    /// use lowtide::memory::DeviceSelector;
    ///
    /// let both = [DeviceChoice::CudaOrdinal(0), DeviceChoice::CudaOrdinal(1)];
    /// let memory = Memory::builder().devices(both).start()?;
    /// let arena = memory.open_arena_on(DeviceSelector::Ordinal(1), "embedder")?;
    /// # Ok::<(), lowtide::BoxError>(())
    /// ```
    #[must_use]
    pub fn devices(mut self, devices: impl IntoIterator<Item = DeviceChoice>) -> Self {
        let mut devices = devices.into_iter();
        self.code.device.choice = Some(devices.next().unwrap_or(DeviceChoice::None));
        self.code.device.further = Some(devices.collect());
        self
    }
}
