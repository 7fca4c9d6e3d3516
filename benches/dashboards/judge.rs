//! Queries of the live data, and verdicts on their results.
//!
//! Invariant: a fault is either in the list of what is named, with a reason, or counted.

use std::collections::BTreeSet;
use std::ops::Range;
use std::time::{SystemTime, UNIX_EPOCH};

use lowtide::BoxError;
use lowtide::metrics::MetricsTier;
use lowtide::metrics::names::TABLE;
use serde_json::Value;

use crate::boards::{self, Panel, Rule};
use crate::named::{self, METRICS, PANELS, RULES};
use crate::process::Prometheus;

/// Seconds since the Unix epoch.
pub(crate) fn now() -> Result<u64, BoxError> {
    Ok(SystemTime::now().duration_since(UNIX_EPOCH)?.as_secs())
}

/// The results.
#[derive(Debug, Default)]
pub(crate) struct Report {
    figures: Vec<(&'static str, usize)>,
    faults: Vec<String>,
    excused: Vec<String>,
}

impl Report {
    pub(crate) fn figure(&mut self, name: &'static str, count: usize) {
        self.figures.push((name, count));
    }

    pub(crate) fn expect(&mut self, holds: bool, what: impl FnOnce() -> String) {
        if !holds {
            self.faults.push(what());
        }
    }

    /// Prints everything. Returns `true` if there are no faults.
    pub(crate) fn print(&self) -> bool {
        for excused in &self.excused {
            println!("named: {excused}");
        }
        for (name, count) in &self.figures {
            println!("figure {name} {count} count");
        }
        for fault in &self.faults {
            eprintln!("fault: {fault}");
        }
        self.faults.is_empty()
    }
}

/// The behaviour of a query's series.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Found {
    Nothing,
    Constant,
    Changing,
}

/// Series without a number at any time are none.
fn found(data: &Value) -> Found {
    let mut found = Found::Nothing;
    for series in data["result"].as_array().map_or(&[][..], Vec::as_slice) {
        let values = series["values"].as_array().map_or(&[][..], Vec::as_slice);
        let numbers = values.iter().filter_map(|pair| pair[1].as_str()?.parse::<f64>().ok());
        let numbers: Vec<_> = numbers.filter(|number| !number.is_nan()).collect();
        let Some(first) = numbers.first() else { continue };
        let changes = numbers.iter().any(|number| (number - first).abs() > f64::EPSILON);
        if changes {
            return Found::Changing;
        }
        found = Found::Constant;
    }
    found
}

/// Asks every query of every panel and annotation.
pub(crate) async fn boards(
    prometheus: &Prometheus,
    panels: &[Panel],
    time: Range<u64>,
    report: &mut Report,
) -> Result<(), BoxError> {
    let (mut bad, mut excused, mut queries) = (0, 0, 0);
    let (mut annotations, mut bad_annotations) = (0, 0);
    for panel in panels {
        let mut faults: Vec<(String, bool, &str)> = Vec::new();
        for query in &panel.queries {
            queries += 1;
            let data = prometheus.range(&query.expr, time.start, time.end).await?;
            let place = format!("{} / {} {}", panel.board, panel.title, query.letter);
            match found(&data) {
                Found::Nothing => {
                    faults.push((place.trim().to_owned() + ": no series", true, &query.letter));
                }
                Found::Constant if !panel.annotation => {
                    faults.push((place + ": no series that changes", false, &query.letter));
                }
                Found::Constant | Found::Changing => {}
            }
        }
        let mut left = 0;
        for (fault, empty, letter) in &faults {
            // Who may be empty may be constant as well.
            let named = PANELS.iter().find(|named| {
                named.title == panel.title
                    && named.letters.contains(letter)
                    && (named.may_be_empty || !empty)
            });
            if let Some(named) = named {
                report.excused.push(format!("{fault}: {}", named.why));
            } else {
                left += 1;
                report.faults.push(fault.clone());
            }
        }
        if panel.annotation {
            annotations += 1;
            bad_annotations += usize::from(left > 0);
        } else {
            bad += usize::from(left > 0);
            excused += usize::from(left == 0 && !faults.is_empty());
        }
    }
    for named in PANELS {
        let exists = panels.iter().any(|panel| {
            let has = |letter: char| panel.queries.iter().any(|one| one.letter.contains(letter));
            panel.title == named.title && named.letters.chars().all(has)
        });
        let what = || format!("{} {}: named, and no such query", named.title, named.letters);
        report.expect(exists, what);
    }
    report.figure("dashboard.panels", panels.len() - annotations);
    report.figure("dashboard.panels_without_series", bad);
    report.figure("dashboard.panels_named", excused);
    report.figure("dashboard.queries", queries);
    report.figure("dashboard.annotations", annotations);
    report.figure("dashboard.annotations_without_series", bad_annotations);
    Ok(())
}

/// Each recording rule has made series, each alert was evaluated, and nothing failed.
pub(crate) async fn rules(
    prometheus: &Prometheus,
    rules: &[Rule],
    time: Range<u64>,
    report: &mut Report,
) -> Result<(), BoxError> {
    let mut without = 0;
    for rule in rules.iter().filter(|rule| rule.records) {
        let data = prometheus.range(&rule.name, time.start, time.end).await?;
        let why = named::why(RULES, &rule.name);
        match (found(&data), why) {
            (Found::Nothing, None) => {
                without += 1;
                report.faults.push(format!("{}: no series", rule.name));
            }
            (Found::Nothing, Some(why)) => {
                report.excused.push(format!("{}: no series: {why}", rule.name));
            }
            _ => {}
        }
    }
    let groups = prometheus.api("rules").await?;
    let groups = groups["groups"].as_array().cloned().unwrap_or_default();
    let evaluated: Vec<_> =
        groups.iter().flat_map(|group| group["rules"].as_array().cloned()).flatten().collect();
    for rule in rules {
        let ok = evaluated.iter().any(|one| one["name"] == rule.name && one["health"] == "ok");
        report.expect(ok, || format!("{}: not evaluated, or with an error", rule.name));
    }
    report.figure("dashboard.rules", rules.len());
    report.figure("dashboard.rules_without_series", without);
    Ok(())
}

/// Asks the query by which an autoscaler scales. The load changes its value, which is at most the
/// number of instances.
pub(crate) async fn autoscaling(
    prometheus: &Prometheus,
    query: &str,
    instances: usize,
    time: Range<u64>,
    report: &mut Report,
) -> Result<(), BoxError> {
    let data = prometheus.range(query, time.start, time.end).await?;
    let changes = found(&data) == Found::Changing;
    report.expect(changes, || format!("{query}: no value that changes"));
    let above = format!("{query} < 0 or {query} > {instances}");
    let data = prometheus.range(&above, time.start, time.end).await?;
    report.expect(found(&data) == Found::Nothing, || format!("{above}: a value out of range"));
    report.figure("dashboard.autoscaling_queries", 1);
    Ok(())
}

/// Checks that metrics in panels and rules are scraped, and that those which are published by
/// default are in one of them.
pub(crate) fn names(panels: &[Panel], rules: &[Rule], text: &str, report: &mut Report) {
    let panels = panels.iter().flat_map(|panel| &panel.queries).map(|query| query.expr.as_str());
    let rules = rules.iter().map(|rule| rule.expr.as_str());
    let used: BTreeSet<_> = panels.chain(rules).flat_map(boards::metrics).collect();
    let scraped = boards::scraped(text);
    let mut lacking = 0;
    for name in used.difference(&scraped) {
        if let Some(why) = named::why(METRICS, name) {
            report.excused.push(format!("{name}: not scraped: {why}"));
        } else {
            lacking += 1;
            report.faults.push(format!("{name}: named, and not scraped"));
        }
    }
    let is_basic = |name: &&&str| {
        let metric = TABLE.iter().find(|metric| metric.name == **name);
        metric.is_some_and(|metric| metric.tier == MetricsTier::Basic)
    };
    let of_lowtide = |name: &&&str| name.starts_with("lowtide_");
    let basic = scraped.iter().filter(is_basic).filter(of_lowtide).copied().collect();
    let unshown: Vec<_> = BTreeSet::difference(&basic, &used).collect();
    for name in &unshown {
        report.faults.push(format!("{name}: scraped, and on no panel and in no rule"));
    }
    report.figure("dashboard.metrics_used", used.len());
    report.figure("dashboard.metrics_lacking", lacking);
    report.figure("dashboard.metrics_unshown", unshown.len());
}
