//! The state shared by the handles of an admission and its permits: ledgers, level and counts. A
//! layer that measures requests uses it directly.
//!
//! A permit has to keep it alive, and a reference count would cost two atomic operations for each
//! request, as many as the reservation itself. So a state is never freed: after its last handle and
//! its last permit have been dropped, the next admission reuses it. There are as many of them as
//! there were admissions at once.
//!
//! Invariant: at most one admission owns a state. A permit that outlives the handles finds the
//! state as they left it.

use std::collections::BTreeMap;
use std::fmt;
use std::num::NonZero;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};
use std::task::Waker;
use std::time::Duration;

use lowtide_core::bytes::ByteSize;
use lowtide_core::clock::{Bell, Moment};

use super::correction::K_START;
use super::cost::{Budget, Cost, Priority, RejectReason, Rejected};
use super::eviction::{Eviction, Evictor, Patience, RetryHint};
use super::large::{LARGE_MIN, LargeRequest, LargeRequests, RequestMemory, TOP_MAX};
use super::learning::LASTS;
use super::ledger::{Booked, InsufficientBudget, Ledger, Reservation, ResourceHold};
use super::permit::{Permit, Waiting};
use super::pressure::Level;
use super::tally::{AdmissionStats, BudgetCounts, STRIPES, Shard, Tally, used};
use super::turns::{Turn, Turns};
use super::unused::PurgeablePages;
use super::usage::Usages;
use super::waiting::{PassError, WaitId, WaitQueue, WaitReason, WaitTerms};

/// The retry time if an operator has to act. A guess.
const EXHAUSTED: Duration = Duration::from_secs(30);
/// The longest retry time, unless it is known when there will be room.
const RETRY_MAX: Duration = Duration::from_secs(60);
/// The longest known time after which a request is told to retry.
const KNOWN_MAX: Duration = Duration::from_secs(24 * 3600);

/// How many requests that wait for something else than bytes try again after a release, and at a
/// tick. Estimates: each attempt costs microseconds.
const WOKEN_OTHERS: usize = 4;
const WOKEN_OTHERS_TICK: usize = 16;

/// The bit beside the level of an admission that has been closed.
pub(super) const CLOSED: u8 = 1 << 7;

/// The states whose admissions are gone.
static LEFT: Mutex<Vec<&'static AdmissionState>> = Mutex::new(Vec::new());

/// The state of one admission, which its handles and permits share
/// ([`Admission::state`](super::Admission::state), [`Permit::state`]). For a layer that measures
/// requests, suspends and cancels them.
#[derive(Default)]
pub struct AdmissionState {
    pub(super) host: Ledger,
    pub(super) device: Ledger,
    /// The level, and [`CLOSED`].
    pub(super) level: AtomicU8,
    level_watches: Mutex<BTreeMap<u64, Waker>>,
    /// What only observe mode has admitted, by reason, since the start.
    pub(super) observed: [AtomicU64; RejectReason::ALL.len()],
    /// The bytes that no request owns while that leaves no room for requests, otherwise 0.
    pub(super) unowned: AtomicU64,
    /// `true` once the device is lost: no device bytes are reserved.
    pub(super) is_device_lost: AtomicBool,
    /// `true` if device memory is host memory: device bytes are reserved in the host's ledger.
    pub(super) unified: AtomicBool,
    /// The running requests that have reserved much.
    pub(super) large: LargeRequests,
    /// The memory of measured requests by route: at most 65 routes.
    pub routes: Usages,
    /// The same by tenant: at most 33.
    pub tenants: Usages,
    pub(super) queue: WaitQueue,
    pub(super) turns: Turns,
    pub(super) unused: PurgeablePages,
    /// Wakes the control loop.
    pub(super) bell: RwLock<Option<Arc<Bell>>>,
    /// `true` if the next tick is further away than while requests wait.
    pub(super) is_slow: AtomicBool,
    /// The least host memory that a request asked for which did not fit, since the last tick, or
    /// [`u64::MAX`].
    lacked: AtomicU64,
    /// Permits of resources that have not been dropped.
    resource_permits: AtomicU64,
    /// How often a reservation was suspended, since the start.
    pub(super) suspensions: AtomicU64,
    tallies: [Shard; STRIPES],
    /// How often a request was rejected that another instance may serve, since the start.
    pub(super) sheds: AtomicU64,
    /// The ticks of the control loop.
    pub(super) ticks: AtomicU64,
    /// `true` once a reclaimer was registered.
    pub(super) has_reclaimers: AtomicBool,
    /// Makes room for requests and loads that do not fit. Read only on a rejection.
    pub(super) evictor: RwLock<Option<Arc<Evictor>>>,
}

debug_as!(AdmissionState, |state|
    level: state.level(), host: state.host.reserved_bytes(), device: state.device.reserved_bytes());

impl AdmissionState {
    /// Returns an unused state, with this ceiling and correction factor of host memory.
    pub(super) fn take(ceiling: ByteSize, correction_factor: f64) -> &'static Self {
        let state = Self::left().unwrap_or_else(|| Box::leak(Box::default()));
        state.host.begin(ceiling, correction_factor);
        state.device.begin(ByteSize::MAX, K_START);
        state.level.store(Level::None.as_u8(), Ordering::Relaxed);
        let Self { is_device_lost, has_reclaimers, unified, is_slow, .. } = state;
        for flag in [is_device_lost, has_reclaimers, unified, is_slow] {
            flag.store(false, Ordering::Release);
        }
        let Self { unowned, suspensions, sheds, .. } = state;
        for count in state.observed.iter().chain([unowned, suspensions, sheds]) {
            count.store(0, Ordering::Relaxed);
        }
        replace(&state.evictor, None);
        state.large.begin();
        state.routes.begin();
        state.tenants.begin();
        state.queue.begin();
        state.turns.begin(std::thread::available_parallelism().map_or(1, usize::from));
        state.unused.begin();
        replace(&state.bell, None);
        state.lacked.store(u64::MAX, Ordering::Relaxed);
        state.tallies.iter().for_each(Shard::begin);
        state
    }

    /// Returns a state whose admission and permits are all gone.
    fn left() -> Option<&'static Self> {
        // Tried, not waited for: a process forked in the meantime would wait forever.
        let mut left = LEFT.try_lock().ok()?;
        // Acquire: what was released before a drop is seen.
        let is_free = |state: &&Self| {
            state.resource_permits.load(Ordering::Acquire) == 0 && state.counts().held() == 0
        };
        let at = left.iter().position(is_free)?;
        Some(left.swap_remove(at))
    }

    /// Returns the state when its last handle is dropped.
    pub(super) fn leave(&'static self) {
        replace(&self.evictor, None);
        if cfg!(lowtide_loom) {
            // Its atomics belong to one run of a model.
            return;
        }
        // Tried, as above. If another admission takes or returns a state at this moment, the state is
        // leaked.
        if let Ok(mut left) = LEFT.try_lock() {
            left.push(self);
        }
    }

    /// Returns a cost as it is reserved. With one budget for host and device, all of it is the
    /// host's.
    #[must_use]
    pub fn by_budget(&self, cost: Cost) -> Cost {
        // Most requests need no device memory.
        if cost.device.is_zero() || !self.unified.load(Ordering::Relaxed) {
            return cost;
        }
        Cost::host(cost.host.saturating_add(cost.device))
    }

    /// Admits a request, or counts it as rejected.
    #[inline]
    pub(super) fn admit(&'static self, cost: Cost, priority: Priority) -> Result<Permit, Rejected> {
        let admitted = self.admit_at_once(cost, priority);
        admitted.map_or_else(|| self.admit_or_reject(cost, priority), Ok)
    }

    #[inline(never)]
    fn admit_or_reject(&'static self, cost: Cost, priority: Priority) -> Result<Permit, Rejected> {
        let ceiling = self.host.ceiling();
        let may_fit = cost.host <= ceiling && ceiling < ByteSize::MAX && priority < Priority::High;
        // If it does not fit, that is the only reason, and nothing makes room for it.
        let is_simple = may_fit
            && !(self.observes() || self.evicts() || self.unowned.load(Ordering::Relaxed) != 0);
        let Some(tally) = is_simple.then(|| self.plain(cost, priority)).flatten() else {
            let decided = self.try_admit(None, cost, priority, None);
            return decided.map_err(|rejected| self.reject(rejected));
        };
        let Err(short) = self.host.try_book(cost.host) else {
            self.hurry();
            return Ok(self.admitted(tally, cost.host));
        };
        if self.is_slow.load(Ordering::Relaxed) {
            self.hurry();
        }
        // Nothing is loaded, so these are bytes.
        let InsufficientBudget { asked, reserved, allowance } = short;
        if asked.get() < self.lacked.load(Ordering::Relaxed) {
            self.lacked.fetch_min(asked.get(), Ordering::Relaxed);
        }
        let (budget, retry_after) = (Budget::Host, self.retry_after(self.host.wait_for(&short)));
        tally.rejected(RejectReason::Full, Some((budget, asked)));
        self.sheds.fetch_add(1, Ordering::Relaxed);
        Err(Rejected::Full { budget, asked, reserved, allowance, retry_after })
    }

    /// Like [`Admission::try_admit_with`](super::Admission::try_admit_with), but a rejection is not
    /// counted, and a resource that is evicted for the request records its label.
    ///
    /// # Errors
    /// [`Rejected`], with the numbers.
    #[inline]
    pub fn try_admit_uncounted(
        &'static self,
        waiting: Option<&Waiting>,
        cost: Cost,
        priority: Priority,
        label: Option<&dyn fmt::Display>,
    ) -> Result<Permit, Rejected> {
        let admitted = if waiting.is_none() { self.admit_at_once(cost, priority) } else { None };
        let waits = waiting.map(|waiting| &waiting.id);
        admitted.map_or_else(|| self.try_admit(waits, cost, priority, label), Ok)
    }

    /// Admits a request that needs no device memory, if nothing has to be considered except that it
    /// fits. `None` only means that [`AdmissionState::try_admit`] decides.
    #[inline]
    fn admit_at_once(&'static self, cost: Cost, priority: Priority) -> Option<Permit> {
        // Nothing is called that returns: no register has to be saved.
        let tally = self.plain(cost, priority)?;
        self.host.try_book_plain(cost.host).then(|| self.admitted(tally, cost.host))
    }

    /// Returns where a request is counted of which only the host's bytes have to be considered.
    #[inline]
    fn plain(&self, cost: Cost, priority: Priority) -> Option<Tally<'_>> {
        let is_plain = cost.device.is_zero() && priority != Priority::Exempt && self.is_open();
        Tally::owned(&self.tallies).filter(|_| is_plain && !self.unused.is_large(cost.host))
    }

    #[inline]
    fn admitted(&'static self, tally: Tally<'_>, host: ByteSize) -> Permit {
        tally.admit(host, ByteSize::ZERO);
        Permit::host(self, host)
    }

    /// Returns `true` if requests of every priority are admitted that fit.
    #[inline]
    fn is_open(&self) -> bool {
        self.level.load(Ordering::Acquire) < Level::High.as_u8() && self.queue.is_empty()
    }

    /// Returns `true` if admission has been closed.
    #[inline]
    pub(super) fn is_closed(&self) -> bool {
        self.level.load(Ordering::Acquire) & CLOSED != 0
    }

    /// Admits a request, which may be in the queue. A rejection is not counted. In observe mode a
    /// request that would be rejected is admitted, and counted.
    pub(super) fn try_admit(
        &'static self,
        waits: Option<&WaitId>,
        cost: Cost,
        priority: Priority,
        label: Option<&dyn fmt::Display>,
    ) -> Result<Permit, Rejected> {
        let cost = self.by_budget(cost);
        if priority == Priority::Exempt {
            let host = self.host.book_exempt(cost.host);
            let device = self.device.book_exempt(cost.device);
            self.tally().admit_exempt(host, device);
            return Ok(Permit::of_request(self, Cost { host, device }, true));
        }
        let decided = self.decide(waits, cost, priority, label);
        // Now, so that the tick finds what was reserved.
        if self.host.is_watched(cost.host) || self.device.is_watched(cost.device) {
            self.hurry();
        }
        let permit = match decided {
            Ok(booked) => Permit::of_request(self, booked, false),
            Err(rejected) => {
                let reason = self.ignored(rejected)?;
                // No more than can ever be reserved: the estimate may be of a client.
                let book = |of: &Ledger, bytes: ByteSize| of.book_exempt(bytes.min(of.ceiling()));
                let (host, device) = (book(&self.host, cost.host), book(&self.device, cost.device));
                let mut permit = Permit::of_request(self, Cost { host, device }, false);
                permit.observe(reason);
                permit
            }
        };
        self.tally().admit(permit.cost().host, permit.cost().device);
        Ok(permit)
    }

    /// Reserves the cost of a request that is not exempt, or returns why it is rejected.
    fn decide(
        &'static self,
        waits: Option<&WaitId>,
        cost: Cost,
        priority: Priority,
        label: Option<&dyn fmt::Display>,
    ) -> Result<Cost, Rejected> {
        if self.sheds(priority) {
            if let Some(waits) = waits {
                self.queue.lacks(waits, WaitReason::Other);
            }
            return Err(self.away());
        }
        if waits.is_some() || !self.queue.is_empty() {
            return self.book_in_order(waits, cost, priority, label);
        }
        let how = if priority == Priority::High { Ledger::try_book_more } else { Ledger::try_book };
        let make_room = || self.make_room(cost, label, Patience::Waits);
        self.book(cost, how).map_err(|(budget, short)| self.full(budget, short, make_room))
    }

    /// Returns `true` in observe mode, in which nothing waits, is rejected or cancelled.
    #[must_use]
    pub fn observes(&self) -> bool {
        self.host.observes.load(Ordering::Relaxed)
    }

    /// Returns the reason of a rejection that observe mode ignores.
    pub(super) fn ignored(&self, rejected: Rejected) -> Result<RejectReason, Rejected> {
        let is_ignored = self.observes() && rejected != Rejected::ShuttingDown;
        if is_ignored { Ok(rejected.reason()) } else { Err(rejected) }
    }

    /// Counts what only observe mode admits.
    pub(super) fn count_observed(&self, reason: RejectReason) {
        if let Some(count) = self.observed.get(reason as usize) {
            count.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Reserves a cost in every budget, or in none.
    fn book(
        &self,
        cost: Cost,
        how: impl Fn(&Ledger, ByteSize) -> Booked + Copy,
    ) -> Result<Cost, (Budget, InsufficientBudget)> {
        if self.unused.keeps_out(cost.host, self.host.unheld()) {
            self.hurry();
            return Err((Budget::Host, self.host.shortfall(cost.host)));
        }
        let reserve = |ledger: &Ledger, bytes| book(ledger, bytes, how);
        let (host, device) = self.reserve_both(cost, reserve, Ledger::release)?;
        Ok(Cost { host, device })
    }

    /// Reserves bytes in both budgets, or in none.
    fn reserve_both<T>(
        &self,
        cost: Cost,
        reserve: impl Fn(&Ledger, ByteSize) -> Booked<T>,
        release: impl FnOnce(&Ledger, T),
    ) -> Result<(T, T), (Budget, InsufficientBudget)> {
        let host = reserve(&self.host, cost.host).map_err(|short| (Budget::Host, short))?;
        match reserve(&self.device, cost.device) {
            Ok(device) => Ok((host, device)),
            Err(short) => {
                release(&self.host, host);
                Err((Budget::Device, short))
            }
        }
    }

    /// Reserves a cost if the order of the queue allows it. The order decides how the room is
    /// shared, so no headroom is left.
    #[cold]
    fn book_in_order(
        &'static self,
        waits: Option<&WaitId>,
        cost: Cost,
        priority: Priority,
        label: Option<&dyn fmt::Display>,
    ) -> Result<Cost, Rejected> {
        let ceilings = Cost { host: self.host.ceiling(), device: self.device.ceiling() };
        let book = || self.book(cost, Ledger::try_book_more);
        let passed = self.queue.pass(waits, cost, priority, ceilings, book);
        // One that was woken together with this one may have been blocked by it.
        if matches!(passed, Ok(_) | Err(PassError::Behind { has_aged: true })) {
            self.wake_waiting();
        }
        passed.map_err(|error| match error {
            // There is room that others wait for.
            PassError::Behind { .. } => {
                let short = self.host.shortfall(cost.host);
                self.full(Budget::Host, short, || RetryHint::Unknown)
            }
            PassError::NoRoom(budget, short) => {
                self.full(budget, short, || self.make_room(cost, label, Patience::Waits))
            }
        })
    }

    /// Wakes the requests that may fit now, after a release of bytes. Runs code of their executors.
    #[inline]
    pub fn wake_waiting(&self) {
        if !self.queue.is_empty() {
            self.wake(WOKEN_OTHERS);
        }
    }

    /// Ends the wait of requests whose deadline has passed, and wakes those that may fit. If there
    /// is no room for the first one, or for one that was rejected, it suspends the reservations of
    /// requests that wait for their clients. The control loop does this at each tick, by its clock.
    pub fn tend_queue(&'static self, now: Moment) {
        self.ticks.fetch_add(1, Ordering::Relaxed);
        self.queue.expire(now);
        let lacked = ByteSize::new(self.lacked.swap(u64::MAX, Ordering::Relaxed));
        let first = self.queue.lacking(|budget| budget == Budget::Host);
        let lacks = first.map_or(lacked, |(first, _)| first.host);
        let waits_for_turn = self.queue.lacks_any(WaitReason::Turn);
        // Slow clients hold turns and slots of the slow start, too.
        let is_held_up = waits_for_turn || self.queue.lacks_any(WaitReason::Other);
        if (is_held_up || lacks < ByteSize::MAX) && !self.observes() {
            let lacks_room = || is_held_up || self.host.room() < lacks;
            let is_short = || lacks_room() && self.host.has_room_for_suspended();
            self.large.suspend_while(now, is_short);
        }
        if !self.queue.is_empty() {
            self.wake(WOKEN_OTHERS_TICK);
            self.queue.wake_loads();
            if let Some(cost) = self.queue.overdue().filter(|_| !self.observes()) {
                self.make_room(cost, None, Patience::HasWaited);
            }
        }
    }

    #[cold]
    fn wake(&self, others: usize) {
        self.queue.wake([&self.host, &self.device], others);
    }

    /// Releases the host memory of a request that ends and is not exempt.
    #[inline]
    pub(super) fn finish_host(&self, bytes: ByteSize) {
        let is_small = !self.unused.is_large(bytes);
        if is_small && let Some(tally) = Tally::owned(&self.tallies) {
            self.host.release(bytes);
            tally.finish();
            return self.wake_waiting();
        }
        self.finish(Cost::host(bytes), false);
    }

    /// Releases the reservation of a request that ends.
    pub(super) fn finish(&self, cost: Cost, is_exempt: bool) {
        // Before its bytes can be reserved. What exempt requests reserve is not bounded by memory.
        if !is_exempt {
            self.unused.free(cost.host);
        }
        self.host.release(cost.host);
        // Most requests need no device memory.
        if !cost.device.is_zero() {
            self.device.release(cost.device);
        }
        self.tally().finish();
        self.wake_waiting();
    }

    /// Reserves the bytes of a resource, or claims idle resources whose unload makes room for it.
    /// Reclaimers of the application are asked first if `asks` is set. Must not be called with the
    /// lock of a resource held.
    pub(super) fn reserve_or_evict(
        &'static self,
        cost: Cost,
        asks: bool,
        resource: &Arc<str>,
    ) -> Result<Eviction, Rejected> {
        let cost = self.by_budget(cost);
        let mut eviction = None;
        let load = |evictor: Arc<Evictor>| evictor.for_load(self, cost, asks, resource);
        let evict = || match self.evictor().map(load) {
            Some(Ok(claimed)) => {
                eviction = Some(claimed);
                RetryHint::Unknown
            }
            Some(Err(Some(stays))) => RetryHint::Resident(stays),
            Some(Err(None)) | None => RetryHint::Unknown,
        };
        let reserved = self.reserve_resource(cost, evict);
        match (reserved, eviction) {
            (Ok(permit), _) => Ok(Eviction::Booked(permit)),
            (Err(_), Some(eviction)) => Ok(eviction),
            (Err(Rejected::Full { budget, asked, .. }), None) if asked > self.loadable(budget) => {
                Err(Rejected::TooLarge { budget, asked, ceiling: self.loadable(budget) })
            }
            (Err(rejected), None) => Err(rejected),
        }
    }

    /// Returns the most bytes that a resource may have: one with a larger cost cannot be loaded,
    /// even if no request runs and no other resource is loaded. It is the ceiling less what the
    /// process holds while nothing is reserved, unless reclaimers may release a part of that.
    #[must_use]
    pub fn loadable(&self, budget: Budget) -> ByteSize {
        let ledger = self.ledger(budget);
        let reclaims = self.evictor().is_some_and(|evictor| evictor.has_reclaimers());
        if reclaims { ledger.ceiling() } else { ledger.loadable() }
    }

    /// Reserves the bytes of a resource, or makes room for one that retries.
    pub(super) fn reserve_resource(
        &'static self,
        cost: Cost,
        make_room: impl FnMut() -> RetryHint,
    ) -> Result<Permit, Rejected> {
        let cost = self.by_budget(cost);
        let booked = if self.sheds(Priority::Normal) {
            Err(self.away())
        } else {
            let booked = self.reserve_both(cost, reserve_resource, Ledger::release_resource);
            booked.map_err(|(budget, short)| self.full(budget, short, make_room))
        };
        let (host, device) = booked.or_else(|rejected| {
            self.count_observed(self.ignored(rejected)?);
            let (mut host, mut device) = Default::default();
            self.host.raise(&mut host, cost.host);
            self.device.raise(&mut device, cost.device);
            Ok((host, device))
        })?;
        self.resource_permits.fetch_add(1, Ordering::Relaxed);
        Ok(Permit::resource(self, host, device))
    }

    /// Releases the reservation of a resource.
    pub(super) fn unload(&self, host: ResourceHold, device: ResourceHold) {
        self.host.release_resource(host);
        self.device.release_resource(device);
        self.resource_permits.fetch_sub(1, Ordering::Release);
        self.wake_waiting();
    }

    /// Lets the control loop tick now if its next tick comes late.
    pub(super) fn hurry(&self) {
        if !self.is_slow.swap(false, Ordering::AcqRel) {
            return;
        }
        // The tick comes at once. Its request must not seem to be as old as the last one.
        if let Some(evictor) = self.evictor.try_read().ok().and_then(|of| of.clone()) {
            self.large.set_now(evictor.clock.now());
        }
        if let Some(bell) = self.bell.try_read().ok().and_then(|of| of.clone()) {
            bell.ring();
        }
    }

    fn evictor(&self) -> Option<Arc<Evictor>> {
        // Most services have nothing to evict: then the lock is not tried.
        self.evicts().then(|| self.evictor.try_read().ok())??.clone()
    }

    fn evicts(&self) -> bool {
        !self.host.resource_reservations().is_zero()
            || !self.device.resource_reservations().is_zero()
            || self.has_reclaimers.load(Ordering::Relaxed)
    }

    /// Returns `true` if a request of this cost would fit if `freed` bytes of resources were
    /// released.
    pub(super) fn fits(&self, cost: Cost, freed: Cost) -> bool {
        self.host.fits(cost.host, freed.host) && self.device.fits(cost.device, freed.device)
    }

    /// Returns `true` if a resource of this cost would fit if `freed` bytes of resources were
    /// released.
    pub(super) fn fits_resource(&self, cost: Cost, freed: Cost) -> bool {
        self.host.fits_resource(cost.host, freed.host)
            && self.device.fits_resource(cost.device, freed.device)
    }

    /// Reserves what a resource needs beyond `freed` bytes that are being released.
    pub(super) fn reserve(&self, cost: Cost, freed: Cost) -> Option<[Reservation; 2]> {
        let host = self.host.reserve(cost.host, freed.host)?;
        if let Some(device) = self.device.reserve(cost.device, freed.device) {
            return Some([host, device]);
        }
        self.host.unreserve(host);
        None
    }

    /// Releases a reservation.
    pub(super) fn unreserve(&self, [host, device]: [Reservation; 2]) {
        self.host.unreserve(host);
        self.device.unreserve(device);
        self.wake_waiting();
    }

    /// Turns released resources and the additional reservation into the permit of a load.
    pub(super) fn exchange(
        &'static self,
        freed: Vec<Permit>,
        [host, device]: [Reservation; 2],
        cost: Cost,
    ) -> Permit {
        let (hosts, devices): (Vec<_>, Vec<_>) =
            freed.into_iter().filter_map(Permit::into_resource).unzip();
        let host = self.host.exchange(&hosts, host, cost.host);
        let device = self.device.exchange(&devices, device, cost.device);
        self.resource_permits.fetch_add(1, Ordering::Relaxed);
        self.resource_permits.fetch_sub(hosts.len() as u64, Ordering::Release);
        self.wake_waiting();
        Permit::resource(self, host, device)
    }

    /// Reserves more host memory on the terms of a new request of this priority. Returns the bytes
    /// reserved. A rejection is not counted.
    pub(super) fn grow_with(
        &'static self,
        held: ByteSize,
        bytes: ByteSize,
        priority: Priority,
    ) -> Result<ByteSize, Rejected> {
        let reserved = match priority {
            Priority::Exempt => return Ok(self.raise(bytes)),
            Priority::High => {
                let grow = |ledger: &Ledger, bytes| ledger.try_grow(held, bytes);
                book(&self.host, bytes, grow).map_err(|short| {
                    // The bytes it holds and the bytes it requests must fit together.
                    let total = held.saturating_add(bytes);
                    let never = total > self.host.ceiling();
                    let asked = if never { total } else { bytes };
                    let make_room = || self.make_room(Cost::host(bytes), None, Patience::None);
                    self.full(Budget::Host, InsufficientBudget { asked, ..short }, make_room)
                })?
            }
            Priority::Low | Priority::Normal if self.sheds(priority) => return Err(self.away()),
            // For which no request waits. Makes no room: the holder can do without.
            Priority::Low | Priority::Normal => {
                let others_wait = self.queue.lacking(|budget| budget == Budget::Host).is_some();
                let booked = match others_wait {
                    true => Err((Budget::Host, self.host.shortfall(bytes))),
                    false => self.book(Cost::host(bytes), Ledger::try_book),
                };
                let refuse = |(of, short)| self.refusal(of, short, || RetryHint::Unknown);
                booked.map_err(refuse)?.host
            }
        };
        Ok(self.count_growth(reserved))
    }

    /// Counts the growth of a request by these bytes, and returns them.
    fn count_growth(&self, bytes: ByteSize) -> ByteSize {
        self.tally().grow(bytes);
        bytes
    }

    /// Admits a request for whose claim there is no room, so that its body can arrive: it reserves
    /// so many bytes and is suspended. It counts as one with its claim. Returns `None` if there is
    /// no room for the bytes either.
    pub fn admit_suspended(
        &'static self,
        bytes: ByteSize,
        claim: ByteSize,
        priority: Priority,
    ) -> Option<Permit> {
        if self.sheds(priority) || !self.host.has_room_for_suspended() {
            return None;
        }
        let host = book(&self.host, bytes, Ledger::try_book_more).ok()?;
        self.tally().admit(claim, ByteSize::ZERO);
        // Of its claim only these bytes are reserved, and the rest when it resumes.
        self.tally().grow(ByteSize::new(host.get().wrapping_sub(claim.get())));
        Some(Permit::of_suspended(self, host, claim))
    }

    /// Reserves host memory for what arrives of the body of a suspended request. Returns `false`
    /// if there is no room for it.
    pub(super) fn book_arriving(&self, bytes: ByteSize) -> bool {
        let has_room = self.host.has_room_for_suspended()
            && book(&self.host, bytes, Ledger::try_book_more).is_ok();
        if has_room {
            self.count_growth(bytes);
        }
        has_room
    }

    /// Reserves host memory for a request whose reservation was suspended, in the order of the
    /// queue. One that has not started is rejected by level, as a new one. Returns the bytes
    /// reserved. A rejection is not counted.
    pub(super) fn book_again(
        &'static self,
        waits: Option<&WaitId>,
        bytes: ByteSize,
        priority: Priority,
        is_started: bool,
    ) -> Result<ByteSize, Rejected> {
        if !is_started && self.sheds(priority) {
            return Err(self.away());
        }
        let cost = Cost::host(bytes);
        let booked = self.book_in_order(waits, cost, priority, None)?;
        Ok(self.count_growth(booked.host))
    }

    /// Replaces the parts of a request in the sums over all: the bytes of its reservation that it
    /// does not hold, all of them if it is suspended, those whose need is not known, and in each
    /// budget all of them if only observe mode admits it.
    pub(super) fn replace_parts(&self, before: [ByteSize; 5], after: [ByteSize; 5]) {
        let Ledger { unheld, suspended, unlearned, observed, .. } = &self.host;
        let sums = [unheld, suspended, unlearned, observed, &self.device.observed];
        for ((sum, before), after) in sums.iter().zip(before).zip(after) {
            // A difference, which may be negative: additions wrap.
            let more = after.get().wrapping_sub(before.get());
            if more != 0 {
                sum.fetch_add(more, Ordering::Relaxed);
            }
        }
    }

    /// Reserves more host memory for a request, even beyond the allowance. Returns the bytes
    /// reserved.
    pub(super) fn raise(&self, bytes: ByteSize) -> ByteSize {
        self.count_growth(self.host.book_exempt(bytes))
    }

    /// Returns `true` if the host's ledger has no room for other requests. A level would count
    /// memory that the next purge releases.
    #[must_use]
    pub fn is_short(&self) -> bool {
        self.host.reserved() > self.host.allowance()
    }

    /// Returns the turn of a request that claims so much, which is not entered; `None` if it needs
    /// none.
    #[must_use]
    pub fn turn(&'static self, claim: ByteSize) -> Option<Turn> {
        self.turns.of(claim)
    }

    /// Returns the rejection of a request during the slow start of its route, of which so many run.
    #[cold]
    pub fn slow_start(&self, running: u32) -> Rejected {
        Rejected::SlowStart { running, retry_after: self.retry_after(Some(LASTS)) }
    }

    /// Counts a running request as cancelled, since it holds more than `most`.
    #[cold]
    pub fn outgrown(&self, held: ByteSize, claim: ByteSize, most: ByteSize) -> Rejected {
        let may_fit = held.get() <= self.host.ceiling().get() / 2;
        let retry_after = may_fit.then(|| self.retry_after(None));
        self.large.note_cancelled();
        self.reject(Rejected::Outgrown { held, claim, most, retry_after })
    }

    /// Counts bytes that outlived their request.
    pub fn outlive(&self, bytes: ByteSize) {
        self.tally().outlive(bytes);
    }

    /// Counts a request as rejected, and returns the rejection.
    #[inline]
    pub fn reject(&self, rejected: Rejected) -> Rejected {
        self.count_rejection(rejected.reason(), rejected.shortage());
        rejected
    }

    /// Counts a rejection, in the class of what did not fit.
    pub(super) fn count_rejection(&self, reason: RejectReason, short: Option<(Budget, ByteSize)>) {
        use RejectReason::{HeldTooLong, SlowClient, TooLarge};
        self.tally().rejected(reason, short);
        // Another instance may serve the request now, unless it or its client is the reason.
        if !matches!(reason, TooLarge | SlowClient | HeldTooLong) {
            self.sheds.fetch_add(1, Ordering::Relaxed);
        }
    }

    pub(super) fn ledger(&self, budget: Budget) -> &Ledger {
        match budget {
            Budget::Host => &self.host,
            Budget::Device => &self.device,
        }
    }

    /// Returns the sums of all stripes.
    pub(super) fn counts(&self) -> AdmissionStats {
        let mut counts = AdmissionStats::default();
        // Ends first: an ended request began before and is counted below.
        for tally in used(&self.tallies) {
            counts.add_ended(tally);
        }
        for tally in used(&self.tallies) {
            counts.add(tally);
        }
        counts
    }

    pub(super) fn budget_counts(&self, budget: Budget) -> BudgetCounts {
        let mut counts = BudgetCounts::none();
        for tally in used(&self.tallies) {
            counts.add(tally, budget);
        }
        counts
    }

    fn tally(&self) -> Tally<'_> {
        Tally::here(&self.tallies)
    }

    /// Returns a number that differs from one rejected request to the next.
    fn spread(&self) -> u64 {
        self.sheds_total().wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 32
    }

    /// Returns the wakers of the watches that wait for a change of the level, by number.
    pub(super) fn level_watches(&self) -> MutexGuard<'_, BTreeMap<u64, Waker>> {
        self.level_watches.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn level(&self) -> Level {
        Level::from_u8(self.level.load(Ordering::Relaxed) & !CLOSED)
    }

    /// Returns `true` if requests of this priority are rejected now, whatever their cost.
    fn sheds(&self, priority: Priority) -> bool {
        let by_level = match self.level() {
            Level::None | Level::Elevated => false,
            Level::High => priority == Priority::Low,
            // The level stays until memory is well below its mark. A single request is kept below
            // it by the ledger.
            Level::Critical if priority == Priority::Normal => self.host.single().is_zero(),
            Level::Critical => priority == Priority::Low,
        };
        by_level || self.is_closed()
    }

    /// Returns why a request is rejected independently of its cost.
    fn away(&self) -> Rejected {
        if self.is_closed() {
            return Rejected::ShuttingDown;
        }
        if let Some(rejected) = self.exhausted() {
            return rejected;
        }
        let retry_after = self.retry_after(None);
        Rejected::Pressure { level: self.level(), retry_after }
    }

    /// Returns the rejection while memory that no request owns leaves no room.
    fn exhausted(&self) -> Option<Rejected> {
        let unowned = NonZero::new(self.unowned.load(Ordering::Relaxed))?;
        let retry_after = self.retry_after(Some(EXHAUSTED));
        let (unowned, ceiling) = (ByteSize::new(unowned.get()), self.host.ceiling());
        Some(Rejected::Exhausted { unowned, ceiling, retry_after })
    }

    /// Asks reclaimers and unloads idle resources if that makes room for a rejected request.
    fn make_room(
        &'static self,
        cost: Cost,
        label: Option<&dyn fmt::Display>,
        patience: Patience,
    ) -> RetryHint {
        let make = |evictor: Arc<Evictor>| evictor.for_request(self, cost, label, patience);
        self.evictor().map_or(RetryHint::Unknown, make)
    }

    /// Returns why a cost does not fit, and makes room if it may fit later.
    #[cold]
    fn full(
        &self,
        budget: Budget,
        short: InsufficientBudget,
        make_room: impl FnMut() -> RetryHint,
    ) -> Rejected {
        if budget == Budget::Host && short.asked <= self.host.ceiling() {
            self.lacked.fetch_min(short.asked.get(), Ordering::Relaxed);
        }
        self.refusal(budget, short, make_room)
    }

    /// Returns the reason: the device is lost, the request can never fit, or it does not fit now.
    /// Unlike after [`AdmissionState::full`], the next tick does not make room for it.
    fn refusal(
        &self,
        budget: Budget,
        short: InsufficientBudget,
        mut make_room: impl FnMut() -> RetryHint,
    ) -> Rejected {
        let ledger = self.ledger(budget);
        let InsufficientBudget { asked, reserved, allowance } = short;
        if budget == Budget::Device && self.is_device_lost.load(Ordering::Relaxed) {
            return Rejected::DeviceLost { asked };
        }
        let ceiling = ledger.ceiling();
        if asked > ceiling {
            return Rejected::TooLarge { budget, asked, ceiling };
        }
        let wait = ledger.wait_for(&short);
        let hint = if self.observes() { RetryHint::Unknown } else { make_room() };
        if budget == Budget::Host
            && !matches!(hint, RetryHint::Unloading(_))
            && let Some(rejected) = self.exhausted()
        {
            return rejected;
        }
        let retry_after = match hint {
            RetryHint::Unloading(takes) => self.retry_after(Some(takes)),
            // A known time: up to a tenth and one second are added.
            RetryHint::Resident(stays) if !ledger.drains(&short) => {
                let seconds = whole_seconds(stays.min(KNOWN_MAX));
                Duration::from_secs(seconds + self.spread() % (seconds / 10 + 2))
            }
            RetryHint::Resident(_) | RetryHint::Unknown => self.retry_after(wait),
        };
        let (reserved, allowance) = (ledger.in_bytes(reserved), ledger.in_bytes(allowance));
        Rejected::Full { budget, asked, reserved, allowance, retry_after }
    }

    /// Returns the time in which the missing bytes become free, if known; otherwise 1 s at no
    /// pressure to 4 s at critical, a guess. Up to as much again is added, by a number that differs
    /// between requests, so that clients do not return at once.
    fn retry_after(&self, wait: Option<Duration>) -> Duration {
        let by_level = || 1 + u64::from(self.level.load(Ordering::Relaxed) & !CLOSED);
        let most = RETRY_MAX.as_secs() / 2;
        let seconds = wait.map_or_else(by_level, |wait| whole_seconds(wait).clamp(1, most));
        // Three seconds at least, or those that were rejected together come back together.
        Duration::from_secs(seconds + self.spread() % (seconds + 1).max(3))
    }
}

/// For a layer that measures requests, and for reports.
impl AdmissionState {
    /// Enters the queue of requests that wait for room, for at most the time `within`; `None` waits
    /// without a deadline. Returns `None` if the queue is full, or if there is no control loop for
    /// the deadline.
    #[must_use]
    pub fn wait(
        &'static self,
        cost: Cost,
        priority: Priority,
        tenant: u64,
        within: Option<Duration>,
    ) -> Option<Waiting> {
        let is_admitted = false;
        Waiting::enter(self, WaitTerms { cost, priority, tenant, within, is_admitted })
    }

    /// Enters the queue of requests for the room of a load, before those that were not admitted.
    /// Returns `None` as [`AdmissionState::wait`] does.
    pub(super) fn wait_for_load(&'static self, cost: Cost, within: Duration) -> Option<Waiting> {
        let cost = self.by_budget(cost);
        // Resources are not multiplied by the correction factor.
        let units = |ledger: &Ledger, bytes| ByteSize::new(ledger.units_of(bytes));
        let (host, device) = (units(&self.host, cost.host), units(&self.device, cost.device));
        let (priority, tenant, within) = (Priority::Normal, 0, Some(within));
        let cost = Cost { host, device };
        Waiting::enter(self, WaitTerms { cost, priority, tenant, within, is_admitted: true })
    }

    /// Returns `true` while requests wait for room. One atomic read.
    #[must_use]
    pub fn has_waiting(&self) -> bool {
        !self.queue.is_empty()
    }

    /// Returns the number of rejected requests that another instance may serve, since the start:
    /// for lack of memory or of its device, or because the service shuts down. One atomic read.
    #[inline]
    #[must_use]
    pub fn sheds_total(&self) -> u64 {
        self.sheds.load(Ordering::Relaxed)
    }

    /// Reserves the device bytes of all costs in the host's budget from now on, for a device that
    /// shares the host's memory: one limit holds for both, and every byte counts once. Called
    /// before the first reservation.
    pub fn unify(&self) {
        self.unified.store(true, Ordering::Relaxed);
    }

    /// Returns the time of the control loop's last tick, or that at which a request has asked for
    /// the next one. No clock is read.
    #[inline]
    #[must_use]
    pub fn last_tick(&self) -> Moment {
        self.large.now()
    }

    /// Adds a running request that has reserved much, or something else that has a time limit, to
    /// the registry of requests.
    pub fn register(&self, request: Arc<dyn LargeRequest>) {
        let reserved = request.figures().map_or(ByteSize::ZERO, |of| of.reserved);
        self.large.add(request, reserved);
    }
}

/// For reports.
impl AdmissionState {
    /// Returns the `most` running requests that hold most memory, the largest first, among those
    /// that hold at least [`LARGE_MIN`] and are measured. Allocates, and takes a lock for some
    /// microseconds.
    #[must_use]
    pub fn largest(&self, most: usize, now: Moment) -> Vec<RequestMemory> {
        self.large.top(most, now, |of| (of.live >= LARGE_MIN).then_some(of.live))
    }

    /// Returns the `most` running requests that were admitted first, the oldest first, among those
    /// that have waited for something, and are measured and have reserved at least
    /// [`REGISTERED_MIN`](super::large::REGISTERED_MIN), or have a time limit. Costs as much as
    /// [`AdmissionState::largest`].
    #[must_use]
    pub fn oldest(&self, most: usize, now: Moment) -> Vec<RequestMemory> {
        self.large.top(most, now, |of| Some(of.age))
    }

    /// Describes the running requests that have reserved most memory, the largest first, among
    /// those of [`AdmissionState::oldest`]: as many as `into` has places, and at most 16. Returns
    /// their number. Allocates nothing if the texts in `into` have room.
    pub fn largest_reserved(&self, into: &mut [RequestMemory], now: Moment) -> usize {
        let mut top: [Option<(ByteSize, Arc<dyn LargeRequest>)>; TOP_MAX] = Default::default();
        for request in self.large.each() {
            let figures = request.figures().filter(|of| of.admitted_at.is_some());
            let Some(reserved) = figures.map(|of| of.reserved) else { continue };
            let is_more = |(other, _): &(ByteSize, _)| *other >= reserved;
            let at = top.partition_point(|of| of.as_ref().is_some_and(is_more));
            if let Some(places) = top.get_mut(at..).filter(|places| !places.is_empty()) {
                places.rotate_right(1);
                places[0] = Some((reserved, request));
            }
        }
        let mut count = 0;
        for (_, request) in top.iter().flatten() {
            if let Some(place) = into.get_mut(count) {
                count += usize::from(request.describe(now, place));
            }
        }
        count
    }
}

/// Replaces a value, unless it is being read or replaced by another thread: it is tried, not waited
/// for, since a process forked in the meantime would wait forever.
pub(super) fn replace<T>(slot: &RwLock<Option<T>>, new: Option<T>) {
    // The previous one is dropped after the lock is released.
    let before = slot.try_write().map(|mut slot| std::mem::replace(&mut *slot, new));
    drop(before);
}

fn whole_seconds(time: Duration) -> u64 {
    time.as_secs().saturating_add(u64::from(time.subsec_nanos() > 0))
}

/// Reserves for a request and returns the bytes reserved, which must be released later. Without a
/// limit nothing is rejected: it reserves as much as 64 bits hold.
fn book(
    ledger: &Ledger,
    bytes: ByteSize,
    how: impl Fn(&Ledger, ByteSize) -> Booked,
) -> Booked<ByteSize> {
    // Most requests need no device memory.
    if bytes.is_zero() {
        return Ok(bytes);
    }
    if ledger.ceiling() == ByteSize::MAX {
        return Ok(ledger.book_exempt(bytes));
    }
    how(ledger, bytes).map(|()| bytes)
}

/// Reserves the bytes of a resource. Without a limit nothing is rejected: it reserves nothing if 64
/// bits are full.
fn reserve_resource(ledger: &Ledger, bytes: ByteSize) -> Booked<ResourceHold> {
    let reserved = ledger.try_reserve_resource(bytes);
    if reserved.is_err() && ledger.ceiling() == ByteSize::MAX {
        return ledger.try_reserve_resource(ByteSize::ZERO);
    }
    reserved
}

#[cfg(all(test, not(lowtide_loom)))]
mod tests {
    use super::*;
    use crate::admission::Admission;

    /// Desks belong to the whole process, and other tests use admissions at the same time. So the
    /// test only checks from outside that a new admission starts fresh.
    #[test]
    fn a_new_door_is_open_empty_and_without_limit_whatever_the_last_one_was() {
        let one = ByteSize::mib(1);
        for _ in 0..200 {
            let door = Admission::with_limit(one);
            let permit = door.try_admit(Cost::host(one)).expect("fits");
            let model = door.try_reserve_resource(Cost::device(one)).expect("no limit");
            assert!(door.try_admit(Cost::host(one)).is_err());
            door.set_level(Level::Critical);
            door.close();
            let before = door.clone();
            drop(door);
            let new = Admission::new();
            assert_eq!(new.stats(), AdmissionStats::default());
            assert_eq!((new.level(), new.is_closed()), (Level::None, false));
            assert_eq!(new.ledger(Budget::Host).ceiling(), ByteSize::MAX);
            for budget in [Budget::Host, Budget::Device] {
                assert_eq!(new.ledger(budget).reserved_bytes(), ByteSize::ZERO);
                let classes = new.classes(budget);
                assert!(
                    classes.iter().all(|class| class.admitted_total + class.rejected_total == 0)
                );
            }
            assert_eq!((before.stats().held(), before.is_closed()), (1, true));
            drop((before, new));
            // They outlive their admission, and no other has its state in the meantime.
            let other = Admission::with_limit(one);
            drop((permit, model));
            assert_eq!(other.stats().finished_total, 0);
            assert_eq!(other.ledger(Budget::Host).reserved(), ByteSize::ZERO);
        }
    }

    #[test]
    fn a_desk_whose_door_and_permits_are_gone_is_taken_again() {
        // More than all other tests of this process ever use at once.
        const MANY: usize = 400;
        let addresses: Vec<_> = (0..MANY)
            .map(|_| {
                let state = AdmissionState::take(ByteSize::MAX, K_START);
                state.leave();
                std::ptr::from_ref(state)
            })
            .collect();
        let mut different = addresses;
        different.sort_unstable();
        different.dedup();
        assert!(different.len() < MANY / 2, "{} of {MANY}", different.len());
    }

    #[test]
    fn permits_that_end_on_other_threads_are_counted() {
        let door = Admission::with_limit(ByteSize::mib(64));
        std::thread::scope(|scope| {
            for _ in 0..4 {
                let door = &door;
                scope.spawn(move || {
                    let permits: Vec<_> = (0..16)
                        .filter_map(|_| door.try_admit(Cost::host(ByteSize::mib(1))).ok())
                        .collect();
                    assert_eq!(permits.len(), 16);
                    std::thread::spawn(move || drop(permits)).join().expect("no panic");
                });
            }
        });
        let stats = door.stats();
        assert_eq!((stats.admitted_total, stats.finished_total, stats.held()), (64, 64, 0));
        assert_eq!(door.ledger(Budget::Host).reserved(), ByteSize::ZERO);
    }

    /// Only stripes that have been used are summed.
    #[test]
    fn counts_include_those_of_every_thread() {
        let door = Admission::new();
        let all = std::sync::Barrier::new(2 * STRIPES);
        let cost = Cost::host(ByteSize::mib(1));
        std::thread::scope(|scope| {
            for _ in 0..2 * STRIPES {
                scope.spawn(|| {
                    let permit = door.try_admit(cost).expect("no limit");
                    all.wait(); // so that each thread has a place at the same time
                    drop(permit);
                });
            }
        });
        let (stats, threads) = (door.stats(), 2 * STRIPES as u64);
        assert_eq!((stats.admitted_total, stats.finished_total), (threads, threads));
        let class = door.classes(Budget::Host)[crate::tally::class_of(cost.host)];
        assert_eq!(class.admitted_total, threads);
    }
}
