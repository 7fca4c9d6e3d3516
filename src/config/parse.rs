//! Parsers of the values of variables. An error describes the values that are accepted.

use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::bytes::ByteSize;
use crate::decay::DecayTime;
use lowtide_admission::ExhaustionPolicy;
use lowtide_admission::ledger::{K_MAX, K_MIN};

/// Sets a value that was parsed, or returns the description of the accepted values.
pub(super) fn put<T, E: ToString>(
    place: &mut Option<T>,
    value: Result<T, E>,
) -> Result<(), String> {
    *place = Some(value.map_err(|expected| expected.to_string())?);
    Ok(())
}

pub(super) fn positive(text: &str) -> Result<ByteSize, String> {
    match text.parse::<ByteSize>() {
        Ok(ByteSize::ZERO) => Err("an amount of memory above zero".to_owned()),
        Ok(size) => Ok(size),
        Err(error) => Err(error.expected().to_owned()),
    }
}

pub(super) fn ratio(text: &str) -> Result<f64, &'static str> {
    let valid = part(text).filter(|ratio| *ratio > 0.0 && *ratio <= 1.0);
    valid.ok_or("a number in (0, 1], or a percentage up to 100%")
}

pub(super) fn correction_factor(text: &str) -> Result<f64, &'static str> {
    let valid = text.parse().ok().filter(|factor| (K_MIN..=K_MAX).contains(factor));
    valid.ok_or("a number in [1, 5]")
}

/// Parses a number or a percentage.
pub(super) fn part(text: &str) -> Option<f64> {
    match text.strip_suffix('%') {
        Some(percent) => percent.trim_end().parse::<f64>().ok().map(|percent| percent / 100.0),
        None => text.parse().ok(),
    }
}

pub(super) fn whole(text: &str) -> Result<u32, &'static str> {
    text.parse().map_err(|_| "a whole number from 0 to 4294967295")
}

pub(super) fn decay_time(text: &str) -> Result<DecayTime, String> {
    match text {
        "never" => Ok(DecayTime::Never),
        "0" => Ok(DecayTime::AtOnce),
        _ => duration(text)
            .map(DecayTime::from_duration)
            .ok_or_else(|| expected_time(", 0 or never")),
    }
}

pub(super) fn time_or_zero(text: &str) -> Result<Duration, String> {
    let time = if text == "0" { Some(Duration::ZERO) } else { duration(text) };
    time.ok_or_else(|| expected_time(", or 0"))
}

pub(super) fn time_or_never(text: &str) -> Result<Option<Duration>, String> {
    if text == "never" {
        return Ok(None);
    }
    duration(text)
        .filter(|time| !time.is_zero())
        .map(Some)
        .ok_or_else(|| expected_time(" above zero, or never"))
}

pub(super) fn exhaustion_policy(text: &str) -> Result<ExhaustionPolicy, &'static str> {
    let (name, time) = match text.split_once(':') {
        Some((name, time)) => (name, duration(time).map(Some)),
        None => (text, Some(None)),
    };
    let policy = match (name, time) {
        ("report", Some(None)) => Some(ExhaustionPolicy::Report),
        ("serve-one", Some(None)) => Some(ExhaustionPolicy::SERVE_ONE),
        ("serve-one", Some(Some(grace))) => Some(ExhaustionPolicy::ServeOne { grace }),
        ("exit", Some(None)) => Some(ExhaustionPolicy::EXIT),
        ("exit", Some(Some(min_uptime))) => Some(ExhaustionPolicy::Exit { min_uptime }),
        _ => None,
    };
    policy.ok_or("report, serve-one, exit, or the latter two with a time, such as exit:1m")
}

/// The accepted paths of a file that the crate writes: a relative one would depend on the folder in
/// which the service is started.
pub(super) const ABSOLUTE_PATH: &str = "an absolute path";

pub(super) fn path_or_off(text: &str) -> Result<Option<PathBuf>, String> {
    match Path::new(text) {
        _ if text == "off" => Ok(None),
        path if path.is_absolute() => Ok(Some(path.to_owned())),
        _ => Err(format!("{ABSOLUTE_PATH}, or off")),
    }
}

pub(super) fn time(text: &str) -> Result<Duration, String> {
    duration(text).filter(|time| !time.is_zero()).ok_or_else(|| expected_time(" above zero"))
}

fn expected_time(more: &str) -> String {
    format!("a duration such as 500ms, 30s or 5m{more}")
}

fn duration(text: &str) -> Option<Duration> {
    humantime::parse_duration(text).ok()
}

/// The maximum length of the version of a service, in bytes: it is a label of a metric.
const VERSION_MAX: usize = 64;

/// The versions that are accepted.
pub(super) const VERSION_EXPECTED: &str = "1 to 64 bytes without control characters";

/// Returns `true` if the text is accepted as the version of a service.
pub(super) fn is_version(text: &str) -> bool {
    (1..=VERSION_MAX).contains(&text.len()) && !text.chars().any(char::is_control)
}

pub(super) fn version(text: &str) -> Result<String, &'static str> {
    if is_version(text) { Ok(text.to_owned()) } else { Err(VERSION_EXPECTED) }
}

pub(super) fn on_or_off(text: &str) -> Result<bool, &'static str> {
    match text {
        "on" => Ok(true),
        "off" => Ok(false),
        _ => Err("on or off"),
    }
}
