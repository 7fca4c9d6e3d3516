//! The settings of the control loop, and their validation.
//!
//! Plain values, checked once before the loop begins.
//!
//! Invariant: a running loop has times above zero, fractions within their bounds, and
//! `active_tick <= idle_tick`.

use std::fmt;
use std::time::Duration;

use thiserror::Error;

use crate::correction::{K_MAX, K_MIN, K_START};
use crate::exhaustion::ExhaustionPolicy;
use crate::pressure::Thresholds;
use lowtide_core::bytes::ByteSize;

/// The settings of the control loop.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Settings {
    /// The thresholds of the pressure levels.
    pub thresholds: Thresholds,
    /// The fraction of the limit that admission fills, in (0, 1]. Default: .80, determined together
    /// with the thresholds.
    pub ceiling: f64,
    /// The largest fraction to which the host's ceiling rises with evidence, in (0, 1]; it does not
    /// rise if this is at most `ceiling`. Default: .93, where memory is critical.
    pub ceiling_max: f64,
    /// The initial correction factor: the assumed ratio of real need to estimate until it is
    /// measured, in [1, 5]. Default: 2.
    pub correction_factor: f64,
    /// Time between samples while memory grows by a hundredth of the limit within an idle tick,
    /// more than half of the limit is required, or requests wait or have reserved more than a fifth
    /// of the allowance. Default: 10 ms (with 250 ms the goodput was a fifth lower).
    pub active_tick: Duration,
    /// The longest time between samples otherwise: while requests are held, a quarter of the time
    /// in which 1 GB/s would use up the room. Up to four times as long in a quiet time. Default: 250
    /// ms.
    pub idle_tick: Duration,
    /// The fraction of a core that sampling may take, in (0, 1]. Ticks are less frequent if they
    /// cost more. Default: .01.
    pub share: f64,
    /// The time without requests after which the service counts as idle. Default: 1 s.
    pub quiet: Duration,
    /// Time between periodic purges; `None` disables them. Default: 30 s.
    pub purge_interval: Option<Duration>,
    /// The smallest amount worth a purge. Default: 16 MiB, a guess.
    pub purge_floor: ByteSize,
    /// The smallest amount worth a purge, as a fraction of the live bytes, in (0, 1]. Default: .25.
    /// Both minimums apply.
    pub purge_part: f64,
    /// The smallest growth of retained memory that triggers a purge if it lasts for two seconds,
    /// and the same as a fraction of the anonymous memory from which it grew, above 0 and at most
    /// 1. Both minimums apply. `None` disables it. Default: `None`.
    pub purge_growth: Option<(ByteSize, f64)>,
    /// Time between runs of the heap's decay while there is something to decay; `None` if the
    /// allocator has its own threads for that. Default: `None`.
    pub heap_decay_interval: Option<Duration>,
    /// Time between publications of metrics; `None` disables them. Default: 1 s.
    pub publish_interval: Option<Duration>,
    /// Time between samples of the device's free memory; `None` without such a device. Default:
    /// `None`.
    pub device_interval: Option<Duration>,
    /// The policy for memory that no request owns and that leaves no room for requests. Default:
    /// [`ExhaustionPolicy::Report`].
    pub exhaustion_policy: ExhaustionPolicy,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            thresholds: Thresholds::default(),
            ceiling: 0.80,
            ceiling_max: 0.93,
            correction_factor: K_START,
            active_tick: Duration::from_millis(10),
            idle_tick: Duration::from_millis(250),
            share: 0.01,
            quiet: Duration::from_secs(1),
            purge_interval: Some(Duration::from_secs(30)),
            purge_floor: ByteSize::mib(16),
            purge_part: 0.25,
            purge_growth: None,
            heap_decay_interval: None,
            publish_interval: Some(Duration::from_secs(1)),
            device_interval: None,
            exhaustion_policy: ExhaustionPolicy::Report,
        }
    }
}

/// An invalid setting.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
#[error("{name} is {value}: expected {expected}")]
#[non_exhaustive]
pub struct SettingsError {
    /// The name of the setting.
    pub name: &'static str,
    /// The value given.
    pub value: String,
    /// The values that are accepted.
    pub expected: String,
}

/// Returns an error unless the value is accepted.
fn expect(
    is_right: bool,
    name: &'static str,
    value: impl fmt::Debug,
    expected: impl fmt::Display,
) -> Result<(), SettingsError> {
    if is_right {
        return Ok(());
    }
    Err(SettingsError { name, value: format!("{value:?}"), expected: expected.to_string() })
}

impl Settings {
    pub(super) fn check(&self) -> Result<(), SettingsError> {
        let parts = [
            ("ceiling", self.ceiling),
            ("ceiling_max", self.ceiling_max),
            ("purge_part", self.purge_part),
            ("purge_growth.part", self.purge_growth.map_or(1.0, |(_, part)| part)),
            ("share", self.share),
        ];
        for (name, value) in parts {
            expect(value > 0.0 && value <= 1.0, name, value, "above 0 and at most 1")?;
        }
        let factor = self.correction_factor;
        expect((K_MIN..=K_MAX).contains(&factor), "correction_factor", factor, "1 to 5")?;
        let Thresholds { up, down, .. } = self.thresholds;
        let is_rising = |list: [f64; 3]| 0.0 < list[0] && list[0] < list[1] && list[1] < list[2];
        let are_apart = up.iter().zip(down).all(|(up, down)| down < *up && *up <= 1.0);
        let are_right = is_rising(up) && is_rising(down) && are_apart;
        expect(are_right, "thresholds", (up, down), "0 < down < up <= 1, rising with the level")?;
        let times = [
            ("active_tick", Some(self.active_tick)),
            ("purge_interval", self.purge_interval),
            ("publish_interval", self.publish_interval),
            ("device_interval", self.device_interval),
            ("heap_decay_interval", self.heap_decay_interval),
        ];
        for (name, time) in times {
            expect(time != Some(Duration::ZERO), name, Duration::ZERO, "a time above zero")?;
        }
        let most = format!("at most the idle_tick of {:?}", self.idle_tick);
        expect(self.active_tick <= self.idle_tick, "active_tick", self.active_tick, most)
    }
}
