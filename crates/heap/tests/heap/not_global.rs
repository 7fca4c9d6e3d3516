//! Without `Heap` as global allocator everything still works, and says so.

use std::sync::Arc;

use lowtide_core::clock::SystemClock;
use lowtide_heap::{
    self as heap, Account, HeapProbe, HeapProfile, HostArena, HostError, Unsupported,
};

use crate::start::NOT_GLOBAL;

/// With C's `malloc` served by jemalloc, Rust's default allocator is jemalloc as well.
const INTERPOSED: bool = cfg!(feature = "interpose");

#[test]
fn a_heap_that_nobody_uses_is_told_and_harmless() {
    NOT_GLOBAL.run(|| {
        assert_eq!(heap::is_global(), INTERPOSED);
        let found = heap::effective().unwrap();
        assert_eq!(heap::serves_c(), INTERPOSED);
        assert_eq!(found.differences_from(HeapProfile::Throughput), []);

        let probe = HeapProbe::new().unwrap();
        let snapshot = probe.snapshot().unwrap();
        assert!(snapshot.live <= snapshot.active && snapshot.active <= snapshot.mapped);
        assert!(probe.active().is_ok());

        let differences = heap::apply(&HeapProfile::Balanced.settings()).unwrap();
        assert_eq!(differences.is_empty(), heap::background_threads_supported());
        heap::decay_tick().unwrap();
        heap::flush_thread_cache().unwrap();

        assert_eq!(heap::is_measured(), INTERPOSED && cfg!(target_os = "linux"));
        let account = Arc::new(Account::new((), |_, _| ()));
        let kept = account.run(|| vec![1_u8; 1 << 20]);
        assert_eq!(account.memory().live.is_zero(), !heap::is_measured(), "the work is done");
        drop(kept);

        // With `interpose` the allocator is jemalloc, and still not `Heap`.
        let arena = HostArena::new("lasting").unwrap();
        let refused = arena.scope_uncached(|| unreachable!("refused before")).map(|()| "it ran");
        assert_eq!(refused, Err(HostError::NotRedirected));
        arena.retire().unwrap();

        let clock = SystemClock::new();
        heap::purge(&clock).unwrap();
        let released = heap::purge(&clock).unwrap().jemalloc;
        if !INTERPOSED {
            assert_eq!(released, Err(Unsupported::NoJemalloc));
        }
    });
}
