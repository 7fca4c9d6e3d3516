//! Runs cells, prints their lines, and keeps their figures.
//!
//! Invariant: every cell that was run has a line.

use std::path::PathBuf;
use std::time::Duration;

use lowtide::{BoxError, ByteSize};

use crate::cell::{Bed, Outcome};
use crate::figures::Figures;
use crate::measures::Measures;
use crate::mix::Mix;
use crate::oracle::{STEP, Setting};
use crate::policy::{CONCURRENCY, Policy};
use crate::schedule::{Offer, Sending};
use crate::service::{Queue, Settings};
use crate::table;

/// The least static budget that is run for real, in percent of the limit; 60 lived in each run so
/// far.
const STATIC_LEAST: u32 = 40;
/// The load at which fixed settings are chosen and compared.
const COMPARED: f64 = 4.0;

/// A cell to be run.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Plan {
    /// The policy that admits requests.
    pub(crate) policy: Policy,
    /// Times what fits.
    pub(crate) load: f64,
    /// Which sizes.
    pub(crate) mix: Mix,
    /// The factor by which estimates are multiplied.
    pub(crate) estimate: f64,
}

/// The settings and results that all cells share.
#[derive(Debug)]
pub(crate) struct Runner {
    /// The limit of the service's cgroup.
    pub(crate) limit: ByteSize,
    /// The time for which requests are offered.
    pub(crate) lasts: Duration,
    /// Of arrivals, sizes and holds.
    pub(crate) seed: u64,
    /// Open connections of the proxy at most.
    pub(crate) connections: usize,
    /// How requests are sent.
    pub(crate) sending: Sending,
    /// `true` if a request holds its body once, and not twice.
    pub(crate) one_copy: bool,
    /// The program of the policy `envoy80`.
    pub(crate) envoy: Option<PathBuf>,
    /// The results.
    pub(crate) figures: Figures,
    /// MiB before the first request, of each cell.
    pub(crate) bases: Vec<f64>,
    /// Cells of lowtide whose service did not live to the end.
    pub(crate) lost: Vec<String>,
}

impl Runner {
    /// Runs a cell and keeps its figures.
    pub(crate) fn run(&mut self, plan: Plan) -> Result<(Measures, Outcome), BoxError> {
        let (measures, outcome) = self.attempt(plan)?;
        measures.tell(&cell_name(plan), &mut self.figures);
        Ok((measures, outcome))
    }

    fn attempt(&mut self, plan: Plan) -> Result<(Measures, Outcome), BoxError> {
        let Plan { policy, load, mix, estimate } = plan;
        let settings = self.settings(policy, estimate);
        let mut offer = Offer::steady(mix, load * mix.fits(self.limit), self.lasts, self.seed);
        offer.sending = self.sending;
        let outcome = Bed::start(&settings)?.offer(offer.clone())?;
        let measures = Measures::of(&offer, &outcome);
        self.say(&policy.to_string(), plan, &measures, &outcome);
        if policy == Policy::Lowtide && (outcome.death.is_some() || outcome.oom_kills > 0) {
            self.lost.push(cell_name(plan));
        }
        Ok((measures, outcome))
    }

    /// Returns the settings of the service in a cell of its own kind.
    pub(crate) fn settings(&self, policy: Policy, estimate: f64) -> Settings {
        Settings {
            policy: policy.to_string(),
            estimate,
            limit_bytes: self.limit.get(),
            connections: self.connections,
            device_bytes: None,
            one_copy: self.one_copy,
            envoy: self.envoy.clone(),
            decay_off: false,
            queue: Queue::default(),
        }
    }

    /// Prints the line of a cell.
    pub(crate) fn say(&mut self, name: &str, plan: Plan, measures: &Measures, outcome: &Outcome) {
        let names = [name, plan.mix.name()];
        println!("{}", table::line(names, plan.load, plan.estimate, measures, outcome));
        self.bases.push(table::base(outcome));
    }

    /// The best static budget by the model, or the best limit on requests under way.
    pub(crate) fn best(&self, policy: Policy, plan: Plan) -> Result<Policy, BoxError> {
        let setting = Setting {
            mix: plan.mix,
            limit: self.limit,
            rate: COMPARED * plan.mix.fits(self.limit),
            estimate: plan.estimate,
            seed: self.seed,
        };
        let found = match policy {
            Policy::Static(_) => setting.best_static(),
            _ => setting.best_concurrency(),
        };
        Ok(found.ok_or("no fixed setting survives in the model")?)
    }

    /// Runs fixed settings for real, from the model's best down to the least, and finds the highest
    /// that survives by halving what is left: a lower one holds less. Returns its goodput.
    fn best_alive(&mut self, best: Policy, plan: Plan) -> Result<Option<(f64, Policy)>, BoxError> {
        let settings = up_to(best);
        let (mut alive, mut dead, mut next) = (0, settings.len(), settings.len() - 1);
        let mut found = None;
        while alive < dead {
            let plan = Plan { policy: settings[next], ..plan };
            let (measures, outcome) = self.attempt(plan)?;
            if outcome.death.is_none() {
                found = Some((plan, measures));
                alive = next + 1;
            } else {
                dead = next;
            }
            next = usize::midpoint(alive, dead);
        }
        Ok(found.map(|(plan, measures)| {
            measures.tell(&cell_name(plan), &mut self.figures);
            (measures.goodput_mib, plan.policy)
        }))
    }

    /// Ours beside the best fixed settings at the load of the comparison; returns the settings
    /// that lived.
    pub(crate) fn compare(&mut self, mix: Mix, estimate: f64) -> Result<Vec<Policy>, BoxError> {
        let plan = Plan { policy: Policy::Lowtide, load: COMPARED, mix, estimate };
        let mut alive = Vec::new();
        let mut against = Vec::new();
        for (kind, name) in
            [(Policy::Static(None), "static"), (Policy::Concurrency(0), "concurrency")]
        {
            let start = self.best(kind, plan)?;
            println!("  the model's best: {start}");
            if let Some((goodput, policy)) = self.best_alive(start, plan)? {
                against.push((name, goodput));
                alive.push(policy);
            }
        }
        let (ours, _) = self.run(plan)?;
        for (name, goodput) in against {
            let end = if mix == Mix::Heavy { String::new() } else { format!(".{}", mix.name()) };
            let ratio = crate::figures::part(ours.goodput_mib, goodput);
            self.figures.add(&format!("overload.ratio.{name}{end}"), ratio, "ratio");
        }
        Ok(alive)
    }
}

/// The settings of a kind up to this one, of which the first is not the best for sure.
fn up_to(best: Policy) -> Vec<Policy> {
    match best {
        Policy::Static(Some(percent)) => {
            let steps = (STATIC_LEAST.min(percent)..=percent).step_by(STEP as usize);
            steps.map(|percent| Policy::Static(Some(percent))).collect()
        }
        Policy::Concurrency(most) => {
            let lower = CONCURRENCY.into_iter().filter(|other| *other <= most);
            lower.map(Policy::Concurrency).collect()
        }
        other => vec![other],
    }
}

/// The name of a cell in figures: all static budgets are one policy.
fn cell_name(plan: Plan) -> String {
    let policy = match plan.policy {
        Policy::Static(_) => "static".to_owned(),
        policy => policy.to_string(),
    };
    let mut name = format!("{policy}.{}x.{}", plan.load, plan.mix.name());
    if (plan.estimate - 1.0).abs() > 1e-9 {
        name += &format!(".estimate_{}", plan.estimate);
    }
    name
}
