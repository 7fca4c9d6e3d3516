//! Dashboards, rules and their documents, held against the one table of metric names.
//!
//! Nothing is started: expressions are parsed and the labels of what they yield are worked out, the
//! dashboard is read as JSON, the rules as YAML. That they evaluate is promtool's to check, and
//! that Grafana draws them is not checked here.
//!
//! Invariant: what dashboard, rules and documents name is what `names::TABLE` holds, both ways.

mod documents;
mod layout;
#[path = "../../../../benches/dashboards/named.rs"]
#[allow(dead_code, reason = "the bench reads more of it")]
mod named;
#[cfg(test)]
mod planted;
pub(super) mod promql;
mod rules;

use std::collections::BTreeSet;

use serde_json::Value;

use self::promql::Known;
use self::rules::Rules;
use super::metrics_tier::MetricsTier;
use super::names::TABLE;
use crate::tree::{Faults, Tree};

/// The shipped files that are compared.
struct Shipped<'a> {
    tree: &'a Tree,
    faults: &'a Faults,
    dashboards: Vec<Value>,
}

/// The dashboards that are shipped, in the order of their links, with the highest tier of the
/// metrics that they may show.
const DASHBOARDS: [(&str, MetricsTier); 3] = [
    ("overview", MetricsTier::Basic),
    ("device", MetricsTier::Basic),
    ("detail", MetricsTier::Detail),
];
/// The beginning of the standard metrics of a process, which dashboards of others show.
const PROCESS: &str = "process_";

impl<'a> Shipped<'a> {
    fn read(tree: &'a Tree, faults: &'a Faults) -> Self {
        let dashboard = |(name, _)| {
            let name = format!("dashboards/{name}.json");
            serde_json::from_str(tree.text(&name, faults)).unwrap_or_else(|error| {
                faults.say(format!("{name}: {error}"));
                Value::Null
            })
        };
        Self { tree, faults, dashboards: DASHBOARDS.map(dashboard).into() }
    }

    fn text(&self, name: &str) -> &'a str {
        self.tree.text(name, self.faults)
    }

    /// The metrics that panels show.
    fn metrics(&self) -> BTreeSet<String> {
        let known = Known::table();
        self.dashboards.iter().flat_map(|one| layout::check(one, &known).metrics).collect()
    }

    fn panels(&self) -> Vec<&Value> {
        self.dashboards.iter().filter_map(|one| one["panels"].as_array()).flatten().collect()
    }

    fn rules(&self) -> Rules {
        Rules::read(self.text("dashboards/lowtide.rules.yml"))
    }

    /// The library's files but its tests: their names and texts.
    fn sources(&self) -> Vec<(String, String)> {
        let library = self.tree.library().into_iter();
        let sources = library.filter(|source| !source.name.contains("test"));
        sources.map(|source| (source.name.clone(), source.text.clone())).collect()
    }
}

/// Checks dashboards, rules, and the documents about them.
pub(super) fn check(tree: &Tree, faults: &Faults) {
    let shipped = Shipped::read(tree, faults);
    check_dashboards(&shipped);
    check_excused(&shipped);
    let rules = shipped.rules();
    let in_rules = |what| format!("dashboards/lowtide.rules.yml: {what}");
    faults.extend(rules.check().faults.into_iter().map(in_rules));
    let tests = "dashboards/tests/lowtide.rules.test.yml";
    let untested = rules.untested(shipped.text(tests));
    faults.extend(untested.into_iter().map(|what| format!("{tests}: {what}")));
    let shown = shipped.metrics().into_iter().chain(rules.check().metrics).collect();
    faults.extend(missing(&shown));
    faults.extend(of_other_tiers(
        "dashboards/lowtide.rules.yml",
        MetricsTier::Basic,
        &rules.check().metrics,
    ));
    let list = shipped.text("docs/METRICS.md");
    faults.expect(list == documents::metrics(), || {
        "docs/METRICS.md is not what the table says: run cargo xtask text --write".to_owned()
    });
    let runbook = shipped.text(rules::RUNBOOK);
    faults.extend(documents::runbook(runbook, &rules, &shipped.dashboards));
    faults.extend(documents::events(&shipped.sources(), runbook));
    faults.extend(documents::configuration(
        shipped.text("dashboards/prometheus.yml"),
        shipped.text("dashboards/provisioning/datasources/prometheus.yml"),
        shipped.text("dashboards/provisioning/dashboards/lowtide.yml"),
    ));
}

/// Writes the documents that are generated, and returns their names.
pub(super) fn write(root: &std::path::Path) -> std::io::Result<&'static str> {
    std::fs::write(root.join("docs/METRICS.md"), documents::metrics())?;
    Ok("docs/METRICS.md")
}

/// The dashboards keep the rules of the linter, and each has an address of its own.
fn check_dashboards(shipped: &Shipped<'_>) {
    for ((name, tier), dashboard) in DASHBOARDS.iter().zip(&shipped.dashboards) {
        let found = layout::check(dashboard, &Known::table());
        let at = |fault| format!("dashboards/{name}.json: {fault}");
        shipped.faults.extend(found.faults.into_iter().map(at));
        shipped.faults.extend(of_other_tiers(&format!("{name}.json"), *tier, &found.metrics));
    }
    for file in &shipped.tree.files {
        let name = file.name.strip_prefix("dashboards/").and_then(|n| n.strip_suffix(".json"));
        let is_listed = |name| DASHBOARDS.iter().any(|(listed, _)| *listed == name);
        let is_known = name.is_none_or(|name| name.contains('/') || is_listed(name));
        shipped.faults.expect(is_known, || format!("{}: not in the list of dashboards", file.name));
    }
    let uids: BTreeSet<_> = shipped.dashboards.iter().map(|one| one["uid"].to_string()).collect();
    shipped.faults.expect(uids.len() == DASHBOARDS.len(), || format!("equal uids: {uids:?}"));
}

/// The metrics that are published by default and are not among these.
fn missing(shown: &BTreeSet<String>) -> Vec<String> {
    TABLE
        .iter()
        .filter(|metric| metric.tier == MetricsTier::Basic && !metric.name.starts_with(PROCESS))
        .filter(|metric| !shown.contains(metric.name))
        .map(|metric| format!("{}: published by default, on no panel and in no rule", metric.name))
        .collect()
}

/// Faults for metrics above this tier: the file would show nothing by default.
fn of_other_tiers(file: &str, tier: MetricsTier, names: &BTreeSet<String>) -> Vec<String> {
    let above = TABLE.iter().filter(|metric| metric.tier > tier && names.contains(metric.name));
    above.map(|metric| format!("{file}: {} is of the tier {}", metric.name, metric.tier)).collect()
}

/// Checks that the queries and metrics that may be empty on a machine without a GPU exist, and
/// that under a third of the queries may be.
fn check_excused(shipped: &Shipped<'_>) {
    let panels = shipped.panels();
    for named in named::PANELS {
        let has = |letter: char| {
            let letter = letter.to_string();
            panels.iter().filter(|panel| panel["title"] == named.title).any(|panel| {
                let targets = panel["targets"].as_array();
                targets.is_some_and(|them| them.iter().any(|one| one["refId"] == letter.as_str()))
            })
        };
        // Annotations have no letters.
        let annotations = shipped.dashboards.iter().map(|one| &one["annotations"]["list"]);
        let mut annotations = annotations.filter_map(Value::as_array).flatten();
        let exists = if named.letters.is_empty() {
            annotations.any(|one| one["name"] == named.title)
        } else {
            named.letters.chars().all(has)
        };
        let what = || format!("benches/dashboards/named.rs: {}: no such query", named.title);
        shipped.faults.expect(exists, what);
    }
    for (name, _) in named::METRICS {
        let exists = TABLE.iter().any(|metric| metric.name == *name);
        let what = || format!("benches/dashboards/named.rs: {name}: no such metric");
        shipped.faults.expect(exists, what);
    }
    let queries: usize =
        panels.iter().filter_map(|one| one["targets"].as_array()).map(Vec::len).sum();
    let excused: usize = named::PANELS.iter().map(|named| named.letters.len()).sum();
    let what = || format!("{excused} of {queries} queries may be empty: expected under a third");
    shipped.faults.expect(excused * 3 < queries, what);
}
