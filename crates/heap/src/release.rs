//! Tests if the kernel takes unused memory back: jemalloc does not report that a release failed.
//!
//! Memory that is locked, and a filter of system calls, make `madvise` fail; some emulators ignore
//! it. jemalloc then counts the pages as released, and reuses them before it maps new ones.
#![cfg_attr(target_os = "linux", expect(unsafe_code, reason = "madvise on a block of jemalloc"))]

use std::fmt;
use std::io;
use std::sync::atomic::{AtomicI32, Ordering};

use lowtide_core::bytes::ByteSize;

use super::libc_heap::locked;

/// The reason that the kernel does not take unused memory back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize), serde(rename_all = "snake_case"))]
#[non_exhaustive]
pub enum ReleaseFailure {
    /// The memory is locked (`mlockall`).
    Locked,
    /// `madvise` fails with this error code, for example because of a seccomp filter.
    Refused(i32),
    /// `madvise` reports success and has no effect, as in some emulators.
    Ignored,
}

impl fmt::Display for ReleaseFailure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Locked => f.write_str("the memory is locked (mlockall)"),
            Self::Refused(code) => {
                let error = io::Error::from_raw_os_error(*code);
                write!(f, "madvise fails: {error}; expected no seccomp filter that refuses it")
            }
            Self::Ignored => f.write_str("madvise has no effect, as in some emulators"),
        }
    }
}

/// The result of the last test: an error code, or one of these.
static LAST: AtomicI32 = AtomicI32::new(WORKS);
const WORKS: i32 = 0;
const LOCKED: i32 = -1;
const IGNORED: i32 = -2;

/// Returns the result of the last [`check_release`], which each purge makes; `None` before the
/// first. Costs one load.
#[must_use]
pub fn release_failure() -> Option<ReleaseFailure> {
    match LAST.load(Ordering::Relaxed) {
        WORKS => None,
        LOCKED => Some(ReleaseFailure::Locked),
        IGNORED => Some(ReleaseFailure::Ignored),
        code => Some(ReleaseFailure::Refused(code)),
    }
}

/// Returns the most bytes of unused memory that can stay resident for the reason of the last
/// [`check_release`]: zero if there is none, and what the process has locked if that is the reason.
/// Reads a file of the kernel in that case; allocates nothing.
#[must_use]
pub fn unreleased_max() -> ByteSize {
    match release_failure() {
        None => ByteSize::ZERO,
        Some(ReleaseFailure::Locked) => locked(),
        Some(ReleaseFailure::Refused(_) | ReleaseFailure::Ignored) => ByteSize::MAX,
    }
}

/// Tests if the kernel takes memory back, with a block of the calling thread's arena. Returns the
/// reason if it does not. About 5 us.
pub fn check_release() -> Option<ReleaseFailure> {
    LAST.store(platform::try_release(), Ordering::Relaxed);
    release_failure()
}

/// Records that memory stays because it is locked. A block that is mapped later may be unlocked.
pub(super) fn note_locked() -> Option<ReleaseFailure> {
    LAST.store(LOCKED, Ordering::Relaxed);
    release_failure()
}

#[cfg(target_os = "linux")]
mod platform {
    use std::io;

    use tikv_jemalloc_sys::{MALLOCX_ALIGN, MALLOCX_TCACHE_NONE, mallocx, sdallocx};

    use super::{IGNORED, LOCKED, WORKS};
    use lowtide_core::kernel::page_size;

    /// Large enough to be no part of a slab, so that the block has pages that were unused before.
    const PAGES: usize = 8;

    pub(super) fn try_release() -> i32 {
        let page = usize::try_from(page_size().unwrap_or_default().get()).unwrap_or(0);
        let (size, flags) = (PAGES * page, MALLOCX_ALIGN(page.max(1)) | MALLOCX_TCACHE_NONE);
        if page == 0 {
            return WORKS;
        }
        // SAFETY: the size is not zero, and a page is a power of two.
        let block = unsafe { mallocx(size, flags) };
        if block.is_null() {
            return WORKS;
        }
        let first = block.cast::<u8>();
        // SAFETY: the block is this function's, and longer than a byte. Volatile: the kernel
        // changes it below.
        unsafe { first.write_volatile(1) };
        // SAFETY: the first page belongs to the block, which holds nothing.
        let refused = unsafe { libc::madvise(block, page, libc::MADV_DONTNEED) } != 0;
        let code = io::Error::last_os_error().raw_os_error().unwrap_or(0);
        // SAFETY: as above.
        let stays = unsafe { first.read_volatile() } != 0;
        // SAFETY: the block came from `mallocx` with these flags and this size, and is not used any
        // more.
        unsafe { sdallocx(block, size, flags) };
        match (refused, code) {
            (false, _) if stays => IGNORED,
            (false, _) => WORKS,
            // The arguments are valid, so only the state of the pages is not.
            (true, libc::EINVAL) => LOCKED,
            (true, code) => code,
        }
    }
}

#[cfg(not(target_os = "linux"))]
mod platform {
    pub(super) const fn try_release() -> i32 {
        super::WORKS
    }
}
