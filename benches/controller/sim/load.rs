//! The offered load: the number of requests at each time, and their sizes.
//!
//! A load is a function of time in parts of what fits. It admits nothing, and waits for nothing: an
//! open loop.
//!
//! Invariant: the parts of a mix sum to 1.

use std::f64::consts::TAU;

use super::chance::Chance;

/// Bodies of three sizes: MiB, and the part of requests that has them.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Mix {
    pub(crate) name: &'static str,
    pub(crate) classes: [(f64, f64); 3],
}

/// The names of classes of a mix, the smallest first.
pub(crate) const CLASSES: [&str; 3] = ["small", "middle", "large"];

/// The mixes.
pub(crate) const MIXES: [Mix; 3] = [
    Mix { name: "usual", classes: [(0.0625, 0.70), (1.0, 0.25), (8.0, 0.05)] },
    Mix { name: "small", classes: [(0.015_625, 0.70), (0.25, 0.25), (4.0, 0.05)] },
    Mix { name: "large", classes: [(0.25, 0.70), (2.0, 0.25), (16.0, 0.05)] },
];

impl Mix {
    /// MiB of a request on average.
    pub(crate) fn mean(&self) -> f64 {
        self.classes.iter().map(|(mib, part)| mib * part).sum()
    }

    /// MiB of the largest body.
    pub(crate) const fn largest(&self) -> f64 {
        self.classes[2].0
    }

    /// The class of a request.
    pub(crate) fn draw(&self, chance: &mut Chance) -> usize {
        let unit = chance.unit();
        if unit < self.classes[0].1 {
            0
        } else {
            usize::from(unit >= self.classes[0].1 + self.classes[1].1) + 1
        }
    }
}

/// The shape of a load over seconds: where it lies between its low and its high value.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Shape {
    /// Always high.
    Constant,
    /// High from a second on.
    Step { at: f64 },
    /// From low to high within these seconds.
    Ramp { within: f64 },
    /// Both in turn, half of the period each.
    Square { period: f64 },
    /// Between both, a sine.
    Sine { period: f64 },
    /// Low but for a short time in each period.
    Spikes { period: f64, width: f64 },
    /// A service's days, of so many seconds: nothing at night, a morning, a peak, an afternoon.
    Days { day: f64 },
}

/// A function of time, in parts of what fits.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Load {
    pub(crate) low: f64,
    pub(crate) high: f64,
    pub(crate) shape: Shape,
}

/// Seconds of a day.
pub(crate) const DAY: f64 = 86_400.0;

impl Load {
    pub(crate) const fn constant(high: f64) -> Self {
        Self { low: high, high, shape: Shape::Constant }
    }

    /// One of all but days.
    pub(crate) fn draw(chance: &mut Chance) -> Self {
        let (low, high) = (chance.between(0.0, 0.5), chance.around(1.0, 8.0));
        let period = chance.around(0.5, 10.0);
        let (times, shape) = match chance.next() % 6 {
            0 => (1.0, Shape::Constant),
            1 => (1.0, Shape::Step { at: 6.0 }),
            2 => (1.0, Shape::Ramp { within: 10.0 }),
            3 => (1.0, Shape::Square { period }),
            4 => (1.0, Shape::Sine { period }),
            _ => (2.0, Shape::Spikes { period, width: period * 0.1 }),
        };
        Self { low, high: times * high, shape }
    }

    /// Returns this load multiplied by `factor`.
    pub(crate) fn times(self, factor: f64) -> Self {
        Self { low: factor * self.low, high: factor * self.high, ..self }
    }

    /// The load at this second.
    pub(crate) fn at(self, second: f64) -> f64 {
        let of = |is_high: bool| f64::from(u8::from(is_high));
        let part = match self.shape {
            Shape::Constant => 1.0,
            Shape::Step { at } => of(second >= at),
            Shape::Ramp { within } => (second / within).min(1.0),
            Shape::Square { period } => of((second / period).fract() >= 0.5),
            Shape::Sine { period } => (TAU * second / period).cos().mul_add(-0.5, 0.5),
            Shape::Spikes { period, width } => of((second / period).fract() * period < width),
            Shape::Days { day } => of_day((second / day).fract() * 24.0),
        };
        if part < 1.0 { (self.high - self.low).mul_add(part, self.low) } else { self.high }
    }

    /// For how long the load stays about the same, in seconds.
    pub(crate) const fn grain(self) -> f64 {
        match self.shape {
            Shape::Days { day } => day / 20_000.0,
            _ => 0.02,
        }
    }
}

/// The part of a day's peak at this hour.
fn of_day(hour: f64) -> f64 {
    match hour {
        // A few requests an hour in the morning and in the evening.
        6.0..9.0 => 0.0005,
        9.0..9.5 => (hour - 9.0) * 2.0 * 0.25,
        9.5..10.0 => 0.25,
        // Overload for some minutes.
        12.0..12.1 => 1.0,
        12.1..12.2 => 0.2,
        15.0..15.5 => 0.1,
        18.0..22.0 => 0.0002,
        _ => 0.0,
    }
}
