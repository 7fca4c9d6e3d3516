//! DataFusion's sort spills when the ledger is short, and completes.

#[path = "../examples/sort/run.rs"]
mod run;

use std::fmt;
use std::future::Future;
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use datafusion_common::{DataFusionError, Result};
use datafusion_execution::memory_pool::{MemoryConsumer, MemoryPool, MemoryReservation};
use lowtide_admission::clock::{Clock as _, SystemClock};
use lowtide_admission::{Admission, Budget, ByteSize, Cost, Level, Permit, Resources};
use lowtide_datafusion::{AdmissionMemoryPool, DenyReason};
use run::{BATCH_BYTES, Sorted};

/// 16 MiB, of which a sort holds about twice as much.
const BATCHES: usize = (16 << 20) / BATCH_BYTES;
/// Enough for the sort.
const LARGE: ByteSize = ByteSize::mib(64);
/// What a sort needs to make progress: 4 MiB for merging, and some batches.
const MIN: ByteSize = ByteSize::mib(12);
const PATIENCE: Duration = Duration::from_secs(120);
/// The batch before which the tests take memory away.
const HALF: usize = BATCHES / 2;

fn pool(admission: &Admission) -> Arc<AdmissionMemoryPool> {
    Arc::new(AdmissionMemoryPool::new(admission.clone()).with_min(MIN))
}

fn block_on<T>(future: impl Future<Output = T>) -> T {
    tokio::runtime::Builder::new_current_thread().build().expect("a runtime").block_on(future)
}

/// Sorts, and checks that all is in order and returned.
fn sort(
    admission: &Admission,
    pool: &Arc<AdmissionMemoryPool>,
    between: impl Fn(usize) + Send + Sync + 'static,
) -> Sorted {
    let before = admission.ledger(Budget::Host).reserved();
    let sorted = block_on(run::sort(pool.clone(), BATCHES, between)).expect("it completes");
    assert!(sorted.is_sorted && sorted.is_complete, "{sorted:?}");
    assert_eq!(sorted.bytes, 16 << 20);
    let stats = pool.stats();
    assert_eq!((stats.used, stats.reserved, stats.consumers), (ByteSize::ZERO, ByteSize::ZERO, 0));
    assert!(admission.ledger(Budget::Host).reserved() >= before);
    sorted
}

/// Runs `tighten` when half of the rows have been read, and checks that the sort spills from then
/// on, and did not before. What `tighten` returns is kept until the end.
fn spills_once<T: Send + 'static>(
    admission: &Admission,
    pool: &Arc<AdmissionMemoryPool>,
    tighten: impl Fn() -> T + Send + Sync + 'static,
) -> Sorted {
    let (watched, kept) = (Arc::clone(pool), Mutex::new(Vec::new()));
    let sorted = sort(admission, pool, move |batch| {
        if batch == HALF {
            let stats = watched.stats();
            assert_eq!(stats.denied_total, 0, "{stats:?}");
            assert!(stats.used > MIN, "{stats:?}");
            kept.lock().expect("one thread").push(tighten());
        }
    });
    assert!(sorted.spills > 0, "{sorted:?}");
    assert!(sorted.spilled_bytes > 0, "{sorted:?}");
    assert!(pool.stats().denied_total > 0);
    sorted
}

#[test]
fn a_sort_that_fits_the_ledger_does_not_spill() {
    let admission = Admission::with_limit(LARGE);
    let pool = pool(&admission);
    let sorted = sort(&admission, &pool, |_| ());
    assert_eq!((sorted.spills, sorted.spilled_bytes, pool.stats().denied_total), (0, 0, 0));
    assert!(pool.stats().reserved_peak > ByteSize::of(sorted.bytes), "{:?}", pool.stats());
    assert_eq!(admission.ledger(Budget::Host).reserved(), ByteSize::ZERO);
    assert_eq!(admission.stats().held(), 0, "the permit ends with the query");
}

#[test]
fn a_sort_larger_than_the_ledger_spills_and_completes() {
    let admission = Admission::with_limit(MIN);
    let pool = pool(&admission);
    let sorted = sort(&admission, &pool, |_| ());
    assert!(sorted.spills > 0 && sorted.spilled_bytes >= 8 << 20, "{sorted:?}");
    let stats = pool.stats();
    assert!(stats.reserved_peak <= MIN, "never beyond the ledger: {stats:?}");
    let rejected: u64 = admission.stats().rejected.iter().sum();
    assert_eq!(rejected, 0, "a sort that spills is no rejected request");
}

#[test]
fn a_request_admitted_during_a_sort_makes_it_spill() {
    let admission = Admission::with_limit(LARGE);
    let (pool, door) = (pool(&admission), admission.clone());
    spills_once(&admission, &pool, move || {
        let rest = ByteSize::mib(40);
        let permit = door.try_admit(Cost::host(rest)).expect("the sort leaves that much");
        assert_eq!(permit.cost().host, rest);
        permit
    });
    let denied = pool.stats().last_denied.expect("denied");
    assert!(denied.consumer.starts_with("ExternalSorter"), "{denied}");
    assert!(matches!(denied.reason, DenyReason::Rejected(_)), "{denied}");
    assert!(pool.stats().reserved_peak <= LARGE, "{:?}", pool.stats());
}

/// A pool whose released bytes are taken by requests before the query can reserve them again.
#[derive(Debug)]
struct Contended {
    pool: Arc<AdmissionMemoryPool>,
    door: Admission,
    permits: Mutex<Vec<Permit>>,
}

impl Contended {
    fn take_all(&self) {
        let step = Cost::host(ByteSize::kib(64));
        let permits = std::iter::from_fn(|| self.door.try_admit(step).ok());
        self.permits.lock().expect("one thread").extend(permits);
    }
}

impl fmt::Display for Contended {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "contended({})", self.pool)
    }
}

impl MemoryPool for Contended {
    fn name(&self) -> &str {
        "contended"
    }

    fn register(&self, consumer: &MemoryConsumer) {
        self.pool.register(consumer);
    }

    fn unregister(&self, consumer: &MemoryConsumer) {
        self.pool.unregister(consumer);
    }

    fn grow(&self, reservation: &MemoryReservation, additional: usize) {
        self.pool.grow(reservation, additional);
    }

    fn shrink(&self, reservation: &MemoryReservation, shrink: usize) {
        self.pool.shrink(reservation, shrink);
        self.take_all();
    }

    fn try_grow(&self, reservation: &MemoryReservation, additional: usize) -> Result<()> {
        self.pool.try_grow(reservation, additional)
    }

    fn reserved(&self) -> usize {
        self.pool.reserved()
    }
}

/// Without a minimum, a sort that had spilled failed: it could not hold one batch any more.
#[test]
fn a_sort_completes_although_requests_take_all_that_it_releases() {
    let sort_with = |min| {
        let admission = Admission::with_limit(MIN);
        let pool = Arc::new(AdmissionMemoryPool::new(admission.clone()).with_min(min));
        let permits = Mutex::default();
        let contended = Arc::new(Contended { pool: pool.clone(), door: admission, permits });
        (pool, block_on(run::sort(contended, BATCHES, |_| ())))
    };
    let (pool, sorted) = sort_with(MIN);
    let sorted = sorted.expect("it completes");
    assert!(sorted.is_sorted && sorted.is_complete && sorted.spills > 1, "{sorted:?}");
    let stats = pool.stats();
    assert!(stats.reserved_peak <= MIN && stats.overdraft.is_zero(), "{stats:?}");

    let (pool, failed) = sort_with(ByteSize::ZERO);
    let failed = failed.expect_err("all is taken");
    assert!(matches!(failed.find_root(), DataFusionError::ResourcesExhausted(_)), "{failed}");
    let stats = pool.stats();
    assert_eq!((stats.used, stats.reserved, stats.consumers), (ByteSize::ZERO, ByteSize::ZERO, 0));
}

#[test]
fn level_high_makes_a_sort_spill_although_it_fits() {
    let admission = Admission::with_limit(LARGE);
    let (pool, level) = (pool(&admission), admission.clone());
    spills_once(&admission, &pool, move || level.set_level(Level::High));
    let denied = pool.stats().last_denied.expect("denied");
    let text = denied.to_string();
    assert!(text.contains("memory pressure is high"), "{text}");
}

#[test]
fn a_request_that_waits_makes_a_sort_spill_and_is_admitted() {
    let admission = Admission::with_limit(LARGE);
    let (pool, door) = (pool(&admission), admission.clone());
    // It does not fit until the sort has spilled.
    let waits = Mutex::new(Box::pin(admission.reserve(Cost::host(ByteSize::mib(50)))));
    let (waits, admitted) = (Arc::new(waits), Arc::new(Mutex::new(None)));
    let (polled, permit) = (Arc::clone(&waits), Arc::clone(&admitted));
    let sorted = sort(&admission, &pool, move |batch| {
        if batch < HALF || permit.lock().expect("one thread").is_some() {
            return;
        }
        let mut cx = Context::from_waker(Waker::noop());
        let polled = polled.lock().expect("one thread").as_mut().poll(&mut cx);
        if batch == HALF {
            assert!(polled.is_pending(), "{} reserved", door.ledger(Budget::Host).reserved());
        }
        if let Poll::Ready(answer) = polled {
            *permit.lock().expect("one thread") = Some(answer.expect("it fits by now"));
        }
    });
    assert!(sorted.spills > 0, "{sorted:?}");
    let permit = admitted.lock().expect("one thread").take().expect("admitted during the sort");
    assert_eq!(permit.cost().host, ByteSize::mib(50));
}

#[test]
fn a_request_that_does_not_fit_asks_the_pool_and_the_sort_spills() {
    let admission = Admission::with_limit(LARGE);
    let (pool, resources) = (pool(&admission), Resources::new());
    let clock = Arc::new(SystemClock::new());
    let reclaimer = resources.add_reclaimer(pool.reclaimable("queries"), &admission, clock.clone());
    let reclaimer = Arc::new(reclaimer.expect("a new name"));
    resources.evict_for(&admission, clock.clone(), || ());
    let now = clock;
    let (door, asked, watched) = (admission.clone(), Arc::clone(&reclaimer), Arc::clone(&pool));
    spills_once(&admission, &pool, move || {
        let rejected = door.try_admit(Cost::host(ByteSize::mib(50)));
        assert!(rejected.is_err());
        // On a thread of its own.
        let deadline = now.now() + PATIENCE;
        while asked.stats().calls_total == 0 {
            assert!(now.now() < deadline, "the pool was not asked");
            std::thread::yield_now();
        }
        assert!(!watched.stats().wanted.is_zero());
    });
    let stats = pool.stats();
    assert_eq!((reclaimer.stats().calls_total >= 1, stats.wanted), (true, ByteSize::ZERO));
    assert!(
        matches!(stats.last_denied.expect("denied").reason, DenyReason::Reclaimed { .. }),
        "the ledger had room"
    );
}
