//! Which devices this process sees, by number and by UUID.
//!
//! The driver itself reads `CUDA_VISIBLE_DEVICES`, so a number counts what is visible, and a share
//! of a device (MIG) is a device like any other, with a UUID of its own. A number may name another
//! device after a restart; a UUID does not.
//!
//! Invariant: `DeviceUuid::from_str(uuid.to_string()) = uuid`.

use std::fmt;
use std::str::FromStr;

use super::calls::{Answer, Calls};
use super::error::UuidError;
use crate::bytes::ByteSize;

/// The name of a device that stays with it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct DeviceUuid([u8; 16]);

impl DeviceUuid {
    /// From its bytes, in their order in `CUuuid`.
    #[must_use]
    pub const fn new(bytes: [u8; 16]) -> Self {
        Self(bytes)
    }

    /// Its bytes.
    #[must_use]
    pub const fn bytes(self) -> [u8; 16] {
        self.0
    }
}

impl fmt::Display for DeviceUuid {
    /// As nvidia-smi writes it: `GPU-` and groups of 8, 4, 4, 4 and 12 digits.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("GPU")?;
        for (at, byte) in self.0.iter().enumerate() {
            if [0, 4, 6, 8, 10].contains(&at) {
                f.write_str("-")?;
            }
            write!(f, "{byte:02x}")?;
        }
        Ok(())
    }
}

impl FromStr for DeviceUuid {
    type Err = UuidError;

    fn from_str(text: &str) -> Result<Self, UuidError> {
        let refused = || UuidError { text: text.to_owned() };
        let digits = text.strip_prefix("GPU-").or_else(|| text.strip_prefix("MIG-"));
        let digits: String = digits.ok_or_else(refused)?.chars().filter(|&it| it != '-').collect();
        let is_hex = digits.len() == 32 && digits.bytes().all(|digit| digit.is_ascii_hexdigit());
        let number = u128::from_str_radix(&digits, 16).ok().filter(|_| is_hex);
        Ok(Self(number.ok_or_else(refused)?.to_be_bytes()))
    }
}

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
}

impl CudaDevice {
    /// What the driver says of the device with this number.
    pub(super) fn read(calls: &Calls, ordinal: u32) -> Answer<Self> {
        let device = calls.device(ordinal)?;
        let uuid = DeviceUuid(calls.device_uuid(device)?);
        let (name, memory) = (calls.device_name(device)?, calls.device_memory(device)?);
        Ok(Self { ordinal, uuid, name, memory })
    }
}

impl fmt::Display for CudaDevice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "CUDA device {}, {}, {}, {}", self.ordinal, self.name, self.memory, self.uuid)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_uuid_is_read_as_it_is_written() {
        let bytes = std::array::from_fn(|at| u8::try_from(at).expect("small") * 17);
        let uuid = DeviceUuid::new(bytes);
        assert_eq!(uuid.to_string(), "GPU-00112233-4455-6677-8899-aabbccddeeff");
        assert_eq!(uuid.to_string().parse(), Ok(uuid));
        assert_eq!("MIG-00112233-4455-6677-8899-AABBCCDDEEFF".parse(), Ok(uuid));
    }

    #[test]
    fn what_is_no_uuid_is_named() {
        let short = "GPU-00112233-4455-6677-8899-aabbccddeef";
        for text in ["", "0", "GPU-", "GPU-0", short, "00112233-4455-6677-8899-aabbccddeeff"] {
            let error = text.parse::<DeviceUuid>().expect_err(text);
            assert_eq!(error, UuidError { text: text.to_owned() });
        }
        let signed = "GPU-+0112233-4455-6677-8899-aabbccddeeff";
        assert!(signed.parse::<DeviceUuid>().is_err() && "GPU-é".parse::<DeviceUuid>().is_err());
    }
}
