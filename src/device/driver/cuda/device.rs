//! Which devices this process sees, by number and by UUID.
//!
//! The driver itself reads `CUDA_VISIBLE_DEVICES`, so a number counts what is visible, and a share
//! of a device (MIG) is a device like any other, with a UUID of its own. A number may name another
//! device after a restart; a UUID does not.
//!
//! Invariant: what is in a [`CudaDevice`] is what the driver said of one number at one time.

use std::fmt;

use super::abi::ATTRIBUTE_INTEGRATED;
use super::calls::{Answer, Calls};
use crate::bytes::ByteSize;
use crate::device::driver::DeviceUuid;

/// A device that this process sees.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct CudaDevice {
    /// Its number, from 0 on.
    pub ordinal: u32,
    /// Its name that stays.
    pub uuid: DeviceUuid,
    /// What it is called, such as `NVIDIA H200`.
    pub name: String,
    /// All its memory.
    pub memory: ByteSize,
    /// Whether it has no memory of its own and uses the machine's, as in a Jetson or a GB10. A
    /// device with memory of its own that shares the host's page tables, as in a GH200 or GB200,
    /// has not.
    pub integrated: bool,
}

impl CudaDevice {
    /// What the driver says of the device with this number.
    pub(super) fn read(calls: &Calls, ordinal: u32) -> Answer<Self> {
        let device = calls.device(ordinal)?;
        let uuid = DeviceUuid::new(calls.device_uuid(device)?);
        let (name, memory) = (calls.device_name(device)?, calls.device_memory(device)?);
        let integrated = calls.device_attribute(ATTRIBUTE_INTEGRATED, device)? == 1;
        Ok(Self { ordinal, uuid, name, memory, integrated })
    }
}

impl fmt::Display for CudaDevice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "CUDA device {}, {}, {}, {}", self.ordinal, self.name, self.memory, self.uuid)
    }
}
