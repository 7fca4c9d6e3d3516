//! The cost of admitting a request and ending it, alone and with another thread; for comparison a
//! semaphore's permits by the byte, two atomic additions, and a look at a file of the kernel.
//!
//! Invariant: every turn books and gives back, so that the account is as before.

use std::hint::black_box;
use std::sync::Barrier;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use lowtide::{BoxError, ByteSize};
use lowtide_admission::{Admission, Budget, Cost, Signals};
use lowtide_heap::thread_totals;
use tokio::sync::Semaphore;

use crate::common::figures::Figures;

const TURNS: u32 = 1_000_000;
const COST: ByteSize = ByteSize::kib(64);

pub(crate) fn measure(rounds: usize, figures: &mut Figures) -> Result<(), BoxError> {
    let open = Admission::with_limit(ByteSize::gib(64));
    let full = Admission::with_limit(ByteSize::gib(1));
    let _most = full.try_admit(Cost::host(ByteSize::gib(1)))?;
    let admit = || drop(black_box(open.try_admit(black_box(Cost::host(COST)))));
    let reject = || drop(black_box(full.try_admit(black_box(Cost::host(COST)))));
    let account = AtomicU64::new(0);
    let atomics = || two_atomics(&account);
    let semaphore = Semaphore::new(1 << 30);
    let permits = || drop(black_box(semaphore.try_acquire_many(black_box(65_536))));
    let signals = Signals::open();
    let read = || {
        black_box(signals.sample());
    };
    for _ in 0..rounds {
        let (one, two) = (alone(TURNS, admit), beside(TURNS, &admit));
        let floors = (alone(TURNS, atomics), beside(TURNS, &atomics));
        figures.add("admission.one_threads_ns", one, "ns");
        figures.add("admission.two_threads_ns", two, "ns");
        figures.add("admission.rejected_ns", alone(TURNS, reject), "ns");
        figures.add("admission.atomics_one_ns", floors.0, "ns");
        figures.add("admission.atomics_two_ns", floors.1, "ns");
        figures.add("admission.one_over_atomics", one / floors.0, "ratio");
        figures.add("admission.two_over_atomics", two / floors.1, "ratio");
        figures.add("admission.semaphore_one_ns", alone(TURNS, permits), "ns");
        figures.add("admission.semaphore_two_ns", beside(TURNS, &permits), "ns");
        figures.add("admission.kept_files_ns", alone(TURNS / 1000, read), "ns");
    }
    let before = thread_totals()?;
    for _ in 0..1000 {
        admit();
        reject();
    }
    let bytes = thread_totals()?.0 - before.0;
    figures.add("admission.allocated_bytes", f64::from(u32::try_from(bytes)?), "bytes");
    let left = open.ledger(Budget::Host).reserved();
    if left.is_zero() { Ok(()) } else { Err(format!("{left} are booked still").into()) }
}

/// What any account costs at least.
fn two_atomics(account: &AtomicU64) {
    account.fetch_add(black_box(1), Ordering::Relaxed);
    account.fetch_sub(black_box(1), Ordering::Relaxed);
}

/// Nanoseconds of a turn.
pub(crate) fn alone(turns: u32, turn: impl Fn()) -> f64 {
    let start = Instant::now();
    for _ in 0..turns {
        turn();
    }
    start.elapsed().as_secs_f64() * 1e9 / f64::from(turns)
}

/// Nanoseconds of a turn of each of two threads.
fn beside(turns: u32, turn: &(impl Fn() + Sync)) -> f64 {
    let ready = Barrier::new(2);
    let run = || {
        ready.wait();
        alone(turns, turn)
    };
    std::thread::scope(|scope| {
        let other = scope.spawn(run);
        let mine = run();
        other.join().map_or(f64::NAN, |theirs| f64::midpoint(mine, theirs))
    })
}
