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

use super::error::{ConfigError, Fault};
use super::settings::Settings;

pub use super::settings::VARIABLES;

/// The prefix of the variables' names.
pub const PREFIX: &str = "LOWTIDE_";

/// The first variable of device arenas, and the beginning of the others.
const DEVICE: &str = "LOWTIDE_DEVICE";

/// Reads the environment of the process.
///
/// # Errors
/// [`ConfigError`] with every unknown variable and every invalid value, each with the accepted
/// values.
#[expect(clippy::disallowed_methods, reason = "this is the one reader of the environment")]
pub(crate) fn read() -> Result<Settings, ConfigError> {
    settings(std::env::vars_os())
}

/// Returns the variables of device arenas that are set, which a build without the feature `device`
/// does not have.
#[expect(clippy::disallowed_methods, reason = "this is the one reader of the environment")]
pub(crate) fn of_devices() -> Vec<&'static str> {
    let is_set = |name: &&str| std::env::var_os(name).is_some_and(|value| !value.is_empty());
    VARIABLES.iter().copied().filter(|name| name.starts_with(DEVICE)).filter(is_set).collect()
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
pub(crate) fn settings(
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
        if !VARIABLES.contains(&name) {
            let unknown = format!("unknown variable {name}: {}", meant(name));
            faults.push(Fault::of_name(name, unknown));
            continue;
        }
        let put = match value.to_str().map(str::trim) {
            Some("") => Ok(()),
            Some(text) => settings.put(name, text),
            None => Err("UTF-8 text"),
        };
        if let Err(expected) = put {
            faults.push(Fault::bad(name, &value.to_string_lossy(), expected));
        }
    }
    ConfigError::check(faults)?;
    Ok(settings)
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

/// The most similar known variable, or all of them.
fn meant(name: &str) -> String {
    let tail = name.len().saturating_sub(PREFIX.len());
    let most = EDITS_MAX.min(tail / 2);
    VARIABLES
        .iter()
        .filter(|known| known.len().abs_diff(name.len()) <= most)
        .map(|known| (edits(name, known), known))
        .min()
        .filter(|(edits, _)| *edits <= most)
        .map_or_else(
            || format!("expected one of {}", VARIABLES.join(", ")),
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
    use std::time::Duration;

    use super::*;
    use crate::bytes::ByteSize;
    use crate::config::{DeviceBackend, DeviceChoice, Profile};
    use crate::decay::DecayTime;
    use crate::device::Contents;
    use crate::metrics::MetricsTier;
    use lowtide_admission::{AdmissionMode, ExhaustionPolicy};

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
            ("LOWTIDE_ADMISSION", "observe"),
            ("LOWTIDE_METRICS_INTERVAL", "2s"),
            ("LOWTIDE_METRICS", "detail"),
            ("LOWTIDE_PROCESS_METRICS", "off"),
            ("LOWTIDE_SERVICE_VERSION", "2.4.1"),
            ("LOWTIDE_EXHAUSTION_POLICY", "exit:10m"),
            ("LOWTIDE_FLIGHT_RECORDER", "/run/lowtide/recording"),
            ("LOWTIDE_HEAP_PROFILE_DIR", "/profiles"),
            ("LOWTIDE_SPILL_DIR", "/spill"),
            ("LOWTIDE_SPILL_MAX", "2g"),
            ("PATH", "/bin"),
        ]);
        let expected = Settings {
            profile: Some(Profile::LowMemory),
            memory_limit: Some(Some(ByteSize::mib(512))),
            ceiling: Some(0.75),
            correction_factor: Some(1.5),
            devices: Some(vec![DeviceChoice::Host]),
            device_backend: Some(DeviceBackend::Pool),
            device_limit: Some(ByteSize::gib(1)),
            device_watermark: Some(0.1),
            device_decay: Some(DecayTime::Never),
            device_sleep_after: Some(Some(Duration::from_secs(600))),
            device_min_awake: Some(Duration::from_secs(60)),
            device_sleep_stable: Some(Contents::Stay),
            device_sleep_dynamic: Some(Contents::Discard),
            heap_decay: Some(DecayTime::from_millis(500)),
            background_threads: Some(3),
            purge_interval: Some(None),
            idle_unload: Some(Duration::from_secs(90)),
            max_wait: Some(Duration::ZERO),
            admission_mode: Some(AdmissionMode::Observe),
            metrics_interval: Some(Duration::from_secs(2)),
            metrics: Some(MetricsTier::Detail),
            process_metrics: Some(false),
            service_version: Some(Some("2.4.1".to_owned())),
            exhaustion_policy: Some(ExhaustionPolicy::Exit {
                min_uptime: Duration::from_secs(600),
            }),
            flight_recorder: Some(Some("/run/lowtide/recording".into())),
            heap_profile_dir: Some(Some("/profiles".into())),
            spill_dir: Some(Some("/spill".into())),
            spill_max: Some(ByteSize::gib(2)),
        };
        assert_eq!(found, Ok(expected));
        assert_eq!(VARIABLES.len(), 28, "a variable was added that this test does not name");
    }

    /// The bug: `LOWTIDE_MEMORY_LIMIT=` stopped the start, which is what a template with a missing
    /// value produces.
    #[test]
    fn an_empty_variable_is_unset() {
        for text in ["", " ", "\t"] {
            let empty = VARIABLES.iter().map(|variable| (*variable, text));
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
            assert_eq!(found.map(|settings| settings.device_watermark), Ok(share), "{text}");
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
            ("LOWTIDE_ADMISSION", "off", "expected enforce or observe"),
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
        assert_eq!(never.map(|settings| settings.device_sleep_after), Ok(Some(None)));
        for text in ["0", "0s"] {
            let none = given(&[("LOWTIDE_DEVICE_MIN_AWAKE", text)]);
            let none = none.map(|settings| settings.device_min_awake);
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
            ("LOWTIDE_SPILL_MAX", "127m"),
        ])
        .expect_err("nine faults");
        assert_eq!(error.faults.len(), 9, "{error}");
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
            "LOWTIDE_SPILL_MAX=\"127m\": expected an amount of memory of at least 128m",
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
        let own = VARIABLES.iter().find(|variable| is_service_link(variable));
        assert!(own.is_none(), "{own:?} would never be read");
    }

    #[test]
    fn a_value_that_is_no_text_is_a_fault_and_no_panic() {
        use std::os::unix::ffi::OsStringExt as _;
        let value = OsString::from_vec(vec![0xFF, 0xFE]);
        let error = settings([("LOWTIDE_PROFILE".into(), value)]).expect_err("not UTF-8");
        assert!(error.to_string().contains("UTF-8"), "{error}");
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
        let text = |name: &str| given(&[(name, "1")]).expect_err("unknown").to_string();
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
