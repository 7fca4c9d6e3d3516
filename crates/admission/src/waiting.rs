//! The queue of requests that wait for room, before their bodies are read.
//!
//! A request that does not fit enters, and tries again each time it is woken. Whatever releases
//! bytes, and each tick of the control loop, wakes the requests that may fit now
//! ([`AdmissionState`](super::state::AdmissionState) does). A waiting request reserves nothing. The tower layer
//! estimates its need again at each attempt, since the need of its route may have been learned
//! meanwhile.
//!
//! The order is that of start-time fair queueing (Goyal, Vin and Cheng, 1996) within each priority:
//! a request's tag is the number of bytes that its tenant waits for in front of it, counted from
//! the tag that was admitted last. Requests of one tenant keep the order of their arrival, and a
//! tenant with many requests does not delay the first one of another. A later request that fits may
//! pass an earlier one that does not, up to the bytes that the earlier one waits for; then room is
//! kept for the earlier one. Requests that come first by their priority or tag also count as
//! passing. A request that was passed by a whole ledger of bytes comes first from then on. So does
//! one that was admitted before and waits for more.
//!
//! Requests that wait for something else than bytes, such as the measurement of their route or their
//! turn among large requests, hold up no other request.
//!
//! Invariants: at most [`ENTRIES_MAX`] requests wait, and no more than may hold a sixteenth of the
//! ceiling in their connections, and as many again that were admitted before; the requests that
//! wait for bytes of a budget are each passed by at most one ceiling of them. No waker is called,
//! cloned or dropped with the lock held. Waking allocates nothing.
//!
//! It does not reserve, and reads no clock: the control loop's ticks are its time.

use std::cmp::Reverse;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use lowtide_core::bytes::ByteSize;
use lowtide_core::clock::Moment;
use lowtide_core::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering, fence};
use lowtide_core::sync::{Mutex, MutexGuard, lock};

use super::cost::{Budget, Cost, Priority};
use super::ledger::Ledger;

/// The maximum number of waiting requests, and of those that were admitted before.
const ENTRIES_MAX: usize = 4096;
/// The memory that a waiting request is assumed to hold: its head, its task and the read buffer of
/// its connection. An estimate for hyper over HTTP/1.
const ENTRY_BYTES: ByteSize = ByteSize::kib(16);
/// The part of the ceiling that waiting requests may hold.
const PART: u64 = 16;
/// The number of wakers that are called after one pass with the lock held.
const BATCH: usize = 16;

/// The time, or half of its own if that is less, after which the first waiting request may evict
/// resources that it would otherwise wait beside. A guess: requests of most services end sooner.
pub(super) const PATIENCE: Duration = Duration::from_secs(1);

/// The number of ticks after which a request that was woken and does not come holds up no others:
/// its task may be blocked, or its client gone.
const MISSED_MAX: u32 = 10;

/// The waiting requests of one admission.
#[derive(Default)]
pub(super) struct WaitQueue {
    /// The number of waiting requests: read without the lock.
    len: AtomicUsize,
    /// Requests that were admitted after waiting, since the start.
    waited: AtomicU64,
    /// The time that requests have waited, in nanoseconds.
    time: AtomicU64,
    /// `true` if a control loop ticks, without which deadlines would not pass.
    is_timed: AtomicBool,
    waiting: Mutex<WaitList>,
}

/// The number of a waiting request, never used again.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct WaitId(u64);

/// Why an attempt failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum WaitReason {
    /// Bytes of this budget.
    Bytes(Budget),
    /// Bytes of this budget, which evictions may free.
    Load(Budget),
    /// Its turn among large requests.
    Turn,
    /// Something else than bytes.
    Other,
}

/// Why [`WaitQueue::pass`] admitted no request.
#[derive(Clone, Copy, Debug)]
pub(super) enum PassError<E> {
    /// The budget has no room.
    NoRoom(Budget, E),
    /// Others come first: `has_aged` if one of them does from now on, and was not woken for that.
    Behind { has_aged: bool },
}

/// The terms on which a request waits.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct WaitTerms {
    pub(super) cost: Cost,
    pub(super) priority: Priority,
    /// Requests of one tenant keep their order.
    pub(super) tenant: u64,
    /// The longest time to wait; `None` without a deadline.
    pub(super) within: Option<Duration>,
    /// The request was admitted, and waits for more. It comes first: its end frees memory.
    pub(super) is_admitted: bool,
}

#[derive(Default)]
struct WaitList {
    /// Sorted by [`WaitingRequest::order`].
    list: Vec<WaitingRequest>,
    /// The number of the next request.
    next: u64,
    /// The tag of the request that was admitted last.
    admitted: u64,
    /// The time of the last tick.
    now: Moment,
}

#[derive(Default)]
struct WaitingRequest {
    id: u64,
    terms: WaitTerms,
    tag: u64,
    /// The ticks' time at the first tick after it entered.
    since: Option<Moment>,
    lack: Option<WaitReason>,
    /// The bytes of the budget it lacks that later requests were admitted with.
    passed: u64,
    /// It comes first: a whole ledger of bytes has passed it, or it was admitted before.
    has_aged: bool,
    /// It has been woken and has not tried since.
    is_woken: bool,
    /// The ticks since it was woken.
    missed: u32,
    attempts: u64,
    waker: Option<Waker>,
}

impl WaitingRequest {
    fn order(&self) -> impl Ord + use<> {
        // Aged ones in the order of their arrival.
        let (priority, tag) =
            if self.has_aged { (None, 0) } else { (Some(self.terms.priority), self.tag) };
        (!self.has_aged, Reverse(priority), tag, self.id)
    }

    /// Returns the budget whose bytes it waits for.
    const fn lacks(&self) -> Option<Budget> {
        let Some(WaitReason::Bytes(of) | WaitReason::Load(of)) = self.lack else { return None };
        Some(of)
    }

    /// Returns the budget whose bytes it waits for, if the request with this number, or without
    /// one, arrived later.
    fn passed_by(&self, id: Option<&WaitId>) -> Option<Budget> {
        self.lacks().filter(|_| id.is_none_or(|id| id.0 > self.id))
    }

    /// Returns the bytes that later requests may still take past it.
    fn leaves(&self, budget: Budget, ceilings: Cost) -> u64 {
        let most = self.terms.cost.of(budget).min(ceilings.of(budget));
        most.get().saturating_sub(self.passed)
    }
}

impl WaitQueue {
    /// Starts over. Requests that still wait find that waiting has ended.
    pub(super) fn begin(&self) {
        self.end();
        self.waited.store(0, Ordering::Relaxed);
        self.time.store(0, Ordering::Relaxed);
    }

    /// Ends all waiting, because no control loop ticks any more.
    pub(super) fn end(&self) {
        self.is_timed.store(false, Ordering::Relaxed);
        self.end_where(|_| true);
    }

    /// Ends the wait of the requests that were not admitted before. The others try again: a load
    /// ends, and a suspended request waits on.
    pub(super) fn close(&self) {
        self.end_where(|entry| !entry.terms.is_admitted);
        // One without a waker has been woken, or has not waited yet.
        self.in_batches(|entries, batch| {
            let mut waiting = entries.list.iter_mut().filter(|entry| entry.waker.is_some());
            waiting.all(|entry| batch.add(entry));
        });
    }

    fn end_where(&self, is_ended: impl Fn(&WaitingRequest) -> bool) {
        let ended: Vec<_> = {
            let mut entries = self.entries();
            let (ended, stay) = std::mem::take(&mut entries.list).into_iter().partition(is_ended);
            entries.list = stay;
            self.len.store(entries.list.len(), Ordering::SeqCst);
            ended
        };
        ended.into_iter().filter_map(|entry| entry.waker).for_each(Waker::wake);
    }

    /// Returns `true` if a control loop ticks.
    #[inline]
    pub(super) fn is_timed(&self) -> bool {
        self.is_timed.load(Ordering::Relaxed)
    }

    /// Returns the number of waiting requests.
    pub(super) fn len(&self) -> usize {
        self.len.load(Ordering::Relaxed)
    }

    /// Returns the number of requests that were admitted after waiting, and the time that all
    /// requests that wait no more have waited.
    pub(super) fn waited(&self) -> (u64, Duration) {
        let time = Duration::from_nanos(self.time.load(Ordering::Relaxed));
        (self.waited.load(Ordering::Relaxed), time)
    }

    /// Counts the time of a request that waits no more.
    fn count(&self, entry: &WaitingRequest, now: Moment) {
        let time = entry.since.map_or(Duration::ZERO, |since| now - since);
        let time = u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        self.time.fetch_add(time, Ordering::Relaxed);
    }

    /// Returns `true` if no request waits. After a release of bytes, a request that entered before
    /// it is seen; one that enters later finds the bytes.
    #[inline]
    pub(super) fn is_empty(&self) -> bool {
        // Loom orders sequentially consistent accesses no further than acquire and release.
        #[cfg(lowtide_loom)]
        fence(Ordering::SeqCst);
        self.len.load(Ordering::SeqCst) == 0
    }

    /// Returns the cost of the first request that waits for bytes of one of these budgets, and the
    /// sum over all that do.
    pub(super) fn lacking(&self, of: impl Fn(Budget) -> bool) -> Option<(Cost, Cost)> {
        if self.is_empty() {
            return None;
        }
        let entries = self.entries();
        let mut costs = entries.list.iter().filter(|it| it.lacks().is_some_and(&of));
        let first = costs.next()?.terms.cost;
        Some((first, costs.fold(first, |sum, entry| sum.and(entry.terms.cost))))
    }

    /// Returns `true` if a request waits for this.
    pub(super) fn lacks_any(&self, lack: WaitReason) -> bool {
        !self.is_empty() && self.entries().list.iter().any(|it| it.lack == Some(lack))
    }

    /// Returns the cost of the first request that waits for bytes, if it has waited for
    /// [`PATIENCE`], or for half of its time. Not of a load, which evicts at its next attempt.
    pub(super) fn overdue(&self) -> Option<Cost> {
        let entries = self.entries();
        let first = entries.list.iter().find(|it| matches!(it.lack, Some(WaitReason::Bytes(_))))?;
        let patience = first.terms.within.map_or(PATIENCE, |within| PATIENCE.min(within / 2));
        (entries.now - first.since? >= patience).then_some(first.terms.cost)
    }

    /// Enters the queue. Returns `None` if it is full, or if a deadline could not pass.
    pub(super) fn enter(&self, terms: WaitTerms, ceiling: ByteSize) -> Option<WaitId> {
        let most = usize::try_from(ceiling.get() / PART / ENTRY_BYTES.get()).unwrap_or(usize::MAX);
        let mut entries = self.entries();
        // With the lock held, so that `end` either sees the entry or is seen.
        if terms.within.is_some() && !self.is_timed() {
            return None;
        }
        // Those that were admitted before are not kept out by those that were not.
        let of_its_kind = |other: &&WaitingRequest| other.terms.is_admitted == terms.is_admitted;
        if entries.list.iter().filter(of_its_kind).count() >= most.min(ENTRIES_MAX) {
            return None;
        }
        let id = entries.next;
        entries.next += 1;
        let ahead = entries.list.iter().filter(|other| other.terms.tenant == terms.tenant);
        let bytes = |of: Cost| of.host.saturating_add(of.device).get();
        let ahead = ahead.map(|other| other.tag.saturating_add(bytes(other.terms.cost))).max();
        let tag = ahead.map_or(entries.admitted, |ahead| ahead.max(entries.admitted));
        let (has_aged, is_woken) = (terms.is_admitted, true);
        let entry = WaitingRequest { id, terms, tag, has_aged, is_woken, ..<_>::default() };
        let at = entries.list.partition_point(|other| other.order() < entry.order());
        entries.list.insert(at, entry);
        self.len.store(entries.list.len(), Ordering::SeqCst);
        drop(entries);
        // The request tries to reserve next: it finds what was released before this, or the
        // release finds the request (see `is_empty`).
        fence(Ordering::SeqCst);
        Some(WaitId(id))
    }

    /// Leaves the queue. Returns `true` if the request was in it.
    pub(super) fn leave(&self, id: &WaitId) -> bool {
        let left;
        let mut entries = self.entries();
        left = entries.at(id).map(|at| entries.list.remove(at));
        if let Some(entry) = &left {
            self.count(entry, entries.now);
        }
        self.len.store(entries.list.len(), Ordering::SeqCst);
        left.is_some()
    }

    /// Waits until the request is woken. Returns `true` if it may try again, and `false` if its
    /// deadline has passed or waiting has ended.
    pub(super) fn poll(&self, id: &WaitId, cx: &Context<'_>) -> Poll<bool> {
        // Cloned and dropped without the lock, since both run code of the executor.
        let mut waker = Some(cx.waker().clone());
        let mut entries = self.entries();
        let Some(entry) = entries.get(id) else { return Poll::Ready(false) };
        std::mem::swap(&mut entry.waker, &mut waker);
        if std::mem::take(&mut entry.is_woken) {
            entry.missed = 0;
            return Poll::Ready(true);
        }
        Poll::Pending
    }

    /// Reserves with `book` if the order of the queue allows a request of this cost to be admitted
    /// now; `id` is its own, or `None` if it does not wait. A request that was admitted
    /// has left the queue.
    pub(super) fn pass<T, E>(
        &self,
        id: Option<&WaitId>,
        cost: Cost,
        priority: Priority,
        ceilings: Cost,
        book: impl FnOnce() -> Result<T, (Budget, E)>,
    ) -> Result<T, PassError<E>> {
        let mut entries = self.entries();
        if let Some(entry) = id.and_then(|id| entries.get(id)) {
            entry.terms.cost = cost;
            entry.attempts += 1;
        }
        let (at, has_aged) = entries.before(id, cost, priority, ceilings);
        let ahead = entries.list.get(..at).unwrap_or_default();
        let is_blocked = ahead.iter().any(|entry| {
            let leaves = |budget| entry.leaves(budget, ceilings);
            entry.lacks().is_some_and(|budget| cost.of(budget).get() > leaves(budget))
        });
        let lacked = ahead.iter().find_map(WaitingRequest::lacks);
        let booked = if is_blocked { Err(None) } else { book().map_err(Some) };
        let lack = match &booked {
            Ok(_) => {
                if let Some(entry) = entries.admit(id, cost) {
                    self.count(&entry, entries.now);
                    self.waited.fetch_add(1, Ordering::Relaxed);
                }
                self.len.store(entries.list.len(), Ordering::SeqCst);
                None
            }
            Err(None) => lacked,
            Err(Some((budget, _))) => Some(*budget),
        };
        if let (Some(entry), Some(lack)) = (id.and_then(|id| entries.get(id)), lack) {
            entry.lack = Some(WaitReason::Bytes(lack));
        }
        booked.map_err(|error| match error {
            Some((budget, error)) => PassError::NoRoom(budget, error),
            None => PassError::Behind { has_aged },
        })
    }

    /// Records why an attempt failed that was not made by [`WaitQueue::pass`].
    pub(super) fn lacks(&self, id: &WaitId, lack: WaitReason) {
        if let Some(entry) = self.entries().get(id) {
            entry.lack = Some(lack);
            entry.attempts += 1;
        }
    }

    /// Begins a tick: requests that have waited for too long leave.
    pub(super) fn expire(&self, now: Moment) {
        self.is_timed.store(true, Ordering::Relaxed);
        if self.is_empty() {
            return;
        }
        self.in_batches(|entries, batch| {
            entries.now = now;
            entries.list.retain_mut(|entry| {
                let since = *entry.since.get_or_insert(now);
                entry.missed += u32::from(entry.is_woken);
                if entry.missed >= MISSED_MAX {
                    entry.lack = None;
                }
                let is_over = entry.terms.within.is_some_and(|within| now - since >= within);
                let leaves = is_over && batch.add(entry);
                if leaves {
                    self.count(entry, now);
                }
                !leaves
            });
            self.len.store(entries.list.len(), Ordering::SeqCst);
        });
    }

    /// Wakes the requests that may fit now, those that can never fit, and up to `others` of those
    /// that wait for something else than bytes.
    #[cold]
    pub(super) fn wake(&self, [host, device]: [&Ledger; 2], mut others: usize) {
        let ceilings = Cost { host: host.ceiling(), device: device.ceiling() };
        self.in_batches(|entries, batch| {
            let mut room = [host.room().get(), device.room().get()];
            // What those in front leave to those behind.
            let mut leaves = [u64::MAX; 2];
            for entry in &mut entries.list {
                let Some(budget) = entry.lacks() else { continue };
                let cost = [entry.terms.cost.host.get(), entry.terms.cost.device.get()];
                // It entered below a higher ceiling, and is answered at its next attempt.
                let is_too_large = entry.terms.cost.of(budget) > ceilings.of(budget);
                let fits = |budget: usize| {
                    let [cost, room, leaves] = [&cost, &room, &leaves].map(|of| of.get(budget));
                    cost <= room.min(leaves)
                };
                if entry.is_woken || is_too_large || (fits(0) && fits(1)) {
                    let taken = if is_too_large { [0; 2] } else { cost };
                    for ((room, leaves), cost) in room.iter_mut().zip(&mut leaves).zip(taken) {
                        (*room, *leaves) = (room.saturating_sub(cost), leaves.saturating_sub(cost));
                    }
                    if !entry.is_woken {
                        batch.add(entry);
                    }
                } else if let Some(leaves) = leaves.get_mut(budget as usize) {
                    *leaves = entry.leaves(budget, ceilings).min(*leaves);
                }
                if batch.is_full() {
                    return;
                }
            }
            // In their order: a turn that has ended lets one begin.
            let mut turns = entries.list.iter_mut().filter(|it| it.lack == Some(WaitReason::Turn));
            if let Some(next) = turns.find(|it| !it.is_woken) {
                batch.add(next);
            }
            while !batch.is_full() && others > 0 {
                let waiting = entries.list.iter_mut();
                let waiting = waiting.filter(|it| it.lack == Some(WaitReason::Other));
                // Each in its turn.
                let next = waiting.filter(|it| !it.is_woken).min_by_key(|it| it.attempts);
                let Some(entry) = next else { return };
                batch.add(entry);
                others -= 1;
            }
        });
    }

    /// Wakes the loads that wait. A resource whose last use has ended can be evicted for them, but
    /// it has released no bytes, so nothing else wakes them.
    #[cold]
    pub(super) fn wake_loads(&self) {
        self.in_batches(|entries, batch| {
            let is_load = |it: &WaitingRequest| matches!(it.lack, Some(WaitReason::Load(_)));
            let mut loads = entries.list.iter_mut().filter(|it| is_load(it) && !it.is_woken);
            loads.all(|entry| batch.add(entry));
        });
    }

    /// Lets `choose` choose requests with the lock held, and wakes them without it, until it
    /// chooses less than a whole batch.
    fn in_batches(&self, mut choose: impl FnMut(&mut WaitList, &mut WakeBatch)) {
        // Ends: each pass chooses requests that were not chosen before, or is the last.
        loop {
            let mut batch = WakeBatch::default();
            choose(&mut self.entries(), &mut batch);
            let is_last = !batch.is_full();
            batch.wakers.into_iter().flatten().for_each(Waker::wake);
            if is_last {
                return;
            }
        }
    }

    fn entries(&self) -> MutexGuard<'_, WaitList> {
        lock(&self.waiting)
    }
}

/// Requests that are woken together.
#[derive(Default)]
struct WakeBatch {
    wakers: [Option<Waker>; BATCH],
    count: usize,
}

impl WakeBatch {
    const fn is_full(&self) -> bool {
        self.count == BATCH
    }

    /// Adds a request, which counts as woken. Returns `false` if there is no room for it.
    fn add(&mut self, entry: &mut WaitingRequest) -> bool {
        let Some(place) = self.wakers.get_mut(self.count) else { return false };
        *place = entry.waker.take();
        entry.is_woken = true;
        self.count += 1;
        true
    }
}

impl WaitList {
    fn at(&self, id: &WaitId) -> Option<usize> {
        self.list.iter().position(|entry| entry.id == id.0)
    }

    fn get(&mut self, id: &WaitId) -> Option<&mut WaitingRequest> {
        let at = self.at(id)?;
        self.list.get_mut(at)
    }

    /// Returns the number of requests that come before this one, which may not be in the queue. If
    /// it would make a whole ledger of bytes pass one behind it, that one comes first from now on,
    /// and the flag is `true`.
    fn before(
        &mut self,
        id: Option<&WaitId>,
        cost: Cost,
        priority: Priority,
        ceilings: Cost,
    ) -> (usize, bool) {
        let before = |entries: &Self| match id.and_then(|id| entries.at(id)) {
            Some(at) => at,
            // As if it entered now, as the last of its priority.
            None => entries
                .list
                .partition_point(|other| other.has_aged || other.terms.priority >= priority),
        };
        let at = before(self);
        let mut has_aged = false;
        for entry in self.list.get_mut(at..).unwrap_or_default() {
            let Some(budget) = entry.passed_by(id).filter(|_| !entry.has_aged) else { continue };
            let passing = cost.of(budget).get();
            let passed = entry.passed.saturating_add(passing);
            if passing > 0 && passed > ceilings.of(budget).get() {
                (entry.has_aged, has_aged) = (true, true);
            }
        }
        if has_aged {
            self.list.sort_unstable_by_key(WaitingRequest::order);
        }
        (before(self), has_aged)
    }

    /// Records that a request was admitted, and removes it if it has a place.
    fn admit(&mut self, id: Option<&WaitId>, cost: Cost) -> Option<WaitingRequest> {
        let at = id.and_then(|id| self.at(id));
        let admitted = at.map(|at| self.list.remove(at));
        // One that has aged may be far ahead of those with a smaller tag that still wait.
        if let Some(entry) = admitted.as_ref().filter(|entry| !entry.has_aged) {
            self.admitted = self.admitted.max(entry.tag);
        }
        for entry in &mut self.list {
            if let Some(budget) = entry.passed_by(id) {
                entry.passed = entry.passed.saturating_add(cost.of(budget).get());
            }
        }
        if self.list.is_empty() {
            self.admitted = 0;
        }
        admitted
    }
}

#[cfg(all(test, lowtide_loom))]
mod models {
    use loom::thread;
    use std::sync::Arc;

    use super::*;

    const ALL: ByteSize = ByteSize::mib(1);

    /// The queue and the account as a state uses them, without what a model has no need of.
    struct Room {
        queue: WaitQueue,
        host: Ledger,
        device: Ledger,
    }

    impl Room {
        fn full() -> Arc<Self> {
            let (host, device) = (Ledger::with_ceiling(ALL, 1.0), Ledger::new());
            host.try_book(ALL).expect("it is empty");
            Arc::new(Self { queue: WaitQueue::default(), host, device })
        }

        /// As `AdmissionState::admit_at_once`.
        fn admit_at_once(&self) -> bool {
            self.queue.is_empty() && self.host.try_book_plain(ALL)
        }

        /// As `AdmissionState::finish_host`.
        fn release(&self) {
            self.host.release(ALL);
            if !self.queue.is_empty() {
                self.queue.wake([&self.host, &self.device], 1);
            }
        }

        /// Enters and tries once, while `others` run. A request that was not admitted is woken.
        fn wait_beside<const N: usize>(self: Arc<Self>, others: [fn(&Self); N]) {
            let others = others.map(|other| {
                let room = Arc::clone(&self);
                thread::spawn(move || other(&room))
            });
            let (cost, priority) = (Cost::host(ALL), Priority::Normal);
            let (tenant, within, is_admitted) = (0, None, false);
            let terms = WaitTerms { cost, priority, tenant, within, is_admitted };
            let id = self.queue.enter(terms, ALL).expect("there is place");
            let cx = &Context::from_waker(Waker::noop());
            assert_eq!(self.queue.poll(&id, cx), Poll::Ready(true), "its first turn");
            let book = || self.host.try_book_more(ALL).map_err(|short| (Budget::Host, short));
            let passed = self.queue.pass(
                Some(&id),
                cost,
                priority,
                Cost { host: ALL, device: ByteSize::MAX },
                book,
            );
            others.into_iter().for_each(|other| other.join().expect("no panic"));
            assert!(passed.is_ok() || self.queue.poll(&id, cx) == Poll::Ready(true), "lost");
            assert_eq!(self.host.reserved(), if passed.is_ok() { ALL } else { ByteSize::ZERO });
        }
    }

    #[test]
    fn a_request_that_enters_finds_the_room_or_is_woken_by_the_release() {
        loom::model(|| Room::full().wait_beside([Room::release]));
    }

    #[test]
    fn a_request_that_enters_is_woken_by_one_that_was_admitted_at_once() {
        let admit = |room: &Room| {
            if room.admit_at_once() {
                room.release();
            }
        };
        loom::model(move || Room::full().wait_beside([Room::release, admit]));
    }
}
