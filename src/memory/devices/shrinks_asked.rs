//! The targets of a shrink, and those that dropped runs leave to the worker.

use std::sync::atomic::{AtomicU32, Ordering};

use crate::config::arena::ShrinkTarget;

use super::device::DEVICES_MAX;

/// The targets that may exist: the host, and as many devices as a `Memory` may have.
fn targets() -> impl Iterator<Item = ShrinkTarget> {
    std::iter::once(ShrinkTarget::Cpu(0)).chain((0..).take(DEVICES_MAX).map(ShrinkTarget::Gpu))
}

/// Returns the targets that exist with this number of devices. Without a device, `gpu:0` has one
/// that releases nothing.
pub(super) fn known(devices: usize) -> impl Iterator<Item = ShrinkTarget> {
    targets().take(1 + devices.max(1))
}

/// The targets that the worker has to shrink: one bit for each.
#[derive(Debug, Default)]
pub(in crate::memory) struct ShrinksAsked(AtomicU32);

impl ShrinksAsked {
    pub(super) fn ask(&self, asked: impl Iterator<Item = ShrinkTarget>) {
        let bits = asked.filter_map(|target| targets().position(|known| known == target));
        self.0.fetch_or(bits.fold(0, |bits, at| bits | 1 << at), Ordering::Release);
    }

    pub(super) fn take(&self) -> impl Iterator<Item = ShrinkTarget> + use<> {
        let bits = self.0.swap(0, Ordering::Acquire);
        targets().enumerate().filter(move |(at, _)| bits & 1 << at != 0).map(|(_, target)| target)
    }
}
