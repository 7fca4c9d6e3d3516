//! Call stacks of the heap profiler by cached unwind rules, while each allocation is sampled.
#![cfg(all(
    feature = "profiling",
    target_os = "linux",
    target_env = "gnu",
    target_arch = "x86_64"
))]
#![expect(unsafe_code, reason = "a process that hangs is ended")]

use std::hint::black_box;
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
