//! Dashboards, rules and their documents, held against the one table of metric names.
//!
//! Nothing is started: expressions are parsed and the labels of what they yield are worked out, the
//! dashboard is read as JSON, the rules as YAML. That they evaluate is promtool's to check, and
//! that Grafana draws them is not checked here.
//!
//! Invariant: what dashboard, rules and documents name is what `names::TABLE` holds, both ways.

mod documents;
mod layout;
#[path = "../../benches/dashboards/named.rs"]
#[allow(dead_code, reason = "the bench reads more of it")]
mod named;
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

/// The dashboards that are shipped, in the order of their links.
const DASHBOARDS: [&str; 5] = ["overview", "heap", "device", "pressure_and_admission", "resources"];

fn dashboard(name: &str) -> Value {
    serde_json::from_str(&read(&format!("dashboards/{name}.json"))).expect("JSON")
}

fn dashboards() -> Vec<Value> {
    DASHBOARDS.into_iter().map(dashboard).collect()
}

fn none(faults: &[String]) {
    assert!(faults.is_empty(), "{} faults:\n{}", faults.len(), faults.join("\n"));
}

#[test]
fn the_dashboards_keep_the_rules_of_the_linter_and_name_what_exists() {
    for name in DASHBOARDS {
        let mut faults = layout::check(&dashboard(name), &Known::table()).faults;
        faults.iter_mut().for_each(|fault| *fault = format!("{name}: {fault}"));
        none(&faults);
    }
}

#[test]
fn every_shipped_dashboard_is_checked_and_has_an_address_of_its_own() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("dashboards");
    let mut files: Vec<_> = std::fs::read_dir(folder)
        .expect("a folder")
        .filter_map(|entry| entry.ok()?.file_name().into_string().ok())
        .filter_map(|name| Some(name.strip_suffix(".json")?.to_owned()))
        .collect();
    files.sort();
    let mut expected = DASHBOARDS.map(str::to_owned).to_vec();
    expected.sort();
    assert_eq!(files, expected);
    let uids: BTreeSet<_> = dashboards().iter().map(|one| one["uid"].to_string()).collect();
    assert_eq!(uids.len(), DASHBOARDS.len(), "{uids:?}");
}

/// The metrics that panels show.
fn shown() -> BTreeSet<String> {
    let known = Known::table();
    dashboards().iter().flat_map(|one| layout::check(one, &known).metrics).collect()
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
    none(&missing(&shown()));
}

/// The metrics of the table that are not among these.
fn missing(shown: &BTreeSet<String>) -> Vec<String> {
    TABLE
        .iter()
        .filter(|metric| !shown.contains(metric.name))
        .map(|metric| format!("{}: on no panel", metric.name))
        .collect()
}

/// What may be empty on a machine without a GPU exists, and is not most of what is shown.
#[test]
fn what_is_excused_from_live_data_is_a_query_of_a_panel() {
    let boards = dashboards();
    let panels: Vec<_> =
        boards.iter().filter_map(|one| one["panels"].as_array()).flatten().collect();
    let mut faults = Vec::new();
    for named in named::PANELS {
        let has = |letter: char| {
            let letter = letter.to_string();
            panels.iter().filter(|panel| panel["title"] == named.title).any(|panel| {
                let targets = panel["targets"].as_array();
                targets.is_some_and(|them| them.iter().any(|one| one["refId"] == letter.as_str()))
            })
        };
        if named.letters.is_empty() || !named.letters.chars().all(has) {
            faults.push(format!("{} {}: no such query", named.title, named.letters));
        }
    }
    for (name, _) in named::METRICS {
        if TABLE.iter().all(|metric| metric.name != *name) {
            faults.push(format!("{name}: no such metric"));
        }
    }
    none(&faults);
    let queries: usize =
        panels.iter().filter_map(|one| one["targets"].as_array()).map(Vec::len).sum();
    let excused: usize = named::PANELS.iter().map(|named| named.letters.len()).sum();
    assert!(excused * 3 < queries, "{excused} of {queries}");
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
    none(&documents::runbook(&read("docs/OPERATING.md"), &rules, &dashboards()));
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
