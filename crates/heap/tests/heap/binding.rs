//! Threads bound to a few arenas, in processes that jemalloc gave 256 of them.
//!
//! The number of arenas is fixed before `main`: each test starts this program again with another
//! one.
#![expect(unsafe_code, reason = "jemalloc is asked directly, past what is tested")]

use std::sync::mpsc;
use std::thread;

use lowtide_heap::{bind_thread, bound_arenas};
use tikv_jemalloc_ctl::raw;

use crate::start::again;

const THREADS: usize = 64;
/// Says in a child which part it plays, and with that that it is one.
const PART: &str = "HOST_BINDING_PART";

/// Runs the other test of this name in a process where jemalloc starts with this configuration.
fn child(part: &str, conf: &str) {
    let output = again("binding::what_a_child_does")
        .env(PART, part)
        .env("_RJEM_MALLOC_CONF", conf)
        .env("MALLOC_CONF", conf)
        .output()
        .expect("starts");
    let text = String::from_utf8_lossy(&output.stdout);
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{text}{errors}");
    assert!(text.contains(&format!("done: {part}")), "it did nothing: {text}{errors}");
}

/// The arenas in which as many threads allocate at once, each after `start`; and in how many arenas
/// a thread's block of 100 KB lies then.
fn arenas_of_threads(start: impl Fn() -> u32 + Sync) -> (Vec<u32>, usize) {
    thread::scope(|scope| {
        let (tell, told) = mpsc::channel();
        let mut holds = Vec::new();
        let mut arenas = Vec::new();
        for _ in 0..THREADS {
            let (hold, wait) = mpsc::channel::<()>();
            let (tell, start) = (tell.clone(), &start);
            scope.spawn(move || {
                let bound = start();
                let block = std::hint::black_box(vec![7_u8; 100_000]);
                tell.send(bound).expect("the test listens");
                let _ = wait.recv();
                drop(block);
            });
            holds.push(hold);
            arenas.push(told.recv().expect("it starts"));
        }
        (arenas, filled())
    })
}

/// Returns the number of the first 256 arenas that have active pages for a block of that size.
fn filled() -> usize {
    // SAFETY: `epoch` is a `uint64_t`, and writing any number refreshes the statistics.
    unsafe { raw::write(b"epoch\0", 1_u64) }.expect("a refresh");
    let active = |arena: usize| {
        let name = format!("stats.arenas.{arena}.pactive\0");
        // SAFETY: a number of pages is a `size_t`.
        unsafe { raw::read::<usize>(name.as_bytes()) }.unwrap_or(0)
    };
    (0..256).filter(|&arena| active(arena) * 4096 >= 100_000).count()
}

fn distinct(mut arenas: Vec<u32>) -> usize {
    arenas.sort_unstable();
    arenas.dedup();
    arenas.len()
}

#[test]
#[expect(clippy::disallowed_methods, reason = "how this program tells a child which part it plays")]
fn what_a_child_does() {
    let Ok(part) = std::env::var(PART) else {
        println!("skipped: this is not a child");
        return;
    };
    let found = lowtide_heap::effective().expect("jemalloc tells");
    let at_start: u32 = found.get("narenas").and_then(|text| text.parse().ok()).expect("known");
    let arenas = |cpus| bound_arenas(cpus).expect("jemalloc tells");
    let bind = || bind_thread(2).expect("jemalloc binds");
    match &*part {
        "bound" => {
            assert_eq!((at_start, arenas(2)), (256, 8));
            let (arenas, filled) = arenas_of_threads(bind);
            assert!(arenas.iter().all(|&arena| arena < 8), "{arenas:?}");
            for arena in 0..8 {
                let count = arenas.iter().filter(|&&found| found == arena).count();
                assert_eq!(count, THREADS / 8, "{arenas:?}");
            }
            // More of them exist: jemalloc makes one for each new thread's own books.
            assert_eq!(filled, 8, "of the arenas that exist");
        }
        "unbound" => {
            assert_eq!((at_start, arenas(64)), (256, 256));
            let (arenas, filled) = arenas_of_threads(|| bind_thread(64).expect("jemalloc tells"));
            assert!(distinct(arenas) >= THREADS / 2 && filled >= THREADS / 2, "{filled}");
        }
        "few" => {
            assert_eq!((at_start, arenas(2)), (3, 3), "there are no more");
            let (arenas, _) = arenas_of_threads(bind);
            assert!(arenas.iter().all(|&arena| arena < 3), "{arenas:?}");
        }
        "by_cpu" => {
            assert_eq!(arenas(2), at_start, "arenas go with CPUs");
            let _ = arenas_of_threads(bind);
        }
        other => panic!("no such part: {other}"),
    }
    println!("{:?}", lowtide_heap::HeapProbe::new().expect("jemalloc tells").snapshot());
    println!("done: {part}");
}

#[test]
fn with_a_quota_of_2_of_64_cpus_64_threads_use_8_arenas() {
    child("bound", "narenas:256");
}

#[test]
fn without_a_quota_jemalloc_spreads_threads_itself() {
    child("unbound", "narenas:256");
}

#[test]
fn where_there_are_few_arenas_nothing_is_bound() {
    child("few", "narenas:3");
}

#[test]
fn where_arenas_go_with_cpus_nothing_is_bound_and_nothing_fails() {
    child("by_cpu", "percpu_arena:percpu");
}
