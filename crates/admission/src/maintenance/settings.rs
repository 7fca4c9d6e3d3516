//! The settings of the control loop, and their validation.
//!
//! Plain values, checked once before the loop begins.
//!
//! Invariant: a running loop has times above zero, fractions within their bounds, and
//! `active_tick <= idle_tick`.

use std::time::Duration;

use thiserror::Error;

use crate::exhaustion::ExhaustionPolicy;
use crate::ledger::{K_MAX, K_MIN, K_START};
use crate::pressure::Thresholds;
use lowtide_core::bytes::ByteSize;

use super::PurgeGrowth;

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
    /// Time between samples while requests are held, memory grows, or more than half of the limit
    /// is required. Default: 10 ms (with 250 ms the goodput was a fifth lower).
    pub active_tick: Duration,
    /// Time between samples otherwise. Default: 250 ms.
    pub idle_tick: Duration,
    /// The largest fraction by which the time between samples is shortened at random, so that the
    /// services of a fleet do not sample and purge in step; in [0, 0.5]. Default: 0.
    pub jitter: f64,
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
    /// The growth that triggers a purge; `None` disables it. Default: `None`.
    pub purge_growth: Option<PurgeGrowth>,
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
            jitter: 0.0,
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
#[derive(Clone, Debug, Error, PartialEq)]
#[non_exhaustive]
pub enum SettingsError {
    /// A fraction is out of range.
    #[error("{name} is {value}: expected above 0 and at most 1")]
    Part {
        /// The name of the setting.
        name: &'static str,
        /// The value given.
        value: f64,
    },
    /// The correction factor is out of range.
    #[error("correction_factor is {value}: expected 1 to 5")]
    CorrectionFactor {
        /// The value given.
        value: f64,
    },
    /// The jitter is out of range.
    #[error("jitter is {value}: expected 0 to 0.5")]
    Jitter {
        /// The value given.
        value: f64,
    },
    /// A time is zero, so that the loop would never rest.
    #[error("{name} is zero: expected a time above zero")]
    ZeroTime {
        /// The name of the setting.
        name: &'static str,
    },
    /// The active tick is longer than the idle one.
    #[error("active_tick is {active:?}: expected at most the idle_tick of {idle:?}")]
    Ticks {
        /// The active tick.
        active: Duration,
        /// The idle tick.
        idle: Duration,
    },
}

impl Settings {
    pub(super) fn check(&self) -> Result<(), SettingsError> {
        let parts = [
            ("ceiling", self.ceiling),
            ("ceiling_max", self.ceiling_max),
            ("purge_part", self.purge_part),
            ("share", self.share),
        ];
        for (name, value) in parts {
            if !(value > 0.0 && value <= 1.0) {
                return Err(SettingsError::Part { name, value });
            }
        }
        if !(K_MIN..=K_MAX).contains(&self.correction_factor) {
            return Err(SettingsError::CorrectionFactor { value: self.correction_factor });
        }
        if !(0.0..=0.5).contains(&self.jitter) {
            return Err(SettingsError::Jitter { value: self.jitter });
        }
        self.purge_growth.map_or(Ok(()), |growth| growth.check())?;
        let times = [
            ("active_tick", Some(self.active_tick)),
            ("purge_interval", self.purge_interval),
            ("publish_interval", self.publish_interval),
            ("device_interval", self.device_interval),
            ("heap_decay_interval", self.heap_decay_interval),
        ];
        for (name, time) in times {
            if time.is_some_and(|time| time.is_zero()) {
                return Err(SettingsError::ZeroTime { name });
            }
        }
        if self.active_tick > self.idle_tick {
            let (active, idle) = (self.active_tick, self.idle_tick);
            return Err(SettingsError::Ticks { active, idle });
        }
        Ok(())
    }
}
