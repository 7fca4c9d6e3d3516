//! Other block allocators, to run beside ours: one library, and models of two that have none.
//!
//! A peer hands out spans of offsets and touches no memory. The models follow what the sources of
//! cuArena and of ONNX Runtime's arena do with sizes and addresses; how fast those run says
//! nothing, because they are other programs. Not modelled: threads, streams, failing devices.
//!
//! Invariant: `live <= taken`; live blocks of one peer never overlap.

mod bfc;
mod cuarena;
mod offset;

pub(crate) use bfc::{Bfc, Extend};
pub(crate) use cuarena::CuArena;
pub(crate) use offset::Offset;

/// A block allocator over offsets.
pub(crate) trait Peer {
    /// A handle by which a live block is freed.
    type Handle;

    /// A block of at least so many bytes, or `None` where it finds no room. `bytes > 0`.
    fn alloc(&mut self, bytes: u64) -> Option<Self::Handle>;

    /// Frees a live block.
    ///
    /// # Panics
    /// If the block is not live.
    fn free(&mut self, block: Self::Handle);

    /// Bytes taken from the device: all of a fixed pool, the segments of an arena that grows.
    fn taken(&self) -> u64;

    /// Bytes of the largest block that is free, of those that were taken.
    fn largest_free(&self) -> u64;

    /// Bytes of all live blocks, after rounding.
    fn live(&self) -> u64;
}
