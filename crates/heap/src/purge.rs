//! Releases memory now: jemalloc's unused pages, and glibc's.
//!
//! It runs only when called; policy is elsewhere. A purge takes about 0.1 ms per MiB released, so
//! it belongs on its own thread, never on one that runs an async runtime.
//!
//! A release is what the kernel reports: jemalloc and glibc count pages as released that stay
//! resident, for example because they are locked.
//!
//! Invariant: each part is the bytes that were released, or the reason it is unsupported.
#![expect(unsafe_code, reason = "purges of an arena, madvise on a block of jemalloc")]

use std::sync::atomic::{AtomicI32, Ordering};
use std::time::Duration;
use std::{fmt, io};

use lowtide_core::bytes::ByteSize;
use lowtide_core::clock::{Clock, SystemClock};
use lowtide_core::kernel;

use super::error::{HostError, Unsupported};
use super::process::{anonymous_resident, locked};
use super::recall::{flush_thread_cache, request_tcache_flush};
use super::stats::{HeapProbe, HeapSnapshot};
use super::{allocator, arenas, libc_heap, mallctl, spill};

/// The memory that a purge released, by heap.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct PurgeReport {
    /// jemalloc: the decrease of the memory behind its pages (resident and muzzy), from one refresh
    /// before and one after. Allocations of other threads in between are subtracted. If the
    /// kernel's figure, as for `libc`, fell by less than half of that, it is the kernel's. Zero if
    /// there was nothing to release, or other threads took as much at the same time.
    pub jemalloc: Result<ByteSize, Unsupported>,
    /// The duration for jemalloc, without the measurements around it.
    pub jemalloc_took: Duration,
    /// The muzzy part of jemalloc's bytes: released lazily before, and reclaimed only now. The rest
    /// was dirty.
    pub muzzy: ByteSize,
    /// glibc: the decrease of the process's anonymous resident memory (`/proc/self/statm`, resident
    /// less shared) while glibc trimmed; glibc itself reports only yes or no. It includes pages
    /// that other threads touched or released meanwhile, and the kernel's figure may be off by some
    /// hundred KiB.
    pub libc: Result<ByteSize, Unsupported>,
    /// The duration for glibc.
    pub libc_took: Duration,
    /// Bytes of unused pages that stay resident because the kernel does not take them back: at most
    /// [`HeapSnapshot::unused_of`](super::HeapSnapshot::unused_of) and
    /// [`unreleased_max`](super::unreleased_max). jemalloc reuses them before it maps new ones.
    pub unreleased: ByteSize,
    /// The reason that the kernel does not take them back.
    pub failure: Option<ReleaseFailure>,
}

impl PurgeReport {
    /// Returns the bytes that both heaps released.
    #[must_use]
    pub fn released(&self) -> ByteSize {
        let jemalloc = self.jemalloc.unwrap_or_default();
        jemalloc.saturating_add(self.libc.unwrap_or_default())
    }

    /// Returns the dirty part of jemalloc's bytes.
    #[must_use]
    pub fn dirty(&self) -> ByteSize {
        self.jemalloc.unwrap_or_default().saturating_sub(self.muzzy)
    }
}

/// Releases all unused memory of the heap now.
///
/// Requests that cooperating threads flush their caches
/// ([`request_tcache_flush`](super::request_tcache_flush)), flushes the calling thread's cache,
/// purges every jemalloc arena, then trims glibc's heap. Live memory is never touched.
///
/// It does not wait for other threads: memory that they flush later is dirty until it decays or the
/// next purge. If jemalloc's background thread is purging an arena at the same time, that arena is
/// left to it; its pages are released a moment later and are not in the report.
///
/// Blocks for about 0.1 ms per MiB released, plus twice the cost of
/// [`HeapProbe::snapshot`](super::HeapProbe::snapshot) and some 30 us; threads that allocate
/// meanwhile wait for single arenas during parts of it. Allocates only one block, of 8 pages, for
/// [`check_release`](super::check_release).
///
/// # Errors
/// [`HostError::Mallctl`] if jemalloc refuses; glibc's heap is then not trimmed.
pub fn purge(clock: &dyn Clock) -> Result<PurgeReport, HostError> {
    let (before, resident) = (snapshot()?, anonymous_resident());
    let start = clock.now();
    request_tcache_flush();
    flush_thread_cache()?;
    // First, so that its block is purged as well.
    let failure = if allocator::is_global() { check_release() } else { None };
    purge_arenas()?;
    let jemalloc_took = clock.now() - start;
    let (after, resident_after) = (snapshot()?, anonymous_resident());
    let backed = |of: HeapSnapshot| of.resident.saturating_add(of.muzzy);
    let counted = backed(before).saturating_sub(backed(after));
    let fell = resident.saturating_sub(resident_after);
    let left = counted.saturating_sub(fell);
    let inexact = inexactness();
    let is_locked = || left > inexact && locked().saturating_add(inexact) >= left;
    let failure = failure.or_else(|| is_locked().then(note_locked).flatten());
    let unreleased = after.unused_of(resident_after).max(left).min(unreleased_max());
    let is_known = !resident_after.is_zero();
    let stays = is_known && left > counted.scaled(0.5).max(inexact);
    let released = if failure.is_some() || stays { counted.min(fell) } else { counted };
    let jemalloc = if released.is_zero() && !allocator::is_global() {
        Err(Unsupported::NoJemalloc)
    } else {
        Ok(released)
    };
    let (libc, libc_took) = trim_libc(clock, libc_heap::trim);
    Ok(PurgeReport {
        jemalloc,
        jemalloc_took,
        muzzy: before.muzzy.saturating_sub(after.muzzy).min(released),
        libc,
        libc_took,
        unreleased: if failure.is_some() { unreleased } else { ByteSize::ZERO },
        failure,
    })
}

/// Purges every arena but that on disk, which its pager purges: that waits for the disk.
fn purge_arenas() -> Result<(), HostError> {
    let _kept = arenas::keep();
    let Some(on_disk) = spill::arena() else { return mallctl::ARENAS_PURGE.perform() };
    for index in (0..mallctl::ARENAS_COUNT.read()?).filter(|index| *index != on_disk) {
        // SAFETY: a purge releases pages without blocks, and no other. No arena is destroyed.
        match unsafe { mallctl::ARENA_PURGE.perform_in(index) } {
            Err(HostError::Mallctl { code: libc::EFAULT, .. }) => {} // not initialised
            other => other?,
        }
    }
    Ok(())
}

/// Returns the statistics of jemalloc's heap.
fn snapshot() -> Result<HeapSnapshot, HostError> {
    HeapProbe::here()?.snapshot()
}

/// Like [`purge`], with times by the system clock.
///
/// # Errors
/// The errors of [`purge`].
pub fn purge_now() -> Result<PurgeReport, HostError> {
    purge(&SystemClock::new())
}

/// Makes every arena release the pages that are due by its decay time, as jemalloc's background
/// threads do.
///
/// For platforms without those threads (see
/// [`background_threads_supported`](super::background_threads_supported)): call it a few times per
/// decay time. Costs less than 1 us per arena if nothing is due.
///
/// # Errors
/// [`HostError::Mallctl`] if jemalloc refuses.
pub fn decay_tick() -> Result<(), HostError> {
    let _kept = arenas::keep();
    mallctl::ARENAS_DECAY.perform()
}

/// The inexactness of the kernel's figure of resident memory.
fn inexactness() -> ByteSize {
    let page = kernel::page_size().unwrap_or_default();
    kernel::resident_error(kernel::online_cpus().unwrap_or(1), page)
}

/// Returns the bytes that glibc released, trimmed by `trim`, and the duration.
fn trim_libc(
    clock: &dyn Clock,
    trim: impl FnOnce() -> Result<bool, Unsupported>,
) -> (Result<ByteSize, Unsupported>, Duration) {
    let before = anonymous_resident();
    let start = clock.now();
    let trimmed = trim();
    let took = clock.now() - start;
    let released = |trimmed| match trimmed {
        true => before.saturating_sub(anonymous_resident()),
        false => ByteSize::ZERO,
    };
    (trimmed.map(released), took)
}

// Tests if the kernel takes unused memory back: jemalloc does not report that a release failed.
//
// Memory that is locked, and a filter of system calls, make `madvise` fail; some emulators ignore
// it. jemalloc then counts the pages as released, and reuses them before it maps new ones.

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

#[cfg(test)]
mod tests {
    use super::*;
    use lowtide_core::clock::ManualClock;

    #[test]
    fn a_report_adds_up_what_was_released() {
        let report = PurgeReport {
            jemalloc: Ok(ByteSize::mib(5)),
            jemalloc_took: Duration::ZERO,
            muzzy: ByteSize::mib(2),
            libc: Err(Unsupported::NotGlibc),
            libc_took: Duration::ZERO,
            unreleased: ByteSize::ZERO,
            failure: None,
        };
        assert_eq!((report.released(), report.dirty()), (ByteSize::mib(5), ByteSize::mib(3)));
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn the_resident_memory_of_this_process_is_known() {
        assert!(anonymous_resident() > ByteSize::kib(100));
    }

    #[test]
    fn what_the_trim_answers_is_what_is_told() {
        let clock = ManualClock::new();
        let told = |answer| trim_libc(&clock, || answer).0;
        assert_eq!(told(Ok(false)), Ok(ByteSize::ZERO));
        for reason in [
            Unsupported::SymbolMissing("malloc_trim"),
            Unsupported::NotGlibc,
            Unsupported::NotLinux,
        ] {
            assert_eq!(told(Err(reason)), Err(reason));
        }
        let step = Duration::from_millis(7);
        let (released, took) = trim_libc(&clock, || {
            clock.advance(step);
            Ok(true)
        });
        assert_eq!(took, step);
        assert!(released.is_ok(), "it says that it gave back");
    }

    #[test]
    fn time_is_the_clocks() {
        let report = purge(&ManualClock::new()).unwrap();
        assert_eq!((report.jemalloc_took, report.libc_took), (Duration::ZERO, Duration::ZERO));
    }
}
