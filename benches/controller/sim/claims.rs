//! Claims that a run must meet: each claim that does not hold is a line.
//!
//! Invariant: every kind of scenario is asked for the first claims, and for those of its kind.

use std::time::Duration;

use lowtide_admission::clock::Moment;
use lowtide_admission::{Level, RejectReason, Settings};

use super::scenario::{Kind, Scenario};
use super::seen::Seen;
use super::world::World;

/// Seconds without load at the end of a run.
pub(crate) const DRAIN: f64 = 12.0;
/// Within so many seconds of a change of truth K is where it stays.
const SETTLES_WITHIN: f64 = 10.0;

/// Runs a scenario and judges it.
///
/// # Errors
/// The claims that do not hold.
pub(crate) fn judge(scenario: &Scenario) -> Result<Seen, String> {
    let seen = run(scenario, Settings::default());
    let faults = faults(scenario, &seen);
    if faults.is_empty() {
        return Ok(seen);
    }
    let (seed, kind, faults) = (scenario.seed, scenario.kind.name(), faults.join("\n  "));
    let again = format!("cargo bench --bench controller -- --from {seed} --seeds 1 --days 0");
    Err(format!("seed {seed}, {kind}:\n  {faults}\n  {scenario:?}\n  again: {again}"))
}

/// Runs a scenario: its load and what comes after it.
pub(crate) fn run(scenario: &Scenario, settings: Settings) -> Seen {
    let world = World::new(scenario.clone(), settings);
    world.play(Moment::after_origin(Duration::from_secs_f64(scenario.lasts + DRAIN)));
    world.finish()
}

/// Returns the claims that do not hold.
pub(crate) fn faults(scenario: &Scenario, seen: &Seen) -> Vec<String> {
    let mut faults = Vec::new();
    let mut claim = |holds: bool, what: &dyn Fn() -> String| {
        if !holds {
            faults.push(what());
        }
    };
    claim(seen.killed.is_none(), &|| format!("killed at {:.3} s", seen.killed.unwrap_or_default()));
    claim(!seen.beyond, &|| "the plant held more than its limit and lived".to_owned());
    claim(seen.hasty == 0, &|| format!("{} purges came before their pace", seen.hasty));
    let exhausted = seen.reasons[RejectReason::Exhausted as usize];
    claim(exhausted == 0, &|| format!("{exhausted} are shed for a leak that is none"));
    claim(seen.end.panics == 0, &|| format!("{} jobs panicked", seen.end.panics));
    claim(seen.end.reserved.is_zero() && seen.end.held == 0, &|| {
        format!("{} stay booked by {} requests", seen.end.reserved, seen.end.held)
    });
    claim(seen.end.standing.is_zero(), &|| format!("{} stay standing", seen.end.standing));
    claim(seen.end.live < 0.01, &|| format!("{:.1} MiB stay live", seen.end.live));
    claim(seen.end.level == Level::None, &|| format!("the level stays {}", seen.end.level));
    claim(seen.end.admits, &|| "a fiftieth of the limit is shed in an idle service".to_owned());
    let kept = 16.0_f64.max(0.25 * (seen.end.base + seen.end.live)) + 0.5;
    claim(seen.end.dirty <= kept, &|| {
        format!("{:.1} MiB stay dirty in an idle service", seen.end.dirty)
    });
    claim(seen.wasted == 0 || scenario.may_waste(), &|| {
        format!(
            "{} were shed that had had room for 250 ms, the last one at {:.2} s, by reason {:?}",
            seen.wasted,
            seen.last_wasted.unwrap_or_default(),
            seen.reasons,
        )
    });
    match scenario.kind {
        Kind::Overload => steady(scenario, seen, &mut claim),
        Kind::Fits => {
            let part = seen.learned.shed_ratio();
            claim(part <= 0.01, &|| format!("{:.2} % of what fits is shed", 100.0 * part));
            claim(seen.learned.small == 0, &|| {
                format!("{} small ones of what fits are shed", seen.learned.small)
            });
        }
        Kind::Change => {
            steady(scenario, seen, &mut claim);
            let settles = settles(scenario, seen);
            claim(settles <= SETTLES_WITHIN, &|| format!("K settles in {settles:.1} s"));
        }
        Kind::Fall | Kind::Wild | Kind::Days | Kind::Fit => {}
    }
    faults
}

/// In steady overload levels change once a second at most.
fn steady(scenario: &Scenario, seen: &Seen, claim: &mut dyn FnMut(bool, &dyn Fn() -> String)) {
    let changes = seen.changes_per_second(2.0, scenario.lasts);
    claim(changes <= 1.0, &|| format!("{changes:.2} changes of level a second"));
}

/// Returns the seconds from the change of truth to the last look at which K was further than a
/// quarter from its final value.
pub(crate) fn settles(scenario: &Scenario, seen: &Seen) -> f64 {
    let Some((change, _)) = scenario.truth.change else { return 0.0 };
    let late = |from: f64| {
        seen.looks.iter().filter(move |look| (from..scenario.lasts).contains(&look.second))
    };
    let stays: Vec<f64> = late(scenario.lasts - 2.0).map(|look| look.k).collect();
    let count = f64::from(u32::try_from(stays.len()).unwrap_or(1).max(1));
    let stays = stays.iter().sum::<f64>() / count;
    let far = |k: f64| (k / stays - 1.0).abs() > 0.25;
    late(change).filter(|look| far(look.k)).map(|look| look.second - change).fold(0.0, f64::max)
}

impl Scenario {
    /// Returns `true` if the learned factor may reject a request that would have fitted: if a
    /// moment taught another truth, or if others hold what is booked.
    fn may_waste(&self) -> bool {
        self.kind == Kind::Change || self.resource.is_some() || self.sampler.blind.is_some()
    }

    /// MiB of the largest request at this second, by what it says or by what is true.
    pub(super) fn largest(&self, second: f64) -> f64 {
        let truth = self.truth.at(second) * (1.0 + self.truth.noise);
        self.mix.largest() * truth.max(1.0)
    }
}
