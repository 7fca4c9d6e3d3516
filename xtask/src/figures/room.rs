//! Figures of room on demand: requests that wait for room, models that are evicted, and services
//! that leak.

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
        arguments: "bench --locked --bench room -- leak",
        figures: &[
            ("room.leak.exit_s", None),
            ("room.leak.exit_old_s", None),
            ("room.leak.serve_one_mib_s", None),
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
    Bench {
        arguments: "bench --locked --bench control -- --parts admission",
        figures: &[("room.admission_over_atomics", Some("admission.one_over_atomics"))],
    },
    Bench {
        arguments: "bench --locked --bench overload -- --measured",
        figures: &[
            ("room.4x.quick.goodput_ratio", Some("measured.4x.goodput_ratio")),
            ("room.4x.share.small", Some("overload.lowtide.4x.heavy.estimate_0.share.small")),
            ("room.4x.share.medium", Some("overload.lowtide.4x.heavy.estimate_0.share.medium")),
            ("room.4x.share.large", Some("overload.lowtide.4x.heavy.estimate_0.share.large")),
        ],
    },
    Bench {
        arguments: "bench --locked --bench overload -- --survive 60 --seed 1",
        figures: &[("room.oom_kills", Some("overload.survive.oom_kills"))],
    },
];
