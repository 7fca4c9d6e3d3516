//! The control loop: from a sample to levels, allowances and jobs.
//!
//! [`Maintenance::tick`] is the whole loop body. It samples, corrects the ledgers, sets the level,
//! and selects jobs. It does not purge, unload or publish, calls no driver and allocates nothing.
//! The worker ([`Worker`]) runs the jobs. The owner of the threads drives both: [`run_control`] on
//! one, [`run_worker`] on the other.
//!
//! Invariants: each tick first corrects a ledger and then shares the room, so that no headroom is
//! computed from an old allowance; the figures of one device change the allowance of no other;
//! `next > now`, and `next - now <= 4 x idle_tick`; a purge happens only for pressure or exhaustion,
//! an unload, an operator's request, growth ([`Settings::purge_growth`]), or if
//! `purgeable - decaying + free blocks of the C library > max(purge_floor, purge_part x live)`;
//! levels depend on physical bytes, allowances on required ones.

mod jobs;
mod purging;
mod saturation;
mod settings;
mod state;
mod worker;

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use lowtide_core::bytes::ByteSize;
use lowtide_core::clock::Moment;
use lowtide_core::sync::{lock, try_lock};

use super::admission::Admission;
use super::ceiling::{Ceiling, CeilingParts, CeilingSample};
use super::correction::{Correction, Measured, RequestRate};
use super::cost::{Budget, Cost, RejectReason};
use super::exhaustion::{Exhaustion, ExhaustionSample};
use super::fairness::{Fairness, LedgerFigures};
use super::large::LARGE_MIN;
use super::ledger::{Ledger, RoomSharing};
use super::limit_advice::{LimitSample, STEP};
use super::managed::Resources;
use super::pressure::{Level, PressureTracker, Thresholds};
use super::reclaim::{ReclaimBackoff, ReclaimStep, STEPS_MAX, due};
use super::signal::{Limit, LimitSource};
use super::state::AdmissionState;
use super::tally::{AdmissionStats, BudgetCounts};
use super::waiting::WaitReason;
use purging::{RetainedGrowth, purgeable_now};
use saturation::{Saturation, add_utilizations};
use state::Figures;
use worker::Pacer;

use jobs::Jobs;
pub use jobs::{Job, Trigger};
pub use saturation::{REPORT_WINDOW, SHED_SHOWN, mean_weight};
pub use settings::{Settings, SettingsError};
pub use state::PressureState;
pub use worker::{MaintenanceActions, Worker, run_control, run_worker};

/// A sample of signals, heap and arenas. By default nothing is held and no limit is known.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Sample {
    /// Bytes that count against the host's limit, without `unreleased`.
    pub physical: ByteSize,
    /// Unused memory that stays resident because the kernel does not take it back. Requests use it
    /// again before new memory.
    pub unreleased: ByteSize,
    /// The part of `physical` that a purge releases: dirty and muzzy pages, and idle bytes of
    /// arenas on host memory.
    pub purgeable: ByteSize,
    /// The part of `purgeable` that decays by itself: idle bytes of arenas on host memory. A purge
    /// releases it under pressure, on request and after an unload.
    pub decaying: ByteSize,
    /// Freed blocks in thread caches. A purge requests their release, and each thread releases its
    /// own.
    pub cached: ByteSize,
    /// Anonymous memory of this process.
    pub anonymous: ByteSize,
    /// The part of `anonymous` that belongs neither to live pages of the heap nor to arenas: memory
    /// that the heap retains, and everything in the C library's heap.
    pub untracked_anonymous: ByteSize,
    /// The host's limit.
    pub limit: Limit,
    /// `true` while a fit is in force, even if it is not what limits the host any more.
    pub has_fit: bool,
    /// What work in progress has taken of the reservations of its requests, which is reported when
    /// it ends.
    pub in_progress: ByteSize,
    /// What work in progress has taken beyond the reservations of its requests.
    pub outgrown: ByteSize,
    /// What work has put on disk since the sample before, for lack of memory.
    pub spilled: ByteSize,
    /// Bytes of live blocks on the heap.
    pub heap_live: ByteSize,
    /// Bytes of heap pages with live blocks.
    pub heap_active: ByteSize,
    /// The memory of the first device, if it has its own.
    pub device: DeviceFigures,
    /// The time when an arena's idle memory is due to decay; `None` or [`Moment::NEVER`] if none is.
    pub device_decay_due: Option<Moment>,
    /// The time when an arena has been idle for long enough to sleep; `None` or [`Moment::NEVER`] if
    /// none will.
    pub device_sleep_due: Option<Moment>,
    /// `true` if that sleep may need host memory for contents, and time for copies. It is then
    /// skipped while the host is short of memory.
    pub device_sleep_takes_host: bool,
}

impl Sample {
    /// Returns the physical bytes less the purgeable ones.
    #[must_use]
    pub const fn required(&self) -> ByteSize {
        self.physical.saturating_sub(self.purgeable)
    }
}

/// The memory of one device in a sample.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DeviceFigures {
    /// The memory that arenas have committed.
    pub committed: ByteSize,
    /// The part of `committed` that is wholly idle.
    pub idle: ByteSize,
    /// The limit of the device's budget; `None` for none, zero for a device that is lost.
    pub limit: Option<ByteSize>,
}

/// The source of samples for the control loop.
pub trait Sensor: Send {
    /// Takes a sample. Called on the control thread at each tick: a few microseconds, no
    /// allocation, no driver call.
    fn sample(&mut self, now: Moment) -> Sample;

    /// Returns the bytes of free blocks in the heap of the C library, with or without memory behind
    /// them, as of the last second or so. Called on the control thread, and only if the answer can
    /// decide on a purge. Default: zero.
    fn libc_idle(&mut self, _now: Moment) -> ByteSize {
        ByteSize::ZERO
    }

    /// Returns the figures of the last sample for a further device: the one that was added with the
    /// `nth` call of [`Maintenance::add_device`], from 0. Default: nothing held, no limit.
    fn further_device(&self, _nth: usize) -> DeviceFigures {
        DeviceFigures::default()
    }
}

/// The level and the learned figures of one budget.
#[derive(Debug)]
struct BudgetAccount {
    /// Keeps the ledger from being used by another admission.
    admission: Admission,
    budget: Budget,
    ledger: &'static Ledger,
    pressure: PressureTracker,
    correction: Correction,
    /// Requests by class since start.
    counts: BudgetCounts,
    fairness: Fairness,
    /// The time of the last tick, and the requests that had ended by then.
    at: Moment,
    finished: u64,
}

impl BudgetAccount {
    fn new(
        admission: Admission,
        budget: Budget,
        thresholds: Thresholds,
        correction_factor: f64,
    ) -> Self {
        let (correction, fairness) =
            (Correction::starting_at(correction_factor), Fairness::default());
        let (pressure, counts) = (PressureTracker::new(thresholds), BudgetCounts::none());
        let ledger = admission.state().ledger(budget);
        let (at, finished) = (Moment::ORIGIN, 0);
        Self { admission, budget, ledger, pressure, correction, counts, fairness, at, finished }
    }

    /// Returns `true` if there is nothing to correct and nothing to share: no limit is known or in
    /// force, and nothing is held or reserved. The device's budget without a device is so always.
    fn is_unused(&self, physical: ByteSize, limit: ByteSize) -> bool {
        limit == ByteSize::MAX
            && physical.is_zero()
            && self.ledger.ceiling() == ByteSize::MAX
            && self.ledger.reserved().is_zero()
            && self.pressure.level == Level::None
    }

    /// Returns the progress of requests since the last tick.
    fn turnover(&mut self, stats: &AdmissionStats, now: Moment) -> RequestRate {
        let ended = stats.finished_total.saturating_sub(self.finished);
        let turnover = RequestRate { time: now - self.at, ended, held: stats.held() };
        (self.at, self.finished) = (now, stats.finished_total);
        turnover
    }

    /// Updates the allowance and the headroom reserved within it.
    fn correct(&mut self, measured: Measured) {
        let (ledger, since) = (self.ledger, measured.turnover.time);
        ledger.correct(&mut self.correction, measured);
        self.counts = self.admission.state().budget_counts(self.budget);
        let (reserved, requests, allowance) =
            (ledger.reserved(), ledger.requests(), ledger.allowance());
        let seen = LedgerFigures { since, reserved, requests, allowance };
        ledger.balance(self.fairness.update(seen, &self.counts));
    }

    /// Publishes a last allowance, as if nothing were held but the reservations, and no reserved
    /// headroom: no further update will follow.
    fn leave(&mut self) {
        let measured = Measured { ceiling: self.ledger.ceiling(), ..Measured::default() };
        self.ledger.correct(&mut self.correction, measured);
        self.ledger.balance(RoomSharing::default());
    }

    /// Updates the allowance of a further device, whose admission is its own: only the device's
    /// bytes are reserved in it. It has neither a level nor reclaim steps: its owner releases idle
    /// memory by its own figures.
    fn update_device(&mut self, figures: DeviceFigures, share: f64, now: Moment) {
        let DeviceFigures { committed: physical, idle: purgeable, limit } = figures;
        let limit = limit.unwrap_or(ByteSize::MAX);
        let state = self.admission.state();
        state.is_device_lost.store(limit.is_zero(), Ordering::Relaxed);
        if self.is_unused(physical, limit) {
            return;
        }
        let turnover = self.turnover(&state.counts(), now);
        let ceiling = part_of(limit, share);
        self.correct(Measured { physical, purgeable, ceiling, turnover, ..Measured::default() });
    }
}

/// Returns the most bytes that may be held of a device if requests may fill `share` of its limit.
fn part_of(limit: ByteSize, share: f64) -> ByteSize {
    if limit == ByteSize::MAX { limit } else { limit.scaled(share) }
}

/// The shortest time between two looks at a fit in force. A guess: a look costs some 0.1 ms.
const FIT_INTERVAL: Duration = Duration::from_millis(100);
/// The place of [`Job::Publish`] among the periodic jobs.
const PUBLISH: usize = 2;

/// The sample of a tick, and what follows from it alone.
struct Tick {
    now: Moment,
    sample: Sample,
    /// The limit, or [`ByteSize::MAX`] if none is known.
    limit: ByteSize,
    stats: AdmissionStats,
    /// `true` if requests wait for room.
    waits: bool,
    /// The most memory that the process should use.
    most: ByteSize,
    /// The smallest amount for which a purge is worth its cost.
    worth: ByteSize,
    /// The same while memory may fill up. It is not more than the reserve holds, or the process
    /// would exceed its limit without a purge.
    urgent_worth: ByteSize,
}

/// The state of the control loop. Owned by one thread.
pub struct Maintenance {
    settings: Settings,
    sensor: Box<dyn Sensor>,
    admission: Admission,
    resources: Resources,
    /// The reclaim steps, the cheapest first.
    steps: Arc<[ReclaimStep]>,
    state: Arc<PressureState>,
    purge: Arc<ReclaimBackoff>,
    host: BudgetAccount,
    device: BudgetAccount,
    further: Vec<BudgetAccount>,
    ceiling: Ceiling,
    /// The time for which the next tick is planned, and the one at which it comes, since ticks take
    /// a bounded share of a core.
    planned: Moment,
    due: Moment,
    pacer: Pacer,
    /// The requests admitted by the last tick, and the time since which none has arrived or been
    /// held and the heap has not moved, with the sample of then.
    admitted: u64,
    quiet_since: Option<(Moment, Sample)>,
    purged_at: Moment,
    /// `true` if little of the limit is left once requests hold what they have reserved. The next
    /// tick then comes at its time, whatever ticks cost.
    may_fill_up: bool,
    /// The smallest purgeable amount since the last purge began.
    purgeable_low: ByteSize,
    /// `true` if a flush of thread caches was requested since the service became quiet.
    recalled: bool,
    /// The loads by the last tick, and the time of the last load without a purge after it.
    loads: u64,
    loaded_at: Option<Moment>,
    growth: RetainedGrowth,
    exhaustion: Exhaustion,
    saturation: Saturation,
    /// The time of the last sample for the advice on limits.
    recorded: Moment,
    /// When each periodic job was last posted.
    posted: [Option<Moment>; 4],
}

impl Maintenance {
    /// Creates a loop that has not sampled yet. Under pressure it runs the reclaim steps in the
    /// order of their cost; equal ones keep their order.
    ///
    /// # Errors
    /// [`SettingsError`] if a setting is invalid.
    ///
    /// # Panics
    /// If there are more than 32 steps.
    #[expect(clippy::panic_in_result_fn, reason = "an error of the caller")]
    pub fn new(
        settings: Settings,
        sensor: Box<dyn Sensor>,
        admission: Admission,
        resources: Resources,
        steps: Vec<ReclaimStep>,
    ) -> Result<Self, SettingsError> {
        settings.check()?;
        let count = steps.len();
        assert!(count <= STEPS_MAX, "{count} reclaim steps, expected at most {STEPS_MAX}");
        let (thresholds, factor) = (settings.thresholds, settings.correction_factor);
        let account = |budget| BudgetAccount::new(admission.clone(), budget, thresholds, factor);
        Ok(Self {
            settings,
            sensor,
            host: account(Budget::Host),
            device: account(Budget::Device),
            admission,
            resources,
            steps: steps.into(),
            state: Arc::default(),
            purge: Arc::default(),
            further: Vec::new(),
            ceiling: Ceiling::new(settings.ceiling, settings.ceiling_max),
            planned: Moment::NEVER,
            due: Moment::ORIGIN,
            pacer: Pacer::new(settings.share, settings.idle_tick),
            admitted: 0,
            quiet_since: None,
            purged_at: Moment::ORIGIN,
            may_fill_up: false,
            purgeable_low: ByteSize::MAX,
            recalled: false,
            loads: 0,
            loaded_at: None,
            growth: RetainedGrowth::new(),
            exhaustion: Exhaustion::new(settings.exhaustion_policy),
            saturation: Saturation::default(),
            recorded: Moment::ORIGIN,
            posted: [None; 4],
        })
    }

    /// Adds the budget of a further device: the device's bytes in `admission`, which has no other
    /// user for them. Called before the first tick.
    pub fn add_device(&mut self, admission: Admission) {
        let (thresholds, factor) = (Thresholds::default(), self.settings.correction_factor);
        self.further.push(BudgetAccount::new(admission, Budget::Device, thresholds, factor));
    }

    /// Returns the shared state, which receives the jobs and the figures of the last tick.
    #[must_use]
    pub fn state(&self) -> Arc<PressureState> {
        Arc::clone(&self.state)
    }

    /// Creates the worker that runs the jobs.
    #[must_use]
    pub fn worker(&self, hands: Box<dyn MaintenanceActions>) -> Worker {
        Worker {
            state: self.state(),
            purge: Arc::clone(&self.purge),
            steps: Arc::clone(&self.steps),
            resources: self.resources.clone(),
            hands,
            panics: 0,
        }
    }

    /// Returns the time for which the last tick has planned the next one, or that of the last tick
    /// if a request has asked for one since.
    #[must_use]
    pub fn next_tick(&self) -> Moment {
        let was_slow = self.planned - self.host.at > self.settings.active_tick;
        let is_asked = self.states().any(|state| !state.is_slow.load(Ordering::Relaxed));
        if was_slow && is_asked { self.host.at } else { self.planned }
    }

    /// Takes a sample, decides, publishes the figures and posts the jobs for the worker. Returns
    /// them, the most urgent first. Allocates nothing.
    pub fn tick(&mut self, now: Moment) -> impl Iterator<Item = Job> + Clone + use<> {
        let state = self.admission.state();
        let freed = state.unused.freed();
        let mut figures = *lock(&self.state.figures);
        let last = figures.sample;
        let tick = self.sample(last.limit, now);
        let sample = &tick.sample;
        let before = (last.physical, now - self.host.at);
        self.account(&tick, &mut figures);
        // And once a large one that waits for that holds what it needs.
        let unheld = state.host.unheld().saturating_add(state.unused.wanted());
        let needs = sample.physical.saturating_add(unheld);
        self.may_fill_up = needs > tick.most || !sample.spilled.is_zero();
        state.large.tend(self.host.pressure.level, now);
        let held = [sample.physical, purgeable_now(sample)];
        state.unused.publish(freed, held, [tick.urgent_worth, tick.most]);
        let waits = state.queue.lacks_any(WaitReason::Turn);
        state.turns.adapt(before.1, self.host.counts.admitted_total(LARGE_MIN), waits);
        state.tend_queue(now);
        let exhaustion = self.look_for_exhaustion(&tick, &mut figures);
        figures.saturation = self.saturate(&tick);
        let decided = [exhaustion, self.decide_purge(&tick)].into_iter();
        self.record_limits(&tick);
        let mut jobs = Jobs::default();
        decided.chain(self.climb(&tick)).flatten().for_each(|job| jobs.insert(job));
        let due = self.post_due(&tick, &mut jobs);
        let active_tick = self.settings.active_tick;
        // What begins to wait from now on asks for a tick. The step sees what waited before.
        self.states().for_each(|of| _ = of.is_slow.swap(true, Ordering::AcqRel));
        let (step, watched) = self.step(&tick, needs, before);
        // A job that is already due has been posted: check again after an active tick at the
        // earliest.
        let next = due.max(now + active_tick).min(now + step);
        debug_assert!(next > now, "the next tick is not in the future");
        self.planned = next;
        if next - now <= active_tick {
            self.states().for_each(|state| state.is_slow.store(false, Ordering::Relaxed));
        }
        self.accounts().for_each(|account| account.ledger.watch(watched));
        self.state.publish(&figures);
        self.state.post_all(jobs);
        jobs
    }

    /// Takes a sample. `last` is the limit at the sample before.
    fn sample(&mut self, last: Limit, now: Moment) -> Tick {
        let (state, mut sample) = (self.admission.state(), self.sensor.sample(now));
        // A limit that was known still exists: a failed read must not admit requests.
        // A fit is none of the kernel's, and has ended.
        if !sample.limit.is_known() && last.source != LimitSource::Fit {
            sample.limit = last;
        }
        state.host.taken.store(sample.in_progress.get(), Ordering::Relaxed);
        let Settings { purge_floor, purge_part, ceiling_max, .. } = self.settings;
        let (limit, most) = (sample.limit.bytes, part_of(sample.limit.bytes, ceiling_max));
        let worth = purge_floor.max(sample.heap_live.scaled(purge_part));
        let urgent_worth = purge_floor.max(worth.min(limit.saturating_sub(most)));
        // Once: it sums counters of all threads.
        let (stats, waits) = (state.counts(), !state.queue.is_empty());
        Tick { now, sample, limit, stats, waits, most, worth, urgent_worth }
    }

    /// Posts the jobs whose time has come. Returns the time of the next one.
    fn post_due(&mut self, tick: &Tick, jobs: &mut Jobs) -> Moment {
        let (now, sample, settings) = (tick.now, &tick.sample, &self.settings);
        // While host memory is short, an arena that needs it for its contents does not sleep: that
        // relieves nothing, and a purge would wait for its copies.
        let sleeps = self.host.pressure.level == Level::None || !sample.device_sleep_takes_host;
        let mut next = Moment::NEVER;
        for (job, due) in [
            (Job::UnloadIdle, Some(self.resources.next_due())),
            (Job::DecayDevice, sample.device_decay_due),
            (Job::SleepDevice, if sleeps { sample.device_sleep_due } else { None }),
        ] {
            let due = due.unwrap_or(Moment::NEVER);
            next = next.min(due);
            if due <= now {
                jobs.insert(job);
            }
        }
        // Without anything to decay, an idle service is not woken for it.
        let decays = sample.purgeable > sample.decaying;
        let periodic = [
            (Job::DecayHeap, if decays { settings.heap_decay_interval } else { None }),
            // Before they are published.
            (Job::SampleDevice, settings.device_interval),
            (Job::Publish, settings.publish_interval),
            (Job::TendFit, sample.has_fit.then_some(FIT_INTERVAL)),
        ];
        for ((job, every), posted) in periodic.into_iter().zip(&mut self.posted) {
            let Some(every) = every else { continue };
            if posted.is_none_or(|at| now - at >= every) {
                jobs.insert(job);
                *posted = Some(now);
            }
            // A fit is tended at ticks that come anyway.
            if job != Job::TendFit {
                next = next.min(posted.unwrap_or(now) + every);
            }
        }
        next
    }

    /// Ends this loop, and wakes what waits for a tick. Resets admission unless it is closed, as it
    /// is after a shutdown: the level is cleared, and the allowance becomes `ceiling / K`, as if
    /// nothing were held but the reservations. Otherwise a critical level at that moment would
    /// reject requests forever.
    pub fn leave(&mut self) {
        let (state, host) = (self.admission.state(), self.host.ledger);
        if !self.admission.is_closed() {
            let own = [&mut self.host, &mut self.device];
            own.into_iter().chain(&mut self.further).for_each(BudgetAccount::leave);
            self.admission.set_level(Level::None);
            state.unowned.store(0, Ordering::Relaxed);
            let amounts = [&host.single, &host.taken, &host.evictable];
            amounts.iter().for_each(|of| of.store(0, Ordering::Relaxed));
            state.queue.end();
        }
        state.large.wake_all();
    }

    /// Updates the exhaustion state. Returns a job if it has changed.
    fn look_for_exhaustion(&mut self, tick: &Tick, figures: &mut Figures) -> Option<Job> {
        let (state, sample) = (self.admission.state(), &tick.sample);
        let (exhaustion, host) = (&mut self.exhaustion, &self.host);
        // While a fit is in force, an operator asked for less room than there is, and a restart
        // would undo that.
        let is_fit = sample.limit.source == LimitSource::Fit && !exhaustion.is_declared();
        // In observe mode none is rejected.
        let is_open = is_fit || state.observes();
        let reasons = [RejectReason::Full, RejectReason::Pressure, RejectReason::Exhausted];
        let purge_ended = self.purge.next() != Moment::NEVER;
        let seen = ExhaustionSample {
            most: if is_open { ByteSize::MAX } else { host.correction.most },
            smallest: host.counts.smallest(),
            admitted_total: host.counts.admitted_total(ByteSize::MAX),
            refused_total: reasons.map(|reason| tick.stats.rejected_total(reason)).iter().sum(),
            purged: purge_ended.then_some(self.purged_at),
        };
        exhaustion.update(tick.now, seen);
        // Single requests are admitted so that memory stays below the critical level's mark. Pages
        // that a purge would release count: a request that runs in another arena cannot use them.
        let mark = if exhaustion.may_serve_one() { self.settings.thresholds.up[2] } else { 0.0 };
        let other = host.correction.other.saturating_add(sample.purgeable);
        let room = sample.limit.bytes.scaled(mark).saturating_sub(other);
        let single = room.scaled(1.0 / host.correction.correction_factor);
        state.host.single.store(single.get(), Ordering::Relaxed);
        // While some are served, others wait for their end.
        let rejects = exhaustion.is_declared() && !exhaustion.serves_one();
        let unowned = if rejects { host.correction.unowned.get().max(1) } else { 0 };
        state.unowned.store(unowned, Ordering::Relaxed);
        let before = (figures.is_exhausted, figures.needs_restart);
        let now = (exhaustion.is_declared(), exhaustion.needs_restart);
        (figures.is_exhausted, figures.needs_restart) = now;
        figures.serves_one = exhaustion.serves_one();
        (before != now).then_some(Job::ReportExhaustion)
    }

    /// Updates levels, allowances and reserved headroom.
    fn account(&mut self, tick: &Tick, figures: &mut Figures) {
        let Tick { now, ref sample, limit, .. } = *tick;
        let turnover = self.host.turnover(&tick.stats, now);
        let DeviceFigures { committed, idle, limit: device_limit } = sample.device;
        let device_limit = device_limit.unwrap_or(ByteSize::MAX);
        self.admission.state().is_device_lost.store(device_limit.is_zero(), Ordering::Relaxed);
        let _ = self.host.pressure.update(now, sample.physical, limit);
        // A lost device has no pressure: it admits nothing, and releasing memory would not help.
        let pressed = if device_limit.is_zero() { ByteSize::MAX } else { device_limit };
        let _ = self.device.pressure.update(now, committed, pressed);
        let (ceiling, parts) = match limit {
            ByteSize::MAX => (limit, CeilingParts::default()),
            _ => self.ceiling.update(CeilingSample {
                limit,
                required: sample.required(),
                uncovered: self.host.correction.uncovered,
                is_measured: self.host.correction.is_measured(),
                unlearned: ByteSize::new(self.host.ledger.unlearned.load(Ordering::Relaxed)),
                level: self.host.pressure.level,
                turnover,
                tick: self.settings.active_tick,
                late: now - self.planned,
            }),
        };
        (figures.sample, figures.limit, figures.ceiling_parts) = (*sample, limit, parts);
        let device_ceiling = part_of(device_limit, self.settings.ceiling);
        let (mark, none) = (self.settings.thresholds.down[0], ByteSize::ZERO);
        let Sample { physical, purgeable, outgrown, spilled, .. } = *sample;
        for (account, [physical, purgeable, outgrown, spilled], limit, ceiling) in [
            (&mut self.host, [physical, purgeable, outgrown, spilled], limit, ceiling),
            (&mut self.device, [committed, idle, none, none], device_limit, device_ceiling),
        ] {
            if !account.is_unused(physical, limit) {
                account.correct(Measured { physical, purgeable, outgrown, ceiling, turnover });
            }
            let nth = account.budget as usize;
            figures.levels[nth] = account.pressure.level;
            let above = physical.saturating_sub(part_of(limit, mark));
            figures.wanted[nth] = above.saturating_add(spilled);
        }
        for (nth, device) in self.further.iter_mut().enumerate() {
            device.update_device(self.sensor.further_device(nth), self.settings.ceiling, now);
        }
        let utilizations = self.accounts().map(|account| account.ledger.utilization());
        add_utilizations(&mut figures.utilizations, turnover.time, utilizations);
        figures.entered = self.host.pressure.entered;
        // The device's level unloads; only the host's rejects, since a cost that does not fit the
        // device is rejected by its ledger, and no process is killed.
        self.admission.set_level(self.host.pressure.level);
    }

    fn accounts(&self) -> impl Iterator<Item = &BudgetAccount> {
        [&self.host, &self.device].into_iter().chain(&self.further)
    }

    /// Returns the state of each admission: one for the host and the first device.
    fn states(&self) -> impl Iterator<Item = &'static AdmissionState> {
        self.accounts().skip(1).map(|account| account.admission.state())
    }

    /// Records the needs of requests for the advice on limits, unless it is too early.
    fn record_limits(&mut self, tick: &Tick) {
        if tick.now - self.recorded < STEP {
            return;
        }
        self.recorded = tick.now;
        let (totals, correction) = (self.host.ledger.totals(), &self.host.correction);
        let by_level = [RejectReason::Pressure, RejectReason::Exhausted];
        let of_requests = totals.requests.scaled(correction.correction_factor);
        let without_requests = tick.sample.required().saturating_sub(of_requests);
        let limits = LimitSample {
            now: tick.now,
            limit: tick.limit,
            required: tick.sample.required(),
            totals,
            other: if tick.limit < ByteSize::MAX { correction.other } else { without_requests },
            correction_factor: correction.correction_factor,
            trusts_lone: correction.trusts_lone(),
            is_measured: !totals.unheld.is_zero() || correction.is_measured(),
            classes: self.host.counts.classes,
            rejected_by_level: by_level.map(|it| tick.stats.rejected_total(it)).iter().sum(),
        };
        // Unless the record is being read: then the next sample covers its time too.
        if let Some(mut record) = try_lock(&self.state.limits) {
            record.add(limits, self.settings.ceiling);
        }
    }

    /// Publishes what requests may reserve if resources are evicted. Returns the saturation.
    fn saturate(&mut self, tick: &Tick) -> f64 {
        let (state, now) = (self.admission.state(), tick.now);
        let Cost { host, device } = state.by_budget(self.resources.evictable());
        let spare = host.scaled(1.0 / self.host.correction.correction_factor);
        state.host.evictable.store(spare.get(), Ordering::Relaxed);
        let total = self.states().map(AdmissionState::sheds_total).sum();
        let last = self.saturation.shed_at;
        // An instance that shuts down sheds to others, which are to have room.
        let sheds = self.saturation.has_recent_shed(now, total) && !state.is_closed();
        // The first is published at once, with the figures of its moment.
        if sheds && last.is_none_or(|at| now - at >= SHED_SHOWN) {
            self.posted[PUBLISH] = None;
        }
        let is_critical = self.host.pressure.level == Level::Critical;
        let is_short = sheds || tick.waits || is_critical || self.exhaustion.is_declared();
        let mut value = 1.0;
        if !is_short {
            // The largest part that is taken of a budget.
            value = self.host.ledger.saturation(host).max(self.device.ledger.saturation(device));
            for device in &self.further {
                value = value.max(device.ledger.saturation(ByteSize::ZERO));
            }
        }
        self.saturation.add(now, value)
    }

    /// Returns one reclaim step for each budget. While work spills, which begins below level high,
    /// the host's steps are those of that level.
    fn climb(&self, tick: &Tick) -> [Option<Job>; 2] {
        let least = if tick.sample.spilled.is_zero() { Level::None } else { Level::High };
        [(&self.host, least), (&self.device, Level::None)].map(|(account, least)| {
            let level = account.pressure.level.max(least);
            let step = due(&self.steps, account.budget, level, tick.now)?;
            self.steps.get(step)?.pace.start(tick.now).then_some(Job::Reclaim { step })
        })
    }

    /// Returns the time until the next sample, and the part of the room, as its inverse, whose
    /// reservation is a reason for one before. `needs` are the bytes that are held or about to be,
    /// `last` the physical ones at the sample before, and the time since then.
    fn step(&self, tick: &Tick, needs: ByteSize, last: (ByteSize, Duration)) -> (Duration, u64) {
        let (sample, Settings { active_tick, idle_tick, .. }) = (&tick.sample, self.settings);
        let ledgers = || self.accounts().map(|account| account.ledger);
        let is_held = ledgers().any(|ledger| !ledger.requests().is_zero());
        // A fifth, and a sixteenth below: sudden load in the simulation was rejected more often with
        // a half and a quarter.
        let fills = |ledger: &Ledger| ledger.requests() > ledger.request_room().scaled(0.2);
        let filled = sample.required() > tick.limit.scaled(0.5) || ledgers().any(fills);
        // By a hundredth of the limit in an idle tick.
        let part = last.1.div_duration_f64(idle_tick).min(1.0) / 100.0;
        let grows = sample.physical.saturating_sub(last.0) > tick.limit.scaled(part);
        // Requests may ask for one tick before its time, but not for each.
        let is_early = last.1 < active_tick.max(self.pacer.rest());
        let moves = self.planned != Moment::NEVER && (grows || is_early);
        let pressed = self.host.pressure.level.max(self.device.pressure.level) > Level::None;
        if filled || moves || pressed || !self.admission.state().queue.is_empty() {
            return (active_tick, 1);
        }
        let is_long = |(at, _): (Moment, _)| tick.now - at >= self.settings.quiet;
        let is_quiet = !is_held && self.quiet_since.is_some_and(is_long);
        let least = if is_held { active_tick } else { idle_tick };
        let most = if is_quiet { idle_tick.saturating_mul(4) } else { idle_tick };
        // Requests are counted as they grow, but not C code, which may take a quarter of the room:
        // at 1 GB/s a byte in a nanosecond.
        let to_fill = Duration::from_nanos(tick.most.saturating_sub(needs).get() / 4);
        // The first request after a quiet time asks for a sample.
        (to_fill.clamp(least, most), if is_quiet { u64::MAX } else { 16 })
    }
}

debug_as!(Maintenance, |it| host: it.host, device: it.device, last: it.state.figures());

#[cfg(all(test, not(lowtide_loom)))]
mod tests {
    use super::*;
    use crate::cost::Cost;

    #[test]
    fn a_budget_is_corrected_while_it_is_limited_held_or_reserved() {
        let (admission, none) = (Admission::new(), ByteSize::ZERO);
        let mut account =
            BudgetAccount::new(admission.clone(), Budget::Device, Thresholds::default(), 2.0);
        let limit = ByteSize::mib(100);
        assert!(account.is_unused(none, ByteSize::MAX));
        assert!(!account.is_unused(ByteSize::new(1), ByteSize::MAX));
        assert!(!account.is_unused(none, limit));
        let permit = admission.try_admit(Cost::device(ByteSize::new(1))).expect("no limit");
        assert!(!account.is_unused(none, ByteSize::MAX));
        drop(permit);
        assert!(account.is_unused(none, ByteSize::MAX));
        account.correct(Measured { ceiling: limit, ..Measured::default() });
        assert!(!account.is_unused(none, ByteSize::MAX), "a limit is in force");
        let unlimited = Measured { ceiling: ByteSize::MAX, ..Measured::default() };
        account.correct(unlimited);
        assert!(account.is_unused(none, ByteSize::MAX));
    }
}

#[cfg(all(test, not(lowtide_loom)))]
mod device_tests {
    use super::*;
    use crate::cost::Cost;
    use crate::cost::Rejected;

    #[test]
    fn a_device_admits_by_its_own_figures_and_nothing_once_it_is_lost() {
        let (admission, marks) = (Admission::new(), Thresholds::default());
        let mut account = BudgetAccount::new(admission.clone(), Budget::Device, marks, 2.0);
        let figures = DeviceFigures {
            committed: ByteSize::mib(40),
            idle: ByteSize::mib(40),
            limit: Some(ByteSize::mib(100)),
        };
        account.update_device(figures, 0.8, Moment::ORIGIN);
        let ask = |mib| admission.try_admit(Cost::device(ByteSize::mib(mib)));
        let held = ask(30).expect("idle memory is room");
        assert!(!account.ledger.requests().is_zero());
        assert!(matches!(ask(81), Err(Rejected::TooLarge { .. })));
        let lost = DeviceFigures { limit: Some(ByteSize::ZERO), ..DeviceFigures::default() };
        account.update_device(lost, 0.8, Moment::ORIGIN);
        let rejected = Rejected::DeviceLost { asked: ByteSize::mib(1) };
        assert_eq!(ask(1).map(drop), Err(rejected));
        let host = admission.try_admit(Cost::host(ByteSize::mib(1)));
        assert!(host.is_ok(), "what needs no device is admitted");
        drop((held, host));
        assert!(account.ledger.requests().is_zero());
        account.update_device(figures, 0.8, Moment::ORIGIN);
        assert!(ask(30).is_ok());
    }
}
