//! Pools of stream-ordered memory, call by call.
//!
//! Sizes are bytes. The model's own `pools` states which memory a trim releases, and when.
//!
//! Invariant: as in [`super`].

use super::super::call::Call;
use super::super::model::{self, Model};
use super::super::pools::Pool;
use super::{Answer, Raw, code};

fn pool(model: &mut Model, number: u64) -> model::Answer<&mut Pool> {
    model.device_pools();
    if model.pools.get(number).is_none() {
        return Err(model.no_pool(number));
    }
    Ok(model.pools.get_mut(number).unwrap_or_else(|| unreachable!("found above")))
}

#[expect(clippy::missing_errors_doc, reason = "each answers with the codes of cuda.h")]
impl Raw<'_> {
    /// Returns the device's initial pool, and its current one, which [`Raw::alloc_async`] uses
    /// without a pool.
    #[must_use]
    pub fn device_pools(&self) -> (u64, u64) {
        self.model().device_pools()
    }

    /// `cuDeviceSetMemPool`.
    pub fn pool_use(&self, pool: u64) -> Answer {
        self.model().pool_use(pool).map_err(code)
    }

    /// `cuMemPoolCreate`; a `max` of 0 means no limit.
    pub fn pool_create(&self, max: u64) -> Answer<u64> {
        self.call(Call::PoolCreate, 0, |model| Ok(model.pool_create(max)))
    }

    /// `cuMemPoolDestroy`: free memory is released now, the rest when it is freed.
    pub fn pool_destroy(&self, pool: u64) -> Answer {
        self.call(Call::PoolDestroy, 0, |model| model.pool_destroy(pool))
    }

    /// `cuMemPoolTrimTo`: releases memory that the host has seen to be free.
    pub fn pool_trim(&self, number: u64, keep: u64) -> Answer {
        self.call(Call::PoolTrim, 0, |model| {
            pool(model, number)?;
            model.trim(number, keep);
            Ok(())
        })
    }

    /// Reads or changes the counters of a pool, which is no call of its own.
    pub fn pool<T>(&self, number: u64, act: impl FnOnce(&mut Pool) -> T) -> Answer<T> {
        let mut model = self.model();
        model.call = Call::PoolTrim;
        model.lost_in().and_then(|()| pool(&mut model, number)).map(act).map_err(code)
    }

    /// `cuMemAllocFromPoolAsync`, or `cuMemAllocAsync` from the device's current pool.
    pub fn alloc_async(&self, pool: Option<u64>, size: u64, stream: u64) -> Answer<u64> {
        self.call(Call::AllocAsync, size, |model| {
            let current = model.device_pools().1;
            model.alloc_ordered(pool.unwrap_or(current), size, stream)
        })
    }

    /// `cuMemFreeAsync`. A free of memory that is not allocated is refused and recorded as a fault.
    pub fn free_async(&self, at: u64, stream: u64) -> Answer {
        self.call(Call::FreeAsync, 0, |model| model.free_ordered(at, stream))
    }
}
