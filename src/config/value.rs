//! The values of settings: how their variables spell them, and their bounds.
//!
//! An error describes the values that are accepted.
//!
//! Invariant: a value that a variable can give, spelled and parsed again, is the same value.

use std::path::PathBuf;
use std::time::Duration;

use super::profile::Profile;
use crate::bytes::ByteSize;
use crate::decay::DecayTime;
use crate::metrics::MetricsTier;
use lowtide_admission::{AdmissionMode, ExhaustionPolicy, K_MAX, K_MIN};

/// How a variable spells the values of a setting, and which it accepts.
pub(super) struct Format<T> {
    /// The accepted values, as a phrase to follow the word "expected".
    pub(super) expected: &'static str,
    pub(super) parse: fn(&str) -> Result<T, &'static str>,
    pub(super) accepts: fn(&T) -> bool,
}

impl<T> Format<T> {
    /// Creates the format of a type of which every value is accepted.
    pub(super) const fn of(parse: fn(&str) -> Result<T, &'static str>) -> Self {
        Self { expected: "", parse, accepts: |_| true }
    }

    pub(super) fn read(&self, text: &str) -> Result<T, &'static str> {
        let value = (self.parse)(text)?;
        self.check(&value).map(|()| value)
    }

    /// Checks a value that did not pass the parser.
    pub(super) fn check(&self, value: &T) -> Result<(), &'static str> {
        if (self.accepts)(value) { Ok(()) } else { Err(self.expected) }
    }
}

/// Defines formats: the type, what is expected, the parser, and which values are accepted.
macro_rules! formats {
    ($($(#[$meta:meta])* $name:ident: $kind:ty = $expected:expr, $parse:expr, $accepts:expr;)*) => {
        $($(#[$meta])* pub(super) const $name: Format<$kind> = Format {
            expected: $expected,
            parse: |text| {
                let parse: fn(&str) -> Option<$kind> = $parse;
                parse(text).ok_or($expected)
            },
            accepts: $accepts,
        };)*
    };
}

const NEVER: &str = "a duration such as 500ms, 30s or 5m above zero, or never";
const ABOVE_ZERO: &str = "an amount of memory above zero";

#[cfg(feature = "device")]
pub(super) const SIZE: Format<ByteSize> =
    Format { expected: ABOVE_ZERO, parse: str::parse, accepts: |size| !size.is_zero() };
pub(super) const SIZE_IF_ANY: Format<Option<ByteSize>> = Format {
    expected: ABOVE_ZERO,
    parse: |text| text.parse().map(Some),
    accepts: |size| *size != Some(ByteSize::ZERO),
};

formats! {
    RATIO: f64 = "a number in (0, 1], or a percentage up to 100%", part,
        |ratio| *ratio > 0.0 && *ratio <= 1.0;
    // As the heap does, but its error does not name the setting.
    SPILL_SIZE: ByteSize = "an amount of memory of at least 128m", |text| text.parse().ok(),
        |size| *size >= ByteSize::mib(128);
    #[cfg(feature = "device")]
    SHARE: f64 = "a number in [0, 1), or a percentage below 100%", part,
        |share| (0.0..1.0).contains(share);
    FACTOR: f64 = "a number in [1, 5]", |text| text.parse().ok(),
        |factor| (K_MIN..=K_MAX).contains(factor);
    WHOLE: u32 = "a whole number from 0 to 4294967295", |text| text.parse().ok(), |_| true;
    TIME: Duration = "a duration such as 500ms, 30s or 5m above zero", time, |time| !time.is_zero();
    TIME_OR_ZERO: Duration = "a duration such as 500ms, 30s or 5m, or 0",
        |text| if text == "0" { Some(Duration::ZERO) } else { time(text) }, |_| true;
    // `never` is the longest time.
    TIME_OR_MAX: Duration = NEVER,
        |text| if text == "never" { Some(Duration::MAX) } else { time(text) },
        |time| !time.is_zero();
    TIME_OR_NEVER: Option<Duration> = NEVER,
        |text| if text == "never" { Some(None) } else { time(text).map(Some) },
        |time| *time != Some(Duration::ZERO);
    DECAY: DecayTime = "a duration such as 500ms, 30s or 5m, 0 or never", |text| match text {
        "never" => Some(DecayTime::Never),
        "0" => Some(DecayTime::AtOnce),
        _ => time(text).map(DecayTime::from_duration),
    }, |_| true;
    POLICY: ExhaustionPolicy =
        "report, serve-one, exit, or the latter two with a time, such as exit:1m", policy, |_| true;
    // A relative path would depend on the folder in which the service is started.
    PATH: Option<PathBuf> = "an absolute path, or off",
        |text| Some((text != "off").then(|| text.into())),
        |path| path.as_ref().is_none_or(|path| path.is_absolute());
    // It is a label of a metric.
    VERSION: Option<String> = "1 to 64 bytes without control characters",
        |text| Some(Some(text.to_owned())),
        |text| text.as_ref().is_none_or(|text| {
            (1..=64).contains(&text.len()) && !text.contains(char::is_control)
        });
    ON_OR_OFF: bool = "on or off", |text| match text {
        "on" => Some(true),
        "off" => Some(false),
        _ => None,
    }, |_| true;
}

/// Parses a number or a percentage.
fn part(text: &str) -> Option<f64> {
    match text.strip_suffix('%') {
        Some(percent) => percent.trim_end().parse::<f64>().ok().map(|percent| percent / 100.0),
        None => text.parse().ok(),
    }
}

fn time(text: &str) -> Option<Duration> {
    humantime::parse_duration(text).ok()
}

fn policy(text: &str) -> Option<ExhaustionPolicy> {
    let (name, time) = match text.split_once(':') {
        Some((name, after)) => (name, Some(time(after)?)),
        None => (text, None),
    };
    Some(match (name, time) {
        ("report", None) => ExhaustionPolicy::Report,
        ("serve-one", None) => ExhaustionPolicy::SERVE_ONE,
        ("serve-one", Some(grace)) => ExhaustionPolicy::ServeOne { grace },
        ("exit", None) => ExhaustionPolicy::EXIT,
        ("exit", Some(min_uptime)) => ExhaustionPolicy::Exit { min_uptime },
        _ => return None,
    })
}

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
