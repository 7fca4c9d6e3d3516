//! A live scrape against the table of metrics, both ways, and a recorder that comes late.
//!
//! One test installs a recorder, which stays in its process; the other has one of its own.
#![cfg(all(feature = "prometheus", target_os = "linux"))]

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use lowtide::clock::{Clock, ManualClock};
use lowtide::config::DeviceChoice;
use lowtide::decay::DecayTime;
use lowtide::device::Region;
use lowtide::memory::Builder;
use lowtide::metrics::MetricsTier;
use lowtide::metrics::names::{Metric, MetricKind, TABLE};
use lowtide::metrics::record;
use lowtide::service::Endpoints;
use lowtide::{ByteSize, Memory};
use lowtide_admission::{Admission, Budget, Cost, Priority, Reclaimable, UnloadReason};
use lowtide_heap::HostArena;
use metrics_exporter_prometheus::PrometheusBuilder;
use test_fork::test;

use crate::recorder;
use crate::support::{Tree, advance_until};

const SOON: Duration = Duration::from_secs(5);
const TICK: Duration = Duration::from_millis(250);

/// A text in Prometheus' format, taken apart.
#[derive(Debug, Default)]
struct Scrape {
    /// By name.
    help: BTreeMap<String, String>,
    /// By name.
    kind: BTreeMap<String, String>,
    /// Name, labels and value.
    series: Vec<(String, BTreeMap<String, String>, f64)>,
}

impl Scrape {
    fn parse(text: &str) -> Self {
        let mut scrape = Self::default();
        for line in text.lines().filter(|line| !line.is_empty()) {
            if let Some(help) = line.strip_prefix("# HELP ") {
                let (name, help) = help.split_once(' ').expect("a name and a text");
                let before = scrape.help.insert(name.to_owned(), help.to_owned());
                assert_eq!(before, None, "{name} is described twice");
            } else if let Some(kind) = line.strip_prefix("# TYPE ") {
                let (name, kind) = kind.split_once(' ').expect("a name and a type");
                scrape.kind.insert(name.to_owned(), kind.to_owned());
            } else {
                assert!(!line.starts_with('#'), "{line}");
                let (series, value) = line.rsplit_once(' ').expect("a series and a value");
                let (name, labels) = series.split_once('{').unwrap_or((series, "}"));
                let labels =
                    labels.trim_end_matches('}').split(',').filter(|pair| !pair.is_empty());
                let labels =
                    labels.map(|pair| pair.split_once('=').expect("a label and its value"));
                let labels =
                    labels.map(|(label, value)| (label.into(), value.trim_matches('"').into()));
                let value = value.parse().expect("a number");
                scrape.series.push((name.to_owned(), labels.collect(), value));
            }
        }
        scrape
    }

    /// Returns `true` if there is a series of the metric, or of a part of a histogram.
    fn has(&self, metric: &Metric) -> bool {
        self.series.iter().any(|(name, ..)| stem(name, metric).is_some())
    }
}

/// The metric's name where the series belongs to it.
fn stem(series: &str, metric: &Metric) -> Option<&'static str> {
    let rest = series.strip_prefix(metric.name)?;
    let parts: &[&str] =
        if metric.kind == MetricKind::Histogram { &["_bucket", "_sum", "_count"] } else { &[""] };
    parts.contains(&rest).then_some(metric.name)
}

/// Each published series stands in the table, with its labels.
fn every_series_stands_in_the_table(scrape: &Scrape) {
    for (name, labels, _) in &scrape.series {
        let metric = TABLE.iter().find(|metric| stem(name, metric).is_some());
        let metric = metric.unwrap_or_else(|| panic!("{name} is not in the table"));
        let mut expected: BTreeSet<_> = metric.labels.iter().copied().collect();
        if name.ends_with("_bucket") {
            expected.insert("le");
        }
        let found: BTreeSet<_> = labels.keys().map(String::as_str).collect();
        assert_eq!(found, expected, "labels of {name}");
    }
}

/// Metrics that a device has, and host memory does not: `memory_device` looks for these.
const OF_A_DEVICE: [&str; 8] = [
    "lowtide_device_budget_reserved_bytes",
    "lowtide_device_budget_ceiling_bytes",
    "lowtide_device_budget_allowance_bytes",
    "lowtide_device_total_bytes",
    "lowtide_device_free_bytes",
    "lowtide_device_context_overhead_bytes",
    "lowtide_device_unmanaged_bytes",
    "lowtide_device_watermark_released_bytes_total",
];

/// Each metric of the table is published, with type and help.
fn every_metric_of_the_table_is_published(scrape: &Scrape) {
    for metric in TABLE {
        let name = metric.name;
        if OF_A_DEVICE.contains(&name) {
            assert!(!scrape.has(metric), "{name} on the host");
            continue;
        }
        assert!(scrape.has(metric), "{name} is not published");
        let kind = format!("{:?}", metric.kind).to_lowercase();
        assert_eq!(scrape.kind.get(name), Some(&kind), "{name}");
        assert_eq!(scrape.help.get(name).map(String::as_str), Some(metric.help), "{name}");
    }
    let published = TABLE.len() - OF_A_DEVICE.len();
    assert_eq!(scrape.kind.len(), published, "a type without a metric");
}

const COST: ByteSize = ByteSize::mib(1);

/// Brings every metric about: an arena with a limit that refuses, a resource that was loaded,
/// failed and was unloaded, requests admitted and shed, purges.
fn live(memory: &Memory) {
    let arena = memory.devices().open_arena("weights").expect("opens");
    let buffer = arena.alloc::<u8>(1 << 20, Region::Stable).expect("room");
    assert!(arena.alloc::<u8>(64 << 20, Region::Stable).is_err(), "above its limit");
    let model = memory.managed("model", || Ok(1)).register().expect("registered");
    drop(model.acquire_blocking().expect("loads"));
    assert_eq!(model.unload_now(SOON).ok(), Some(true));
    let broken = memory.managed("broken", || Err::<(), _>(lowtide::BoxError::from("planted")));
    let broken = broken.register().expect("registered");
    assert!(broken.acquire_blocking().is_err());
    assert_eq!(model.stats().unloads_total(UnloadReason::Manual), 1);

    let admit = |cost| memory.admission().try_admit(Cost::host(cost)).map(drop);
    assert!(admit(ByteSize::mib(1)).is_ok());
    assert!(admit(ByteSize::gib(1)).is_err(), "larger than the limit");
    assert!(admit(ByteSize::mib(70)).is_err(), "more than is left");
    let exempt = memory.admission().try_admit_with(Cost::host(ByteSize::mib(1)), Priority::Exempt);
    let exempt = exempt.expect("always");
    let state = exempt.state();
    state.routes.of_route("GET", "/users/{id}", true, true).add(COST, COST, None);
    state.tenants.of_tenant("acme").add(COST, COST, None);
    drop(exempt);
    memory.heap().purge().expect("not forked");
    drop(buffer);
}

/// Something idle, so that physical and required differ.
fn leave_idle(memory: &Memory) {
    let arena = memory.devices().open_arena("scratch").expect("opens");
    drop(arena.alloc::<u8>(1 << 20, Region::Dynamic).expect("room"));
}

#[test]
fn the_scrape_and_the_table_say_the_same_once_there_is_a_recorder() {
    let (clock, tree) = (Arc::new(ManualClock::new()), Tree::new(ByteSize::mib(100)));
    let publications = Arc::new(AtomicU64::new(0));
    let count = Arc::clone(&publications);
    let hook = move || {
        count.fetch_add(1, Ordering::SeqCst);
    };
    let hooks = || publications.load(Ordering::SeqCst);
    let memory = Memory::builder()
        .clock(Arc::clone(&clock) as Arc<dyn Clock>)
        .signals(tree.open())
        .device(DeviceChoice::Host)
        .device_limit(ByteSize::mib(4))
        .device_decay(DecayTime::Never)
        .metrics(MetricsTier::Detail)
        .service_version("2.4.1")
        .after_publish(hook)
        .start()
        .expect("starts");
    live(&memory);
    let nothing = Reclaimable::new("cache", || ByteSize::ZERO, |_| ByteSize::ZERO);
    drop(memory.reclaimer(nothing).expect("its name is free"));
    // Those of resources are there while these are loaded.
    let _arena = HostArena::new("kept").expect("an arena of the heap");
    advance_until(&clock, TICK, "it goes on without a recorder", || hooks() >= 3);

    let builder = recorder::builder();
    let recorder = builder.install_recorder().expect("the first of this process");
    assert_eq!(recorder.render(), "", "nothing was kept for it");
    memory.heap().purge().expect("not forked");
    leave_idle(&memory);
    // The recorder may have come in the middle of the first; descriptions follow within seconds.
    advance_until(&clock, TICK, "published twice, and described", || {
        let text = recorder.render();
        let twice = text.lines().any(|line| {
            let count = line.strip_prefix("lowtide_sampler_duration_seconds_count ");
            count.is_some_and(|count| count.parse::<u64>().is_ok_and(|count| count >= 2))
        });
        twice && text.contains("# HELP lowtide_build_info")
    });
    let closed = memory.devices().open_arena("closed").expect("opens");
    let info = |value| {
        let line = format!(
            "lowtide_device_arena_info{{device=\"0\",arena=\"closed\",backend=\"host\"}} {value}"
        );
        recorder.render().contains(&line)
    };
    advance_until(&clock, TICK, "the open arena is published", || info(1));
    closed.close().expect("nothing is live");
    drop(closed);
    advance_until(&clock, TICK, "it is published as gone", || info(0));
    assert!(memory.shutdown_blocking(SOON).is_clean());
    let scrape = Scrape::parse(&recorder.render());
    every_series_stands_in_the_table(&scrape);
    every_metric_of_the_table_is_published(&scrape);
    figures(&scrape);
    parts_add_up_to(ByteSize::mib(100), &scrape);
    assert!(hooks() >= 3);
}

/// Labels are bounded, whatever clients and programs do: `other` is the name of all beyond that.
#[test]
fn ten_thousand_routes_and_tenants_and_all_arenas_are_answered_in_a_megabyte() {
    let (clock, tree) = (Arc::new(ManualClock::new()), Tree::new(ByteSize::mib(100)));
    let recorder = recorder::builder().install_recorder().expect("the first of this process");
    let builder = Memory::builder().clock(Arc::clone(&clock) as Arc<dyn Clock>);
    let builder = builder.signals(tree.open()).metrics(MetricsTier::Detail);
    let memory = builder.device(DeviceChoice::Host).start().expect("starts");
    let state = memory.admission().state();
    for nth in 0..10_000 {
        let route = format!("/routes/{nth}/{{id}}");
        state.routes.of_route("GET", &route, true, true).add(COST, COST, None);
        state.tenants.of_tenant(&format!("tenant {nth}")).add(COST, COST, None);
    }
    let open = |nth: u32| memory.devices().open_arena(&format!("arena {nth}"));
    let arenas: Vec<_> = (0..64).map(|nth| open(nth).expect("a place")).collect();
    let error = open(64).expect_err("all places are taken").to_string();
    assert_eq!(error, "too many arenas: at most 64; expected some to be closed, or to be shared");
    advance_until(&clock, TICK, "all are published", || {
        let text = recorder.render();
        ["tenant=\"other\"", "arena=\"arena 63\""].iter().all(|label| text.contains(label))
    });
    let text = recorder.render();
    let scrape = Scrape::parse(&text);
    let values = |label: &str| {
        let values = scrape.series.iter().filter_map(|(_, labels, _)| labels.get(label));
        values.collect::<BTreeSet<_>>().len()
    };
    assert_eq!(["route", "tenant", "arena"].map(values), [65, 33, 64]);
    let named = |(name, labels, _): &&(String, BTreeMap<_, String>, f64)| {
        name == "lowtide_admission_route_requests_total"
            && labels.get("route").is_some_and(|route| route == "other")
    };
    let other = scrape.series.iter().find(named).map(|(.., value)| *value);
    assert_eq!(other, Some(9_936.0), "each request is counted");
    let query = "/memory?format=json&with=map,history,events,permits,routes,tenants,settings";
    let request = http::Request::get(query).body(()).expect("a request");
    let endpoints = Endpoints::new(Some(memory.clone()));
    let answer = endpoints.answer_request(&request).expect("one of its paths");
    assert_eq!(answer.status(), 200);
    for bytes in [text.len(), answer.body().len()] {
        assert!(bytes < 1 << 20, "{bytes}");
    }
    drop(arenas);
    assert!(memory.shutdown_blocking(SOON).is_clean());
}

/// tikv/rust-prometheus#261: the totals of a second `Memory` stood still until they exceeded those
/// of the first.
#[test]
fn the_counters_of_a_second_memory_continue_those_of_the_first() {
    let recorder = recorder::builder().install_recorder().expect("the first of this process");
    let total = |name: &str| {
        let scrape = Scrape::parse(&recorder.render());
        let series = scrape.series.iter().filter(|(found, ..)| found == name);
        series.map(|(.., value)| value).sum::<f64>()
    };
    let admitted = || total("lowtide_admission_admitted_total");
    let mut expected = 0.0;
    for requests in [3, 2, 0, 5] {
        let (clock, tree) = (Arc::new(ManualClock::new()), Tree::new(ByteSize::mib(100)));
        tree.killed(2);
        let builder = Memory::builder().clock(Arc::clone(&clock) as Arc<dyn Clock>);
        let memory = builder.signals(tree.open()).metrics(MetricsTier::Detail);
        let memory = memory.device(DeviceChoice::Host).start().expect("starts");
        let admit = || drop(memory.admission().try_admit(Cost::host(COST)).expect("fits"));
        for _ in 0..requests {
            admit();
            expected += 1.0;
        }
        let model = memory.managed("model", || Ok(1)).register().expect("registered");
        drop(model.acquire_blocking().expect("loads"));
        let ticks = total("lowtide_sampler_ticks_total");
        advance_until(&clock, TICK, "it publishes more ticks", || {
            total("lowtide_sampler_ticks_total") > ticks && (admitted() - expected).abs() < 0.5
        });
        // Since the last publication.
        admit();
        expected += 1.0;
        assert!(memory.shutdown_blocking(SOON).is_clean());
        assert!((admitted() - expected).abs() < 0.5, "{} of {expected}", admitted());
        assert!((total("lowtide_pressure_oom_kills_total") - 2.0).abs() < 0.5, "the kernel's");
    }
    assert!((total("lowtide_resource_loads_total") - 4.0).abs() < 0.5);
}

/// Runs a memory with these settings until it has published once.
fn published(with: fn(Builder) -> Builder) -> Scrape {
    let (clock, tree) = (Arc::new(ManualClock::new()), Tree::new(ByteSize::mib(100)));
    let recorder = recorder::builder().install_recorder().expect("the first of this process");
    let builder = Memory::builder()
        .clock(Arc::clone(&clock) as Arc<dyn Clock>)
        .signals(tree.open())
        .device(DeviceChoice::Host)
        .device_limit(ByteSize::mib(4));
    let memory = with(builder).start().expect("starts");
    live(&memory);
    let is_whole = || {
        let text = recorder.render();
        // The last of a publication, so that no part of one is seen.
        ["lowtide_admission_route_live_bytes{", "lowtide_resource_unloads_total{"]
            .iter()
            .all(|name| text.contains(name))
            && text.contains("# HELP lowtide_build_info")
    };
    advance_until(&clock, TICK, "published and described", is_whole);
    assert!(memory.shutdown_blocking(SOON).is_clean());
    Scrape::parse(&recorder.render())
}

#[test]
fn the_basic_tier_publishes_its_metrics_and_no_other() {
    let scrape = published(|builder| builder);
    every_series_stands_in_the_table(&scrape);
    let found: BTreeSet<_> = scrape.kind.keys().map(String::as_str).collect();
    let basic = TABLE.iter().filter(|metric| metric.tier == MetricsTier::Basic);
    let names = basic.map(|metric| metric.name).filter(|name| !OF_A_DEVICE.contains(name));
    assert_eq!(found, names.collect());
}

#[test]
fn the_metrics_of_the_process_can_be_left_to_the_application() {
    let scrape = published(|builder| builder.metrics(MetricsTier::Detail).process_metrics(false));
    let of_process = scrape.kind.keys().find(|name| name.starts_with("process_"));
    assert_eq!(of_process, None);
}

#[test]
fn a_resource_is_published_as_booked_with_all_its_bytes() {
    let admission = Admission::new();
    let ledger = admission.ledger(Budget::Host);
    ledger.set_measured(ByteSize::ZERO, ByteSize::mib(100));
    let model = admission.try_reserve_resource(Cost::host(ByteSize::mib(64))).expect("fits");
    let permit = admission.try_admit(Cost::host(ByteSize::mib(1))).expect("fits");
    let recorder = PrometheusBuilder::new().build_recorder();
    metrics::with_local_recorder(&recorder, || record::publish(None, &[], &admission));
    let scrape = Scrape::parse(&recorder.handle().render());
    let host = |labels: &BTreeMap<_, String>| labels.get("budget").is_some_and(|of| of == "host");
    let one = |name: &str| {
        let mut series = scrape.series.iter();
        series.find(|(found, labels, _)| found == name && host(labels)).map(|found| found.2)
    };
    assert_eq!(one("lowtide_admission_reserved_bytes"), Some(ByteSize::mib(65).as_f64()));
    let left = one("lowtide_admission_allowance_bytes").map(|all| all - ByteSize::mib(65).as_f64());
    let left = left.expect("a limit is known");
    let fits = ByteSize::mib(17);
    assert!((left - fits.as_f64()).abs() < 2.0, "{left}: (100 MiB / K) less 32 MiB less 1 MiB");
    drop((model, permit));
}

fn parts_add_up_to(limit: ByteSize, scrape: &Scrape) {
    let parts = scrape.series.iter().filter(|(name, ..)| name == "lowtide_pressure_part_bytes");
    let sum: f64 = parts.map(|(.., value)| value).sum();
    assert!((sum - limit.as_f64()).abs() < 0.5, "{sum}");
}

/// Figures of which the test knows what they must be, among them totals from before the recorder.
fn figures(scrape: &Scrape) {
    let mib = |count: u64| ByteSize::mib(count).as_f64();
    for (name, label, expected) in [
        ("lowtide_pressure_physical_bytes", None, mib(10)),
        ("lowtide_pressure_charged_bytes", None, mib(10)),
        ("lowtide_pressure_physical_peak_bytes", None, mib(10)),
        ("process_resident_memory_bytes", None, mib(10)),
        ("lowtide_pressure_limit_bytes", None, mib(100)),
        ("lowtide_pressure_level", None, 0.0),
        ("lowtide_admission_admitted_total", None, 2.0),
        ("lowtide_admission_rejected_total", Some(("reason", "too_large")), 1.0),
        ("lowtide_admission_rejected_total", Some(("reason", "full")), 1.0),
        ("lowtide_admission_reserved_bytes", Some(("budget", "host")), 0.0),
        ("lowtide_admission_requests_total", Some(("outcome", "rejected")), 1.0),
        ("lowtide_admission_reserved_headroom_bytes", Some(("budget", "host")), 0.0),
        ("lowtide_device_limit_bytes", Some(("arena", "weights")), mib(4)),
        ("lowtide_device_live_bytes", Some(("arena", "weights")), 0.0),
        ("lowtide_device_live_peak_bytes", Some(("arena", "weights")), mib(1)),
        ("lowtide_device_alloc_failures_total", Some(("reason", "limit")), 1.0),
        ("lowtide_device_alloc_failures_total", Some(("reason", "device")), 0.0),
        ("lowtide_device_state", Some(("arena", "weights")), 0.0),
        ("lowtide_device_arena_info", Some(("backend", "host")), 1.0),
        ("lowtide_device_arena_info", Some(("arena", "weights")), 1.0),
        ("lowtide_device_released_bytes_total", Some(("cause", "shrink")), 0.0),
        ("lowtide_pressure_limit_info", Some(("source", "cgroup")), 1.0),
        ("lowtide_pressure_limit_info", Some(("source", "override")), 0.0),
        ("lowtide_pressure_limit_stale", None, 0.0),
        ("lowtide_admission_ceiling_bytes", Some(("budget", "host")), mib(80)),
        ("lowtide_admission_permits", None, 0.0),
        ("lowtide_resource_waiting", Some(("resource", "model")), 0.0),
        ("lowtide_resource_cost_bytes", Some(("resource", "model")), 0.0),
        ("lowtide_resource_unload_panics_total", Some(("resource", "model")), 0.0),
        ("lowtide_reclaimer_calls_total", Some(("reclaimer", "cache")), 0.0),
        ("lowtide_heap_purges_total", Some(("trigger", "manual")), 2.0),
        ("lowtide_heap_purge_duration_seconds_count", Some(("heap", "jemalloc")), 1.0),
        ("lowtide_heap_purge_duration_seconds_count", Some(("heap", "libc")), 1.0),
        ("lowtide_resource_unloads_total", Some(("reason", "manual")), 1.0),
        ("lowtide_resource_loaded", Some(("resource", "broken")), 0.0),
        ("lowtide_build_info", Some(("profile", "balanced")), 1.0),
        ("lowtide_build_info", Some(("service_version", "2.4.1")), 1.0),
        ("lowtide_build_info", Some(("version", env!("CARGO_PKG_VERSION"))), 1.0),
    ] {
        let found: Vec<_> = scrape
            .series
            .iter()
            .filter(|(series, labels, _)| {
                let labelled =
                    |(label, value): (&str, &str)| labels.get(label).is_some_and(|v| v == value);
                series == name && label.is_none_or(labelled)
            })
            .map(|(.., value)| *value)
            .collect();
        let largest = found.iter().copied().fold(f64::NAN, f64::max);
        assert!((largest - expected).abs() < 0.5, "{name} {label:?}: {found:?}, not {expected}");
    }
    let one = |name: &str| {
        let series = scrape.series.iter().find(|(found, ..)| found == name);
        series.map_or(f64::NAN, |(.., value)| *value)
    };
    let [physical, purgeable, required] = ["physical", "purgeable", "required"]
        .map(|figure| one(&format!("lowtide_pressure_{figure}_bytes")));
    assert!(purgeable >= mib(1) && (physical - purgeable - required).abs() < 0.5, "{required}");
    let loads = scrape.series.iter().filter(|(name, labels, value)| {
        name == "lowtide_resource_loads_total"
            && labels.get("outcome").is_some_and(|outcome| outcome == "failed")
            && labels.get("resource").is_some_and(|resource| resource == "broken")
            && *value > 0.5
    });
    assert_eq!(loads.count(), 1, "the failed load is counted under its resource");
}
