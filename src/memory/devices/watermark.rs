//! Keeps device memory free for its other users.
//!
//! Only the worker queries the driver, at the metrics interval. If too little memory is free
//! ([`Watermark`](lowtide_admission::Watermark)), idle memory of our arenas is released before its
//! decay time, most of it from the arena with the most. Live memory is not touched. A driver that
//! has lost its context is not queried again.
//!
//! The idle memory of a further device is also released before its decay time if its arenas hold
//! most of its limit. For the first device that is a reclaim step of its budget's level.
//!
//! Invariants: no driver call under a lock; a device releases memory of its own arenas only, and an
//! error of one ends nothing for the others.

use crate::bytes::ByteSize;
use crate::clock::Moment;
use crate::device::driver::{Driver as _, DriverError};
use crate::memory::error::Diagnostic;
use crate::memory::shared::Shared;
use lowtide_admission::{DeviceSample, Thresholds};

use super::device::Device;
use super::open::is_loss;

impl Shared {
    /// Samples the memory of each device, and releases idle memory if little is free.
    pub(in crate::memory) fn sample_devices(&self, now: Moment) {
        for device in &self.devices.list {
            if device.is_lost() {
                device.watch.forget();
                continue;
            }
            self.sample_device(device, now);
            if device.admission.is_some() {
                self.keep_below_limit(device);
            }
        }
        self.report_losses();
    }

    fn sample_device(&self, device: &Device, now: Moment) {
        // Memory that is committed or released during the query counts as ours, not as unmanaged.
        let before = self.committed_on(device);
        let memory = match device.driver.device_memory() {
            Ok(Some(memory)) => memory,
            Ok(None) => return,
            Err(error) => return self.device_is_silent(device, &error),
        };
        let committed = before.max(self.committed_on(device));
        let look = DeviceSample { total: memory.total, free: memory.free, committed };
        let was_short = device.watch.is_short();
        let (wanted, low) = device.watch.add_sample(now, look);
        let (free, idle) = (look.free, self.idle_on(device));
        if !wanted.is_zero() {
            let given = self.give_idle_back(device, wanted);
            device.watch.add_released(given);
        }
        let name = &device.name;
        match (was_short, device.watch.is_short()) {
            (false, true) => log!(
                info,
                target: "lowtide",
                device = %name,
                %free,
                watermark = %low,
                %idle,
                "device memory low"
            ),
            (true, false) => {
                log!(info, target: "lowtide", device = %name, %free, "device memory recovered");
            }
            _ => {}
        }
    }

    /// Releases idle memory of a device if its arenas hold more of the limit than the lowest level
    /// allows.
    fn keep_below_limit(&self, device: &Device) {
        let limit = self.config.device_limit.value;
        let Thresholds { up: [up, ..], down: [down, ..], .. } = Thresholds::default();
        let committed = self.committed_on(device);
        if limit != ByteSize::MAX && committed > limit.scaled(up) {
            self.give_idle_back(device, committed.saturating_sub(limit.scaled(down)));
        }
    }

    /// Releases `wanted` idle bytes of a device's arenas, starting with those that have the most.
    /// Returns the released bytes, which may be more: memory leaves in whole handles.
    fn give_idle_back(&self, device: &Device, wanted: ByteSize) -> ByteSize {
        let mut arenas: Vec<_> =
            self.arenas_on(device).map(|arena| (arena.control_figures(), arena)).collect();
        arenas.sort_by_key(|(figures, _)| std::cmp::Reverse(figures.idle));
        let mut released = ByteSize::ZERO;
        for (figures, arena) in arenas {
            let part = figures.idle.min(wanted.saturating_sub(released));
            if part.is_zero() {
                break;
            }
            match arena.trim(figures.committed.saturating_sub(part)) {
                Ok(given) => released = released.saturating_add(given),
                Err(error) if is_loss(&error) => break,
                Err(error) => {
                    let text = format!("arena {}: trim failed: {error}", arena.name());
                    self.add_diagnostic(Diagnostic::warning("device", text));
                }
            }
        }
        released
    }

    /// Discards the last sample until the device answers again, which never happens after its
    /// context is lost.
    fn device_is_silent(&self, device: &Device, error: &DriverError) {
        device.watch.forget();
        let start = format!("device {}: cannot query the device's memory: ", device.name);
        self.add_diagnostic_once(&start, Diagnostic::warning("device", format!("{start}{error}")));
    }

    pub(super) fn committed_on(&self, device: &Device) -> ByteSize {
        self.arenas_on(device).map(|arena| arena.glance().committed).sum()
    }

    fn idle_on(&self, device: &Device) -> ByteSize {
        self.arenas_on(device).map(|arena| arena.control_figures().idle).sum()
    }
}
