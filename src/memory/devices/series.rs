//! Publishes the arenas and the device as metrics, and keeps what was published.

use crate::device::driver::Backend;
use crate::memory::MemorySnapshot;
use crate::memory::shared::Shared;
use crate::metrics::record::devices as record;

use super::snapshot::{DeviceSnapshot, DevicesSnapshot};

/// The maximum number of device arenas and backends with metrics series.
const RUNGS_MAX: usize = 64;

/// The series that were published.
#[derive(Default)]
pub(in crate::memory) struct Series {
    /// The device arenas that were published, and the backend of each.
    backends: Vec<(String, Backend)>,
    /// `true` if the device's memory was published the last time.
    knows_device: bool,
}

impl Series {
    pub(in crate::memory) fn publish(&mut self, shared: &Shared, snapshot: &MemorySnapshot) {
        let devices = &snapshot.devices;
        for arena in &shared.devices.gone.published(&devices.arenas, &devices.draining) {
            record::arena(arena);
        }
        self.publish_rungs(devices);
        self.publish_device(devices.rollback_failures_total, devices.memory.as_ref());
    }

    /// Publishes the backend of each device arena. A published pair stays, with value 0 after the
    /// arena is closed; beyond [`RUNGS_MAX`] pairs, new ones are not published.
    fn publish_rungs(&mut self, devices: &DevicesSnapshot) {
        let open = || devices.arenas.iter().chain(&devices.draining);
        for arena in open() {
            let is_known = |(name, backend): &(String, Backend)| {
                *name == arena.name && *backend == arena.backend
            };
            if self.backends.len() < RUNGS_MAX && !self.backends.iter().any(is_known) {
                self.backends.push((arena.name.clone(), arena.backend));
            }
        }
        for (name, backend) in &self.backends {
            let is_open = open().any(|arena| arena.name == *name && arena.backend == *backend);
            record::arena_info(name, *backend, is_open);
        }
    }

    fn publish_device(&mut self, rollback_failures_total: u64, device: Option<&DeviceSnapshot>) {
        let figures = device.map(|device| record::Device {
            total: device.total,
            free: device.free,
            context_overhead: device.context_overhead,
            unmanaged: device.unmanaged,
            watermark_released_total: device.watermark_released_total,
        });
        record::device(rollback_failures_total, figures);
        if self.knows_device && device.is_none() {
            record::device_unknown();
        }
        self.knows_device = device.is_some();
    }
}
