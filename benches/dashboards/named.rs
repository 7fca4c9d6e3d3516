//! Series that may be empty or constant on a machine without a GPU, each with its reason.
//!
//! Invariant: what is not named here has series that change.

/// Queries of a panel that may lack something.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Named {
    pub(crate) title: &'static str,
    /// The letters of its queries.
    pub(crate) letters: &'static str,
    /// `true` if they may have no series at all; otherwise they may have none that changes.
    pub(crate) may_be_empty: bool,
    pub(crate) why: &'static str,
}

const fn constant(title: &'static str, letters: &'static str, why: &'static str) -> Named {
    Named { title, letters, may_be_empty: false, why }
}

const fn empty(title: &'static str, letters: &'static str, why: &'static str) -> Named {
    Named { title, letters, may_be_empty: true, why }
}

const LIMIT: &str = "a limit stands while the process lives";
const INFO: &str = "it describes the running version and settings, which do not change";
const CGROUP: &str = "needs a memory cgroup of its own, and one that reaches its limit";
const NEIGHBOUR: &str = "no other process uses the simulated device";
const STAND_IN: &str = "the simulated device has one size, and its context uses no memory";
const FOREIGN: &str = "the proxy exports and imports no memory";
const FAULTLESS: &str = "an error that the load does not cause";
const MOMENT: &str = "activations live briefly, and samples fall between two of them";
const MEET: &str = "on few cores threads may never contend for a lock";
const VIEWED: &str = "an arena used through cudarc sleeps only if the program asks for it";
const TENANTS: &str = "the proxy names no tenants";
const RECLAIMERS: &str = "the proxy registers no reclaimer";
const PLACES: &str = "the load leaves places, and its clients read";
const TRUSTED: &str = "the proxy trusts its estimates, and then the ceiling stays";
const SHORTAGE: &str = "an arena is never short here: admission rejects requests before";

/// The panels.
pub(crate) const PANELS: &[Named] = &[
    constant("Host memory", "D", LIMIT),
    empty("OOM kills, all instances", "A", CGROUP),
    constant("Reclaimable by purge", "B", "no page is muzzy in the profile balanced"),
    constant("Heap arenas and background threads", "B", "the heap keeps what it started with"),
    constant("Builds", "A", INFO),
    constant("Diagnostics", "A", "diagnostics are found at the start"),
    constant("Backend", "A", INFO),
    constant("Committed and live, by arena", "D", LIMIT),
    constant("Device fragmentation, by arena", "B", MOMENT),
    constant("Pending and cached, by arena", "AB", MOMENT),
    constant("Asleep and offloaded, by arena", "AB", VIEWED),
    constant("Sleeps and wakes", "C", "no process takes the memory of a sleeping arena"),
    constant("Ceiling", "A", TRUSTED),
    constant("Allocations refused", "A", SHORTAGE),
    constant("Shortages", "AB", SHORTAGE),
    constant("Remaps and moves", "AB", "host memory is not remapped, and nothing compacts"),
    constant("Bytes remapped and moved", "AB", "host memory is not remapped, and nothing compacts"),
    constant("Device address space", "A", "it is reserved once, when the arena opens"),
    constant("Device memory by owner", "ABCD", STAND_IN),
    constant("Released for other processes", "A", NEIGHBOUR),
    constant("Exported and imported memory by arena", "AB", FOREIGN),
    constant("Budget by device", "C", LIMIT),
    constant("Lost devices", "A", FAULTLESS),
    constant("Interoperability and driver errors", "ABC", FAULTLESS),
    constant("Memory against the limit", "E", LIMIT),
    empty("Memory against the limit", "D", CGROUP),
    constant("Reserved and allowance", "D", LIMIT),
    constant(
        "Reserved and allowance",
        "C",
        "headroom is reserved only while larger requests fall behind",
    ),
    constant("Source of the limit", "ABC", INFO),
    empty("OOM kills", "A", CGROUP),
    empty("Limits reached", "A", CGROUP),
    empty("Memory stalls", "AB", CGROUP),
    empty("Largest tenants", "AB", TENANTS),
    constant("Suspended reservations", "A", "bodies arrive at once here"),
    constant("Connections closed, by reason", "A", PLACES),
    empty("Unloads, by reason", "B", RECLAIMERS),
    empty("Released by unloads", "B", RECLAIMERS),
    empty("Last unload duration", "B", RECLAIMERS),
    empty("Unload panics", "B", RECLAIMERS),
    constant("Memory held by resources", "A", "each load of the model holds as much"),
    constant("Lock contention", "A", MEET),
    constant("Lock wait time", "A", MEET),
    constant("Unload panics", "A", FAULTLESS),
];

/// Metrics that a scrape may lack.
pub(crate) const METRICS: &[(&str, &str)] = &[
    ("lowtide_pressure_charged_bytes", CGROUP),
    ("lowtide_pressure_oom_kills_total", CGROUP),
    ("lowtide_pressure_events_total", CGROUP),
    ("lowtide_pressure_stall_ratio", CGROUP),
    ("lowtide_pressure_stall_seconds", CGROUP),
    ("lowtide_reclaimer_calls_total", RECLAIMERS),
    ("lowtide_reclaimer_panics_total", RECLAIMERS),
    ("lowtide_reclaimer_released_bytes_total", RECLAIMERS),
    ("lowtide_reclaimer_run_seconds", RECLAIMERS),
    ("lowtide_admission_tenant_live_bytes", TENANTS),
    ("lowtide_admission_tenant_live_peak_bytes", TENANTS),
];

/// Recording rules that may make no series.
pub(crate) const RULES: &[(&str, &str)] = &[];

/// The reason of a name in a list.
pub(crate) fn why(list: &[(&str, &'static str)], name: &str) -> Option<&'static str> {
    list.iter().find(|(named, _)| *named == name).map(|(_, why)| *why)
}
