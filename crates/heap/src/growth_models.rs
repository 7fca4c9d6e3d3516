//! Models of `growth`, by loom: every order in which its threads may read and write.

use std::mem;

use loom::sync::atomic::Ordering::Relaxed;
use loom::sync::atomic::{AtomicI64, AtomicU64};
use loom::sync::{Arc, Mutex, atomic};
use loom::thread;

#[path = "growth.rs"]
#[expect(clippy::duplicate_mod, reason = "the same source, with loom's atomics")]
mod growth;

use growth::{Growth, OUTGROWN, Progress};

/// Runs a model with up to so many preemptions as `LOOM_MAX_PREEMPTIONS`, or two.
fn model(run: impl Fn() + Sync + Send + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound.get_or_insert(2);
    builder.check(run);
}

/// The growth after which a sample is due.
const STEP: u64 = 4;

/// Growth and the bell, as checkpoints and the control loop use them.
struct Exchange {
    growth: Growth,
    bell: Mutex<bool>,
}

impl Exchange {
    /// A sample is taken: one was due.
    fn new(sample_at: u64) -> Arc<Self> {
        let [counted, sample_at, short_at, anonymous_max] =
            [0, sample_at, u64::MAX, u64::MAX].map(AtomicU64::new);
        let growth = Growth { counted, sample_at, short_at, anonymous_max };
        Arc::new(Self { growth, bell: Mutex::new(false) })
    }

    /// As `Bell` does. Returns what was set before.
    fn set_rung(&self, is_rung: bool) -> bool {
        mem::replace(&mut *self.bell.lock().expect("no panic"), is_rung)
    }

    fn ring(&self) -> bool {
        let rings = self.growth.takes_ring();
        if rings {
            self.set_rung(true);
        }
        rings
    }

    /// Returns `true` if it rings.
    fn count(&self, more: u64) -> bool {
        let [is_due, _] = self.growth.count(more, 0);
        is_due && self.ring()
    }

    /// Returns the count at which the next sample is due.
    fn sample(&self) -> u64 {
        self.set_rung(false);
        let due = self.growth.counted.load(Relaxed) + STEP;
        if self.growth.publish(due, u64::MAX, u64::MAX) {
            self.ring();
        }
        due
    }
}

#[test]
fn a_sample_that_is_due_is_rung_for_or_a_newer_one_is_published() {
    for sample_at in [STEP, u64::MAX] {
        model(move || {
            let exchange = Exchange::new(sample_at);
            let threads = [STEP, STEP + 1].map(|more| {
                let exchange = Arc::clone(&exchange);
                thread::spawn(move || exchange.count(more))
            });
            let due = exchange.sample();
            let rings = threads.map(|thread| thread.join().expect("no panic"));
            let counted = exchange.growth.counted.load(Relaxed);
            let is_rung = exchange.set_rung(true);
            assert!(counted < due || is_rung, "{counted} of {due}");
            assert!(sample_at == STEP || !rings.iter().all(|rings| *rings), "twice for a sample");
        });
    }
}

#[test]
fn a_thread_that_reads_the_kernels_figure_keeps_what_a_newer_sample_says() {
    model(|| {
        let exchange = Exchange::new(u64::MAX);
        let [old, new, anonymous] = [100, 30, 20];
        exchange.growth.publish(u64::MAX, 1, old);
        let other = Arc::clone(&exchange);
        let thread = thread::spawn(move || {
            let [_, seems_short] = other.growth.count(1, 0);
            seems_short && other.growth.is_short(0, || Some(anonymous))
        });
        exchange.growth.publish(u64::MAX, new - anonymous, new);
        assert!(!thread.join().expect("no panic"));
        let short_at = exchange.growth.short_at.load(Relaxed);
        assert!(short_at <= 1 + new - anonymous, "{short_at}");
    });
}

/// The net bytes of a thread, which jemalloc writes.
struct Thread {
    progress: Progress,
    net: AtomicI64,
}

impl Thread {
    fn new() -> Arc<Self> {
        Arc::new(Self { progress: Progress::default(), net: AtomicI64::new(0) })
    }

    fn net(&self) -> i64 {
        self.net.load(Relaxed)
    }

    fn allocate(&self, bytes: i64) {
        self.net.store(self.net() + bytes, Relaxed);
    }

    fn taken(&self) -> [u64; 2] {
        self.progress.taken(|| self.net())
    }

    /// Runs the work while another thread reads once, and returns what that finds.
    fn read_beside(thread: &Arc<Self>, work: fn(&Self)) -> [u64; 2] {
        let own = Arc::clone(thread);
        let writer = thread::spawn(move || work(&own));
        let found = thread.taken();
        writer.join().expect("no panic");
        found
    }
}

#[test]
fn what_work_has_taken_is_read_as_of_one_instant() {
    model(|| {
        let thread = Thread::new();
        let found = Thread::read_beside(&thread, |thread| {
            thread.allocate(50); // nobody's
            thread.progress.begin(10, 0, thread.net());
            thread.allocate(12);
            thread.progress.begin(0, 0, thread.net());
        });
        assert!([[0, 0], [10, 0]].contains(&found), "{found:?}");
        assert_eq!((thread.taken(), thread.progress.most.load(Relaxed)), ([0, 0], 0));
    });
}

#[test]
fn what_work_has_taken_beyond_its_claim_is_read_as_of_one_instant() {
    model(|| {
        let thread = Thread::new();
        thread.allocate(12);
        let found = Thread::read_beside(&thread, |thread| {
            // As `outgrow`, at a checkpoint within work.
            thread.progress.begin(10, 0, 0);
            thread.progress.outgrow();
            thread.allocate(3);
            thread.progress.begin(0, 0, thread.net());
        });
        assert!([[0, 0], [10, 0], [10, 2], [10, 5]].contains(&found), "{found:?}");
        assert_eq!(thread.taken(), [0, 0]);
    });
}

#[test]
fn what_lies_on_disk_is_never_read_as_taken() {
    model(|| {
        let thread = Thread::new();
        thread.progress.begin(10, OUTGROWN, 0);
        thread.allocate(12);
        let found = Thread::read_beside(&thread, |thread| {
            thread.progress.spill(12);
            thread.allocate(1000);
            thread.progress.moved_to_disk(4);
            thread.progress.begin(0, 0, thread.net());
        });
        assert!([[10, 2], [8, 0], [0, 0]].contains(&found), "{found:?}");
        assert_eq!(thread.taken(), [0, 0]);
    });
}
