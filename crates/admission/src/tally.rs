//! Counts of admitted and rejected requests, by size and reason, in one stripe per thread.
//!
//! A counter that all threads write costs each of them a transfer of its cache line for each
//! request. So each thread counts in its own stripe: no other thread writes there, and adding is a
//! load and a store. Threads beyond the owned stripes share some, with atomic additions, and admit
//! in more steps. The module only manages who may write where.
//!
//! Invariants: the counters of an owned stripe are written by the one thread that holds its place.
//! A sum that is read is never more than what happened, and exact when no thread counts.

use std::cell::Cell;
use std::sync::atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use lowtide_core::bytes::ByteSize;

use super::cost::{Budget, RejectReason};

/// Stripes that are owned by one thread each. Up to as many concurrent threads pay least. A guess.
const OWNED: usize = 16;
/// Stripes that further threads share.
const SHARED: usize = 8;
/// All stripes.
pub(super) const STRIPES: usize = OWNED + SHARED;

const _: () = assert!(OWNED <= u32::BITS as usize, "the places are bits of a word");

/// The owned places in use, one bit each, for all admissions of this process.
static TAKEN: AtomicU32 = AtomicU32::new(0);
/// The shared place of the next thread.
static NEXT: AtomicUsize = AtomicUsize::new(0);
/// The stripes in which a thread of this process has ever counted are below this.
static USED: AtomicUsize = AtomicUsize::new(0);

/// Returns the stripes that may contain counts. A process with few threads uses few, and a reader
/// that went over all of them would fetch some 40 KiB of zeros.
pub(super) fn used(tallies: &[Shard; STRIPES]) -> &[Shard] {
    // Relaxed: a stripe is in use before it counts, so a reader that has seen a count, or what
    // followed from it, sees the stripe.
    tallies.get(..USED.load(Ordering::Relaxed)).unwrap_or(tallies)
}

thread_local! {
    /// The place of this thread. Without a destructor, so that reading it is one load.
    static HERE: Cell<ShardId> = const { Cell::new(ShardId::NONE) };
    static HELD: Holding = Holding::take();
}

/// The place where a thread counts: its stripe.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ShardId(pub(super) usize);

impl ShardId {
    /// The place of a thread that has not counted yet.
    const NONE: Self = Self(usize::MAX);

    /// Returns the place of the calling thread; a shared one if the thread is about to end.
    pub(super) fn here() -> Self {
        let place = HERE.get();
        if place == Self::NONE { Self::find() } else { place }
    }

    #[cold]
    fn find() -> Self {
        let place = HELD.try_with(|held| held.0).unwrap_or_else(|_| Self::using(OWNED));
        HERE.set(place);
        place
    }

    /// Returns the place of this stripe, which counts as used from now on.
    fn using(stripe: usize) -> Self {
        USED.fetch_max(stripe + 1, Ordering::Relaxed);
        Self(stripe)
    }

    /// Returns `true` if no other thread counts there.
    #[inline]
    const fn is_owned(self) -> bool {
        self.0 < OWNED
    }
}

/// A place held until the thread ends.
struct Holding(ShardId);

impl Holding {
    fn take() -> Self {
        let free = |taken: u32| Some(taken.trailing_ones()).filter(|at| (*at as usize) < OWNED);
        let take = |taken| Some(taken | 1 << free(taken)?);
        // Acquire: makes the previous holder's writes to its stripes visible.
        let taken = TAKEN.fetch_update(Ordering::Acquire, Ordering::Relaxed, take);
        Self(ShardId::using(match taken {
            Ok(before) => before.trailing_ones() as usize,
            Err(_) => OWNED + NEXT.fetch_add(1, Ordering::Relaxed) % SHARED,
        }))
    }
}

impl Drop for Holding {
    fn drop(&mut self) {
        if self.0.is_owned() {
            // Destructors that run later may count, and another thread may hold the place then.
            HERE.set(ShardId::using(OWNED));
            TAKEN.fetch_and(!(1 << self.0.0), Ordering::Release);
        }
    }
}

/// Requests of one class in one budget.
#[derive(Debug, Default)]
struct ClassTally {
    /// Their number, and their bytes.
    admitted: [AtomicU64; 2],
    rejected: [AtomicU64; 2],
}

/// One stripe.
#[derive(Debug, Default)]
#[repr(align(128))]
pub(super) struct Shard {
    classes: [[ClassTally; ClassStats::COUNT]; 2],
    exempt: AtomicU64,
    /// Requests whose permits were dropped on this thread, wherever they were admitted.
    finished: AtomicU64,
    rejected: [AtomicU64; RejectReason::ALL.len()],
    /// Bytes reserved by requests outside a class, by budget: exempt requests and growth.
    beside: [AtomicU64; 2],
    /// Bytes that outlived their requests.
    outlived: AtomicU64,
}

impl Shard {
    /// Resets the counters. Called while no thread counts.
    pub(super) fn begin(&self) {
        let classes = self.classes.iter().flatten();
        let classes = classes.flat_map(|class| class.admitted.iter().chain(&class.rejected));
        let single = [&self.exempt, &self.finished, &self.outlived];
        let single = single.into_iter().chain(&self.rejected).chain(&self.beside);
        classes.chain(single).for_each(|counter| counter.store(0, Ordering::Relaxed));
    }
}

/// The stripe in which the calling thread counts.
#[derive(Clone, Copy)]
pub(super) struct Tally<'a> {
    shard: &'a Shard,
    /// `true` if no other thread counts there.
    is_owned: bool,
}

impl<'a> Tally<'a> {
    /// Returns the stripe of the calling thread.
    #[inline]
    pub(super) fn here(shards: &'a [Shard; STRIPES]) -> Self {
        let place = ShardId::here();
        // A place is always one of the stripes.
        let shard = shards.get(place.0).unwrap_or(&shards[0]);
        Self { shard, is_owned: place.is_owned() }
    }

    /// Returns the stripe of the calling thread if it is owned. Calls nothing.
    #[inline]
    pub(super) fn owned(shards: &'a [Shard; STRIPES]) -> Option<Self> {
        let place = HERE.get();
        let shard = if place.is_owned() { shards.get(place.0) } else { None };
        shard.map(|shard| Self { shard, is_owned: true })
    }

    #[inline]
    fn add(self, counter: &AtomicU64, amount: u64) {
        if self.is_owned {
            let sum = counter.load(Ordering::Relaxed).wrapping_add(amount);
            // Release: what is counted has happened. Costs nothing on x86.
            counter.store(sum, Ordering::Release);
        } else {
            counter.fetch_add(amount, Ordering::Release);
        }
    }

    /// Counts an admitted request with these bytes.
    #[inline]
    pub(super) fn admit(self, host: ByteSize, device: ByteSize) {
        self.count(Budget::Host, host, |class| &class.admitted);
        if !device.is_zero() {
            self.count(Budget::Device, device, |class| &class.admitted);
        }
    }

    /// Counts an admitted exempt request with these bytes. It is in no class.
    pub(super) fn admit_exempt(self, host: ByteSize, device: ByteSize) {
        self.add(&self.shard.exempt, 1);
        for (beside, bytes) in self.shard.beside.iter().zip([host, device]) {
            self.add(beside, bytes.get());
        }
    }

    /// Counts a request that ended.
    #[inline]
    pub(super) fn finish(self) {
        self.add(&self.shard.finished, 1);
    }

    /// Counts a rejected request, by class if it did not fit this budget.
    pub(super) fn rejected(self, reason: RejectReason, full: Option<(Budget, ByteSize)>) {
        if let Some(counter) = self.shard.rejected.get(reason as usize) {
            self.add(counter, 1);
        }
        if let Some((budget, bytes)) = full {
            self.count(budget, bytes, |class| &class.rejected);
        }
    }

    /// Counts the growth of a request by these host bytes.
    pub(super) fn grow(self, bytes: ByteSize) {
        self.add(&self.shard.beside[0], bytes.get());
    }

    /// Counts bytes that outlived their request.
    pub(super) fn outlive(self, bytes: ByteSize) {
        self.add(&self.shard.outlived, bytes.get());
    }

    #[inline]
    fn count(self, budget: Budget, bytes: ByteSize, of: impl Fn(&ClassTally) -> &[AtomicU64; 2]) {
        let classes = self.shard.classes.get(budget as usize);
        if let Some(class) = classes.and_then(|list| list.get(class_of(bytes))) {
            let [requests, sum] = of(class);
            self.add(requests, 1);
            self.add(sum, bytes.get());
        }
    }
}

/// Counts of admitted and rejected requests.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct AdmissionStats {
    /// Requests admitted since start.
    pub admitted_total: u64,
    /// Admitted requests whose permit has been dropped.
    pub finished_total: u64,
    /// Requests rejected since start, in the order of [`RejectReason::ALL`].
    pub rejected: [u64; RejectReason::ALL.len()],
    /// Requests that wait for room now. Of them, only those whose reservations were suspended are
    /// among the admitted ones.
    pub waiting: u64,
    /// Requests admitted after they had waited, since start.
    pub waited_total: u64,
    /// The time that requests have waited, since start, to one tick of the control loop; without
    /// those that still wait.
    pub waited_time_total: Duration,
    /// How often a reservation was suspended, since start: that of a request whose body is slow to
    /// arrive while others wait for room.
    pub suspended_total: u64,
    /// The time since the oldest running request was admitted, to a second: of those that have
    /// reserved at least 64 KiB, are measured, and have waited for something. Zero without one.
    pub oldest_permit: Duration,
    /// `true` in [observe mode](crate::AdmissionMode::Observe).
    pub observe_mode: bool,
    /// What observe mode admitted and would otherwise have waited or been rejected, since start, in
    /// the order of [`RejectReason::ALL`]: requests, each once, and loads of resources. Requests
    /// counted as full, pressure and slow start would have waited, if they may; it is not known
    /// which of those would have found room in time.
    pub observed: [u64; RejectReason::ALL.len()],
    /// Bytes that measured requests held when they ended, since start: in caches, in tasks that go
    /// on, or leaked. Includes headers of responses, which the server frees soon after.
    pub outlived_bytes_total: u64,
}

impl AdmissionStats {
    /// Returns the requests rejected for this reason.
    #[must_use]
    pub fn rejected_total(&self, reason: RejectReason) -> u64 {
        self.rejected.get(reason as usize).copied().unwrap_or(0)
    }

    /// Returns the number of requests that hold a permit now.
    #[must_use]
    pub const fn held(&self) -> u64 {
        self.admitted_total.saturating_sub(self.finished_total)
    }
}

/// Counts of one size class since start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct ClassStats {
    /// The label of the class in metrics: its bound, such as `8MiB`, or `larger`.
    pub class: &'static str,
    /// The largest request of the class, [`ByteSize::MAX`] for the last class. A class has more than
    /// half of it and at most all of it, the first one everything up to it. Bounds are powers of two.
    pub bound: ByteSize,
    /// Requests admitted. Exempt requests are in no class.
    pub admitted_total: u64,
    /// Bytes of the admitted requests, as estimated at admission.
    pub admitted_bytes_total: u64,
    /// Requests rejected because they did not fit. Requests rejected for another reason are in no
    /// class.
    pub rejected_total: u64,
    /// Bytes of the rejected requests.
    pub rejected_bytes_total: u64,
}

impl ClassStats {
    /// The number of classes.
    pub const COUNT: usize = 24;
}

impl AdmissionStats {
    /// Adds the ended requests of a stripe. The ends of all stripes are added before the starts.
    pub(super) fn add_ended(&mut self, tally: &Shard) {
        // Acquire: a reader that sees an end sees the start, and everything released before the
        // end.
        self.finished_total += tally.finished.load(Ordering::Acquire);
    }

    /// Adds the started requests of a stripe.
    pub(super) fn add(&mut self, tally: &Shard) {
        let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let host = tally.classes.first().into_iter().flatten();
        self.admitted_total += host.map(|class| read(&class.admitted[0])).sum::<u64>();
        self.admitted_total += read(&tally.exempt);
        self.outlived_bytes_total = self.outlived_bytes_total.wrapping_add(read(&tally.outlived));
        for (sum, counter) in self.rejected.iter_mut().zip(&tally.rejected) {
            *sum += read(counter);
        }
    }
}

/// Counts of one budget's requests, by class, since start.
#[derive(Clone, Copy, Debug)]
pub(super) struct BudgetCounts {
    pub(super) classes: [ClassStats; ClassStats::COUNT],
    /// Bytes reserved by requests outside their classes: exempt requests and growth.
    pub(super) beside: u64,
}

impl BudgetCounts {
    /// Returns the counts before the first request.
    pub(super) fn none() -> Self {
        let classes = std::array::from_fn(|at| {
            let (class, bound) = (NAMES.get(at).copied().unwrap_or_default(), class_bound(at));
            ClassStats { class, bound, ..ClassStats::default() }
        });
        Self { classes, beside: 0 }
    }

    /// Returns the smallest request of the smallest class in which one was admitted or did not fit.
    pub(super) fn smallest(&self) -> ByteSize {
        let asked = |class: &ClassStats| class.admitted_total + class.rejected_total > 0;
        let before = self.classes.iter().position(asked).and_then(|at| at.checked_sub(1));
        let below =
            before.and_then(|at| self.classes.get(at)).map_or(ByteSize::ZERO, |of| of.bound);
        below.saturating_add(ByteSize::new(1))
    }

    /// Returns the requests of classes up to this bound admitted since start, without exempt ones.
    pub(super) fn admitted_total(&self, most: ByteSize) -> u64 {
        let classes = self.classes.iter().filter(|class| class.bound <= most);
        classes.map(|class| class.admitted_total).sum()
    }

    /// Adds a stripe.
    pub(super) fn add(&mut self, tally: &Shard, budget: Budget) {
        let Some(classes) = tally.classes.get(budget as usize) else { return };
        let add = |sum: &mut u64, counter: &AtomicU64| {
            *sum = sum.wrapping_add(counter.load(Ordering::Relaxed));
        };
        for (sum, class) in self.classes.iter_mut().zip(classes) {
            let ClassTally { admitted: [admitted, bytes], rejected: [rejected, shed_bytes] } =
                class;
            add(&mut sum.admitted_total, admitted);
            add(&mut sum.admitted_bytes_total, bytes);
            add(&mut sum.rejected_total, rejected);
            add(&mut sum.rejected_bytes_total, shed_bytes);
        }
        if let Some(beside) = tally.beside.get(budget as usize) {
            add(&mut self.beside, beside);
        }
    }
}

/// The power of two of the least bound, 16 KiB.
const FIRST: u32 = 14;

/// Names by index, used as labels in metrics.
const NAMES: [&str; ClassStats::COUNT] = [
    "16KiB", "32KiB", "64KiB", "128KiB", "256KiB", "512KiB", "1MiB", "2MiB", "4MiB", "8MiB",
    "16MiB", "32MiB", "64MiB", "128MiB", "256MiB", "512MiB", "1GiB", "2GiB", "4GiB", "8GiB",
    "16GiB", "32GiB", "64GiB", "larger",
];

/// Returns the class of a request of `bytes` bytes: an index of [`BudgetCounts::classes`].
#[inline]
pub(crate) const fn class_of(bytes: ByteSize) -> usize {
    // The exponent of the power of two at or above it, less FIRST. Up to FIRST the lowest bit, set
    // here, makes it zero.
    let at = (bytes.get().saturating_sub(1) >> (FIRST - 1) | 1).ilog2() as usize;
    if at < ClassStats::COUNT { at } else { ClassStats::COUNT - 1 }
}

/// Returns the largest request of a class, or [`ByteSize::MAX`] for the last class.
pub(crate) const fn class_bound(class: usize) -> ByteSize {
    if class >= ClassStats::COUNT - 1 {
        return ByteSize::MAX;
    }
    ByteSize::new(1 << FIRST << class)
}

#[cfg(all(test, not(lowtide_loom)))]
mod tests {
    use std::sync::{Barrier, Mutex};

    use lowtide_core::sync::lock;

    use super::*;

    #[test]
    fn a_place_has_one_holder_at_a_time_and_goes_back_with_its_thread() {
        let here = ShardId::here();
        assert_eq!(here, ShardId::here(), "a thread keeps its place");
        // More threads at once than there are places of either kind.
        let threads = 2 * STRIPES;
        for _ in 0..3 {
            let all = Barrier::new(threads);
            let mut places: Vec<ShardId> = std::thread::scope(|scope| {
                let threads: Vec<_> = (0..threads)
                    .map(|_| {
                        scope.spawn(|| {
                            let place = ShardId::here();
                            all.wait();
                            place
                        })
                    })
                    .collect();
                threads.into_iter().map(|thread| thread.join().expect("no panic")).collect()
            });
            places.push(here);
            assert!(places.iter().all(|place| place.0 < STRIPES));
            let mut owned: Vec<_> = places.iter().filter(|place| place.is_owned()).collect();
            owned.sort_by_key(|place| place.0);
            assert!(owned.windows(2).all(|pair| pair[0] != pair[1]), "{owned:?}");
            assert!(places.iter().any(|place| !place.is_owned()), "there are too few for all");
        }
    }

    /// What a thread counts in a destructor that runs after its place was returned may not go where
    /// another thread counts.
    #[test]
    fn a_thread_that_ends_counts_in_a_shared_place_once_it_has_returned_its_own() {
        static LAST: Mutex<Vec<ShardId>> = Mutex::new(Vec::new());
        struct Ending;
        impl Drop for Ending {
            fn drop(&mut self) {
                lock(&LAST).push(ShardId::here());
            }
        }
        thread_local! {
            static FIRST: Ending = const { Ending };
            static SECOND: Ending = const { Ending };
        }
        let run = || {
            FIRST.with(|_| ());
            let place = ShardId::here();
            SECOND.with(|_| ());
            place
        };
        // Other tests may use all places that are owned at this moment.
        let mut places = std::iter::repeat_with(|| {
            lock(&LAST).clear();
            std::thread::spawn(run).join().expect("no panic")
        });
        let place = places.by_ref().take(1000).find(|place| place.is_owned()).expect("one is free");
        let ends = lock(&LAST).clone();
        // One destructor ran before the place was returned, the other one after it.
        assert_eq!(ends.iter().filter(|end| **end == place).count(), 1, "{ends:?}");
        assert_eq!(ends.iter().filter(|end| !end.is_owned()).count(), 1, "{ends:?}");
    }

    #[test]
    fn no_count_is_lost_whoever_counts() {
        const EACH: u64 = 20_000;
        let tallies: [Shard; STRIPES] = std::array::from_fn(|_| Shard::default());
        let threads = 2 * STRIPES as u64;
        std::thread::scope(|scope| {
            for _ in 0..threads {
                scope.spawn(|| {
                    let tally = Tally::here(&tallies);
                    for at in 0..EACH {
                        tally.admit(ByteSize::mib(1), ByteSize::new(at % 2));
                        tally.rejected(RejectReason::Full, Some((Budget::Host, ByteSize::mib(8))));
                        tally.grow(ByteSize::new(3));
                        tally.rejected(RejectReason::TooLarge, None);
                        tally.finish();
                    }
                });
            }
        });
        let (mut counts, mut host) = (AdmissionStats::default(), BudgetCounts::none());
        let mut device = BudgetCounts::none();
        for tally in &tallies {
            counts.add_ended(tally);
            counts.add(tally);
            host.add(tally, Budget::Host);
            device.add(tally, Budget::Device);
        }
        let all = EACH * threads;
        assert_eq!((counts.admitted_total, counts.finished_total, counts.held()), (all, all, 0));
        assert_eq!(counts.rejected, [all, all, 0, 0, 0, 0, 0, 0, 0, 0]);
        assert_eq!(host.beside, 3 * all);
        let class = |bytes| host.classes[class_of(bytes)];
        assert_eq!(class(ByteSize::mib(1)).admitted_bytes_total, all << 20);
        assert_eq!(class(ByteSize::mib(8)).rejected_bytes_total, all << 23);
        assert_eq!(device.classes[0].admitted_total, all / 2, "no bytes are of no class there");
    }
}

#[cfg(test)]
mod size_class_tests {
    use super::*;

    #[test]
    fn a_class_holds_what_is_over_half_of_its_bound_and_no_more_than_it() {
        for (at, name) in NAMES.into_iter().enumerate() {
            let bound = class_bound(at);
            assert_eq!(class_of(bound), at);
            if bound == ByteSize::MAX {
                assert_eq!((at, name), (ClassStats::COUNT - 1, "larger"));
                continue;
            }
            assert_eq!(name, bound.exact(), "the name says the bound");
            assert_eq!(class_of(bound.saturating_add(ByteSize::new(1))), at + 1);
            if at > 0 {
                assert_eq!(class_of(ByteSize::new(bound.get() / 2)), at - 1);
            }
        }
        assert_eq!(class_of(ByteSize::ZERO), 0);
        assert_eq!(class_of(ByteSize::new(1)), 0);
    }
}
