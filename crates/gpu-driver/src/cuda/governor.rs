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

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use lowtide_core::bytes::ByteSize;
use lowtide_core::clock::Moment;
use lowtide_core::decay::DecayTime;
use lowtide_core::log;
use lowtide_core::sync::{Mutex, is_background, lock};

use super::calls::Calls;
use super::context::DeviceContext;
use super::memory::{KEEP_ALL, UNIT_MIN};
use super::open::{CudaDevice, DeviceChoice, POOL_LIMITS, choose, log_undone, start, try_pool};
use super::table::{
    ATTRIBUTE_POOLS, GRAPH_RESERVED, GRAPH_USED_HIGH, POOL_RESERVED, POOL_RESERVED_HIGH,
    POOL_THRESHOLD, POOL_USED, POOL_USED_HIGH,
};
use crate::DriverError;
use crate::error::DriverResult;

/// The devices that have a governor, a bit for each number; the last bit stands for all higher
/// numbers.
static GOVERNED: AtomicU64 = AtomicU64::new(0);

/// The number of pools that were left because they were in use.
static LEFT: AtomicU64 = AtomicU64::new(0);

/// The number of checks per decay time.
const PARTS: u32 = 8;

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
/// use lowtide_gpu_driver::cuda::{DeviceChoice, PoolGovernor};
/// use lowtide_gpu_driver::decay::DecayTime;
///
/// let (limit, decay) = (Some(ByteSize::gib(40)), DecayTime::from_millis(5_000));
/// let governor = Arc::new(PoolGovernor::open(DeviceChoice::Ordinal(0), limit, decay)?);
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
///   [`DriverError::CurrentPool`].
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
    context: DeviceContext,
    device: CudaDevice,
    /// The handles of the device and of the pool.
    number: i32,
    pool: usize,
    /// The current pool that other code has set last.
    before: AtomicUsize,
    limit: Option<ByteSize>,
    decay: DecayTime,
    /// What was needed of the pool, of the default pool, and of the memory that the device caches
    /// for graphs.
    own: Mutex<PeakWindow>,
    default: Mutex<PeakWindow>,
    graphs: Mutex<PeakWindow>,
    _claim: GovernorClaim,
}

/// The recent peak of memory in use.
#[derive(Debug, Default)]
struct PeakWindow {
    /// For each part of the window: its start, its last sample, and the peak in it.
    parts: VecDeque<(Moment, Moment, u64)>,
    /// The highest peak ever.
    high: u64,
    /// No trim is made before this time, because the last one released nothing.
    rest_until: Option<Moment>,
}

impl PeakWindow {
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
struct GovernorClaim(u64);

impl GovernorClaim {
    fn take(device: u32) -> Option<Self> {
        let bit = 1 << device.min(63);
        let before = GOVERNED.fetch_or(bit, Ordering::AcqRel);
        (before & bit == 0).then_some(Self(bit))
    }
}

impl Drop for GovernorClaim {
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

impl Read {
    /// Reads a pool, without changing what others read from it.
    fn of(calls: &Calls, pool: usize) -> DriverResult<Self> {
        let used = calls.pool_bytes(pool, POOL_USED)?;
        let reserved = calls.pool_bytes(pool, POOL_RESERVED)?;
        Ok(Self { used, used_high: used, reserved })
    }
}

impl PoolGovernor {
    /// Creates a pool, tests it once, and makes it the device's current one. Retains the primary
    /// context.
    ///
    /// `limit` is the maximum memory that the pool may hold, in use and cached; further allocations
    /// fail with out of memory. It is at least 64 KiB, or more if the driver allocates in larger
    /// units, and requires a driver for CUDA 12.2 or newer. `decay` is the time after which unused
    /// memory is released: a few seconds suit most programs.
    ///
    /// Cost: that of [`CudaDriver::open`](super::CudaDriver::open).
    ///
    /// # Errors
    /// [`DriverError`]; nothing has changed then.
    pub fn open(
        device: DeviceChoice,
        limit: Option<ByteSize>,
        decay: DecayTime,
    ) -> Result<Self, DriverError> {
        let calls = start(&|_| true)?;
        let device = choose(&calls, device)?;
        let ordinal = device.ordinal;
        // With less, not even the trial fits; and the driver treats 0 as no limit.
        if let Some(requested) = limit.filter(|&limit| limit < UNIT_MIN) {
            return Err(DriverError::PoolLimit { requested, unit: UNIT_MIN });
        }
        let claim =
            GovernorClaim::take(ordinal).ok_or(DriverError::Governed { device: ordinal })?;
        let driver_version = calls.driver_version()?;
        if let Some(limit) = limit.filter(|_| driver_version < POOL_LIMITS) {
            return Err(DriverError::NoPoolLimit { limit, driver_version });
        }
        let number = calls.device(ordinal)?;
        let refused = |cause| {
            let cause = Box::new(cause);
            DriverError::CurrentPool { device: ordinal, cause }
        };
        let offered = calls.table.pools().and_then(|()| calls.table.current_pools());
        offered.map_err(refused)?;
        if calls.device_attribute(ATTRIBUTE_POOLS, number).map_err(refused)? == 0 {
            return Err(refused(DriverError::Unsupported { what: "memory pools" }));
        }
        let mut context = DeviceContext::new(calls, number);
        context.retain()?;
        let pool = try_pool(&context, number, limit).map_err(refused)?;
        let installed = context.call(|calls| {
            let before = calls.current_pool(number)?;
            calls.set_current_pool(number, pool.number)?;
            Ok(before)
        });
        let before = installed.map_err(|error| {
            log_undone(context.call(|calls| pool.close(calls, context.stream)));
            refused(error)
        })?;
        let of = Self {
            context,
            device,
            number,
            pool: pool.number,
            before: AtomicUsize::new(before),
            limit,
            decay,
            own: Mutex::default(),
            default: Mutex::default(),
            graphs: Mutex::default(),
            _claim: claim,
        };
        let limit = limit.map(tracing::field::display);
        log!(info, device = %of.device, limit, "pool governor started");
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
        self.context.call(|calls| {
            let bytes = |attribute| calls.pool_bytes(self.pool, attribute);
            let (used, used_high) = (bytes(POOL_USED)?, bytes(POOL_USED_HIGH)?);
            let (reserved, high) = (bytes(POOL_RESERVED)?, bytes(POOL_RESERVED_HIGH)?);
            let (free, total) = calls.memory_info()?;
            let used_high = used_high.max(lock(&self.own).high);
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
    /// long, so don't call it on an async runtime's thread. `MemoryDevices::govern` lets a worker
    /// call it, which does not wait.
    ///
    /// # Errors
    /// Any [`DriverError`] of the calls; nothing is lost, and the next call tries again.
    pub fn decay(&self, now: Moment) -> Result<ByteSize, DriverError> {
        let time = match self.decay {
            DecayTime::Never => return Ok(ByteSize::ZERO),
            DecayTime::AtOnce => Duration::ZERO,
            DecayTime::Within(time) => time,
        };
        let (released, taken) = self.context.call(|calls| {
            let taken = self.hold(calls)?;
            let read = self.look(calls)?;
            let released = self.release_unneeded((&self.own, now, time), &read, |keep| {
                self.trim_to(calls, self.pool, (read.reserved, keep))
            })?;
            Ok((released.saturating_add(self.decay_others(calls, now, time)?), taken))
        })?;
        if taken {
            log!(info, device = %self.device, "current pool of other code replaced");
        }
        Ok(released)
    }

    /// Sets the threshold of the pool, and the pool as the current one, if other code has changed
    /// them. Returns `true` if another pool was current.
    fn hold(&self, calls: &Calls) -> DriverResult<bool> {
        if calls.pool_bytes(self.pool, POOL_THRESHOLD)? != KEEP_ALL {
            calls.set_pool_bytes(self.pool, POOL_THRESHOLD, KEEP_ALL)?;
        }
        let current = calls.current_pool(self.number)?;
        if current == self.pool {
            return Ok(false);
        }
        calls.set_current_pool(self.number, self.pool)?;
        self.before.store(current, Ordering::Relaxed);
        Ok(true)
    }

    /// Records a sample of a cache, and releases with `trim` what was not needed. `trim` gets the
    /// bytes to keep.
    fn release_unneeded(
        &self,
        (needs, now, time): (&Mutex<PeakWindow>, Moment, Duration),
        read: &Read,
        trim: impl FnOnce(u64) -> DriverResult<ByteSize>,
    ) -> DriverResult<ByteSize> {
        let keep = lock(needs).keep(now, read, time);
        let Some(keep) = keep else { return Ok(ByteSize::ZERO) };
        let released = trim(keep)?;
        lock(needs).rest(now, released, time);
        Ok(released)
    }

    /// Releases what the default pool and the device's graphs cache beyond their peak.
    fn decay_others(&self, calls: &Calls, now: Moment, time: Duration) -> DriverResult<ByteSize> {
        let (default, read) = self.look_at_default(calls)?;
        let released = self.release_unneeded((&self.default, now, time), &read, |keep| {
            self.trim_to(calls, default, (read.reserved, keep))
        })?;
        if calls.table.graphs().is_err() {
            return Ok(released);
        }
        let used_high = calls.graph_bytes(self.number, GRAPH_USED_HIGH)?;
        calls.write_graphs(self.number, GRAPH_USED_HIGH, &mut 0)?; // the peak begins again
        let reserved = calls.graph_bytes(self.number, GRAPH_RESERVED)?;
        let read = Read { used: 0, used_high, reserved };
        let trimmed = self.release_unneeded((&self.graphs, now, time), &read, |_| {
            self.trim_graphs(calls, reserved)
        })?;
        Ok(released.saturating_add(trimmed))
    }

    /// Reads the default pool.
    fn look_at_default(&self, calls: &Calls) -> DriverResult<(usize, Read)> {
        let default = calls.default_pool(self.number)?;
        Ok((default, Read::of(calls, default)?))
    }

    fn trim_graphs(&self, calls: &Calls, before: u64) -> DriverResult<ByteSize> {
        calls.graph_trim(self.number)?;
        let after = calls.graph_bytes(self.number, GRAPH_RESERVED)?;
        Ok(ByteSize::new(before.saturating_sub(after)))
    }

    /// Releases all memory that the pool, the default pool and the device's graphs cache, and
    /// returns the number of bytes released. Blocks like [`PoolGovernor::decay`] if there is memory
    /// to release.
    ///
    /// # Errors
    /// The errors of [`PoolGovernor::decay`].
    pub fn trim(&self) -> Result<ByteSize, DriverError> {
        self.context.call(|calls| {
            let own = (self.pool, Read::of(calls, self.pool)?);
            let mut released = ByteSize::ZERO;
            for (pool, read) in [own, self.look_at_default(calls)?] {
                if read.reserved > read.used {
                    let trimmed = self.trim_to(calls, pool, (read.reserved, 0))?;
                    released = released.saturating_add(trimmed);
                }
            }
            if calls.table.graphs().is_err() {
                return Ok(released);
            }
            let reserved = calls.graph_bytes(self.number, GRAPH_RESERVED)?;
            Ok(released.saturating_add(self.trim_graphs(calls, reserved)?))
        })
    }

    /// Reads the memory in use and restarts the peak measurement.
    fn look(&self, calls: &Calls) -> DriverResult<Read> {
        let used_high = calls.pool_bytes(self.pool, POOL_USED_HIGH)?;
        calls.set_pool_bytes(self.pool, POOL_USED_HIGH, 0)?;
        Ok(Read { used_high, ..Read::of(calls, self.pool)? })
    }

    /// Trims a pool and returns the number of bytes released.
    fn trim_to(
        &self,
        calls: &Calls,
        pool: usize,
        (before, keep): (u64, u64),
    ) -> DriverResult<ByteSize> {
        // The frees were on streams of other code, in any number. Background work does not wait:
        // the pool then releases only memory that a wait of the program has shown to be free.
        if !is_background() {
            calls.context_synchronize()?;
        }
        let keep = usize::try_from(keep).unwrap_or(usize::MAX);
        calls.pool_trim_to(pool, keep)?;
        let after = calls.pool_bytes(pool, POOL_RESERVED)?;
        Ok(ByteSize::new(before.saturating_sub(after)))
    }

    /// Restores the previous pool, unless other code has set a different one.
    fn restore(&self, calls: &Calls) -> DriverResult {
        if calls.current_pool(self.number)? != self.pool {
            return Ok(());
        }
        calls.set_current_pool(self.number, self.before.load(Ordering::Relaxed)).or_else(|_| {
            // The previous owner of the pool may have destroyed it meanwhile.
            calls.set_current_pool(self.number, calls.default_pool(self.number)?)
        })
    }

    /// Destroys the pool if nothing in it is in use; returns `true` if it is destroyed.
    fn give_up(&self, calls: &Calls) -> DriverResult<bool> {
        let used = self.restore(calls).and_then(|()| calls.pool_bytes(self.pool, POOL_USED));
        if used == Ok(0) {
            return calls.pool_destroy(self.pool).map(|()| true);
        }
        // Memory that is freed from now on is released at the next synchronization.
        let set = calls.set_pool_bytes(self.pool, POOL_THRESHOLD, 0);
        used.and_then(|_| set.map(|()| false))
    }
}

impl Drop for PoolGovernor {
    /// Restores the previous pool, without waiting for work. Does nothing in a forked child.
    fn drop(&mut self) {
        if !self.context.is_here() {
            return;
        }
        let outcome = self.context.call(|calls| self.give_up(calls));
        if matches!(outcome, Ok(true)) {
            return;
        }
        LEFT.fetch_add(1, Ordering::Relaxed);
        let cause = outcome.err().map_or_else(|| "still in use".to_owned(), |it| it.to_string());
        log!(warn, device = %self.device, cause, "pool of a dropped governor not destroyed");
    }
}

lowtide_core::debug_as!(PoolGovernor, |it| device: it.device, limit: it.limit, decay: it.decay);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_needed_is_forgotten_after_its_time_and_not_before() {
        let (time, mut needs) = (Duration::from_secs(8), PeakWindow::default());
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
