//! The part of the control thread's samples that arenas contribute.
//!
//! Runs on the control thread: no allocation, no driver call.
//!
//! The kernel counts memory committed by an integrated GPU neither in the resident set nor against
//! the cgroup (reported for a GB10: weights of 77 GiB, a resident set of 1.8 GiB), although it is
//! the machine's memory. It is added here, and nowhere else. Memory of pinned pools is always the
//! host's, and counted by the kernel: as anonymous memory of the host driver, and as shared memory
//! of CUDA.
//!
//! A lost device counts as empty with a limit of zero, so nothing more is admitted for it. Its
//! arenas are due for neither decay nor sleep.
//!
//! Invariant: the figures of a device are the sums over its own arenas.

use std::sync::Arc;

use crate::bytes::ByteSize;
use crate::device::driver::Backend;
use lowtide_admission::{DeviceFigures, Sample};

use super::arenas::Arenas;
use super::device::{Counted, Device};

/// The arenas, as the control thread reads them.
pub(in crate::memory) struct ArenasSensor {
    arenas: Arenas,
    list: Vec<Arc<Device>>,
    /// The figures of the last sample, by the number of the device.
    figures: Vec<DeviceFigures>,
    limit: Option<ByteSize>,
}

impl ArenasSensor {
    /// `limit` is that of each device; [`ByteSize::MAX`] for none.
    pub(super) fn new(arenas: Arenas, list: &[Arc<Device>], limit: ByteSize) -> Self {
        let figures = vec![DeviceFigures::default(); list.len()];
        let limit = (limit != ByteSize::MAX).then_some(limit);
        Self { arenas, list: list.to_vec(), figures, limit }
    }

    /// Adds the arenas to a sample of kernel and heap.
    pub(in crate::memory) fn add_to(&mut self, sample: &mut Sample) {
        for (figures, device) in self.figures.iter_mut().zip(&self.list) {
            let limit = if device.is_lost() { Some(ByteSize::ZERO) } else { self.limit };
            *figures = DeviceFigures { limit, ..DeviceFigures::default() };
        }
        let by_device = &mut self.figures;
        self.arenas.each(|device, arena| {
            let figures = arena.control_figures();
            let (committed, idle) = (figures.committed, figures.idle);
            let is_pinned = arena.backend() == Backend::PinnedHost;
            if device.counted == Counted::BesideKernel && !is_pinned {
                sample.physical = sample.physical.saturating_add(committed);
            }
            if device.is_lost() {
                return;
            }
            sample.device_decay_due = sample.device_decay_due.min(figures.next_decay);
            sample.device_sleep_due = sample.device_sleep_due.min(figures.next_sleep);
            if device.counted == Counted::OnDevice && !is_pinned {
                if let Some(sum) = by_device.get_mut(device.number as usize) {
                    sum.committed = sum.committed.saturating_add(committed);
                    sum.idle = sum.idle.saturating_add(idle);
                }
                return;
            }
            sample.purgeable = sample.purgeable.saturating_add(idle);
            sample.decaying = sample.decaying.saturating_add(idle);
            if device.counted == Counted::ByKernel {
                let other = sample.untracked_anonymous.saturating_sub(committed);
                sample.untracked_anonymous = other;
            }
        });
        let is_own = |device: &Arc<Device>| device.counted == Counted::OnDevice;
        sample.device_sleep_takes_host = self.list.iter().any(is_own);
        if let Some(figures) =
            self.figures.first().filter(|_| self.list.first().is_some_and(is_own))
        {
            sample.device_committed = figures.committed;
            sample.device_idle = figures.idle;
            sample.device_limit = figures.limit;
        }
    }

    /// Returns the figures of the last sample of the `nth` device that has an account of its own.
    pub(in crate::memory) fn further_device(&self, nth: usize) -> DeviceFigures {
        let with_account =
            self.list.iter().zip(&self.figures).filter(|it| it.0.admission.is_some());
        with_account.map(|(_, figures)| *figures).nth(nth).unwrap_or_default()
    }
}
