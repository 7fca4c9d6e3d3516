//! The value of a resource, and who may use it, in one word.
//!
//! A guard is taken with one compare-and-exchange and ends with another: no lock, and no second
//! reference count. So the word counts the guards, and the handles that keep the allocation. The
//! cell decides when there is a value and when it is taken out; this module only makes that safe
//! without a lock, and calls the cell if the end of a guard needs more than the word.
//!
//! Invariants: `OPEN => FULL`, and no other flag changes the value while `guards > 0`; the value is
//! written and taken out only by the one who has set `MOVING`, which needs `guards = 0`; the
//! allocation is freed by the one whose handle or guard was the last.
#![expect(unsafe_code, reason = "guards share a value without a lock, and keep its allocation")]

use std::ops::Deref;
use std::process::abort;
use std::ptr::NonNull;

use lowtide_core::sync::UnsafeCell;
use lowtide_core::sync::atomic::{AtomicU64, Ordering, fence};

/// One guard. The guards are the lowest 24 bits.
const GUARD: u64 = 1;
/// The most guards at once.
const GUARDS_MAX: u64 = (1 << 24) - 1;
/// One use that ended and was not recorded. The uses are the next 10 bits; more count as so many.
const USE: u64 = 1 << 24;
const USES_MAX: u64 = (1 << 10) - 1;
const USES: u64 = USES_MAX * USE;
/// Guards may be taken.
const OPEN: u64 = 1 << 34;
/// There is a value.
const FULL: u64 = 1 << 35;
/// The value is being written or taken out.
const MOVING: u64 = 1 << 36;
/// The cell is called at the end of each guard.
const WATCHED: u64 = 1 << 37;
/// One handle. The handles are the highest 26 bits.
const HANDLE: u64 = 1 << 38;
/// What keeps the allocation.
const OWNERS: u64 = GUARDS_MAX | !(HANDLE - 1);

/// What a handle and its guards point to.
///
/// # Safety
/// `slot` always returns the same slot, which is part of `self` and no other object's.
pub(super) unsafe trait Shared: Sized {
    type Value;

    fn slot(&self) -> &Slot<Self::Value>;

    /// Returns `true` if the time at which a use ends need not be read now.
    fn may_record_later(&self) -> bool;

    /// Calls `end`, which ends a guard and returns the number of those that are left. It was a use
    /// if `counts` is set.
    fn end_guard(&self, counts: bool, end: impl FnOnce() -> usize);
}

/// The place of a value.
pub(super) struct Slot<T> {
    word: AtomicU64,
    value: UnsafeCell<Option<T>>,
}

// SAFETY: the value is written and taken out by one thread at a time, which has set MOVING, and
// only shared references to it exist otherwise.
unsafe impl<T: Send + Sync> Sync for Slot<T> {}

impl<T> Slot<T> {
    /// Creates an empty place, with one handle.
    pub(super) fn new() -> Self {
        Self { word: AtomicU64::new(HANDLE), value: UnsafeCell::new(None) }
    }

    /// Puts in a value. Guards may be taken from now on if `is_open` is set.
    ///
    /// # Panics
    /// If there is one, or if another thread puts one in or takes it out.
    pub(super) fn put(&self, value: T, is_open: bool) {
        let begun = self.change(|word| (word & (FULL | MOVING) == 0).then_some(word | MOVING));
        assert!(begun, "a second value");
        self.value.with_mut(|place| {
            // SAFETY: this thread has set MOVING, and no guard exists without FULL.
            unsafe { *place = Some(value) };
        });
        let open = if is_open { OPEN } else { 0 };
        self.change(|word| Some(word & !MOVING | FULL | open));
    }

    /// Takes the value out if there is one and it has no guards. If `is_idle` is set, also no use
    /// may have ended since [`Slot::take_uses`].
    pub(super) fn take(&self, is_idle: bool) -> Option<T> {
        let none = GUARDS_MAX | if is_idle { USES } else { 0 };
        let may_go = |word: u64| word & (FULL | MOVING | none) == FULL;
        if !self.change(|word| may_go(word).then_some(word & !OPEN | MOVING)) {
            return None;
        }
        let value = self.value.with_mut(|place| {
            // SAFETY: this thread has set MOVING; there were no guards, and none can be taken
            // without OPEN.
            unsafe { (*place).take() }
        });
        self.change(|word| Some(word & !(MOVING | FULL)));
        value
    }

    /// Returns the value when no handle and no guard is left.
    pub(super) fn take_last(&mut self) -> Option<T> {
        self.value.with_mut(|place| {
            // SAFETY: the reference is the only one.
            unsafe { (*place).take() }
        })
    }

    /// Lets no further guards be taken.
    pub(super) fn shut(&self) {
        self.word.fetch_and(!OPEN, Ordering::Relaxed);
    }

    /// Sets whether the cell is called at the end of each guard.
    pub(super) fn watch(&self, is_watched: bool) {
        if is_watched {
            self.word.fetch_or(WATCHED, Ordering::Relaxed);
        } else {
            self.word.fetch_and(!WATCHED, Ordering::Relaxed);
        }
    }

    /// Returns the number of guards.
    pub(super) fn guards(&self) -> usize {
        guards(self.word.load(Ordering::Acquire))
    }

    /// Returns the number of uses that have ended since the last call and were not recorded.
    pub(super) fn take_uses(&self) -> u32 {
        let uses = (self.word.fetch_and(!USES, Ordering::Acquire) & USES) / USE;
        u32::try_from(uses).unwrap_or(u32::MAX)
    }

    /// Changes the word as long as `change` returns the next one. Returns `false` if it returned
    /// `None`.
    fn change(&self, change: impl Fn(u64) -> Option<u64>) -> bool {
        self.word.fetch_update(Ordering::AcqRel, Ordering::Relaxed, change).is_ok()
    }
}

const fn guards(word: u64) -> usize {
    (word & GUARDS_MAX) as usize
}

/// Keeps the allocation. Cheap to clone.
pub(super) struct Handle<C: Shared>(NonNull<C>);

// SAFETY: a handle gives shared access to C, and the thread of the last one drops C.
unsafe impl<C: Shared + Send + Sync> Send for Handle<C> {}
// SAFETY: as above.
unsafe impl<C: Shared + Send + Sync> Sync for Handle<C> {}

impl<C: Shared> Handle<C> {
    /// Allocates what `of` shares, whose slot is new.
    pub(super) fn new(of: C) -> Self {
        Self(NonNull::from(Box::leak(Box::new(of))))
    }

    /// Takes a guard, if there is a value and guards may be taken. Its end counts as a use if
    /// `counts` is set.
    #[inline]
    pub(super) fn guard(&self, counts: bool) -> Option<Guard<C>> {
        let word = &self.slot().word;
        let mut now = word.load(Ordering::Relaxed);
        // Ends: a failed exchange means that another one succeeded (or, rarely, failed spuriously).
        while now & OPEN != 0 && now & GUARDS_MAX < GUARDS_MAX {
            // Acquire: the value was written before OPEN was set.
            let (took, next) = (Ordering::Acquire, now + GUARD);
            match word.compare_exchange_weak(now, next, took, Ordering::Relaxed) {
                Ok(_) => return Some(Guard { of: self.0, counts }),
                Err(other) => now = other,
            }
        }
        None
    }
}

impl<C: Shared> Deref for Handle<C> {
    type Target = C;

    #[inline]
    fn deref(&self) -> &C {
        // SAFETY: the allocation is not freed while the word counts this handle, and only shared
        // references to it exist.
        unsafe { self.0.as_ref() }
    }
}

impl<C: Shared> Clone for Handle<C> {
    fn clone(&self) -> Self {
        let before = self.slot().word.fetch_add(HANDLE, Ordering::Relaxed);
        if before.leading_zeros() == 0 {
            // More than half of what can be counted: they are leaked.
            abort();
        }
        Self(self.0)
    }
}

impl<C: Shared> Drop for Handle<C> {
    fn drop(&mut self) {
        let before = self.slot().word.fetch_sub(HANDLE, Ordering::Release);
        if before & OWNERS == HANDLE {
            // SAFETY: the word counted this handle and nothing else that keeps the allocation.
            unsafe { free(self.0) };
        }
    }
}

/// Frees what the last owner left.
///
/// # Safety
/// `of` came from [`Handle::new`], and the caller has just removed the last handle or guard.
#[cold]
unsafe fn free<C: Shared>(of: NonNull<C>) {
    // Everything that the other owners did comes before the drop.
    fence(Ordering::Acquire);
    // SAFETY: it came from a box, and nothing refers to it any more.
    drop(unsafe { Box::from_raw(of.as_ptr()) });
}

/// Keeps the value in its place, and the allocation.
pub(super) struct Guard<C: Shared> {
    of: NonNull<C>,
    counts: bool,
}

// SAFETY: a guard gives shared access to C and its value, and the thread of the last owner drops
// both.
unsafe impl<C: Shared<Value: Send + Sync> + Send + Sync> Send for Guard<C> {}
// SAFETY: as above.
unsafe impl<C: Shared<Value: Send + Sync> + Send + Sync> Sync for Guard<C> {}

impl<C: Shared> Guard<C> {
    #[inline]
    fn of(&self) -> &C {
        // SAFETY: the allocation is not freed while the word counts this guard, and only shared
        // references to it exist.
        unsafe { self.of.as_ref() }
    }

    /// Ends the guard with the help of the cell.
    #[cold]
    fn end_slowly(&self) {
        let word = &self.of().slot().word;
        // The guard keeps the allocation until this handle does.
        let before = word.fetch_add(HANDLE, Ordering::Relaxed);
        debug_assert!(guards(before) > 0, "ended a guard that was not counted");
        let handle = Handle(self.of);
        let end = || guards(handle.slot().word.fetch_sub(GUARD, Ordering::Release) - GUARD);
        handle.end_guard(self.counts, end);
    }
}

impl<C: Shared> Deref for Guard<C> {
    type Target = C::Value;

    #[inline]
    fn deref(&self) -> &C::Value {
        let value = self.of().slot().value.with(|value| {
            // SAFETY: the word counts this guard. So the value was written before, and is not taken
            // out: only shared references to it exist.
            unsafe { &*value }
        });
        match value {
            Some(value) => value,
            None => unreachable!("a guard without a value"),
        }
    }
}

impl<C: Shared> Drop for Guard<C> {
    #[inline]
    fn drop(&mut self) {
        let word = &self.of().slot().word;
        let mut now = word.load(Ordering::Relaxed);
        let is_simple = !self.counts || self.of().may_record_later();
        // Ends: as above.
        while is_simple && now & WATCHED == 0 {
            let counted = self.counts && now & USES < USES;
            let next = now - GUARD + if counted { USE } else { 0 };
            // Release: what was done with the value comes before it is taken out.
            match word.compare_exchange_weak(now, next, Ordering::Release, Ordering::Relaxed) {
                Ok(_) if next & OWNERS == 0 => {
                    // SAFETY: the word counted this guard and nothing else that keeps the
                    // allocation.
                    return unsafe { free(self.of) };
                }
                Ok(_) => return,
                Err(other) => now = other,
            }
        }
        self.end_slowly();
    }
}

/// A cell that counts the calls that it gets.
#[cfg(test)]
mod counting {
    use lowtide_core::sync::Arc;
    use lowtide_core::sync::atomic::{AtomicBool, AtomicUsize};

    use super::*;

    #[derive(Clone)]
    pub(super) struct Calls {
        pub(super) may_record_later: Arc<AtomicBool>,
        /// The ends that the cell was called for, and those of them that were uses.
        pub(super) ends: Arc<AtomicUsize>,
        pub(super) uses: Arc<AtomicUsize>,
        /// The ends of the last guard among them.
        pub(super) rings: Arc<AtomicUsize>,
        pub(super) freed: Arc<AtomicUsize>,
    }

    impl Calls {
        pub(super) fn new(may_record_later: bool) -> Self {
            let zero = || Arc::new(AtomicUsize::new(0));
            let may_record_later = Arc::new(AtomicBool::new(may_record_later));
            Self { may_record_later, ends: zero(), uses: zero(), rings: zero(), freed: zero() }
        }
    }

    pub(super) struct Counting<T> {
        slot: Slot<T>,
        calls: Calls,
        /// What handles read.
        pub(super) own: Option<T>,
    }

    pub(super) fn handle<T>(calls: &Calls) -> Handle<Counting<T>> {
        handle_with(calls, None)
    }

    pub(super) fn handle_with<T>(calls: &Calls, own: Option<T>) -> Handle<Counting<T>> {
        Handle::new(Counting { slot: Slot::new(), calls: calls.clone(), own })
    }

    // SAFETY: the slot is a field.
    unsafe impl<T> Shared for Counting<T> {
        type Value = T;

        fn slot(&self) -> &Slot<T> {
            &self.slot
        }

        fn may_record_later(&self) -> bool {
            self.calls.may_record_later.load(Ordering::Relaxed)
        }

        fn end_guard(&self, counts: bool, end: impl FnOnce() -> usize) {
            self.calls.ends.fetch_add(1, Ordering::Relaxed);
            self.calls.uses.fetch_add(usize::from(counts), Ordering::Relaxed);
            if end() == 0 {
                self.calls.rings.fetch_add(1, Ordering::Relaxed);
            }
        }
    }

    impl<T> Drop for Counting<T> {
        fn drop(&mut self) {
            drop(self.slot.take_last());
            self.calls.freed.fetch_add(1, Ordering::Relaxed);
        }
    }
}

#[cfg(all(test, not(lowtide_loom)))]
mod tests {
    use super::counting::{Calls, handle, handle_with};
    use super::*;

    #[test]
    fn a_value_has_guards_only_while_it_is_open_and_goes_only_without_them() {
        let handle = handle(&Calls::new(true));
        assert!(handle.guard(true).is_none(), "there is none");
        handle.slot().put(7, true);
        let guards = [handle.guard(true).expect("open"), handle.guard(false).expect("open")];
        assert_eq!((*guards[0], handle.slot().guards()), (7, 2));
        assert_eq!(handle.slot().take(false), None);
        handle.slot().shut();
        assert!(handle.guard(true).is_none(), "closed");
        assert_eq!(*guards[1], 7, "the guards keep it");
        drop(guards);
        assert_eq!(handle.slot().take(true), None, "it was used just now");
        assert_eq!((handle.slot().take_uses(), handle.slot().take_uses()), (1, 0));
        assert_eq!((handle.slot().take(true), handle.slot().take(false)), (Some(7), None));
        handle.slot().put(8, false);
        assert!(handle.guard(true).is_none());
        assert_eq!(handle.slot().take(true), Some(8));
    }

    #[test]
    fn the_cell_is_called_when_it_watches_and_when_a_time_must_be_recorded() {
        let calls = Calls::new(false);
        let handle = handle(&calls);
        handle.slot().put((), true);
        let called =
            || [&calls.ends, &calls.uses, &calls.rings].map(|of| of.load(Ordering::Relaxed));
        let other = handle.guard(false);
        drop(handle.guard(true));
        assert_eq!(called(), [1, 1, 0]);
        drop(handle.guard(false));
        calls.may_record_later.store(true, Ordering::Relaxed);
        drop(handle.guard(true));
        assert_eq!((called(), handle.slot().take_uses()), ([1, 1, 0], 1));
        handle.slot().watch(true);
        drop(other);
        assert_eq!(called(), [2, 1, 1]);
        handle.slot().watch(false);
        drop(handle.guard(true));
        assert_eq!(called(), [2, 1, 1]);
    }

    #[test]
    fn counts_hold_at_their_ends() {
        let handle = handle(&Calls::new(true));
        handle.slot().put((), true);
        for _ in 0..2 * USES_MAX {
            drop(handle.guard(true));
        }
        assert_eq!(u64::from(handle.slot().take_uses()), USES_MAX);
        handle.slot().word.fetch_add(GUARDS_MAX - 1, Ordering::Relaxed);
        let last = handle.guard(true).expect("one more");
        assert!(handle.guard(true).is_none(), "as many as can be counted");
        drop(last);
        handle.slot().word.fetch_sub(GUARDS_MAX - 1, Ordering::Relaxed);
        assert_eq!((handle.slot().take_uses(), handle.slot().take(true)), (1, Some(())));
    }

    #[test]
    fn the_last_guard_or_handle_frees_all_of_it() {
        let calls = Calls::new(true);
        let freed = || calls.freed.load(Ordering::Relaxed);
        let value = std::sync::Arc::new(());
        for counts in [true, false] {
            let before = freed();
            let first = handle_with(&calls, Some(std::sync::Arc::clone(&value)));
            first.slot().put(std::sync::Arc::clone(&value), true);
            let (second, guard) = (first.clone(), first.guard(counts).expect("open"));
            drop(first);
            assert_eq!(second.own.as_ref(), Some(&value));
            drop(second);
            calls.may_record_later.store(!counts, Ordering::Relaxed);
            assert_eq!((freed(), std::sync::Arc::strong_count(&guard)), (before, 3));
            drop(guard);
            assert_eq!((freed(), std::sync::Arc::strong_count(&value)), (before + 1, 1));
        }
        drop(handle::<()>(&calls));
        assert_eq!(freed(), 3);
    }

    /// A value that knows whether it was taken out.
    #[test]
    fn threads_never_see_a_value_that_was_taken_out() {
        let handle = handle(&Calls::new(true));
        let here = |value: &AtomicU64| value.load(Ordering::Relaxed) == 1;
        let (mut taken, mut seen) = (0, 0);
        std::thread::scope(|scope| {
            let users = [true, false].map(|counts| {
                let handle = handle.clone();
                scope.spawn(move || {
                    let guards = (0..20_000).filter_map(|_| handle.guard(counts));
                    guards.map(|guard| assert!(here(&guard), "taken out")).count()
                })
            });
            while !users.iter().all(|user| user.is_finished()) {
                handle.slot().put(AtomicU64::new(1), true);
                while !users.iter().all(|user| user.is_finished()) {
                    let Some(value) = handle.slot().take(false) else { continue };
                    value.store(0, Ordering::Relaxed);
                    taken += 1;
                    break;
                }
            }
            seen = users.map(|user| user.join().expect("no panic")).iter().sum();
        });
        println!("{taken} taken out, {seen} guards");
        assert_eq!(handle.slot().guards(), 0);
    }
}

#[cfg(all(test, lowtide_loom))]
mod models {
    use loom::cell::UnsafeCell;
    use loom::thread;

    use super::counting::{Calls, handle, handle_with};
    use super::*;

    /// A value whose reads and writes loom orders.
    struct Value(UnsafeCell<bool>);

    // SAFETY: loom fails where two accesses are not ordered.
    unsafe impl Sync for Value {}

    impl Value {
        fn new() -> Self {
            Self(UnsafeCell::new(true))
        }

        fn is_here(&self) -> bool {
            // SAFETY: as above.
            self.0.with(|here| unsafe { *here })
        }
    }

    impl Drop for Value {
        fn drop(&mut self) {
            // SAFETY: as above.
            self.0.with_mut(|here| unsafe { *here = false });
        }
    }

    #[test]
    fn a_guarded_value_is_neither_taken_out_nor_seen_before_it_is_written() {
        loom::model(|| {
            let handle = handle::<Value>(&Calls::new(true));
            let other = handle.clone();
            let user = thread::spawn(move || {
                for _ in 0..2 {
                    if let Some(guard) = other.guard(true) {
                        assert!(guard.is_here());
                    }
                }
            });
            handle.slot().put(Value::new(), true);
            if let Some(value) = handle.slot().take(false) {
                drop(value);
                handle.slot().put(Value::new(), true);
            }
            user.join().expect("no panic");
            assert!(handle.slot().take(false).is_some(), "no guard is left");
        });
    }

    #[test]
    fn one_of_two_takes_the_value_out_and_a_use_that_ended_keeps_it() {
        loom::model(|| {
            let handle = handle::<Value>(&Calls::new(true));
            handle.slot().put(Value::new(), true);
            let (taker, user) = (handle.clone(), handle.clone());
            let taker = thread::spawn(move || taker.slot().take(true).map(drop).is_some());
            let user = thread::spawn(move || user.guard(true).map(drop).is_some());
            let mine = handle.slot().take(true).map(drop).is_some();
            let (theirs, used) = (taker.join().expect("no panic"), user.join().expect("no panic"));
            assert!(!(mine && theirs) && !(used && (mine || theirs)));
            assert!(used || mine || theirs);
        });
    }

    #[test]
    fn the_last_guard_and_the_last_handle_free_once_and_after_every_use() {
        loom::model(|| {
            let calls = Calls::new(true);
            let handle = handle_with(&calls, Some(Value::new()));
            handle.slot().put(Value::new(), true);
            let (guard, other) = (handle.guard(true).expect("open"), handle.clone());
            let threads = [
                thread::spawn(move || assert!(guard.is_here())),
                thread::spawn(move || assert!(other.own.as_ref().is_some_and(Value::is_here))),
            ];
            drop(handle);
            threads.into_iter().for_each(|thread| thread.join().expect("no panic"));
            assert_eq!(calls.freed.load(Ordering::Relaxed), 1);
        });
    }

    /// The end of the last guard is seen by the one who waits for it, or calls the cell.
    #[test]
    fn the_end_of_the_last_guard_is_never_missed_by_who_watches() {
        loom::model(|| {
            let calls = Calls::new(true);
            let handle = handle::<Value>(&calls);
            handle.slot().put(Value::new(), true);
            let guards = [true, false].map(|counts| handle.guard(counts).expect("open"));
            let threads = guards.map(|guard| thread::spawn(move || drop(guard)));
            handle.slot().watch(true);
            let saw_none = handle.slot().guards() == 0;
            threads.into_iter().for_each(|thread| thread.join().expect("no panic"));
            assert!(saw_none || calls.rings.load(Ordering::Relaxed) == 1);
        });
    }

    #[test]
    fn each_use_is_counted_once_whoever_takes_the_count() {
        loom::model(|| {
            let calls = Calls::new(true);
            let handle = handle::<Value>(&calls);
            handle.slot().put(Value::new(), true);
            let other = handle.clone();
            let user = thread::spawn(move || {
                drop(other.guard(true));
                drop(other.guard(false));
                drop(other.guard(true));
            });
            let early = handle.slot().take_uses();
            user.join().expect("no panic");
            assert_eq!(early + handle.slot().take_uses(), 2);
        });
    }
}
