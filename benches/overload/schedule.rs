//! When requests come, of what size, and how long each holds its memory: all from a seed.
//!
//! Invariant: the same offer gives the same requests, in order of their times.

use std::time::Duration;

use lowtide::ByteSize;
use serde::{Deserialize, Serialize};

use crate::chance::Chance;
use crate::mix::{HOLD, Mix, PARTS};

/// How the requests are sent, and what they need.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
pub(crate) struct Sending {
    /// For how many milliseconds each body is sent, piece by piece; 0: as fast as it goes.
    pub(crate) body_millis: u64,
    /// `true` if bodies do not announce their length.
    pub(crate) is_chunked: bool,
    /// Further copies of its body that each request holds.
    pub(crate) copies: u32,
    /// `true` if one small request in [`GIANT_EVERY`] needs [`GIANT`] times its body.
    pub(crate) has_giants: bool,
}

/// One small request in so many is a giant.
const GIANT_EVERY: u64 = 100;
/// The number of times that a giant holds its body.
pub(crate) const GIANT: u32 = 100;

/// The load to offer.
#[derive(Clone, Debug)]
pub(crate) struct Offer {
    /// Which sizes.
    pub(crate) mix: Mix,
    /// Requests a second.
    pub(crate) rate: f64,
    /// The length in milliseconds.
    pub(crate) millis: u64,
    /// Of arrivals, sizes and holds.
    pub(crate) seed: u64,
    pub(crate) sending: Sending,
}

/// A request to come.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Arrival {
    /// Since the start of the load.
    pub(crate) at: Duration,
    /// Which of the classes.
    pub(crate) class: usize,
    /// Of its body.
    pub(crate) size: ByteSize,
    /// For which it is to hold its memory.
    pub(crate) hold: Duration,
    /// As said.
    pub(crate) is_giant: bool,
}

impl Offer {
    pub(crate) fn steady(mix: Mix, rate: f64, lasts: Duration, seed: u64) -> Self {
        Self { mix, rate, millis: millis(lasts), seed, sending: Sending::default() }
    }

    /// Returns its length.
    pub(crate) const fn lasts(&self) -> Duration {
        Duration::from_millis(self.millis)
    }

    /// The requests.
    pub(crate) fn arrivals(&self) -> Vec<Arrival> {
        let mut chance = Chance(self.seed);
        let (mut all, mut at) = (Vec::new(), 0.0);
        loop {
            // The gap between two arrivals of a Poisson process (exponential).
            at -= (1.0 - unit(chance.bits())).ln() / self.rate;
            if at >= self.lasts().as_secs_f64() {
                return all;
            }
            let class = class_of(chance.bits() % 100);
            let hold = HOLD[0] + (HOLD[1] - HOLD[0]).mul_f64(unit(chance.bits()));
            let size = self.mix.sizes()[class];
            // Drawn last, so that an offer without giants has the same requests.
            let is_small = self.sending.has_giants && class == 0;
            let is_giant = is_small && chance.bits().is_multiple_of(GIANT_EVERY);
            all.push(Arrival { at: Duration::from_secs_f64(at), class, size, hold, is_giant });
        }
    }
}

fn class_of(draw: u64) -> usize {
    let mut sum = 0;
    let below = |part: &u64| {
        sum += part;
        draw < sum
    };
    PARTS.iter().position(below).unwrap_or(0)
}

/// A number in [0, 1).
pub(crate) fn unit(bits: u64) -> f64 {
    f64::from(u32::try_from(bits >> 32).unwrap_or(0)) / (f64::from(u32::MAX) + 1.0)
}

/// Whole milliseconds.
pub(crate) fn millis(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}
