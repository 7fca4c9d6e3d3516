//! The report: the table, and the bounds that must hold.

use lowtide::ByteSize;

use crate::run::Outcome;
use crate::service::Setup;

/// Small requests that lowtide serves for each one that the concurrency limit serves. Measured: 2.3
/// to 5.3 on a busy machine with two cores.
const SMALL_MIN: f64 = 1.5;
/// The same for large requests. Measured: 0.4 to 1.2.
const BIG_MIN: f64 = 0.25;
/// Resident memory of lowtide's service ten seconds after the load.
const AFTER_MAX: ByteSize = ByteSize::mib(32);

/// The text below the table.
pub(crate) const LEGEND: &str = "\
served and 503: requests by answer. p99: of the served small requests. RSS: the
highest during the load, and ten seconds after it.
jemalloc alone is enough if the limit holds all requests that clients can send at
once; a concurrency limit is enough if all requests need about the same memory.";

/// The table's heading.
pub(crate) const HEADING: &str = concat!(
    "                             |    5 MiB     |        2 KiB        |   RSS, MiB\n",
    "setup                 killed | served   503 | served   503  p99 s |  peak  +10 s",
);

/// The row of a setup.
pub(crate) fn row(setup: Setup, outcome: &Outcome) -> String {
    let (big, small) = (&outcome.load.big, &outcome.load.small);
    let or_none = |number: Option<String>| number.unwrap_or_else(|| "-".to_owned());
    let killed = outcome.killed_after.map(|after| format!("{after:.1} s"));
    let killed = killed.unwrap_or_else(|| "no".to_owned());
    let p99 = (small.ok > 0).then(|| format!("{:.2}", small.quantile(0.99) / 1e3));
    let after = or_none(outcome.after.map(|after| format!("{:.0}", mib(after))));
    format!(
        "{:<20}{killed:>8} |{:>7}{:>6} |{:>7}{:>6}{:>7} |{:>6.0}{after:>7}",
        setup.title(),
        big.ok,
        big.shed,
        small.ok,
        small.shed,
        or_none(p99),
        mib(outcome.peak),
    )
}

/// The bounds that must hold: whether each does, and its text with the measured values.
pub(crate) fn bounds(outcomes: &[(Setup, Outcome)]) -> Vec<(bool, String)> {
    let of = |wanted| outcomes.iter().find(|(setup, _)| *setup == wanted).map(|(_, found)| found);
    let (Some(limited), Some(lowtide)) = (of(Setup::Concurrency), of(Setup::Lowtide)) else {
        return vec![(false, "all setups have run".to_owned())];
    };
    let (theirs, ours) = (&limited.load, &lowtide.load);
    let failed = [&ours.big, &ours.small].map(|tally| tally.other.values().sum::<u64>());
    let failed = failed.iter().sum::<u64>();
    let small = ratio(ours.small.ok, theirs.small.ok);
    let big = ratio(ours.big.ok, theirs.big.ok);
    let after = lowtide.after.unwrap_or(ByteSize::MAX);
    let end = if lowtide.killed_after.is_some() { "was" } else { "was not" };
    vec![
        (
            lowtide.killed_after.is_none() && failed == 0,
            format!("lowtide is not killed and no request fails: {end} killed, {failed} failed"),
        ),
        (
            small >= SMALL_MIN,
            format!("small requests, lowtide / concurrency limit >= {SMALL_MIN}: {small:.1}"),
        ),
        (
            big >= BIG_MIN,
            format!("large requests, lowtide / concurrency limit >= {BIG_MIN}: {big:.1}"),
        ),
        (
            after <= AFTER_MAX,
            format!("lowtide's RSS after 10 s <= {AFTER_MAX}: {:.0} MiB", mib(after)),
        ),
    ]
}

#[expect(clippy::cast_precision_loss, reason = "requests are few")]
fn ratio(ours: u64, theirs: u64) -> f64 {
    ours as f64 / theirs.max(1) as f64
}

fn mib(size: ByteSize) -> f64 {
    size.as_f64() / ByteSize::mib(1).as_f64()
}
