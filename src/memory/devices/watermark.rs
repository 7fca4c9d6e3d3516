//! Keeps device memory free for its other users.
//!
//! Only the worker queries the driver, at the metrics interval. If too little memory is free
//! ([`Watermark`](lowtide_admission::Watermark)), idle memory of our arenas is released before its
//! decay time, most of it from the arena with the most. Live memory is not touched. A driver that
//! has lost its context is not queried again.
//!
//! Invariant: no driver call under a lock.

use crate::bytes::ByteSize;
use crate::clock::Moment;
use crate::device::driver::DriverError;
use crate::memory::error::Diagnostic;
use crate::memory::shared::Shared;
use lowtide_admission::watermark::{DeviceSample, Trend};

impl Shared {
    /// Samples the device's memory, and releases idle memory if little is free.
    pub(in crate::memory) fn sample_device(&self, now: Moment) {
        let Some(driver) = &self.devices.driver else { return };
        if self.devices.watch.is_lost() {
            return;
        }
        // Memory that is committed or released during the query counts as ours, not as unmanaged.
        let before = self.device_committed();
        let memory = match driver.device_memory() {
            Ok(Some(memory)) => memory,
            Ok(None) => return,
            Err(error) => return self.device_is_silent(&error),
        };
        let committed = before.max(self.device_committed());
        let look = DeviceSample { total: memory.total, free: memory.free, committed };
        let (verdict, low) = self.devices.watch.add_sample(now, look);
        let (free, idle) = (look.free, self.device_idle());
        if !verdict.wanted.is_zero() {
            let given = self.give_idle_back(verdict.wanted);
            self.devices.watch.add_released(given);
        }
        match verdict.trend {
            Trend::Same => {}
            Trend::Short => {
                log!(
                    info,
                    target: "lowtide",
                    %free,
                    watermark = %low,
                    %idle,
                    "device memory low"
                );
            }
            Trend::Room => {
                log!(info, target: "lowtide", %free, "device memory recovered");
            }
        }
    }

    /// Releases `wanted` idle bytes of the arenas, starting with those that have the most. Returns
    /// the released bytes.
    fn give_idle_back(&self, wanted: ByteSize) -> ByteSize {
        let mut arenas: Vec<_> =
            self.device_arenas().map(|arena| (arena.glance(), arena)).collect();
        arenas.sort_by_key(|(glance, _)| std::cmp::Reverse(glance.idle));
        let mut left = wanted;
        for (glance, arena) in arenas {
            let part = glance.idle.min(left);
            if part.is_zero() {
                break;
            }
            match arena.trim(glance.committed.saturating_sub(part)) {
                Ok(given) => left = left.saturating_sub(given),
                Err(error) => {
                    let text = format!("arena {}: trim failed: {error}", arena.name());
                    self.add_diagnostic(Diagnostic::warning("device", text));
                }
            }
        }
        wanted.saturating_sub(left)
    }

    /// Discards the last sample until the device answers again, which never happens after its
    /// context is lost.
    fn device_is_silent(&self, error: &DriverError) {
        self.devices.watch.forget(error.is_context_lost());
        let start = "cannot query the device's memory: ";
        self.add_diagnostic_once(start, Diagnostic::warning("device", format!("{start}{error}")));
    }

    pub(super) fn device_committed(&self) -> ByteSize {
        self.device_arenas().map(|arena| arena.glance().committed).sum()
    }

    fn device_idle(&self) -> ByteSize {
        self.device_arenas().map(|arena| arena.glance().idle).sum()
    }
}
