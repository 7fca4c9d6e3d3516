//! One device of a `Memory`: its driver, its budget, and the last sample of its memory. The worker
//! keeps device memory free for its other users.
//!
//! The list of arenas holds the device of each, so that whatever visits arenas can leave out those
//! of a lost device. Only the worker queries the driver for free memory, at the metrics interval;
//! readers get the last sample. If too little memory is free ([`Watermark`]), idle memory of our
//! arenas is released before its decay time, most of it from the arena with the most. Live memory
//! is not touched.
//!
//! The idle memory of a further device is also released before its decay time if its arenas hold
//! most of its limit. For the first device that is a reclaim step of its budget's level.
//!
//! Invariants: a device that is lost stays lost, and its driver gets no further call ([`Guarded`]);
//! no driver call under a lock; a device releases memory of its own arenas only, and an error of
//! one ends nothing for the others; `unmanaged = total - free - committed - context overhead`, or
//! 0.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use crate::bytes::ByteSize;
use crate::device::driver::{Driver, DriverError, Guarded};
use crate::metrics::record::DeviceSnapshot;
use crate::sync::{Mutex, lock};
use lowtide_admission::{Admission, Budget, Ledger};

use super::watermark::{DeviceSample, Watermark};

/// The budget in which the memory of arenas counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum CountedIn {
    /// The host's budget; the kernel's figures contain it.
    ByKernel,
    /// The host's budget; it is added to the kernel's figures.
    BesideKernel,
    /// The device's budget.
    OnDevice,
}

impl CountedIn {
    pub(super) fn of(driver: &dyn Driver) -> Self {
        match driver.capabilities() {
            can if can.unified => Self::BesideKernel,
            can if !can.host_backed => Self::OnDevice,
            _ => Self::ByKernel,
        }
    }
}

/// A device, its driver and its account.
#[derive(Debug)]
pub(in crate::memory) struct Device {
    /// Its place among the devices, from 0.
    pub(super) number: u32,
    /// Its name in metrics and errors: the UUID, or its number if the driver knows none.
    pub(super) name: Arc<str>,
    pub(super) driver: Arc<Guarded>,
    pub(super) counted: CountedIn,
    pub(super) watch: Mutex<Watermark>,
    /// The account of a further device that has memory of its own. The first device's is in the
    /// admission of the `Memory`.
    pub(super) admission: Option<Admission>,
    /// `true` once the loss was reported.
    pub(super) is_reported: AtomicBool,
}

impl Device {
    pub(super) fn new(number: u32, driver: Arc<dyn Driver>, watermark: f64) -> Self {
        let counted = CountedIn::of(&*driver);
        let has_account = number > 0 && counted == CountedIn::OnDevice;
        let name = driver.uuid().map_or_else(|| number.to_string(), |uuid| uuid.to_string());
        Self {
            number,
            name: name.into(),
            counted,
            driver: Arc::new(Guarded::new(driver)),
            watch: Mutex::new(Watermark::new(watermark)),
            admission: has_account.then(Admission::new),
            is_reported: AtomicBool::new(false),
        }
    }

    pub(super) fn is_lost(&self) -> bool {
        self.driver.lost().is_some()
    }

    /// Returns the ledger in which the device's bytes are reserved.
    pub(super) fn ledger<'a>(&'a self, memory: &'a Admission) -> &'a Ledger {
        match (&self.admission, self.counted) {
            (Some(own), _) => own.ledger(Budget::Device),
            (None, CountedIn::OnDevice) => memory.ledger(Budget::Device),
            (None, _) => memory.ledger(Budget::Host),
        }
    }

    /// Returns the figures of the last sample; `None` if the driver reported nothing.
    pub(super) fn memory(&self) -> Option<DeviceSnapshot> {
        let context_overhead = self.driver.context_overhead();
        let watch = lock(&self.watch);
        let DeviceSample { total, free, committed } = watch.last.filter(|_| !self.is_lost())?;
        let others = total.saturating_sub(free).saturating_sub(committed);
        Some(DeviceSnapshot {
            total,
            free,
            context_overhead,
            unmanaged: context_overhead.map(|overhead| others.saturating_sub(overhead)),
            is_short: watch.is_short(),
            watermark_released_total: watch.released_total,
        })
    }

    /// Returns the bytes that arenas could still commit: the device's free memory, but at most what
    /// the budget has left. Asks the driver.
    pub(super) fn headroom(&self, memory: &Admission) -> Result<ByteSize, DriverError> {
        let free = self.driver.headroom()?.unwrap_or(ByteSize::MAX);
        let ledger = self.ledger(memory);
        Ok(free.min(ledger.allowance_bytes().saturating_sub(ledger.reserved_bytes())))
    }
}
