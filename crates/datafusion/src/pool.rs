//! The pool: the bytes of consumers, and one permit of the ledger for their sum.
//!
//! DataFusion calls it for each growth and release of an operator, often for some kilobytes. The
//! permit changes in steps of [`STEP`], so most calls only add and subtract under the pool's lock.
//!
//! While the ledger has room, the first consumer that asks gets it. Growth has the terms of
//! [`Permit::grow_with`]. Consumers that can spill grow with low priority: they yield to the level,
//! to requests that wait and to the reserved headroom. Denied growth makes their operator spill.
//! The query of other consumers fails if they are denied growth, so their priority is high.
//!
//! An operator has to hold a little even if memory is short: a sort that cannot hold one batch
//! fails. So up to its minimum, the pool is a `FairSpillPool`: consumers that can spill have equal
//! shares of what the others leave of it. Within its share, a consumer grows with high priority,
//! and if there is no room, beyond the allowance: by the minimum at most.
//!
//! Invariants: `reserved = ceil(sum over consumers / STEP) * STEP`, from the return of each call to
//! the next; bytes beyond the allowance are at most the minimum and what grew infallibly. No waker
//! is called and no permit dropped with the lock held.
//!
//! It does not make operators spill, and does not measure.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use datafusion_common::Result;
use datafusion_execution::memory_pool::{
    MemoryConsumer, MemoryLimit, MemoryPool, MemoryReservation,
};
use lowtide_admission::{
    Admission, Budget, ByteSize, Cost, Permit, Priority, Reclaimable, Rejected,
};

use super::denied::{Denied, DenyReason, bounded};

/// The bytes by which the permit changes. An estimate: the most that is reserved and not used, by
/// the whole pool. A sort of 64 MiB in batches of 512 KiB changes its permit 339 times instead of
/// 771; each change takes some 12 ns, as long as the pool's lock.
const STEP: ByteSize = ByteSize::mib(1);
/// The default of [`AdmissionMemoryPool::with_min`]. An estimate: the 10 MB that one sort keeps for
/// merging, and two runs of 11 MiB.
const MIN: ByteSize = ByteSize::mib(32);

/// A DataFusion memory pool whose bytes are reserved in the ledger of an [`Admission`].
pub struct AdmissionMemoryPool {
    admission: Admission,
    min: ByteSize,
    limit: ByteSize,
    state: Mutex<State>,
}

/// The figures of a pool at one instant.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct PoolStats {
    /// The bytes that all consumers hold.
    pub used: ByteSize,
    /// The bytes that are reserved in the ledger: `used` rounded up to 1 MiB.
    pub reserved: ByteSize,
    /// The part of them for which the ledger had no room when it was reserved.
    pub overdraft: ByteSize,
    /// The largest number of bytes that were reserved at once.
    pub reserved_peak: ByteSize,
    /// The bytes that consumers are still to release for others.
    pub wanted: ByteSize,
    /// The registered consumers.
    pub consumers: usize,
    /// Growth that was denied, since the start.
    pub denied_total: u64,
    /// The last growth that was denied.
    pub last_denied: Option<Denied>,
}

#[derive(Debug, Default)]
struct State {
    /// By the number of the consumer.
    consumers: BTreeMap<usize, Consumer>,
    /// All figures but `reserved` and `consumers`, which follow from the other fields.
    stats: PoolStats,
    /// The part of `used` of consumers that cannot spill.
    unspillable: ByteSize,
    /// The number of consumers that can spill.
    spillers: u64,
    /// `None` while nothing is used: a permit counts as a running request.
    permit: Option<Permit>,
}

#[derive(Clone, Copy, Debug, Default)]
struct Consumer {
    bytes: ByteSize,
    can_spill: bool,
}

impl AdmissionMemoryPool {
    /// Creates a pool that reserves from this admission, without a limit of its own. It keeps the
    /// handle, and so the `Memory` of the handle.
    #[must_use]
    pub fn new(admission: Admission) -> Self {
        Self { admission, min: MIN, limit: ByteSize::MAX, state: Mutex::default() }
    }

    /// Sets the bytes up to which consumers may always grow, even beyond the allowance: the least
    /// with which queries make progress by spilling. Nothing is reserved for it in advance.
    /// Default: 32 MiB. With zero, queries fail while requests take all memory.
    ///
    /// Each sort of a partition needs `datafusion.execution.sort_spill_reservation_bytes`
    /// (10 MB by default) and some batches. The smaller the minimum, the more files a sort spills
    /// while memory is short.
    #[must_use]
    pub const fn with_min(mut self, min: ByteSize) -> Self {
        self.min = min;
        self
    }

    /// Sets the bytes that the pool may hold in total, so that queries leave room for requests even
    /// while none comes. Growth that cannot fail is not limited. Default: none.
    #[must_use]
    pub const fn with_limit(mut self, limit: ByteSize) -> Self {
        self.limit = limit;
        self
    }

    /// Describes the memory of the pool that spilling can release, to register it with
    /// `Memory::reclaimer` or [`Resources::add_reclaimer`].
    ///
    /// A request that does not fit, or level high, then asks for bytes. The pool releases nothing
    /// at once, and reports that. Until consumers that hold more than their share of the minimum
    /// have released as much, they are denied growth, so they spill when they grow next.
    ///
    /// [`Resources::add_reclaimer`]: lowtide_admission::Resources::add_reclaimer
    #[must_use]
    pub fn reclaimable(self: &Arc<Self>, name: impl Into<Arc<str>>) -> Reclaimable {
        let (asked, wanted_of) = (Arc::downgrade(self), Arc::downgrade(self));
        let releasable = move || asked.upgrade().map_or(ByteSize::ZERO, |pool| pool.releasable());
        let release = move |wanted| {
            if let Some(pool) = wanted_of.upgrade() {
                pool.want(wanted);
            }
            ByteSize::ZERO
        };
        Reclaimable::new(name, releasable, release)
    }

    /// Returns the figures of the pool.
    #[must_use]
    pub fn stats(&self) -> PoolStats {
        let state = self.state();
        let (reserved, consumers) = (state.reserved(), state.consumers.len());
        PoolStats { reserved, consumers, ..state.stats.clone() }
    }

    /// Wakes those that wait for released bytes, without the lock, and drops a permit.
    fn finish(&self, freed: Option<Permit>) {
        self.admission.state().wake_waiting();
        drop(freed);
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn releasable(&self) -> ByteSize {
        self.state().releasable(self.min)
    }

    fn want(&self, bytes: ByteSize) {
        let mut state = self.state();
        let wanted = state.stats.wanted.max(bytes);
        state.stats.wanted = wanted.min(state.releasable(self.min));
    }

    fn check(&self, state: &mut State, of: Consumer, asked: ByteSize) -> Result<(), DenyReason> {
        let used = state.stats.used;
        if used.saturating_add(asked) > self.limit {
            return Err(DenyReason::Limit { used, limit: self.limit });
        }
        let within = !of.can_spill || of.bytes.saturating_add(asked) <= state.share(self.min);
        if !within && !state.stats.wanted.is_zero() {
            return Err(DenyReason::Reclaimed { wanted: state.stats.wanted });
        }
        let priority = if within { Priority::High } else { Priority::Low };
        let more = steps(used.saturating_add(asked)).saturating_sub(steps(used));
        let Err(rejected) = state.grow(&self.admission, more, priority) else { return Ok(()) };
        if within && state.stats.overdraft.saturating_add(more) <= self.min {
            state.overdraw(&self.admission, more);
            return Ok(());
        }
        Err(DenyReason::Rejected(rejected))
    }
}

impl State {
    fn reserved(&self) -> ByteSize {
        self.permit.as_ref().map_or(ByteSize::ZERO, |permit| permit.cost().host)
    }

    /// Returns the bytes that each consumer that can spill may hold while memory is short.
    fn share(&self, min: ByteSize) -> ByteSize {
        let left = min.saturating_sub(self.unspillable);
        ByteSize::new(left.get() / self.spillers.max(1))
    }

    /// Returns the bytes that consumers hold beyond their share of the minimum and can spill.
    fn releasable(&self, min: ByteSize) -> ByteSize {
        let share = self.share(min);
        let spillers = self.consumers.values().filter(|consumer| consumer.can_spill);
        let beyond = spillers.map(|consumer| consumer.bytes.saturating_sub(share));
        beyond.fold(ByteSize::ZERO, ByteSize::saturating_add)
    }

    /// Reserves more in the ledger. No bytes always fit.
    fn grow(
        &mut self,
        admission: &Admission,
        more: ByteSize,
        priority: Priority,
    ) -> Result<(), Rejected> {
        if more.is_zero() {
            return Ok(());
        }
        let mut permit = match self.permit.take() {
            Some(permit) => permit,
            None => admission.try_admit_with(Cost::ZERO, Priority::Exempt)?,
        };
        let grown = permit.grow_with(more, priority);
        self.stats.reserved_peak = self.stats.reserved_peak.max(permit.cost().host);
        // Also without bytes: its drop wakes others, and the lock is held.
        self.permit = Some(permit);
        grown
    }

    /// Reserves more in the ledger, even beyond the allowance.
    fn overdraw(&mut self, admission: &Admission, more: ByteSize) {
        // An exempt permit is never rejected.
        if self.grow(admission, more, Priority::Exempt).is_ok() {
            self.stats.overdraft = self.stats.overdraft.saturating_add(more);
        }
    }

    fn add(&mut self, consumer: &MemoryConsumer, bytes: ByteSize) {
        let can_spill = consumer.can_spill();
        let entry = self
            .consumers
            .entry(consumer.id())
            .or_insert_with(|| Consumer { bytes: ByteSize::ZERO, can_spill });
        entry.bytes = entry.bytes.saturating_add(bytes);
        self.stats.used = self.stats.used.saturating_add(bytes);
        if !can_spill {
            self.unspillable = self.unspillable.saturating_add(bytes);
        }
    }

    /// Removes bytes of a consumer, and releases what is not needed any more.
    fn remove(&mut self, id: usize, bytes: ByteSize, min: ByteSize) -> Option<Permit> {
        let entry = self.consumers.get_mut(&id)?;
        let (bytes, can_spill) = (bytes.min(entry.bytes), entry.can_spill);
        entry.bytes = entry.bytes.saturating_sub(bytes);
        self.stats.used = self.stats.used.saturating_sub(bytes);
        if can_spill {
            self.stats.wanted = self.stats.wanted.saturating_sub(bytes).min(self.releasable(min));
        } else {
            self.unspillable = self.unspillable.saturating_sub(bytes);
        }
        self.release()
    }

    /// Releases the steps that are not used, and returns a permit that is to be dropped without the
    /// lock.
    fn release(&mut self) -> Option<Permit> {
        let spare = self.reserved().saturating_sub(steps(self.stats.used));
        self.stats.overdraft = self.stats.overdraft.saturating_sub(spare);
        if let Some(permit) = &mut self.permit {
            permit.shrink_quietly(spare);
        }
        if self.stats.used.is_zero() { self.permit.take() } else { None }
    }
}

/// Returns the bytes rounded up to a multiple of [`STEP`].
fn steps(bytes: ByteSize) -> ByteSize {
    bytes.next_multiple_of(STEP).unwrap_or(ByteSize::MAX)
}

impl MemoryPool for AdmissionMemoryPool {
    fn name(&self) -> &str {
        "admission"
    }

    fn register(&self, consumer: &MemoryConsumer) {
        let mut state = self.state();
        let can_spill = consumer.can_spill();
        state.consumers.insert(consumer.id(), Consumer { bytes: ByteSize::ZERO, can_spill });
        state.spillers += u64::from(can_spill);
    }

    fn unregister(&self, consumer: &MemoryConsumer) {
        let mut state = self.state();
        // Reservations release their bytes before: none are left.
        let freed = state.remove(consumer.id(), ByteSize::MAX, self.min);
        if state.consumers.remove(&consumer.id()).is_some() && consumer.can_spill() {
            state.spillers = state.spillers.saturating_sub(1);
        }
        drop(state);
        self.finish(freed);
    }

    fn grow(&self, reservation: &MemoryReservation, additional: usize) {
        let asked = ByteSize::of(additional);
        let mut state = self.state();
        let more =
            steps(state.stats.used.saturating_add(asked)).saturating_sub(steps(state.stats.used));
        if state.grow(&self.admission, more, Priority::High).is_err() {
            state.overdraw(&self.admission, more);
        }
        state.add(reservation.consumer(), asked);
    }

    fn shrink(&self, reservation: &MemoryReservation, shrink: usize) {
        let bytes = ByteSize::of(shrink);
        let freed = self.state().remove(reservation.consumer().id(), bytes, self.min);
        self.finish(freed);
    }

    fn try_grow(&self, reservation: &MemoryReservation, additional: usize) -> Result<()> {
        let (consumer, asked) = (reservation.consumer(), ByteSize::of(additional));
        let can_spill = consumer.can_spill();
        let mut state = self.state();
        let known = state.consumers.get(&consumer.id()).copied();
        let of = known.unwrap_or(Consumer { bytes: ByteSize::ZERO, can_spill });
        match self.check(&mut state, of, asked) {
            Ok(()) => {
                state.add(consumer, asked);
                Ok(())
            }
            Err(reason) => {
                let share = if can_spill { state.share(self.min) } else { self.min };
                let consumer = bounded(consumer.name());
                let denied = Denied { consumer, can_spill, asked, held: of.bytes, share, reason };
                state.stats.denied_total += 1;
                state.stats.last_denied = Some(denied.clone());
                // A permit that was taken for this growth.
                let freed = state.release();
                drop(state);
                self.finish(freed);
                Err(denied.into())
            }
        }
    }

    fn reserved(&self) -> usize {
        self.state().stats.used.as_usize().unwrap_or(usize::MAX)
    }

    fn memory_limit(&self) -> MemoryLimit {
        let ceiling = self.admission.ledger(Budget::Host).ceiling();
        match self.limit.min(ceiling) {
            ByteSize::MAX => MemoryLimit::Infinite,
            limit => MemoryLimit::Finite(limit.as_usize().unwrap_or(usize::MAX)),
        }
    }
}

impl fmt::Display for AdmissionMemoryPool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (used, reserved) = {
            let state = self.state();
            (state.stats.used, state.reserved())
        };
        let (name, min) = (self.name(), self.min);
        write!(f, "{name}(used: {used}, reserved: {reserved}, min: {min}, limit: {})", self.limit)
    }
}

lowtide_admission::debug_as!(AdmissionMemoryPool, |it| min: it.min, limit: it.limit, stats: it.stats());
