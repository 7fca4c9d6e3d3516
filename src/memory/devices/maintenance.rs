//! What a `Memory` does with all arenas: their decay at each tick, what is due with each
//! publication, their figures, and their end.

use crate::bytes::ByteSize;
use crate::clock::Moment;
use crate::device::driver::Driver as _;
use crate::memory::error::Diagnostic;
use crate::memory::manager::Memory;
use crate::memory::shared::Shared;
use crate::memory::shutdown::Shutdown;
use crate::memory::snapshot::BudgetSnapshot;
use lowtide_admission::{Budget, Level};

use super::arenas::Listed;
use super::device::Counted;
use super::device::Device;
use super::open::is_loss;
use super::snapshot::{DeviceStatus, DevicesSnapshot};

impl Shared {
    /// Decays the arenas that are due, and completes what sessions have left.
    pub(in crate::memory) fn decay_devices(&self, now: Moment) {
        self.report_losses();
        for arena in self.working_arenas() {
            if arena.next_decay() > now {
                continue;
            }
            if let Err(error) = arena.decay(now)
                && !is_loss(&error)
            {
                let text = format!("arena {}: {error}", arena.name());
                self.add_diagnostic(Diagnostic::warning("device", text));
            }
        }
        self.shrink_asked();
        self.sweep();
    }

    /// Does what is due with each publication.
    pub(in crate::memory) fn maintain_devices(&self, now: Moment) {
        self.report_losses();
        self.maintain_pools();
        #[cfg(feature = "cuda")]
        self.decay_governors(now);
        #[cfg(not(feature = "cuda"))]
        let _ = now;
        self.sweep();
    }

    /// Ends the management of arenas after the threads have ended, and reports what is live.
    pub(in crate::memory) fn end_devices(&self, report: &mut Shutdown) {
        report.requests += self.devices.held();
        self.end_empty_sleeps();
        self.release_stores();
        let arenas = self.devices.list.iter().flat_map(|device| self.arenas_on(device));
        report.device_live = arenas.map(|arena| arena.glance().live).sum();
    }

    /// Returns the figures of arenas and device; none of arenas in a forked child.
    pub(in crate::memory) fn devices_snapshot(&self) -> DevicesSnapshot {
        let here = self.birth.is_here();
        let (arenas, draining) =
            if here { self.devices.arenas.parted() } else { Default::default() };
        let list = self.devices.list.iter().filter(|_| here);
        let devices: Vec<_> = list.map(|device| self.status(device)).collect();
        let snapshot = |listed: &Listed| listed.arena.snapshot();
        DevicesSnapshot {
            arenas: arenas.iter().map(snapshot).collect(),
            draining: draining.iter().map(snapshot).collect(),
            arena_devices: arenas.iter().chain(&draining).map(|it| it.device.number).collect(),
            memory: devices.first().and_then(|device| device.memory),
            rollback_failures_total: devices.iter().map(|it| it.rollback_failures_total).sum(),
            devices,
        }
    }

    /// Returns the figures of a device. Makes no driver call.
    pub(super) fn status(&self, device: &Device) -> DeviceStatus {
        let own = device.admission.as_ref().map(|admission| {
            // A further device has no level.
            BudgetSnapshot::of(admission, Budget::Device, Level::None)
        });
        let first = (device.number == 0 && device.counted == Counted::OnDevice)
            .then(|| self.budget(Budget::Device));
        DeviceStatus {
            number: device.number,
            name: device.name.to_string(),
            ordinal: device.driver.ordinal(),
            backend: device.driver.backend(),
            lost: device.lost().map(ToString::to_string),
            budget: own.or(first),
            memory: device.watch.snapshot(&*device.driver).filter(|_| !device.is_lost()),
            rollback_failures_total: device.driver.rollback_failures_total(),
        }
    }

    /// Returns the memory committed by arenas that the kernel does not count, although it is the
    /// host's.
    pub(in crate::memory) fn committed_beside_kernel(&self) -> ByteSize {
        let list = self.devices.list.iter().filter(|_| self.birth.is_here());
        let beside = list.filter(|device| device.counted == Counted::BesideKernel);
        beside.map(|device| self.committed_on(device)).sum()
    }

    /// Returns the memory committed by arenas in memory of this process.
    pub(in crate::memory) fn committed_in_process(&self) -> ByteSize {
        let listed = self.arenas().into_iter();
        let in_process = listed.filter(|it| it.device.driver.capabilities().host_backed);
        in_process.map(|it| it.arena.glance().committed).sum()
    }
}

impl Memory {
    /// Returns the names of the arenas, in the order of `MemoryDevices::occupancy`.
    #[cfg(feature = "service")]
    pub(crate) fn arena_names(&self) -> Vec<String> {
        self.0.shared.arenas().iter().map(|listed| listed.arena.name().to_owned()).collect()
    }
}
