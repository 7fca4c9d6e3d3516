//! Accounts: the bytes that pieces of work hold.
#![cfg(target_os = "linux")]

use std::hint::black_box;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;

use lowtide_heap::{self as heap, Account, AccountMemory, ByteSize};

const MIB: usize = 1 << 20;

/// Records how its account ended.
#[derive(Default)]
struct Owner(Arc<Mutex<Vec<AccountMemory>>>);

impl Owner {
    fn ended(&mut self, memory: AccountMemory) {
        self.0.lock().expect("no panic").push(memory);
    }
}

/// An owner of another type.
struct Stranger;

fn account() -> Arc<Account<Owner>> {
    Arc::new(Account::new(Owner::default(), Owner::ended))
}

fn block(mib: usize) -> Vec<u8> {
    black_box(Vec::with_capacity(mib * MIB))
}

/// Whole MiB that are live, and at the peak.
fn mib(account: &Account<Owner>) -> [u64; 2] {
    let AccountMemory { live, peak, .. } = account.memory();
    [live, peak].map(|bytes| (bytes.get() + (1 << 19)) >> 20)
}

#[test]
fn bytes_count_for_the_innermost_account() {
    let (outer, inner) = (account(), account());
    let mut kept = Vec::new();
    outer.run(|| {
        kept.push(block(1));
        inner.run(|| kept.push(block(2)));
        heap::unmeasured(|| kept.push(block(4)));
        outer.run(|| kept.push(block(8)));
    });
    assert_eq!([mib(&outer), mib(&inner)], [[9, 9], [2, 2]]);
    inner.run(|| drop(kept.remove(1)));
    heap::unmeasured(|| kept.clear());
    assert_eq!([mib(&outer), mib(&inner)], [[9, 9], [0, 2]]);
}

/// The bug: what one long piece of work held was unknown until it ended.
#[test]
fn other_threads_see_what_work_in_progress_has_taken_of_its_amount() {
    let account = account();
    let seen = || {
        let look = || heap::in_progress()[0].get() >> 20;
        thread::spawn(look).join().expect("no panic")
    };
    let work = || {
        let mut kept = vec![block(2)];
        assert_eq!(seen(), 2);
        kept.push(block(3));
        assert_eq!(seen(), 5);
        kept.remove(0);
        assert_eq!(seen(), 3);
        account.adopt(ByteSize::ZERO);
        assert_eq!((seen(), mib(&account)), (0, [3, 5]), "it is charged");
        kept.push(block(16));
        assert_eq!(seen(), 4, "of 8 MiB 3 are charged, and a part of one that others took");
        kept
    };
    let on_another = thread::scope(|scope| {
        let kept = scope.spawn(|| account.run_within(ByteSize::mib(8), work));
        kept.join().expect("no panic")
    });
    assert_eq!((seen(), mib(&account)), (0, [19, 19]));
    drop(on_another);
}

#[test]
fn blocks_of_others_that_an_account_frees_lend_it_nothing() {
    let account = account();
    let foreign = block(64);
    account.run(|| drop(foreign));
    let kept = account.run(|| block(1));
    assert_eq!(mib(&account), [1, 1]);
    drop(kept);
}

#[test]
fn a_panic_ends_the_work_and_what_it_kept_counts() {
    let (outer, inner) = (account(), account());
    let mut kept = Vec::new();
    outer.run(|| {
        let panics = || {
            inner.run(|| {
                kept.push(block(2));
                resume_unwind(Box::new("bug"))
            })
        };
        let caught: Result<(), _> = catch_unwind(AssertUnwindSafe(panics));
        assert!(caught.is_err());
        assert!(Arc::ptr_eq(&Account::current().expect("the outer one"), &outer));
        kept.push(block(1));
    });
    assert!(Account::<Owner>::current().is_none());
    assert_eq!([mib(&outer)[0], mib(&inner)[0]], [1, 2]);
}

#[test]
fn the_current_account_is_found_by_the_type_of_its_owner_and_may_be_kept() {
    let account = account();
    assert!(Account::<Owner>::current().is_none());
    let kept = account.run(|| {
        assert!(Account::<Stranger>::current().is_none());
        heap::unmeasured(|| assert!(Account::<Owner>::current().is_none()));
        let elsewhere = || assert!(Account::<Owner>::current().is_none());
        thread::scope(|scope| scope.spawn(elsewhere).join()).expect("no panic");
        Account::<Owner>::current().expect("runs")
    });
    assert!(Arc::ptr_eq(&kept, &account));
    let ends = Arc::clone(&kept.owner().0);
    drop(account);
    assert!(ends.lock().expect("no panic").is_empty(), "a handle is left");
    let block = kept.run(|| block(3));
    drop(kept);
    let ends = ends.lock().expect("no panic");
    assert_eq!(ends.len(), 1);
    assert_eq!(ends[0].live.get() >> 20, 3, "what outlives it");
    drop(block);
}

#[test]
fn work_that_moves_between_threads_is_one_account() {
    let account = account();
    let elsewhere = || account.run(|| block(5));
    let kept = thread::scope(|scope| scope.spawn(elsewhere).join()).expect("no panic");
    assert_eq!(mib(&account), [5, 5]);
    let elsewhere = || account.run(|| drop(kept));
    thread::scope(|scope| scope.spawn(elsewhere).join()).expect("no panic");
    assert_eq!(mib(&account), [0, 5]);
}

#[test]
fn a_peak_within_one_piece_of_work_is_read() {
    let account = account();
    account.run(|| (0..20).for_each(|_| drop(block(1))));
    assert_eq!(mib(&account), [0, 1]);
    assert_eq!(account.memory().allocated.get() >> 20, 20);
    // Outside of accounts: the thread's own peak is much higher.
    drop(block(64));
    account.run(|| (0..20).for_each(|_| drop(block(2))));
    assert_eq!(mib(&account), [0, 2]);
}

#[test]
fn adopted_and_released_bytes_count_in_the_order_of_events() {
    let account = account();
    account.run(|| {
        let block = block(20);
        account.adopt(ByteSize::mib(5));
        account.release(ByteSize::mib(5));
        drop(block);
    });
    assert_eq!(mib(&account), [0, 25]);
    account.release(ByteSize::gib(1));
    account.adopt(ByteSize::mib(1));
    assert_eq!(mib(&account), [1, 25], "a release lends nothing either");
    account.adopt(ByteSize::MAX);
    assert_eq!(account.memory().live, ByteSize::MAX);
}

/// Any nesting, on several threads, against sums that the test keeps itself.
#[test]
fn random_nested_work_on_threads_adds_up() {
    const ACCOUNTS: usize = 4;
    let accounts: [_; ACCOUNTS] = std::array::from_fn(|_| account());
    let held: [_; ACCOUNTS] = std::array::from_fn(|_| AtomicUsize::new(0));

    /// Runs work for random accounts within each other. A block of a size class each.
    fn nest(
        state: &mut u64,
        depth: u32,
        all: &[Arc<Account<Owner>>],
        held: &[AtomicUsize],
        kept: &mut Vec<(usize, Vec<u8>)>,
    ) {
        *state ^= *state << 13;
        *state ^= *state >> 7;
        *state ^= *state << 17;
        let at = usize::try_from(*state % all.len() as u64).expect("small");
        let size = 1 << (6 + (*state >> 20) % 12);
        all[at].run(|| {
            // Room for the list first, on nobody's account.
            heap::unmeasured(|| kept.reserve(1));
            kept.push((at, black_box(Vec::with_capacity(size))));
            held[at].fetch_add(size, Ordering::Relaxed);
            if depth > 0 {
                nest(state, depth - 1, all, held, kept);
            }
            if *state & 1 == 0
                && let Some(found) = kept.iter().rposition(|(owner, _)| *owner == at)
            {
                let (_, block) = kept.swap_remove(found);
                held[at].fetch_sub(block.capacity(), Ordering::Relaxed);
            }
        });
    }

    let seeds = [1_u64, 2, 3];
    println!("seeds {seeds:?}");
    let kept: Vec<_> = thread::scope(|scope| {
        let threads = seeds.map(|seed| {
            let (accounts, held) = (&accounts, &held);
            scope.spawn(move || {
                let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15);
                let mut kept = Vec::new();
                (0..2_000).for_each(|_| nest(&mut state, 3, accounts, held, &mut kept));
                kept
            })
        });
        threads.map(|thread| thread.join().expect("no panic")).into_iter().flatten().collect()
    });
    for (account, held) in accounts.iter().zip(&held) {
        assert_eq!(account.memory().live, ByteSize::of(held.load(Ordering::Relaxed)));
    }
    drop(kept);
}
