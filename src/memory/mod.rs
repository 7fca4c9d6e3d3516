//! `Memory`: the parts of the crate joined into one that runs.
//!
//! It builds heap settings, device arenas, admission and resources from one [`Config`], joins
//! policy to mechanism, owns the two threads (`lowtide-control` decides, `lowtide-worker` does),
//! and stops them. It holds no policy and no mechanism of its own. Without it heap and arenas work
//! all the same; nothing is timed, admitted or published then.
//!
//! It runs until [`Memory::shutdown`], or until the last handle is dropped: a [`Memory`], or an
//! [`Admission`] that came from one, which every layer holds. What the threads and resources hold
//! is no such handle, so that nothing keeps itself running.
//!
//! Invariants: at most one `Memory` runs in a process; `threads = 2` while it does, 0 after
//! [`Memory::shutdown`]; dropping it never blocks.

mod admin_tasks;
mod arenas;
mod builder;
mod device;
mod driver;
mod error;
mod events;
mod found;
#[cfg(feature = "cuda")]
mod governors;
mod hands;
mod heap;
mod history;
mod own_arena;
mod published;
mod resources;
mod scopes;
mod sensor;
mod shared;
mod shrink;
mod sleep;
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
use crate::control::{Admission, Budget, Cost, Job, JobQueue, Resource, Trigger};
use crate::control::{Level, ResourceStats};
use crate::device::{ArenaCells, ArenaConfig, DeviceArena};
use crate::fork::Birth;
use crate::sync::{Mutex, lock};

pub use admin_tasks::{AdminCommand, AdminError, AdminTask, AdminTaskState};
pub use builder::Builder;
pub use error::{Diagnostic, MemoryError, Severity, StartError};
pub use events::Event;
pub use history::HistorySample;
pub use scopes::{ArenaReport, ArenaUse, Replaced, ScopeError, Slot, SlotKind, SlotSnapshot};
pub use shared::Purged;
pub use shrink::{Run, ShrinkError, ShrinkFailure, ShrinkOutcome, Shrunk, ShrunkTarget};
pub use snapshot::{BudgetSnapshot, DeviceSnapshot, MemorySnapshot};
pub use threads::on_thread_start;

use shared::Shared;

/// The process generation in which a `Memory` runs, or [`NOWHERE`]: what the parent of a fork
/// claimed is no claim in the child.
static STARTED: AtomicU64 = AtomicU64::new(NOWHERE);
/// No `Memory` runs.
const NOWHERE: u64 = u64::MAX;

/// The memory of a service, managed. A cheap handle; all clones are the same.
///
/// It runs while a handle lives: this one, a clone, or a handle of [`Memory::admission`], which
/// every layer holds. Dropping the last one without [`Memory::shutdown`] ends the threads and logs
/// a warning.
///
/// ```
/// use lowtide::{ByteSize, Memory};
/// use lowtide::control::Cost;
///
/// let memory = Memory::builder().memory_limit(ByteSize::gib(1)).start()?;
/// let permit = memory.admission().try_admit(Cost::host(ByteSize::mib(3)))?;
/// // ... the request's work ...
/// drop(permit);
/// println!("{}", memory.shutdown(std::time::Duration::from_secs(5)));
/// # Ok::<(), lowtide::BoxError>(())
/// ```
///
/// A handle that is dropped at once manages nothing, so the compiler warns:
///
/// ```compile_fail
/// #![deny(unused_must_use)]
/// lowtide::Memory::builder().start()?;
/// # Ok::<(), lowtide::BoxError>(())
/// ```
#[derive(Clone)]
#[must_use = "dropping the last handle ends the threads, and nothing is measured any more"]
pub struct Memory(Arc<Inner>);

/// A handle of a [`Memory`] that does not keep it running.
#[derive(Clone)]
pub struct WeakMemory {
    shared: Weak<Shared>,
    running: Weak<Running>,
}

impl WeakMemory {
    /// Returns the `Memory` while another handle keeps it running. Allocates some bytes.
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
    /// Holds `running`.
    admission: Admission,
}

/// Ends the threads when the last handle is dropped. It holds no arena and no resource, so that
/// what keeps the threads running does not keep those after a shutdown.
struct Running {
    threads: Threads,
    queue: Arc<JobQueue>,
    claim: Arc<Claim>,
    /// Keeps nothing running.
    admission: Admission,
}

/// How long a shutdown waits for its threads at least, whatever its deadline: threads without a job
/// end at once, and a purge of 10 GiB takes as long.
const JOIN_MIN: Duration = Duration::from_secs(1);

/// How many threads a `Memory` has.
const THREADS: usize = 2;

/// The two threads. Dropping it tells them to end and does not wait.
struct Threads {
    stop: Arc<AtomicBool>,
    bell: Arc<Bell>,
    started: Mutex<Vec<Started>>,
}

/// A thread that was started. Its end stays known after it has been joined.
struct Started {
    name: &'static str,
    id: ThreadId,
    end: Arc<End>,
    /// Until somebody joins it.
    handle: Option<JoinHandle<()>>,
}

/// Says that a thread's work is over, by a panic too.
#[derive(Default)]
struct End {
    over: AtomicBool,
    /// One for each shutdown that waits: a ring wakes one.
    waiting: Mutex<Vec<Arc<Bell>>>,
}

/// The right to be the one `Memory` of this process. Given back once: by the last of the two
/// threads when it ends, or when every handle is gone.
struct Claim {
    held: AtomicBool,
    /// Threads that have not ended.
    threads: AtomicUsize,
    birth: Birth,
}

impl Memory {
    fn of(shared: Arc<Shared>, running: Arc<Running>) -> Self {
        let admission = shared.admission.keeping(running.clone());
        Self(Arc::new(Inner { shared, running, admission }))
    }

    /// Returns a builder with default settings. It does not read the environment:
    /// [`Builder::with_environment`] does, and [`Memory::start`] is both.
    #[must_use]
    pub fn builder() -> Builder {
        Builder::default()
    }

    /// Starts a `Memory` with default settings and the `LOWTIDE_*` variables of the environment:
    /// short for `Memory::builder().with_environment()?.start()`.
    ///
    /// [`Builder::start`] alone does **not** read the environment, so `LOWTIDE_MEMORY_LIMIT` and
    /// the other variables have no effect there.
    ///
    /// # Errors
    /// As [`Builder::with_environment`] and [`Builder::start`].
    pub fn start() -> Result<Self, StartError> {
        Self::builder().with_environment()?.start()
    }

    /// A handle that does not keep it running: for loaders, clean-ups and hooks. One of those that
    /// holds a `Memory` or an [`Admission`] keeps it running until [`Memory::shutdown`].
    #[must_use]
    pub fn downgrade(&self) -> WeakMemory {
        let Inner { shared, running, .. } = &*self.0;
        WeakMemory { shared: Arc::downgrade(shared), running: Arc::downgrade(running) }
    }

    /// What is in force, each value with its source.
    #[must_use]
    pub fn config(&self) -> &Config {
        &self.0.shared.config
    }

    /// What did not go as asked, or cannot be had here: each once, in order of appearance. None in
    /// a forked child.
    #[must_use]
    pub fn diagnostics(&self) -> Vec<Diagnostic> {
        self.0.shared.diagnostics()
    }

    /// Returns a handle to admission, which requests book against. It is a handle of this `Memory`
    /// as well: while a clone of it lives, in a layer for example, the threads run and correct the
    /// account. After [`Memory::shutdown`] it is closed.
    #[must_use]
    pub fn admission(&self) -> &Admission {
        &self.0.admission
    }

    /// The pressure on host memory.
    #[must_use]
    pub fn level(&self) -> Level {
        self.0.shared.state.level(Budget::Host)
    }

    /// A cost as it is booked. If device memory is host memory, because arenas lie in the memory of
    /// this process or on an integrated GPU, there is one budget for both: all of it is the host's
    /// then, as in every admission of this `Memory`.
    #[must_use]
    pub fn cost(&self, host: ByteSize, device: ByteSize) -> Cost {
        self.admission().by_budget(Cost::host(host).and_device(device))
    }

    /// Opens a device arena with the configured driver, limit, decay and idle time; it is sampled,
    /// decays, falls asleep by itself where that is configured and is published until this
    /// `Memory` ends, or somebody closes it ([`DeviceArena::close`]), which frees its name. That
    /// all handles are dropped does not end it.
    ///
    /// Else it is as [`ArenaConfig::new`] has it, and may be told otherwise:
    /// [`DeviceArena::set_limit`], [`DeviceArena::set_decay`], [`DeviceArena::set_thread_cache`].
    /// Growth by steps is had through [`Memory::share_arena`]. One that is opened after
    /// [`Memory::shutdown`] is left to its caller.
    ///
    /// # Errors
    /// [`MemoryError::NoDevice`] where the configuration says `none`, [`MemoryError::Arena`] where
    /// the driver refuses, [`MemoryError::TooManyArenas`], [`MemoryError::DuplicateArena`],
    /// [`MemoryError::Forked`].
    pub fn open_arena(&self, name: &str) -> Result<DeviceArena, MemoryError> {
        let shared = &self.0.shared;
        let config =
            ArenaConfig { limit: shared.config.device_limit.value, ..shared.arena_config(name) };
        shared.open_arena(config)
    }

    /// Purges heap and arenas now, on this thread: about 0.1 ms for each MiB given back. Not for a
    /// thread of an async runtime; see [`Memory::request_purge`].
    /// [`Builder::after_tcache_flush_request`] is not called: that is the worker's.
    ///
    /// # Errors
    /// [`MemoryError::Forked`].
    pub fn purge(&self) -> Result<Purged, MemoryError> {
        self.0.shared.check_here()?;
        Ok(self.0.shared.purge(Trigger::Manual))
    }

    /// Has the worker purge heap and arenas; returns at once. In a forked child, which has no
    /// worker, does nothing.
    pub fn request_purge(&self) {
        if self.0.shared.check_here().is_err() {
            return;
        }
        self.0.shared.queue.push_one(Job::Purge { trigger: Trigger::Manual });
    }

    /// Every figure at one instant. Costs a refresh of jemalloc's statistics and a few reads of
    /// `/proc`: some tens of microseconds. In a forked child there is no heap, arena, resource or
    /// note in it.
    #[must_use]
    pub fn snapshot(&self) -> MemorySnapshot {
        self.0.shared.snapshot()
    }

    /// The last events, oldest first: at most 64. None in a forked child.
    #[must_use]
    pub fn events(&self) -> Vec<Event> {
        let shared = &self.0.shared;
        if shared.birth.is_here() { shared.events.all() } else { Vec::new() }
    }

    /// A few figures at each of the last publications, oldest first: at most 300. None in a forked
    /// child.
    #[must_use]
    pub fn history(&self) -> Vec<HistorySample> {
        let shared = &self.0.shared;
        if shared.birth.is_here() { shared.history.all() } else { Vec::new() }
    }

    /// Where everything lies in each arena, those that serve first, then those that drain: by name,
    /// in at most `cells_max` cells altogether (and never fewer than 4 for each arena). Costs
    /// [`DeviceArena::cells`] for each.
    #[must_use]
    pub fn cells(&self, cells_max: usize) -> Vec<(String, ArenaCells)> {
        let arenas = self.0.shared.arenas();
        let each = cells_max / (2 * arenas.len()).max(1);
        arenas.iter().map(|arena| (arena.name().to_owned(), arena.cells(each))).collect()
    }

    /// The names of the arenas in that order.
    #[cfg(feature = "service")]
    pub(crate) fn arena_names(&self) -> Vec<String> {
        self.0.shared.arenas().iter().map(|arena| arena.name().to_owned()).collect()
    }

    /// The time by the clock that it goes by.
    #[cfg(feature = "service")]
    pub(crate) fn now(&self) -> Moment {
        self.0.shared.clock.now()
    }

    /// Ends it in order: admits nothing more, waits for resources that are in use, unloads them,
    /// and joins the threads. Blocks until the deadline at most, and a second longer where a job is
    /// under way; not for a thread of an async runtime. A second call finds nothing left to do; one
    /// that comes while the first still waits does so as well. The next `Memory` may start when
    /// both threads have ended; called on one of them (from a hook), it waits for the other only.
    ///
    /// It closes no arena, and nobody looks for idle memory any more. On a device, call
    /// [`DeviceArena::close`] afterwards, when the last buffer is gone: it waits for the device,
    /// gives all memory back and has adopted memory released, which the drop of the last handle
    /// cannot while work may go on.
    #[must_use = "the report says what is still outstanding"]
    pub fn shutdown(&self, deadline: Duration) -> Shutdown {
        let shared = &self.0.shared;
        if !shared.birth.is_here() {
            return Shutdown { forked: true, ..Shutdown::default() };
        }
        shared.admission.close();
        let end = shared.clock.now() + deadline;
        let mut report = Shutdown::default();
        for resource in shared.resources.all() {
            if let Err(error) = resource.close(end - shared.clock.now()) {
                report.resources.push(error.to_string());
            }
        }
        self.0.running.threads.end();
        self.0.running.threads.join(&*shared.clock, end, &mut report);
        shared.end_empty_sleeps();
        report.requests = shared.admission.stats().held();
        report.device_live = shared.arenas().iter().map(|arena| arena.glance().live).sum();
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
    /// Whether both were started, and nothing has told them to end.
    fn is_running(&self) -> bool {
        lock(&self.started).len() == THREADS && !self.stop.load(Ordering::Acquire)
    }

    /// Tells both threads to end; the worker does first what waits.
    fn end(&self) {
        self.stop.store(true, Ordering::Release);
        self.bell.ring();
    }

    /// Waits for the threads until `deadline`, or [`JOIN_MIN`] where that is longer, and reports
    /// those that panicked or are still at work; the latter may be joined later.
    ///
    /// No lock is held meanwhile, so that a thread which is waited for, or another one, may call
    /// this as well.
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

    /// Waits for it until the deadline; says whether it has come.
    fn wait(&self, clock: &dyn Clock, deadline: Moment) -> bool {
        let bell = Bell::new();
        lock(&self.waiting).push(Arc::clone(&bell));
        // Ends at the deadline at the latest: each turn waits until then, or for the end.
        while !self.is_over() && clock.now() < deadline {
            clock.wait_until(&bell, deadline);
        }
        lock(&self.waiting).retain(|other| !Arc::ptr_eq(other, &bell));
        self.is_over()
    }
}

/// Ends the thread that holds it: the last one gives the claim back, and who waits is told.
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
    /// Takes it; `None` where another `Memory` has it.
    fn take() -> Option<Arc<Self>> {
        let birth = Birth::now();
        let here = birth.generation();
        let claim = |by| (by != here).then_some(here);
        STARTED.fetch_update(Ordering::AcqRel, Ordering::Acquire, claim).ok()?;
        let (held, threads) = (AtomicBool::new(true), AtomicUsize::new(THREADS));
        Some(Arc::new(Self { held, threads, birth }))
    }

    /// Lets the next `Memory` start, once. In a forked child, whose claim is another, does nothing.
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
                "memory dropped without shutdown"
            );
        }
    }
}

/// What was still outstanding when a [`Memory`] ended.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Shutdown {
    /// Requests whose permits are held.
    pub requests: u64,
    /// Resources that were in use until the deadline, each with the reason.
    pub resources: Vec<String>,
    /// Device bytes that are live: buffers that somebody still holds.
    pub device_live: ByteSize,
    /// Threads that ended by a panic.
    pub panicked: Vec<String>,
    /// Threads that still did a job at the deadline; they end after it.
    pub busy: Vec<String>,
    /// Called in a forked child, where there is nothing to end.
    pub forked: bool,
}

impl Shutdown {
    /// Whether nothing is outstanding.
    #[must_use]
    pub fn is_clean(&self) -> bool {
        *self == Self::default()
    }
}

impl fmt::Display for Shutdown {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.forked {
            return f.write_str("a forked child: nothing to end");
        }
        if self.is_clean() {
            return f.write_str("nothing outstanding");
        }
        let plural = if self.requests == 1 { "" } else { "s" };
        write!(f, "{} request{plural}, {} of device memory live", self.requests, self.device_live)?;
        for resource in &self.resources {
            write!(f, "; {resource}")?;
        }
        for thread in &self.panicked {
            write!(f, "; {thread} panicked")?;
        }
        for thread in &self.busy {
            write!(f, "; {thread} is still at work")?;
        }
        Ok(())
    }
}

/// The stats of every registered resource.
fn resource_stats(resources: &crate::control::Resources) -> Vec<ResourceStats> {
    resources.all().iter().map(|resource: &Arc<dyn Resource>| resource.stats()).collect()
}
