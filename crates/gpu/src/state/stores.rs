//! Stores: host memory for the contents of sleeping blocks, and those that hold none.
//!
//! A store becomes idle when the arena has woken, or when it was prepared for a sleep. The next
//! sleep takes the idle stores. This module decides how many stay until then, and makes no call.
//!
//! Invariant: a store is idle, holds saved contents, or is held by the operation that creates or
//! releases it; its reservation stays as long as the store.

use std::any::Any;
use std::time::Duration;

use crate::driver::{HOST_GRANULARITY, HostStore};
use lowtide_core::bytes::ByteSize;
use lowtide_core::clock::Moment;
use lowtide_core::decay::DecayTime;

/// The maximum size of a store, if a granule is no larger.
const STORE_MAX: ByteSize = ByteSize::gib(1);

/// The time after a wake in which no store is released, so that the work of the caller that woke
/// the arena starts before releases keep the driver busy. A guess.
const QUIET_AFTER_WAKE: Duration = Duration::from_millis(100);

/// A reservation with the host budget, released when it is dropped.
pub(crate) type HostReservation = Box<dyn Any + Send>;

/// Host memory for contents.
pub(crate) struct Store {
    pub(crate) handle: HostStore,
    pub(crate) size: ByteSize,
    /// Dropped after the store is released, by code that may call the budget.
    pub(crate) reservation: Option<HostReservation>,
}

/// The stores without contents.
#[derive(Default)]
pub(crate) struct IdleStores {
    stores: Vec<Store>,
    /// The last time at which stores became idle, or the arena woke.
    since: Moment,
    /// The bytes prepared for the next sleep, which may be more than the limit.
    prepared: ByteSize,
    is_preparing: bool,
}

impl IdleStores {
    /// Adds stores.
    pub(crate) fn put(&mut self, stores: Vec<Store>, now: Moment) {
        if self.stores.is_empty() {
            self.stores = stores;
        } else {
            self.stores.extend(stores);
        }
        self.since = now;
    }

    /// Takes all stores.
    pub(crate) fn take(&mut self) -> Vec<Store> {
        std::mem::take(&mut self.stores)
    }

    /// Takes the last store.
    pub(crate) fn pop(&mut self) -> Option<Store> {
        self.stores.pop()
    }

    /// Returns the bytes of all stores.
    pub(crate) fn bytes(&self) -> ByteSize {
        self.stores.iter().map(|store| store.size).sum()
    }

    /// Records the end of a wake, which has used what was prepared.
    pub(crate) const fn end_wake(&mut self, now: Moment) {
        (self.since, self.prepared) = (now, ByteSize::ZERO);
    }

    /// Begins to prepare stores for a sleep that keeps this much. Returns the sizes of the stores
    /// to create; `None` if another operation prepares stores.
    pub(crate) fn begin_prepare(
        &mut self,
        kept: ByteSize,
        granularity: ByteSize,
    ) -> Option<Vec<ByteSize>> {
        if std::mem::replace(&mut self.is_preparing, true) {
            return None;
        }
        self.prepared = kept;
        let usable = |store: &Store| store.size.get() / granularity.get() * granularity.get();
        let mut missing = kept.get().saturating_sub(self.stores.iter().map(usable).sum());
        let most = store_max(granularity);
        let mut sizes = Vec::new();
        while missing > 0 {
            let size = missing.min(most.get());
            missing -= size;
            sizes.push(store_size(ByteSize::new(size)));
        }
        Some(sizes)
    }

    /// Ends the preparation.
    pub(crate) const fn end_prepare(&mut self) {
        self.is_preparing = false;
    }

    /// Records that no sleep uses what was prepared: only the limit counts from here on.
    pub(crate) const fn unprepare(&mut self) {
        self.prepared = ByteSize::ZERO;
    }

    /// Returns `true` if there is more than this limit and what was prepared.
    pub(crate) fn is_over(&self, stores_max: ByteSize) -> bool {
        self.bytes() > stores_max.max(self.prepared)
    }

    /// Returns the time at which the last store is to be released, with this limit, and if blocks
    /// of this size are live: soon if there is more than the limit, after the decay time if it is
    /// not needed.
    pub(crate) fn due(&self, stores_max: ByteSize, need: ByteSize, decay: DecayTime) -> Moment {
        let Some(last) = self.stores.last() else { return Moment::NEVER };
        let soon = self.since + QUIET_AFTER_WAKE;
        if self.is_over(stores_max) {
            return soon;
        }
        let is_needed = self.bytes().saturating_sub(last.size) < need;
        match decay {
            DecayTime::AtOnce if !is_needed => soon,
            DecayTime::Within(time) if !is_needed => soon.max(self.since + time),
            _ => Moment::NEVER,
        }
    }
}

/// Returns the maximum size of a store: 1 GiB, or a granule, so that no single allocation is as
/// large as the device.
pub(crate) const fn store_max(granularity: ByteSize) -> ByteSize {
    let granules = STORE_MAX.get() / granularity.get();
    ByteSize::new(if granules > 1 { granules } else { 1 } * granularity.get())
}

/// Returns the size of a store for contents of this size.
pub(crate) fn store_size(contents: ByteSize) -> ByteSize {
    contents.next_multiple_of(HOST_GRANULARITY).unwrap_or(contents)
}

#[cfg(all(test, not(lowtide_loom)))]
mod tests {
    use super::*;

    fn idle(sizes: &[ByteSize]) -> IdleStores {
        let store = |size| Store { handle: HostStore::new(1), size, reservation: None };
        let mut idle = IdleStores::default();
        idle.put(sizes.iter().map(|size| store(*size)).collect(), Moment::ORIGIN);
        idle
    }

    #[test]
    fn what_is_prepared_is_what_the_idle_stores_lack() {
        let mut idle = idle(&[ByteSize::mib(3)]);
        let kept = ByteSize::new((2 << 30) + (4 << 20));
        let sizes = idle.begin_prepare(kept, ByteSize::mib(2));
        assert_eq!(sizes, Some(vec![ByteSize::gib(1), ByteSize::gib(1), ByteSize::mib(2)]));
        assert_eq!(idle.begin_prepare(kept, ByteSize::mib(2)), None, "one at a time");
        idle.end_prepare();
        assert_eq!(idle.begin_prepare(ByteSize::mib(2), ByteSize::mib(2)), Some(Vec::new()));
    }

    #[test]
    fn a_store_is_due_beyond_the_limit_soon_and_beyond_the_need_after_the_decay_time() {
        let sizes = [ByteSize::mib(4), ByteSize::mib(2)];
        let time = Duration::from_secs(10);
        let due = |max: u64, need: u64| {
            let (max, need) = (ByteSize::mib(max), ByteSize::mib(need));
            idle(&sizes).due(max, need, DecayTime::Within(time))
        };
        assert_eq!(due(5, 6), Moment::ORIGIN + QUIET_AFTER_WAKE);
        assert_eq!(due(6, 5), Moment::NEVER, "the last store has a part of the need");
        assert_eq!(due(6, 4), Moment::ORIGIN + time);
        let never = idle(&sizes).due(ByteSize::mib(6), ByteSize::ZERO, DecayTime::Never);
        assert_eq!(never, Moment::NEVER);
        assert_eq!(idle(&[]).due(ByteSize::ZERO, ByteSize::ZERO, DecayTime::AtOnce), Moment::NEVER);
    }
}
