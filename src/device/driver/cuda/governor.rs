//! The pool governor: a pool of ours as the device's current one, so that code which knows nothing
//! of lowtide keeps a limit and gives back what it does not use.
//!
//! cudarc, and whoever allocates through it, names no pool: it takes from the device's current one
//! (`cuMemAllocAsync`). The governor puts a pool of its own there. That pool keeps all that is
//! freed, which spares the driver's calls while there is work, up to a limit, and gives back what
//! nobody needed for a while. It sees no single allocation and moves none.
//!
//! Invariant: a device has one governor of this process at most; after its end the current pool is
//! what it was before, or what somebody else has set meanwhile.

use std::collections::VecDeque;
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use thiserror::Error;

use super::abi::{
    ATTRIBUTE_POOLS, POOL_RESERVED, POOL_RESERVED_HIGH, POOL_THRESHOLD, POOL_USED, POOL_USED_HIGH,
};
use super::calls::{Answer, Calls};
use super::context::Seat;
use super::device::CudaDevice;
use super::error::{BackendFailure, CudaError};
use super::ladder::{POOL_LIMITS, try_pool};
use super::open::{DeviceChoice, choose, start};
use super::pool::Pool;
use super::pooling::{Current, Pooling};
use super::segments::UNIT_MIN;
use crate::bytes::ByteSize;
use crate::clock::Moment;
use crate::decay::DecayTime;
use crate::device::driver::DriverError;
use crate::sync::{Mutex, is_background, lock};

/// The devices that have a governor, a bit for each number; the last stands for all beyond.
static GOVERNED: AtomicU64 = AtomicU64::new(0);

/// Pools that were left because they were in use.
static LEFT: AtomicU64 = AtomicU64::new(0);

/// In how many parts the time of the decay is looked at.
const PARTS: u32 = 8;

/// How a device's current pool is governed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GovernorOptions {
    /// Which device. Default: the first that this process sees.
    pub device: DeviceChoice,
    /// How much memory the pool takes at most, in use and kept: beyond it, an allocation is out of
    /// memory. At least 64 KiB, and more where the driver takes more at once. Needs a driver of
    /// CUDA 12.2 or newer. Default: `None`, as much as there is.
    pub limit: Option<ByteSize>,
    /// How long memory that nobody uses may stay. Default: 5 s.
    pub decay: DecayTime,
}

impl Default for GovernorOptions {
    fn default() -> Self {
        let decay = DecayTime::from_duration(Duration::from_secs(5));
        Self { device: DeviceChoice::Ordinal(0), limit: None, decay }
    }
}

/// Why a device's current pool is not governed. All is as it was.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
#[non_exhaustive]
pub enum GovernorError {
    /// No device, a limit of too little memory ([`CudaError::PoolLimit`]), or a call that failed.
    #[error(transparent)]
    Cuda(#[from] CudaError),
    /// The device has a governor.
    #[error("the current pool of CUDA device {device} is governed already: expected one governor")]
    Governed {
        /// The device's number.
        device: u32,
    },
    /// The driver knows no limit of a pool.
    #[error(
        "a pool's limit of {limit}: the CUDA driver is of version {driver_version}, expected 12020 \
         or newer"
    )]
    NoLimit {
        /// What was asked for.
        limit: ByteSize,
        /// 1000 x major + 10 x minor.
        driver_version: u32,
    },
    /// A pool of our own cannot be had, or cannot be the current one.
    #[error("no pool of our own can be the current one of CUDA device {device}: {cause}")]
    Refused {
        /// The device's number.
        device: u32,
        /// Why.
        cause: BackendFailure,
    },
}

impl From<DriverError> for GovernorError {
    fn from(error: DriverError) -> Self {
        Self::Cuda(error.into())
    }
}

/// What is in a governed pool, and what of the device is not, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct GovernorReport {
    /// What the pool takes at most, where there is a limit.
    pub limit: Option<ByteSize>,
    /// In use by those who allocated it.
    pub used: ByteSize,
    /// The most of that since the governor began.
    pub used_high: ByteSize,
    /// Taken of the device by the pool: in use, and kept.
    pub reserved: ByteSize,
    /// The most of that since the governor began.
    pub reserved_high: ByteSize,
    /// All memory of the device.
    pub total: ByteSize,
    /// What the device could give to anybody.
    pub free: ByteSize,
    /// What is taken of the device and neither this pool's nor the arenas': memory that bypasses
    /// the governor (`cuMemAlloc`, other pools, virtual memory), what the contexts themselves
    /// take, several hundred MiB each, and other processes.
    pub unmanaged: ByteSize,
}

impl GovernorReport {
    /// What the pool keeps and nobody uses.
    #[must_use]
    pub const fn held(&self) -> ByteSize {
        self.reserved.saturating_sub(self.used)
    }
}

/// Governs the memory of code that allocates from a device's current pool: unmodified cudarc, and
/// with it candle. For as long as it lives, what such code allocates comes out of a pool of ours.
///
/// ```no_run
/// use std::sync::Arc;
/// use lowtide::ByteSize;
/// use lowtide::device::driver::cuda::{GovernorOptions, PoolGovernor};
///
/// let limit = Some(ByteSize::gib(40));
/// let governor = Arc::new(PoolGovernor::open(GovernorOptions { limit, ..Default::default() })?);
/// let memory = lowtide::Memory::start()?;
/// memory.govern(&governor)?; // its worker calls `decay` from now on
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// What it cannot do:
/// - Code that does not allocate from the current pool bypasses it. cubecl (burn) falls back to
///   `cuMemAlloc` when an allocation from the pool fails, for whatever reason, and so bypasses a
///   limit. [`PoolGovernor::report`] says how much is elsewhere.
/// - What was allocated before it was opened stays where it was.
/// - Others may set the threshold of the current pool (mistral.rs does, while it has graphs): until
///   the next [`PoolGovernor::decay`] their value holds.
/// - A device that computes in confidence may refuse a current pool other than its own: that is
///   [`GovernorError::Refused`].
/// - [`PoolGovernor::decay`] and [`PoolGovernor::trim`] wait for the context, which fails and
///   spoils a capture while a stream captures a graph: call neither during a capture. The worker of
///   a `Memory` does not wait: it gives back what the program's own waits have shown to be free.
///
/// Its end puts the current pool back, and gives its own up where nothing in it is used. Where
/// something is, the pool is left, with a threshold of 0, and counted in
/// [`PoolGovernor::left_total`]: what is in it stays valid and goes back as it is freed.
pub struct PoolGovernor {
    seat: Seat,
    device: CudaDevice,
    pool: Pool,
    current: Current,
    /// The current pool before.
    before: usize,
    limit: Option<ByteSize>,
    decay: DecayTime,
    needs: Mutex<Needs>,
    _claim: Claim,
}

/// What was in use of late.
#[derive(Debug, Default)]
struct Needs {
    /// When each part of the time began and was last looked at, and the most in use in it.
    parts: VecDeque<(Moment, Moment, u64)>,
    /// The most ever.
    high: u64,
    /// A trim that gave nothing back is not tried again before.
    rest_until: Option<Moment>,
}

impl Needs {
    /// Notes the most in use since the last look; what was needed within this time.
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

/// What a pool says of itself.
struct Read {
    used: u64,
    used_high: u64,
    reserved: u64,
}

impl PoolGovernor {
    /// Makes a pool, tries it once, and makes it the device's current one. Retains the primary
    /// context.
    ///
    /// Cost: as [`CudaDriver::open`](super::CudaDriver::open).
    ///
    /// # Errors
    /// [`GovernorError`]; nothing is changed then.
    pub fn open(options: GovernorOptions) -> Result<Self, GovernorError> {
        let calls = start(&|_| true)?;
        let device = choose(&calls, options.device)?;
        let ordinal = device.ordinal;
        // Of less not even the trial can be had; and to the driver 0 is no limit.
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
        let (limit, decay) = (options.limit, options.decay);
        let needs = Mutex::default();
        let of = Self { seat, device, pool, current, before, limit, decay, needs, _claim: claim };
        let device = &of.device;
        log!(info, %device, limit = ?limit, "the device's current pool is governed");
        Ok(of)
    }

    /// The device.
    #[must_use]
    pub const fn device(&self) -> &CudaDevice {
        &self.device
    }

    /// How many pools of governors of this process were left because something in them was in use
    /// when the governor ended, or because CUDA refused to say or to give them up.
    #[must_use]
    pub fn left_total() -> u64 {
        LEFT.load(Ordering::Relaxed)
    }

    /// What is in the pool, and what of the device is neither its nor in `arenas`: the bytes that
    /// arenas of ours hold on this device
    /// ([`ArenaGlance::committed`](crate::device::ArenaGlance::committed)).
    ///
    /// ```no_run
    /// # fn read(governor: &lowtide::device::driver::cuda::PoolGovernor)
    /// # -> Result<(), lowtide::BoxError> {
    /// # #[cfg(feature = "memory")] {
    /// # let memory = lowtide::Memory::start()?;
    /// let arenas = memory.snapshot().arenas.iter().map(|arena| arena.committed).sum();
    /// let report = governor.report(arenas)?;
    /// println!("{} in use, {} kept, {} unmanaged", report.used, report.held(), report.unmanaged);
    /// # }
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// Cost: five calls of the driver; waits for no work.
    ///
    /// # Errors
    /// As the driver says.
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

    /// Gives back what the pool keeps beyond what was in use at any one time within the decay time,
    /// so that a pool that nobody uses for that long keeps nothing. Returns how much went. Call it
    /// several times in that time; each second is often enough for seconds.
    ///
    /// Cost: four calls of the driver, and where there is something to give back, a wait for all
    /// work of the context: the pool gives up only what the host has seen to be free. Blocks for as
    /// long: not for a thread of an async runtime. `Memory::govern` has a worker call it, which
    /// does not wait.
    ///
    /// # Errors
    /// As the driver says; nothing is lost, and the next call tries again.
    pub fn decay(&self, now: Moment) -> Result<ByteSize, DriverError> {
        let time = match self.decay {
            DecayTime::Never => return Ok(ByteSize::ZERO),
            DecayTime::AtOnce => Duration::ZERO,
            DecayTime::Within(time) => time,
        };
        self.seat.call(|calls| {
            let read = self.look(calls)?;
            let keep = {
                let mut needs = lock(&self.needs);
                let needed = needs.note(now, read.used_high, time).max(read.used);
                if needs.rest_until.is_some_and(|until| now < until) {
                    return Ok(ByteSize::ZERO);
                }
                needed
            };
            if read.reserved <= keep {
                return Ok(ByteSize::ZERO);
            }
            let released = self.trim_to(calls, (read.reserved, keep))?;
            // What is in use in part cannot go: a wait for nothing is not repeated at each call.
            let rests = released.is_zero().then(|| now + time);
            lock(&self.needs).rest_until = rests;
            Ok(released)
        })
    }

    /// Gives back all that the pool keeps; returns how much went. Blocks as
    /// [`PoolGovernor::decay`] does where there is something to give back.
    ///
    /// # Errors
    /// As for [`PoolGovernor::decay`].
    pub fn trim(&self) -> Result<ByteSize, DriverError> {
        self.seat.call(|calls| {
            let reserved = self.bytes(calls, POOL_RESERVED)?;
            if reserved == self.bytes(calls, POOL_USED)? {
                return Ok(ByteSize::ZERO);
            }
            self.trim_to(calls, (reserved, 0))
        })
    }

    fn bytes(&self, calls: &Calls, attribute: i32) -> Answer<u64> {
        self.pool.pooling.bytes(calls, self.pool.number, attribute)
    }

    /// Reads what is in use, and begins anew to look for the most.
    fn look(&self, calls: &Calls) -> Answer<Read> {
        let (pooling, pool) = (&self.pool.pooling, self.pool.number);
        let used_high = self.bytes(calls, POOL_USED_HIGH)?;
        pooling.set_bytes(calls, pool, (POOL_USED_HIGH, 0))?;
        let (used, reserved) = (self.bytes(calls, POOL_USED)?, self.bytes(calls, POOL_RESERVED)?);
        Ok(Read { used, used_high, reserved })
    }

    /// How much went.
    fn trim_to(&self, calls: &Calls, (before, keep): (u64, u64)) -> Answer<ByteSize> {
        // The frees were of streams that are not ours, and of any number. Background work goes
        // without: the pool gives up what a wait of the program has shown to be free.
        if !is_background() {
            calls.context_synchronize()?;
        }
        let keep = usize::try_from(keep).unwrap_or(usize::MAX);
        self.pool.pooling.trim_to(calls, self.pool.number, keep)?;
        let after = self.bytes(calls, POOL_RESERVED)?;
        Ok(ByteSize::new(before.saturating_sub(after)))
    }

    /// Puts the current pool back, unless somebody has set another.
    fn restore(&self, calls: &Calls) -> Answer {
        if self.current.get(calls)? != self.pool.number {
            return Ok(());
        }
        self.current.set(calls, self.before).or_else(|_| {
            // Whose it was may have given it up meanwhile.
            let default = self.pool.pooling.of_device(calls)?;
            self.current.set(calls, default)
        })
    }

    /// Gives the pool up where nothing in it is used; whether it is gone.
    fn give_up(&self, calls: &Calls) -> Answer<bool> {
        let (pooling, pool) = (&self.pool.pooling, self.pool.number);
        let used = self.restore(calls).and_then(|()| self.bytes(calls, POOL_USED));
        if used == Ok(0) {
            return pooling.destroy(calls, pool).map(|()| true);
        }
        // What is freed from now on goes at the next wait of anybody.
        let set = pooling.set_bytes(calls, pool, (POOL_THRESHOLD, 0));
        used.and_then(|_| set.map(|()| false))
    }
}

impl Drop for PoolGovernor {
    /// Waits for no work. In a forked child does nothing.
    fn drop(&mut self) {
        if !self.seat.context.is_here() {
            return;
        }
        let outcome = self.seat.call(|calls| self.give_up(calls));
        if matches!(outcome, Ok(true)) {
            return;
        }
        LEFT.fetch_add(1, Ordering::Relaxed);
        let cause = outcome.err().map_or_else(|| "it is in use".to_owned(), |it| it.to_string());
        log!(warn, device = %self.device, cause, "a governed pool was left behind");
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

/// The calls of pools and of the current one, where functions and attribute say that there are any.
fn offered(calls: &Calls, device: i32) -> Result<(Pooling, Current), BackendFailure> {
    let pooling = Pooling::new(calls.table.pools?, device);
    let current = Current::new(calls.table.current_pool?, device);
    if calls.device_attribute(ATTRIBUTE_POOLS, device)? == 0 {
        return Err(BackendFailure::NotOffered);
    }
    Ok((pooling, current))
}

/// Notes a call that undoes something: there is nobody to tell.
fn undone(outcome: Answer) {
    if let Err(error) = outcome {
        log!(warn, %error, "a driver call could not be undone");
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
        // Looked at often or rarely, used a little: the most counts.
        for millis in (100..8_000).step_by(100) {
            assert_eq!(needs.note(at(millis), 3, time), 100, "{millis}");
        }
        assert!(needs.parts.len() <= 9, "{:?}", needs.parts);
        // The last look at it was in the first part, which is an eighth of the time.
        assert_eq!(needs.note(at(8_900), 3, time), 3);
        assert_eq!(needs.note(at(90_000), 0, time), 0);
        assert_eq!((needs.high, needs.parts.len()), (100, 1));
        assert_eq!(needs.note(at(90_000), 7, Duration::ZERO), 0, "at once");
    }
}
