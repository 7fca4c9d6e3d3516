//! Tests of the checks: each changes one thing in a shipped file, and expects one kind of fault.
//!
//! Another test expects that the unchanged files pass. A case fails if its change no longer
//! applies.
//!
//! Invariant: each check has a case.

use std::collections::BTreeSet;

use serde_json::{Value, json};

use super::promql::{self, Known, Place};
use super::rules::Rules;
use super::{DASHBOARDS, MetricsTier, Shipped, documents, layout, missing, of_other_tiers};
use crate::tree::{self, Faults, Tree};

/// Calls with what is shipped.
fn with<T>(ask: impl FnOnce(&Shipped<'_>) -> T) -> T {
    let (tree, faults) = (Tree::read(&tree::root()).expect("the repository"), Faults::default());
    let answer = ask(&Shipped::read(&tree, &faults));
    assert_eq!(faults.sorted(), [""; 0]);
    answer
}

fn read(name: &str) -> String {
    with(|shipped| shipped.text(name).to_owned())
}

fn dashboards() -> Vec<Value> {
    with(|shipped| shipped.dashboards.clone())
}

fn dashboard(name: &str) -> Value {
    let at = DASHBOARDS.iter().position(|(other, _)| *other == name).expect("a dashboard");
    dashboards().remove(at)
}

/// Expects that one of the faults says this.
#[track_caller]
fn finds(expected: &str, faults: &[String]) {
    assert!(faults.iter().any(|fault| fault.contains(expected)), "{expected:?}: {faults:?}");
}

/// The faults of the dashboard with a value put at a pointer, where there must be one already.
#[track_caller]
fn changed(pointer: &str, value: Value) -> Vec<String> {
    let mut dashboard = dashboard("overview");
    *dashboard.pointer_mut(pointer).expect("a value to change") = value;
    layout::check(&dashboard, &Known::table()).faults
}

#[test]
fn faults_of_the_dashboards_head_and_variables_are_found() {
    for (pointer, value, expected) in [
        ("/schemaVersion", json!(22), "schemaVersion"),
        ("/id", json!(7), "id: expected null"),
        ("/uid", json!(""), "uid"),
        ("/title", json!(""), "no title"),
        ("/graphTooltip", json!(0), "graphTooltip"),
        ("/editable", json!(true), "editable"),
        ("/templating/list/0/name", json!("ds"), "expected datasource, namespace"),
        ("/templating/list/0/query", json!("loki"), "of type prometheus"),
        ("/templating/list/1/type", json!("custom"), "variable namespace: expected type query"),
        ("/templating/list/1/datasource/uid", json!("abc"), "the chosen data source"),
        ("/templating/list/1/multi", json!(false), "expected multi"),
        ("/templating/list/2/allValue", json!(".+"), "allValue"),
        ("/templating/list/2/refresh", json!(1), "refresh"),
        ("/templating/list/4/query/query", json!("label_values(up, instance)"), "the values of"),
        ("/templating/list/5/query/query", json!("label_values(up, device)"), "the values of"),
        ("/tags", json!([]), "tags: expected lowtide"),
        ("/links/0/tags", json!(["other"]), "links: expected"),
        ("/links/0/includeVars", json!(false), "links: expected"),
        ("/annotations/list/0/name", json!("nap"), "annotations"),
        ("/annotations/list/0/datasource/uid", json!("abc"), "annotation deploy: expected the"),
        ("/annotations/list/1/enable", json!(false), "annotation restart: expected it enabled"),
        ("/annotations/list/2/iconColor", json!(""), "annotation unload: expected a colour"),
        ("/annotations/list/3/expr", json!("lowtide_nods > 0"), "is in no table"),
        ("/annotations/list/3/expr", json!("lowtide_diagnostics"), "expected what is above 0"),
        ("/annotations/list/3/textFormat", json!("{{arena}}"), "have no label arena"),
    ] {
        finds(expected, &changed(pointer, value));
    }
    let mut dashboard = dashboard("overview");
    dashboard["__inputs"] = json!([]);
    finds("__inputs", &layout::check(&dashboard, &Known::table()).faults);
}

#[test]
fn faults_of_panels_are_found() {
    // Panel 0 is a row, panel 2 a stat, and panel 7 has several series.
    for (pointer, value, expected) in [
        ("/panels/0/collapsed", json!(true), "collapsed"),
        ("/panels/2/id", json!(1), "stands twice"),
        ("/panels/2/title", json!(""), "no title"),
        ("/panels/2/description", json!("Memory."), "asks no question"),
        ("/panels/2/type", json!("graph"), "type graph"),
        ("/panels/2/fieldConfig/defaults/unit", json!(""), "unit"),
        ("/panels/2/fieldConfig/defaults/unit", json!("decbytes"), "unit"),
        ("/panels/2/datasource/uid", json!("abc"), "data source \"abc\""),
        ("/panels/2/targets", json!([]), "no query"),
        ("/panels/2/targets/0/datasource/uid", json!("abc"), "a query of data source"),
        ("/panels/2/targets/0/legendFormat", json!(""), "legend"),
        ("/panels/7/targets/1/refId", json!("A"), "refId"),
        ("/panels/7/targets/0/legendFormat", json!("{{arena}} {{instance}}"), "label arena"),
        ("/panels/7/targets/0/legendFormat", json!("live"), "leaves instance out"),
        ("/panels/7/gridPos/w", json!(9), "lies over"),
        ("/panels/7/gridPos/x", json!(17), "of 24 columns"),
        ("/panels/2/gridPos/y", json!(500), "in another order"),
    ] {
        finds(expected, &changed(pointer, value));
    }
}

#[test]
fn faults_of_a_panels_query_are_found() {
    let selected = r#"{namespace=~"$namespace", job=~"$job", pod=~"$pod", instance=~"$instance"}"#;
    for (query, expected) in [
        ("lowtide_heap_live_byte@", "is in no table"),
        ("lowtide_sampler_duration_seconds@", "is in no table"),
        ("sum by (job (lowtide_heap_live_bytes@)", "in: sum by (job ("),
        ("lowtide_heap_live_bytes", "expected job=~\"$job\""),
        (r#"lowtide_heap_live_bytes{job=~"$job"}"#, "expected instance=~"),
        (r#"lowtide_heap_live_bytes{job="$job", instance=~"$instance"}"#, "expected job=~"),
        (r#"lowtide_heap_live_bytes{job=~"$job"}"#, "expected namespace=~"),
        ("increase(lowtide_heap_purges_total@[1h])", "panels have no other range"),
        (
            "lowtide_heap_live_bytes@ * on (job) group_left (arena) lowtide_build_info@",
            "label arena",
        ),
        ("lowtide_device_allocs_total@", "a total without rate"),
        ("rate(lowtide_heap_live_bytes@[$__rate_interval])", "a gauge in rate"),
        ("deriv(lowtide_device_allocs_total@[$__rate_interval])", "a total without rate"),
        ("rate(lowtide_device_allocs_total@[5m])", "panels have no other range"),
        ("sum by (arena) (lowtide_heap_live_bytes@)", "aggregated by arena"),
        ("lowtide_device_leases@", "expected device=~"),
        ("sum by (device) (topk(3, lowtide_heap_live_bytes@))", "aggregated by device"),
        ("lowtide_heap_live_bytes@ / lowtide_device_live_bytes@", "never match"),
        ("lowtide_heap_live_bytes@ / on (arena) lowtide_device_live_bytes@", "matched by arena"),
        (
            "histogram_quantile(0.9, sum by (job, instance) \
             (rate(lowtide_sampler_duration_seconds_bucket@[$__rate_interval])))",
            "without le",
        ),
        ("abs(lowtide_heap_live_bytes@)", "abs: a function that this check does not know"),
    ] {
        let query = query.replace('@', selected);
        finds(expected, &promql::check(&query, Place::Panel, &Known::table()).faults);
    }
    let labelled = r#"lowtide_heap_live_bytes{arena="a"}"#;
    let found = promql::check(labelled, Place::Rule, &Known::table());
    finds("has no label arena", &found.faults);
}

#[test]
fn faults_of_rules_are_found() {
    let text = read("dashboards/lowtide.rules.yml");
    for (from, to, expected) in [
        ("lowtide_heap_live_bytes > 0", "lowtide_heap_alive_bytes > 0", "is in no table"),
        ("bytes / lowtide_pressure_limit_bytes", "bytes / lowtide_device_lost", "never match"),
        ("instance_arena:lowtide", "instance_resource:lowtide", "no label resource"),
        ("instance:lowtide_pressure_required:min10m", "lowtide_pressure_required", "level:metric"),
        ("alert: LowtideHeapFragmented", "alert: HeapFragmented", "the prefix"),
        ("alert: LowtideHeapFragmented", "alert: LowtideHeapRetainedHigh", "stands twice"),
        ("severity: critical", "severity: page", "expected a severity"),
        ("summary: '{{ $labels.instance }} rejects", "about: '{{ $labels.instance }}", "a summary"),
        ("description: Required memory", "text: Required memory", "a description"),
        ("#lowtideheapretainedhigh", "#heap", "expected runbook"),
        ("{{ $labels.resource }} on", "{{ $labels.arena }} on", "$labels.arena is no label"),
    ] {
        assert!(text.contains(from), "{from:?} is not in the rules any more");
        finds(expected, &Rules::read(&text.replace(from, to)).check().faults);
    }
}

#[test]
fn an_alert_without_a_firing_or_a_silent_test_is_found() {
    let rules = Rules::read(&read("dashboards/lowtide.rules.yml"));
    let tests = read("dashboards/tests/lowtide.rules.test.yml");
    let renamed = tests.replace("alertname: LowtideRequestsShed", "alertname: Other");
    finds("LowtideRequestsShed is not tested firing", &rules.untested(&renamed));
    finds("LowtideRequestsShed is not tested silent", &rules.untested(&renamed));
}

#[test]
fn a_metric_that_nothing_shows_is_found() {
    let mut shown = with(|shipped| shipped.metrics());
    assert!(shown.remove("lowtide_device_state"));
    finds("lowtide_device_state: published by default, on no panel", &missing(&shown));
    let detail = BTreeSet::from(["lowtide_device_leases".to_owned()]);
    finds("is of the tier detail", &of_other_tiers("f", MetricsTier::Basic, &detail));
    assert!(of_other_tiers("f", MetricsTier::Detail, &detail).is_empty());
}

#[test]
fn faults_of_the_documents_are_found() {
    let rules = Rules::read(&read("dashboards/lowtide.rules.yml"));
    let text = read("docs/OPERATING.md");
    let sources = with(|shipped| shipped.sources());
    for (from, to, expected) in [
        ("### LowtideRequestsShed", "### Requests", "LowtideRequestsShed: expected one section"),
        ("### LowtideRequestsShed", "### LowtideOther", "LowtideOther: a section for an alert"),
        ("lowtide_heap_", "lowtide_pile_", "a metric that does not exist"),
        ("*Correction factor*", "*Multiplicity*", "Multiplicity: docs/OPERATING.md names a panel"),
    ] {
        assert!(text.contains(from), "{from:?} is not in the runbook any more");
        finds(expected, &documents::runbook(&text.replace(from, to), &rules, &dashboards()));
    }
    for (from, to, expected) in [
        ("| `idle memory decayed` | debug |", "| - | debug |", "\"idle memory decayed\" (debug)"),
        ("| `idle memory decayed` | debug |", "| `idle memory decayed` | info |", "(debug) is not"),
        ("| `memory purged` |", "| `purged twice` |", "\"purged twice\": no such event"),
    ] {
        assert!(text.contains(from), "{from:?} is not in the runbook any more");
        finds(expected, &documents::events(&sources, &text.replace(from, to)));
    }
    let prometheus = read("dashboards/prometheus.yml");
    let source = read("dashboards/provisioning/datasources/prometheus.yml");
    let provider = read("dashboards/provisioning/dashboards/lowtide.yml");
    for (file, from, to, expected) in [
        (0, "- lowtide.rules.yml", "- other.yml", "does not load the rules"),
        (0, "scrape_interval: 15s", "scrape_interval: 1m", "timeInterval is not"),
        (1, "type: prometheus", "type: loki", "another type"),
        (2, "type: file", "type: git", "reads files"),
    ] {
        let mut files = [prometheus.clone(), source.clone(), provider.clone()];
        assert!(files[file].contains(from), "{from:?} is not in the configuration any more");
        files[file] = files[file].replace(from, to);
        finds(expected, &documents::configuration(&files[0], &files[1], &files[2]));
    }
}
