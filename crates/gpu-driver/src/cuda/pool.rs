//! A stream-ordered memory pool that caches freed memory: private, or the device's default pool if
//! a private one is refused.
//!
//! A private pool counts its own memory, is isolated from other users, and may have a limit. The
//! device's default pool is shared: a trim also releases memory that other code freed, and its
//! threshold is restored on close unless other code has changed it meanwhile.
//!
//! Invariant: after `close` the threshold of the default pool is that from before `open`, or the
//! one that other code has set.

use super::abi::POOL_THRESHOLD;
use super::calls::{Answer, Calls};
use super::pooling::Pooling;
use crate::DriverError;
use lowtide_core::bytes::ByteSize;

/// The threshold at which the pool releases no freed memory before a trim.
pub(super) const KEEP_ALL: u64 = u64::MAX;

/// A pool that caches all freed memory.
#[derive(Clone, Copy)]
pub(super) struct Pool {
    pub(super) pooling: Pooling,
    pub(super) number: usize,
    owner: PoolOwner,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum PoolOwner {
    /// A private pool.
    Us,
    /// The device's default pool, and its previous threshold.
    Device { threshold: u64 },
}

impl Pool {
    /// Creates a private pool with this limit. Without a limit, or if the driver does not support
    /// one (before CUDA 12.2), the pool may take all memory of the device.
    pub(super) fn create(calls: &Calls, pooling: Pooling, limit: Option<ByteSize>) -> Answer<Self> {
        let limit = limit.and_then(ByteSize::as_usize).unwrap_or(0);
        let number = pooling.create(calls, limit)?;
        let set = pooling.set_bytes(calls, number, (POOL_THRESHOLD, KEEP_ALL));
        if let Err(error) = set {
            let _ = pooling.destroy(calls, number);
            return Err(error);
        }
        Ok(Self { pooling, number, owner: PoolOwner::Us })
    }

    /// Returns the device's default pool.
    pub(super) fn of_device(calls: &Calls, pooling: Pooling) -> Answer<Self> {
        let number = pooling.of_device(calls)?;
        let threshold = pooling.bytes(calls, number, POOL_THRESHOLD)?;
        pooling.set_bytes(calls, number, (POOL_THRESHOLD, KEEP_ALL))?;
        Ok(Self { pooling, number, owner: PoolOwner::Device { threshold } })
    }

    /// Returns `true` for the device's default pool, which other code uses as well.
    pub(super) fn is_shared(&self) -> bool {
        self.owner != PoolOwner::Us
    }

    /// Allocates memory, which exists when this returns.
    pub(super) fn take(&self, calls: &Calls, bytes: usize, stream: usize) -> Answer<Taken> {
        let at = self.pooling.alloc(calls, self.number, bytes, stream)?;
        let waited = calls.stream_synchronize(stream);
        Ok(Taken { at, waited })
    }

    /// Frees memory into the pool, which caches it. Does not wait.
    pub(super) fn give(&self, calls: &Calls, at: u64, stream: usize) -> Answer {
        self.pooling.free(calls, at, stream)
    }

    /// Releases free memory to the device. The pool releases only what the host has seen to be
    /// free, so this waits for the stream of the frees first.
    pub(super) fn trim(&self, calls: &Calls, stream: usize) -> Answer {
        calls.stream_synchronize(stream)?;
        self.pooling.trim_to(calls, self.number, 0)
    }

    /// Destroys a private pool, or restores the threshold of the device's default pool.
    pub(super) fn close(&self, calls: &Calls, stream: usize) -> Answer {
        let threshold = match self.owner {
            PoolOwner::Us => return self.pooling.destroy(calls, self.number),
            PoolOwner::Device { threshold } => threshold,
        };
        if self.pooling.bytes(calls, self.number, POOL_THRESHOLD)? != KEEP_ALL {
            return Ok(()); // other code has changed it
        }
        self.pooling.set_bytes(calls, self.number, (POOL_THRESHOLD, threshold))?;
        let Some(keep) = usize::try_from(threshold).ok().filter(|_| threshold != KEEP_ALL) else {
            return Ok(());
        };
        calls.stream_synchronize(stream)?;
        self.pooling.trim_to(calls, self.number, keep)
    }
}

/// Memory of a pool. If its allocation has not completed, it must be freed again.
pub(super) struct Taken {
    pub(super) at: u64,
    pub(super) waited: Result<(), DriverError>,
}
