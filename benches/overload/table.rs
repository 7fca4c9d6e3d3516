//! The figures of all runs: a line for each run, and medians for each policy and rate.
//!
//! Invariant: `2xx + shed + failed = 100 %` of what was offered, in every line.

use std::fmt::Write as _;

use crate::load::CLASSES;
use crate::run::{Outcome, Plan};
use crate::service::Policy;

/// Bytes of a MiB.
const MIB: f64 = 1_048_576.0;

/// A sender that begins later than this has fallen behind: a guess, below the 150 ms that an answer
/// takes at least.
const LATE_MAX_MS: f64 = 100.0;

/// The figures of one run, or their medians.
#[derive(Clone, Copy, Debug, Default)]
struct Figures {
    goodput: f64,
    goodput_mib: f64,
    shed_percent: f64,
    failed_percent: f64,
    p50_ms: f64,
    p99_ms: f64,
    shed_p99_ms: f64,
    peak_mib: f64,
    late_p99_ms: f64,
    served_percent: [f64; CLASSES.len()],
}

impl Figures {
    fn of(plan: &Plan, outcome: &Outcome) -> Self {
        let tally = &outcome.tally;
        let [offered, ok, shed] = tally.sums();
        let seconds = plan.lasts.as_secs_f64();
        Self {
            goodput: count(tally.ok_in_time) / seconds,
            goodput_mib: count(tally.ok_in_time_bytes) / MIB / seconds,
            shed_percent: percent(shed, offered),
            failed_percent: percent(offered - ok - shed, offered),
            p50_ms: quantile(&tally.ok_millis, 0.5),
            p99_ms: quantile(&tally.ok_millis, 0.99),
            shed_p99_ms: quantile(&tally.shed_millis, 0.99),
            peak_mib: outcome.peak.as_f64() / MIB,
            late_p99_ms: quantile(&tally.late_millis, 0.99),
            served_percent: tally.classes.map(|[offered, ok, _]| percent(ok, offered)),
        }
    }

    /// The median of each figure over these runs.
    fn median(all: &[Self]) -> Self {
        let of =
            |figure: fn(&Self) -> f64| quantile(&all.iter().map(figure).collect::<Vec<_>>(), 0.5);
        let mut served_percent = [0.0; CLASSES.len()];
        for (at, served) in served_percent.iter_mut().enumerate() {
            let each: Vec<f64> = all.iter().map(|figures| figures.served_percent[at]).collect();
            *served = quantile(&each, 0.5);
        }
        Self {
            goodput: of(|one| one.goodput),
            goodput_mib: of(|one| one.goodput_mib),
            shed_percent: of(|one| one.shed_percent),
            failed_percent: of(|one| one.failed_percent),
            p50_ms: of(|one| one.p50_ms),
            p99_ms: of(|one| one.p99_ms),
            shed_p99_ms: of(|one| one.shed_p99_ms),
            peak_mib: of(|one| one.peak_mib),
            late_p99_ms: of(|one| one.late_p99_ms),
            served_percent,
        }
    }

    fn columns(&self) -> String {
        let [small, middle, large] = self.served_percent;
        format!(
            "{:>8.1}{:>8.1}{:>8.1}{:>8.1}{:>9.0}{:>9.0}{:>9.0}{:>8.0}{:>7.0}{:>5.0}{:>5.0}{:>8.1}",
            self.goodput,
            self.goodput_mib,
            self.shed_percent,
            self.failed_percent,
            self.p50_ms,
            self.p99_ms,
            self.shed_p99_ms,
            self.peak_mib,
            small,
            middle,
            large,
            self.late_p99_ms,
        )
    }
}

/// A run in one line.
pub(crate) fn line(plan: &Plan, outcome: &Outcome) -> String {
    let mut text = format!(
        "{:<9}{:>4}/s seed {}{}  {}; {:.0} MiB before load",
        plan.policy.name(),
        plan.rate,
        plan.seed,
        Figures::of(plan, outcome).columns(),
        outcome.end,
        outcome.base.as_f64() / MIB
    );
    if let Some(learned) = &outcome.learned {
        let _ = write!(text, "; {learned}");
    }
    // Which failures, where a few kinds tell it.
    for (what, times) in outcome.tally.failures.iter().take(4) {
        let _ = write!(text, "; {times} x {what}");
    }
    text
}

/// Medians of each rate and policy.
pub(crate) fn table(outcomes: &[(Plan, Outcome)]) -> String {
    let mut text = format!(
        "{:>9}  {:<8}{:>8}{:>8}{:>8}{:>8}{:>8}{:>9}{:>9}{:>9}{:>8}{:>17}{:>8}\n",
        "offered",
        "policy",
        "died",
        "2xx/s",
        "MiB/s",
        "shed %",
        "fail %",
        "p50 ms",
        "p99 ms",
        "503 p99",
        "peak",
        "% served S/M/L",
        "late"
    );
    for Cell { rate, policy, runs, died, medians } in cells(outcomes) {
        let died = format!("{died} of {runs}");
        let columns = medians.columns();
        let _ = writeln!(text, "{rate:>7}/s  {:<8}{died:>8}{columns}", policy.name());
    }
    text
}

/// How late the sender itself began, at worst, and in which runs that was too late to be believed.
pub(crate) fn sender(outcomes: &[(Plan, Outcome)]) -> String {
    let late = |(plan, outcome): &(Plan, Outcome)| Figures::of(plan, outcome).late_p99_ms;
    let worst = outcomes.iter().map(late).fold(0.0, f64::max);
    let behind = outcomes.iter().filter(|run| late(run) > LATE_MAX_MS).count();
    let mut text = format!("the sender began p99 {worst:.0} ms late in its worst run\n");
    if behind > 0 {
        let _ = writeln!(
            text,
            "IT FELL BEHIND ITS SCHEDULE by more than {LATE_MAX_MS} ms in {behind} of {} runs: \
             latencies of those are partly its own",
            outcomes.len()
        );
    }
    let _ = writeln!(text, "figure overload_sender_behind {:.1} runs", count(behind as u64));
    text
}

/// Every median once, as `figure NAME VALUE UNIT`.
pub(crate) fn figures(outcomes: &[(Plan, Outcome)]) -> String {
    let mut text = String::new();
    for Cell { rate, policy, runs, died, medians: of } in cells(outcomes) {
        let [small, middle, large] = of.served_percent;
        let name = policy.name();
        let mut figure = |what: &str, value: f64, unit: &str| {
            let _ = writeln!(text, "figure overload_{name}_{rate}_{what} {value:.1} {unit}");
        };
        figure("runs", count(runs), "runs");
        figure("died", count(died), "runs");
        figure("goodput", of.goodput, "1/s");
        figure("goodput_bytes", of.goodput_mib, "MiB/s");
        figure("shed", of.shed_percent, "%");
        figure("failed", of.failed_percent, "%");
        figure("latency_p50", of.p50_ms, "ms");
        figure("latency_p99", of.p99_ms, "ms");
        figure("refusal_p99", of.shed_p99_ms, "ms");
        figure("peak", of.peak_mib, "MiB");
        figure("served_small", small, "%");
        figure("served_middle", middle, "%");
        figure("served_large", large, "%");
        figure("sender_late_p99", of.late_p99_ms, "ms");
    }
    text
}

/// The runs of one policy at one rate.
struct Cell {
    rate: u32,
    policy: Policy,
    runs: u64,
    died: u64,
    medians: Figures,
}

/// The runs by rate and policy, in that order.
fn cells(outcomes: &[(Plan, Outcome)]) -> Vec<Cell> {
    let mut keys: Vec<_> = outcomes.iter().map(|(plan, _)| (plan.rate, plan.policy)).collect();
    keys.sort_unstable();
    keys.dedup();
    let cell = |(rate, policy)| {
        let here = |plan: &Plan| (plan.rate, plan.policy) == (rate, policy);
        let of_cell: Vec<_> = outcomes.iter().filter(|(plan, _)| here(plan)).collect();
        let each: Vec<_> =
            of_cell.iter().map(|(plan, outcome)| Figures::of(plan, outcome)).collect();
        Cell {
            rate,
            policy,
            runs: of_cell.len() as u64,
            died: of_cell.iter().filter(|(_, outcome)| outcome.died).count() as u64,
            medians: Figures::median(&each),
        }
    };
    keys.into_iter().map(cell).collect()
}

#[expect(clippy::cast_precision_loss, reason = "counts of one run are far below 2^52")]
fn count(number: u64) -> f64 {
    number as f64
}

fn percent(part: u64, whole: u64) -> f64 {
    if whole == 0 { 0.0 } else { 100.0 * count(part) / count(whole) }
}

/// The value below which this part lies; 0 without any.
fn quantile(values: &[f64], part: f64) -> f64 {
    let mut values = values.to_vec();
    values.sort_unstable_by(f64::total_cmp);
    let last = count(values.len().saturating_sub(1) as u64);
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "an index below the length"
    )]
    let at = (last * part).round() as usize;
    values.get(at).copied().unwrap_or(0.0)
}
