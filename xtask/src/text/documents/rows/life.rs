//! The page that follows an allocation: what each step goes by.
//!
//! Invariant: as in `rows`.

use lowtide::config::{Config, Profile};
use lowtide::control::{Level, Thresholds};
use lowtide::decay::DecayTime;
use lowtide::host::HeapProfile;

use super::{Row, config, jemalloc, k, loop_settings, rows as of_page, values};
use crate::code::{constant, how_often, part, percent, size, time};

const PAGE: &str = "docs/LIFE_OF_AN_ALLOCATION.md";

/// A decay time of a profile.
fn within(decay: DecayTime) -> String {
    let DecayTime::Within(within) = decay else { panic!("{decay:?} is no time") };
    time(within)
}

pub(super) fn rows() -> Vec<Row> {
    let balanced = config(Profile::Balanced);
    let cache = jemalloc(HeapProfile::Balanced, "tcache_max").parse().expect("bytes");
    let marks = Thresholds::default();
    let up = |level| part(marks.band(level).expect("it has marks").up);
    of_page(
        PAGE,
        [
            ("Figures are published {};", values![how_often(Config::METRICS_INTERVAL)]),
            ("A block of at most {} comes out of the thread's cache", values![size(cache)]),
            // jemalloc's largest size class that shares pages, on pages of 4 KiB.
            ("or pages of its own above 14 KiB.", values![]),
            (
                "spreads threads over {} arenas for each CPU | `narenas` ({}) |",
                values![
                    constant("src/host/binding.rs", "ARENAS_PER_CPU").count(),
                    jemalloc(HeapProfile::Balanced, "narenas")
                ],
            ),
            (
                "along a curve that ends after {}. jemalloc's",
                values![within(balanced.heap_decay.value)],
            ),
            (
                "a freed block of that size, kept within {}.",
                values![constant("src/device/config.rs", "FRONT").size()],
            ),
            (
                "Memory that has been idle for {} is released:",
                values![within(balanced.device_decay.value)],
            ),
            (
                "if other processes leave less than {} of the device",
                values![percent(Config::DEVICE_WATERMARK)],
            ),
            ("Meanwhile, every {}, the loop compares", values![time(loop_settings().active_tick)]),
            (
                "The correction factor, {} at first and then {} to {}, is the measured",
                values![k("K_START").to_string(), k("K_MIN").to_string(), k("K_MAX").to_string()],
            ),
            (
                "Above {} of the limit the loop purges, above {} it unloads, above {} it admits",
                values![up(Level::Elevated), up(Level::High), up(Level::Critical)],
            ),
        ],
    )
}
