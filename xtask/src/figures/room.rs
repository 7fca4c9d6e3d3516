//! Figures of room on demand: requests that wait for room, models that are evicted, a cache that
//! shrinks, services that leak, and clients that hold memory or connections.

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
        arguments: "bench --locked --bench room -- cache",
        figures: &[("room.cache.kills", None), ("room.cache.sheds", None)],
    },
    Bench {
        arguments: "bench --locked --bench room -- hostage",
        figures: &[
            ("room.hostage.slow_bodies.honest_ratio", None),
            ("room.hostage.silent_bodies.honest_ratio", None),
            ("room.hostage.zero_window.honest_ratio", None),
            ("room.hostage.unread.honest_ratio", None),
            ("room.hostage.hung_upstream.honest_ratio", None),
        ],
    },
    Bench {
        arguments: "bench --locked --bench room -- h2",
        figures: &[
            ("room.h2.kills", None),
            ("room.h2.honest_ratio", None),
            ("room.h2.newcomer_part", None),
            ("room.h2.refused", None),
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
            ("room.burst.shed_ratio", None),
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
            ("room.4x.slow.goodput_ratio", Some("measured.4x.slow.goodput_ratio")),
            ("room.4x.over_rss10_ratio", Some("measured.4x.over_rss10_ratio")),
            ("room.4x.share.small", Some("measured.4x.share.small")),
            ("room.4x.share.medium", Some("measured.4x.share.medium")),
            ("room.4x.share.large", Some("measured.4x.share.large")),
        ],
    },
    Bench {
        arguments: "bench --locked --bench overload -- --survive 60 --seed 1",
        figures: &[("room.oom_kills", Some("overload.survive.oom_kills"))],
    },
];
