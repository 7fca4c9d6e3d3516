//! Figures of an arena on a GPU, measured without one.

use super::benches::Bench;

pub(super) const BENCHES: &[Bench] = &[
    Bench {
        arguments: "bench --locked --bench gpu -- --part torture",
        figures: &[("gpu.torture.found_s", None), ("gpu.killed_part.results_kept", None)],
    },
    Bench {
        arguments: "bench --locked --bench gpu -- --part binary",
        figures: &[("gpu.check.binary_mib", None)],
    },
];
