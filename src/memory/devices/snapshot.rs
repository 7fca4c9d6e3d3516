//! The figures of device arenas and of the device, as a part of a `MemorySnapshot`.

use std::collections::BTreeMap;

use crate::bytes::ByteSize;
use crate::device::driver::{Backend, Driver};
use crate::device::{ArenaSnapshot, DeviceArena};
use crate::memory::history::HistorySample;
use crate::memory::shared::Shared;

/// The device arenas of a [`Memory`](crate::Memory), and its device, at one instant.
#[derive(Clone, Debug)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct DevicesSnapshot {
    /// The arenas of this `Memory` that serve, including those of pinned pools
    /// ([`Backend::PinnedHost`]).
    pub arenas: Vec<ArenaSnapshot>,
    /// Arenas that were replaced, or left by their last user, and still have live blocks.
    pub draining: Vec<ArenaSnapshot>,
    /// The whole device as last sampled by the worker, about a second ago; `None` if device memory
    /// is host memory, or the device reports nothing.
    pub memory: Option<DeviceSnapshot>,
    /// The number of failed driver calls that should have undone an earlier call
    /// ([`rollback_failures_total`](crate::device::driver::Driver::rollback_failures_total)).
    pub rollback_failures_total: u64,
}

impl Shared {
    /// Returns the figures of arenas and device; none of arenas in a forked child.
    pub(in crate::memory) fn devices_snapshot(&self) -> DevicesSnapshot {
        let here = self.birth.is_here();
        let driver = self.devices.driver.as_deref().filter(|_| here);
        let (arenas, draining) =
            if here { self.devices.arenas.parted() } else { Default::default() };
        DevicesSnapshot {
            arenas: arenas.iter().map(DeviceArena::snapshot).collect(),
            draining: draining.iter().map(DeviceArena::snapshot).collect(),
            memory: driver.and_then(|driver| self.devices.watch.snapshot(driver)),
            rollback_failures_total: driver.map_or(0, Driver::rollback_failures_total),
        }
    }
}

impl DevicesSnapshot {
    fn all(&self) -> impl Iterator<Item = &ArenaSnapshot> {
        self.arenas.iter().chain(&self.draining)
    }

    /// Returns the names and committed bytes of arenas in host memory.
    pub(in crate::memory) fn on_host(&self) -> Vec<(String, ByteSize)> {
        let is_host = |backend| matches!(backend, Backend::Host | Backend::PinnedHost);
        let on_host = self.all().filter(|arena| is_host(arena.backend));
        on_host.map(|arena| (arena.name.clone(), arena.committed)).collect()
    }

    /// Returns the sleeps, wakes and failed wakes of each arena that serves.
    pub(in crate::memory) fn sleeps(&self) -> BTreeMap<String, [u64; 3]> {
        let of = |arena: &ArenaSnapshot| {
            let counts = [arena.sleeps_total, arena.wakes_total, arena.wake_failures_total];
            (arena.name.clone(), counts)
        };
        self.arenas.iter().map(of).collect()
    }

    /// Adds live and retained bytes to a sample of the history.
    pub(in crate::memory) fn add_to(&self, sample: &mut HistorySample) {
        let on_device = || self.all().filter(|arena| arena.backend != Backend::PinnedHost);
        sample.device_live = on_device().map(|arena| arena.live.saturating_sub(arena.asleep)).sum();
        sample.device_retained = on_device().map(ArenaSnapshot::retained).sum();
    }
}

/// The memory of a device, with all its users.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct DeviceSnapshot {
    /// The total memory.
    pub total: ByteSize,
    /// The free memory.
    pub free: ByteSize,
    /// The memory in use right after our context was created and before our first commit. It is an
    /// upper bound of the context's size, because it includes memory that other processes and other
    /// code of this process used at that moment. `None` if unknown.
    pub context_overhead: Option<ByteSize>,
    /// The memory that is neither free, nor committed by our arenas, nor in the context overhead;
    /// at least
    /// 0. It is used by other processes and by other code of this process: allocations made
    ///    directly through `cudarc`, by ONNX Runtime or by candle, and growth of the context. It is
    ///    too small if a process that was counted in the context overhead has exited. `None` if the
    ///    context overhead is unknown.
    pub unmanaged: Option<ByteSize>,
    /// `true` if less than the watermark is free, or was and has not recovered enough. Idle memory
    /// of our arenas is then released before its decay time.
    pub is_short: bool,
    /// The bytes released because of that, since the start.
    pub watermark_released_total: u64,
}
