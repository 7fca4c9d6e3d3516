//! Checkpoints: what threads allocate counts before the work that allocates it has ended.
//!
//! [`Heap`](super::Heap) passes a checkpoint before each block of [`LARGE`] bytes or more, and
//! jemalloc calls one after each [`STEP`] bytes of smaller ones. It adds what the thread has taken
//! to a count of the process, which frees never lower: pages of freed blocks may still be there.
//! The control loop samples the kernel's figures and publishes at which count the next sample is due
//! and at which memory is short ([`publish_sample`]). Only when memory seems short does a checkpoint
//! read the kernel's figure itself.
//!
//! If the thread's work holds far more than its claim, the control loop sees from here on what it
//! takes ([`in_progress`](super::in_progress)), and if memory is short, the work spills (`spill`).
//!
//! A checkpoint takes no lock but that of the bell that it rings, and allocates nothing except the
//! entry of a thread that outgrows a claim for the first time. What jemalloc calls, within an
//! allocation, only counts and rings: the rest is done at the thread's next allocation.
//!
//! Invariant: anonymous memory since the last sample has grown by at most what was counted, one
//! step and one large block of each thread, and pages of older blocks that were touched since.
#![expect(unsafe_code, reason = "jemalloc calls a function")]

use std::cell::Cell;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::sync::{Arc, LazyLock};

use lowtide_core::bytes::ByteSize;
use lowtide_core::clock::{Bell, Clock as _, SystemClock};
use lowtide_core::fork::Birth;

use super::account::{self, work_is};
use super::growth::{Growth, OUTGROWN, SPILLING};
use super::mallctl::{THREAD_EVENT, ThreadEvent};
use super::{process, redirect, spill};

/// The size from which each block is a checkpoint. An estimate: a thread allocates such blocks a few
/// thousand times a second at most.
pub(super) const LARGE: usize = 256 << 10;
/// The bytes of smaller blocks between two checkpoints of a thread.
const STEP: u64 = 1 << 20;
/// Work that holds less than this beyond its claim neither counts nor spills. An estimate: sixteen
/// threads that do take a sixth of a limit of 384 MiB.
const EXCESS_MIN: u64 = 4 << 20;
/// The least growth after which the next sample is due.
const SAMPLE_MIN: u64 = 4 << 20;
/// A sample is due when this part of the room is gone.
const SAMPLE_PART: u64 = 16;
/// The least time between two rings, in microseconds: a sample takes some 10.
const RING_EVERY: u64 = 2000;

static GROWTH: Growth = Growth {
    counted: AtomicU64::new(0),
    sample_at: AtomicU64::new(u64::MAX),
    short_at: AtomicU64::new(u64::MAX),
    anonymous_max: AtomicU64::new(u64::MAX),
};
/// `true` while checkpoints count.
static IS_ON: AtomicBool = AtomicBool::new(false);
/// The process in which they count, the bell, and its clock.
static WATCH: LazyLock<(Birth, Arc<Bell>, SystemClock)> =
    LazyLock::new(|| (Birth::now(), Bell::new(), SystemClock::new()));
/// The time of the next ring at the earliest, in microseconds of that clock.
static RINGS_AT: AtomicU64 = AtomicU64::new(0);

thread_local! {
    /// The thread's net bytes that are counted.
    static SEEN: Cell<i64> = const { Cell::new(0) };
    /// `true` while the thread passes a checkpoint.
    static IS_PASSING: Cell<bool> = const { Cell::new(false) };
}

/// Starts the checkpoints of this process, if [`Heap`](super::Heap) is its global allocator. Returns
/// the bell that rings when the next sample is due.
pub fn watch_growth() -> Arc<Bell> {
    let (birth, bell, _) = &*WATCH;
    if account::is_measured() && birth.is_here() {
        let _ = process::statm(); // opens the file
        // Without it, because four others are registered, only large blocks count.
        let event = ThreadEvent { call: after_step, step: STEP, is_alloc_only: true };
        // SAFETY: `after_step` may be called within each allocation of each thread.
        let _ = unsafe { THREAD_EVENT.write(event) };
        IS_ON.store(true, Relaxed);
    }
    // That of the parent does not ring in a child.
    if birth.is_here() { Arc::clone(bell) } else { Bell::new() }
}

/// Ends the checkpoints of this process: no sample follows.
pub fn unwatch_growth() {
    IS_ON.store(false, Relaxed);
    GROWTH.publish(u64::MAX, u64::MAX, u64::MAX);
}

/// Returns the count of what threads were seen to take, for [`publish_sample`].
#[must_use]
pub fn counted_growth() -> u64 {
    GROWTH.counted.load(Relaxed)
}

/// Publishes a sample that was begun when [`counted_growth`] was `counted`: the limit,
/// [`ByteSize::MAX`] if there is none, the physical memory that counts against it, and the process's
/// anonymous memory.
pub fn publish_sample(counted: u64, limit: ByteSize, physical: ByteSize, anonymous: ByteSize) {
    let left = limit.saturating_sub(physical).get();
    let due = counted.saturating_add((left / SAMPLE_PART).max(SAMPLE_MIN));
    let sample_at = if limit == ByteSize::MAX { u64::MAX } else { due };
    let anonymous = anonymous.get();
    let room = |reserve: u64| left.cast_signed().saturating_sub(reserve.cast_signed());
    let most = |reserve| anonymous.saturating_add_signed(room(reserve));
    let most = spill::reserve(limit).map_or(u64::MAX, most);
    let short_at = counted.saturating_add(most.saturating_sub(anonymous));
    if GROWTH.publish(sample_at, short_at, most) {
        ring();
    }
}

/// Counts what the thread has taken until now. Returns `true` if memory seems short once so many
/// bytes more are allocated.
fn count(net: i64, coming: u64) -> bool {
    let more = net.wrapping_sub(SEEN.replace(net)).max(0).unsigned_abs();
    let [is_due, seems_short] = GROWTH.count(more, coming);
    if is_due {
        ring();
    }
    seems_short
}

/// Rings once for each sample, unless it has just rung.
#[cold]
fn ring() {
    let (_, bell, clock) = &*WATCH;
    let now = u64::try_from(clock.now().since_origin().as_micros()).unwrap_or(u64::MAX);
    if now >= RINGS_AT.load(Relaxed) && GROWTH.takes_ring() {
        RINGS_AT.store(now + RING_EVERY, Relaxed);
        bell.ring();
    }
}

/// Called by jemalloc within an allocation.
unsafe extern "C" fn after_step(_: bool, allocated: u64, freed: u64) {
    if !IS_ON.load(Relaxed) || IS_PASSING.get() {
        return;
    }
    let seems_short = count(allocated.wrapping_sub(freed).cast_signed(), 0);
    let excess = || account::at_work(|account, now| account.excess(now, 0)).unwrap_or(0);
    if work_is(SPILLING) || excess() >= EXCESS_MIN && (seems_short || !work_is(OUTGROWN)) {
        redirect::ask_for_checkpoint();
    }
}

/// Passes a checkpoint before so many bytes are allocated, outside jemalloc.
#[cold]
#[inline(never)]
pub(super) fn pass(coming: usize) {
    if !IS_ON.load(Relaxed) || IS_PASSING.replace(true) {
        return;
    }
    let coming = coming as u64;
    let seems_short = account::net_bytes().is_some_and(|net| count(net, coming));
    if work_is(SPILLING) {
        spill::keep_pace();
    } else if WATCH.0.is_here() {
        account::at_work(|account, now| {
            if account.excess(now, coming) < EXCESS_MIN {
                return;
            }
            if !work_is(OUTGROWN) {
                account::outgrow(account);
            }
            if seems_short && GROWTH.is_short(coming, || process::statm().map(|now| now.anon.get()))
            {
                spill::begin();
            }
        });
    }
    IS_PASSING.set(false);
}
