//! Measures the bytes that a piece of work allocates and frees on its thread.
//!
//! jemalloc adds the size of each block to a counter of the thread that allocates or frees it. The
//! difference between two reads is the amount of the work in between. The tower layer measures
//! requests with it, around each poll (`service/permit`). Work on other threads is not measured.
//!
//! Only closures can be measured, so each start has its end on the same thread, also after a panic,
//! and a measurement cannot leak. On systems other than Linux nothing is measured.
//!
//! Invariant: each byte that a thread allocates or frees counts for the innermost measurement that
//! runs on it, or for none.
#![expect(unsafe_code, reason = "jemalloc's counters are read through pointers")]

use std::cell::Cell;
use std::ptr::NonNull;

use super::mallctl as ctl;

/// A peak of fewer bytes is not read: the allocated bytes are an upper bound.
const PEAK_MIN: u64 = 64 << 10;

/// The bytes that a piece of work allocated and freed on its thread, without nested measured work.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Moved {
    /// Bytes of blocks that it allocated, after rounding.
    pub allocated: u64,
    /// Bytes of blocks that it freed, also of those that other work allocated.
    pub freed: u64,
    /// The most by which `allocated - freed` rose, to about 64 KiB.
    pub peak: u64,
}

/// Returns `true` if work can be measured on this thread: [`Heap`](super::Heap) is the global
/// allocator. Takes a few nanoseconds.
pub fn is_measured() -> bool {
    Counters::here().is_some()
}

/// Runs the work and returns the bytes that it allocated and freed on this thread; `None` if that
/// cannot be measured here. Costs a few nanoseconds, and about 40 more if more than 64 KiB were
/// allocated.
pub fn measure<R>(work: impl FnOnce() -> R) -> (R, Option<Moved>) {
    let Some(counters) = Counters::here() else { return (work(), None) };
    let scope = Scope::enter(counters.read());
    let result = work();
    (result, scope.leave())
}

/// The counters at one instant.
#[derive(Clone, Copy, Default)]
struct Totals {
    allocated: u64,
    freed: u64,
}

impl Totals {
    /// Bytes that the thread allocated and did not free; the counters wrap, and so does this.
    const fn net(self) -> i64 {
        self.allocated.wrapping_sub(self.freed).cast_signed()
    }
}

/// The addresses of a thread's counters in jemalloc.
#[derive(Clone, Copy)]
struct Counters {
    allocated: NonNull<u64>,
    freed: NonNull<u64>,
}

thread_local! {
    /// This thread's, once looked for.
    static COUNTERS: Cell<Option<Option<Counters>>> = const { Cell::new(None) };
    /// The innermost measurement that runs.
    static OPEN: Cell<Option<Frame>> = const { Cell::new(None) };
    /// When the thread's peak was reset.
    static PEAK_RESET: Cell<Totals> = const { Cell::new(Totals { allocated: 0, freed: 0 }) };
}

impl Counters {
    /// The calling thread's; `None` if its blocks are not jemalloc's.
    fn here() -> Option<Self> {
        COUNTERS.get().unwrap_or_else(|| {
            let found = Self::find();
            COUNTERS.set(Some(found));
            found
        })
    }

    #[cold]
    fn find() -> Option<Self> {
        // Elsewhere jemalloc may free them before a thread's last destructor has run.
        if !cfg!(target_os = "linux") || !super::is_global() {
            return None;
        }
        let allocated = ctl::THREAD_ALLOCATED_AT.counter().ok()??;
        let freed = ctl::THREAD_DEALLOCATED_AT.counter().ok()??;
        Some(Self { allocated, freed })
    }

    fn read(self) -> Totals {
        // SAFETY: it points to an aligned `u64` in jemalloc's thread-local storage, which on Linux
        // lives as long as the thread. It was found on this thread: a `Counters` is in its
        // thread-local storage or in a local variable between two statements, and is not `Send`.
        // Only this thread writes there, in calls of the allocator, of which the compiler may
        // assume that they write nothing else: hence volatile.
        let allocated = unsafe { self.allocated.as_ptr().read_volatile() };
        // SAFETY: the same.
        let freed = unsafe { self.freed.as_ptr().read_volatile() };
        Totals { allocated, freed }
    }
}

/// A measurement that runs.
#[derive(Clone, Copy)]
struct Frame {
    /// The start of the counts that are not in `moved` yet.
    since: Totals,
    moved: Moved,
}

impl Frame {
    fn begin(now: Totals) -> Self {
        reset_peak(now);
        Self { since: now, moved: Moved::default() }
    }

    /// Adds the bytes until now.
    fn settle(&mut self, now: Totals) {
        let Moved { allocated, freed, peak } = &mut self.moved;
        let more = now.allocated.wrapping_sub(self.since.allocated);
        let before = Totals { allocated: *allocated, freed: *freed }.net();
        let high = before.saturating_add(rise(self.since, now));
        *peak = (*peak).max(u64::try_from(high).unwrap_or(0));
        *allocated += more;
        *freed += now.freed.wrapping_sub(self.since.freed);
        self.since = now;
    }
}

/// By how much the thread's net bytes rose at most between the two, above the first.
fn rise(since: Totals, now: Totals) -> i64 {
    let allocated = now.allocated.wrapping_sub(since.allocated);
    let most = i64::try_from(allocated).unwrap_or(i64::MAX);
    if allocated <= PEAK_MIN {
        return most;
    }
    let Ok(peak) = ctl::THREAD_PEAK.read() else { return most };
    let above_reset = i64::try_from(peak).unwrap_or(i64::MAX);
    let high = PEAK_RESET.get().net().saturating_add(above_reset);
    let end = now.net().wrapping_sub(since.net()).max(0);
    high.saturating_sub(since.net()).clamp(end, most)
}

/// Resets the peak of the thread, unless little was allocated and freed since.
fn reset_peak(now: Totals) {
    let last = PEAK_RESET.get();
    let moved = now.allocated.wrapping_sub(last.allocated).max(now.freed.wrapping_sub(last.freed));
    if moved > PEAK_MIN && ctl::THREAD_PEAK_RESET.perform().is_ok() {
        PEAK_RESET.set(now);
    }
}

/// Opens a measurement and closes it, also on unwinding.
struct Scope {
    outer: Option<Frame>,
}

impl Scope {
    fn enter(now: Totals) -> Self {
        let mut outer = OPEN.get();
        if let Some(outer) = &mut outer {
            outer.settle(now);
        }
        OPEN.set(Some(Frame::begin(now)));
        Self { outer }
    }

    fn leave(self) -> Option<Moved> {
        let now = Counters::here()?.read();
        let mut own = OPEN.get()?;
        own.settle(now);
        Some(own.moved)
    }
}

impl Drop for Scope {
    fn drop(&mut self) {
        // Bytes of the inner work do not count for the outer one.
        let outer = self.outer.zip(Counters::here()).map(|(outer, counters)| {
            let now = counters.read();
            reset_peak(now);
            Frame { since: now, ..outer }
        });
        OPEN.set(outer);
    }
}
