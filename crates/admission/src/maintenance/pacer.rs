//! Limits the rate of the control loop's ticks, so that they take at most a set share of a core.
//!
//! The cost of a tick is the smallest of the last few: on a busy machine the clock also counts the
//! time that other processes took, and a loop that slowed down for that would be blind when it
//! matters. It reads no clock.
//!
//! Invariant: `rest >= cost / share - cost`, with `cost` the smallest of the last [`KEPT`], and
//! `next <= max(requested, now + rest_max)`.

use std::time::Duration;

use lowtide_core::clock::Moment;

/// The number of ticks whose cost is kept.
const KEPT: usize = 8;

/// The costs of the last ticks.
#[derive(Debug)]
pub(super) struct Pacer {
    /// The inverse of the share of a core that ticks may take.
    per_cost: u32,
    /// The longest rest.
    rest_max: Duration,
    costs: [Duration; KEPT],
    next: usize,
}

impl Pacer {
    /// Creates a pacer for this share of a core, in `(0, 1]`.
    pub(super) fn new(share: f64, rest_max: Duration) -> Self {
        // From 1 to 10,000, since the share is checked to be at least that small.
        let per_cost = Duration::from_secs(1).div_f64(share.clamp(1e-4, 1.0)).as_secs();
        let per_cost = u32::try_from(per_cost).unwrap_or(u32::MAX);
        Self { per_cost, rest_max, costs: [Duration::ZERO; KEPT], next: 0 }
    }

    /// Adds a tick that began at `begun` and took `cost`. Returns the time of the next tick, not
    /// before `asked`.
    pub(super) fn next(&mut self, begun: Moment, cost: Duration, asked: Moment) -> Moment {
        if let Some(place) = self.costs.get_mut(self.next) {
            *place = cost;
        }
        self.next = (self.next + 1) % KEPT;
        let least = self.costs.iter().min().copied().unwrap_or_default();
        let rest = (least * self.per_cost).min(self.rest_max);
        asked.max(begun + rest)
    }
}

#[cfg(all(test, not(lowtide_loom)))]
mod tests {
    use super::*;

    const MILLI: Duration = Duration::from_millis(1);

    fn pacer() -> Pacer {
        Pacer::new(0.01, 250 * MILLI)
    }

    /// Returns the time of the next tick, in ms, after ticks of these ms, if the loop requests 10.
    fn after(costs: &[u32]) -> u128 {
        let mut pacer = pacer();
        let begun = Moment::ORIGIN + 1000 * MILLI;
        let mut next = begun;
        for &cost in costs {
            next = pacer.next(begun, cost * MILLI, begun + 10 * MILLI);
        }
        (next - begun).as_millis()
    }

    #[test]
    fn ticks_that_always_cost_much_come_less_often() {
        assert_eq!(after(&[2; KEPT]), 200, "one in a hundred");
        assert_eq!(after(&[5; KEPT]), 250, "and no later than an idle service's");
        assert_eq!(after(&[1; 4]), 10, "too few to tell");
    }

    #[test]
    fn one_tick_that_others_held_up_slows_nothing() {
        let mut costs = [0; 2 * KEPT];
        costs[9] = 80;
        assert_eq!(after(&costs), 10);
        costs = [80; 2 * KEPT];
        costs[9] = 0;
        assert_eq!(after(&costs), 10, "seven of eight");
    }

    #[test]
    fn a_rest_that_is_asked_for_is_never_shortened() {
        let begun = Moment::ORIGIN;
        let asked = begun + 700 * MILLI;
        assert_eq!(pacer().next(begun, 9 * MILLI, asked), asked);
    }
}
