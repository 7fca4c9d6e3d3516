//! Figures of an arena on a GPU, measured without one.

use super::benches::Bench;

pub(super) const BENCHES: &[Bench] = &[Bench {
    arguments: "bench --locked --bench gpu -- --part stores",
    figures: &[
        ("gpu.lease.calls_before", None),
        ("gpu.stores.touch_threads_ratio", None),
        ("gpu.stores.touch_threads_ratio_best", None),
    ],
}];
