//! The pool governor: replaces a device's current pool, so that code which does not know lowtide
//! keeps a limit and releases unused memory.
//!
//! cudarc, and code that allocates through it, names no pool: it allocates from the device's
//! current one (`cuMemAllocAsync`). The governor makes its own pool the current one. That pool
//! caches freed memory up to a limit, which saves driver calls under load, and releases memory that
//! was not needed for a while. The governor sees no single allocation and moves none.
//!
//! Other code may own the same device: it raises the threshold of a pool, or sets a current pool of
//! its own. Each decay sets both back, and also releases what the default pool and the device's
//! graphs cache without need. It trims no other pool, which its owner may have destroyed.
//!
//! Invariant: a device has at most one governor in this process; after the governor ends, the
//! current pool is the previous one, or the one that other code has set meanwhile.

use lowtide_core::log;
use std::collections::VecDeque;
use std::fmt;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use thiserror::Error;

use super::abi::{
    ATTRIBUTE_POOLS, GRAPH_RESERVED, GRAPH_USED_HIGH, POOL_RESERVED, POOL_RESERVED_HIGH,
    POOL_THRESHOLD, POOL_USED, POOL_USED_HIGH,
};
use super::calls::{Answer, Calls};
use super::context::Seat;
use super::device::CudaDevice;
use super::error::{BackendFailure, CudaError};
use super::ladder::{POOL_LIMITS, try_pool};
use super::open::{DeviceChoice, choose, start};
use super::pool::{KEEP_ALL, Pool};
use super::pooling::{Current, Graphing, Pooling};
use super::segments::UNIT_MIN;
use crate::DriverError;
use lowtide_core::bytes::ByteSize;
use lowtide_core::clock::Moment;
use lowtide_core::decay::DecayTime;
use lowtide_core::sync::{Mutex, is_background, lock};

/// The devices that have a governor, a bit for each number; the last bit stands for all higher
/// numbers.
static GOVERNED: AtomicU64 = AtomicU64::new(0);

/// The number of pools that were left because they were in use.
static LEFT: AtomicU64 = AtomicU64::new(0);

/// The number of checks per decay time.
const PARTS: u32 = 8;

/// Options of a [`PoolGovernor`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GovernorOptions {
    /// The device. Default: the first visible one.
    pub device: DeviceChoice,
    /// The maximum memory that the pool may hold, in use and cached; further allocations fail with
    /// out of memory. At least 64 KiB, or more if the driver allocates in larger units. Requires a
    /// driver for CUDA 12.2 or newer. Default: `None`, no limit.
    pub limit: Option<ByteSize>,
    /// The time after which unused memory is released. Default: 5 s.
    pub decay: DecayTime,
}

impl Default for GovernorOptions {
    fn default() -> Self {
        let decay = DecayTime::from_duration(Duration::from_secs(5));
        Self { device: DeviceChoice::Ordinal(0), limit: None, decay }
    }
}

/// An error of opening a [`PoolGovernor`]. The device's current pool is then unchanged.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
#[non_exhaustive]
pub enum GovernorError {
    /// The device cannot be opened, the limit is too small ([`CudaError::PoolLimit`]), or a call
    /// failed.
    #[error(transparent)]
    Cuda(#[from] CudaError),
    /// The device already has a governor in this process.
    #[error("CUDA device {device} already has a pool governor in this process")]
    Governed {
        /// The device's ordinal.
        device: u32,
    },
    /// The driver does not support pool limits.
    #[error(
        "a pool limit of {limit} needs a driver for CUDA 12.2 or newer: found one for CUDA \
         {}.{}",
        driver_version / 1000, driver_version % 1000 / 10
    )]
    NoLimit {
        /// The requested limit.
        limit: ByteSize,
        /// The driver's CUDA version: 1000 x major + 10 x minor.
        driver_version: u32,
    },
    /// The device refused to create a pool, or to make it the current one.
    #[error("cannot replace the current pool of CUDA device {device}: {cause}")]
    Refused {
        /// The device's ordinal.
        device: u32,
        /// The cause.
        cause: BackendFailure,
    },
}

impl From<DriverError> for GovernorError {
    fn from(error: DriverError) -> Self {
        Self::Cuda(error.into())
    }
}

/// The memory inside and outside a governed pool, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct GovernorReport {
    /// The pool's limit, if one is set.
    pub limit: Option<ByteSize>,
    /// Bytes allocated from the pool and in use.
    pub used: ByteSize,
    /// The highest value of `used` since the governor was opened.
    pub used_high: ByteSize,
    /// Bytes that the pool holds: in use and cached.
    pub reserved: ByteSize,
    /// The highest value of `reserved` since the governor was opened.
    pub reserved_high: ByteSize,
    /// The total memory of the device.
    pub total: ByteSize,
    /// The free memory of the device.
    pub free: ByteSize,
    /// Device memory that belongs neither to this pool nor to the arenas: allocations that bypass
    /// the governor (`cuMemAlloc`, other pools, virtual memory), the CUDA contexts themselves,
    /// several hundred MiB each, and other processes.
    pub unmanaged: ByteSize,
}

impl GovernorReport {
    /// Returns the bytes that the pool caches: held but not in use.
    #[must_use]
    pub const fn held(&self) -> ByteSize {
        self.reserved.saturating_sub(self.used)
    }
}

/// Governs the memory of code that allocates from a device's current pool, such as unmodified
/// cudarc and candle.
///
/// While the governor lives, such allocations come from the governor's pool.
///
/// ```no_run
/// use std::sync::Arc;
/// use lowtide_gpu_driver::ByteSize;
/// use lowtide_gpu_driver::cuda::{GovernorOptions, PoolGovernor};
///
/// let limit = Some(ByteSize::gib(40));
/// let governor = Arc::new(PoolGovernor::open(GovernorOptions { limit, ..Default::default() })?);
/// // From now on `PoolGovernor::decay` is to be called; `MemoryDevices::govern` of `lowtide`
/// // does that in the background.
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Limitations
/// - Code that does not allocate from the current pool bypasses the governor. cubecl (burn) falls
///   back to `cuMemAlloc` if an allocation from the pool fails for any reason, and so bypasses a
///   limit. [`PoolGovernor::report`] returns the bytes that are outside.
/// - Memory allocated before the governor was opened stays in the previous pool. What the default
///   pool caches decays as well, whatever its threshold; other pools are their owner's.
/// - Other code may set the release threshold of the current pool (mistral.rs does, while it has
///   graphs), or another current pool: that applies until the next [`PoolGovernor::decay`].
/// - A device in confidential-computing mode may refuse to change its current pool:
///   [`GovernorError::Refused`].
/// - [`PoolGovernor::decay`] and [`PoolGovernor::trim`] wait for the context. While a stream
///   captures a graph, that wait fails and invalidates the capture, so call neither during a
///   capture. The worker of a `Memory` does not wait: it releases only memory that the program's
///   own waits have shown to be free.
///
/// # Drop
/// Dropping the governor restores the previous pool and destroys its own if nothing in it is in
/// use. Otherwise the pool is left with a threshold of 0 and counted in
/// [`PoolGovernor::left_total`]: its allocations stay valid, and their memory is released as they
/// are freed.
pub struct PoolGovernor {
    seat: Seat,
    device: CudaDevice,
    pool: Pool,
    current: Current,
    /// The current pool that other code has set last.
    before: AtomicUsize,
    graphs: Option<Graphing>,
    limit: Option<ByteSize>,
    decay: DecayTime,
    needs: Mutex<Needs>,
    /// Those of the default pool and of the device's graphs.
    others: Mutex<[Needs; 2]>,
    _claim: Claim,
}

/// The recent peak of memory in use.
#[derive(Debug, Default)]
struct Needs {
    /// For each part of the window: its start, its last sample, and the peak in it.
    parts: VecDeque<(Moment, Moment, u64)>,
    /// The highest peak ever.
    high: u64,
    /// No trim is made before this time, because the last one released nothing.
    rest_until: Option<Moment>,
}

impl Needs {
    /// Records the peak since the last sample, and returns the peak within the window.
    fn note(&mut self, now: Moment, high: u64, time: Duration) -> u64 {
        self.high = self.high.max(high);
        match self.parts.back_mut() {
            Some((began, seen, most)) if now < *began + time / PARTS => {
                (*seen, *most) = (now.max(*seen), high.max(*most));
            }
            _ => self.parts.push_back((now, now, high)),
        }
        self.parts.retain(|(_, seen, _)| *seen + time > now);
        self.parts.iter().map(|(.., most)| *most).max().unwrap_or(0)
    }

    /// Records a sample, and returns the bytes to keep if some of those reserved were not needed.
    fn keep(&mut self, now: Moment, read: &Read, time: Duration) -> Option<u64> {
        let needed = self.note(now, read.used_high, time).max(read.used);
        let rests = self.rest_until.is_some_and(|until| now < until);
        (!rests && read.reserved > needed).then_some(needed)
    }

    /// Records the result of a trim. A block that is partly in use cannot be released: the next
    /// trim is not made at once then.
    fn rest(&mut self, now: Moment, released: ByteSize, time: Duration) {
        self.rest_until = released.is_zero().then(|| now + time);
    }
}

/// The right to govern a device.
struct Claim(u64);

impl Claim {
    fn take(device: u32) -> Option<Self> {
        let bit = 1 << device.min(63);
        let before = GOVERNED.fetch_or(bit, Ordering::AcqRel);
        (before & bit == 0).then_some(Self(bit))
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        GOVERNED.fetch_and(!self.0, Ordering::AcqRel);
    }
}

/// The counters read from a pool.
struct Read {
    used: u64,
    used_high: u64,
    reserved: u64,
}

impl PoolGovernor {
    /// Creates a pool, tests it once, and makes it the device's current one. Retains the primary
    /// context.
    ///
    /// Cost: that of [`CudaDriver::open`](super::CudaDriver::open).
    ///
    /// # Errors
    /// [`GovernorError`]; nothing has changed then.
    pub fn open(options: GovernorOptions) -> Result<Self, GovernorError> {
        let calls = start(&|_| true)?;
        let device = choose(&calls, options.device)?;
        let ordinal = device.ordinal;
        // With less, not even the trial fits; and the driver treats 0 as no limit.
        if let Some(requested) = options.limit.filter(|&limit| limit < UNIT_MIN) {
            return Err(CudaError::PoolLimit { requested, unit: UNIT_MIN }.into());
        }
        let claim = Claim::take(ordinal).ok_or(GovernorError::Governed { device: ordinal })?;
        let driver_version = calls.driver_version()?;
        if let Some(limit) = options.limit.filter(|_| driver_version < POOL_LIMITS) {
            return Err(GovernorError::NoLimit { limit, driver_version });
        }
        let number = calls.device(ordinal)?;
        let refused = |cause| GovernorError::Refused { device: ordinal, cause };
        let (pooling, current) = offered(&calls, number).map_err(refused)?;
        let seat = Seat::take(calls, number)?;
        let pool = try_pool(&seat, pooling, options.limit).map_err(refused)?;
        let installed = seat.call(|calls| {
            let before = current.get(calls)?;
            current.set(calls, pool.number)?;
            Ok(before)
        });
        let before = installed.map_err(|error| {
            undone(seat.call(|calls| pool.close(calls, seat.own)));
            refused(error.into())
        })?;
        let of = Self {
            graphs: seat.context.calls().table.graphs.ok().map(|of| Graphing::new(of, number)),
            seat,
            device,
            pool,
            current,
            before: AtomicUsize::new(before),
            limit: options.limit,
            decay: options.decay,
            needs: Mutex::default(),
            others: Mutex::default(),
            _claim: claim,
        };
        let (device, limit) = (&of.device, of.limit);
        log!(info, %device, limit = limit.map(tracing::field::display), "pool governor started");
        Ok(of)
    }

    /// Returns the device.
    #[must_use]
    pub const fn device(&self) -> &CudaDevice {
        &self.device
    }

    /// Returns the number of pools that governors of this process did not destroy, because they
    /// were in use when the governor ended, or because CUDA failed to report or destroy them.
    #[must_use]
    pub fn left_total() -> u64 {
        LEFT.load(Ordering::Relaxed)
    }

    /// Returns the memory inside and outside the pool.
    ///
    /// `arenas` is the number of bytes that arenas hold on this device
    /// (`ArenaGlance::committed`); they do not count as unmanaged.
    ///
    /// ```no_run
    /// # use lowtide_gpu_driver::{ByteSize, DriverError, cuda::PoolGovernor};
    /// # fn read(governor: &PoolGovernor, committed: &[ByteSize]) -> Result<(), DriverError> {
    /// let arenas = committed.iter().copied().sum();
    /// let report = governor.report(arenas)?;
    /// println!("{} in use, {} kept, {} unmanaged", report.used, report.held(), report.unmanaged);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// Cost: five driver calls; waits for no work.
    ///
    /// # Errors
    /// Any [`DriverError`] of the calls.
    pub fn report(&self, arenas: ByteSize) -> Result<GovernorReport, DriverError> {
        self.seat.call(|calls| {
            let bytes = |attribute| self.bytes(calls, attribute);
            let (used, used_high) = (bytes(POOL_USED)?, bytes(POOL_USED_HIGH)?);
            let (reserved, high) = (bytes(POOL_RESERVED)?, bytes(POOL_RESERVED_HIGH)?);
            let (free, total) = calls.memory_info()?;
            let used_high = used_high.max(lock(&self.needs).high);
            let reserved = ByteSize::new(reserved);
            let unmanaged = [free, reserved, arenas]
                .iter()
                .fold(total, |rest, part| rest.saturating_sub(*part));
            Ok(GovernorReport {
                limit: self.limit,
                used: ByteSize::new(used),
                used_high: ByteSize::new(used_high),
                reserved,
                reserved_high: ByteSize::new(high),
                total,
                free,
                unmanaged,
            })
        })
    }

    /// Releases the memory that the pool caches beyond the peak in use within the decay time, and
    /// returns the number of bytes released.
    ///
    /// A pool that is unused for that long caches nothing. The same holds for the device's default
    /// pool, and for the memory that the device caches for graphs. If other code has set another
    /// current pool, or the threshold of this one, sets them back. Call it several times per decay
    /// time; once a second suits a decay time of seconds.
    ///
    /// Cost: a dozen driver calls and, if there is memory to release, a wait for all work of the
    /// context, because the pool releases only what the host has seen to be free. It blocks that
    /// long, so don't call it on an async runtime's thread. `MemoryDevices::govern` lets a worker call
    /// it, which does not wait.
    ///
    /// # Errors
    /// Any [`DriverError`] of the calls; nothing is lost, and the next call tries again.
    pub fn decay(&self, now: Moment) -> Result<ByteSize, DriverError> {
        let time = match self.decay {
            DecayTime::Never => return Ok(ByteSize::ZERO),
            DecayTime::AtOnce => Duration::ZERO,
            DecayTime::Within(time) => time,
        };
        let (released, taken) = self.seat.call(|calls| {
            let taken = self.hold(calls)?;
            let read = self.look(calls)?;
            let keep = lock(&self.needs).keep(now, &read, time);
            let mut released = ByteSize::ZERO;
            if let Some(keep) = keep {
                released = self.trim_to(calls, self.pool.number, (read.reserved, keep))?;
                lock(&self.needs).rest(now, released, time);
            }
            Ok((released.saturating_add(self.decay_others(calls, now, time)?), taken))
        })?;
        if taken {
            log!(info, device = %self.device, "current pool of other code replaced");
        }
        Ok(released)
    }

    /// Sets the threshold of the pool, and the pool as the current one, if other code has changed
    /// them. Returns `true` if another pool was current.
    fn hold(&self, calls: &Calls) -> Answer<bool> {
        let (pooling, pool) = (&self.pool.pooling, self.pool.number);
        if self.bytes(calls, POOL_THRESHOLD)? != KEEP_ALL {
            pooling.set_bytes(calls, pool, (POOL_THRESHOLD, KEEP_ALL))?;
        }
        let current = self.current.get(calls)?;
        if current == pool {
            return Ok(false);
        }
        self.current.set(calls, pool)?;
        self.before.store(current, Ordering::Relaxed);
        Ok(true)
    }

    /// Releases what the default pool and the device's graphs cache beyond their peak.
    fn decay_others(&self, calls: &Calls, now: Moment, time: Duration) -> Answer<ByteSize> {
        let (default, read) = self.look_at_default(calls)?;
        let mut released = ByteSize::ZERO;
        let keep = lock(&self.others)[0].keep(now, &read, time);
        if let Some(keep) = keep {
            released = self.trim_to(calls, default, (read.reserved, keep))?;
            lock(&self.others)[0].rest(now, released, time);
        }
        let Some(graphs) = &self.graphs else { return Ok(released) };
        let used_high = graphs.bytes(calls, GRAPH_USED_HIGH)?;
        graphs.restart(calls, GRAPH_USED_HIGH)?;
        let reserved = graphs.bytes(calls, GRAPH_RESERVED)?;
        let read = Read { used: 0, used_high, reserved };
        if lock(&self.others)[1].keep(now, &read, time).is_some() {
            let trimmed = self.trim_graphs(calls, graphs, reserved)?;
            lock(&self.others)[1].rest(now, trimmed, time);
            released = released.saturating_add(trimmed);
        }
        Ok(released)
    }

    /// Reads the default pool, without changing what others read from it.
    fn look_at_default(&self, calls: &Calls) -> Answer<(usize, Read)> {
        let pooling = &self.pool.pooling;
        let default = pooling.of_device(calls)?;
        let used = pooling.bytes(calls, default, POOL_USED)?;
        let reserved = pooling.bytes(calls, default, POOL_RESERVED)?;
        Ok((default, Read { used, used_high: used, reserved }))
    }

    fn trim_graphs(&self, calls: &Calls, graphs: &Graphing, before: u64) -> Answer<ByteSize> {
        graphs.trim(calls)?;
        let after = graphs.bytes(calls, GRAPH_RESERVED)?;
        Ok(ByteSize::new(before.saturating_sub(after)))
    }

    /// Releases all memory that the pool, the default pool and the device's graphs cache, and
    /// returns the number of bytes released. Blocks like [`PoolGovernor::decay`] if there is memory
    /// to release.
    ///
    /// # Errors
    /// The errors of [`PoolGovernor::decay`].
    pub fn trim(&self) -> Result<ByteSize, DriverError> {
        self.seat.call(|calls| {
            let own = (self.bytes(calls, POOL_USED)?, self.bytes(calls, POOL_RESERVED)?);
            let (default, read) = self.look_at_default(calls)?;
            let mut released = ByteSize::ZERO;
            let pools = [(self.pool.number, own), (default, (read.used, read.reserved))];
            for (pool, (used, reserved)) in pools {
                if reserved > used {
                    let trimmed = self.trim_to(calls, pool, (reserved, 0))?;
                    released = released.saturating_add(trimmed);
                }
            }
            let Some(graphs) = &self.graphs else { return Ok(released) };
            let reserved = graphs.bytes(calls, GRAPH_RESERVED)?;
            Ok(released.saturating_add(self.trim_graphs(calls, graphs, reserved)?))
        })
    }

    fn bytes(&self, calls: &Calls, attribute: i32) -> Answer<u64> {
        self.pool.pooling.bytes(calls, self.pool.number, attribute)
    }

    /// Reads the memory in use and restarts the peak measurement.
    fn look(&self, calls: &Calls) -> Answer<Read> {
        let (pooling, pool) = (&self.pool.pooling, self.pool.number);
        let used_high = self.bytes(calls, POOL_USED_HIGH)?;
        pooling.set_bytes(calls, pool, (POOL_USED_HIGH, 0))?;
        let (used, reserved) = (self.bytes(calls, POOL_USED)?, self.bytes(calls, POOL_RESERVED)?);
        Ok(Read { used, used_high, reserved })
    }

    /// Trims a pool and returns the number of bytes released.
    fn trim_to(&self, calls: &Calls, pool: usize, (before, keep): (u64, u64)) -> Answer<ByteSize> {
        // The frees were on streams of other code, in any number. Background work does not wait:
        // the pool then releases only memory that a wait of the program has shown to be free.
        if !is_background() {
            calls.context_synchronize()?;
        }
        let keep = usize::try_from(keep).unwrap_or(usize::MAX);
        self.pool.pooling.trim_to(calls, pool, keep)?;
        let after = self.pool.pooling.bytes(calls, pool, POOL_RESERVED)?;
        Ok(ByteSize::new(before.saturating_sub(after)))
    }

    /// Restores the previous pool, unless other code has set a different one.
    fn restore(&self, calls: &Calls) -> Answer {
        if self.current.get(calls)? != self.pool.number {
            return Ok(());
        }
        self.current.set(calls, self.before.load(Ordering::Relaxed)).or_else(|_| {
            // The previous owner of the pool may have destroyed it meanwhile.
            let default = self.pool.pooling.of_device(calls)?;
            self.current.set(calls, default)
        })
    }

    /// Destroys the pool if nothing in it is in use; returns `true` if it is destroyed.
    fn give_up(&self, calls: &Calls) -> Answer<bool> {
        let (pooling, pool) = (&self.pool.pooling, self.pool.number);
        let used = self.restore(calls).and_then(|()| self.bytes(calls, POOL_USED));
        if used == Ok(0) {
            return pooling.destroy(calls, pool).map(|()| true);
        }
        // Memory that is freed from now on is released at the next synchronization.
        let set = pooling.set_bytes(calls, pool, (POOL_THRESHOLD, 0));
        used.and_then(|_| set.map(|()| false))
    }
}

impl Drop for PoolGovernor {
    /// Restores the previous pool, without waiting for work. Does nothing in a forked child.
    fn drop(&mut self) {
        if !self.seat.context.is_here() {
            return;
        }
        let outcome = self.seat.call(|calls| self.give_up(calls));
        if matches!(outcome, Ok(true)) {
            return;
        }
        LEFT.fetch_add(1, Ordering::Relaxed);
        let cause = outcome.err().map_or_else(|| "still in use".to_owned(), |it| it.to_string());
        log!(warn, device = %self.device, cause, "pool of a dropped governor not destroyed");
    }
}

impl fmt::Debug for PoolGovernor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PoolGovernor")
            .field("device", &self.device)
            .field("limit", &self.limit)
            .field("decay", &self.decay)
            .finish_non_exhaustive()
    }
}

/// Returns the calls of pools and of the current pool, if functions and attribute support them.
fn offered(calls: &Calls, device: i32) -> Result<(Pooling, Current), BackendFailure> {
    let pooling = Pooling::new(calls.table.pools?, device);
    let current = Current::new(calls.table.current_pool?, device);
    if calls.device_attribute(ATTRIBUTE_POOLS, device)? == 0 {
        return Err(BackendFailure::NotOffered);
    }
    Ok((pooling, current))
}

/// Logs a failed rollback call, because no caller can receive the error.
fn undone(outcome: Answer) {
    if let Err(error) = outcome {
        log!(warn, %error, "rollback of a driver call failed, memory may leak");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_needed_is_forgotten_after_its_time_and_not_before() {
        let (time, mut needs) = (Duration::from_secs(8), Needs::default());
        let at = |millis| Moment::ORIGIN + Duration::from_millis(millis);
        assert_eq!(needs.note(at(0), 100, time), 100);
        // Checked often or rarely, and used a little: the highest use counts.
        for millis in (100..8_000).step_by(100) {
            assert_eq!(needs.note(at(millis), 3, time), 100, "{millis}");
        }
        assert!(needs.parts.len() <= 9, "{:?}", needs.parts);
        // The last check of it was in the first part, which is an eighth of the time.
        assert_eq!(needs.note(at(8_900), 3, time), 3);
        assert_eq!(needs.note(at(90_000), 0, time), 0);
        assert_eq!((needs.high, needs.parts.len()), (100, 1));
        assert_eq!(needs.note(at(90_000), 7, Duration::ZERO), 0, "at once");
    }
}
