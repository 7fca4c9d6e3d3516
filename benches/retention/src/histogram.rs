//! Latencies of one thread: counts by nanoseconds, 128 steps to a power of two.
//!
//! It allocates when it is made and never again. Invariant: a step is less than 0.8 % wide, and a
//! percentile is placed within its step by how many lie below.

const STEPS: u32 = 128;
const BINS: usize = 128 * 34;

/// Counts by latency.
#[derive(Clone, Debug)]
pub(crate) struct Histogram(Vec<u32>);

impl Default for Histogram {
    fn default() -> Self {
        Self(vec![0; BINS])
    }
}

impl Histogram {
    /// Counts one.
    pub(crate) fn add(&mut self, nanos: u64) {
        // Below 128 ns each is a step of its own.
        let power = nanos.max(1).ilog2().saturating_sub(STEPS.ilog2());
        let at = u64::from(power * STEPS) + (nanos >> power);
        let at = usize::try_from(at).unwrap_or(usize::MAX);
        self.0[at.min(BINS - 1)] += 1;
    }

    /// Counts what another counted.
    pub(crate) fn merge(&mut self, other: &Self) {
        self.0.iter_mut().zip(&other.0).for_each(|(sum, more)| *sum += more);
    }

    /// The latency below which this part of all lie, in nanoseconds; 0 where there are none.
    pub(crate) fn percentile(&self, part: f64) -> f64 {
        let wanted = part * self.0.iter().map(|&count| f64::from(count)).sum::<f64>();
        let mut below = 0.0;
        for (at, &here) in (0_u32..).zip(&self.0) {
            let here = f64::from(here);
            if here > 0.0 && below + here >= wanted {
                let power = (at / STEPS).saturating_sub(1);
                let width = f64::from(power).exp2();
                let start = f64::from(at - power * STEPS) * width;
                return start + width * ((wanted - below) / here);
            }
            below += here;
        }
        0.0
    }
}
