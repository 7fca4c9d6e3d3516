//! Devices and backends by name.
//!
//! This module exists only with the feature `device`.

use std::fmt;
use std::str::FromStr;

use super::value::{Format, Spelled, spelled};
use crate::device::Contents;
use crate::device::driver::DeviceUuid;

spelled! {
    DeviceBackend: |backend| backend.to_string();
    Contents: |contents| contents.to_string();
    Vec<DeviceChoice>: |devices| {
        devices.iter().map(ToString::to_string).collect::<Vec<_>>().join(",")
    };
}

/// The device on which arenas allocate.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum DeviceChoice {
    /// The best backend that works, or the host driver, with a diagnostic, if none does.
    #[default]
    Auto,
    /// The first CUDA device that is visible to this process. Start-up fails if there is none.
    Cuda,
    /// Every CUDA device that is visible to this process, in the driver's order
    /// (`CUDA_VISIBLE_DEVICES`), at most 16. Start-up fails if there is none, or one cannot be
    /// opened.
    CudaAll,
    /// The CUDA device with this number, among those visible to this process, or an error.
    CudaOrdinal(u32),
    /// The CUDA device or MIG instance with this UUID, or an error.
    CudaUuid(DeviceUuid),
    /// The host driver: host memory behind the same arena API.
    Host,
    /// No device arenas. Opening one is an error.
    None,
}

impl fmt::Display for DeviceChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Auto => f.write_str("auto"),
            Self::Cuda => f.write_str("cuda"),
            Self::CudaAll => f.write_str("cuda:all"),
            Self::CudaOrdinal(ordinal) => write!(f, "cuda:{ordinal}"),
            Self::CudaUuid(uuid) => write!(f, "cuda:{uuid}"),
            Self::Host => f.write_str("host"),
            Self::None => f.write_str("none"),
        }
    }
}

/// The texts that name a device.
const EXPECTED: &str = "auto, cuda, cuda:1 (a number), cuda:GPU-... or cuda:MIG-... (a UUID), \
                        cuda:all, a list such as cuda:0,cuda:1, host or none";

/// The texts that name a device in a list.
const EXPECTED_IN_A_LIST: &str = "only CUDA devices in a list: each cuda, cuda:1 (a number), \
                                  cuda:GPU-... or cuda:MIG-... (a UUID)";

use DeviceChoice::{Cuda, CudaOrdinal, CudaUuid};

/// A device, or a list of CUDA devices with the default one first.
pub(super) const DEVICES: Format<Vec<DeviceChoice>> = Format {
    expected: EXPECTED_IN_A_LIST,
    parse: |text| {
        if !text.contains(',') {
            return Ok(vec![text.trim().parse()?]);
        }
        text.split(',').map(|text| text.trim().parse().map_err(|_| EXPECTED_IN_A_LIST)).collect()
    },
    accepts: |devices| match devices.as_slice() {
        [] => false,
        [_] => true,
        list => list.iter().all(|one| matches!(one, Cuda | CudaOrdinal(_) | CudaUuid(_))),
    },
};

impl FromStr for DeviceChoice {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let expected = EXPECTED;
        Ok(match text {
            "auto" => Self::Auto,
            "cuda" => Self::Cuda,
            "cuda:all" => Self::CudaAll,
            "host" => Self::Host,
            "none" => Self::None,
            _ => {
                let named = text.strip_prefix("cuda:").ok_or(expected)?;
                let is_number = named.bytes().all(|digit| digit.is_ascii_digit());
                match named.parse() {
                    Ok(ordinal) if is_number => Self::CudaOrdinal(ordinal),
                    _ => Self::CudaUuid(named.parse().map_err(|_| expected)?),
                }
            }
        })
    }
}

lowtide_core::named_enum! {
    /// The way in which CUDA memory is allocated.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
    #[non_exhaustive]
    pub enum DeviceBackend {
        /// The first that works of virtual memory, a private pool, and plain allocations.
        #[default]
        Auto = "auto",
        /// CUDA virtual memory management (`cuMemCreate`, `cuMemMap`).
        VirtualMemory = "virtual-memory",
        /// A private stream-ordered memory pool.
        Pool = "pool",
        /// Plain allocations (`cuMemAlloc`).
        Plain = "plain",
        /// Managed memory, which the driver migrates between device and host.
        Managed = "managed",
    }
}

lowtide_core::by_name!(DeviceBackend, "auto, virtual-memory, pool, plain or managed");

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    use crate::config::{Config, Profile, Settings};
    use crate::device::SleepConfig;

    #[test]
    fn a_device_is_named_by_number_or_uuid_and_written_as_it_is_read() {
        let uuid = "GPU-00112233-4455-6677-8899-aabbccddeeff";
        let read = |text: &str| text.parse::<DeviceChoice>();
        assert_eq!(read("cuda:1"), Ok(CudaOrdinal(1)));
        assert_eq!(read("cuda:007"), Ok(CudaOrdinal(7)));
        let named = uuid.parse().map(CudaUuid);
        assert_eq!(read(&format!("cuda:{uuid}")).ok(), named.ok());
        assert_eq!(
            read(&format!("cuda:{}", uuid.replace("GPU", "MIG"))),
            read(&format!("cuda:{uuid}"))
        );
        let all = ["auto", "cuda", "cuda:0", "cuda:4294967295", "cuda:all", "host", "none"];
        for text in all.into_iter().chain([&*format!("cuda:{uuid}")]) {
            assert_eq!(read(text).expect(text).to_string(), text);
        }
        let wrong =
            ["", "gpu", "cuda:", "cuda:+1", "cuda:-1", "cuda:4294967296", "cuda: 1", "host:0"];
        for text in wrong.into_iter().chain(["CUDA", "cuda:GPU-", "cuda:GPU-0011", uuid]) {
            let expected = read(text).expect_err(text);
            assert!(expected.contains("cuda:1 (a number)"), "{text}: {expected}");
        }
        for backend in DeviceBackend::ALL {
            assert_eq!(backend.name().parse(), Ok(backend));
        }
        assert!("cuda_pool".parse::<DeviceBackend>().is_err());
    }

    #[test]
    fn a_list_names_cuda_devices_and_the_default_one_comes_first() {
        let (zero, one) = (CudaOrdinal(0), CudaOrdinal(1));
        let read = |text: &str| DEVICES.read(text);
        assert_eq!(read("cuda:1, cuda:0"), Ok(vec![one, zero]));
        assert_eq!(read("cuda:all"), Ok(vec![DeviceChoice::CudaAll]));
        for text in ["cuda:0,", ",cuda:0", "cuda:0,host", "cuda:all,cuda:0", "auto,cuda:0", "0,1"] {
            assert_eq!(read(text), Err(EXPECTED_IN_A_LIST), "{text}");
        }
        assert_eq!(read("gpu"), Err(EXPECTED));
        let of = |devices: &[DeviceChoice]| Settings {
            devices: Some(devices.to_vec()),
            ..Settings::default()
        };
        let host = of(&[zero, DeviceChoice::Host]);
        let error = Config::resolve(&host, &Settings::default()).expect_err("host in a list");
        assert!(error.to_string().contains("host"), "{error}");
        // A device of the environment replaces the whole list of the code.
        let three = CudaOrdinal(3);
        let config = Config::resolve(&of(&[zero, one]), &of(&[three])).expect("valid");
        assert_eq!(config.devices.value, [three]);
    }

    #[test]
    fn no_profile_puts_arenas_to_sleep_and_what_is_written_is_how_they_do() {
        let sleep = |code: &Settings, environment: &Settings| {
            Config::resolve(code, environment).expect("valid").device_sleep()
        };
        for profile in Profile::ALL {
            let code = Settings { profile: Some(profile), ..Settings::default() };
            assert_eq!(sleep(&code, &Settings::default()), SleepConfig::default(), "{profile}");
        }
        let code = Settings {
            device_sleep_after: Some(Some(Duration::from_secs(60))),
            device_sleep_dynamic: Some(Contents::Discard),
            ..Settings::default()
        };
        let min_awake = Some(Duration::from_secs(5));
        let environment = Settings { device_min_awake: min_awake, ..Settings::default() };
        let sleep = sleep(&code, &environment);
        assert_eq!(sleep.idle_after, Some(Duration::from_secs(60)));
        assert_eq!(Some(sleep.min_awake), min_awake);
        assert_eq!(sleep.options.stable, Contents::Keep);
        assert_eq!(sleep.options.dynamic, Contents::Discard);
    }
}
