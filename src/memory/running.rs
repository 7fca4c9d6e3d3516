//! The two threads of a `Memory`, those of its flight recorder and profiler, their end, and the
//! claim that makes a `Memory` the only one of its process.
//!
//! `builder` starts them. They end when they are told to, or when the last handle is dropped.
//!
//! Invariants: at most one claim is held in a process; dropping [`RunningMemory`] waits for no
//! thread but the flight recorder's, and for that at most [`RECORDED_WITHIN`].

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::thread::{JoinHandle, ThreadId};
use std::time::Duration;

use crate::clock::{Bell, Clock, Moment, SystemClock};
use crate::fork::Birth;
use crate::sync::{Mutex, lock};
use lowtide_admission::{Admission, PressureState};

use super::error::{Shutdown, StartError};
use super::events::EventLog;
use super::flight::{Flight, RunEnd};

/// The threads, which are told to end when the last handle is dropped. It holds no arena and no
/// resource, so that these are not kept alive after a shutdown.
pub(super) struct RunningMemory {
    pub(super) stop: Arc<AtomicBool>,
    pub(super) bell: Arc<Bell>,
    /// Those of the flight recorder, the profiler and the pager.
    pub(super) other_bells: Vec<Arc<Bell>>,
    pub(super) started: Mutex<Vec<Started>>,
    pub(super) claim: Arc<ProcessClaim>,
    /// Does not keep the manager running.
    pub(super) admission: Admission,
    #[cfg_attr(not(feature = "service"), expect(dead_code, reason = "for layers"))]
    pub(super) events: Arc<EventLog>,
    pub(super) flight: Arc<Flight>,
    pub(super) state: Arc<PressureState>,
}

/// The minimum time that a shutdown waits for its threads, regardless of its deadline: idle threads
/// end immediately, and a purge of 10 GiB takes this long.
const JOIN_MIN: Duration = Duration::from_secs(1);

/// The time for which a drop waits for the flight recorder to write the end: the process may exit
/// next, and would seem to have been killed. A record takes less than a millisecond if its disk
/// does not block.
const RECORDED_WITHIN: Duration = Duration::from_millis(100);

/// The name of the flight recorder's thread.
pub(super) const FLIGHT: &str = "lowtide-flight";

/// A thread that was started. Its end stays recorded after it has been joined.
pub(super) struct Started {
    pub(super) name: &'static str,
    pub(super) id: ThreadId,
    pub(super) end: Arc<ThreadEnd>,
    /// The handle, until the thread is joined.
    pub(super) handle: Option<JoinHandle<()>>,
}

/// Records that a thread has ended, also by a panic.
#[derive(Default)]
pub(super) struct ThreadEnd {
    over: AtomicBool,
    /// Wakes one waiting shutdown, which wakes the next.
    bell: Arc<Bell>,
}

impl RunningMemory {
    /// Signals the threads to end; the worker finishes its queue first.
    pub(super) fn end(&self) {
        self.stop.store(true, Ordering::Release);
        self.bell.ring();
        self.other_bells.iter().for_each(|bell| bell.ring());
    }

    /// Waits for the threads until `deadline`, but at least [`JOIN_MIN`], and reports those that
    /// panicked or are still running. The latter may be joined later.
    ///
    /// No lock is held while waiting, so the awaited thread, or another one, may call this as well.
    pub(super) fn join(&self, clock: &dyn Clock, deadline: Moment, report: &mut Shutdown) {
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
            let is_it = |thread: &&mut Started| thread.id == id;
            let handle = lock(&self.started).iter_mut().find(is_it).and_then(|it| it.handle.take());
            if handle.is_some_and(|handle| handle.join().is_err()) {
                report.panicked.push(name.to_owned());
            }
        }
    }
}

impl ThreadEnd {
    /// Waits for the end until the deadline. Returns `true` if the thread has ended.
    fn wait(&self, clock: &dyn Clock, deadline: Moment) -> bool {
        let is_over = || self.over.load(Ordering::Acquire);
        // Bounded by the deadline: each iteration waits for the deadline or the end.
        while !is_over() && clock.now() < deadline {
            clock.wait_until(&self.bell, deadline);
        }
        let is_over = is_over();
        if is_over {
            self.bell.ring();
        }
        is_over
    }
}

/// Dropped at the end of its thread: the last one releases the claim and wakes the waiting
/// shutdowns.
pub(super) struct ThreadEndGuard {
    pub(super) end: Arc<ThreadEnd>,
    claim: Arc<ProcessClaim>,
}

impl ThreadEndGuard {
    /// Counts a thread of the claim.
    pub(super) fn of(claim: &Arc<ProcessClaim>) -> Self {
        claim.threads.fetch_add(1, Ordering::AcqRel);
        Self { end: Arc::default(), claim: Arc::clone(claim) }
    }
}

impl Drop for ThreadEndGuard {
    fn drop(&mut self) {
        if self.claim.threads.fetch_sub(1, Ordering::AcqRel) == 1 {
            self.claim.release();
        }
        self.end.over.store(true, Ordering::Release);
        self.end.bell.ring();
    }
}

impl Drop for RunningMemory {
    fn drop(&mut self) {
        if !self.claim.birth.is_here() {
            return;
        }
        let was_running =
            lock(&self.started).len() >= THREADS && !self.stop.load(Ordering::Acquire);
        self.flight.end(if std::thread::panicking() { RunEnd::Panicked } else { RunEnd::Dropped });
        self.state.close();
        self.end();
        let this = std::thread::current().id();
        let is_recorder = |thread: &&Started| thread.name == FLIGHT && thread.id != this;
        let recorder = lock(&self.started).iter().find(is_recorder).map(|it| Arc::clone(&it.end));
        if let Some(end) = recorder {
            let clock = SystemClock::new();
            end.wait(&clock, clock.now() + RECORDED_WITHIN);
        }
        self.claim.release();
        let requests_held = self.admission.stats().held();
        if was_running && requests_held > 0 {
            log!(warn, requests_held, "memory manager dropped without shutdown");
        } else if was_running {
            // Perhaps by an error that ends `main`, which is logged after this.
            log!(debug, "memory manager dropped without shutdown");
        }
    }
}

/// The number of threads that every `Memory` has.
pub(super) const THREADS: usize = 2;

/// The process generation in which a `Memory` runs, or [`NOWHERE`]. A forked child does not inherit
/// the parent's claim.
static STARTED: AtomicU64 = AtomicU64::new(NOWHERE);
/// No `Memory` runs.
const NOWHERE: u64 = u64::MAX;

/// The right to run the one `Memory` of this process. Released once: by the last of its threads
/// when it ends, or when every handle is dropped.
pub(super) struct ProcessClaim {
    held: AtomicBool,
    /// The number of threads that have not ended.
    threads: AtomicUsize,
    pub(super) birth: Birth,
    /// `false` for a detached `Memory`.
    pub(super) is_attached: bool,
}

impl ProcessClaim {
    /// Takes the claim; `None` if another `Memory` holds it.
    ///
    /// # Errors
    /// [`StartError::AlreadyStarted`].
    pub(super) fn take() -> Result<Arc<Self>, StartError> {
        let here = Birth::now().generation();
        let claim = |by| (by != here).then_some(here);
        let taken = STARTED.fetch_update(Ordering::AcqRel, Ordering::Acquire, claim);
        taken.map_err(|_| StartError::AlreadyStarted)?;
        Ok(Self::new(true))
    }

    /// Returns a claim that was taken, or what stands for that of a detached `Memory`, which needs
    /// none.
    pub(super) fn new(is_attached: bool) -> Arc<Self> {
        let (held, threads) = (AtomicBool::new(is_attached), AtomicUsize::new(0));
        Arc::new(Self { held, threads, birth: Birth::now(), is_attached })
    }

    /// Allows the next `Memory` to start, once. Does nothing in a forked child, which has its own
    /// claim.
    pub(super) fn release(&self) {
        if self.birth.is_here() && self.held.swap(false, Ordering::AcqRel) {
            STARTED.store(NOWHERE, Ordering::Release);
        }
    }
}

impl Drop for ProcessClaim {
    fn drop(&mut self) {
        self.release();
    }
}
