//! The values of slots: their names, what callers are told of their arenas, and their figures.

use std::fmt;
use std::sync::Arc;

use crate::bytes::ByteSize;
use crate::config::arena::{ArenaResolution, Conflict};
use crate::device::{ArenaSnapshot, PinnedSnapshot};

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
    /// The device's number: its place in [`MemoryDevices::all`](crate::memory::MemoryDevices::all), from 0.
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

/// The options in force after an arena was shared, used or replaced, and the options of the caller,
/// or older ones, that are not in force.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct ArenaReport {
    /// Every value in force, with its source.
    pub resolution: Arc<ArenaResolution>,
    /// Every option that is not in force, with the value in force.
    pub conflicts: Vec<Conflict>,
    /// `true` if this call opened the arena.
    pub opened: bool,
}

/// The result of a replacement.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Replaced {
    /// The options in force.
    pub report: ArenaReport,
    /// The live bytes that drain with the old arena; `None` if there was none.
    pub draining: Option<ByteSize>,
    /// The idle bytes of the old arena that were released immediately.
    pub released: ByteSize,
}

/// The figures of a slot.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct SlotSnapshot {
    /// The slot.
    pub slot: Slot,
    /// `true` if its arena is shared.
    pub shared: bool,
    /// The number of uses.
    pub users: u32,
    /// The options in force; `None` without an arena.
    pub resolution: Option<Arc<ArenaResolution>>,
    /// The serving arena; `None` without one. Blocks of dropped pinned buffers whose copies are not
    /// complete count as live.
    pub arena: Option<ArenaSnapshot>,
    /// The arenas that were replaced, or left by their last user, oldest first.
    pub draining: Vec<ArenaSnapshot>,
    /// The serving pool, for pinned memory.
    pub pool: Option<PinnedSnapshot>,
}
