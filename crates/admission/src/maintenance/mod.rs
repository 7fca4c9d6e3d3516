//! The control loop: from a sample to levels, allowances and jobs.
//!
//! [`Maintenance::tick`] is the whole loop body. It samples, corrects the ledgers, sets the level,
//! and selects jobs. It does not purge, unload or publish, calls no driver and allocates nothing.
//! The worker ([`Worker`]) runs the jobs. The owner of the threads drives both: [`run_control`] on
//! one, [`run_worker`] on the other.
//!
//! Invariants: `next > now`, and `next - now <= idle_tick`; a purge happens only for pressure or
//! exhaustion, an unload, an operator's request, growth ([`Settings::purge_growth`]), or if
//! `purgeable - decaying + free blocks of the C library > max(purge_floor, purge_part x live)`;
//! levels depend on physical bytes, allowances on required ones.

mod account;
mod jobs;
mod purging;
mod saturation;
mod settings;
mod state;
mod worker;

use std::hash::{BuildHasher as _, RandomState};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use lowtide_core::bytes::ByteSize;
use lowtide_core::clock::Moment;

use super::admission::Admission;
use super::ceiling::{Ceiling, CeilingParts, CeilingSample};
use super::correction::{Measured, RequestRate};
use super::cost::{Budget, Cost, RejectReason};
use super::exhaustion::{Exhaustion, ExhaustionSample};
use super::limit_advice::LimitSample;
use super::managed::Resources;
use super::pressure::{Level, Thresholds};
use super::reclaim::{ReclaimBackoff, ReclaimPolicy, ReclaimStep};
use super::signal::{Limit, LimitSource};
use super::tally::AdmissionStats;
use account::BudgetAccount;
use purging::{RetainedGrowth, purgeable_now};
use saturation::{Saturation, taken};

pub use account::DeviceFigures;
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

/// The shortest time between two looks at a fit in force. A guess: a look costs some 0.1 ms.
const FIT_INTERVAL: Duration = Duration::from_millis(100);

/// The state of the control loop. Owned by one thread.
pub struct Maintenance {
    settings: Settings,
    sensor: Box<dyn Sensor>,
    admission: Admission,
    resources: Resources,
    policy: ReclaimPolicy,
    state: Arc<PressureState>,
    purge: Arc<ReclaimBackoff>,
    host: BudgetAccount,
    device: BudgetAccount,
    further: Vec<BudgetAccount>,
    ceiling: Ceiling,
    last: Option<Sample>,
    /// The time for which the next tick is planned.
    planned: Moment,
    /// The requests admitted by the last tick, and the time since which none has arrived or been
    /// held and the heap has not moved, with the sample of then.
    admitted: u64,
    quiet_since: Option<(Moment, Sample)>,
    purged_at: Moment,
    /// The answer of the function of that name at this tick. The next one then comes at its time,
    /// whatever ticks cost.
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
    decayed_at: Option<Moment>,
    published_at: Option<Moment>,
    /// The time of the last device sample.
    looked_at: Option<Moment>,
    /// The time when the fit in force was last tended.
    fit_at: Option<Moment>,
    /// The state of the jitter's generator, different in each process.
    chance: u64,
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
    pub fn new(
        settings: Settings,
        sensor: Box<dyn Sensor>,
        admission: Admission,
        resources: Resources,
        steps: Vec<ReclaimStep>,
    ) -> Result<Self, SettingsError> {
        settings.check()?;
        let (thresholds, factor) = (settings.thresholds, settings.correction_factor);
        let account = |budget| BudgetAccount::new(admission.clone(), budget, thresholds, factor);
        let (host, device) = (account(Budget::Host), account(Budget::Device));
        Ok(Self {
            settings,
            sensor,
            admission,
            resources,
            policy: ReclaimPolicy::new(steps),
            state: Arc::default(),
            purge: Arc::default(),
            host,
            device,
            further: Vec::new(),
            ceiling: Ceiling::new(settings.ceiling, settings.ceiling_max),
            last: None,
            planned: Moment::NEVER,
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
            decayed_at: None,
            published_at: None,
            looked_at: None,
            fit_at: None,
            chance: RandomState::new().hash_one(0_u8) | 1,
        })
    }

    /// Adds the budget of a further device: the device's bytes in `admission`, which has no other
    /// user for them. Called before the first tick.
    pub fn add_device(&mut self, admission: Admission) {
        let (thresholds, factor) = (Thresholds::default(), self.settings.correction_factor);
        let account = BudgetAccount::new(admission, Budget::Device, thresholds, factor);
        self.further.push(account);
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
            policy: self.policy.clone(),
            resources: self.resources.clone(),
            hands,
            panics: 0,
        }
    }

    /// Returns the time for which the last tick has planned the next one.
    #[must_use]
    pub const fn next_tick(&self) -> Moment {
        self.planned
    }

    /// Takes a sample, decides, and posts the jobs for the worker. Returns them, the most urgent
    /// first. Allocates nothing.
    pub fn tick(&mut self, now: Moment) -> impl Iterator<Item = Job> + Clone + use<> {
        let freed = self.admission.state().unused.freed();
        let mut sample = self.sensor.sample(now);
        // A limit that was known still exists: a failed read must not admit requests.
        // A fit is none of the kernel's, and has ended.
        let is_fit = |limit: Limit| limit.source == LimitSource::Fit;
        if let Some(last) = self.last.filter(|_| !sample.limit.is_known())
            && !is_fit(last.limit)
        {
            sample.limit = last.limit;
        }
        self.admission.state().host.taken.store(sample.in_progress.get(), Ordering::Relaxed);
        // Once: it sums counters of all threads.
        let stats = self.admission.stats();
        self.account(&sample, &stats, now);
        self.record_limits(&sample, &stats, now);
        self.may_fill_up = self.may_fill_up(&sample);
        self.admission.state().large.tend(self.host.pressure.level, now);
        let worth = self.urgent_purge_worth(&sample);
        let unused = &self.admission.state().unused;
        unused.publish(
            freed,
            [sample.physical, purgeable_now(&sample)],
            [worth, self.most(&sample)],
        );
        self.admission.state().tend_queue(now);
        let mut jobs = Jobs::default();
        self.look_for_exhaustion(&sample, &stats, now, &mut jobs);
        self.saturate(&stats, now);
        self.decide_purge(&sample, &stats, now, &mut jobs);
        self.climb(now, &mut jobs);
        let resources_due = self.resources.next_due();
        if resources_due <= now {
            jobs.insert(Job::UnloadIdle);
        }
        let device_decay_due = sample.device_decay_due.unwrap_or(Moment::NEVER);
        if device_decay_due <= now {
            jobs.insert(Job::DecayDevice);
        }
        let sleep_due = self.sleep_due(&sample);
        if sleep_due <= now {
            jobs.insert(Job::SleepDevice);
        }
        // Without anything to decay, an idle service is not woken for it.
        let every = self.settings.heap_decay_interval;
        let every = every.filter(|_| sample.purgeable > sample.decaying);
        let decay_due = decide(Job::DecayHeap, every, &mut self.decayed_at, now, &mut jobs);
        // Before they are published.
        let every = self.settings.device_interval;
        let look_due = decide(Job::SampleDevice, every, &mut self.looked_at, now, &mut jobs);
        let every = self.settings.publish_interval;
        let publish_due = decide(Job::Publish, every, &mut self.published_at, now, &mut jobs);
        let every = Some(FIT_INTERVAL).filter(|_| sample.has_fit);
        decide(Job::TendFit, every, &mut self.fit_at, now, &mut jobs);
        let step = if self.is_active(&sample) {
            self.settings.active_tick
        } else {
            self.settings.idle_tick
        };
        let step = self.jittered(step);
        let due = resources_due.min(device_decay_due).min(sleep_due);
        let due = due.min(publish_due).min(look_due).min(decay_due);
        // A job that is already due has been posted: check again after an active tick at the
        // earliest.
        let next = due.max(now + self.settings.active_tick).min(now + step);
        let is_slow = next - now > self.settings.active_tick;
        self.admission.state().is_slow.store(is_slow, Ordering::Relaxed);
        self.last = Some(sample);
        self.planned = next;
        debug_assert!(next > now, "the next tick is not in the future");
        self.state.post_all(jobs);
        jobs
    }

    /// Returns the most memory that the process should use.
    fn most(&self, sample: &Sample) -> ByteSize {
        if !sample.limit.is_known() {
            return ByteSize::MAX;
        }
        sample.limit.bytes.scaled(self.settings.ceiling_max)
    }

    /// Returns `true` if little of the limit is left once requests hold what they have reserved,
    /// and a large one that waits for that what it needs.
    fn may_fill_up(&self, sample: &Sample) -> bool {
        let admission = self.admission.state();
        let unheld = admission.host.unheld().saturating_add(admission.unused.wanted());
        sample.limit.is_known() && sample.physical.saturating_add(unheld) > self.most(sample)
    }

    /// Shortens a step at random.
    fn jittered(&mut self, step: Duration) -> Duration {
        // Marsaglia's xorshift: any sequence that differs between processes works.
        self.chance ^= self.chance << 13;
        self.chance ^= self.chance >> 7;
        self.chance ^= self.chance << 17;
        let part = f64::from(u32::try_from(self.chance >> 32).unwrap_or(0)) / f64::from(u32::MAX);
        step.mul_f64(1.0 - self.settings.jitter * part)
    }

    /// Wakes what waits for a tick, when this loop has ended and none follows.
    pub fn wake_waiting(&self) {
        self.admission.state().large.wake_all();
    }

    /// Resets admission when this loop ends before the service: the level is cleared, and the
    /// allowance becomes `ceiling / K`, as if nothing were held but the reservations. Otherwise a
    /// critical level at that moment would reject requests forever. A closed admission stays
    /// closed.
    pub fn leave(&mut self) {
        let own = [&mut self.host, &mut self.device];
        own.into_iter().chain(&mut self.further).for_each(BudgetAccount::leave);
        self.admission.set_level(Level::None);
        let state = self.admission.state();
        state.unowned.store(0, Ordering::Relaxed);
        state.host.single.store(0, Ordering::Relaxed);
        state.host.taken.store(0, Ordering::Relaxed);
        state.queue.end();
    }

    /// Updates the exhaustion state.
    fn look_for_exhaustion(
        &mut self,
        sample: &Sample,
        stats: &AdmissionStats,
        now: Moment,
        jobs: &mut Jobs,
    ) {
        // While a fit is in force, an operator asked for less room than there is, and a restart
        // would undo that.
        let is_fit = sample.limit.source == LimitSource::Fit && !self.exhaustion.is_declared();
        // In observe mode none is rejected.
        let is_open = is_fit || self.admission.state().observes();
        let most = if is_open { ByteSize::MAX } else { self.host.correction.most };
        let reasons = [RejectReason::Full, RejectReason::Pressure, RejectReason::Exhausted];
        let purge_ended = self.purge.next() != Moment::NEVER;
        let seen = ExhaustionSample {
            most,
            smallest: self.host.counts.smallest(),
            admitted_total: self.host.counts.admitted_total(),
            refused_total: reasons.into_iter().map(|reason| stats.rejected_total(reason)).sum(),
            purged: purge_ended.then_some(self.purged_at),
        };
        self.exhaustion.update(now, seen);
        let may_serve_one = self.exhaustion.may_serve_one();
        let single = if may_serve_one { self.room_for_one(sample) } else { ByteSize::ZERO };
        self.admission.state().host.single.store(single.get(), Ordering::Relaxed);
        // While some are served, others wait for their end.
        let rejects = self.exhaustion.is_declared() && !self.exhaustion.serves_one();
        let unowned = if rejects { self.host.correction.unowned.get().max(1) } else { 0 };
        self.admission.state().unowned.store(unowned, Ordering::Relaxed);
        if self.state.set_exhausted(&self.exhaustion) {
            jobs.insert(Job::ReportExhaustion);
        }
    }

    /// Returns the most that single requests may reserve, so that memory stays below the critical
    /// level's mark. Pages that a purge would release count: a request that runs in another arena
    /// cannot use them.
    fn room_for_one(&self, sample: &Sample) -> ByteSize {
        let mark = self.settings.thresholds.up(Level::Critical);
        let most = sample.limit.bytes.scaled(mark);
        let other = self.host.correction.other.saturating_add(sample.purgeable);
        let room = most.saturating_sub(other);
        room.scaled(1.0 / self.host.correction.correction_factor)
    }

    /// Updates levels, allowances and reserved headroom.
    fn account(&mut self, sample: &Sample, stats: &AdmissionStats, now: Moment) {
        let turnover = self.host.turns.next(stats, now);
        let limit = if sample.limit.is_known() { sample.limit.bytes } else { ByteSize::MAX };
        let is_lost = account::is_lost(sample.device.limit);
        self.admission.state().is_device_lost.store(is_lost, Ordering::Relaxed);
        let device_limit = sample.device.limit.unwrap_or(ByteSize::MAX);
        let _ = self.host.pressure.update(now, sample.physical, limit);
        // A lost device has no pressure: it admits nothing, and releasing memory would not help.
        let pressed = if device_limit.is_zero() { ByteSize::MAX } else { device_limit };
        let _ = self.device.pressure.update(now, sample.device.committed, pressed);
        let ceiling = self.host_ceiling(sample, limit, turnover, now);
        let device_ceiling = account::ceiling(device_limit, self.settings.ceiling);
        let DeviceFigures { committed, idle, .. } = sample.device;
        let budgets = [
            (&mut self.host, sample.physical, sample.purgeable, limit, ceiling),
            (&mut self.device, committed, idle, device_limit, device_ceiling),
        ];
        let mark = self.settings.thresholds.down[0];
        let wanted = budgets.map(|(account, physical, purgeable, limit, ceiling)| {
            if account.is_unused(physical, limit) {
                return ByteSize::ZERO;
            }
            account.correct(Measured { physical, purgeable, ceiling, turnover });
            physical.saturating_sub(account::ceiling(limit, mark))
        });
        for (nth, device) in self.further.iter_mut().enumerate() {
            device.update_device(self.sensor.further_device(nth), self.settings.ceiling, now);
        }
        let accounts = [&self.host, &self.device].into_iter().chain(&self.further);
        let utilizations = accounts.map(|account| account.ledger().utilization());
        self.state.utilizations.add(turnover.time, utilizations);
        self.state.set_sample(sample, limit);
        self.state.set_entered(&self.host.pressure);
        // The device's level unloads; only the host's rejects, since a cost that does not fit the
        // device is rejected by its ledger, and no process is killed.
        self.admission.set_level(self.host.pressure.level);
        // Last: a reader that sees a level finds it in force.
        for (account, wanted) in [&self.host, &self.device].into_iter().zip(wanted) {
            self.state.set_level(account.budget, account.pressure.level, wanted);
        }
    }

    /// Records the needs of requests for the advice on limits.
    fn record_limits(&self, sample: &Sample, stats: &AdmissionStats, now: Moment) {
        let (ledger, correction) = (self.admission.ledger(Budget::Host), &self.host.correction);
        let by_level = [RejectReason::Pressure, RejectReason::Exhausted];
        let (required, reserved) = (sample.required(), ledger.requests());
        let (unheld, resources) = (ledger.unheld(), ledger.resource_reservations());
        let correction_factor = correction.correction_factor;
        let (limit, other) = match sample.limit.is_known() {
            true => (sample.limit.bytes, correction.other),
            false => (ByteSize::MAX, required.saturating_sub(reserved.scaled(correction_factor))),
        };
        let limits = LimitSample {
            now,
            limit,
            required,
            resources,
            loaded: resources.saturating_sub(ledger.loading()),
            other,
            correction_factor,
            trusts_lone: correction.trusts_lone(),
            reserved,
            held: reserved.saturating_sub(unheld),
            is_measured: !unheld.is_zero() || correction.is_measured(),
            classes: self.host.counts.classes,
            rejected_by_level: by_level.map(|reason| stats.rejected_total(reason)).iter().sum(),
        };
        self.state.record_limits(limits, self.settings.ceiling);
    }

    /// Returns the host's ceiling, and publishes its parts.
    fn host_ceiling(
        &mut self,
        sample: &Sample,
        limit: ByteSize,
        turnover: RequestRate,
        now: Moment,
    ) -> ByteSize {
        if limit == ByteSize::MAX {
            self.state.set_ceiling_parts(CeilingParts::default());
            return limit;
        }
        let (ceiling, parts) = self.ceiling.update(CeilingSample {
            limit,
            required: sample.required(),
            uncovered: self.host.correction.uncovered,
            is_measured: self.host.correction.is_measured(),
            unlearned: ByteSize::new(self.host.ledger().unlearned.load(Ordering::Relaxed)),
            level: self.host.pressure.level,
            turnover,
            tick: self.settings.active_tick,
            late: now - self.planned,
        });
        self.state.set_ceiling_parts(parts);
        ceiling
    }

    /// Returns `true` if for the quiet time no request has been held or admitted, and the heap has
    /// neither allocated nor freed as much as is worth a purge: a program that works without
    /// requests would fault in again what a purge releases.
    fn is_quiet(&mut self, sample: &Sample, stats: &AdmissionStats, now: Moment) -> bool {
        if stats.held() > 0 || stats.admitted_total != self.admitted {
            self.admitted = stats.admitted_total;
            self.quiet_since = None;
            return false;
        }
        let worth = self.purge_worth(sample);
        let rests = |(_, then): &(Moment, Sample)| {
            let moved = then.heap_active.get().abs_diff(sample.heap_active.get());
            let freed = sample.purgeable.saturating_sub(then.purgeable);
            moved <= worth.get() && freed <= worth
        };
        let since = self.quiet_since.filter(rests).unwrap_or((now, *sample));
        now - self.quiet_since.insert(since).0 >= self.settings.quiet
    }

    /// Publishes the saturation.
    fn saturate(&mut self, stats: &AdmissionStats, now: Moment) {
        let devices = self.further.iter().map(|device| device.state().sheds_total());
        let total = devices.sum::<u64>() + self.admission.state().sheds_total();
        let last = self.saturation.shed_at;
        // An instance that shuts down sheds to others, which are to have room.
        let sheds = self.saturation.has_recent_shed(now, total) && !self.admission.is_closed();
        // The first is published at once, with the figures of its moment.
        if sheds && last.is_none_or(|at| now - at >= SHED_SHOWN) {
            self.published_at = None;
        }
        let is_critical = self.host.pressure.level == Level::Critical;
        let is_short = sheds || stats.waiting > 0 || is_critical || self.exhaustion.is_declared();
        let value = if is_short { 1.0 } else { self.taken() };
        self.state.set_saturation(self.saturation.add(now, value));
    }

    /// Returns the largest part that is taken of a budget.
    fn taken(&self) -> f64 {
        let Cost { host, device } = self.admission.state().by_budget(self.resources.evictable());
        let own = taken(self.host.ledger(), host).max(taken(self.device.ledger(), device));
        let further = self.further.iter().map(|device| taken(device.ledger(), ByteSize::ZERO));
        further.fold(own, f64::max)
    }

    /// Posts one reclaim step for each budget.
    fn climb(&self, now: Moment, jobs: &mut Jobs) {
        for account in [&self.host, &self.device] {
            let due = self.policy.due(account.budget, account.pressure.level, now);
            if let Some(step) = due
                && self.policy.steps.get(step).is_some_and(|it| it.pace.start(now))
            {
                jobs.insert(Job::Reclaim { step });
            }
        }
    }

    /// Returns the time when an arena may sleep. While host memory is short, an arena that needs it
    /// for its contents does not sleep: that relieves nothing, and a purge would wait for its
    /// copies.
    fn sleep_due(&self, sample: &Sample) -> Moment {
        let is_short = self.host.pressure.level > Level::None;
        if is_short && sample.device_sleep_takes_host {
            return Moment::NEVER;
        }
        sample.device_sleep_due.unwrap_or(Moment::NEVER)
    }

    /// Returns `true` if the next sample should come soon.
    fn is_active(&self, sample: &Sample) -> bool {
        let limit = sample.limit;
        let filled = limit.is_known() && sample.required() > limit.bytes.scaled(0.5);
        let before = self.last.map_or(ByteSize::MAX, |last| last.physical);
        let grown = sample.physical.saturating_sub(before);
        let grows = grown > if limit.is_known() { limit.bytes.scaled(0.01) } else { ByteSize::MAX };
        let pressed = self.host.pressure.level.max(self.device.pressure.level) > Level::None;
        let waits = !self.admission.state().queue.is_empty();
        let mut accounts = [&self.host, &self.device].into_iter().chain(&self.further);
        let is_held = accounts.any(|account| !account.ledger().requests().is_zero());
        filled || grows || pressed || waits || is_held
    }
}

/// Posts a periodic job if it is due. Returns the time when it is next due.
fn decide(
    job: Job,
    every: Option<Duration>,
    last: &mut Option<Moment>,
    now: Moment,
    jobs: &mut Jobs,
) -> Moment {
    let Some(every) = every else { return Moment::NEVER };
    if last.is_none_or(|at| now - at >= every) {
        *last = Some(now);
        jobs.insert(job);
    }
    last.map_or(now, |at| at + every)
}

debug_as!(Maintenance, |it| host: it.host, device: it.device, last: it.last);
