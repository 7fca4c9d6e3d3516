//! Chooses one of the devices of a `Memory` by what the caller names, and reserves its bytes.
//!
//! Invariant: a device that is lost is never chosen; the error names it.

use std::cmp::Reverse;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use crate::bytes::ByteSize;
use crate::device::driver::{Driver as _, DriverError};
use crate::memory::devices::MemoryDevices;
use crate::memory::error::{Diagnostic, MemoryError};
use crate::memory::shared::Shared;
use lowtide_admission::{Cost, Permit};

use super::device::{CountedIn, Device};
use super::values::{DeviceSelector, DeviceStatus};

impl MemoryDevices<'_> {
    /// Returns all devices, the default one first; empty if the configured device is `none`, and in
    /// a forked child. Makes no driver call.
    #[must_use]
    pub fn all(&self) -> Vec<DeviceStatus> {
        self.shared().devices_snapshot().devices
    }

    /// Returns the selected device. Only [`DeviceSelector::MostHeadroom`] makes driver calls: one
    /// for each device, of some 10 us.
    ///
    /// ```
    /// use lowtide::Memory;
    /// use lowtide::config::DeviceChoice;
    /// use lowtide::memory::{DeviceSelector, MemoryError};
    ///
    /// let memory = Memory::builder().device(DeviceChoice::Host).start()?;
    /// assert_eq!(memory.devices().on(DeviceSelector::MostHeadroom).status()?.number, 0);
    /// let unknown = memory.devices().on(DeviceSelector::Number(7)).status();
    /// assert!(matches!(unknown, Err(MemoryError::UnknownDevice { .. })));
    /// # Ok::<(), lowtide::BoxError>(())
    /// ```
    ///
    /// # Errors
    /// [`MemoryError`] if there is no such device, or it is lost.
    pub fn status(&self) -> Result<DeviceStatus, MemoryError> {
        let shared = self.shared();
        shared.select(self.selector).map(|device| shared.status(&device))
    }

    /// Reserves bytes of the selected device in its budget, for a request that will use them.
    /// Returns the device, for [`MemoryDevices::on`], and the permit, which holds the bytes. Does
    /// not wait: there is a queue for the default device only
    /// ([`Admission`](crate::admission::Admission)). Bytes of a device without memory of its own
    /// are reserved in the host's budget.
    ///
    /// Each device has a budget: [`device_limit`](crate::memory::Builder::device_limit) times the
    /// ceiling, less the memory that its arenas have committed for nothing that is reserved. What
    /// may be reserved is this, divided by the
    /// [correction factor](crate::memory::Builder::correction_factor): 2 until it is measured, so
    /// at first about half of the ceiling. Without a limit everything is admitted. Costs some
    /// nanoseconds more than [`Admission::try_admit`](crate::admission::Admission::try_admit), and
    /// for [`DeviceSelector::MostHeadroom`] those of [`MemoryDevices::status`].
    ///
    /// A handler answers an error like a layer does:
    ///
    /// ```
    /// # #[cfg(feature = "service")] {
    /// use http::{Response, StatusCode};
    /// use lowtide::admission::Rejected;
    /// use lowtide::config::DeviceChoice;
    /// use lowtide::memory::{DeviceSelector, MemoryError};
    /// use lowtide::service::rejection;
    /// use lowtide::{ByteSize, Memory};
    ///
    /// fn answer(error: &MemoryError, asked: ByteSize) -> Response<String> {
    ///     match error {
    ///         // 503 with Retry-After, or 413 if the bytes can never fit.
    ///         MemoryError::Rejected(rejected) => rejection(rejected),
    ///         // 503 without Retry-After: another instance may have a device that works.
    ///         MemoryError::DeviceLost { .. } => {
    ///             rejection(&Rejected::DeviceLost { asked })
    ///         }
    ///         // An unknown device is a mistake of the program.
    ///         _ => {
    ///             let mut response = Response::new(String::new());
    ///             *response.status_mut() = StatusCode::INTERNAL_SERVER_ERROR;
    ///             response
    ///         }
    ///     }
    /// }
    ///
    /// let memory = Memory::builder().device(DeviceChoice::Host).start()?;
    /// let asked = ByteSize::mib(64);
    /// match memory.devices().on(DeviceSelector::MostHeadroom).reserve(asked) {
    ///     Ok((device, permit)) => {
    ///         let arena = memory.devices().on(device).open_arena("request")?;
    ///         // The request uses the arena while it holds the permit.
    /// #       drop((arena, permit));
    ///     }
    ///     Err(error) => println!("{}", answer(&error, asked).status()),
    /// }
    /// # }
    /// # Ok::<(), lowtide::BoxError>(())
    /// ```
    ///
    /// # Errors
    /// [`MemoryError`] if there is no such device, it is lost, or the bytes do not fit.
    pub fn reserve(&self, bytes: ByteSize) -> Result<(DeviceSelector, Permit), MemoryError> {
        let shared = self.shared();
        shared.check_here()?;
        let device = shared.select(self.selector)?;
        let cost = match device.counted {
            CountedIn::OnDevice => Cost::device(bytes),
            CountedIn::ByKernel | CountedIn::BesideKernel => Cost::host(bytes),
        };
        let admission = device.admission.as_ref().unwrap_or(&shared.admission);
        Ok((DeviceSelector::Number(device.number), admission.try_admit(cost)?))
    }
}

impl Shared {
    /// Returns the device that the selector names.
    pub(super) fn select(&self, selector: DeviceSelector) -> Result<Arc<Device>, MemoryError> {
        let list = &self.devices.list;
        if list.is_empty() {
            return Err(MemoryError::NoDevice);
        }
        // The names of devices of the kind that is asked for.
        let name = |device: &Arc<Device>| match selector {
            DeviceSelector::Ordinal(_) => device.driver.ordinal().map(DeviceSelector::Ordinal),
            DeviceSelector::Uuid(_) => device.driver.uuid().map(DeviceSelector::Uuid),
            _ => Some(DeviceSelector::Number(device.number)),
        };
        let asked = match selector {
            DeviceSelector::MostHeadroom => return self.roomiest(),
            DeviceSelector::Default => DeviceSelector::Number(0),
            named => named,
        };
        let Some(device) = list.iter().find(|device| name(device) == Some(asked)).cloned() else {
            let mut known: Vec<_> = list.iter().filter_map(name).collect();
            if known.is_empty() {
                known.extend(list.iter().map(|device| DeviceSelector::Number(device.number)));
            }
            return Err(MemoryError::unknown_device(&selector, &known));
        };
        match device.driver.lost() {
            Some(error) => Err(lost(&device, error)),
            None => Ok(device),
        }
    }

    /// Returns the device with the most headroom, and the fewest arenas among equal ones.
    fn roomiest(&self) -> Result<Arc<Device>, MemoryError> {
        let arenas = self.devices.arenas.all();
        let mut failed = None;
        let key = |device: &Arc<Device>| match device.headroom(&self.admission) {
            Ok(room) => {
                let on = arenas.iter().filter(|it| it.device.number == device.number).count();
                Some(((Reverse(room), on), Arc::clone(device)))
            }
            Err(error) => {
                let name = device.name.to_string();
                failed.get_or_insert(match device.driver.lost() {
                    Some(error) => lost(device, error),
                    None => MemoryError::DeviceSilent { device: name, error },
                });
                None
            }
        };
        let best = self.devices.list.iter().filter_map(key).min_by_key(|(key, _)| *key);
        best.map(|(_, device)| device).ok_or_else(|| failed.unwrap_or(MemoryError::NoDevice))
    }

    /// Reports devices that were lost since the last call.
    pub(super) fn report_losses(&self) {
        for device in &self.devices.list {
            if let Some(error) = device.driver.lost()
                && !device.is_reported.swap(true, Ordering::Relaxed)
            {
                let name = &device.name;
                let works = self.devices.list.iter().any(|device| !device.is_lost());
                let others = if works { "; other devices are unaffected" } else { "" };
                let text = format!(
                    "device {name} is lost: {error}; it gets no call until a restart{others}"
                );
                self.add_diagnostic(Diagnostic::warning("device", text));
            }
        }
    }
}

fn lost(device: &Device, error: &DriverError) -> MemoryError {
    MemoryError::DeviceLost { device: device.name.to_string(), error: error.clone() }
}
