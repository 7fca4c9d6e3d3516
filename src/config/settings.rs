//! Settings as given in code or in the environment: each may be unset, each value is valid.

use std::path::PathBuf;
use std::time::Duration;

use super::profile::Profile;
use crate::bytes::ByteSize;
use crate::decay::DecayTime;
use crate::metrics::MetricsTier;
use lowtide_admission::ExhaustionPolicy;

/// Settings from code or from the environment. `None` leaves a setting to the profile or default.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Settings {
    /// The profile, which gives the defaults of other settings.
    pub profile: Option<Profile>,
    /// The limit of host memory. Unset: the cgroup's limit, or the machine's memory.
    pub memory_limit: Option<ByteSize>,
    /// The share of the limit up to which requests are admitted, in (0, 1]. Unset: .80, which rises
    /// to at most .93 while the measured growth allows it.
    pub ceiling: Option<f64>,
    /// Bytes that a request is assumed to need per estimated byte, until that is measured; from 1
    /// to 5.
    pub correction_factor: Option<f64>,
    /// The settings of device arenas.
    #[cfg(feature = "device")]
    pub device: super::DeviceSettings,
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
    /// The longest time that a request waits for room behind a layer of
    /// `Memory::layer` without its own setting; zero to reject immediately.
    pub max_wait: Option<Duration>,
    /// The time between publications of metrics. Must not be zero.
    pub metrics_interval: Option<Duration>,
    /// The metrics that are published.
    pub metrics: Option<MetricsTier>,
    /// `false` if the application publishes the `process_*` metrics itself.
    pub process_metrics: Option<bool>,
    /// The version of the service, for `lowtide_build_info`: 1 to 64 bytes without control
    /// characters.
    pub service_version: Option<String>,
    /// The policy for memory that no request owns and that leaves no room for requests.
    pub exhaustion_policy: Option<ExhaustionPolicy>,
    /// The absolute path of the flight recorder's file; `Some(None)` records nothing.
    pub flight_recorder: Option<Option<PathBuf>>,
    /// The absolute path of the folder for heap profiles; `Some(None)`: none are written.
    pub heap_profile_dir: Option<Option<PathBuf>>,
}
