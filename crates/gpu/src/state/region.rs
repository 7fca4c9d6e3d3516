//! One region of an arena: the part for one kind of lifetime, with its own addresses.
//!
//! A region joins the block index (free offsets) with the segment (memory), and calls neither
//! driver nor clock. [`RegionState::place`] decides which free place an allocation takes: memory
//! that is free now, memory that another stream may still use, or memory to commit. A block is
//! arriving from its placement until its memory is committed; only then is it live.
//!
//! Invariants: `requested + cached <= live`; `live + arriving + held = index.live`, and held
//! ranges have no memory; `live <= active`.

use std::num::NonZeroU64;

use crate::driver::DeviceAddress;
use crate::index::{ALIGN, BlockId, BlockIndex, End, MARKS, Request, Span};
use crate::record::Line;
use crate::state::moves::Pins;
use crate::state::pending::{Dependencies, Pending, StreamUses};
use crate::state::segment::{GranuleCall, Run, Segment};
use crate::state::streams::StreamKey;
use crate::types::{Region, RegionSnapshot};
use lowtide_core::bytes::ByteSize;

/// Blocks below this size are placed in the region's range for small blocks. Half a granule of 2
/// MiB, and `kSmallSize` of PyTorch's caching allocator. Measured by `benches/index`: after the
/// large blocks of a mix are freed, 928 MiB of small blocks keep 1.0 GiB active in a separate
/// range, and 4.9 GiB in a shared one.
const SMALL_BELOW: u64 = 1 << 20;

/// The cost of a place that a stream must wait for, and of one whose memory must be committed, in
/// the measure of [`Segment::cost`], while any span is pending. Memory without a wait is used
/// first, then memory that only needs a wait, and only then is more committed.
const COST_OF_WAITING: u64 = 1 << 34;
const COST_OF_COMMITTING: u64 = 1 << 35;

/// The number of free blocks that are examined for a figure, while the lock is held: those of the
/// highest bins, whose sizes differ by less than 1/16 within a bin. 32 take some 2 us.
const LOOKS: usize = 32;

/// Returns the end of a region to which blocks of a size belong.
pub(crate) const fn end_of(size: u64) -> End {
    if size < SMALL_BELOW { End::High } else { End::Low }
}

/// The places to search for a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Search {
    /// In a bounded number of free spans; small blocks among small ones.
    Usual,
    /// In a bounded number of free spans; small blocks among large ones.
    AmongLarge,
    /// In all free spans: the place that makes the fewest granules active.
    Cheapest,
    /// The same, among places that begin at a granule's start. Such a place touches no more
    /// granules than the block's size needs, whatever happens to its neighbours.
    Apart,
    /// In all free spans among large blocks: a place that needs no wait.
    Clear,
}

/// The number of a lane of an arena, from 1.
pub(crate) type LaneNumber = NonZeroU64;

lowtide_core::named_enum! {
    /// The kind of a request for a block.
    #[derive(Clone, Copy, Debug)]
    pub(crate) enum RequestKind {
        Buffer = "buffer",
        Raw = "raw",
        Reserve = "reserve",
        /// The new block of a resize.
        Resize = "resize",
    }
}

/// The source of a request for a block. Small, because each request carries it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RequestOrigin {
    pub(crate) kind: RequestKind,
    /// The lane that the request is for.
    pub(crate) lane: Option<LaneNumber>,
}

impl RequestOrigin {
    pub(crate) const BUFFER: Self = Self { kind: RequestKind::Buffer, lane: None };
    pub(crate) const RAW: Self = Self { kind: RequestKind::Raw, lane: None };
    pub(crate) const RESERVE: Self = Self { kind: RequestKind::Reserve, lane: None };
    pub(crate) const RESIZE: Self = Self { kind: RequestKind::Resize, lane: None };
}

/// A requested block.
#[derive(Clone, Copy, Debug)]
pub(crate) struct AllocRequest {
    pub(crate) region: Region,
    /// Bytes of the block; 0 for none.
    pub(crate) size: u64,
    /// Its alignment, a power of two.
    pub(crate) align: u64,
    /// The size that the caller requested.
    pub(crate) requested: u64,
    /// The origin of the request.
    pub(crate) origin: RequestOrigin,
    /// The stream that may use the block immediately, in stream order; any stream if `None`.
    pub(crate) taker: Option<StreamKey>,
}

impl AllocRequest {
    /// Creates a request for this many bytes, rounded up to the unit of sizes.
    #[inline]
    pub(crate) fn new(region: Region, bytes: u64, align: u64, origin: RequestOrigin) -> Self {
        let size = bytes.checked_next_multiple_of(ALIGN).unwrap_or(bytes);
        Self { region, size, align, requested: bytes, origin, taker: None }
    }

    /// Adds the request to the line of its event.
    pub(crate) fn note<'a, 'b>(&self, line: &'a mut Line<'b>) -> &'a mut Line<'b> {
        let RequestOrigin { kind, lane } = self.origin;
        line.text("kind", kind.name())
            .text("region", self.region.name())
            .number("bytes", self.requested)
            .number("align", self.align)
            .number("lane", lane.map(NonZeroU64::get))
    }
}

/// A block that has been placed.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Placement {
    pub(crate) id: BlockId,
    pub(crate) span: Span,
    pub(crate) at: DeviceAddress,
    /// The requested size in bytes.
    pub(crate) requested: u64,
    /// The number of moves in the region for which `span` and `at` are valid.
    pub(crate) moves: u64,
}

impl Placement {
    /// A value of `moves` that is never reached, so that the block's place must be looked up.
    pub(crate) const STALE: u64 = u64::MAX;
}

/// A run of a region, and its place.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PlacedRun {
    pub(crate) region: Region,
    pub(crate) run: Run,
    pub(crate) at: DeviceAddress,
    pub(crate) size: ByteSize,
    /// The size of its handles.
    pub(crate) handle: ByteSize,
}

/// The state of one region.
#[derive(Debug)]
pub(crate) struct RegionState {
    pub(crate) segment: Segment,
    pub(crate) index: RegionIndex,
    /// Wraps: a block that a cache kept and handed out again was allocated with one requested size,
    /// and is freed with another. Together with the caches' counts the sum is right.
    pub(super) requested: u64,
    pub(crate) live: u64,
    /// The bytes of blocks that have a place but no memory yet.
    pub(crate) arriving: u64,
    pub(crate) pins: Pins,
    /// The number of times that blocks of the region were moved or lost.
    pub(crate) moves: u64,
    /// Freed memory that the device may still use. It is free in the index, and keeps its granules.
    pub(crate) pending: Pending,
}

impl RegionState {
    pub(crate) fn new(region: Region, mut segment: Segment) -> Self {
        let mut index = RegionIndex::new(region, segment.extent, segment.granularity);
        segment.pieces.iter_mut().for_each(|pieces| pieces.wall_off(&mut index));
        let (pins, pending) = (Pins::default(), Pending::default());
        Self { segment, index, requested: 0, live: 0, arriving: 0, pins, moves: 0, pending }
    }

    /// Returns the size of the largest block that the region could ever have.
    pub(crate) fn largest_ever(&self) -> ByteSize {
        let pieces = self.segment.pieces.as_ref();
        ByteSize::new(pieces.map_or_else(|| self.index.large(), |pieces| pieces.largest))
    }

    /// Finds a place, preferring those that cost the fewest granules, and marks it as arriving.
    /// Returns the uses that must complete before its first use by the taker's stream, or by no
    /// stream.
    ///
    /// Small blocks are placed separately unless the search includes the large ones.
    pub(crate) fn place(
        &mut self,
        wanted: &AllocRequest,
        search: Search,
    ) -> Option<(Placement, Dependencies)> {
        let is_apart = !matches!(search, Search::AmongLarge);
        let end = if is_apart { end_of(wanted.size) } else { End::Low };
        let request = Request { size: wanted.size, align: wanted.align, end };
        let (segment, pending) = (&self.segment, &self.pending);
        let foreign = |place| pending.bytes > 0 && pending.is_foreign(place, wanted.taker);
        let cost = |place| {
            let cost = segment.cost(place);
            if pending.bytes == 0 {
                return cost;
            }
            let commits = u64::from(segment.missing(place).granules > 0);
            cost + u64::from(foreign(place)) * COST_OF_WAITING + commits * COST_OF_COMMITTING
        };
        let inactive = |place| {
            let commits = u64::from(segment.missing(place).granules > 0);
            commits * (COST_OF_COMMITTING + 2 * segment.inactive(place)) + u64::from(foreign(place))
        };
        let (id, span) = match search {
            Search::Cheapest => self.index.take_cheapest(request, inactive)?,
            Search::Apart => {
                let align = wanted.align.max(segment.granularity);
                self.index.take_cheapest(Request { align, ..request }, inactive)?
            }
            Search::Clear => self.take_clear(wanted)?,
            // A piece for small blocks is as easy to get as a place among the large ones.
            Search::Usual => self.index.take(request, segment.pieces.is_some(), cost)?,
            Search::AmongLarge => self.index.take(request, false, cost)?,
        };
        let is_free = self.pending.bytes == 0;
        let claim = if is_free { Dependencies::new() } else { self.claim(span) };
        Some((self.put(wanted, id, span), claim))
    }

    /// Records a block at the place that was taken for it, as arriving.
    pub(crate) fn put(&mut self, wanted: &AllocRequest, id: BlockId, span: Span) -> Placement {
        self.segment.set_touched::<true>(span);
        self.arriving += span.size;
        let at = self.segment.address_of(span.offset);
        if wanted.align > ALIGN {
            self.pins.align(id, wanted.align);
        }
        Placement { id, span, at, requested: wanted.requested, moves: self.moves }
    }

    /// Finds a place of whole granules among the large blocks that has no memory, and marks it as
    /// arriving, for an operation. Walks the blocks.
    pub(crate) fn place_bare(&mut self, wanted: &AllocRequest) -> Option<Placement> {
        let mut free = self.free_low();
        // At the end of a free span, which is least likely to have memory.
        let segment = &self.segment;
        let place = free.find_map(|span| {
            let offset = span.end().checked_sub(wanted.size)? / wanted.align * wanted.align;
            let place = Span { offset, size: wanted.size };
            let granules = segment.granules_of(place).len() as u64;
            let is_bare = offset >= span.offset
                && segment.bare(place) == granules
                && segment.is_in_one_half(place);
            is_bare.then_some(place)
        })?;
        drop(free);
        let id = self.index.take_at(place)?;
        self.pins.begin_operation(id);
        Some(self.put(wanted, id, place))
    }

    /// Finds a place among the large blocks that needs no wait. Walks the blocks: for callers that
    /// must not wait.
    fn take_clear(&mut self, wanted: &AllocRequest) -> Option<(BlockId, Span)> {
        let needed = (wanted.size, wanted.align);
        let clear = |span| self.pending.first_clear(span, needed, wanted.taker);
        let places = self.free_low().filter_map(clear);
        let place = places.min_by_key(|&place| self.segment.cost(place))?;
        Some((self.index.take_at(place)?, place))
    }

    /// Returns the free spans among the large blocks, in address order.
    fn free_low(&self) -> impl Iterator<Item = Span> {
        let blocks = self.index.blocks_of(End::Low);
        blocks.filter(|(_, name)| name.is_none()).map(|(span, _)| span)
    }

    /// Takes the pending parts out of a span that a block gets. Returns the uses to wait for.
    fn claim(&mut self, span: Span) -> Dependencies {
        let (claim, cuts) = self.pending.take(span);
        for (left, right) in cuts {
            self.border_parts(left, right, |segment, left, right, both| {
                segment.set_touched::<false>(both);
                segment.set_touched::<true>(left);
                segment.set_touched::<true>(right);
            });
        }
        for (part, _) in &claim {
            self.segment.set_touched::<false>(*part);
        }
        claim
    }

    /// Records a touched span as pending, joined with its neighbours of the same uses. A segment of
    /// a driver without virtual memory has no neighbours.
    #[inline(never)]
    fn defer(&mut self, span: Span, uses: StreamUses) {
        let gone = self.pending.insert(span, uses, self.segment.pieces.is_none());
        for (left, right) in gone.into_iter().flatten() {
            self.border_parts(left, right, |segment, left, right, both| {
                segment.set_touched::<false>(left);
                segment.set_touched::<false>(right);
                segment.set_touched::<true>(both);
            });
        }
    }

    /// Calls `change` with the parts of two adjoining spans that count differently if the spans are
    /// one: those in the granule of their border, or all. None if a granule begins at the border.
    fn border_parts(
        &mut self,
        left: Span,
        right: Span,
        change: impl FnOnce(&mut Segment, Span, Span, Span),
    ) {
        let (mut start, mut end) = (left.offset, right.end());
        if self.segment.pieces.is_none() {
            let granule = self.segment.granularity;
            let first = right.offset / granule * granule;
            if first == right.offset {
                return;
            }
            (start, end) = (start.max(first), end.min(first + granule));
        }
        let left = Span { offset: start, size: right.offset - start };
        let right = Span { size: end - right.offset, ..right };
        let both = Span { offset: start, size: end - start };
        change(&mut self.segment, left, right, both);
    }

    /// Records that a stream has completed all uses up to an epoch. Returns the spans whose
    /// granules became idle.
    pub(crate) fn mark_complete(&mut self, stream: StreamKey, epoch: u64) -> Vec<Span> {
        let mut spans = self.pending.complete(stream, epoch);
        spans.retain(|&span| self.segment.set_touched::<false>(span));
        spans
    }

    /// Removes an arriving block, ends its operation, and restores its pending parts. Returns
    /// `true` if granules became idle.
    pub(crate) fn cancel_placement(
        &mut self,
        placed: Placement,
        parts: impl IntoIterator<Item = (Span, StreamUses)>,
    ) -> Option<bool> {
        let span = self.index.release(placed.id)?;
        self.pins.end_operation(placed.id);
        self.pins.forget(placed.id);
        self.arriving -= span.size;
        let idle = self.segment.memory().idle();
        self.segment.set_touched::<false>(span);
        for (part, uses) in parts.into_iter().filter(|(_, uses)| !uses.is_empty()) {
            self.segment.set_touched::<true>(part);
            self.defer(part, uses);
        }
        Some(self.segment.memory().idle() > idle)
    }

    /// Frees a live block, immediately or when these uses are complete. Returns its span, and `true`
    /// if granules became idle.
    pub(crate) fn release(&mut self, placed: Placement, uses: StreamUses) -> Option<(Span, bool)> {
        let span = self.index.release(placed.id)?;
        self.pins.forget(placed.id);
        self.live -= span.size;
        self.requested = self.requested.wrapping_sub(placed.requested);
        if uses.is_empty() {
            return Some((span, self.segment.set_touched::<false>(span)));
        }
        self.defer(span, uses);
        Some((span, false))
    }

    /// Starts resizing a live block with these uses in place. The part that the block grows by is
    /// arriving until [`RegionState::end_resize`]. Returns `None` if there is no room after the
    /// block, or if that room may still be in use.
    pub(crate) fn begin_resize(
        &mut self,
        placed: Placement,
        requested: u64,
        uses: StreamUses,
    ) -> Option<Placement> {
        let placed = self.refreshed(placed);
        debug_assert!(self.index.span_of(placed.id).is_some(), "only its buffer resizes a block");
        let span = self.index.resize(placed.id, requested)?;
        let grown = span.size.saturating_sub(placed.span.size);
        let more = Span { offset: placed.span.end(), size: grown };
        if grown > 0 && !self.pending.is_clear(more) {
            let undone = self.index.resize(placed.id, placed.span.size);
            debug_assert_eq!(undone, Some(placed.span), "a block can always be cut back");
            return None;
        }
        self.segment.set_touched::<false>(placed.span);
        self.segment.set_touched::<true>(span);
        if grown == 0 && span.size < placed.span.size && !uses.is_empty() {
            let less = Span { offset: span.end(), size: placed.span.size - span.size };
            self.segment.set_touched::<true>(less);
            self.defer(less, uses);
        }
        self.live -= placed.span.size.saturating_sub(span.size);
        self.arriving += span.size.saturating_sub(placed.span.size);
        let less = placed.requested.saturating_sub(requested);
        self.requested = self.requested.wrapping_sub(less);
        Some(Placement { span, requested, ..placed })
    }

    /// Records that the memory which a block grew by is committed, or undoes the growth.
    pub(crate) fn end_resize(&mut self, before: Placement, after: Placement, done: bool) {
        let grown = after.span.size.saturating_sub(before.span.size);
        self.arriving -= grown;
        if done {
            self.live += grown;
            let more = after.requested.saturating_sub(before.requested);
            self.requested = self.requested.wrapping_add(more);
            return;
        }
        let before = Span { size: before.span.size, ..after.span };
        let undone = self.index.resize(after.id, before.size);
        debug_assert_eq!(undone, Some(before), "a block can always be cut back");
        self.segment.set_touched::<false>(after.span);
        self.segment.set_touched::<true>(before);
    }

    /// Returns the size of the longest free span of addresses. If more than [`LOOKS`] are in its bin
    /// it may be a 16th less.
    pub(crate) fn largest_span(&self) -> u64 {
        self.index.largest_of(LOOKS, |span| span.size)
    }

    /// Returns the size of the longest free span of committed memory among the [`LOOKS`] largest free
    /// blocks of each range.
    pub(crate) fn largest_free(&self) -> u64 {
        self.index.largest_of(LOOKS, |span| self.segment.committed_run_max(span))
    }

    /// Returns all figures, including those of the caches.
    pub(crate) fn snapshot(&self, caches: &CacheCounts, is_asleep: bool) -> RegionSnapshot {
        let (region, size) = (self.index.region, ByteSize::new);
        // A block that waits for its memory does not sleep: none waits once the arena is asleep.
        let asleep = if is_asleep { self.asleep() } else { self.lost() };
        let cached = caches.cached[region as usize];
        let (live, memory) = (self.live - cached, self.segment.memory());
        let requested = self.requested.wrapping_add(caches.requested[region as usize]);
        RegionSnapshot {
            region,
            requested: size(requested),
            live: size(live),
            asleep: size(asleep),
            cached: size(cached),
            active: size(memory.active),
            idle: size(memory.idle()),
            committed: size(memory.backed),
            reserved: size(self.segment.reserved()),
            pending: size(self.pending.bytes),
            holes: size(memory.active + asleep - live - self.pending.bytes),
            largest_free: size(self.largest_free()),
        }
    }

    /// Returns every block that is live or arriving, in address order.
    pub(crate) fn live_spans(&self) -> impl Iterator<Item = Span> {
        self.live_blocks().map(|(span, _)| span)
    }

    /// Returns the live bytes that have no memory.
    pub(crate) fn asleep(&self) -> u64 {
        self.live_spans().map(|span| self.segment.bare_bytes(span)).sum()
    }

    /// Returns the bytes without memory of blocks whose contents were lost.
    fn lost(&self) -> u64 {
        let spans = self.pins.lost().filter_map(|id| self.index.span_of(id));
        spans.map(|span| self.segment.bare_bytes(span)).sum()
    }

    /// Returns the live spans without an order, in less time.
    pub(crate) fn live_spans_unordered(&self) -> impl Iterator<Item = Span> {
        self.index.live_unordered().filter(|span| !self.is_held(*span))
    }

    /// Returns the live spans with the names of their blocks.
    pub(crate) fn live_blocks(&self) -> impl Iterator<Item = (Span, BlockId)> {
        let blocks = self.index.blocks().filter_map(|(span, name)| Some((span, name?)));
        blocks.filter(|(span, _)| !self.is_held(*span))
    }

    /// Returns `true` if the index entry of a span is not a block.
    pub(crate) fn is_held(&self, span: Span) -> bool {
        self.segment.pieces.as_ref().is_some_and(|pieces| pieces.is_held(span.offset))
    }

    /// Returns the current place of a live block.
    pub(crate) fn refreshed(&self, placed: Placement) -> Placement {
        if placed.moves == self.moves {
            return placed;
        }
        let Some(span) = self.index.span_of(placed.id) else {
            debug_assert!(false, "only its owner asks, and it is live");
            return placed;
        };
        let at = self.segment.address_of(span.offset);
        Placement { span, at, moves: self.moves, ..placed }
    }

    /// Returns the current address of a live block.
    pub(crate) fn address_of(&self, id: BlockId) -> Option<u64> {
        Some(self.segment.address_of(self.index.span_of(id)?.offset).get())
    }

    /// Records that the contents of a block are lost. Its owner gets an error at the next use.
    pub(crate) fn lose(&mut self, id: BlockId) {
        self.pins.lose(id);
        self.moves += 1;
    }

    /// Takes a free span for an operation that moves a block there, as arriving.
    pub(crate) fn take_room(&mut self, span: Span) -> Option<Placement> {
        if !self.pending.is_clear(span) {
            return None;
        }
        let id = self.index.take_at(span)?;
        self.pins.begin_operation(id); // its handle is not divided meanwhile
        let origin = RequestOrigin::BUFFER;
        let (region, size) = (self.index.region, span.size);
        let wanted = AllocRequest { region, size, align: ALIGN, requested: 0, origin, taker: None };
        Some(self.put(&wanted, id, span))
    }

    /// Moves a block to the place taken for it, ends the operation and frees the old place. Returns
    /// `true` if granules became idle.
    pub(crate) fn trade(&mut self, id: BlockId, room: Placement) -> bool {
        self.pins.end_operation(room.id);
        let old = self.index.span_of(id);
        let traded = self.index.exchange(id, room.id);
        debug_assert!(traded, "of one size, or neighbours");
        let Some((old, new)) = old.zip(self.index.span_of(id)) else { return false };
        let left = self.index.release(room.id);
        debug_assert_eq!(left.map(|left| left.size), Some(room.span.size));
        let idle = self.segment.memory().idle();
        self.arriving -= room.span.size;
        self.segment.set_touched::<false>(room.span);
        self.segment.set_touched::<false>(old);
        self.segment.set_touched::<true>(new);
        self.moves += 1;
        self.segment.memory().idle() > idle
    }

    /// Places a block, as arriving, in a free span that holds it: at the end of the span at which
    /// blocks of its size are placed.
    pub(crate) fn place_in(&mut self, wanted: &AllocRequest, within: Span) -> Option<Placement> {
        let offset = match self.index.end_at(within.offset) {
            End::Low => within.offset,
            End::High => (within.end() - wanted.size) / wanted.align * wanted.align,
        };
        let span = Span { offset, size: wanted.size };
        let id = self.index.take_at(span);
        debug_assert!(id.is_some(), "{span:?} of {within:?} is free");
        Some(self.put(wanted, id?, span))
    }

    /// Returns a run with its place.
    pub(crate) fn placed_run(&self, run: Run) -> PlacedRun {
        let region = self.index.region;
        let ((at, size), handle) = (self.segment.place_of(run), self.segment.handle_size(run));
        PlacedRun { region, run, at, size, handle }
    }

    /// Marks committed granules as leaving, for a sleep.
    pub(crate) fn begin_part(&mut self, run: Run) {
        let span = self.segment.span_of(run);
        let Some(pieces) = &mut self.segment.pieces else { return self.segment.begin_part(run) };
        let is_idle = pieces.mark_leaving(&mut self.index, span);
        debug_assert!(is_idle, "no other leaves for a sleep");
    }

    /// Records the result of a decommit.
    pub(crate) fn end_leave(&mut self, run: Run, done: bool) {
        let offset = self.segment.span_of(run).offset;
        match &mut self.segment.pieces {
            Some(pieces) => pieces.end(&mut self.index, offset, (None, !done)),
            None => self.segment.end(run, GranuleCall::Leave, done),
        }
    }

    /// Walks everything and checks the invariants.
    ///
    /// # Panics
    /// If an invariant is violated.
    pub(crate) fn validate(&self) {
        self.index.validate();
        self.pins.validate(|id| self.index.span_of(id).is_some());
        self.pending.validate();
        let mut spans: Vec<_> = self.live_spans().chain(self.pending.spans()).collect();
        spans.sort_unstable_by_key(|span| span.offset);
        let held = match &self.segment.pieces {
            Some(pieces) => pieces.validate(&self.index, spans.into_iter()),
            None => {
                self.segment.validate(spans.into_iter());
                0
            }
        };
        assert_eq!(self.live + self.arriving + held, self.index.live());
        let active = self.segment.memory().active;
        assert!(
            self.live <= active || self.live - self.asleep() <= active,
            "no live block is bare"
        );
    }
}

// Blocks in the caches of threads and lanes, as the state sees them: live, and counted by the
// caches.
//
// The caches count their allocations and frees without the state's lock. A snapshot adds the
// counts, and the state takes them over when a cache is dropped.

/// The counts of a cache since the arena was opened.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct CacheCounts {
    /// The numbers of blocks handed out and put in. Blocks that later went from the cache to the
    /// arena do not count.
    pub(crate) allocs: u64,
    pub(crate) frees: u64,
    /// The bytes in the cache now, by region.
    pub(crate) cached: [u64; 2],
    /// The requested bytes of blocks handed out minus those of blocks put in, by region. Wraps.
    pub(crate) requested: [u64; 2],
}

impl CacheCounts {
    pub(crate) fn add(&mut self, other: Self) {
        self.allocs += other.allocs;
        self.frees += other.frees;
        for region in Region::ALL.map(Region::number) {
            self.cached[region] += other.cached[region];
            let requested = &mut self.requested[region];
            *requested = requested.wrapping_add(other.requested[region]);
        }
    }

    /// Returns the bytes in the cache.
    #[inline]
    pub(crate) fn cached(&self) -> u64 {
        self.cached.iter().sum()
    }

    /// Counts a block that was handed out.
    #[inline]
    pub(crate) fn went(&mut self, placed: &Placement) {
        let region = placed.id.region() as usize;
        self.cached[region] -= placed.span.size;
        self.requested[region] = self.requested[region].wrapping_add(placed.requested);
    }

    /// Counts a block that was put in.
    #[inline]
    pub(crate) fn came(&mut self, placed: &Placement) {
        let region = placed.id.region() as usize;
        self.cached[region] += placed.span.size;
        self.requested[region] = self.requested[region].wrapping_sub(placed.requested);
    }
}

// The addresses of a region in two ranges: large blocks from the low end, small blocks in a separate
// range at the high end.
//
// A small block that stays would pin a granule among large blocks, so small blocks share granules
// with small blocks. The small range is a ninth of the addresses, which cost nothing. If the small
// range is full, or memory is short, a small block is placed among the large ones. Between the
// ranges is a wall, a granule without an owner, so that no free span crosses the border.
//
// Invariants: large range, wall and small range tile `[0, span)`; an id always refers to one range.

/// The small range gets one in this many addresses.
const SMALL_PART: u64 = 9;

/// The number of granules from which on there are two ranges: with fewer, each granule counts. A
/// guess.
pub(crate) const APART_FROM: u64 = 64;

/// The id of a block of an arena has the marks of its region and of its range, so that no two blocks
/// have the same.
impl BlockId {
    /// Returns the end of the region at which the block's range is.
    pub(crate) const fn end(self) -> End {
        if self.slot & MARKS[0] == 0 { End::Low } else { End::High }
    }

    /// Returns the block's region.
    pub(crate) const fn region(self) -> Region {
        if self.slot & MARKS[1] == 0 { Region::Stable } else { Region::Dynamic }
    }
}

/// The blocks of a region.
#[derive(Debug)]
pub(crate) struct RegionIndex {
    pub(crate) region: Region,
    /// The index of the range at each end.
    ranges: [BlockIndex; 2],
}

/// Returns the bytes of addresses that a region needs so that its large range has `large` of them:
/// a multiple of the granule, as `large` is.
pub(crate) fn span_for(large: u64, granule: u64) -> u64 {
    if large / granule < APART_FROM {
        return large;
    }
    let small = (large / (SMALL_PART - 1)).next_multiple_of(granule);
    large.saturating_add(small).saturating_add(granule)
}

impl RegionIndex {
    /// Creates an index of free addresses. With fewer than [`APART_FROM`] granules there is no
    /// small range.
    pub(crate) fn new(region: Region, span: u64, granule: u64) -> Self {
        let part = if span / granule < APART_FROM { 0 } else { span / SMALL_PART };
        let small = part / granule * granule;
        let wall = if small > 0 { granule } else { 0 };
        let low = Span { offset: 0, size: span - small - wall };
        let high = Span { offset: span - small, size: small };
        let mark = region as u32 * MARKS[1];
        let ranges = [BlockIndex::over(low, mark, 0), BlockIndex::over(high, mark | MARKS[0], 0)];
        Self { region, ranges }
    }

    /// Returns the bytes of addresses that large blocks can have.
    pub(crate) const fn large(&self) -> u64 {
        self.bounds(End::Low).size
    }

    /// Returns the wall between the ranges, if there are two.
    pub(crate) const fn wall(&self) -> Option<Span> {
        let offset = self.large();
        let span = Span { offset, size: self.bounds(End::High).offset - offset };
        if span.size > 0 { Some(span) } else { None }
    }

    /// Like [`BlockIndex::take`], in the range at the request's end. A small block that finds no
    /// address there is placed among the large ones, unless it is to stay `within` the range. A
    /// block of up to twice the size of small ones is placed among those if they have memory for
    /// it, and the large ones have not.
    pub(crate) fn take(
        &mut self,
        request: Request,
        within: bool,
        cost: impl Fn(Span) -> u64,
    ) -> Option<(BlockId, Span)> {
        let [low, high] = &mut self.ranges;
        if matches!(request.end, End::High) && high.span() > 0 {
            let taken = high.take_below(u64::MAX, request, &cost);
            if taken.is_some() || within {
                return taken;
            }
        }
        let (down, up) =
            (Request { end: End::Low, ..request }, Request { end: End::High, ..request });
        if request.size < 2 * SMALL_BELOW && !within {
            let found = low.take_below(COST_OF_COMMITTING, down, &cost);
            let found = found.or_else(|| high.take_below(COST_OF_COMMITTING, up, &cost));
            return found.or_else(|| low.take_below(u64::MAX, down, cost));
        }
        low.take_below(u64::MAX, down, cost)
    }

    /// Returns all offsets of the range at an end.
    pub(crate) const fn bounds(&self, end: End) -> Span {
        self.ranges[end as usize].range()
    }

    /// Returns the end whose range an offset lies in.
    pub(crate) const fn end_at(&self, offset: u64) -> End {
        if offset >= self.bounds(End::High).offset { End::High } else { End::Low }
    }

    /// Like [`BlockIndex::take_cheapest`], in both ranges for a small block.
    pub(crate) fn take_cheapest(
        &mut self,
        request: Request,
        cost: impl Fn(Span) -> u64,
    ) -> Option<(BlockId, Span)> {
        let low = Request { end: End::Low, ..request };
        let [low_index, high_index] = &mut self.ranges;
        if request.end == End::High
            && let Some(high) = high_index.cheapest(request, &cost)
            && low_index.cheapest(low, &cost).is_none_or(|low| high <= low)
        {
            return high_index.take_cheapest(request, cost);
        }
        low_index.take_cheapest(low, cost)
    }

    /// Like [`BlockIndex::take_at`].
    pub(crate) fn take_at(&mut self, span: Span) -> Option<BlockId> {
        self.ranges[self.end_at(span.offset) as usize].take_at(span)
    }

    /// Like [`BlockIndex::release`].
    pub(crate) fn release(&mut self, id: BlockId) -> Option<Span> {
        self.ranges[id.end() as usize].release(id)
    }

    /// Like [`BlockIndex::span_of`].
    pub(crate) fn span_of(&self, id: BlockId) -> Option<Span> {
        self.ranges[id.end() as usize].span_of(id)
    }

    /// Like [`BlockIndex::resize`]; a block stays in its range.
    pub(crate) fn resize(&mut self, id: BlockId, size: u64) -> Option<Span> {
        self.ranges[id.end() as usize].resize(id, size)
    }

    /// Like [`BlockIndex::exchange`], for two blocks of one range.
    pub(crate) fn exchange(&mut self, id: BlockId, other: BlockId) -> bool {
        self.ranges[id.end() as usize].exchange(id, other)
    }

    /// Returns the bytes of all live blocks.
    pub(crate) fn live(&self) -> u64 {
        self.ranges.iter().map(BlockIndex::live).sum()
    }

    /// Returns the bytes of the indexes themselves.
    pub(crate) fn metadata(&self) -> usize {
        self.ranges.iter().map(BlockIndex::metadata).sum()
    }

    /// Like [`BlockIndex::largest_of`], with this many looks in each range.
    pub(crate) fn largest_of(&self, looks: usize, measure: impl Fn(Span) -> u64) -> u64 {
        let ranges = self.ranges.iter();
        ranges.map(|index| index.largest_of(looks, &measure)).fold(0, u64::max)
    }

    /// Like [`BlockIndex::blocks`]: the blocks of the low range, then those of the high range. The
    /// wall is not included.
    pub(crate) fn blocks(&self) -> impl Iterator<Item = (Span, Option<BlockId>)> {
        self.blocks_of(End::Low).chain(self.blocks_of(End::High))
    }

    /// Like [`BlockIndex::live_blocks_unordered`], for both ranges.
    pub(crate) fn live_unordered(&self) -> impl Iterator<Item = Span> {
        self.ranges.iter().flat_map(BlockIndex::live_blocks_unordered)
    }

    /// Like [`RegionIndex::blocks`], for one range.
    pub(crate) fn blocks_of(&self, end: End) -> impl Iterator<Item = (Span, Option<BlockId>)> {
        self.ranges[end as usize].blocks()
    }

    /// # Panics
    /// If an invariant is violated.
    pub(crate) fn validate(&self) {
        self.ranges.iter().for_each(BlockIndex::validate);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GRANULE: u64 = 1 << 20;

    fn request(size: u64, end: End) -> Request {
        Request { size, align: 256, end }
    }

    #[test]
    fn small_blocks_have_a_range_of_their_own_and_go_among_the_large_when_it_is_full() {
        let mut ranges =
            RegionIndex::new(Region::Dynamic, span_for(64 * GRANULE, GRANULE), GRANULE);
        assert_eq!(ranges.large(), 64 * GRANULE);
        let wall = ranges.wall().expect("two ranges");
        let (mut above, mut below) = (0, 0);
        while let Some((name, span)) = ranges.take(request(GRANULE / 2, End::High), false, |_| 0) {
            assert_eq!(ranges.span_of(name), Some(span));
            assert_eq!(name.end() == End::High, span.offset >= wall.end());
            *(if span.offset >= wall.end() { &mut above } else { &mut below }) += 1;
            assert!(span.end() <= wall.offset || span.offset >= wall.end());
        }
        assert_eq!((above, below), (16, 128), "all addresses but the wall's");
        ranges.validate();
    }

    #[test]
    fn blocks_of_two_ranges_do_not_change_places() {
        let mut ranges =
            RegionIndex::new(Region::Dynamic, span_for(64 * GRANULE, GRANULE), GRANULE);
        let (small, _) = ranges.take(request(512, End::High), false, |_| 0).expect("room");
        let (large, _) = ranges.take(request(512, End::Low), false, |_| 0).expect("room");
        assert!(!ranges.exchange(small, large));
        let small = ranges.release(small).expect("live");
        assert!(small.offset > 64 * GRANULE && ranges.take_at(small).is_some());
        ranges.validate();
    }

    #[test]
    fn a_few_granules_are_one_range() {
        assert_eq!(span_for(63 * GRANULE, GRANULE), 63 * GRANULE);
        let mut ranges = RegionIndex::new(Region::Dynamic, 63 * GRANULE, GRANULE);
        assert_eq!((ranges.large(), ranges.wall()), (63 * GRANULE, None));
        let (_, span) = ranges.take(request(512, End::High), false, |_| 0).expect("room");
        assert_eq!(span.offset, 0);
    }
}
