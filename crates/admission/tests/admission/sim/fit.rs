//! A service fits in a smaller limit, which the kernel puts in force as soon as it does, while the
//! load goes on.
//!
//! It judges: a fit is possible if what requests and models in use do not release leaves room some
//! seconds before its end. No process may exceed the kernel's limit, and no fit may be reached while
//! the usage does not fit.

use std::sync::Arc;
use std::time::Duration;

use lowtide_admission::clock::Moment;
use lowtide_admission::fit::{Fit, FitSample, FitStep};
use lowtide_admission::{Budget, Cost, Job, Permit, Settings, Trigger, Use};
use lowtide_core::sync::lock;

use super::scenario::{BEFORE, FitPlan, Kind, MIB, Scenario, bytes};
use super::world::{Weight, World};

const MILLI: Duration = Duration::from_millis(1);
/// The load after the limit was lowered.
const AFTER: Duration = Duration::from_secs(5);
/// What is left by then is in the way: a fit takes a second, and requests last for up to 2.5.
const MARGIN: Duration = Duration::from_secs(5);
/// The part of the fit up to which a service can be full of what does not shrink.
const FILLED: f64 = 0.85;

/// What happened.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Fitted {
    /// `true` if the process could be made to fit.
    pub(crate) possible: bool,
    /// `true` if what never shrinks is more than the fit.
    pub(crate) impossible: bool,
    /// The seconds until it fit; `None` if it was refused.
    pub(crate) seconds: Option<f64>,
    /// Requests that were served in the smaller limit.
    pub(crate) served: u64,
}

/// What the service holds besides what requests do.
struct Stage {
    world: Arc<World>,
    scenario: Scenario,
    plan: FitPlan,
    /// Of each model, while the service uses it.
    guards: Vec<Option<Use<Weight>>>,
    task: Option<Permit>,
}

/// Runs the scenario of a seed.
///
/// # Errors
/// The first claim that did not hold.
pub(crate) fn run(seed: u64) -> Result<Fitted, String> {
    let scenario = Scenario::of_kind(seed, Kind::Fit);
    let plan = scenario.fit.ok_or("no plan")?;
    let world = World::new(scenario.clone(), Settings::default());
    let mut stage = Stage { world, scenario, plan, guards: Vec::new(), task: None };
    stage.begin();
    stage.play(BEFORE)?;
    let FitPlan { limit, within, .. } = stage.plan;
    let start = lock(&stage.world.state).now;
    let fit = Fit::new(bytes(limit), within, true, start);
    let target = fit.target().as_f64() / MIB;
    let end = start.since_origin() + within;
    let mut seen = Fitted {
        possible: stage.floor(end - MARGIN) <= FILLED * limit,
        impossible: stage.floor(end + Duration::from_secs(2)) > target,
        ..Fitted::default()
    };
    {
        let state = &mut *lock(&stage.world.state);
        (state.fit, state.fitted) = (Some(fit), Some(fit.limit));
    }
    lock(&stage.world.maintenance).state().post(Job::Purge { trigger: Trigger::Manual });
    // Ends: a fit fails a second after its time at the latest.
    let step = loop {
        stage.play(MILLI)?;
        let step = lock(&stage.world.state).step;
        if let Some(step) = step.filter(|step| *step != FitStep::Shrinking) {
            break step;
        }
    };
    if step == FitStep::Failed {
        return Ok(seen);
    }
    let before: u64 = {
        let state = &mut *lock(&stage.world.state);
        seen.seconds = Some((state.now - start).as_secs_f64());
        let usage = state.plant.usage();
        if usage > target || seen.impossible {
            return Err(format!("it was reached with {usage} MiB of {target}: {seen:?}"));
        }
        state.plant.lower(state.now, limit);
        state.seen.served.iter().sum()
    };
    stage.play(AFTER)?;
    let state = lock(&stage.world.state);
    seen.served = state.seen.served.iter().sum::<u64>() - before;
    if state.fitted.is_some() { Err("the fit is still in force".to_owned()) } else { Ok(seen) }
}

impl Stage {
    /// Loads the models that fit, and begins the task. What does not fit does not count.
    fn begin(&mut self) {
        let world = &self.world;
        world.pass(Duration::from_millis(10));
        let models = world.managed.get().map_or(&[][..], Vec::as_slice);
        for (model, of) in models.iter().zip(&mut self.scenario.models) {
            let has_room = world.admission.try_reserve_resource(model.stats().cost).is_ok();
            let guard = has_room.then(|| model.acquire_blocking().ok()).flatten();
            of.used_until = of.used_until.filter(|_| guard.is_some());
            self.guards.push(guard.filter(|_| of.used_until.is_some()));
            world.pass(Duration::from_millis(10));
        }
        let cost = Cost::host(bytes(self.plan.task.0));
        self.task = world.admission.try_admit(cost).ok().filter(|_| self.plan.task.0 > 0.0);
        if self.task.is_some() {
            let state = &mut *lock(&world.state);
            state.plant.allocate(state.now, self.plan.task.0);
        } else {
            self.plan.task.0 = 0.0;
        }
    }

    /// Returns what neither requests nor models that are not in use hold at this time.
    fn floor(&self, at: Duration) -> f64 {
        let build = &self.scenario.build;
        let (task, ends) = self.plan.task;
        let task = if at < ends { task } else { 0.0 };
        let is_used = |until: Option<Duration>| until.is_some_and(|until| at < until);
        let used = self.scenario.models.iter().filter(|model| is_used(model.used_until));
        build.base + build.files * build.limit + task + used.map(|model| model.mib).sum::<f64>()
    }

    fn play(&mut self, time: Duration) -> Result<(), String> {
        let end = lock(&self.world.state).now + time;
        loop {
            let now = lock(&self.world.state).now;
            if now >= end {
                return Ok(());
            }
            self.world.play(now + MILLI);
            let now = now.since_origin();
            for (guard, model) in self.guards.iter_mut().zip(&self.scenario.models) {
                if model.used_until.is_some_and(|until| now >= until) {
                    *guard = None;
                }
            }
            let (task, ends) = self.plan.task;
            let has_ended = now >= ends && self.task.take().is_some();
            let state = &mut *lock(&self.world.state);
            if has_ended {
                state.plant.free(state.now, task);
            }
            if let Some(at) = state.plant.killed {
                return Err(format!("killed after {:.3} s", at.since_origin().as_secs_f64()));
            }
        }
    }
}

impl World {
    /// What `lowtide::memory` does, over the plant.
    pub(super) fn tend_fit(&self, now: Moment) {
        let ledger = self.admission.ledger(Budget::Host);
        let uses = self.resources.stats().iter().any(|stats| stats.loaded);
        let promised = ledger.unheld().saturating_add(ledger.loading());
        let holds = uses || !promised.is_zero() || self.admission.stats().held() > 0;
        let release = {
            let state = &mut *lock(&self.state);
            let Some(fit) = &mut state.fit else { return };
            let plant = &state.plant;
            let sample = FitSample {
                limit: bytes(plant.limit),
                usage: Some(bytes(plant.usage())),
                physical: bytes(plant.physical()),
                purgeable: bytes(plant.dirty),
                promised,
                may_release: holds || plant.dirty > 1.0,
            };
            let step = fit.step(now, &sample);
            let is_over = matches!(step, FitStep::Lowered | FitStep::Failed | FitStep::Expired);
            (state.step, state.fitted) = (Some(step), Some(fit.limit_now()).filter(|_| !is_over));
            let beyond = (step == FitStep::Shrinking).then(|| fit.release(now, &sample)).flatten();
            beyond.map(|beyond| (beyond, !sample.purgeable.is_zero()))
        };
        let Some((beyond, purges)) = release else { return };
        if purges {
            lock(&self.maintenance).state().post(Job::Purge { trigger: Trigger::Manual });
        }
        self.resources.release(beyond);
    }
}
