//! The scenario of a seed: a process, a load, wrong estimates, a late sampler, and its claims.
//!
//! A scenario is plain values; nothing runs here.
//!
//! Invariant: the same seed is the same scenario.

use std::time::Duration;

use super::chance::Chance;
use super::load::{DAY, Load, MIXES, Mix, Shape};
use super::plant::Build;

/// The part of the limit that a controller with default settings fills.
pub(crate) const CEILING: f64 = 0.80;
/// MiB of the managed resource.
pub(crate) const RESOURCE: f64 = 60.0;

/// The subject of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// Steady overload.
    Overload,
    /// Overload that falls to a quarter of what fits.
    Fall,
    /// A quarter of what fits on average: by chance it is twice that for a moment.
    Fits,
    /// The truth behind the estimates changes in the midst of overload.
    Change,
    /// Any load beside neighbours, changing limits and a resource.
    Wild,
    /// Days of traffic.
    Days,
    /// A service that is to fit in a smaller limit.
    Fit,
}

impl Kind {
    /// Those that seeds take turns in.
    pub(crate) const ALL: [Self; 5] =
        [Self::Overload, Self::Fall, Self::Fits, Self::Change, Self::Wild];

    pub(crate) fn name(self) -> String {
        format!("{self:?}").to_lowercase()
    }
}

/// The error of estimates: a request holds `estimate x factor`, more or less.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Truth {
    pub(crate) factor: f64,
    /// A request's own factor lies between `1 / (1 + noise)` and `1 + noise`.
    pub(crate) noise: f64,
    /// From a second on it is another factor.
    pub(crate) change: Option<(f64, f64)>,
}

impl Truth {
    /// The factor at this second.
    pub(crate) fn at(&self, second: f64) -> f64 {
        match self.change {
            Some((at, factor)) if second >= at => factor,
            _ => self.factor,
        }
    }
}

/// The delay of the loop's ticks after the times that it asked for.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Late {
    /// Up to this always, evenly.
    Always(Duration, Duration),
    /// A millisecond or so, and in this part of the ticks 10 to 250 ms.
    Sometimes(f64),
}

/// The properties of the loop's readings.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Sampler {
    pub(crate) late: Late,
    /// A sample is that of the tick before.
    pub(crate) stale: bool,
    /// One tick in so many begins a moment in which no limit can be read.
    pub(crate) blind: Option<f64>,
}

/// Somebody else in the cgroup.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Neighbour {
    /// The most that it holds, as a part of the limit.
    pub(crate) part: f64,
    /// The time that it takes to grow to that; then it leaves, and so on.
    pub(crate) within: f64,
}

/// A managed model.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Model {
    pub(crate) mib: f64,
    pub(crate) residency: Duration,
    /// The time until which the service itself uses it.
    pub(crate) used_until: Option<Duration>,
}

/// The limit that a service is to fit in, in MiB, and the time for it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct FitPlan {
    pub(crate) limit: f64,
    pub(crate) within: Duration,
    /// MiB of a background task with a reservation, and the time at which it ends.
    pub(crate) task: (f64, Duration),
}

/// One run.
#[derive(Clone, Debug)]
pub(crate) struct Scenario {
    pub(crate) seed: u64,
    pub(crate) kind: Kind,
    pub(crate) build: Build,
    pub(crate) mix: Mix,
    pub(crate) load: Load,
    /// Seconds of load; ten more without follow.
    pub(crate) lasts: f64,
    pub(crate) truth: Truth,
    /// The part of a request's time within which its body arrives.
    pub(crate) arrives: f64,
    /// A request's memory goes up to so much later than its booking.
    pub(crate) lingers: Duration,
    /// A body that turns out larger than it said books more, and is given up where that fails.
    pub(crate) grows: bool,
    /// Requests are measured, and learned from, as behind the tower layer.
    pub(crate) measured: bool,
    pub(crate) sampler: Sampler,
    /// The longest delay of the worker's start.
    pub(crate) worker_late: Duration,
    pub(crate) neighbour: Option<Neighbour>,
    /// The limit is another part of the first one from a second on.
    pub(crate) limits: Vec<(f64, f64)>,
    /// One request in so many needs a model; `None` where there is none.
    pub(crate) resource: Option<f64>,
    /// The models; none for one of [`RESOURCE`].
    pub(crate) models: Vec<Model>,
    pub(crate) fit: Option<FitPlan>,
}

impl Scenario {
    /// A steady scenario of 256 MiB at this many times what fits, in which requests are not
    /// measured.
    pub(crate) fn steady(seed: u64, mix: Mix, factor: f64, times: f64) -> Self {
        let (limit, base, decay) = (256.0, 20.0, Some(1.0));
        Self {
            seed,
            kind: Kind::Overload,
            build: Build { limit, base, decay, caches: 2.0, holes: 0.02, files: 0.3 },
            mix,
            load: Load::constant(times),
            lasts: 20.0,
            truth: Truth { factor, noise: 0.2, change: None },
            arrives: 0.1,
            lingers: Duration::from_millis(2),
            grows: false,
            measured: false,
            sampler: Sampler { late: Late::Sometimes(0.002), stale: false, blind: None },
            worker_late: Duration::from_millis(2),
            neighbour: None,
            limits: Vec::new(),
            resource: None,
            models: Vec::new(),
            fit: None,
        }
    }

    /// The scenario of a seed.
    pub(crate) fn of(seed: u64) -> Self {
        let kinds = u64::try_from(Kind::ALL.len()).unwrap_or(1);
        let kind = Kind::ALL[usize::try_from(seed % kinds).unwrap_or(0)];
        Self::of_kind(seed, kind)
    }

    /// A scenario of this kind.
    pub(crate) fn of_kind(seed: u64, kind: Kind) -> Self {
        let chance = &mut Chance::new(seed);
        let limit = chance.pick(&[128.0, 256.0, 256.0, 1024.0]);
        let mut mix = chance.pick(&MIXES);
        if mix.largest() > 0.05 * limit && kind != Kind::Wild {
            // A body of an eighth of the limit is shed by chance alone.
            mix = MIXES[1];
        }
        let high = chance.pick(&[2.0, 4.0, 8.0]);
        let build = Build::draw(chance, limit);
        let truth = Truth {
            factor: chance.around(0.5, 2.0),
            noise: chance.pick(&[0.0, 0.2, 0.5]),
            change: None,
        };
        let sampler = Sampler::draw(chance);
        let mut scenario = Self {
            seed,
            kind,
            build,
            mix,
            load: Load::constant(high),
            lasts: 12.0,
            truth,
            arrives: chance.between(0.02, 0.5),
            lingers: chance.pick(&[Duration::ZERO, Duration::from_millis(5)]),
            grows: chance.happens(0.25),
            measured: true,
            sampler,
            worker_late: chance.pick(&[Duration::ZERO, Duration::from_millis(20)]),
            neighbour: None,
            limits: Vec::new(),
            resource: None,
            models: Vec::new(),
            fit: None,
        };
        scenario.make(chance, high);
        scenario
    }

    /// Sets the properties of its kind.
    fn make(&mut self, chance: &mut Chance, high: f64) {
        match self.kind {
            Kind::Overload => {}
            Kind::Fall => {
                self.load = Load { low: high, high: 0.25, shape: Shape::Step { at: 8.0 } };
            }
            Kind::Fits => {
                self.load = chance.pick(&[
                    Load::constant(0.25),
                    Load { low: 0.0, high: 0.3, shape: Shape::Sine { period: 3.0 } },
                    Load { low: 0.05, high: 0.3, shape: Shape::Square { period: 2.0 } },
                ]);
                self.lasts = 20.0;
            }
            Kind::Change => {
                let (one, other) = chance.pick(&[(0.5, 1.0), (1.0, 2.0), (2.0, 0.5), (1.0, 0.5)]);
                self.truth.factor = one;
                self.truth.change = Some((8.0, other));
                self.lasts = 20.0;
            }
            Kind::Wild => {
                self.load = Load::draw(chance);
                if chance.happens(0.5) {
                    let part = chance.between(0.02, 0.2);
                    let within = part / chance.between(0.005, 0.03);
                    self.neighbour = Some(Neighbour { part, within });
                }
                if chance.happens(0.4) {
                    self.limits = vec![(4.0, 0.95), (5.0, 0.9), (6.0, 0.85), (9.0, 1.2)];
                }
                if self.build.limit > 200.0 && chance.happens(0.5) {
                    self.resource = Some(chance.pick(&[0.2, 0.02]));
                }
                if chance.happens(0.3) {
                    self.sampler.blind = Some(0.002);
                }
            }
            Kind::Days => {
                self.load = Load { low: 0.0, high: 4.0, shape: Shape::Days { day: DAY } };
                self.resource = Some(0.2);
            }
            Kind::Fit => self.make_fit(chance),
        }
    }

    /// A load of requests, models of which some are in use, a background task with a reservation,
    /// page cache, and a fit that it may or may not be possible to reach.
    fn make_fit(&mut self, chance: &mut Chance) {
        let limit = self.build.limit;
        let within = chance.time(Duration::from_secs(8), Duration::from_secs(30));
        let during = |chance: &mut Chance| chance.time(BEFORE, BEFORE + within.mul_f64(1.2));
        for _ in 0..chance.pick(&[0, 1, 2, 4]) {
            let used_until = chance.happens(0.4).then(|| during(chance));
            let residency = chance.pick(&[Duration::ZERO, Duration::from_secs(3600)]);
            let mib = chance.between(0.03, 0.15) * limit;
            self.models.push(Model { mib, residency, used_until });
        }
        self.resource = Some(0.3).filter(|_| !self.models.is_empty());
        self.load = Load::constant(chance.pick(&[0.0, 0.1, 0.4, 1.0, 2.0]));
        self.lasts = 60.0;
        self.build.base = chance.between(0.02, 0.3) * limit;
        self.build.files = chance.pick(&[0.0, 0.0, 0.05, 0.3]);
        (self.build.caches, self.build.holes) = (0.0, 0.0);
        self.sampler = Sampler { late: Late::Sometimes(0.0), stale: false, blind: None };
        // The needs of measured requests are learned; the factor corrects the estimates of others.
        self.measured = chance.happens(0.7);
        let task = (chance.pick(&[0.0, 0.0, 0.1]) * limit, during(chance));
        let fit = chance.between(0.25, 0.9) * limit;
        self.fit = Some(FitPlan { limit: fit, within, task });
    }

    /// Requests a second that fill what admission fills on average, by what they say and by what is
    /// true.
    pub(crate) fn fitting_rate(&self) -> f64 {
        let resource = self.resource.map_or(0.0, |_| RESOURCE);
        let room = CEILING.mul_add(self.build.limit, -self.build.base - resource);
        // The body is there for all of the time but half of its arrival.
        let held = HOLD * 0.5_f64.mul_add(-self.arrives, 1.0);
        room / (self.mix.mean() * self.truth.factor.max(1.0) * held)
    }
}

/// The load before a fit begins.
pub(crate) const BEFORE: Duration = Duration::from_secs(3);
/// Seconds that a request lasts, on average, and how far from that it may be.
pub(crate) const HOLD: f64 = 2.0;
pub(crate) const HOLD_SPREAD: f64 = 0.5;

impl Sampler {
    fn draw(chance: &mut Chance) -> Self {
        let millis = Duration::from_millis;
        let late = chance.pick(&[
            Late::Sometimes(0.0),
            Late::Sometimes(0.002),
            Late::Sometimes(0.02),
            Late::Always(millis(10), millis(50)),
            Late::Always(millis(10), millis(250)),
        ]);
        Self { late, stale: chance.happens(0.3), blind: None }
    }

    /// Returns the delay of this tick.
    pub(crate) fn lateness(&self, chance: &mut Chance) -> Duration {
        let millis = Duration::from_millis;
        match self.late {
            Late::Always(low, high) => chance.time(low, high),
            Late::Sometimes(part) if chance.happens(part) => chance.time(millis(10), millis(250)),
            Late::Sometimes(_) => chance.time(Duration::ZERO, millis(2)),
        }
    }
}
