//! One device of a `Memory`: its driver, its budget, and the last sample of its memory.
//!
//! It acts on no arena. The list of arenas holds the device of each, so that whatever visits arenas
//! can leave out those of a lost device.
//!
//! Invariant: a device that is lost stays lost, and its driver gets no further call
//! ([`Guarded`]).

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::bytes::ByteSize;
use crate::device::driver::{Driver, DriverError, Guarded};
use lowtide_admission::{Admission, Budget, Ledger};

use super::watch::DeviceWatch;

/// The maximum number of devices: each has series of its own in metrics.
pub(super) const DEVICES_MAX: usize = 16;

/// The budget in which the memory of arenas counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Counted {
    /// The host's budget; the kernel's figures contain it.
    ByKernel,
    /// The host's budget; it is added to the kernel's figures.
    BesideKernel,
    /// The device's budget.
    OnDevice,
}

impl Counted {
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
    pub(super) counted: Counted,
    pub(super) watch: DeviceWatch,
    /// The account of a further device that has memory of its own. The first device's is in the
    /// admission of the `Memory`.
    pub(super) admission: Option<Admission>,
    /// `true` once the loss was reported.
    is_reported: AtomicBool,
}

impl Device {
    pub(super) fn new(number: u32, driver: Arc<dyn Driver>, watermark: f64) -> Self {
        let counted = Counted::of(&*driver);
        let has_account = number > 0 && counted == Counted::OnDevice;
        Self {
            number,
            name: name_of(number, &*driver).into(),
            counted,
            driver: Arc::new(Guarded::new(driver)),
            watch: DeviceWatch::new(watermark),
            admission: has_account.then(Admission::new),
            is_reported: AtomicBool::new(false),
        }
    }

    /// Returns the driver, for an arena.
    pub(super) fn driver(&self) -> Arc<dyn Driver> {
        Arc::clone(&self.driver) as Arc<dyn Driver>
    }

    /// Returns the error by which the loss of the device became known, if it is lost.
    pub(super) fn lost(&self) -> Option<&DriverError> {
        self.driver.lost()
    }

    pub(super) fn is_lost(&self) -> bool {
        self.lost().is_some()
    }

    /// Returns the error of the loss, the first time.
    pub(super) fn lost_once(&self) -> Option<&DriverError> {
        self.lost().filter(|_| !self.is_reported.swap(true, Ordering::Relaxed))
    }

    /// Returns the ledger in which the device's bytes are reserved.
    pub(super) fn ledger<'a>(&'a self, memory: &'a Admission) -> &'a Ledger {
        match (&self.admission, self.counted) {
            (Some(own), _) => own.ledger(Budget::Device),
            (None, Counted::OnDevice) => memory.ledger(Budget::Device),
            (None, _) => memory.ledger(Budget::Host),
        }
    }

    /// Returns the bytes that arenas could still commit: the device's free memory, but at most what
    /// the budget has left. Asks the driver.
    pub(super) fn headroom(&self, memory: &Admission) -> Result<ByteSize, DriverError> {
        let free = self.driver.headroom()?.unwrap_or(ByteSize::MAX);
        let ledger = self.ledger(memory);
        Ok(free.min(ledger.allowance_bytes().saturating_sub(ledger.reserved_bytes())))
    }
}

fn name_of(number: u32, driver: &dyn Driver) -> String {
    driver.uuid().map_or_else(|| number.to_string(), |uuid| uuid.to_string())
}
