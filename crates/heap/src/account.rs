//! Accounts: the bytes that a piece of work, such as a request, holds.
//!
//! jemalloc adds the size of each block to a counter of the thread that allocates or frees it. The
//! difference between two reads belongs to the account for which the thread worked in between. The
//! tower layer keeps an account for each request, and runs each poll for it (`service/permit`).
//!
//! Work is a closure, so it starts and ends on the same thread, even if it panics. Work on other
//! threads counts if it is run for the account there. If memory passes from one account to another
//! without a call of the allocator, one releases it and the other adopts it. On systems other than
//! Linux nothing is measured.
//!
//! Work may run for seconds before it ends and is counted, such as one poll that parses a large
//! body. What such work has taken so far of a stated amount, and beyond it if it outgrows its claim
//! (`checkpoint`), can be read by other threads ([`in_progress`]). What it allocates on disk
//! (`spill`) counts for the account apart.
//!
//! Invariants: each byte that a thread allocates or frees counts for the innermost account for
//! which it runs, or for none; `peak >= live`; `live` does not fall below 0 if an account frees the
//! blocks of others, so that later allocations are not hidden.
#![expect(unsafe_code, reason = "jemalloc's counters are read through pointers")]

use std::any::TypeId;
use std::cell::Cell;
use std::fmt;
use std::ptr::{self, NonNull};
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;

use lowtide_core::bytes::ByteSize;
use lowtide_core::fork::Birth;
use lowtide_core::sync::{Mutex, lock};

use super::growth::{OUTGROWN, Progress, SPILLING};
use super::mallctl as ctl;
use super::spill;

/// If a thread allocated fewer bytes than this, its peak is not read, because the allocated bytes
/// are an upper bound. A power of two.
const PEAK_MIN: u64 = ByteSize::kib(64).get();

const _: () = assert!(PEAK_MIN.is_power_of_two(), "two amounts are compared by their bits");

/// The bytes that a piece of work holds, and the caller's data about that work.
///
/// ```
/// use std::sync::Arc;
///
/// use lowtide_heap::{self as host, Account, ByteSize};
///
/// #[global_allocator]
/// static HEAP: host::Heap = host::Heap;
///
/// let account = Account::new("the import", |name, memory| {
///     println!("{name} needed {}", memory.peak);
/// });
/// let account = Arc::new(account);
/// let kept = account.run(|| vec![1_u8; 1 << 20]);
/// # #[cfg(target_os = "linux")]
/// assert_eq!(account.memory().live, ByteSize::mib(1));
/// account.run(|| drop(kept));
/// assert_eq!(account.memory().live, ByteSize::ZERO);
/// ```
#[repr(C)] // `head` comes first, so that a pointer to it is one to the account
pub struct Account<T: 'static> {
    head: Head,
    owner: T,
    ended: fn(&mut T, AccountMemory),
}

/// The part of an account that does not depend on its owner.
pub(super) struct Head {
    live: AtomicU64,
    peak: AtomicU64,
    allocated: AtomicU64,
    /// The bytes that it is expected to hold at most; [`u64::MAX`] without a claim.
    claim: AtomicU64,
    /// The bytes on disk, and the most at once.
    spilled: AtomicU64,
    spilled_peak: AtomicU64,
    /// The type of the owner.
    owner: TypeId,
}

/// The bytes of an account: blocks of jemalloc, after rounding, and adopted bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct AccountMemory {
    /// The bytes that are allocated and not freed. Work that still runs is counted when it ends.
    pub live: ByteSize,
    /// The largest number of live bytes, to about 64 KiB. If several threads run work for the
    /// account at the same time, it may be too low by up to the sum of their separate peaks.
    pub peak: ByteSize,
    /// All bytes that were ever allocated or adopted.
    pub allocated: ByteSize,
    /// The largest number of bytes on disk ([`spill_into`](super::spill_into)), which are in none of
    /// the figures above.
    pub spilled: ByteSize,
}

impl<T: 'static> Account<T> {
    /// Creates an account without bytes. `ended` is called once, when the last handle of the account
    /// is dropped; its `live` bytes are those that outlive the account.
    #[inline]
    pub fn new(owner: T, ended: fn(&mut T, AccountMemory)) -> Self {
        let head = Head {
            live: AtomicU64::new(0),
            peak: AtomicU64::new(0),
            allocated: AtomicU64::new(0),
            claim: AtomicU64::new(u64::MAX),
            spilled: AtomicU64::new(0),
            spilled_peak: AtomicU64::new(0),
            owner: TypeId::of::<T>(),
        };
        Self { head, owner, ended }
    }

    /// Runs the work. The bytes that it allocates and frees on this thread count for this account,
    /// and not for one that surrounds it. If nothing is measured here ([`is_measured`]), it only
    /// runs the work.
    ///
    /// Costs some 50 instructions, 40 more if bytes were allocated or freed, and another 400 if
    /// more than 64 KiB were.
    #[inline]
    pub fn run<R>(self: &Arc<Self>, work: impl FnOnce() -> R) -> R {
        // A pointer to the whole account, because `current` makes an `Arc` of it.
        run_for(NonNull::new(Arc::as_ptr(self).cast_mut().cast()), work)
    }

    /// Like [`Account::run`], for work that may take up to `most` bytes before it ends. What it has
    /// taken of them is part of [`in_progress`] meanwhile. Costs some 40 instructions more: for
    /// work that may take much.
    #[cold]
    pub fn run_within<R>(self: &Arc<Self>, most: ByteSize, work: impl FnOnce() -> R) -> R {
        ThreadEntry::begin(|_| most.get());
        let _guard = ProgressGuard;
        self.run(work)
    }

    /// Returns the account for which this thread runs, if its owner has this type.
    #[must_use]
    pub fn current() -> Option<Arc<Self>> {
        let head = ACCOUNT.get()?;
        // SAFETY: the pointer is valid until the call of `run` that set it returns, which is on
        // this thread and below us on the stack.
        let is_same = unsafe { head.as_ref() }.owner == TypeId::of::<T>();
        let account: *mut Self = is_same.then(|| head.as_ptr().cast())?;
        // SAFETY: `run` takes a reference to an `Arc`, which holds the account until it returns,
        // and it made the pointer with `Arc::as_ptr`. The owner is a `T`, so the account is an
        // `Account<T>`.
        unsafe { Arc::increment_strong_count(account) };
        // SAFETY: the same; the count that was added is that of this `Arc`.
        Some(unsafe { Arc::from_raw(account) })
    }

    /// Returns the bytes of the account.
    #[inline]
    pub fn memory(&self) -> AccountMemory {
        let Head { live, peak, allocated, spilled_peak, .. } = &self.head;
        let [live, peak, allocated, spilled] =
            [live, peak, allocated, spilled_peak].map(|of| ByteSize::new(of.load(Relaxed)));
        AccountMemory { live, peak, allocated, spilled }
    }

    /// Sets the bytes that the account is expected to hold at most. Work that holds 4 MiB more counts
    /// in [`in_progress`] and, while memory is short, spills ([`spill_into`](super::spill_into)).
    /// Without a claim it does neither. Costs one atomic store.
    pub fn set_claim(&self, claim: ByteSize) {
        self.head.claim.store(claim.get(), Relaxed);
    }

    /// Returns the caller's data.
    pub const fn owner(&self) -> &T {
        &self.owner
    }

    /// Adds bytes that others allocated and the account holds from now on.
    pub fn adopt(&self, bytes: ByteSize) {
        self.head.settle_if_current();
        self.head.charge(bytes.get(), 0, bytes.get());
    }

    /// Subtracts bytes that others hold from now on. The account does not fall below 0.
    pub fn release(&self, bytes: ByteSize) {
        self.head.settle_if_current();
        self.head.charge(0, self.head.free_spilled(bytes.get()), 0);
    }
}

impl<T: 'static> Drop for Account<T> {
    fn drop(&mut self) {
        let memory = self.memory();
        (self.ended)(&mut self.owner, memory);
    }
}

lowtide_core::debug_as!([T: fmt::Debug + 'static] Account<T>, |it|
    memory: it.memory(), owner: it.owner);

impl Head {
    /// Counts the bytes until now if the thread runs for this account. So events count in their
    /// order, and the peak is exact.
    fn settle_if_current(&self) {
        let current = ACCOUNT.get();
        if current.is_some_and(|head| ptr::eq(head.as_ptr(), self))
            && let Some(counters) = Counters::here()
        {
            switch(counters.read(), current);
            if IS_COUNTED.get() {
                ThreadEntry::begin(|it| it.progress.most.load(Relaxed) - it.taken()[0]);
            }
        }
    }

    /// Returns by how much the account holds more than its claim, if the thread runs for it, has
    /// these totals and allocates so much next; 0 without a claim.
    pub(super) fn excess(&self, now: Totals, coming: u64) -> u64 {
        let grown = now.net().wrapping_sub(SINCE.get().net());
        let held = self.live.load(Relaxed).saturating_add_signed(grown).saturating_add(coming);
        held.saturating_sub(self.claim.load(Relaxed))
    }

    /// Adds what moved until now if the thread spills, or the account has bytes on disk.
    #[cold]
    fn charge_disk(&self, now: Totals) {
        let since = SINCE.get();
        let (allocated, freed) = now.since(since);
        if !work_is(SPILLING) {
            return self.charge(allocated, self.free_spilled(freed), rise(since, now, allocated));
        }
        // So many bytes were freed outside the spill arena for certain.
        let moved = FREED_OUTSIDE.take().min(freed);
        let grown = now.net().wrapping_sub(since.net()).saturating_add_unsigned(moved);
        let before = self.spilled.fetch_add(grown.max(0).unsigned_abs(), Relaxed);
        let high = before.saturating_add(rise(since, now, allocated));
        self.spilled_peak.fetch_max(high, Relaxed);
        self.allocated.fetch_add(allocated, Relaxed);
        // If more was freed than allocated, blocks of before were freed too.
        let freed = self.free_spilled(grown.min(0).unsigned_abs());
        self.charge(0, moved + freed, 0);
    }

    /// Subtracts freed bytes from those on disk, and returns the rest: which of them were on disk is
    /// not known.
    fn free_spilled(&self, freed: u64) -> u64 {
        let less = |spilled: u64| (spilled > 0).then(|| spilled.saturating_sub(freed));
        let (Ok(before) | Err(before)) = self.spilled.fetch_update(Relaxed, Relaxed, less);
        freed.saturating_sub(before)
    }

    /// Adds what moved between the two, with the peak in between.
    #[inline(never)]
    fn charge_much(&self, since: Totals, now: Totals) {
        let (allocated, freed) = now.since(since);
        self.charge(allocated, freed, rise(since, now, allocated));
    }

    /// Adds the bytes of blocks that were allocated, after rounding, and of those that were freed,
    /// including blocks that other work allocated. `peak` is the most by which `allocated - freed`
    /// rose.
    #[inline(always)]
    fn charge(&self, allocated: u64, freed: u64, peak: u64) {
        if allocated > 0 {
            self.allocated.fetch_add(allocated, Relaxed);
        }
        let mut live = self.live.load(Relaxed);
        loop {
            let after = live.saturating_add(allocated).saturating_sub(freed);
            match self.live.compare_exchange_weak(live, after, Relaxed, Relaxed) {
                Ok(_) => {
                    let high = after.max(live.saturating_add(peak));
                    // Most polls stay below the peak and need only a load.
                    if high > self.peak.load(Relaxed) {
                        self.peak.fetch_max(high, Relaxed);
                    }
                    return;
                }
                Err(other) => live = other,
            }
        }
    }
}

/// Returns `true` if work is measured on this thread: [`Heap`](super::Heap) is the global
/// allocator, and the system is Linux. Takes a few nanoseconds.
#[inline]
pub fn is_measured() -> bool {
    Counters::here().is_some()
}

/// Runs the work so that the bytes that it allocates and frees count for no account.
pub fn unmeasured<R>(work: impl FnOnce() -> R) -> R {
    run_for(None, work)
}

/// The entry of a thread in [`THREADS`].
struct ThreadEntry {
    progress: Progress,
    /// Read by other threads only while the entry is in [`THREADS`], which is locked.
    counters: Counters,
    birth: Birth,
}

/// The threads that ever did work whose progress is read.
static THREADS: Mutex<Vec<Arc<ThreadEntry>>> = Mutex::new(Vec::new());

/// The thread's entry, which ends with the thread.
struct OwnEntry(Option<Arc<ThreadEntry>>);

thread_local! {
    static ENTRY: OwnEntry = unmeasured(OwnEntry::new);
    /// `true` while the thread does such work.
    static IS_COUNTED: Cell<bool> = const { Cell::new(false) };
}

impl OwnEntry {
    fn new() -> Self {
        let entry = Counters::here().map(|counters| {
            Arc::new(ThreadEntry { progress: Progress::default(), counters, birth: Birth::now() })
        });
        lock(&THREADS).extend(entry.clone());
        Self(entry)
    }
}

impl Drop for OwnEntry {
    fn drop(&mut self) {
        // In a forked child a thread that does not exist may hold the lock, and none reads.
        if let Some(own) = self.0.as_ref().filter(|own| own.birth.is_here()) {
            lock(&THREADS).retain(|entry| !Arc::ptr_eq(entry, own));
        }
    }
}

impl ThreadEntry {
    fn with(act: impl FnOnce(&Self)) {
        let _ = ENTRY.try_with(|it| it.0.as_deref().map(act));
    }

    /// Counts on this thread from here on, up to so many bytes, and beyond them if it outgrows its
    /// claim.
    fn begin(most: impl FnOnce(&Self) -> u64) {
        Self::with(|entry| {
            let (most, states) = (most(entry), WORK.get());
            IS_COUNTED.set(most > 0 || states & OUTGROWN != 0);
            entry.progress.begin(most, states, entry.counters.read().net());
        });
    }

    fn taken(&self) -> [u64; 2] {
        self.progress.taken(|| self.counters.read().net())
    }
}

/// Returns `true` if the thread's work is in one of these states.
#[inline]
pub(super) fn work_is(states: u8) -> bool {
    WORK.get() & states != 0
}

/// Passes the account for which the thread runs, and the thread's totals, to `look`; `None` without
/// such an account.
pub(super) fn at_work<R>(look: impl FnOnce(&Head, Totals) -> R) -> Option<R> {
    let (account, counters) = (ACCOUNT.get()?, Counters::here()?);
    // SAFETY: it outlives the call of `run_for` that set it, which has not returned.
    Some(look(unsafe { account.as_ref() }, counters.read()))
}

/// Returns the net bytes of the thread.
pub(super) fn net_bytes() -> Option<i64> {
    Some(Counters::here()?.read().net())
}

/// Counts what the thread's work takes also beyond its claim, until the work ends.
#[cold]
pub(super) fn outgrow(account: &Head) {
    WORK.set(WORK.get() | OUTGROWN);
    let (claim, live) = (account.claim.load(Relaxed), account.live.load(Relaxed));
    // Before the thread's entry is created, which charges the account.
    let since = SINCE.get().net();
    ThreadEntry::with(|entry| {
        if !IS_COUNTED.replace(true) {
            entry.progress.begin(claim.saturating_sub(live), 0, since);
        }
        entry.progress.outgrow();
    });
}

/// Charges the account of the thread until now, and what it allocates from here on apart.
pub(super) fn begin_spill() {
    ThreadEntry::with(|entry| entry.progress.spill(entry.taken().iter().sum()));
    // With totals of now: the thread's entry may just have been created, and charged.
    at_work(|_, now| switch(now, ACCOUNT.get()));
    FREED_OUTSIDE.set(0);
    WORK.set(WORK.get() | SPILLING);
}

/// Notes that the thread, which spills, has moved so many bytes to disk.
pub(super) fn moved_to_disk(bytes: u64) {
    FREED_OUTSIDE.set(FREED_OUTSIDE.get() + bytes);
    ThreadEntry::with(|entry| entry.progress.moved_to_disk(bytes));
}

/// In a forked child, whose one thread this is: it spills no more.
pub(super) fn forget_spill() {
    if work_is(SPILLING) {
        WORK.set(WORK.get() & !SPILLING);
        spill::end();
    }
}

/// The outermost work of the thread has ended, and was counted.
#[cold]
fn end_work() {
    if WORK.replace(0) & SPILLING != 0 {
        spill::end();
    }
    ThreadEntry::begin(|_| 0);
}

/// Ends the count when it is dropped.
struct ProgressGuard;

impl Drop for ProgressGuard {
    #[cold]
    fn drop(&mut self) {
        ThreadEntry::begin(|_| 0);
    }
}

/// Returns the bytes that the work in progress has taken so far of its amounts
/// ([`Account::run_within`]), and those that it has taken beyond its claims
/// ([`Account::set_claim`]), both without what is on disk. Takes some 10 ns for each thread that ever
/// did such work, and allocates nothing.
#[must_use]
pub fn in_progress() -> [ByteSize; 2] {
    let add = |sum: [u64; 2], more: [u64; 2]| [sum[0] + more[0], sum[1] + more[1]];
    lock(&THREADS).iter().map(|it| it.taken()).fold([0; 2], add).map(ByteSize::new)
}

/// Runs the work for this account, or for none.
#[inline]
fn run_for<R>(account: Option<NonNull<Head>>, work: impl FnOnce() -> R) -> R {
    let _entered = Entered::new(account);
    work()
}

/// Ends work for an account when dropped, also on unwinding.
struct Entered {
    outer: Option<NonNull<Head>>,
    counters: Counters,
}

impl Entered {
    /// Begins work; `None` if nothing is measured, or if the thread runs for this account already.
    #[inline]
    fn new(account: Option<NonNull<Head>>) -> Option<Self> {
        let outer = ACCOUNT.get();
        if outer == account {
            return None;
        }
        let counters = Counters::here()?;
        switch(counters.read(), account);
        Some(Self { outer, counters })
    }
}

impl Drop for Entered {
    #[inline]
    fn drop(&mut self) {
        switch(self.counters.read(), self.outer);
        if WORK.get() != 0 && self.outer.is_none() {
            end_work();
        }
    }
}

/// The counters at one instant.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) struct Totals {
    allocated: u64,
    freed: u64,
}

impl Totals {
    const ZERO: Self = Self { allocated: 0, freed: 0 };

    /// Returns the bytes that were allocated, and those that were freed, since an earlier instant.
    const fn since(self, before: Self) -> (u64, u64) {
        let allocated = self.allocated.wrapping_sub(before.allocated);
        (allocated, self.freed.wrapping_sub(before.freed))
    }

    /// Bytes that the thread allocated and did not free. Wraps, as the counters do.
    pub(super) const fn net(self) -> i64 {
        self.allocated.wrapping_sub(self.freed).cast_signed()
    }
}

/// A thread's counters in jemalloc. They live as long as the thread, and only it writes to them.
#[derive(Clone, Copy)]
struct Counters {
    allocated: &'static AtomicU64,
    freed: &'static AtomicU64,
}

thread_local! {
    /// The counters of the thread; `None` if they were not looked for, or its blocks are not
    /// jemalloc's.
    static COUNTERS: Cell<Option<Counters>> = const { Cell::new(None) };
    static IS_LOOKED_FOR: Cell<bool> = const { Cell::new(false) };
    /// The account for which the thread runs. It outlives the call of `run_for` that set it, which
    /// resets it before it returns.
    static ACCOUNT: Cell<Option<NonNull<Head>>> = const { Cell::new(None) };
    /// The start of the bytes that are not charged yet.
    static SINCE: Cell<Totals> = const { Cell::new(Totals::ZERO) };
    /// The states of the thread's work: [`OUTGROWN`], [`SPILLING`].
    static WORK: Cell<u8> = const { Cell::new(0) };
    /// The bytes that the thread has moved to disk since it was charged last.
    static FREED_OUTSIDE: Cell<u64> = const { Cell::new(0) };
    /// When the thread's peak was reset.
    static PEAK_RESET: Cell<Totals> = const { Cell::new(Totals::ZERO) };
}

/// Charges the current account with the bytes until now, and continues with another one.
#[inline]
fn switch(now: Totals, to: Option<NonNull<Head>>) {
    if let Some(account) = ACCOUNT.replace(to)
        && SINCE.get() != now
    {
        settle(account, now);
    }
    if to.is_some() {
        SINCE.set(now);
        let (allocated, freed) = now.since(PEAK_RESET.get());
        if (allocated | freed) >= PEAK_MIN {
            reset_peak(now);
        }
    }
}

#[inline(never)]
fn settle(account: NonNull<Head>, now: Totals) {
    // SAFETY: it outlives the call of `run_for` that set it, which has not returned.
    let account = unsafe { account.as_ref() };
    if work_is(SPILLING) || account.spilled.load(Relaxed) > 0 {
        return account.charge_disk(now);
    }
    let since = SINCE.get();
    let (allocated, freed) = now.since(since);
    if allocated < PEAK_MIN {
        account.charge(allocated, freed, allocated);
    } else {
        account.charge_much(since, now);
    }
}

/// Returns by how much the thread's net bytes rose at most between the two, above the first.
#[inline(always)]
fn rise(since: Totals, now: Totals, allocated: u64) -> u64 {
    let Ok(peak) = ctl::THREAD_PEAK.read() else { return allocated };
    let above_reset = i64::try_from(peak).unwrap_or(i64::MAX);
    let high = PEAK_RESET.get().net().saturating_add(above_reset);
    let end = now.net().wrapping_sub(since.net()).max(0);
    let rise = high.saturating_sub(since.net()).max(end);
    u64::try_from(rise).unwrap_or(0).min(allocated)
}

#[cold]
fn reset_peak(now: Totals) {
    if ctl::THREAD_PEAK_RESET.perform().is_ok() {
        PEAK_RESET.set(now);
    }
}

impl Counters {
    /// Returns those of the calling thread.
    #[inline]
    fn here() -> Option<Self> {
        COUNTERS.get().or_else(Self::look)
    }

    #[cold]
    fn look() -> Option<Self> {
        if !IS_LOOKED_FOR.replace(true) {
            COUNTERS.set(Self::find());
        }
        COUNTERS.get()
    }

    fn find() -> Option<Self> {
        // Elsewhere jemalloc may free them before a thread's last destructor has run.
        if !cfg!(target_os = "linux") || !super::is_global() {
            return None;
        }
        let keys = [&ctl::THREAD_ALLOCATED_AT, &ctl::THREAD_DEALLOCATED_AT];
        let [allocated, freed] = keys.map(|at| {
            let at = at.read().ok()??;
            // SAFETY: an aligned word in jemalloc's thread-local storage, which on Linux lives as
            // long as the thread. A `Counters` stays in the thread's own storage, in a local
            // variable, or in an entry of `THREADS`, which the thread takes out before it ends.
            // jemalloc writes whole words, and any value that one had is right for a reader on
            // another thread.
            Some(unsafe { AtomicU64::from_ptr(at.as_ptr()) })
        });
        Some(Self { allocated: allocated?, freed: freed? })
    }

    #[inline]
    fn read(self) -> Totals {
        Totals { allocated: self.allocated.load(Relaxed), freed: self.freed.load(Relaxed) }
    }
}
