//! The table of metric names: name, type, unit, labels and help of every metric.
//!
//! Tests compare dashboards, rules, docs and a live scrape with this table. Every name contains its
//! unit, so that an exporter's own naming rules change nothing.

use metrics::Unit;

use super::MetricsTier;

/// The type of a metric, in Prometheus' terms.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A value that rises and falls.
    Gauge,
    /// A total that only rises while the process runs.
    Counter,
    /// Observations in buckets.
    Histogram,
}

impl Kind {
    /// Returns the word in a `# TYPE` line.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Gauge => "gauge",
            Self::Counter => "counter",
            Self::Histogram => "histogram",
        }
    }
}

/// A metric.
#[derive(Clone, Copy, Debug)]
pub struct Metric {
    /// The full name.
    pub name: &'static str,
    /// The tier in which it is published.
    pub tier: MetricsTier,
    /// The type.
    pub kind: Kind,
    /// The unit.
    pub unit: Unit,
    /// The labels of every series.
    pub labels: &'static [&'static str],
    /// The help text, one sentence.
    pub help: &'static str,
}

macro_rules! table {
    (
        $($id:ident: $tier:ident $kind:ident $name:literal $unit:ident [$($label:literal),*]
            $help:literal;)*
    ) => {
        $(
            #[doc = $help]
            #[allow(clippy::doc_markdown, reason = "help texts name label values as they are")]
            pub const $id: Metric = Metric {
                name: $name,
                tier: MetricsTier::$tier,
                kind: Kind::$kind,
                unit: Unit::$unit,
                labels: &[$($label),*],
                help: $help,
            };
        )*
        /// All metrics of the crate. Those that begin with `lowtide_device` are published only with
        /// the feature `device`.
        pub const TABLE: &[Metric] = &[$($id),*];
    };
}

table! {
    HEAP_LIVE: Basic Gauge "lowtide_heap_live_bytes" Bytes []
        "Bytes of heap blocks that the application has allocated and not freed.";
    HEAP_ACTIVE: Detail Gauge "lowtide_heap_active_bytes" Bytes []
        "Bytes of heap pages that contain at least one live or cached block.";
    HEAP_RESIDENT: Detail Gauge "lowtide_heap_resident_bytes" Bytes []
        "Bytes of the jemalloc heap in physical memory, as counted by jemalloc.";
    HEAP_RETAINED: Basic Gauge "lowtide_heap_retained_bytes" Bytes []
        "Physical bytes that the heap keeps in addition to live bytes: resident minus live. \
         Not jemalloc's stats.retained, which is lowtide_heap_unbacked_bytes.";
    HEAP_DIRTY: Detail Gauge "lowtide_heap_dirty_bytes" Bytes []
        "Bytes of unused heap pages that are still in physical memory.";
    HEAP_MUZZY: Detail Gauge "lowtide_heap_muzzy_bytes" Bytes []
        "Bytes of unused heap pages that the kernel may reclaim (MADV_FREE).";
    HEAP_METADATA: Detail Gauge "lowtide_heap_metadata_bytes" Bytes []
        "Bytes that jemalloc uses for its own metadata.";
    HEAP_UNBACKED: Detail Gauge "lowtide_heap_unbacked_bytes" Bytes []
        "Heap address space kept for reuse, without physical memory.";
    HEAP_THREAD_CACHES: Detail Gauge "lowtide_heap_thread_cache_bytes" Bytes []
        "Bytes of free blocks in jemalloc's thread caches.";
    HEAP_ARENA_LIVE: Detail Gauge "lowtide_heap_arena_live_bytes" Bytes ["heap_arena"]
        "Bytes of live blocks in a dedicated heap arena. The arena of a resource has the \
         resource's name; the first 64 names of a process are published.";
    HEAP_ARENA_RETAINED: Detail Gauge "lowtide_heap_arena_retained_bytes" Bytes ["heap_arena"]
        "Physical bytes that a dedicated heap arena keeps in addition to live bytes: active \
         plus dirty plus muzzy, minus live.";
    HEAP_PURGES: Detail Counter "lowtide_heap_purges_total" Count ["trigger"]
        "Heap purges by lowtide, by trigger (pressure, manual, unload, load, growth, idle, \
         periodic).";
    HEAP_PURGED: Detail Counter "lowtide_heap_purged_bytes_total" Bytes ["heap"]
        "Physical bytes released by heap purges of lowtide, by heap: jemalloc (its dirty pages), \
         muzzy (jemalloc's muzzy pages), libc (the heap of the C library).";
    HEAP_PURGE_SECONDS: Detail Histogram "lowtide_heap_purge_duration_seconds" Seconds ["heap"]
        "Duration of a heap purge, by heap (jemalloc with its muzzy pages, libc).";
    DEVICE_LIVE: Basic Gauge "lowtide_device_live_bytes" Bytes ["device", "arena"]
        "Bytes of device blocks that the application has allocated and not freed, after rounding.";
    DEVICE_ASLEEP: Detail Gauge "lowtide_device_asleep_bytes" Bytes ["device", "arena"]
        "Part of an arena's live bytes without device memory because the arena is asleep.";
    DEVICE_OFFLOADED: Detail Gauge "lowtide_device_offloaded_bytes" Bytes ["device", "arena"]
        "Host memory that holds the contents of a sleeping arena, or is kept for the next sleep.";
    DEVICE_REQUESTED: Detail Gauge "lowtide_device_requested_bytes" Bytes ["device", "arena"]
        "Bytes of live device memory as requested by callers, before rounding.";
    DEVICE_IDLE: Detail Gauge "lowtide_device_idle_bytes" Bytes ["device", "arena"]
        "Bytes of an arena's committed granules that are entirely free.";
    DEVICE_COMMITTED: Basic Gauge "lowtide_device_committed_bytes" Bytes ["device", "arena"]
        "Physical bytes that an arena has allocated from its driver.";
    DEVICE_RETAINED: Basic Gauge "lowtide_device_retained_bytes" Bytes ["device", "arena"]
        "Physical bytes that an arena keeps in addition to live bytes: committed minus those live \
         bytes that are in device memory (live minus asleep).";
    DEVICE_HOLES: Detail Gauge "lowtide_device_hole_bytes" Bytes ["device", "arena"]
        "Free bytes inside an arena's active granules (fragmentation).";
    DEVICE_LARGEST_FREE: Detail Gauge "lowtide_device_largest_free_bytes" Bytes ["device", "arena"]
        "Size of an arena's largest free block in committed memory.";
    DEVICE_LIVE_PEAK: Detail Gauge "lowtide_device_live_peak_bytes" Bytes ["device", "arena"]
        "Largest number of live bytes since the arena was opened.";
    DEVICE_COMMITTED_PEAK: Detail Gauge "lowtide_device_committed_peak_bytes" Bytes
        ["device", "arena"]
        "Largest number of committed bytes since the arena was opened.";
    DEVICE_PENDING: Detail Gauge "lowtide_device_pending_bytes" Bytes ["device", "arena"]
        "Bytes freed by the application that queued device work may still use.";
    DEVICE_CACHED: Detail Gauge "lowtide_device_cached_bytes" Bytes ["device", "arena"]
        "Bytes of free device blocks in the caches of threads and lanes; part of the holes.";
    DEVICE_METADATA: Detail Gauge "lowtide_device_metadata_bytes" Bytes ["device", "arena"]
        "Host memory that an arena uses for its own metadata.";
    DEVICE_LIMIT: Detail Gauge "lowtide_device_limit_bytes" Bytes ["device", "arena"]
        "Limit of an arena's committed bytes; absent if there is no limit.";
    DEVICE_LEASES: Detail Gauge "lowtide_device_leases" Count ["device", "arena"]
        "Number of leases of an arena that are held now.";
    DEVICE_STATE: Basic Gauge "lowtide_device_state" Count ["device", "arena"]
        "State of an arena: 0 awake, 1 draining, 2 asleep, 3 waking.";
    DEVICE_ARENA_INFO: Detail Gauge "lowtide_device_arena_info" Count ["device", "arena", "backend"]
        "1 while an arena is open, by the backend that allocates its memory (cuda_virtual_memory, \
         cuda_pool, cuda_plain, host, pinned_host, custom); 0 after it was closed.";
    DEVICE_SLEEPS: Detail Counter "lowtide_device_sleeps_total" Count ["device", "arena"]
        "Times that an arena went to sleep.";
    DEVICE_WAKES: Detail Counter "lowtide_device_wakes_total" Count ["device", "arena"]
        "Times that an arena woke.";
    DEVICE_WAKE_FAILURES: Basic Counter "lowtide_device_wake_failures_total" Count
        ["device", "arena"]
        "Failed attempts to wake an arena. It stays asleep and loses nothing.";
    DEVICE_ALLOCS: Detail Counter "lowtide_device_allocs_total" Count ["device", "arena"]
        "Device blocks allocated.";
    DEVICE_FREES: Detail Counter "lowtide_device_frees_total" Count ["device", "arena"]
        "Device blocks freed.";
    DEVICE_ALLOC_FAILURES: Basic Counter "lowtide_device_alloc_failures_total" Count
        ["device", "arena", "reason"]
        "Failed device allocations, by reason: limit (the arena's), device (its memory is full), \
         addresses (no free range), driver (an error).";
    DEVICE_COMMITS: Detail Counter "lowtide_device_commits_total" Count ["device", "arena"]
        "Driver calls that committed device memory.";
    DEVICE_DECOMMITS: Detail Counter "lowtide_device_decommits_total" Count ["device", "arena"]
        "Driver calls that released device memory.";
    DEVICE_COMMITTED_TOTAL: Detail Counter "lowtide_device_commit_bytes_total" Bytes
        ["device", "arena"]
        "Bytes of device memory committed.";
    DEVICE_DECOMMITTED_TOTAL: Detail Counter "lowtide_device_decommit_bytes_total" Bytes
        ["device", "arena"]
        "Bytes of device memory returned to the driver.";
    DEVICE_REMAPS: Detail Counter "lowtide_device_remaps_total" Count ["device", "arena"]
        "Driver calls that moved the physical memory of idle granules to addresses that needed \
         it.";
    DEVICE_REMAPPED: Detail Counter "lowtide_device_remap_bytes_total" Bytes ["device", "arena"]
        "Bytes of physical memory moved from idle granules to addresses that needed it.";
    DEVICE_MOVES: Detail Counter "lowtide_device_moves_total" Count ["device", "arena"]
        "Device blocks moved by compaction.";
    DEVICE_MOVED: Detail Counter "lowtide_device_moved_bytes_total" Bytes ["device", "arena"]
        "Bytes of device blocks moved by compaction.";
    DEVICE_RELEASED: Detail Counter "lowtide_device_released_bytes_total" Bytes
        ["device", "arena", "cause"]
        "Bytes of device memory released on request rather than by decay, by cause (trim, which \
         includes purges, or shrink).";
    DEVICE_SHORTAGE_CALLBACKS: Detail Counter "lowtide_device_shortage_callbacks_total" Count
        ["device", "arena"]
        "Calls of shortage callbacks, which release memory when device memory is short.";
    DEVICE_SHORTAGE_PANICS: Detail Counter "lowtide_device_shortage_panics_total" Count
        ["device", "arena"]
        "Shortage callbacks that panicked.";
    DEVICE_LOCK_CONTENDED: Detail Counter "lowtide_device_lock_contended_total" Count
        ["device", "arena"]
        "Times that a thread had to wait for a lock of an arena.";
    DEVICE_LOCK_WAIT: Detail Gauge "lowtide_device_lock_wait_seconds" Seconds ["device", "arena"]
        "Total time that threads have waited for an arena's lock. A gauge, because counters \
         of the metrics facade are integers; rate() works all the same.";
    DEVICE_EXPORTED: Detail Gauge "lowtide_device_exported_bytes" Bytes ["device", "arena"]
        "Bytes of blocks exported to other code (DLPack, raw pointers). The arena does not sleep \
         while any are exported.";
    DEVICE_IMPORTED: Detail Gauge "lowtide_device_imported_bytes" Bytes ["device", "arena"]
        "Bytes allocated by other code and imported into an arena, until they are released. No \
         other metric of the arena includes them.";
    DEVICE_RELEASE_PANICS: Detail Counter "lowtide_device_release_panics_total" Count
        ["device", "arena"]
        "Release functions of imported memory that panicked.";
    DEVICE_PARKED_ERRORS: Detail Counter "lowtide_device_parked_errors_total" Count
        ["device", "arena"]
        "CUDA errors that cudarc stored when it used views of buffers that were already freed.";
    DEVICE_LOST: Basic Gauge "lowtide_device_lost" Count ["device"]
        "1 once the device is lost: until the process restarts every driver call for it fails, and \
         it admits nothing; else 0.";
    DEVICE_BUDGET_RESERVED: Detail Gauge "lowtide_device_budget_reserved_bytes" Bytes ["device"]
        "Bytes of the device's memory that requests, and on the first device loaded resources, \
         have reserved; absent if its memory is the host's.";
    DEVICE_BUDGET_CEILING: Detail Gauge "lowtide_device_budget_ceiling_bytes" Bytes ["device"]
        "Bytes of the device that requests, resources and other memory of arenas may fill \
         together: LOWTIDE_CEILING times LOWTIDE_DEVICE_LIMIT; absent without a limit; 0 once the \
         device is lost.";
    DEVICE_BUDGET_ALLOWANCE: Detail Gauge "lowtide_device_budget_allowance_bytes" Bytes ["device"]
        "Sum of reserved bytes of the device up to which requests are admitted now; absent without \
         a limit; 0 once the device is lost.";
    DEVICE_ROLLBACK_FAILURES: Basic Counter "lowtide_device_rollback_failures_total" Count
        ["device"]
        "Driver calls that failed while undoing another call. Each may leak memory or addresses \
         until the process ends.";
    DEVICE_TOTAL: Basic Gauge "lowtide_device_total_bytes" Bytes ["device"]
        "Memory of the device. Absent if the device does not report it; NaN if it no longer does.";
    DEVICE_FREE: Basic Gauge "lowtide_device_free_bytes" Bytes ["device"]
        "Free memory of the device, all processes considered.";
    DEVICE_CONTEXT_OVERHEAD: Detail Gauge "lowtide_device_context_overhead_bytes" Bytes ["device"]
        "Device memory in use right after the CUDA context was created: an upper bound of the \
         context's overhead, because it includes other processes at that moment.";
    DEVICE_UNMANAGED: Basic Gauge "lowtide_device_unmanaged_bytes" Bytes ["device"]
        "Used device memory outside lowtide's arenas and the context overhead: other processes, \
         and other allocators in this process (cudarc, ONNX Runtime).";
    DEVICE_WATERMARK_RELEASED: Detail Counter "lowtide_device_watermark_released_bytes_total" Bytes
        ["device"]
        "Idle bytes that arenas released because free device memory fell below the watermark \
         (LOWTIDE_DEVICE_WATERMARK).";
    PRESSURE_LEVEL: Basic Gauge "lowtide_pressure_level" Count []
        "Pressure level of host memory: 0 none, 1 elevated, 2 high, 3 critical.";
    PRESSURE_LIMIT: Basic Gauge "lowtide_pressure_limit_bytes" Bytes []
        "Limit of host memory; lowtide_pressure_limit_info names its source.";
    PRESSURE_LIMIT_INFO: Detail Gauge "lowtide_pressure_limit_info" Count ["source"]
        "1 for the source that set the limit of host memory: cgroup (its hard limit), high \
         (memory.high), machine, commit (strict overcommit), override (LOWTIDE_MEMORY_LIMIT or the \
         builder), address_space (ulimit), fit (an operator is about to lower it), unknown; 0 for \
         the others.";
    PRESSURE_LIMIT_STALE: Basic Gauge "lowtide_pressure_limit_stale" Count []
        "1 while the cgroup's limit cannot be read and the last value is used, else 0.";
    PRESSURE_EXHAUSTED: Basic Gauge "lowtide_pressure_exhausted" Count []
        "1 while memory that no request owns leaves no room for the smallest request, else 0.";
    PRESSURE_PHYSICAL: Basic Gauge "lowtide_pressure_physical_bytes" Bytes []
        "Memory that counts against the limit: the cgroup's usage without page cache, or the \
         process's anonymous and shared memory.";
    PRESSURE_PHYSICAL_PEAK: Basic Gauge "lowtide_pressure_physical_peak_bytes" Bytes []
        "Largest lowtide_pressure_physical_bytes of the last 30 to 60 s, as sampled by \
         the control loop, every 10 to 250 ms: a scrape does not miss a short peak.";
    PRESSURE_PART: Basic Gauge "lowtide_pressure_part_bytes" Bytes ["part"]
        "Parts of the limit of host memory: live blocks of the heap by owner (requests, resources, \
         heap for the rest), fragmentation (of the heap, thread caches and metadata included), \
         purgeable, arenas (device arenas in host memory), other, headroom. The sum is the limit; \
         without one there is no headroom, and the sum is physical memory.";
    PRESSURE_PURGEABLE: Detail Gauge "lowtide_pressure_purgeable_bytes" Bytes []
        "Part of lowtide_pressure_physical_bytes that a purge would release.";
    PRESSURE_REQUIRED: Basic Gauge "lowtide_pressure_required_bytes" Bytes []
        "Memory in use after a purge: physical minus purgeable bytes.";
    PRESSURE_CHARGED: Detail Gauge "lowtide_pressure_charged_bytes" Bytes []
        "Anonymous and shared memory of the whole cgroup, including other processes; absent if no \
         memory cgroup can be read.";
    PRESSURE_TRANSITIONS: Detail Counter "lowtide_pressure_transitions_total" Count ["to"]
        "Changes of the pressure level, by the new level (none, elevated, high, critical).";
    PRESSURE_OOM_KILLS: Basic Counter "lowtide_pressure_oom_kills_total" Count []
        "Processes of the cgroup killed by the kernel's OOM killer; absent without a cgroup.";
    PRESSURE_EVENTS: Detail Counter "lowtide_pressure_events_total" Count ["group", "event"]
        "Memory events counted by the kernel since the start (high, max, oom, oom_kill), in the \
         process's cgroup (own) and in its limited ancestors (above); absent if the kernel does \
         not report them.";
    PRESSURE_STALL: Detail Gauge "lowtide_pressure_stall_ratio" Count ["kind"]
        "Share of the last 10 s in which tasks of the cgroup waited for memory (PSI avg10), by \
         kind (some, full); absent if the kernel does not report it.";
    PRESSURE_STALL_TOTAL: Detail Gauge "lowtide_pressure_stall_seconds" Seconds ["kind"]
        "Total time that tasks of the cgroup have waited for memory (PSI total), by kind (some, \
         full). A gauge, because counters of the metrics facade are integers; rate() works all \
         the same.";
    SATURATION: Basic Gauge "lowtide_saturation_ratio" Count []
        "How near the service is to rejecting requests for lack of memory, 0 to 1, for \
         autoscalers: the part of the room for requests that is taken, and 1 while requests wait \
         or are rejected. A mean over about 15 s.";
    ADMISSION_RESERVED: Basic Gauge "lowtide_admission_reserved_bytes" Bytes ["budget"]
        "Bytes reserved by admitted requests and loaded resources, as estimated.";
    ADMISSION_CEILING: Basic Gauge "lowtide_admission_ceiling_bytes" Bytes ["budget"]
        "Bytes that requests, resources and other memory may fill together: LOWTIDE_CEILING times \
         the memory limit; without that setting it rises from .80 to at most .93 of it; absent \
         without a limit.";
    ADMISSION_CEILING_PART: Detail Gauge "lowtide_admission_ceiling_part_bytes" Bytes ["part"]
        "What determines the host's ceiling (start, earned, reserve_fixed, reserve_unlearned, \
         reserve_growth): the earned part, but at most the limit less the largest reserve, and at \
         least the start; absent without a limit.";
    ADMISSION_ALLOWANCE: Basic Gauge "lowtide_admission_allowance_bytes" Bytes ["budget"]
        "Sum of reserved bytes up to which requests are admitted now, computed from the ceiling, \
         the memory that no request owns and the correction factor; absent without a limit.";
    ADMISSION_CORRECTION_FACTOR: Basic Gauge "lowtide_admission_correction_factor_ratio" Count
        ["budget"]
        "Measured memory per byte that requests hold, or have reserved if they are not measured, \
         1 to 5, initially 2 or LOWTIDE_CORRECTION_FACTOR; absent without a limit.";
    ADMISSION_ADMITTED: Basic Counter "lowtide_admission_admitted_total" Count []
        "Requests admitted.";
    ADMISSION_HELD: Basic Gauge "lowtide_admission_permits" Count []
        "Number of permits held now.";
    ADMISSION_REJECTED: Basic Counter "lowtide_admission_rejected_total" Count ["reason"]
        "Requests rejected, by reason (too_large, full, pressure, shutting_down, exhausted, \
         slow_start, device_lost, outgrown, slow_client, held_too_long). The last three had been \
         admitted, and were ended while they ran.";
    ADMISSION_WAITING: Basic Gauge "lowtide_admission_waiting" Count []
        "Requests that wait for room now: before their bodies are read, or, if they were \
         suspended, before the end of their bodies.";
    ADMISSION_WAITED: Detail Counter "lowtide_admission_waited_total" Count []
        "Requests admitted or resumed after they had waited for room.";
    ADMISSION_SUSPENDED: Detail Counter "lowtide_admission_suspended_total" Count []
        "Reservations suspended because their requests waited for their clients while others \
         waited for room.";
    ADMISSION_OLDEST: Basic Gauge "lowtide_admission_oldest_permit_seconds" Seconds []
        "Time since the oldest running request was admitted, among those that have waited for \
         something and have a time limit, or are measured and have reserved 64 KiB or more; 0 \
         without one.";
    ADMISSION_WAIT_TIME: Detail Gauge "lowtide_admission_wait_seconds" Seconds []
        "Total time that requests have waited for room, whether they were admitted or not; without \
         those that still wait. A gauge, because counters of the metrics facade are integers; \
         rate() works all the same.";
    CONNECTIONS: Detail Gauge "lowtide_connections" Count []
        "Open connections of servers that bound them.";
    CONNECTIONS_CLOSED: Detail Counter "lowtide_connections_closed_total" Count ["reason"]
        "Connections that were closed, by reason: refused (when they were accepted, for lack of \
         places), displaced (for another one, after the longest time without progress), stalled \
         (their clients took nothing of a response while memory was short), overdue (their \
         clients took nothing of a response whose time limit had passed).";
    ADMISSION_OUTLIVED: Detail Counter "lowtide_admission_outlived_bytes_total" Bytes []
        "Bytes that measured requests still held when they ended: in caches, in tasks that go on, \
         or leaked. Includes headers of responses, which the server frees soon after.";
    ADMISSION_ROUTE_LIVE: Basic Gauge "lowtide_admission_route_live_bytes" Bytes ["method", "route"]
        "Bytes that running requests of the route hold, as measured: each request from 64 KiB on, \
         and to 64 KiB. Exempt requests are not counted.";
    ADMISSION_ROUTE_REQUESTS: Basic Counter "lowtide_admission_route_requests_total" Count
        ["method", "route"]
        "Measured requests of the route that have ended, also those that failed.";
    ADMISSION_ROUTE_PEAK: Basic Counter "lowtide_admission_route_peak_bytes_total" Bytes
        ["method", "route"]
        "Sum of the largest number of bytes that each ended request of the route held. Divided by \
         lowtide_admission_route_requests_total, it is the mean need.";
    ADMISSION_ROUTE_CLAIM: Detail Counter "lowtide_admission_route_claim_bytes_total" Bytes
        ["method", "route"]
        "Sum of the bytes that each ended request of the route had reserved. Divided by \
         lowtide_admission_route_peak_bytes_total, it is the margin of reservations.";
    ADMISSION_TENANT_LIVE: Detail Gauge "lowtide_admission_tenant_live_bytes" Bytes ["tenant"]
        "Bytes that running requests of the tenant hold, as measured: each request from 64 KiB on, \
         and to 64 KiB. Exempt requests are not counted; absent if the service names no tenants.";
    ADMISSION_TENANT_PEAK: Detail Gauge "lowtide_admission_tenant_live_peak_bytes" Bytes ["tenant"]
        "Largest number of bytes that running requests of the tenant held together since the \
         start.";
    ADMISSION_REQUESTS: Detail Counter "lowtide_admission_requests_total" Count
        ["budget", "size_class", "outcome"]
        "Requests by outcome (admitted, or rejected because they did not fit) and by size class \
         (its upper bound, or larger). Exempt requests are not counted; a class appears with its \
         first request.";
    ADMISSION_BYTES: Detail Counter "lowtide_admission_bytes_total" Bytes
        ["budget", "size_class", "outcome"]
        "Estimated bytes of the requests counted by lowtide_admission_requests_total.";
    ADMISSION_RESERVED_HEADROOM: Detail Gauge "lowtide_admission_reserved_headroom_bytes" Bytes
        ["budget"]
        "Free allowance that a request below high priority must find, even if it is smaller than \
         this, while a class of larger requests gets less than its share; else 0.";
    RESOURCE_LOADED: Basic Gauge "lowtide_resource_loaded" Count ["resource"]
        "1 if the resource is loaded, else 0.";
    RESOURCE_GUARDS: Detail Gauge "lowtide_resource_guards" Count ["resource"]
        "Number of guards of the resource that are held now. It is not unloaded while any \
         are.";
    RESOURCE_LOADING: Detail Gauge "lowtide_resource_loading" Count ["resource"]
        "1 while the resource is being loaded, else 0.";
    RESOURCE_WAITING: Detail Gauge "lowtide_resource_waiting" Count ["resource"]
        "Number of callers waiting for the resource.";
    RESOURCE_COST: Detail Gauge "lowtide_resource_cost_bytes" Bytes ["resource", "budget"]
        "Bytes that the next load of the resource reserves, by budget.";
    RESOURCE_LAST_USED: Detail Gauge "lowtide_resource_last_used_timestamp_seconds" Seconds
        ["resource"]
        "Time of the resource's last release, in seconds since the Unix epoch.";
    RESOURCE_LOADS: Basic Counter "lowtide_resource_loads_total" Count ["resource", "outcome"]
        "Loads of the resource, by outcome (ok, failed, and refused: for lack of memory).";
    RESOURCE_UNLOADS: Basic Counter "lowtide_resource_unloads_total" Count ["resource", "reason"]
        "Unloads of the resource, by reason (idle, pressure, eviction, manual, shutdown).";
    RESOURCE_MEASURED: Basic Gauge "lowtide_resource_measured_bytes" Bytes ["resource", "budget"]
        "Bytes that the resource held right after its last load, by budget (host, device); absent \
         if its memory was not measured.";
    RESOURCE_RECOVERED: Detail Counter "lowtide_resource_recovered_bytes_total" Bytes
        ["resource", "budget"]
        "Bytes released by unloads of the resource, by budget, as far as measured.";
    RESOURCE_LOAD_SECONDS: Detail Gauge "lowtide_resource_last_load_seconds" Seconds ["resource"]
        "Duration of the resource's last load.";
    RESOURCE_UNLOAD_SECONDS: Detail Gauge "lowtide_resource_last_unload_seconds" Seconds
        ["resource"]
        "Duration of the last call of the resource's unload function.";
    RESOURCE_UNLOAD_PANICS: Detail Counter "lowtide_resource_unload_panics_total" Count ["resource"]
        "Unload functions of the resource that panicked.";
    RECLAIMER_CALLS: Detail Counter "lowtide_reclaimer_calls_total" Count ["reclaimer"]
        "Calls of the application's function that releases memory, by reclaimer (at most 64).";
    RECLAIMER_RELEASED: Detail Counter "lowtide_reclaimer_released_bytes_total" Bytes ["reclaimer"]
        "Bytes that these calls reported as released.";
    RECLAIMER_SECONDS: Detail Gauge "lowtide_reclaimer_run_seconds" Seconds ["reclaimer"]
        "Time that these calls have taken since the start.";
    RECLAIMER_PANICS: Detail Counter "lowtide_reclaimer_panics_total" Count ["reclaimer"]
        "Calls of the reclaimer's functions that panicked.";
    SAMPLER_LAST_RUN: Basic Gauge "lowtide_sampler_last_run_timestamp_seconds" Seconds []
        "Time of the last publication of metrics, in seconds since the Unix epoch.";
    SAMPLER_SECONDS: Detail Histogram "lowtide_sampler_duration_seconds" Seconds []
        "Duration of taking and publishing the metrics.";
    SAMPLER_TICKS: Detail Counter "lowtide_sampler_ticks_total" Count []
        "Ticks of the control loop.";
    SAMPLER_LATENESS: Detail Gauge "lowtide_sampler_lateness_seconds" Seconds []
        "Largest delay of a tick of the control loop since the last publication.";
    DIAGNOSTICS: Basic Gauge "lowtide_diagnostics" Count []
        "Number of warnings found at start or later. /memory lists them under diagnostics.";
    BUILD_INFO: Basic Gauge "lowtide_build_info" Count ["version", "profile", "service_version"]
        "Always 1; the labels name the version of lowtide, the profile, and the version of the \
         service (LOWTIDE_SERVICE_VERSION), or unknown.";
    PROCESS_RESIDENT: Basic Gauge "process_resident_memory_bytes" Bytes []
        "Resident set size of the process.";
    PROCESS_CPU: Basic Counter "process_cpu_seconds_total" Seconds []
        "CPU time of the process in user and system mode, in whole seconds.";
    PROCESS_START: Basic Gauge "process_start_time_seconds" Seconds []
        "Start time of the process, in seconds since the Unix epoch.";
    PROCESS_VIRTUAL: Detail Gauge "process_virtual_memory_bytes" Bytes []
        "Address space of the process.";
    PROCESS_THREADS: Detail Gauge "process_threads" Count []
        "Number of threads of the process.";
    PROCESS_OPEN_FDS: Detail Gauge "process_open_fds" Count []
        "Number of open file descriptors of the process.";
    PROCESS_MAX_FDS: Detail Gauge "process_max_fds" Count []
        "Limit of open file descriptors of the process; absent if there is none.";
}

/// The buckets of the histograms, in seconds: from a tenth of a millisecond to a second.
pub const SECONDS_BUCKETS: &[f64] = &[0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0];

/// Metrics of OpenTelemetry's semantic conventions with the same or nearly the same meaning.
const OPENTELEMETRY: &[(&str, &str)] = &[
    (PRESSURE_PHYSICAL.name, "container.memory.working_set"),
    (PRESSURE_LIMIT.name, "k8s.container.memory.limit"),
    (PRESSURE_CHARGED.name, "container.memory.rss"),
    (DEVICE_TOTAL.name, "hw.gpu.memory.limit"),
    (DEVICE_COMMITTED.name, "hw.gpu.memory.usage (of this process's arenas)"),
    (PROCESS_RESIDENT.name, "process.memory.usage"),
    (PROCESS_VIRTUAL.name, "process.memory.virtual"),
    (PROCESS_CPU.name, "process.cpu.time"),
    (PROCESS_START.name, "process.uptime (since then)"),
    (PROCESS_THREADS.name, "process.thread.count"),
    (PROCESS_OPEN_FDS.name, "process.unix.file_descriptor.count"),
    (BUILD_INFO.name, "service.version (resource attribute)"),
];

/// Returns the table in Markdown, as in docs/METRICS.md.
#[must_use]
pub fn markdown() -> String {
    use std::fmt::Write as _;
    let mut text = String::from(
        "| name | tier | type | labels | meaning | OpenTelemetry |\n|---|---|---|---|---|---|\n",
    );
    for metric in TABLE {
        let labels = metric.labels.join(", ");
        let (name, tier, kind) = (metric.name, metric.tier.name(), metric.kind.name());
        let help = metric.help;
        let other = OPENTELEMETRY.iter().find(|(ours, _)| *ours == name).map_or("", |(_, o)| o);
        let _ = writeln!(text, "| `{name}` | {tier} | {kind} | {labels} | {help} | {other} |");
    }
    text
}

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
            assert_eq!(metric.kind == Kind::Counter, name.ends_with("_total"), "{name}");
            let stem = name.trim_end_matches("_total");
            match metric.unit {
                Unit::Bytes => assert!(stem.ends_with("_bytes"), "{name}"),
                Unit::Seconds => assert!(stem.ends_with("_seconds"), "{name}"),
                _ => assert!(!stem.ends_with("_bytes") && !stem.ends_with("_seconds"), "{name}"),
            }
            assert!(metric.help.ends_with('.'), "{name}: help is a sentence");
        }
    }
}
