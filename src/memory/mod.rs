//! The running memory manager of a process.
//!
//! [`Memory`] builds heap settings, device arenas, admission and resources from one [`Config`],
//! connects policy to mechanism, owns the two threads (`lowtide-control` decides, `lowtide-worker`
//! acts), and stops them. It contains no policy and no mechanism of its own. Heap, arenas and an
//! [`Admission`] with a fixed limit also work without it; but then nothing is timed or published.
//!
//! It runs until [`Memory::shutdown`], or until the last handle is dropped. Handles are [`Memory`]
//! and every [`Admission`] obtained from one, which every layer holds. The threads and resources
//! hold no such handle, so they do not keep it running.
//!
//! Invariants: at most one `Memory` runs in a process; `threads = 2` while it runs, 0 after
//! [`Memory::shutdown`]; dropping it never blocks.

mod admin_tasks;
mod builder;
#[cfg_attr(not(feature = "device"), path = "no_devices.rs")]
mod devices;
mod error;
mod events;
mod found;
mod hands;
mod heap;
mod history;
mod own_arena;
mod resources;
#[cfg(feature = "tokio")]
mod runtime;
mod sensor;
mod shared;
mod snapshot;
mod threads;

use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Weak};
use std::thread::{JoinHandle, ThreadId};
use std::time::Duration;

use crate::bytes::ByteSize;
use crate::clock::{Bell, Clock, Moment};
use crate::config::Config;
use crate::fork::Birth;
use crate::sync::{Mutex, lock};
use lowtide_admission::{Admission, Budget, Cost, Job, JobQueue, Resource, Trigger};
use lowtide_admission::{Level, RequestMemory, ResourceStats, RouteUsage, TenantUsage};

pub use admin_tasks::{AdminCommand, AdminError, AdminTask, AdminTaskState};
pub use builder::Builder;
#[cfg(feature = "device")]
pub use devices::{
    ArenaError, ArenaReport, ArenaUse, DeviceSnapshot, DevicesSnapshot, Replaced, Run, ScopeError,
    ShrinkError, ShrinkFailure, ShrinkOutcome, Shrunk, ShrunkTarget, Slot, SlotKind, SlotSnapshot,
};
pub use error::{Diagnostic, MemoryError, Severity, StartError};
pub use events::Event;
pub use history::HistorySample;
pub use shared::Purged;
pub use snapshot::{BudgetSnapshot, MemorySnapshot};
pub use threads::on_thread_start;

use events::Events;
use shared::Shared;

/// The process generation in which a `Memory` runs, or [`NOWHERE`]. A forked child does not inherit
/// the parent's claim.
static STARTED: AtomicU64 = AtomicU64::new(NOWHERE);
/// No `Memory` runs.
const NOWHERE: u64 = u64::MAX;

/// The memory manager of a service. A cheap handle; all clones refer to the same manager.
///
/// It runs while a handle exists: this one, a clone, or a handle from [`Memory::admission`], which
/// every layer holds. Dropping the last handle without [`Memory::shutdown`] ends the threads and
/// logs a warning.
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
pub struct Memory(Arc<Inner>);

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

struct Inner {
    shared: Arc<Shared>,
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

/// Ends the threads when the last handle is dropped. It holds no arena and no resource, so that
/// these are not kept alive after a shutdown.
struct Running {
    threads: Threads,
    queue: Arc<JobQueue>,
    claim: Arc<Claim>,
    /// `true` once the service is about to end, for its readiness.
    is_ending: AtomicBool,
    /// Does not keep the manager running.
    admission: Admission,
    #[cfg_attr(not(feature = "service"), expect(dead_code, reason = "for layers"))]
    events: Arc<Events>,
}

/// The minimum time that a shutdown waits for its threads, regardless of its deadline: idle threads
/// end immediately, and a purge of 10 GiB takes this long.
const JOIN_MIN: Duration = Duration::from_secs(1);

/// The maximum number of requests that are listed.
const LARGEST_MAX: usize = 16;

/// The number of threads of a `Memory`.
const THREADS: usize = 2;

/// The two threads. Dropping it signals them to end and does not wait.
struct Threads {
    stop: Arc<AtomicBool>,
    bell: Arc<Bell>,
    started: Mutex<Vec<Started>>,
}

/// A thread that was started. Its end stays recorded after it has been joined.
struct Started {
    name: &'static str,
    id: ThreadId,
    end: Arc<End>,
    /// The handle, until the thread is joined.
    handle: Option<JoinHandle<()>>,
}

/// Records that a thread has ended, also by a panic.
#[derive(Default)]
struct End {
    over: AtomicBool,
    /// One bell for each waiting shutdown, because a ring wakes one waiter.
    waiting: Mutex<Vec<Arc<Bell>>>,
}

/// The right to run the one `Memory` of this process. Released once: by the last of the two threads
/// when it ends, or when every handle is dropped.
struct Claim {
    held: AtomicBool,
    /// The number of threads that have not ended.
    threads: AtomicUsize,
    birth: Birth,
    /// `false` for a detached `Memory`.
    is_attached: bool,
}

impl Memory {
    fn of(shared: Arc<Shared>, running: Arc<Running>) -> Self {
        let admission = shared.admission.keeping(running.clone());
        Self(Arc::new(Inner { shared, running, admission }))
    }

    /// Returns a builder with default settings.
    #[must_use]
    pub fn builder() -> Builder {
        Builder::default()
    }

    /// Starts a `Memory` with default settings and the `LOWTIDE_*` variables of the environment.
    /// Short for `Memory::builder().start()`.
    ///
    /// # Errors
    /// The same as for [`Builder::start`].
    pub fn start() -> Result<Self, StartError> {
        Self::builder().start()
    }

    /// Returns the `Memory` that an earlier call of this function started, if it still runs, or
    /// starts one with default settings: for tests that share one. It ends with its last handle.
    ///
    /// # Errors
    /// The same as for [`Builder::start`].
    pub fn shared() -> Result<Self, StartError> {
        static SHARED: Mutex<Option<WeakMemory>> = Mutex::new(None);
        let mut shared = lock(&SHARED);
        let running = shared.as_ref().and_then(WeakMemory::upgrade);
        let runs =
            |memory: &Self| memory.0.shared.birth.is_here() && !memory.admission().is_closed();
        if let Some(memory) = running.filter(runs) {
            return Ok(memory);
        }
        let memory = Self::start()?;
        *shared = Some(memory.downgrade());
        Ok(memory)
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
    /// no room for requests, by the [`Builder::exhaustion_policy`]. `/healthz` then answers 503.
    /// For liveness probes of your own; one atomic read.
    #[must_use]
    pub fn needs_restart(&self) -> bool {
        self.0.shared.state.needs_restart()
    }

    /// Returns the cost to reserve. If device memory is host memory, because arenas are in the
    /// memory of this process or on an integrated GPU, host and device share one budget, and the
    /// whole cost is host memory. Every admission of this `Memory` does the same.
    #[must_use]
    pub fn cost(&self, host: ByteSize, device: ByteSize) -> Cost {
        self.admission().by_budget(Cost::host(host).and_device(device))
    }

    /// Purges the heap and the arenas now, on this thread. Takes about 0.1 ms for each MiB
    /// released. Do not call it on a thread of an async runtime; see [`Memory::request_purge`].
    /// Does not call [`Builder::after_tcache_flush_request`]; only the worker does.
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

    /// Returns the last events, oldest first: at most 64. Empty in a forked child.
    #[must_use]
    pub fn events(&self) -> Vec<Event> {
        let shared = &self.0.shared;
        if shared.birth.is_here() { shared.events.all() } else { Vec::new() }
    }

    /// Returns the running requests that hold most memory, the largest first: at most 16, each with
    /// at least 256 KiB. Only requests that passed a layer and are measured are listed
    /// (`service::SharedPermit::memory`). Empty in a forked child.
    #[must_use]
    pub fn largest_requests(&self) -> Vec<RequestMemory> {
        let shared = &self.0.shared;
        if !shared.birth.is_here() {
            return Vec::new();
        }
        shared.admission.largest(LARGEST_MAX, shared.clock.now())
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
        shared.admission.oldest(LARGEST_MAX, shared.clock.now())
    }

    /// Returns the memory of measured requests by route, the largest first: at most 64 routes, and
    /// one named `other` for the rest. A route is a method and a pattern that axum matched, a gRPC
    /// method, or else the first segment of the path. Empty in a forked child.
    #[must_use]
    pub fn usage_by_route(&self) -> Vec<RouteUsage> {
        let shared = &self.0.shared;
        if shared.birth.is_here() { shared.admission.usage_by_route() } else { Vec::new() }
    }

    /// Returns the memory of measured requests by tenant (`service::Tenant`), the largest first: at
    /// most 32 tenants, and one named `other` for the rest. Empty in a forked child.
    #[must_use]
    pub fn usage_by_tenant(&self) -> Vec<TenantUsage> {
        let shared = &self.0.shared;
        if shared.birth.is_here() { shared.admission.usage_by_tenant() } else { Vec::new() }
    }

    /// Returns a few figures at each of the last publications, oldest first: at most 300. Empty in
    /// a forked child.
    #[must_use]
    pub fn history(&self) -> Vec<HistorySample> {
        let shared = &self.0.shared;
        if shared.birth.is_here() { shared.history.all() } else { Vec::new() }
    }

    /// Makes `/readyz` answer 503 from now on, while the service still serves. Call it between a
    /// signal to shut down and the close of the listener, so that load balancers choose another
    /// instance. Admission is not changed.
    pub fn set_ending(&self) {
        self.0.running.is_ending.store(true, Ordering::Relaxed);
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
        let end = shared.clock.now() + deadline;
        let mut report = Shutdown { exhausted: shared.ends_exhausted(), ..Shutdown::default() };
        for resource in shared.resources.all() {
            if let Err(error) = resource.close(end - shared.clock.now()) {
                report.resources.push(error.to_string());
            }
        }
        self.0.running.threads.end();
        self.0.running.threads.join(&*shared.clock, end, &mut report);
        shared.end_devices(&mut report);
        report.requests = shared.admission.stats().held();
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

impl Threads {
    /// Returns `true` if both threads were started and none was signalled to end.
    fn is_running(&self) -> bool {
        lock(&self.started).len() == THREADS && !self.stop.load(Ordering::Acquire)
    }

    /// Signals both threads to end; the worker finishes its queue first.
    fn end(&self) {
        self.stop.store(true, Ordering::Release);
        self.bell.ring();
    }

    /// Waits for the threads until `deadline`, but at least [`JOIN_MIN`], and reports those that
    /// panicked or are still running. The latter may be joined later.
    ///
    /// No lock is held while waiting, so the awaited thread, or another one, may call this as well.
    fn join(&self, clock: &dyn Clock, deadline: Moment, report: &mut Shutdown) {
        let deadline = deadline.max(clock.now() + JOIN_MIN);
        let seen = |thread: &Started| (thread.name, thread.id, Arc::clone(&thread.end));
        let started: Vec<_> = lock(&self.started).iter().map(seen).collect();
        for (name, id, end) in started {
            if id == std::thread::current().id() {
                continue; // called from a hook on the worker, which cannot wait for itself
            }
            if !end.wait(clock, deadline) {
                report.busy.push(name.to_owned());
                continue;
            }
            let handle = {
                let mut started = lock(&self.started);
                let thread = started.iter_mut().find(|thread| thread.id == id);
                thread.and_then(|thread| thread.handle.take())
            };
            if handle.is_some_and(|handle| handle.join().is_err()) {
                report.panicked.push(name.to_owned());
            }
        }
    }
}

impl End {
    fn is_over(&self) -> bool {
        self.over.load(Ordering::Acquire)
    }

    /// Waits for the end until the deadline. Returns `true` if the thread has ended.
    fn wait(&self, clock: &dyn Clock, deadline: Moment) -> bool {
        let bell = Bell::new();
        lock(&self.waiting).push(Arc::clone(&bell));
        // Bounded by the deadline: each iteration waits for the deadline or the end.
        while !self.is_over() && clock.now() < deadline {
            clock.wait_until(&bell, deadline);
        }
        lock(&self.waiting).retain(|other| !Arc::ptr_eq(other, &bell));
        self.is_over()
    }
}

/// Dropped at the end of its thread: the last one releases the claim and wakes the waiting
/// shutdowns.
struct Ends {
    end: Arc<End>,
    claim: Arc<Claim>,
}

impl Drop for Ends {
    fn drop(&mut self) {
        if self.claim.threads.fetch_sub(1, Ordering::AcqRel) == 1 {
            self.claim.release();
        }
        self.end.over.store(true, Ordering::Release);
        for bell in &*lock(&self.end.waiting) {
            bell.ring();
        }
    }
}

impl Claim {
    /// Takes the claim; `None` if another `Memory` holds it.
    ///
    /// # Errors
    /// [`StartError::AlreadyStarted`].
    fn take() -> Result<Arc<Self>, StartError> {
        let birth = Birth::now();
        let here = birth.generation();
        let claim = |by| (by != here).then_some(here);
        let taken = STARTED.fetch_update(Ordering::AcqRel, Ordering::Acquire, claim);
        taken.map_err(|_| StartError::AlreadyStarted)?;
        let (held, threads) = (AtomicBool::new(true), AtomicUsize::new(THREADS));
        Ok(Arc::new(Self { held, threads, birth, is_attached: true }))
    }

    /// Returns what stands for the claim of a detached `Memory`, which needs none.
    fn of_none() -> Arc<Self> {
        let (held, threads) = (AtomicBool::new(false), AtomicUsize::new(THREADS));
        Arc::new(Self { held, threads, birth: Birth::now(), is_attached: false })
    }

    /// Allows the next `Memory` to start, once. Does nothing in a forked child, which has its own
    /// claim.
    fn release(&self) {
        if self.birth.is_here() && self.held.swap(false, Ordering::AcqRel) {
            STARTED.store(NOWHERE, Ordering::Release);
        }
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        self.release();
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        if !self.claim.birth.is_here() {
            return;
        }
        let was_running = self.threads.is_running();
        self.queue.close();
        self.threads.end();
        self.claim.release();
        if was_running {
            log!(
                warn,
                target: "lowtide",
                requests_held = self.admission.stats().held(),
                "memory manager dropped without shutdown"
            );
        }
    }
}

/// The outstanding work when a [`Memory`] ended.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Shutdown {
    /// The number of requests that hold permits.
    pub requests: u64,
    /// The resources that were in use until the deadline, each with the reason.
    pub resources: Vec<String>,
    /// The bytes of device memory in buffers that are still held.
    #[cfg(feature = "device")]
    pub device_live: ByteSize,
    /// The threads that panicked.
    pub panicked: Vec<String>,
    /// The threads that were still running a job at the deadline. They end after it.
    pub busy: Vec<String>,
    /// `true` if memory was exhausted and the policy is
    /// [`ExhaustionPolicy::Exit`](crate::config::ExhaustionPolicy). It makes the report an error,
    /// so that a `main` that returns it exits with a status above 0 and is restarted.
    pub exhausted: bool,
    /// `true` if called in a forked child, in which nothing runs.
    pub forked: bool,
}

impl Shutdown {
    /// Returns `true` if nothing is outstanding and memory was not exhausted.
    #[must_use]
    pub fn is_clean(&self) -> bool {
        *self == Self::default()
    }

    /// Returns the report as an error if something is outstanding or memory was exhausted.
    ///
    /// # Errors
    /// The report itself.
    pub fn into_result(self) -> Result<(), Self> {
        if self.is_clean() { Ok(()) } else { Err(self) }
    }
}

impl std::error::Error for Shutdown {}

impl fmt::Display for Shutdown {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.forked {
            return f.write_str("forked child: nothing to shut down");
        }
        if self.exhausted {
            f.write_str("memory exhausted; ")?;
        }
        if (Self { exhausted: false, ..self.clone() }).is_clean() {
            return f.write_str("nothing outstanding");
        }
        let plural = if self.requests == 1 { "" } else { "s" };
        write!(f, "{} request{plural}{}", self.requests, self.devices())?;
        for resource in &self.resources {
            write!(f, "; {resource}")?;
        }
        for thread in &self.panicked {
            write!(f, "; {thread} panicked")?;
        }
        for thread in &self.busy {
            write!(f, "; {thread} still running")?;
        }
        Ok(())
    }
}

/// Returns the stats of every registered resource.
fn resource_stats(resources: &lowtide_admission::Resources) -> Vec<ResourceStats> {
    resources.all().iter().map(|resource: &Arc<dyn Resource>| resource.stats()).collect()
}
