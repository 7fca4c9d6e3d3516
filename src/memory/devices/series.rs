//! Publishes the arenas and the device as metrics, and keeps what was published.

use crate::device::driver::Backend;
use crate::memory::MemorySnapshot;
use crate::memory::shared::Shared;
use crate::metrics::record::{DeviceBudget, DeviceMemoryFigures, MetricsWriter};

use super::snapshot::{DeviceStatus, DevicesSnapshot};

/// The maximum number of arenas and backends with series of their own, on all devices.
const RUNGS_MAX: usize = 64;

/// The series that were published.
#[derive(Default)]
pub(in crate::memory) struct Series {
    /// The arenas that were published, with the names of device and arena, and the backend.
    backends: Vec<(String, String, Backend)>,
    /// The numbers of the devices whose memory was published the last time; at most all devices.
    known: Vec<u32>,
}

impl Series {
    pub(in crate::memory) fn publish(
        &mut self,
        to: MetricsWriter,
        shared: &Shared,
        snapshot: &MemorySnapshot,
    ) {
        let devices = &snapshot.devices;
        for ((device, _), arena) in &shared.devices.gone.published(devices) {
            to.arena(device, arena);
        }
        self.publish_rungs(to, devices);
        devices.devices.iter().for_each(|device| self.publish_device(to, device));
    }

    /// Publishes the backend of each device arena. A published pair stays, with value 0 after the
    /// arena is closed; beyond [`RUNGS_MAX`] pairs, new ones are not published.
    fn publish_rungs(&mut self, to: MetricsWriter, devices: &DevicesSnapshot) {
        for (device, arena) in devices.placed() {
            let is_known = |(on, name, backend): &(String, String, Backend)| {
                *on == device.name && *name == arena.name && *backend == arena.backend
            };
            if self.backends.len() < RUNGS_MAX && !self.backends.iter().any(is_known) {
                self.backends.push((device.name.clone(), arena.name.clone(), arena.backend));
            }
        }
        for (on, name, backend) in &self.backends {
            let is_open = devices.placed().any(|(device, arena)| {
                device.name == *on && arena.name == *name && arena.backend == *backend
            });
            to.arena_info(on, name, *backend, is_open);
        }
    }

    fn publish_device(&mut self, to: MetricsWriter, status: &DeviceStatus) {
        let name = &status.name;
        let memory = status.memory.map(|device| DeviceMemoryFigures {
            total: device.total,
            free: device.free,
            context_overhead: device.context_overhead,
            unmanaged: device.unmanaged,
            watermark_released_total: device.watermark_released_total,
        });
        to.device(name, status.lost.is_some(), status.rollback_failures_total, memory);
        if let Some(budget) = &status.budget {
            let (reserved, ceiling) = (budget.reserved, budget.ceiling);
            let budget = DeviceBudget { reserved, ceiling, allowance: budget.allowance };
            to.device_budget(name, budget);
        }
        let was_known = self.known.contains(&status.number);
        self.known.retain(|known| *known != status.number);
        if status.memory.is_some() {
            self.known.push(status.number);
        } else if was_known {
            to.device_unknown(name);
        }
    }
}
