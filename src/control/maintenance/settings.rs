//! What the control loop goes by, and which of it makes no sense.
//!
//! Plain values: they are checked once, before the loop begins, and stay.
//!
//! Invariant: a loop that runs has times above zero, parts within their bounds, and
//! `active_tick <= idle_tick`.

use std::time::Duration;

use thiserror::Error;

use crate::bytes::ByteSize;
use crate::control::ledger::{K_MAX, K_MIN, K_START};
use crate::control::pressure::Thresholds;

use super::PurgeGrowth;

/// What the control loop goes by.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Settings {
    /// The marks of the levels.
    pub thresholds: Thresholds,
    /// The part of the limit that admission fills; .80 by default, found together with the marks.
    pub ceiling: f64,
    /// What a booked byte is taken to need until that is measured, in [1, 5]; 2 by default.
    pub correction_factor: f64,
    /// Time between samples while requests are held, memory grows, or more than half of the limit
    /// is required; 10 ms by default (a sampler of 250 ms cost a fifth of the goodput).
    pub active_tick: Duration,
    /// Time between samples else; 250 ms by default.
    pub idle_tick: Duration,
    /// The part by which steps between samples are shortened at random, so that the services of a
    /// fleet do not sample, and purge, in step; 0 by default.
    pub jitter: f64,
    /// The part of a core that sampling may take: ticks come less often where they cost more; .01
    /// by default.
    pub share: f64,
    /// Without requests for this long the service is idle; 1 s by default.
    pub quiet: Duration,
    /// Time between periodic purges; 30 s by default, `None` for off.
    pub purge_interval: Option<Duration>,
    /// Less than this is not worth a purge; 16 MiB by default, a guess.
    pub purge_floor: ByteSize,
    /// Nor is less than this part of the live bytes; .25 by default.
    pub purge_part: f64,
    /// When growth is worth a purge; `None`, the default, for never.
    pub purge_growth: Option<PurgeGrowth>,
    /// Time between ticks of the heap's decay while there is something to decay; `None`, the
    /// default, where the allocator has threads of its own for that.
    pub heap_decay_interval: Option<Duration>,
    /// Time between publications of metrics; 1 s by default, `None` for off.
    pub publish_interval: Option<Duration>,
    /// Time between looks at the memory that the device has left; `None`, the default, where there
    /// is no device to look at.
    pub device_interval: Option<Duration>,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            thresholds: Thresholds::default(),
            ceiling: 0.80,
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
        }
    }
}

/// Settings that make no sense.
#[derive(Clone, Debug, Error, PartialEq)]
#[non_exhaustive]
pub enum SettingsError {
    /// A part that is none.
    #[error("{name} is {value}: expected above 0 and at most 1")]
    Part {
        /// The setting.
        name: &'static str,
        /// What was given.
        value: f64,
    },
    /// A multiplier that is none.
    #[error("correction_factor is {value}: expected 1 to 5")]
    Multiplier {
        /// What was given.
        value: f64,
    },
    /// A jitter that is none.
    #[error("jitter is {value}: expected 0 to 0.5")]
    Jitter {
        /// What was given.
        value: f64,
    },
    /// A time of zero, at which a loop would never rest.
    #[error("{name} is zero: expected a time")]
    ZeroTime {
        /// The setting.
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
        let parts =
            [("ceiling", self.ceiling), ("purge_part", self.purge_part), ("share", self.share)];
        for (name, value) in parts {
            if !(value > 0.0 && value <= 1.0) {
                return Err(SettingsError::Part { name, value });
            }
        }
        if !(K_MIN..=K_MAX).contains(&self.correction_factor) {
            return Err(SettingsError::Multiplier { value: self.correction_factor });
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
