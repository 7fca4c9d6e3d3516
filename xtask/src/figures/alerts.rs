//! Figures of alerts: how early they fire.
//!
//! An alert's time is not typed in: promtool evaluates the shipped rules over generated series at
//! every step and expects silence each time, so that its first complaint is the time at which the
//! alert fires.
//!
//! Invariant: a case whose alert never fires is an error, not a figure.

use std::fmt::Write as _;
use std::fs;
use std::time::Duration;

use super::clone::Folder;
use super::{Figure, count, figure};
use crate::run::Run;
use crate::tree;

const MIB: f64 = (1_u32 << 20) as f64;
const MINUTE: Duration = Duration::from_secs(60);
/// The step of scrapes and evaluations in `dashboards/prometheus.yml`.
const SCRAPE: Duration = Duration::from_secs(15);
/// Prometheus evaluates groups in any order: this is the slowest, in which each sees the values of
/// an evaluation before.
const ORDER: &str = "group_eval_order: [lowtide-alerts, lowtide-growth, lowtide-figures]";
const REQUIRED: &str = "lowtide_pressure_required_bytes";
const PHYSICAL: &str = "lowtide_pressure_physical_bytes";
const LIMIT: &str = "lowtide_pressure_limit_bytes";
const START: &str = "process_start_time_seconds";

/// A series: its name and labels besides those of the target, and its value at a time in seconds.
struct Series<'a> {
    name: &'a str,
    value: &'a dyn Fn(f64) -> f64,
}

/// Returns the first time at which the alert fires over these series, of which each step is
/// scraped and evaluated; `None` if it does not fire within `length`.
fn first_fire(
    alert: &str,
    step: Duration,
    length: Duration,
    series: &[Series<'_>],
) -> Result<Option<Duration>, String> {
    let steps = u32::try_from(length.as_secs() / step.as_secs()).unwrap_or(u32::MAX);
    let seconds = step.as_secs();
    let rules = tree::root().join("dashboards/lowtide.rules.yml");
    let mut test = format!(
        "rule_files: [{:?}]\nevaluation_interval: {seconds}s\n{ORDER}\n\
         tests:\n  - interval: {seconds}s\n    input_series:\n",
        rules.display().to_string()
    );
    for Series { name, value } in series {
        let (name, labels) = name.split_once('{').unwrap_or((name, "}"));
        let comma = if labels == "}" { "" } else { "," };
        let _ = write!(
            test,
            "      - series: {name}{{job=\"j\",instance=\"i\"{comma}{labels}\n        values: "
        );
        for nth in 0..=steps {
            let _ = write!(test, "{:.0} ", value((nth * step).as_secs_f64()));
        }
        test.push('\n');
    }
    test.push_str("    alert_rule_test:\n");
    for nth in 1..=steps {
        let _ = writeln!(
            test,
            "      - {{alertname: {alert}, eval_time: {}s, exp_alerts: []}}",
            (nth * step).as_secs()
        );
    }
    let folder = Folder::new("alerts")?;
    let file = folder.path().join("test.yml");
    fs::write(&file, test).map_err(|error| format!("{}: {error}", file.display()))?;
    let Some(said) = Run::new("promtool").words("test rules").arg(&file).failure()? else {
        return Ok(None);
    };
    let mark = format!("alertname: {alert}, time: ");
    let times = said.split(&mark).skip(1).filter_map(|rest| rest.split(',').next());
    let times: Result<Vec<_>, _> = times.map(humantime::parse_duration).collect();
    let times = times.map_err(|error| format!("promtool: {error}: {said}"))?;
    times.into_iter().min().map(Some).ok_or_else(|| format!("promtool: {said}"))
}

/// The percentage of the headroom at the start that a leak has used when the alert fires.
fn headroom_used(limit_mib: f64, start_mib: f64, mib_per_hour: f64) -> Result<f64, String> {
    let held = move |at: f64| (start_mib + mib_per_hour * at / 3600.0).min(limit_mib) * MIB;
    let hours = (limit_mib - start_mib) / mib_per_hour;
    let series = [
        Series { name: REQUIRED, value: &held },
        Series { name: PHYSICAL, value: &held },
        Series { name: LIMIT, value: &|_| limit_mib * MIB },
        Series { name: START, value: &|_| 0.0 },
    ];
    let length = Duration::from_secs_f64(hours * 3600.0);
    let fired = first_fire("LowtideMemoryLimitInHours", MINUTE, length, &series)?;
    let fired = fired.ok_or("LowtideMemoryLimitInHours does not fire")?;
    println!("  {limit_mib} MiB, {mib_per_hour} MiB/h from {start_mib} MiB: after {fired:?}");
    Ok(100.0 * fired.as_secs_f64() / 3600.0 * mib_per_hour / (limit_mib - start_mib))
}

pub(super) fn measure_leaks() -> Result<Vec<Figure>, String> {
    let small = headroom_used(256.0, 80.0, 50.0)?;
    // Half of its headroom is half a day.
    let large = headroom_used(16.0 * 1024.0, 14.5 * 1024.0, 60.0)?;
    Ok(vec![
        figure("alerts.leak_256mib.headroom_used", small, "percent"),
        figure("alerts.leak_16gib.headroom_used", large, "percent"),
    ])
}

/// 200 of 210 MiB are retained, in a container of 256 MiB.
pub(super) fn measure_retained() -> Result<Vec<Figure>, String> {
    let series = [
        Series { name: "lowtide_heap_resident_bytes", value: &|_| 210.0 * MIB },
        Series { name: "lowtide_heap_live_bytes", value: &|_| 10.0 * MIB },
        Series { name: "lowtide_heap_retained_bytes", value: &|_| 200.0 * MIB },
        Series { name: LIMIT, value: &|_| 256.0 * MIB },
    ];
    let fired = first_fire("LowtideHeapRetainedHigh", SCRAPE, 60 * MINUTE, &series)?;
    let fired = fired.ok_or("LowtideHeapRetainedHigh does not fire")?;
    let minutes = fired.as_secs_f64() / 60.0;
    Ok(vec![figure("alerts.retained.minutes", minutes, "minutes")])
}

/// 40 requests a second, of which half are rejected for 75 s. The time is from the last scrape
/// before the episode.
pub(super) fn measure_shed() -> Result<Vec<Figure>, String> {
    let begins = 1800.0;
    let inside = move |at: f64| (at - begins).clamp(0.0, 75.0);
    let rejected = move |at: f64| 20.0 * inside(at);
    let admitted = move |at: f64| 40.0 * at - 20.0 * inside(at);
    let series = [
        Series { name: "lowtide_admission_rejected_total{reason=\"full\"}", value: &rejected },
        Series { name: "lowtide_admission_admitted_total", value: &admitted },
    ];
    let fired = first_fire("LowtideRequestsShed", SCRAPE, 60 * MINUTE, &series)?;
    let fired = fired.ok_or("LowtideRequestsShed does not fire")?.as_secs_f64() - begins;
    Ok(vec![figure("alerts.shed.seconds", fired, "seconds")])
}

/// Services without a fault, over two days: how many raise an alert about growth.
pub(super) fn measure_false_alarms() -> Result<Vec<Figure>, String> {
    const DAY: f64 = 86_400.0;
    let limit = 256.0;
    let warms = |at: f64| 40.0 + 120.0 * (at / 1800.0).min(1.0);
    let slows = |at: f64| 40.0 + 130.0 * (1.0 - (-at / 1800.0).exp());
    let saw = |at: f64| 80.0 + 120.0 * (at % DAY) / DAY;
    let hours = |at: f64| 130.0 - 50.0 * (at * std::f64::consts::TAU / DAY).cos();
    let bursts = |at: f64| if at % 1800.0 < 600.0 { 180.0 } else { 60.0 };
    let idle = |at: f64| 20.0 + 0.2 * at / 3600.0;
    let services: [(&str, &dyn Fn(f64) -> f64); 6] = [
        ("warms up in half an hour", &warms),
        ("warms up ever more slowly", &slows),
        ("a sawtooth of a day", &saw),
        ("traffic by the hour of the day", &hours),
        ("bursts of ten minutes", &bursts),
        ("small and idle", &idle),
    ];
    let mut alarms = 0;
    for (name, mib) in services {
        let held = |at: f64| mib(at) * MIB;
        let series = [
            Series { name: REQUIRED, value: &held },
            Series { name: PHYSICAL, value: &held },
            Series { name: LIMIT, value: &|_| limit * MIB },
            Series { name: START, value: &|_| 0.0 },
        ];
        let length = Duration::from_secs_f64(2.0 * DAY);
        if let Some(at) = first_fire("LowtideMemoryLimitInHours", 5 * MINUTE, length, &series)? {
            println!("  {name}: an alert after {at:?}");
            alarms += 1;
        }
    }
    Ok(vec![figure("alerts.false_alarms", count(alarms), "count")])
}
