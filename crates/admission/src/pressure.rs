//! Pressure levels: how close memory use is to the limit, with hysteresis.
//!
//! Pure arithmetic over time, usage and limit. It reads no clock and no file, and acts on nothing.
//!
//! A level is entered as soon as its `up` threshold is reached. Fast growth raises the level by one
//! more: growth that would reach the limit within [`TICKS_TO_FULL`] samples of a busy service. A
//! level is left one step at a time, after usage has stayed below its `down` threshold for the
//! dwell time.
//!
//! Invariants: `level >= the highest level whose up threshold <= usage / limit`;
//! `falls <= elapsed / dwell + 1` and `rises <= falls + 3`, so that level changes are bounded for
//! any usage.

use std::time::Duration;

use lowtide_core::bytes::ByteSize;
use lowtide_core::clock::Moment;

/// Growth that fills the limit within this many samples raises the level by one.
const TICKS_TO_FULL: f64 = 5.0;

/// A longer step than this is a step of an idle service, and the next ones will be shorter, so
/// growth is not extrapolated over five idle steps. Twice the step of an active service.
const STEP_MAX: Duration = Duration::from_millis(20);

/// The weight of the newest growth in its average. A guess: two samples make three quarters of it.
const GROWTH_WEIGHT: f64 = 0.5;

lowtide_core::named_enum! {
    /// A pressure level: how close memory use is to the limit.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
    #[repr(u8)]
    pub enum Level {
        /// Far from the limit.
        #[default]
        None = "none",
        /// Heap and arenas are purged.
        Elevated = "elevated",
        /// Idle resources are unloaded; requests of low priority are rejected.
        High = "high",
        /// Requests of normal priority are rejected as well.
        Critical = "critical",
    }
}

impl Level {
    /// Returns the number for metrics: 0 none, 1 elevated, 2 high, 3 critical.
    #[must_use]
    pub const fn as_u8(self) -> u8 {
        self as u8
    }

    /// Returns the level of a number. Numbers above 3 are critical.
    #[must_use]
    pub const fn from_u8(figure: u8) -> Self {
        match figure {
            0 => Self::None,
            1 => Self::Elevated,
            2 => Self::High,
            _ => Self::Critical,
        }
    }
}

/// The thresholds of elevated, high and critical, as fractions of the limit, and the dwell time.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Thresholds {
    /// A level is entered at or above this fraction of the limit.
    pub up: [f64; 3],
    /// It may be left below this fraction.
    pub down: [f64; 3],
    /// How long usage must stay below the `down` threshold before the level is left. With zero, a
    /// level can be left at each sample.
    pub dwell: Duration,
}

impl Thresholds {
    /// Returns the highest level whose upper threshold is reached.
    fn reached(&self, ratio: f64) -> Level {
        Level::ALL[self.up.partition_point(|up| ratio >= *up)]
    }
}

impl Default for Thresholds {
    /// .75/.70, .85/.78, .93/.85 and 250 ms: determined in an overload experiment (a 256 MiB memory
    /// cgroup at up to eight times the load that fits), together with a ceiling of .80.
    fn default() -> Self {
        let dwell = Duration::from_millis(250);
        Self { up: [0.75, 0.85, 0.93], down: [0.70, 0.78, 0.85], dwell }
    }
}

/// The current level and the state that determines the next one. Updated by one owner.
#[derive(Clone, Debug, Default)]
pub(crate) struct PressureTracker {
    thresholds: Thresholds,
    pub(crate) level: Level,
    /// The time since which usage is below the lower threshold of the current level.
    below_since: Option<Moment>,
    last: Option<(Moment, ByteSize)>,
    /// The average growth in bytes per second; negative if memory shrinks.
    growth: f64,
    /// The number of times that each level was entered.
    pub(crate) entered: [u64; 4],
}

impl PressureTracker {
    /// Creates a state at [`Level::None`].
    pub(crate) fn new(thresholds: Thresholds) -> Self {
        Self { thresholds, ..Self::default() }
    }

    /// Updates the state with a sample and returns the level. A limit of [`ByteSize::MAX`] means no
    /// limit; a limit of zero is always exceeded.
    pub(crate) fn update(&mut self, now: Moment, usage: ByteSize, limit: ByteSize) -> Level {
        let (then, before) = self.last.replace((now, usage)).unwrap_or((now, usage));
        let step = now - then;
        if !step.is_zero() {
            let newest = (usage.as_f64() - before.as_f64()) / step.as_secs_f64();
            self.growth += GROWTH_WEIGHT * (newest - self.growth);
        }
        // The limit is reached soon at the current growth.
        let grown = self.growth * step.min(STEP_MAX).as_secs_f64() * TICKS_TO_FULL;
        let fills_soon = limit != ByteSize::MAX && grown > 0.0;
        let fills_soon = fills_soon && usage.as_f64() + grown >= limit.as_f64();
        let ratio = ratio(usage, limit);
        let reached = self.thresholds.reached(ratio);
        let target = Level::from_u8(reached.as_u8() + u8::from(fills_soon));
        let down = (self.level as usize).checked_sub(1).map(|at| self.thresholds.down[at]);
        if target > self.level {
            self.enter(target);
        } else if target == self.level || down.is_none_or(|down| ratio >= down) {
            self.below_since = None;
        } else {
            let since = *self.below_since.get_or_insert(now);
            if now - since >= self.thresholds.dwell {
                self.enter(Level::from_u8(self.level.as_u8().saturating_sub(1)));
                self.below_since = Some(now);
            }
        }
        debug_assert!(self.level >= reached, "left a level whose threshold is reached");
        self.level
    }

    fn enter(&mut self, level: Level) {
        (self.level, self.below_since) = (level, None);
        self.entered[level as usize] += 1;
    }
}

/// Returns usage as a fraction of the limit.
fn ratio(usage: ByteSize, limit: ByteSize) -> f64 {
    if limit == ByteSize::MAX {
        0.0
    } else if limit.is_zero() {
        f64::INFINITY
    } else {
        usage.as_f64() / limit.as_f64()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMIT: ByteSize = ByteSize::mib(1000);

    fn at(millis: u64) -> Moment {
        Moment::after_origin(Duration::from_millis(millis))
    }

    fn part(percent: u64) -> ByteSize {
        ByteSize::mib(10 * percent)
    }

    /// Holds usage for so long that growth is forgotten.
    fn settle(pressure: &mut PressureTracker, from: u64, percent: u64, millis: u64) -> Level {
        let mut level = pressure.level;
        for step in 0..millis / 10 {
            level = pressure.update(at(from + step * 10), part(percent), LIMIT);
        }
        level
    }

    #[test]
    fn levels_rise_at_once_and_fall_one_step_after_the_dwell_time() {
        let mut pressure = PressureTracker::new(Thresholds::default());
        assert_eq!(pressure.update(at(0), part(95), LIMIT), Level::Critical);
        let mut seen = vec![(0, Level::Critical)];
        for tick in 1..200 {
            let level = pressure.update(at(tick * 10), part(10), LIMIT);
            if seen.last().map(|(_, last)| *last) != Some(level) {
                seen.push((tick * 10, level));
            }
        }
        let expected =
            [(0, Level::Critical), (260, Level::High), (510, Level::Elevated), (760, Level::None)];
        assert_eq!(seen, expected);
    }

    #[test]
    fn between_the_marks_nothing_moves() {
        let mut pressure = PressureTracker::new(Thresholds::default());
        assert_eq!(settle(&mut pressure, 0, 72, 1000), Level::None);
        assert_eq!(settle(&mut pressure, 1000, 75, 1000), Level::Elevated);
        assert_eq!(settle(&mut pressure, 2000, 72, 5000), Level::Elevated);
        assert_eq!(settle(&mut pressure, 7000, 69, 240), Level::Elevated);
        // A moment above the lower mark starts the dwell time again.
        assert_eq!(settle(&mut pressure, 7240, 71, 10), Level::Elevated);
        assert_eq!(settle(&mut pressure, 7250, 69, 250), Level::Elevated);
        assert_eq!(settle(&mut pressure, 7500, 69, 20), Level::None);
    }

    #[test]
    fn fast_growth_raises_one_level_before_the_mark() {
        let mut pressure = PressureTracker::new(Thresholds::default());
        let mut first = None;
        for tick in 0..20 {
            let percent = 20 + tick * 8;
            let level = pressure.update(at(tick * 10), part(percent.min(100)), LIMIT);
            if level > Level::None && first.is_none() {
                first = Some(percent);
            }
        }
        let first = first.expect("raised");
        assert!(first < 75, "raised only at {first} %");
        assert!(first >= 100 - 8 * 5, "raised at {first} % already");
    }

    /// The bug: the growth of one idle step of 250 ms was drawn out over five more, so that the
    /// first burst after a quiet time was pressure at a tenth of the limit.
    #[test]
    fn a_burst_after_an_idle_step_was_pressure_far_from_the_limit() {
        let mut pressure = PressureTracker::new(Thresholds::default());
        pressure.update(at(0), part(2), LIMIT);
        assert_eq!(pressure.update(at(250), part(42), LIMIT), Level::None);
        for step in 1..=10 {
            let level = pressure.update(at(250 + 10 * step), part(42), LIMIT);
            assert_eq!(level, Level::None, "the burst stays where it is");
        }
    }

    #[test]
    fn no_limit_is_no_pressure_and_a_limit_of_zero_is_critical() {
        let mut pressure = PressureTracker::new(Thresholds::default());
        assert_eq!(pressure.update(at(0), ByteSize::gib(900), ByteSize::MAX), Level::None);
        assert_eq!(pressure.update(at(10), ByteSize::MAX, ByteSize::MAX), Level::None);
        assert_eq!(pressure.update(at(20), ByteSize::ZERO, ByteSize::ZERO), Level::Critical);
        assert_eq!(pressure.update(at(30), ByteSize::MAX, ByteSize::new(1)), Level::Critical);
    }

    #[test]
    fn flips_are_bounded_however_usage_moves() {
        let mut draw = crate::chance::draws(7);
        let mut pressure = PressureTracker::new(Thresholds::default());
        let (mut rises, mut falls, mut last) = (0_u64, 0_u64, Level::None);
        let ticks = 20_000;
        for tick in 0..ticks {
            let used = part(draw(101));
            let level = pressure.update(at(tick * 10), used, LIMIT);
            rises += u64::from(level > last);
            falls += u64::from(level < last);
            assert!(level >= Thresholds::default().reached(ratio(used, LIMIT)));
            last = level;
        }
        let dwells = ticks * 10 / 250;
        assert!(falls <= dwells + 1, "{falls} falls in {dwells} dwell times");
        assert!(rises <= falls + 3, "{rises} rises after {falls} falls");
        let entered: u64 = pressure.entered.iter().sum();
        assert_eq!(entered, rises + falls);
    }

    #[test]
    fn levels_print_lower_case_and_count_from_zero() {
        for (figure, level) in Level::ALL.into_iter().enumerate() {
            assert_eq!(usize::from(level.as_u8()), figure);
            assert_eq!(Level::from_u8(level.as_u8()), level);
            assert_eq!(level.to_string(), level.name());
        }
        assert!(Level::Critical > Level::High);
        assert_eq!(format!("{:>9}", Level::High), "     high");
    }
}
