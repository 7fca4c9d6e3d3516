//! Queries of the live data, and verdicts on their results.
//!
//! Invariant: a fault is either in the list of what is named, with a reason, or counted.

use std::collections::BTreeSet;
use std::ops::Range;
use std::time::{SystemTime, UNIX_EPOCH};

use lowtide::BoxError;
use serde_json::Value;

use crate::boards::{Query, Rule};
use crate::common::figures::{Figures, count};
use crate::named::{PANELS, RULES};
use crate::process::Prometheus;

/// Seconds since the Unix epoch.
pub(crate) fn now() -> Result<u64, BoxError> {
    Ok(SystemTime::now().duration_since(UNIX_EPOCH)?.as_secs())
}

/// The results.
#[derive(Debug, Default)]
pub(crate) struct Report {
    figures: Figures,
    faults: Vec<String>,
}

impl Report {
    pub(crate) fn figure(&mut self, name: &str, number: usize) {
        self.figures.add(format!("dashboard.{name}"), count(number as u64), "count");
    }

    pub(crate) fn expect(&mut self, holds: bool, what: impl FnOnce() -> String) {
        if !holds {
            self.faults.push(what());
        }
    }

    /// Adds a fault, unless it has a reason. Returns `true` if it has none.
    fn fault(&mut self, what: String, why: Option<&str>) -> bool {
        match why {
            Some(why) => println!("named: {what}: {why}"),
            None => self.faults.push(what),
        }
        why.is_none()
    }

    /// Prints everything. Returns `true` if there are no faults.
    pub(crate) fn print(&self) -> bool {
        self.figures.print();
        self.faults.iter().for_each(|fault| eprintln!("fault: {fault}"));
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
        if numbers.iter().any(|number| (number - first).abs() > f64::EPSILON) {
            return Found::Changing;
        }
        found = Found::Constant;
    }
    found
}

/// Asks every query of every panel and annotation.
pub(crate) async fn boards(
    prometheus: &Prometheus,
    queries: &[Query],
    time: &Range<u64>,
    report: &mut Report,
) -> Result<(), BoxError> {
    let (mut bad, mut excused) = (BTreeSet::new(), BTreeSet::new());
    for query in queries {
        let (what, is_empty) = match found(&prometheus.range(&query.expr, time).await?) {
            Found::Nothing => ("no series", true),
            Found::Constant if !query.is_annotation => ("no series that changes", false),
            Found::Constant | Found::Changing => continue,
        };
        // Who may be empty may be constant as well.
        let named = PANELS.iter().find(|named| {
            named.title == query.title
                && named.letters.contains(&query.letter)
                && (named.may_be_empty || !is_empty)
        });
        let fault = format!("{} / {} {}: {what}", query.board, query.title, query.letter);
        let is_bad = report.fault(fault, named.map(|named| named.why));
        (if is_bad { &mut bad } else { &mut excused }).insert(query.panel());
    }
    for named in PANELS {
        let has = |letter: &str| {
            queries.iter().any(|one| one.title == named.title && one.letter.contains(letter))
        };
        let exists = has("") && named.letters.split("").all(has);
        let what = || format!("{} {}: named, and no such query", named.title, named.letters);
        report.expect(exists, what);
    }
    let all: BTreeSet<_> = queries.iter().map(Query::panel).collect();
    let [panels, annotations] = [false, true].map(|is_annotation| {
        [&all, &bad].map(|set| set.iter().filter(|panel| panel.0 == is_annotation).count())
    });
    report.figure("panels", panels[0]);
    report.figure("panels_without_series", panels[1]);
    report.figure("panels_named", excused.difference(&bad).filter(|panel| !panel.0).count());
    report.figure("queries", queries.len());
    report.figure("annotations", annotations[0]);
    report.figure("annotations_without_series", annotations[1]);
    Ok(())
}

/// Each recording rule has made series, each alert was evaluated, and nothing failed.
pub(crate) async fn rules(
    prometheus: &Prometheus,
    rules: &[Rule],
    time: &Range<u64>,
    report: &mut Report,
) -> Result<(), BoxError> {
    let mut without = 0;
    for rule in rules.iter().filter(|rule| rule.records) {
        if found(&prometheus.range(&rule.name, time).await?) == Found::Nothing {
            let why = RULES.iter().find(|(name, _)| *name == rule.name).map(|(_, why)| *why);
            let fault = format!("{}: no series", rule.name);
            without += usize::from(report.fault(fault, why));
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
    report.figure("rules", rules.len());
    report.figure("rules_without_series", without);
    Ok(())
}
