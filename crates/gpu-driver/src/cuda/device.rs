//! The devices visible to this process, by ordinal and by UUID.
//!
//! The driver itself reads `CUDA_VISIBLE_DEVICES`, so ordinals count visible devices only, and a
//! MIG instance is a device with its own UUID. An ordinal may refer to a different device after a
//! restart; a UUID does not.
//!
//! Invariant: a [`CudaDevice`] holds the driver's answers for one ordinal at one time.

use std::fmt;

use super::abi::ATTRIBUTE_INTEGRATED;
use super::calls::{Answer, Calls};
use crate::DeviceUuid;
use lowtide_core::bytes::ByteSize;

/// A device that is visible to this process.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct CudaDevice {
    /// The device's ordinal, from 0.
    pub ordinal: u32,
    /// The device's UUID, which stays the same across restarts.
    pub uuid: DeviceUuid,
    /// The product name, such as `NVIDIA H200`.
    pub name: String,
    /// The total memory of the device.
    pub memory: ByteSize,
    /// `true` if the device has no memory of its own and uses the host's, as in a Jetson or a GB10.
    /// `false` for a device with its own memory that shares the host's page tables, such as a GH200
    /// or GB200.
    pub integrated: bool,
}

impl CudaDevice {
    /// Queries the device with this ordinal.
    pub(super) fn read(calls: &Calls, ordinal: u32) -> Answer<Self> {
        let device = calls.device(ordinal)?;
        // The UUID of the part of a device that this process sees, if there is one.
        let uuid = match calls.table.part_uuid {
            Some(_) => calls.part_uuid(device)?,
            None => calls.device_uuid(device)?,
        };
        let (uuid, name) = (DeviceUuid::new(uuid), calls.device_name(device)?);
        let memory = ByteSize::of(calls.device_memory(device)?);
        let integrated = calls.device_attribute(ATTRIBUTE_INTEGRATED, device)? == 1;
        Ok(Self { ordinal, uuid, name, memory, integrated })
    }
}

impl fmt::Display for CudaDevice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "CUDA device {}, {}, {}, {}", self.ordinal, self.name, self.memory, self.uuid)
    }
}
