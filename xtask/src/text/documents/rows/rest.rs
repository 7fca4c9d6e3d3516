//! The other pages: the README, tuning, arena options, recordings, words, how it is built.
//!
//! Invariant: as in `rows`.

use std::time::Duration;

use lowtide::config::arena::CUARENA_MARGIN;
use lowtide::config::{Config, Profile};
use lowtide::device::HostDriver;
use lowtide::device::driver::Driver as _;
use lowtide::host::HeapProfile;

use super::{Row, config, jemalloc, k, rows as of_page, ticks, values};
use crate::code::{between, constant, how_often, percent, size, spoken, word};

pub(super) fn rows() -> Vec<Row> {
    let pages = [readme(), started(), tuning(), options(), benched(), built(), others()];
    pages.into_iter().flatten().collect()
}

fn correction_factor() -> Vec<String> {
    ["K_START", "K_MIN", "K_MAX"].map(|name| k(name).to_string()).into()
}

fn readme() -> Vec<Row> {
    let reserved_headroom = constant("src/control/fairness.rs", "BERTH_PART").number();
    assert!((reserved_headroom - 3.0).abs() < f64::EPSILON, "the page says a third");
    // Its three runs: with lowtide, with jemalloc's defaults, with half of the limit.
    let tide = |name| constant("examples/tide/run.rs", name).time();
    let [warm_up, quiet, burst] = ["WARM_UP", "QUIET", "BURST"].map(tide);
    let rest = ["IDLE_UNLOAD", "AFTER_UNLOAD", "HALF_BURST"].map(tide).into_iter().sum();
    let looks = Duration::from_secs(10);
    let lasts: Duration = 2 * (warm_up + quiet + burst) + looks + rest;
    of_page(
        "README.md",
        [
            (
                "Both need Rust {} or newer,",
                values![between("Cargo.toml", "\nrust-version = \"", "\"")],
            ),
            ("Once built, the first command takes about {}.", values![spoken(lasts)]),
            ("larger than a third of what may be reserved", values![]),
        ],
    )
}

fn started() -> Vec<Row> {
    let slow = "src/service/slow_start.rs";
    let eight = constant(slow, "ANSWERED").number();
    let lessons = constant("src/service/learned.rs", "LESSONS_MIN").number();
    assert!((eight - lessons).abs() < f64::EPSILON, "the page gives one number for both");
    let lasts = constant(slow, "LASTS").time();
    assert_eq!(lasts, Duration::from_secs(1), "the page says a second");
    let idle = config(Profile::Balanced).idle_unload.value;
    let ceiling = percent(Config::CEILING);
    of_page(
        "docs/GETTING_STARTED.md",
        [
            ("Once {} requests of a route have succeeded,", values![word(eight)]),
            ("{} until it is measured, then between {} and {}.", correction_factor()),
            ("Requests are admitted up to {} of the limit.", values![ceiling]),
            ("It is unloaded after {} without use", values![spoken(idle)]),
        ],
    )
}

fn tuning() -> Vec<Row> {
    let [low, balanced, throughput] =
        [HeapProfile::LowMemory, HeapProfile::Balanced, HeapProfile::Throughput];
    for (name, value) in [("background_thread", "true"), ("muzzy_decay_ms", "0")] {
        let found = HeapProfile::ALL.map(|profile| jemalloc(profile, name));
        assert_eq!(found, [value; 3], "the page gives one value of {name} for all");
    }
    for name in ["tcache_max", "metadata_thp"] {
        let found = HeapProfile::ALL.map(|profile| jemalloc(profile, name));
        assert!(found.iter().all(|value| *value == found[0]), "{name}: {found:?}");
    }
    assert_eq!(jemalloc(low, "cache_oblivious"), jemalloc(balanced, "cache_oblivious"));
    let conf = balanced.conf().to_str().expect("ASCII");
    of_page(
        "docs/TUNING.md",
        [
            ("### `background_thread` `true` in every profile.", values![]),
            (
                "### `max_background_threads` {}, in low-memory {} (guess).",
                values![
                    jemalloc(balanced, "max_background_threads"),
                    jemalloc(low, "max_background_threads")
                ],
            ),
            (
                "### `narenas` {} in balanced (guess), {} in low-memory,",
                values![jemalloc(balanced, "narenas"), jemalloc(low, "narenas")],
            ),
            (
                "### `dirty_decay_ms` {}; in throughput {}, which is jemalloc's default.",
                values![
                    jemalloc(balanced, "dirty_decay_ms"),
                    jemalloc(throughput, "dirty_decay_ms")
                ],
            ),
            ("### `muzzy_decay_ms` {}.", values![jemalloc(balanced, "muzzy_decay_ms")]),
            (
                "### `tcache_max` jemalloc's {} bytes in every profile.",
                values![jemalloc(balanced, "tcache_max")],
            ),
            (
                "### `thp` jemalloc's `{}`, which leaves it to the kernel; `{}` in low-memory.",
                values![jemalloc(balanced, "thp"), jemalloc(low, "thp")],
            ),
            (
                "### `metadata_thp` `{}`, also jemalloc's default.",
                values![jemalloc(balanced, "metadata_thp")],
            ),
            (
                "### `cache_oblivious` `{}` in low-memory and balanced; jemalloc's `{}` in \
                 throughput.",
                values![
                    jemalloc(balanced, "cache_oblivious"),
                    jemalloc(throughput, "cache_oblivious")
                ],
            ),
            ("JEMALLOC_SYS_WITH_MALLOC_CONF = \"{}\"", values![conf]),
        ],
    )
}

/// The bug: the page named another major version of mimalloc than the one that the bench links.
fn benched() -> Vec<Row> {
    let of_lock = |name: &str| {
        let start = format!("name = \"{name}\"\nversion = \"");
        between("benches/retention/Cargo.lock", &start, "\"")
    };
    of_page(
        "docs/BENCHMARKS_APPENDIX.md",
        [(
            "`mimalloc_collect`, mimalloc 3 (`libmimalloc-sys` {})",
            values![of_lock("libmimalloc-sys")],
        )],
    )
}

fn options() -> Vec<Row> {
    assert_eq!(Config::METRICS_INTERVAL.as_secs(), 1, "the page says within a second");
    of_page(
        "docs/ARENA_OPTIONS.md",
        [
            (
                "rounded to granules ({} on the host driver)",
                values![size(HostDriver::new().capabilities().granularity.get())],
            ),
            (
                "all that the device has left less {}.",
                values![format!("{} MiB", CUARENA_MARGIN.get() >> 20)],
            ),
            ("the control loop's next tick ({}), and", values![ticks()]),
            ("the worker has seen that, within a second.", values![]),
            (
                "count among the {} that a `Memory` may have",
                values![constant("src/memory/devices/arenas.rs", "ARENAS_MAX").count()],
            ),
        ],
    )
}

fn built() -> Vec<Row> {
    let share = constant("src/memory/sensor.rs", "EPOCH_SHARE").number();
    of_page(
        "docs/ARCHITECTURE.md",
        [
            ("The correction factor is {} until measured, then {} to {}.", correction_factor()),
            ("samples every {},", values![ticks()]),
            ("only as often as {} % of a core allows", values![format!("{:.1}", 100.0 / share)]),
        ],
    )
}

fn others() -> Vec<Row> {
    let mut all = of_page(
        "docs/METRICS.md",
        [(
            "publishes the metrics {} by default, through",
            values![how_often(Config::METRICS_INTERVAL)],
        )],
    );
    all.extend(of_page(
        "docs/RECORDING.md",
        [(
            "about every {} the current thread",
            values![constant("src/device/record/lines.rs", "DUE_FROM").size()],
        )],
    ));
    all
}
