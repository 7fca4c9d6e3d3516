//! Figures of room on demand: requests that wait for room, and models that are evicted.

use super::benches::Bench;

pub(super) const BENCHES: &[Bench] = &[
    Bench {
        arguments: "bench --locked --bench room -- schedules",
        figures: &[("room.schedules.failed", None)],
    },
    Bench {
        arguments: "bench --locked --bench room -- zipf",
        figures: &[
            ("room.zipf.refused", None),
            ("room.zipf.over_limit", None),
            ("room.zipf.hit_ratio", None),
            ("room.zipf.hit_ratio_worst_seed", None),
            ("room.zipf.saved_ratio", None),
            ("room.zipf.saved_ratio_worst_seed", None),
        ],
    },
    Bench {
        arguments: "bench --locked --bench overload -- --burst",
        figures: &[
            ("room.burst400.served", None),
            ("room.burst400.over_queue_ratio", None),
            ("room.burst400.kills", None),
        ],
    },
];
