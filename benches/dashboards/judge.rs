//! Queries of the live data, and verdicts on their results.
//!
//! Invariant: a fault is either in the list of what is named, with a reason, or counted.

use std::ops::Range;
use std::time::{SystemTime, UNIX_EPOCH};

use lowtide::BoxError;
use serde_json::Value;

use crate::process::Prometheus;

/// Seconds since the Unix epoch.
pub(crate) fn now() -> Result<u64, BoxError> {
    Ok(SystemTime::now().duration_since(UNIX_EPOCH)?.as_secs())
}

/// The faults.
#[derive(Debug, Default)]
pub(crate) struct Report(pub(crate) Vec<String>);

impl Report {
    pub(crate) fn expect(&mut self, holds: bool, what: impl FnOnce() -> String) {
        self.0.extend((!holds).then(what));
    }

    /// Adds a fault, unless it has a reason.
    fn fault(&mut self, what: String, why: Option<&str>) {
        match why {
            Some(why) => println!("named: {what}: {why}"),
            None => self.0.push(what),
        }
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
    for series in list(&data["result"]) {
        let numbers =
            list(&series["values"]).iter().filter_map(|pair| pair[1].as_str()?.parse::<f64>().ok());
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
    time: &Range<u64>,
    report: &mut Report,
) -> Result<(), BoxError> {
    let queries = read()?;
    for query in &queries {
        // One event shows at a constant rate, and before and after it nothing.
        let shown = query.expr.trim_end_matches(if query.is_annotation { "" } else { " > 0" });
        let (what, is_empty) = match found(&prometheus.range(shown, time).await?) {
            Found::Nothing => ("no series", true),
            Found::Constant if !query.is_annotation => ("no series that changes", false),
            Found::Constant | Found::Changing => continue,
        };
        // Who may be empty may be constant as well.
        let named = exceptions().find(|[kind, title, letters, _]| {
            let is_kind = *kind == "empty" || *kind == "constant" && !is_empty;
            is_kind && *title == query.title && letters.contains(&query.letter)
        });
        let fault = format!("{} / {} {}: {what}", query.board, query.title, query.letter);
        report.fault(fault, named.map(|[.., why]| why));
    }
    for [_, title, letters, _] in exceptions().filter(|[kind, ..]| *kind != "rule") {
        let has = |letter: &str| {
            queries.iter().any(|one| one.title == title && one.letter.contains(letter))
        };
        let exists = has("") && letters.trim_matches('-').split("").all(has);
        report.expect(exists, || format!("{title} {letters}: named, and no such query"));
    }
    println!("{} queries", queries.len());
    Ok(())
}

/// Each recording rule has made series, each alert was evaluated, and nothing failed.
pub(crate) async fn rules(
    prometheus: &Prometheus,
    time: &Range<u64>,
    report: &mut Report,
) -> Result<(), BoxError> {
    let groups = prometheus.api("rules").await?;
    let rules = list(&groups["groups"]).iter().flat_map(|group| list(&group["rules"]));
    for rule in rules.clone() {
        let name = text(&rule["name"]);
        report
            .expect(rule["health"] == "ok", || format!("{name}: not evaluated, or with an error"));
        if rule["type"] == "recording"
            && found(&prometheus.range(&name, time).await?) == Found::Nothing
        {
            let named = exceptions().find(|[kind, known, ..]| *kind == "rule" && *known == name);
            report.fault(format!("{name}: no series"), named.map(|[.., why]| why));
        }
    }
    report.expect(rules.clone().count() > 0, || "Prometheus has read no rules".to_owned());
    println!("{} rules", rules.count());
    Ok(())
}

// The queries of the shipped dashboards. Invariant: a query that Grafana would send is in the list,
// its variables replaced by what they stand for when all is chosen.

/// The dashboards.
const FILES: [&str; 3] = ["overview", "device", "detail"];
/// Variables, and what they stand for. A range holds five scrapes; the shown time is the load's.
const VARIABLES: [(&str, &str); 7] = [
    ("$__rate_interval", "5s"),
    ("$__range", "80s"),
    ("$namespace", ".*"),
    ("$job", ".*"),
    ("$pod", ".*"),
    ("$instance", ".*"),
    ("$device", ".*"),
];

/// One query of a panel or an annotation.
#[derive(Clone, Debug)]
struct Query {
    board: &'static str,
    title: String,
    is_annotation: bool,
    /// The letter in its panel; empty for an annotation.
    letter: String,
    expr: String,
}

fn text(value: &Value) -> String {
    value.as_str().unwrap_or_default().to_owned()
}

fn list(value: &Value) -> &[Value] {
    value.as_array().map_or(&[], Vec::as_slice)
}

/// The queries of all dashboards.
fn read() -> Result<Vec<Query>, BoxError> {
    let mut queries = Vec::new();
    for board in FILES {
        let path = crate::root().join(format!("dashboards/{board}.json"));
        let json = std::fs::read_to_string(&path);
        let json = json.map_err(|error| format!("{}: {error}", path.display()))?;
        let json: Value = serde_json::from_str(&json)?;
        let mut add = |title: &Value, is_annotation, of: &Value| {
            let mut expr = text(&of["expr"]);
            for (name, value) in VARIABLES {
                expr = expr.replace(name, value);
            }
            let (title, letter) = (text(title), text(&of["refId"]));
            queries.push(Query { board, title, is_annotation, letter, expr });
        };
        for panel in list(&json["panels"]) {
            list(&panel["targets"]).iter().for_each(|of| add(&panel["title"], false, of));
        }
        for of in list(&json["annotations"]["list"]) {
            add(&of["name"], true, of);
        }
    }
    Ok(queries)
}

// Series that may be empty or constant on a machine without a GPU, each with its reason.
// Invariant: what is not named here has series that change.

const EXCEPTIONS: &str = include_str!("exceptions.tsv");

/// Returns the kind, the title, the letters and the reason of each exception.
fn exceptions() -> impl Iterator<Item = [&'static str; 4]> {
    let rows = EXCEPTIONS.lines().filter(|line| !line.starts_with('#'));
    rows.filter_map(|line| line.split('\t').collect::<Vec<_>>().try_into().ok())
}
