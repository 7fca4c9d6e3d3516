//! Fits without real memory: the control loop, admission and resources of the crate over a fake
//! process, in virtual time. A seed gives the schedule.
//!
//! A schedule has a load of requests with wrong estimates, models of which some are in use, a
//! background task with a reservation, page cache, and a fit that it may or may not be possible to
//! reach. When the fit is reached, the kernel's limit is lowered to it at once, and the load goes
//! on.
//!
//! It judges: a fit is possible if what requests and models in use do not release leaves room four
//! seconds before its end; one that fails although it was possible is refused wrongly. No process
//! may exceed the kernel's limit, and no fit may be reached while the usage does not fit.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use lowtide_admission::ByteSize;
use lowtide_admission::clock::{Clock as _, ManualClock, Moment};
use lowtide_admission::fit::{Fit, FitSample, FitStep, FitTerms};
use lowtide_admission::{
    Admission, Budget, Cost, Job, JobQueue, Limit, LimitSource, Maintenance, MaintenanceActions,
    Managed, Permit, ReclaimPolicy, Resources, Sample, Sensor, Settings, Trigger, Use, Worker,
};
use lowtide_core::sync::lock;

use super::chance::Chance;

const MIB: f64 = 1_048_576.0;
const MILLI: Duration = Duration::from_millis(1);
/// The load before the fit begins.
const BEFORE: Duration = Duration::from_secs(3);
/// The load after the limit was lowered.
const AFTER: Duration = Duration::from_secs(5);
/// What is left by then is in the way: a fit takes a second, and requests last for up to two.
const MARGIN: Duration = Duration::from_secs(4);
/// A request holds its memory after this part of its time.
const GROWS: f64 = 0.3;
/// The part of the fit up to which a service can be full of what does not shrink.
const FILLED: f64 = 0.85;

/// What happened in a schedule.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Seen {
    /// `true` if the process could be made to fit.
    pub(crate) possible: bool,
    /// `true` if what never shrinks is more than the fit.
    pub(crate) impossible: bool,
    /// The seconds until it fit; `None` if it was refused.
    pub(crate) seconds: Option<f64>,
    /// Requests that were admitted in the smaller limit.
    pub(crate) served: u64,
}

/// Why a schedule failed.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Fault {
    /// The process held more than the limit, after so many seconds.
    Killed { after: f64 },
    /// The fit was reached while the usage did not fit.
    Wrong { usage_mib: f64 },
    /// It was possible.
    Refused(Seen),
    /// The fit was still in force after the limit was lowered.
    Left,
}

/// The process and its cgroup, in MiB.
#[derive(Debug, Default)]
struct Plant {
    /// The kernel's limit.
    limit: f64,
    fit: Option<ByteSize>,
    base: f64,
    live: f64,
    models: f64,
    dirty: f64,
    /// Page cache, which the kernel drops when memory is short.
    cache: f64,
    step: Option<FitStep>,
}

impl Plant {
    fn physical(&self) -> f64 {
        self.base + self.live + self.models + self.dirty
    }

    fn usage(&self) -> f64 {
        (self.physical() + self.cache).min(self.limit.max(self.physical()))
    }

    fn allocate(&mut self, mib: f64) {
        self.dirty -= self.dirty.min(mib);
        self.live += mib;
    }

    fn free(&mut self, mib: f64) {
        self.live -= mib;
        self.dirty += mib;
    }

    fn kernel(&self) -> Limit {
        Limit { bytes: bytes(self.limit), source: LimitSource::Cgroup }
    }
}

fn bytes(mib: f64) -> ByteSize {
    ByteSize::new(1).scaled(mib.max(0.0) * MIB)
}

type SharedPlant = Arc<Mutex<Plant>>;

struct Senses(SharedPlant);

impl Sensor for Senses {
    fn sample(&mut self, _: Moment) -> Sample {
        let plant = lock(&self.0);
        let active = plant.physical() - plant.dirty;
        Sample {
            physical: bytes(plant.physical()),
            purgeable: bytes(plant.dirty),
            anonymous: bytes(plant.physical()),
            untracked_anonymous: bytes(plant.dirty),
            limit: plant.kernel().fitted(plant.fit),
            has_fit: plant.fit.is_some(),
            heap_live: bytes(active),
            heap_active: bytes(active),
            ..Sample::default()
        }
    }
}

/// What `lowtide::memory` does, over the plant.
struct Does {
    plant: SharedPlant,
    fit: Arc<Mutex<Option<Fit>>>,
    admission: Admission,
    resources: Resources,
    queue: Arc<JobQueue>,
}

impl MaintenanceActions for Does {
    fn purge(&mut self, _: Trigger) -> ByteSize {
        bytes(std::mem::take(&mut lock(&self.plant).dirty))
    }

    fn decay_device(&mut self, _: Moment) {}

    fn tend_fit(&mut self, now: Moment) {
        let Some(mut fit) = *lock(&self.fit) else { return };
        let sample = self.sample();
        let step = fit.step(now, &sample);
        let release = (step == FitStep::Shrinking).then(|| fit.release(now, &sample)).flatten();
        *lock(&self.fit) = Some(fit);
        {
            let mut plant = lock(&self.plant);
            let is_over = matches!(step, FitStep::Lowered | FitStep::Failed | FitStep::Expired);
            (plant.step, plant.fit) = (Some(step), Some(fit.limit()).filter(|_| !is_over));
        }
        if let Some(beyond) = release {
            if !sample.purgeable.is_zero() {
                self.queue.push_one(Job::Purge { trigger: Trigger::Manual });
            }
            self.resources.release(beyond);
        }
    }
}

impl Does {
    fn sample(&self) -> FitSample {
        let ledger = self.admission.ledger(Budget::Host);
        let uses = self.resources.all().iter().any(|resource| resource.stats().loaded);
        let promised = ledger.unheld().saturating_add(ledger.loading());
        let holds = uses || !promised.is_zero() || self.admission.stats().held() > 0;
        let plant = lock(&self.plant);
        FitSample {
            limit: plant.kernel().bytes,
            usage: Some(bytes(plant.usage())),
            physical: bytes(plant.physical()),
            purgeable: bytes(plant.dirty),
            promised,
            may_release: holds || plant.dirty > 1.0,
        }
    }
}

/// A request that runs.
struct Request {
    permit: Permit,
    _guard: Option<Use<()>>,
    began: Moment,
    lasts: Duration,
    needs: f64,
    holds: f64,
}

/// A model, and the time until which it is in use; `None` if only requests use it.
struct Model {
    managed: Managed<()>,
    mib: f64,
    used_until: Option<Moment>,
    guard: Option<Use<()>>,
}

/// A schedule.
struct Schedule {
    limit: f64,
    fit: f64,
    within: Duration,
    base: f64,
    cache: f64,
    /// Requests a second, and the largest of them.
    rate: f64,
    largest: f64,
    /// The truth of an estimate.
    truth: f64,
    measured: bool,
    /// A background task with a reservation, and the time at which it ends.
    task: f64,
    task_ends: Duration,
    /// Sizes of models, the times of their use in the schedule, and their minimum residency.
    models: Vec<(f64, Option<Duration>, Duration)>,
}

impl Schedule {
    fn draw(chance: &mut Chance) -> Self {
        let limit = chance.around(256.0, 4096.0);
        let within = chance.time(Duration::from_secs(8), Duration::from_secs(30));
        let after = |chance: &mut Chance| {
            let low = BEFORE;
            chance.time(low, BEFORE + within.mul_f64(1.2))
        };
        let count = chance.pick(&[0, 1, 2, 4]);
        let models = (0..count).map(|_| {
            let used = chance.happens(0.4).then(|| after(chance));
            let residency = chance.pick(&[Duration::ZERO, Duration::from_secs(3600)]);
            (chance.between(0.03, 0.15) * limit, used, residency)
        });
        let models = models.collect();
        let load = chance.pick(&[0.0, 0.1, 0.4, 1.0, 2.0]);
        let largest = chance.between(0.002, 0.1) * limit;
        let measured = chance.happens(0.7);
        // The needs of measured requests are learned; the factor corrects the estimates of others.
        let truth = if measured { chance.around(0.7, 1.3) } else { chance.around(0.5, 2.0) };
        Self {
            limit,
            fit: chance.between(0.25, 0.9) * limit,
            within,
            base: chance.between(0.02, 0.3) * limit,
            cache: chance.pick(&[0.0, 0.0, 0.05, 0.3]) * limit,
            // Requests last for a second on average, and need half of the largest.
            rate: load * limit / (0.5 * largest),
            largest,
            truth,
            measured,
            task: chance.pick(&[0.0, 0.0, 0.1]) * limit,
            task_ends: after(chance),
            models,
        }
    }

    /// Returns what neither requests nor models that are not in use hold at this time.
    fn floor(&self, at: Duration) -> f64 {
        let task = if at < self.task_ends { self.task } else { 0.0 };
        let used = self.models.iter().filter(|(_, until, _)| until.is_some_and(|until| at < until));
        self.base + self.cache + task + used.map(|(mib, ..)| mib).sum::<f64>()
    }
}

impl Model {
    /// Returns a guard, and loads the model if it fits: a load that has to wait for room would wait
    /// for this thread.
    fn acquire(&self, admission: &Admission) -> Option<Use<()>> {
        self.managed.try_acquire().or_else(|| {
            let cost = Cost::host(bytes(self.mib));
            drop(admission.try_reserve_resource(cost).ok()?);
            self.managed.acquire_blocking().ok()
        })
    }
}

struct World {
    schedule: Schedule,
    chance: Chance,
    clock: Arc<ManualClock>,
    plant: SharedPlant,
    fit: Arc<Mutex<Option<Fit>>>,
    admission: Admission,
    maintenance: Maintenance,
    worker: Worker,
    next: Moment,
    requests: Vec<Request>,
    models: Vec<Model>,
    task: Option<Permit>,
    owed: f64,
    admitted: u64,
}

/// Runs the schedule of a seed.
///
/// # Errors
/// The first claim that did not hold.
pub(crate) fn run(seed: u64) -> Result<Seen, Fault> {
    let mut chance = Chance::new(seed);
    let schedule = Schedule::draw(&mut chance);
    let mut world = World::new(schedule, chance);
    world.play(BEFORE)?;
    let Schedule { fit, within, .. } = world.schedule;
    let terms = FitTerms { limit: bytes(fit), within, counts_page_cache: true };
    let target = terms.target().as_f64() / MIB;
    let end = BEFORE + within;
    let mut seen = Seen {
        possible: world.schedule.floor(end - MARGIN) <= FILLED * fit,
        impossible: world.schedule.floor(end + Duration::from_secs(2)) > target,
        ..Seen::default()
    };
    let start = world.clock.now();
    *lock(&world.fit) = Some(Fit::new(terms, start));
    lock(&world.plant).fit = Some(terms.limit);
    let queue = world.maintenance.queue();
    queue.push_one(Job::Purge { trigger: Trigger::Manual });
    // Ends: a fit fails a second after its time at the latest.
    let step = loop {
        world.play(MILLI)?;
        let step = lock(&world.plant).step;
        if let Some(step) = step.filter(|step| *step != FitStep::Shrinking) {
            break step;
        }
    };
    if step == FitStep::Failed {
        return if seen.possible { Err(Fault::Refused(seen)) } else { Ok(seen) };
    }
    seen.seconds = Some((world.clock.now() - start).as_secs_f64());
    {
        let mut plant = lock(&world.plant);
        let usage_mib = plant.usage();
        if usage_mib > target || seen.impossible {
            return Err(Fault::Wrong { usage_mib });
        }
        plant.limit = fit;
        plant.cache = plant.cache.min(0.05 * fit);
    }
    let before = world.admitted;
    world.play(AFTER)?;
    seen.served = world.admitted - before;
    if lock(&world.plant).fit.is_some() { Err(Fault::Left) } else { Ok(seen) }
}

impl World {
    fn new(schedule: Schedule, chance: Chance) -> Self {
        let clock = Arc::new(ManualClock::new());
        let (limit, base, cache) = (schedule.limit, schedule.base, schedule.cache);
        let plant = Arc::new(Mutex::new(Plant { limit, base, cache, ..Plant::default() }));
        let fit = Arc::new(Mutex::new(None));
        let (admission, resources) = (Admission::new(), Resources::new());
        let ladder = ReclaimPolicy::new(vec![resources.reclaimer(Budget::Host)]);
        let maintenance = Maintenance::new(
            Settings::default(),
            Box::new(Senses(Arc::clone(&plant))),
            admission.clone(),
            resources.clone(),
            ladder,
        );
        let maintenance = maintenance.unwrap_or_else(|error| panic!("settings: {error}"));
        let worker = maintenance.worker(Box::new(Does {
            plant: Arc::clone(&plant),
            fit: Arc::clone(&fit),
            admission: admission.clone(),
            resources: resources.clone(),
            queue: maintenance.queue(),
        }));
        let mut world = Self {
            schedule,
            chance,
            clock,
            plant,
            fit,
            admission,
            maintenance,
            worker,
            next: Moment::ORIGIN,
            requests: Vec::new(),
            models: Vec::new(),
            task: None,
            owed: 0.0,
            admitted: 0,
        };
        world.begin(&resources);
        world
    }

    /// Loads the models that fit, and begins the task.
    fn begin(&mut self, resources: &Resources) {
        let _ = self.play(Duration::from_millis(10));
        for (nth, (mib, used, residency)) in self.schedule.models.clone().into_iter().enumerate() {
            let (loads, unloads) = (Arc::clone(&self.plant), Arc::clone(&self.plant));
            let load = move || {
                lock(&loads).models += mib;
                Ok(())
            };
            let managed = Managed::builder(format!("model-{nth}"), load)
                .cost(Cost::host(bytes(mib)))
                .min_residency(residency)
                .unload(move |()| {
                    let mut plant = lock(&unloads);
                    plant.models -= mib;
                    plant.dirty += mib;
                })
                .build(Arc::clone(&self.clock) as _, Some(self.admission.clone()));
            let added = resources.add(Arc::new(managed.clone()));
            let used_until = used.map(Moment::after_origin);
            let mut model = Model { managed, mib, used_until, guard: None };
            let guard = model.acquire(&self.admission).filter(|_| added.is_ok());
            model.guard = guard.filter(|_| used_until.is_some());
            self.models.push(model);
            let _ = self.play(Duration::from_millis(10));
        }
        // Models that were not loaded do not count.
        for (model, of) in self.models.iter().zip(&mut self.schedule.models) {
            if model.guard.is_none() {
                of.1 = None;
            }
        }
        let task = Cost::host(bytes(self.schedule.task));
        self.task = self.admission.try_admit(task).ok().filter(|_| self.schedule.task > 0.0);
        if self.task.is_some() {
            lock(&self.plant).allocate(self.schedule.task);
        } else {
            self.schedule.task = 0.0;
        }
    }

    fn play(&mut self, time: Duration) -> Result<(), Fault> {
        let end = self.clock.now() + time;
        while self.clock.now() < end {
            self.step();
            let plant = lock(&self.plant);
            if plant.physical() > plant.limit {
                return Err(Fault::Killed { after: self.clock.now().since_origin().as_secs_f64() });
            }
        }
        Ok(())
    }

    /// A millisecond.
    fn step(&mut self) {
        let now = self.clock.now();
        if now >= self.next {
            let tick = self.maintenance.tick(now);
            self.next = tick.next;
            self.maintenance.queue().push(tick.jobs);
        }
        if let Some(job) = self.maintenance.queue().pop() {
            self.worker.run(job, &*self.clock);
        }
        self.requests(now);
        for model in &mut self.models {
            if model.used_until.is_some_and(|until| now >= until) {
                model.guard = None;
            }
        }
        if now >= Moment::after_origin(self.schedule.task_ends) && self.task.take().is_some() {
            lock(&self.plant).free(self.schedule.task);
        }
        self.clock.advance(MILLI);
    }

    /// Requests grow, end and arrive.
    fn requests(&mut self, now: Moment) {
        let (plant, measured) = (&self.plant, self.schedule.measured);
        self.requests.retain_mut(|request| {
            let part = (now - request.began).as_secs_f64() / request.lasts.as_secs_f64();
            let holds = request.needs * (part / GROWS).min(1.0);
            let mut plant = lock(plant);
            if holds > request.holds {
                plant.allocate(holds - request.holds);
                request.holds = holds;
                if measured {
                    request.permit.raise(bytes(holds));
                    request.permit.report(bytes(holds));
                }
            }
            if part >= 1.0 {
                plant.free(request.holds);
            }
            part < 1.0
        });
        self.owed += self.schedule.rate / 1000.0;
        while self.owed >= 1.0 {
            self.owed -= 1.0;
            self.arrive(now);
        }
    }

    fn arrive(&mut self, now: Moment) {
        let needs = self.chance.unit() * self.schedule.largest;
        let lasts = self.chance.time(Duration::from_millis(50), Duration::from_secs(2));
        // A third of the requests use a model, which is loaded for them if it fits.
        let wants = self.chance.happens(0.3) && !self.models.is_empty();
        let at = usize::try_from(self.chance.next() % 64).unwrap_or(0);
        let Ok(mut permit) =
            self.admission.try_admit(Cost::host(bytes(needs / self.schedule.truth)))
        else {
            return;
        };
        let model = self.models.get(at % self.models.len().max(1)).filter(|_| wants);
        let guard = model.map(|model| model.acquire(&self.admission));
        if guard.as_ref().is_some_and(Option::is_none) {
            return;
        }
        if self.schedule.measured {
            permit.report(ByteSize::ZERO);
        }
        self.admitted += 1;
        self.requests.push(Request {
            permit,
            _guard: guard.flatten(),
            began: now,
            lasts,
            needs,
            holds: 0.0,
        });
    }
}
