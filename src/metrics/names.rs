//! The one table of metric names: what is published, its type, unit, labels and help.
//!
//! Dashboards, rules, docs and a live scrape are compared with this table by tests; a name that is
//! not here does not exist. Every name carries its unit, so that an exporter's own naming rules
//! change nothing.

use metrics::Unit;

/// The type of a metric, in Prometheus' words.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A value that goes up and down.
    Gauge,
    /// A total that only rises while the process lives.
    Counter,
    /// Observations in buckets.
    Histogram,
}

impl Kind {
    /// The word in a `# TYPE` line.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Gauge => "gauge",
            Self::Counter => "counter",
            Self::Histogram => "histogram",
        }
    }
}

/// One metric.
#[derive(Clone, Copy, Debug)]
pub struct Metric {
    /// The full name.
    pub name: &'static str,
    /// The type.
    pub kind: Kind,
    /// The unit.
    pub unit: Unit,
    /// The labels of every series.
    pub labels: &'static [&'static str],
    /// One sentence on what it counts.
    pub help: &'static str,
}

macro_rules! table {
    ($($id:ident: $kind:ident $name:literal $unit:ident [$($label:literal),*] $help:literal;)*) => {
        $(
            #[doc = $help]
            #[allow(clippy::doc_markdown, reason = "help texts name label values as they are")]
            pub const $id: Metric = Metric {
                name: $name,
                kind: Kind::$kind,
                unit: Unit::$unit,
                labels: &[$($label),*],
                help: $help,
            };
        )*
        /// Every metric of the crate.
        pub const TABLE: &[Metric] = &[$($id),*];
    };
}

table! {
    HEAP_LIVE: Gauge "lowtide_heap_live_bytes" Bytes []
        "Bytes of heap blocks held by the application.";
    HEAP_ACTIVE: Gauge "lowtide_heap_active_bytes" Bytes []
        "Bytes of heap pages that hold at least one live block.";
    HEAP_RESIDENT: Gauge "lowtide_heap_resident_bytes" Bytes []
        "Bytes of the heap in physical memory, as jemalloc counts them.";
    HEAP_RETAINED: Gauge "lowtide_heap_retained_bytes" Bytes []
        "Physical bytes that the heap keeps beyond what is live: resident minus live.";
    HEAP_DIRTY: Gauge "lowtide_heap_dirty_bytes" Bytes []
        "Bytes of unused heap pages that are still backed.";
    HEAP_MUZZY: Gauge "lowtide_heap_muzzy_bytes" Bytes []
        "Bytes of unused heap pages given back lazily.";
    HEAP_METADATA: Gauge "lowtide_heap_metadata_bytes" Bytes []
        "Bytes of jemalloc's own books.";
    HEAP_MAPPED: Gauge "lowtide_heap_mapped_bytes" Bytes []
        "Bytes in extents that jemalloc has mapped and uses.";
    HEAP_UNBACKED: Gauge "lowtide_heap_unbacked_bytes" Bytes []
        "Address space kept for reuse; no physical memory stands behind it.";
    HEAP_THREAD_CACHES: Gauge "lowtide_heap_thread_cache_bytes" Bytes []
        "Bytes of free blocks in jemalloc's thread caches.";
    HEAP_ARENA_LIVE: Gauge "lowtide_heap_arena_live_bytes" Bytes ["heap_arena"]
        "Bytes of blocks in a dedicated heap arena that the application holds; that of a resource \
         has its name. The first 64 names that a process publishes.";
    HEAP_ARENA_RETAINED: Gauge "lowtide_heap_arena_retained_bytes" Bytes ["heap_arena"]
        "Backed bytes that a dedicated heap arena keeps beyond what is live: active, dirty and \
         muzzy minus live.";
    HEAP_ARENA_ACTIVE: Gauge "lowtide_heap_arena_active_bytes" Bytes ["heap_arena"]
        "Bytes of its pages with at least one live or cached block.";
    HEAP_ARENA_PURGEABLE: Gauge "lowtide_heap_arena_purgeable_bytes" Bytes ["heap_arena"]
        "Bytes of its unused pages, dirty and muzzy.";
    HEAP_ARENAS: Gauge "lowtide_heap_arenas" Count []
        "jemalloc arenas.";
    HEAP_BACKGROUND_THREADS: Gauge "lowtide_heap_background_threads" Count []
        "jemalloc background threads that run.";
    HEAP_PURGES: Counter "lowtide_heap_purges_total" Count ["trigger"]
        "Purges of the heap that this crate ran, by trigger (pressure, manual, unload, load, \
         growth, idle, periodic).";
    HEAP_PURGED: Counter "lowtide_heap_purged_bytes_total" Bytes ["heap"]
        "Physical bytes given back by those purges, by heap (jemalloc without its muzzy pages, \
         muzzy, libc).";
    HEAP_PURGE_SECONDS: Histogram "lowtide_heap_purge_duration_seconds" Seconds ["heap"]
        "How long a purge took, by heap (jemalloc with its muzzy pages, libc).";
    PROCESS_RESIDENT: Gauge "lowtide_process_resident_bytes" Bytes []
        "The process's resident set, as the kernel says.";
    PROCESS_OTHER: Gauge "lowtide_process_other_bytes" Bytes []
        "The part of the resident set that is not jemalloc's: stacks, mapped files, heaps of C \
         code, and what arenas hold of the host's memory.";
    DEVICE_LIVE: Gauge "lowtide_device_live_bytes" Bytes ["device", "arena"]
        "Bytes of device blocks held by the application, after rounding.";
    DEVICE_ASLEEP: Gauge "lowtide_device_asleep_bytes" Bytes ["device", "arena"]
        "The part of live bytes with no memory behind it, because the arena sleeps.";
    DEVICE_OFFLOADED: Gauge "lowtide_device_offloaded_bytes" Bytes ["device", "arena"]
        "Host memory that holds contents of the arena while it sleeps, or stays for that.";
    DEVICE_REQUESTED: Gauge "lowtide_device_requested_bytes" Bytes ["device", "arena"]
        "Bytes of device memory that callers asked for.";
    DEVICE_ACTIVE: Gauge "lowtide_device_active_bytes" Bytes ["device", "arena"]
        "Bytes of granules that hold at least one live or pending byte.";
    DEVICE_IDLE: Gauge "lowtide_device_idle_bytes" Bytes ["device", "arena"]
        "Bytes of committed granules that are wholly free.";
    DEVICE_COMMITTED: Gauge "lowtide_device_committed_bytes" Bytes ["device", "arena"]
        "Physical bytes that the arena holds from its driver.";
    DEVICE_RETAINED: Gauge "lowtide_device_retained_bytes" Bytes ["device", "arena"]
        "Physical bytes that the arena keeps beyond what is live and awake: committed minus live, \
         asleep bytes not counted.";
    DEVICE_RESERVED: Gauge "lowtide_device_reserved_bytes" Bytes ["device", "arena"]
        "Address space that the arena holds, backed or not.";
    DEVICE_HOLES: Gauge "lowtide_device_hole_bytes" Bytes ["device", "arena"]
        "Free bytes inside active granules.";
    DEVICE_LARGEST_FREE: Gauge "lowtide_device_largest_free_bytes" Bytes ["device", "arena"]
        "Largest free block on committed memory.";
    DEVICE_LIVE_PEAK: Gauge "lowtide_device_live_peak_bytes" Bytes ["device", "arena"]
        "Largest amount of live bytes since the arena was opened.";
    DEVICE_COMMITTED_PEAK: Gauge "lowtide_device_committed_peak_bytes" Bytes ["device", "arena"]
        "Largest amount of committed bytes since the arena was opened.";
    DEVICE_PENDING: Gauge "lowtide_device_pending_bytes" Bytes ["device", "arena"]
        "Bytes freed by the application that the device may still use.";
    DEVICE_CACHED: Gauge "lowtide_device_cached_bytes" Bytes ["device", "arena"]
        "Bytes of free blocks that the fronts of threads and lanes keep; part of the holes.";
    DEVICE_METADATA: Gauge "lowtide_device_metadata_bytes" Bytes ["device", "arena"]
        "Host memory of the arena's own books.";
    DEVICE_LIMIT: Gauge "lowtide_device_limit_bytes" Bytes ["device", "arena"]
        "What committed must not pass; absent where there is no limit.";
    DEVICE_LEASES: Gauge "lowtide_device_leases" Count ["device", "arena"]
        "Leases that are held now.";
    DEVICE_STATE: Gauge "lowtide_device_state" Count ["device", "arena"]
        "Whether the arena's memory can be used: 0 awake, 1 draining, 2 asleep, 3 waking.";
    DEVICE_ARENA_INFO: Gauge "lowtide_device_arena_info" Count ["device", "arena", "rung"]
        "1 while the arena is open on this rung (cuda_virtual_memory, cuda_pool, cuda_plain, \
         host), 0 once it is not.";
    DEVICE_SLEEPS: Counter "lowtide_device_sleeps_total" Count ["device", "arena"]
        "Times that the arena fell asleep.";
    DEVICE_WAKES: Counter "lowtide_device_wakes_total" Count ["device", "arena"]
        "Times that it woke.";
    DEVICE_WAKE_FAILURES: Counter "lowtide_device_wake_failures_total" Count ["device", "arena"]
        "Times that it could not be woken; it sleeps on, and nothing is lost.";
    DEVICE_ALLOCS: Counter "lowtide_device_allocs_total" Count ["device", "arena"]
        "Blocks allocated.";
    DEVICE_FREES: Counter "lowtide_device_frees_total" Count ["device", "arena"]
        "Blocks freed.";
    DEVICE_ALLOC_FAILURES: Counter "lowtide_device_alloc_failures_total" Count
        ["device", "arena", "reason"]
        "Allocations refused, by reason (limit, device, addresses or driver).";
    DEVICE_COMMITS: Counter "lowtide_device_commits_total" Count ["device", "arena"]
        "Driver calls that committed memory.";
    DEVICE_DECOMMITS: Counter "lowtide_device_decommits_total" Count ["device", "arena"]
        "Driver calls that gave memory back.";
    DEVICE_COMMITTED_TOTAL: Counter "lowtide_device_commit_bytes_total" Bytes ["device", "arena"]
        "Bytes committed, in all.";
    DEVICE_DECOMMITTED_TOTAL: Counter "lowtide_device_decommit_bytes_total" Bytes
        ["device", "arena"]
        "Bytes given back to the driver, in all.";
    DEVICE_REMAPS: Counter "lowtide_device_remaps_total" Count ["device", "arena"]
        "Driver calls that moved the memory of idle granules to where some was needed.";
    DEVICE_REMAPPED: Counter "lowtide_device_remap_bytes_total" Bytes ["device", "arena"]
        "Bytes moved by those, in all.";
    DEVICE_MOVES: Counter "lowtide_device_moves_total" Count ["device", "arena"]
        "Blocks that compactions moved.";
    DEVICE_MOVED: Counter "lowtide_device_moved_bytes_total" Bytes ["device", "arena"]
        "Bytes of those blocks.";
    DEVICE_ASKED_BACK: Counter "lowtide_device_asked_back_bytes_total" Bytes
        ["device", "arena", "act"]
        "Bytes given back because somebody asked and not because they decayed, by act (trim, \
         purges among them; shrink).";
    DEVICE_SHORTAGE_CALLBACKS: Counter "lowtide_device_shortage_callbacks_total" Count
        ["device", "arena"]
        "Calls of callbacks because memory was short.";
    DEVICE_SHORTAGE_PANICS: Counter "lowtide_device_shortage_panics_total" Count
        ["device", "arena"]
        "Those of them that panicked.";
    DEVICE_LOCK_CONTENDED: Counter "lowtide_device_lock_contended_total" Count ["device", "arena"]
        "Times that a thread found a lock of the arena taken.";
    DEVICE_LOCK_WAIT: Gauge "lowtide_device_lock_wait_seconds" Seconds ["device", "arena"]
        "How long threads have waited for the arena's lock, in all; a gauge, since counters hold \
         whole numbers.";
    DEVICE_LENT: Gauge "lowtide_device_lent_bytes" Bytes ["device", "arena"]
        "Bytes of blocks whose addresses are lent to foreign code; the arena does not sleep \
         meanwhile.";
    DEVICE_ADOPTED: Gauge "lowtide_device_adopted_bytes" Bytes ["device", "arena"]
        "Bytes that others allocated and the arena adopted, and that are not released; in no other \
         figure of it.";
    DEVICE_RELEASE_PANICS: Counter "lowtide_device_release_panics_total" Count ["device", "arena"]
        "Release functions of adopted memory that panicked.";
    DEVICE_PARKED_ERRORS: Counter "lowtide_device_parked_errors_total" Count ["device", "arena"]
        "CUDA errors that views of freed buffers left with cudarc.";
    DEVICE_STUCK: Counter "lowtide_device_stuck_total" Count ["device"]
        "Driver calls that failed and were to undo another: each may have cost memory or addresses \
         until the process ends.";
    DEVICE_TOTAL: Gauge "lowtide_device_total_bytes" Bytes ["device"]
        "Memory of the device. Absent, as the three after it, where the device says nothing; NaN \
         once it says nothing any more.";
    DEVICE_FREE: Gauge "lowtide_device_free_bytes" Bytes ["device"]
        "What of it nobody holds.";
    DEVICE_FLOOR: Gauge "lowtide_device_context_floor_bytes" Bytes ["device"]
        "What the device held right after our context was made: an upper bound of what the context \
         takes, neighbours of that moment included.";
    DEVICE_FOREIGN: Gauge "lowtide_device_foreign_bytes" Bytes ["device"]
        "What of the device is neither free, nor committed by our arenas, nor in the floor: other \
         processes, and what this one allocates beside the arenas (cudarc, ONNX Runtime).";
    DEVICE_GIVEN_BACK: Counter "lowtide_device_given_back_bytes_total" Bytes ["device"]
        "Idle bytes that arenas gave back because little of the device was free.";
    PRESSURE_LEVEL: Gauge "lowtide_pressure_level" Count []
        "Pressure on host memory: 0 none, 1 elevated, 2 high, 3 critical.";
    PRESSURE_LIMIT: Gauge "lowtide_pressure_limit_bytes" Bytes []
        "What host memory must not pass; /memory says who says so.";
    PRESSURE_LIMIT_INFO: Gauge "lowtide_pressure_limit_info" Count ["source"]
        "1 for the source of the limit (cgroup, high, machine, override, address_space, unknown), \
         0 for the others.";
    PRESSURE_LIMIT_STALE: Gauge "lowtide_pressure_limit_stale" Count []
        "1 while a file of the cgroup that says the limit cannot be read, and what was read last \
         stands.";
    PRESSURE_EXHAUSTED: Gauge "lowtide_pressure_exhausted" Count []
        "1 while memory that no request owns leaves no room for the smallest request, else 0.";
    PRESSURE_PHYSICAL: Gauge "lowtide_pressure_physical_bytes" Bytes []
        "What counts against the limit: the cgroup's usage less page cache, or the resident set.";
    PRESSURE_PURGEABLE: Gauge "lowtide_pressure_purgeable_bytes" Bytes []
        "The part of physical that a purge of ours gives back.";
    PRESSURE_REQUIRED: Gauge "lowtide_pressure_required_bytes" Bytes []
        "Physical minus purgeable.";
    PRESSURE_CHARGED: Gauge "lowtide_pressure_charged_bytes" Bytes []
        "Anonymous and shared memory of the whole cgroup, other processes included; absent \
         where no memory cgroup can be read.";
    PRESSURE_BOOKED: Gauge "lowtide_pressure_booked_bytes" Bytes ["budget"]
        "Bytes of admitted requests and loaded resources, as they were estimated.";
    PRESSURE_CEILING: Gauge "lowtide_pressure_ceiling_bytes" Bytes ["budget"]
        "Up to which amount admission fills memory at most; absent without a limit, as allowance \
         and multiplier.";
    PRESSURE_ALLOWANCE: Gauge "lowtide_pressure_allowance_bytes" Bytes ["budget"]
        "Up to which amount of booked bytes requests are admitted now.";
    PRESSURE_MULTIPLIER: Gauge "lowtide_pressure_multiplier_ratio" Count ["budget"]
        "What a byte booked by a request was found to need, in bytes (K of the ledger): 1 to 5, \
         2 at first.";
    PRESSURE_ADMITTED: Counter "lowtide_pressure_admitted_total" Count []
        "Requests admitted.";
    ADMISSION_HELD: Gauge "lowtide_admission_permits" Count []
        "Permits that are held now.";
    PRESSURE_SHED: Counter "lowtide_pressure_shed_total" Count ["reason"]
        "Rejected requests by reason (too_large, full, pressure, shutting_down, exhausted, \
         slow_start).";
    ADMISSION_REQUESTS: Counter "lowtide_admission_requests_total" Count
        ["budget", "size_class", "outcome"]
        "Requests admitted (but the exempt) and shed because they did not fit the budget, by size: \
         the bound of the class, or larger; a class appears with its first request.";
    ADMISSION_BYTES: Counter "lowtide_admission_bytes_total" Bytes
        ["budget", "size_class", "outcome"]
        "Bytes of those requests, as they were estimated.";
    ADMISSION_BERTH: Gauge "lowtide_admission_berth_bytes" Bytes ["budget"]
        "What each request has to leave room for, be it smaller itself, because larger ones are \
         behind; 0 while all have their share.";
    PRESSURE_TRANSITIONS: Counter "lowtide_pressure_transitions_total" Count ["to"]
        "Changes of the pressure level, by the level reached (none, elevated, high, critical).";
    PRESSURE_OOM_KILLS: Counter "lowtide_pressure_oom_kills_total" Count []
        "Processes of the cgroup that the kernel has killed for memory; absent without a cgroup.";
    PRESSURE_EVENTS: Counter "lowtide_pressure_events_total" Count ["group", "event"]
        "What the kernel counted since the start (high, max, oom, oom_kill), in the own cgroup \
         (own) and in those of its ancestors that have a limit (above); absent where no file \
         says it.";
    PRESSURE_STALL: Gauge "lowtide_pressure_stall_ratio" Count ["kind"]
        "The part of the last ten seconds that tasks of the own cgroup waited for memory (PSI), by \
         kind (some, full). Advisory; absent where the kernel shows none, as the total after it.";
    PRESSURE_STALL_TOTAL: Gauge "lowtide_pressure_stall_seconds" Seconds ["kind"]
        "How long they waited since the cgroup was made; a gauge, since counters hold whole \
         numbers.";
    RESOURCE_LOADED: Gauge "lowtide_resource_loaded" Count ["resource"]
        "Whether the resource is loaded: 1 or 0.";
    RESOURCE_GUARDS: Gauge "lowtide_resource_guards" Count ["resource"]
        "Uses of the resource that are held now.";
    RESOURCE_LOADING: Gauge "lowtide_resource_loading" Count ["resource"]
        "Whether the resource is being loaded: 1 or 0.";
    RESOURCE_WAITING: Gauge "lowtide_resource_waiting" Count ["resource"]
        "Callers that wait for the resource.";
    RESOURCE_COST: Gauge "lowtide_resource_cost_bytes" Bytes ["resource", "budget"]
        "What the next load of the resource books.";
    RESOURCE_LAST_USED: Gauge "lowtide_resource_last_used_timestamp_seconds" Seconds ["resource"]
        "When the resource was last released, in seconds since the Unix epoch.";
    RESOURCE_LOADS: Counter "lowtide_resource_loads_total" Count ["resource", "outcome"]
        "Loads, by outcome: ok, failed, or refused for want of memory.";
    RESOURCE_UNLOADS: Counter "lowtide_resource_unloads_total" Count ["resource", "reason"]
        "Unloads, by reason (idle, pressure, eviction, manual, shutdown).";
    RESOURCE_MEASURED: Gauge "lowtide_resource_measured_bytes" Bytes ["resource", "budget"]
        "What the resource held right after its last load, by budget (host, device); absent where \
         it has no arena of its own.";
    RESOURCE_RECOVERED: Counter "lowtide_resource_recovered_bytes_total" Bytes
        ["resource", "budget"]
        "Bytes that its unloads gave back, by budget, as far as that was measured.";
    RESOURCE_LOAD_SECONDS: Gauge "lowtide_resource_last_load_seconds" Seconds ["resource"]
        "How long the last load took.";
    RESOURCE_UNLOAD_SECONDS: Gauge "lowtide_resource_last_unload_seconds" Seconds ["resource"]
        "How long the last clean-up took.";
    RESOURCE_UNLOAD_PANICS: Counter "lowtide_resource_unload_panics_total" Count ["resource"]
        "Clean-ups that panicked.";
    SAMPLER_LAST_RUN: Gauge "lowtide_sampler_last_run_timestamp_seconds" Seconds []
        "When the figures were last taken, in seconds since the Unix epoch.";
    SAMPLER_SECONDS: Histogram "lowtide_sampler_duration_seconds" Seconds []
        "How long taking and publishing the figures took.";
    SAMPLER_TICKS: Counter "lowtide_sampler_ticks_total" Count []
        "Ticks of the control loop.";
    SAMPLER_LATENESS: Gauge "lowtide_sampler_lateness_seconds" Seconds []
        "How long after its time a tick began at most, since the figures before.";
    NOTES: Gauge "lowtide_notes" Count []
        "Warnings of what did not go as asked; /memory has their words.";
    BUILD_INFO: Gauge "lowtide_build_info" Count ["version", "profile", "allocator"]
        "Always 1; the labels say what runs.";
}

/// Buckets of the histograms, in seconds: from a tenth of a millisecond to a second.
pub const SECONDS_BUCKETS: &[f64] = &[0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0];

/// The table in Markdown, as docs/METRICS.md holds it.
#[must_use]
pub fn markdown() -> String {
    use std::fmt::Write as _;
    let mut text = String::from("| name | type | labels | meaning |\n|---|---|---|---|\n");
    for metric in TABLE {
        let labels = metric.labels.join(", ");
        let (name, kind, help) = (metric.name, metric.kind.name(), metric.help);
        let _ = writeln!(text, "| `{name}` | {kind} | {labels} | {help} |");
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
            assert!(name.starts_with("lowtide_"), "{name}");
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
