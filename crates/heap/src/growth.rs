//! The words in which threads that allocate tell the one that samples how memory grows, without a
//! lock.
//!
//! `checkpoint` has a [`Growth`] for the process, `account` a [`Progress`] for each thread. Relies on
//! `super::atomic`: those of the standard library, and loom's in the models of this file.
//!
//! Invariants: a sample that is due is rung for, or a newer one is published; what is read of a
//! thread's progress is what it had taken at one instant, without what it has on disk.

use super::atomic::Ordering::{Acquire, Relaxed, Release};
use super::atomic::{AtomicI64, AtomicU64, fence};

/// What all threads were seen to take, and what the last sample says of it.
pub(super) struct Growth {
    /// The bytes that threads were seen to take; never falls.
    pub(super) counted: AtomicU64,
    /// The count at which the next sample is due, or [`u64::MAX`].
    pub(super) sample_at: AtomicU64,
    /// The count at which memory is short, or [`u64::MAX`].
    pub(super) short_at: AtomicU64,
    /// The most anonymous memory of the process before memory is short.
    pub(super) anonymous_max: AtomicU64,
}

impl Growth {
    /// Counts bytes that were taken. Returns `true` if a sample is due, and if memory seems short,
    /// once so many more are allocated.
    pub(super) fn count(&self, more: u64, coming: u64) -> [bool; 2] {
        // What is published before the count has these bytes is seen here.
        let counted = self.counted.fetch_add(more, Acquire) + more + coming;
        [&self.sample_at, &self.short_at].map(|at| counted >= at.load(Relaxed))
    }

    /// Publishes what follows from a sample. Returns `true` if the next one is due already.
    pub(super) fn publish(&self, sample_at: u64, short_at: u64, anonymous_max: u64) -> bool {
        self.anonymous_max.store(anonymous_max, Relaxed);
        self.short_at.swap(short_at, Release);
        self.sample_at.swap(sample_at, Relaxed);
        self.counted.fetch_add(0, Release) >= sample_at
    }

    /// Returns `true` to one caller for each sample that is published: it is to ring.
    pub(super) fn takes_ring(&self) -> bool {
        self.sample_at.swap(u64::MAX, Relaxed) != u64::MAX
    }

    /// Returns `true` if memory is short once so many bytes more are allocated. `anonymous` reads the
    /// kernel's figure, from which the count follows until the next sample.
    pub(super) fn is_short(&self, coming: u64, anonymous: impl FnOnce() -> Option<u64>) -> bool {
        let (before, counted) = (self.short_at.load(Acquire), self.counted.load(Relaxed));
        let Some(anonymous) = anonymous() else { return false };
        let left = self.anonymous_max.load(Relaxed).saturating_sub(anonymous);
        // Unless a sample was published meanwhile.
        let at = counted.saturating_add(left);
        let _ = self.short_at.compare_exchange(before, at, Relaxed, Relaxed);
        coming >= left
    }
}

/// What a thread has taken of an amount. The thread alone writes to it.
#[derive(Default)]
pub(super) struct Progress {
    /// What it may still take; 0 if it does no such work.
    pub(super) most: AtomicU64,
    /// Two flags, and above them the thread's net bytes from which it is counted. If it spills, what
    /// it had taken when it began to, less what was moved to disk since.
    state: AtomicI64,
}

/// It outgrows its claim: what it takes beyond `most` counts.
pub(super) const OUTGROWN: u8 = 1;
/// It allocates on disk: what it has taken does not follow its counters.
pub(super) const SPILLING: u8 = 2;
/// The bits of both.
const FLAGS: u32 = 2;
/// The most reads of a progress that changes meanwhile, as it does a few times in a poll.
const READS_MAX: u32 = 4;

impl Progress {
    /// Begins to count from these net bytes on, up to `most`.
    pub(super) fn begin(&self, most: u64, flags: u8, net: i64) {
        let taken = if flags & SPILLING == 0 { net } else { 0 };
        self.state.store(taken << FLAGS | i64::from(flags), Relaxed);
        self.most.store(most, Release);
    }

    /// Counts also what is taken beyond `most`.
    pub(super) fn outgrow(&self) {
        self.state.fetch_or(i64::from(OUTGROWN), Release);
    }

    /// Counts so much, and no more of what is taken from here on. It has outgrown its claim.
    pub(super) fn spill(&self, taken: u64) {
        let state = taken.cast_signed() << FLAGS | i64::from(OUTGROWN | SPILLING);
        self.state.store(state, Relaxed);
        // Who sees the counters move from here on sees this too.
        fence(Release);
    }

    /// Of the bytes that were taken before it spilled, so many are on disk now.
    pub(super) fn moved_to_disk(&self, bytes: u64) {
        self.state.fetch_sub(bytes.cast_signed() << FLAGS, Relaxed);
    }

    /// Returns what was taken of the amount, and beyond it. `net` reads the thread's net bytes.
    pub(super) fn taken(&self, net: impl Fn() -> i64) -> [u64; 2] {
        let mut state = self.state.load(Acquire);
        for _ in 0..READS_MAX {
            let (most, net) = (self.most.load(Acquire), net());
            fence(Acquire);
            let after = self.state.load(Acquire);
            if after == state {
                let (figure, has) = (state >> FLAGS, |flag| state & i64::from(flag) != 0);
                let grown = if has(SPILLING) { figure } else { net.wrapping_sub(figure) };
                let grown = grown.max(0).unsigned_abs();
                let beyond = if has(OUTGROWN) { grown.saturating_sub(most) } else { 0 };
                return [most.min(grown), beyond];
            }
            state = after;
        }
        [0; 2]
    }
}
