//! Sentences of the other pages: README, tuning, arena options, recordings, glossary, architecture.
//!
//! Invariant: as in `rows`.

use std::time::Duration;

use super::{
    Row, conf, expect, jemalloc, k, of_profile, rows as of_page, same, seconds, ticks, values,
};
use crate::text::code::Code;
use crate::text::words::{how_often, percent, spoken, word};

pub(super) fn rows(code: &Code<'_>) -> Vec<Row> {
    let pages = [readme, started, tuning, options, benched, built, others];
    pages.into_iter().flat_map(|rows| rows(code)).collect()
}

fn correction_factor(code: &Code<'_>) -> Vec<String> {
    ["K_START", "K_MIN", "K_MAX"].map(|name| k(code, name).to_string()).into()
}

fn readme(code: &Code<'_>) -> Vec<Row> {
    let reserved_headroom = code.constant("BERTH_PART").number();
    expect(code, same(reserved_headroom, 3.0), "README.md: a third");
    // Its three runs: with lowtide, with jemalloc's defaults, with half of the limit.
    let tide = |name| code.constant(&format!("tide::run::{name}")).time();
    let [warm_up, quiet, burst] = ["WARM_UP", "QUIET", "BURST"].map(tide);
    let rest = ["IDLE_UNLOAD", "AFTER_UNLOAD", "HALF_BURST"].map(tide).into_iter().sum();
    let looks = Duration::from_secs(10);
    let lasts: Duration = 2 * (warm_up + quiet + burst) + looks + rest;
    of_page(
        "README.md",
        [
            (
                "Both need Rust {} or newer,",
                values![code.within("Cargo.toml", "\nrust-version = \"", "\"")],
            ),
            ("Once built, the first command takes about {}.", values![spoken(lasts)]),
            ("larger than a third of what may be reserved", values![]),
        ],
    )
}

fn started(code: &Code<'_>) -> Vec<Row> {
    let eight = code.constant("need::LESSONS_MIN").number();
    let lasts = code.constant("slow_start::LASTS").time();
    expect(code, lasts == Duration::from_secs(1), "docs/GETTING_STARTED.md: a second");
    let idle = of_profile(code, "Balanced", "idle_unload").time();
    let ceiling = percent(code.constant("Config::CEILING").number());
    of_page(
        "docs/GETTING_STARTED.md",
        [
            ("Once {} requests of a route have succeeded,", values![word(eight)]),
            ("{} until it is measured, then between {} and {}.", correction_factor(code)),
            ("Requests are admitted up to {} of the limit at first.", values![ceiling]),
            ("It is unloaded after {} without use", values![spoken(idle)]),
        ],
    )
}

fn tuning(code: &Code<'_>) -> Vec<Row> {
    let all @ [low, balanced, throughput] = ["LowMemory", "Balanced", "Throughput"];
    for name in ["background_thread", "muzzy_decay_ms", "tcache_max", "metadata_thp"] {
        let found = all.map(|profile| jemalloc(code, profile, name));
        let is_one = found.iter().all(|value| *value == found[0]);
        expect(code, is_one, &format!("docs/TUNING.md: one {name} in every profile"));
    }
    let [cache, other] = [low, balanced].map(|of| jemalloc(code, of, "cache_oblivious"));
    expect(code, cache == other, "docs/TUNING.md: one cache_oblivious in two profiles");
    of_page(
        "docs/TUNING.md",
        [
            (
                "### `background_thread` `{}` in every profile.",
                values![jemalloc(code, balanced, "background_thread")],
            ),
            (
                "### `max_background_threads` {}, in low-memory {} (guess).",
                values![
                    jemalloc(code, balanced, "max_background_threads"),
                    jemalloc(code, low, "max_background_threads")
                ],
            ),
            (
                "### `narenas` {} in balanced (guess), {} in low-memory,",
                values![jemalloc(code, balanced, "narenas"), jemalloc(code, low, "narenas")],
            ),
            (
                "### `dirty_decay_ms` {}; in throughput {}, which is jemalloc's default.",
                values![
                    jemalloc(code, balanced, "dirty_decay_ms"),
                    jemalloc(code, throughput, "dirty_decay_ms")
                ],
            ),
            ("### `muzzy_decay_ms` {}.", values![jemalloc(code, balanced, "muzzy_decay_ms")]),
            (
                "### `tcache_max` jemalloc's {} bytes in every profile.",
                values![jemalloc(code, balanced, "tcache_max")],
            ),
            (
                "### `thp` jemalloc's `{}`, which leaves it to the kernel; `{}` in low-memory.",
                values![jemalloc(code, balanced, "thp"), jemalloc(code, low, "thp")],
            ),
            (
                "### `metadata_thp` `{}`, also jemalloc's default.",
                values![jemalloc(code, balanced, "metadata_thp")],
            ),
            (
                "### `cache_oblivious` `{}` in low-memory and balanced; jemalloc's `{}` in \
                 throughput.",
                values![
                    jemalloc(code, balanced, "cache_oblivious"),
                    jemalloc(code, throughput, "cache_oblivious")
                ],
            ),
            ("JEMALLOC_SYS_WITH_MALLOC_CONF = \"{}\"", values![conf(code, balanced)]),
        ],
    )
}

/// The bug: the page named another major version of mimalloc than the one that the bench links.
fn benched(code: &Code<'_>) -> Vec<Row> {
    let of_lock = |name: &str| {
        let start = format!("name = \"{name}\"\nversion = \"");
        code.within("benches/retention/Cargo.lock", &start, "\"")
    };
    of_page(
        "docs/BENCHMARKS_APPENDIX.md",
        [(
            "`mimalloc_collect`, mimalloc 3 (`libmimalloc-sys` {})",
            values![of_lock("libmimalloc-sys")],
        )],
    )
}

fn options(code: &Code<'_>) -> Vec<Row> {
    let published = code.constant("Config::METRICS_INTERVAL").time();
    expect(code, published == Duration::from_secs(1), "docs/ARENA_OPTIONS.md: within a second");
    of_page(
        "docs/ARENA_OPTIONS.md",
        [
            (
                "rounded to granules ({} on the host driver)",
                values![code.constant("host::GRANULARITY").size()],
            ),
            (
                "all that the device has left less {}.",
                values![code.constant("CUARENA_MARGIN").size()],
            ),
            ("the control loop's next tick ({}), and", values![ticks(code)]),
            ("the worker has seen that, within a second.", values![]),
            (
                "count among the {} that a `Memory` may have",
                values![code.constant("ARENAS_MAX").count()],
            ),
        ],
    )
}

fn built(code: &Code<'_>) -> Vec<Row> {
    let share = code.constant("EPOCH_SHARE").number();
    of_page(
        "docs/ARCHITECTURE.md",
        [
            ("The correction factor is {} until measured, then {} to {}.", correction_factor(code)),
            ("samples every {},", values![ticks(code)]),
            ("only as often as {} % of a core allows", values![format!("{:.1}", 100.0 / share)]),
        ],
    )
}

fn others(code: &Code<'_>) -> Vec<Row> {
    let mut all = of_page(
        "docs/METRICS.md",
        [(
            "publishes the metrics {} by default, through",
            values![how_often(code.constant("Config::METRICS_INTERVAL").time())],
        )],
    );
    let kept = seconds(&code.constant("runtime::DECAY_MIN"));
    all.extend(of_page(
        "docs/ENGINES.md",
        [("but at least {}, and then returns it", values![kept])],
    ));
    all.extend(of_page(
        "docs/RECORDING.md",
        [("about every {} the current thread", values![code.constant("DUE_FROM").size()])],
    ));
    all
}
