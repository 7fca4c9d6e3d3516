//! The device's memory as a whole: what is free, what is not ours, and what goes back for others.
//!
//! The worker asks the driver, at the pace of the metrics; nobody else does: whoever wants the
//! figures has those of the last look. Where neighbours leave too little ([`Watermark`]), idle
//! memory of our arenas goes back before its decay time, most of it from where there is most; live
//! memory is not touched. A driver that has lost its context is asked no more.
//!
//! Invariant: `foreign = total - free - committed - floor`, or 0; no driver call under a lock.

use crate::bytes::ByteSize;
use crate::clock::Moment;
use crate::control::watermark::{DeviceSample, Trend, Watermark};
use crate::device::driver::{Driver, DriverError};
use crate::sync::atomic::{AtomicU64, Ordering};
use crate::sync::{Mutex, lock};

use super::error::Diagnostic;
use super::shared::Shared;
use super::snapshot::DeviceSnapshot;

/// What is known of the device.
#[derive(Debug)]
pub(super) struct DeviceWatch {
    state: Mutex<State>,
    /// Bytes given back because the device was short.
    given_back: AtomicU64,
}

#[derive(Debug)]
struct State {
    watermark: Watermark,
    /// The last look.
    last: Option<DeviceSample>,
    /// The driver's context is gone.
    is_lost: bool,
}

impl DeviceWatch {
    /// With the watermark at this part of the device's memory.
    pub(super) fn new(part: f64) -> Self {
        let state = State { watermark: Watermark::new(part), last: None, is_lost: false };
        Self { state: Mutex::new(state), given_back: AtomicU64::new(0) }
    }

    /// The figures of the last look; `None` where the device has said nothing.
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

    /// Bytes given back because the device was short, since the start.
    pub(super) fn watermark_released_total(&self) -> u64 {
        self.given_back.load(Ordering::Relaxed)
    }
}

impl Shared {
    /// Looks how much memory the device has left; gives idle memory back where that is little.
    pub(super) fn sample_device(&self, now: Moment) {
        let Some(driver) = &self.driver else { return };
        if lock(&self.device.state).is_lost {
            return;
        }
        // What is committed or given back meanwhile is ours either way: nobody else's memory.
        let before = self.device_committed();
        let memory = match driver.device_memory() {
            Ok(Some(memory)) => memory,
            Ok(None) => return,
            Err(error) => return self.device_is_silent(&error),
        };
        let committed = before.max(self.device_committed());
        let look = DeviceSample { total: memory.total, free: memory.free, committed };
        let (verdict, low) = {
            let mut state = lock(&self.device.state);
            state.last = Some(look);
            (state.watermark.look(now, look), state.watermark.low(look.total))
        };
        let (free, idle) = (look.free, self.device_idle());
        if !verdict.wanted.is_zero() {
            let given = self.give_idle_back(verdict.wanted);
            self.device.given_back.fetch_add(given.get(), Ordering::Relaxed);
        }
        match verdict.tide {
            Trend::Same => {}
            Trend::Short => {
                log!(
                    info,
                    target: "lowtide",
                    %free,
                    watermark = %low,
                    %idle,
                    "the device is short of memory"
                );
            }
            Trend::Room => {
                log!(info, target: "lowtide", %free, "the device has room again");
            }
        }
    }

    /// Gives so much idle memory of the arenas back, from those first that have the most; how much
    /// that was.
    fn give_idle_back(&self, wanted: ByteSize) -> ByteSize {
        let mut arenas: Vec<_> =
            self.arenas().into_iter().map(|arena| (arena.glance(), arena)).collect();
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
                    let text = format!("{}: {error}", arena.name());
                    self.diagnostic(Diagnostic::warning("device", text));
                }
            }
        }
        wanted.saturating_sub(left)
    }

    /// Nothing is known of the device until it answers again; never, once its context is lost.
    fn device_is_silent(&self, error: &DriverError) {
        let is_lost = error.is_context_lost();
        let mut state = lock(&self.device.state);
        (state.last, state.is_lost) = (None, is_lost);
        state.watermark.forget();
        drop(state);
        let start = "the device does not say how much memory it has: ";
        self.add_diagnostic_once(start, Diagnostic::warning("device", format!("{start}{error}")));
    }

    pub(super) fn device_committed(&self) -> ByteSize {
        self.arenas().iter().map(|arena| arena.glance().committed).sum()
    }

    fn device_idle(&self) -> ByteSize {
        self.arenas().iter().map(|arena| arena.glance().idle).sum()
    }
}
