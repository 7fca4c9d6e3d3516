//! The part of the control thread's samples that arenas contribute.
//!
//! Runs on the control thread: no allocation, no driver call.
//!
//! The kernel counts memory committed by an integrated GPU neither in the resident set nor against
//! the cgroup (reported for a GB10: weights of 77 GiB, a resident set of 1.8 GiB), although it is
//! the machine's memory. It is added here, and nowhere else. Memory of pinned pools is always the
//! host's, and counted by the kernel: as anonymous memory of the host driver, and as shared memory
//! of CUDA.

use crate::bytes::ByteSize;
use crate::device::driver::{Backend, Driver};
use lowtide_admission::Sample;

use super::arenas::Arenas;

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
    pub(super) fn of(driver: Option<&dyn Driver>) -> Self {
        match driver.map(Driver::capabilities) {
            Some(can) if can.unified => Self::BesideKernel,
            Some(can) if !can.host_backed => Self::OnDevice,
            _ => Self::ByKernel,
        }
    }
}

/// The arenas, as the control thread reads them.
pub(in crate::memory) struct ArenasSensor {
    arenas: Arenas,
    counted: Counted,
    limit: ByteSize,
}

impl ArenasSensor {
    pub(super) const fn new(arenas: Arenas, counted: Counted, limit: ByteSize) -> Self {
        Self { arenas, counted, limit }
    }

    /// Adds the arenas to a sample of kernel and heap.
    pub(in crate::memory) fn add_to(&self, sample: &mut Sample) {
        let (mut committed, mut idle) = (ByteSize::ZERO, ByteSize::ZERO);
        let (mut pinned_committed, mut pinned_idle) = (ByteSize::ZERO, ByteSize::ZERO);
        self.arenas.each(|arena| {
            let figures = arena.control_figures();
            let (all, unused) = match arena.backend() {
                Backend::PinnedHost => (&mut pinned_committed, &mut pinned_idle),
                _ => (&mut committed, &mut idle),
            };
            *all = all.saturating_add(figures.committed);
            *unused = unused.saturating_add(figures.idle);
            sample.device_decay_due = sample.device_decay_due.min(figures.next_decay);
            sample.device_sleep_due = sample.device_sleep_due.min(figures.next_sleep);
        });
        sample.purgeable = sample.purgeable.saturating_add(pinned_idle);
        sample.decaying = pinned_idle;
        if self.counted == Counted::OnDevice {
            sample.device_sleep_takes_host = true;
            sample.device_committed = committed;
            sample.device_idle = idle;
            sample.device_limit = (self.limit != ByteSize::MAX).then_some(self.limit);
            return;
        }
        sample.purgeable = sample.purgeable.saturating_add(idle);
        sample.decaying = sample.decaying.saturating_add(idle);
        if self.counted == Counted::ByKernel {
            let committed = committed.saturating_add(pinned_committed);
            sample.untracked_anonymous = sample.untracked_anonymous.saturating_sub(committed);
        } else {
            sample.physical = sample.physical.saturating_add(committed);
        }
    }
}
