//! The table of figures: what measures each, and the goals that are judged here.

use super::{Figure, alerts, clone, field, footprint, house, paths, small};

/// What measures figures.
#[derive(Debug)]
pub(super) enum Source {
    /// Cargo with these arguments.
    Cargo(&'static str),
    /// A bench and its arguments.
    Bench(&'static str),
    /// A script and its arguments.
    Script(&'static str),
    /// A function, to whose names the subject is added.
    Own(fn() -> Result<Vec<Figure>, String>),
}

/// A row of the table.
#[derive(Debug)]
pub(super) struct Row {
    pub(super) subject: &'static str,
    /// The beginnings of the names of its figures.
    pub(super) figures: &'static str,
    pub(super) source: Source,
    /// Names that a program prints, and the names here.
    pub(super) renamed: &'static [(&'static str, &'static str)],
    /// It takes long, and is measured by request alone.
    pub(super) is_long: bool,
}

/// A goal.
#[derive(Clone, Copy, Debug)]
pub(super) enum Bound {
    Most(f64),
    Least(f64),
}

const fn row(subject: &'static str, figures: &'static str, source: Source) -> Row {
    Row { subject, figures, source, renamed: &[], is_long: false }
}

const fn renamed(row: Row, renamed: &'static [(&'static str, &'static str)]) -> Row {
    Row { renamed, ..row }
}

const fn long(row: Row) -> Row {
    Row { is_long: true, ..row }
}

/// The subjects, and what each is about.
pub(super) const SUBJECTS: &[(&str, &str)] = &[
    ("house", "how large the project is: lines, types, names, cycles, words; some seconds"),
    ("workspace", "what it costs to build, test and use the workspace: some 20 minutes"),
    ("arena", "the arena's paths: functions, instructions, schedules; some minutes"),
    ("gpu", "an arena on a GPU, over the simulation: calls, bytes, order; some minutes"),
    ("faults", "faults that were found and fixed: what goes wrong now, with a real ONNX Runtime"),
    ("measured", "requests that are measured: errors, costs, overload; over an hour"),
    ("traffic", "cases of services, streams, mixed loads, a request's path: half an hour"),
    ("room", "requests that wait for room, evictions of models, leaks: some 75 minutes"),
    ("light", "instructions of requests, heap blocks, failed device allocations; minutes"),
    ("poll", "single polls that need more than the limit, with spill: an hour"),
    ("engines", "ONNX Runtime in a service, and the C library: half an hour"),
    ("questions", "an operator's questions, kills, alerts, recorder, profiler: half an hour"),
    ("fleet", "load reports, behind a real Envoy too; fits; the saturation: some 20 minutes"),
    ("counted", "figures that do not depend on the machine's speed, and the tables of documents"),
    ("field", "cases from public reports, and the bench `replay`: some minutes"),
];

use Source::{Bench, Cargo, Own, Script};

/// What measures the figures of each subject; `counted` has a module of its own.
pub(super) const ROWS: &[Row] = &[
    row("house", "house.", Own(house::measure)),
    row(
        "workspace",
        "workspace.axum_lines workspace.tonic_lines workspace.model_lines",
        Own(small::measure_lines),
    ),
    row("workspace", "workspace.demo_cpu_minutes", Own(clone::measure_demo)),
    row("workspace", "workspace.test_", Own(clone::measure_tests)),
    row("workspace", "workspace.quick_cpu_seconds", Own(clone::measure_quick)),
    row("workspace", "workspace.heap_build_cpu_seconds", Own(footprint::measure_heap)),
    row("workspace", "workspace.service_build_cpu_seconds", Own(footprint::measure_service)),
    row("arena", "arena.warm.functions arena.warm.files", Own(paths::measure_warm)),
    row("arena", "arena.drop.functions arena.drop.files", Own(paths::measure_drop)),
    row(
        "arena",
        "arena.warm_pair. arena.cold_alloc. arena.drop.instructions arena.sleep. arena.wake.",
        Own(paths::measure_ratios),
    ),
    row("arena", "arena.schedules", Own(small::measure_schedules)),
    row("light", "light.fail. light.metadata.", Bench("index -- --failed")),
    row("gpu", "gpu.context_waits gpu.compact.", Bench("gpu -- --part compact")),
    row("gpu", "gpu.trace.", Bench("gpu -- --part trace")),
    row("gpu", "gpu.wake. gpu.lease.", Bench("gpu -- --part wake --part leases")),
    row("gpu", "gpu.devices.", Bench("gpu -- --part devices")),
    row("gpu", "gpu.pair. gpu.forward. gpu.view.", Bench("gpu -- --part pairs --part views")),
    row("faults", "faults.", Bench("room -- faults")),
    row("faults", "faults.ort.", Script(".ci/engines")),
    row(
        "measured",
        "measured.scope. measured.layer. measured.live_ measured.peak_ measured.learned_",
        Bench("requests"),
    ),
    renamed(
        row("measured", "measured.tick_us", Bench("render")),
        &[("tick.median_us", "measured.tick_us")],
    ),
    renamed(
        row("measured", "measured.simulator.failed", Bench("controller")),
        &[("controller.failed", "measured.simulator.failed")],
    ),
    row("measured", "measured.tick.", Own(paths::measure_tick)),
    row("measured", "measured.runaway.", Bench("room -- faults runaway")),
    row(
        "measured",
        "measured.rest.",
        Cargo("bench --locked --manifest-path benches/retention/Cargo.toml -- --parts rest"),
    ),
    row("measured", "measured.1x. measured.4x.", Bench("overload -- --measured")),
    renamed(
        row("measured", "measured.oom_kills", Bench("overload -- --survive 60 --seed 1")),
        &[("overload.survive.oom_kills", "measured.oom_kills")],
    ),
    row("traffic", "traffic.cases_failed", Own(field::measure_cases)),
    row(
        "traffic",
        "traffic.bidi. traffic.bomb. traffic.cold_s traffic.grpc. traffic.h2. traffic.sse. traffic.unread.",
        Bench("overload -- --streams"),
    ),
    row("traffic", "traffic.mixed. traffic.model_loads", Bench("overload -- --mixed 10")),
    row("traffic", "traffic.request.", Own(paths::measure_request)),
    row("room", "room.schedules.", Bench("room -- schedules")),
    row("room", "room.zipf.", Bench("room -- zipf")),
    row("room", "room.cache.", Bench("room -- cache")),
    row("room", "room.hostage.", Bench("room -- hostage")),
    row("room", "room.h2.", Bench("room -- h2")),
    row("room", "room.leak.", Bench("room -- leak")),
    row("room", "room.burst", Bench("overload -- --burst")),
    renamed(
        row("room", "room.admission_over_atomics", Bench("control -- --parts admission")),
        &[("admission.one_over_atomics", "room.admission_over_atomics")],
    ),
    renamed(
        row("room", "room.4x.", Bench("overload -- --measured")),
        &[
            ("measured.4x.goodput_ratio", "room.4x.quick.goodput_ratio"),
            ("measured.4x.slow.goodput_ratio", "room.4x.slow.goodput_ratio"),
            ("measured.4x.over_rss10_ratio", "room.4x.over_rss10_ratio"),
            ("measured.4x.share.small", "room.4x.share.small"),
            ("measured.4x.share.medium", "room.4x.share.medium"),
            ("measured.4x.share.large", "room.4x.share.large"),
        ],
    ),
    renamed(
        row("room", "room.oom_kills", Bench("overload -- --survive 60 --seed 1")),
        &[("overload.survive.oom_kills", "room.oom_kills")],
    ),
    row("poll", "poll.", Bench("overload -- --poll 20")),
    row("poll", "poll.control.", Bench("idle -- --recorder")),
    row("poll", "poll.disk.", Script(".ci/disks")),
    row("poll", "poll.v2.", Script(".ci/limits/run")),
    row("light", "light.heap.", Bench("control -- --parts heap")),
    row(
        "light",
        "light.patterns. light.replay. light.segments.",
        Cargo("test --locked -p lowtide-gpu --test gpu -- --nocapture streams::patterns traces::"),
    ),
    row("engines", "engines.ort. engines.large.", Script(".ci/engines --figures")),
    row("engines", "engines.rust. engines.c.", Bench("c")),
    row("questions", "questions.metrics", Own(small::measure_metrics)),
    row("questions", "questions.panels", Own(small::measure_panels)),
    row("questions", "questions.alerts.leak_", Own(alerts::measure_leaks)),
    row("questions", "questions.alerts.retained.", Own(alerts::measure_retained)),
    row("questions", "questions.alerts.shed.", Own(alerts::measure_shed)),
    row("questions", "questions.alerts.false_alarms", Own(alerts::measure_false_alarms)),
    row("questions", "questions.answered questions.logs.", Own(small::measure_answered)),
    renamed(
        row("questions", "questions.page.", Script(".ci/page/run release")),
        &[
            ("page.bytes", "questions.page.bytes"),
            ("page.first_picture_ms", "questions.page.first_picture_ms"),
            ("page.violations", "questions.page.violations"),
        ],
    ),
    row("questions", "questions.recorder.", Bench("idle -- --recorder")),
    row(
        "questions",
        "questions.killed.",
        Cargo("bench --locked -p lowtide-benches --features profiling --bench questions -- killed"),
    ),
    row(
        "questions",
        "questions.profiler.",
        Cargo(
            "bench --locked -p lowtide-benches --features profiling --bench questions -- profiler",
        ),
    ),
    row("questions", "questions.advice.", Bench("controller -- --seeds 0 --days 0")),
    row("light", "light.r light.sizes. light.admission. light.la", Bench("requests -- --counted")),
    row("fleet", "fleet.orca.", Script(".ci/fleet")),
    row("fleet", "fleet.report", Bench("requests -- --reports")),
    row("fleet", "fleet.grpc.", Script(".ci/grpc")),
    row("fleet", "fleet.fit.", Bench("room -- fit")),
    row(
        "fleet",
        "fleet.saturation.",
        Cargo("test --locked -p lowtide --test memory memory_saturation -- --nocapture"),
    ),
    row("field", "field.fell", Own(field::measure_fell)),
    row(
        "field",
        "field.rows_wrong field.unreleasable. field.limits. field.overcommit. field.device. \
         field.pattern. field.stream. field.exit. field.lost. field.double. field.bodiless. \
         field.stall.",
        Own(field::measure_rows),
    ),
    long(renamed(
        row("field", "field.soak.drift", Bench("dashboards -- --soak 20m")),
        &[("soak.drift", "field.soak.drift")],
    )),
    long(renamed(
        row("field", "field.virtual_days", Bench("controller -- --seeds 0 --advice 0 --days 90")),
        &[("controller.days.held", "field.virtual_days")],
    )),
];

use Bound::{Least, Most};

/// The goals of figures that no program judges itself.
pub(super) const GOALS: &[(&str, Bound)] = &[
    ("house.product_lines", Most(54_000.0)),
    ("house.product_files", Most(340.0)),
    ("house.all_lines", Most(82_000.0)),
    ("house.public_types", Most(280.0)),
    ("house.error_types", Most(20.0)),
    ("house.shared_names", Most(30.0)),
    ("house.cycle_files", Most(5.0)),
    ("house.doc_words", Most(36_000.0)),
    ("workspace.axum_lines", Most(15.0)),
    ("workspace.tonic_lines", Most(18.0)),
    ("workspace.model_lines", Most(6.0)),
    ("workspace.demo_cpu_minutes", Most(5.0)),
    ("workspace.test_cpu_minutes", Most(8.0)),
    ("workspace.test_binaries", Most(15.0)),
    ("workspace.quick_cpu_seconds", Most(60.0)),
    ("workspace.heap_build_cpu_seconds", Most(15.0)),
    ("workspace.service_build_cpu_seconds", Most(50.0)),
    ("arena.warm.functions", Most(60.0)),
    ("arena.warm.files", Most(12.0)),
    ("arena.drop.functions", Most(50.0)),
    ("arena.drop.files", Most(12.0)),
    ("arena.warm_pair.instructions_ratio", Most(1.0)),
    ("arena.cold_alloc.instructions_ratio", Most(1.0)),
    ("arena.drop.instructions_ratio", Most(1.0)),
    ("arena.sleep.instructions_ratio", Most(1.0)),
    ("arena.wake.instructions_ratio", Most(1.0)),
    ("arena.schedules_per_s_ratio", Least(10.0)),
    ("measured.tick.functions", Most(70.0)),
    ("measured.tick.files", Most(18.0)),
    ("arena.schedules.failed", Most(0.0)),
    ("questions.metrics", Most(45.0)),
    ("questions.panels", Most(35.0)),
    ("questions.alerts.leak_256mib.headroom_used", Most(50.0)),
    ("questions.alerts.leak_16gib.headroom_used", Most(50.0)),
    ("questions.alerts.retained.minutes", Most(30.0)),
    ("questions.alerts.shed.seconds", Most(90.0)),
    ("questions.alerts.false_alarms", Most(0.0)),
    ("questions.answered", Least(8.0)),
    ("questions.logs.named", Least(6.0)),
    ("questions.page.bytes", Most(60_000.0)),
    ("questions.page.first_picture_ms", Most(300.0)),
    ("questions.page.violations", Most(0.0)),
    ("light.metadata.bytes_per_block", Most(110.0)),
    ("fleet.orca.goodput_ratio", Least(1.3)),
    ("fleet.orca.shed_ratio", Most(0.25)),
    ("fleet.grpc.read", Least(1.0)),
    ("fleet.saturation.in_range", Least(1.0)),
    ("traffic.cases_failed", Most(0.0)),
    ("field.fell", Most(0.0)),
    ("field.rows_wrong", Most(0.0)),
    ("field.soak.drift", Most(0.0)),
    ("field.virtual_days", Least(90.0)),
    ("field.unreleasable.served", Least(40.0)),
    ("field.limits.wrong", Most(0.0)),
    ("field.overcommit.mappings", Most(500.0)),
    ("field.device.usable_gib", Least(23.0)),
    ("field.device.usable_few_gib", Least(23.0)),
    ("field.device.arenas", Least(500.0)),
    ("light.patterns.worst", Most(1.15)),
    ("field.pattern.growing_batches", Most(1.06)),
    ("field.pattern.two_models", Most(1.10)),
    ("field.pattern.one_shot_streams", Most(1.06)),
    ("field.pattern.host_ahead", Most(1.01)),
    ("field.pattern.clean_ups", Most(1.30)),
    ("field.stream.null", Most(0.0)),
    ("field.exit.calls", Most(0.0)),
    ("field.lost.calls_per_minute", Most(10.0)),
    ("field.double.served", Least(192.0)),
    ("field.bodiless.reserved", Most(64.0)),
    ("field.stall.cut", Most(0.0)),
];
