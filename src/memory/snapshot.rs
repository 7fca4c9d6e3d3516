//! Every figure of a `Memory` at one instant: plain values for endpoints, metrics and tests.

use std::time::Duration;

use crate::bytes::ByteSize;
use crate::clock::Moment;
use crate::config::Profile;
use crate::control::{AdmissionStats, Level, ResourceStats, Signal};
use crate::device::ArenaSnapshot;
use crate::host::HeapSnapshot;

use super::error::Note;

/// The figures of a [`Memory`](super::Memory).
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct MemorySnapshot {
    /// The profile in force.
    pub profile: Profile,
    /// The process heap; `None` where jemalloc's statistics cannot be read.
    pub heap: Option<HeapSnapshot>,
    /// The device arenas that were opened here.
    pub arenas: Vec<ArenaSnapshot>,
    /// Arenas that were replaced or left by their last user, and still have live blocks.
    pub draining: Vec<ArenaSnapshot>,
    /// What the kernel says, read now.
    pub signal: Signal,
    /// Processes of the cgroup that the kernel has killed for memory, where it says so.
    pub oom_kills: Option<u64>,
    /// What counts against the host's limit.
    pub physical: ByteSize,
    /// The part of it that a purge gives back, as of the last sample.
    pub purgeable: ByteSize,
    /// The host's budget.
    pub host: BudgetSnapshot,
    /// The device's budget.
    pub device: BudgetSnapshot,
    /// Requests admitted and turned away.
    pub admission: AdmissionStats,
    /// The resources that were registered here.
    pub resources: Vec<ResourceStats>,
    /// What did not go as asked.
    pub notes: Vec<Note>,
    /// When it was taken.
    pub now: Moment,
    /// The same on the wall clock, since the Unix epoch.
    pub since_epoch: Duration,
}

impl MemorySnapshot {
    /// Physical bytes less those that a purge gives back.
    #[must_use]
    pub const fn required(&self) -> ByteSize {
        self.physical.saturating_sub(self.purgeable)
    }

    /// When a moment was, on the wall clock, since the Unix epoch.
    #[must_use]
    pub fn on_wall(&self, moment: Moment) -> Duration {
        self.since_epoch.saturating_sub(self.now - moment)
    }
}

/// The figures of one budget.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub struct BudgetSnapshot {
    /// Bytes of admitted requests and loaded resources, as they were estimated.
    pub booked: ByteSize,
    /// Up to which amount of `booked` requests are admitted now.
    pub allowance: ByteSize,
    /// Up to which amount memory is filled by admission; [`ByteSize::MAX`] without a limit.
    pub ceiling: ByteSize,
    /// What a byte booked by a request was found to need.
    pub multiplier: f64,
    /// The pressure on it.
    pub level: Level,
}
