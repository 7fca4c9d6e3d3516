//! Figures of an arena on a GPU, measured without one.

use super::benches::Bench;

pub(super) const BENCHES: &[Bench] = &[
    Bench {
        arguments: "bench --locked --bench gpu -- --part compact",
        figures: &[
            ("gpu.context_waits", None),
            ("gpu.compact.moves_per_block", None),
            ("gpu.compact.copies_per_move", None),
            ("gpu.compact.calls_per_move", None),
        ],
    },
    Bench {
        arguments: "bench --locked --bench gpu -- --part trace",
        figures: &[
            ("gpu.trace.added_committed_per_live", None),
            ("gpu.trace.small_handles.committed_per_live", None),
            ("gpu.trace.committed_per_live", None),
        ],
    },
    Bench {
        arguments: "bench --locked --bench gpu -- --part wake",
        figures: &[
            ("gpu.wake.small_handles.calls", None),
            ("gpu.wake.calls", None),
            ("gpu.wake.bytes_before_first_copy", None),
            ("gpu.wake.small_blocks.calls", None),
            ("gpu.wake.holes.calls", None),
        ],
    },
    Bench {
        arguments: "bench --locked --bench gpu -- --part torture",
        figures: &[("gpu.torture.found_s", None)],
    },
    Bench {
        arguments: "bench --locked --bench gpu -- --part killed",
        figures: &[("gpu.killed_part.results_kept", None)],
    },
    Bench {
        arguments: "bench --locked --bench gpu -- --part binary",
        figures: &[("gpu.check.binary_mib", None)],
    },
    Bench {
        arguments: "bench --locked --bench gpu -- --part leases",
        figures: &[("gpu.lease.calls_before", None)],
    },
    Bench {
        arguments: "bench --locked --bench gpu -- --part stores",
        figures: &[
            ("gpu.stores.touch_threads_ratio", None),
            ("gpu.stores.touch_threads_ratio_best", None),
        ],
    },
    Bench {
        arguments: "bench --locked --bench gpu -- --part devices",
        figures: &[("gpu.devices.faults", None)],
    },
    Bench {
        arguments: "bench --locked --bench gpu -- --part pairs",
        figures: &[
            ("gpu.pair.ping_pong_ns", None),
            ("gpu.pair.uncached.512_ns", None),
            ("gpu.pair.8.ratio", None),
            ("gpu.pair.128.ratio", None),
            ("gpu.pair.512.ratio", None),
            ("gpu.forward.ratio", None),
            ("gpu.cuarena.b1.ratio", None),
            ("gpu.cuarena.b2.ratio", None),
            ("gpu.cuarena.b4.ratio", None),
            ("gpu.cuarena.b5.ratio", None),
        ],
    },
    Bench {
        arguments: "bench --locked --bench gpu -- --part views",
        figures: &[
            ("gpu.view.calls", None),
            ("gpu.view.calls_of_cudarc", None),
            ("gpu.view.event_creations", None),
        ],
    },
];
