//! The targets of a shrink, and those that dropped runs leave to the worker.

use std::sync::atomic::{AtomicU8, Ordering};

use crate::config::arena::{Target, TargetKind};

/// The existing targets.
pub(super) const TARGETS: [Target; 2] =
    [Target { kind: TargetKind::Cpu, id: 0 }, Target { kind: TargetKind::Gpu, id: 0 }];

/// The targets that the worker has to shrink: one bit for each.
#[derive(Debug, Default)]
pub(in crate::memory) struct ShrinksAsked(AtomicU8);

impl ShrinksAsked {
    pub(super) fn ask(&self, targets: impl Iterator<Item = Target>) {
        let bits = targets.filter_map(|target| TARGETS.iter().position(|known| *known == target));
        self.0.fetch_or(bits.fold(0, |bits, at| bits | 1 << at), Ordering::Release);
    }

    pub(super) fn take(&self) -> impl Iterator<Item = Target> + use<> {
        let bits = self.0.swap(0, Ordering::Acquire);
        TARGETS.into_iter().enumerate().filter(move |(at, _)| bits & 1 << at != 0).map(|(_, t)| t)
    }
}
