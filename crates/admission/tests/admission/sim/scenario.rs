//! The scenario of a seed: a process, a load, wrong estimates, a late sampler, and its claims.
//!
//! A scenario is plain values; nothing runs here.
//!
//! Invariant: the same seed is the same scenario.

use std::f64::consts::TAU;
use std::time::Duration;

use lowtide_admission::clock::Moment;
use lowtide_admission::{ByteSize, Limit, Sample};

use super::chance::Chance;

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
    /// Somebody else in the cgroup: the most that it holds, as a part of the limit, and the seconds in
    /// which it grows to that; then it leaves, and so on.
    pub(crate) neighbour: Option<(f64, f64)>,
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
        // In this order, in which chance is drawn.
        let mut scenario = Self {
            kind,
            build,
            lasts: 12.0,
            truth,
            arrives: chance.between(0.02, 0.5),
            lingers: chance.pick(&[Duration::ZERO, Duration::from_millis(5)]),
            grows: chance.happens(0.25),
            measured: true,
            sampler,
            worker_late: chance.pick(&[Duration::ZERO, Duration::from_millis(20)]),
            ..Self::steady(seed, mix, 1.0, high)
        };
        scenario.make(chance, high);
        scenario
    }

    /// Sets the properties of its kind.
    fn make(&mut self, chance: &mut Chance, high: f64) {
        match self.kind {
            Kind::Overload | Kind::Days => {}
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
                    self.neighbour = Some((part, within));
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

// The offered load, an open loop: the requests at each time, in parts of what fits, and their sizes.

/// Bodies of three sizes: MiB, and the part of requests that has them.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Mix {
    pub(crate) name: &'static str,
    pub(crate) classes: [(f64, f64); 3],
}

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

// The process in its cgroup: what it holds, what its allocator keeps, and when the kernel kills.
//
// Amounts are MiB. Freed bytes stay with their thread up to a bound, leave holes in pages that
// stay active, and else make pages dirty; the next allocation takes thread caches, holes and dirty
// pages before it touches new memory, as jemalloc does. Dirty pages go along a time constant, or
// never. The page cache takes what is left of the limit and gives it up to whoever touches memory.
// The plant admits nothing and purges nothing by itself.
//
// Invariants: `physical = base + live + cached + holes + dirty + neighbour`; the kernel kills where
// `physical > limit`, since nothing but page cache can be reclaimed.

/// Bytes of a MiB.
pub(crate) const MIB: f64 = 1_048_576.0;

/// The properties of the process.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Build {
    /// The cgroup's limit at the start.
    pub(crate) limit: f64,
    /// The memory that the process holds without requests.
    pub(crate) base: f64,
    /// The time constant by which dirty pages go, in seconds; `None` for never.
    pub(crate) decay: Option<f64>,
    /// The most freed bytes that threads keep.
    pub(crate) caches: f64,
    /// The part of freed bytes that leaves holes.
    pub(crate) holes: f64,
    /// The part of the limit that files would fill.
    pub(crate) files: f64,
}

impl Build {
    pub(crate) fn draw(chance: &mut Chance, limit: f64) -> Self {
        Self {
            limit,
            base: chance.between(0.04, 0.15) * limit,
            decay: chance.pick(&[None, Some(0.3), Some(1.0), Some(10.0)]),
            caches: chance.between(0.0, 0.015) * limit,
            holes: chance.between(0.0, 0.05),
            files: chance.pick(&[0.0, 0.3, 1.0]),
        }
    }
}

/// The process and its cgroup at one instant.
#[derive(Clone, Debug, Default)]
pub(crate) struct Plant {
    pub(crate) build: Build,
    pub(crate) limit: f64,
    pub(crate) live: f64,
    cached: f64,
    holes: f64,
    pub(crate) dirty: f64,
    pub(crate) neighbour: f64,
    /// By when the dirty pages have decayed.
    decayed_at: Moment,
    pub(crate) killed: Option<Moment>,
}

impl Plant {
    pub(crate) fn new(build: Build) -> Self {
        Self { build, limit: build.limit, ..Self::default() }
    }

    pub(crate) fn physical(&self) -> f64 {
        self.build.base + self.live + self.cached + self.holes + self.dirty + self.neighbour
    }

    /// Returns the charge of the cgroup, with the page cache.
    pub(crate) fn usage(&self) -> f64 {
        let files = (self.build.files * self.limit).min(self.limit - self.physical());
        self.physical() + files.max(0.0)
    }

    /// A thread allocates and touches it.
    pub(crate) fn allocate(&mut self, now: Moment, mib: f64) {
        self.decay(now);
        let mut fresh = mib;
        for kept in [&mut self.cached, &mut self.holes, &mut self.dirty] {
            let taken = fresh.min(*kept);
            *kept -= taken;
            fresh -= taken;
        }
        self.live += mib;
        self.look(now);
    }

    pub(crate) fn free(&mut self, now: Moment, mib: f64) {
        self.decay(now);
        self.live = (self.live - mib).max(0.0);
        let cached = mib.min(self.build.caches - self.cached);
        let holes = (mib - cached) * self.build.holes;
        self.cached += cached;
        self.holes += holes;
        self.dirty += mib - cached - holes;
    }

    /// A purge gives back at most this much; says how much it was.
    pub(crate) fn give_back(&mut self, now: Moment, most: f64) -> f64 {
        self.decay(now);
        let given = most.min(self.dirty);
        self.dirty -= given;
        given
    }

    /// Threads give back this part of what they keep.
    pub(crate) fn recall(&mut self, part: f64) {
        let given = self.cached * part;
        self.cached -= given;
        self.dirty += given;
    }

    pub(crate) fn set_neighbour(&mut self, now: Moment, mib: f64) {
        self.decay(now);
        self.neighbour = mib;
        self.look(now);
    }

    /// Another limit, where the kernel accepts it: it refuses one that leaves no room for what is
    /// held (version 1), and an operator who sees to that leaves some.
    pub(crate) fn set_limit(&mut self, now: Moment, mib: f64) -> bool {
        self.decay(now);
        let accepts = mib >= self.limit || self.physical() <= 0.82 * mib;
        if accepts {
            self.limit = mib;
        }
        accepts
    }

    /// The kernel's limit falls, whatever is held.
    pub(crate) fn lower(&mut self, now: Moment, mib: f64) {
        self.limit = mib;
        self.look(now);
    }

    /// Returns a sensor's reading, without a limit if that cannot be read.
    pub(crate) fn sample(&mut self, now: Moment, knows_limit: bool) -> Sample {
        self.decay(now);
        let limit = if knows_limit { Limit::given(bytes(self.limit)) } else { Limit::UNKNOWN };
        let active = self.build.base + self.live + self.cached + self.holes;
        Sample {
            physical: bytes(self.physical()),
            purgeable: bytes(self.dirty),
            cached: bytes(self.cached),
            anonymous: bytes(active + self.dirty),
            untracked_anonymous: bytes(self.dirty),
            limit,
            heap_live: bytes(self.build.base + self.live),
            heap_active: bytes(active),
            ..Sample::default()
        }
    }

    fn decay(&mut self, now: Moment) {
        if let Some(constant) = self.build.decay {
            let passed = (now - self.decayed_at).as_secs_f64();
            if passed > 0.0 && self.dirty > 0.0 {
                self.dirty *= (-passed / constant).exp();
                if self.dirty < 1e-3 {
                    self.dirty = 0.0;
                }
            }
        }
        self.decayed_at = now;
    }

    fn look(&mut self, now: Moment) {
        let part = self.physical() / self.limit;
        if part > 1.0 && self.killed.is_none() {
            self.killed = Some(now);
        }
    }
}

/// An amount in bytes.
pub(crate) fn bytes(mib: f64) -> ByteSize {
    ByteSize::mib(1).scaled(mib.max(0.0))
}
