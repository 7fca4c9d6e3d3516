//! Applies the heap's settings at start, and adds diagnostics for those that cannot be applied.
//!
//! It also determines once whether jemalloc's threads or lowtide drive the heap's decay.
//!
//! Invariant: `decay_interval` is set if and only if jemalloc runs no background threads.

use std::time::Duration;

use crate::config::{Config, Resolved, Source};
use crate::decay::DecayTime;
use lowtide_admission::{Cpus, LimitSource, Signals};
use lowtide_heap::{self as heap, HeapProbe, HeapSettings};

use super::error::Diagnostic;
use super::found::{at_start_otherwise, keeps_addresses, moved};

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

/// Applies the heap's settings, and adds a diagnostic for each that was not applied.
pub(super) fn settle_heap(
    config: &Config,
    signals: &Signals,
    unread: Option<String>,
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
    let mut background_threads = 0;
    let at_start = heap::effective().ok().filter(|found| found.is_global);
    match heap::apply(&settings) {
        Ok(applied) => {
            if applied.background_threads {
                background_threads = applied.max_background_threads;
            }
            applied.differences.iter().for_each(|difference| diagnostic(difference.to_string()));
            let found = at_start.as_ref();
            found
                .into_iter()
                .flat_map(|it| moved(it, &settings, &applied))
                .for_each(&mut diagnostic);
        }
        Err(error) => diagnostic(error.to_string()),
    }
    if let Some(found) = at_start.map(|found| found.with_unread(unread)) {
        at_start_otherwise(config, &found).into_iter().for_each(&mut diagnostic);
        let limit = signals.sample().limit;
        if limit.source == LimitSource::AddressSpace && found.retain {
            diagnostic(keeps_addresses(limit.bytes, &found));
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
