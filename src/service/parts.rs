//! The optional parts of `/memory`: maps of arenas, history, events, admin tasks, the largest and
//! oldest requests, the memory of routes and tenants, size classes of the heap, mappings of the
//! process, the processes on each device, the last run, the advice on limits, the trend of live
//! memory, and the settings.
//!
//! Each part is bounded. The figures themselves are in `endpoints`, the maps in `devices`.

use serde_json::{Map, Value, json};

use crate::bytes::{ByteSize, ParseByteSizeError};
use crate::heap::Profiler;
use crate::memory::{AdminTask, Event, HistorySample, LeakReport, LeakSuspect, Memory};
use lowtide_admission::{
    LimitAdvice, LimitForecast, LimitHour, Mappings, MemoryUsage, RequestMemory, RouteUsage,
    TenantUsage,
};
use lowtide_heap::HeapSizeClass;

use super::answer::{self, seconds};
use super::asked::QueryError;
use super::devices::{self, Maps};
use super::last_exit::last_exit;

/// The maximum number of size classes, and of mapped files.
const ROWS_MAX: usize = 16;
/// The maximum length of a path, in characters.
const PATH_MAX: usize = 256;

lowtide_core::named_enum! {
    /// An optional part, by its name in the query and in the JSON.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub(super) enum Part {
        Map = "map",
        MetricsHistory = "history",
        Events = "events",
        AdminTasks = "admin_tasks",
        LargestRequests = "largest_requests",
        Permits = "permits",
        Routes = "routes",
        Tenants = "tenants",
        SizeClasses = "size_classes",
        Mappings = "mappings",
        DeviceProcesses = "device_processes",
        LastExit = "last_exit",
        LimitAdvice = "limit_advice",
        Leaks = "leaks",
        Settings = "settings",
    }
}

impl Part {
    /// Parses names separated by commas.
    pub(super) fn read(text: &str) -> Result<Vec<Self>, QueryError> {
        let part = |name: &str| {
            let known = Self::ALL.into_iter().find(|part| part.name() == name);
            known.ok_or_else(|| QueryError::Value {
                name: "with",
                value: name.to_owned(),
                expected: Self::ALL.map(Self::name).join(", "),
            })
        };
        let mut parts = Vec::new();
        for name in text.split(',').filter(|name| !name.is_empty()) {
            let part = part(name)?;
            if parts.contains(&part) {
                return Err(QueryError::Twice { name: part.name() });
            }
            parts.push(part);
        }
        Ok(parts)
    }

    /// Parses the limit for which advice is asked, of a query with these parts.
    pub(super) fn read_limit(text: &str, parts: &[Self]) -> Result<ByteSize, QueryError> {
        let expected = if !parts.contains(&Self::LimitAdvice) {
            "with=limit_advice in the same query"
        } else {
            match text.parse() {
                Ok(ByteSize::ZERO) => "an amount of memory above zero",
                Ok(limit) => return Ok(limit),
                Err(error) => ParseByteSizeError::expected(&error),
            }
        };
        let (value, expected) = (text.to_owned(), expected.to_owned());
        Err(QueryError::Value { name: "limit", value, expected })
    }

    /// Adds the part to the document. `needs_token` is for admin tasks: `None` if they are
    /// disabled. `limit` is for the advice on limits.
    pub(super) fn add(
        self,
        memory: &Memory,
        maps: &Maps,
        needs_token: Option<bool>,
        limit: Option<ByteSize>,
        to: &mut Map<String, Value>,
    ) {
        let value = match self {
            Self::Map => match maps.of(memory) {
                Some(maps) => maps,
                None => return, // a build without device arenas
            },
            Self::MetricsHistory => history(&memory.history()),
            Self::Events => memory.events().iter().map(event).collect(),
            Self::AdminTasks => needs_token.map_or(Value::Null, |needs_token| {
                let list: Value = memory.admin_tasks().iter().map(admin_task).collect();
                json!({ "needs_token": needs_token, "list": list })
            }),
            Self::LargestRequests => memory.largest_requests().iter().map(request).collect(),
            Self::Permits => memory.oldest_requests().iter().map(request).collect(),
            Self::Routes => memory.usage_by_route().iter().map(route).collect(),
            Self::Tenants => memory.usage_by_tenant().iter().map(tenant).collect(),
            Self::SizeClasses => size_classes(memory),
            Self::Mappings => memory.mappings().as_ref().map_or(Value::Null, mappings),
            Self::DeviceProcesses => match devices::processes(memory) {
                Some(processes) => processes,
                None => return, // a build without CUDA
            },
            Self::LastExit => last_exit(memory.last_exit()),
            Self::LimitAdvice => limit_advice(memory, limit),
            Self::Leaks => leaks(&memory.leaks()),
            Self::Settings => memory
                .config()
                .settings()
                .into_iter()
                .map(|(name, setting)| (name, json!(setting)))
                .collect::<Value>(),
        };
        to.insert(self.name().to_owned(), value);
    }
}

/// Returns the heap's size classes with the most free space in their pages, at most 16; empty if
/// the statistics cannot be read.
fn size_classes(memory: &Memory) -> Value {
    let mut classes = memory.size_classes();
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
    let bytes = |of: fn(&HistorySample) -> ByteSize| -> Vec<u64> {
        points.iter().map(|point| of(point).get()).collect()
    };
    let mut columns = json!({
        "at_seconds": points.iter().map(|point| seconds(point.at)).collect::<Vec<_>>(),
        "physical_bytes": bytes(|point| point.physical),
        "heap_live_bytes": bytes(|point| point.heap_live),
        "heap_retained_bytes": bytes(|point| point.heap_retained),
    });
    devices::add_history(points, &mut columns);
    columns
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
        "age_seconds": seconds(request.age),
        "cancelled": request.is_cancelled,
    })
}

fn route(of: &RouteUsage) -> Value {
    named(json!({ "method": of.method, "route": of.route }), &of.memory)
}

fn tenant(of: &TenantUsage) -> Value {
    named(json!({ "tenant": of.tenant }), &of.memory)
}

/// Adds the memory to a name.
fn named(mut named: Value, memory: &MemoryUsage) -> Value {
    for (name, value) in [
        ("live_bytes", Some(memory.live.get())),
        ("live_peak_bytes", Some(memory.live_peak.get())),
        ("requests", Some(memory.requests_total)),
        ("mean_peak_bytes", memory.mean_peak().map(ByteSize::get)),
        ("mean_claim_bytes", memory.mean_claim().map(ByteSize::get)),
    ] {
        named[name] = value.into();
    }
    named
}

fn limit_advice(memory: &Memory, limit: Option<ByteSize>) -> Value {
    let advice = memory.limit_advice();
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
        "limit_bytes": answer::limit(advice.limit),
        "observed_seconds": seconds(advice.observed),
        "requests": advice.requests,
        "requests_min": LimitAdvice::REQUESTS_MIN,
        "rejected": advice.rejected,
        "unowned_bytes": advice.unowned.get(),
        "smallest_limit_bytes": advice.smallest_limit().map(ByteSize::get),
        "sentence": advice.to_string(),
        "hours": advice.hours.iter().map(hour).collect::<Value>(),
        "at": limit.map(|limit| forecast(&advice.at(limit))),
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
    let quiet =
        report.trend.points.iter().map(
            |point| json!({ "at_seconds": seconds(point.at), "live_bytes": point.live.get() }),
        );
    json!({
        "quiet_live": quiet.collect::<Vec<_>>(),
        "window_seconds": report.trend.window.as_secs(),
        "growth_per_hour_bytes": report.trend.growth_per_hour.map(f64::round),
        "profiler": report.profiler.name(),
        "interval_bytes": interval,
        "suspects": report.suspects.as_ref().map(|suspects| json!({
            "from_seconds": seconds(suspects.from),
            "to_seconds": seconds(suspects.to),
            "list": suspects.sites.iter().map(suspect).collect::<Vec<_>>(),
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
