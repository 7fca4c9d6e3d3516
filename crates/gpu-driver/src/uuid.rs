//! Stable device identifiers, in the format of nvidia-smi.
//!
//! An ordinal may refer to a different device after a restart; a UUID does not. This module looks
//! up no device.
//!
//! Invariant: `DeviceUuid::from_str(uuid.to_string()) = uuid`.

use std::fmt;
use std::str::FromStr;

use super::DriverError;

/// The UUID of a device, which stays the same across restarts.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct DeviceUuid([u8; 16]);

impl DeviceUuid {
    /// Creates a UUID from its bytes, in the order of `CUuuid`.
    #[must_use]
    pub const fn new(bytes: [u8; 16]) -> Self {
        Self(bytes)
    }

    /// Returns the bytes.
    #[must_use]
    pub const fn bytes(self) -> [u8; 16] {
        self.0
    }
}

impl fmt::Display for DeviceUuid {
    /// Writes the UUID like nvidia-smi: `GPU-` and groups of 8, 4, 4, 4 and 12 digits.
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

impl fmt::Debug for DeviceUuid {
    /// Writes the UUID as its text.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl FromStr for DeviceUuid {
    type Err = DriverError;

    fn from_str(text: &str) -> Result<Self, DriverError> {
        let refused = || DriverError::InvalidUuid { text: text.to_owned() };
        let digits = text.strip_prefix("GPU-").or_else(|| text.strip_prefix("MIG-"));
        let digits: String = digits.ok_or_else(refused)?.chars().filter(|&it| it != '-').collect();
        let is_hex = digits.len() == 32 && digits.bytes().all(|digit| digit.is_ascii_hexdigit());
        let number = u128::from_str_radix(&digits, 16).ok().filter(|_| is_hex);
        Ok(Self(number.ok_or_else(refused)?.to_be_bytes()))
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
        assert_eq!((uuid.to_string().parse(), format!("{uuid:?}")), (Ok(uuid), uuid.to_string()));
        assert_eq!("MIG-00112233-4455-6677-8899-AABBCCDDEEFF".parse(), Ok(uuid));
    }

    #[test]
    fn what_is_no_uuid_is_named() {
        let short = "GPU-00112233-4455-6677-8899-aabbccddeef";
        for text in ["", "0", "GPU-", "GPU-0", short, "00112233-4455-6677-8899-aabbccddeeff"] {
            let error = text.parse::<DeviceUuid>().expect_err(text);
            assert_eq!(error, DriverError::InvalidUuid { text: text.to_owned() });
        }
        let signed = "GPU-+0112233-4455-6677-8899-aabbccddeeff";
        assert!(signed.parse::<DeviceUuid>().is_err() && "GPU-é".parse::<DeviceUuid>().is_err());
    }
}
