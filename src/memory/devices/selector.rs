//! The names of devices, of slots, and of targets to shrink.

use std::fmt;

use crate::config::arena::ShrinkTarget;
use crate::device::driver::DeviceUuid;

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

/// A kind of memory of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum SlotKind {
    /// Device memory.
    Device,
    /// Host memory for copies to and from the device, page-locked as far as the system allows: a
    /// pool, with `arena.max_mem` as its limit.
    Pinned,
}

/// The place of an arena: a provider, a device, a kind of memory.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Slot {
    /// The provider's name, which metrics and errors use for its arenas.
    pub name: String,
    /// The device's number: its place in [`MemoryDevices::all`](crate::memory::MemoryDevices::all),
    /// from 0.
    pub device: u32,
    /// The kind of memory.
    pub kind: SlotKind,
}

impl Slot {
    /// Creates the slot of the device's memory.
    #[must_use]
    pub fn device(name: impl Into<String>, device: u32) -> Self {
        Self { name: name.into(), device, kind: SlotKind::Device }
    }

    /// Creates the slot of page-locked memory for that device.
    #[must_use]
    pub fn pinned(name: impl Into<String>, device: u32) -> Self {
        Self { name: name.into(), device, kind: SlotKind::Pinned }
    }
}

impl fmt::Display for Slot {
    /// `name` for an arena on device 0, as in metrics; `name:1`, `name:pinned`, `name:1:pinned`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.name)?;
        if self.device > 0 {
            write!(f, ":{}", self.device)?;
        }
        if self.kind == SlotKind::Pinned { f.write_str(":pinned") } else { Ok(()) }
    }
}

/// Returns the targets that exist with this number of devices. Without a device, `gpu:0` has one
/// that releases nothing.
pub(in crate::memory) fn known_targets(devices: usize) -> impl Iterator<Item = ShrinkTarget> {
    std::iter::once(ShrinkTarget::Cpu(0)).chain((0..).take(devices.max(1)).map(ShrinkTarget::Gpu))
}
