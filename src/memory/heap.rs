//! Applies the heap's settings at start, and adds a diagnostic with the requested and the effective
//! value for each that differs.
//!
//! It also spreads threads over a number of heap arenas that fits the CPUs of this process: those
//! of a `Memory` and, through [`on_thread_start`], those of any runtime; and it determines once
//! whether jemalloc's threads or lowtide drive the heap's decay.
//!
//! Invariant: a process that was started with the requested settings has no such diagnostic;
//! `decay_interval` is set if and only if jemalloc runs no background threads.

use std::sync::OnceLock;
use std::time::Duration;

use crate::config::{Config, Profile, Resolved, Source, env};
use crate::decay::DecayTime;
use lowtide_admission::{Cpus, LimitSource, Signals};
use lowtide_heap::{self as heap, Difference, EffectiveConf, HeapProbe, HeapProfile, HeapSettings};

use super::error::Diagnostic;

/// The heap after the start. Without values for a detached `Memory`, which leaves it as it is.
#[derive(Default)]
pub(super) struct SettledHeap {
    /// `None` if jemalloc's statistics cannot be read.
    pub(super) probe: Option<HeapProbe>,
    /// The time between decay passes; `None` if jemalloc's threads do them, or if nothing decays.
    pub(super) decay_interval: Option<Duration>,
    /// The maximum number of jemalloc's threads, as reported by jemalloc; 0 if they are off.
    pub(super) background_threads: u32,
}

/// The maximum number of jemalloc's threads: no more than CPUs, unless more were set explicitly.
fn threads_for(asked: Resolved<u32>, cpus: Cpus) -> u32 {
    match (asked.source, cpus.whole()) {
        (Source::Profile, Some(cpus)) => asked.value.min(cpus),
        _ => asked.value,
    }
}

/// The decay passes in one decay time: pages are released a quarter of the time late at most.
const LOOKS_PER_DECAY: u32 = 4;
/// The minimum interval of decay passes.
const DECAY_INTERVAL_MIN: Duration = Duration::from_millis(20);
/// The maximum interval of decay passes: pages are released gradually, not all at the end of a long
/// time.
const DECAY_INTERVAL_MAX: Duration = Duration::from_secs(2);

/// Returns the interval of decay passes of a heap without background threads; `None` if nothing
/// decays, or if jemalloc releases pages as it frees them.
fn decay_interval(decay: DecayTime) -> Option<Duration> {
    match decay {
        DecayTime::Within(time) => {
            Some((time / LOOKS_PER_DECAY).clamp(DECAY_INTERVAL_MIN, DECAY_INTERVAL_MAX))
        }
        DecayTime::AtOnce | DecayTime::Never => None,
    }
}

/// Applies the heap's settings, and adds a diagnostic for each that differs.
pub(super) fn settle_heap(
    config: &Config,
    signals: &Signals,
    ignores_environment: bool,
    diagnostics: &mut Vec<Diagnostic>,
) -> SettledHeap {
    let mut diagnostic = |text| diagnostics.push(Diagnostic::warning("heap", text));
    if !heap::is_global() {
        diagnostic(
            "jemalloc is not the global allocator, so Rust's allocations are neither measured nor \
             purged: add `lowtide::global_allocator!(balanced);` to the binary"
                .to_owned(),
        );
    }
    let threads = threads_for(config.background_threads, signals.cpus());
    let settings = HeapSettings {
        dirty_decay: config.heap_decay.value,
        // Muzzy pages stay in the resident set until the kernel reclaims them, so they are released
        // at once.
        muzzy_decay: DecayTime::AtOnce,
        background_threads: threads > 0,
        max_background_threads: (threads > 0).then_some(threads),
    };
    let applied = heap::apply(&settings);
    let mut differences =
        applied.map_err(|error| diagnostic(error.to_string())).unwrap_or_default();
    let found = heap::effective().ok();
    let get = |setting| found.as_ref().and_then(|found| found.get(setting));
    let is_on = get("background_thread") == Some("true");
    let background_threads = get("max_background_threads").filter(|_| is_on);
    let background_threads = background_threads.and_then(|text| text.parse().ok()).unwrap_or(0);
    if let Some(found) = found.filter(|_| heap::is_global()) {
        for difference in found.differences() {
            if !differences.contains(&difference) {
                differences.push(difference);
            }
        }
        differences.iter().map(Difference::to_string).for_each(&mut diagnostic);
        let [variable, unread] = EffectiveConf::variables();
        if !ignores_environment && env::of_others(unread).is_some_and(|text| !text.is_empty()) {
            diagnostic(format!(
                "{unread} is set, which this build of jemalloc does not read: it reads {variable}"
            ));
        }
        profile_in_part(config, &found).into_iter().for_each(&mut diagnostic);
        let limit = signals.sample().limit;
        if limit.source == LimitSource::AddressSpace && found.get("retain") == Some("true") {
            // They are not available for blocks of other sizes, and an allocation that finds no
            // address aborts a Rust program.
            diagnostic(format!(
                "the address space is limited (ulimit -v or -d), so the limit is {} now, and falls \
                 as jemalloc keeps addresses for reuse; add retain:false to {variable}, or limit \
                 the process's memory with a cgroup instead of ulimit",
                limit.bytes
            ));
        }
    }
    if let Ok(Some(least)) = heap::limit_mappings() {
        diagnostic(format!(
            "the kernel does not overcommit (vm.overcommit_memory is 2 or cannot be read), so \
             unused ranges of the heap from {least} on take a mapping each, of at most {} for the \
             process, and smaller ones stay committed; expected vm.overcommit_memory=1 (sysctl), \
             or a larger vm.max_map_count",
            heap::mappings_max()
        ));
    }
    if heap::is_global()
        && let Some(cause) = heap::check_release()
    {
        diagnostic(Diagnostic::unreleased(cause).text);
    }
    SettledHeap {
        probe: HeapProbe::new().map_err(|error| diagnostic(error.to_string())).ok(),
        decay_interval: decay_interval(config.heap_decay.value).filter(|_| background_threads == 0),
        background_threads,
    }
}

/// Returns a text if settings of an explicit profile cannot be changed any more, or if no settings
/// were requested. Without an explicit profile the binary may contain another profile on purpose.
fn profile_in_part(config: &Config, found: &EffectiveConf) -> Option<String> {
    let profile = match config.profile.value {
        Profile::LowMemory => HeapProfile::LowMemory,
        Profile::Balanced => HeapProfile::Balanced,
        Profile::Throughput => HeapProfile::Throughput,
    };
    let [variable, _] = EffectiveConf::variables();
    let conf = found.requested_by(profile);
    let mut fixed = found.differences_from(profile);
    fixed.retain(Difference::is_fixed_at_start);
    if config.profile.source != Source::Default && !fixed.is_empty() {
        let list = fixed.iter().map(Difference::to_string).collect::<Vec<_>>().join(", ");
        return Some(format!(
            "profile {} is only partly in force ({list}); start the process with {variable}={conf}",
            config.profile.value
        ));
    }
    found.is_default().then(|| {
        format!(
            "this binary exports no settings, so jemalloc uses its defaults for those that are \
             fixed before `main`; make `lowtide::global_allocator!({profile});` its allocator, or \
             start the process with {variable}={conf}"
        )
    })
}

/// Binds the calling thread to a heap arena. For tokio's `on_thread_start` and similar hooks.
///
/// The thread is bound to one of the first `4 x CPUs` arenas, in turn. jemalloc creates four arenas
/// for each CPU that the process may run on, and ignores quotas: with 64 CPUs and a quota of 2
/// these are 256 arenas instead of 8. If jemalloc has no more than `4 x CPUs` arenas, nothing is
/// done. Takes about 3 us; the first call reads the cgroup's files, once per process. If jemalloc
/// rejects the binding, the thread keeps its arena.
///
/// ```
/// let runtime = tokio::runtime::Builder::new_multi_thread()
///     .on_thread_start(lowtide::memory::on_thread_start)
///     .on_thread_park(lowtide::heap::on_thread_park)
///     .build()?;
/// # drop(runtime);
/// # Ok::<(), std::io::Error>(())
/// ```
pub fn on_thread_start() {
    // A thread that is not bound keeps its arena, which is no reason not to run.
    let _ = whole_cpus().map(heap::bind_thread);
}

/// Returns the number of heap arenas that threads use after [`on_thread_start`]; `None` if the CPUs
/// or jemalloc's arenas are unknown.
pub(super) fn bound_arenas() -> Option<u32> {
    whole_cpus().and_then(|cpus| heap::bound_arenas(cpus).ok())
}

/// Returns the CPUs that this process can keep busy, as first read.
fn whole_cpus() -> Option<u32> {
    static CPUS: OnceLock<Option<u32>> = OnceLock::new();
    *CPUS.get_or_init(|| Signals::open().cpus().whole())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn jemalloc_has_no_more_threads_than_cpus_unless_somebody_asked_for_them() {
        let threads = |source, value, quota_milli| {
            let cpus = Cpus { allowed: Some(64), quota_milli };
            threads_for(Resolved { value, source }, cpus)
        };
        assert_eq!(threads(Source::Profile, 4, Some(1_500)), 2);
        assert_eq!(threads(Source::Profile, 4, None), 4);
        assert_eq!(threads(Source::Environment, 4, Some(1_500)), 4);
        assert_eq!(threads(Source::Profile, 0, Some(1_500)), 0);
        let unknown = Resolved { value: 4, source: Source::Profile };
        assert_eq!(threads_for(unknown, Cpus::default()), 4);
    }

    #[test]
    fn decay_is_driven_a_few_times_in_each_decay_time_within_bounds() {
        for (decay, expected) in [
            (DecayTime::Never, None),
            (DecayTime::AtOnce, None),
            (DecayTime::from_millis(1), Some(20)),
            (DecayTime::from_millis(1_000), Some(250)),
            (DecayTime::from_millis(10_000), Some(2_000)),
            (DecayTime::Within(Duration::MAX), Some(2_000)),
        ] {
            assert_eq!(decay_interval(decay), expected.map(Duration::from_millis), "{decay:?}");
        }
    }
}
