//! The memory of the whole device: free memory, memory of other users, and the release of idle
//! memory for them.
//!
//! Only the worker queries the driver, at the metrics interval; readers get the last sample. If too
//! little memory is free ([`Watermark`]), idle memory of our arenas is released before its decay
//! time, most of it from the arena with the most. Live memory is not touched. A driver that has
//! lost its context is not queried again.
//!
//! Invariant: `unmanaged = total - free - committed - context overhead`, or 0; no driver call under
//! a lock.

use crate::bytes::ByteSize;
use crate::clock::Moment;
use crate::device::driver::{Driver, DriverError};
use crate::sync::atomic::{AtomicU64, Ordering};
use crate::sync::{Mutex, lock};
use lowtide_admission::watermark::{DeviceSample, Trend, Watermark};

use super::snapshot::DeviceSnapshot;
use crate::memory::error::Diagnostic;
use crate::memory::shared::Shared;

/// The state of the device.
#[derive(Debug)]
pub(super) struct DeviceWatch {
    state: Mutex<WatchState>,
    /// Bytes released because device memory was low.
    given_back: AtomicU64,
}

#[derive(Debug)]
struct WatchState {
    watermark: Watermark,
    /// The last sample.
    last: Option<DeviceSample>,
    /// `true` once the driver's context is lost.
    is_lost: bool,
}

impl DeviceWatch {
    /// Creates it with a watermark at this share of the device's memory.
    pub(super) fn new(part: f64) -> Self {
        let state = WatchState { watermark: Watermark::new(part), last: None, is_lost: false };
        Self { state: Mutex::new(state), given_back: AtomicU64::new(0) }
    }

    /// Returns the figures of the last sample; `None` if the driver reported nothing.
    pub(super) fn snapshot(&self, driver: &dyn Driver) -> Option<DeviceSnapshot> {
        let (last, is_short) = {
            let state = lock(&self.state);
            (state.last?, state.watermark.is_short())
        };
        let context_overhead = driver.context_overhead();
        let taken = last.total.saturating_sub(last.free);
        let others = taken.saturating_sub(last.committed);
        Some(DeviceSnapshot {
            total: last.total,
            free: last.free,
            context_overhead,
            unmanaged: context_overhead
                .map(|context_overhead| others.saturating_sub(context_overhead)),
            is_short,
            watermark_released_total: self.watermark_released_total(),
        })
    }

    /// Returns the bytes released because device memory was low, since the start.
    pub(super) fn watermark_released_total(&self) -> u64 {
        self.given_back.load(Ordering::Relaxed)
    }
}

impl Shared {
    /// Samples the device's memory, and releases idle memory if little is free.
    pub(in crate::memory) fn sample_device(&self, now: Moment) {
        let Some(driver) = &self.devices.driver else { return };
        if lock(&self.devices.watch.state).is_lost {
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
        let (verdict, low) = {
            let mut state = lock(&self.devices.watch.state);
            state.last = Some(look);
            (state.watermark.look(now, look), state.watermark.low(look.total))
        };
        let (free, idle) = (look.free, self.device_idle());
        if !verdict.wanted.is_zero() {
            let given = self.give_idle_back(verdict.wanted);
            self.devices.watch.given_back.fetch_add(given.get(), Ordering::Relaxed);
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
        let is_lost = error.is_context_lost();
        let mut state = lock(&self.devices.watch.state);
        (state.last, state.is_lost) = (None, is_lost);
        state.watermark.forget();
        drop(state);
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
