//! The values by which users name and see devices: selectors, slots and figures.

use std::fmt;

use crate::bytes::ByteSize;
use crate::device::ArenaSnapshot;
use crate::device::driver::{Backend, DeviceUuid};
use crate::memory::snapshot::BudgetSnapshot;
use crate::metrics::record::DeviceSnapshot;

/// The maximum number of devices: each has series of its own in metrics.
pub(super) const DEVICES_MAX: usize = 16;

/// Names one of the devices of a [`Memory`](crate::Memory).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum DeviceSelector {
    /// The first device.
    #[default]
    Default,
    /// The device with this number: its place in
    /// [`MemoryDevices::all`](crate::memory::MemoryDevices::all), from 0. Slots and shrink targets
    /// (`gpu:1`) count the same way.
    Number(u32),
    /// The device with this ordinal in CUDA, among those visible to the process.
    Ordinal(u32),
    /// The device with this UUID.
    Uuid(DeviceUuid),
    /// The device on which most memory can still be committed: free on the device, and within its
    /// budget. Of equal ones, the one with the fewest arenas. Devices that are lost, or cannot be
    /// queried, are left out.
    MostHeadroom,
}

impl fmt::Display for DeviceSelector {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Default => f.write_str("default"),
            Self::Number(number) => write!(f, "number {number}"),
            Self::Ordinal(ordinal) => write!(f, "cuda:{ordinal}"),
            Self::Uuid(uuid) => write!(f, "cuda:{uuid}"),
            Self::MostHeadroom => f.write_str("most headroom"),
        }
    }
}

/// The place of an arena: a provider, a device, a kind of memory.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Slot {
    /// The provider's name, which metrics and errors use for its arenas.
    pub name: String,
    /// The device's number: its place in [`MemoryDevices::all`](crate::memory::MemoryDevices::all),
    /// from 0.
    pub device: u32,
    /// `false` for device memory. `true` for host memory for copies to and from the device,
    /// page-locked as far as the system allows: a pool, with `arena.max_mem` as its limit.
    pub pinned: bool,
}

impl Slot {
    /// Creates the slot of the device's memory.
    #[must_use]
    pub fn device(name: impl Into<String>, device: u32) -> Self {
        Self { name: name.into(), device, pinned: false }
    }

    /// Creates the slot of page-locked memory for that device.
    #[must_use]
    pub fn pinned(name: impl Into<String>, device: u32) -> Self {
        Self { name: name.into(), device, pinned: true }
    }
}

impl fmt::Display for Slot {
    /// `name` for an arena on device 0, as in metrics; `name:1`, `name:pinned`, `name:1:pinned`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.name)?;
        if self.device > 0 {
            write!(f, ":{}", self.device)?;
        }
        if self.pinned { f.write_str(":pinned") } else { Ok(()) }
    }
}

/// The device arenas of a [`Memory`](crate::Memory), and its devices, at one instant.
#[derive(Clone, Debug)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct DevicesSnapshot {
    /// The arenas of this `Memory` that serve, including those of pinned pools
    /// ([`Backend::PinnedHost`]).
    pub arenas: Vec<ArenaSnapshot>,
    /// Arenas that were replaced, or left by their last user, and still have live blocks.
    pub draining: Vec<ArenaSnapshot>,
    /// The number of the device of each arena: first of those that serve, then of those that
    /// drain.
    pub arena_devices: Vec<u32>,
    /// The devices, in the order of their numbers, the default one first.
    pub devices: Vec<DeviceStatus>,
    /// The default device as a whole, as last sampled by the worker, about a second ago; `None` if
    /// device memory is host memory, or the device reports nothing.
    pub memory: Option<DeviceSnapshot>,
    /// The number of failed driver calls that should have undone an earlier call
    /// ([`rollback_failures_total`](crate::device::driver::Driver::rollback_failures_total)), of
    /// all devices.
    pub rollback_failures_total: u64,
}

impl DevicesSnapshot {
    /// Creates the snapshot of one device with these arenas.
    #[cfg(test)]
    pub(super) fn of_one(
        name: &str,
        arenas: Vec<ArenaSnapshot>,
        draining: Vec<ArenaSnapshot>,
    ) -> Self {
        let device = DeviceStatus {
            number: 0,
            name: name.to_owned(),
            ordinal: None,
            backend: Backend::Host,
            lost: None,
            budget: None,
            memory: None,
            rollback_failures_total: 0,
        };
        let arena_devices = vec![0; arenas.len() + draining.len()];
        let (devices, memory) = (vec![device], None);
        Self { arenas, draining, arena_devices, devices, memory, rollback_failures_total: 0 }
    }

    /// Returns each arena with its device: first those that serve, then those that drain.
    pub fn placed(&self) -> impl Iterator<Item = (&DeviceStatus, &ArenaSnapshot)> {
        self.all().zip(&self.arena_devices).filter_map(|(arena, number)| {
            let device = self.devices.iter().find(|device| device.number == *number)?;
            Some((device, arena))
        })
    }

    fn all(&self) -> impl Iterator<Item = &ArenaSnapshot> {
        self.arenas.iter().chain(&self.draining)
    }

    /// Returns the names and committed bytes of arenas in host memory.
    pub(in crate::memory) fn on_host(&self) -> Vec<(String, ByteSize)> {
        let is_host = |backend| matches!(backend, Backend::Host | Backend::PinnedHost);
        let on_host = self.all().filter(|arena| is_host(arena.backend));
        on_host.map(|arena| (arena.name.clone(), arena.committed)).collect()
    }

    /// Returns the name of the first lost device, and the error.
    pub(in crate::memory) fn first_lost(&self) -> Option<(&str, &str)> {
        self.devices.iter().find_map(|device| Some((&*device.name, device.lost.as_deref()?)))
    }

    /// Returns the host memory that holds contents of sleeping arenas, or is kept for that.
    pub(in crate::memory) fn offloaded(&self) -> ByteSize {
        self.all().map(|arena| arena.offloaded).sum()
    }

    /// Returns the live bytes in device memory.
    pub(in crate::memory) fn live(&self) -> ByteSize {
        self.on_device().map(|arena| arena.live.saturating_sub(arena.asleep)).sum()
    }

    /// Returns the retained bytes of device memory.
    pub(in crate::memory) fn retained(&self) -> ByteSize {
        self.on_device().map(ArenaSnapshot::retained).sum()
    }

    fn on_device(&self) -> impl Iterator<Item = &ArenaSnapshot> {
        self.all().filter(|arena| arena.backend != Backend::PinnedHost)
    }
}

/// A device of a [`Memory`](crate::Memory) at one instant.
#[derive(Clone, Debug)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct DeviceStatus {
    /// Its place among the devices, from 0: the default device has 0.
    pub number: u32,
    /// Its name in metrics and errors: the UUID, or the number if the driver knows none.
    pub name: String,
    /// Its ordinal in CUDA, among the devices visible to the process.
    pub ordinal: Option<u32>,
    /// The way in which its memory is allocated.
    pub backend: Backend,
    /// The error by which its loss became known; `None` while it works. Until the process restarts,
    /// a lost device admits nothing, and every driver call for it fails with this error. A lease of
    /// an awake arena still succeeds, and the snapshots of its arenas keep their last state.
    pub lost: Option<String>,
    /// Its budget; `None` if its memory counts in the host's. Only the first device has a level.
    pub budget: Option<BudgetSnapshot>,
    /// The whole device as last sampled by the worker, about a second ago; `None` if its memory is
    /// host memory, or the device reports nothing.
    pub memory: Option<DeviceSnapshot>,
    /// The number of failed driver calls that should have undone an earlier call.
    pub rollback_failures_total: u64,
}
