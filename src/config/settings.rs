//! The table of settings: for each its type, default, variable, meaning and format.
//!
//! From it come the values that were set (`Settings`), those in force ([`Config`]), the
//! `LOWTIDE_*` variables, the setters of [`Builder`](crate::memory::Builder) and
//! [`Config::settings`]. A test compares the list in docs/DEPLOYING.md with it.
//!
//! Pure: it reads neither the environment nor the machine.
//!
//! Invariant: for every setting, `effective = environment, else code, else profile or default`.

use std::path::PathBuf;
use std::time::Duration;

use super::error::{ConfigError, Fault};
use super::profile::Profile;
use super::value::*;
use crate::bytes::ByteSize;
use crate::decay::DecayTime;
#[cfg(feature = "device")]
use crate::device::{Contents, SleepConfig, SleepOptions};
use crate::metrics::MetricsTier;
use lowtide_admission::{AdmissionMode, ExhaustionPolicy, K_START};

#[cfg(feature = "device")]
use super::device::{DEVICES, DeviceBackend, DeviceChoice};

lowtide_core::named_enum! {
    /// The source of a value.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    #[non_exhaustive]
    pub enum Source {
        /// A `LOWTIDE_*` variable.
        Environment = "environment",
        /// The program, through the builder.
        Code = "code",
        /// The profile.
        Profile = "profile",
        /// The default, which is the same under every profile.
        Default = "default",
    }
}

/// A value and its source.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
pub struct Resolved<T> {
    /// The value in force.
    pub value: T,
    /// The source of the value.
    pub source: Source,
}

fn spelled<T: Spelled>(resolved: &Resolved<T>) -> Resolved<String> {
    Resolved { value: resolved.value.spelled(), source: resolved.source }
}

/// A default that no profile changes.
const fn fixed<T>(value: T, _: Profile) -> Resolved<T> {
    Resolved { value, source: Source::Default }
}

/// A default for each profile, in the order of [`Profile::ALL`].
const fn by_profile<T: Copy>(values: [T; Profile::ALL.len()], profile: Profile) -> Resolved<T> {
    Resolved { value: values[profile as usize], source: Source::Profile }
}

fn pick<T: Clone>(environment: &Option<T>, code: &Option<T>, default: Resolved<T>) -> Resolved<T> {
    let of = |value: &Option<T>, source| Some(Resolved { value: value.clone()?, source });
    let picked = of(environment, Source::Environment).or_else(|| of(code, Source::Code));
    picked.unwrap_or(default)
}

/// Defines a setter, if the setting has one: of its type, or of what becomes its value.
macro_rules! setter {
    ([$($on:meta)?] [$(#[$doc:meta])*] [$setter:ident $value:ty] $kind:ty) => {
        $(#[$doc])*
        pub fn $setter(mut self, value: $value) -> Self {
            self.code.$setter = Some(Some(value.into()));
            self
        }
    };
    ([$($on:meta)?] [$(#[$doc:meta])*] [] $kind:ty) => {};
    ([$($on:meta)?] [$(#[$doc:meta])*] [$setter:ident] $kind:ty) => {
        $(#[$on])?
        $(#[$doc])*
        pub fn $setter(mut self, value: $kind) -> Self {
            self.code.$setter = Some(value);
            self
        }
    };
}
pub(crate) use setter;

macro_rules! settings {
    ($(
        $([$on:meta])? $(#[$doc:meta])*
        $name:ident $(as $setter:ident $(($value:ty))?)?: $kind:ty = $from:ident($default:expr),
        $variable:literal: $help:literal, $format:expr;
    )*) => {
        /// Settings as given in code or in the environment, each valid.
        #[derive(Clone, Debug, Default, PartialEq)]
        pub(crate) struct Settings {
            $($(#[$on])? pub(crate) $name: Option<$kind>,)*
        }

        impl Settings {
            /// Checks the bounds of the values: those set in code did not pass a parser.
            fn check(&self) -> Result<(), ConfigError> {
                let mut faults = Vec::new();
                $($(#[$on])? if let Some(value) = &self.$name {
                    if let Err(expected) = Format::<$kind>::check(&$format, value) {
                        faults.push(Fault::bad(stringify!($name), &value.spelled(), expected));
                    }
                })*
                ConfigError::check(faults)
            }

            /// Parses the text of a variable. An unknown variable changes nothing.
            ///
            /// # Errors
            /// The accepted values, as a phrase to follow the word "expected".
            pub(super) fn put(&mut self, variable: &str, text: &str) -> Result<(), &'static str> {
                match variable {
                    $($variable => {
                        $(#[$on])? {
                            self.$name = Some(Format::<$kind>::read(&$format, text)?);
                        }
                    })*
                    _ => {}
                }
                Ok(())
            }
        }

        /// The value in force for every setting.
        #[derive(Clone, Debug, PartialEq)]
        #[non_exhaustive]
        pub struct Config {
            $($(#[$on])? #[doc = $help] pub $name: Resolved<$kind>,)*
        }

        impl Config {
            /// Resolves every setting: the environment wins over code, code over the profile, and
            /// the profile over the default.
            ///
            /// # Errors
            /// [`ConfigError`] if code set a value that the setting does not accept.
            pub(crate) fn resolve(
                code: &Settings,
                environment: &Settings,
            ) -> Result<Self, ConfigError> {
                code.check()?;
                environment.check()?;
                let base = environment.profile.or(code.profile).unwrap_or_default();
                Ok(Self {
                    $($(#[$on])? $name: pick(
                        &environment.$name, &code.$name, $from($default, base)
                    ),)*
                })
            }

            /// Returns every setting: its variable, its value as the variable spells it (empty if
            /// it is unset) and the value's source.
            #[must_use]
            pub fn settings(&self) -> Vec<(&'static str, Resolved<String>)> {
                Vec::from([$($(#[$on])? ($variable, spelled(&self.$name))),*])
            }
        }

        /// Every variable that this crate reads. An empty value counts as unset. Those that begin
        /// with `LOWTIDE_DEVICE` need the feature `device`.
        pub const VARIABLES: &[&str] = &[$($variable),*];

        /// Defines the setters of `Builder`.
        macro_rules! setters {
            () => {
                $($crate::config::setter!([$($on)?] [$(#[$doc])*] [$($setter $($value)?)?] $kind);)*
            };
        }
        pub(crate) use setters;
    };
}

settings! {
    /// Sets the profile, which gives the defaults of other settings. Default: balanced.
    profile as profile: Profile = fixed(Profile::default()),
        "LOWTIDE_PROFILE": "low-memory, balanced or throughput: the defaults of the other settings",
        Format::of(str::parse);
    /// Sets the limit of host memory. Default: the cgroup's limit, or the machine's memory. A
    /// configured limit can lower that, but not raise it.
    memory_limit as memory_limit(ByteSize): Option<ByteSize> = fixed(None),
        "LOWTIDE_MEMORY_LIMIT": "limit of host memory, e.g. 512m (binary units, as in Docker) or \
        1.5GiB; unset: the limit of the cgroup or the machine",
        SIZE_IF_ANY;
    /// Sets the share of the limit up to which requests are admitted, in (0, 1]. By default it
    /// starts at 0.80 and rises to at most 0.93 while the measured growth allows it; a share
    /// that is set stays.
    // The highest value at which no run of the overload bench was killed.
    ceiling as ceiling: f64 = fixed(0.80),
        "LOWTIDE_CEILING": "share of the limit up to which requests are admitted: 0.8 or 80%; \
        above 0, at most 1; unset: 0.8, rising to 0.93 while measured growth allows it",
        RATIO;
    /// Sets the bytes that a request is assumed to need per estimated byte until that is
    /// measured, in [1, 5]. Default: 2, which is safe for estimates of half the true size. Set
    /// 1 if estimates are known to be exact; then nothing that fits is rejected in the first
    /// seconds.
    correction_factor as correction_factor: f64 = fixed(K_START),
        "LOWTIDE_CORRECTION_FACTOR": "memory that a request is assumed to need per estimated byte \
        until that is measured: 1 if estimates are exact, at most 5",
        FACTOR;
    /// Sets whether requests wait, are rejected and cancelled, or only what would happen to them is
    /// counted. Default: [`AdmissionMode::Enforce`]. [`Admission::set_mode`] and the admin command
    /// `admission` change it at run time.
    ///
    /// [`Admission::set_mode`]: crate::admission::Admission::set_mode
    admission_mode as admission_mode: AdmissionMode = fixed(AdmissionMode::Enforce),
        "LOWTIDE_ADMISSION": "enforce, or observe: admit every request, and count those that would \
        have waited or been rejected",
        Format::of(str::parse);
    [cfg(feature = "device")]
    devices: Vec<DeviceChoice> = fixed(vec![DeviceChoice::Auto]),
        "LOWTIDE_DEVICE": "auto, cuda, cuda:1 (a number), cuda:GPU-... or cuda:MIG-... (a UUID), \
        cuda:all, a list such as cuda:0,cuda:1 (the default device first), host or none: where \
        device arenas allocate",
        DEVICES;
    [cfg(feature = "device")]
    /// Sets the way in which CUDA memory is allocated. Default: the first that works.
    device_backend as device_backend: DeviceBackend = fixed(DeviceBackend::Auto),
        "LOWTIDE_DEVICE_BACKEND": "auto, virtual-memory, pool, plain or managed: how CUDA memory \
        is allocated",
        Format::of(str::parse);
    [cfg(feature = "device")]
    /// Sets the limit of device memory for each arena, and of the budget of each device.
    /// Default: none. The ceiling of a budget is this times [`Builder::ceiling`]; until the
    /// [correction factor](Builder::correction_factor) is measured, half of that can be
    /// reserved. Devices whose memory counts in the host's budget have no budget of their own.
    device_limit as device_limit: ByteSize = fixed(ByteSize::MAX),
        "LOWTIDE_DEVICE_LIMIT": "limit of device memory for each arena and for the budget of each \
        device, e.g. 8g; unset: no limit",
        SIZE;
    [cfg(feature = "device")]
    /// Sets the share of the device's memory, in [0, 1), to keep free for its other users.
    /// Default: 0.05; 0 for none. If less is free, idle memory of our arenas is released before
    /// its decay time, until one and a half times this share is free. Live memory is never
    /// released.
    // An estimate: 4 GiB of 80 GiB, which another process needs for its context and the workspace
    // of its first request. For a service that is alone on its device the cost is that at most
    // 7.5 % of the device never hold idle memory.
    device_watermark as device_watermark: f64 = fixed(0.05),
        "LOWTIDE_DEVICE_WATERMARK": "share of the device's memory to keep free for its other \
        users: 0.05, 5%, or 0 for none",
        SHARE;
    [cfg(feature = "device")]
    /// Sets the time after which idle device memory is released. Default: 1 s, 5 s or 30 s, by
    /// profile.
    // An estimate, not measured on a GPU: a shorter pause costs no driver call.
    device_decay as device_decay: DecayTime =
        by_profile([1_000, 5_000, 30_000].map(DecayTime::from_millis)),
        "LOWTIDE_DEVICE_DECAY": "time after which idle device memory is released: a time such as \
        5s, 0 or never",
        DECAY;
    [cfg(feature = "device")]
    /// Sets the time without a lease after which a device arena goes to sleep, `None` for
    /// never. Default: never. See [`DeviceArena::sleep`](crate::device::DeviceArena::sleep) for
    /// the requirements on the arena's users.
    device_sleep_after as device_sleep_after: Option<Duration> = fixed(None),
        "LOWTIDE_DEVICE_SLEEP_AFTER": "time without a lease after which a device arena goes to \
        sleep: a time such as 10m, or never",
        TIME_OR_NEVER;
    [cfg(feature = "device")]
    /// Sets the minimum time that a device arena stays awake after it was opened or woken.
    /// Default: 0.
    device_min_awake as device_min_awake: Duration = fixed(Duration::ZERO),
        "LOWTIDE_DEVICE_MIN_AWAKE": "minimum time that a device arena stays awake after it was \
        opened or woken: a time such as 1m, or 0",
        TIME_OR_ZERO;
    [cfg(feature = "device")]
    /// Sets the treatment of the stable region's contents when an idle arena goes to sleep.
    /// Default: keep.
    device_sleep_stable as device_sleep_stable: Contents = fixed(Contents::default()),
        "LOWTIDE_DEVICE_SLEEP_STABLE": "keep (in host memory), discard or stay (in device memory): \
        contents of stable regions in a sleep",
        Format::of(str::parse);
    [cfg(feature = "device")]
    /// Sets the treatment of the dynamic region's contents when an idle arena goes to sleep.
    /// Default: keep.
    device_sleep_dynamic as device_sleep_dynamic: Contents = fixed(Contents::default()),
        "LOWTIDE_DEVICE_SLEEP_DYNAMIC": "keep (in host memory), discard or stay (in device \
        memory): contents of dynamic regions in a sleep",
        Format::of(str::parse);
    /// Sets the time for which jemalloc keeps dirty pages. Default: 1 s, 1 s or 10 s, by
    /// profile.
    // One second costs nothing measurable against ten and returns memory ten times as fast; zero
    // would cost 5 to 8 times the CPU.
    heap_decay as heap_decay: DecayTime =
        by_profile([1_000, 1_000, 10_000].map(DecayTime::from_millis)),
        "LOWTIDE_HEAP_DECAY": "time for which jemalloc keeps dirty pages: a time such as 1s, 0 or \
        never",
        DECAY;
    /// Sets the maximum number of jemalloc's background threads, 0 for none. Default: 1, 2 or
    /// 4, by profile.
    // An estimate: two suffice for the default arenas.
    background_threads as background_threads: u32 = by_profile([1, 2, 4]),
        "LOWTIDE_BACKGROUND_THREADS": "maximum number of jemalloc's background threads; 0 for none",
        WHOLE;
    /// Sets the time between heap purges of a busy service. With `None` neither time nor growth
    /// starts a purge; pressure, idleness, loads and unloads still do. Default: 10 s, 30 s or
    /// `None`, by profile.
    purge_interval as purge_interval: Option<Duration> =
        by_profile([Some(10), Some(30), None].map(|time| time.map(Duration::from_secs))),
        "LOWTIDE_PURGE_INTERVAL": "time between purges of the heap of a busy service: a time such \
        as 30s, or never",
        TIME_OR_NEVER;
    /// Sets the idle time after which resources without their own setting are unloaded;
    /// [`Duration::MAX`](Duration::MAX) for never. Default: 60 s, 300 s or 900 s, by profile.
    idle_unload as idle_unload: Duration = by_profile([60, 300, 900].map(Duration::from_secs)),
        "LOWTIDE_IDLE_UNLOAD": "idle time after which a resource without its own setting is \
        unloaded: a time such as 5m, or never",
        TIME_OR_MAX;
    /// Sets the longest time that a request waits for room behind a layer of
    /// `Memory::layer` without its own setting; zero to reject immediately. Default: 2 s.
    max_wait as max_wait: Duration = fixed(Config::MAX_WAIT),
        "LOWTIDE_MAX_WAIT": "longest time that a request waits for room behind a layer without its \
        own setting: a time such as 2s, or 0",
        TIME_OR_ZERO;
    /// Sets the time between publications of metrics. Default: 1 s.
    metrics_interval as metrics_interval: Duration = fixed(Duration::from_secs(1)),
        "LOWTIDE_METRICS_INTERVAL": "time between publications of metrics, e.g. 1s",
        TIME;
    /// Sets which metrics are published. Default: [`MetricsTier::Basic`], those that alerts and
    /// the main dashboards need.
    metrics as metrics: MetricsTier = fixed(MetricsTier::Basic),
        "LOWTIDE_METRICS": "basic or detail: the metrics that are published",
        Format::of(str::parse);
    /// Sets whether the standard `process_*` metrics are published. Default: `true`. Set
    /// `false` if the application publishes them itself, for example through the crate
    /// `metrics-process`.
    process_metrics as process_metrics: bool = fixed(true),
        "LOWTIDE_PROCESS_METRICS": "on or off: whether the process_* metrics are published; off if \
        the application does",
        ON_OR_OFF;
    /// Sets the version of the service, 1 to 64 bytes without control characters: the label
    /// `service_version` of `lowtide_build_info`, by which dashboards mark deployments. Default:
    /// `unknown`.
    ///
    /// ```
    /// let memory = lowtide::Memory::builder().service_version(env!("CARGO_PKG_VERSION"));
    /// ```
    service_version as service_version(impl Into<String>): Option<String> = fixed(None),
        "LOWTIDE_SERVICE_VERSION": "version of the service, a label of its metrics: 1 to 64 bytes \
        without control characters",
        VERSION;
    /// Sets the policy for memory that no request owns and that leaves no room for requests,
    /// such as a leak. Default: [`ExhaustionPolicy::Report`]. The others need a supervisor
    /// that restarts the process.
    exhaustion_policy as exhaustion_policy: ExhaustionPolicy = fixed(ExhaustionPolicy::Report),
        "LOWTIDE_EXHAUSTION_POLICY": "report, serve-one or exit: what follows if memory that no \
        request owns leaves no room for requests; serve-one:5m with a grace period, exit:1m with a \
        minimum uptime",
        POLICY;
    /// Records the last five minutes in this file, which survives a kill: samples, events, the
    /// largest requests. The next start with the same path logs why this run ended, and
    /// [`MemoryReport::last_exit`](crate::memory::MemoryReport::last_exit) and `/memory?with=last_exit`
    /// have the recording. Default: nothing is recorded.
    ///
    /// The path must be absolute, and the file must be local and of its own for each process. It
    /// takes 512 KiB, which are allocated at the start; a thread of its own writes it, once a
    /// second and when memory moves fast. If it cannot be created, allocated or locked, or if the
    /// path is that of something else, nothing is recorded and a diagnostic has the cause. After a
    /// fork, the child holds the lock too until it ends or calls `exec`.
    flight_recorder as flight_recorder(impl Into<PathBuf>): Option<PathBuf> = fixed(None),
        "LOWTIDE_FLIGHT_RECORDER": "absolute path of a file of 512 KiB that keeps the last five \
        minutes for the next start, or off",
        PATH;
    /// Writes heap profiles to this folder when the service has settled, when memory grows, and
    /// near the limit, if the heap profiler is active (feature `profiling`, `global_allocator!`
    /// with `prof: true`). The path must be absolute, and a folder belongs to one instance. At most
    /// 8 files of a run are kept, of some KiB to some 100 KiB each. Default: none are written.
    heap_profile_dir as heap_profile_dir(impl Into<PathBuf>): Option<PathBuf> = fixed(None),
        "LOWTIDE_HEAP_PROFILE_DIR": "absolute path of a folder for heap profiles, written as \
        memory grows if the heap profiler is active, or off",
        PATH;
    /// Sets the folder to which requests spill: while memory is short, one that holds far more than
    /// its claim goes on in a file there until the end of its poll. Without a folder, a poll that
    /// needs more than the limit ends the process. The path must be absolute, and on a disk.
    /// Default: nothing is spilled.
    ///
    /// The file is readable by the process alone, has no name, and takes space only while it is
    /// used. 64 MiB of the disk stay free. Needs `Heap` as the global allocator. A failed write to
    /// the disk ends the process. A forked child that does not call `exec` must not use what was
    /// spilled before the fork.
    spill_dir as spill_dir(impl Into<PathBuf>): Option<PathBuf> = fixed(None),
        "LOWTIDE_SPILL_DIR": "absolute path of a folder on a disk to which requests spill that \
        outgrow their claims while memory is short, or off",
        PATH;
    /// Sets the maximum size of the file to which requests spill, at least 128 MiB. Default: 4 GiB.
    // An estimate: four times the memory of most containers that need it.
    spill_max as spill_max: ByteSize = fixed(ByteSize::gib(4)),
        "LOWTIDE_SPILL_MAX": "the most that requests spill to disk together, e.g. 4g",
        SPILL_SIZE;
}

impl Config {
    /// The default of the longest time that a request waits for room. An estimate: longer than
    /// bursts that a service can serve, and shorter than the timeouts of most clients.
    pub const MAX_WAIT: Duration = Duration::from_secs(2);

    /// Returns the growth of retained heap memory that triggers a purge, from the profile. `None`
    /// for never, which also holds if `purge_interval` is `None`. The amounts are estimates. The
    /// growth must last for twice the decay time, in which dirty pages are purged without it.
    pub(crate) fn purge_growth(&self) -> Option<(ByteSize, f64)> {
        self.purge_interval.value?;
        match self.profile.value {
            Profile::LowMemory => Some((ByteSize::mib(16), 0.05)),
            Profile::Balanced => Some((ByteSize::mib(64), 0.10)),
            Profile::Throughput => None,
        }
    }
}

#[cfg(feature = "device")]
impl Config {
    /// Returns the sleep configuration of arenas.
    #[must_use]
    pub fn device_sleep(&self) -> SleepConfig {
        let options = SleepOptions {
            stable: self.device_sleep_stable.value,
            dynamic: self.device_sleep_dynamic.value,
            ..SleepOptions::default()
        };
        SleepConfig {
            idle_after: self.device_sleep_after.value,
            min_awake: self.device_min_awake.value,
            options,
            ..SleepConfig::default()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    #[test]
    fn environment_wins_over_code_and_code_over_the_profile() {
        let code = Settings {
            profile: Some(Profile::Throughput),
            ceiling: Some(0.5),
            background_threads: Some(7),
            ..Settings::default()
        };
        let environment = Settings { ceiling: Some(0.6), ..Settings::default() };
        let config = Config::resolve(&code, &environment).expect("valid");
        assert_eq!(config.ceiling, Resolved { value: 0.6, source: Source::Environment });
        assert_eq!(config.background_threads, Resolved { value: 7, source: Source::Code });
        let decay = Resolved { value: DecayTime::from_millis(10_000), source: Source::Profile };
        assert_eq!(config.heap_decay, decay);
        assert_eq!(config.profile.source, Source::Code);
        let nobody = Config::resolve(&Settings::default(), &Settings::default()).expect("valid");
        let sources = [nobody.profile.source, nobody.ceiling.source, nobody.memory_limit.source];
        assert_eq!(sources, [Source::Default; 3], "no profile sets them");
        let sources = [nobody.devices.source, nobody.device_limit.source];
        assert_eq!(sources, [Source::Default; 2], "nor these");
        assert_eq!(nobody.metrics_interval.source, Source::Default);
        assert_eq!(nobody.max_wait, Resolved { value: 2 * SECOND, source: Source::Default });
        let policy = Resolved { value: ExhaustionPolicy::Report, source: Source::Default };
        assert_eq!(nobody.exhaustion_policy, policy);
        assert_eq!(
            (nobody.heap_decay.source, nobody.idle_unload.source.to_string()),
            (Source::Profile, "profile".to_owned())
        );
    }

    #[test]
    fn values_from_code_are_checked_too() {
        let code = Settings {
            ceiling: Some(f64::NAN),
            correction_factor: Some(0.9),
            memory_limit: Some(Some(ByteSize::ZERO)),
            idle_unload: Some(Duration::ZERO),
            flight_recorder: Some(Some("recording".into())),
            device_watermark: Some(1.0),
            device_sleep_after: Some(Some(Duration::ZERO)),
            ..Settings::default()
        };
        let error = Config::resolve(&code, &Settings::default()).expect_err("seven faults");
        assert_eq!(error.faults.len(), 7, "{error}");
    }

    #[test]
    fn a_busy_service_that_is_purged_only_under_pressure_is_not_purged_for_growth() {
        let of = |profile, purge_interval| {
            let code = Settings { profile: Some(profile), purge_interval, ..Settings::default() };
            Config::resolve(&code, &Settings::default()).expect("valid").purge_growth()
        };
        for profile in [Profile::LowMemory, Profile::Balanced] {
            assert!(of(profile, None).is_some(), "{profile}");
            assert_eq!(of(profile, Some(None)), None, "{profile}");
        }
        assert_eq!(of(Profile::Throughput, Some(Some(SECOND))), None);
    }

    #[test]
    fn no_profile_decays_at_once() {
        for profile in Profile::ALL {
            assert_ne!(default_of(profile).heap_decay.value, DecayTime::AtOnce, "{profile}");
        }
    }

    fn default_of(profile: Profile) -> Config {
        let code = Settings { profile: Some(profile), ..Settings::default() };
        Config::resolve(&code, &Settings::default()).expect("valid")
    }

    #[test]
    fn a_value_that_is_read_back_means_the_same_in_the_environment() {
        for profile in Profile::ALL {
            let (config, mut again) = (default_of(profile), Settings::default());
            for (variable, (name, shown)) in VARIABLES.iter().zip(config.settings()) {
                assert_eq!(*variable, name);
                if !shown.value.is_empty() {
                    again.put(name, &shown.value).expect(name);
                }
            }
            let again = Config::resolve(&Settings::default(), &again).expect("valid");
            let values = |config: Config| config.settings().into_iter().map(|(_, it)| it.value);
            assert!(values(config).eq(values(again)), "{profile}");
        }
    }

    #[test]
    fn the_guide_lists_each_variable_with_its_defaults() {
        let guide = include_str!("../../docs/DEPLOYING.md");
        for (nth, profile) in Profile::ALL.into_iter().enumerate() {
            for (name, shown) in default_of(profile).settings() {
                let quoted = format!("`{name}`");
                let items =
                    guide.lines().filter_map(|line| line.strip_prefix("- ")?.split_once(" ("));
                let item = items
                    .into_iter()
                    .find(|(names, _)| names.split(", ").any(|other| other == quoted));
                let (_, defaults) = item.unwrap_or_else(|| panic!("{name} is missing"));
                let defaults = defaults.split([')', ';']).next().unwrap_or_default();
                // One for all profiles, or one for each.
                let each: Vec<_> = defaults.split(", ").map(|it| it.trim_matches('`')).collect();
                let told = if each.len() == 3 { each[nth] } else { each[0] };
                let is_right = match (told.parse::<f64>(), shown.value.parse::<f64>()) {
                    (Ok(told), Ok(value)) => told.to_bits() == value.to_bits(),
                    _ => told == shown.value,
                };
                let is_said = !matches!(&*shown.value, "" | "off") && name != "LOWTIDE_PROFILE";
                assert!(is_right || !is_said, "{name}, {profile}: {told}: {}", shown.value);
            }
        }
    }
}
