//! Settings as given in code or in the environment: each may be unset, each value is valid.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use thiserror::Error;

use super::profile::Profile;
use crate::bytes::ByteSize;
use crate::decay::DecayTime;
use crate::device::Contents;
use crate::device::driver::DeviceUuid;

/// Settings from code or from the environment. `None` leaves a setting to the profile or default.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Settings {
    /// The profile, which gives the defaults of other settings.
    pub profile: Option<Profile>,
    /// The limit of host memory. Unset: the cgroup's limit, or the machine's memory.
    pub memory_limit: Option<ByteSize>,
    /// The share of the limit up to which requests are admitted, in (0, 1].
    pub ceiling: Option<f64>,
    /// Bytes that a request is assumed to need per estimated byte, until that is measured; from 1
    /// to 5.
    pub correction_factor: Option<f64>,
    /// The device on which arenas allocate.
    pub device: Option<DeviceChoice>,
    /// The way in which CUDA memory is allocated.
    pub device_backend: Option<DeviceBackend>,
    /// The limit of device memory for each arena. Unset: no limit.
    pub device_limit: Option<ByteSize>,
    /// The share of the device's memory to keep free for its other users, in [0, 1); 0 for none.
    pub device_watermark: Option<f64>,
    /// The time after which idle device memory is released.
    pub device_decay: Option<DecayTime>,
    /// The time without a lease after which a device arena goes to sleep; `Some(None)` for never.
    /// Must not be zero.
    pub device_sleep_after: Option<Option<Duration>>,
    /// The minimum time that a device arena stays awake after it was opened or woken.
    pub device_min_awake: Option<Duration>,
    /// The treatment of the stable region's contents when an idle arena goes to sleep.
    pub device_sleep_stable: Option<Contents>,
    /// The treatment of the dynamic region's contents when an idle arena goes to sleep.
    pub device_sleep_dynamic: Option<Contents>,
    /// The time for which jemalloc keeps dirty pages.
    pub heap_decay: Option<DecayTime>,
    /// The maximum number of jemalloc's background threads; 0 for none.
    pub background_threads: Option<u32>,
    /// The time between heap purges of a busy service; `Some(None)` purges only under pressure.
    /// Must not be zero.
    pub purge_interval: Option<Option<Duration>>,
    /// The idle time after which resources without their own setting are unloaded;
    /// [`Duration::MAX`] for never. Must not be zero.
    pub idle_unload: Option<Duration>,
    /// The time between publications of metrics. Must not be zero.
    pub metrics_interval: Option<Duration>,
}

/// The device on which arenas allocate.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum DeviceChoice {
    /// The best backend that works, or the host driver, with a diagnostic, if none does.
    #[default]
    Auto,
    /// The first CUDA device that is visible to this process. Start-up fails if there is none.
    Cuda,
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
            Self::CudaOrdinal(ordinal) => write!(f, "cuda:{ordinal}"),
            Self::CudaUuid(uuid) => write!(f, "cuda:{uuid}"),
            Self::Host => f.write_str("host"),
            Self::None => f.write_str("none"),
        }
    }
}

impl FromStr for DeviceChoice {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let expected = "auto, cuda, cuda:1 (a number), cuda:GPU-... or cuda:MIG-... (a UUID), host \
                        or none";
        Ok(match text {
            "auto" => Self::Auto,
            "cuda" => Self::Cuda,
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

/// All settings that are invalid.
///
/// Its `Debug` output is its message, so a `main` that returns this error prints a readable text.
#[derive(Clone, Error, PartialEq, Eq)]
pub struct ConfigError {
    /// The faults, in order of the settings' names. Never empty.
    pub faults: Vec<Fault>,
}

impl fmt::Display for ConfigError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (at, fault) in self.faults.iter().enumerate() {
            let separator = if at == 0 { "" } else { "; " };
            write!(f, "{separator}{fault}")?;
        }
        Ok(())
    }
}

impl fmt::Debug for ConfigError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// One invalid setting.
#[derive(Clone, Debug, Error, PartialEq, Eq, PartialOrd, Ord)]
#[non_exhaustive]
pub enum Fault {
    /// A value that the setting does not accept.
    #[error("{name}={value:?}: expected {expected}")]
    BadValue {
        /// The variable or setting.
        name: String,
        /// The value that was set.
        value: String,
        /// The accepted values.
        expected: String,
    },
    /// An unknown `LOWTIDE_*` variable.
    #[error("unknown variable {name}: {}", meant(name))]
    UnknownVariable {
        /// The variable.
        name: String,
    },
}

/// The most similar known variable, or all of them.
fn meant(name: &str) -> String {
    let names = || super::env::VARIABLES.iter().map(|variable| variable.name);
    let tail = name.len().saturating_sub(super::env::PREFIX.len());
    let most = EDITS_MAX.min(tail / 2);
    names()
        .filter(|known| known.len().abs_diff(name.len()) <= most)
        .map(|known| (edits(name, known), known))
        .min()
        .filter(|(edits, _)| *edits <= most)
        .map_or_else(
            || format!("expected one of {}", names().collect::<Vec<_>>().join(", ")),
            |(_, known)| format!("did you mean {known}?"),
        )
}

/// The maximum edit distance of a suggestion, which is also limited to half the name's letters.
const EDITS_MAX: usize = 4;

/// The edit distance (Levenshtein).
fn edits(one: &str, other: &str) -> usize {
    let mut row: Vec<usize> = (0..=other.len()).collect();
    for (at, letter) in one.bytes().enumerate() {
        let mut before = std::mem::replace(&mut row[0], at + 1);
        for (to, wanted) in other.bytes().enumerate() {
            let changed = before + usize::from(letter != wanted);
            before = row[to + 1];
            row[to + 1] = changed.min(before + 1).min(row[to] + 1);
        }
    }
    row[other.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

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
        let all = ["auto", "cuda", "cuda:0", "cuda:4294967295", "host", "none"];
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
    fn edits_are_counted() {
        for (one, other, count) in
            [("", "", 0), ("ebb", "ebb", 0), ("", "ebb", 3), ("ebb", "eb", 1), ("tide", "dive", 2)]
        {
            assert_eq!((edits(one, other), edits(other, one)), (count, count), "{one} {other}");
        }
    }

    #[test]
    fn a_misspelt_variable_is_told_from_one_that_is_like_none() {
        let text = |name: &str| Fault::UnknownVariable { name: name.to_owned() }.to_string();
        for name in ["LOWTIDE_MEM_LIMIT", "LOWTIDE_MEMORY_LIMTI", "LOWTIDE_MEMORYLIMIT"] {
            let text = text(name);
            assert!(text.ends_with("did you mean LOWTIDE_MEMORY_LIMIT?"), "{text}");
        }
        for name in ["LOWTIDE_", "LOWTIDE_X", "LOWTIDE_COLOUR_OF_THE_SEA", "LOWTIDE_\u{e4}"] {
            let text = text(name);
            assert!(text.contains("expected one of LOWTIDE_PROFILE, "), "{text}");
        }
    }
}
