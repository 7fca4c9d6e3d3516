//! The shipped files: the queries of the dashboards, and the rules.
//!
//! It reads; `judge` asks. Invariant: a query that Grafana would send is in the list, its variables
//! replaced by what they stand for when all is chosen.

use lowtide::BoxError;
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
            Rule { name, records }
        })
        .collect())
}
