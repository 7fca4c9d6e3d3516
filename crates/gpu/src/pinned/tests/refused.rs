//! Tests of requests that fail, and of segments that arrive while a log subscriber panics.

use super::*;

/// Regression test: the peak of committed memory counted failed requests.
#[test]
fn a_request_that_was_refused_made_the_peak() {
    let (pool, driver) = open(ByteSize::MAX);
    pool.alloc::<u8>(1 << 62).expect_err("no host has it");
    assert_eq!(pool.snapshot().arena.committed_peak, ByteSize::ZERO);
    drop(mib(&pool, 6));
    assert_eq!(pool.snapshot().arena.committed_peak, ByteSize::mib(6));
    check(&pool, &driver);
}

/// Regression test: if a log subscriber panicked, a segment was arriving, or leaving, forever, and
/// its memory was lost.
#[test]
fn a_listener_that_panicked_lost_a_segment() {
    let (pool, driver) =
        open_with(PinnedConfig { kind: PinnedKind::Pageable, ..config(ByteSize::MAX) });
    let listened = |act: &dyn Fn()| tracing::subscriber::with_default(Panics, act);
    listened(&|| drop(bytes(&pool, GRANULE).expect("room")));
    check(&pool, &driver);
    listened(&|| assert_eq!(pool.purge(), Ok(ByteSize::mib(1))));
    assert_eq!(pool.glance().committed, ByteSize::ZERO);
    check(&pool, &driver);
}

/// A log subscriber that panics.
struct Panics;

impl tracing::Subscriber for Panics {
    fn enabled(&self, _: &tracing::Metadata<'_>) -> bool {
        true
    }

    fn new_span(&self, _: &tracing::span::Attributes<'_>) -> tracing::span::Id {
        tracing::span::Id::from_u64(1)
    }

    fn record(&self, _: &tracing::span::Id, _: &tracing::span::Record<'_>) {}

    fn record_follows_from(&self, _: &tracing::span::Id, _: &tracing::span::Id) {}

    fn event(&self, event: &tracing::Event<'_>) {
        panic!("a trial: {:?}", event.metadata().name());
    }

    fn enter(&self, _: &tracing::span::Id) {}

    fn exit(&self, _: &tracing::span::Id) {}
}
