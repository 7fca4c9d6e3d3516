//! A pool of stream-ordered memory that keeps what is freed: ours, or the device's own where ours
//! is refused.
//!
//! A pool of ours counts its own memory, takes no part in what others do, and may have a limit. In
//! the device's default pool others allocate as well: a trim gives back what they have freed, too,
//! and its threshold is put back at the end unless somebody else has set another meanwhile.
//!
//! Invariant: after `close` the threshold of the device's pool is that from before `open`, or what
//! somebody else has set.

use super::abi::POOL_THRESHOLD;
use super::calls::{Answer, Calls};
use super::pooling::Pooling;
use crate::bytes::ByteSize;
use crate::device::driver::DriverError;

/// Nothing that is freed goes back before a trim.
const KEEP_ALL: u64 = u64::MAX;

/// A pool that keeps all that is freed.
#[derive(Clone, Copy)]
pub(super) struct Pool {
    pub(super) pooling: Pooling,
    pub(super) number: usize,
    owner: Owner,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Owner {
    /// We made it.
    Us,
    /// The device came with it; its threshold was this.
    Device { threshold: u64 },
}

impl Pool {
    /// A pool of our own, of no more than so much memory. Without a limit, or where the driver
    /// knows none (before CUDA 12.2), of as much as the device has.
    pub(super) fn create(calls: &Calls, pooling: Pooling, limit: Option<ByteSize>) -> Answer<Self> {
        let limit = limit.and_then(ByteSize::as_usize).unwrap_or(0);
        let number = pooling.create(calls, limit)?;
        let set = pooling.set_bytes(calls, number, (POOL_THRESHOLD, KEEP_ALL));
        if let Err(error) = set {
            let _ = pooling.destroy(calls, number);
            return Err(error);
        }
        Ok(Self { pooling, number, owner: Owner::Us })
    }

    /// The pool that the device came with.
    pub(super) fn of_device(calls: &Calls, pooling: Pooling) -> Answer<Self> {
        let number = pooling.of_device(calls)?;
        let threshold = pooling.bytes(calls, number, POOL_THRESHOLD)?;
        pooling.set_bytes(calls, number, (POOL_THRESHOLD, KEEP_ALL))?;
        Ok(Self { pooling, number, owner: Owner::Device { threshold } })
    }

    /// Whether it is the device's, which others use as well.
    pub(super) fn is_shared(&self) -> bool {
        self.owner != Owner::Us
    }

    /// Memory that is there when this returns.
    pub(super) fn take(&self, calls: &Calls, bytes: usize, stream: usize) -> Answer<Taken> {
        let at = self.pooling.alloc(calls, self.number, bytes, stream)?;
        let waited = calls.stream_synchronize(stream);
        Ok(Taken { at, waited })
    }

    /// Gives memory back to the pool, which keeps it. Waits for nothing.
    pub(super) fn give(&self, calls: &Calls, at: u64, stream: usize) -> Answer {
        self.pooling.free(calls, at, stream)
    }

    /// Gives to the device what is free. The pool gives up only what the host has seen to be free,
    /// so the stream of the frees is waited for first.
    pub(super) fn trim(&self, calls: &Calls, stream: usize) -> Answer {
        calls.stream_synchronize(stream)?;
        self.pooling.trim_to(calls, self.number, 0)
    }

    /// Gives up a pool of ours, and puts the threshold of another back.
    pub(super) fn close(&self, calls: &Calls, stream: usize) -> Answer {
        let threshold = match self.owner {
            Owner::Us => return self.pooling.destroy(calls, self.number),
            Owner::Device { threshold } => threshold,
        };
        if self.pooling.bytes(calls, self.number, POOL_THRESHOLD)? != KEEP_ALL {
            return Ok(()); // somebody else rules it now
        }
        self.pooling.set_bytes(calls, self.number, (POOL_THRESHOLD, threshold))?;
        let Some(keep) = usize::try_from(threshold).ok().filter(|_| threshold != KEEP_ALL) else {
            return Ok(());
        };
        calls.stream_synchronize(stream)?;
        self.pooling.trim_to(calls, self.number, keep)
    }
}

/// Memory of a pool, and whether it was waited for: where not, it is to be given back.
pub(super) struct Taken {
    pub(super) at: u64,
    pub(super) waited: Result<(), DriverError>,
}
