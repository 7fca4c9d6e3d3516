//! Sentences of the page that follows an allocation.
//!
//! Invariant: as in `rows`.

use super::{Row, band, jemalloc, k, of_loop, of_profile, rows as of_page, seconds, values};
use crate::text::code::Code;
use crate::text::words::{how_often, part, percent, size, time};

const PAGE: &str = "docs/LIFE_OF_AN_ALLOCATION.md";

pub(super) fn rows(code: &Code<'_>) -> Vec<Row> {
    let cache = jemalloc(code, "Balanced", "tcache_max").parse().ok().and_then(size);
    let up = |level| part(band(code, level)[0]);
    of_page(
        PAGE,
        [
            (
                "Figures are published {};",
                values![how_often(code.constant("Config::METRICS_INTERVAL").time())],
            ),
            (
                "A block of at most {} comes out of the thread's cache",
                values![cache.unwrap_or_default()],
            ),
            (
                "it waits for room, for at most {}, with",
                values![time(code.constant("Config::MAX_WAIT").time())],
            ),
            // jemalloc's largest size class that shares pages, on pages of 4 KiB.
            ("or pages of its own above 14 KiB.", values![]),
            (
                "spreads threads over {} arenas for each CPU | `narenas` ({}) |",
                values![
                    code.constant("ARENAS_PER_CPU").count(),
                    jemalloc(code, "Balanced", "narenas")
                ],
            ),
            (
                "along a curve that ends after {}. jemalloc's",
                values![seconds(&of_profile(code, "Balanced", "heap_decay"))],
            ),
            (
                "a freed block of that size, kept within {}.",
                values![code.constant("THREAD_CACHE").size()],
            ),
            (
                "Memory that has been idle for {} is released:",
                values![seconds(&of_profile(code, "Balanced", "device_decay"))],
            ),
            (
                "if other processes leave less than {} of the device",
                values![percent(code.constant("DeviceConfig::WATERMARK").number())],
            ),
            (
                "Meanwhile, every {} under load and up to every {} without, the loop compares",
                values![
                    time(of_loop(code, "active_tick").time()),
                    time(of_loop(code, "idle_tick").time())
                ],
            ),
            (
                "The correction factor, {} at first and then {} to {}, is the memory",
                values![
                    k(code, "K_START").to_string(),
                    k(code, "K_MIN").to_string(),
                    k(code, "K_MAX").to_string()
                ],
            ),
            (
                "Above {} of the limit the loop purges, above {} it unloads, above {} it admits",
                values![up("Elevated"), up("High"), up("Critical")],
            ),
        ],
    )
}
