//! The `LOWTIDE_*` environment variables. No other module of the crate reads the environment.
//!
//! Values are validated as they are read. An unknown `LOWTIDE_*` variable is an error, because a
//! misspelt limit must not be ignored silently. The variables that Kubernetes injects for a service
//! named `lowtide` are recognized by their shape and skipped. A known variable with an empty value
//! counts as unset, as Compose and Helm produce it from a template with a missing value. In a build
//! without the feature `device`, the variables of arenas are not validated and set nothing; the
//! start of a `Memory` names them in a diagnostic.
//!
//! Invariant: every other variable sets exactly one setting, is empty, is a service link, or is a
//! fault.

use std::ffi::OsString;
use std::time::Duration;

use super::device::variables as device;
use super::error::{ConfigError, Fault};
use super::parse::{
    correction_factor, decay_time, exhaustion_policy, on_or_off, path_or_off, positive, put, ratio,
    time, time_or_never, time_or_zero, version, whole,
};
use super::settings::Settings;

/// The prefix of the variables' names.
pub const PREFIX: &str = "LOWTIDE_";

/// The first variable of device arenas, and the beginning of the others.
const DEVICE: &str = "LOWTIDE_DEVICE";

/// Parses a text into the settings, or returns the description of the accepted values.
type Put = fn(&mut Settings, &str) -> Result<(), String>;

/// An environment variable.
#[derive(Clone, Copy, Debug)]
pub struct Variable {
    /// The full name.
    pub name: &'static str,
    /// Its accepted values and meaning, in one line.
    pub help: &'static str,
    put: Put,
}

/// Every variable that this crate reads. An empty value counts as unset. Those that begin with
/// `LOWTIDE_DEVICE` need the feature `device`.
///
/// * `LOWTIDE_PROFILE`: low-memory, balanced or throughput: the defaults of the other settings
/// * `LOWTIDE_MEMORY_LIMIT`: limit of host memory, e.g. 512m (binary units, as in Docker) or
///   1.5GiB; unset: the limit of the cgroup or the machine
/// * `LOWTIDE_CEILING`: share of the limit up to which requests are admitted: 0.8 or 80%; above 0,
///   at most 1; unset: 0.8, rising to 0.93 while measured growth allows it
/// * `LOWTIDE_CORRECTION_FACTOR`: memory that a request is assumed to need per estimated byte until
///   that is measured: 1 if estimates are exact, at most 5
/// * `LOWTIDE_DEVICE`: auto, cuda, cuda:1 (a number), cuda:GPU-... or cuda:MIG-... (a UUID),
///   cuda:all, a list such as cuda:0,cuda:1 (the default device first), host or none: where device
///   arenas allocate
/// * `LOWTIDE_DEVICE_BACKEND`: auto, virtual-memory, pool, plain or managed: how CUDA memory is
///   allocated
/// * `LOWTIDE_DEVICE_LIMIT`: limit of device memory for each arena and for the budget of each
///   device, e.g. 8g; unset: no limit
/// * `LOWTIDE_DEVICE_WATERMARK`: share of the device's memory to keep free for its other users:
///   0.05, 5%, or 0 for none
/// * `LOWTIDE_DEVICE_DECAY`: time after which idle device memory is released: a time such as 5s, 0
///   or never
/// * `LOWTIDE_DEVICE_SLEEP_AFTER`: time without a lease after which a device arena goes to sleep: a
///   time such as 10m, or never
/// * `LOWTIDE_DEVICE_MIN_AWAKE`: minimum time that a device arena stays awake after it was opened
///   or woken: a time such as 1m, or 0
/// * `LOWTIDE_DEVICE_SLEEP_STABLE`: keep (in host memory), discard or stay (in device memory):
///   contents of stable regions in a sleep
/// * `LOWTIDE_DEVICE_SLEEP_DYNAMIC`: keep (in host memory), discard or stay (in device memory):
///   contents of dynamic regions in a sleep
/// * `LOWTIDE_HEAP_DECAY`: time for which jemalloc keeps dirty pages: a time such as 1s, 0 or never
/// * `LOWTIDE_BACKGROUND_THREADS`: maximum number of jemalloc's background threads; 0 for none
/// * `LOWTIDE_PURGE_INTERVAL`: time between purges of the heap of a busy service: a time such as
///   30s, or never
/// * `LOWTIDE_IDLE_UNLOAD`: idle time after which a resource without its own setting is unloaded: a
///   time such as 5m, or never
/// * `LOWTIDE_MAX_WAIT`: longest time that a request waits for room behind a layer without its own
///   setting: a time such as 2s, or 0
/// * `LOWTIDE_METRICS_INTERVAL`: time between publications of metrics, e.g. 1s
/// * `LOWTIDE_METRICS`: basic or detail: the metrics that are published
/// * `LOWTIDE_PROCESS_METRICS`: on or off: whether the process_* metrics are published; off if the
///   application does
/// * `LOWTIDE_SERVICE_VERSION`: version of the service, a label of its metrics: 1 to 64 bytes
///   without control characters
/// * `LOWTIDE_EXHAUSTION_POLICY`: report, serve-one or exit: what follows if memory that no request
///   owns leaves no room for requests; serve-one:5m with a grace period, exit:1m with a minimum
///   uptime
/// * `LOWTIDE_FLIGHT_RECORDER`: absolute path of a file of 512 KiB that keeps the last five minutes
///   for the next start, or off
/// * `LOWTIDE_HEAP_PROFILE_DIR`: absolute path of a folder for heap profiles, written as memory
///   grows if the heap profiler is active, or off
pub const VARIABLES: &[Variable] = &[
    Variable {
        name: "LOWTIDE_PROFILE",
        help: "low-memory, balanced or throughput: the defaults of the other settings",
        put: |settings, text| put(&mut settings.profile, text.parse()),
    },
    Variable {
        name: "LOWTIDE_MEMORY_LIMIT",
        help: "limit of host memory, e.g. 512m (binary units, as in Docker) or 1.5GiB; unset: the \
               limit of the cgroup or the machine",
        put: |settings, text| put(&mut settings.memory_limit, positive(text)),
    },
    Variable {
        name: "LOWTIDE_CEILING",
        help: "share of the limit up to which requests are admitted: 0.8 or 80%; above 0, at most \
               1; unset: 0.8, rising to 0.93 while measured growth allows it",
        put: |settings, text| put(&mut settings.ceiling, ratio(text)),
    },
    Variable {
        name: "LOWTIDE_CORRECTION_FACTOR",
        help: "memory that a request is assumed to need per estimated byte until that is measured: \
               1 if estimates are exact, at most 5",
        put: |settings, text| put(&mut settings.correction_factor, correction_factor(text)),
    },
    Variable {
        name: "LOWTIDE_DEVICE",
        help: "auto, cuda, cuda:1 (a number), cuda:GPU-... or cuda:MIG-... (a UUID), cuda:all, a \
               list such as cuda:0,cuda:1 (the default device first), host or none: where device \
               arenas allocate",
        put: device::choice,
    },
    Variable {
        name: "LOWTIDE_DEVICE_BACKEND",
        help: "auto, virtual-memory, pool, plain or managed: how CUDA memory is allocated",
        put: device::backend,
    },
    Variable {
        name: "LOWTIDE_DEVICE_LIMIT",
        help: "limit of device memory for each arena and for the budget of each device, e.g. 8g; \
               unset: no limit",
        put: device::limit,
    },
    Variable {
        name: "LOWTIDE_DEVICE_WATERMARK",
        help: "share of the device's memory to keep free for its other users: 0.05, 5%, or 0 for \
               none",
        put: device::watermark,
    },
    Variable {
        name: "LOWTIDE_DEVICE_DECAY",
        help: "time after which idle device memory is released: a time such as 5s, 0 or never",
        put: device::decay,
    },
    Variable {
        name: "LOWTIDE_DEVICE_SLEEP_AFTER",
        help: "time without a lease after which a device arena goes to sleep: a time such as 10m, \
               or never",
        put: device::sleep_after,
    },
    Variable {
        name: "LOWTIDE_DEVICE_MIN_AWAKE",
        help: "minimum time that a device arena stays awake after it was opened or woken: a time \
               such as 1m, or 0",
        put: device::min_awake,
    },
    Variable {
        name: "LOWTIDE_DEVICE_SLEEP_STABLE",
        help: "keep (in host memory), discard or stay (in device memory): contents of stable \
               regions in a sleep",
        put: device::sleep_stable,
    },
    Variable {
        name: "LOWTIDE_DEVICE_SLEEP_DYNAMIC",
        help: "keep (in host memory), discard or stay (in device memory): contents of dynamic \
               regions in a sleep",
        put: device::sleep_dynamic,
    },
    Variable {
        name: "LOWTIDE_HEAP_DECAY",
        help: "time for which jemalloc keeps dirty pages: a time such as 1s, 0 or never",
        put: |settings, text| put(&mut settings.heap_decay, decay_time(text)),
    },
    Variable {
        name: "LOWTIDE_BACKGROUND_THREADS",
        help: "maximum number of jemalloc's background threads; 0 for none",
        put: |settings, text| put(&mut settings.background_threads, whole(text)),
    },
    Variable {
        name: "LOWTIDE_PURGE_INTERVAL",
        help: "time between purges of the heap of a busy service: a time such as 30s, or never",
        put: |settings, text| put(&mut settings.purge_interval, time_or_never(text)),
    },
    Variable {
        name: "LOWTIDE_IDLE_UNLOAD",
        help: "idle time after which a resource without its own setting is unloaded: a time such \
               as 5m, or never",
        put: |settings, text| {
            let time = time_or_never(text).map(|time| time.unwrap_or(Duration::MAX));
            put(&mut settings.idle_unload, time)
        },
    },
    Variable {
        name: "LOWTIDE_MAX_WAIT",
        help: "longest time that a request waits for room behind a layer without its own setting: \
               a time such as 2s, or 0",
        put: |settings, text| put(&mut settings.max_wait, time_or_zero(text)),
    },
    Variable {
        name: "LOWTIDE_METRICS_INTERVAL",
        help: "time between publications of metrics, e.g. 1s",
        put: |settings, text| put(&mut settings.metrics_interval, time(text)),
    },
    Variable {
        name: "LOWTIDE_METRICS",
        help: "basic or detail: the metrics that are published",
        put: |settings, text| put(&mut settings.metrics, text.parse()),
    },
    Variable {
        name: "LOWTIDE_PROCESS_METRICS",
        help: "on or off: whether the process_* metrics are published; off if the application does",
        put: |settings, text| put(&mut settings.process_metrics, on_or_off(text)),
    },
    Variable {
        name: "LOWTIDE_SERVICE_VERSION",
        help: "version of the service, a label of its metrics: 1 to 64 bytes without control \
               characters",
        put: |settings, text| put(&mut settings.service_version, version(text)),
    },
    Variable {
        name: "LOWTIDE_EXHAUSTION_POLICY",
        help: "report, serve-one or exit: what follows if memory that no request owns leaves no \
               room for requests; serve-one:5m with a grace period, exit:1m with a minimum uptime",
        put: |settings, text| put(&mut settings.exhaustion_policy, exhaustion_policy(text)),
    },
    Variable {
        name: "LOWTIDE_FLIGHT_RECORDER",
        help: "absolute path of a file of 512 KiB that keeps the last five minutes for the next \
               start, or off",
        put: |settings, text| put(&mut settings.flight_recorder, path_or_off(text)),
    },
    Variable {
        name: "LOWTIDE_HEAP_PROFILE_DIR",
        help: "absolute path of a folder for heap profiles, written as memory grows if the heap \
               profiler is active, or off",
        put: |settings, text| put(&mut settings.heap_profile_dir, path_or_off(text)),
    },
];

/// Reads the environment of the process.
///
/// # Errors
/// [`ConfigError`] with every unknown variable and every invalid value, each with the accepted
/// values.
#[expect(clippy::disallowed_methods, reason = "this is the one reader of the environment")]
pub fn read() -> Result<Settings, ConfigError> {
    settings(std::env::vars_os())
}

/// Returns the variables of device arenas that are set, which a build without the feature `device`
/// does not have.
#[expect(clippy::disallowed_methods, reason = "this is the one reader of the environment")]
pub(crate) fn of_devices() -> Vec<&'static str> {
    let is_set = |name: &&str| std::env::var_os(name).is_some_and(|value| !value.is_empty());
    let names = VARIABLES.iter().map(|variable| variable.name);
    names.filter(|name| name.starts_with(DEVICE)).filter(is_set).collect()
}

/// Returns a variable of another program, such as jemalloc. Invalid UTF-8 is replaced.
#[expect(clippy::disallowed_methods, reason = "this is the one reader of the environment")]
pub(crate) fn of_others(name: &str) -> Option<String> {
    std::env::var_os(name).map(|text| text.to_string_lossy().into_owned())
}

/// Parses the given variables. Those without the prefix `LOWTIDE_` are ignored.
///
/// # Errors
/// The same as for [`read`].
pub fn settings(
    variables: impl IntoIterator<Item = (OsString, OsString)>,
) -> Result<Settings, ConfigError> {
    let mut settings = Settings::default();
    let mut faults = Vec::new();
    for (name, value) in variables {
        let Some(name) = name.to_str().filter(|name| name.starts_with(PREFIX)) else {
            continue;
        };
        if is_service_link(name) {
            continue;
        }
        let Some(variable) = VARIABLES.iter().find(|variable| variable.name == name) else {
            faults.push(Fault::UnknownVariable { name: name.to_owned() });
            continue;
        };
        let put = match value.to_str().map(str::trim) {
            Some("") => Ok(()),
            Some(text) => (variable.put)(&mut settings, text),
            None => Err("UTF-8 text".to_owned()),
        };
        if let Err(expected) = put {
            faults.push(Fault::BadValue {
                name: name.to_owned(),
                value: value.to_string_lossy().into_owned(),
                expected,
            });
        }
    }
    if faults.is_empty() {
        Ok(settings)
    } else {
        faults.sort();
        Err(ConfigError { faults })
    }
}

/// Returns `true` if Kubernetes injects a variable of this shape for a service whose name begins
/// with `lowtide`: `X_SERVICE_HOST`, `X_SERVICE_PORT[_NAME]`, `X_PORT`, `X_PORT_n_TCP[_...]`.
fn is_service_link(name: &str) -> bool {
    let protocols = ["_TCP", "_UDP", "_SCTP"];
    let tail_of_port = |tail: &str| {
        let number = tail.trim_start_matches(|c: char| c.is_ascii_digit());
        number.len() < tail.len() && protocols.iter().any(|protocol| number.starts_with(protocol))
    };
    name.ends_with("_SERVICE_HOST")
        || name.ends_with("_PORT")
        || name.contains("_SERVICE_PORT")
        || name.match_indices("_PORT_").any(|(at, sep)| tail_of_port(&name[at + sep.len()..]))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bytes::ByteSize;
    use crate::config::{DeviceBackend, DeviceChoice, DeviceSettings, Profile};
    use crate::decay::DecayTime;
    use crate::device::Contents;
    use crate::metrics::MetricsTier;
    use lowtide_admission::ExhaustionPolicy;

    fn given(pairs: &[(&str, &str)]) -> Result<Settings, ConfigError> {
        settings(pairs.iter().map(|(name, value)| (name.into(), value.into())))
    }

    #[test]
    fn every_variable_sets_its_setting() {
        let found = given(&[
            ("LOWTIDE_PROFILE", "low-memory"),
            ("LOWTIDE_MEMORY_LIMIT", "512m"),
            ("LOWTIDE_CEILING", "0.75"),
            ("LOWTIDE_CORRECTION_FACTOR", "1.5"),
            ("LOWTIDE_DEVICE", "host"),
            ("LOWTIDE_DEVICE_BACKEND", "pool"),
            ("LOWTIDE_DEVICE_LIMIT", "1GiB"),
            ("LOWTIDE_DEVICE_DECAY", "never"),
            ("LOWTIDE_DEVICE_SLEEP_AFTER", "10m"),
            ("LOWTIDE_DEVICE_MIN_AWAKE", "1m"),
            ("LOWTIDE_DEVICE_WATERMARK", "10%"),
            ("LOWTIDE_DEVICE_SLEEP_STABLE", "stay"),
            ("LOWTIDE_DEVICE_SLEEP_DYNAMIC", "discard"),
            ("LOWTIDE_HEAP_DECAY", "500ms"),
            ("LOWTIDE_BACKGROUND_THREADS", "3"),
            ("LOWTIDE_PURGE_INTERVAL", "never"),
            ("LOWTIDE_IDLE_UNLOAD", "90s"),
            ("LOWTIDE_MAX_WAIT", "0"),
            ("LOWTIDE_METRICS_INTERVAL", "2s"),
            ("LOWTIDE_METRICS", "detail"),
            ("LOWTIDE_PROCESS_METRICS", "off"),
            ("LOWTIDE_SERVICE_VERSION", "2.4.1"),
            ("LOWTIDE_EXHAUSTION_POLICY", "exit:10m"),
            ("LOWTIDE_FLIGHT_RECORDER", "/run/lowtide/recording"),
            ("LOWTIDE_HEAP_PROFILE_DIR", "/profiles"),
            ("PATH", "/bin"),
        ]);
        let expected = Settings {
            profile: Some(Profile::LowMemory),
            memory_limit: Some(ByteSize::mib(512)),
            ceiling: Some(0.75),
            correction_factor: Some(1.5),
            device: DeviceSettings {
                choice: Some(DeviceChoice::Host),
                further: Some(vec![]),
                backend: Some(DeviceBackend::Pool),
                limit: Some(ByteSize::gib(1)),
                watermark: Some(0.1),
                decay: Some(DecayTime::Never),
                sleep_after: Some(Some(Duration::from_secs(600))),
                min_awake: Some(Duration::from_secs(60)),
                sleep_stable: Some(Contents::Stay),
                sleep_dynamic: Some(Contents::Discard),
            },
            heap_decay: Some(DecayTime::from_millis(500)),
            background_threads: Some(3),
            purge_interval: Some(None),
            idle_unload: Some(Duration::from_secs(90)),
            max_wait: Some(Duration::ZERO),
            metrics_interval: Some(Duration::from_secs(2)),
            metrics: Some(MetricsTier::Detail),
            process_metrics: Some(false),
            service_version: Some("2.4.1".to_owned()),
            exhaustion_policy: Some(ExhaustionPolicy::Exit {
                min_uptime: Duration::from_secs(600),
            }),
            flight_recorder: Some(Some("/run/lowtide/recording".into())),
            heap_profile_dir: Some(Some("/profiles".into())),
        };
        assert_eq!(found, Ok(expected));
        assert_eq!(VARIABLES.len(), 25, "a variable was added that this test does not name");
    }

    /// The bug: `LOWTIDE_MEMORY_LIMIT=` stopped the start, which is what a template with a missing
    /// value produces.
    #[test]
    fn an_empty_variable_is_unset() {
        for text in ["", " ", "\t"] {
            let empty = VARIABLES.iter().map(|variable| (variable.name, text));
            let found = given(&empty.collect::<Vec<_>>());
            assert_eq!(found, Ok(Settings::default()), "{text:?}");
        }
        let unknown = given(&[("LOWTIDE_MEM_LIMIT", "")]).expect_err("a misspelt name");
        assert!(unknown.to_string().contains("did you mean LOWTIDE_MEMORY_LIMIT?"), "{unknown}");
    }

    #[test]
    fn a_ceiling_is_a_number_or_a_percentage_and_an_idle_time_may_be_never() {
        for (text, ratio) in [("80%", Some(0.8)), ("100 %", Some(1.0)), ("0.8", Some(0.8))] {
            let found = given(&[("LOWTIDE_CEILING", text)]);
            assert_eq!(found.map(|settings| settings.ceiling), Ok(ratio), "{text}");
        }
        for text in ["0%", "101%", "80", "%", "-5%", "NaN%", "80%%"] {
            assert!(given(&[("LOWTIDE_CEILING", text)]).is_err(), "{text}");
        }
        for (text, share) in [("0", Some(0.0)), ("5%", Some(0.05)), ("0.5", Some(0.5))] {
            let found = given(&[("LOWTIDE_DEVICE_WATERMARK", text)]);
            assert_eq!(found.map(|settings| settings.device.watermark), Ok(share), "{text}");
        }
        for text in ["1", "100%", "-1%", "4g"] {
            assert!(given(&[("LOWTIDE_DEVICE_WATERMARK", text)]).is_err(), "{text}");
        }
        let never = given(&[("LOWTIDE_IDLE_UNLOAD", "never")]);
        assert_eq!(never.map(|settings| settings.idle_unload), Ok(Some(Duration::MAX)));
    }

    #[test]
    fn a_policy_for_exhaustion_has_a_time_of_its_own_or_the_default() {
        let (none, one) = (Duration::ZERO, Duration::from_millis(1500));
        for (text, policy) in [
            ("report", ExhaustionPolicy::Report),
            ("serve-one", ExhaustionPolicy::SERVE_ONE),
            ("serve-one:0s", ExhaustionPolicy::ServeOne { grace: none }),
            ("exit", ExhaustionPolicy::EXIT),
            ("exit:1500ms", ExhaustionPolicy::Exit { min_uptime: one }),
        ] {
            let found = given(&[("LOWTIDE_EXHAUSTION_POLICY", text)]);
            assert_eq!(
                found.map(|settings| settings.exhaustion_policy),
                Ok(Some(policy)),
                "{text}"
            );
        }
        for text in ["restart", "report:1m", "exit:", "exit:soon", "Exit", "serve-one:1m:1m"] {
            let error = given(&[("LOWTIDE_EXHAUSTION_POLICY", text)]).expect_err("a fault");
            let expected = format!(
                "LOWTIDE_EXHAUSTION_POLICY={text:?}: expected report, serve-one, exit, or the \
                 latter two with a time, such as exit:1m"
            );
            assert_eq!(error.to_string(), expected);
        }
    }

    #[test]
    fn a_tier_a_switch_and_a_version_are_checked() {
        let long = "1".repeat(65);
        for (name, value, expected) in [
            ("LOWTIDE_METRICS", "all", "basic or detail"),
            ("LOWTIDE_PROCESS_METRICS", "true", "on or off"),
            ("LOWTIDE_SERVICE_VERSION", "1\n2", "without control characters"),
            ("LOWTIDE_SERVICE_VERSION", &long, "1 to 64 bytes"),
        ] {
            let error = given(&[(name, value)]).expect_err("a fault").to_string();
            assert!(error.contains(name) && error.contains(expected), "{error}");
        }
        assert!(given(&[("LOWTIDE_SERVICE_VERSION", &long[1..])]).is_ok());
    }

    #[test]
    fn a_recording_has_an_absolute_path_or_is_off() {
        let off = given(&[("LOWTIDE_FLIGHT_RECORDER", "off")]);
        assert_eq!(off.map(|settings| settings.flight_recorder), Ok(Some(None)));
        for text in ["true", "recording", "./recording"] {
            let error = given(&[("LOWTIDE_FLIGHT_RECORDER", text)]).expect_err("a fault");
            let expected =
                format!("LOWTIDE_FLIGHT_RECORDER={text:?}: expected an absolute path, or off");
            assert_eq!(error.to_string(), expected);
        }
    }

    #[test]
    fn an_arena_may_never_sleep_and_stay_awake_for_no_time_but_not_sleep_after_none() {
        let never = given(&[("LOWTIDE_DEVICE_SLEEP_AFTER", "never")]);
        assert_eq!(never.map(|settings| settings.device.sleep_after), Ok(Some(None)));
        for text in ["0", "0s"] {
            let none = given(&[("LOWTIDE_DEVICE_MIN_AWAKE", text)]);
            let none = none.map(|settings| settings.device.min_awake);
            assert_eq!(none, Ok(Some(Duration::ZERO)), "{text}");
        }
        for (name, value, expected) in [
            ("LOWTIDE_DEVICE_SLEEP_AFTER", "0", "above zero, or never"),
            ("LOWTIDE_DEVICE_SLEEP_AFTER", "soon", "above zero, or never"),
            ("LOWTIDE_DEVICE_MIN_AWAKE", "never", "30s or 5m, or 0"),
            ("LOWTIDE_DEVICE_SLEEP_STABLE", "offload", "keep, discard or stay"),
            ("LOWTIDE_DEVICE_SLEEP_DYNAMIC", "free", "keep, discard or stay"),
        ] {
            let error = given(&[(name, value)]).expect_err("a fault").to_string();
            let said = [name, &format!("{value:?}"), expected].map(|part| error.contains(part));
            assert_eq!(said, [true; 3], "{error}");
        }
    }

    #[test]
    fn faults_name_the_variable_the_value_and_what_was_expected() {
        let error = given(&[
            ("LOWTIDE_MEMORY_LIMIT", "512MB"),
            ("LOWTIDE_CEILING", "1.5"),
            ("LOWTIDE_DEVICE", "gpu"),
            ("LOWTIDE_DEVICE_BACKEND", "cuda_pool"),
            ("LOWTIDE_HEAP_DECAY", "soon"),
            ("LOWTIDE_PROFIL", "balanced"),
            ("LOWTIDE_METRICS_INTERVAL", "0s"),
            ("LOWTIDE_DEVICE_LIMIT", "0"),
        ])
        .expect_err("eight faults");
        assert_eq!(error.faults.len(), 8, "{error}");
        let text = error.to_string();
        for part in [
            "LOWTIDE_MEMORY_LIMIT",
            "512MB",
            "LOWTIDE_CEILING",
            "\"1.5\"",
            "(0, 1]",
            "auto, cuda, cuda:1 (a number), ",
            "\"cuda_pool\": expected auto, virtual-memory, pool, plain or managed",
            "\"soon\"",
            "unknown variable LOWTIDE_PROFIL: did you mean LOWTIDE_PROFILE?",
            "above zero",
        ] {
            assert!(text.contains(part), "{part:?} is missing in: {text}");
        }
        let sentence = r#"LOWTIDE_MEMORY_LIMIT="512MB": expected digits, then B, k, m, g, "#;
        assert!(text.contains(sentence), "{text}");
        // What a `main` prints that returns it.
        assert_eq!(format!("{error:?}"), text);
        assert_eq!(format!("{error:#?}"), text);
    }

    #[test]
    fn the_documentation_lists_every_variable_with_its_help() {
        let source = include_str!("env.rs").replace("\n///   ", " ");
        for Variable { name, help, .. } in VARIABLES {
            let row = format!("/// * `{name}`: {help}\n");
            assert!(source.contains(&row), "the documentation has no {row}");
        }
        let rows = source.lines().filter(|line| line.starts_with("/// * `"));
        assert_eq!(rows.count(), VARIABLES.len());
    }

    #[test]
    fn service_links_are_not_ours() {
        let links = [
            "LOWTIDE_SERVICE_HOST",
            "LOWTIDE_SERVICE_PORT",
            "LOWTIDE_SERVICE_PORT_HTTP",
            "LOWTIDE_PORT",
            "LOWTIDE_PORT_8080_TCP",
            "LOWTIDE_PORT_8080_TCP_ADDR",
            "LOWTIDE_PORT_53_UDP_PROTO",
            "LOWTIDE_PROXY_SERVICE_HOST",
            "LOWTIDE_PROXY_PORT_80_TCP",
        ];
        for link in links {
            assert_eq!(given(&[(link, "tcp://10.0.0.1:80")]), Ok(Settings::default()), "{link}");
        }
        for other in ["LOWTIDE_PORTS", "LOWTIDE_PORT_X", "LOWTIDE_SERVICE", "LOWTIDE_"] {
            assert!(given(&[(other, "1")]).is_err(), "{other}");
        }
        let own = VARIABLES.iter().find(|variable| is_service_link(variable.name));
        assert!(own.is_none(), "{own:?} would never be read");
    }

    #[test]
    fn a_value_that_is_no_text_is_a_fault_and_no_panic() {
        use std::os::unix::ffi::OsStringExt as _;
        let value = OsString::from_vec(vec![0xFF, 0xFE]);
        let error = settings([("LOWTIDE_PROFILE".into(), value)]).expect_err("not UTF-8");
        assert!(error.to_string().contains("UTF-8"), "{error}");
    }
}
