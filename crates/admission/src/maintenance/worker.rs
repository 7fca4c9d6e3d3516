//! The worker: runs the jobs of the control loop, one after the other, on its own thread.
//!
//! Its only decision is to purge after an unload. The actions themselves are behind
//! [`MaintenanceActions`], [`super::super::reclaim::Reclaim`] and
//! [`super::super::managed::Resource`]; a panic in any of them ends that job and not the thread.
//! During a job its thread is marked as background: nothing on it waits for all work of a device.
//!
//! The ticks of the control loop take at most a set share of a core. The cost of a tick is the
//! smallest of the last few: on a busy machine the clock also counts the time that other processes
//! took, and a loop that slowed down for that would be blind when it matters.
//!
//! Invariants: `jobs done + jobs panicked = jobs taken`; `rest >= cost / share - cost`, with `cost`
//! the smallest of the last [`KEPT`], and `next <= max(requested, now + rest_max)`.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use lowtide_core::bytes::ByteSize;
use lowtide_core::clock::{Bell, Clock, Moment};
use lowtide_core::sync::{background, caught};

use super::jobs::{Job, Trigger};
use super::{Maintenance, PressureState};
use crate::cost::Budget;
use crate::managed::Resources;
use crate::pressure::Level;
use crate::reclaim::{PAUSE_MIN, ReclaimBackoff, ReclaimStep};
use crate::state::replace;

/// Actions that the worker delegates. `memory` implements them over heap, arenas and metrics.
pub trait MaintenanceActions: Send {
    /// Purges the host's heap, and returns the bytes released.
    fn purge(&mut self, trigger: Trigger) -> ByteSize;

    /// Runs a job for which the worker has nothing: those of devices, decay, admin tasks, the fit in
    /// force, exhaustion and metrics. Returns `true` if more of its kind are due, which then run
    /// one at a time, after more urgent jobs. Default: nothing.
    fn run(&mut self, _job: Job, _now: Moment) -> bool {
        false
    }
}

/// The worker's state, created by [`Maintenance::worker`].
pub struct Worker {
    pub(super) state: Arc<PressureState>,
    pub(super) purge: Arc<ReclaimBackoff>,
    pub(super) steps: Arc<[ReclaimStep]>,
    pub(super) resources: Resources,
    pub(super) hands: Box<dyn MaintenanceActions>,
    pub(super) panics: u64,
}

impl Worker {
    /// Runs one job on this thread. A panic of the job is caught and counted.
    pub fn run(&mut self, job: Job, clock: &dyn Clock) {
        let _background = background();
        let Job::Purge { trigger } = job else {
            self.panics += u64::from(caught(|| self.work(job, clock)).is_err());
            return;
        };
        let asked = self.state.purgeable_by(trigger);
        let recovered = caught(|| self.hands.purge(trigger));
        self.panics += u64::from(recovered.is_err());
        if trigger.is_paced() {
            self.purge.finish(asked, recovered.unwrap_or_default(), clock.now());
        }
    }

    /// Returns the number of jobs that have panicked.
    #[must_use]
    pub const fn panics_total(&self) -> u64 {
        self.panics
    }

    fn work(&mut self, job: Job, clock: &dyn Clock) {
        let (now, before) = (clock.now(), self.resources.releases_total());
        match job {
            Job::Reclaim { step } => {
                let Some(step) = self.steps.get(step) else { return };
                let figures = self.state.figures();
                let is_dear = step.starts_at >= Level::High;
                // No dearer memory is released instead of what the next purge releases, unless the
                // last ones released little.
                let next = self.purge.next();
                let works = next == Moment::NEVER || next <= now + PAUSE_MIN;
                let spares = is_dear && works && step.relieves == Budget::Host;
                let spared = if spares { figures.sample.purgeable } else { ByteSize::ZERO };
                let bytes = figures.wanted[step.relieves as usize].saturating_sub(spared);
                if is_dear && bytes.is_zero() {
                    return step.pace.cancel();
                }
                step.run(bytes, || clock.now());
            }
            Job::UnloadIdle => drop(self.resources.unload_due(now)),
            _ if self.hands.run(job, now) => self.state.post(job),
            _ => {}
        }
        // A resource was unloaded or a reclaimer called: only a purge releases the memory.
        if self.resources.releases_total() > before {
            self.state.post(Job::Purge { trigger: Trigger::Unload });
        }
    }
}

debug_as!(Worker, |worker| panics: worker.panics);

/// Runs the worker's jobs on this thread until no more are accepted and none is pending.
pub fn run_worker(worker: &mut Worker, clock: &dyn Clock) {
    let state = Arc::clone(&worker.state);
    // Ends when no more jobs are accepted.
    while let Some(job) = state.wait_for_job(clock) {
        worker.run(job, clock);
    }
}

/// Runs the control loop on this thread: samples, decides and posts jobs until `stop` is set and
/// `bell` is rung. A request that begins to wait for room rings it too if the next tick is far.
pub fn run_control(
    maintenance: &mut Maintenance,
    clock: &dyn Clock,
    bell: &Arc<Bell>,
    stop: &AtomicBool,
) {
    maintenance.states().for_each(|state| replace(&state.bell, Some(Arc::clone(bell))));
    maintenance.due = clock.now();
    // Ends when `stop` is set; each iteration waits until the next sample.
    while !stop.load(Ordering::Acquire) {
        clock.wait_until(bell, maintenance.turn(clock));
    }
    // After the last tick: no deadline passes any more.
    maintenance.admission.state().queue.end();
}

impl Maintenance {
    /// Runs a tick. Returns the time of the next one.
    fn turn(&mut self, clock: &dyn Clock) -> Moment {
        let now = clock.now();
        self.state.ticks.fetch_add(1, Ordering::Relaxed);
        let late = u64::try_from((now - self.due).as_nanos()).unwrap_or(u64::MAX);
        self.state.late.fetch_max(late, Ordering::Relaxed);
        // A sensor that panics costs its tick, not the thread: the allowances stay unchanged.
        let (next, is_urgent) = match caught(|| self.tick(now)) {
            Ok(_) => (self.planned, self.may_fill_up),
            Err(_) => (now + self.settings.idle_tick, false),
        };
        let paced = self.pacer.next(now, clock.now() - now, next);
        self.due = if is_urgent { next } else { paced };
        self.due
    }
}

/// The number of ticks whose cost is kept.
const KEPT: usize = 8;

/// The costs of the last ticks.
#[derive(Debug)]
pub(super) struct Pacer {
    /// The inverse of the share of a core that ticks may take.
    per_cost: u32,
    /// The longest rest.
    rest_max: Duration,
    /// The newest first.
    costs: [Duration; KEPT],
}

impl Pacer {
    /// Creates a pacer for this share of a core, in `(0, 1]`.
    pub(super) fn new(share: f64, rest_max: Duration) -> Self {
        // From 1 to 10,000, since the share is checked to be at least that small.
        let per_cost = Duration::from_secs(1).div_f64(share.clamp(1e-4, 1.0)).as_secs();
        let per_cost = u32::try_from(per_cost).unwrap_or(u32::MAX);
        Self { per_cost, rest_max, costs: [Duration::ZERO; KEPT] }
    }

    /// Adds a tick that began at `begun` and took `cost`. Returns the time of the next tick, not
    /// before `asked`.
    pub(super) fn next(&mut self, begun: Moment, cost: Duration, asked: Moment) -> Moment {
        self.costs.rotate_right(1);
        self.costs[0] = cost;
        asked.max(begun + self.rest())
    }

    /// Returns the shortest time from one tick to the next.
    pub(super) fn rest(&self) -> Duration {
        let least = self.costs.iter().min().copied().unwrap_or_default();
        (least * self.per_cost).min(self.rest_max)
    }
}

#[cfg(all(test, not(lowtide_loom)))]
mod tests {
    use std::task::{Context, Poll, Waker};
    use std::time::Duration;

    use super::*;
    use crate::admission::Admission;
    use crate::cost::{Cost, Priority};
    use crate::maintenance::{Sample, Sensor, Settings};
    use crate::reclaim::STEPS_MAX;
    use crate::signal::Limit;
    use lowtide_core::bytes::ByteSize;
    use lowtide_core::clock::ManualClock;
    use lowtide_core::sync::{Mutex, lock};

    const SECOND: Duration = Duration::from_secs(1);
    const MILLI: Duration = Duration::from_millis(1);

    /// A host of 100 MiB, and arenas that are due; a purge releases nothing.
    #[derive(Default)]
    struct World {
        sample: Sample,
        /// Arenas that are due, and the bytes held once one of them sleeps.
        due: usize,
        held: ByteSize,
        done: Vec<&'static str>,
    }

    struct LedgerFigures(Arc<Mutex<World>>);

    impl Sensor for LedgerFigures {
        fn sample(&mut self, _: Moment) -> Sample {
            lock(&self.0).sample
        }
    }

    struct Does(Arc<Mutex<World>>);

    impl MaintenanceActions for Does {
        fn purge(&mut self, _: Trigger) -> ByteSize {
            lock(&self.0).done.push("purge");
            ByteSize::ZERO
        }

        fn run(&mut self, job: Job, _: Moment) -> bool {
            if job != Job::SleepDevice {
                return false;
            }
            let mut world = lock(&self.0);
            world.done.push("sleep");
            world.due -= 1;
            if world.due == 0 {
                world.sample.device_sleep_due = None;
            }
            world.sample.physical = world.sample.physical.max(world.held);
            world.due > 0
        }
    }

    /// Both loops by hand, a second a turn and one job in it.
    fn run(turns: u32, maintenance: &mut Maintenance, worker: &mut Worker, clock: &ManualClock) {
        for _ in 0..turns {
            clock.advance(SECOND);
            let _ = maintenance.tick(clock.now());
            if let Some(job) = maintenance.state().pop_job() {
                worker.run(job, clock);
            }
        }
    }

    fn rig(world: World) -> (Arc<Mutex<World>>, Maintenance, Worker) {
        let limit = Limit::given(ByteSize::mib(100));
        let sample = Sample { limit, ..world.sample };
        let world = Arc::new(Mutex::new(World { sample, ..world }));
        let settings = Settings { publish_interval: None, ..Settings::default() };
        let (admission, resources) = (Admission::new(), Resources::new());
        let sensor = Box::new(LedgerFigures(Arc::clone(&world)));
        let policy = Vec::new();
        let maintenance = Maintenance::new(settings, sensor, admission, resources, policy);
        let maintenance = maintenance.expect("valid");
        let worker = maintenance.worker(Box::new(Does(Arc::clone(&world))));
        (world, maintenance, worker)
    }

    /// A sample that takes 3 ms of the clock.
    struct Dear(Arc<ManualClock>, Sample);

    impl Sensor for Dear {
        fn sample(&mut self, _: Moment) -> Sample {
            self.0.advance(3 * MILLI);
            self.1
        }
    }

    /// A loop with such samples.
    fn dear(clock: &Arc<ManualClock>, sample: Sample, admission: Admission) -> Maintenance {
        let settings = Settings { publish_interval: None, ..Settings::default() };
        let sensor = Box::new(Dear(Arc::clone(clock), sample));
        let (resources, policy) = (Resources::new(), Vec::new());
        Maintenance::new(settings, sensor, admission, resources, policy).expect("valid")
    }

    #[test]
    fn costly_ticks_come_in_time_while_memory_may_fill_up() {
        let (clock, admission) = (Arc::new(ManualClock::new()), Admission::new());
        let mut held = admission.try_admit(Cost::host(ByteSize::mib(40))).expect("no limit yet");
        held.report(ByteSize::ZERO);
        let limit = Limit::given(ByteSize::mib(100));
        let sample = Sample { limit, physical: ByteSize::mib(60), ..Sample::default() };
        let mut maintenance = dear(&clock, sample, admission);
        for turn in 0..20 {
            let begun = clock.now();
            let next = maintenance.turn(&*clock);
            assert!(next - begun <= 10 * MILLI, "{turn}");
            clock.advance(next - clock.now());
        }
    }

    #[test]
    fn a_tick_that_came_late_is_told_once_and_costly_ones_come_less_often() {
        let (clock, admission) = (Arc::new(ManualClock::new()), Admission::new());
        // More than half of the limit.
        let sample = Sample {
            physical: ByteSize::mib(60),
            limit: Limit::given(ByteSize::mib(100)),
            ..Sample::default()
        };
        let mut maintenance = dear(&clock, sample, admission);
        let mut rests = Vec::new();
        for _ in 0..10 {
            let begun = clock.now();
            let next = maintenance.turn(&*clock);
            rests.push((next - begun).as_millis());
            clock.advance(next - clock.now());
        }
        assert_eq!(rests, [10, 10, 10, 10, 10, 10, 10, 250, 250, 250], "300 ms, at most 250");
        assert_eq!(maintenance.state.take_lateness(), Duration::ZERO, "each in its time");
        clock.advance(40 * MILLI);
        maintenance.turn(&*clock);
        assert_eq!(maintenance.state.ticks_total(), 11);
        assert_eq!(maintenance.state.take_lateness(), 40 * MILLI);
        assert_eq!(maintenance.state.take_lateness(), Duration::ZERO, "told once");
    }

    /// The bug: the warning about rejections had the figures of up to a second later, and a service
    /// that ended before then logged none.
    #[test]
    fn the_first_rejection_is_published_by_the_next_tick() {
        let limit = Limit::given(ByteSize::mib(100));
        let sensor = Box::new(Dear(Arc::default(), Sample { limit, ..Sample::default() }));
        let (admission, settings) = (Admission::new(), Settings::default());
        let resources = Resources::new();
        let maintenance =
            Maintenance::new(settings, sensor, admission.clone(), resources, Vec::new());
        let (mut maintenance, clock) = (maintenance.expect("valid"), ManualClock::new());
        let mut is_published = || {
            clock.advance(10 * MILLI);
            maintenance.tick(clock.now()).any(|job| job == Job::Publish)
        };
        assert!(is_published() && !is_published());
        let cost = Cost::host(ByteSize::mib(30));
        let _held = admission.try_admit(cost).expect("it fits");
        let reject = || assert!(admission.try_admit(cost).is_err(), "two do not fit");
        reject();
        assert!(is_published() && !is_published(), "at once, and once");
        reject();
        assert!(!is_published(), "more of them wait for the next second");
    }

    /// The bug: what had run at the last tick counted as held for ever.
    #[test]
    fn no_work_is_in_progress_after_the_last_tick() {
        let (clock, admission) = (Arc::new(ManualClock::new()), Admission::new());
        let mut held = admission.try_admit(Cost::host(ByteSize::mib(40))).expect("no limit yet");
        held.report(ByteSize::ZERO);
        let sample = Sample { in_progress: ByteSize::mib(30), ..Sample::default() };
        let mut maintenance = dear(&clock, sample, admission.clone());
        let unheld = || admission.state().host.unheld();
        let _ = maintenance.tick(clock.now());
        assert_eq!(unheld(), ByteSize::mib(10));
        maintenance.leave();
        assert_eq!(unheld(), ByteSize::mib(40));
    }

    /// The bug: a tick after admission was closed let a suspended request wait, and no other tick
    /// came for its deadline.
    #[test]
    fn no_request_waits_for_a_deadline_after_the_last_tick() {
        let (clock, admission) = (Arc::new(ManualClock::new()), Admission::new());
        let mut slow = admission.try_admit(Cost::host(ByteSize::mib(1))).expect("no limit");
        slow.suspend(ByteSize::ZERO);
        let mut maintenance = dear(&clock, Sample::default(), admission.clone());
        maintenance.turn(&*clock);
        let wait = || slow.wait_to_resume(Priority::Normal, 0, SECOND);
        let waiting = wait().expect("the loop ticks");
        run_control(&mut maintenance, &*clock, &Bell::new(), &AtomicBool::new(true));
        let cx = Context::from_waker(Waker::noop());
        assert_eq!(waiting.poll_turn(&cx), Poll::Ready(false), "its wait has ended");
        assert!(wait().is_none());
    }

    #[test]
    fn what_is_urgent_goes_between_two_arenas_that_fall_asleep() {
        let sample = Sample { device_sleep_due: Some(Moment::ORIGIN), ..Sample::default() };
        let held = ByteSize::mib(95);
        let (world, mut maintenance, mut worker) =
            rig(World { sample, due: 3, held, ..World::default() });
        let clock = ManualClock::new();
        run(1, &mut maintenance, &mut worker, &clock);
        let state = maintenance.state();
        let pending: Vec<_> = std::iter::from_fn(|| state.pop_job()).collect();
        assert!(pending.contains(&Job::SleepDevice), "for the next");
        pending.into_iter().for_each(|job| state.post(job));
        run(20, &mut maintenance, &mut worker, &clock);
        let done = lock(&world).done.clone();
        assert_eq!(done[..2], ["sleep", "purge"], "{done:?}");
        assert_eq!(done.iter().filter(|did| **did == "sleep").count(), 3);
    }

    /// The bug: at level high a cache was asked for bytes that the next purge released, and shrank
    /// to a third of what the requests left it.
    #[test]
    fn level_high_asks_for_no_bytes_that_the_next_purge_releases() {
        for (purgeable, works, asked) in [(20, true, 0), (5, true, 15), (20, false, 20)] {
            let (physical, purgeable) = (ByteSize::mib(90), ByteSize::mib(purgeable));
            let sample = Sample { physical, purgeable, ..Sample::default() };
            let (_, mut maintenance, mut worker) = rig(World { sample, ..World::default() });
            let wanted = Arc::new(Mutex::new(None));
            let asks = Arc::clone(&wanted);
            let step = ReclaimStep::new(Budget::Host, Level::High, move |bytes| {
                *lock(&asks) = Some(bytes);
                ByteSize::ZERO
            });
            worker.steps = [step].into();
            maintenance.steps = Arc::clone(&worker.steps);
            let clock = ManualClock::new();
            let _ = maintenance.tick(clock.now());
            for _ in 0..8 {
                let released = ByteSize::mib(u64::from(works));
                maintenance.purge.finish(ByteSize::mib(1), released, clock.now());
            }
            worker.run(Job::Reclaim { step: 0 }, &clock);
            assert_eq!(lock(&wanted).map_or(0, |bytes: ByteSize| bytes.get() >> 20), asked);
        }
    }

    #[test]
    #[should_panic(expected = "33 reclaim steps, expected at most 32")]
    fn a_loop_has_a_bounded_number_of_steps() {
        let with_steps = |count| {
            let step = |_| ReclaimStep::new(Budget::Host, Level::High, |bytes| bytes);
            let steps = (0..count).map(step).collect();
            let sensor = Box::new(Dear(Arc::default(), Sample::default()));
            let (settings, admission) = (Settings::default(), Admission::new());
            Maintenance::new(settings, sensor, admission, Resources::new(), steps)
        };
        assert!(with_steps(STEPS_MAX).is_ok());
        let _ = with_steps(STEPS_MAX + 1);
    }

    #[test]
    fn arenas_whose_sleep_takes_host_memory_stay_awake_while_that_is_short() {
        for takes_host in [true, false] {
            let sample = Sample {
                physical: ByteSize::mib(95),
                device_sleep_due: Some(Moment::ORIGIN),
                device_sleep_takes_host: takes_host,
                ..Sample::default()
            };
            let (world, mut maintenance, mut worker) =
                rig(World { sample, due: 1, ..World::default() });
            let clock = ManualClock::new();
            let sleeps = || lock(&world).done.iter().filter(|did| **did == "sleep").count();
            run(20, &mut maintenance, &mut worker, &clock);
            assert_eq!(sleeps(), usize::from(!takes_host));
            lock(&world).sample.physical = ByteSize::mib(10);
            run(20, &mut maintenance, &mut worker, &clock);
            assert_eq!(sleeps(), 1, "it is short no more");
        }
    }
}

#[cfg(all(test, not(lowtide_loom)))]
mod pacer_tests {
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
