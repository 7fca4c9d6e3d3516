//! The shipped files: the queries of the dashboards, and the rules.
//!
//! It reads; `judge` asks. Invariant: a query that Grafana would send is in the list, its variables
//! replaced by what they stand for when all is chosen.

use std::collections::BTreeSet;

use lowtide::BoxError;
use lowtide::metrics::names::{MetricKind, TABLE};
use serde_json::Value;
use yaml_rust2::{Yaml, YamlLoader};

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
pub(crate) struct Query {
    pub(crate) board: &'static str,
    pub(crate) title: String,
    pub(crate) is_annotation: bool,
    /// The letter in its panel; empty for an annotation.
    pub(crate) letter: String,
    pub(crate) expr: String,
}

impl Query {
    /// Its panel or annotation.
    pub(crate) fn panel(&self) -> (bool, &str, &str) {
        (self.is_annotation, self.board, &self.title)
    }
}

/// One rule.
#[derive(Clone, Debug)]
pub(crate) struct Rule {
    pub(crate) name: String,
    pub(crate) records: bool,
    pub(crate) expr: String,
}

fn file(name: &str) -> Result<String, BoxError> {
    let path = crate::root().join("dashboards").join(name);
    Ok(std::fs::read_to_string(&path).map_err(|error| format!("{}: {error}", path.display()))?)
}

/// The queries of all dashboards.
pub(crate) fn read() -> Result<Vec<Query>, BoxError> {
    let mut queries = Vec::new();
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let list = |value: &Value| value.as_array().cloned().unwrap_or_default();
    for board in FILES {
        let json: Value = serde_json::from_str(&file(&format!("{board}.json"))?)?;
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
            add(&of["name"], true, &of);
        }
    }
    Ok(queries)
}

/// The rules.
pub(crate) fn rules() -> Result<Vec<Rule>, BoxError> {
    let documents = YamlLoader::load_from_str(&file("lowtide.rules.yml")?)?;
    let list = |value: &Yaml| value.as_vec().cloned().unwrap_or_default();
    let groups = documents.first().map(|document| list(&document["groups"])).unwrap_or_default();
    let rules = groups.iter().flat_map(|group| list(&group["rules"]));
    Ok(rules
        .map(|rule| {
            let text = |key: &str| rule[key].as_str().unwrap_or_default().to_owned();
            let records = rule["record"].as_str().is_some();
            let name = if records { text("record") } else { text("alert") };
            Rule { name, records, expr: text("expr") }
        })
        .collect())
}

/// The query by which KEDA scales, of all instances: those here are no pods.
pub(crate) fn autoscaling() -> Result<String, BoxError> {
    let path = crate::root().join("deploy/keda.yaml");
    let documents = YamlLoader::load_from_str(&std::fs::read_to_string(path)?)?;
    let query = documents.first().map(|one| &one["spec"]["triggers"][0]["metadata"]["query"]);
    let query = query.and_then(Yaml::as_str).ok_or("deploy/keda.yaml has no query")?;
    let (before, pods) = query.split_once('{').ok_or("the query selects no pods")?;
    let (_, after) = pods.split_once('}').ok_or("the query selects no pods")?;
    Ok(format!("{before}{after}"))
}

/// The metrics of the table that a text names, be it by a part of a histogram.
pub(crate) fn metrics(text: &str) -> BTreeSet<&'static str> {
    let words = text.split(|c: char| !c.is_ascii_alphanumeric() && c != '_' && c != ':');
    let words: BTreeSet<_> =
        words.filter(|word| word.starts_with("lowtide_") || word.starts_with("process_")).collect();
    let named = |name: &str, kind: MetricKind| match kind {
        MetricKind::Histogram => words.iter().any(|word| {
            let part = word.strip_prefix(name).unwrap_or_default();
            ["_bucket", "_sum", "_count"].contains(&part)
        }),
        _ => words.contains(name),
    };
    TABLE.iter().filter(|metric| named(metric.name, metric.kind)).map(|one| one.name).collect()
}

/// The metrics that a scrape shows: those that have series.
pub(crate) fn scraped(text: &str) -> BTreeSet<&'static str> {
    let series: Vec<_> = text.lines().filter(|line| !line.starts_with('#')).collect();
    metrics(&series.join("\n"))
}
