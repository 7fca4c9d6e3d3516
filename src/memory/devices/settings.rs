//! The settings of device arenas that a program makes.

use std::sync::Arc;

use crate::config::DeviceChoice;
use crate::device::driver::Driver;
use crate::memory::Builder;

/// Device arenas.
impl Builder {
    /// Sets the device on which arenas allocate. [`DeviceChoice::CudaAll`] opens every visible one.
    /// Default: the best that works.
    #[must_use]
    pub fn device(mut self, value: DeviceChoice) -> Self {
        self.code.devices = Some(vec![value]);
        self
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
    /// [`MemoryDevices::reserve`](crate::memory::MemoryDevices::reserve) reserves.
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
    /// let reserved = memory.devices().on(DeviceSelector::Number(1)).reserve(ByteSize::mib(8))?;
    /// let arena = memory.devices().on(reserved.device()).open_arena("on the second")?;
    /// assert_eq!(memory.devices().all().len(), 2);
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
    /// let arena = memory.devices().on(DeviceSelector::Ordinal(1)).open_arena("embedder")?;
    /// # Ok::<(), lowtide::BoxError>(())
    /// ```
    #[must_use]
    pub fn devices(mut self, devices: impl IntoIterator<Item = DeviceChoice>) -> Self {
        let mut devices: Vec<_> = devices.into_iter().collect();
        if devices.is_empty() {
            devices.push(DeviceChoice::None);
        }
        self.code.devices = Some(devices);
        self
    }
}
