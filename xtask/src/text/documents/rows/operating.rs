//! The page for operators: what the loop, the worker, the arenas and the alerts go by.
//!
//! Invariant: one row for each sentence with a number of ours.

use lowtide::ByteSize;
use lowtide::clock::Moment;
use lowtide::config::{Config, Profile};
use lowtide::control::{DeviceSample, Level, Thresholds, Watermark};
use lowtide::device::SleepConfig;
use lowtide::host::HeapProfile;

use super::{Row, config, first_of_a_sentence, jemalloc, k, loop_settings, seconds, ticks, values};
use crate::code::{
    Alert, between, constant, how_often, percent, size, spoken, time, word, written,
};

const PAGE: &str = "docs/OPERATING.md";
const ADMIN: &str = "src/service/admin/mod.rs";

/// How much idle memory the watermark wants back of a device that is full, as a part of it.
fn wanted_of_a_full_device() -> f64 {
    let (total, free) = (ByteSize::gib(80), ByteSize::ZERO);
    let look = DeviceSample { total, free, committed: total };
    let wanted = Watermark::new(Config::DEVICE_WATERMARK).look(Moment::ORIGIN, look).wanted;
    wanted.as_f64() / total.as_f64()
}

/// `ten` of `(10, Duration::from_secs(1))`.
fn at_once(name: &str) -> &'static str {
    let pair = between(ADMIN, &format!("const {name}: (u32, Duration) = ("), ");\n");
    let (burst, each) = pair.split_once(", ").expect("a pair");
    assert_eq!(each, "Duration::from_secs(1)", "{name}: the page says one a second");
    word(burst.parse().expect("a number"))
}

pub(super) fn rows() -> Vec<Row> {
    let all = [published(), levels(), routes(), kernel(), purges(), threads(), device(), sleep()];
    all.into_iter().flatten().map(|(says, values)| Row { page: PAGE, says, values }).collect()
}

type Rows = Vec<(&'static str, Vec<String>)>;

fn published() -> Rows {
    let hook = constant("src/memory/hands.rs", "HOOK_EVERY").time();
    let each = constant("src/control/maintenance/purging.rs", "PAUSE_PER_MIB").time();
    vec![
        (
            "Its worker thread publishes {} (`LOWTIDE_METRICS_INTERVAL`)",
            values![how_often(Config::METRICS_INTERVAL)],
        ),
        ("runs after a publication, at most once in {}.", values![time(hook)]),
        // A hundred times as long lies between two.
        ("| a purge: about {} per MiB |", values![time(each / 100)]),
    ]
}

fn levels() -> Rows {
    let (marks, control) = (Thresholds::default(), loop_settings());
    let band = |level| {
        let band = marks.band(level).expect("it has marks");
        values![percent(band.up), percent(band.down)]
    };
    let pause = constant("src/control/reclaim.rs", "PAUSE_MIN").time();
    let touched = (3.0 * 1024.0 * control.active_tick.as_secs_f64()).floor();
    vec![
        ("up to the ceiling, {} of the limit", values![percent(Config::CEILING)]),
        ("| elevated | {} | {} |", band(Level::Elevated)),
        ("| high | {} | {} |", band(Level::High)),
        ("| critical | {} | {} |", band(Level::Critical)),
        ("heap and the arenas, at most {} and less often", values![how_often(pause)]),
        ("left one step at a time, after {} below", values![time(marks.dwell())]),
        (
            "A request that declares more than {} is treated like any other",
            values![size(lowtide::service::EXEMPT_BODY_MAX.get())],
        ),
        ("reserves {};", values![size(lowtide::service::EXEMPT_BODY_MAX.get())]),
        ("before it answers, up to {} of it,", values![size(lowtide::service::DRAIN_MAX.get())]),
        (
            "so fast that the limit is {} samples away",
            values![word(constant("src/control/pressure.rs", "TICKS_TO_FULL").number())],
        ),
        ("up to 3 GiB a second, which is {} MiB between two samples", values![touched.to_string()]),
        ("that is wrong by more than {} times", values![word(k("K_MAX"))]),
    ]
}

fn routes() -> Rows {
    let of = |file: &str, name: &str| constant(file, name).count();
    let learned = "src/service/learned.rs";
    let admin_tasks = "src/memory/admin_tasks.rs";
    let token = "src/service/admin/token.rs";
    vec![
        ("The map has at most {} cells.", values![of("src/service/parts.rs", "CELLS_MAX")]),
        (
            "`again_in_seconds` says when to request it again, a second for each {} blocks",
            values![of("src/service/parts.rs", "BLOCKS_EACH_SECOND")],
        ),
        (
            "The document stays under {}.",
            values![constant("benches/render/main.rs", "BYTES_MAX").size()],
        ),
        (
            "`keep` (default {}) |",
            values![between(ADMIN, "query.get(\"keep\").unwrap_or(\"", "\"")],
        ),
        (
            "shows the last {}. At most {} wait;",
            values![of(admin_tasks, "KEPT_MAX"), of(admin_tasks, "WAITING_MAX")],
        ),
        (
            "the token, of {} to {} characters",
            values![of(token, "LENGTH_MIN"), of(token, "LENGTH_MAX")],
        ),
        (
            "{} commands at once, then one a second",
            values![first_of_a_sentence(at_once("COMMANDS"))],
        ),
        ("rejections {} at once, then one a second", values![at_once("LOGGED")]),
        (
            "doubles every {} while requests of the route run.",
            values![time(constant("src/service/slow_start.rs", "STEP").time())],
        ),
        (
            "for each of at most {} routes, the {}th percentile",
            values![of(learned, "ROUTES_MAX"), of(learned, "PERCENTILE")],
        ),
    ]
}

fn kernel() -> Rows {
    let read = constant("src/memory/sensor.rs", "SIGNAL_MAX").time();
    vec![("at most {} later in an idle process", values![time(read)])]
}

fn purges() -> Rows {
    let [low, balanced, throughput] = Profile::ALL.map(config);
    let pause = constant("src/control/reclaim.rs", "PAUSE_MIN").time();
    let each = constant("src/control/maintenance/purging.rs", "PAUSE_PER_MIB").time();
    let looks = constant("src/memory/heap.rs", "LOOKS_PER_DECAY").number();
    let heap = |name| time(constant("src/memory/heap.rs", name).time());
    let control = loop_settings();
    assert!((control.purge_part - 0.25).abs() < f64::EPSILON, "the page says a quarter");
    assert_eq!((throughput.purge_when_idle_for, throughput.purge_growth), (None, None));
    let growth = [&low, &balanced].map(|config| config.purge_growth.expect("not never"));
    assert_eq!(growth[0].hold, growth[1].hold, "the page gives one time");
    let [a, b] = growth;
    vec![
        ("the level is elevated or higher: at most once in {}, less", values![time(pause)]),
        (
            "no request was held for {} (`low-memory`) or {} (`balanced`; never in `throughput`)",
            values![seconds(low.purge_when_idle_for), seconds(balanced.purge_when_idle_for)],
        ),
        (
            "more than {} is purgeable, and more than a quarter of the live bytes.",
            values![size(control.purge_floor.get())],
        ),
        (
            "for {} the process has kept more than before: by more than {} and {} of its \
             anonymous memory (`low-memory`), or {} and {} (`balanced`); never in `throughput`",
            values![
                time(a.hold),
                size(a.floor.get()),
                percent(a.part),
                size(b.floor.get()),
                percent(b.part)
            ],
        ),
        (
            "at least {} for each MiB kept, so that they take {} of a core at most",
            values![time(each), percent(0.0001 / each.as_secs_f64())],
        ),
        (
            "{} times in a decay time, at intervals of {} to {}.",
            values![word(looks), heap("DECAY_INTERVAL_MIN"), heap("DECAY_INTERVAL_MAX")],
        ),
    ]
}

fn threads() -> Rows {
    let each = constant("src/host/binding.rs", "ARENAS_PER_CPU").number();
    vec![
        ("over the first `{} x CPUs` arenas", values![each.to_string()]),
        (
            "with 64 CPUs and a quota of 2 it makes room for {} arenas, each with free pages of \
             its own; with the hook threads use {}.",
            values![(64.0 * each).to_string(), (2.0 * each).to_string()],
        ),
        (
            "`heap_profile!(balanced)` has {}, or",
            values![jemalloc(HeapProfile::Balanced, "narenas")],
        ),
    ]
}

fn device() -> Rows {
    let looks = constant("src/memory/builder.rs", "DEVICE_INTERVAL_MAX").time();
    let (low, high) = (Config::DEVICE_WATERMARK, wanted_of_a_full_device());
    assert!((high / low - 1.5).abs() < 1e-6, "the page says 1.5 times the watermark");
    let calm = constant("src/control/watermark.rs", "CALM").time();
    let governor = "src/device/driver/cuda/governor.rs";
    let decay = written(governor, "let decay = DecayTime::from_duration(", ");").time();
    vec![
        (
            "{} the worker reads the device's free memory",
            values![first_of_a_sentence(&how_often(looks))],
        ),
        ("`LOWTIDE_DEVICE_WATERMARK`, {} of the device by default,", values![percent(low)]),
        ("the last {} of the device are not kept idle", values![percent(high)]),
        ("when the target has been free for {},", values![spoken(calm)]),
        ("released after the decay time ({})", values![time(decay)]),
    ]
}

fn sleep() -> Rows {
    let again = constant("src/device/sleep/idle.rs", "AGAIN").time();
    vec![
        ("within the idle time and a tick of the sampler ({})", values![ticks()]),
        ("the arena stays awake and tries again after {};", values![time(again)]),
        (
            "waits for the memory, for up to {} if the device is full",
            values![spoken(SleepConfig::default().wake_timeout)],
        ),
    ]
}

pub(super) fn alerts() -> Vec<Row> {
    let all = [heap_alerts(), host_alerts(), request_alerts(), device_alerts()];
    all.into_iter().flatten().map(|(says, values)| Row { page: PAGE, says, values }).collect()
}

fn heap_alerts() -> Rows {
    let retained = Alert::named("LowtideHeapRetainedHigh");
    let fragmented = Alert::named("LowtideHeapFragmented");
    vec![
        (
            "for {} the heap has held more than {} resident bytes for each live one, and more \
             than {} of them are retained",
            values![
                spoken(retained.lasts),
                word(retained.after("per_live:ratio > ")),
                retained.size_after("retained_bytes > ")
            ],
        ),
        (
            "for {} more than {} of the bytes in active pages (those with a live or a cached \
             block) have not been live, and more than {} of them are holes",
            values![
                spoken(fragmented.lasts),
                percent(fragmented.after("fragmentation:ratio > ")),
                fragmented.size_after("thread_cache_bytes > ")
            ],
        ),
    ]
}

fn host_alerts() -> Rows {
    let marks = Thresholds::default();
    let up = |level| percent(marks.band(level).expect("it has marks").up);
    let near = Alert::named("LowtideMemoryNearLimit");
    let hours = Alert::named("LowtideMemoryLimitInHours");
    let stale = Alert::named("LowtideLimitStale");
    let sampler = Alert::named("LowtideSamplerStale");
    let old = std::time::Duration::from_secs_f64(sampler.after("timestamp_seconds > "));
    let refused = constant("src/control/exhaustion.rs", "REFUSED_FOR").time();
    let exhausted = constant("src/control/desk.rs", "EXHAUSTED").time();
    vec![
        (
            "above {} of the limit for {}, with less than {} left. Purging began at {}, unloading \
             at {}; from {} on only high-priority requests that fit",
            values![
                percent(near.after("per_limit:ratio > ")),
                spoken(near.lasts),
                near.size_after("physical_bytes < "),
                up(Level::Elevated),
                up(Level::High),
                up(Level::Critical)
            ],
        ),
        (
            "after requests have been rejected for {}. Requests are rejected as `exhausted` with a \
             retry time of {} to {},",
            values![time(refused), time(exhausted), time(2 * exhausted)],
        ),
        (
            "has grown by more than {} in {}, at a rate that reaches the limit within {} hours, \
             and the service uses more than {} of its limit",
            values![
                hours.size_after("[1h]) > "),
                spoken(hours.window()),
                word(hours.after("[1h], ") / 3600.0),
                percent(hours.after("per_limit:ratio > "))
            ],
        ),
        ("**Meaning:** for {} the cgroup file", values![spoken(stale.lasts)]),
        ("has not updated its figures for {}. The", values![spoken(old)]),
        ("if `LOWTIDE_METRICS_INTERVAL` is above {}, raise", values![spoken(old)]),
    ]
}

fn request_alerts() -> Rows {
    let shed = Alert::named("LowtideRequestsShed");
    let thrashing = Alert::named("LowtideResourceThrashing");
    let fail = Alert::named("LowtideResourceLoadsFail");
    let kill = Alert::named("LowtideOomKill");
    let down = Alert::named("LowtideDown");
    let restarts = Alert::named("LowtideRestarts");
    let each = std::time::Duration::from_secs_f64(1.0 / shed.after("rate5m > "));
    vec![
        (
            "**Meaning:** for {} more than {} of the requests were rejected, and more than one \
             every {}.",
            values![spoken(shed.lasts), percent(shed.after("ratio5m > ")), spoken(each)],
        ),
        (
            "a resource was loaded more than {} times in {}.",
            values![word(thrashing.after("[30m])) > ")), spoken(thrashing.window())],
        ),
        ("has failed within the last {}. Every request", values![spoken(fail.window())]),
        ("for memory within the last {} (`lowtide_pressure", values![spoken(kill.window())]),
        ("**Meaning:** for {} an instance that was scraped", values![spoken(down.lasts)]),
        (
            "has started {} times or more within {}: `lowtide_sampler",
            values![word(restarts.after("[30m])) > ") + 1.0), spoken(restarts.window())],
        ),
    ]
}

fn device_alerts() -> Rows {
    let fail = Alert::named("LowtideDeviceAllocationsFail");
    let retained = Alert::named("LowtideDeviceRetainedHigh");
    let wake = Alert::named("LowtideWakeFailures");
    let stuck = Alert::named("LowtideDeviceStuck");
    let half = retained.after("per_committed:ratio > ");
    assert!((half - 0.5).abs() < f64::EPSILON, "the page says half");
    vec![
        (
            "(`lowtide_device_alloc_failures_total`) in the last {}. The work",
            values![spoken(fail.window())],
        ),
        (
            "more than half of the device memory of an arena has been without a live block for \
             {}, and that is more than {}.",
            values![spoken(retained.lasts), retained.size_after("device_retained_bytes > ")],
        ),
        ("was used within the last {} and could", values![spoken(wake.window())]),
        (
            "has failed within the last {} (`lowtide_device_rollback_failures",
            values![spoken(stuck.window()).trim_start_matches("an ")],
        ),
    ]
}
