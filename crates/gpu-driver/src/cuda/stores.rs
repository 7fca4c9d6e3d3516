//! Host memory for offloading, addressed by number so that no slice of it can exist.
//!
//! Invariant: a number names one store from its creation until it is freed, and is never reused.

use std::collections::BTreeMap;
use std::ops::Range;

use super::calls::{Answer, Calls, Locked};
use crate::{DriverError, HostStore, StoreSpan};
use lowtide_core::bytes::ByteSize;
use lowtide_core::sync::{Mutex, lock};

/// The stores of a driver.
#[derive(Debug, Default)]
pub(super) struct Stores {
    kept: Mutex<Kept>,
}

#[derive(Debug, Default)]
struct Kept {
    last: u64,
    stores: BTreeMap<u64, Locked>,
}

impl Stores {
    pub(super) fn create(&self, calls: &Calls, size: ByteSize) -> Answer<HostStore> {
        let locked = calls.host_alloc(size)?;
        let mut kept = lock(&self.kept);
        kept.last += 1;
        let number = kept.last;
        kept.stores.insert(number, locked);
        Ok(HostStore::new(number))
    }

    /// Frees a store; the store stays if the driver refuses.
    pub(super) fn destroy(&self, calls: &Calls, store: HostStore) -> Answer {
        // Removed from the table first: the call may block as long as other work of the device
        // takes.
        let locked = lock(&self.kept).stores.remove(&store.get()).ok_or_else(unknown)?;
        let outcome = calls.host_free(&locked);
        if outcome.is_err() {
            lock(&self.kept).stores.insert(store.get(), locked);
        }
        outcome
    }

    /// Calls a function with the part of a store that a span names.
    pub(super) fn with(
        &self,
        span: StoreSpan,
        act: impl FnOnce((&Locked, Range<usize>)) -> Answer,
    ) -> Answer {
        let end = span.offset.checked_add(span.size).and_then(ByteSize::as_usize);
        let part = span.offset.as_usize().zip(end).ok_or_else(unknown)?;
        let kept = lock(&self.kept);
        let locked = kept.stores.get(&span.store.get()).ok_or_else(unknown)?;
        act((locked, part.0..part.1))
    }
}

fn unknown() -> DriverError {
    DriverError::Unsupported { what: "a host store that it did not create" }
}
