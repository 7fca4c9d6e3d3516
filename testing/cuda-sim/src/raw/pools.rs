//! Pools of stream-ordered memory, call by call.
//!
//! Sizes are bytes. The model's own `pools` states which memory a trim releases, and when.
//!
//! Invariant: as in [`super`].

use super::super::call::Call;
use super::super::model::Model;
use super::super::pools::Pool;
use super::{Answer, Raw, code};
use lowtide_core::bytes::ByteSize;

/// The counters of a pool, and its threshold.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PoolState {
    /// The bytes that it keeps at a synchronising call.
    pub threshold: u64,
    /// Bytes in use.
    pub used: u64,
    /// The highest value of `used` since the last reset.
    pub used_high: u64,
    /// Bytes allocated from the device.
    pub reserved: u64,
    /// The highest value of `reserved` since the last reset.
    pub reserved_high: u64,
}

fn pool(model: &mut Model, call: Call, number: u64) -> Answer<&mut Pool> {
    model.device_pools();
    if model.pools.get(number).is_none() {
        return Err(code(model.no_pool(call, number)));
    }
    model.pools.get_mut(number).ok_or(1)
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
        self.model().pool_use(Call::PoolCreate, pool).map_err(code)
    }

    /// `cuMemPoolCreate`; a `max` of 0 means no limit.
    pub fn pool_create(&self, max: u64) -> Answer<u64> {
        let mut model = self.model();
        model.enter(Call::PoolCreate, ByteSize::ZERO).map_err(code)?;
        Ok(model.pool_create(max))
    }

    /// `cuMemPoolDestroy`: free memory is released now, the rest when it is freed.
    pub fn pool_destroy(&self, pool: u64) -> Answer {
        let mut model = self.model();
        model.enter(Call::PoolDestroy, ByteSize::ZERO).map_err(code)?;
        model.pool_destroy(Call::PoolDestroy, pool).map_err(code)
    }

    /// `cuMemPoolTrimTo`: releases memory that the host has seen to be free.
    pub fn pool_trim(&self, number: u64, keep: u64) -> Answer {
        let mut model = self.model();
        model.enter(Call::PoolTrim, ByteSize::ZERO).map_err(code)?;
        pool(&mut model, Call::PoolTrim, number)?;
        model.trim(number, keep);
        Ok(())
    }

    /// Returns the counters of a pool.
    pub fn pool_state(&self, number: u64) -> Answer<PoolState> {
        let mut model = self.model();
        model.lost_in(Call::PoolTrim).map_err(code)?;
        let it = pool(&mut model, Call::PoolTrim, number)?;
        Ok(PoolState {
            threshold: it.threshold,
            used: it.used,
            used_high: it.used_high,
            reserved: it.reserved,
            reserved_high: it.reserved_high,
        })
    }

    /// Sets the bytes that a pool keeps at a synchronising call.
    pub fn pool_threshold(&self, number: u64, keep: u64) -> Answer {
        let mut model = self.model();
        model.lost_in(Call::PoolTrim).map_err(code)?;
        pool(&mut model, Call::PoolTrim, number)?.threshold = keep;
        Ok(())
    }

    /// Resets the highest `used` or `reserved` to the present value.
    pub fn pool_reset_high(&self, number: u64, used: bool) -> Answer {
        let mut model = self.model();
        model.lost_in(Call::PoolTrim).map_err(code)?;
        let it = pool(&mut model, Call::PoolTrim, number)?;
        if used {
            it.used_high = it.used;
        } else {
            it.reserved_high = it.reserved;
        }
        Ok(())
    }

    /// `cuMemAllocFromPoolAsync`, or `cuMemAllocAsync` from the device's current pool.
    pub fn alloc_async(&self, pool: Option<u64>, size: u64, stream: u64) -> Answer<u64> {
        let mut model = self.model();
        model.enter(Call::AllocAsync, ByteSize::new(size)).map_err(code)?;
        let current = model.device_pools().1;
        let pool = pool.unwrap_or(current);
        model.alloc_ordered(Call::AllocAsync, pool, size, stream).map_err(code)
    }

    /// `cuMemFreeAsync`. A free of memory that is not allocated is refused and recorded as a fault.
    pub fn free_async(&self, at: u64, stream: u64) -> Answer {
        let mut model = self.model();
        model.enter(Call::FreeAsync, ByteSize::ZERO).map_err(code)?;
        model.free_ordered(Call::FreeAsync, at, stream).map_err(code)
    }
}
