//! Without `Heap` as global allocator everything still works, and says so.

use lowtide::clock::SystemClock;
use lowtide::host::{self, HeapProbe, HeapProfile, Outcome, Unsupported};
use test_fork::test;

/// With C's `malloc` served by jemalloc, Rust's default allocator is jemalloc as well.
const INTERPOSED: bool = cfg!(feature = "interpose");

#[test]
fn a_heap_that_nobody_uses_is_told_and_harmless() {
    assert_eq!(host::is_global(), INTERPOSED);
    let found = host::effective().unwrap();
    assert_eq!((found.is_global, found.serves_c), (INTERPOSED, INTERPOSED));
    assert_eq!(found.conf_of_binary, HeapProfile::Throughput.conf().to_str().ok());

    let probe = HeapProbe::new().unwrap();
    let snapshot = probe.snapshot().unwrap();
    assert!(snapshot.live <= snapshot.active && snapshot.active <= snapshot.mapped);
    assert!(probe.glance().is_ok());

    let applied = host::apply(&HeapProfile::Balanced.settings()).unwrap();
    assert_eq!(applied.background_threads, host::background_threads_supported());
    host::decay_tick().unwrap();
    host::flush_thread_cache().unwrap();

    let clock = SystemClock::new();
    host::purge(&clock).unwrap();
    let outcome = host::purge(&clock).unwrap().jemalloc.outcome;
    if !INTERPOSED {
        assert_eq!(outcome, Outcome::Unsupported(Unsupported::NoJemalloc));
    }
}
