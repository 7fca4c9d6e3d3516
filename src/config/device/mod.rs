//! The settings of device arenas, and their values in force.
//!
//! The parent resolves and reads them as part of all settings; this module exists only with the
//! feature `device`.

pub(super) mod variables;

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use super::profile::Profile;
use super::resolved::{Resolved, pick, pick_or};
use crate::bytes::ByteSize;
use crate::decay::DecayTime;
use crate::device::driver::DeviceUuid;
use crate::device::{Contents, SleepConfig, SleepOptions};

/// Settings of device arenas from code or from the environment. `None` leaves a setting to the
/// profile or default.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct DeviceSettings {
    /// The device on which arenas allocate: the default one if there are several.
    pub choice: Option<DeviceChoice>,
    /// Further CUDA devices, each once.
    pub further: Option<Vec<DeviceChoice>>,
    /// The way in which CUDA memory is allocated.
    pub backend: Option<DeviceBackend>,
    /// The limit of device memory for each arena. Unset: no limit.
    pub limit: Option<ByteSize>,
    /// The share of the device's memory to keep free for its other users, in [0, 1); 0 for none.
    pub watermark: Option<f64>,
    /// The time after which idle device memory is released.
    pub decay: Option<DecayTime>,
    /// The time without a lease after which a device arena goes to sleep; `Some(None)` for never.
    /// Must not be zero.
    pub sleep_after: Option<Option<Duration>>,
    /// The minimum time that a device arena stays awake after it was opened or woken.
    pub min_awake: Option<Duration>,
    /// The treatment of the stable region's contents when an idle arena goes to sleep.
    pub sleep_stable: Option<Contents>,
    /// The treatment of the dynamic region's contents when an idle arena goes to sleep.
    pub sleep_dynamic: Option<Contents>,
}

impl DeviceSettings {
    /// Validates the values. `demand` takes whether one holds, its setting, the value, and what
    /// was expected.
    pub(super) fn check(&self, demand: &mut impl FnMut(bool, &str, String, &str)) {
        let further = self.further.iter().flatten();
        if self.further.as_ref().is_some_and(|further| !further.is_empty()) {
            let mut all = self.choice.iter().chain(further);
            let wrong = all.find(|device| !device.is_one_cuda_device());
            demand(
                wrong.is_none(),
                "devices",
                wrong.map_or_else(String::new, ToString::to_string),
                EXPECTED_IN_A_LIST,
            );
        }
        if let Some(part) = self.watermark {
            let holds = (0.0..1.0).contains(&part);
            demand(holds, "device_watermark", part.to_string(), "a number in [0, 1)");
        }
        if let Some(limit) = self.limit {
            let holds = !limit.is_zero();
            demand(holds, "device_limit", limit.exact(), "an amount of memory above zero");
        }
        if let Some(time) = self.sleep_after.flatten() {
            let holds = !time.is_zero();
            demand(holds, "device_sleep_after", format!("{time:?}"), "a time above zero");
        }
    }
}

/// The value in force for every setting of device arenas.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct DeviceConfig {
    /// The device on which arenas allocate: the default one if there are several.
    pub choice: Resolved<DeviceChoice>,
    /// Further CUDA devices.
    pub further: Resolved<Vec<DeviceChoice>>,
    /// The way in which CUDA memory is allocated.
    pub backend: Resolved<DeviceBackend>,
    /// The limit of each device arena; [`ByteSize::MAX`] for none.
    pub limit: Resolved<ByteSize>,
    /// The share of the device's memory to keep free. If less is free, idle memory is released
    /// before its decay time. 0 for none.
    pub watermark: Resolved<f64>,
    /// The time after which idle device memory is released.
    pub decay: Resolved<DecayTime>,
    /// The time without a lease after which a device arena goes to sleep; `None` for never.
    pub sleep_after: Resolved<Option<Duration>>,
    /// The minimum time that a device arena stays awake after it was opened or woken.
    pub min_awake: Resolved<Duration>,
    /// The treatment of the stable region's contents when an idle arena goes to sleep.
    pub sleep_stable: Resolved<Contents>,
    /// The treatment of the dynamic region's contents when an idle arena goes to sleep.
    pub sleep_dynamic: Resolved<Contents>,
}

impl DeviceConfig {
    /// The default share of the device's memory to keep free. An estimate: 4 GiB of 80 GiB, which
    /// another process needs for its context and the workspace of its first request. For a service
    /// that is alone on its device the cost is that at most 7.5 % of the device never hold idle
    /// memory.
    pub const WATERMARK: f64 = 0.05;

    /// Resolves every setting, as [`Config::resolve`](super::Config::resolve).
    pub(super) fn resolve(
        code: &DeviceSettings,
        environment: &DeviceSettings,
        base: Profile,
    ) -> Self {
        Self {
            choice: pick_or(environment.choice, code.choice, DeviceChoice::Auto),
            further: pick_or(environment.further.clone(), code.further.clone(), Vec::new()),
            backend: pick_or(environment.backend, code.backend, DeviceBackend::Auto),
            limit: pick_or(environment.limit, code.limit, ByteSize::MAX),
            watermark: pick_or(environment.watermark, code.watermark, Self::WATERMARK),
            decay: pick(environment.decay, code.decay, base.device_decay()),
            sleep_after: pick_or(environment.sleep_after, code.sleep_after, None),
            min_awake: pick_or(environment.min_awake, code.min_awake, Duration::ZERO),
            sleep_stable: pick_or(environment.sleep_stable, code.sleep_stable, Contents::default()),
            sleep_dynamic: pick_or(
                environment.sleep_dynamic,
                code.sleep_dynamic,
                Contents::default(),
            ),
        }
    }

    /// Returns the sleep configuration of arenas.
    #[must_use]
    pub fn sleep(&self) -> SleepConfig {
        let options = SleepOptions {
            stable: self.sleep_stable.value,
            dynamic: self.sleep_dynamic.value,
            ..SleepOptions::default()
        };
        SleepConfig {
            idle_after: self.sleep_after.value,
            min_awake: self.min_awake.value,
            options,
            ..SleepConfig::default()
        }
    }
}

impl Profile {
    /// The time for which a device arena keeps unused granules: a shorter pause costs no driver
    /// call. An estimate, not measured on a GPU.
    pub(super) const fn device_decay(self) -> DecayTime {
        match self {
            Self::LowMemory => DecayTime::from_millis(1_000),
            Self::Balanced => DecayTime::from_millis(5_000),
            Self::Throughput => DecayTime::from_millis(30_000),
        }
    }
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

impl DeviceChoice {
    /// Returns `true` if this names one CUDA device, as a list of devices must.
    const fn is_one_cuda_device(&self) -> bool {
        matches!(self, Self::Cuda | Self::CudaOrdinal(_) | Self::CudaUuid(_))
    }
}

/// Reads a device, or a list of CUDA devices with the default one first.
pub(super) fn list(text: &str) -> Result<(DeviceChoice, Vec<DeviceChoice>), &'static str> {
    let Some((first, further)) = text.split_once(',') else {
        return Ok((text.trim().parse()?, Vec::new()));
    };
    let one = |text: &str| {
        let device = text.trim().parse().ok().filter(DeviceChoice::is_one_cuda_device);
        device.ok_or(EXPECTED_IN_A_LIST)
    };
    Ok((one(first)?, further.split(',').map(one).collect::<Result<_, _>>()?))
}

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

/// The way in which CUDA memory is allocated.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum DeviceBackend {
    /// The first that works of virtual memory, a private pool, and plain allocations.
    #[default]
    Auto,
    /// CUDA virtual memory management (`cuMemCreate`, `cuMemMap`).
    VirtualMemory,
    /// A private stream-ordered memory pool.
    Pool,
    /// Plain allocations (`cuMemAlloc`).
    Plain,
    /// Managed memory, which the driver migrates between device and host.
    Managed,
}

impl DeviceBackend {
    const ALL: [(Self, &'static str); 5] = [
        (Self::Auto, "auto"),
        (Self::VirtualMemory, "virtual-memory"),
        (Self::Pool, "pool"),
        (Self::Plain, "plain"),
        (Self::Managed, "managed"),
    ];
}

impl fmt::Display for DeviceBackend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = Self::ALL.iter().find(|(backend, _)| backend == self);
        f.write_str(name.map_or("", |(_, name)| name))
    }
}

impl FromStr for DeviceBackend {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let named = Self::ALL.into_iter().find(|(_, name)| *name == text);
        let backend = named.map(|(backend, _)| backend);
        backend.ok_or("auto, virtual-memory, pool, plain or managed")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{Config, Settings};

    #[test]
    fn a_device_is_named_by_number_or_uuid_and_written_as_it_is_read() {
        let uuid = "GPU-00112233-4455-6677-8899-aabbccddeeff";
        let read = |text: &str| text.parse::<DeviceChoice>();
        assert_eq!(read("cuda:1"), Ok(DeviceChoice::CudaOrdinal(1)));
        assert_eq!(read("cuda:007"), Ok(DeviceChoice::CudaOrdinal(7)));
        let named = uuid.parse().map(DeviceChoice::CudaUuid);
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
        for (backend, name) in DeviceBackend::ALL {
            assert_eq!((name.parse(), backend.to_string()), (Ok(backend), name.to_owned()));
        }
        assert!("cuda_pool".parse::<DeviceBackend>().is_err());
    }

    #[test]
    fn a_list_names_cuda_devices_and_the_default_one_comes_first() {
        let (zero, one) = (DeviceChoice::CudaOrdinal(0), DeviceChoice::CudaOrdinal(1));
        assert_eq!(list("cuda:1, cuda:0"), Ok((one, vec![zero])));
        assert_eq!(list("cuda:all"), Ok((DeviceChoice::CudaAll, vec![])));
        for text in ["cuda:0,", ",cuda:0", "cuda:0,host", "cuda:all,cuda:0", "auto,cuda:0", "0,1"] {
            assert_eq!(list(text), Err(EXPECTED_IN_A_LIST), "{text}");
        }
        assert_eq!(list("gpu"), Err(EXPECTED));
        let further = Some(vec![one, DeviceChoice::Host]);
        let device = DeviceSettings { choice: Some(zero), further, ..DeviceSettings::default() };
        let code = Settings { device, ..Settings::default() };
        let error = Config::resolve(&code, &Settings::default()).expect_err("host in a list");
        assert!(error.to_string().contains("host"), "{error}");
        // A device of the environment replaces the whole list of the code.
        let mut environment = Settings::default();
        variables::choice(&mut environment, "cuda:3").expect("a device");
        let further = Some(vec![one]);
        let device = DeviceSettings { choice: Some(zero), further, ..DeviceSettings::default() };
        let code = Settings { device, ..Settings::default() };
        let device = Config::resolve(&code, &environment).expect("valid").device;
        assert_eq!(device.choice.value, DeviceChoice::CudaOrdinal(3));
        assert_eq!(device.further.value, vec![]);
    }

    #[test]
    fn no_profile_puts_arenas_to_sleep_and_what_is_written_is_how_they_do() {
        let sleep = |code: &Settings, environment: &Settings| {
            Config::resolve(code, environment).expect("valid").device.sleep()
        };
        for profile in Profile::ALL {
            let code = Settings { profile: Some(profile), ..Settings::default() };
            assert_eq!(sleep(&code, &Settings::default()), SleepConfig::default(), "{profile}");
        }
        let of = |device| Settings { device, ..Settings::default() };
        let code = DeviceSettings {
            sleep_after: Some(Some(Duration::from_secs(60))),
            sleep_dynamic: Some(Contents::Discard),
            ..DeviceSettings::default()
        };
        let min_awake = Some(Duration::from_secs(5));
        let environment = DeviceSettings { min_awake, ..DeviceSettings::default() };
        let sleep = sleep(&of(code), &of(environment));
        assert_eq!(sleep.idle_after, Some(Duration::from_secs(60)));
        assert_eq!(Some(sleep.min_awake), min_awake);
        assert_eq!(sleep.options.stable, Contents::Keep);
        assert_eq!(sleep.options.dynamic, Contents::Discard);
    }
}
