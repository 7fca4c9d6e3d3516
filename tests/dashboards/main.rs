//! Dashboards, rules and their documents, held against the one table of metric names.
//!
//! Nothing is started: expressions are parsed and the labels of what they yield are worked out, the
//! dashboard is read as JSON, the rules as YAML. That they evaluate is promtool's to check, and
//! that Grafana draws them is not checked here.
//!
//! Invariant: what dashboard, rules and documents name is what `names::TABLE` holds, both ways.

mod documents;
mod layout;
mod planted;
mod promql;
mod rules;

use std::collections::BTreeSet;
use std::path::Path;

use lowtide::metrics::names::TABLE;
use serde_json::Value;

use promql::Known;
use rules::Rules;

/// A file of the repository.
fn read(name: &str) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(name);
    std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{name}: {error}"))
}

fn dashboard() -> Value {
    serde_json::from_str(&read("dashboards/overview.json")).expect("JSON")
}

fn none(faults: &[String]) {
    assert!(faults.is_empty(), "{} faults:\n{}", faults.len(), faults.join("\n"));
}

#[test]
fn the_overview_keeps_the_rules_of_the_linter_and_names_what_exists() {
    none(&layout::check(&dashboard(), &Known::table()).faults);
}

#[test]
fn rules_and_alerts_are_complete_and_name_what_exists() {
    none(&Rules::read(&read("dashboards/lowtide.rules.yml")).check().faults);
}

#[test]
fn every_alert_is_tested_firing_and_silent() {
    let rules = Rules::read(&read("dashboards/lowtide.rules.yml"));
    none(&rules.untested(&read("dashboards/tests/lowtide.rules.test.yml")));
}

#[test]
fn every_metric_is_shown() {
    let mut shown = layout::check(&dashboard(), &Known::table()).metrics;
    shown.extend(Rules::read(&read("dashboards/lowtide.rules.yml")).check().metrics);
    none(&missing(&shown));
}

/// The metrics of the table that are not among these.
fn missing(shown: &BTreeSet<String>) -> Vec<String> {
    TABLE
        .iter()
        .filter(|metric| !shown.contains(metric.name))
        .map(|metric| format!("{}: on no panel and in no rule", metric.name))
        .collect()
}

#[test]
fn the_list_of_metrics_is_the_table() {
    let expected = documents::metrics();
    if read("docs/METRICS.md") != expected {
        let copy = Path::new(env!("CARGO_TARGET_TMPDIR")).join("METRICS.md");
        std::fs::write(&copy, expected).expect("written");
        let copy = copy.display();
        panic!("docs/METRICS.md is not what the table says: cp {copy} docs/METRICS.md");
    }
}

#[test]
fn every_alert_has_its_section_in_the_runbook() {
    let rules = Rules::read(&read("dashboards/lowtide.rules.yml"));
    none(&documents::runbook(&read("docs/OPERATING.md"), &rules, &dashboard()));
}

/// The library's files, but for its tests.
fn sources() -> Vec<(String, String)> {
    let mut folders = vec!["src".to_owned()];
    let mut sources = Vec::new();
    while let Some(folder) = folders.pop() {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(&folder);
        for entry in std::fs::read_dir(path).expect("a folder") {
            let entry = entry.expect("an entry");
            let name = format!("{folder}/{}", entry.file_name().to_string_lossy());
            if name.contains("test") {
                continue;
            } else if entry.file_type().expect("a type").is_dir() {
                folders.push(name);
            } else if name.ends_with(".rs") {
                let text = read(&name);
                sources.push((name, text));
            }
        }
    }
    sources.sort();
    sources
}

#[test]
fn every_event_is_listed_and_every_listed_one_exists() {
    none(&documents::events(&sources(), &read("docs/OPERATING.md")));
}

#[test]
fn the_configuration_files_agree_with_each_other() {
    none(&documents::configuration(
        &read("dashboards/prometheus.yml"),
        &read("dashboards/provisioning/datasources/prometheus.yml"),
        &read("dashboards/provisioning/dashboards/lowtide.yml"),
    ));
}
