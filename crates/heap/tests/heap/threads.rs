//! Caches of threads that cooperate: real threads that park, and what is left in their caches.

use std::panic::resume_unwind;
use std::sync::mpsc::{self, Receiver, Sender};
use std::thread;
use std::time::Duration;

use lowtide_heap::ByteSize;
use lowtide_heap::clock::{Bell, Clock, SystemClock};
use lowtide_heap::decay::DecayTime;
use lowtide_heap::{HeapProbe, HeapSettings};
use test_fork::test;

const THREADS: usize = 8;
const PATIENCE: Duration = Duration::from_secs(120);
/// The least that one thread leaves in its cache by `fill`, and the most once it is empty.
const FULL: ByteSize = ByteSize::kib(200);
const EMPTY: ByteSize = ByteSize::kib(32);

/// Nothing happens by itself; the test has a thread of its own.
fn alone(test: impl FnOnce() + Send) {
    let still = HeapSettings {
        dirty_decay: DecayTime::Never,
        muzzy_decay: DecayTime::AtOnce,
        background_threads: false,
        max_background_threads: None,
    };
    lowtide_heap::apply(&still).expect("jemalloc takes settings");
    let ended = thread::scope(|scope| scope.spawn(test).join());
    if let Err(panic) = ended {
        resume_unwind(panic);
    }
}

/// Fills the calling thread's cache, by about 600 KiB that are allocated and freed.
fn fill() {
    for size in [1, 2, 4, 8, 16, 28].map(|kib| kib << 10) {
        let blocks: Vec<_> = (0..10).map(|_| vec![7_u8; size]).collect();
        drop(std::hint::black_box(blocks));
    }
}

fn cached() -> ByteSize {
    HeapProbe::new().expect("jemalloc tells").snapshot().expect("jemalloc tells").thread_caches
}

fn all(bytes: ByteSize) -> ByteSize {
    ByteSize::new(bytes.get() * THREADS as u64)
}

fn until(what: &str, mut condition: impl FnMut() -> bool) {
    let (clock, bell) = (SystemClock::new(), Bell::new());
    let deadline = clock.now() + PATIENCE;
    while !condition() {
        assert!(clock.now() < deadline, "never: {what}; {} are cached", cached());
        clock.wait_until(&bell, clock.now() + Duration::from_millis(1));
    }
}

type Work = fn();

/// Threads that wait for work; each answers when it has done a piece.
struct Crew {
    work: Vec<Sender<Work>>,
    done: Receiver<()>,
    threads: Vec<thread::JoinHandle<()>>,
}

impl Crew {
    fn new() -> Self {
        let (tell, done) = mpsc::channel();
        let start = |_| {
            let (send, receive) = mpsc::channel::<Work>();
            let tell = tell.clone();
            let thread = thread::spawn(move || {
                while let Ok(work) = receive.recv() {
                    work();
                    tell.send(()).expect("the test listens");
                }
            });
            (send, thread)
        };
        let (work, threads) = (0..THREADS).map(start).unzip();
        Self { work, done, threads }
    }

    fn all_do(&self, work: Work) {
        self.work.iter().for_each(|thread| thread.send(work).expect("it runs"));
        for _ in &self.work {
            self.done.recv_timeout(PATIENCE).expect("it answers");
        }
    }

    fn end(self) {
        drop(self.work);
        self.threads.into_iter().for_each(|thread| thread.join().expect("no panic"));
    }
}

#[test]
fn a_thread_that_parks_after_a_purge_gives_its_cache_up_and_one_that_was_not_asked_keeps_it() {
    alone(|| {
        let crew = Crew::new();
        let base = cached();
        crew.all_do(fill);
        let full = cached();
        assert!(full.saturating_sub(base) >= all(FULL), "{base} {full}");
        // Nobody has asked since the threads were made, but for what tests before this one did.
        crew.all_do(|| {
            assert!(!lowtide_heap::flush_tcache_if_requested().unwrap_or(true) || fill_again())
        });
        let full = cached();
        crew.all_do(|| assert_eq!(lowtide_heap::flush_tcache_if_requested(), Ok(false)));
        crew.all_do(lowtide_heap::on_thread_park);
        assert!(cached().saturating_add(EMPTY) >= full, "nobody asked");

        lowtide_heap::purge_now().expect("jemalloc purges");
        assert!(cached().saturating_sub(base) >= all(FULL), "they have not parked yet");
        crew.all_do(lowtide_heap::on_thread_park);
        until("the caches are empty", || cached().saturating_sub(base) <= all(EMPTY));
        crew.all_do(|| assert_eq!(lowtide_heap::flush_tcache_if_requested(), Ok(false)));
        crew.end();
    });
}

fn fill_again() -> bool {
    fill();
    true
}

#[test]
fn workers_of_tokio_that_wake_after_a_purge_leave_no_full_cache_behind() {
    alone(|| {
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(2)
            .on_thread_park(lowtide_heap::on_thread_park)
            .build()
            .expect("a runtime");
        let base = cached();
        let task = || async { fill() };
        runtime.block_on(async { tokio::spawn(task()).await }).expect("no panic");
        lowtide_heap::purge_now().expect("jemalloc purges");
        // One that is parked runs nothing: a task that fills a cache and ends wakes it.
        until("no worker keeps a cache", || {
            runtime.block_on(async { tokio::spawn(task()).await }).expect("no panic");
            lowtide_heap::request_tcache_flush();
            runtime.block_on(async { tokio::spawn(async {}).await }).expect("no panic");
            cached().saturating_sub(base) <= EMPTY
        });
        drop(runtime);
    });
}
