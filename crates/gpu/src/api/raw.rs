//! Raw blocks: allocated and freed by address, for code that keeps addresses and not buffers.
//!
//! ONNX Runtime's allocator callbacks and C code need an address from an allocation, and free by
//! address. The owner is responsible for every use of it; nothing here reads or writes the memory.
//! A raw block is freed by [`DeviceArena::free`], [`Lane::free`] or [`DeviceArena::reset`], or with
//! the arena. If the device may still use it then, the arena's memory is leaked.
//!
//! A raw block has the streams that use it, or none: then any stream may, and only a wait for the
//! whole device proves that its memory is unused. It holds streams by number and no lane, because
//! a lane holds the arena. A stream that ends before the block is freed counts as unknown.
//!
//! Invariant: an address is known from the call that returned it until it is freed.

use std::fmt;
use std::sync::Arc;

use crate::api::arena::DeviceArena;
use crate::api::lane::{Lane, LaneInner};
use crate::driver::DeviceAddress;
use crate::exec::front::Kept;
use crate::exec::inner::ArenaInner;
use crate::observe::record::Operation;
use crate::observe::record::hooks::Origin;
use crate::observe::record::operation::After;
use crate::state::arena::ArenaState;
use crate::state::region::{AllocRequest, Region};
use crate::state::streams::StreamKey;
use crate::types::error::DeviceError;
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

/// The most streams that a raw block remembers; one more, and it counts as used by any stream.
/// Twice the 32 streams that PyTorch has in a pool.
pub(crate) const USERS_MAX: usize = 64;

/// The streams that use a raw block: two words, because most blocks have one stream.
#[derive(Debug)]
pub(crate) struct Users {
    /// The stream that it was allocated on; [`StreamKey::CONTEXT`] if any stream may use it.
    first: StreamKey,
    /// The others, each once.
    others: Option<Box<Others>>,
}

#[derive(Debug, Default)]
struct Others(Vec<StreamKey>);

impl Users {
    /// A block that any stream may use.
    const ANY: Self = Self { first: StreamKey::CONTEXT, others: None };

    fn of(first: Option<StreamKey>) -> Self {
        Self { first: first.unwrap_or(StreamKey::CONTEXT), others: None }
    }

    /// Adds a stream; returns `true` if it was unknown. Of a block that any stream may use, nothing
    /// more needs to be known.
    fn add(&mut self, stream: StreamKey) -> bool {
        if self.first == StreamKey::CONTEXT || self.first == stream {
            return false;
        }
        let others = &mut self.others.get_or_insert_default().0;
        if others.contains(&stream) {
            return false;
        }
        if others.len() + 1 < USERS_MAX {
            others.push(stream);
        } else {
            *self = Self::ANY;
        }
        true
    }

    /// Calls `act` with the streams, and with the work that must complete after a free.
    fn with<T>(&self, act: impl FnOnce(&[StreamKey], After) -> T) -> T {
        match &self.others {
            _ if self.first == StreamKey::CONTEXT => act(&[], After::All),
            None => act(&[self.first], After::Lanes),
            Some(others) => {
                let all: Vec<_> =
                    [self.first].into_iter().chain(others.0.iter().copied()).collect();
                act(&all, After::Lanes)
            }
        }
    }
}

/// A live raw block, and the streams that use it.
#[derive(Debug)]
pub(crate) struct RawUse {
    pub(crate) kept: Kept,
    pub(crate) users: Users,
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
        self.alloc_raw_for(None, size, align, region)
    }

    /// Allocates a raw block for the stream of a lane, if given.
    fn alloc_raw_for(
        &self,
        lane: Option<&LaneInner>,
        size: ByteSize,
        align: ByteSize,
        region: Region,
    ) -> Result<RawBlock, DeviceError> {
        let inner = self.inner();
        inner.check_open()?;
        let origin = Origin { lane: lane.map_or(0, LaneInner::number), ..Origin::RAW };
        let largest_align = inner.capabilities.granularity;
        if !align.get().is_power_of_two() || align > largest_align {
            return Err(DeviceError::Alignment { requested: align, largest: largest_align });
        }
        let wanted = AllocRequest::new(size, align).ok_or(DeviceError::ZeroSize)?;
        let largest = inner.largest[region.number()];
        if size > largest {
            inner.refuse_too_large(region, size.get(), align, origin);
            let len = size.as_usize().unwrap_or(usize::MAX);
            return Err(DeviceError::TooLarge { len, element: ByteSize::new(1), largest });
        }
        let taker = lane.and_then(LaneInner::key);
        let placed = inner.alloc_block(region, wanted.by(origin), taker)?;
        // It may have been moved since its allocation; from here on it stays.
        let mut books = inner.wait_until_still(inner.lock(), region, placed.id);
        let kept = (region, books.region(region).refreshed(placed));
        let of = RawUse { kept, users: Users::of(taker) };
        let before = books.raw.insert(kept.1.at, of);
        drop(books);
        debug_assert!(before.is_none(), "two live blocks begin at one address");
        Ok(RawBlock::of(&kept))
    }

    /// Frees a raw block and returns its description. Makes no driver call.
    ///
    /// Its memory is reused after the work of the streams that use it: that of the lane it was
    /// allocated on, and those of [`DeviceArena::record_use`]. A block without a lane may be used
    /// on any stream: its memory is reused only after all work of the device.
    ///
    /// # Errors
    /// [`DeviceError::NotLive`] if it was freed before, or belongs to a buffer;
    /// [`DeviceError::InteriorAddress`], [`DeviceError::ForeignAddress`], [`DeviceError::Forked`].
    /// The arena is unchanged after each.
    pub fn free(&self, at: DeviceAddress) -> Result<RawBlock, DeviceError> {
        self.free_after(at, None)
    }

    fn free_after(
        &self,
        at: DeviceAddress,
        lane: Option<&LaneInner>,
    ) -> Result<RawBlock, DeviceError> {
        let inner = self.inner();
        inner.check_here()?;
        let mut books = inner.lock();
        let Some(mut raw) = books.raw.remove(&at) else {
            return Err(inner.unknown(&books, at));
        };
        if let Some(lane) = lane {
            books.note_user(&mut raw, lane, &*inner.clock);
        }
        books.release_raw(&raw, &*inner.clock);
        drop(books);
        inner.pass_on();
        Ok(RawBlock::of(&raw.kept))
    }

    /// Resizes a raw block in place; `None` if it cannot grow there. The rest of a smaller size is
    /// free. Only the owner of the block calls this.
    ///
    /// # Errors
    /// The errors of [`DeviceArena::free`], and those of [`DeviceArena::alloc_raw`]. The block is
    /// unchanged.
    pub(crate) fn resize_raw(
        &self,
        at: DeviceAddress,
        size: ByteSize,
    ) -> Result<Option<RawBlock>, DeviceError> {
        let inner = self.inner();
        inner.check_here()?;
        let books = inner.lock();
        let found = books.raw.get(&at).map(|raw| raw.kept);
        let (region, placed) = found.ok_or_else(|| inner.unknown(&books, at))?;
        drop(books);
        let Some(resized) = inner.resize_in_place(region, placed, size.get())? else {
            return Ok(None);
        };
        let kept = (region, resized);
        if let Some(raw) = inner.lock().raw.get_mut(&at) {
            raw.kept = kept;
        }
        Ok(Some(RawBlock::of(&kept)))
    }

    /// Records that a lane's stream also uses a raw block: after the free, its work until then is
    /// waited for as well. If the lane is dropped before the block is freed, the memory is reused
    /// only after all work of the device.
    ///
    /// ```
    /// # use std::sync::Arc;
    /// # use lowtide_gpu::{ByteSize, clock::SystemClock, driver::StreamHandle};
    /// # use lowtide_gpu::{ArenaConfig, DeviceArena, DeviceError, HostDriver, Region};
    /// # let clock = Arc::new(SystemClock::new());
    /// # let arena = DeviceArena::open(Arc::new(HostDriver::new()), clock, ArenaConfig::new("a"))?;
    /// // SAFETY: the host driver has no streams.
    /// let (computes, copies) =
    ///     unsafe { (arena.lane(StreamHandle::new(1))?, arena.lane(StreamHandle::new(2))?) };
    /// let block = computes.alloc_raw(ByteSize::kib(4), ByteSize::new(256), Region::Dynamic)?;
    /// arena.record_use(block.at, &copies)?;
    /// computes.free(block.at)?; // reused after the work of both
    /// # Ok::<(), DeviceError>(())
    /// ```
    ///
    /// # Errors
    /// The errors of [`DeviceArena::free`]; [`DeviceError::ForeignLane`] for a lane of another
    /// arena.
    pub fn record_use(&self, at: DeviceAddress, lane: &Lane) -> Result<(), DeviceError> {
        let inner = self.inner();
        inner.check_here()?;
        if !Arc::ptr_eq(inner, lane.arena().inner()) {
            return Err(DeviceError::ForeignLane {
                buffer_of: self.name().to_owned(),
                lane_of: lane.arena().name().to_owned(),
            });
        }
        let mut books = inner.lock();
        let Some(mut raw) = books.raw.remove(&at) else {
            return Err(inner.unknown(&books, at));
        };
        books.note_user(&mut raw, lane.known(), &*inner.clock);
        books.raw.insert(at, raw);
        drop(books);
        inner.pass_on();
        Ok(())
    }

    /// Records that streams which the arena does not know use a raw block: its memory is reused
    /// only after all work of the device.
    ///
    /// # Errors
    /// The errors of [`DeviceArena::free`].
    pub fn record_unknown_use(&self, at: DeviceAddress) -> Result<(), DeviceError> {
        let inner = self.inner();
        inner.check_here()?;
        let mut books = inner.lock();
        match books.raw.get_mut(&at) {
            Some(raw) => raw.users = Users::ANY,
            None => return Err(inner.unknown(&books, at)),
        }
        Ok(())
    }

    /// Returns the raw block at this address. O(log n) in the number of raw blocks.
    ///
    /// # Errors
    /// The errors of [`DeviceArena::free`].
    pub fn raw_block(&self, at: DeviceAddress) -> Result<RawBlock, DeviceError> {
        self.inner().check_here()?;
        let books = self.inner().lock();
        let found = books.raw.get(&at).map(|raw| RawBlock::of(&raw.kept));
        found.ok_or_else(|| self.inner().unknown(&books, at))
    }

    /// Returns the raw block that contains this address. O(log n) in the number of raw blocks.
    ///
    /// # Errors
    /// [`DeviceError::NotLive`] if the address is of this arena and in no raw block;
    /// [`DeviceError::InteriorAddress`] if it is in a buffer; [`DeviceError::ForeignAddress`],
    /// [`DeviceError::Forked`].
    pub fn raw_block_containing(&self, at: DeviceAddress) -> Result<RawBlock, DeviceError> {
        self.inner().check_here()?;
        let books = self.inner().lock();
        let before = books.raw.range(..=at).next_back();
        let found = before.map(|(_, raw)| RawBlock::of(&raw.kept));
        let contains = |block: &RawBlock| at.get() - block.at.get() < block.size.get();
        found.filter(contains).ok_or_else(|| self.inner().unknown(&books, at))
    }
}

impl Lane {
    /// Allocates a raw block for this lane's next work. Like [`DeviceArena::alloc_raw`], and in the
    /// order of the stream like [`Lane::alloc`]: memory that this lane freed is reused first.
    ///
    /// The block does not keep the lane. Drop the lane after its blocks are freed; otherwise their
    /// memory is reused only after all work of the device.
    ///
    /// # Errors
    /// The errors of [`DeviceArena::alloc_raw`].
    pub fn alloc_raw(
        &self,
        size: ByteSize,
        align: ByteSize,
        region: Region,
    ) -> Result<RawBlock, DeviceError> {
        self.arena().alloc_raw_for(Some(self.known()), size, align, region)
    }

    /// Frees a raw block of the lane's arena after its last use on this lane. Equals
    /// [`DeviceArena::record_use`] and [`DeviceArena::free`], in one step.
    ///
    /// # Errors
    /// The errors of [`DeviceArena::free`].
    pub fn free(&self, at: DeviceAddress) -> Result<RawBlock, DeviceError> {
        self.arena().free_after(at, Some(self.known()))
    }
}

impl ArenaState {
    /// Frees every raw block; returns their bytes.
    pub(crate) fn reset(&mut self, clock: &dyn Clock) -> ByteSize {
        self.tell(clock, |numbers| {
            numbers.forget_raw();
            None
        });
        let all: Vec<_> = std::mem::take(&mut self.raw).into_values().collect();
        all.iter().for_each(|raw| self.release_raw(raw, clock));
        let bytes = all.iter().map(|raw| ByteSize::new(raw.kept.1.span.size)).sum();
        self.tell(clock, |_| Some(Operation::Reset { blocks: all.len() as u64, bytes }));
        bytes
    }

    /// Adds the stream of a lane to those that use a block.
    fn note_user(&mut self, raw: &mut RawUse, lane: &LaneInner, clock: &dyn Clock) {
        let is_new = lane.key().is_none_or(|stream| raw.users.add(stream));
        if is_new && lane.number() > 0 {
            let (region, placed) = raw.kept;
            self.tell(clock, |numbers| {
                Some(Operation::Use { id: numbers.of(region, placed.id)?, lane: lane.number() })
            });
        }
    }

    /// Frees a raw block that is no longer known by its address.
    fn release_raw(&mut self, raw: &RawUse, clock: &dyn Clock) {
        let (region, placed) = raw.kept;
        raw.users.with(|streams, after| {
            self.release_after(region, placed, (streams, after), clock);
        });
    }
}

impl ArenaInner {
    /// Returns the reason an address is not known. Walks the blocks of a region.
    fn unknown(&self, books: &ArenaState, at: DeviceAddress) -> DeviceError {
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

#[cfg(all(test, not(lowtide_loom)))]
mod tests {
    use super::*;

    fn streams(users: &Users) -> (Vec<StreamKey>, After) {
        users.with(|streams, after| (streams.to_vec(), after))
    }

    #[test]
    fn a_block_knows_each_stream_once_and_beyond_the_most_it_is_any_streams() {
        let key = StreamKey::new;
        let mut users = Users::of(Some(key(1)));
        assert_eq!(streams(&users), (vec![key(1)], After::Lanes));
        assert!(!users.add(key(1)));
        for number in 2..=USERS_MAX as u64 {
            assert!(users.add(key(number)) && !users.add(key(number)));
        }
        let all = (1..=USERS_MAX as u64).map(key).collect();
        assert_eq!(streams(&users), (all, After::Lanes));
        assert!(!users.add(key(7)), "known");
        assert!(users.add(key(1_000)));
        assert_eq!(streams(&users), (vec![], After::All));
        assert!(!users.add(key(1_001)), "any stream already");
        assert_eq!(streams(&Users::of(None)), (vec![], After::All));
    }
}
