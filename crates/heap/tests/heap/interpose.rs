//! Allocations of C code in the process: with feature `interpose` they lie in our heap and show in
//! its statistics; without, they lie in glibc's, and return through the trim of a purge.
//!
//! A C library is compiled and loaded, as a service loads an inference runtime. One process, one
//! test: the figures are of the whole process.
#![cfg(all(target_os = "linux", target_env = "gnu"))]
#![expect(unsafe_code, reason = "a library is loaded, and its functions are called")]

use std::ffi::{CStr, CString, c_void};
use std::fs;
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use lowtide_heap::ByteSize;
use lowtide_heap::HeapProbe;
use test_fork::test;

const INTERPOSED: bool = cfg!(feature = "interpose");

/// Takes blocks, and one more that stays to the end, so that what is given back before it lies in
/// the midst of the heap: glibc gives the end of its heap back by itself.
const SOURCE: &str = r"
#include <stdlib.h>
#include <string.h>

static void **blocks;
static size_t held;

int library_take(size_t count, size_t size) {
    blocks = calloc(count + 1, sizeof *blocks);
    for (held = 0; blocks != NULL && held < count + 1; held++) {
        blocks[held] = malloc(size);
        if (blocks[held] == NULL) return -1;
        memset(blocks[held], 1, size);
    }
    return blocks == NULL ? -1 : 0;
}

void library_give(void) {
    for (size_t at = 0; at + 1 < held; at++) free(blocks[at]);
}
";

/// Blocks of a size below the one from which glibc maps each by itself.
const COUNT: usize = 8_192;
const SIZE: usize = 4_000;
const TAKEN: ByteSize = ByteSize::new((COUNT * SIZE) as u64);

struct Library {
    take: extern "C" fn(usize, usize) -> i32,
    give: extern "C" fn(),
}

impl Library {
    /// Compiled with the compiler that built jemalloc, and loaded for the life of the process.
    fn load() -> Self {
        let folder = PathBuf::from(env!("CARGO_TARGET_TMPDIR"));
        let own = std::process::id();
        let (source, file) = (
            folder.join(format!("interpose-{own}.c")),
            folder.join(format!("libinterpose-{own}.so")),
        );
        fs::write(&source, SOURCE).expect("a folder for temporary files");
        let compiler = Command::new("cc")
            .args(["-shared", "-fPIC", "-O1", "-fno-builtin", "-o"])
            .args([&file, &source])
            .output()
            .expect("cc, which jemalloc is built with");
        assert!(compiler.status.success(), "{}", String::from_utf8_lossy(&compiler.stderr));
        let library = Self::open(&file);
        // It stays loaded without its name.
        fs::remove_file(&source).and_then(|()| fs::remove_file(&file)).expect("just written");
        library
    }

    fn open(file: &Path) -> Self {
        let path = CString::new(file.as_os_str().as_bytes()).expect("a path without NUL");
        // SAFETY: the path is a C string; the library has no initialisers that run.
        let library = unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_NOW) };
        assert!(!library.is_null(), "dlopen of {}", file.display());
        let symbol = |name: &CStr| {
            // SAFETY: the handle is of the library just opened, which is never closed.
            let found = unsafe { libc::dlsym(library, name.as_ptr()) };
            assert!(!found.is_null(), "{name:?}");
            found
        };
        let (take, give) = (symbol(c"library_take"), symbol(c"library_give"));
        Self {
            // SAFETY: the source above defines it as `int (size_t, size_t)`.
            take: unsafe {
                std::mem::transmute::<*mut c_void, extern "C" fn(usize, usize) -> i32>(take)
            },
            // SAFETY: the source above defines it as `void (void)`.
            give: unsafe { std::mem::transmute::<*mut c_void, extern "C" fn()>(give) },
        }
    }
}

/// Returns the live bytes in jemalloc, and in glibc.
fn live(probe: &HeapProbe) -> (ByteSize, ByteSize) {
    let jemalloc = probe.snapshot().expect("statistics").live;
    (jemalloc, lowtide_heap::libc_heap().map_or(ByteSize::ZERO, |heap| heap.live))
}

#[test]
fn what_a_c_library_allocates_shows_where_it_lies_and_comes_back() {
    assert_eq!(lowtide_heap::serves_c(), INTERPOSED);
    let probe = HeapProbe::new().expect("statistics");
    let library = Library::load();
    lowtide_heap::purge_now().expect("purged");
    let before = live(&probe);

    assert_eq!((library.take)(COUNT, SIZE), 0, "room");
    let taken = live(&probe);
    let grown = (taken.0.saturating_sub(before.0), taken.1.saturating_sub(before.1));
    println!("{TAKEN} taken by C: jemalloc grew by {}, glibc by {}", grown.0, grown.1);
    let (own, other) = if INTERPOSED { grown } else { (grown.1, grown.0) };
    assert!(own >= TAKEN, "{own} of {TAKEN}");
    assert!(other < ByteSize::mib(1), "{other} in the other heap");

    (library.give)();
    let given = live(&probe);
    let (was, kept) = if INTERPOSED { (before.0, given.0) } else { (before.1, given.1) };
    let kept = kept.saturating_sub(was);
    assert!(kept < ByteSize::mib(1), "{kept} live after all was given");
    let report = lowtide_heap::purge_now().expect("purged");
    println!("a purge gave back {report:?}");
    let (own, other) = (report.jemalloc.unwrap(), report.libc.unwrap_or_default());
    let (own, other) = if INTERPOSED { (own, other) } else { (other, own) };
    // All but the block that stays, and pages shared with it.
    assert!(TAKEN.saturating_sub(own) < ByteSize::mib(2), "{own} of {TAKEN} came back");
    assert!(other < ByteSize::mib(2), "{other} from the other heap");
}
