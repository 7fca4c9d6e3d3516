//! The handle of a memory manager.
//!
//! It asks the state that it shares with the two threads (`shared`), and ends these. What it does
//! with device arenas, resources, admin tasks and a runtime is in the modules of those.

use std::fmt;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};
use std::time::Duration;

use crate::bytes::ByteSize;
#[cfg(feature = "service")]
use crate::clock::Moment;
use crate::config::Config;
#[cfg(feature = "service")]
use lowtide_admission::PressureState;
use lowtide_admission::{Admission, Budget, Cost, Job, Trigger};
use lowtide_admission::{Level, LimitAdvice, Mappings, RequestMemory, RouteUsage, TenantUsage};
use lowtide_heap::HeapSizeClass;

use super::breakdown::Breakdown;
use super::error::{Diagnostic, MemoryError};
use super::events::Event;
use super::flight::{LastExit, RunEnd};
use super::history::HistorySample;
use super::leaks::LeakReport;
use super::running::Running;
use super::shared::{Purged, Shared};
use super::shutdown::Shutdown;
use super::snapshot::MemorySnapshot;
use super::trend::LiveTrend;
use super::verdict::{RequestTotals, Verdict};

/// The memory manager of a service. A cheap handle; all clones refer to the same manager.
///
/// It runs while a handle exists: this one, a clone, or a handle from [`Memory::admission`], which
/// every layer holds. Dropping the last handle without [`Memory::shutdown`] ends the threads and
/// logs a warning. It waits for none but the flight recorder's, if that is on: up to 100 ms.
///
/// ```
/// use lowtide::{ByteSize, Memory};
/// use lowtide::admission::Cost;
///
/// let memory = Memory::builder().memory_limit(ByteSize::gib(1)).start()?;
/// let permit = memory.admission().try_admit(Cost::host(ByteSize::mib(3)))?;
/// // ... the request's work ...
/// drop(permit);
/// println!("{}", memory.shutdown(std::time::Duration::from_secs(5)));
/// # Ok::<(), lowtide::BoxError>(())
/// ```
///
/// A handle that is dropped immediately manages nothing, so the compiler warns:
///
/// ```compile_fail
/// #![deny(unused_must_use)]
/// lowtide::Memory::builder().start()?;
/// # Ok::<(), lowtide::BoxError>(())
/// ```
#[derive(Clone)]
#[must_use = "dropping the last handle ends the manager's threads"]
pub struct Memory(pub(super) Arc<Inner>);

/// A handle to a [`Memory`] that does not keep it running.
#[derive(Clone)]
pub struct WeakMemory {
    shared: Weak<Shared>,
    running: Weak<Running>,
}

impl WeakMemory {
    /// Returns the `Memory` if another handle keeps it running. Allocates a few bytes.
    pub fn upgrade(&self) -> Option<Memory> {
        Some(Memory::of(self.shared.upgrade()?, self.running.upgrade()?))
    }
}

impl fmt::Debug for WeakMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("WeakMemory").finish_non_exhaustive()
    }
}

pub(super) struct Inner {
    pub(super) shared: Arc<Shared>,
    running: Arc<Running>,
    /// Keeps `running` alive.
    admission: Admission,
}

/// Adds an event about a running request, if the admission belongs to a `Memory`.
#[cfg(feature = "service")]
pub(crate) fn add_request_event(admission: &Admission, at: Duration, route: &str, text: String) {
    if let Some(running) = admission.kept().and_then(|kept| kept.downcast_ref::<Running>())
        && running.claim.birth.is_here()
    {
        running.events.add(at, "cancel", route, text);
    }
}

/// Returns what the control loop publishes, if the admission belongs to a `Memory`.
#[cfg(feature = "service")]
pub(crate) fn published_state(admission: &Admission) -> Option<Arc<PressureState>> {
    let running = admission.kept()?.downcast_ref::<Running>()?;
    Some(Arc::clone(&running.state))
}

/// Returns `true` if the admission belongs to a `Memory` that is about to end.
#[cfg(feature = "service")]
pub(crate) fn is_ending(admission: &Admission) -> bool {
    let running = admission.kept().and_then(|kept| kept.downcast_ref::<Running>());
    running.is_some_and(|running| running.is_ending.load(Ordering::Relaxed))
}

/// The time for which mappings are kept.
const MAPPINGS_KEPT: Duration = Duration::from_secs(10);
/// The maximum number of requests that are listed.
const LARGEST_MAX: usize = 16;

impl Memory {
    pub(super) fn of(shared: Arc<Shared>, running: Arc<Running>) -> Self {
        let admission = shared.admission.keeping(running.clone());
        Self(Arc::new(Inner { shared, running, admission }))
    }

    /// Returns a handle that does not keep the manager running, for loaders, clean-ups and hooks.
    /// If one of those holds a `Memory` or an [`Admission`] instead, the manager runs until
    /// [`Memory::shutdown`].
    #[must_use]
    pub fn downgrade(&self) -> WeakMemory {
        let Inner { shared, running, .. } = &*self.0;
        WeakMemory { shared: Arc::downgrade(shared), running: Arc::downgrade(running) }
    }

    /// Returns the configuration in force, each value with its source.
    #[must_use]
    pub fn config(&self) -> &Config {
        &self.0.shared.config
    }

    /// Returns the diagnostics: settings that could not be applied, and features that this system
    /// lacks. Each appears once, in order of appearance. Empty in a forked child.
    #[must_use]
    pub fn diagnostics(&self) -> Vec<Diagnostic> {
        self.0.shared.diagnostics()
    }

    /// Returns a handle to admission, on which requests reserve memory. It also keeps this `Memory`
    /// running: while a clone exists, for example in a layer, the threads run and keep the account
    /// current. Admission is closed after [`Memory::shutdown`].
    #[must_use]
    pub fn admission(&self) -> &Admission {
        &self.0.admission
    }

    /// Returns the pressure on host memory.
    #[must_use]
    pub fn level(&self) -> Level {
        self.0.shared.state.level(Budget::Host)
    }

    /// Returns `true` if the process should be restarted because memory that no request owns leaves
    /// no room for requests, by the [`exhaustion_policy`](super::Builder::exhaustion_policy).
    /// `/healthz` then answers 503. For liveness probes of your own; one atomic read.
    #[must_use]
    pub fn needs_restart(&self) -> bool {
        self.0.shared.state.needs_restart()
    }

    /// Returns the cost to reserve. If device memory is host memory, because arenas are in the
    /// memory of this process or on an integrated GPU, host and device share one budget, and the
    /// whole cost is host memory. Every admission of this `Memory` does the same.
    #[must_use]
    pub fn cost(&self, host: ByteSize, device: ByteSize) -> Cost {
        self.admission().state().by_budget(Cost::host(host).and_device(device))
    }

    /// Purges the heap and the arenas now, on this thread. Takes about 0.1 ms for each MiB
    /// released. Do not call it on a thread of an async runtime; see [`Memory::request_purge`].
    /// Does not call the hook of
    /// [`after_tcache_flush_request`](super::Builder::after_tcache_flush_request); only the worker
    /// does.
    ///
    /// # Errors
    /// [`MemoryError::Forked`] in a forked child.
    pub fn purge(&self) -> Result<Purged, MemoryError> {
        self.0.shared.check_here()?;
        Ok(self.0.shared.purge(Trigger::Manual))
    }

    /// Requests a purge of the heap and the arenas by the worker, and returns immediately. Does
    /// nothing in a forked child, which has no worker.
    pub fn request_purge(&self) {
        if self.0.shared.check_here().is_err() {
            return;
        }
        self.0.shared.queue.push_one(Job::Purge { trigger: Trigger::Manual });
    }

    /// Returns all figures at one instant. Costs a refresh of jemalloc's statistics and a few reads
    /// of `/proc`: some tens of microseconds. In a forked child it contains no heap, arenas,
    /// resources or diagnostics.
    #[must_use]
    pub fn snapshot(&self) -> MemorySnapshot {
        self.0.shared.snapshot()
    }

    /// Returns the holders of the host's physical memory. Costs a snapshot.
    #[must_use]
    pub fn breakdown(&self) -> Breakdown {
        self.0.shared.breakdown(&self.snapshot())
    }

    /// Returns the answer to "where did the memory go, and is anything wrong?" in sentences. Costs
    /// a snapshot.
    #[must_use]
    pub fn verdict(&self) -> Verdict {
        self.explain(&self.snapshot()).0
    }

    /// Returns the verdict on a snapshot, and the holders of its memory.
    pub(crate) fn explain(&self, snapshot: &MemorySnapshot) -> (Verdict, Breakdown) {
        let breakdown = self.0.shared.breakdown(snapshot);
        let ledger = self.admission().ledger(Budget::Host);
        let requests = RequestTotals {
            reserved: ledger.requests(),
            room: ledger.request_room(),
            loadable: self.admission().state().loadable(Budget::Host),
            oldest: self.oldest_requests(),
        };
        let trend = self.0.shared.quiet_times.trend();
        (Verdict::new(snapshot, &breakdown, &requests, &self.events(), &trend), breakdown)
    }

    /// Returns the time on the manager's clock.
    #[cfg(all(feature = "service", feature = "device"))]
    pub(crate) fn now(&self) -> Moment {
        self.0.shared.clock.now()
    }

    /// Returns the heap's size classes, the smallest first; none if jemalloc's statistics cannot be
    /// read. Costs a refresh of the statistics and about 6 us.
    #[must_use]
    pub fn size_classes(&self) -> Vec<HeapSizeClass> {
        let mut classes = Vec::new();
        if let Some(heap) = &self.0.shared.heap {
            let _ = heap.each_class(|class| classes.push(class));
        }
        classes
    }

    /// Returns the resident memory of this process by mapping: what it holds outside the heap. The
    /// kernel takes milliseconds for it, and seconds in a process with much memory, so a thread
    /// reads it, and this call waits for at most 50 ms. `None` if it is not read by then (a later
    /// call returns it), if it cannot be read, and in a forked child. At most 20 s old.
    #[must_use]
    pub fn mappings(&self) -> Option<Mappings> {
        let shared = &self.0.shared;
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
        self.0.shared.started_at
    }

    /// Returns the last events, oldest first: at most 16 of each kind. Empty in a forked child.
    #[must_use]
    pub fn events(&self) -> Vec<Event> {
        let shared = &self.0.shared;
        if shared.birth.is_here() { shared.events.all() } else { Vec::new() }
    }

    /// Returns the running requests that hold most memory, the largest first: at most 16, each with
    /// at least 256 KiB. Only requests that passed a layer and are measured are listed
    /// (`service::RequestPermit::memory`). Empty in a forked child.
    #[must_use]
    pub fn largest_requests(&self) -> Vec<RequestMemory> {
        let shared = &self.0.shared;
        if !shared.birth.is_here() {
            return Vec::new();
        }
        shared.admission.state().largest(LARGEST_MAX, shared.clock.now())
    }

    /// Returns the running requests that were admitted first, the oldest first: at most 16, each
    /// with a reservation of at least 64 KiB. Only requests that passed a layer, are measured, and
    /// have waited for something are listed. Empty in a forked child.
    #[must_use]
    pub fn oldest_requests(&self) -> Vec<RequestMemory> {
        let shared = &self.0.shared;
        if !shared.birth.is_here() {
            return Vec::new();
        }
        shared.admission.state().oldest(LARGEST_MAX, shared.clock.now())
    }

    /// Returns the memory of measured requests by route, the largest first: at most 64 routes, and
    /// one named `other` for the rest. A route is a method and a pattern that axum matched, a gRPC
    /// method, or else the first segment of the path. Empty in a forked child.
    #[must_use]
    pub fn usage_by_route(&self) -> Vec<RouteUsage> {
        let shared = &self.0.shared;
        if shared.birth.is_here() { shared.admission.state().usage_by_route() } else { Vec::new() }
    }

    /// Returns the memory of measured requests by tenant (`service::Tenant`), the largest first: at
    /// most 32 tenants, and one named `other` for the rest. Empty in a forked child.
    #[must_use]
    pub fn usage_by_tenant(&self) -> Vec<TenantUsage> {
        let shared = &self.0.shared;
        if shared.birth.is_here() { shared.admission.state().usage_by_tenant() } else { Vec::new() }
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
    /// let advice = memory.limit_advice();
    /// println!("{advice}\n{}", advice.at(ByteSize::mib(256)));
    /// # Ok::<(), lowtide::BoxError>(())
    /// ```
    #[must_use]
    pub fn limit_advice(&self) -> LimitAdvice {
        let shared = &self.0.shared;
        if shared.birth.is_here() { shared.state.limit_advice() } else { LimitAdvice::default() }
    }

    /// Returns a moment on the wall clock, since the Unix epoch.
    #[cfg(feature = "service")]
    pub(crate) fn on_wall(&self, moment: Moment) -> Duration {
        let clock = &self.0.shared.clock;
        clock.since_epoch().saturating_sub(clock.now() - moment)
    }

    /// Returns the trend of live memory at quiet times, and the call sites that grew. Costs some
    /// 50 us. Without quiet times in a forked child, and for a detached `Memory`.
    #[must_use]
    pub fn leaks(&self) -> LeakReport {
        let shared = &self.0.shared;
        let profiler = lowtide_heap::profiler();
        if !shared.birth.is_here() {
            return LeakReport { trend: LiveTrend::default(), profiler, suspects: None };
        }
        let suspects = shared.profiles.as_ref().and_then(|profiles| profiles.suspects());
        LeakReport { trend: shared.quiet_times.trend(), profiler, suspects }
    }

    /// Returns a few figures at each of the last publications, oldest first: at most 300. Empty in
    /// a forked child.
    #[must_use]
    pub fn history(&self) -> Vec<HistorySample> {
        let shared = &self.0.shared;
        if shared.birth.is_here() { shared.history.all() } else { Vec::new() }
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
    /// if let Some(last) = memory.last_exit() {
    ///     println!("the last run (pid {}): {}", last.pid, last.summary);
    /// }
    /// # assert!(memory.last_exit().is_none());
    /// # assert!(memory.shutdown(std::time::Duration::from_secs(5)).is_clean());
    /// # std::fs::remove_dir_all(&folder)?;
    /// # Ok::<(), lowtide::BoxError>(())
    /// ```
    #[must_use]
    pub fn last_exit(&self) -> Option<&LastExit> {
        self.0.shared.flight.last_exit()
    }

    /// Makes `/readyz` answer 503 from now on, while the service still serves. Call it between a
    /// signal to shut down and the close of the listener, so that load balancers choose another
    /// instance. Admission is not changed.
    pub fn set_ending(&self) {
        self.0.running.is_ending.store(true, Ordering::Relaxed);
        self.0.shared.flight.set_ending();
    }

    /// Returns `true` after [`Memory::set_ending`].
    #[cfg(feature = "service")]
    pub(crate) fn is_ending(&self) -> bool {
        self.0.running.is_ending.load(Ordering::Relaxed)
    }

    /// Returns `true` if memory is exhausted and single requests are still admitted.
    #[cfg(feature = "service")]
    pub(crate) fn serves_one(&self) -> bool {
        self.0.shared.state.serves_one()
    }

    /// Shuts the manager down: admits nothing more, waits until resources are unused, unloads them,
    /// and joins the threads. Blocks until the deadline at most, plus one second if a job is
    /// running, and one second for each clean-up that is. Do not call it on a thread of an async
    /// runtime. A second call has nothing left to do; a concurrent call waits as well. The next
    /// `Memory` can start when both threads have ended; if called on one of them (from a hook), it
    /// waits only for the other.
    ///
    /// It closes no arena, and idle memory is not released any more. On a device, call
    /// `DeviceArena::close` afterwards, when the last buffer is dropped: it waits for the device,
    /// releases all memory and calls the release functions of imported memory. Dropping the last
    /// handle cannot do this while device work may be running.
    #[must_use = "the report lists outstanding work"]
    pub fn shutdown(&self, deadline: Duration) -> Shutdown {
        let shared = &self.0.shared;
        if !shared.birth.is_here() {
            return Shutdown { forked: true, ..Shutdown::default() };
        }
        shared.admission.close();
        shared.end_fit_at_shutdown();
        #[cfg(feature = "device")]
        shared.devices.close();
        let end = shared.clock.now() + deadline;
        let mut report = Shutdown { exhausted: shared.ends_exhausted(), ..Shutdown::default() };
        for resource in shared.resources.all() {
            if let Err(error) = resource.close(end - shared.clock.now()) {
                report.resources.push(error.to_string());
            }
        }
        shared.flight.end(if report.exhausted { RunEnd::Exhausted } else { RunEnd::ShutDown });
        self.0.running.threads.end();
        self.0.running.threads.join(&*shared.clock, end, &mut report);
        report.requests = shared.admission.stats().held();
        #[cfg(feature = "device")]
        shared.end_devices(&mut report);
        report
    }
}

impl fmt::Debug for Memory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let shared = &self.0.shared;
        f.debug_struct("Memory")
            .field("profile", &shared.config.profile.value)
            .field("level", &self.level())
            .finish_non_exhaustive()
    }
}
