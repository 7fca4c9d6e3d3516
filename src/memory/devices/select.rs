//! Chooses one of the devices of a `Memory` by what the caller names, and reserves its bytes.
//!
//! Invariant: a device that is lost is never chosen; the error names it.

use std::cmp::Reverse;
use std::fmt;
use std::sync::Arc;

use thiserror::Error;

use crate::bytes::ByteSize;
use crate::device::driver::{DeviceUuid, Driver as _, DriverError};
use crate::memory::error::{Diagnostic, MemoryError};
use crate::memory::manager::Memory;
use crate::memory::shared::Shared;
use lowtide_admission::{Cost, Permit, Rejected};

use super::device::Device;
use super::sensor::Counted;
use super::snapshot::DeviceStatus;

/// Names one of the devices of a [`Memory`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum DeviceSelector {
    /// The first device.
    #[default]
    Default,
    /// The device with this number: its place in [`Memory::devices`], from 0. Slots and shrink
    /// targets (`gpu:1`) count the same way.
    Number(u32),
    /// The device with this ordinal in CUDA, among those visible to the process.
    Ordinal(u32),
    /// The device with this UUID.
    Uuid(DeviceUuid),
    /// The device on which most memory can still be committed: free on the device, and within its
    /// budget. Of equal ones, the one with the fewest arenas. Devices that are lost, or cannot be
    /// queried, are left out.
    MostHeadroom,
}

impl fmt::Display for DeviceSelector {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Default => f.write_str("default"),
            Self::Number(number) => write!(f, "number {number}"),
            Self::Ordinal(ordinal) => write!(f, "cuda:{ordinal}"),
            Self::Uuid(uuid) => write!(f, "cuda:{uuid}"),
            Self::MostHeadroom => f.write_str("most headroom"),
        }
    }
}

/// The reason that no device was chosen.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
#[non_exhaustive]
pub enum DeviceSelectError {
    /// The configured device is `none`.
    #[error("the configured device is none")]
    NoDevice,
    /// No device of this `Memory` has this name.
    #[error("unknown device {selector}: expected one of {}", known.join(", "))]
    Unknown {
        /// The name.
        selector: DeviceSelector,
        /// The names of the devices in metrics, in the order of their numbers.
        known: Vec<String>,
    },
    /// The device is lost, or all are and this is the first. Its memory is gone until the process
    /// restarts.
    #[error("device {device} is lost: {error}")]
    Lost {
        /// The device's name in metrics.
        device: String,
        /// The error by which the loss became known.
        error: DriverError,
    },
    /// The device could not be queried.
    #[error("cannot query device {device}: {error}")]
    Silent {
        /// The device's name in metrics.
        device: String,
        /// The cause.
        error: DriverError,
    },
}

/// The reason that bytes of a device were not reserved.
#[derive(Clone, Debug, Error, PartialEq)]
#[non_exhaustive]
pub enum DeviceReserveError {
    /// No device was chosen.
    #[error(transparent)]
    Device(#[from] DeviceSelectError),
    /// The bytes do not fit.
    #[error(transparent)]
    Rejected(#[from] Rejected),
    /// This `Memory` cannot do it now, for example in a forked child.
    #[error(transparent)]
    Memory(#[from] MemoryError),
}

/// Reserved bytes of a device.
#[derive(Debug)]
#[must_use = "dropping a reservation releases its bytes at once"]
pub struct DeviceReservation {
    device: u32,
    permit: Permit,
}

impl DeviceReservation {
    /// Returns the device, for [`Memory::open_arena_on`].
    #[must_use]
    pub const fn device(&self) -> DeviceSelector {
        DeviceSelector::Number(self.device)
    }

    /// Returns the permit, which holds the bytes.
    pub fn into_permit(self) -> Permit {
        self.permit
    }
}

impl Memory {
    /// Returns the devices, the default one first; empty if the configured device is `none`, and in
    /// a forked child. Makes no driver call.
    #[must_use]
    pub fn devices(&self) -> Vec<DeviceStatus> {
        self.0.shared.devices_snapshot().devices
    }

    /// Returns the device that the selector names. Only [`DeviceSelector::MostHeadroom`] makes
    /// driver calls: one for each device, of some 10 us.
    ///
    /// ```
    /// use lowtide::Memory;
    /// use lowtide::config::DeviceChoice;
    /// use lowtide::memory::{DeviceSelectError, DeviceSelector};
    ///
    /// let memory = Memory::builder().device(DeviceChoice::Host).start()?;
    /// assert_eq!(memory.device(DeviceSelector::MostHeadroom)?.number, 0);
    /// let unknown = memory.device(DeviceSelector::Number(7));
    /// assert!(matches!(unknown, Err(DeviceSelectError::Unknown { .. })));
    /// # Ok::<(), lowtide::BoxError>(())
    /// ```
    ///
    /// # Errors
    /// [`DeviceSelectError`] if there is no such device, or it is lost.
    pub fn device(&self, selector: DeviceSelector) -> Result<DeviceStatus, DeviceSelectError> {
        let shared = &self.0.shared;
        shared.select(selector).map(|device| shared.status(&device))
    }

    /// Reserves bytes of a device in its budget, for a request that will use them. Does not wait:
    /// there is a queue for the default device only
    /// ([`Admission`](crate::admission::Admission)). Bytes of a device without memory of its own
    /// are reserved in the host's budget.
    ///
    /// Each device has a budget: [`device_limit`](super::Builder::device_limit) times the ceiling,
    /// less the memory that its arenas have committed for nothing that is reserved. Without a limit
    /// everything is admitted. Costs some nanoseconds more than
    /// [`Admission::try_admit`](crate::admission::Admission::try_admit), and for
    /// [`DeviceSelector::MostHeadroom`] those of [`Memory::device`].
    ///
    /// # Errors
    /// [`DeviceReserveError`] if there is no such device, it is lost, or the bytes do not fit.
    pub fn reserve_on(
        &self,
        selector: DeviceSelector,
        bytes: ByteSize,
    ) -> Result<DeviceReservation, DeviceReserveError> {
        let shared = &self.0.shared;
        shared.check_here()?;
        let device = shared.select(selector)?;
        let cost = match device.counted {
            Counted::OnDevice => Cost::device(bytes),
            Counted::ByKernel | Counted::BesideKernel => Cost::host(bytes),
        };
        let admission = device.admission.as_ref().unwrap_or(&shared.admission);
        let permit = admission.try_admit(cost)?;
        Ok(DeviceReservation { device: device.number, permit })
    }
}

impl Shared {
    /// Returns the device that the selector names.
    pub(super) fn select(
        &self,
        selector: DeviceSelector,
    ) -> Result<Arc<Device>, DeviceSelectError> {
        let list = &self.devices.list;
        if list.is_empty() {
            return Err(DeviceSelectError::NoDevice);
        }
        let has = |of: &dyn Fn(&Device) -> bool| list.iter().find(|device| of(device)).cloned();
        let found = match selector {
            DeviceSelector::MostHeadroom => return self.roomiest(),
            DeviceSelector::Default => list.first().cloned(),
            DeviceSelector::Number(number) => has(&|device| device.number == number),
            DeviceSelector::Ordinal(it) => has(&|device| device.driver.ordinal() == Some(it)),
            DeviceSelector::Uuid(uuid) => has(&|device| device.driver.uuid() == Some(uuid)),
        };
        let unknown = || {
            let known = list.iter().map(|device| device.name.to_string()).collect();
            DeviceSelectError::Unknown { selector, known }
        };
        let device = found.ok_or_else(unknown)?;
        match device.lost() {
            Some(error) => Err(lost(&device, error)),
            None => Ok(device),
        }
    }

    /// Returns the device with the most headroom, and the fewest arenas among equal ones.
    fn roomiest(&self) -> Result<Arc<Device>, DeviceSelectError> {
        let (mut best, mut failed) = (None, None);
        for device in &self.devices.list {
            match device.headroom(&self.admission) {
                Ok(room) => {
                    let key = (room, Reverse(self.devices.arenas.count_on(device)));
                    if best.as_ref().is_none_or(|(most, _)| key > *most) {
                        best = Some((key, Arc::clone(device)));
                    }
                }
                Err(error) => {
                    let silent = match device.lost() {
                        Some(error) => lost(device, error),
                        None => {
                            DeviceSelectError::Silent { device: device.name.to_string(), error }
                        }
                    };
                    failed.get_or_insert(silent);
                }
            }
        }
        match (best, failed) {
            (Some((_, device)), _) => Ok(device),
            (None, failed) => Err(failed.unwrap_or(DeviceSelectError::NoDevice)),
        }
    }

    /// Reports devices that were lost since the last call. Their arenas fail from now on.
    pub(super) fn report_losses(&self) {
        for device in &self.devices.list {
            if let Some(error) = device.lost_once() {
                let name = &device.name;
                let text = format!(
                    "device {name} is lost: {error}; its arenas fail, other devices are unaffected"
                );
                self.add_diagnostic(Diagnostic::warning("device", text));
            }
        }
    }
}

fn lost(device: &Device, error: &DriverError) -> DeviceSelectError {
    DeviceSelectError::Lost { device: device.name.to_string(), error: error.clone() }
}
