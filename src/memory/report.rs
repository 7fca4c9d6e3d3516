//! The handles by which a program asks a `Memory` for reports, and acts on its heap.
//!
//! They borrow the `Memory` and hold nothing else. In a forked child, in which a thread of the
//! parent may hold a lock, the lists are empty.

use std::time::Duration;

use lowtide_admission::{Job, LimitAdvice, Mappings, MemoryUsage, RequestMemory, Trigger};
use lowtide_heap::HeapSizeClass;

use crate::sync::lock;

use super::breakdown::Breakdown;
use super::error::{Diagnostic, MemoryError};
use super::events::Event;
use super::flight::LastExit;
use super::manager::Memory;
use super::shared::{Purged, Shared};
use super::snapshot::MemorySnapshot;
use super::trend::{HistorySample, LeakReport, QuietTimes};
use super::verdict::Verdict;

/// The time for which mappings are kept.
const MAPPINGS_KEPT: Duration = Duration::from_secs(10);
/// The maximum number of requests that are listed.
const LARGEST_MAX: usize = 16;

impl Memory {
    /// Returns a handle to the heap: purges, size classes, leaks.
    #[must_use]
    pub fn heap(&self) -> MemoryHeap<'_> {
        MemoryHeap(&self.0.shared)
    }

    /// Returns a handle to the reports: who holds memory, what happened, what is wrong.
    #[must_use]
    pub fn report(&self) -> MemoryReport<'_> {
        MemoryReport(&self.0.shared)
    }
}

/// The heap of a `Memory`, from [`Memory::heap`].
#[derive(Clone, Copy, Debug)]
pub struct MemoryHeap<'a>(&'a Shared);

impl MemoryHeap<'_> {
    /// Purges the heap and the arenas now, on this thread. Takes about 0.1 ms for each MiB
    /// released. Do not call it on a thread of an async runtime; see [`MemoryHeap::request_purge`].
    /// Does not call the hook of
    /// [`after_tcache_flush_request`](super::Builder::after_tcache_flush_request); only the worker
    /// does.
    ///
    /// # Errors
    /// [`MemoryError::Forked`] in a forked child.
    pub fn purge(&self) -> Result<Purged, MemoryError> {
        self.0.check_here()?;
        Ok(self.0.purge(Trigger::Manual))
    }

    /// Requests a purge of the heap and the arenas by the worker, and returns immediately. Does
    /// nothing in a forked child, which has no worker.
    pub fn request_purge(&self) {
        self.0.here(|shared| shared.state.post(Job::Purge { trigger: Trigger::Manual }));
    }

    /// Returns the heap's size classes, the smallest first; none if jemalloc's statistics cannot be
    /// read. Costs a refresh of the statistics and about 6 us.
    #[must_use]
    pub fn size_classes(&self) -> Vec<HeapSizeClass> {
        let mut classes = Vec::new();
        if let Some(heap) = &self.0.heap {
            let _ = heap.each_class(|class| classes.push(class));
        }
        classes
    }

    /// Returns the trend of live memory at quiet times, and the call sites that grew. Costs some
    /// 50 us. Without quiet times in a forked child, and for a detached `Memory`.
    #[must_use]
    pub fn leaks(&self) -> LeakReport {
        let suspects = |shared: &Shared| shared.profiles.as_ref()?.suspects();
        let report = |shared: &Shared| Some(lock(&shared.quiet_times).report(suspects(shared)));
        self.0.here(report).unwrap_or_else(|| QuietTimes::default().report(None))
    }
}

/// The reports of a `Memory`, from [`Memory::report`].
#[derive(Clone, Copy, Debug)]
pub struct MemoryReport<'a>(pub(super) &'a Shared);

impl<'a> MemoryReport<'a> {
    /// Returns the diagnostics: settings that could not be applied, and features that this system
    /// lacks. Each appears once, in order of appearance. Empty in a forked child.
    #[must_use]
    pub fn diagnostics(&self) -> Vec<Diagnostic> {
        self.0.diagnostics()
    }

    /// Returns the holders of the host's physical memory. Costs a snapshot.
    #[must_use]
    pub fn breakdown(&self) -> Breakdown {
        self.0.breakdown(&self.0.snapshot())
    }

    /// Returns the answer to "where did the memory go, and is anything wrong?" in sentences. Its
    /// `Display` output has one sentence a line. Costs a snapshot.
    #[must_use]
    pub fn verdict(&self) -> Verdict {
        self.explain(&self.0.snapshot()).0
    }

    /// Returns the verdict on a snapshot, and the holders of its memory.
    pub(crate) fn explain(&self, snapshot: &MemorySnapshot) -> (Verdict, Breakdown) {
        let breakdown = self.0.breakdown(snapshot);
        (Verdict::new(self.0, snapshot, &breakdown), breakdown)
    }

    /// Returns the resident memory of this process by mapping: what it holds outside the heap. The
    /// kernel takes milliseconds for it, and seconds in a process with much memory, so a thread
    /// reads it, and this call waits for at most 50 ms. `None` if it is not read by then (a later
    /// call returns it), if it cannot be read, and in a forked child. At most 20 s old.
    #[must_use]
    pub fn mappings(&self) -> Option<Mappings> {
        let shared = self.0;
        shared.check_here().ok()?;
        let read = || Mappings::read().ok();
        let reading = shared.mappings.read(&*shared.clock, "lowtide-maps", MAPPINGS_KEPT, read);
        let (at, found) = reading.ok()?.last?;
        // That of an earlier call, while the next one is read.
        found.filter(|_| shared.clock.now() - at < MAPPINGS_KEPT * 2)
    }

    /// Returns the time when this `Memory` was started, since the Unix epoch.
    #[must_use]
    pub fn started_at(&self) -> Duration {
        self.0.started_at
    }

    /// Returns the last events, oldest first: at most 16 of each kind. Empty in a forked child.
    #[must_use]
    pub fn events(&self) -> Vec<Event> {
        self.0.here(|shared| shared.events.all())
    }

    /// Returns the running requests that hold most memory, the largest first: at most 16, each with
    /// at least 256 KiB. Only requests that passed a layer and are measured are listed
    /// (`service::RequestPermit::memory`). Empty in a forked child.
    #[must_use]
    pub fn largest_requests(&self) -> Vec<RequestMemory> {
        self.0.here(|shared| shared.admission.state().largest(LARGEST_MAX, shared.clock.now()))
    }

    /// Returns the running requests that were admitted first, the oldest first: at most 16, each
    /// with a reservation of at least 64 KiB. Only requests that passed a layer, are measured, and
    /// have waited for something are listed. Empty in a forked child.
    #[must_use]
    pub fn oldest_requests(&self) -> Vec<RequestMemory> {
        self.0.here(|shared| shared.admission.state().oldest(LARGEST_MAX, shared.clock.now()))
    }

    /// Returns the memory of measured requests by route, the largest first: at most 64 routes, and
    /// one named `other` for the rest. A route is a method and a pattern that axum matched, a gRPC
    /// method, or else the first segment of the path. Empty in a forked child.
    #[must_use]
    pub fn usage_by_route(&self) -> Vec<MemoryUsage> {
        self.0.here(|shared| shared.admission.state().routes.read())
    }

    /// Returns the memory of measured requests by tenant (`service::Tenant`), the largest first: at
    /// most 32 tenants, and one named `other` for the rest. Empty in a forked child.
    #[must_use]
    pub fn usage_by_tenant(&self) -> Vec<MemoryUsage> {
        self.0.here(|shared| shared.admission.state().tenants.read())
    }

    /// Returns what the traffic of the last 24 hours and the current one has needed: by hour, the
    /// smallest limit that would have rejected less than .1 % of the requests
    /// ([`LimitAdvice::smallest_limit`]), and what a given limit would have done
    /// ([`LimitAdvice::at`]). [`MemorySnapshot::on_wall`] converts the start of an hour. Takes some
    /// 0.1 ms. Empty in a forked child.
    ///
    /// ```
    /// use lowtide::{ByteSize, Memory};
    ///
    /// let memory = Memory::builder().start()?;
    /// let advice = memory.report().limit_advice();
    /// println!("{advice}\n{}", advice.at(ByteSize::mib(256)));
    /// # Ok::<(), lowtide::BoxError>(())
    /// ```
    #[must_use]
    pub fn limit_advice(&self) -> LimitAdvice {
        self.0.here(|shared| shared.state.limit_advice())
    }

    /// Returns a few figures at each of the last publications, oldest first: at most 300. Empty in
    /// a forked child.
    #[must_use]
    pub fn history(&self) -> Vec<HistorySample> {
        self.0.here(|shared| shared.history.all())
    }

    /// Returns the last run of this service and the reason why it ended, if that run had the
    /// [flight recorder](super::Builder::flight_recorder) and this one has it at the same path;
    /// `None` after the first run, and if the recording could not be read.
    ///
    /// ```
    /// # let folder = std::env::temp_dir().join(format!("lowtide-{}", std::process::id()));
    /// # std::fs::create_dir_all(&folder)?;
    /// # let path = folder.join("recording");
    /// use lowtide::Memory;
    ///
    /// let memory = Memory::builder().flight_recorder(path).start()?;
    /// if let Some(last) = memory.report().last_exit() {
    ///     println!("the last run (pid {}): {}", last.pid, last.summary);
    /// }
    /// # assert!(memory.report().last_exit().is_none());
    /// # assert!(memory.shutdown_blocking(std::time::Duration::from_secs(5)).is_clean());
    /// # std::fs::remove_dir_all(&folder)?;
    /// # Ok::<(), lowtide::BoxError>(())
    /// ```
    #[must_use]
    pub fn last_exit(&self) -> Option<&'a LastExit> {
        self.0.flight.last_exit.as_ref()
    }
}
