//! The values of settings: how their variables spell them, and their bounds.
//!
//! An error describes the values that are accepted.
//!
//! Invariant: a value that a variable can give, spelled and parsed again, is the same value.

use std::path::{Path, PathBuf};
use std::time::Duration;

use super::profile::Profile;
use crate::bytes::ByteSize;
use crate::decay::DecayTime;
use crate::metrics::MetricsTier;
use lowtide_admission::{AdmissionMode, ExhaustionPolicy, K_MAX, K_MIN};

/// `Err` with the accepted values if a value is out of bounds.
pub(super) type Bounds = Result<(), &'static str>;

const SIZE: &str = "an amount of memory above zero";
const RATIO: &str = "a number in (0, 1], or a percentage up to 100%";
const FACTOR: &str = "a number in [1, 5]";
const TIME: &str = "a duration such as 500ms, 30s or 5m above zero";
const TIME_OR_ZERO: &str = "a duration such as 500ms, 30s or 5m, or 0";
const TIME_OR_NEVER: &str = "a duration such as 500ms, 30s or 5m above zero, or never";
const DECAY: &str = "a duration such as 500ms, 30s or 5m, 0 or never";
/// A relative path would depend on the folder in which the service is started.
const PATH: &str = "an absolute path, or off";
/// It is a label of a metric.
const VERSION: &str = "1 to 64 bytes without control characters";

fn demand(holds: bool, expected: &'static str) -> Bounds {
    if holds { Ok(()) } else { Err(expected) }
}

pub(super) const fn any<T>(_: &T) -> Bounds {
    Ok(())
}

pub(super) fn size(text: &str) -> Result<ByteSize, &'static str> {
    text.parse::<ByteSize>().map_err(|error| error.expected)
}

pub(super) fn above_zero(size: &ByteSize) -> Bounds {
    demand(!size.is_zero(), SIZE)
}

/// Parses a number or a percentage.
pub(super) fn part(text: &str) -> Option<f64> {
    match text.strip_suffix('%') {
        Some(percent) => percent.trim_end().parse::<f64>().ok().map(|percent| percent / 100.0),
        None => text.parse().ok(),
    }
}

pub(super) fn ratio(text: &str) -> Result<f64, &'static str> {
    part(text).ok_or(RATIO)
}

pub(super) fn in_ratio(ratio: &f64) -> Bounds {
    demand(*ratio > 0.0 && *ratio <= 1.0, RATIO)
}

pub(super) fn factor(text: &str) -> Result<f64, &'static str> {
    text.parse().map_err(|_| FACTOR)
}

pub(super) fn in_factor(factor: &f64) -> Bounds {
    demand((K_MIN..=K_MAX).contains(factor), FACTOR)
}

pub(super) fn whole(text: &str) -> Result<u32, &'static str> {
    text.parse().map_err(|_| "a whole number from 0 to 4294967295")
}

fn duration(text: &str, expected: &'static str) -> Result<Duration, &'static str> {
    humantime::parse_duration(text).map_err(|_| expected)
}

pub(super) fn time(text: &str) -> Result<Duration, &'static str> {
    duration(text, TIME)
}

pub(super) fn in_time(time: &Duration) -> Bounds {
    demand(!time.is_zero(), TIME)
}

pub(super) fn time_or_zero(text: &str) -> Result<Duration, &'static str> {
    if text == "0" { Ok(Duration::ZERO) } else { duration(text, TIME_OR_ZERO) }
}

/// `never` is the longest time.
pub(super) fn time_or_max(text: &str) -> Result<Duration, &'static str> {
    if text == "never" { Ok(Duration::MAX) } else { duration(text, TIME_OR_NEVER) }
}

pub(super) fn in_time_or_max(time: &Duration) -> Bounds {
    demand(!time.is_zero(), TIME_OR_NEVER)
}

pub(super) fn time_or_never(text: &str) -> Result<Option<Duration>, &'static str> {
    if text == "never" { Ok(None) } else { duration(text, TIME_OR_NEVER).map(Some) }
}

pub(super) fn in_time_or_never(time: &Option<Duration>) -> Bounds {
    demand(*time != Some(Duration::ZERO), TIME_OR_NEVER)
}

pub(super) fn decay_time(text: &str) -> Result<DecayTime, &'static str> {
    match text {
        "never" => Ok(DecayTime::Never),
        "0" => Ok(DecayTime::AtOnce),
        _ => duration(text, DECAY).map(DecayTime::from_duration),
    }
}

pub(super) fn exhaustion_policy(text: &str) -> Result<ExhaustionPolicy, &'static str> {
    let expected = "report, serve-one, exit, or the latter two with a time, such as exit:1m";
    let (name, time) = match text.split_once(':') {
        Some((name, time)) => (name, Some(duration(time, expected)?)),
        None => (text, None),
    };
    match (name, time) {
        ("report", None) => Ok(ExhaustionPolicy::Report),
        ("serve-one", None) => Ok(ExhaustionPolicy::SERVE_ONE),
        ("serve-one", Some(grace)) => Ok(ExhaustionPolicy::ServeOne { grace }),
        ("exit", None) => Ok(ExhaustionPolicy::EXIT),
        ("exit", Some(min_uptime)) => Ok(ExhaustionPolicy::Exit { min_uptime }),
        _ => Err(expected),
    }
}

pub(super) fn path_or_off(text: &str) -> Result<Option<PathBuf>, &'static str> {
    Ok((text != "off").then(|| Path::new(text).to_owned()))
}

pub(super) fn absolute(path: &Option<PathBuf>) -> Bounds {
    demand(path.as_ref().is_none_or(|path| path.is_absolute()), PATH)
}

pub(super) fn version(text: &str) -> Result<Option<String>, &'static str> {
    Ok(Some(text.to_owned()))
}

pub(super) fn is_label(version: &Option<String>) -> Bounds {
    let is_label =
        |text: &String| (1..=64).contains(&text.len()) && !text.contains(char::is_control);
    demand(version.as_ref().is_none_or(is_label), VERSION)
}

pub(super) fn on_or_off(text: &str) -> Result<bool, &'static str> {
    match text {
        "on" => Ok(true),
        "off" => Ok(false),
        _ => Err("on or off"),
    }
}

/// Implements `FromStr` of an enum of names, with these words for the accepted ones.
macro_rules! by_name {
    ($name:ty, $expected:literal) => {
        impl std::str::FromStr for $name {
            type Err = &'static str;

            fn from_str(text: &str) -> Result<Self, Self::Err> {
                Self::ALL.into_iter().find(|it| it.name() == text).ok_or($expected)
            }
        }
    };
}
pub(super) use by_name;

/// A value as its variable spells it; empty if that cannot say it.
pub(super) trait Spelled {
    fn spelled(&self) -> String;
}

macro_rules! spelled {
    ($($kind:ty: |$value:ident| $text:expr;)*) => {
        $(impl Spelled for $kind {
            fn spelled(&self) -> String {
                let $value = self;
                $text
            }
        })*
    };
}
#[cfg(feature = "device")]
pub(super) use spelled;

spelled! {
    Profile: |profile| profile.to_string();
    MetricsTier: |tier| tier.to_string();
    AdmissionMode: |mode| mode.to_string();
    f64: |number| number.to_string();
    u32: |number| number.to_string();
    bool: |is_on| (if *is_on { "on" } else { "off" }).to_owned();
    ByteSize: |size| if *size == ByteSize::MAX { String::new() } else { size.exact() };
    Option<ByteSize>: |size| size.map_or_else(String::new, ByteSize::exact);
    Option<String>: |text| text.clone().unwrap_or_default();
    Option<PathBuf>: |path| {
        path.as_ref().map_or_else(|| "off".to_owned(), |path| path.display().to_string())
    };
    Duration: |time| match *time {
        Duration::MAX => "never".to_owned(),
        time => humantime::format_duration(time).to_string(),
    };
    Option<Duration>: |time| time.unwrap_or(Duration::MAX).spelled();
    DecayTime: |decay| match decay {
        DecayTime::AtOnce => "0".to_owned(),
        DecayTime::Within(time) => time.spelled(),
        DecayTime::Never => "never".to_owned(),
    };
    ExhaustionPolicy: |policy| match policy {
        ExhaustionPolicy::ServeOne { grace: time }
        | ExhaustionPolicy::Exit { min_uptime: time } => {
            format!("{}:{}", policy.name(), time.spelled())
        }
        _ => policy.name().to_owned(),
    };
}
