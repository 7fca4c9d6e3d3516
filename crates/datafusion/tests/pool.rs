//! The pool reserves in the ledger what its consumers hold, rounded up, and denies on its terms.

use std::future::Future;
use std::pin::pin;
use std::sync::{Arc, Barrier};
use std::task::{Context, Waker};
use std::thread;

use datafusion_common::DataFusionError;
use datafusion_execution::memory_pool::{
    MemoryConsumer, MemoryLimit, MemoryPool, MemoryReservation,
};
use lowtide_admission::{Admission, Budget, ByteSize, Cost, Level, RejectReason};
use lowtide_datafusion::{AdmissionMemoryPool, DenyReason};

const MIB: usize = 1 << 20;
const LEVELS: [Level; 4] = [Level::None, Level::Elevated, Level::High, Level::Critical];

struct Rig {
    admission: Admission,
    pool: Arc<AdmissionMemoryPool>,
    shared: Arc<dyn MemoryPool>,
}

impl Rig {
    fn new(limit: u64, change: impl FnOnce(AdmissionMemoryPool) -> AdmissionMemoryPool) -> Self {
        let admission = Admission::with_limit(ByteSize::mib(limit));
        let pool = Arc::new(change(AdmissionMemoryPool::new(admission.clone())));
        let shared = Arc::clone(&pool) as Arc<dyn MemoryPool>;
        Self { admission, pool, shared }
    }

    /// A ledger of 100 MiB, and a pool without a minimum.
    fn without_min() -> Self {
        Self::new(100, |pool| pool.with_min(ByteSize::ZERO))
    }

    fn spiller(&self, name: &str) -> MemoryReservation {
        MemoryConsumer::new(name).with_can_spill(true).register(&self.shared)
    }

    fn other(&self, name: &str) -> MemoryReservation {
        MemoryConsumer::new(name).register(&self.shared)
    }

    fn ledger(&self) -> ByteSize {
        self.admission.ledger(Budget::Host).reserved()
    }

    fn last_reason(&self) -> DenyReason {
        self.pool.stats().last_denied.expect("denied").reason
    }

    fn last_rejection(&self) -> RejectReason {
        match self.last_reason() {
            DenyReason::Rejected(rejected) => rejected.reason(),
            other => panic!("{other}: expected a rejection"),
        }
    }
}

fn rounded(bytes: usize) -> ByteSize {
    ByteSize::of(bytes.next_multiple_of(MIB))
}

/// A `SplitMix64` generator.
struct Random(u64);

impl Random {
    fn below(&mut self, end: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        usize::try_from((mixed ^ (mixed >> 31)) % end as u64).expect("less than a usize")
    }
}

#[test]
fn the_ledger_holds_the_sum_rounded_up_and_nothing_at_the_end() {
    let rig = Rig::without_min();
    let (sort, join) = (rig.spiller("sort"), rig.other("join"));
    assert_eq!(rig.ledger(), ByteSize::ZERO);
    sort.try_grow(1).expect("fits");
    assert_eq!((rig.ledger(), rig.shared.reserved()), (ByteSize::mib(1), 1));
    join.try_grow(MIB - 1).expect("the rest of the step");
    assert_eq!(rig.ledger(), ByteSize::mib(1));
    join.grow(1);
    assert_eq!(rig.ledger(), ByteSize::mib(2));
    let part = join.split(10);
    join.shrink(1);
    assert_eq!(rig.ledger(), ByteSize::mib(1));
    drop(join);
    assert_eq!((rig.shared.reserved(), rig.pool.stats().consumers), (11, 2), "its part is left");
    drop(part);
    assert_eq!((rig.shared.reserved(), rig.pool.stats().consumers), (1, 1));
    sort.free();
    assert_eq!((rig.ledger(), rig.admission.stats().held()), (ByteSize::ZERO, 0));
    drop((rig.pool, rig.shared, sort));
    assert_eq!(rig.admission.ledger(Budget::Host).reserved(), ByteSize::ZERO);
}

/// One act of a query on one of its reservations.
fn act(random: &mut Random, rig: &Rig, held: &mut Vec<MemoryReservation>) {
    let bytes = [10_000, MIB, 9 * MIB][random.below(3)];
    let size = random.below(bytes);
    let at = random.below(held.len().max(1));
    match (random.below(8), held.get(at)) {
        (0, _) | (_, None) if held.len() < 12 => held.push(rig.spiller("sort")),
        (1, _) if held.len() < 12 => held.push(rig.other("join")),
        (2, Some(_)) => drop(held.swap_remove(at)),
        (3, Some(one)) => one.shrink(size.min(one.size())),
        (4, Some(one)) => one.grow(size / 8),
        (5, Some(one)) => {
            let part = one.split(size.min(one.size()));
            held.push(part);
        }
        (6, Some(one)) => drop(one.free()),
        (_, Some(one)) => drop(one.try_grow(size)),
        (_, None) => {}
    }
}

#[test]
fn the_ledger_holds_the_sum_rounded_up_after_every_act_of_a_random_schedule() {
    for seed in 0..40 {
        println!("seed {seed}");
        let mut random = Random(seed);
        let rig = Rig::new(60, |pool| {
            pool.with_min(ByteSize::mib(seed % 20)).with_limit(ByteSize::mib(40 + seed))
        });
        let (mut held, mut permits) = (Vec::new(), Vec::new());
        for _ in 0..2000 {
            match random.below(12) {
                0 => rig.admission.set_level(LEVELS[random.below(LEVELS.len())]),
                1 => permits.extend(rig.admission.try_admit(Cost::host(ByteSize::mib(7)))),
                2 => drop(permits.pop()),
                _ => act(&mut random, &rig, &mut held),
            }
            let sum: usize = held.iter().map(MemoryReservation::size).sum();
            let others = ByteSize::mib(7 * permits.len() as u64);
            let stats = rig.pool.stats();
            assert_eq!((rig.shared.reserved(), stats.reserved), (sum, rounded(sum)), "{stats:?}");
            assert_eq!(rig.ledger(), rounded(sum).saturating_add(others), "{stats:?}");
            assert!(stats.overdraft <= stats.reserved, "{stats:?}");
        }
        assert!(rig.pool.stats().denied_total > 0, "the schedule meets the limits");
        drop((held, permits));
        assert_eq!((rig.ledger(), rig.pool.stats().overdraft), (ByteSize::ZERO, ByteSize::ZERO));
    }
}

#[test]
fn the_ledger_holds_the_sum_rounded_up_after_each_round_of_many_threads() {
    const THREADS: usize = 8;
    let rig = Rig::new(100, |pool| pool.with_min(ByteSize::mib(8)));
    // The threads and this one, which looks between two rounds.
    let (begin, end) = (Barrier::new(THREADS + 1), Barrier::new(THREADS + 1));
    thread::scope(|scope| {
        for thread in 0..THREADS {
            let (rig, begin, end) = (&rig, &begin, &end);
            scope.spawn(move || {
                let (mut random, mut held) = (Random(thread as u64), Vec::new());
                for _ in 0..30 {
                    begin.wait();
                    for _ in 0..300 {
                        act(&mut random, rig, &mut held);
                    }
                    end.wait();
                }
            });
        }
        for round in 0..30 {
            begin.wait();
            end.wait();
            let used = rig.shared.reserved();
            assert_eq!(rig.ledger(), rounded(used), "round {round}: {:?}", rig.pool.stats());
        }
    });
    assert_eq!((rig.ledger(), rig.shared.reserved()), (ByteSize::ZERO, 0));
    assert_eq!((rig.pool.stats().consumers, rig.admission.stats().held()), (0, 0));
}

#[test]
fn growth_that_cannot_fail_is_reserved_and_keeps_others_out() {
    let rig = Rig::new(100, |pool| pool.with_limit(ByteSize::mib(50)).with_min(ByteSize::mib(1)));
    let sort = rig.spiller("sort");
    sort.grow(150 * MIB);
    assert_eq!(rig.ledger(), ByteSize::mib(150));
    assert_eq!(rig.pool.stats().overdraft, ByteSize::mib(150), "100 MiB had no room for all of it");
    assert!(rig.admission.try_admit(Cost::host(ByteSize::mib(1))).is_err());
    sort.try_grow(1).expect_err("beyond its limit");
    assert!(matches!(rig.last_reason(), DenyReason::Limit { .. }));
    sort.shrink(120 * MIB);
    assert_eq!(rig.pool.stats().overdraft, ByteSize::mib(30), "paid back first");
    drop(rig.admission.try_admit(Cost::host(ByteSize::mib(70))).expect("the rest"));
}

#[test]
fn a_consumer_that_can_spill_yields_to_level_high_and_others_do_not() {
    let rig = Rig::without_min();
    let (sort, join) = (rig.spiller("sort"), rig.other("join"));
    sort.try_grow(10 * MIB).expect("no pressure");
    rig.admission.set_level(Level::High);
    sort.try_grow(MIB).expect_err("high");
    assert_eq!(rig.last_rejection(), RejectReason::Pressure);
    join.try_grow(MIB).expect("its query would fail");
    rig.admission.set_level(Level::Critical);
    join.try_grow(MIB).expect("its end frees memory");
    rig.admission.set_level(Level::Elevated);
    sort.try_grow(MIB).expect("no pressure");
}

#[test]
fn a_consumer_that_can_spill_yields_to_a_request_that_waits() {
    let rig = Rig::without_min();
    let sort = rig.spiller("sort");
    sort.try_grow(60 * MIB).expect("fits");
    let mut waits = pin!(rig.admission.reserve(Cost::host(ByteSize::mib(50))));
    let mut cx = Context::from_waker(Waker::noop());
    assert!(waits.as_mut().poll(&mut cx).is_pending());
    sort.try_grow(MIB).expect_err("40 MiB are free, and are kept for the request");
    assert_eq!(rig.last_rejection(), RejectReason::Full);
    sort.shrink(30 * MIB);
    assert!(waits.as_mut().poll(&mut cx).is_ready(), "it was woken");
    waits.set(rig.admission.reserve(Cost::ZERO));
    sort.try_grow(MIB).expect("none waits");
}

/// Queries use more memory than their operators report.
#[test]
fn memory_that_the_pool_does_not_see_is_learned_and_makes_consumers_spill_earlier() {
    let admission = Admission::new();
    let pool = AdmissionMemoryPool::new(admission.clone()).with_min(ByteSize::ZERO);
    let shared: Arc<dyn MemoryPool> = Arc::new(pool);
    let sort = MemoryConsumer::new("sort").with_can_spill(true).register(&shared);
    let ceiling = ByteSize::mib(800);
    let sample = |physical| admission.ledger(Budget::Host).set_measured(physical, ceiling);
    sample(ByteSize::ZERO);
    sort.try_grow(100 * MIB).expect("of 400 MiB, with a factor of 2");
    // What the control loop does at each tick: the sort holds 300 MiB in truth.
    (0..100).for_each(|_| sample(ByteSize::mib(300)));
    let factor = admission.ledger(Budget::Host).correction_factor();
    assert!((3.0..3.3).contains(&factor), "{factor}");
    sort.try_grow(140 * MIB).expect("240 MiB, and 242 of 800 by a factor of 3.3");
    sort.try_grow(30 * MIB).expect_err("270 MiB, and 266 of 800 by a factor of 3");
}

#[test]
fn within_the_minimum_consumers_grow_beyond_the_allowance_and_no_further() {
    let rig = Rig::new(100, |pool| pool.with_min(ByteSize::mib(16)));
    let all = rig.admission.try_admit(Cost::host(ByteSize::mib(100))).expect("fits");
    let (first, second, merge) = (rig.spiller("first"), rig.spiller("second"), rig.other("merge"));
    merge.try_grow(4 * MIB).expect("of the minimum");
    for sort in [&first, &second] {
        sort.try_grow(6 * MIB).expect("half of the rest");
        sort.try_grow(1).expect_err("more than its share");
    }
    let denied = rig.pool.stats().last_denied.expect("denied");
    assert_eq!((denied.share, denied.held), (ByteSize::mib(6), ByteSize::mib(6)));
    merge.try_grow(1).expect_err("the minimum is used");
    let stats = rig.pool.stats();
    assert_eq!((stats.reserved, stats.overdraft), (ByteSize::mib(16), ByteSize::mib(16)));
    drop(first);
    second.try_grow(5 * MIB).expect("the rest is its own");
    assert_eq!(rig.pool.stats().overdraft, ByteSize::mib(15));
    drop(all);
    second.try_grow(50 * MIB).expect("the ledger has room");
}

#[test]
fn one_that_took_all_cannot_keep_out_a_newcomer() {
    let rig = Rig::new(100, |pool| pool.with_min(ByteSize::mib(16)));
    let (hog, newcomer) = (rig.spiller("hog"), rig.spiller("newcomer"));
    hog.try_grow(100 * MIB).expect("it fits");
    newcomer.try_grow(8 * MIB).expect("half of the minimum");
    hog.try_grow(1).expect_err("it spills");
    hog.free();
    newcomer.try_grow(50 * MIB).expect("there is room");
}

#[test]
fn an_error_names_consumer_bytes_and_what_was_available_and_is_bounded() {
    let rig = Rig::without_min();
    let _all = rig.admission.try_admit(Cost::host(ByteSize::mib(99))).expect("fits");
    let join = rig.other("HashJoinInput[3]");
    join.try_grow(1000).expect("the last step");
    let error = join.try_grow(5 * MIB).expect_err("full");
    assert!(matches!(error, DataFusionError::ResourcesExhausted(_)), "{error:?}");
    let text = error.to_string();
    let named = "cannot reserve 5.0 MiB for HashJoinInput[3], which holds 1000 B: cannot reserve \
                 5.0 MiB of host memory now: 100.0 MiB reserved, allowance 100.0 MiB";
    assert!(text.contains(named), "{text}");
    let long = rig.other(&"x".repeat(100_000));
    let text = long.try_grow(5 * MIB).expect_err("full").to_string();
    assert!(text.len() < 500, "{} bytes", text.len());
    let denied = rig.pool.stats().last_denied.expect("denied");
    assert_eq!((denied.asked, denied.can_spill), (ByteSize::mib(5), false));
    assert_eq!(rig.admission.stats().rejected.iter().sum::<u64>(), 0, "no request was rejected");
}

#[test]
fn a_denial_of_the_first_growth_leaves_no_permit() {
    let rig = Rig::without_min();
    let _all = rig.admission.try_admit(Cost::host(ByteSize::mib(100))).expect("fits");
    rig.spiller("sort").try_grow(1).expect_err("full");
    assert_eq!(rig.admission.stats().held(), 1);
}

#[test]
fn the_limit_is_that_of_the_ledger_or_its_own() {
    let finite = |pool: &Arc<AdmissionMemoryPool>| match pool.memory_limit() {
        MemoryLimit::Finite(bytes) => Some(bytes),
        _ => None,
    };
    assert_eq!(finite(&Rig::without_min().pool), Some(100 * MIB));
    let limited = Rig::new(100, |pool| pool.with_limit(ByteSize::mib(20)));
    assert_eq!(finite(&limited.pool), Some(20 * MIB));
    let boundless = AdmissionMemoryPool::new(Admission::new());
    assert!(matches!(boundless.memory_limit(), MemoryLimit::Infinite));
    let shown = "admission(used: 0 B, reserved: 0 B, min: 32.0 MiB, limit: 20.0 MiB)";
    assert_eq!(limited.pool.to_string(), shown);
}
