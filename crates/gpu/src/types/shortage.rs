//! The arguments of callbacks when memory is short.

use super::region::Region;
use lowtide_core::bytes::ByteSize;

/// The resource that is short.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ShortageInfo {
    /// The allocation would exceed the limit.
    Limit {
        /// Bytes above the limit after all idle memory is released: this many bytes of granules
        /// must become idle.
        over: ByteSize,
    },
    /// The device is out of memory, and the arena has no idle memory.
    Device,
    /// The region has no free span of addresses that is long enough.
    Addresses,
}

/// The argument of a shortage callback.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct Shortage<'a> {
    /// The arena's name.
    pub arena: &'a str,
    /// The region of the allocation. Idle memory of either region helps; addresses only of this
    /// one.
    pub region: Region,
    /// The size of the block.
    pub requested: ByteSize,
    /// The resource that is short.
    pub cause: ShortageInfo,
}
