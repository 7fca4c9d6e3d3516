//! Figures of an arena on a GPU, measured without one.

use super::benches::Bench;

pub(super) const BENCHES: &[Bench] = &[Bench {
    arguments: "bench --locked --bench gpu -- --part pairs",
    figures: &[
        ("gpu.pair.8.ratio", None),
        ("gpu.pair.128.ratio", None),
        ("gpu.pair.512.ratio", None),
        ("gpu.forward.ratio", None),
        ("gpu.cuarena.b1.ratio", None),
        ("gpu.cuarena.b2.ratio", None),
        ("gpu.cuarena.b4.ratio", None),
        ("gpu.cuarena.b5.ratio", None),
        ("gpu.view.calls", None),
        ("gpu.view.event_creations", None),
    ],
}];
