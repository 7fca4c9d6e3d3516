//! The last sample of the whole device's memory, and the watermark of its free memory.
//!
//! `watermark` queries the driver and acts; readers get the last sample.
//!
//! Invariant: `unmanaged = total - free - committed - context overhead`, or 0.

use crate::bytes::ByteSize;
use crate::clock::Moment;
use crate::device::driver::Driver;
use crate::sync::atomic::{AtomicU64, Ordering};
use crate::sync::{Mutex, lock};
use lowtide_admission::{DeviceSample, Watermark};

use super::snapshot::DeviceSnapshot;

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
}

impl DeviceWatch {
    /// Creates it with a watermark at this share of the device's memory.
    pub(super) fn new(part: f64) -> Self {
        let state = WatchState { watermark: Watermark::new(part), last: None };
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

    /// Returns `true` while little memory of the device is free.
    pub(super) fn is_short(&self) -> bool {
        lock(&self.state).watermark.is_short()
    }

    /// Takes a sample. Returns the idle memory to release, and the watermark.
    pub(super) fn add_sample(&self, now: Moment, sample: DeviceSample) -> (ByteSize, ByteSize) {
        let mut state = lock(&self.state);
        state.last = Some(sample);
        (state.watermark.look(now, sample), state.watermark.low(sample.total))
    }

    /// Counts bytes that were released because device memory was low.
    pub(super) fn add_released(&self, bytes: ByteSize) {
        self.given_back.fetch_add(bytes.get(), Ordering::Relaxed);
    }

    /// Discards the last sample until the device answers again, which never happens after its
    /// context is lost.
    pub(super) fn forget(&self) {
        let mut state = lock(&self.state);
        state.last = None;
        state.watermark.forget();
    }
}
