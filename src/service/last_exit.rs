//! The part `last_exit` of `/memory`: the recording of the last run.
//!
//! Bounded as the recording is: about 300 samples, 256 events, 16 permits.

use serde::Serialize;
use serde_json::{Value, json};

use crate::bytes::ByteSize;
use crate::memory::{FlightEvent, FlightResource, FlightSample, LastExit};

use super::answer::{limit, seconds};
use super::parts::request;

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
        "resources": last.resources.iter().map(resource).collect::<Vec<_>>(),
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

fn column<T: Serialize>(samples: &[FlightSample], of: impl Fn(&FlightSample) -> T) -> Value {
    samples.iter().map(|sample| json!(of(sample))).collect()
}

fn event(event: &FlightEvent) -> Value {
    json!({
        "at_seconds": seconds(event.at),
        "kind": event.kind,
        "about": event.about,
        "text": event.text,
        "times": event.times,
    })
}

fn resource(resource: &FlightResource) -> Value {
    json!({
        "name": resource.name,
        "loaded": resource.loaded,
        "host_bytes": resource.host.get(),
        "device_bytes": resource.device.get(),
    })
}
