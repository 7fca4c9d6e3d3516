//! glibc's heap, which serves C and C++ code in the same process: its statistics, and trimming.
//!
//! The statistics are looked up at run time: if the C library lacks them, calls return
//! [`Unsupported`], and the program still links and starts. When to trim is decided elsewhere.
//!
//! Invariant: `held = live + idle`, as glibc counts.

use super::error::Unsupported;
use lowtide_core::bytes::ByteSize;

/// glibc's heap at one instant, as `mallinfo2` reports it.
///
/// With feature `interpose` C code uses jemalloc, and this is nearly zero.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct LibcHeap {
    /// Address space obtained from the kernel: arenas, and blocks with their own mapping. Memory
    /// that a trim released from the middle of an arena still counts here.
    pub held: ByteSize,
    /// Blocks that callers hold, or that are in glibc's thread caches.
    pub live: ByteSize,
    /// Free blocks inside the arenas, backed or not.
    pub idle: ByteSize,
}

/// Returns the statistics of glibc's heap. Locks each arena in turn and walks its free blocks.
///
/// # Errors
/// [`Unsupported`] without glibc 2.33 or later.
pub fn libc_heap() -> Result<LibcHeap, Unsupported> {
    platform::read()
}

/// Makes glibc release every whole free page; returns `true` if it reports that it released
/// something (which it does even if those pages had been released before).
pub(super) use platform::trim;

#[cfg(all(target_os = "linux", target_env = "gnu"))]
#[expect(unsafe_code, reason = "glibc's malloc_trim and mallinfo2 are C calls")]
mod platform {
    use std::ffi::{CStr, c_void};
    use std::mem;
    use std::ptr::NonNull;
    use std::sync::OnceLock;

    use super::{ByteSize, LibcHeap, Unsupported};

    /// `struct mallinfo2 mallinfo2(void)`. Safe to call: the code that creates one guarantees that.
    type Info = extern "C" fn() -> libc::mallinfo2;

    pub(crate) fn trim() -> Result<bool, Unsupported> {
        // SAFETY: any thread may call it with any number ("MT-Safe", malloc_trim(3)): only pages
        // without a block are released. 0 keeps the least at the top of the heap.
        Ok(unsafe { libc::malloc_trim(0) } != 0)
    }

    pub(super) fn read() -> Result<LibcHeap, Unsupported> {
        static FOUND: OnceLock<Option<Info>> = OnceLock::new();
        read_by(*FOUND.get_or_init(|| {
            // SAFETY: glibc declares the function so (malloc.h); the pointer is not null. Any
            // thread may call it ("MT-Safe", mallinfo2(3)): it takes nothing, locks each arena
            // while it reads it, and returns a plain value.
            symbol(c"mallinfo2")
                .map(|found| unsafe { mem::transmute::<NonNull<c_void>, Info>(found) })
        }))
    }

    fn read_by(found: Option<Info>) -> Result<LibcHeap, Unsupported> {
        let mallinfo2 = found.ok_or(Unsupported::SymbolMissing("mallinfo2"))?;
        let info = mallinfo2();
        let maps = ByteSize::of(info.hblkhd);
        Ok(LibcHeap {
            held: ByteSize::of(info.arena).saturating_add(maps),
            live: ByteSize::of(info.uordblks).saturating_add(maps),
            idle: ByteSize::of(info.fordblks),
        })
    }

    /// A function that the process has, by name.
    fn symbol(name: &CStr) -> Option<NonNull<c_void>> {
        // SAFETY: `RTLD_DEFAULT` is the handle for "wherever the process has it" (dlsym(3)), and
        // the name ends in NUL.
        NonNull::new(unsafe { libc::dlsym(libc::RTLD_DEFAULT, name.as_ptr()) })
    }

    #[cfg(test)]
    mod tests {
        use super::*;

        #[test]
        fn a_function_that_does_not_exist_is_none() {
            assert!(symbol(c"malloc").is_some());
            assert!(symbol(c"lowtide_has_no_such_function").is_none());
        }

        #[test]
        fn without_the_function_there_are_no_statistics_and_a_trim_works() {
            assert_eq!(read_by(None), Err(Unsupported::SymbolMissing("mallinfo2")));
            assert!(trim().is_ok());
        }
    }
}

#[cfg(not(all(target_os = "linux", target_env = "gnu")))]
use without_glibc as platform;

/// For platforms without such a heap; compiled into every test, so that platforms without a build
/// machine are tested too.
#[cfg(any(test, not(all(target_os = "linux", target_env = "gnu"))))]
mod without_glibc {
    use super::{LibcHeap, Unsupported};

    /// The nearest cause.
    pub(super) const fn reason(is_linux: bool) -> Unsupported {
        if is_linux { Unsupported::NotGlibc } else { Unsupported::NotLinux }
    }

    pub(crate) const fn trim() -> Result<bool, Unsupported> {
        Err(reason(cfg!(target_os = "linux")))
    }

    pub(super) const fn read() -> Result<LibcHeap, Unsupported> {
        Err(reason(cfg!(target_os = "linux")))
    }
}

#[cfg(test)]
mod tests_without_glibc {
    use super::*;

    #[test]
    fn other_c_libraries_and_other_systems_are_told_apart() {
        assert_eq!(without_glibc::reason(true), Unsupported::NotGlibc);
        assert_eq!(without_glibc::reason(false), Unsupported::NotLinux);
        let here = without_glibc::reason(cfg!(target_os = "linux"));
        assert_eq!(without_glibc::trim(), Err(here));
        assert_eq!(without_glibc::read(), Err(here));
        if cfg!(not(all(target_os = "linux", target_env = "gnu"))) {
            assert_eq!((trim(), libc_heap()), (Err(here), Err(here)), "it is what runs here");
        }
    }
}

#[cfg(all(test, target_os = "linux", target_env = "gnu"))]
mod tests {
    use super::*;

    #[test]
    fn what_is_held_is_live_or_idle() {
        match libc_heap() {
            Ok(heap) => assert_eq!(heap.held, heap.live.saturating_add(heap.idle)),
            Err(reason) => assert_eq!(reason, Unsupported::SymbolMissing("mallinfo2")),
        }
    }
}
