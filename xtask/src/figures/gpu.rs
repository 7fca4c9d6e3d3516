//! Figures of an arena on a GPU, measured without one.

use super::benches::Bench;

pub(super) const BENCHES: &[Bench] = &[Bench {
    arguments: "bench --locked --bench gpu -- --part devices",
    figures: &[("gpu.devices.faults", None)],
}];
