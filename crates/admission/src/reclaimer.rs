//! Reclaimers of the application: caches and other memory that it can release on request.
//!
//! [`Resources::add_reclaimer`](super::Resources::add_reclaimer) registers one. A request or a load
//! that does not fit asks it, in one order with idle resources (`eviction`), and so does level high
//! (`managed::resource`). The application's functions run on temporary threads and with no lock
//! held: a slow one delays no tick and no admission.
//!
//! Memory of a reclaimer is ordinary live memory that no request owns. It becomes room when a
//! sample finds it freed, whatever the functions return.
//!
//! Invariants: neither function of a reclaimer runs twice at once; it is asked for at most what is
//! wanted; the pause between two calls is that of [`ReclaimBackoff`]; at most [`RECLAIMERS_MAX`] names are
//! known in the life of a registry, so that labels of metrics are bounded.
//!
//! It does not choose which reclaimer is asked.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use lowtide_core::bytes::ByteSize;
use lowtide_core::clock::{Clock, Moment};
use lowtide_core::fork::Birth;
use lowtide_core::sync::{Mutex, caught, lock};

use super::cost::Cost;
use super::eviction::{Claimable, EvictionClaim, Idle};
use super::managed::ResourceError;
use super::reclaim::{ReclaimBackoff, elsewhere};
use super::state::AdmissionState;

/// The largest number of names of reclaimers.
pub(super) const RECLAIMERS_MAX: usize = 64;
/// The longest time that the worker waits for a reclaimer.
const ANSWER_MAX: Duration = Duration::from_secs(1);

/// The functions and the cost of a reclaimer.
pub struct Reclaimable {
    pub(super) name: Arc<str>,
    cost: Duration,
    releasable: Box<dyn Fn() -> ByteSize + Send + Sync>,
    release: Box<dyn Fn(ByteSize) -> ByteSize + Send + Sync>,
}

impl Reclaimable {
    /// Describes memory that the application can release: the bytes that `release` could release
    /// now, and `release`, which gets the bytes that are wanted and returns those that it released.
    ///
    /// `releasable` must return at once: while it hangs, requests that do not fit ask no reclaimer.
    /// `release` may take its time, but must not wait for a request.
    #[must_use]
    pub fn new(
        name: impl Into<Arc<str>>,
        releasable: impl Fn() -> ByteSize + Send + Sync + 'static,
        release: impl Fn(ByteSize) -> ByteSize + Send + Sync + 'static,
    ) -> Self {
        let (releasable, release) = (Box::new(releasable), Box::new(release));
        Self { name: name.into(), cost: Duration::ZERO, releasable, release }
    }

    /// Sets the work that each second without 1 GiB of this memory adds: the misses per second that
    /// it causes, times the time of one. Default: zero, so that it is released before any idle
    /// resource.
    ///
    /// It is compared with what an idle resource is worth, its uses per second times its load time
    /// for each GiB ([`Resources::evict_for`](super::Resources::evict_for)). A model of 4 GiB that
    /// is loaded in 20 s and used every 10 minutes is worth 8 ms; a cache of 2 GiB with 400 hits
    /// per second whose misses take 5 ms is worth 1 s, and is released after the model.
    #[must_use]
    pub fn cost_per_gib(mut self, cost: Duration) -> Self {
        self.cost = cost;
        self
    }
}

debug_as!(Reclaimable, |reclaimable| name: reclaimable.name);

/// The counters of a reclaimer at one instant. They continue if its name is registered again.
#[derive(Clone, Debug, Default)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct ReclaimerStats {
    /// The name.
    pub name: Arc<str>,
    /// `true` while it is registered.
    pub registered: bool,
    /// The bytes that it could release when it was last asked.
    pub releasable: ByteSize,
    /// Calls of its release function.
    pub calls_total: u64,
    /// The bytes that the calls reported as released.
    pub released_total: ByteSize,
    /// Calls of one of its functions that panicked.
    pub panics_total: u64,
    /// The message of the last panic.
    pub panic: Option<String>,
    /// The time that the calls of its release function have taken.
    pub time_total: Duration,
}

impl ReclaimerStats {
    /// Counts a panic. Returns the result of a call, zero for a panic.
    fn count(&mut self, called: Result<ByteSize, String>) -> ByteSize {
        called.unwrap_or_else(|message| {
            self.panics_total += 1;
            self.panic = Some(message);
            ByteSize::ZERO
        })
    }
}

/// The reclaimers of a registry, by name. A name stays when its reclaimer is removed.
#[derive(Default)]
pub(super) struct Reclaimers {
    slots: Mutex<Vec<ReclaimerRecord>>,
    /// `true` if no memory is measured, so that a release makes no room.
    pub(super) is_useless: AtomicBool,
}

struct ReclaimerRecord {
    stats: Arc<Mutex<ReclaimerStats>>,
    current: Option<Arc<Registered>>,
}

impl Reclaimers {
    pub(super) fn add(
        reclaimers: &Arc<Self>,
        of: Reclaimable,
        admission: &'static AdmissionState,
        clock: Arc<dyn Clock>,
    ) -> Result<Reclaimer, ResourceError> {
        let mut slots = lock(&reclaimers.slots);
        let place = slots.iter().position(|slot| lock(&slot.stats).name == of.name);
        if place.is_some_and(|at| slots.get(at).is_some_and(|slot| slot.current.is_some())) {
            return Err(ResourceError::Duplicate { name: of.name });
        }
        if place.is_none() && slots.len() >= RECLAIMERS_MAX {
            return Err(ResourceError::TooMany { name: of.name, max: RECLAIMERS_MAX });
        }
        let at = place.unwrap_or_else(|| {
            let stats = ReclaimerStats { name: Arc::clone(&of.name), ..ReclaimerStats::default() };
            slots.push(ReclaimerRecord { stats: Arc::new(Mutex::new(stats)), current: None });
            slots.len() - 1
        });
        let slot = &mut slots[at];
        lock(&slot.stats).registered = true;
        let (stats, pace) = (Arc::clone(&slot.stats), ReclaimBackoff::default());
        let (is_asked, is_removed) = (AtomicBool::new(false), AtomicBool::new(false));
        let registered =
            Arc::new(Registered { of, admission, clock, stats, pace, is_asked, is_removed });
        slot.current = Some(Arc::clone(&registered));
        let reclaimers = Arc::downgrade(reclaimers);
        Ok(Reclaimer { registered, reclaimers, birth: Birth::now() })
    }

    pub(super) fn all(&self) -> Vec<Arc<Registered>> {
        lock(&self.slots).iter().filter_map(|slot| slot.current.clone()).collect()
    }

    pub(super) fn stats(&self) -> Vec<ReclaimerStats> {
        lock(&self.slots).iter().map(|slot| lock(&slot.stats).clone()).collect()
    }

    /// Returns the time from which one may be asked, [`Moment::NEVER`] while each runs, and `None`
    /// if there is none, or none is to be asked.
    pub(super) fn next_ask(&self) -> Option<Moment> {
        if self.is_useless.load(Ordering::Relaxed) {
            return None;
        }
        let slots = lock(&self.slots);
        let registered = slots.iter().filter_map(|slot| slot.current.as_ref());
        registered.map(|registered| registered.pace.next()).min()
    }

    /// Removes a reclaimer unless another one has its name by now.
    fn remove(&self, registered: &Arc<Registered>) {
        let mut slots = lock(&self.slots);
        let is_it = |slot: &&mut ReclaimerRecord| {
            slot.current.as_ref().is_some_and(|current| Arc::ptr_eq(current, registered))
        };
        if let Some(slot) = slots.iter_mut().find(is_it) {
            slot.current = None;
            lock(&slot.stats).registered = false;
        }
    }
}

/// A registered reclaimer. Dropping it removes the reclaimer.
///
/// The drop does not wait: a call that is running ends later, and none begins any more. The
/// functions are then dropped, possibly on a thread of this crate.
#[must_use = "dropping it removes the reclaimer"]
pub struct Reclaimer {
    registered: Arc<Registered>,
    reclaimers: Weak<Reclaimers>,
    birth: Birth,
}

impl Reclaimer {
    /// Returns the name.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.registered.of.name
    }

    /// Returns the counters; in a forked child only the name.
    #[must_use]
    pub fn stats(&self) -> ReclaimerStats {
        if self.birth.is_here() {
            return lock(&self.registered.stats).clone();
        }
        let name = Arc::clone(&self.registered.of.name);
        ReclaimerStats { name, ..ReclaimerStats::default() }
    }
}

impl Drop for Reclaimer {
    fn drop(&mut self) {
        // In a forked child another thread may have held the lock.
        if !self.birth.is_here() {
            return;
        }
        self.registered.is_removed.store(true, Ordering::Release);
        if let Some(reclaimers) = self.reclaimers.upgrade() {
            reclaimers.remove(&self.registered);
        }
    }
}

debug_as!(Reclaimer, |reclaimer| name: reclaimer.name());

pub(super) struct Registered {
    of: Reclaimable,
    admission: &'static AdmissionState,
    clock: Arc<dyn Clock>,
    stats: Arc<Mutex<ReclaimerStats>>,
    pace: ReclaimBackoff,
    /// `true` while its releasable function runs.
    is_asked: AtomicBool,
    is_removed: AtomicBool,
}

impl Registered {
    /// Returns the score: the larger, the sooner it is asked.
    pub(super) fn score(&self) -> f64 {
        if self.of.cost.is_zero() {
            return f64::INFINITY;
        }
        ByteSize::gib(1).as_f64() / self.of.cost.as_secs_f64()
    }

    /// Returns how it may be asked now.
    pub(super) fn idle(registered: &Arc<Self>) -> Option<Idle> {
        if registered.pace.next() > registered.clock.now() {
            return None;
        }
        let releasable = registered.releasable();
        (!releasable.is_zero()).then(|| Idle {
            admission: registered.admission,
            cost: Cost::host(releasable),
            stays_for: Duration::ZERO,
            loaded_for: Duration::ZERO,
            used_for: Duration::ZERO,
            unload_time: Duration::ZERO,
            score: registered.score(),
            is_divisible: true,
            resource: Arc::clone(registered) as Arc<dyn Claimable>,
        })
    }

    fn begin(self: &Arc<Self>) -> Option<ReclaimCall> {
        let may_ask = !self.is_removed.load(Ordering::Acquire) && self.pace.start(self.clock.now());
        may_ask.then(|| ReclaimCall { registered: Arc::clone(self), is_over: false })
    }

    /// Asks for these bytes on a new thread, and returns those that it released. Waits for at most
    /// [`ANSWER_MAX`]; a call that takes longer continues.
    pub(super) fn ask_elsewhere(self: &Arc<Self>, wanted: ByteSize) -> ByteSize {
        let Some(asked) = self.begin() else { return ByteSize::ZERO };
        let released = elsewhere(&*self.clock, ANSWER_MAX, move || {
            let wanted = wanted.min(asked.registered.releasable());
            if wanted.is_zero() { wanted } else { asked.run(wanted) }
        });
        released.unwrap_or_default()
    }

    /// Returns the bytes that it could release now; zero if the function panics, or runs on another
    /// thread, where it may hang.
    fn releasable(&self) -> ByteSize {
        if self.is_asked.swap(true, Ordering::Acquire) {
            return ByteSize::ZERO;
        }
        let releasable = caught(|| (self.of.releasable)());
        self.is_asked.store(false, Ordering::Release);
        let mut stats = lock(&self.stats);
        stats.releasable = stats.count(releasable);
        stats.releasable
    }
}

impl Claimable for Registered {
    fn claim(self: Arc<Self>, bytes: ByteSize) -> Option<EvictionClaim> {
        let call = self.begin()?;
        let unload = move |_: &Arc<str>| {
            call.run(bytes);
            None
        };
        Some((Cost::host(bytes), Box::new(unload)))
    }
}

/// A reclaimer that is being asked. Dropping it before its run ends that.
struct ReclaimCall {
    registered: Arc<Registered>,
    is_over: bool,
}

impl ReclaimCall {
    /// Runs the function on this thread, and returns the bytes that it reported. A panic counts as
    /// none.
    fn run(mut self, wanted: ByteSize) -> ByteSize {
        self.is_over = true;
        let registered = &*self.registered;
        let start = registered.clock.now();
        let ran = caught(|| (registered.of.release)(wanted));
        let now = registered.clock.now();
        let mut stats = lock(&registered.stats);
        stats.calls_total += 1;
        stats.time_total = stats.time_total.saturating_add(now - start);
        let released = stats.count(ran);
        stats.released_total = stats.released_total.saturating_add(released);
        stats.releasable = stats.releasable.saturating_sub(released);
        drop(stats);
        registered.pace.finish(wanted, released, now);
        released
    }
}

impl Drop for ReclaimCall {
    fn drop(&mut self) {
        if !self.is_over {
            self.registered.pace.cancel();
        }
    }
}
