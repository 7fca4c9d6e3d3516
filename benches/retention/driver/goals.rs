//! The goals, and which of them hold.
//!
//! Invariant: a goal whose figures were not measured is told as such and is not missed.

use crate::figures::Figures;

/// Prints a line for each goal; whether none was missed.
pub(crate) fn judge(figures: &Figures) -> bool {
    println!("\n{:<66}{:>9}{:>11}", "goal", "at most", "measured");
    let mut held = true;
    for (what, most, found) in all(figures) {
        let Some(found) = found else {
            println!("{what:<66}{most:>9}{:>11}", "-");
            continue;
        };
        let verdict = if found <= most { "" } else { "  missed" };
        held &= found <= most;
        println!("{what:<66}{most:>9}{found:>11.4}{verdict}");
    }
    held
}

fn all(figures: &Figures) -> Vec<(&'static str, f64, Option<f64>)> {
    let of = |name: &str| figures.of(name);
    let burst = |who: &str, end: &str, whom: &str| {
        figures.ratio(&format!("retention.{who}.{end}"), &format!("retention.{whom}.{end}"))
    };
    let documents = |who: &str, end: &str, whom: &str| {
        figures.ratio(&format!("documents.{who}.{end}"), &format!("documents.{whom}.{end}"))
    };
    let (je, trim) = ("jemalloc_default", "glibc_trim");
    let latency = |end: &str| {
        let pairs = of(&format!("pairs.balanced.{end}_ratio"));
        pairs.or_else(|| burst("balanced", &format!("{end}_us"), je))
    };
    let less = |one: &str, other: &str| Some(of(one)? - of(other)?);
    let part = |one: &str, other: &str| Some(of(one)?.max(0.0) / of(other)?.max(1e-9));
    vec![
        ("low_memory: +2 s / jemalloc default", 0.18, burst("low_memory", "resident_2s_mib", je)),
        ("balanced: +2 s / jemalloc default", 0.22, burst("balanced", "resident_2s_mib", je)),
        ("low_memory: +10 s / glibc + trim", 1.00, burst("low_memory", "resident_10s_mib", trim)),
        ("balanced: +10 s / glibc + trim", 1.15, burst("balanced", "resident_10s_mib", trim)),
        ("low_memory: +10 s / balanced", 1.00, burst("low_memory", "resident_10s_mib", "balanced")),
        (
            "low_memory: +10 s / balanced, documents",
            1.00,
            documents("low_memory", "resident_10s_mib", "balanced"),
        ),
        ("low_memory, survivors apart: at rest / live", 1.35, of(crate::burst::APART_AT_REST)),
        ("balanced: peak / jemalloc default", 1.05, burst("balanced", "peak_mib", je)),
        ("balanced: p50 / jemalloc default", 1.04, latency("p50")),
        ("balanced: p95 / jemalloc default", 1.02, latency("p95")),
        (
            "instructions of a pair over plain tikv-jemallocator",
            4.0,
            less("heap.pair.instructions", "heap.pair.plain_instructions"),
        ),
        (
            "balanced: CPU per operation / jemalloc default",
            1.10,
            of("retention.balanced.cpu_per_op_ratio"),
        ),
        ("p99 while purging each second", 1.5, of("retention.balanced_purging.p99_ratio")),
        (
            "balanced: CPU per operation / trim_100ms",
            0.5,
            burst("balanced", "cpu_us", "trim_100ms"),
        ),
        ("over base after unloading, own arena", 0.005, of("unload.own_arena.over_base_ratio")),
        (
            "the same over that of shared + purge",
            0.1,
            part("unload.own_arena.over_base_ratio", "unload.shared_purge.over_base_ratio"),
        ),
        ("200 cycles: resident slope, KiB", 8.0, of("cycles.200.resident_slope_kib")),
        (
            "the same where each arena is retired, KiB",
            8.0,
            of("cycles.200_retired.resident_slope_kib"),
        ),
        ("200 cycles: descriptors more", 0.0, of("cycles.200.descriptor_growth")),
        ("200 cycles: threads more", 0.0, of("cycles.200.thread_growth")),
        ("200 cycles: arenas more", 0.0, of("cycles.200.arena_growth")),
        ("scrape with 64 threads, us", 200.0, of("heap.scrape.us")),
        ("scrape, allocations", 0.0, of("heap.scrape.allocations")),
        ("purge, ms for each MiB", 0.15, of("heap.purge.ms_per_mib")),
    ]
}
