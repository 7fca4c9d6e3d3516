//! Recording rules and alerts: complete, over names that exist, each alert with its tests.
//!
//! That they evaluate to what they claim is what `promtool test rules` checks.
//!
//! Invariant: an alert that names a ratio names an amount or a rate as well.

use std::collections::BTreeSet;

use yaml_rust2::{Yaml, YamlLoader};

use super::layout::placeholders;
use super::promql::{self, Known, Labels, Place};

/// The path of the runbook.
pub(crate) const RUNBOOK: &str = "docs/OPERATING.md";
/// Words that an alert may be graded by.
const SEVERITIES: [&str; 2] = ["warning", "critical"];
/// The prefix of every alert's name, because all services share one list.
const PREFIX: &str = "Lowtide";

/// The rules of a file.
#[derive(Debug)]
pub(crate) struct Rules {
    rules: Vec<Yaml>,
}

/// The findings in the rules.
#[derive(Debug, Default)]
pub(crate) struct Findings {
    pub(crate) metrics: BTreeSet<String>,
    pub(crate) faults: Vec<String>,
}

/// The first document of a YAML file. One that cannot be read is a fault of its own, and empty
/// here.
pub(crate) fn yaml(text: &str) -> Yaml {
    let documents = YamlLoader::load_from_str(text).unwrap_or_default();
    documents.into_iter().next().unwrap_or(Yaml::BadValue)
}

/// Returns the items of a list, or nothing if the value is no list.
pub(crate) fn items(value: &Yaml) -> &[Yaml] {
    value.as_vec().map_or(&[], Vec::as_slice)
}

impl Rules {
    pub(crate) fn read(text: &str) -> Self {
        let file = yaml(text);
        let rules = items(&file["groups"]).iter().flat_map(|group| items(&group["rules"]));
        Self { rules: rules.cloned().collect() }
    }

    /// The names of the alerts.
    pub(crate) fn alerts(&self) -> Vec<&str> {
        self.rules.iter().filter_map(|rule| rule["alert"].as_str()).collect()
    }

    pub(crate) fn check(&self) -> Findings {
        let mut found = Findings::default();
        let (mut known, mut names) = (Known::table(), BTreeSet::new());
        for rule in &self.rules {
            let record = rule["record"].as_str();
            let name = record.or_else(|| rule["alert"].as_str()).unwrap_or("a rule without a name");
            let text = rule["expr"].as_str().unwrap_or_default();
            let expression = promql::check(text, Place::Rule, &known);
            found.faults.extend(expression.faults.iter().map(|fault| format!("{name}: {fault}")));
            found.metrics.extend(expression.metrics.iter().cloned());
            if !names.insert(name) {
                found.faults.push(format!("{name} stands twice"));
            }
            if let Some(record) = record {
                recorded(record, &expression.labels, &mut found.faults);
                known.record(record, expression.labels);
            } else {
                alert(name, rule, &expression, &mut found.faults);
            }
        }
        found
    }

    /// The alerts of which a test file of promtool has no firing or no silent case.
    pub(crate) fn untested(&self, text: &str) -> Vec<String> {
        let file = yaml(text);
        let cases: Vec<_> = items(&file["tests"])
            .iter()
            .flat_map(|test| items(&test["alert_rule_test"]))
            .map(|case| (case["alertname"].as_str(), !items(&case["exp_alerts"]).is_empty()))
            .collect();
        let missing = |name: &str, fires| !cases.contains(&(Some(name), fires));
        let mut faults = Vec::new();
        for name in self.alerts() {
            for (fires, what) in [(true, "firing"), (false, "silent")] {
                if missing(name, fires) {
                    faults.push(format!("{name} is not tested {what}"));
                }
            }
        }
        faults
    }
}

/// `level:metric:operation`, and a level that tells how the series differ.
fn recorded(name: &str, labels: &Labels, faults: &mut Vec<String>) {
    let parts: Vec<_> = name.split(':').collect();
    let [level, metric, operation] = parts.as_slice() else {
        faults.push(format!("{name}: expected level:metric:operation"));
        return;
    };
    if !metric.starts_with("lowtide_") || operation.is_empty() {
        faults.push(format!("{name}: expected a metric of ours, and an operation"));
    }
    let labels = labels.clone().unwrap_or_default();
    for word in level.split('_') {
        if !labels.contains(word) {
            faults.push(format!("{name}: its series have no label {word}"));
        }
    }
}

fn alert(name: &str, rule: &Yaml, expression: &promql::Findings, faults: &mut Vec<String>) {
    let mut expect = |holds: bool, what: &str| {
        if !holds {
            faults.push(format!("{name}: {what}"));
        }
    };
    expect(name.starts_with(PREFIX), "expected the prefix of all alerts");
    let severity = rule["labels"]["severity"].as_str().unwrap_or_default();
    expect(SEVERITIES.contains(&severity), "expected a severity, warning or critical");
    let annotation = |key: &str| rule["annotations"][key].as_str().unwrap_or_default();
    expect(annotation("summary").contains("{{"), "expected a summary that says where");
    expect(annotation("description").ends_with('.'), "expected a description, in sentences");
    let anchor = format!("{RUNBOOK}#{}", name.to_lowercase());
    expect(annotation("runbook") == anchor, &format!("expected runbook: {anchor}"));
    let ratio = |metric: &&String| metric.contains("ratio");
    let floor = expression.metrics.iter().any(|metric| !ratio(&metric));
    let ratios = expression.metrics.iter().any(|metric| ratio(&metric));
    expect(!ratios || floor, "a ratio alone: expected an amount or a rate beside it");
    let labels = expression.labels.clone().unwrap_or_default();
    for key in ["summary", "description"] {
        for place in placeholders(annotation(key)) {
            let label = place.strip_prefix("$labels.");
            let known =
                label.map_or_else(|| place.starts_with("$value"), |label| labels.contains(label));
            expect(known, &format!("{key}: {place} is no label of its series"));
        }
    }
}
