//! Writes snapshots under the names of the table: one function for each part.
//!
//! Takes 50 to 300 ns per figure with a recorder, by labels and machine (`benches/render`), 4 ns
//! without one. A recorder may allocate, so these functions are never called from an allocator or
//! from the control thread.

#[cfg(feature = "device")]
pub mod devices;

use std::time::Duration;

use metrics::SharedString;
use metrics::{counter, describe_counter, describe_gauge, describe_histogram, gauge, histogram};

use super::names::{self as name, Kind, TABLE};
use crate::bytes::ByteSize;
use lowtide_admission::{Budget, Cost};

/// The budgets with metrics: the device's exists only in a build with device arenas.
pub const BUDGETS: &[Budget] =
    if cfg!(feature = "device") { &[Budget::Host, Budget::Device] } else { &[Budget::Host] };

/// Returns the part of a cost in one budget.
pub(crate) const fn part(cost: Cost, budget: Budget) -> ByteSize {
    match budget {
        Budget::Host => cost.host,
        Budget::Device => cost.device,
    }
}

/// Describes type, unit and help of every metric to the recorder. Called again every few seconds,
/// because a recorder may be installed at any time.
pub fn describe() {
    for metric in TABLE {
        match metric.kind {
            Kind::Gauge => describe_gauge!(metric.name, metric.unit, metric.help),
            Kind::Counter => describe_counter!(metric.name, metric.unit, metric.help),
            Kind::Histogram => describe_histogram!(metric.name, metric.unit, metric.help),
        }
    }
}

/// Publishes the version, profile and allocator.
pub fn build_info(profile: &'static str) {
    gauge!(
        name::BUILD_INFO.name,
        "version" => env!("CARGO_PKG_VERSION"),
        "profile" => profile,
        "allocator" => "jemalloc"
    )
    .set(1.0);
}

/// Publishes the time at which figures were taken, since the Unix epoch, and the duration.
pub fn sampler(since_epoch: Duration, took: Duration) {
    gauge!(name::SAMPLER_LAST_RUN.name).set(since_epoch.as_secs_f64());
    histogram!(name::SAMPLER_SECONDS.name).record(took.as_secs_f64());
}

/// Shares a label's value between many series, which copies it once.
fn shared(value: &str) -> SharedString {
    SharedString::from_shared(std::sync::Arc::from(value))
}

/// Converts a count for a gauge.
fn count(count: u64) -> f64 {
    f64::from(u32::try_from(count).unwrap_or(u32::MAX))
}

/// Publishes the number of diagnostics.
pub fn diagnostics(diagnostics: usize) {
    gauge!(name::DIAGNOSTICS.name).set(f64::from(u32::try_from(diagnostics).unwrap_or(u32::MAX)));
}

/// Publishes the control loop's own figures.
pub fn ticks(total: u64, lateness: Duration) {
    counter!(name::SAMPLER_TICKS.name).absolute(total);
    gauge!(name::SAMPLER_LATENESS.name).set(lateness.as_secs_f64());
}

/// Publishes the process heap.
pub fn heap(heap: &lowtide_heap::HeapSnapshot) {
    for (metric, bytes) in [
        (name::HEAP_LIVE, heap.live),
        (name::HEAP_ACTIVE, heap.active),
        (name::HEAP_RESIDENT, heap.resident),
        (name::HEAP_RETAINED, heap.retained()),
        (name::HEAP_DIRTY, heap.dirty),
        (name::HEAP_MUZZY, heap.muzzy),
        (name::HEAP_METADATA, heap.metadata),
        (name::HEAP_MAPPED, heap.mapped),
        (name::HEAP_UNBACKED, heap.unbacked),
        (name::HEAP_THREAD_CACHES, heap.thread_caches),
    ] {
        gauge!(metric.name).set(bytes.as_f64());
    }
    gauge!(name::HEAP_ARENAS.name).set(f64::from(heap.arenas));
    gauge!(name::HEAP_BACKGROUND_THREADS.name).set(f64::from(heap.background_threads));
}

/// Publishes a dedicated heap arena; zeros after it is dropped.
pub fn heap_arena(name: &str, arena: &lowtide_heap::HostArenaStats) {
    let name_of = shared(name);
    let label = || name_of.clone();
    gauge!(name::HEAP_ARENA_LIVE.name, "heap_arena" => label()).set(arena.live.as_f64());
    gauge!(name::HEAP_ARENA_RETAINED.name, "heap_arena" => label()).set(arena.retained().as_f64());
    gauge!(name::HEAP_ARENA_ACTIVE.name, "heap_arena" => label()).set(arena.active.as_f64());
    let purgeable = arena.dirty.saturating_add(arena.muzzy);
    gauge!(name::HEAP_ARENA_PURGEABLE.name, "heap_arena" => label()).set(purgeable.as_f64());
}

/// Publishes the resident bytes that are not jemalloc's.
pub fn process_other(bytes: ByteSize) {
    gauge!(name::PROCESS_OTHER.name).set(bytes.as_f64());
}

/// Publishes the number of purges that a trigger has started.
pub fn purges(trigger: &'static str, total: u64) {
    counter!(name::HEAP_PURGES.name, "trigger" => trigger).absolute(total);
}

/// Publishes the bytes that purges have released from a heap.
pub fn purged(heap: &'static str, bytes: u64) {
    counter!(name::HEAP_PURGED.name, "heap" => heap).absolute(bytes);
}

/// Publishes the duration of one purge of a heap.
pub fn purge_duration(heap: &'static str, took: Duration) {
    histogram!(name::HEAP_PURGE_SECONDS.name, "heap" => heap).record(took.as_secs_f64());
}

/// Publishes the host's pressure.
pub fn pressure(signal: &lowtide_admission::Signal, state: &lowtide_admission::PressureState) {
    use lowtide_admission::{Level, LimitSource};
    gauge!(name::PRESSURE_EXHAUSTED.name).set(f64::from(u8::from(state.is_exhausted())));
    gauge!(name::PRESSURE_LEVEL.name).set(f64::from(state.level(Budget::Host).as_u8()));
    if signal.limit.is_known() {
        gauge!(name::PRESSURE_LIMIT.name).set(signal.limit.bytes.as_f64());
    }
    for source in LimitSource::ALL {
        let says = signal.limit.source == source;
        gauge!(name::PRESSURE_LIMIT_INFO.name, "source" => source.name())
            .set(f64::from(u8::from(says)));
    }
    gauge!(name::PRESSURE_LIMIT_STALE.name).set(f64::from(u8::from(signal.limit_is_stale)));
    gauge!(name::PRESSURE_PHYSICAL.name).set(state.physical().as_f64());
    gauge!(name::PRESSURE_PURGEABLE.name).set(state.purgeable().as_f64());
    gauge!(name::PRESSURE_REQUIRED.name).set(state.required().as_f64());
    if let Some(rss) = signal.rss {
        gauge!(name::PROCESS_RESIDENT.name).set(rss.as_f64());
    }
    if let Some(charged) = signal.charged {
        gauge!(name::PRESSURE_CHARGED.name).set(charged.as_f64());
    }
    if state.limit() != ByteSize::MAX {
        for (part, bytes) in state.ceiling_parts().by_name() {
            gauge!(name::ADMISSION_CEILING_PART.name, "part" => part).set(bytes.as_f64());
        }
    }
    for level in Level::ALL {
        let total = state.entered_total(level);
        counter!(name::PRESSURE_TRANSITIONS.name, "to" => level.name()).absolute(total);
    }
}

/// Publishes the processes of the cgroup killed by the kernel.
pub fn oom_kills(total: u64) {
    counter!(name::PRESSURE_OOM_KILLS.name).absolute(total);
}

/// Publishes the kernel's counts of the own cgroup (`own`), or of those above it (`above`), since
/// the start.
pub fn events(group: &'static str, counts: lowtide_admission::EventCounts) {
    for (event, total) in counts.by_name() {
        if let Some(total) = total {
            counter!(name::PRESSURE_EVENTS.name, "group" => group, "event" => event)
                .absolute(total);
        }
    }
}

/// Publishes the time that the own cgroup stalls for memory.
pub fn psi(psi: lowtide_admission::Psi) {
    for (kind, stall) in psi.by_name() {
        gauge!(name::PRESSURE_STALL.name, "kind" => kind).set(stall.avg10);
        let total = stall.total.as_secs_f64();
        gauge!(name::PRESSURE_STALL_TOTAL.name, "kind" => kind).set(total);
    }
}

/// Publishes one budget's ledger.
pub fn ledger(ledger: &lowtide_admission::Ledger, budget: Budget) {
    let label = budget.name();
    gauge!(name::ADMISSION_RESERVED.name, "budget" => label).set(ledger.reserved_bytes().as_f64());
    // Without a limit there is no allowance to show.
    if ledger.ceiling() != ByteSize::MAX {
        let allowance = ledger.allowance_bytes().as_f64();
        gauge!(name::ADMISSION_CEILING.name, "budget" => label).set(ledger.ceiling().as_f64());
        gauge!(name::ADMISSION_ALLOWANCE.name, "budget" => label).set(allowance);
        gauge!(name::ADMISSION_CORRECTION_FACTOR.name, "budget" => label)
            .set(ledger.correction_factor());
    }
    gauge!(name::ADMISSION_RESERVED_HEADROOM.name, "budget" => label)
        .set(ledger.reserved_headroom().as_f64());
}

/// Publishes one budget's requests by size; classes without requests are omitted.
pub fn classes(budget: Budget, classes: &[lowtide_admission::ClassStats]) {
    for class in classes {
        if class.admitted_total == 0 && class.rejected_total == 0 {
            continue;
        }
        for (outcome, requests, bytes) in [
            ("admitted", class.admitted_total, class.admitted_bytes_total),
            ("rejected", class.rejected_total, class.rejected_bytes_total),
        ] {
            let labels = [
                ("budget", budget.name()),
                ("size_class", class.class.name()),
                ("outcome", outcome),
            ];
            counter!(name::ADMISSION_REQUESTS.name, &labels).absolute(requests);
            counter!(name::ADMISSION_BYTES.name, &labels).absolute(bytes);
        }
    }
}

/// Publishes the open connections, and those closed by reason.
#[cfg(feature = "service")]
pub(crate) fn connections(open: u64, closed: impl Iterator<Item = (&'static str, u64)>) {
    gauge!(name::CONNECTIONS.name).set(count(open));
    for (reason, total) in closed {
        counter!(name::CONNECTIONS_CLOSED.name, "reason" => reason).absolute(total);
    }
}

/// Publishes the admitted and rejected requests.
pub fn admission(stats: &lowtide_admission::AdmissionStats) {
    counter!(name::ADMISSION_ADMITTED.name).absolute(stats.admitted_total);
    counter!(name::ADMISSION_OUTLIVED.name).absolute(stats.outlived_bytes_total);
    gauge!(name::ADMISSION_HELD.name).set(count(stats.held()));
    gauge!(name::ADMISSION_WAITING.name).set(count(stats.waiting));
    counter!(name::ADMISSION_WAITED.name).absolute(stats.waited_total);
    gauge!(name::ADMISSION_WAIT_TIME.name).set(stats.waited_time_total.as_secs_f64());
    counter!(name::ADMISSION_SUSPENDED.name).absolute(stats.suspended_total);
    gauge!(name::ADMISSION_OLDEST.name).set(stats.oldest_permit.as_secs_f64());
    for reason in lowtide_admission::RejectReason::ALL {
        let total = stats.rejected_total(reason);
        counter!(name::ADMISSION_REJECTED.name, "reason" => reason.name()).absolute(total);
    }
}

/// Publishes the memory of the requests of a route.
pub fn route(usage: &lowtide_admission::RouteUsage) {
    let (route, memory) = (shared(&usage.route), &usage.memory);
    let labels = || [("method", SharedString::const_str(usage.method)), ("route", route.clone())];
    gauge!(name::ADMISSION_ROUTE_LIVE.name, &labels()).set(memory.live.as_f64());
    for (metric, total) in [
        (name::ADMISSION_ROUTE_REQUESTS, memory.requests_total),
        (name::ADMISSION_ROUTE_PEAK, memory.peak_bytes_total),
        (name::ADMISSION_ROUTE_CLAIM, memory.claim_bytes_total),
    ] {
        counter!(metric.name, &labels()).absolute(total);
    }
}

/// Publishes the memory of the requests of a tenant.
pub fn tenant(usage: &lowtide_admission::TenantUsage) {
    let (tenant, memory) = (shared(&usage.tenant), &usage.memory);
    let label = || tenant.clone();
    gauge!(name::ADMISSION_TENANT_LIVE.name, "tenant" => label()).set(memory.live.as_f64());
    gauge!(name::ADMISSION_TENANT_PEAK.name, "tenant" => label()).set(memory.live_peak.as_f64());
}

/// Publishes a reclaimer of the application.
pub fn reclaimer(stats: &lowtide_admission::ReclaimerStats) {
    let reclaimer = shared(&stats.name);
    let label = || reclaimer.clone();
    counter!(name::RECLAIMER_CALLS.name, "reclaimer" => label()).absolute(stats.calls_total);
    counter!(name::RECLAIMER_RELEASED.name, "reclaimer" => label())
        .absolute(stats.released_total.get());
    gauge!(name::RECLAIMER_SECONDS.name, "reclaimer" => label())
        .set(stats.time_total.as_secs_f64());
    counter!(name::RECLAIMER_PANICS.name, "reclaimer" => label()).absolute(stats.panics_total);
}

/// Publishes a resource; `last_used` since the Unix epoch.
pub fn resource(stats: &lowtide_admission::ResourceStats, last_used: Option<Duration>) {
    use lowtide_admission::UnloadReason;
    let resource = shared(&stats.name);
    let label = || resource.clone();
    for (metric, value) in [
        (name::RESOURCE_LOADED, f64::from(u8::from(stats.loaded))),
        (name::RESOURCE_LOADING, f64::from(u8::from(stats.loading))),
        (name::RESOURCE_GUARDS, count(stats.guards as u64)),
        (name::RESOURCE_WAITING, count(stats.waiting as u64)),
        (name::RESOURCE_LOAD_SECONDS, stats.load_time.as_secs_f64()),
        (name::RESOURCE_UNLOAD_SECONDS, stats.unload_time.as_secs_f64()),
    ] {
        gauge!(metric.name, "resource" => label()).set(value);
    }
    for &budget in BUDGETS {
        gauge!(name::RESOURCE_COST.name, "resource" => label(), "budget" => budget.name())
            .set(part(stats.cost, budget).as_f64());
    }
    if let Some(last_used) = last_used {
        let at = last_used.as_secs_f64();
        gauge!(name::RESOURCE_LAST_USED.name, "resource" => label()).set(at);
    }
    for (outcome, total) in [
        ("ok", stats.loads_ok_total),
        ("failed", stats.loads_failed_total),
        ("refused", stats.loads_refused_total),
    ] {
        counter!(name::RESOURCE_LOADS.name, "resource" => label(), "outcome" => outcome)
            .absolute(total);
    }
    for reason in UnloadReason::ALL {
        counter!(name::RESOURCE_UNLOADS.name, "resource" => label(), "reason" => reason.name())
            .absolute(stats.unloads.total(reason));
    }
    for &budget in BUDGETS {
        if let Some(measured) = stats.measured {
            let bytes = part(measured, budget).as_f64();
            gauge!(name::RESOURCE_MEASURED.name, "resource" => label(), "budget" => budget.name())
                .set(bytes);
        }
        let recovered = part(stats.recovered_total, budget).get();
        counter!(name::RESOURCE_RECOVERED.name, "resource" => label(), "budget" => budget.name())
            .absolute(recovered);
    }
    counter!(name::RESOURCE_UNLOAD_PANICS.name, "resource" => label())
        .absolute(stats.unload_panics_total);
}
