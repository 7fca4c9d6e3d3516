//! The dashboards: the rules of Grafana's own dashboard linter, and those of this project.
//!
//! It reads the classic JSON model. It does not know all options of all panels: a misspelt option
//! that no rule here names passes.
//!
//! Invariant: a panel that passes has a question, a unit, a place of its own, and targets whose
//! legends name labels that are there.

use std::collections::BTreeSet;

use serde_json::Value;

use super::promql::{self, Known, Place};

/// The data source of every panel and query.
const SOURCE: &str = "${datasource}";
/// Columns of Grafana's grid.
const COLUMNS: u64 = 24;
/// Panel types that all versions since 10 draw, with the data that they need.
const TYPES: [&str; 4] = ["timeseries", "stat", "state-timeline", "table"];
/// Units that panels may have; amounts are binary, as everywhere.
const UNITS: [&str; 9] =
    ["bytes", "binBps", "percentunit", "s", "short", "none", "cpm", "ops", "reqps"];
/// The events that every dashboard marks in the time of its panels.
const ANNOTATIONS: [&str; 5] = ["deploy", "restart", "unload", "rejection", "OOM kill"];
/// The variables, in their order.
const VARIABLES: [&str; 6] = ["datasource", "namespace", "job", "pod", "instance", "device"];
/// The labels of a target that tell nothing more to a reader who sees `instance`.
const IMPLIED: [&str; 3] = ["namespace", "job", "pod"];
/// By which the dashboards find each other.
const TAG: &str = "lowtide";

/// The findings in a dashboard.
#[derive(Debug, Default)]
pub(crate) struct Findings {
    pub(crate) metrics: BTreeSet<String>,
    pub(crate) faults: Vec<String>,
}

impl Findings {
    fn expect(&mut self, holds: bool, what: impl Into<String>) {
        if !holds {
            self.faults.push(what.into());
        }
    }
}

/// Checks a dashboard.
pub(crate) fn check(dashboard: &Value, known: &Known) -> Findings {
    let mut found = Findings::default();
    head(dashboard, &mut found);
    variables(dashboard, &mut found);
    annotations(dashboard, known, &mut found);
    links(dashboard, &mut found);
    let panels = list(dashboard, "panels");
    found.expect(panels.len() > 4, "the dashboard is empty");
    let mut ids = BTreeSet::new();
    for panel in panels {
        let title = text(panel, "/title");
        found.expect(!title.is_empty(), format!("panel {} has no title", panel["id"]));
        let id = panel["id"].as_u64();
        found.expect(
            id.is_some_and(|id| ids.insert(id)),
            format!("{title}: id {} is none, or stands twice", panel["id"]),
        );
        if text(panel, "/type") == "row" {
            // A collapsed row holds its panels inside, where nothing here would look.
            found.expect(panel["collapsed"] == false, format!("{title}: a collapsed row"));
        } else {
            self::panel(panel, title, known, &mut found);
        }
    }
    places(panels, &mut found);
    found
}

fn head(dashboard: &Value, found: &mut Findings) {
    let version = dashboard["schemaVersion"].as_u64().unwrap_or(0);
    found.expect((39..=42).contains(&version), format!("schemaVersion {version}: 39 to 42"));
    found.expect(dashboard.get("id") == Some(&Value::Null), "id: expected null");
    found.expect(!text(dashboard, "/uid").is_empty(), "uid: expected a fixed one");
    found.expect(!text(dashboard, "/title").is_empty(), "no title");
    found.expect(dashboard.get("__inputs").is_none(), "__inputs: provisioning does not fill them");
    found.expect(dashboard["graphTooltip"] == 1, "graphTooltip: expected 1, a shared crosshair");
    found.expect(dashboard["editable"] == false, "editable: expected false");
}

fn variables(dashboard: &Value, found: &mut Findings) {
    let variables = dashboard.pointer("/templating/list").and_then(Value::as_array);
    let variables = variables.map_or(&[][..], Vec::as_slice);
    let names: Vec<_> = variables.iter().map(|variable| text(variable, "/name")).collect();
    found.expect(
        names == VARIABLES,
        format!("variables {names:?}: expected {}", VARIABLES.join(", ")),
    );
    for variable in variables {
        let name = text(variable, "/name");
        if name == "datasource" {
            let prometheus = text(variable, "/query") == "prometheus";
            found.expect(
                text(variable, "/type") == "datasource" && prometheus,
                "datasource: expected a data source of type prometheus",
            );
            continue;
        }
        let mut expect = |holds, what| found.expect(holds, format!("variable {name}: {what}"));
        expect(text(variable, "/type") == "query", "expected type query");
        expect(text(variable, "/datasource/uid") == SOURCE, "expected the chosen data source");
        expect(variable["multi"] == true && variable["includeAll"] == true, "expected multi, all");
        // It matches series without the label too.
        expect(text(variable, "/allValue") == ".*", "expected allValue .*");
        expect(variable["refresh"] == 2, "expected refresh 2, on a change of time");
        let query = text(variable, "/query/query");
        // What every service publishes, with a device or without.
        let metric = if name == "device" {
            "lowtide_device_rollback_failures_total"
        } else {
            "lowtide_build_info"
        };
        let asks = query.strip_prefix(&format!("label_values({metric}"));
        let label = asks.and_then(|rest| rest.strip_suffix(&format!(", {name})")));
        expect(label.is_some(), "expected the values of its label in a metric of every service");
    }
}

/// Checks that events are marked from counters, so that every viewer sees them at any time.
fn annotations(dashboard: &Value, known: &Known, found: &mut Findings) {
    let list = dashboard.pointer("/annotations/list").and_then(Value::as_array);
    let list = list.map_or(&[][..], Vec::as_slice);
    let names: Vec<_> = list.iter().map(|one| text(one, "/name")).collect();
    found.expect(names == ANNOTATIONS, format!("annotations {names:?}: expected {ANNOTATIONS:?}"));
    for one in list {
        let name = text(one, "/name");
        let mut expect = |holds, what| found.expect(holds, format!("annotation {name}: {what}"));
        expect(text(one, "/datasource/uid") == SOURCE, "expected the chosen data source");
        expect(one["enable"] == true, "expected it enabled");
        expect(!text(one, "/iconColor").is_empty(), "expected a colour");
        let expr = text(one, "/expr");
        expect(expr.ends_with("> 0"), "expected what is above 0");
        let query = promql::check(expr, Place::Panel, known);
        found.faults.extend(query.faults.iter().map(|fault| format!("annotation {name}: {fault}")));
        let labels = query.labels.unwrap_or_default();
        for label in placeholders(text(one, "/textFormat")).difference(&labels) {
            found.faults.push(format!("annotation {name}: its series have no label {label}"));
        }
    }
}

/// Each dashboard leads to the others, with what was chosen.
fn links(dashboard: &Value, found: &mut Findings) {
    let is_tagged = list(dashboard, "tags").iter().any(|tag| tag == TAG);
    found.expect(is_tagged, format!("tags: expected {TAG}"));
    let leads = list(dashboard, "links").iter().any(|link| {
        link["type"] == "dashboards"
            && list(link, "tags").iter().any(|tag| tag == TAG)
            && link["includeVars"] == true
            && link["keepTime"] == true
    });
    found.expect(leads, format!("links: expected one to the dashboards with the tag {TAG}"));
}

fn panel(panel: &Value, title: &str, known: &Known, found: &mut Findings) {
    let kind = text(panel, "/type");
    found.expect(TYPES.contains(&kind), format!("{title}: type {kind} is none of {TYPES:?}"));
    let question = text(panel, "/description");
    found.expect(question.contains('?'), format!("{title}: its description asks no question"));
    let unit = text(panel, "/fieldConfig/defaults/unit");
    found.expect(UNITS.contains(&unit), format!("{title}: unit {unit:?} is none of {UNITS:?}"));
    let source = text(panel, "/datasource/uid");
    found.expect(source == SOURCE, format!("{title}: data source {source:?}"));
    let targets = list(panel, "targets");
    found.expect(!targets.is_empty(), format!("{title}: no query"));
    let (mut letters, mut legends) = (BTreeSet::new(), BTreeSet::new());
    for target in targets {
        found.expect(
            letters.insert(text(target, "/refId")),
            format!("{title}: refId {} stands twice", target["refId"]),
        );
        let source = text(target, "/datasource/uid");
        found.expect(source == SOURCE, format!("{title}: a query of data source {source:?}"));
        let query = promql::check(text(target, "/expr"), Place::Panel, known);
        found.faults.extend(query.faults.iter().map(|fault| format!("{title}: {fault}")));
        found.metrics.extend(query.metrics);
        let legend = text(target, "/legendFormat");
        if kind == "table" {
            continue;
        }
        found.expect(
            !legend.is_empty() && legends.insert(legend),
            format!("{title}: legend {legend:?} is none, or stands twice"),
        );
        let (named, labels) = (placeholders(legend), query.labels.unwrap_or_default());
        for label in named.difference(&labels) {
            found.faults.push(format!("{title}: no series has the label {label} of its legend"));
        }
        // Two series under one legend could not be told apart.
        let told = |label: &&String| !IMPLIED.contains(&label.as_str());
        for label in labels.difference(&named).filter(told) {
            found.faults.push(format!("{title}: the legend {legend:?} leaves {label} out"));
        }
    }
}

/// The labels that a legend or a template names: `{{label}}`.
pub(crate) fn placeholders(legend: &str) -> BTreeSet<String> {
    let parts = legend.split("{{").skip(1);
    parts.filter_map(|part| Some(part.split_once("}}")?.0.trim().to_owned())).collect()
}

/// Panels lie inside the grid, one after the other and none over another.
fn places(panels: &[Value], found: &mut Findings) {
    let mut taken: Vec<(&str, [u64; 4])> = Vec::new();
    for panel in panels {
        let title = text(panel, "/title");
        let side = |name: &str| panel["gridPos"][name].as_u64().unwrap_or(u64::MAX / 4);
        let [x, y, w, h] = ["x", "y", "w", "h"].map(side);
        let fits = w > 0 && h > 0 && x + w <= COLUMNS;
        found.expect(fits, format!("{title}: {x}+{w} of {COLUMNS} columns, {h} lines"));
        for (other, [ox, oy, ow, oh]) in &taken {
            let apart = x >= ox + ow || *ox >= x + w || y >= oy + oh || *oy >= y + h;
            found.expect(apart, format!("{title} lies over {other}"));
        }
        taken.push((title, [x, y, w, h]));
    }
    found.expect(
        taken.is_sorted_by_key(|(_, [x, y, ..])| (*y, *x)),
        "panels stand in another order than they lie",
    );
}

fn text<'a>(value: &'a Value, pointer: &str) -> &'a str {
    value.pointer(pointer).and_then(Value::as_str).unwrap_or_default()
}

fn list<'a>(value: &'a Value, name: &str) -> &'a [Value] {
    value[name].as_array().map_or(&[], Vec::as_slice)
}
