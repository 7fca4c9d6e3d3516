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
const CGROUP: &str = "needs a memory cgroup of its own, and one that reaches its limit";
const STAND_IN: &str = "the simulated device has one size, and its context uses no memory";
const FAULTLESS: &str = "an error that the load does not cause";
const MOMENT: &str = "activations live briefly, and samples fall between two of them";
const TRUSTED: &str = "the proxy trusts its estimates, and its ceiling is set";
const SHORTAGE: &str = "an arena is never short here: admission rejects requests before";
const LIVES: &str = "no process ends and starts under the same address";

/// The panels and annotations.
pub(crate) const PANELS: &[Named] = &[
    empty("restart", "", LIVES),
    empty("OOM kill", "", CGROUP),
    empty("OOM kills", "A", CGROUP),
    constant("Diagnostics", "A", "diagnostics are found at the start"),
    constant("Physical memory and limit", "D", LIMIT),
    constant("Heap after quiet times", "AB", "needs more than an hour of data"),
    constant("Reserved and allowance", "C", TRUSTED),
    constant("Budget of the first device", "C", LIMIT),
    constant("Correction factor", "A", TRUSTED),
    empty("Failures", "A", SHORTAGE),
    empty("Failures", "BCD", FAULTLESS),
    constant("Device memory by owner", "BC", STAND_IN),
    empty("Limits and stalls", "AB", CGROUP),
    constant("Waits and suspensions", "B", "bodies arrive at once here"),
    constant("Heap by kind", "F", "no page is muzzy in the profile balanced"),
    constant("Idle, holes and pending, by arena", "C", MOMENT),
];

/// Recording rules that may make no series.
pub(crate) const RULES: &[(&str, &str)] = &[
    ("instance:lowtide_pressure_limit_fast:hours", "needs an hour of data"),
    ("instance:lowtide_pressure_limit_slow:hours", "needs six hours of data"),
];
