//! Keeps large requests out of memory that unused pages still fill.
//!
//! A ledger counts pages that a purge would release as free. They are not free at once: a freed
//! block leaves its pages in the arena of its thread, and a request that runs in another arena
//! cannot use them. A large request that is admitted in their place may allocate all it needs
//! within one poll, before the loop notices. So a request that is large compared to the limit is
//! not admitted while the process would exceed `most` with those pages, and its attempt requests a
//! purge at the next tick. It then waits in the queue, or is rejected if it cannot wait.
//!
//! The figures are those of the last tick. The bytes of the largest request that has ended since
//! then are added, both as physical and as purgeable ones: they may have been allocated since, too.
//! Not the sum of all, since requests that follow each other use the same pages. A purge may fail
//! to release what was estimated, so no request is kept out for more than [`TICKS_MAX`] ticks in a
//! row.
//!
//! Invariant: a request is kept out only if `physical + freed + unheld + cost > most`, and if a
//! purge is worth its cost.

use std::sync::atomic::{AtomicU64, Ordering};

use lowtide_core::bytes::ByteSize;

/// A request is large if it needs at least this part of `most`. An estimate: smaller ones leave the
/// loop a tick or more before they fill the rest.
const LARGE_PART: u64 = 16;
/// The number of ticks in a row for which requests are kept out: some purges take 20 ms.
const TICKS_MAX: u64 = 20;

/// Unused pages at the last tick.
#[derive(Debug, Default)]
pub(super) struct PurgeablePages {
    physical: AtomicU64,
    /// What a purge would release.
    purgeable: AtomicU64,
    /// The smallest amount for which a purge is worth its cost.
    worth: AtomicU64,
    /// The smallest large request: [`LARGE_PART`] of them are the most memory that the process may
    /// use, or [`u64::MAX`] without a limit.
    large: AtomicU64,
    /// The bytes of the largest request that has ended since the last tick.
    freed: AtomicU64,
    /// The largest request that was kept out since the last tick.
    wanted: AtomicU64,
    /// The ticks in a row before which requests were kept out. Written by the control loop only.
    ticks: AtomicU64,
}

impl PurgeablePages {
    /// Starts over, without a limit.
    pub(super) fn begin(&self) {
        let Self { physical, purgeable, worth, large, freed, wanted, ticks } = self;
        for figure in [physical, purgeable, worth, freed, wanted, ticks] {
            figure.store(0, Ordering::Relaxed);
        }
        large.store(u64::MAX / LARGE_PART, Ordering::Relaxed);
    }

    #[inline]
    pub(super) fn is_large(&self, bytes: ByteSize) -> bool {
        bytes.get() >= self.large.load(Ordering::Relaxed)
    }

    /// Counts the bytes of a request that has ended.
    pub(super) fn free(&self, bytes: ByteSize) {
        if self.is_large(bytes) {
            self.freed.fetch_max(bytes.get(), Ordering::Relaxed);
        }
    }

    /// Returns `true` if a request must wait for a purge. Requests have reserved `unheld` bytes
    /// that they do not hold.
    pub(super) fn keeps_out(&self, bytes: ByteSize, unheld: ByteSize) -> bool {
        self.is_large(bytes) && self.keeps_out_large(bytes, unheld)
    }

    #[cold]
    fn keeps_out_large(&self, bytes: ByteSize, unheld: ByteSize) -> bool {
        let [physical, purgeable, worth, large, freed] =
            [&self.physical, &self.purgeable, &self.worth, &self.large, &self.freed]
                .map(|figure| figure.load(Ordering::Relaxed));
        // Pages that were freed since the last tick may also have been allocated since.
        let with_all = physical.saturating_add(freed);
        let with_all = with_all.saturating_add(unheld.get()).saturating_add(bytes.get());
        let keeps_out = self.ticks.load(Ordering::Relaxed) < TICKS_MAX
            && with_all / LARGE_PART > large
            && purgeable.saturating_add(freed) > worth;
        if keeps_out {
            self.wanted.fetch_max(bytes.get(), Ordering::Relaxed);
        }
        keeps_out
    }

    /// Returns the bytes of the largest request that was kept out since the last tick. Called once
    /// by each tick.
    pub(super) fn wanted(&self) -> ByteSize {
        let wanted = self.wanted.swap(0, Ordering::Relaxed);
        let ticks = if wanted == 0 { 0 } else { self.ticks.load(Ordering::Relaxed) + 1 };
        self.ticks.store(ticks, Ordering::Relaxed);
        ByteSize::new(wanted)
    }

    /// Returns the bytes of the largest request that has ended since the last tick. A tick takes
    /// its sample after this.
    pub(super) fn freed(&self) -> ByteSize {
        ByteSize::new(self.freed.load(Ordering::Relaxed))
    }

    /// Publishes the figures of a tick, which include these `freed` bytes.
    pub(super) fn publish(
        &self,
        freed: ByteSize,
        [physical, purgeable]: [ByteSize; 2],
        [worth, most]: [ByteSize; 2],
    ) {
        // Unless a larger one has ended meanwhile.
        let _ = self.freed.compare_exchange(freed.get(), 0, Ordering::Relaxed, Ordering::Relaxed);
        self.physical.store(physical.get(), Ordering::Relaxed);
        self.purgeable.store(purgeable.get(), Ordering::Relaxed);
        self.worth.store(worth.get(), Ordering::Relaxed);
        self.large.store(most.get() / LARGE_PART, Ordering::Relaxed);
    }
}

#[cfg(all(test, not(lowtide_loom)))]
mod tests {
    use super::*;

    fn unlimited() -> PurgeablePages {
        let pages = PurgeablePages::default();
        pages.begin();
        pages
    }

    const NONE: ByteSize = ByteSize::ZERO;

    const fn mib(mib: u64) -> ByteSize {
        ByteSize::mib(mib)
    }

    /// 238 MiB may be used: 120 are, of which 80 are unused pages.
    fn pages() -> PurgeablePages {
        let pages = unlimited();
        pages.publish(NONE, [mib(120), mib(80)], [mib(4), mib(238)]);
        pages
    }

    #[test]
    fn a_large_request_waits_only_while_unused_pages_take_its_room() {
        let pages = pages();
        assert!(!pages.keeps_out(mib(94), NONE), "214 of 238 MiB");
        assert!(pages.keeps_out(mib(94), mib(90)), "304 of 238 MiB");
        assert_eq!((pages.wanted(), pages.wanted()), (mib(94), NONE));
        assert!(!pages.keeps_out(mib(14), mib(238)), "not large");
        pages.publish(NONE, [mib(40), NONE], [mib(4), mib(238)]);
        assert!(!pages.keeps_out(mib(94), mib(200)), "a purge would release nothing");
    }

    /// The bug: a request that ended left its pages to another arena, and the next one was admitted
    /// in its place and filled the limit before the next sample.
    #[test]
    fn pages_that_were_freed_since_the_last_sample_count() {
        let pages = pages();
        pages.publish(NONE, [mib(120), NONE], [mib(4), mib(238)]);
        assert!(!pages.keeps_out(mib(94), mib(90)), "all of it is in use");
        pages.free(mib(1));
        assert!(!pages.keeps_out(mib(94), mib(90)), "a small request frees little");
        pages.free(mib(90));
        assert!(pages.keeps_out(mib(94), mib(90)));
    }

    /// The bug: the bytes of requests that followed each other added up, and a large one was
    /// rejected although the process held next to nothing.
    #[test]
    fn requests_that_follow_each_other_free_the_same_pages() {
        let pages = pages();
        pages.publish(NONE, [mib(10), NONE], [mib(4), mib(238)]);
        for _ in 0..100 {
            pages.free(mib(90));
        }
        assert!(!pages.keeps_out(mib(94), NONE));
    }

    #[test]
    fn pages_that_no_purge_releases_keep_a_request_out_for_twenty_ticks() {
        let pages = pages();
        for tick in 0..TICKS_MAX {
            assert!(pages.keeps_out(mib(94), mib(90)), "tick {tick}");
            assert_eq!(pages.wanted(), mib(94));
        }
        assert!(!pages.keeps_out(mib(94), mib(90)));
        assert_eq!(pages.wanted(), NONE);
        assert!(pages.keeps_out(mib(94), mib(90)), "the next one counts from the start");
    }

    #[test]
    fn without_a_limit_nothing_is_kept_out() {
        let pages = unlimited();
        assert!(!pages.keeps_out(ByteSize::MAX, ByteSize::MAX));
        pages.free(ByteSize::MAX);
        assert!(!pages.keeps_out(ByteSize::MAX, NONE), "one as large has ended");
    }
}
