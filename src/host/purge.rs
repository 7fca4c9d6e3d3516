//! Giving memory back now: jemalloc's unused pages, and glibc's beside it.
//!
//! It does so when it is called and never by itself; when to call is decided elsewhere. A purge
//! takes about 0.1 ms for each MiB that it gives back, so it belongs on a thread of its own and
//! never on one that runs an async runtime.
//!
//! Invariant: each part is `Released(bytes > 0)`, or nothing was there, or the reason why not.

use std::time::Duration;

use crate::bytes::ByteSize;
use crate::clock::{Clock, SystemClock};

use super::error::{HostError, Unsupported};
use super::recall::request_tcache_flush;
use super::stats::Backed;
use super::{allocator, arenas, libc_heap, mallctl};

/// What came of giving back one heap's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// This much was given back; never zero.
    Released(ByteSize),
    /// Nothing was there to give back, or as much was taken meanwhile by other threads.
    NothingToRelease,
    /// Cannot be done in this process.
    Unsupported(Unsupported),
}

impl Outcome {
    /// From the amounts before and after.
    fn between(before: ByteSize, after: ByteSize) -> Self {
        match before.saturating_sub(after) {
            ByteSize::ZERO => Self::NothingToRelease,
            released => Self::Released(released),
        }
    }
}

/// What came of one heap, and how long it took.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Part {
    /// What came of it.
    pub outcome: Outcome,
    /// Time for the giving back itself; the measuring around it is not in it.
    pub took: Duration,
}

impl Part {
    /// The bytes given back; zero where there were none or it cannot be done.
    #[must_use]
    pub const fn released(&self) -> ByteSize {
        match self.outcome {
            Outcome::Released(bytes) => bytes,
            Outcome::NothingToRelease | Outcome::Unsupported(_) => ByteSize::ZERO,
        }
    }
}

/// What a purge gave back, by heap.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PurgeReport {
    /// jemalloc: how much less memory its statistics show behind its pages (resident and muzzy),
    /// by one refresh before and one after. What other threads allocated in between is subtracted.
    pub jemalloc: Part,
    /// The part of jemalloc's bytes that were muzzy: given back lazily before, and taken by the
    /// kernel only now. The rest were dirty. jemalloc purges both kinds in one go, so there is one
    /// time for them.
    pub muzzy: ByteSize,
    /// glibc: how much smaller the process's anonymous resident memory became (`/proc/self/statm`,
    /// resident less shared) while glibc trimmed. glibc itself says only yes or no. It is of
    /// the whole process, so what other threads touched or gave back meanwhile is in it, and the
    /// kernel may keep it wrong by some hundred KiB.
    pub libc: Part,
}

impl PurgeReport {
    /// The bytes given back by both heaps.
    #[must_use]
    pub const fn released(&self) -> ByteSize {
        self.jemalloc.released().saturating_add(self.libc.released())
    }

    /// The part of jemalloc's bytes that were dirty.
    #[must_use]
    pub const fn dirty(&self) -> ByteSize {
        self.jemalloc.released().saturating_sub(self.muzzy)
    }
}

/// Gives back all unused memory of the heap now.
///
/// Calls back the caches of threads that cooperate
/// ([`request_tcache_flush`](super::recall_thread_caches)), empties the calling thread's, purges
/// every jemalloc arena, then has glibc trim its own heap. It waits for no other thread: what those
/// give up later is dirty until it decays or the next purge takes it. If jemalloc's background
/// thread is purging an arena at the same time, that arena is left to it: its pages are released a
/// moment later and are not in the report. Memory that is live is never touched. Blocks for about
/// 0.1 ms for each MiB given back, twice the cost of
/// [`HeapProbe::snapshot`](super::HeapProbe::snapshot) besides; threads that allocate meanwhile
/// wait on single arenas for parts of it. Allocates nothing but the one block with which
/// [`is_global`](super::is_global) is found the first time.
///
/// # Errors
/// [`HostError::Mallctl`] where jemalloc refuses; then glibc has not been asked.
pub fn purge(clock: &dyn Clock) -> Result<PurgeReport, HostError> {
    let (jemalloc, muzzy) = purge_jemalloc(clock)?;
    Ok(PurgeReport { jemalloc, muzzy, libc: trim_libc(clock, libc_heap::trim) })
}

/// As [`purge`], with times by the machine's clock.
///
/// # Errors
/// As [`purge`].
pub fn purge_now() -> Result<PurgeReport, HostError> {
    purge(&SystemClock::new())
}

/// Empties the calling thread's cache of freed blocks, so that the pages under them can go.
///
/// For threads that are about to park. True where there was a cache to empty. About 1 us when it
/// is empty already.
///
/// # Errors
/// [`HostError::Mallctl`] where jemalloc refuses.
pub fn flush_thread_cache() -> Result<bool, HostError> {
    match mallctl::THREAD_CACHE_FLUSH.perform() {
        Ok(()) => Ok(true),
        // A thread without a cache, by configuration or because it is ending.
        Err(HostError::Mallctl { refusal, .. }) if refusal.is_fault() => Ok(false),
        Err(error) => Err(error),
    }
}

/// Has every arena give back what its decay times let go, as jemalloc's background threads do.
///
/// For platforms without those (see
/// [`background_threads_supported`](super::background_threads_supported)): call it a few times in
/// each decay time. Below 1 us for each arena when nothing is due.
///
/// # Errors
/// [`HostError::Mallctl`] where jemalloc refuses.
pub fn decay_tick() -> Result<(), HostError> {
    let _kept = arenas::keep();
    mallctl::ARENAS_DECAY.perform()
}

/// What came of jemalloc, and how much of that was muzzy.
fn purge_jemalloc(clock: &dyn Clock) -> Result<(Part, ByteSize), HostError> {
    let before = Backed::read()?;
    let start = clock.now();
    request_tcache_flush();
    flush_thread_cache()?;
    let kept = arenas::keep();
    mallctl::ARENAS_PURGE.perform()?;
    drop(kept);
    let took = clock.now() - start;
    let after = Backed::read()?;
    let mut outcome = Outcome::between(before.bytes(), after.bytes());
    if outcome == Outcome::NothingToRelease && !allocator::is_global() {
        outcome = Outcome::Unsupported(Unsupported::NoJemalloc);
    }
    let part = Part { outcome, took };
    Ok((part, before.muzzy.saturating_sub(after.muzzy).min(part.released())))
}

/// What came of glibc, by whoever trims it.
fn trim_libc(clock: &dyn Clock, trim: impl FnOnce() -> Result<bool, Unsupported>) -> Part {
    let before = anonymous_resident();
    let start = clock.now();
    let trimmed = trim();
    let took = clock.now() - start;
    let outcome = match trimmed {
        Ok(false) => Outcome::NothingToRelease,
        Ok(true) => Outcome::between(before, anonymous_resident()),
        Err(reason) => Outcome::Unsupported(reason),
    };
    Part { outcome, took }
}

/// Resident memory of the process that belongs to no file and no shared memory; zero where the
/// kernel does not say. Does not allocate.
#[cfg(target_os = "linux")]
fn anonymous_resident() -> ByteSize {
    let mut text = [0_u8; 128];
    let length = std::fs::File::open("/proc/self/statm")
        .and_then(|mut file| std::io::Read::read(&mut file, &mut text))
        .unwrap_or(0);
    let pages = std::str::from_utf8(&text[..length]).ok().and_then(anonymous_pages);
    pages.and_then(|pages| libc_heap::kernel_page().checked_mul(pages)).unwrap_or(ByteSize::ZERO)
}

#[cfg(not(target_os = "linux"))]
const fn anonymous_resident() -> ByteSize {
    ByteSize::ZERO
}

/// Resident less shared pages, from the text of `/proc/<pid>/statm` (`proc_pid_statm(5)`:
/// size, resident, shared, ...).
#[cfg(target_os = "linux")]
fn anonymous_pages(statm: &str) -> Option<u64> {
    let mut fields = statm.split_ascii_whitespace().skip(1).map(str::parse::<u64>);
    let resident = fields.next()?.ok()?;
    let shared = fields.next()?.ok()?;
    resident.checked_sub(shared)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::clock::ManualClock;

    #[test]
    fn a_difference_is_released_only_when_there_is_one() {
        let (less, more) = (ByteSize::mib(1), ByteSize::mib(3));
        assert_eq!(Outcome::between(more, less), Outcome::Released(ByteSize::mib(2)));
        assert_eq!(Outcome::between(less, more), Outcome::NothingToRelease);
        assert_eq!(Outcome::between(less, less), Outcome::NothingToRelease);
    }

    #[test]
    fn a_report_adds_up_what_was_released() {
        let part = |outcome| Part { outcome, took: Duration::ZERO };
        let report = PurgeReport {
            jemalloc: part(Outcome::Released(ByteSize::mib(5))),
            muzzy: ByteSize::mib(2),
            libc: part(Outcome::Unsupported(Unsupported::NotGlibc)),
        };
        assert_eq!((report.released(), report.dirty()), (ByteSize::mib(5), ByteSize::mib(3)));
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn statm_is_read_as_the_manual_says() {
        assert_eq!(anonymous_pages("5000 1200 200 30 0 900 0\n"), Some(1000));
        for broken in ["", "5000", "5000 1200", "5000 x 200", "5000 100 200"] {
            assert_eq!(anonymous_pages(broken), None, "{broken:?}");
        }
        assert!(anonymous_resident() > ByteSize::kib(100));
    }

    #[test]
    fn what_the_trim_answers_is_what_is_told() {
        let clock = ManualClock::new();
        let told = |answer| trim_libc(&clock, || answer).outcome;
        assert_eq!(told(Ok(false)), Outcome::NothingToRelease);
        for reason in [
            Unsupported::SymbolMissing("malloc_trim"),
            Unsupported::NotGlibc,
            Unsupported::NotLinux,
        ] {
            assert_eq!(told(Err(reason)), Outcome::Unsupported(reason));
        }
        let step = Duration::from_millis(7);
        let part = trim_libc(&clock, || {
            clock.advance(step);
            Ok(true)
        });
        assert_eq!(part.took, step);
        assert!(!matches!(part.outcome, Outcome::Unsupported(_)), "it says that it gave back");
    }

    #[test]
    fn time_is_the_clocks() {
        let report = purge(&ManualClock::new()).unwrap();
        assert_eq!((report.jemalloc.took, report.libc.took), (Duration::ZERO, Duration::ZERO));
    }
}
