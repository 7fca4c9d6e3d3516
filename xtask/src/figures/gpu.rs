//! Figures of an arena on a GPU, measured without one.

use super::benches::Bench;

pub(super) const BENCHES: &[Bench] = &[Bench {
    arguments: "bench --locked --bench gpu -- --part wake",
    figures: &[
        ("gpu.wake.calls", None),
        ("gpu.wake.bytes_before_first_copy", None),
        ("gpu.wake.small_blocks.calls", None),
        ("gpu.wake.holes.calls", None),
    ],
}];
