//! Situations from public reports in which the heap goes on working: forks beside busy threads,
//! many threads, frees on other threads, odd settings, other allocators, many CPUs, signals.
#![cfg(target_os = "linux")]
#![expect(unsafe_code, reason = "forks, signals and timers are C calls")]

use std::ffi::{c_int, c_void};
use std::fs;
use std::hint::black_box;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::ptr;
use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::thread;

use lowtide_heap::{ByteSize, HeapProbe};
use test_fork::test;

use crate::start::{BALANCED, again};

const READ: &str = if cfg!(feature = "interpose") { "MALLOC_CONF" } else { "_RJEM_MALLOC_CONF" };

fn fill(bytes: usize, size: usize) -> Vec<Vec<u8>> {
    (0..bytes / size).map(|_| vec![1; size]).collect()
}

fn resident() -> ByteSize {
    HeapProbe::new().expect("statistics").snapshot().expect("statistics").resident
}

/// Runs work on four threads until `test` has ended.
fn beside_busy_threads(test: impl FnOnce()) {
    let ends = AtomicBool::new(false);
    thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                while !ends.load(Ordering::Relaxed) {
                    drop(black_box(fill(1 << 20, 256)));
                }
            });
        }
        test();
        ends.store(true, Ordering::Relaxed);
    });
}

#[test]
fn two_hundred_children_are_forked_beside_busy_threads() {
    beside_busy_threads(|| {
        for nth in 0..200 {
            // SAFETY: the child allocates, which jemalloc allows after a fork, and ends.
            let child = unsafe { libc::fork() };
            if child == 0 {
                // SAFETY: ends the child if it hangs.
                let _ = unsafe { libc::alarm(20) };
                let blocks = fill(4 << 20, 1_000);
                let thread = thread::spawn(|| fill(1 << 20, 100).len());
                let is_right = thread.join().is_ok_and(|count| count == 10_485)
                    && HeapProbe::new().is_ok_and(|probe| probe.snapshot().is_ok())
                    && blocks.len() == 4_194;
                // SAFETY: ends the child at once.
                unsafe { libc::_exit(i32::from(!is_right)) };
            }
            let mut status = 0;
            // SAFETY: waits for the child, whose status goes to a local.
            let waited = unsafe { libc::waitpid(child, &raw mut status, 0) };
            assert_eq!((waited, status), (child, 0), "child {nth}");
        }
    });
}

fn small_thread<T: Send + 'static>(
    work: impl FnOnce() -> T + Send + 'static,
) -> thread::JoinHandle<T> {
    thread::Builder::new().stack_size(256 << 10).spawn(work).expect("a thread")
}

#[test]
fn ten_thousand_threads_leave_no_memory_behind() {
    let run = |count: usize| {
        for _ in 0..count {
            assert_eq!(small_thread(|| fill(64 << 10, 300).len()).join().expect("no panic"), 218);
        }
    };
    run(100);
    let before = resident();
    run(10_000);
    let grown = resident().saturating_sub(before);
    assert!(grown < ByteSize::mib(8), "{grown}");
}

#[test]
fn a_thousand_threads_at_once_return_their_memory() {
    static GATE: Barrier = Barrier::new(1_001);
    let before = resident();
    let work = || {
        let blocks = fill(256 << 10, 500);
        GATE.wait();
        drop(blocks);
        GATE.wait();
    };
    let threads: Vec<_> = (0..1_000).map(|_| small_thread(work)).collect();
    GATE.wait();
    assert!(resident() > ByteSize::mib(240));
    GATE.wait();
    threads.into_iter().for_each(|thread| thread.join().expect("no panic"));
    lowtide_heap::purge_now().expect("purges");
    let grown = resident().saturating_sub(before);
    assert!(grown < ByteSize::mib(48), "{grown}");
}

#[test]
fn memory_that_another_thread_frees_is_released() {
    let before = resident();
    let makers: Vec<_> = (0..4).map(|_| thread::spawn(|| fill(300 << 20, 96 << 10))).collect();
    let made = makers.into_iter().map(|maker| maker.join().expect("no panic"));
    let made: Vec<_> = made.collect();
    assert!(resident().saturating_sub(before) > ByteSize::mib(1_150));
    thread::spawn(move || drop(made)).join().expect("no panic");
    lowtide_heap::purge_now().expect("purges");
    let grown = resident().saturating_sub(before);
    assert!(grown < ByteSize::mib(32), "{grown}");
}

/// Runs a test of this program in a process with these variables.
fn passes_with(test: &str, variables: &[(&str, &str)]) {
    let output = again(test).envs([BALANCED.variable()]).envs(variables.iter().copied()).output();
    let output = output.expect("starts");
    let [text, errors] = [&output.stdout, &output.stderr].map(|of| String::from_utf8_lossy(of));
    let ran = output.status.success() && text.contains("running 1 test");
    assert!(ran, "{variables:?}: {} {text}{errors}", output.status);
}

#[test]
fn any_value_of_the_variable_starts() {
    let values = [
        "",
        ",",
        ":",
        "a",
        "a:b",
        "narenas:0",
        "narenas:1",
        "narenas:4094",
        "narenas:99999999999",
        "narenas:-1",
        "dirty_decay_ms:0",
        "dirty_decay_ms:-1",
        "dirty_decay_ms:-2",
        "muzzy_decay_ms:-1",
        "background_thread:maybe",
        "max_background_threads:0",
        "tcache:false",
        "tcache_max:0",
        "lg_tcache_max:40",
        "thp:always",
        "thp:never",
        "metadata_thp:always",
        "retain:false",
        "percpu_arena:percpu",
        "oversize_threshold:0",
        "zero:true,junk:true",
        "abort_conf:false,stats_print:true",
    ];
    assert_eq!(values.len(), 27);
    for value in values {
        passes_with("profile_sources::what_took_effect_in_this_process_is_said", &[(READ, value)]);
    }
}

#[test]
fn memory_is_released_with_huge_pages() {
    passes_with("process::a_release_is_what_the_kernel_reports", &[(READ, "thp:always")]);
}

/// An allocator, and a machine of 512 CPUs.
const SOURCE: &str = r#"
#define _GNU_SOURCE
#include <dlfcn.h>
#include <sched.h>
#include <stddef.h>
#include <string.h>
#include <unistd.h>
#ifdef ALLOCATOR
void *__libc_malloc(size_t), *__libc_calloc(size_t, size_t), *__libc_realloc(void *, size_t);
void __libc_free(void *);
void *malloc(size_t n) { return __libc_malloc(n + 16); }
void *calloc(size_t n, size_t m) { return __libc_calloc(n + 1, m); }
void *realloc(void *p, size_t n) { return __libc_realloc(p, n + 16); }
void free(void *p) { __libc_free(p); }
#else
long sysconf(int name) {
    static long (*next)(int);
    if (!next) next = dlsym(RTLD_NEXT, "sysconf");
    return name == _SC_NPROCESSORS_ONLN || name == _SC_NPROCESSORS_CONF ? 512 : next(name);
}
int sched_getaffinity(pid_t pid, size_t size, cpu_set_t *set) {
    memset(set, 0, size);
    for (size_t i = 0; i < 512 && i < size * 8; i++) CPU_SET_S(i, size, set);
    return 0;
}
#endif
"#;

/// Compiles the library for `LD_PRELOAD`.
fn preloaded(name: &str, definition: &str) -> PathBuf {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR"));
    let (source, file) = (folder.join(format!("{name}.c")), folder.join(format!("{name}.so")));
    fs::write(&source, SOURCE).expect("written");
    let compiled = Command::new("cc")
        .args(["-shared", "-fPIC", "-O1", definition, "-o"])
        .args([&file, &source])
        .arg("-ldl")
        .status();
    assert!(compiled.expect("cc starts").success());
    file
}

#[test]
fn another_allocator_that_is_preloaded_serves_c_alone() {
    let file = preloaded("other_allocator", "-DALLOCATOR");
    let preload = ("LD_PRELOAD", file.to_str().expect("text"));
    passes_with("process::a_release_is_what_the_kernel_reports", &[preload]);
}

#[test]
fn a_machine_of_512_cpus_is_served() {
    let file = preloaded("many_cpus", "-DCPUS");
    let preload = ("LD_PRELOAD", file.to_str().expect("text"));
    for value in ["", "narenas:default", "percpu_arena:percpu"] {
        let variables = [preload, (READ, value)];
        passes_with("profile_sources::what_took_effect_in_this_process_is_said", &variables);
    }
}

unsafe extern "C" {
    /// glibc's `backtrace(3)`.
    fn backtrace(buffer: *mut *mut c_void, size: c_int) -> c_int;
}

static UNWOUND: AtomicU32 = AtomicU32::new(0);

extern "C" fn unwind(_: c_int) {
    let mut frames = [ptr::null_mut(); 64];
    // SAFETY: as many places as are passed.
    let count = unsafe { backtrace(frames.as_mut_ptr(), 64) };
    UNWOUND.fetch_add(u32::from(count > 0), Ordering::Relaxed);
}

#[test]
#[cfg(target_env = "gnu")]
fn stacks_are_unwound_in_a_signal_while_threads_allocate() {
    unwind(0); // loads the unwinder
    let handler: extern "C" fn(c_int) = unwind;
    // SAFETY: the handler only unwinds, which needs no lock after the first call.
    let _ = unsafe { libc::signal(libc::SIGPROF, handler as libc::sighandler_t) };
    // SAFETY: ends this process if it hangs.
    let _ = unsafe { libc::alarm(60) };
    set_timer(1_000);
    beside_busy_threads(|| {
        while UNWOUND.load(Ordering::Relaxed) < 200 {
            lowtide_heap::purge_now().expect("purges");
        }
    });
    set_timer(0);
}

/// Sends the signal each time that the process has used so much CPU time; 0 for never.
fn set_timer(micros: libc::suseconds_t) {
    let every = libc::timeval { tv_sec: 0, tv_usec: micros };
    let timer = libc::itimerval { it_interval: every, it_value: every };
    // SAFETY: reads the timer, and writes nothing.
    let set = unsafe { libc::setitimer(libc::ITIMER_PROF, &raw const timer, ptr::null_mut()) };
    assert_eq!(set, 0);
}
