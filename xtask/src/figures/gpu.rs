//! Figures of an arena on a GPU, measured without one.

use super::benches::Bench;

pub(super) const BENCHES: &[Bench] = &[Bench {
    arguments: "bench --locked --bench gpu -- --part compact",
    figures: &[
        ("gpu.context_waits", None),
        ("gpu.compact.moves_per_block", None),
        ("gpu.compact.copies_per_move", None),
        ("gpu.compact.calls_per_move", None),
    ],
}];
