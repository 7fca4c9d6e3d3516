//! Figures of measured requests: what is attributed to them, what that costs, and how a service
//! fares that admits by it. Each is printed by a bench, some under another name.

use super::benches::Bench;

pub(super) const BENCHES: &[Bench] = &[
    Bench {
        arguments: "bench --locked --bench requests",
        figures: &[
            ("measured.scope.instructions", None),
            ("measured.layer.ratio", None),
            ("measured.live_error_percent", None),
            ("measured.peak_error_percent", None),
            ("measured.learned_after_requests", None),
        ],
    },
    Bench {
        arguments: "bench --locked --bench render",
        figures: &[("measured.tick_us", Some("tick.median_us"))],
    },
    Bench {
        arguments: "bench --locked --bench controller",
        figures: &[("measured.simulator.failed", Some("controller.failed"))],
    },
    Bench {
        arguments: "bench --locked --bench faults -- runaway",
        figures: &[("measured.runaway.ended", None)],
    },
    Bench {
        arguments: "bench --locked --manifest-path benches/retention/Cargo.toml \
                    --no-default-features -- --parts burst --only low_memory,low_memory_apart",
        figures: &[("measured.rest.resident_per_live", None)],
    },
    Bench {
        arguments: "bench --locked --bench overload -- --measured",
        figures: &[("measured.1x.shed_ratio", None), ("measured.4x.goodput_ratio", None)],
    },
    Bench {
        arguments: "bench --locked --bench overload -- --survive 60 --seed 1",
        figures: &[("measured.oom_kills", Some("overload.survive.oom_kills"))],
    },
];
