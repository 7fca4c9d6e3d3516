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
mod promql;
mod rules;

use std::collections::BTreeSet;

use serde_json::Value;

use self::promql::Known;
use self::rules::Rules;
use super::names::TABLE;
use crate::tree::{Faults, Tree};

/// The shipped files that are compared.
struct Shipped<'a> {
    tree: &'a Tree,
    faults: &'a Faults,
    dashboards: Vec<Value>,
}

/// The dashboards that are shipped, in the order of their links.
const DASHBOARDS: [&str; 5] = ["overview", "heap", "device", "pressure_and_admission", "resources"];

impl<'a> Shipped<'a> {
    fn read(tree: &'a Tree, faults: &'a Faults) -> Self {
        let dashboard = |name| {
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
    faults.extend(missing(&shipped.metrics()));
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
    for (name, dashboard) in DASHBOARDS.iter().zip(&shipped.dashboards) {
        let faults = layout::check(dashboard, &Known::table()).faults;
        let at = |fault| format!("dashboards/{name}.json: {fault}");
        shipped.faults.extend(faults.into_iter().map(at));
    }
    for file in &shipped.tree.files {
        let name = file.name.strip_prefix("dashboards/").and_then(|n| n.strip_suffix(".json"));
        let is_known = name.is_none_or(|name| name.contains('/') || DASHBOARDS.contains(&name));
        shipped.faults.expect(is_known, || format!("{}: not in the list of dashboards", file.name));
    }
    let uids: BTreeSet<_> = shipped.dashboards.iter().map(|one| one["uid"].to_string()).collect();
    shipped.faults.expect(uids.len() == DASHBOARDS.len(), || format!("equal uids: {uids:?}"));
}

/// The metrics of the table that are not among these.
fn missing(shown: &BTreeSet<String>) -> Vec<String> {
    TABLE
        .iter()
        .filter(|metric| !shown.contains(metric.name))
        .map(|metric| format!("{}: on no panel", metric.name))
        .collect()
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
        let exists = !named.letters.is_empty() && named.letters.chars().all(has);
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
