//! Resolves settings to a [`Config`]: a value for every setting, with its source.
//!
//! Pure: it reads neither the environment nor the machine.

use std::path::PathBuf;
use std::time::Duration;

use super::error::{ConfigError, Fault};
use super::parse::{ABSOLUTE_PATH, VERSION_EXPECTED, is_version};
use super::profile::Profile;
use super::resolved::{Resolved, pick, pick_or};
use super::settings::Settings;
use crate::bytes::ByteSize;
use crate::decay::DecayTime;
use crate::metrics::MetricsTier;
use lowtide_admission::ledger::{K_MAX, K_MIN, K_START};
use lowtide_admission::{ExhaustionPolicy, PurgeGrowth};

/// The value in force for every setting.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Config {
    /// The profile, which gives the defaults of other settings.
    pub profile: Resolved<Profile>,
    /// The explicit limit of host memory; `None` for the limit of the cgroup or the machine.
    pub memory_limit: Resolved<Option<ByteSize>>,
    /// The share of the limit up to which requests are admitted; the default one can rise.
    pub ceiling: Resolved<f64>,
    /// Bytes that a request is assumed to need per estimated byte, until that is measured.
    pub correction_factor: Resolved<f64>,
    /// The values in force for device arenas.
    #[cfg(feature = "device")]
    pub device: super::DeviceConfig,
    /// The time for which jemalloc keeps dirty pages.
    pub heap_decay: Resolved<DecayTime>,
    /// The maximum number of jemalloc's background threads.
    pub background_threads: Resolved<u32>,
    /// The time that a service must be quiet before its heap is purged; `None`: not purged for
    /// being quiet.
    pub purge_when_idle_for: Option<Duration>,
    /// The time between heap purges of a busy service; `None` purges only under pressure.
    pub purge_interval: Resolved<Option<Duration>>,
    /// The growth of retained heap memory that triggers a purge, from the profile. `None` for
    /// never, which also holds if `purge_interval` is `None`.
    pub purge_growth: Option<PurgeGrowth>,
    /// The idle time of resources without their own setting; [`Duration::MAX`] for never.
    pub idle_unload: Resolved<Duration>,
    /// The longest time that a request waits for room behind a layer without its own setting.
    pub max_wait: Resolved<Duration>,
    /// The time between publications of metrics.
    pub metrics_interval: Resolved<Duration>,
    /// The metrics that are published.
    pub metrics: Resolved<MetricsTier>,
    /// `false` if the application publishes the `process_*` metrics itself.
    pub process_metrics: Resolved<bool>,
    /// The version of the service, for `lowtide_build_info`.
    pub service_version: Resolved<Option<String>>,
    /// The policy for memory that no request owns and that leaves no room for requests.
    pub exhaustion_policy: Resolved<ExhaustionPolicy>,
    /// The absolute path of the flight recorder's file; `None` records nothing.
    pub flight_recorder: Resolved<Option<PathBuf>>,
    /// The folder for heap profiles; `None`: none are written.
    pub heap_profile_dir: Resolved<Option<PathBuf>>,
}

impl Config {
    /// The default share of the limit up to which requests are admitted at first: the highest value
    /// at which no run of the overload bench was killed.
    pub const CEILING: f64 = 0.80;
    /// The default of the longest time that a request waits for room. An estimate: longer than
    /// bursts that a service can serve, and shorter than the timeouts of most clients.
    pub const MAX_WAIT: Duration = Duration::from_secs(2);
    /// The default time between publications of metrics.
    pub const METRICS_INTERVAL: Duration = Duration::from_secs(1);

    /// Resolves every setting: the environment wins over code, code over the profile, and the
    /// profile over the default.
    ///
    /// # Errors
    /// [`ConfigError`] if code set a value that the setting does not accept.
    pub fn resolve(code: &Settings, environment: &Settings) -> Result<Self, ConfigError> {
        check(code)?;
        check(environment)?;
        let profile = pick_or(environment.profile, code.profile, Profile::default());
        let base = profile.value;
        let purge_interval =
            pick(environment.purge_interval, code.purge_interval, base.purge_interval());
        Ok(Self {
            profile,
            memory_limit: pick_or(
                environment.memory_limit.map(Some),
                code.memory_limit.map(Some),
                None,
            ),
            ceiling: pick_or(environment.ceiling, code.ceiling, Self::CEILING),
            correction_factor: pick_or(
                environment.correction_factor,
                code.correction_factor,
                K_START,
            ),
            #[cfg(feature = "device")]
            device: super::DeviceConfig::resolve(&code.device, &environment.device, base),
            heap_decay: pick(environment.heap_decay, code.heap_decay, base.heap_decay()),
            background_threads: pick(
                environment.background_threads,
                code.background_threads,
                base.background_threads(),
            ),
            purge_when_idle_for: base.purge_when_idle_for(),
            purge_interval,
            purge_growth: base.purge_growth().filter(|_| purge_interval.value.is_some()),
            idle_unload: pick(environment.idle_unload, code.idle_unload, base.idle_unload()),
            max_wait: pick_or(environment.max_wait, code.max_wait, Self::MAX_WAIT),
            metrics_interval: pick_or(
                environment.metrics_interval,
                code.metrics_interval,
                Self::METRICS_INTERVAL,
            ),
            metrics: pick_or(environment.metrics, code.metrics, MetricsTier::Basic),
            process_metrics: pick_or(environment.process_metrics, code.process_metrics, true),
            service_version: pick_or(
                environment.service_version.clone().map(Some),
                code.service_version.clone().map(Some),
                None,
            ),
            exhaustion_policy: pick_or(
                environment.exhaustion_policy,
                code.exhaustion_policy,
                ExhaustionPolicy::Report,
            ),
            flight_recorder: pick_or(
                environment.flight_recorder.clone(),
                code.flight_recorder.clone(),
                None,
            ),
            heap_profile_dir: pick_or(
                environment.heap_profile_dir.clone(),
                code.heap_profile_dir.clone(),
                None,
            ),
        })
    }
}

/// Validates the values: those set in code did not pass a parser.
fn check(settings: &Settings) -> Result<(), ConfigError> {
    let mut faults = Vec::new();
    let mut demand = |holds: bool, name: &str, value: String, expected: &str| {
        if !holds {
            let (name, expected) = (name.to_owned(), expected.to_owned());
            faults.push(Fault::BadValue { name, value, expected });
        }
    };
    if let Some(ceiling) = settings.ceiling {
        let holds = ceiling > 0.0 && ceiling <= 1.0;
        demand(holds, "ceiling", ceiling.to_string(), "a number in (0, 1]");
    }
    if let Some(correction_factor) = settings.correction_factor {
        let holds = (K_MIN..=K_MAX).contains(&correction_factor);
        demand(holds, "correction_factor", correction_factor.to_string(), "a number in [1, 5]");
    }
    if let Some(size) = settings.memory_limit {
        demand(!size.is_zero(), "memory_limit", size.exact(), "an amount of memory above zero");
    }
    for (name, time) in [
        ("idle_unload", settings.idle_unload),
        ("metrics_interval", settings.metrics_interval),
        ("purge_interval", settings.purge_interval.flatten()),
    ] {
        if let Some(time) = time {
            demand(!time.is_zero(), name, format!("{time:?}"), "a time above zero");
        }
    }
    if let Some(version) = &settings.service_version {
        demand(is_version(version), "service_version", version.clone(), VERSION_EXPECTED);
    }
    for (name, path) in [
        ("flight_recorder", &settings.flight_recorder),
        ("heap_profile_dir", &settings.heap_profile_dir),
    ] {
        let Some(Some(path)) = path else { continue };
        demand(path.is_absolute(), name, path.display().to_string(), ABSOLUTE_PATH);
    }
    #[cfg(feature = "device")]
    settings.device.check(&mut demand);
    if faults.is_empty() { Ok(()) } else { Err(ConfigError { faults }) }
}

#[cfg(test)]
mod tests {
    use super::super::resolved::Source;
    use super::*;
    use crate::config::DeviceSettings;

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
        let sources = [nobody.device.choice.source, nobody.device.limit.source];
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
            memory_limit: Some(ByteSize::ZERO),
            idle_unload: Some(Duration::ZERO),
            flight_recorder: Some(Some("recording".into())),
            device: DeviceSettings {
                watermark: Some(1.0),
                sleep_after: Some(Some(Duration::ZERO)),
                ..DeviceSettings::default()
            },
            ..Settings::default()
        };
        let error = Config::resolve(&code, &Settings::default()).expect_err("seven faults");
        assert_eq!(error.faults.len(), 7, "{error}");
    }

    #[test]
    fn a_busy_service_that_is_purged_only_under_pressure_is_not_purged_for_growth() {
        let of = |profile, purge_interval| {
            let code = Settings { profile: Some(profile), purge_interval, ..Settings::default() };
            Config::resolve(&code, &Settings::default()).expect("valid").purge_growth
        };
        for profile in [Profile::LowMemory, Profile::Balanced] {
            assert!(of(profile, None).is_some(), "{profile}");
            assert_eq!(of(profile, Some(None)), None, "{profile}");
        }
        assert_eq!(of(Profile::Throughput, Some(Some(Duration::from_secs(1)))), None);
    }

    #[test]
    fn no_profile_decays_at_once() {
        for profile in Profile::ALL {
            let code = Settings { profile: Some(profile), ..Settings::default() };
            let config = Config::resolve(&code, &Settings::default()).expect("valid");
            assert_ne!(config.heap_decay.value, DecayTime::AtOnce, "{profile}");
        }
    }
}
