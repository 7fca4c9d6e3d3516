//! Call stacks of the heap profiler by cached unwind rules, while each allocation is sampled.
#![cfg(all(
    feature = "profiling",
    target_os = "linux",
    target_env = "gnu",
    target_arch = "x86_64"
))]
#![expect(unsafe_code, reason = "a child is forked, and a process that hangs is ended")]

use std::ffi::{c_int, c_void};
use std::hint::black_box;
use std::ptr;
use std::sync::atomic::{AtomicU8, Ordering};
use std::thread;

use lowtide_heap::{ByteSize, Profiler, cache_unwind_rules, profiler};

use crate::start::{again, assert_passed};

/// Runs a test again in a process in which each allocation is sampled, and there its closure.
fn with_samples(name: &str, test: fn()) {
    const SAMPLES: &str = "prof:true,lg_prof_sample:0";
    let interval = ByteSize::new(1);
    if profiler() == (Profiler::Active { interval }) {
        // SAFETY: ends this process if it hangs.
        let _ = unsafe { libc::alarm(20) };
        assert!(cache_unwind_rules().expect("the profiler is active"));
        test();
        return;
    }
    let mut process = again(&format!("unwind::{name}"));
    process.envs(["MALLOC_CONF", "_RJEM_MALLOC_CONF"].map(|variable| (variable, SAMPLES)));
    assert_passed(&process.output().expect("starts"));
}

/// Bug: the C library allocates while it looks for the stack of a thread, as each start of a thread
/// has it do. If malloc was jemalloc's and that allocation was the first sample of the thread, the
/// profiler looked for the stack too, and waited for ever for a lock of this thread.
#[test]
fn threads_start_while_each_allocation_is_sampled() {
    with_samples("threads_start_while_each_allocation_is_sampled", || {
        for size in 1..=20 {
            let thread = thread::spawn(move || black_box(vec![1_u8; size]).len());
            assert_eq!(thread.join().expect("no panic"), size);
        }
    });
}

/// 0, 1 while a thread holds the lock of the loader, and 2 when it is to release it.
static HOLDS: AtomicU8 = AtomicU8::new(0);

fn hold_loader() {
    extern "C" fn hold(_: *mut libc::dl_phdr_info, _: usize, _: *mut c_void) -> c_int {
        HOLDS.store(1, Ordering::Relaxed);
        while HOLDS.load(Ordering::Relaxed) < 2 {
            thread::yield_now();
        }
        1
    }
    // SAFETY: the callback uses none of its arguments.
    unsafe { libc::dl_iterate_phdr(Some(hold), ptr::null_mut()) };
}

/// Allocates by a call that no rule is known for.
#[inline(never)]
fn first_call() -> usize {
    black_box(vec![1_u8; 100]).len()
}

/// Bug: the child of a fork waited for the lock of the loader, which a thread held that was not
/// there, when it allocated in a function for the first time.
#[test]
fn a_child_of_a_fork_looks_up_no_rules() {
    with_samples("a_child_of_a_fork_looks_up_no_rules", || {
        thread::scope(|scope| {
            scope.spawn(hold_loader);
            while HOLDS.load(Ordering::Relaxed) < 1 {
                thread::yield_now();
            }
            // SAFETY: the child allocates, which jemalloc allows after a fork, and ends.
            let child = unsafe { libc::fork() };
            if child == 0 {
                // SAFETY: ends the child if it hangs.
                let _ = unsafe { libc::alarm(10) };
                let is_wrong = first_call() != 100;
                // SAFETY: ends the child at once.
                unsafe { libc::_exit(i32::from(is_wrong)) };
            }
            let mut status = 0;
            // SAFETY: waits for the child, whose status goes to a local.
            let waited = unsafe { libc::waitpid(child, &raw mut status, 0) };
            HOLDS.store(2, Ordering::Relaxed);
            assert_eq!((waited, status), (child, 0));
        });
    });
}
