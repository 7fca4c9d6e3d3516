//! What may be empty or constant on a machine without a GPU, each with its reason.
//!
//! Invariant: what is not named here has series that change.

/// Queries of a panel that may lack something.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Named {
    pub(crate) title: &'static str,
    /// The letters of its queries.
    pub(crate) letters: &'static str,
    /// Whether they may have no series at all; else they may have none that changes.
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
const INFO: &str = "it says what runs, and that does not change";
const CGROUP: &str = "needs a memory cgroup of its own, and one that reaches its limit";
const NEIGHBOUR: &str = "nobody else is on the device that stands in";
const STAND_IN: &str = "the device that stands in has one size, and its context holds nothing";
const FOREIGN: &str = "the proxy lends and adopts nothing";
const FAULTLESS: &str = "a fault that the load does not bring about";
const MOMENT: &str = "activations live for a moment, and the figures are taken between two";
const FAST: &str = "a load may be over between two scrapes";
const MEET: &str = "on few cores threads may never meet at a lock";
const VIEWED: &str = "an arena that was lent to cudarc sleeps only if the program asks";
const SHORTAGE: &str = "an arena is never short here: admission turns away before it is";

/// The panels.
pub(crate) const PANELS: &[Named] = &[
    constant("Host memory", "D", LIMIT),
    empty("OOM kills, all instances", "A", CGROUP),
    constant("What a purge could take", "B", "no page is muzzy in the profile balanced"),
    constant("Heap arenas and background threads", "AB", "the heap keeps what it started with"),
    constant("Builds", "A", INFO),
    constant("Notes", "A", "what did not go as asked is found at the start"),
    constant("Rungs", "A", INFO),
    constant("Committed and live, by arena", "D", LIMIT),
    constant("Device fragmentation, by arena", "B", MOMENT),
    constant("Pending and cached, by arena", "AB", MOMENT),
    constant("Asleep and offloaded, by arena", "AB", VIEWED),
    constant("Sleeps and wakes", "C", "nobody takes the memory of an arena that sleeps"),
    constant("Allocations refused", "A", SHORTAGE),
    constant("Shortages", "AB", SHORTAGE),
    constant("Remaps and moves", "AB", "host memory is not remapped, and nobody compacts"),
    constant("Bytes remapped and moved", "AB", "host memory is not remapped, and nobody compacts"),
    constant("Device address space", "A", "it is reserved once, when the arena opens"),
    constant("The device, whoever holds it", "ABCD", STAND_IN),
    constant("Given back for neighbours", "A", NEIGHBOUR),
    constant("Exported and imported memory by arena", "AB", FOREIGN),
    constant("Faults at the border", "ABC", FAULTLESS),
    constant("What counts against the limit", "E", LIMIT),
    empty("What counts against the limit", "D", CGROUP),
    constant("Booked and allowance", "D", LIMIT),
    constant("Booked and allowance", "C", "a berth is kept only while larger requests are behind"),
    constant("Who says the limit", "ABC", INFO),
    empty("OOM kills", "A", CGROUP),
    empty("Limits reached", "A", CGROUP),
    empty("Waits for memory", "AB", CGROUP),
    constant("Held by resources", "A", "each load of the model holds as much"),
    constant("Being loaded", "A", FAST),
    constant("Callers that wait", "A", FAST),
    constant("Locks found taken", "A", MEET),
    constant("Waits for a lock", "A", MEET),
    constant("Clean-ups that panicked", "A", FAULTLESS),
];

/// Metrics that a scrape may lack.
pub(crate) const METRICS: &[(&str, &str)] = &[
    ("lowtide_pressure_charged_bytes", CGROUP),
    ("lowtide_pressure_oom_kills_total", CGROUP),
    ("lowtide_pressure_events_total", CGROUP),
    ("lowtide_pressure_stall_ratio", CGROUP),
    ("lowtide_pressure_stall_seconds", CGROUP),
];

/// Recording rules that may make no series.
pub(crate) const RULES: &[(&str, &str)] = &[];

/// The reason of a name in a list.
pub(crate) fn why(list: &[(&str, &'static str)], name: &str) -> Option<&'static str> {
    list.iter().find(|(named, _)| *named == name).map(|(_, why)| *why)
}
