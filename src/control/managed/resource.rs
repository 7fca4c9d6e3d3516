//! Resources as the control loop sees them: when one is due, and unloading it; nothing of its type.
//!
//! The loop decides and the worker unloads. This file loads nothing.
//!
//! Invariant: `next_due` of a registry is the least of its members', and a member that is
//! guarded has none.

use std::fmt;
use std::sync::{Arc, Weak};
use std::time::Duration;

use crate::bytes::ByteSize;
use crate::clock::{Clock, Moment};
use crate::control::admission::{Admission, Cost};
use crate::control::eviction::{Evictor, Idle, Pool};
use crate::control::ledger::Budget;
use crate::control::pressure::Level;
use crate::control::reclaim::{Ask, Reclaim, Recovered};
use crate::fork::Birth;
use crate::sync::{Mutex, lock};

use super::error::{AddError, UnloadError};

/// Why a resource was unloaded.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum UnloadReason {
    /// It was not used for its idle time.
    Idle,
    /// Memory was short.
    Pressure,
    /// A load or a request had no room.
    Eviction,
    /// Somebody asked for it.
    Asked,
    /// The service ends.
    Shutdown,
}

impl UnloadReason {
    /// All reasons.
    pub const ALL: [Self; 5] =
        [Self::Idle, Self::Pressure, Self::Eviction, Self::Asked, Self::Shutdown];

    /// Its label in metrics.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Idle => "idle",
            Self::Pressure => "pressure",
            Self::Eviction => "eviction",
            Self::Asked => "manual",
            Self::Shutdown => "shutdown",
        }
    }
}

/// How often a resource has been unloaded, by reason.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Unloads {
    counts: [u64; UnloadReason::ALL.len()],
}

impl Unloads {
    /// For this reason.
    #[must_use]
    pub fn total(&self, reason: UnloadReason) -> u64 {
        self.counts.get(reason as usize).copied().unwrap_or(0)
    }

    /// For all reasons.
    #[must_use]
    pub fn sum(&self) -> u64 {
        self.counts.iter().sum()
    }

    pub(super) fn count(&mut self, reason: UnloadReason) {
        if let Some(count) = self.counts.get_mut(reason as usize) {
            *count += 1;
        }
    }
}

/// What there is to know about a resource at one instant.
#[derive(Clone, Debug)]
pub struct ResourceStats {
    /// Its name.
    pub name: Arc<str>,
    /// Whether it is loaded.
    pub loaded: bool,
    /// Whether it is being loaded, be it that nobody waits for it.
    pub loading: bool,
    /// Guards that are held.
    pub guards: usize,
    /// Callers that wait for it.
    pub waiting: usize,
    /// What its next load books: what its builder said, or what it was found to hold where that is
    /// more and the builder said anything.
    pub cost: Cost,
    /// Loads that succeeded.
    pub loads_ok_total: u64,
    /// Loads that failed.
    pub loads_failed_total: u64,
    /// Loads that were not begun because the cost did not fit, or was shed by level.
    pub loads_refused_total: u64,
    /// Unloads, by reason.
    pub unloads: Unloads,
    /// Clean-ups that panicked.
    pub unload_panics_total: u64,
    /// When its last guard was released; `None` before.
    pub last_used: Option<Moment>,
    /// When it will be unloaded for idleness, if nobody uses it before; `None` while it is not
    /// loaded, is used, or has no idle time.
    pub due: Option<Moment>,
    /// How long the last successful load took.
    pub load_time: Duration,
    /// How long the last clean-up took.
    pub unload_time: Duration,
    /// What it held right after its last load, where its enclosure can tell: a heap arena of its
    /// own can of the host's memory, a device arena of its own of the device's. Nothing of a budget
    /// of which it cannot. If jemalloc does not serve C and C++ code (feature `interpose`), a load
    /// that ran alone is also measured by the growth of the process.
    pub measured: Option<Cost>,
    /// What its unloads gave back in all, as far as its enclosure could tell.
    pub recovered_total: Cost,
}

impl ResourceStats {
    /// What is known without a look at it.
    pub(super) fn unknown(name: Arc<str>, cost: Cost) -> Self {
        Self {
            name,
            loaded: false,
            loading: false,
            guards: 0,
            waiting: 0,
            cost,
            loads_ok_total: 0,
            loads_failed_total: 0,
            loads_refused_total: 0,
            unloads: Unloads::default(),
            unload_panics_total: 0,
            last_used: None,
            due: None,
            load_time: Duration::ZERO,
            unload_time: Duration::ZERO,
            measured: None,
            recovered_total: Cost::ZERO,
        }
    }
}

/// A resource of any type.
pub trait Resource: Send + Sync {
    /// Its name.
    fn name(&self) -> &str;

    /// When it may be unloaded for idleness, or when its load times out; [`Moment::NEVER`] while it
    /// is neither loaded nor loading, is used, or has no such time. Does not allocate.
    fn next_due(&self) -> Moment;

    /// Unloads it on the calling thread if it is due, and says whether it did. Gives up a load that
    /// has timed out.
    fn unload_if_due(&self, now: Moment) -> bool;

    /// Unloads it on the calling thread if nobody holds it, and says whether it did. For pressure
    /// only after its minimum residency.
    fn unload(&self, reason: UnloadReason) -> bool;

    /// Closes it for good and waits until it is unloaded.
    ///
    /// # Errors
    /// [`UnloadError::Busy`] where it is still held when `wait` is over.
    fn close(&self, wait: Duration) -> Result<(), UnloadError>;

    /// What there is to know about it; in a forked child its name and cost alone.
    fn stats(&self) -> ResourceStats;

    /// Whether it may be evicted, now or after its minimum residency, to make room for others. By
    /// default never.
    #[doc(hidden)]
    fn idle(&self) -> Option<Idle> {
        None
    }
}

/// The resources of a service. Cheap to clone; all clones are one. In a forked child there are
/// none, and none can be added.
#[derive(Clone)]
pub struct Resources {
    list: Arc<Mutex<Vec<Arc<dyn Resource>>>>,
    birth: Birth,
}

impl Resources {
    /// How many resources there may be.
    pub const MAX: usize = 1024;

    /// None yet.
    #[must_use]
    pub fn new() -> Self {
        Self { list: Arc::default(), birth: Birth::now() }
    }

    /// Adds one. It stays, and so its name is taken, as long as this registry.
    ///
    /// # Errors
    /// [`AddError`] where there are [`Resources::MAX`] already, or one of that name, or in a forked
    /// child; nothing happens then.
    pub fn add(&self, resource: Arc<dyn Resource>) -> Result<(), AddError> {
        if !self.birth.is_here() {
            return Err(AddError::Forked);
        }
        let mut list = lock(&self.list);
        if list.len() >= Self::MAX {
            return Err(AddError::Full { max: Self::MAX });
        }
        if list.iter().any(|other| other.name() == resource.name()) {
            return Err(AddError::Duplicate { name: resource.name().to_owned() });
        }
        list.push(resource);
        Ok(())
    }

    /// All of them, in the order in which they were added.
    #[must_use]
    pub fn all(&self) -> Vec<Arc<dyn Resource>> {
        if self.birth.is_here() { lock(&self.list).clone() } else { Vec::new() }
    }

    /// When the next one is due. Does not allocate; costs a look at each.
    #[must_use]
    pub fn next_due(&self) -> Moment {
        if !self.birth.is_here() {
            return Moment::NEVER;
        }
        let list = lock(&self.list);
        list.iter().map(|resource| resource.next_due()).min().unwrap_or(Moment::NEVER)
    }

    /// Returns how many loads have succeeded. Does not allocate; costs a look at each resource.
    pub(crate) fn loads_total(&self) -> u64 {
        if !self.birth.is_here() {
            return 0;
        }
        lock(&self.list).iter().map(|resource| resource.stats().loads_ok_total).sum()
    }

    /// Unloads those that are due, on the calling thread, and says how many were.
    pub fn unload_due(&self, now: Moment) -> usize {
        self.all().iter().filter(|resource| resource.unload_if_due(now)).count()
    }

    /// Has this admission evict idle resources of this registry before it rejects for want of room:
    /// loads of resources that are built with it, and requests, which are rejected with the time
    /// that the unloads take and find the room when they come again.
    ///
    /// Resources are unloaded in one step: as few as make enough room, those first that cost least
    /// to load again, or none. Evicted are resources that are not in use or waited for, are booked
    /// with this admission, and are past their minimum residency, however short they have been
    /// idle. What they had booked stays booked until they are gone; then it is the load's.
    ///
    /// The unloads run on threads that end with them. When those of one step have ended, `after` is
    /// called on one of those threads, before the room is used: the place to purge the heap.
    ///
    /// The registry is not kept alive. A second call replaces the first.
    pub fn evict_for(
        &self,
        admission: &Admission,
        clock: Arc<dyn Clock>,
        after: impl Fn() + Send + Sync + 'static,
    ) {
        let pool = WeakResources { list: Arc::downgrade(&self.list), birth: self.birth };
        admission.set_evictor(Evictor::new(Box::new(pool), clock, Box::new(after)));
    }

    /// A reclaimer that unloads idle resources at level high: first those whose return costs least
    /// for what they hold, `bytes x idle time / load time`.
    #[must_use]
    pub fn reclaimer(&self, budget: Budget) -> Arc<dyn Reclaim> {
        Arc::new(IdleResources { resources: self.clone(), budget })
    }
}

impl Default for Resources {
    fn default() -> Self {
        Self::new()
    }
}

impl fmt::Debug for Resources {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names: Vec<_> = self.all().iter().map(|resource| resource.name().to_owned()).collect();
        f.debug_list().entries(names).finish()
    }
}

/// Resources that it does not keep.
struct WeakResources {
    list: Weak<Mutex<Vec<Arc<dyn Resource>>>>,
    birth: Birth,
}

impl Pool for WeakResources {
    fn idle(&self) -> Vec<Idle> {
        let Some(list) = self.list.upgrade() else { return Vec::new() };
        let all = Resources { list, birth: self.birth }.all();
        all.iter().filter_map(|resource| resource.idle()).collect()
    }
}

/// By how much it is better to unload this than another: the larger, the sooner.
pub(super) fn score(bytes: ByteSize, idle: Duration, load: Duration) -> f64 {
    bytes.as_f64() * idle.as_secs_f64() / load.max(Duration::from_millis(1)).as_secs_f64()
}

/// Unloads what is idle until enough is recovered.
#[derive(Debug)]
struct IdleResources {
    resources: Resources,
    budget: Budget,
}

impl IdleResources {
    /// What it holds: what it was found to, or what it was said to where that is more.
    fn bytes(&self, stats: &ResourceStats) -> ByteSize {
        self.part_of(stats.cost).max(self.part_of(stats.measured.unwrap_or_default()))
    }

    const fn part_of(&self, cost: Cost) -> ByteSize {
        match self.budget {
            Budget::Host => cost.host,
            Budget::Device => cost.device,
        }
    }

    /// What an unload gave back: what was measured of it, or what was booked.
    fn given_back(&self, before: &ResourceStats, after: &ResourceStats) -> ByteSize {
        let total = |stats: &ResourceStats| self.part_of(stats.recovered_total);
        let measured = total(after).saturating_sub(total(before));
        if measured.is_zero() { self.bytes(before) } else { measured }
    }

    /// The larger, the sooner it goes.
    fn score(&self, stats: &ResourceStats, now: Moment) -> f64 {
        let idle = now - stats.last_used.unwrap_or(Moment::ORIGIN);
        score(self.bytes(stats), idle, stats.load_time)
    }
}

impl Reclaim for IdleResources {
    fn name(&self) -> &str {
        "idle-resources"
    }

    fn relieves(&self) -> Budget {
        self.budget
    }

    fn cost_rank(&self) -> u8 {
        100
    }

    fn starts_at(&self) -> Level {
        Level::High
    }

    fn reclaim(&self, ask: Ask) -> Recovered {
        let mut idle: Vec<_> = self
            .resources
            .all()
            .into_iter()
            .map(|resource| (resource.stats(), resource))
            .filter(|(stats, _)| stats.loaded && stats.guards == 0)
            .filter(|(stats, _)| !self.bytes(stats).is_zero())
            .collect();
        idle.sort_by(|(one, _), (other, _)| {
            self.score(other, ask.now).total_cmp(&self.score(one, ask.now))
        });
        let mut recovered = ByteSize::ZERO;
        for (stats, resource) in idle {
            if recovered >= ask.bytes {
                break;
            }
            if resource.unload(UnloadReason::Pressure) {
                recovered = recovered.saturating_add(self.given_back(&stats, &resource.stats()));
            }
        }
        Recovered::of(recovered)
    }
}
