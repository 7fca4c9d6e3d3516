//! Which cells are run: what was chosen, the drawn runs, the comparison, the check.
//!
//! It decides what is run and nothing of what comes of it, but for the check, which is none where
//! the load does not kill.

use lowtide::BoxError;

use crate::Cli;
use crate::cell::{Plan, Runner};
use crate::chance::Chance;
use crate::common::figures::{count, part, quantile};
use crate::measures::Measures;
use crate::mix::{CLASSES, Mix};
use crate::policy::Policy;
use crate::schedule::Sending;

/// Loads of the runs that are drawn.
const HIGH: [f64; 3] = [2.0, 4.0, 8.0];

/// Estimates of the runs that are drawn; 0 gives none.
const DRAWN: [f64; 6] = [0.0, 0.0, 0.25, 0.5, 1.0, 4.0];
/// Times in which their bodies are sent, in milliseconds.
const BODIES: [u64; 3] = [0, 1000, 3000];
/// The time in which a body is sent slowly, in milliseconds.
const SLOW: u64 = 1000;
/// Seeds of the comparison with static budgets, and those budgets in percent of the limit.
const SEEDS: u64 = 6;
const STATIC: [u32; 8] = [60, 64, 68, 72, 76, 80, 84, 88];

/// Every combination of what was given.
pub(crate) fn chosen(runner: &mut Runner, cli: &Cli) -> Result<bool, BoxError> {
    for &load in &cli.load {
        for &policy in &cli.policy {
            runner.run(Plan { policy, load, mix: cli.mix, estimate: cli.estimate })?;
        }
    }
    Ok(true)
}

/// Runs of lowtide, drawn by the seed.
pub(crate) fn survive(runner: &mut Runner, runs: u32) -> Result<bool, BoxError> {
    let (seed, mut chance) = (runner.seed, Chance(runner.seed));
    let mut draw = |count: usize| usize::try_from(chance.bits() >> 33).unwrap_or(0) % count;
    let sending = runner.sending;
    let mut kills = 0;
    for run in 0..runs {
        let plan = Plan {
            policy: Policy::Lowtide,
            load: HIGH[draw(HIGH.len())],
            mix: Mix::ALL[draw(Mix::ALL.len())],
            estimate: DRAWN[draw(DRAWN.len())],
        };
        runner.seed = seed + u64::from(run);
        runner.sending = Sending {
            body_millis: BODIES[draw(BODIES.len())],
            is_chunked: draw(4) == 0,
            copies: 0,
            has_giants: draw(4) == 0,
        };
        println!("seed {}: {:?}", runner.seed, runner.sending);
        kills += runner.run(plan)?.oom_kills;
    }
    (runner.seed, runner.sending) = (seed, sending);
    println!("{runs} runs drawn by seed {seed}: {kills} OOM kills");
    runner.figures.add("overload.survive.runs", f64::from(runs), "runs");
    runner.figures.add("overload.survive.oom_kills", count(kills), "kills");
    Ok(true)
}

/// Sheds of lowtide where the load fits, and its goodput beside the best static budget that
/// survives each seed with quick and with slow bodies, and beside a threshold on the resident set.
/// Requests have no estimate, or a right one.
pub(crate) fn measured(runner: &mut Runner) -> Result<bool, BoxError> {
    let seed = runner.seed;
    let plan = |policy, load, estimate| Plan { policy, load, mix: Mix::Heavy, estimate };
    let (mut sheds, mut small, mut sent) = (0, 0, 0);
    for (estimate, more) in [(0.0, 0), (0.0, 1), (1.0, 0), (1.0, 1)] {
        runner.seed = seed + more;
        let measures = runner.run(plan(Policy::Lowtide, 1.0, estimate))?;
        sheds += measures.learned_sheds.iter().sum::<u64>();
        small += measures.learned_sheds[0];
        sent += measures.learned_sent;
    }
    // The seeds of a policy with bodies of this time, up to the first that it does not survive.
    let mut seeds = |policy, estimate, body_millis| -> Result<(Vec<Measures>, bool), BoxError> {
        let mut all = Vec::new();
        let sending = runner.sending;
        runner.sending.body_millis = body_millis;
        for more in 0..SEEDS {
            runner.seed = seed + more;
            let measures = runner.run(plan(policy, 4.0, estimate))?;
            if measures.died {
                break;
            }
            all.push(measures);
        }
        runner.sending = sending;
        let survives = all.len() as u64 == SEEDS;
        Ok((all, survives))
    };
    let (slow, _) = seeds(Policy::Lowtide, 0.0, SLOW)?;
    // Last, so that the cell's own figures are those of quick bodies.
    let (quick, _) = seeds(Policy::Lowtide, 0.0, 0)?;
    let (rss10, rss10_survives) = seeds(Policy::Rss10, 1.0, 0)?;
    let mut best = None;
    // Ends: the lower budgets hold less than the limit.
    for percent in STATIC.into_iter().rev() {
        let fixed = Policy::Static(percent);
        if let (quick, true) = seeds(fixed, 1.0, 0)?
            && let (slow, true) = seeds(fixed, 1.0, SLOW)?
        {
            best = Some((percent, quick, slow));
            break;
        }
    }
    runner.seed = seed;
    let (percent, fixed_quick, fixed_slow) = best.ok_or("no static budget survives each seed")?;
    println!(
        "the best static budget that survives each seed, with quick and with slow bodies: \
         {percent} % of the limit; the threshold on the resident set {} each with quick ones",
        if rss10_survives { "survives" } else { "does not survive" }
    );
    let ours = goodput(&quick);
    let fixed = goodput(&fixed_quick);
    let figures = &mut runner.figures;
    figures.add("measured.1x.shed_ratio", part(count(sheds), count(sent)), "ratio");
    figures.add("measured.1x.sheds_small", count(small), "requests");
    figures.add("measured.4x.goodput_mib_s", ours, "MiB/s");
    figures.add("measured.4x.static_goodput_mib_s", fixed, "MiB/s");
    figures.add("measured.4x.static_percent", f64::from(percent), "%");
    figures.add("measured.4x.goodput_ratio", part(ours, fixed), "ratio");
    let (ours_slow, fixed_slow) = (goodput(&slow), goodput(&fixed_slow));
    figures.add("measured.4x.slow.goodput_mib_s", ours_slow, "MiB/s");
    figures.add("measured.4x.slow.static_goodput_mib_s", fixed_slow, "MiB/s");
    figures.add("measured.4x.slow.goodput_ratio", part(ours_slow, fixed_slow), "ratio");
    figures.add("measured.4x.rss10_goodput_mib_s", goodput(&rss10), "MiB/s");
    figures.add("measured.4x.rss10_seeds", count(rss10.len() as u64), "seeds");
    figures.add("measured.4x.over_rss10_ratio", part(ours, goodput(&rss10)), "ratio");
    for (class, name) in CLASSES.into_iter().enumerate() {
        let shares: Vec<_> = quick.iter().map(|measures| measures.shares[class]).collect();
        figures.add(format!("measured.4x.share.{name}"), quantile(&shares, 0.5), "ratio");
    }
    Ok(true)
}

/// The mean goodput of runs once everything is learned, in MiB/s.
fn goodput(runs: &[Measures]) -> f64 {
    part(runs.iter().map(|measures| measures.learned_goodput_mib).sum(), count(runs.len() as u64))
}

/// Three short runs of lowtide, and one without admission: where that one lives, the load was none.
pub(crate) fn ci(runner: &mut Runner) -> Result<bool, BoxError> {
    for (load, mix, estimate) in
        [(2.0, Mix::Small, 2.0), (4.0, Mix::Heavy, 1.0), (8.0, Mix::Large, 0.5)]
    {
        runner.run(Plan { policy: Policy::Lowtide, load, mix, estimate })?;
    }
    let plan = Plan { policy: Policy::None, load: 4.0, mix: Mix::Heavy, estimate: 1.0 };
    let bound = runner.run(plan)?.oom_kills > 0;
    if !bound {
        println!("FAILED: the service without admission was not OOM-killed: the load is too low");
    }
    Ok(bound)
}
