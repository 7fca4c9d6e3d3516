//! Latencies of one thread: counts by nanoseconds, 128 steps to a power of two.
//!
//! It allocates when it is made and never again. Invariant: a step is less than 0.8 % wide, and a
//! percentile is placed within its step by how many lie below.

use crate::count;

const STEPS: usize = 128;
const POWERS: usize = 34;

/// Counts by latency.
#[derive(Clone, Debug)]
pub struct Histogram(Vec<u32>);

impl Default for Histogram {
    fn default() -> Self {
        Self(vec![0; STEPS * POWERS])
    }
}

impl Histogram {
    /// Counts one.
    pub fn add(&mut self, nanos: u64) {
        if let Some(count) = self.0.get_mut(step(nanos)) {
            *count += 1;
        }
    }

    /// Counts what another counted.
    pub fn merge(&mut self, other: &Self) {
        for (sum, more) in self.0.iter_mut().zip(&other.0) {
            *sum += more;
        }
    }

    /// The latency below which this part of all lie, in nanoseconds; 0 where there are none.
    #[must_use]
    pub fn percentile(&self, part: f64) -> f64 {
        let all: u64 = self.0.iter().map(|&count| u64::from(count)).sum();
        let wanted = part * count(all);
        let mut below = 0.0;
        for (at, &here) in self.0.iter().enumerate() {
            let here = f64::from(here);
            if here > 0.0 && below + here >= wanted {
                let (start, end) = (start(at), start(at + 1));
                return start + (end - start) * ((wanted - below) / here);
            }
            below += here;
        }
        0.0
    }
}

/// The step of a latency: below 128 ns each is its own.
fn step(nanos: u64) -> usize {
    let nanos = usize::try_from(nanos).unwrap_or(usize::MAX);
    if nanos < STEPS {
        return nanos;
    }
    let power = (nanos.ilog2() - STEPS.ilog2()) as usize;
    let at = STEPS + power * STEPS + ((nanos >> power) - STEPS);
    at.min(STEPS * POWERS - 1)
}

/// Returns the start of a step in nanoseconds.
fn start(at: usize) -> f64 {
    let (power, within) = (at / STEPS, at % STEPS);
    let nanos = if power == 0 { within } else { (STEPS + within) << (power - 1) };
    count(nanos as u64)
}
