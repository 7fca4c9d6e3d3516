//! Resources of any type, as the control loop uses them: when one is due, and how to unload it.
//!
//! The loop decides and the worker unloads. Nothing is loaded here.
//!
//! Invariant: `next_due` of a registry is the earliest of its members', and a member with guards
//! has none.

use std::fmt;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};
use std::time::Duration;

use crate::admission::Admission;
use crate::cost::{Budget, Cost};
use crate::eviction::{EvictionCause, Evictor, Idle, Pool};
use crate::pressure::Level;
use crate::reclaim::{Ask, Reclaim, Recovered};
use crate::reclaimer::{Reclaimable, Reclaimer, ReclaimerStats, Reclaimers, Registered};
use lowtide_core::bytes::ByteSize;
use lowtide_core::clock::{Clock, Moment};
use lowtide_core::fork::Birth;
use lowtide_core::sync::{Mutex, lock};

use super::error::{AddError, UnloadError};
use super::uses::score;

lowtide_core::named_enum! {
    /// The reason why a resource was unloaded.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
    #[non_exhaustive]
    pub enum UnloadReason {
        /// The resource was not used for its idle time.
        Idle = "idle",
        /// Memory was short.
        Pressure = "pressure",
        /// A load or a request had no room.
        Eviction = "eviction",
        /// An explicit unload was requested.
        Manual = "manual",
        /// The service shut down.
        Shutdown = "shutdown",
    }
}

/// The number of unloads of a resource, by reason.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize), serde(transparent))]
pub struct Unloads {
    counts: [u64; UnloadReason::ALL.len()],
}

impl Unloads {
    /// Returns the number of unloads for this reason.
    #[must_use]
    pub fn total(&self, reason: UnloadReason) -> u64 {
        self.counts.get(reason as usize).copied().unwrap_or(0)
    }

    /// Returns the number of unloads for all reasons.
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

/// The last unload of a resource.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct LastUnload {
    /// The time when it had ended.
    pub at: Moment,
    /// The reason.
    pub reason: UnloadReason,
    /// The caller that needed the room, with the figures at that time; `None` unless evicted.
    pub cause: Option<EvictionCause>,
}

impl fmt::Display for LastUnload {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.cause {
            Some(cause) => cause.fmt(f),
            None => write!(f, "unloaded: {}", self.reason.name()),
        }
    }
}

/// The state and counters of a resource at one instant.
#[derive(Clone, Debug)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct ResourceStats {
    /// The name.
    pub name: Arc<str>,
    /// `true` if the resource is loaded.
    pub loaded: bool,
    /// `true` while the resource is being loaded, even if no caller waits for it.
    pub loading: bool,
    /// The number of guards held.
    pub guards: usize,
    /// The number of callers that wait for the resource.
    pub waiting: usize,
    /// The bytes that the next load reserves: the cost set on the builder, or the measured bytes if
    /// they are more and a cost was set.
    pub cost: Cost,
    /// Loads that succeeded.
    pub loads_ok_total: u64,
    /// Loads that failed.
    pub loads_failed_total: u64,
    /// Loads that were rejected because the cost did not fit, or by level.
    pub loads_refused_total: u64,
    /// Unloads, by reason.
    pub unloads: Unloads,
    /// The last unload; `None` before.
    #[cfg_attr(feature = "serde", serde(skip))]
    pub last_unload: Option<LastUnload>,
    /// Cleanups that panicked.
    pub unload_panics_total: u64,
    /// The time when the last guard was released; `None` before.
    pub last_used: Option<Moment>,
    /// The mean time between its last uses up to now, at most 32. At least a quarter of the time
    /// since the last one. Uses that overlap count each.
    pub use_interval: Duration,
    /// The time when the resource will be unloaded for idleness unless it is used before; `None`
    /// while it is not loaded, is in use, or has no idle time.
    pub due: Option<Moment>,
    /// The duration of the last successful load.
    pub load_time: Duration,
    /// The duration of the last cleanup.
    pub unload_time: Duration,
    /// The bytes held right after the last load, if the load scope can measure them: a separate
    /// heap arena measures host memory, a separate device arena device memory. Zero for a budget
    /// that is not measured. If jemalloc does not serve C and C++ code (feature `interpose`), a
    /// load that ran alone is also measured by the growth of the process.
    pub measured: Option<Cost>,
    /// The bytes released by all unloads, as far as the load scope could measure them.
    pub recovered_total: Cost,
}

impl ResourceStats {
    /// Returns the statistics of a resource that cannot be inspected.
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
            last_unload: None,
            unload_panics_total: 0,
            last_used: None,
            use_interval: Duration::ZERO,
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
    /// Returns the name.
    fn name(&self) -> &str;

    /// Returns the time when the resource may be unloaded for idleness, or when its load times out;
    /// [`Moment::NEVER`] if neither applies. Does not allocate.
    fn next_due(&self) -> Moment;

    /// Unloads the resource on the calling thread if it is due, and returns `true` if it did. Also
    /// gives up a load that has timed out.
    fn unload_if_due(&self, now: Moment) -> bool;

    /// Unloads the resource on the calling thread if it has no guards, and returns `true` if it
    /// did. For pressure only after its minimum residency.
    fn unload(&self, reason: UnloadReason) -> bool;

    /// Closes the resource permanently and waits until it is unloaded.
    ///
    /// # Errors
    /// [`UnloadError::Busy`] if the resource is still in use when `wait` is over, and
    /// [`UnloadError::CleaningUp`] if its clean-up is still running then, and took a second.
    fn close(&self, wait: Duration) -> Result<(), UnloadError>;

    /// Returns the state and counters; in a forked child only the name and cost.
    fn stats(&self) -> ResourceStats;

    /// Returns how the resource may be evicted to make room for others, now or after its minimum
    /// residency. Default: never.
    #[doc(hidden)]
    fn idle(&self) -> Option<Idle> {
        None
    }

    /// Returns its reservation if it may be evicted, now or after its minimum residency; else zero.
    /// Does not allocate. Default: zero.
    #[doc(hidden)]
    fn evictable(&self) -> Cost {
        Cost::ZERO
    }
}

/// The registry of a service's resources. Cheap to clone; all clones share one list. In a forked
/// child it is empty, and none can be added.
#[derive(Clone)]
pub struct Resources {
    list: Arc<Mutex<Vec<Arc<dyn Resource>>>>,
    reclaimers: Arc<Reclaimers>,
    birth: Birth,
}

impl Resources {
    /// The largest number of resources: 1024.
    pub const MAX: usize = 1024;

    /// Creates an empty registry.
    #[must_use]
    pub fn new() -> Self {
        Self { list: Arc::default(), reclaimers: Arc::default(), birth: Birth::now() }
    }

    /// Adds a resource. It stays, and its name is taken, as long as the registry exists.
    ///
    /// # Errors
    /// [`AddError`] if there are already [`Resources::MAX`], if the name is taken, or in a forked
    /// child. Nothing is added then.
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

    /// Adds a reclaimer of the application. It is asked if a load or a request of `admission` does
    /// not fit, in the order of [`Resources::evict_for`], and from level high.
    ///
    /// # Errors
    /// [`AddError`] if its name is taken, if 64 names are known, or in a forked child.
    pub fn add_reclaimer(
        &self,
        reclaimable: Reclaimable,
        admission: &Admission,
        clock: Arc<dyn Clock>,
    ) -> Result<Reclaimer, AddError> {
        if !self.birth.is_here() {
            return Err(AddError::Forked);
        }
        let desk = admission.desk();
        let added = Reclaimers::add(&self.reclaimers, reclaimable, desk, clock)?;
        desk.has_reclaimers.store(true, Ordering::Relaxed);
        Ok(added)
    }

    /// Asks no reclaimer, for an admission that measures no memory: a release would make no room.
    #[doc(hidden)]
    pub fn disable_reclaimers(&self) {
        self.reclaimers.disable();
    }

    /// Returns the counters of the reclaimers, removed ones included; none in a forked child.
    #[must_use]
    pub fn reclaimer_stats(&self) -> Vec<ReclaimerStats> {
        if self.birth.is_here() { self.reclaimers.stats() } else { Vec::new() }
    }

    /// Returns the number of unloads and of calls of reclaimers.
    pub(crate) fn releases_total(&self) -> u64 {
        let unloads = |resource: &Arc<dyn Resource>| resource.stats().unloads.sum();
        let calls: u64 = self.reclaimer_stats().iter().map(|stats| stats.calls_total).sum();
        self.all().iter().map(unloads).sum::<u64>() + calls
    }

    /// Returns all resources, in the order in which they were added.
    #[must_use]
    pub fn all(&self) -> Vec<Arc<dyn Resource>> {
        if self.birth.is_here() { lock(&self.list).clone() } else { Vec::new() }
    }

    /// Returns the time when the next resource is due. Does not allocate; checks each resource.
    #[must_use]
    pub fn next_due(&self) -> Moment {
        if !self.birth.is_here() {
            return Moment::NEVER;
        }
        let list = lock(&self.list);
        list.iter().map(|resource| resource.next_due()).min().unwrap_or(Moment::NEVER)
    }

    /// Returns the number of loads that succeeded. Does not allocate; checks each resource.
    pub(crate) fn loads_total(&self) -> u64 {
        if !self.birth.is_here() {
            return 0;
        }
        lock(&self.list).iter().map(|resource| resource.stats().loads_ok_total).sum()
    }

    /// Returns the reservations of resources that may be evicted, now or after their minimum
    /// residency. Does not allocate; checks each resource.
    pub(crate) fn evictable(&self) -> Cost {
        if !self.birth.is_here() {
            return Cost::ZERO;
        }
        let list = lock(&self.list);
        list.iter().fold(Cost::ZERO, |sum, resource| sum.and(resource.evictable()))
    }

    /// Unloads the resources that are due, on the calling thread, and returns their number.
    pub fn unload_due(&self, now: Moment) -> usize {
        self.all().iter().filter(|resource| resource.unload_if_due(now)).count()
    }

    /// Lets `admission` evict idle resources of this registry if a load or a request does not fit.
    /// A load waits for the room. A request is rejected, with the time that the unloads take, and
    /// finds the room when it retries.
    ///
    /// Resources are unloaded in one step: as few as make enough room, or none. Those come first
    /// that will cost the least time to load again for each byte that they release:
    /// `uses per second x load time / bytes`. The load time is that of the last load. The uses per
    /// second are those of the last 32 uses, up to now ([`ResourceStats::use_interval`]), and are
    /// remembered after an unload. Candidates are resources that are not in use or waited for, are
    /// reserved with this admission, and are past their minimum residency, however short they have
    /// been idle. Their reservations stay until they are unloaded and then pass to the load.
    ///
    /// Reclaimers of the application ([`Resources::add_reclaimer`]) are asked in the same order,
    /// for what is still lacking and no more. A load or a request waits until a sample finds their
    /// memory freed.
    ///
    /// The unloads run on temporary threads. When the unloads of one step have ended, `after` is
    /// called on one of those threads, before the room is used. Purge the heap there.
    ///
    /// The registry is not kept alive. A second call replaces the first.
    pub fn evict_for(
        &self,
        admission: &Admission,
        clock: Arc<dyn Clock>,
        after: impl Fn() + Send + Sync + 'static,
    ) {
        let pool = WeakResources {
            list: Arc::downgrade(&self.list),
            reclaimers: Arc::downgrade(&self.reclaimers),
            birth: self.birth,
        };
        admission.set_evictor(Evictor::new(Box::new(pool), clock, Box::new(after)));
    }

    /// Asks reclaimers of the application and unloads resources that are not in use, on the calling
    /// thread, until these bytes of host memory are recovered. Unlike pressure, an operator's order
    /// does not respect the minimum residency.
    #[doc(hidden)]
    pub fn release(&self, bytes: ByteSize) {
        let idle = IdleResources { resources: self.clone(), budget: Budget::Host };
        let _ = idle.release(bytes, UnloadReason::Manual);
    }

    /// Returns a reclaim step that unloads idle resources from level high, and for host memory asks
    /// reclaimers of the application, in the order of [`Resources::evict_for`]. A reclaimer runs on
    /// a thread of its own; the step waits for it for at most a second.
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

/// A registry that is not kept alive.
struct WeakResources {
    list: Weak<Mutex<Vec<Arc<dyn Resource>>>>,
    reclaimers: Weak<Reclaimers>,
    birth: Birth,
}

impl Pool for WeakResources {
    fn idle(&self) -> Vec<Idle> {
        let Some(list) = self.list.upgrade() else { return Vec::new() };
        let all = if self.birth.is_here() { lock(&list).clone() } else { Vec::new() };
        all.iter().filter_map(|resource| resource.idle()).collect()
    }

    fn next_ask(&self) -> Option<Moment> {
        self.reclaimers.upgrade()?.next_ask()
    }

    fn reclaimers(&self) -> Vec<Idle> {
        self.reclaimers.upgrade().map_or_else(Vec::new, |reclaimers| reclaimers.idle())
    }
}

/// What releases memory at level high.
enum Source {
    Reclaimer(Arc<Registered>),
    Resource(Box<ResourceStats>, Arc<dyn Resource>),
}

/// Asks reclaimers and unloads idle resources until enough is recovered.
#[derive(Debug)]
struct IdleResources {
    resources: Resources,
    budget: Budget,
}

impl IdleResources {
    /// Returns the bytes that it holds: the measured ones, or the declared cost if that is more.
    fn bytes(&self, stats: &ResourceStats) -> ByteSize {
        self.part_of(stats.cost).max(self.part_of(stats.measured.unwrap_or_default()))
    }

    const fn part_of(&self, cost: Cost) -> ByteSize {
        match self.budget {
            Budget::Host => cost.host,
            Budget::Device => cost.device,
        }
    }

    /// Returns the bytes that an unload released: the measured ones, or else the reservation.
    fn given_back(&self, before: &ResourceStats, after: &ResourceStats) -> ByteSize {
        let total = |stats: &ResourceStats| self.part_of(stats.recovered_total);
        let measured = total(after).saturating_sub(total(before));
        if measured.is_zero() { self.bytes(before) } else { measured }
    }

    /// Returns the reclaimers, which release host memory.
    fn reclaimers(&self) -> Vec<Arc<Registered>> {
        let has = self.budget == Budget::Host && self.resources.birth.is_here();
        if has { self.resources.reclaimers.all() } else { Vec::new() }
    }

    /// Returns the score: the larger, the sooner it is unloaded.
    fn score(&self, stats: &ResourceStats) -> f64 {
        score(self.bytes(stats), stats.use_interval, stats.load_time)
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
        Recovered::of(self.release(ask.bytes, UnloadReason::Pressure))
    }
}

impl IdleResources {
    /// Asks reclaimers, and unloads idle resources for this reason, until these bytes are
    /// recovered. Returns the bytes recovered.
    fn release(&self, bytes: ByteSize, reason: UnloadReason) -> ByteSize {
        let idle = self
            .resources
            .all()
            .into_iter()
            .map(|resource| (resource.stats(), resource))
            .filter(|(stats, _)| stats.loaded && stats.guards == 0)
            .filter(|(stats, _)| !self.bytes(stats).is_zero())
            .map(|(stats, resource)| {
                (self.score(&stats), Source::Resource(Box::new(stats), resource))
            });
        let reclaimers = self.reclaimers().into_iter();
        let reclaimers = reclaimers.map(|it| (it.score(), Source::Reclaimer(it)));
        let mut sources: Vec<_> = reclaimers.chain(idle).collect();
        sources.sort_by(|(one, _), (other, _)| other.total_cmp(one));
        let mut recovered = ByteSize::ZERO;
        for (_, source) in sources {
            let wanted = bytes.saturating_sub(recovered);
            if wanted.is_zero() {
                break;
            }
            let released = match source {
                Source::Reclaimer(reclaimer) => reclaimer.ask_elsewhere(wanted),
                Source::Resource(stats, resource) if resource.unload(reason) => {
                    self.given_back(&stats, &resource.stats())
                }
                Source::Resource(..) => ByteSize::ZERO,
            };
            recovered = recovered.saturating_add(released);
        }
        recovered
    }
}
