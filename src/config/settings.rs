//! What was written: settings with gaps, each value valid in itself.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use thiserror::Error;

use super::profile::Profile;
use crate::bytes::ByteSize;
use crate::decay::DecayTime;
use crate::device::Contents;
use crate::device::driver::DeviceUuid;

/// What somebody wrote, in code or in the environment; `None` means that nobody said.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Settings {
    /// What the other settings start from.
    pub profile: Option<Profile>,
    /// Host memory that must not be passed; unset: the cgroup's limit, or the machine's memory.
    pub memory_limit: Option<ByteSize>,
    /// Part of the limit up to which requests are admitted, in (0, 1].
    pub ceiling: Option<f64>,
    /// What a booked byte is taken to need until that is measured, in [1, 5].
    pub correction_factor: Option<f64>,
    /// Where device arenas live.
    pub device: Option<DeviceChoice>,
    /// In which way CUDA memory is had.
    pub device_backend: Option<DeviceBackend>,
    /// Device memory that an arena must not pass; unset: no limit of its own.
    pub device_limit: Option<ByteSize>,
    /// Part of the device's memory that is to stay free, in [0, 1); 0 for none.
    pub device_watermark: Option<f64>,
    /// How long idle device memory may stay.
    pub device_decay: Option<DecayTime>,
    /// After how long without a lease a device arena falls asleep; `Some(None)`: never. Never zero.
    pub device_sleep_after: Option<Option<Duration>>,
    /// How long a device arena stays awake at least, once it was opened or woken.
    pub device_min_awake: Option<Duration>,
    /// What becomes of the stable region's contents while an arena sleeps by itself.
    pub device_sleep_stable: Option<Contents>,
    /// The same of the dynamic region's.
    pub device_sleep_dynamic: Option<Contents>,
    /// How long jemalloc keeps dirty pages.
    pub heap_decay: Option<DecayTime>,
    /// jemalloc's background threads at most; 0 for none.
    pub background_threads: Option<u32>,
    /// How often a busy service purges its heap; `Some(None)`: only under pressure.
    pub purge_interval: Option<Option<Duration>>,
    /// Idle time after which resources without their own are unloaded. Never zero;
    /// [`Duration::MAX`] for never.
    pub idle_unload: Option<Duration>,
    /// How often metrics are published. Never zero.
    pub metrics_interval: Option<Duration>,
}

/// Where device arenas live.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum DeviceChoice {
    /// The best rung that works; the host driver, with a warning, where there is no GPU.
    #[default]
    Auto,
    /// The first CUDA device that this process sees, or a start-up error with the cause.
    Cuda,
    /// The CUDA device with this number, among those that this process sees, or an error.
    CudaOrdinal(u32),
    /// The CUDA device, or the share of one, with this UUID, or an error.
    CudaUuid(DeviceUuid),
    /// The host driver: host memory behind the same arena.
    Host,
    /// No device arenas; opening one is an error.
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

/// In which way CUDA memory is had.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum DeviceBackend {
    /// The first that works: virtual memory, a pool, plain memory.
    #[default]
    Auto,
    /// Virtual memory.
    VirtualMemory,
    /// A pool of our own.
    Pool,
    /// Plain memory.
    Plain,
    /// Managed memory, which the driver moves between device and host by itself.
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

/// Settings that cannot be used, all of them at once.
///
/// Its `Debug` is its text, so that a `main` that returns it says what is wrong.
#[derive(Clone, Error, PartialEq, Eq)]
pub struct ConfigError {
    /// Each fault, in order of the names. Never empty.
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

/// One setting that cannot be used.
#[derive(Clone, Debug, Error, PartialEq, Eq, PartialOrd, Ord)]
#[non_exhaustive]
pub enum Fault {
    /// The value is none that the setting can have.
    #[error("{name}={value:?}: expected {expected}")]
    BadValue {
        /// The variable or setting.
        name: String,
        /// What it was set to.
        value: String,
        /// What was expected.
        expected: String,
    },
    /// A `LOWTIDE_*` variable that nothing reads.
    #[error("{name} is not a variable of lowtide: {}", meant(name))]
    UnknownVariable {
        /// The variable.
        name: String,
    },
}

/// The variable that was meant, or all there are.
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

/// A name is near another up to so many edits, and up to one for every two letters of its own.
const EDITS_MAX: usize = 4;

/// The least number of letters to put in, leave out or change that makes one of the other.
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
