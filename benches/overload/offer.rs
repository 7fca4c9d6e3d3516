//! The mixes of body sizes, what a request takes, how many requests a second fit and when they come;
//! and the policies that admit them.
//!
//! Arithmetic only; nothing here is measured. Requests come at Poisson times and each takes its
//! bytes for its hold, so that what all of them take at one instant is a compound Poisson sum:
//! `mean = rate x hold x E[taken]`, `variance = rate x hold x E[taken^2]`.
//!
//! Invariant: at the rate that fits `mean + SIGMAS x deviation = ceiling x limit - base`.

use std::time::Duration;

use lowtide::ByteSize;
use serde::{Deserialize, Serialize};

use crate::app::FORWARD_COST;
use crate::chance::Chance;

/// Of a hundred requests, how many are of each class.
pub(crate) const PARTS: [u64; 3] = [70, 25, 5];
/// The classes, as figures name them.
pub(crate) const CLASSES: [&str; 3] = ["small", "medium", "large"];
/// The body, collected whole, and a second copy of it.
const COPIES: u64 = 2;
/// A request holds its memory for a time between these two, all of them as likely.
pub(crate) const HOLD: [Duration; 2] = [Duration::from_millis(1500), Duration::from_millis(2500)];
/// The memory that the service holds besides its requests: 2 MiB before the first, and the buffers
/// of idle connections. Room enough, by a guess.
pub(crate) const BASE: ByteSize = ByteSize::mib(12);
/// The part of the limit up to which is filled: lowtide's default.
pub(crate) const CEILING: f64 = 0.80;
/// A load fits where the sum of what requests take passes the ceiling this rarely: about .13 % of
/// the time, were it a normal distribution; somewhat more, as its large side is the long one.
const SIGMAS: f64 = 3.0;

/// Which sizes come.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Mix {
    /// 64 KiB, 1 MiB, 8 MiB: half of the bytes are in one of twenty requests.
    Heavy,
    /// 16 KiB, 256 KiB, 4 MiB.
    Small,
    /// 256 KiB, 2 MiB, 16 MiB.
    Large,
}

impl Mix {
    /// All of them.
    pub(crate) const ALL: [Self; 3] = [Self::Heavy, Self::Small, Self::Large];

    /// The size of the bodies of each class.
    pub(crate) const fn sizes(self) -> [ByteSize; 3] {
        match self {
            Self::Heavy => [ByteSize::kib(64), ByteSize::mib(1), ByteSize::mib(8)],
            Self::Small => [ByteSize::kib(16), ByteSize::kib(256), ByteSize::mib(4)],
            Self::Large => [ByteSize::kib(256), ByteSize::mib(2), ByteSize::mib(16)],
        }
    }

    /// The mean of a figure of the size over the classes.
    pub(crate) fn mean(self, of: impl Fn(ByteSize) -> f64) -> f64 {
        let parts = PARTS.map(|part| f64::from(u32::try_from(part).unwrap_or(0)) / 100.0);
        self.sizes().into_iter().zip(parts).map(|(size, part)| part * of(size)).sum()
    }

    /// Requests a second that fit under this limit of the host's memory.
    pub(crate) fn fits(self, limit: ByteSize) -> f64 {
        let hold = (HOLD[0] + HOLD[1]).as_secs_f64() / 2.0;
        let room = limit.scaled(CEILING).saturating_sub(BASE).as_f64();
        let mean = hold * self.mean(|size| taken(size).as_f64());
        let square = hold * self.mean(|size| taken(size).as_f64().powi(2));
        // mean x^2 + SIGMAS sqrt(square) x = room, with x the root of the rate.
        let half = SIGMAS * square.sqrt() / 2.0;
        let root = ((half * half + mean * room).sqrt() - half) / mean;
        root * root
    }
}

/// Returns the memory that a body takes in the text service while held: collected, and copied.
pub(crate) fn held(size: ByteSize) -> ByteSize {
    ByteSize::new(size.get() * COPIES)
}

/// Returns the memory that a request takes in all, with its two connections.
pub(crate) fn taken(size: ByteSize) -> ByteSize {
    held(size).saturating_add(FORWARD_COST)
}

// When requests come, of what size, and how long each holds its memory: all from a seed.
//
// Invariant: the same offer gives the same requests, in order of their times.

/// How the requests are sent, and what they need.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
pub(crate) struct Sending {
    /// The time in which each body is sent, piece by piece; 0: as fast as it goes.
    pub(crate) body: Duration,
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
    pub(crate) lasts: Duration,
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
    /// The requests.
    pub(crate) fn arrivals(&self) -> Vec<Arrival> {
        let mut chance = Chance(self.seed);
        let (mut all, mut at) = (Vec::new(), 0.0);
        loop {
            // The gap between two arrivals of a Poisson process (exponential).
            at -= (1.0 - unit(chance.bits())).ln() / self.rate;
            if at >= self.lasts.as_secs_f64() {
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
    (0..PARTS.len()).rfind(|class| PARTS[..*class].iter().sum::<u64>() <= draw).unwrap_or(0)
}

/// A number in [0, 1).
pub(crate) fn unit(bits: u64) -> f64 {
    f64::from(u32::try_from(bits >> 32).unwrap_or(0)) / (f64::from(u32::MAX) + 1.0)
}

/// A policy that admits requests; `admitted` makes them work.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Policy {
    /// Nothing: every request is served.
    None,
    /// A threshold on the resident set, sampled each 10 ms.
    Rss10,
    /// A fixed budget of bytes, in percent of the limit.
    Static(u32),
    /// lowtide, with its defaults.
    Lowtide,
}
