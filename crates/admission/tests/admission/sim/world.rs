//! The real controller over the plant: loop, door, worker and resource, driven event by event.
//!
//! [`Maintenance`], [`Admission`], `Worker` and [`Resources`] are the crate's own;
//! sensor, hands, loader and clock are fakes. What takes time on the worker or in a loader lets the
//! world go on meanwhile: it plays the events of that time and then returns, so that the real code
//! around it sees the clock where it would be. Nothing decides anything here.
//!
//! Invariants: one thread plays all; no lock is held while the controller runs, so that what it
//! calls may take it; `now` of the clock is the moment of the event that is played.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock, Weak};
use std::time::Duration;

use lowtide_admission::clock::{ManualClock, Moment};
use lowtide_admission::fit::{Fit, FitStep};
use lowtide_admission::learning::{self, Compared, Needs, Room, SlowStartPermit};
use lowtide_admission::{
    Admission, Budget, ByteSize, Cost, Job, Level, LimitAdvice, Maintenance, MaintenanceActions,
    Managed, Permit, Rejected, Resources, Sample, Sensor, Settings, Trigger, Use, Worker,
};
use lowtide_core::sync::lock;

use super::chance::Chance;
use super::claims::{End, Look, Seen};
use super::scenario::{HOLD, HOLD_SPREAD, Kind, MIB, Model, Plant, RESOURCE, Scenario, bytes};

/// A purge takes 0.1 ms for each MiB; it gives back in steps of 2 ms.
const PURGE_STEP: Duration = Duration::from_millis(2);
const PURGE_STEP_MIB: f64 = 20.0;
/// A load takes ten such steps.
const LOAD_STEP: Duration = Duration::from_millis(30);
/// The time between two moves of the neighbour and the limit.
const AROUND_EVERY: Duration = Duration::from_millis(50);
/// For how long the limit cannot be read in a blind moment.
const BLIND: Duration = Duration::from_millis(100);

/// The value of a managed resource.
#[derive(Debug)]
pub(crate) struct Weight;

/// The state that changes as the world goes on.
pub(super) struct State {
    pub(super) now: Moment,
    /// When the loop ticks next.
    due: Moment,
    pub(super) chance: Chance,
    pub(super) events: Events,
    pub(super) plant: Plant,
    pub(super) requests: Requests,
    pub(super) seen: Seen,
    /// The sample before, where samples are stale.
    before: Option<Sample>,
    blind_until: Moment,
    limits: usize,
    level: Level,
    /// The fit, the limit that it puts in force, and its last step.
    pub(super) fit: Option<Fit>,
    pub(super) fitted: Option<ByteSize>,
    pub(super) step: Option<FitStep>,
}

/// One run as it goes.
pub(crate) struct World {
    pub(super) scenario: Scenario,
    pub(super) clock: Arc<ManualClock>,
    pub(super) admission: Admission,
    pub(super) resources: Resources,
    pub(super) needs: Needs,
    pub(super) state: Mutex<State>,
    pub(super) maintenance: Mutex<Maintenance>,
    worker: Mutex<Worker>,
    pub(super) working: AtomicBool,
    pub(super) managed: OnceLock<Vec<Managed<Weight>>>,
}

impl World {
    /// A world in which nothing has happened.
    pub(crate) fn new(scenario: Scenario, settings: Settings) -> Arc<Self> {
        let (admission, resources) = (Admission::new(), Resources::new());
        let clock = Arc::new(ManualClock::new());
        let world = Arc::new_cyclic(|weak: &Weak<Self>| {
            let maintenance = Maintenance::new(
                settings,
                Box::new(Senses(Weak::clone(weak))),
                admission.clone(),
                resources.clone(),
                vec![resources.reclaimer(Budget::Host)],
            );
            let maintenance = maintenance.unwrap_or_else(|error| panic!("settings: {error}"));
            let worker = maintenance.worker(Box::new(Does(Weak::clone(weak))));
            Self {
                state: Mutex::new(State::new(&scenario)),
                scenario,
                needs: Needs::default(),
                clock,
                admission,
                resources,
                maintenance: Mutex::new(maintenance),
                worker: Mutex::new(worker),
                working: AtomicBool::new(false),
                managed: OnceLock::new(),
            }
        });
        if world.scenario.resource.is_some() {
            let (residency, used_until) = (Duration::from_secs(2), None);
            let usual = [Model { mib: RESOURCE, residency, used_until }];
            let models = &world.scenario.models[..];
            let models = if models.is_empty() { &usual[..] } else { models };
            let _ = world
                .managed
                .set((0..).zip(models).map(|(nth, model)| world.manage(nth, *model)).collect());
        }
        world
    }

    /// A model, which leaves after five idle seconds; those of a fit stay.
    fn manage(self: &Arc<Self>, nth: u32, Model { mib, residency, .. }: Model) -> Managed<Weight> {
        let (loads, goes) = (Arc::downgrade(self), Arc::downgrade(self));
        let loader = move || {
            if let Some(world) = loads.upgrade() {
                for _ in 0..10 {
                    world.pass(LOAD_STEP);
                    let state = &mut *lock(&world.state);
                    state.plant.allocate(state.now, mib / 10.0);
                }
            }
            Ok(Weight)
        };
        let builder = Managed::builder(format!("model {nth}"), loader)
            .min_residency(residency)
            .cost(Cost::host(bytes(mib)))
            .unload(move |_| {
                if let Some(world) = goes.upgrade() {
                    world.pass(LOAD_STEP);
                    let state = &mut *lock(&world.state);
                    state.plant.free(state.now, mib);
                }
            });
        let has_fit = self.scenario.fit.is_some();
        let builder = if has_fit { builder } else { builder.idle(Duration::from_secs(5)) };
        let managed = builder.build(Arc::clone(&self.clock) as _, Some(self.admission.clone()));
        assert_eq!(self.resources.add(&managed), Ok(()));
        managed
    }

    /// Lets time pass.
    pub(super) fn pass(&self, time: Duration) {
        let until = lock(&self.state).now + time;
        self.play(until);
    }

    /// Plays all events until then. Called again by what takes time within an event.
    pub(crate) fn play(&self, until: Moment) {
        // Ends: each event takes the time on, or is one of finitely many of its moment.
        loop {
            let (step, event) = {
                let state = &mut *lock(&self.state);
                let next = state.events.next(until);
                let to = next.map_or(until, |(at, _)| at).max(state.now);
                let step = to - state.now;
                state.now = to;
                (step, next)
            };
            if !step.is_zero() {
                self.clock.advance(step);
            }
            let Some((_, event)) = event else { return };
            match event {
                Event::Tick => {
                    let is_due = {
                        let state = lock(&self.state);
                        state.now == state.due
                    };
                    if is_due {
                        self.tick();
                    }
                }
                Event::Work => self.work(),
                Event::Around => self.around(),
                Event::Look => self.look(),
                Event::Arrival { comes } => {
                    self.arrival(comes);
                    self.hurry();
                }
                Event::Part(serial) => self.part(serial),
                Event::Ask(serial) => self.ask(serial),
                Event::End(serial) => self.end(serial),
                Event::Freed(serial) => self.freed(serial),
            }
        }
    }

    /// The next tick is posted, if a request has asked for one that comes sooner.
    fn hurry(&self) {
        let next = lock(&self.maintenance).next_tick();
        let state = &mut *lock(&self.state);
        if next <= state.now {
            let due = state.now + self.scenario.sampler.lateness(&mut state.chance);
            if due < state.due {
                state.post_tick(due);
            }
        }
    }

    fn tick(&self) {
        let now = lock(&self.state).now;
        let (mut jobs, next) = {
            let mut maintenance = lock(&self.maintenance);
            (maintenance.tick(now), maintenance.next_tick())
        };
        let level = self.admission.level();
        let state = &mut *lock(&self.state);
        if jobs.clone().any(|job| job == Job::Purge { trigger: Trigger::Pressure }) {
            state.seen.decides();
        }
        state.seen.jobs += u64::try_from(jobs.clone().count()).unwrap_or(0);
        if level != state.level {
            state.level = level;
            state.seen.levels.push((now.since_origin().as_secs_f64(), level));
        }
        let late = self.scenario.sampler.lateness(&mut state.chance);
        state.post_tick(next + late);
        if jobs.next().is_some() && !self.working.load(Ordering::Relaxed) {
            let late = state.chance.time(Duration::ZERO, self.scenario.worker_late);
            state.events.post(now + late, Event::Work);
        }
    }

    /// The worker does what waits for it, one job after the other.
    fn work(&self) {
        if self.working.swap(true, Ordering::Relaxed) {
            return;
        }
        let state = lock(&self.maintenance).state();
        // Nobody else takes it: `working` says so.
        let mut worker = lock(&self.worker);
        while let Some(job) = state.pop_job() {
            worker.run(job, &*self.clock);
        }
        self.working.store(false, Ordering::Relaxed);
    }

    /// The neighbour and the limit move.
    fn around(&self) {
        let state = &mut *lock(&self.state);
        let (now, second) = (state.now, state.now.since_origin().as_secs_f64());
        let first = self.scenario.build.limit;
        if let Some((most, within)) = self.scenario.neighbour {
            let part = (second / within).fract() * most;
            let stays = second < self.scenario.lasts;
            state.plant.set_neighbour(now, if stays { part * first } else { 0.0 });
        }
        if let Some(&(at, part)) = self.scenario.limits.get(state.limits)
            && second >= at
            && state.plant.set_limit(now, part * first)
        {
            state.limits += 1;
        }
        state.events.post(now + AROUND_EVERY, Event::Around);
    }

    fn look(&self) {
        let ledger = self.admission.ledger(Budget::Host);
        let mib = |bytes: ByteSize| bytes.as_f64() / MIB;
        let k = ledger.correction_factor();
        let (allowance, reserved) = (mib(ledger.allowance_bytes()), mib(ledger.requests()));
        let claim = match self.scenario.kind {
            Kind::Days => mib(self.need_of(bytes(1.0)).claim(Room::UNLIMITED)),
            _ => 0.0,
        };
        let state = &mut *lock(&self.state);
        let (second, physical) = (state.now.since_origin().as_secs_f64(), state.plant.physical());
        state.seen.looks.push(Look { second, k, allowance, reserved, physical, claim });
        let every = self.scenario.look_every();
        state.events.post(state.now + every, Event::Look);
    }

    /// Returns the advice on limits by what was recorded.
    pub(crate) fn advice(&self) -> LimitAdvice {
        lock(&self.maintenance).state().limit_advice()
    }

    /// Returns the observations, and the state at the end.
    pub(crate) fn finish(&self) -> Seen {
        let ledger = self.admission.ledger(Budget::Host);
        let held = self.admission.stats().held();
        let probe = self.admission.try_admit(Cost::host(bytes(0.02 * self.scenario.build.limit)));
        let panics = lock(&self.worker).panics_total();
        let admits = probe.is_ok();
        drop(probe);
        let state = lock(&self.state);
        let end = End {
            reserved: ledger.requests(),
            standing: ledger.resource_reservations(),
            held,
            panics,
            admits,
            level: self.admission.level(),
            live: state.plant.live,
            dirty: state.plant.dirty,
            base: state.plant.build.base,
        };
        let mut seen = state.seen.clone();
        seen.end = end;
        seen.killed = state.plant.killed.map(|at| at.since_origin().as_secs_f64());
        seen
    }

    /// Takes the parts out that know the world.
    fn sample(&self) -> Sample {
        let state = &mut *lock(&self.state);
        let now = state.now;
        if let Some(part) = self.scenario.sampler.blind
            && now >= state.blind_until
            && state.chance.happens(part)
        {
            state.blind_until = now + BLIND;
        }
        let knows = now >= state.blind_until;
        let mut fresh = state.plant.sample(now, knows);
        (fresh.limit, fresh.has_fit) = (fresh.limit.fitted(state.fitted), state.fitted.is_some());
        state.seen.samples(state.plant.dirty);
        if self.scenario.sampler.stale {
            return state.before.replace(fresh).unwrap_or(fresh);
        }
        fresh
    }

    /// Gives back what is dirty now, step by step.
    fn purge(&self, trigger: Trigger) -> ByteSize {
        let mut left = {
            let state = &mut *lock(&self.state);
            state.plant.recall(0.5);
            let usage = state.plant.usage();
            state.seen.purge_begins(trigger, state.now, usage <= state.plant.limit + 0.001);
            state.plant.dirty
        };
        let mut given = 0.0;
        // Ends: each turn takes a step's MiB off, or finds nothing more.
        while left > 0.0 {
            self.pass(PURGE_STEP.mul_f64((left / PURGE_STEP_MIB).clamp(0.01, 1.0)));
            let state = &mut *lock(&self.state);
            let step = state.plant.give_back(state.now, left.min(PURGE_STEP_MIB));
            given += step;
            left -= PURGE_STEP_MIB;
        }
        let state = &mut *lock(&self.state);
        state.seen.purge_ends(trigger, state.now);
        bytes(given)
    }
}

impl State {
    fn post_tick(&mut self, due: Moment) {
        self.due = due;
        self.events.post(due, Event::Tick);
    }

    fn new(scenario: &Scenario) -> Self {
        let mut events = Events::default();
        events.post(Moment::ORIGIN, Event::Tick);
        events.post(Moment::ORIGIN, Event::Look);
        if scenario.neighbour.is_some() || !scenario.limits.is_empty() {
            events.post(Moment::ORIGIN, Event::Around);
        }
        // The loop has half a second before the first request.
        let start = Moment::after_origin(Duration::from_millis(500));
        events.post(start, Event::Arrival { comes: false });
        Self {
            now: Moment::ORIGIN,
            due: Moment::ORIGIN,
            chance: Chance::new(!scenario.seed),
            events,
            plant: Plant::new(scenario.build),
            requests: Requests::default(),
            seen: Seen::new(scenario.measured),
            before: None,
            blind_until: Moment::ORIGIN,
            limits: 0,
            level: Level::None,
            fit: None,
            fitted: None,
            step: None,
        }
    }

    /// Returns the need of requests and resources, by their estimates or by the truth, whichever is
    /// more.
    pub(super) fn claimed(&self, standing: ByteSize) -> f64 {
        let standing = standing.as_f64() / MIB;
        self.plant.build.base + self.plant.neighbour + self.requests.claimed() + standing
    }
}

struct Senses(Weak<World>);

impl Sensor for Senses {
    fn sample(&mut self, _: Moment) -> Sample {
        self.0.upgrade().map_or_else(Sample::default, |world| world.sample())
    }
}

struct Does(Weak<World>);

impl MaintenanceActions for Does {
    fn purge(&mut self, trigger: Trigger) -> ByteSize {
        self.0.upgrade().map_or(ByteSize::ZERO, |world| world.purge(trigger))
    }

    fn run(&mut self, job: Job, now: Moment) -> bool {
        if job == Job::TendFit
            && let Some(world) = self.0.upgrade()
        {
            world.tend_fit(now);
        }
        false
    }
}

// The events of a run: those of one moment come as they were posted.

/// Something that happens.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Event {
    /// The control loop ticks.
    Tick,
    /// The worker looks at its queue.
    Work,
    /// A request comes, or only the time to look at the load again.
    Arrival { comes: bool },
    /// A part of a request's body arrives.
    Part(u64),
    /// A request ends.
    End(u64),
    /// The memory of a request goes.
    Freed(u64),
    /// A request asks for the resource again.
    Ask(u64),
    /// The neighbour, and the limit, move.
    Around,
    /// The watched values are read.
    Look,
}

/// The events to come.
#[derive(Debug, Default)]
pub(crate) struct Events {
    heap: BinaryHeap<Reverse<(Moment, u64, Event)>>,
    posted: u64,
}

impl Events {
    pub(crate) fn post(&mut self, at: Moment, event: Event) {
        self.posted += 1;
        self.heap.push(Reverse((at, self.posted, event)));
    }

    /// The next one until then.
    pub(crate) fn next(&mut self, until: Moment) -> Option<(Moment, Event)> {
        let Reverse((at, _, _)) = self.heap.peek()?;
        if *at > until {
            return None;
        }
        self.heap.pop().map(|Reverse((at, _, event))| (at, event))
    }
}

// Requests: how they come, what they hold while they last, and how they end. A request books what it
// says before it starts, and touches what is true as its body arrives, in parts. Invariant: its memory
// is freed once, at its end or where it is given up.

/// A body of this much or more arrives in several parts.
const PARTS_FROM: f64 = 0.25;
const PARTS: u32 = 8;
/// The time after which a request that waits for the resource asks again.
const ASK_EVERY: Duration = Duration::from_millis(10);

/// One request.
pub(super) struct Request {
    class: usize,
    /// MiB by its estimate, and in truth.
    said: f64,
    truth: f64,
    /// MiB that it holds by now.
    held: f64,
    parts_left: u32,
    part_every: Duration,
    permit: Option<Permit>,
    /// `None` if it is not measured.
    terms: Option<Terms>,
    guard: Option<Use<Weight>>,
}

/// What is kept for a measured request, as the tower layer does.
struct Terms {
    need: Compared,
    claim: ByteSize,
    slot: Option<Arc<SlowStartPermit>>,
}

impl Terms {
    /// A poll has ended in which it grew.
    fn grows(&self, is_beyond: bool, has_arrived: bool) {
        if let Some(slot) = &self.slot {
            slot.begins_work();
            slot.ends_work(is_beyond);
            if has_arrived {
                slot.arrived();
            }
        }
    }

    /// It was served.
    fn ends(self, held: f64) {
        self.need.learn(bytes(held));
        if let Some(slot) = &self.slot {
            slot.answered(true);
        }
    }
}

/// Those that are under way, by their serial numbers.
#[derive(Default)]
pub(super) struct Requests {
    all: BTreeMap<u64, Request>,
    serial: u64,
    claimed: f64,
}

impl Requests {
    /// Returns the need of all of them, by their estimates or by the truth.
    pub(super) const fn claimed(&self) -> f64 {
        self.claimed
    }

    fn sit(&mut self, request: Request) -> u64 {
        self.serial += 1;
        self.claimed += request.said.max(request.truth);
        self.all.insert(self.serial, request);
        self.serial
    }

    fn leave(&mut self, serial: u64) -> Option<Request> {
        let request = self.all.remove(&serial)?;
        self.claimed = (self.claimed - request.said.max(request.truth)).max(0.0);
        Some(request)
    }
}

impl World {
    /// The next arrival is posted, and one comes.
    pub(super) fn arrival(&self, comes: bool) {
        let start = {
            let state = &mut *lock(&self.state);
            let second = state.now.since_origin().as_secs_f64();
            if second >= self.scenario.lasts {
                return;
            }
            let rate = self.scenario.load.at(second) * self.scenario.fitting_rate();
            let grain = self.scenario.load.grain();
            let gap = if rate > 0.0 { state.chance.gap(rate) } else { grain };
            let next = state.now + Duration::from_secs_f64(gap.min(grain));
            state.events.post(next, Event::Arrival { comes: gap < grain });
            comes.then_some((state.now, second))
        };
        if let Some((now, second)) = start {
            self.come(now, second);
        }
    }

    fn come(&self, now: Moment, second: f64) {
        let standing = self.admission.ledger(Budget::Host).resource_reservations();
        let (class, said, truth, wants) = {
            let state = &mut *lock(&self.state);
            let chance = &mut state.chance;
            let class = self.scenario.mix.draw(chance);
            let said = self.scenario.mix.classes[class].0;
            let noise = 1.0 + self.scenario.truth.noise;
            let truth = said * self.scenario.truth.at(second) * chance.around(1.0 / noise, noise);
            let wants = self.scenario.resource.is_some_and(|part| chance.happens(part));
            let largest = self.scenario.largest(second);
            let roomy = state.claimed(standing) + largest <= 0.4 * state.plant.limit;
            state.seen.offers(class, said, second, roomy);
            (class, said, truth, wants)
        };
        let admitted = self.admit(bytes(said));
        let state = &mut *lock(&self.state);
        let (permit, terms) = match admitted {
            Ok(admitted) => admitted,
            Err(rejected) => {
                state.seen.sheds(class, said, second, rejected.reason());
                return;
            }
        };
        let away = state.chance.between(1.0 - HOLD_SPREAD / HOLD, 1.0 + HOLD_SPREAD / HOLD);
        let lasts = Duration::from_secs_f64(HOLD * away);
        let parts = if said >= PARTS_FROM { PARTS } else { 1 };
        let request = Request {
            class,
            said,
            truth,
            held: 0.0,
            parts_left: parts,
            part_every: lasts.mul_f64(self.scenario.arrives / f64::from(parts)),
            permit: Some(permit),
            terms,
            guard: None,
        };
        let serial = state.requests.sit(request);
        state.events.post(now, Event::Part(serial));
        state.events.post(now + lasts, Event::End(serial));
        if wants {
            state.events.post(now, Event::Ask(serial));
        }
    }

    /// What is known of requests with this estimate.
    pub(super) fn need_of(&self, estimate: ByteSize) -> Compared {
        let kind = learning::Kind { route: 1, is_declared: true, has_many_routes: false };
        self.needs.of(kind, estimate, false)
    }

    /// Admits a request with this estimate, measured or not.
    fn admit(&self, estimate: ByteSize) -> Result<(Permit, Option<Terms>), Rejected> {
        if !self.scenario.measured {
            return Ok((self.admission.try_admit(Cost::host(estimate))?, None));
        }
        let need = self.need_of(estimate);
        let ledger = self.admission.ledger(Budget::Host);
        let (room, clock) = (ledger.learned_room(), Arc::clone(&self.clock) as _);
        let mut slot = match estimate <= ledger.ceiling() {
            true => need.enter(room.all, &clock, false).map_err(|running| {
                let state = self.admission.state();
                state.reject(state.slow_start(running))
            })?,
            false => None,
        };
        let claim = need.claim(room);
        let mut permit = self.admission.try_admit(Cost::host(claim))?;
        permit.report(ByteSize::ZERO);
        if let Some(slot) = &mut slot {
            slot.begin();
            permit.mark_unlearned(slot);
        }
        Ok((permit, Some(Terms { need, claim, slot })))
    }

    /// A part of the body arrives.
    pub(super) fn part(&self, serial: u64) {
        let state = &mut *lock(&self.state);
        let now = state.now;
        let Some(request) = state.requests.all.get_mut(&serial) else { return };
        let Some(permit) = &mut request.permit else { return };
        let part = (request.truth - request.held) / f64::from(request.parts_left);
        let beyond = bytes(request.held + part).saturating_sub(permit.cost().host);
        if self.scenario.grows && !beyond.is_zero() && permit.grow(beyond).is_err() {
            return Self::release(state, serial);
        }
        request.held += part;
        if let Some(terms) = &request.terms {
            permit.raise(bytes(request.held));
            permit.report(bytes(request.held));
            terms.grows(bytes(request.held) > terms.claim, request.parts_left == 0);
        }
        request.parts_left -= 1;
        if request.parts_left > 0 {
            state.events.post(now + request.part_every, Event::Part(serial));
        }
        state.plant.allocate(now, part);
    }

    /// A request asks for the resource, and waits while it is loaded.
    pub(super) fn ask(&self, serial: u64) {
        let Some(models) = self.managed.get() else { return };
        let Some(managed) = models.get(usize::try_from(serial).unwrap_or(0) % models.len()) else {
            return;
        };
        let stats = managed.stats();
        {
            let state = &mut *lock(&self.state);
            // The worker may be taking it apart, on this very thread.
            if stats.loading || self.working.load(Ordering::Relaxed) {
                state.events.post(state.now + ASK_EVERY, Event::Ask(serial));
                return;
            }
            if state.requests.all.get_mut(&serial).is_none() {
                return;
            }
        }
        // It must not wait: this thread advances the virtual clock.
        let has_room = stats.loaded || self.admission.try_reserve_resource(stats.cost).is_ok();
        let guard = has_room.then(|| managed.acquire_blocking());
        let state = &mut *lock(&self.state);
        match guard {
            Some(Ok(guard)) => {
                if let Some(request) = state.requests.all.get_mut(&serial)
                    && request.permit.is_some()
                {
                    request.guard = Some(guard);
                }
            }
            Some(Err(_)) | None => Self::release(state, serial),
        }
    }

    /// A request ends: its permit and guard go, and its memory with them or a little later.
    pub(super) fn end(&self, serial: u64) {
        let lingers = self.scenario.lingers;
        let state = &mut *lock(&self.state);
        let now = state.now;
        let Some(request) = state.requests.all.get_mut(&serial) else { return };
        request.permit = None;
        if let Some(terms) = request.terms.take() {
            terms.ends(request.held);
        }
        request.guard = None;
        if now.since_origin().as_secs_f64() <= self.scenario.lasts {
            state.seen.served[request.class] += 1;
        }
        let late = state.chance.time(Duration::ZERO, lingers);
        if late.is_zero() {
            Self::release(state, serial);
        } else {
            state.events.post(now + late, Event::Freed(serial));
        }
    }

    /// The memory of a request goes.
    pub(super) fn freed(&self, serial: u64) {
        Self::release(&mut lock(&self.state), serial);
    }

    fn release(state: &mut State, serial: u64) {
        if let Some(request) = state.requests.leave(serial) {
            state.plant.free(state.now, request.held);
        }
    }
}
