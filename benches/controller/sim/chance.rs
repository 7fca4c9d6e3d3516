//! Chance from a seed: the same seed gives the same run.
//!
//! The generator is that of the other benches. It reads nothing but its seed.
//!
//! Invariant: `unit` lies in `[0, 1)`.

#[path = "../../index/chance.rs"]
#[allow(dead_code, reason = "sizes of device blocks are drawn elsewhere")]
mod splitmix;

use std::time::Duration;

/// The generator.
#[derive(Clone, Debug)]
pub(crate) struct Chance(splitmix::Chance);

impl Chance {
    pub(crate) const fn new(seed: u64) -> Self {
        Self(splitmix::Chance::new(seed))
    }

    pub(crate) const fn next(&mut self) -> u64 {
        self.0.next()
    }

    /// A number in `[0, 1)`.
    #[expect(clippy::cast_precision_loss, reason = "53 bits fit a float")]
    pub(crate) fn unit(&mut self) -> f64 {
        (self.next() >> 11) as f64 / (1_u64 << 53) as f64
    }

    /// A number between two.
    pub(crate) fn between(&mut self, low: f64, high: f64) -> f64 {
        (high - low).mul_add(self.unit(), low)
    }

    /// Evenly by logarithm between two.
    pub(crate) fn around(&mut self, low: f64, high: f64) -> f64 {
        self.between(low.ln(), high.ln()).exp()
    }

    /// Returns `true` with this probability.
    pub(crate) fn happens(&mut self, part: f64) -> bool {
        self.unit() < part
    }

    /// The gap to the next arrival of a Poisson process of this rate a second.
    pub(crate) fn gap(&mut self, rate: f64) -> f64 {
        -(1.0 - self.unit()).ln() / rate
    }

    /// One of them.
    pub(crate) fn pick<T: Copy>(&mut self, of: &[T]) -> T {
        let at = usize::try_from(self.next() >> 33).unwrap_or(0) % of.len();
        of[at]
    }

    /// A time between two.
    pub(crate) fn time(&mut self, low: Duration, high: Duration) -> Duration {
        low + high.saturating_sub(low).mul_f64(self.unit())
    }
}
