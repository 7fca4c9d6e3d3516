//! Resources of any type, as the control loop uses them: when one is due, which idle one is
//! unloaded first (`score`), and how to unload it.
//!
//! The loop decides and the worker unloads. Nothing is loaded here.
//!
//! Invariant: `next_due` of a registry is the earliest of its members', and a member with guards
//! has none.

use std::collections::VecDeque;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};
use std::time::Duration;

use lowtide_core::bytes::ByteSize;
use lowtide_core::clock::{Clock, Moment};
use lowtide_core::fork::Birth;
use lowtide_core::sync::{Mutex, MutexGuard, lock};

use super::error::ResourceError;
use crate::admission::Admission;
use crate::cost::{Budget, Cost};
use crate::eviction::{EvictionSource, Evictor, Idle};
use crate::pressure::Level;
use crate::reclaim::ReclaimStep;
use crate::reclaimer::{Reclaimable, Reclaimer, ReclaimerStats, Reclaimers, Registered};
use crate::state::replace;

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

/// The state and counters of a resource at one instant.
#[derive(Clone, Debug, Default)]
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
    /// The time of the last rejection of a load, and its error with the figures at that time;
    /// `None` before.
    pub last_refusal: Option<(Moment, Arc<str>)>,
    /// Unloads, in the order of [`UnloadReason::ALL`].
    pub unloads: [u64; UnloadReason::ALL.len()],
    /// The time when the last unload had ended, and its reason; `None` before.
    pub last_unload: Option<(Moment, UnloadReason)>,
    /// A sentence on the last eviction: the caller that needed the room, with the figures at that
    /// time; `None` before.
    pub last_eviction: Option<Arc<str>>,
    /// Clean-ups that panicked.
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
    /// The duration of the last clean-up.
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
    /// Returns the number of unloads for this reason.
    #[must_use]
    pub fn unloads_total(&self, reason: UnloadReason) -> u64 {
        self.unloads.get(reason as usize).copied().unwrap_or(0)
    }
}

/// A resource of any type. See the methods of [`Managed`](super::Managed) of the same names.
pub(crate) trait AnyResource: Send + Sync {
    fn name(&self) -> &str;

    fn next_due(&self) -> Moment;

    /// Unloads the resource on the calling thread if it has no guards and the reason allows it, and
    /// if it is due at that time. Returns what that released, as far as it is measured, if it did.
    fn unload_if(&self, reason: UnloadReason, due: Option<Moment>) -> Option<Cost>;

    fn close(self: Arc<Self>, wait: Duration) -> Result<(), ResourceError>;

    fn stats(&self) -> ResourceStats;

    /// Returns how it may be evicted, now or after its minimum residency, if it is loaded,
    /// reserved, not in use and not waited for. Does not allocate.
    fn idle(self: Arc<Self>) -> Option<Idle>;
}

/// The registry of a service's resources. Cheap to clone; all clones share one list. In a forked
/// child it is empty, and none can be added.
#[derive(Clone, Default)]
pub struct Resources {
    members: Arc<Members>,
    birth: Birth,
}

#[derive(Default)]
struct Members {
    resources: Mutex<Vec<Arc<dyn AnyResource>>>,
    reclaimers: Arc<Reclaimers>,
}

impl Resources {
    /// The largest number of resources: 1024.
    pub const MAX: usize = 1024;

    /// Creates an empty registry.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a resource of any type.
    pub(super) fn insert(&self, resource: Arc<dyn AnyResource>) -> Result<(), ResourceError> {
        if !self.birth.is_here() {
            return Err(ResourceError::Forked { name: resource.name().into() });
        }
        let mut list = lock(&self.members.resources);
        if list.len() >= Self::MAX {
            return Err(ResourceError::TooMany { name: resource.name().into(), max: Self::MAX });
        }
        if list.iter().any(|other| other.name() == resource.name()) {
            return Err(ResourceError::Duplicate { name: resource.name().into() });
        }
        list.push(resource);
        Ok(())
    }

    /// Adds a reclaimer of the application. It is asked if a load or a request of `admission` does
    /// not fit, in the order of [`Resources::evict_for`], and from level high.
    ///
    /// # Errors
    /// [`ResourceError`] if its name is taken, if 64 names are known, or in a forked child.
    pub fn add_reclaimer(
        &self,
        reclaimable: Reclaimable,
        admission: &Admission,
        clock: Arc<dyn Clock>,
    ) -> Result<Reclaimer, ResourceError> {
        if !self.birth.is_here() {
            return Err(ResourceError::Forked { name: reclaimable.name });
        }
        let state = admission.state();
        let added = Reclaimers::add(&self.members.reclaimers, reclaimable, state, clock)?;
        state.has_reclaimers.store(true, Ordering::Relaxed);
        Ok(added)
    }

    /// Asks no reclaimer, for an admission that measures no memory: a release would make no room.
    pub fn disable_reclaimers(&self) {
        self.members.reclaimers.is_useless.store(true, Ordering::Relaxed);
    }

    /// Returns the counters of the reclaimers, removed ones included; none in a forked child.
    #[must_use]
    pub fn reclaimer_stats(&self) -> Vec<ReclaimerStats> {
        if self.birth.is_here() { self.members.reclaimers.stats() } else { Vec::new() }
    }

    /// Returns the number of unloads and of calls of reclaimers.
    pub(crate) fn releases_total(&self) -> u64 {
        let calls: u64 = self.reclaimer_stats().iter().map(|stats| stats.calls_total).sum();
        self.stats().iter().flat_map(|stats| stats.unloads).sum::<u64>() + calls
    }

    fn all(&self) -> Vec<Arc<dyn AnyResource>> {
        self.here().map_or_else(Vec::new, |list| list.clone())
    }

    /// Returns the list, unless this is a forked child.
    fn here(&self) -> Option<MutexGuard<'_, Vec<Arc<dyn AnyResource>>>> {
        self.birth.is_here().then(|| lock(&self.members.resources))
    }

    /// Returns the state and counters of all resources, in the order in which they were added.
    #[must_use]
    pub fn stats(&self) -> Vec<ResourceStats> {
        self.all().iter().map(|resource| resource.stats()).collect()
    }

    /// Unloads the resource of this name on the calling thread if it has no guards, and returns
    /// `true` if it did.
    #[must_use]
    pub fn unload(&self, name: &str, reason: UnloadReason) -> bool {
        let named = self.all().into_iter().find(|resource| resource.name() == name);
        named.is_some_and(|resource| resource.unload_if(reason, None).is_some())
    }

    /// Closes all resources permanently, one after the other, and waits until each is unloaded, at
    /// most until the deadline. Returns the errors of those that are not.
    pub fn close(&self, clock: &dyn Clock, deadline: Moment) -> Vec<ResourceError> {
        let close = |resource: Arc<dyn AnyResource>| resource.close(deadline - clock.now()).err();
        self.all().into_iter().filter_map(close).collect()
    }

    /// Returns the time when the next resource is due. Does not allocate; checks each resource.
    #[must_use]
    pub fn next_due(&self) -> Moment {
        let due = self.here().and_then(|list| list.iter().map(|it| it.next_due()).min());
        due.unwrap_or(Moment::NEVER)
    }

    /// Returns the number of loads that succeeded. Does not allocate; checks each resource.
    pub(crate) fn loads_total(&self) -> u64 {
        self.here().map_or(0, |list| list.iter().map(|it| it.stats().loads_ok_total).sum())
    }

    /// Returns the reservations of resources that may be evicted, now or after their minimum
    /// residency. Does not allocate; checks each resource.
    pub(crate) fn evictable(&self) -> Cost {
        let Some(list) = self.here() else { return Cost::ZERO };
        let idle = list.iter().filter_map(|it| Arc::clone(it).idle());
        idle.fold(Cost::ZERO, |sum, idle| sum.and(idle.cost))
    }

    /// Unloads the resources that are due, on the calling thread, and returns their number.
    pub fn unload_due(&self, now: Moment) -> usize {
        let unload = |it: &Arc<dyn AnyResource>| it.unload_if(UnloadReason::Idle, Some(now));
        self.all().iter().filter_map(unload).count()
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
    /// Below level high, a request keeps resources whose reload would cost more than its wait. The
    /// break-even interval of a resource is 10 times its load time (smoothed), between 10 s and 5
    /// minutes. A request that fits once the others have ended evicts only resources whose uses are
    /// further apart than that, and of whose bytes it lacks an eighth or more; after half of its
    /// wait, and at most a second, also those that have been loaded for that long. One that would
    /// not fit even then evicts those at once, and all of them after that wait.
    ///
    /// Reclaimers of the application ([`Resources::add_reclaimer`]) are asked in the same order,
    /// for what is still lacking and no more. A load or a request waits until a sample finds their
    /// memory freed.
    ///
    /// The unloads run on temporary threads. When the unloads of one step have ended, `after` is
    /// called on one of those threads, before the room is used. Purge the heap there.
    ///
    /// The registry is not kept alive. A second call replaces the first. `clock` is that of the
    /// control loop.
    pub fn evict_for(
        &self,
        admission: &Admission,
        clock: Arc<dyn Clock>,
        after: impl Fn() + Send + Sync + 'static,
    ) {
        let pool = Arc::downgrade(&self.members);
        let evictor = Evictor::new(Box::new(pool), clock, Box::new(after));
        replace(&admission.state().evictor, Some(Arc::new(evictor)));
    }

    /// Asks reclaimers of the application and unloads resources that are not in use, on the calling
    /// thread, until these bytes of host memory are recovered. Unlike pressure, an operator's order
    /// does not respect the minimum residency.
    pub fn release(&self, bytes: ByteSize) {
        let _ = self.recover(Budget::Host, bytes, UnloadReason::Manual);
    }

    /// Returns a reclaim step that unloads idle resources from level high, and for host memory asks
    /// reclaimers of the application, in the order of [`Resources::evict_for`]. A reclaimer runs on
    /// a thread of its own; the step waits for it for at most a second.
    #[must_use]
    pub fn reclaimer(&self, budget: Budget) -> ReclaimStep {
        let resources = self.clone();
        let release = move |bytes| resources.recover(budget, bytes, UnloadReason::Pressure);
        ReclaimStep::new(budget, Level::High, release)
    }

    /// Asks reclaimers, and unloads idle resources for this reason, until these bytes are
    /// recovered. Returns the bytes recovered.
    fn recover(&self, budget: Budget, bytes: ByteSize, reason: UnloadReason) -> ByteSize {
        let mut sources: Vec<(f64, ReleaseFn<'_>)> = Vec::new();
        if budget == Budget::Host && self.birth.is_here() {
            let ask = |it: Arc<Registered>| -> (f64, ReleaseFn<'_>) {
                (it.score(), Box::new(move |wanted| it.ask_elsewhere(wanted)))
            };
            sources.extend(self.members.reclaimers.all().into_iter().map(ask));
        }
        for resource in self.all() {
            let stats = resource.stats();
            let [cost, measured] = [stats.cost, stats.measured.unwrap_or_default()];
            let held = cost.of(budget).max(measured.of(budget));
            if stats.loaded && stats.guards == 0 && !held.is_zero() {
                let unload = move |_| match resource.unload_if(reason, None)?.of(budget) {
                    ByteSize::ZERO => Some(held),
                    measured => Some(measured),
                };
                let score = score(held, stats.use_interval, stats.load_time);
                sources.push((score, Box::new(move |wanted| unload(wanted).unwrap_or_default())));
            }
        }
        sources.sort_by(|(one, _), (other, _)| other.total_cmp(one));
        let mut recovered = ByteSize::ZERO;
        for (_, release) in sources {
            let wanted = bytes.saturating_sub(recovered);
            if wanted.is_zero() {
                break;
            }
            recovered = recovered.saturating_add(release(wanted));
        }
        recovered
    }
}

debug_as!(Resources, |it|
    names: it.all().iter().map(|resource| resource.name().to_owned()).collect::<Vec<_>>());

/// Not kept alive, and not asked in a forked child.
impl EvictionSource for Weak<Members> {
    fn idle(&self) -> Vec<Idle> {
        let all = self.upgrade().map_or_else(Vec::new, |members| lock(&members.resources).clone());
        all.into_iter().filter_map(|resource| resource.idle()).collect()
    }

    fn next_ask(&self) -> Option<Moment> {
        self.upgrade()?.reclaimers.next_ask()
    }

    fn reclaimers(&self) -> Vec<Idle> {
        let all = self.upgrade().map_or_else(Vec::new, |members| members.reclaimers.all());
        all.iter().filter_map(Registered::idle).collect()
    }
}

/// Releases so many bytes at level high, and returns the bytes released.
type ReleaseFn<'a> = Box<dyn FnOnce(ByteSize) -> ByteSize + 'a>;

// The last uses of a resource, and how costly it is to unload it.
//
// The cell records the end of each use. The score that follows from them decides the order in which
// idle resources are unloaded, for an eviction and under pressure.
//
// The algorithm is LNC-R (Scheuermann, Shim and Vingralek, 1996, "WATCHMAN: A Data Warehouse
// Intelligent Cache Manager"), with the rate of uses of LRU-K (O'Neil, O'Neil and Weikum, 1993). A
// resource is worth `uses per second x load time / bytes`: the time that it will cost to load it
// again, for each byte that its unload releases. The uses per second are those since the end of the
// K-th last use. They fall while the resource is idle, so that no use counts forever, and they are
// remembered while it is not loaded. GDSF weighs the same quantities, but forgets the uses of a
// resource that it evicts.
//
// A burst of uses that is over would count as K uses for a long time. So a resource counts as used
// no more often than once in a quarter of its present idle time. Of resources whose uses are
// independent, one in fifty is idle for that long by chance.
//
// Invariant: at most [`USES_MAX`] uses are remembered, the last ones.
/// The number of uses that are remembered. The more, the closer to the best order if popularity
/// does not change, and the later a change shows. With 10 resources and room for 3, the hit ratios
/// of 8, 32 and 64 differ by less than 0.01 (the bench `room`).
const USES_MAX: usize = 32;
/// An idle time of so many intervals ends a burst.
const INTERVALS_IDLE: u32 = 4;

/// The ends of the last uses of a resource, oldest first.
pub(super) struct RecentUses(VecDeque<Moment>);

impl RecentUses {
    pub(super) fn new() -> Self {
        Self(VecDeque::with_capacity(USES_MAX))
    }

    /// Records the end of a use. Allocates nothing.
    pub(super) fn record(&mut self, end: Moment) {
        if self.0.len() == USES_MAX {
            self.0.pop_front();
        }
        self.0.push_back(end);
    }

    /// Returns the mean time between two uses up to now. A resource that was never used counts as
    /// used once when it was loaded.
    pub(super) fn interval(&self, loaded_at: Moment, now: Moment) -> Duration {
        let [oldest, newest] =
            [self.0.front(), self.0.back()].map(|end| end.copied().unwrap_or(loaded_at));
        let count = u32::try_from(self.0.len().max(1)).unwrap_or(u32::MAX);
        let mean = (now - oldest) / count;
        mean.max((now - newest.max(loaded_at)) / INTERVALS_IDLE)
    }
}

/// Returns the score of a resource: the larger, the sooner it is unloaded. The reciprocal of what
/// the resource is worth.
pub(super) fn score(bytes: ByteSize, interval: Duration, load: Duration) -> f64 {
    bytes.as_f64() * interval.as_secs_f64() / load.max(Duration::from_millis(1)).as_secs_f64()
}

#[cfg(test)]
mod use_tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    fn at(seconds: u32) -> Moment {
        Moment::ORIGIN + SECOND * seconds
    }

    /// Uses that end at these seconds.
    fn uses(ends: impl IntoIterator<Item = u32>) -> RecentUses {
        let mut uses = RecentUses::new();
        ends.into_iter().for_each(|end| uses.record(at(end)));
        uses
    }

    #[test]
    fn a_single_use_counts_by_its_idle_time_alone() {
        assert_eq!(uses([3]).interval(at(1), at(10)), 7 * SECOND);
    }

    #[test]
    fn a_resource_that_was_never_used_counts_from_its_load() {
        assert_eq!(uses([]).interval(at(4), at(10)), 6 * SECOND);
    }

    #[test]
    fn a_resource_that_was_just_loaded_again_is_not_idle_since_its_last_use() {
        let burst = uses(std::iter::repeat_n(0, 32));
        assert_eq!(burst.interval(at(600), at(640)), Duration::from_millis(20_000));
    }

    #[test]
    fn the_interval_is_the_mean_since_the_oldest_use_that_is_remembered() {
        assert_eq!(uses([0, 1, 5, 8]).interval(at(0), at(12)), 3 * SECOND);
        // 100 uses, one every 2 s: the last 32 began to count 64 s ago.
        let regular = uses((0..100).map(|nth| 2 * nth));
        assert_eq!(regular.interval(at(0), at(200)), 2 * SECOND);
    }

    #[test]
    fn uses_before_the_last_32_do_not_count() {
        let (slow, none) = ((0..50).map(|nth| 100 * nth), std::iter::empty());
        let fast = || (0..32).map(|nth| 5000 + nth);
        let after_slow = uses(slow.chain(fast())).interval(at(0), at(5040));
        assert_eq!(after_slow, uses(none.chain(fast())).interval(at(0), at(5040)));
    }

    #[test]
    fn a_burst_that_is_over_counts_by_its_idle_time() {
        let burst = uses(std::iter::repeat_n(0, 32));
        assert_eq!(burst.interval(at(0), at(600)), 150 * SECOND);
    }

    #[test]
    fn of_two_resources_the_one_that_costs_less_time_per_byte_goes_first() {
        let of = |mib, interval: u32, load: u32| {
            score(ByteSize::mib(mib), SECOND * interval, SECOND * load)
        };
        assert!(of(2, 1, 1) > of(1, 1, 1), "more bytes");
        assert!(of(1, 2, 1) > of(1, 1, 1), "fewer uses");
        assert!(of(1, 1, 1) > of(1, 1, 2), "a shorter load");
        assert!(score(ByteSize::mib(1), SECOND, Duration::ZERO).is_finite());
    }
}
