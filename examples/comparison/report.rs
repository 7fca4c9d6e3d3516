//! The report: the table, the bounds that must hold, and the figures.

use std::fmt::Write as _;

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
pub(crate) fn heading() -> String {
    format!(
        "{:<20}{:>8} |{:^14}|{:^21}|{:^14}\n{:<20}{:>8} |{:>7}{:>6} |{:>7}{:>6}{:>7} |{:>6}{:>7}",
        "",
        "",
        "5 MiB",
        "2 KiB",
        "RSS, MiB",
        "setup",
        "killed",
        "served",
        "503",
        "served",
        "503",
        "p99 s",
        "peak",
        "+10 s",
    )
}

/// The row of a setup.
pub(crate) fn row(setup: Setup, outcome: &Outcome) -> String {
    let (big, small) = (&outcome.load.big, &outcome.load.small);
    let or_none = |number: Option<String>| number.unwrap_or_else(|| "-".to_owned());
    let killed = outcome.killed_after.map(|after| format!("{after:.1} s"));
    let killed = killed.unwrap_or_else(|| "no".to_owned());
    let p99 = or_none(small.p99_seconds().map(|p99| format!("{p99:.2}")));
    let after = or_none(outcome.after.map(|after| format!("{:.0}", mib(after))));
    format!(
        "{:<20}{killed:>8} |{:>7}{:>6} |{:>7}{:>6}{p99:>7} |{:>6.0}{after:>7}",
        setup.title(),
        big.served,
        big.rejected,
        small.served,
        small.rejected,
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
    let failed = ours.big.failed + ours.small.failed;
    let ratio = |ours: u32, theirs: u32| f64::from(ours) / f64::from(theirs.max(1));
    let small = ratio(ours.small.served, theirs.small.served);
    let big = ratio(ours.big.served, theirs.big.served);
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

/// The results of a setup as lines `figure NAME VALUE UNIT`.
pub(crate) fn figures(setup: Setup, outcome: &Outcome) -> String {
    let mut text = String::new();
    let mut figure = |name: &str, value: f64, unit: &str| {
        let _ = writeln!(text, "figure comparison.{}.{name} {value:.3} {unit}", setup.name());
    };
    figure("killed", f64::from(u8::from(outcome.killed_after.is_some())), "runs");
    for (size, tally) in [("big", &outcome.load.big), ("small", &outcome.load.small)] {
        figure(&format!("{size}_served"), f64::from(tally.served), "requests");
        figure(&format!("{size}_rejected"), f64::from(tally.rejected), "requests");
    }
    if let Some(p99) = outcome.load.small.p99_seconds() {
        figure("small_p99", p99, "s");
    }
    figure("peak_rss", mib(outcome.peak), "MiB");
    if let Some(after) = outcome.after {
        figure("rss_after", mib(after), "MiB");
    }
    text
}

fn mib(size: ByteSize) -> f64 {
    size.as_f64() / ByteSize::mib(1).as_f64()
}
