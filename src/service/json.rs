//! The optional parts of `/memory`: maps of arenas, history, events, admin tasks, the largest and
//! oldest requests, the memory of routes and tenants, size classes of the heap, mappings of the
//! process, the processes on each device, the last run, the advice on limits, the trend of live
//! memory, and the settings.
//!
//! Each part is bounded; the recording of the last run to about 300 samples, 256 events and 16
//! permits. The figures themselves are in `endpoints`, the maps in `devices`.

use serde::Serialize;
use serde_json::{Value, json};

use crate::bytes::ByteSize;
use crate::heap::Profiler;
use crate::memory::{
    AdminTask, Event, FlightResource, FlightSample, HistorySample, LastExit, LeakReport,
    LeakSuspect, Memory,
};
use lowtide_admission::{
    LimitAdvice, LimitForecast, LimitHour, Mappings, MemoryUsage, RejectReason, RequestMemory,
};
use lowtide_heap::HeapSizeClass;

use super::answer::{limit, seconds};
#[cfg(feature = "cuda")]
use super::devices;
#[cfg(feature = "device")]
use super::devices::Maps;
use super::query::{given_twice, invalid_value};
use super::rejection::Denial;

/// The maximum number of size classes, and of mapped files.
const ROWS_MAX: usize = 16;
/// The maximum length of a path, in characters.
const PATH_MAX: usize = 256;

/// An optional part: its name in the query and in the JSON, and its value, null if this build has
/// none.
pub(super) type JsonPart = (&'static str, fn(&PartContext<'_>) -> Value);

/// The subject of a query.
pub(super) struct PartContext<'a> {
    pub(super) memory: &'a Memory,
    #[cfg(feature = "device")]
    pub(super) maps: &'a Maps,
    /// `None` if admin commands are disabled.
    pub(super) needs_token: Option<bool>,
    /// The limit for which advice is asked.
    pub(super) limit: Option<ByteSize>,
}

const LIMIT_ADVICE: &str = "limit_advice";

const PARTS: &[JsonPart] = &[
    #[cfg(feature = "device")]
    ("map", |asked| asked.maps.of(asked.memory)),
    #[cfg(not(feature = "device"))]
    ("map", |_| Value::Null),
    ("history", |asked| history(&asked.memory.report().history())),
    ("events", |asked| asked.memory.report().events().iter().map(event).collect()),
    ("admin_tasks", |asked| {
        let tasks = || asked.memory.admin().tasks().iter().map(admin_task).collect::<Value>();
        let told = |needs_token| json!({ "needs_token": needs_token, "list": tasks() });
        json!(asked.needs_token.map(told))
    }),
    ("largest_requests", |asked| {
        asked.memory.report().largest_requests().iter().map(request).collect()
    }),
    ("permits", |asked| asked.memory.report().oldest_requests().iter().map(request).collect()),
    ("routes", |asked| asked.memory.report().usage_by_route().iter().map(usage).collect()),
    ("tenants", |asked| asked.memory.report().usage_by_tenant().iter().map(usage).collect()),
    ("size_classes", |asked| size_classes(asked.memory)),
    ("mappings", |asked| json!(asked.memory.report().mappings().as_ref().map(mappings))),
    #[cfg(feature = "cuda")]
    ("device_processes", |asked| devices::processes(asked.memory)),
    #[cfg(not(feature = "cuda"))]
    ("device_processes", |_| Value::Null),
    ("last_exit", |asked| json!(asked.memory.report().last_exit().map(last_exit))),
    (LIMIT_ADVICE, |asked| limit_advice(asked.memory, asked.limit)),
    ("leaks", |asked| leaks(&asked.memory.heap().leaks())),
    ("settings", |asked| {
        let heap = lowtide_heap::effective().map_or_else(|it| it.to_string(), |it| it.to_string());
        let heap = ("heap", json!({ "value": heap, "source": "jemalloc" }));
        let settings = asked.memory.config().settings().into_iter();
        settings.map(|(name, setting)| (name, json!(setting))).chain([heap]).collect()
    }),
];

/// Parses names of parts, separated by commas.
pub(super) fn read(text: &str) -> Result<Vec<&'static JsonPart>, Denial> {
    let mut parts: Vec<&JsonPart> = Vec::new();
    for name in text.split(',').filter(|name| !name.is_empty()) {
        let known = PARTS.iter().find(|(known, _)| *known == name);
        let part = known.ok_or_else(|| {
            let names: Vec<_> = PARTS.iter().map(|(name, _)| *name).collect();
            invalid_value("with", name, names.join(", "))
        })?;
        if parts.iter().any(|(other, _)| *other == name) {
            return Err(given_twice(part.0));
        }
        parts.push(part);
    }
    Ok(parts)
}

/// Parses the limit for which advice is asked, of a query with these parts.
pub(super) fn read_limit(text: &str, parts: &[&JsonPart]) -> Result<ByteSize, Denial> {
    let expected = if parts.iter().all(|(name, _)| *name != LIMIT_ADVICE) {
        "with=limit_advice in the same query"
    } else {
        match text.parse() {
            Ok(ByteSize::ZERO) => "an amount of memory above zero",
            Ok(limit) => return Ok(limit),
            Err(expected) => expected,
        }
    };
    Err(invalid_value("limit", text, expected))
}

/// Returns the heap's size classes with the most free space in their pages, at most 16; empty if
/// the statistics cannot be read.
fn size_classes(memory: &Memory) -> Value {
    let mut classes = memory.heap().size_classes();
    classes.sort_by_key(|class| std::cmp::Reverse(class.slack()));
    classes.truncate(ROWS_MAX);
    let class = |class: &HeapSizeClass| {
        json!({
            "size_bytes": class.size.get(),
            "blocks": class.blocks,
            "held_bytes": class.group_bytes.get().saturating_mul(class.groups),
            "slack_bytes": class.slack().get(),
            "utilisation": class.utilisation(),
        })
    };
    classes.iter().map(class).collect()
}

/// Returns the end of a path, of [`PATH_MAX`] characters at most.
fn shortened(path: &str) -> String {
    let skipped = path.chars().count().saturating_sub(PATH_MAX);
    path.chars().skip(skipped).map(|one| if one.is_control() { ' ' } else { one }).collect()
}

fn mappings(found: &Mappings) -> Value {
    let files = found.files.iter().take(ROWS_MAX);
    let libc = lowtide_heap::libc_heap().ok();
    json!({
        "files": files
            .map(|(path, bytes)| json!({ "path": shortened(path), "resident_bytes": bytes.get() }))
            .collect::<Vec<_>>(),
        "file_count": found.files.len(),
        "file_bytes": found.files.iter().map(|(_, bytes)| *bytes).sum::<ByteSize>().get(),
        "anonymous_bytes": found.anonymous.get(),
        "program_break_bytes": found.program_break.get(),
        "main_stack_bytes": found.main_stack.get(),
        "c_heap_live_bytes": libc.map(|heap| heap.live.get()),
        "c_heap_idle_bytes": libc.map(|heap| heap.idle.get()),
        "truncated": found.is_truncated,
    })
}

/// Returns the history by column, so that names appear once.
fn history(points: &[HistorySample]) -> Value {
    json!({
        "at_seconds": column(points, |point| seconds(point.at)),
        "physical_bytes": column(points, |point| point.physical.get()),
        "heap_live_bytes": column(points, |point| point.heap_live.get()),
        "heap_retained_bytes": column(points, |point| point.heap_retained.get()),
        "device_live_bytes": column(points, |point| point.device_live.get()),
        "device_retained_bytes": column(points, |point| point.device_retained.get()),
    })
}

fn event(event: &Event) -> Value {
    json!({
        "at_seconds": seconds(event.at),
        "since_seconds": seconds(event.since),
        "kind": event.kind,
        "about": event.about,
        "text": event.text,
        "times": event.times,
        "sum": event.sum,
    })
}

pub(super) fn request(request: &RequestMemory) -> Value {
    json!({
        "method": request.method,
        "route": request.route,
        "tenant": request.tenant,
        "phase": request.phase.name(),
        "reserved_bytes": request.reserved.get(),
        "live_bytes": request.live.get(),
        "peak_bytes": request.peak.get(),
        "claim_bytes": request.claim.get(),
        "spilled_bytes": request.spilled.get(),
        "age_seconds": seconds(request.age),
        "cancelled": request.is_cancelled,
    })
}

/// Returns the memory of a route, or of a tenant, which has no method.
fn usage(memory: &MemoryUsage) -> Value {
    let mut named = match memory.method {
        "" => json!({ "tenant": memory.name }),
        method => json!({ "method": method, "route": memory.name }),
    };
    named["live_bytes"] = memory.live.get().into();
    named["live_peak_bytes"] = memory.live_peak.get().into();
    named["requests"] = memory.requests_total.into();
    named["mean_peak_bytes"] = memory.mean_peak().map(ByteSize::get).into();
    named["mean_claim_bytes"] = memory.mean_claim().map(ByteSize::get).into();
    let observed = RejectReason::ALL.into_iter().zip(memory.observed);
    let observed = observed.filter(|(_, count)| *count > 0);
    named["observed"] = observed.map(|(why, count)| (why.name(), json!(count))).collect();
    named
}

fn limit_advice(memory: &Memory, asked: Option<ByteSize>) -> Value {
    let advice = memory.report().limit_advice();
    let hour = |hour: &LimitHour| {
        json!({
            "start_seconds": seconds(memory.on_wall(hour.start)),
            "observed_seconds": seconds(hour.observed),
            "required_p999_bytes": hour.required_p999.get(),
            "required_max_bytes": hour.required_max.get(),
            "unowned_bytes": hour.unowned.get(),
            "requests": hour.requests,
            "rejected": hour.rejected,
        })
    };
    json!({
        "limit_bytes": limit(advice.limit),
        "observed_seconds": seconds(advice.observed),
        "requests": advice.requests,
        "requests_min": LimitAdvice::REQUESTS_MIN,
        "rejected": advice.rejected,
        "unowned_bytes": advice.unowned.get(),
        "smallest_limit_bytes": advice.smallest_limit().map(ByteSize::get),
        "sentence": advice.to_string(),
        "hours": advice.hours.iter().map(hour).collect::<Value>(),
        "at": asked.map(|limit| forecast(&advice.at(limit))),
    })
}

fn forecast(at: &LimitForecast) -> Value {
    json!({
        "limit_bytes": at.limit.get(),
        "ceiling_bytes": at.ceiling.get(),
        "requests": at.requests,
        "rejected": at.rejected,
        "rejected_share": at.rejected_share(),
        "over_ceiling_seconds": seconds(at.over_ceiling),
        "exceeded_seconds": seconds(at.over_limit),
        "exhausted": at.is_exhausted(),
        "sentence": at.to_string(),
    })
}

fn leaks(report: &LeakReport) -> Value {
    let interval = match report.profiler {
        Profiler::Active { interval } => Some(interval.get()),
        _ => None,
    };
    let quiet = report
        .points
        .iter()
        .map(|(at, live)| json!({ "at_seconds": seconds(*at), "live_bytes": live.get() }));
    json!({
        "quiet_live": quiet.collect::<Vec<_>>(),
        "window_seconds": report.window.as_secs(),
        "growth_per_hour_bytes": report.growth_per_hour.map(f64::round),
        "profiler": report.profiler.name(),
        "interval_bytes": interval,
        "suspects": report.suspects.as_ref().map(|(times, sites)| json!({
            "from_seconds": seconds(times.start),
            "to_seconds": seconds(times.end),
            "list": sites.iter().map(suspect).collect::<Vec<_>>(),
        })),
    })
}

fn suspect(site: &LeakSuspect) -> Value {
    json!({
        "then_bytes": site.then.get(),
        "now_bytes": site.now.get(),
        "growth_bytes": site.growth().get(),
        "frames": site.frames,
    })
}

fn admin_task(admin_task: &AdminTask) -> Value {
    json!({
        "id": admin_task.id,
        "command": admin_task.command.name(),
        "subject": admin_task.command.subject(),
        "requested_at_seconds": seconds(admin_task.asked_at),
        "state": admin_task.state.name(),
        "outcome": admin_task.state.outcome(),
        "progress": admin_task.progress,
    })
}

/// Returns the recording.
pub(super) fn last_exit(last: &LastExit) -> Value {
    json!({
        "cause": last.cause.name(),
        "orderly": last.cause.is_orderly(),
        "summary": last.summary,
        "at_seconds": last.at.map(seconds),
        "started_at_seconds": seconds(last.started_at),
        "pid": Some(last.pid).filter(|pid| *pid != 0),
        "service_version": Some(&last.version).filter(|version| !version.is_empty()),
        "samples": columns(&last.samples),
        "events": last.events.iter().map(event).collect::<Vec<_>>(),
        "permits": last.permits.iter().map(request).collect::<Vec<_>>(),
        "resources": last.resources.iter().map(flight_resource).collect::<Vec<_>>(),
    })
}

/// Returns the samples by column, so that names appear once.
fn columns(samples: &[FlightSample]) -> Value {
    json!({
        "at_seconds": column(samples, |sample| seconds(sample.at)),
        "uptime_seconds": column(samples, |sample| seconds(sample.uptime)),
        "physical_bytes": column(samples, |sample| sample.physical.get()),
        "growth_bytes_per_second": column(samples, |sample| sample.growth.get()),
        "limit_bytes": column(samples, |sample| limit(sample.limit)),
        "required_bytes": column(samples, |sample| sample.required.get()),
        "heap_live_bytes": column(samples, |sample| sample.heap_live.get()),
        "heap_retained_bytes": column(samples, |sample| sample.heap_retained.get()),
        "other_bytes": column(samples, |sample| sample.other.map(ByteSize::get)),
        "device_live_bytes": column(samples, |sample| sample.device_live.get()),
        "device_retained_bytes": column(samples, |sample| sample.device_retained.get()),
        "device_reserved_bytes": column(samples, |sample| sample.device_reserved.get()),
        "reserved_bytes": column(samples, |sample| sample.reserved.get()),
        "allowance_bytes": column(samples, |sample| limit(sample.allowance)),
        "ceiling_bytes": column(samples, |sample| limit(sample.ceiling)),
        "level": column(samples, |sample| sample.level.name()),
        "held": column(samples, |sample| sample.held),
        "waiting": column(samples, |sample| sample.waiting),
        "rejected": column(samples, |sample| sample.rejected_total),
        "oom_kills": column(samples, |sample| sample.oom_kills),
        "exhausted": column(samples, |sample| sample.exhausted),
        "ending": column(samples, |sample| sample.ending),
    })
}

fn column<S, T: Serialize>(samples: &[S], of: impl Fn(&S) -> T) -> Value {
    samples.iter().map(|sample| json!(of(sample))).collect()
}

fn flight_resource(resource: &FlightResource) -> Value {
    json!({
        "name": resource.name,
        "loaded": resource.loaded,
        "host_bytes": resource.host.get(),
        "device_bytes": resource.device.get(),
    })
}
