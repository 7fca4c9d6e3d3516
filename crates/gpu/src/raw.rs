//! Raw blocks: allocated and freed by address, for code that keeps addresses and not buffers.
//!
//! ONNX Runtime's allocator callbacks and C code need an address from an allocation, and free by
//! address. The owner is responsible for every use of it; nothing here reads or writes the memory.
//! A raw block is freed by [`DeviceArena::free`] or [`DeviceArena::reset`], or with the arena. If
//! the device may still use it then, the arena's memory is leaked.
//!
//! Invariant: an address is known from the call that returned it until it is freed; only the starts
//! of raw blocks are known.

use std::fmt;

use super::arena::DeviceArena;
use super::books::Books;
use super::driver::DeviceAddress;
use super::error::DeviceError;
use super::front::Kept;
use super::record::Operation;
use super::record::hooks::Origin;
use super::region::{Region, Wanted};
use super::shared::Shared;
use lowtide_core::bytes::ByteSize;
use lowtide_core::clock::Clock;

/// A raw block from [`DeviceArena::alloc_raw`].
///
/// It describes the block and does not own it: dropping this frees nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct RawBlock {
    /// The first address.
    pub at: DeviceAddress,
    /// The requested size.
    pub requested: ByteSize,
    /// The size after rounding up to 256 bytes.
    pub size: ByteSize,
    /// The region.
    pub region: Region,
}

impl RawBlock {
    const fn of(kept: &Kept) -> Self {
        let (region, placed) = *kept;
        Self {
            at: placed.at,
            requested: ByteSize::new(placed.requested),
            size: ByteSize::new(placed.span.size),
            region,
        }
    }
}

impl fmt::Display for RawBlock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} at {}", self.size, self.at)
    }
}

impl DeviceArena {
    /// Allocates a raw block at a multiple of `align` bytes (1 for any). Its contents are
    /// unspecified.
    ///
    /// For code that keeps addresses: a kernel, a C library. Use [`DeviceArena::alloc`] for slices.
    /// The block is live until [`DeviceArena::free`] or [`DeviceArena::reset`]. O(log n) in the
    /// number of raw blocks.
    ///
    /// ```
    /// # use std::sync::Arc;
    /// # use lowtide_gpu::{ByteSize, clock::SystemClock};
    /// use lowtide_gpu::{ArenaConfig, DeviceArena, DeviceError, HostDriver, Region};
    /// # let clock = Arc::new(SystemClock::new());
    /// # let arena = DeviceArena::open(Arc::new(HostDriver::new()), clock, ArenaConfig::new("a"))?;
    ///
    /// let size = ByteSize::kib(10);
    /// let block = arena.alloc_raw(size, ByteSize::new(512), Region::Dynamic)?;
    /// assert!(block.at.is_multiple_of(ByteSize::new(512)) && block.size >= size);
    /// arena.free(block.at)?;
    /// assert!(matches!(arena.free(block.at), Err(DeviceError::NotLive { .. })));
    /// # Ok::<(), DeviceError>(())
    /// ```
    ///
    /// # Errors
    /// [`DeviceError::ZeroSize`]; [`DeviceError::Alignment`] if `align` is not a power of two, or
    /// exceeds the granule; otherwise the errors of [`DeviceArena::alloc`].
    pub fn alloc_raw(
        &self,
        size: ByteSize,
        align: ByteSize,
        region: Region,
    ) -> Result<RawBlock, DeviceError> {
        let shared = self.shared();
        shared.check_open()?;
        let largest_align = shared.capabilities.granularity;
        if !align.get().is_power_of_two() || align > largest_align {
            return Err(DeviceError::Alignment { requested: align, largest: largest_align });
        }
        let wanted = Wanted::new(size, align).ok_or(DeviceError::ZeroSize)?;
        let largest = shared.largest[region.number()];
        if size > largest {
            shared.refuse_too_large(region, size.get(), align, Origin::RAW);
            let len = size.as_usize().unwrap_or(usize::MAX);
            return Err(DeviceError::TooLarge { len, element: ByteSize::new(1), largest });
        }
        let placed = shared.obtain(region, wanted.by(Origin::RAW))?;
        // It may have been moved since its allocation; from here on it stays.
        let mut books = shared.wait_until_still(shared.books(), region, placed.id);
        let kept = (region, books.region(region).refreshed(placed));
        let before = books.raw.insert(kept.1.at, kept);
        drop(books);
        debug_assert!(before.is_none(), "two live blocks begin at one address");
        Ok(RawBlock::of(&kept))
    }

    /// Frees a raw block and returns its description. Makes no driver call.
    ///
    /// # Errors
    /// [`DeviceError::NotLive`] if it was freed before, or belongs to a buffer;
    /// [`DeviceError::InteriorAddress`], [`DeviceError::ForeignAddress`], [`DeviceError::Forked`].
    /// The arena is unchanged after each.
    pub fn free(&self, at: DeviceAddress) -> Result<RawBlock, DeviceError> {
        let shared = self.shared();
        shared.check_here()?;
        let mut books = shared.books();
        let Some(kept) = books.raw.remove(&at) else {
            return Err(shared.unknown(&books, at));
        };
        books.release(kept.0, kept.1, &*shared.clock);
        drop(books);
        shared.pass_on();
        Ok(RawBlock::of(&kept))
    }

    /// Returns the raw block at this address. O(log n) in the number of raw blocks.
    ///
    /// # Errors
    /// The errors of [`DeviceArena::free`].
    pub fn raw_block(&self, at: DeviceAddress) -> Result<RawBlock, DeviceError> {
        self.shared().check_here()?;
        let books = self.shared().books();
        let found = books.raw.get(&at).map(RawBlock::of);
        found.ok_or_else(|| self.shared().unknown(&books, at))
    }
}

impl Books {
    /// Frees every raw block; returns their bytes.
    pub(super) fn reset(&mut self, clock: &dyn Clock) -> ByteSize {
        self.tell(clock, |numbers| {
            numbers.forget_raw();
            None
        });
        let kept: Vec<_> = std::mem::take(&mut self.raw).into_values().collect();
        for &(region, placed) in &kept {
            self.release(region, placed, clock);
        }
        let bytes = kept.iter().map(|(_, placed)| ByteSize::new(placed.span.size)).sum();
        self.tell(clock, |_| Some(Operation::Reset { blocks: kept.len() as u64, bytes }));
        bytes
    }
}

impl Shared {
    /// Returns the reason an address is not known. Walks the blocks of a region.
    fn unknown(&self, books: &Books, at: DeviceAddress) -> DeviceError {
        for region in Region::ALL {
            let books = books.region(region);
            let Some(offset) = books.segment.offset_of(at) else { continue };
            let around = books.block_around(offset.get());
            return match around.filter(|span| span.offset < offset.get()) {
                Some(span) => DeviceError::InteriorAddress {
                    at,
                    block: books.segment.address_of(ByteSize::new(span.offset)),
                    size: ByteSize::new(span.size),
                },
                None => DeviceError::NotLive { at },
            };
        }
        DeviceError::ForeignAddress { at, arena: self.name.clone() }
    }
}
