//! Claims that a run must meet: each claim that does not hold is a line.
//!
//! Invariant: every kind of scenario is asked for the first claims, and for those of its kind.

use std::time::Duration;

use lowtide_admission::clock::Moment;
use lowtide_admission::learning::LESSONS_MIN;
use lowtide_admission::{ByteSize, Level, RejectReason, Settings, Trigger};

use super::scenario::{Kind, Scenario};
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
    let (seed, kind, faults) = (scenario.seed, scenario.kind, faults.join("\n  "));
    let again = format!("cargo bench --bench controller -- --from {seed} --seeds 1 --days 0");
    Err(format!("seed {seed}, {kind:?}:\n  {faults}\n  {scenario:?}\n  again: {again}"))
}

/// Runs a scenario: its load and what comes after it.
pub(crate) fn run(scenario: &Scenario, settings: Settings) -> Seen {
    let world = World::new(scenario.clone(), settings);
    world.play(Moment::after_origin(Duration::from_secs_f64(scenario.lasts + DRAIN)));
    world.finish()
}

/// Returns the claims that do not hold.
pub(crate) fn faults(scenario: &Scenario, seen: &Seen) -> Vec<String> {
    let (end, exhausted) = (&seen.end, seen.reasons[RejectReason::Exhausted as usize]);
    let kept = 16.0_f64.max(0.25 * (end.base + end.live)) + 0.5;
    let mut claims = vec![
        (seen.killed.is_none(), format!("killed at {:?} s", seen.killed)),
        (!seen.beyond, "the plant held more than its limit and lived".to_owned()),
        (seen.hasty == 0, format!("{} purges came before their pace", seen.hasty)),
        (exhausted == 0, format!("{exhausted} are shed for a leak that is none")),
        (end.panics == 0, format!("{} jobs panicked", end.panics)),
        (
            end.reserved.is_zero() && end.held == 0,
            format!("{} stay booked by {} requests", end.reserved, end.held),
        ),
        (end.standing.is_zero(), format!("{} stay standing", end.standing)),
        (end.live < 0.01, format!("{:.1} MiB stay live", end.live)),
        (end.level == Level::None, format!("the level stays {}", end.level)),
        (end.admits, "a fiftieth of the limit is shed in an idle service".to_owned()),
        (end.dirty <= kept, format!("{:.1} MiB stay dirty in an idle service", end.dirty)),
        (
            seen.wasted == 0 || scenario.may_waste(),
            format!(
                "{} were shed that had had room for 250 ms, the last one at {:?} s, by reason {:?}",
                seen.wasted, seen.last_wasted, seen.reasons,
            ),
        ),
    ];
    // In steady overload levels change once a second at most.
    let changes = seen.changes_per_second(2.0, scenario.lasts);
    let steady = (changes <= 1.0, format!("{changes:.2} changes of level a second"));
    match scenario.kind {
        Kind::Overload => claims.push(steady),
        Kind::Fits => {
            let [offered, shed] = seen.learned_mib;
            let (part, small) = (shed / offered.max(1e-9), seen.learned_small);
            claims.push((part <= 0.01, format!("{:.2} % of what fits is shed", 100.0 * part)));
            claims.push((small == 0, format!("{small} small ones of what fits are shed")));
        }
        Kind::Change => {
            let settles = settles(scenario, seen);
            claims.push(steady);
            claims.push((settles <= SETTLES_WITHIN, format!("K settles in {settles:.1} s")));
        }
        Kind::Fall | Kind::Wild | Kind::Days | Kind::Fit => {}
    }
    claims.into_iter().filter(|(holds, _)| !holds).map(|(_, what)| what).collect()
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

// The observations of a run.

/// The state when the load has been over for ten seconds.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct End {
    pub(crate) reserved: ByteSize,
    pub(crate) standing: ByteSize,
    pub(crate) held: u64,
    pub(crate) panics: u64,
    /// `true` if a fiftieth of the limit is admitted.
    pub(crate) admits: bool,
    pub(crate) level: Level,
    pub(crate) live: f64,
    pub(crate) dirty: f64,
    pub(crate) base: f64,
}

/// One look at what is learned.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Look {
    pub(crate) second: f64,
    pub(crate) k: f64,
    /// MiB.
    pub(crate) allowance: f64,
    pub(crate) reserved: f64,
    pub(crate) physical: f64,
    /// The reservation of a request of 1 MiB, as its route has taught.
    pub(crate) claim: f64,
}

/// All of it.
#[derive(Clone, Debug, Default)]
pub(crate) struct Seen {
    /// `true` if requests are measured.
    is_measured: bool,
    pub(crate) offered: u64,
    /// Of each class of sizes.
    pub(crate) served: [u64; 3],
    pub(crate) shed_mib: f64,
    /// MiB that were offered and shed after the first seconds, of the classes that are known: until
    /// then estimates count twice, or few requests run, because nothing has been measured. And how
    /// many of the smallest class were shed.
    learned_mib: [f64; 2],
    learned_small: u64,
    /// Of those shed, by reason in the order of [`RejectReason::ALL`].
    pub(crate) reasons: [u64; RejectReason::ALL.len()],
    /// When the last one was shed, and the last one that would have fitted for a quarter of a
    /// second by then.
    pub(crate) last_shed: Option<f64>,
    last_wasted: Option<f64>,
    pub(crate) wasted: u64,
    /// Since when there has been room for each that comes.
    roomy_since: Option<f64>,
    pub(crate) jobs: u64,
    /// Changes of level: the second, and the new one.
    pub(crate) levels: Vec<(f64, Level)>,
    pub(crate) looks: Vec<Look>,
    purge_ended: Option<Moment>,
    /// MiB at the last two samples, and when a purge was decided.
    dirty: [f64; 2],
    wanted: f64,
    /// Purges of the loop that began sooner than 100 ms after the one before, for little.
    pub(crate) hasty: u64,
    /// `true` if the page cache ever was beyond the limit: the plant is wrong.
    beyond: bool,
    pub(crate) killed: Option<f64>,
    pub(crate) end: End,
}

/// The shortest pause between two purges that the loop decides on.
const PACE: Duration = Duration::from_millis(100);
/// MiB that are worth a purge within it: lowtide's default.
const WORTH: f64 = 16.0;
/// From this second on something has been learned: two lives of requests are over.
const LEARNED: f64 = 6.0;
/// After so long with room a shed is a wasted one.
const ROOMY: f64 = 0.25;

impl Seen {
    pub(super) fn new(is_measured: bool) -> Self {
        Self { is_measured, ..Self::default() }
    }

    pub(super) fn offers(&mut self, class: usize, mib: f64, second: f64, roomy: bool) {
        self.offered += 1;
        if self.knows(class, second) {
            self.learned_mib[0] += mib;
        }
        if !roomy {
            self.roomy_since = None;
        } else if self.roomy_since.is_none() {
            self.roomy_since = Some(second);
        }
    }

    pub(super) fn sheds(&mut self, class: usize, mib: f64, second: f64, reason: RejectReason) {
        self.shed_mib += mib;
        self.reasons[reason as usize] += 1;
        if self.knows(class, second) {
            self.learned_mib[1] += mib;
            self.learned_small += u64::from(class == 0);
        }
        self.last_shed = Some(second);
        let may_know = !self.is_measured || self.knows(class, second);
        if may_know && self.roomy_since.is_some_and(|since| second - since > ROOMY) {
            self.last_wasted = Some(second);
            self.wasted += 1;
        }
    }

    /// Returns `true` if the first seconds are over, and the need of a class is known if it is
    /// measured.
    fn knows(&self, class: usize, second: f64) -> bool {
        let is_known = self.served[class] >= u64::from(LESSONS_MIN);
        second >= LEARNED && (is_known || !self.is_measured)
    }

    /// The loop sees what is dirty now, or saw at the tick before.
    pub(super) const fn samples(&mut self, dirty: f64) {
        self.dirty = [dirty, self.dirty[0]];
    }

    /// The loop decides on a purge.
    pub(super) const fn decides(&mut self) {
        self.wanted = self.dirty[0].max(self.dirty[1]);
    }

    pub(super) fn purge_begins(&mut self, trigger: Trigger, now: Moment, within: bool) {
        let paced = !matches!(trigger, Trigger::Manual | Trigger::Unload);
        let hasty = self.purge_ended.is_some_and(|ended| now - ended < PACE);
        self.hasty += u64::from(paced && hasty && self.wanted < WORTH);
        self.beyond |= !within;
    }

    pub(super) fn purge_ends(&mut self, trigger: Trigger, now: Moment) {
        if !matches!(trigger, Trigger::Manual | Trigger::Unload) {
            self.purge_ended = Some(now);
        }
    }

    /// Changes of level a second between two seconds.
    fn changes_per_second(&self, from: f64, to: f64) -> f64 {
        let within = self.levels.iter().filter(|(at, _)| (from..to).contains(at)).count();
        f64::from(u32::try_from(within).unwrap_or(u32::MAX)) / (to - from)
    }
}
