//! Checks the documents about metrics: the lists of metrics and events, the runbook, the example
//! configuration.
//!
//! It compares names only; it cannot tell whether a sentence is true.
//!
//! Invariant: `docs/METRICS.md = HEAD + names::markdown()`.

use serde_json::Value;

use super::rules::{RUNBOOK, Rules, items, yaml};
use crate::text::names::{self, TABLE};

/// The text above the table.
const HEAD: &str = "\
# Metrics

This table lists every metric that lowtide publishes. It is generated from `src/metrics/names.rs`:
`cargo xtask text --write`. A `Memory` publishes the metrics once a second by default, through the [`metrics`](https://docs.rs/metrics) facade, to the recorder that the
application installed. Counters start at 0 with the process. A histogram has the series `_bucket`,
`_sum` and `_count`. Prometheus adds the labels `job` and `instance`.
[OPERATING.md](OPERATING.md) explains what to do if a value is too high.

Metrics of the tier `detail` are published only with `LOWTIDE_METRICS=detail`. The metrics
`process_*` are those of other Prometheus clients; with `LOWTIDE_PROCESS_METRICS=off` they are left
to the application. The last column has the metric of
OpenTelemetry's semantic conventions with the same or nearly the same meaning, for those who
translate; lowtide publishes none of these.

Names, types and labels of metrics are part of the API: they change only with a new major version,
and before 1.0 only with a new minor version. The changelog names each change; new metrics and new
values of a label may come with any version.

Label values that the table does not list:

- `arena` and `resource`: the names that the application chose.
- `device`: the UUID of the device, or its number in the `Memory` (from 0) if the driver knows no
  UUID, as with the host driver.
- `budget`: `host` or `device`.
- `size_class`: the upper bound of the class, such as `2MiB`, or `larger`.
- `method` and `route`: the HTTP method, and the pattern of axum, gRPC method or first path segment
  that [named the route](OPERATING.md#memory-by-route-and-by-tenant). `tenant`: the name that the
  application gave. `other` stands for all beyond 64 routes and 32 tenants.
- `version`: the version of the crate. `profile`: `low-memory`, `balanced` or `throughput`.
  `service_version`: what `LOWTIDE_SERVICE_VERSION` or `Builder::service_version` says, or
  `unknown`.

The series of each `trigger`, `reason`, `outcome` and `to` exist from the start, with the value 0.
The series of a size class, a route and a tenant appear with its first request.

*Retained* bytes are physical memory that nothing uses. jemalloc's `stats.retained` is something
else: it is `lowtide_heap_unbacked_bytes` here. A *granule* is the unit, 2 MiB on most GPUs, in
which an arena commits memory.

## Saturation

`lowtide_saturation_ratio`, 0 to 1, is for [autoscalers](DEPLOYING.md#autoscaling). For each budget,
those of the host and of devices, lowtide adds a thirty-second of the ceiling to what requests have
reserved, and divides the sum by the room for requests; the largest quotient counts. The room is the
ceiling less all memory that no request owns, divided by the correction factor. Memory that lowtide
would release by itself is not counted: neither unused pages nor resources that are loaded and not
in use. A leak makes the room smaller, so the saturation of a leaking service rises, even without
requests.

A moment counts as 1 while requests wait for memory, for a second after each request that is
rejected or cancelled for lack of it (`too_large` is not counted: no instance would admit it), at
level critical, while memory is exhausted, and once a device is lost. It counts as 0 without a
limit. Requests that are rejected because the service shuts down do not raise it.

Load comes in bursts and scrapes are rare, so the value is a mean over time: the last 15 s make 63 %
of it, and the last 35 s 90 %.

## All metrics

";

/// The levels of events.
const LEVELS: &[&str] = &["error", "warn", "info", "debug", "trace"];

/// Returns the contents that `docs/METRICS.md` should have.
pub(crate) fn metrics() -> String {
    format!("{HEAD}{}", names::markdown())
}

/// Alerts without a section, and sections, metrics and panels (*in italics*) that do not exist.
pub(crate) fn runbook(text: &str, rules: &Rules, dashboards: &[Value]) -> Vec<String> {
    let mut faults = Vec::new();
    let alerts = rules.alerts();
    let headings: Vec<_> =
        text.lines().filter_map(|line| Some(line.strip_prefix("### ")?.trim())).collect();
    for alert in &alerts {
        if headings.iter().filter(|heading| *heading == alert).count() != 1 {
            faults.push(format!("{alert}: expected one section of this name in {RUNBOOK}"));
        }
    }
    for heading in headings.iter().filter(|heading| heading.starts_with("Lowtide")) {
        if !alerts.contains(heading) {
            faults.push(format!("{heading}: a section for an alert that does not exist"));
        }
    }
    for word in text.split(|c: char| !c.is_ascii_alphanumeric() && c != '_') {
        let ours = word.starts_with("lowtide_") && !word.ends_with('_');
        if ours && TABLE.iter().all(|metric| metric.name != word) {
            faults.push(format!("{word}: {RUNBOOK} names a metric that does not exist"));
        }
    }
    let panels: Vec<_> =
        dashboards.iter().filter_map(|one| one["panels"].as_array()).flatten().collect();
    for title in italics(text) {
        if !panels.iter().any(|panel| panel["title"] == *title) {
            faults.push(format!("{title}: {RUNBOOK} names a panel that does not exist"));
        }
    }
    faults
}

/// Events of the source without a row of their name and level in the runbook, and rows without an
/// event. `sources` are the names and texts of files.
pub(crate) fn events(sources: &[(String, String)], text: &str) -> Vec<String> {
    let mut faults = Vec::new();
    let mut rows: Vec<_> = text
        .lines()
        .filter_map(|line| line.strip_prefix("| `")?.split_once("` | "))
        .filter_map(|(event, rest)| Some((event, rest.split_once(" | ")?.0)))
        .filter(|(_, level)| LEVELS.contains(level))
        .map(|row| (row, false))
        .collect();
    for (name, source) in sources {
        for (at, start) in source.match_indices("log!(") {
            let Some((level, rest)) = source[at + start.len()..].split_once(',') else { continue };
            let level = level.trim();
            if !LEVELS.contains(&level) {
                continue;
            }
            // The message is the last of the arguments, and has no quotes in it.
            let parts: Vec<_> = rest.split('"').collect();
            let is_last = |after: &str| after.trim_start_matches([',', ' ', '\n']).starts_with(')');
            let message = parts.windows(2).skip(1).step_by(2).find(|pair| is_last(pair[1]));
            let message = message.map_or("{}", |pair| pair[0]);
            if message.contains('{') {
                continue; // a note, in its own words
            }
            match rows.iter_mut().find(|(row, _)| *row == (message, level)) {
                Some((_, found)) => *found = true,
                None => faults.push(format!("{name}: {message:?} ({level}) is not in {RUNBOOK}")),
            }
        }
    }
    let stale = rows.iter().filter(|(_, found)| !found);
    faults.extend(stale.map(|((event, _), _)| format!("{event:?}: no such event in the source")));
    faults
}

/// Returns the texts between single stars, their lines joined; stars in code are ignored.
fn italics(text: &str) -> Vec<String> {
    let prose: String = text.split("```").step_by(2).collect();
    let lines = prose.replace("**", "").replace("\n* ", "\n");
    let parts = lines.split('*').skip(1).step_by(2);
    parts.map(|part| part.split_whitespace().collect::<Vec<_>>().join(" ")).collect()
}

/// Returns the inconsistencies in the example configuration of Prometheus and Grafana.
pub(crate) fn configuration(prometheus: &str, source: &str, provider: &str) -> Vec<String> {
    let mut faults = Vec::new();
    let mut expect = |holds: bool, what: &str| {
        if !holds {
            faults.push(what.to_owned());
        }
    };
    let prometheus = yaml(prometheus);
    expect(
        items(&prometheus["rule_files"]).iter().any(|f| f.as_str() == Some("lowtide.rules.yml")),
        "Prometheus does not load the rules",
    );
    expect(!items(&prometheus["scrape_configs"]).is_empty(), "Prometheus scrapes nothing");
    let interval = prometheus["global"]["scrape_interval"].as_str();
    let source = yaml(source);
    let sources = items(&source["datasources"]);
    expect(source["apiVersion"].as_i64() == Some(1), "data sources: expected apiVersion 1");
    expect(sources.len() == 1, "expected one data source");
    for source in sources {
        expect(source["type"].as_str() == Some("prometheus"), "a data source of another type");
        expect(
            interval.is_some() && source["jsonData"]["timeInterval"].as_str() == interval,
            "timeInterval is not the scrape interval: $__rate_interval would be wrong",
        );
    }
    let provider = yaml(provider);
    let providers = items(&provider["providers"]);
    expect(provider["apiVersion"].as_i64() == Some(1), "dashboards: expected apiVersion 1");
    expect(
        providers.iter().any(|provider| {
            provider["type"].as_str() == Some("file")
                && provider["options"]["path"].as_str().is_some()
        }),
        "no provider of dashboards reads files",
    );
    faults
}
