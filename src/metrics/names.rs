//! The table of metrics: name, tier, type, labels and help of each, and where its value is.
//!
//! Tests compare dashboards, rules, docs and a live scrape with this table. Every name contains its
//! unit, so that an exporter's own naming rules change nothing.

use metrics::Unit;

/// The type of a metric, in Prometheus' terms.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MetricKind {
    /// A value that rises and falls.
    Gauge,
    /// A total that only rises while the process runs.
    Counter,
    /// Observations in buckets.
    Histogram,
}

/// A metric.
#[derive(Clone, Copy, Debug)]
pub struct Metric {
    /// The full name.
    pub name: &'static str,
    /// The tier in which it is published.
    pub tier: MetricsTier,
    /// The type.
    pub kind: MetricKind,
    /// The labels of every series.
    pub labels: &'static [&'static str],
    /// The help text, one sentence.
    pub help: &'static str,
}

impl Metric {
    /// Returns the unit, with which the name ends.
    #[must_use]
    pub fn unit(&self) -> Unit {
        let stem = self.name.trim_end_matches("_total");
        if stem.ends_with("_bytes") {
            Unit::Bytes
        } else if stem.ends_with("_seconds") {
            Unit::Seconds
        } else {
            Unit::Count
        }
    }
}

/// Passes the table to a macro: sections of rows.
///
/// A section, `@`, has the labels of its rows, and a snapshot with its type. A row has tier, type
/// and name, its labels if they differ from those of the section, and the help text; and after `=`
/// its value in the snapshot, or after `as` a constant, for a method of `MetricsWriter` that
/// publishes it. A value that is a list of names and values is a series for each, with the name in
/// the last label. Only `figures` compiles the values.
macro_rules! rows {
    ($each:ident) => {
        $each! {

    @ [] heap: HeapSnapshot;
    Basic Gauge "lowtide_heap_live_bytes" = heap.live,
        "Bytes of heap blocks that the application has allocated and not freed.";
    Detail Gauge "lowtide_heap_active_bytes" = heap.active,
        "Bytes of heap pages that contain at least one live or cached block.";
    Detail Gauge "lowtide_heap_resident_bytes" = heap.resident,
        "Bytes of the jemalloc heap in physical memory, as counted by jemalloc.";
    Basic Gauge "lowtide_heap_retained_bytes" = heap.retained(),
        "Physical bytes that the heap keeps in addition to live bytes: resident minus live. Not \
         jemalloc's stats.retained, which is lowtide_heap_unbacked_bytes.";
    Detail Gauge "lowtide_heap_dirty_bytes" = heap.dirty,
        "Bytes of unused heap pages that are still in physical memory.";
    Detail Gauge "lowtide_heap_muzzy_bytes" = heap.muzzy,
        "Bytes of unused heap pages that the kernel may reclaim (MADV_FREE).";
    Detail Gauge "lowtide_heap_metadata_bytes" = heap.metadata,
        "Bytes that jemalloc uses for its own metadata.";
    Detail Gauge "lowtide_heap_unbacked_bytes" = heap.unbacked,
        "Heap address space kept for reuse, without physical memory.";
    Detail Gauge "lowtide_heap_thread_cache_bytes" = heap.thread_caches,
        "Bytes of free blocks in jemalloc's thread caches.";
    Detail Gauge "lowtide_heap_spilled_bytes" = heap.spilled,
        "Bytes on disk for work that spilled, which are in no other figure of the heap.";

    @ ["heap_arena"] heap_arena: HostArenaStats;
    Detail Gauge "lowtide_heap_arena_live_bytes" = heap_arena.live,
        "Bytes of live blocks in a dedicated heap arena, as that of a resource; the first 64 names \
         of a process are published.";
    Detail Gauge "lowtide_heap_arena_retained_bytes" = heap_arena.retained(),
        "Physical bytes that a dedicated heap arena keeps in addition to live bytes.";
    Detail Counter "lowtide_heap_purges_total" ["trigger"] as HEAP_PURGES,
        "Heap purges by lowtide, by trigger (pressure, manual, unload, load, growth, idle, \
         periodic).";
    Detail Counter "lowtide_heap_purged_bytes_total" ["heap"] as HEAP_PURGED,
        "Physical bytes released by heap purges, by heap: jemalloc (its dirty pages), muzzy (its \
         muzzy pages), libc (the heap of the C library).";
    Detail Counter "lowtide_heap_spills_total" [] as HEAP_SPILLS,
        "Times that work outgrew its claim and began to spill to disk (LOWTIDE_SPILL_DIR).";
    Detail Histogram "lowtide_heap_purge_duration_seconds" ["heap"] as HEAP_PURGE_SECONDS,
        "Duration of a heap purge, by heap (jemalloc with its muzzy pages, libc).";

    @ ["device", "arena"] #[cfg(feature = "device")] arena: ArenaSnapshot;
    Basic Gauge "lowtide_device_live_bytes" = arena.live,
        "Bytes of device blocks that the application has allocated and not freed, after rounding.";
    Detail Gauge "lowtide_device_asleep_bytes" = arena.asleep,
        "Part of an arena's live bytes without device memory because the arena is asleep.";
    Detail Gauge "lowtide_device_offloaded_bytes" = arena.offloaded,
        "Host memory that holds the contents of a sleeping arena, or is kept for the next sleep.";
    Detail Gauge "lowtide_device_requested_bytes" = arena.requested,
        "Bytes of live device memory as requested by callers, before rounding.";
    Detail Gauge "lowtide_device_idle_bytes" = arena.idle,
        "Bytes of an arena's committed granules that are entirely free.";
    Basic Gauge "lowtide_device_committed_bytes" = arena.committed,
        "Physical bytes that an arena has allocated from its driver.";
    Basic Gauge "lowtide_device_retained_bytes" = arena.retained(),
        "Physical bytes that an arena keeps in addition to live bytes: committed minus live bytes \
         that are awake.";
    Detail Gauge "lowtide_device_hole_bytes" = arena.holes,
        "Free bytes inside an arena's active granules (fragmentation).";
    Detail Gauge "lowtide_device_largest_free_bytes" = arena.largest_free,
        "Size of a free block in an arena's committed memory, the largest of those examined.";
    Detail Gauge "lowtide_device_live_peak_bytes" = arena.live_peak,
        "Largest number of live bytes since the arena was opened.";
    Detail Gauge "lowtide_device_committed_peak_bytes" = arena.committed_peak,
        "Largest number of committed bytes since the arena was opened.";
    Detail Gauge "lowtide_device_pending_bytes" = arena.pending,
        "Bytes freed by the application that queued device work may still use.";
    Detail Gauge "lowtide_device_cached_bytes" = arena.cached,
        "Bytes of free device blocks in the caches of threads and lanes; part of the holes.";
    Detail Gauge "lowtide_device_metadata_bytes" = arena.metadata,
        "Host memory that an arena uses for its own metadata.";
    Detail Gauge "lowtide_device_limit_bytes" = arena.limit,
        "Limit of an arena's committed bytes; absent if there is no limit.";
    Detail Gauge "lowtide_device_leases" = u64::from(arena.leases),
        "Leases of an arena that are held now.";
    Basic Gauge "lowtide_device_state" = arena.state as u64,
        "State of an arena: 0 awake, 1 draining, 2 asleep, 3 waking.";
    Detail Gauge "lowtide_device_arena_info" ["device", "arena", "backend"] as DEVICE_ARENA_INFO,
        "1 while an arena is open, by the backend that allocates its memory (cuda_virtual_memory, \
         cuda_pool, cuda_plain, host, pinned_host, custom); 0 after it was closed.";
    Detail Counter "lowtide_device_sleeps_total" = arena.sleeps_total,
        "Times that an arena went to sleep.";
    Detail Counter "lowtide_device_wakes_total" = arena.wakes_total,
        "Times that an arena woke.";
    Basic Counter "lowtide_device_wake_failures_total" = arena.wake_failures_total,
        "Failed attempts to wake an arena. It stays asleep and loses nothing.";
    Detail Counter "lowtide_device_allocs_total" = arena.allocs_total,
        "Device blocks allocated.";
    Detail Counter "lowtide_device_frees_total" = arena.frees_total,
        "Device blocks freed.";
    Basic Counter "lowtide_device_alloc_failures_total" ["device", "arena", "reason"]
        = arena.alloc_failures(),
        "Failed device allocations, by reason: limit (the arena's), device (its memory is full), \
         addresses (no free range), driver (an error).";
    Detail Counter "lowtide_device_commits_total" = arena.commits_total,
        "Driver calls that committed device memory.";
    Detail Counter "lowtide_device_decommits_total" = arena.decommits_total,
        "Driver calls that released device memory.";
    Detail Counter "lowtide_device_commit_bytes_total" = arena.committed_bytes_total,
        "Bytes of device memory committed.";
    Detail Counter "lowtide_device_decommit_bytes_total" = arena.decommitted_bytes_total,
        "Bytes of device memory returned to the driver.";
    Detail Counter "lowtide_device_remaps_total" = arena.remaps_total,
        "Driver calls that moved the physical memory of idle granules to addresses that needed it.";
    Detail Counter "lowtide_device_remap_bytes_total" = arena.remapped_bytes_total,
        "Bytes of physical memory moved from idle granules to addresses that needed it.";
    Detail Counter "lowtide_device_moves_total" = arena.moves_total,
        "Device blocks moved by compaction.";
    Detail Counter "lowtide_device_moved_bytes_total" = arena.moved_bytes_total,
        "Bytes of device blocks moved by compaction.";
    Detail Counter "lowtide_device_released_bytes_total" ["device", "arena", "cause"]
        = [("trim", arena.trimmed_bytes_total), ("shrink", arena.shrunk_bytes_total)],
        "Bytes of device memory released on request, by cause (trim, which includes purges, or \
         shrink).";
    Detail Counter "lowtide_device_shortage_callbacks_total" = arena.shortage_callbacks_total,
        "Calls of shortage callbacks, which release memory when device memory is short.";
    Detail Counter "lowtide_device_shortage_panics_total" = arena.shortage_panics_total,
        "Shortage callbacks that panicked.";
    Detail Counter "lowtide_device_lock_contended_total" = arena.lock_contended_total,
        "Times that a thread had to wait for a lock of an arena.";
    Detail Gauge "lowtide_device_lock_wait_seconds" = arena.lock_wait_total,
        "Total time that threads have waited for an arena's lock.";
    Detail Gauge "lowtide_device_exported_bytes" = arena.exported,
        "Bytes of blocks exported to other code (DLPack, raw pointers). The arena does not sleep \
         while any are exported.";
    Detail Gauge "lowtide_device_imported_bytes" = arena.imported,
        "Bytes allocated by other code and imported into an arena, until they are released. No \
         other metric of the arena includes them.";
    Detail Counter "lowtide_device_release_panics_total" = arena.release_panics_total,
        "Release functions of imported memory that panicked.";
    Detail Counter "lowtide_device_parked_errors_total" = arena.parked_errors_total,
        "CUDA errors that cudarc stored when it used views of buffers that were already freed.";

    @ ["device"] #[cfg(feature = "device")] device_memory: DeviceSnapshot;
    Basic Gauge "lowtide_device_lost" as DEVICE_LOST,
        "1 once the device is lost, until the process restarts; else 0.";
    Detail Gauge "lowtide_device_budget_reserved_bytes" as DEVICE_RESERVED,
        "Bytes of the device's memory that requests, and on the first device loaded resources, \
         have reserved; absent if its memory is the host's.";
    Detail Gauge "lowtide_device_budget_ceiling_bytes" as DEVICE_CEILING,
        "LOWTIDE_CEILING times LOWTIDE_DEVICE_LIMIT; absent without a limit; 0 once the device is \
         lost.";
    Detail Gauge "lowtide_device_budget_allowance_bytes" as DEVICE_ALLOWANCE,
        "Reserved bytes of the device up to which requests are admitted now; absent without a \
         limit; 0 once the device is lost.";
    Basic Counter "lowtide_device_rollback_failures_total" as DEVICE_ROLLBACK_FAILURES,
        "Driver calls that failed while undoing another call. Each may leak memory or addresses \
         until the process ends.";
    Basic Gauge "lowtide_device_total_bytes" = device_memory.total,
        "Memory of the device. Absent if the device does not report it; NaN if it no longer does.";
    Basic Gauge "lowtide_device_free_bytes" = device_memory.free,
        "Free memory of the device, all processes considered.";
    Detail Gauge "lowtide_device_context_overhead_bytes" = device_memory.context_overhead,
        "Device memory in use right after the CUDA context was created, other processes included.";
    Basic Gauge "lowtide_device_unmanaged_bytes" = device_memory.unmanaged,
        "Used device memory outside lowtide's arenas and the context overhead: other processes and \
         allocators.";
    Detail Counter "lowtide_device_watermark_released_bytes_total"
        = device_memory.watermark_released_total,
        "Idle bytes that arenas released because free device memory fell below the watermark.";

    @ [] pressure: HostPressure<'_>;
    Basic Gauge "lowtide_pressure_level" = u64::from(pressure.state.level(Budget::Host).as_u8()),
        "Pressure level of host memory: 0 none, 1 elevated, 2 high, 3 critical.";
    Basic Gauge "lowtide_pressure_limit_bytes" = pressure.signal.limit.bytes,
        "Limit of host memory; lowtide_pressure_limit_info names its source.";
    Detail Gauge "lowtide_pressure_limit_info" ["source"]
        = LimitSource::ALL.map(|source| (source.name(), pressure.signal.limit.source == source)),
        "1 for the source that set the limit of host memory: cgroup (its hard limit), high \
         (memory.high), machine, commit (strict overcommit), override (LOWTIDE_MEMORY_LIMIT or the \
         builder), address_space (ulimit), fit (an operator is about to lower it), unknown; 0 for \
         the others.";
    Basic Gauge "lowtide_pressure_limit_stale" = pressure.signal.limit_is_stale,
        "1 while the cgroup's limit cannot be read and the last value is used, else 0.";
    Basic Gauge "lowtide_pressure_exhausted" = pressure.state.is_exhausted(),
        "1 while memory that no request owns leaves no room for the smallest request, else 0.";
    Basic Gauge "lowtide_pressure_physical_bytes" = pressure.state.physical(),
        "Memory that counts against the limit: the cgroup's usage without page cache, or the \
         process's anonymous and shared memory.";
    Basic Gauge "lowtide_pressure_physical_peak_bytes"
        = pressure.peak.max(pressure.state.physical()),
        "Largest lowtide_pressure_physical_bytes of the last 30 to 60 s, so that a scrape does not \
         miss a short peak.";
    Basic Gauge "lowtide_pressure_part_bytes" ["part"] as PRESSURE_PART,
        "Parts of the limit of host memory: live blocks of the heap by owner (requests, resources, \
         heap for the rest), fragmentation (of the heap, thread caches and metadata included), \
         purgeable, arenas (device arenas in host memory), other, headroom. The sum is the limit; \
         without one there is no headroom, and the sum is physical memory.";
    Detail Gauge "lowtide_pressure_purgeable_bytes" = pressure.state.sample().purgeable,
        "Part of lowtide_pressure_physical_bytes that a purge would release.";
    Basic Gauge "lowtide_pressure_required_bytes" = pressure.state.sample().required(),
        "Memory in use after a purge: physical minus purgeable bytes.";
    Detail Gauge "lowtide_pressure_charged_bytes" = pressure.signal.charged,
        "Anonymous and shared memory of the whole cgroup, including other processes; absent if no \
         memory cgroup can be read.";
    Detail Counter "lowtide_pressure_transitions_total" ["to"]
        = Level::ALL.map(|level| (level.name(), pressure.state.entered_total(level))),
        "Changes of the pressure level, by the new level (none, elevated, high, critical).";
    Basic Gauge "lowtide_saturation_ratio" = pressure.state.saturation(),
        "How near the service is to rejecting requests for lack of memory, 0 to 1, for \
         autoscalers. A mean over about 15 s.";
    Detail Gauge "lowtide_admission_ceiling_part_bytes" ["part"]
        = (pressure.state.limit() != ByteSize::MAX)
            .then(|| pressure.state.ceiling_parts().by_name()),
        "What determines the host's ceiling (start, earned, reserve_fixed, reserve_unlearned, \
         reserve_growth): earned, at most the limit less the largest reserve, at least start.";

    @ ["group", "event"] events: EventCounts;
    Basic Counter "lowtide_pressure_oom_kills_total" [] as PRESSURE_OOM_KILLS,
        "Processes of the cgroup killed by the kernel's OOM killer; absent without a cgroup.";
    Detail Counter "lowtide_pressure_events_total" = events.by_name(),
        "Memory events counted by the kernel since the start (high, max, oom, oom_kill), in the \
         process's cgroup (own) and in its limited ancestors (above); absent if the kernel does \
         not report them.";

    @ ["kind"] psi: Psi;
    Detail Gauge "lowtide_pressure_stall_ratio"
        = psi.by_name().map(|(kind, avg10, _)| (kind, avg10)),
        "Share of the last 10 s in which tasks of the cgroup waited for memory (PSI avg10), by \
         kind (some, full); absent if the kernel does not report it.";
    Detail Gauge "lowtide_pressure_stall_seconds"
        = psi.by_name().map(|(kind, _, total)| (kind, total)),
        "Total time that tasks of the cgroup have waited for memory (PSI total), by kind (some, \
         full).";

    @ ["budget"] ledger: Ledger;
    Basic Gauge "lowtide_admission_reserved_bytes" = ledger.reserved_bytes(),
        "Bytes reserved by admitted requests and loaded resources, as estimated.";
    Basic Gauge "lowtide_admission_ceiling_bytes" = ledger.ceiling(),
        "Bytes that requests, resources and other memory may fill together: LOWTIDE_CEILING times \
         the memory limit, or else .80 to .93 of it; absent without a limit.";
    Basic Gauge "lowtide_admission_allowance_bytes" = limited(ledger, ledger.allowance_bytes()),
        "Reserved bytes up to which requests are admitted now; absent without a limit.";
    Basic Gauge "lowtide_admission_correction_factor_ratio"
        = limited(ledger, ledger.correction_factor()),
        "Measured memory per byte that requests hold, or have reserved if they are not measured, 1 \
         to 5, initially 2 or LOWTIDE_CORRECTION_FACTOR; absent without a limit.";
    Detail Gauge "lowtide_admission_reserved_headroom_bytes" = ledger.reserved_headroom(),
        "Free allowance that a request below high priority must find while larger requests get \
         less than their share; else 0.";

    @ [] admission: AdmissionStats;
    Basic Counter "lowtide_admission_admitted_total" = admission.admitted_total,
        "Requests admitted.";
    Basic Gauge "lowtide_admission_permits" = admission.held(),
        "Permits held now.";
    Basic Counter "lowtide_admission_rejected_total" ["reason"]
        = RejectReason::ALL.map(|reason| (reason.name(), admission.rejected_total(reason))),
        "Requests rejected, by reason (too_large, full, pressure, shutting_down, exhausted, \
         slow_start, device_lost, outgrown, slow_client, held_too_long). The last three had been \
         admitted, and were ended unless their answers came first.";
    Detail Gauge "lowtide_admission_observe_mode" = admission.observe_mode,
        "1 in observe mode, else 0.";
    Detail Counter "lowtide_admission_observed_total" ["reason"]
        = RejectReason::ALL.map(|reason| (reason.name(), admission.observed[reason as usize])),
        "Requests and loads that only observe mode admitted, by reason.";
    Basic Gauge "lowtide_admission_waiting" = admission.waiting,
        "Requests that wait for room now, suspended ones included.";
    Detail Counter "lowtide_admission_waited_total" = admission.waited_total,
        "Requests admitted or resumed after they had waited for room.";
    Detail Counter "lowtide_admission_suspended_total" = admission.suspended_total,
        "Reservations suspended while their requests waited for their clients.";
    Basic Gauge "lowtide_admission_oldest_permit_seconds" = admission.oldest_permit,
        "Time since the oldest running request was admitted, among those that have waited and have \
         a time limit, or are measured and have reserved 64 KiB; 0 without one.";
    Detail Gauge "lowtide_admission_wait_seconds" = admission.waited_time_total,
        "Total time that requests have waited for room, whether they were admitted or not; without \
         those that still wait.";
    Detail Gauge "lowtide_connections" as CONNECTIONS,
        "Open connections of servers that bound them.";
    Detail Counter "lowtide_connections_closed_total" ["reason"] as CONNECTIONS_CLOSED,
        "Connections that were closed, by reason: refused (no place was free), displaced (for \
         another one), stalled (the client read nothing while memory was short), overdue (it read \
         nothing of a response whose time limit had passed).";
    Detail Counter "lowtide_admission_outlived_bytes_total" = admission.outlived_bytes_total,
        "Bytes that measured requests still held when they ended: in caches, in tasks that go on, \
         or leaked.";

    @ ["method", "route"] route: MemoryUsage;
    Basic Gauge "lowtide_admission_route_live_bytes" = route.live,
        "Bytes that running requests of the route hold, as measured, in steps of 64 KiB for each \
         request. Exempt requests are not counted.";
    Basic Counter "lowtide_admission_route_requests_total" = route.requests_total,
        "Measured requests of the route that have ended, also those that failed.";
    Basic Counter "lowtide_admission_route_peak_bytes_total" = route.peak_bytes_total,
        "Sum of the largest number of bytes that each ended request of the route held. Divided by \
         lowtide_admission_route_requests_total, it is the mean need.";
    Detail Counter "lowtide_admission_route_claim_bytes_total" = route.claim_bytes_total,
        "Sum of the bytes that each ended request of the route had reserved. Divided by \
         lowtide_admission_route_peak_bytes_total, it is the margin of reservations.";

    Detail Counter "lowtide_admission_route_observed_total" = route.observed.iter().sum::<u64>(),
        "Ended requests of the route that only observe mode admitted.";

    @ ["tenant"] tenant: MemoryUsage;
    Detail Gauge "lowtide_admission_tenant_live_bytes" = tenant.live,
        "Bytes that running requests of the tenant hold, as measured, in steps of 64 KiB for each \
         request. Exempt requests are not counted; absent if the service names no tenants.";
    Detail Gauge "lowtide_admission_tenant_live_peak_bytes" = tenant.live_peak,
        "Largest number of bytes that running requests of the tenant held together since the \
         start.";

    @ ["budget", "size_class", "outcome"] class: ClassStats;
    Detail Counter "lowtide_admission_requests_total"
        = [("admitted", class.admitted_total), ("rejected", class.rejected_total)],
        "Requests by outcome (admitted, or rejected because they did not fit) and by size class \
         (its upper bound, or larger). Exempt requests are not counted.";
    Detail Counter "lowtide_admission_bytes_total"
        = [("admitted", class.admitted_bytes_total), ("rejected", class.rejected_bytes_total)],
        "Estimated bytes of the requests counted by lowtide_admission_requests_total.";

    @ ["resource"] resource: ResourceStats;
    Basic Gauge "lowtide_resource_loaded" = resource.loaded,
        "1 if the resource is loaded, else 0.";
    Detail Gauge "lowtide_resource_guards" = resource.guards as u64,
        "Guards of the resource that are held now. It is not unloaded while any are.";
    Detail Gauge "lowtide_resource_loading" = resource.loading,
        "1 while the resource is being loaded, else 0.";
    Detail Gauge "lowtide_resource_waiting" = resource.waiting as u64,
        "Callers waiting for the resource.";
    Detail Gauge "lowtide_resource_cost_bytes" ["resource", "budget"] = resource.cost,
        "Bytes that the next load of the resource reserves, by budget.";
    Detail Gauge "lowtide_resource_last_used_timestamp_seconds" as RESOURCE_LAST_USED,
        "Time of the resource's last release, in seconds since the Unix epoch.";
    Basic Counter "lowtide_resource_loads_total" ["resource", "outcome"]
        = [("ok", resource.loads_ok_total), ("failed", resource.loads_failed_total),
           ("refused", resource.loads_refused_total)],
        "Loads of the resource, by outcome (ok, failed, and refused: for lack of memory).";
    Basic Counter "lowtide_resource_unloads_total" ["resource", "reason"]
        = UnloadReason::ALL.map(|reason| (reason.name(), resource.unloads_total(reason))),
        "Unloads of the resource, by reason (idle, pressure, eviction, manual, shutdown).";
    Basic Gauge "lowtide_resource_measured_bytes" ["resource", "budget"] = resource.measured,
        "Bytes that the resource held right after its last load, by budget (host, device); absent \
         if its memory was not measured.";
    Detail Counter "lowtide_resource_recovered_bytes_total" ["resource", "budget"]
        = resource.recovered_total,
        "Bytes released by unloads of the resource, by budget, as far as measured.";
    Detail Gauge "lowtide_resource_last_load_seconds" = resource.load_time,
        "Duration of the resource's last load.";
    Detail Gauge "lowtide_resource_last_unload_seconds" = resource.unload_time,
        "Duration of the last call of the resource's unload function.";
    Detail Counter "lowtide_resource_unload_panics_total" = resource.unload_panics_total,
        "Unload functions of the resource that panicked.";

    @ ["reclaimer"] reclaimer: ReclaimerStats;
    Detail Counter "lowtide_reclaimer_calls_total" = reclaimer.calls_total,
        "Calls of the application's function that releases memory, by reclaimer (at most 64).";
    Detail Counter "lowtide_reclaimer_released_bytes_total" = reclaimer.released_total,
        "Bytes that these calls reported as released.";
    Detail Gauge "lowtide_reclaimer_run_seconds" = reclaimer.time_total,
        "Time that these calls have taken since the start.";
    Detail Counter "lowtide_reclaimer_panics_total" = reclaimer.panics_total,
        "Calls of the reclaimer's functions that panicked.";

    @ [] process: ProcessStats;
    Basic Gauge "lowtide_sampler_last_run_timestamp_seconds" as SAMPLER_LAST_RUN,
        "Time of the last publication of metrics, in seconds since the Unix epoch.";
    Detail Histogram "lowtide_sampler_duration_seconds" as SAMPLER_SECONDS,
        "Duration of taking and publishing the metrics.";
    Detail Counter "lowtide_sampler_ticks_total" as SAMPLER_TICKS,
        "Ticks of the control loop.";
    Detail Gauge "lowtide_sampler_lateness_seconds" as SAMPLER_LATENESS,
        "Largest delay of a tick of the control loop since the last publication.";
    Basic Gauge "lowtide_diagnostics" as DIAGNOSTICS,
        "Warnings found at start or later; /memory lists them among diagnostics.";
    Basic Gauge "lowtide_build_info" ["version", "profile", "service_version"] as BUILD_INFO,
        "Always 1; the labels name the version of lowtide, the profile, and the version of the \
         service (LOWTIDE_SERVICE_VERSION), or unknown.";
    Basic Gauge "process_resident_memory_bytes" as PROCESS_RESIDENT,
        "Resident set size of the process.";
    Basic Counter "process_cpu_seconds_total" as PROCESS_CPU,
        "CPU time of the process in user and system mode, in whole seconds.";
    Basic Gauge "process_start_time_seconds" = process.start,
        "Start time of the process, in seconds since the Unix epoch.";
    Detail Gauge "process_virtual_memory_bytes" = process.address_space,
        "Address space of the process.";
    Detail Gauge "process_threads" = process.threads,
        "Threads of the process.";
    Detail Gauge "process_open_fds" = process.open_fds,
        "Open file descriptors of the process.";
    Detail Gauge "process_max_fds" = process.max_fds,
        "Limit of open file descriptors of the process; absent if there is none.";
        }
    };
}

/// The metric of a row. Its labels are its own, or those of its section.
macro_rules! metric {
    ($tier:ident $kind:ident $name:literal $help:literal $section:tt) => {
        Metric {
            name: $name,
            tier: MetricsTier::$tier,
            kind: MetricKind::$kind,
            labels: &$section,
            help: $help,
        }
    };
    ($tier:ident $kind:ident $name:literal $help:literal $section:tt $own:tt) => {
        metric!($tier $kind $name $help $own)
    };
}

/// The constant of a row, if it has one.
macro_rules! constant {
    ([] $($metric:tt)+) => {};
    ([$id:ident] $tier:ident $kind:ident $name:literal $help:literal $($labels:tt)+) => {
        #[doc = $help]
        #[allow(clippy::doc_markdown, reason = "help texts name label values as they are")]
        pub const $id: Metric = metric!($tier $kind $name $help $($labels)+);
    };
}

macro_rules! table {
    ($(@ $labels:tt $(#[$cfg:meta])? $source:ident: $type:ty;
        $($tier:ident $kind:ident $name:literal $([$($own:literal),*])? $(as $id:ident)?
            $(= $value:expr)?, $help:literal;)*
    )*) => {
        $($(constant!([$($id)?] $tier $kind $name $help $labels $([$($own),*])?);)*)*
        /// All metrics of the crate. Those that begin with `lowtide_device` are published only with
        /// the feature `device`.
        pub const TABLE: &[Metric] =
            &[$($(metric!($tier $kind $name $help $labels $([$($own),*])?)),*),*];
    };
}

rows!(table);

/// The buckets of the histograms, in seconds: from a tenth of a millisecond to a second.
pub const SECONDS_BUCKETS: &[f64] = &[0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0];

lowtide_core::named_enum! {
    /// The metrics that a `Memory` publishes. `docs/METRICS.md` names the tier of each.
    ///
    /// A metric that is not published costs nothing: its series are not written, and it is not
    /// described to the recorder. Each tier contains the metrics of those before it.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
    #[non_exhaustive]
    pub enum MetricsTier {
        /// Those that the alerts and the dashboards `overview` and `device` need: some 45 names.
        #[default]
        Basic = "basic",
        /// All, with the internals of heap, arenas and admission: some 135 names.
        Detail = "detail",
    }
}

lowtide_core::by_name!(MetricsTier, "basic or detail");

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_unique_and_carry_prefix_and_unit() {
        for (at, metric) in TABLE.iter().enumerate() {
            let name = metric.name;
            assert!(TABLE[..at].iter().all(|other| other.name != name), "{name} stands twice");
            let prefixes = ["lowtide_", "process_"];
            assert!(prefixes.iter().any(|prefix| name.starts_with(prefix)), "{name}");
            assert_eq!(metric.kind == MetricKind::Counter, name.ends_with("_total"), "{name}");
            assert!(metric.help.ends_with('.'), "{name}: help is a sentence");
        }
    }
}
