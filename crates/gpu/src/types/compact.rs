//! Options and results of compactions.

use std::time::Duration;

use crate::driver::DeviceAddress;
use crate::types::Region;
use lowtide_core::bytes::ByteSize;

/// Options of a compaction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CompactOptions {
    /// The region. Blocks of the other region do not move.
    pub region: Region,
    /// `None`, the default, for as many idle granules as possible, which a decay or purge then
    /// releases (on drivers that allocate whole segments: idle segments): for arenas with more
    /// addresses than memory. Otherwise one free span of addresses of at least this size, or the
    /// largest possible (within one segment, on drivers that allocate segments), and
    /// [`ByteSize::MAX`] to join all free space: for arenas whose addresses are as scarce as
    /// memory.
    pub contiguous: Option<ByteSize>,
    /// The maximum of bytes moved in this call; a larger block does not move. With less than about
    /// two granules it may be impossible to clear any.
    pub budget: ByteSize,
    /// `true` if raw blocks may move as well; their owner takes the new addresses from the
    /// callback, and does not use them meanwhile. Default: `false`.
    pub moves_raw: bool,
}

impl CompactOptions {
    /// Creates options for idle granules in this region, without a budget.
    #[must_use]
    pub const fn new(region: Region) -> Self {
        Self { region, contiguous: None, budget: ByteSize::MAX, moves_raw: false }
    }
}

/// A block that was moved.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Moved {
    /// Its region.
    pub region: Region,
    /// Its address before the move.
    pub from: DeviceAddress,
    /// Its address after the move.
    pub to: DeviceAddress,
    /// Its size.
    pub size: ByteSize,
}

/// The result of a compaction.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct CompactReport {
    /// The number of moves. A block moves more than once only if others need its place meanwhile.
    pub moves: u64,
    /// Bytes moved.
    pub moved: ByteSize,
    /// The number of planned moves skipped: the block or its new place had changed, there was no
    /// memory for it, or events could not prove that no work uses the block.
    pub skipped: u64,
    /// Bytes of granules that became idle: those left by the moves, minus those made active.
    pub recovered: ByteSize,
    /// The longest free span of addresses in the region afterwards; up to a 16th less if more than
    /// 32 are about that long.
    pub largest_span: ByteSize,
    /// `true` if it ended early because a lease was held or requested, which blocks moves, or
    /// because another compaction of the arena is running: try again later.
    pub is_busy: bool,
}

/// The costs of a device's driver calls, by which an arena chooses between calls that have the same
/// result; from [`DeviceArena::set_costs`](crate::DeviceArena::set_costs).
///
/// The defaults are for NVIDIA data centre GPUs. None was measured by this project; measure them on
/// the device with `examples/gpu_check`. A wrong figure costs time, and nothing else.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceCosts {
    /// The bytes that the device copies within itself in a second. With zero, a compaction moves
    /// one block at a time. Default: 100 GB/s, less than any data centre GPU since the T4 (300 GB/s
    /// of reads and writes); an H200 copies 2,150 GB/s.
    pub copy_per_second: ByteSize,
    /// The time to queue one copy. Default: 4 us, a guess.
    pub copy_call: Duration,
    /// The time to move the memory of one granule to another address (`cuMemMap`,
    /// `cuMemSetAccess`, `cuMemUnmap`). Default: 63 us, measured by kvcached on an A100 with
    /// handles of 2 MiB.
    pub remap: Duration,
    /// The time to release the memory of one granule and to commit as much elsewhere: the same
    /// calls and `cuMemCreate`. Less per granule if one handle serves many. Default: 256 us, as
    /// above.
    pub recommit: Duration,
}

impl Default for DeviceCosts {
    fn default() -> Self {
        Self {
            copy_per_second: ByteSize::new(100_000_000_000),
            copy_call: Duration::from_micros(4),
            remap: Duration::from_micros(63),
            recommit: Duration::from_micros(256),
        }
    }
}

impl DeviceCosts {
    /// Returns `true` if an arena that is short of memory remaps idle granules, and `false` if it
    /// releases them and commits other memory. At equal costs it remaps: another process may take
    /// memory that is released.
    pub(crate) fn prefers_remap(&self) -> bool {
        self.remap <= self.recommit
    }

    /// Returns the number of bytes, and the number of copies, that take this time.
    pub(crate) fn copied_within(self, time: Duration) -> [u64; 2] {
        let bytes = u128::from(self.copy_per_second.get()) * time.as_nanos() / 1_000_000_000;
        let copies = time.as_nanos() / self.copy_call.as_nanos().max(1);
        [bytes, copies].map(|count| u64::try_from(count).unwrap_or(u64::MAX))
    }
}

#[cfg(all(test, not(lowtide_loom)))]
mod tests {
    use super::*;

    #[test]
    fn a_millisecond_copies_what_the_device_copies_in_it() {
        let within = |costs: DeviceCosts| costs.copied_within(Duration::from_millis(1));
        let costs = DeviceCosts::default();
        assert_eq!(within(costs), [100_000_000, 250]);
        let slow = DeviceCosts { copy_per_second: ByteSize::ZERO, ..costs };
        assert_eq!(within(slow), [0, 250]);
        let free =
            DeviceCosts { copy_per_second: ByteSize::MAX, copy_call: Duration::ZERO, ..costs };
        assert_eq!(within(free), [u64::MAX / 1_000, 1_000_000]);
    }

    #[test]
    fn memory_is_moved_unless_committing_anew_takes_less_time() {
        let costs = DeviceCosts::default();
        assert!(costs.prefers_remap());
        assert!(DeviceCosts { recommit: costs.remap, ..costs }.prefers_remap());
        assert!(!DeviceCosts { recommit: Duration::ZERO, ..costs }.prefers_remap());
    }
}
