//! The names in dashboards, rules and deployment files: each metric is in the table of the code,
//! each variable is a setting, and each alert has its tests and its section of the runbook.
//!
//! That rules evaluate is promtool's to check; that each query finds something, the job
//! `dashboards`, which asks them of a real Prometheus.
//!
//! Invariant: `docs/METRICS.md` ends with the lists of the table.

use std::collections::BTreeSet;

use super::names::{Metric, MetricKind, MetricsTier, TABLE};
use crate::tree::{Faults, Source, Tree};

const RULES: &str = "dashboards/lowtide.rules.yml";
const TESTS: &str = "dashboards/tests/lowtide.rules.test.yml";
const RUNBOOK: &str = "docs/OPERATING.md";
const METRICS: &str = "docs/METRICS.md";
/// The dashboard of metrics that are published only on request.
const DETAIL: &str = "dashboards/detail.json";

/// Checks all of them.
pub(super) fn check(tree: &Tree, faults: &Faults) {
    let rules = tree.text(RULES, faults);
    let records: BTreeSet<_> = after(rules, "- record: ").collect();
    let mut shown = BTreeSet::new();
    for file in &tree.files {
        let is_shown = file.is_under("dashboards");
        if !is_shown && !is_of_deployment(file) {
            continue;
        }
        for name in words(&file.text, "lowtide_", "process_") {
            match metric(name) {
                Some(metric) => {
                    let is_published = metric.tier == MetricsTier::Basic || file.name == DETAIL;
                    faults.expect(is_published || !is_shown, || {
                        format!("{}: {name} is of the tier {}", file.name, metric.tier)
                    });
                    if is_shown {
                        shown.insert(metric.name);
                    }
                }
                None => faults.expect(records.iter().any(|record| record.contains(name)), || {
                    format!("{}: {name}: no such metric", file.name)
                }),
            }
        }
    }
    for Metric { name, tier, .. } in TABLE {
        let is_needless = *tier != MetricsTier::Basic || name.starts_with("process_");
        faults.expect(is_needless || shown.contains(name), || {
            format!("{name}: published by default, on no panel and in no rule")
        });
    }
    check_alerts(tree, rules, faults);
    check_settings(tree, faults);
    let page = tree.text(METRICS, faults);
    faults.expect(written(page) == page, || {
        format!("{METRICS}: not the lists of the code: run `cargo xtask text --write`")
    });
}

/// Returns the page of metrics with the lists of the code.
pub(super) fn write(tree: &Tree) -> (String, String) {
    (METRICS.to_owned(), written(tree.file(METRICS).map_or("", |page| &page.text)))
}

fn written(page: &str) -> String {
    let before = page.split("## Published by default").next().unwrap_or(page);
    let list = |tier| TABLE.iter().filter(move |it| it.tier == tier).map(line).collect::<String>();
    let (basic, detail) = (list(MetricsTier::Basic), list(MetricsTier::Detail));
    let heading = "## Published with `LOWTIDE_METRICS=detail`";
    format!("{before}## Published by default\n\n{basic}\n{heading}\n\n{detail}")
}

/// Returns the line of a metric: its name with its labels, and its meaning.
fn line(metric: &Metric) -> String {
    let labels = format!("{{{}}}", metric.labels.join(",")).replace("{}", "");
    format!("- `{}{labels}`: {}\n", metric.name, metric.help)
}

fn is_of_deployment(file: &Source) -> bool {
    file.is_under("deploy") || ["Dockerfile", "compose.yaml"].contains(&&*file.name)
}

/// Returns the metric of a series.
fn metric(series: &str) -> Option<&'static Metric> {
    let is_it = |metric: &&Metric| {
        let end = series.strip_prefix(metric.name).unwrap_or("?");
        let is_histogram = metric.kind == MetricKind::Histogram;
        end.is_empty() || is_histogram && ["_bucket", "_sum", "_count"].contains(&end)
    };
    TABLE.iter().find(is_it)
}

/// Each alert has a case that fires and one that is silent, and a heading in the runbook.
fn check_alerts(tree: &Tree, rules: &str, faults: &Faults) {
    let (tests, runbook) = (tree.text(TESTS, faults), tree.text(RUNBOOK, faults));
    for alert in after(rules, "- alert: ") {
        let cases = after(tests, "- alertname: ").filter(|name| *name == alert).count();
        faults.expect(cases >= 2, || {
            format!("{TESTS}: {alert} has {cases} cases: expected one that fires, one silent")
        });
        let heading = format!("### {alert}");
        let has_section = runbook.lines().any(|line| line == heading);
        faults.expect(has_section, || format!("{RUNBOOK}: no heading {heading:?}"));
    }
}

/// Each variable that a deployment file sets is a setting.
fn check_settings(tree: &Tree, faults: &Faults) {
    let settings = tree.files.iter().filter(|file| file.is_under("src/config"));
    let settings: String = settings.map(|file| file.text.as_str()).collect();
    for file in tree.files.iter().filter(|file| is_of_deployment(file)) {
        for name in words(&file.text, "LOWTIDE_", "LOWTIDE_") {
            // A comment may name a part: `LOWTIDE_*`.
            let is_known = name.ends_with('_') || settings.contains(&format!("\"{name}\""));
            faults.expect(is_known, || format!("{}: {name}: no such setting", file.name));
        }
    }
}

/// Returns the rest of each line that begins with a mark.
fn after<'a>(text: &'a str, mark: &'a str) -> impl Iterator<Item = &'a str> {
    text.lines().filter_map(move |line| line.trim_start().strip_prefix(mark))
}

/// Returns the words that begin with one of two prefixes and go on.
fn words<'a>(text: &'a str, one: &'a str, other: &'a str) -> impl Iterator<Item = &'a str> {
    let all = text.split(|c: char| !c.is_ascii_alphanumeric() && c != '_');
    all.filter(move |word| {
        [one, other].iter().any(|prefix| word.starts_with(prefix) && word.len() > prefix.len())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The faults of the repository with one text replaced in one file.
    fn faults_of(name: &str, from: &str, to: &str) -> Vec<String> {
        let mut tree = Tree::read(&crate::tree::root()).expect("the repository");
        let file = tree.files.iter_mut().find(|file| file.name == name).expect("the file");
        assert!(file.text.contains(from), "{name}: no {from:?}");
        file.text = file.text.replace(from, to);
        let faults = Faults::default();
        check(&tree, &faults);
        faults.sorted()
    }

    #[test]
    fn a_name_that_does_not_exist_is_found_in_each_kind_of_file() {
        for (name, from, to, expected) in [
            ("dashboards/overview.json", "lowtide_heap_live_bytes", "lowtide_heap_x", "no such m"),
            (
                "dashboards/overview.json",
                "lowtide_heap_live_bytes",
                "lowtide_heap_active_bytes",
                "is of the tier detail",
            ),
            (
                RULES,
                "record: instance:lowtide_pressure_required:min10m",
                "record: a:b:c",
                "no such metric",
            ),
            (
                TESTS,
                "- alertname: LowtideOomKill",
                "- alertname: Other",
                "LowtideOomKill has 0 cases",
            ),
            (RUNBOOK, "### LowtideOomKill", "### Other", "no heading \"### LowtideOomKill\""),
            ("Dockerfile", "LOWTIDE_PROFILE", "LOWTIDE_TYPO", "LOWTIDE_TYPO: no such setting"),
            (
                "deploy/keda.yaml",
                "lowtide_saturation_ratio",
                "lowtide_saturation",
                "no such metric",
            ),
            (METRICS, "Requests admitted.", "Requests.", "not the lists of the code"),
        ] {
            let faults = faults_of(name, from, to);
            assert!(faults.iter().any(|fault| fault.contains(expected)), "{expected}: {faults:?}");
        }
        assert_eq!(faults_of(METRICS, "# Metrics", "# Metrics"), [""; 0]);
    }
}
