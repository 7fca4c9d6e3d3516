//! The table: a line for each cell, as it comes.
//!
//! Invariant: a cell that is void says so, and why.

use crate::cell::Outcome;
use crate::figures::{count, quantile};
use crate::measures::{MIB, Measures};

/// The heading.
pub(crate) fn heading() -> String {
    format!(
        "{:<10}{:>5} {:<6}{:>5}{:>9}{:>8}{:>8}{:>8} {:^17}{:>10}{:>9}{:>7}{:>7}{:>6}  end",
        "policy",
        "load",
        "mix",
        "est",
        "served/s",
        "MiB/s",
        "shed %B",
        "fail %B",
        "share S/M/L",
        "added p99",
        "shed p99",
        "peak",
        "lvl/s",
        "CPU",
    )
}

/// A cell in one line.
pub(crate) fn line(
    name: [&str; 2],
    load: f64,
    estimate: f64,
    measures: &Measures,
    outcome: &Outcome,
) -> String {
    let [policy, mix] = name;
    let [small, medium, large] = measures.shares;
    let shares = format!("{small:.2} {medium:.2} {large:.2}");
    let mut text = format!(
        "{policy:<10}{load:>4}x {mix:<6}{estimate:>5}{:>9.1}{:>8.1}{:>8.1}{:>8.1} {shares:^17}\
         {:>7.1} ms{:>6.2} ms{:>7.0}{:>7.2}{:>4.0} %  ",
        measures.served,
        measures.goodput_mib,
        100.0 * measures.shed_bytes,
        100.0 * measures.failed_bytes,
        measures.p99_ms,
        measures.shed_p99_ms,
        measures.peak_mib,
        measures.level_changes,
        100.0 * measures.busy,
    );
    text += outcome.death.as_deref().unwrap_or("survived");
    if outcome.death.is_some() {
        text += &format!(" at {}", outcome.peak_parts);
    }
    let report = &outcome.report;
    if !report.k.is_empty() {
        let [half, most] = [0.5, 0.99].map(|part| quantile(&report.k, part));
        let reserved = quantile(&report.booked_mib, 0.5);
        text += &format!("; K {half:.2} (p99 {most:.2}), booked {reserved:.0}");
        let reasons = report.shed.iter().filter(|(_, count)| *count > 0);
        text += &reasons.map(|(why, count)| format!(", {count} {why}")).collect::<String>();
    }
    if let Some(why) = measures.void() {
        text += &format!("; VOID: {why}");
    }
    // Which failures, where the service lived: a few kinds tell it.
    if outcome.death.is_none() {
        for (what, times) in outcome.tally.failures.iter().take(3) {
            text += &format!("; {times} x {what}");
        }
    }
    text
}

/// Returns the text below the table.
pub(crate) fn legend(bases: &[f64]) -> String {
    let base = bases.iter().copied().fold(0.0, f64::max);
    let lines = [
        "served/s, MiB/s: of the steady part. shed, fail: of the bytes offered. share: a class's",
        "part of the served bytes over its part of the offered ones. added p99: latency of what",
        "was served less its hold. shed p99: in the service, without waits for the refused body.",
        "lvl/s: changes of level. K, booked: medians of what lowtide's ledger said while it was at",
        "least half full, in MiB; then what was turned away, by reason. peak: MiB;",
    ];
    format!("{} at most {base:.0} MiB before the first request.", lines.join("\n"))
}

/// MiB before the first request.
pub(crate) fn base(outcome: &Outcome) -> f64 {
    count(outcome.base.get()) / MIB
}
