//! The global allocator of this program and the configuration that it exports to jemalloc, chosen
//! when the process starts.
//!
//! A program has one global allocator and exports one string, under a fixed symbol that jemalloc
//! reads before `main`. Here a constructor that runs before jemalloc's sets both as a variable
//! asks, so that one program tests all of them. Without the variable the allocator is `Heap`, and
//! the program exports what its root names `EXPORTED`.
#![expect(unsafe_code, reason = "an allocator, symbols by hand, a constructor that sets them")]
#![allow(dead_code, reason = "each test program takes its part of this")]

use std::alloc::{GlobalAlloc, Layout, System};
use std::any::type_name;
use std::ffi::{CStr, c_char};
use std::process::{Command, Output};
use std::sync::atomic::{AtomicBool, AtomicPtr, Ordering};
use std::{env, ptr};

use lowtide_heap::{CONF_TEXT_MAX, Heap, HeapProfile, conf_text};

use crate::EXPORTED;

/// Names the start that a process is asked for; none of the variables that `Memory` knows.
const VARIABLE: &CStr = c"TEST_START";

/// The symbols that a program with these settings exports.
pub(crate) struct Start {
    name: &'static CStr,
    /// The text under the symbol that jemalloc reads, and under the one that it does not.
    read: Option<&'static CStr>,
    unread: Option<&'static CStr>,
    /// `true` if `Heap` is the global allocator, `false` if it is the default one.
    is_global: bool,
}

/// As `global_allocator!` with settings of one's own exports it.
const OWN_TEXT: &[u8; CONF_TEXT_MAX] = &conf_text(
    HeapProfile::Balanced,
    &[
        ("narenas", "8"),
        ("dirty_decay_ms", "2_000"),
        ("tcache_max", "8192"),
        ("tcache_nslots_small_min", "128"),
        ("tcache_nslots_large", "64"),
        ("thp", "never"),
        ("background_thread", "false"),
    ],
);

/// No configuration.
pub(crate) const NONE: Start = Start { name: c"none", read: None, unread: None, is_global: true };
/// `global_allocator!(balanced)`.
pub(crate) const BALANCED: Start = Start::of_profile(c"balanced", HeapProfile::Balanced.conf());
/// `global_allocator!(low_memory)`.
pub(crate) const LOW_MEMORY: Start =
    Start::of_profile(c"low_memory", HeapProfile::LowMemory.conf());
/// `global_allocator!(throughput)`.
pub(crate) const THROUGHPUT: Start =
    Start::of_profile(c"throughput", HeapProfile::Throughput.conf());
/// `global_allocator!(balanced, narenas: 8, ...)`.
pub(crate) const OWN: Start = Start::of_profile(
    c"own",
    match CStr::from_bytes_until_nul(OWN_TEXT) {
        Ok(text) => text,
        Err(_) => panic!("it has no NUL"),
    },
);
/// A symbol by hand, under the right name.
pub(crate) const BY_HAND: Start = Start { name: c"by_hand", read: Some(TEXT_BY_HAND), ..NONE };
/// A symbol by hand, under the name that this build of jemalloc does not read.
pub(crate) const WRONG_NAME: Start =
    Start { name: c"wrong_name", unread: Some(c"narenas:3"), ..NONE };
/// `jemalloc_conf!(throughput)`: the settings without the allocator.
pub(crate) const NOT_GLOBAL: Start =
    Start { is_global: false, ..Start::of_profile(c"not_global", HeapProfile::Throughput.conf()) };

/// The text of [`BY_HAND`].
pub(crate) const TEXT_BY_HAND: &CStr =
    c"narenas:3,background_thread:true,dirty_decay_ms:1000,cache_oblivious:false";

static STARTS: [Start; 8] =
    [NONE, BALANCED, LOW_MEMORY, THROUGHPUT, OWN, BY_HAND, WRONG_NAME, NOT_GLOBAL];

/// The global allocator.
pub(crate) struct Allocator;

static IS_HEAP: AtomicBool = AtomicBool::new(true);

// SAFETY: both are allocators, and a block goes back to the one that it came from: the choice is
// made before the first allocation and stays.
unsafe impl GlobalAlloc for Allocator {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        if IS_HEAP.load(Ordering::Relaxed) {
            // SAFETY: as promised to this function.
            unsafe { Heap.alloc(layout) }
        } else {
            // SAFETY: as promised to this function.
            unsafe { System.alloc(layout) }
        }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        if IS_HEAP.load(Ordering::Relaxed) {
            // SAFETY: as promised to this function.
            unsafe { Heap.alloc_zeroed(layout) }
        } else {
            // SAFETY: as promised to this function.
            unsafe { System.alloc_zeroed(layout) }
        }
    }

    unsafe fn realloc(&self, block: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        if IS_HEAP.load(Ordering::Relaxed) {
            // SAFETY: as promised to this function.
            unsafe { Heap.realloc(block, layout, size) }
        } else {
            // SAFETY: as promised to this function.
            unsafe { System.realloc(block, layout, size) }
        }
    }

    unsafe fn dealloc(&self, block: *mut u8, layout: Layout) {
        if IS_HEAP.load(Ordering::Relaxed) {
            // SAFETY: as promised to this function.
            unsafe { Heap.dealloc(block, layout) }
        } else {
            // SAFETY: as promised to this function.
            unsafe { System.dealloc(block, layout) }
        }
    }
}

/// As C has it: a pointer to the string, or null.
#[used]
#[cfg_attr(not(feature = "interpose"), unsafe(export_name = "_rjem_malloc_conf"))]
#[cfg_attr(feature = "interpose", unsafe(export_name = "malloc_conf"))]
static READ: AtomicPtr<c_char> = AtomicPtr::new(symbol(EXPORTED.read));

#[used]
#[cfg_attr(not(feature = "interpose"), unsafe(export_name = "malloc_conf"))]
#[cfg_attr(feature = "interpose", unsafe(export_name = "_rjem_malloc_conf"))]
static UNREAD: AtomicPtr<c_char> = AtomicPtr::new(symbol(EXPORTED.unread));

const fn symbol(text: Option<&'static CStr>) -> *mut c_char {
    match text {
        Some(text) => text.as_ptr().cast_mut(),
        None => ptr::null_mut(),
    }
}

/// Runs before constructors without a priority, of which jemalloc's is one.
///
/// The section lists functions that need no arguments; this one touches nothing that another
/// constructor sets up.
#[cfg(target_os = "linux")]
#[used]
#[unsafe(link_section = ".init_array.00001")]
static CHOOSE: extern "C" fn() = choose;

#[cfg_attr(not(target_os = "linux"), expect(dead_code, reason = "no such section there"))]
extern "C" fn choose() {
    // SAFETY: the name is a C string, and no other thread runs yet.
    let asked = unsafe { libc::getenv(VARIABLE.as_ptr()) };
    if asked.is_null() {
        return;
    }
    // SAFETY: a value in the environment is a C string; it stays for as long as it is compared.
    let asked = unsafe { CStr::from_ptr(asked) };
    for start in STARTS.iter().filter(|start| start.name == asked) {
        READ.store(symbol(start.read), Ordering::Relaxed);
        UNREAD.store(symbol(start.unread), Ordering::Relaxed);
        IS_HEAP.store(start.is_global, Ordering::Relaxed);
    }
}

impl Start {
    /// The macro exports its text under both names.
    const fn of_profile(name: &'static CStr, text: &'static CStr) -> Self {
        Self { name, read: Some(text), unread: Some(text), is_global: true }
    }

    /// The variable that asks for it, with its value.
    pub(crate) fn variable(&self) -> (&'static str, &'static str) {
        let [variable, name] = [VARIABLE, self.name].map(|text| text.to_str().expect("plain"));
        (variable, name)
    }

    /// Returns `true` if this process started so.
    #[expect(clippy::disallowed_methods, reason = "how this process is told what it is to do")]
    fn is_this(&self) -> bool {
        let (variable, name) = self.variable();
        env::var(variable).is_ok_and(|found| found == name)
    }

    /// Runs the calling test's closure in a process that starts so: in this one if it did, else in
    /// another one, by running the test again there.
    pub(crate) fn run<F: FnOnce()>(&self, test: F) {
        if self.is_this() {
            test();
            return;
        }
        let path = type_name::<F>();
        let name = path.split_once("::").map_or(path, |(_program, name)| name);
        let name = name.strip_suffix("::{{closure}}").expect("a closure of the test");
        let name = name.strip_suffix("::body_fn").unwrap_or(name); // as `test_fork` calls it
        let output = again(name).envs([self.variable()]).output().expect("starts");
        assert_passed(&output);
    }
}

/// This program again, to run one test, named in full.
pub(crate) fn again(test: &str) -> Command {
    let mut command = Command::new(env::current_exe().expect("this program"));
    command.args(["--exact", test, "--nocapture", "--test-threads=1"]);
    command
}

/// Panics unless a test that was run [`again`] is there and passes; prints what it printed.
#[expect(clippy::print_stdout, clippy::print_stderr, reason = "the output of that test")]
pub(crate) fn assert_passed(output: &Output) {
    let [text, errors] = [&output.stdout, &output.stderr].map(|of| String::from_utf8_lossy(of));
    print!("{text}");
    eprint!("{errors}");
    assert!(output.status.success(), "the test fails in its process: {}", output.status);
    assert!(text.contains("running 1 test"), "this program has no such test");
}
